"""`predict`, `similar`, `explain` and `serve`: query a run in the terminal, over HTTP or in a
browser.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from rich.text import Text
from typer import Argument, Option

import dualkg as kg
from dualkg.cli import common as cli
from dualkg.errors import DataError, RequestError, visible
from dualkg.files import atomic_write, locked

if TYPE_CHECKING:
    from dualkg.inference.predictor import Known, QueryType

QUERIES = "Tab-separated lines of head, relation and tail, with ? or nothing for one of them; - is the standard input."
PARTS = ("head", "relation", "tail")
QUERIES_PER_BLOCK = 1000
MAX_MISTAKES = 5  # bad lines that are named

Given = tuple[str | int | None, str | int | None, str | int | None]
KINDS: tuple[QueryType, ...] = ("heads", "relations", "tails")  # by the part that is missing


@cli.command()
def predict(
    run: cli.RunPath,
    head: Annotated[str | None, Option(help="Name of the head entity.")] = None,
    relation: Annotated[str | None, Option(help="Name of the relation.")] = None,
    tail: Annotated[str | None, Option(help="Name of the tail entity.")] = None,
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
    """Predict the missing one of head, relation and tail; score the triple if all three are
    given.
    """
    from dualkg.inference.index_build import load_index

    given = (head, relation, tail)
    if queries is None and out is not None:
        raise RequestError("--out is for --queries. Leave it out, or redirect the output.")
    if queries is not None and (any(given) or coverage is not None):
        raise RequestError(
            "--queries has the queries. Leave out --head, --relation, --tail and --coverage."
        )
    if coverage is not None and (relation is None or (head is None) == (tail is None)):
        raise RequestError("--coverage needs --relation and one of --head and --tail.")
    if queries is None and sum(one is not None for one in given) < 2:
        raise RequestError("A query needs at least two of --head, --relation and --tail.")
    loaded = cli.load_on_device(run, device)
    predictor = kg.Predictor.of(
        loaded, calibrated=coverage is not None, index=load_index(index) if index else None
    )
    known: Known = "omit" if new else "mark"
    if queries is not None:
        yield from _predict_file(predictor, queries, out, top=top, known=known)
        return
    if coverage is not None and relation is not None:
        predictions = predictor.prediction_set(head, relation, tail, coverage=coverage)
    else:
        predictions = predict_queries(predictor, [given], top=top, known=known)[0]
    query = f"({', '.join('?' if one is None else one for one in given)})"
    yield cli.Result(
        {"query": query, "predictions": [prediction.as_dict() for prediction in predictions]}
    )
    _print_predictions(query, predictions)


def predict_queries(
    predictor: kg.Predictor, queries: Sequence[Given], *, top: int, known: Known = "mark"
) -> list[list[kg.Prediction]]:
    """The best answers to queries (head, relation, tail) with None for what is missing; no None
    scores the triple.
    """
    graph = predictor.graph
    query = kg.inference.predictor.Query
    vocabularies = (graph.entities, graph.relations, graph.entities)
    by_kind: dict[QueryType, dict[int, tuple[int, ...]]] = {}
    for row, given in enumerate(queries):
        ids = tuple(
            names.id(one) for names, one in zip(vocabularies, given, strict=True) if one is not None
        )
        by_kind.setdefault(KINDS[given.index(None)] if None in given else "triple", {})[row] = ids
    found: list[list[kg.Prediction]] = [[] for _ in queries]
    for kind, asked in by_kind.items():
        predicted = predictor.predict(kind, [query(ids, top, known) for ids in asked.values()])
        for row, predictions in zip(asked, predicted, strict=True):
            found[row] = predictions
    return found


# -- a file of queries -------------------------------------------------------


def read_queries(path: Path, graph: kg.Graph) -> list[tuple[int, Given]]:
    """The queries of a file of tab-separated lines by ids, each with its line number; - is the
    standard input.

    Cells are head, relation and tail, or in the order of a header that names them; ? or nothing is
    what is missing. Blank lines are skipped.
    """
    if path != Path("-") and not path.is_file():
        raise RequestError(
            f"{path} is not a file; lines of head, relation and tail were expected, with ? for one."
        )
    content = sys.stdin.buffer.read() if path == Path("-") else path.read_bytes()
    vocabularies = (graph.entities, graph.relations, graph.entities)
    queries: list[tuple[int, Given]] = []
    mistakes: list[str] = []
    order = [0, 1, 2]
    width = 3
    for number, line in enumerate(content.removeprefix(b"\xef\xbb\xbf").split(b"\n"), start=1):
        if not line.strip() or len(mistakes) == MAX_MISTAKES:
            continue
        try:
            cells = [cell.strip() for cell in line.decode("utf-8").rstrip("\r").split("\t")]
            folded = [cell.casefold() for cell in cells]
            if number == 1 and set(PARTS) <= set(folded):
                order = [folded.index(part) for part in PARTS]
                width = len(cells)
                continue
            cells += [""] * (
                len(cells) == width - 1
            )  # some editors strip a tab at the end of a line
            if len(cells) != width:
                raise RequestError(
                    f"{width} cells should be separated by tabs; found {len(cells)}."
                )
            given = [None if cells[place] in ("", "?") else cells[place] for place in order]
            if given.count(None) > 1:
                raise RequestError(
                    f"Only one of head, relation and tail may be ? or empty; {given.count(None)} "
                    "are."
                )
            ids = [
                None if one is None else names.id(one)
                for names, one in zip(vocabularies, given, strict=True)
            ]
            queries.append((number, (ids[0], ids[1], ids[2])))
        except UnicodeDecodeError:
            mistakes.append(f"Line {number:,}: It is not valid UTF-8.")
        except RequestError as error:
            mistakes.append(f"Line {number:,}: {error}")
    if mistakes:
        more = " Later lines were not read." if len(mistakes) == MAX_MISTAKES else ""
        raise DataError(f"{path} cannot be used. {' '.join(mistakes)}{more}")
    if not queries:
        raise RequestError(
            f"{path} has no queries; lines of head, relation and tail were expected, with ? for "
            "one."
        )
    return queries


def _predict_file(
    predictor: kg.Predictor, path: Path, out: Path | None, *, top: int, known: Known
) -> cli.Output:
    """Predict for the queries of a file in blocks, and write lines of TSV or JSON."""
    graph = predictor.graph
    if out is not None and out.suffix.lower() not in (".tsv", ".jsonl"):
        raise RequestError(
            f"Predictions go to a file that ends with .tsv or .jsonl; '{out.name}' does not."
        )
    queries = read_queries(path, graph)

    def answered() -> Iterator[tuple[int, Given, list[kg.Prediction]]]:
        for start in range(0, len(queries), QUERIES_PER_BLOCK):
            block = queries[start : start + QUERIES_PER_BLOCK]
            found = predict_queries(predictor, [given for _, given in block], top=top, known=known)
            yield from (
                (number, given, one) for (number, given), one in zip(block, found, strict=True)
            )

    def as_objects() -> Iterator[dict[str, Any]]:
        for number, given, predictions in answered():
            query = dict(zip(PARTS, _names(given, graph), strict=True))
            yield {"line": number, **query, "predictions": [one.as_dict() for one in predictions]}

    def as_tsv() -> Iterator[str]:
        labelled = any(names.labels is not None for names in (graph.entities, graph.relations))
        yield "\t".join(
            ["line", "rank", *PARTS, *["label"] * labelled, "score", "probability", "split"]
        )
        for number, given, predictions in answered():
            for rank, one in enumerate(predictions, start=1):
                names = [one.name if name is None else name for name in _names(given, graph)]
                label = [" ".join(one.label.split())] * labelled
                probability = "" if one.probability is None else f"{one.probability:.6g}"
                cells = [
                    str(number),
                    str(rank),
                    *names,
                    *label,
                    f"{one.score:.6g}",
                    probability,
                    one.split or "",
                ]
                if re.search(r"[\t\n\r]", "".join(cells)):
                    message = f"A name in {cells[2:5]} has a tab or a line end."
                    raise RequestError(f"{message} Use --json, or --out with .jsonl.")
                yield "\t".join(cells)

    if out is None:
        yield cli.Result(as_objects(), json_lines=True)
        sys.stdout.writelines(f"{line}\n" for line in as_tsv())
        return
    lines = (
        as_tsv()
        if out.suffix.lower() == ".tsv"
        else (json.dumps(one, ensure_ascii=False) for one in as_objects())
    )
    with locked(out):
        if out.exists():
            raise RequestError(f"{out} exists already. Name another file, or remove it.")
        with atomic_write(out) as fresh, fresh.open("w", encoding="utf-8", newline="\n") as file:
            file.writelines(f"{line}\n" for line in lines)
    yield cli.Result({"out": str(out), "queries": len(queries)})
    cli.note(f"The predictions for {len(queries):,} queries are saved in {out}.", style=None)


def _names(given: Given, graph: kg.Graph) -> list[str | None]:
    vocabularies = (graph.entities, graph.relations, graph.entities)
    return [
        None if id is None else names[int(id)]
        for names, id in zip(vocabularies, given, strict=True)
    ]


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
    for one in predictions:
        name = Text(visible(one.label))
        if one.label != one.name:
            name.append(f" {visible(one.name)}", style="dim")
        probability = (
            ["" if one.probability is None else f"{one.probability:.3f}"] if calibrated else []
        )
        known = (
            Text.assemble(("known", "green"), (f" ({one.split})", "dim"))
            if show_known and one.known
            else ""
        )
        rows.append([name, f"{one.score:.3f}", *probability, known])
    cli.print_table(["", score, *(["probability"] if calibrated else []), ""], rows)


@cli.command()
def similar(
    run: cli.RunPath,
    entity: Annotated[str, Argument(help="Name of the entity.")],
    top: Annotated[int, Option(min=1, help="Number of entities.")] = 10,
) -> cli.Output:
    """List the entities with the most similar embeddings (cosine similarity)."""
    predictions = kg.Predictor.of(cli.load_on_device(run, "cpu"), calibrated=False).similar(
        entity, k=top
    )
    yield cli.Result([prediction.as_dict() for prediction in predictions])
    _print_predictions(f"similar to {entity}", predictions, score="cosine", show_known=False)


@cli.command()
def explain(
    run: cli.RunPath,
    head: Annotated[str, Option(help="Name of the head entity.")],
    relation: Annotated[str, Option(help="Name of the relation.")],
    tail: Annotated[str, Option(help="Name of the tail entity.")],
    top: Annotated[int, Option(min=1, help="Number of supporting triples.")] = 5,
    device: cli.Device = None,
) -> cli.Output:
    """Explain a prediction by the training triples that support it most and by similar entities."""
    loaded = cli.load_on_device(run, device)
    explanation = kg.Predictor(loaded.model, loaded.graph, recipe=loaded.recipe).explain(
        head, relation, tail, k=top
    )
    yield cli.Result(explanation.as_dict())
    for number, sentence in enumerate(explanation.sentences()):
        cli.stdout.print(Text(sentence, style="" if number else "bold"), soft_wrap=True)


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
                cli.note(
                    f"{run.name} has no probabilities yet: dualkg calibrate {run.run.folder}",
                    style=None,
                )
        app = application(served, limits=limits, token=token, log=access_log, read_only=read_only)
        start(app, listening, limits=limits, on_start=_print_address, open_browser=open_browser)
    cli.note("Stopped.", style=None)


def _print_address(address: str) -> None:
    print(address, flush=True)
    cli.note("Press Ctrl-C to stop.", style=None)
