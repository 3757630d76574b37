"""`predict`, `explain` and `serve`: query a run in the terminal or over HTTP."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from rich.text import Text
from typer import Argument, Option

import dualkg as kg
from dualkg.cli import common as cli
from dualkg.errors import RequestError, visible

if TYPE_CHECKING:
    from dualkg.inference.predictor import Known
    from dualkg.workflows.predict import FileOfQueries

QUERIES = (
    "Tab-separated lines of head, relation and tail, with ? or nothing for one of them; - is the "
    "standard input."
)
DAY = 24 * 3600.0  # seconds


@cli.command()
def predict(
    run: cli.RunPath,
    head: Annotated[str | None, Option(help="Name of the head entity.")] = None,
    relation: Annotated[str | None, Option(help="Name of the relation.")] = None,
    tail: Annotated[str | None, Option(help="Name of the tail entity.")] = None,
    similar: Annotated[
        str | None, Option(help="Instead list the entities whose embeddings are most similar.")
    ] = None,
    queries: Annotated[Path | None, Option(help=QUERIES)] = None,
    out: Annotated[
        Path | None, Option(help="New file for the predictions of --queries: .tsv or .jsonl.")
    ] = None,
    top: Annotated[int, Option(min=1, help="Number of predictions.")] = 10,
    new: Annotated[
        bool, Option("--new", help="Exclude triples that the graph already contains.")
    ] = False,
    coverage: Annotated[
        float | None, Option(help="Return a prediction set with this coverage, such as 0.9.")
    ] = None,
    index: Annotated[
        Path | None, Option(help="Search heads and tails in this index of the run.")
    ] = None,
    device: cli.Device = None,
) -> cli.Output:
    """Predict the missing one of head, relation and tail, or score a triple."""
    given = (head, relation, tail)
    if similar is not None:
        yield from _similar(run, similar, given, top=top, others=(queries, coverage, index))
        return
    _check_query_options(given, queries=queries, out=out, coverage=coverage)
    num_processes = kg.workflows.num_processes() if os.environ.get("WORLD_SIZE") else 1

    from dualkg.inference.index import load_index
    from dualkg.workflows.predict import (
        FileOfQueries,
        check_suffix,
        predict_queries,
        read_queries,
    )

    if out is not None:
        check_suffix(out)
    if num_processes > 1:
        if coverage is not None or index is not None:
            raise cli.one_process_only("predict with --coverage or --index")
        if str(queries) == "-":
            raise cli.one_process_only("predict with --queries -")
        if not kg.workflows.is_first_process():
            cli.silence()
            # It predicts what the first one writes.
            out = None
    known: Known = "omit" if new else "mark"
    with kg.workflows.opened(run, device=device) as opened:
        predictor = kg.Predictor.of(
            opened,
            calibrated=coverage is not None,
            index=load_index(index) if index else None,
        )
        if queries is not None:
            file = FileOfQueries(predictor, read_queries(queries, predictor.graph), top, known)
            yield from _predict_file(file, out)
        elif coverage is not None and relation is not None:
            predictions = predictor.prediction_set(head, relation, tail, coverage=coverage)
            yield from _query_output(given, predictions)
        else:
            predictions = predict_queries(predictor, [given], top=top, known=known)[0]
            yield from _query_output(given, predictions)


def _similar(
    run: Path,
    entity: str,
    given: tuple[str | None, ...],
    *,
    top: int,
    others: tuple[object, ...],
) -> cli.Output:
    """The entities with the most similar embeddings, by cosine."""
    if any(value is not None for value in (*given, *others)):
        raise RequestError(
            "--similar takes an entity and --top. Leave out --head, --relation, --tail, --queries, "
            "--coverage and --index."
        )
    predictor = kg.Predictor.of(kg.inference.api.open_run(run, device="cpu"), calibrated=False)
    predictions = predictor.similar(entity, k=top)
    yield cli.Result([prediction.as_dict() for prediction in predictions])
    _print_predictions(f"similar to {entity}", predictions, score="cosine", show_known=False)


def _query_output(
    given: tuple[str | None, ...], predictions: Sequence[kg.Prediction]
) -> cli.Output:
    parts = ["?" if part is None else part for part in given]
    query = f"({', '.join(parts)})"
    yield cli.Result(
        {"query": query, "predictions": [prediction.as_dict() for prediction in predictions]}
    )
    _print_predictions(query, predictions)


def _check_query_options(
    given: tuple[str | None, ...],
    *,
    queries: Path | None,
    out: Path | None,
    coverage: float | None,
) -> None:
    """Refuse options of `predict` that do not make a query."""
    head, relation, tail = given
    if queries is not None:
        if any(given) or coverage is not None:
            raise RequestError(
                "--queries has the queries. Leave out --head, --relation, --tail and --coverage."
            )
        return
    if out is not None:
        raise RequestError("--out is for --queries. Leave it out, or redirect the output.")
    has_one_entity = (head is None) != (tail is None)
    if coverage is not None and (relation is None or not has_one_entity):
        raise RequestError("--coverage needs --relation and one of --head and --tail.")
    if given.count(None) > 1:
        raise RequestError("A query needs at least two of --head, --relation and --tail.")


def _predict_file(file: FileOfQueries, out: Path | None) -> cli.Output:
    """Predict for the queries of a file, and write lines of TSV or JSON."""
    if out is None:
        yield cli.Result((answer.as_dict() for answer in file), json_lines=True)
        sys.stdout.writelines(f"{line}\n" for line in file.tsv_lines())
        return
    file.save(out)
    yield cli.Result({"out": str(out), "queries": len(file)})
    cli.note(f"The predictions for {len(file):,} queries are saved in {out}.", style=None)


def _print_predictions(
    title: str,
    predictions: Sequence[kg.Prediction],
    *,
    score: str = "score",
    show_known: bool = True,
) -> None:
    cli.stdout.print(Text(title, style="bold"))
    calibrated = any(prediction.probability is not None for prediction in predictions)
    rows = []
    for prediction in predictions:
        name = Text(visible(prediction.label))
        if prediction.label != prediction.name:
            name.append(f" {visible(prediction.name)}", style="dim")
        row = [name, f"{prediction.score:.3f}"]
        if calibrated:
            for probability in (prediction.probability, prediction.answer_probability):
                row.append("" if probability is None else f"{probability:.3f}")
        if show_known and prediction.known:
            row.append(Text.assemble(("known", "green"), (f" ({prediction.split})", "dim")))
        else:
            row.append("")
        rows.append(row)
    columns = ["", score]
    if calibrated:
        columns += ["probability", "if an answer is missing"]
    cli.print_table([*columns, ""], rows)


@cli.command()
def explain(
    run: cli.RunPath,
    head: Annotated[str, Option(help="Name of the head entity.")],
    relation: Annotated[str, Option(help="Name of the relation.")],
    tail: Annotated[str, Option(help="Name of the tail entity.")],
    top: Annotated[int, Option(min=1, help="Number of supporting triples, and of paths.")] = 5,
    network: Annotated[
        Path | None,
        Option(metavar="RUN", help="Also show paths that this run of a PathNetwork finds."),
    ] = None,
    device: cli.Device = None,
) -> cli.Output:
    """Explain a prediction by the training triples that support it, similar entities, or paths.

    A prediction of a PathNetwork is explained by the paths that carry it.
    """
    opened = kg.inference.api.open_run(run, device=device)
    network_run = kg.inference.api.open_run(network, device=device) if network else None
    predictor = kg.Predictor.of(opened)
    explanation = predictor.explain(head, relation, tail, k=top, network=network_run)
    yield cli.Result(explanation.as_dict())
    title, *sentences = explanation.sentences()
    cli.stdout.print(Text(title, style="bold"), soft_wrap=True)
    for sentence in sentences:
        cli.stdout.print(Text(sentence), soft_wrap=True)


@cli.command(as_json=False)
def serve(
    runs: Annotated[
        list[Path], Argument(metavar="RUN...", help="Folders of trained runs.", show_default=False)
    ],
    host: Annotated[
        str, Option(help="Address to listen on; a public one needs --token.")
    ] = "127.0.0.1",
    port: Annotated[
        int, Option(min=0, max=65535, help="Port to listen on; 0 picks a free one.")
    ] = 8000,
    token: Annotated[
        str | None, Option(envvar="DUALKG_TOKEN", help="Bearer token that requests must send.")
    ] = None,
    open_browser: Annotated[bool, Option("--open", help="Open a browser.")] = False,
    get: Annotated[
        str | None, Option(metavar="PATH", help="Print the response for this path and exit.")
    ] = None,
    timeout: Annotated[float, Option(help="Time limit of a request in seconds.")] = 30.0,
    access_log: Annotated[
        bool, Option("--access-log", help="Log each request as JSON on stderr.")
    ] = False,
    read_only: Annotated[
        bool, Option("--read-only", help="Accept no decisions on predicted facts.")
    ] = False,
    allow_training: Annotated[
        bool,
        Option(
            "--allow-training", help="Accept files of triples in the browser and train on them."
        ),
    ] = False,
    training_folder: Annotated[
        Path, Option(metavar="FOLDER", help="Where --allow-training makes runs.")
    ] = Path("runs"),
    device: cli.Device = None,
) -> None:
    """Serve runs over HTTP: pages for a browser and a JSON API. The first run is the default."""
    from dualkg.serve.app import application
    from dualkg.serve.served import ServedRuns
    from dualkg.serve.server import bind, check_access, request_once
    from dualkg.serve.server import serve as start
    from dualkg.serve.service import Limits

    check_access(host, token)
    limits = Limits(seconds=timeout)
    if get is not None:
        unlimited = Limits(seconds=DAY, stream_seconds=DAY)
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
                calibrate = cli.command_line("calibrate", run.run.folder)
                cli.note(f"{run.name} has no probabilities yet: {calibrate}", style=None)
        for folder in served.in_training:
            cli.note(f"{folder} is in training; /train shows how far it is.", style=None)
        app = application(
            served,
            limits=limits,
            token=token,
            log=access_log,
            read_only=read_only,
            training_folder=training_folder if allow_training else None,
            device=device,
        )
        start(app, listening, limits=limits, on_start=_print_address, open_browser=open_browser)
    cli.note("Stopped.", style=None)


def _print_address(address: str) -> None:
    print(address, flush=True)
    cli.note("Press Ctrl-C to stop.", style=None)
