"""The names of the code under test: what is registered, and how a training is started and read.

If functions or recipe keys are renamed, this module, `cases.py` and `world.py` change, so that the
record of one version can be compared with that of another.
"""

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch

import dualkg as kg
from dualkg.evaluation import compare_ranks
from dualkg.losses import LOSSES as LOSS_REGISTRY
from dualkg.regularizers import REGULARIZERS as REGULARIZER_REGISTRY
from dualkg.training import engines as engine_selection
from dualkg.training.optimizers import OPTIMIZERS as OPTIMIZER_REGISTRY
from tests.families import EMBEDDINGS

GRAPH = Path(__file__).with_name("graph.tsv")
NUM_ENTITIES = 40
NUM_RELATIONS = 4

MODELS = tuple(EMBEDDINGS)
REGULARIZERS = tuple(REGULARIZER_REGISTRY)
LOSSES = tuple(LOSS_REGISTRY)
OPTIMIZERS = tuple(OPTIMIZER_REGISTRY)
Refused = kg.RequestError


def small_graph() -> kg.Graph:
    """The graph of the small trainings: entities are named e0, e1, … and relations r0, r1, …"""
    triples: dict[str, list[list[int]]] = {"train": [], "valid": [], "test": []}
    for line in GRAPH.read_text(encoding="utf-8").splitlines():
        split, *ids = line.split("\t")
        triples[split].append([int(id) for id in ids])
    return kg.Graph(
        "golden",
        kg.Vocabulary([f"e{number}" for number in range(NUM_ENTITIES)]),
        kg.Vocabulary([f"r{number}" for number in range(NUM_RELATIONS)], kind="relation"),
        *(np.array(rows, dtype=np.int32) for rows in triples.values()),
    )


class Perturbation(kg.Callback):
    """Changes the initial weights by a few units in their last place, as other rounding would."""

    def __init__(self, seed: int, size: float) -> None:
        self.seed = seed
        self.size = size

    @torch.no_grad()
    def on_start(self, training: kg.training.TrainingInfo) -> None:
        generator = torch.Generator().manual_seed(self.seed)
        for parameter in training.model.parameters():
            noise = torch.rand(parameter.shape, generator=generator) * 2 - 1
            parameter.mul_(1 + self.size * noise)


class Float64(kg.Callback):
    """Trains in float64, so that other rounding changes few digits."""

    def on_start(self, training: kg.training.TrainingInfo) -> None:
        training.model.double()


def train(
    settings: Mapping[str, Any],
    graph: kg.Graph | None = None,
    *,
    folder: Path | None = None,
    callback: kg.Callback | None = None,
) -> kg.Run:
    """Train on the CPU; raises `Refused` if the settings cannot be combined."""
    allowed = nullcontext()
    if settings.get("training.precision") == "bf16":
        allowed = _bfloat16_allowed()
    callbacks = [callback] if callback else []
    with allowed:
        recipe = kg.Recipe().with_changes(settings)
        return kg.train_recipe(recipe, graph=graph, device="cpu", out=folder, callbacks=callbacks)


@contextmanager
def _bfloat16_allowed() -> Iterator[None]:
    """Treat the CPU as one with bfloat16 products, so that every machine accepts `bf16`."""
    original = engine_selection.has_bf16_products
    engine_selection.has_bf16_products = lambda: True
    try:
        with warnings.catch_warnings():
            # PyTorch warns that it computes the product in another way.
            warnings.simplefilter("ignore", UserWarning)
            yield
    finally:
        engine_selection.has_bf16_products = original


def weight_tables(run: kg.Run) -> dict[str, np.ndarray]:
    """All parameters and buffers of the trained model by name."""
    tables = run.model.state_dict()
    return {name: table.detach().cpu().numpy() for name, table in tables.items()}


def losses_by_epoch(run: kg.Run) -> list[float]:
    return [epoch["loss"] for epoch in run.history]


def validation_mrrs(run: kg.Run) -> list[float]:
    """The MRR of each epoch in which the validation split was ranked."""
    return [epoch["valid_mrr"] for epoch in run.history if "valid_mrr" in epoch]


def ranks(run: kg.Run, split: str) -> dict[str, np.ndarray]:
    """Filtered ranks of shape `(2, num_triples)`: tail queries, then head queries."""
    computed = run.report_on(split).ranks
    return {"optimistic": computed.optimistic, "pessimistic": computed.pessimistic}


def mrr(run: kg.Run, split: str) -> float:
    return run.report_on(split).metrics.mrr


def scores(run: kg.Run, num: int) -> list[float]:
    """The scores of the first test triples."""
    heads, relations, tails = torch.from_numpy(run.graph.test[:num]).long().unbind(1)
    with torch.no_grad():
        return run.model.score(heads, relations, tails).double().tolist()


def bootstrap(num_samples: int, seed: int) -> dict[str, Any]:
    """A paired comparison of random ranks of shape `(num_seeds, 2, num_triples)`."""
    random = np.random.RandomState(seed)  # a generator whose numbers never change
    shape = (2, 2, 60)
    ranks_a = random.randint(1, 50, shape).astype(np.float64)
    ranks_b = np.maximum(ranks_a + random.randint(-5, 7, shape), 1.0)
    return compare_ranks(ranks_a, ranks_b, samples=num_samples, seed=seed).as_dict()
