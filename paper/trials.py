"""Train recipes and rank the validation split along the way, to choose between them: test is not looked at.

python scripts/trials.py trials.json --out found.json                  # a list of {"name": …, "recipe": {…}}
python scripts/trials.py records/searches/seventh-trials.json --only "wn hake" --out again.json

Known answers are those of train and valid. What was found is written after every trial; one that fails is told and
left out.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from dualkg import load_graph
from dualkg.data.filters import KnownAnswers
from dualkg.data.graph import Graph
from dualkg.errors import DualkgError
from dualkg.evaluation.report import evaluate
from dualkg.files import write_text
from dualkg.training.api import choose_device
from dualkg.training.recipe import recipe_from
from dualkg.training.registry import build_model, build_regularizer
from dualkg.training.trainer import InterruptedRunError, Trainer

LOOKS = 4  # at the validation split, the last of them at the end
SAMPLE = 2000  # training triples that are ranked too, for how far a model has learned them by heart


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trials", type=Path, help="a JSON list of names and recipes")
    parser.add_argument("--out", type=Path, required=True, help="where what was found is written")
    parser.add_argument("--only", default="", help="trials whose name contains this")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="no trial is begun after so many")
    parser.add_argument("--device", help="cpu or cuda; left out, a GPU where there is one")
    choices = parser.parse_args()
    asked = [one for one in json.loads(choices.trials.read_text(encoding="utf-8")) if choices.only in one["name"]]
    found: list[dict[str, Any]] = []
    for trial in finished(asked, device=choices.device, seconds=choices.seconds):
        found.append(trial)
        lines = ",\n".join(json.dumps(one, ensure_ascii=False) for one in found)
        write_text(choices.out, f"[\n{lines}\n]\n")


def finished(asked: list[dict[str, Any]], *, device: str | None, seconds: float) -> Iterator[dict[str, Any]]:
    """Each trial as it ends."""
    began = time.monotonic()
    graphs: dict[str, Graph] = {}
    for one in asked:
        if time.monotonic() - began > seconds:
            print(f"{one['name']}: not begun.", flush=True)
            continue
        try:
            name = one["recipe"]["data"]["graph"]
            if name not in graphs:
                graph = load_graph(name)
                graphs[name] = replace(graph, test=graph.test[:0])
            trial = train(one["recipe"], graphs[name], device=device)
        except InterruptedRunError:
            print(f"{one['name']}: stopped, and with it what was to follow.", flush=True)
            return
        except DualkgError as error:
            print(f"{one['name']}: {error}", flush=True)
            continue
        print(f"{one['name']}: {trial['seconds']} s, {trial['engine']}, {trial['valid_mrr']}", flush=True)
        yield {"name": one["name"], **trial}


def train(tables: dict[str, Any], graph: Graph, *, device: str | None) -> dict[str, Any]:
    """Train a recipe, and tell what it came to."""
    recipe = recipe_from(tables, source="a trial")
    every = max(1, -(-recipe.training.epochs // LOOKS))
    watched = recipe.with_changes({"validation.every": every, "validation.keep": "last", "validation.patience": 0})
    model = build_model(recipe.model, graph.shape, seed=recipe.training.seed).to(choose_device(device))
    trainer = Trainer(model, graph, watched, build_regularizer(recipe.regularizer))
    trainer.run()
    history = trainer.progress.history
    chosen = np.random.default_rng(0).choice(len(graph.train), min(SAMPLE, len(graph.train)), replace=False)
    learned = evaluate(model, replace(graph, valid=graph.train[chosen]), split="valid", known=KnownAnswers.of(graph))
    return {
        "recipe": recipe.model_dump(exclude_none=True),
        "engine": trainer.engine,
        "seconds": round(sum(entry["seconds"] for entry in history), 1),
        "valid_mrr": {entry["epoch"]: round(entry["valid_mrr"], 5) for entry in history if "valid_mrr" in entry},
        "train_mrr": round(learned.mrr, 4),
    }


if __name__ == "__main__":
    main()
