"""The only module here that knows names of the code base under test.

If modules, classes, functions, recipe keys or parameter tables are renamed, edit this file and
nothing else. Recorded cases in `golden.json` keep the recipe keys of the version they were recorded
with; `to_recipe` translates them. Everything that is returned to the tests is plain data (numbers,
strings, lists, dictionaries, NumPy arrays) under keys that are fixed in this file.
"""

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

import dualkg as kg
from dualkg.evaluation import Metrics, compare_ranks, evaluate_relations
from dualkg.evaluation import rank as compute_ranks
from dualkg.models import MODELS
from dualkg.regularizers import REGULARIZERS
from dualkg.training import Run, load_run
from dualkg.training import engines as engine_selection
from dualkg.training.recipe import Recipe, recipe_from
from dualkg.workflows import train_recipe

# -- translation of recorded settings -----------------------------------------

# Recipe keys that were renamed: {"loss.kind": "loss.name", "model.options.norm": "model.norm"};
# None if removed.
RENAMED_KEYS: dict[str, str | None] = {
    "loss.kind": "loss.name",
    "loss.count_power": "loss.count_exponent",
    "loss.negatives": "loss.sampler",
    "loss.sides": "loss.corruption",
    "loss.temperature": "loss.adversarial_temperature",
    "loss.known": "loss.filtered",
}
# Values that were renamed, by the recorded key: {"loss.kind": {"all answers": "1vsAll"}}.
RENAMED_VALUES: dict[str, dict[Any, Any]] = {
    "loss.kind": {
        "cross entropy": "OneVsAll",
        "all answers": "KvsAll",
        "negative sampling": "NegativeSampling",
        "margin": "MarginRanking",
    },
    "loss.negatives": {"batch": "in-batch"},
    "loss.known": {True: False, False: True},
    "training.order": {"questions": "queries"},
    "training.engine": {"plain": "reference", "fused": "fast"},
}
# Parameter tables that were renamed, new name to recorded name: {"entity_embeddings": "entities"}.
RECORDED_TABLE_NAMES: dict[str, str] = {}
# Exported files that were renamed, new name to recorded name: {"entity_embeddings.npy":
# "entities.npy"}.
RECORDED_FILE_NAMES: dict[str, str] = {}

MODEL_NAMES = tuple(MODELS)
REGULARIZER_NAMES = tuple(REGULARIZERS)
InvalidSettingsError = kg.RequestError

Query = Mapping[str, str | None]  # head, relation and tail by name; None is what is asked for
Triple = Sequence[str]  # head, relation and tail by name


def to_recipe(settings: Mapping[str, Mapping[str, Any]]) -> Recipe:
    """Recorded settings as a recipe of the present code."""
    tables: dict[str, Any] = {}
    for recorded, value in _flattened(settings):
        path = RENAMED_KEYS.get(recorded, recorded)
        if path is None:
            continue
        *sections, key = path.split(".")
        table = tables
        for section in sections:
            table = table.setdefault(section, {})
        table[key] = RENAMED_VALUES.get(recorded, {}).get(value, value)
    return recipe_from(tables, source="golden.json")


def _flattened(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Keys with dots, `model.options.norm`, and their values."""
    for key, value in settings.items():
        if isinstance(value, Mapping):
            yield from _flattened(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def model_and_regularizer(settings: Mapping[str, Mapping[str, Any]]) -> tuple[str, str]:
    """The names of both as they are in the present code."""
    recipe = to_recipe(settings)
    return recipe.model.name, recipe.regularizer.name


# -- training and ranking ----------------------------------------------------


def build_graph(data: Mapping[str, Any]) -> kg.Graph:
    """A graph of ids; entities are named e0, e1, … and relations r0, r1, …"""
    splits = [
        np.array(data[name], dtype=np.int32).reshape(-1, 3) for name in ("train", "valid", "test")
    ]
    return kg.Graph(
        "golden",
        kg.Vocabulary([f"e{i}" for i in range(data["num_entities"])]),
        kg.Vocabulary([f"r{i}" for i in range(data["num_relations"])], kind="relation"),
        *splits,
    )


def bundled_graph(name: str) -> tuple[list[str], list[list[str]]]:
    """The names of the entities of a bundled graph, and its test triples by name."""
    graph = kg.load_graph(name)
    kinds = (graph.entities, graph.relations, graph.entities)
    triples = [
        [kind[id] for kind, id in zip(kinds, row, strict=True)] for row in graph.test.tolist()
    ]
    return [graph.entities[id] for id in range(len(graph.entities))], triples


def train(
    settings: Mapping[str, Mapping[str, Any]],
    graph: kg.Graph | None = None,
    folder: Path | None = None,
) -> Run:
    """Train on the CPU as the settings say; raises `InvalidSettingsError` if they cannot be
    combined.
    """
    return train_recipe(to_recipe(settings), graph=graph, device="cpu", out=folder)


@contextmanager
def bfloat16_allowed() -> Iterator[None]:
    """Treat the CPU as one with bfloat16 matrix products, so that precision `bf16` is accepted on
    every machine.
    """
    original = engine_selection.has_bf16_products
    engine_selection.has_bf16_products = lambda: True
    try:
        with warnings.catch_warnings():
            warnings.simplefilter(
                "ignore", UserWarning
            )  # PyTorch tells that it takes another matrix product
            yield
    finally:
        engine_selection.has_bf16_products = original


def load_folder(folder: Path) -> Run:
    return load_run(folder)


def weight_tables(run: Run) -> dict[str, np.ndarray]:
    """All parameters and buffers of the trained model by their recorded names."""
    state = run.model.state_dict()
    if num := run.model.embedding.num_biases:  # recorded as a table of their own
        state |= {"entities": state["entities"][:, :-num], "biases": state["entities"][:, -num:]}
    return {
        RECORDED_TABLE_NAMES.get(name, name): value.detach().cpu().numpy()
        for name, value in state.items()
    }


def set_weight_tables(run: Run, tables: Mapping[str, np.ndarray]) -> None:
    new_names = {recorded: new for new, recorded in RECORDED_TABLE_NAMES.items()}
    run.model.load_state_dict(
        {new_names.get(name, name): torch.from_numpy(table) for name, table in tables.items()}
    )


def training_losses(run: Run) -> list[float]:
    """The mean loss of each epoch."""
    return [entry["loss"] for entry in run.history]


def validation_mrrs(run: Run) -> list[float]:
    """The MRR of each epoch in which the validation split was ranked."""
    return [entry["valid_mrr"] for entry in run.history if "valid_mrr" in entry]


def filtered_ranks(run: Run, split: str) -> dict[str, Any]:
    """Ranks of shape `(2, num_triples)`: row 0 predicts tails, row 1 predicts heads."""
    found = compute_ranks(run.model, run.graph, split=split)
    return {
        "optimistic": np.asarray(found.optimistic),
        "pessimistic": np.asarray(found.pessimistic),
        "mrr": run.report_on(split).metrics.mrr,
    }


def bootstrap_comparison(
    ranks_a: np.ndarray, ranks_b: np.ndarray, *, samples: int, seed: int
) -> dict[str, Any]:
    """Paired bootstrap of two sets of ranks of shape `(num_seeds, 2, num_triples)`."""
    found = compare_ranks(ranks_a, ranks_b, samples=samples, seed=seed)
    differences = {"mrr": found.mrr, "hits_at_1": found.hits_at_1, "hits_at_10": found.hits_at_10}
    fields = ("a", "b", "difference", "low", "high", "p_value")
    return {
        name: {field: getattr(one, field) for field in fields} for name, one in differences.items()
    }


# -- evaluation of a run -----------------------------------------------------


def _metrics(found: Metrics) -> dict[str, float]:
    names = ("mrr", "mr", "hits_at_1", "hits_at_3", "hits_at_10", "num_queries")
    return {name: getattr(found, name) for name in names}


def evaluation(run: Run, split: str) -> dict[str, Any]:
    report = run.report_on(split)
    return {
        "realistic": _metrics(report.metrics),
        "optimistic": _metrics(report.optimistic),
        "pessimistic": _metrics(report.pessimistic),
        "without_unseen": _metrics(report.without_unseen),
        "mrr_by_direction": {name: one.mrr for name, one in report.by_direction.items()},
        "mrr_by_relation": {name: one.mrr for name, one in report.by_relation.items()},
        "mrr_by_cardinality": {name: one.mrr for name, one in report.by_cardinality.items()},
    }


def relation_prediction(run: Run) -> dict[str, float]:
    return _metrics(evaluate_relations(run.model, run.graph, split="test"))
