"""Trials: train recipes and rank the validation split along the way, to choose between them without looking at test."""

import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from dualkg.data.filters import KnownAnswers
from dualkg.data.graph import Graph
from dualkg.data.loading import load_graph
from dualkg.errors import DualkgError
from dualkg.evaluation.report import evaluate
from dualkg.files import write_text
from dualkg.training.api import choose_device
from dualkg.training.recipe import recipe_from
from dualkg.training.trainer import InterruptedRunError, Trainer

VALIDATIONS = 4  # per training, the last one at its end
TRAIN_SAMPLE = 2000  # training triples that are ranked too, to see how far they are memorized


def run_trials(
    trials: Sequence[dict[str, Any]], out: Path, *, device: str | None, seconds: float, log: Callable[[str], None]
) -> None:
    """Train each trial, a name and a recipe, and write the results after every one; no trial starts after `seconds`."""
    results: list[dict[str, Any]] = []
    for result in _results(trials, device=device, seconds=seconds, log=log):
        results.append(result)
        lines = ",\n".join(json.dumps(one, ensure_ascii=False) for one in results)
        write_text(out, f"[\n{lines}\n]\n")


def _results(
    trials: Sequence[dict[str, Any]], *, device: str | None, seconds: float, log: Callable[[str], None]
) -> Iterator[dict[str, Any]]:
    started = time.monotonic()
    graphs: dict[str, Graph] = {}
    for trial in trials:
        if time.monotonic() - started > seconds:
            log(f"{trial['name']}: not started.")
            continue
        try:
            name = trial["recipe"]["data"]["graph"]
            if name not in graphs:
                graph = load_graph(name)
                graphs[name] = replace(graph, test=graph.test[:0])
            result = train_trial(trial["recipe"], graphs[name], device=device)
        except InterruptedRunError:
            log(f"{trial['name']}: interrupted; the trials after it were not started.")
            return
        except DualkgError as error:
            log(f"{trial['name']}: {error}")
            continue
        log(f"{trial['name']}: {result['seconds']} s, {result['engine']}, {result['valid_mrr']}")
        yield {"name": trial["name"], **result}


def train_trial(tables: dict[str, Any], graph: Graph, *, device: str | None) -> dict[str, Any]:
    """Train a recipe; validation MRR by epoch, filtered by train and valid, and MRR of a sample of train."""
    recipe = recipe_from(tables, source="a trial")
    every = max(1, -(-recipe.training.epochs // VALIDATIONS))
    validated = recipe.with_changes({"validation.every": every, "validation.keep": "last", "validation.patience": 0})
    trainer = Trainer.of_recipe(validated, graph, device=choose_device(device))
    trainer.run()
    history = trainer.progress.history
    sample = np.random.default_rng(0).choice(len(graph.train), min(TRAIN_SAMPLE, len(graph.train)), replace=False)
    sampled = replace(graph, valid=graph.train[sample])
    train = evaluate(trainer.model, sampled, split="valid", known=KnownAnswers.of(graph))
    return {
        "recipe": recipe.model_dump(exclude_none=True),
        "engine": str(trainer.engine),
        "seconds": round(sum(entry["seconds"] for entry in history), 1),
        "valid_mrr": {entry["epoch"]: round(entry["valid_mrr"], 5) for entry in history if "valid_mrr" in entry},
        "train_mrr": round(train.mrr, 4),
    }
