"""What `evaluate`, `predict` and `similar` do."""

from __future__ import annotations

from pathlib import Path
from typing import cast

from dualkg.answers import Answer, Predictor
from dualkg.answers.predictor import Known
from dualkg.data.graph import Split
from dualkg.errors import RequestError
from dualkg.evaluation import Report
from dualkg.evaluation import evaluate as evaluate_model
from dualkg.training import load_run
from dualkg.training.start import choose_device


def evaluate_run(path: Path, *, split: str, device: str | None) -> Report:
    run = load_run(path)
    if not len(run.graph.split(split)):
        raise RequestError(f"The graph of {path} has no {split} triples to rank.")
    return evaluate_model(run.model.to(choose_device(device)), run.graph, split=cast(Split, split))


def ask(
    path: Path, head: str | None, relation: str | None, tail: str | None, *, top: int, new: bool, device: str | None
) -> tuple[str, list[Answer]]:
    """The question in words, and its answers."""
    run = load_run(path)
    predictor = Predictor(run.model.to(choose_device(device)), run.graph)
    known: Known = "omit" if new else "mark"
    question = f"({head or '?'}, {relation or '?'}, {tail or '?'})"
    match (head, relation, tail):
        case (str(), str(), str()):
            return question, [predictor.judge(head, relation, tail)]
        case (str(), str(), None):
            return question, predictor.tails(head, relation, k=top, known=known)
        case (None, str(), str()):
            return question, predictor.heads(relation, tail, k=top, known=known)
        case (str(), None, str()):
            return question, predictor.relations(head, tail, k=top, known=known)
    raise RequestError("A question gives two of --head, --relation and --tail, and asks for the third.")


def nearest(path: Path, entity: str, *, top: int) -> list[Answer]:
    run = load_run(path)
    return Predictor(run.model, run.graph).similar(entity, k=top)
