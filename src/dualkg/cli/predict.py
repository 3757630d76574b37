"""What `evaluate`, `predict` and `similar` do."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer
from rich.text import Text

from dualkg.cli import options, output
from dualkg.data.graph import Graph, Split, relations_with_self_loops
from dualkg.errors import RequestError
from dualkg.evaluation.report import Report
from dualkg.evaluation.report import evaluate as evaluate_model
from dualkg.inference.calibration_store import calibration_for
from dualkg.inference.predictor import Known, Prediction, Predictor
from dualkg.training.api import choose_device
from dualkg.training.run import RunFolder, load_run

if TYPE_CHECKING:
    from dualkg.inference.explanation import Explanation


if TYPE_CHECKING:
    from dualkg.inference.index_build import IndexedPredictor

    Asked = Predictor | IndexedPredictor


def evaluate_run(path: Path, *, split: str, device: str | None) -> Report:
    run = load_run(path)
    if not len(run.graph.split(split)):
        raise RequestError(f"The graph of {path} has no {split} triples to rank.")
    return evaluate_model(run.model.to(choose_device(device)), run.graph, split=cast(Split, split))


def ask(
    path: Path,
    head: str | None,
    relation: str | None,
    tail: str | None,
    *,
    top: int,
    new: bool,
    device: str | None,
    coverage: float | None = None,
    index: Path | None = None,
) -> tuple[str, list[Prediction]]:
    """The question in words, and its answers; with probabilities where the run has been calibrated."""
    predictor = asked_by(path, device=device, calibrated=coverage is not None)
    known: Known = "omit" if new else "mark"
    question = f"({head or '?'}, {relation or '?'}, {tail or '?'})"
    if coverage is not None:
        if relation is None or (head is None) == (tail is None):
            raise RequestError("--coverage asks for an prediction set: give --relation, and one of --head and --tail.")
        return question, predictor.prediction_set(head, relation, tail, coverage=coverage)
    searching = searched_in(index, predictor) if index else predictor
    match (head, relation, tail):
        case (str(), str(), str()):
            return question, [predictor.triple(head, relation, tail)]
        case (str(), str(), None):
            return question, best_tails(searching, head, relation, top=top, known=known)
        case (None, str(), str()):
            return question, best_heads(searching, relation, tail, top=top, known=known)
        case (str(), None, str()):
            return question, predictor.relations(head, tail, k=top, known=known)
    raise RequestError("A question gives two of --head, --relation and --tail, and asks for the third.")


def best_tails(asked: Asked, head: str, relation: str, *, top: int, known: Known = "mark") -> list[Prediction]:
    """Of (head, relation, ?), but for the head; one more is asked for, as one may be left out."""
    found = asked.tails(head, relation, k=top + 1, known=known)
    return _without_itself(found, head, relation, asked.graph)[:top]


def best_heads(asked: Asked, relation: str, tail: str, *, top: int, known: Known = "mark") -> list[Prediction]:
    """Of (?, relation, tail), but for the tail."""
    found = asked.heads(relation, tail, k=top + 1, known=known)
    return _without_itself(found, tail, relation, asked.graph)[:top]


def _without_itself(answers: list[Prediction], entity: str, relation: str, graph: Graph) -> list[Prediction]:
    """Those that are not the entity that was asked about, unless the graph has that triple, or many such ones."""
    if graph.relations.id(relation) in relations_with_self_loops(graph):
        return answers
    itself = graph.entities.id(entity)
    return [answer for answer in answers if answer.id != itself or answer.known]


def asked_by(path: Path, *, device: str | None, calibrated: bool) -> Predictor:
    """The predictor of a run; `calibrated` makes what a run that was never calibrated does not have yet."""
    run = load_run(path)
    model = run.model.to(choose_device(device))
    if not calibrated and not RunFolder(path).calibration.exists():
        return Predictor(model, run.graph, recipe=run.recipe)
    calibration_data = calibration_for(run)
    return Predictor(
        model,
        run.graph,
        recipe=run.recipe,
        calibration=calibration_data.calibration,
        prediction_sets=calibration_data.prediction_sets,
    )


def searched_in(index: Path, predictor: Predictor) -> IndexedPredictor:
    from dualkg.inference.index_build import (
        IndexedPredictor,
        load_index,  # most questions are asked without
    )

    return IndexedPredictor(predictor, load_index(index))


def nearest(path: Path, entity: str, *, top: int) -> list[Prediction]:
    run = load_run(path)
    return Predictor(run.model, run.graph).similar(entity, k=top)


def explain(
    run: options.RunPath,
    head: Annotated[str, typer.Option(help="The head's name.")],
    relation: Annotated[str, typer.Option(help="The relation's name.")],
    tail: Annotated[str, typer.Option(help="The tail's name.")],
    top: Annotated[int, typer.Option(min=1, help="How many reasons.")] = 5,
    device: options.Device = None,
    threads: options.Threads = None,
    as_json: options.Json = False,
) -> None:
    """Tell which training triples support an answer, and which entities alike have the same."""
    from dualkg.inference.explanation import explain as find_reasons

    options.set_threads(threads)
    loaded = options.load_on(run, device)
    model = loaded.model
    found = find_reasons(model, loaded.graph, (head, relation, tail), k=top, recipe=loaded.recipe)
    if as_json:
        output.print_json(found.as_dict())
    else:
        print_explanation(found)


def print_explanation(found: Explanation) -> None:
    first, *others = found.sentences()
    output.out.print(Text(first, style="bold"), soft_wrap=True)  # no markup: a name may hold anything
    for sentence in others:
        output.out.print(Text(sentence), soft_wrap=True)
