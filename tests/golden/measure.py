"""What is recorded of a training and of the run on the bundled graph: used both to record and to
test.
"""

from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

import numpy as np

from . import adapter
from .checks import ranks_summary, summary

Settings = Mapping[str, Mapping[str, Any]]
Results = dict[str, Any]


def merged(defaults: Settings, settings: Settings) -> dict[str, dict[str, Any]]:
    """Settings with those of the defaults that they do not set themselves."""
    sections = [*defaults, *(name for name in settings if name not in defaults)]
    return {name: {**defaults.get(name, {}), **settings.get(name, {})} for name in sections}


def train(settings: Settings, graph: Any) -> Any:
    with (
        adapter.bfloat16_allowed() if settings["training"]["precision"] == "bf16" else nullcontext()
    ):
        return adapter.train(settings, graph)


def training_results(run: Any, *, with_ranks: bool) -> Results:
    found: Results = {
        "tables": {name: summary(table) for name, table in adapter.weight_tables(run).items()}
    }
    found["loss"] = adapter.training_losses(run)[-1]
    if validated := adapter.validation_mrrs(run):
        found["validation_mrrs"] = validated
    if with_ranks:
        found["ranks"] = {
            split: ranks_summary(adapter.filtered_ranks(run, split)) for split in ("valid", "test")
        }
    return found


def bootstrap_results(inputs: Mapping[str, Any]) -> Results:
    random = np.random.default_rng(inputs["seed"])
    shape = inputs["shape"]
    ranks_a = random.integers(1, 50, shape).astype(np.float64)
    ranks_b = np.maximum(ranks_a + random.integers(-5, 7, shape), 1.0)
    return adapter.bootstrap_comparison(
        ranks_a, ranks_b, samples=inputs["samples"], seed=inputs["seed"]
    )
