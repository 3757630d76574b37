"""`predict`, `similar`, `explain` and `serve`: query a run in the terminal, over HTTP or in a browser."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from rich.text import Text
from typer import Argument, Option

from dualkg.cli import common as cli
from dualkg.errors import RequestError

if TYPE_CHECKING:
    from collections.abc import Sequence

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
    coverage: Annotated[float | None, Option(help="Return a prediction set with this coverage, such as 0.9.")] = None,
    index: Annotated[Path | None, Option(help="Search heads and tails in this index of the run.")] = None,
    device: cli.Device = None,
) -> cli.Result:
    """Predict the missing one of head, relation and tail; score the triple if all three are given."""
    predictor = load_predictor(run, device=device, calibrate=coverage is not None, index=index)
    known: Known = "omit" if new else "mark"
    if coverage is not None and (relation is None or (head is None) == (tail is None)):
        raise RequestError("--coverage needs --relation and one of --head and --tail.")
    match (head, relation, tail):
        case (_, str(), _) if coverage is not None:
            predictions = predictor.prediction_set(head, relation, tail, coverage=coverage)
        case (str(), str(), str()):
            predictions = [predictor.triple(head, relation, tail)]
        case (str(), None, str()):
            predictions = predictor.relations(head, tail, k=top, known=known)
        case (_, str(), _) if head is not None or tail is not None:
            predictions = predict_entities(predictor, head, relation, tail, top=top, known=known)
        case _:
            raise RequestError("A query needs at least two of --head, --relation and --tail.")
    query = f"({head or '?'}, {relation or '?'}, {tail or '?'})"
    data = {"query": query, "predictions": [prediction.as_dict() for prediction in predictions]}
    return cli.Result(data, lambda: _print_predictions(query, predictions))


def load_predictor(path: Path, *, device: str | None, calibrate: bool, index: Path | None = None) -> Predictor:
    """The predictor of a run, with probabilities if the run is calibrated; `calibrate` calibrates it if necessary."""
    from dualkg.inference.index_build import load_index
    from dualkg.inference.predictor import Predictor

    run = cli.load_on_device(path, device)
    return Predictor.of(run, calibrated=calibrate, index=load_index(index) if index else None)


def predict_entities(
    predictor: Predictor,
    head: str | None,
    relation: str,
    tail: str | None,
    *,
    top: int,
    known: Known = "mark",
) -> list[Prediction]:
    """The best answers to (head, relation, ?) or (?, relation, tail).

    The entity of the query is no answer, unless the graph contains that triple or the relation often has self-loops.
    """
    from dualkg.data.graph import relations_with_self_loops

    graph = predictor.graph
    if head is not None:
        entity, found = head, predictor.tails(head, relation, k=top + 1, known=known)  # one may be dropped
    else:
        entity, found = str(tail), predictor.heads(relation, str(tail), k=top + 1, known=known)
    if graph.relations.id(relation) not in relations_with_self_loops(graph):
        itself = graph.entities.id(entity)
        found = [prediction for prediction in found if prediction.id != itself or prediction.known]
    return found[:top]


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
    from dualkg.inference.predictor import Predictor

    loaded = cli.load_on_device(run, device)
    predictor = Predictor(loaded.model, loaded.graph, recipe=loaded.recipe)
    explanation = predictor.explain(head, relation, tail, k=top)

    def show() -> None:
        for number, sentence in enumerate(explanation.sentences()):
            cli.stdout.print(Text(sentence, style="" if number else "bold"), soft_wrap=True)

    return cli.Result(explanation.as_dict(), show)


@cli.command(as_json=False)
def serve(
    runs: Annotated[list[Path], Argument(metavar="RUN...", help="Folders of trained runs.", show_default=False)],
    host: Annotated[str, Option(help="Address to listen on; a public one needs --token.")] = "127.0.0.1",
    port: Annotated[int, Option(min=0, max=65535, help="Port to listen on; 0 picks a free one.")] = 8000,
    token: Annotated[str | None, Option(envvar="DUALKG_TOKEN", help="Bearer token that requests must send.")] = None,
    open_browser: Annotated[bool, Option("--open", help="Open a browser.")] = False,
    get: Annotated[str | None, Option(metavar="PATH", help="Print the response for this path and exit.")] = None,
    timeout: Annotated[float, Option(help="Time limit of a request in seconds.")] = 30.0,
    access_log: Annotated[bool, Option("--access-log", help="Log each request as JSON on stderr.")] = False,
    read_only: Annotated[bool, Option("--read-only", help="Accept no decisions on predicted facts.")] = False,
    device: cli.Device = None,
) -> None:
    """Serve runs over HTTP: pages for a browser and a JSON API. The first run is the default."""
    from dualkg.serve.app import application
    from dualkg.serve.limits import Limits
    from dualkg.serve.server import bind, check_access, request_once
    from dualkg.serve.server import serve as start
    from dualkg.serve.service import ServedRuns

    check_access(host, token)
    limits = Limits(seconds=timeout)
    if get is not None:
        unlimited = Limits(seconds=24 * 3600.0, stream_seconds=24 * 3600.0)
        app = application(ServedRuns.load(runs, device=device), limits=unlimited, token=token)
        reply = request_once(app, get, token=token)
        text = reply.body.decode("utf-8")
        print(text, end="" if text.endswith("\n") else "\n")
        if reply.status >= 400:
            sys.exit(2 if reply.status < 500 else 1)
        return
    with bind(host, port) as listening:
        served = ServedRuns.load(runs, device=device)
        for run in served:
            if run.predictor.calibration is None:
                cli.note(f"{run.name} has no probabilities yet: dualkg calibrate {run.run.folder}", style=None)
        app = application(served, limits=limits, token=token, log=access_log, read_only=read_only)
        start(app, listening, limits=limits, on_start=_print_address, open_browser=open_browser)
    cli.note("Stopped.", style=None)


def _print_address(address: str) -> None:
    print(address, flush=True)
    cli.note("Press Ctrl-C to stop.", style=None)
