"""`predict`, `similar` and `explain`: query a run."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from rich.text import Text
from typer import Argument, Option

from dualkg.cli import common as cli
from dualkg.errors import RequestError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dualkg.data.graph import Graph
    from dualkg.inference.index_build import IndexedPredictor
    from dualkg.inference.predictor import Known, Prediction, Predictor

Head = Annotated[str | None, Option(help="Name of the head entity.")]
Relation = Annotated[str | None, Option(help="Name of the relation.")]
Tail = Annotated[str | None, Option(help="Name of the tail entity.")]


@cli.command()
def predict(
    run: cli.RunPath,
    head: Head = None,
    relation: Relation = None,
    tail: Tail = None,
    top: Annotated[int, Option(min=1, help="Number of predictions.")] = 10,
    new: Annotated[bool, Option("--new", help="Exclude triples that the graph already contains.")] = False,
    coverage: Annotated[
        float | None,
        Option(help="Return a prediction set that contains the answer with this probability, such as 0.9."),
    ] = None,
    index: Annotated[Path | None, Option(help="Search heads and tails in this index of the run.")] = None,
    device: cli.Device = None,
) -> cli.Result:
    """Predict the missing one of head, relation and tail; score the triple if all three are given."""
    predictor = load_predictor(run, device=device, calibrate=coverage is not None)
    known: Known = "omit" if new else "mark"
    if coverage is not None and (relation is None or (head is None) == (tail is None)):
        raise RequestError("--coverage needs --relation and one of --head and --tail.")
    match (head, relation, tail):
        case (_, str(), _) if coverage is not None:
            predictions = predictor.prediction_set(head, relation, tail, coverage=coverage)
        case (str(), str(), str()):
            predictions = [predictor.triple(head, relation, tail)]
        case (str(), str(), None):
            predictions = best_tails(_with_index(predictor, index), head, relation, top=top, known=known)
        case (None, str(), str()):
            predictions = best_heads(_with_index(predictor, index), relation, tail, top=top, known=known)
        case (str(), None, str()):
            predictions = predictor.relations(head, tail, k=top, known=known)
        case _:
            raise RequestError("A query needs at least two of --head, --relation and --tail.")
    query = f"({head or '?'}, {relation or '?'}, {tail or '?'})"
    data = {"query": query, "predictions": [prediction.as_dict() for prediction in predictions]}
    return cli.Result(data, lambda: _print_predictions(query, predictions))


def load_predictor(path: Path, *, device: str | None, calibrate: bool) -> Predictor:
    """The predictor of a run, with probabilities if the run is calibrated; `calibrate` calibrates it if necessary."""
    from dualkg.inference.calibration_store import calibration_for
    from dualkg.inference.predictor import Predictor
    from dualkg.training.run import RunFolder

    run = cli.load_on_device(path, device)
    if not calibrate and not RunFolder(path).calibration.exists():
        return Predictor(run.model, run.graph, recipe=run.recipe)
    saved = calibration_for(run)
    return Predictor(
        run.model,
        run.graph,
        recipe=run.recipe,
        calibration=saved.calibration,
        prediction_sets=saved.prediction_sets,
    )


def _with_index(predictor: Predictor, index: Path | None) -> Predictor | IndexedPredictor:
    if index is None:
        return predictor
    from dualkg.inference.index_build import IndexedPredictor, load_index

    return IndexedPredictor(predictor, load_index(index))


def best_tails(
    predictor: Predictor | IndexedPredictor, head: str, relation: str, *, top: int, known: Known = "mark"
) -> list[Prediction]:
    """The best tails of (head, relation, ?) without the head itself."""
    found = predictor.tails(head, relation, k=top + 1, known=known)  # one more, as one may be dropped
    return without_self_loops(found, head, relation, predictor.graph)[:top]


def best_heads(
    predictor: Predictor | IndexedPredictor, relation: str, tail: str, *, top: int, known: Known = "mark"
) -> list[Prediction]:
    """The best heads of (?, relation, tail) without the tail itself."""
    found = predictor.heads(relation, tail, k=top + 1, known=known)
    return without_self_loops(found, tail, relation, predictor.graph)[:top]


def without_self_loops(predictions: list[Prediction], entity: str, relation: str, graph: Graph) -> list[Prediction]:
    """Drop the entity of the query, unless the graph contains that triple or many self-loops of the relation."""
    from dualkg.data.graph import relations_with_self_loops

    if graph.relations.id(relation) in relations_with_self_loops(graph):
        return predictions
    itself = graph.entities.id(entity)
    return [prediction for prediction in predictions if prediction.id != itself or prediction.known]


def _print_predictions(
    title: str, predictions: Sequence[Prediction], *, score: str = "score", show_known: bool = True
) -> None:
    cli.stdout.print(Text(title, style="bold"))
    calibrated = any(prediction.probability is not None for prediction in predictions)
    rows = []
    for one in predictions:
        name = Text(one.label)
        if one.label != one.name:
            name.append(f" {one.name}", style="dim")
        probability = ["" if one.probability is None else f"{one.probability:.3f}"] if calibrated else []
        known = Text.assemble(("known", "green"), (f" ({one.split})", "dim")) if show_known and one.known else ""
        rows.append([name, f"{one.score:.3f}", *probability, known])
    cli.print_table(["", score, *(["probability"] if calibrated else []), ""], rows)


@cli.command()
def similar(
    run: cli.RunPath,
    entity: Annotated[str, Argument(help="Name of the entity.")],
    top: Annotated[int, Option(min=1, help="Number of entities.")] = 10,
) -> cli.Result:
    """List the entities with the most similar embeddings (cosine similarity)."""
    predictions = load_predictor(run, device="cpu", calibrate=False).similar(entity, k=top)
    data = [prediction.as_dict() for prediction in predictions]
    title = f"similar to {entity}"
    return cli.Result(data, lambda: _print_predictions(title, predictions, score="cosine", show_known=False))


@cli.command()
def explain(
    run: cli.RunPath,
    head: Annotated[str, Option(help="Name of the head entity.")],
    relation: Annotated[str, Option(help="Name of the relation.")],
    tail: Annotated[str, Option(help="Name of the tail entity.")],
    top: Annotated[int, Option(min=1, help="Number of supporting triples.")] = 5,
    device: cli.Device = None,
) -> cli.Result:
    """Explain a prediction by the training triples that support it most and by similar entities."""
    from dualkg.inference.explanation import explain as explain_triple

    loaded = cli.load_on_device(run, device)
    explanation = explain_triple(loaded.model, loaded.graph, (head, relation, tail), k=top, recipe=loaded.recipe)

    def show() -> None:
        for number, sentence in enumerate(explanation.sentences()):
            cli.stdout.print(Text(sentence, style="" if number else "bold"), soft_wrap=True)

    return cli.Result(explanation.as_dict(), show)
