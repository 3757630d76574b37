"""Predictions for a file of queries, one query a line."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from dualkg.data.graph import Graph
from dualkg.delimited import tsv_line
from dualkg.errors import DataError, InvalidValue, RequestError
from dualkg.files import atomic_write, check_new_file, locked, read_bytes
from dualkg.inference.api import open_run
from dualkg.inference.predictor import Known, Prediction, Predictor, Query, QueryType
from dualkg.training.run import Run

PARTS = ("head", "relation", "tail")
FIGURES = ("score", "probability", "split", "answer_probability")
STANDARD_INPUT = Path("-")
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
UNKNOWN = ("", "?")  # what a cell has in place of the part to predict
SUFFIXES = (".tsv", ".jsonl")
QUERIES_PER_BLOCK = 1000
MAX_QUERY_FILE = 1 << 30  # bytes
MAX_MISTAKES = 5  # bad lines that are named
EXPECTED_LINES = "lines of head, relation and tail were expected, with ? for one."

Given = tuple[str | int | None, str | int | None, str | int | None]


# -- queries -----------------------------------------------------------------


@dataclass(frozen=True)
class AnsweredQuery:
    """A query of a file by its names, with None for the part that was predicted."""

    line: int
    head: str | None
    relation: str | None
    tail: str | None
    predictions: Sequence[Prediction]

    def as_dict(self) -> dict[str, Any]:
        return {
            "line": self.line,
            "head": self.head,
            "relation": self.relation,
            "tail": self.tail,
            "predictions": [prediction.as_dict() for prediction in self.predictions],
        }


@dataclass(frozen=True)
class FileOfQueries:
    """The queries of a file by their line numbers; iteration predicts them in blocks."""

    predictor: Predictor
    queries: Sequence[tuple[int, Given]]
    k: int = 10
    known: Known = "mark"

    def __len__(self) -> int:
        return len(self.queries)

    def __iter__(self) -> Iterator[AnsweredQuery]:
        for start in range(0, len(self.queries), QUERIES_PER_BLOCK):
            block = self.queries[start : start + QUERIES_PER_BLOCK]
            given = [query for _, query in block]
            answers = predict_queries(self.predictor, given, top=self.k, known=self.known)
            for (line, query), predictions in zip(block, answers, strict=True):
                yield AnsweredQuery(line, *self._names(query), predictions)

    def _names(self, query: Given) -> tuple[str | None, str | None, str | None]:
        graph = self.predictor.graph
        head, relation, tail = query
        return (
            None if head is None else graph.entities[int(head)],
            None if relation is None else graph.relations[int(relation)],
            None if tail is None else graph.entities[int(tail)],
        )

    def tsv_lines(self) -> Iterator[str]:
        """A header, then a line for each prediction: rank, triple, and `FIGURES`.

        Names that have labels are followed by a column of labels.
        """
        graph = self.predictor.graph
        has_labels = graph.entities.labels is not None or graph.relations.labels is not None
        labels = ["label"] if has_labels else []
        yield "\t".join(["line", "rank", *PARTS, *labels, *FIGURES])
        for answer in self:
            for rank, prediction in enumerate(answer.predictions, start=1):
                yield _tsv_line(answer, rank, prediction, has_labels=has_labels)

    def json_lines(self) -> Iterator[str]:
        """An object for each query."""
        for answer in self:
            yield json.dumps(answer.as_dict(), ensure_ascii=False)

    def save(self, path: str | Path) -> Path:
        """Write the predictions to a new file, .tsv or .jsonl."""
        path = check_suffix(path)
        with locked(path):
            check_new_file(path)
            lines = self.tsv_lines() if path.suffix.lower() == ".tsv" else self.json_lines()
            with (
                atomic_write(path) as fresh,
                fresh.open("w", encoding="utf-8", newline="\n") as file,
            ):
                file.writelines(f"{line}\n" for line in lines)
        return path


def predict_file(
    run: Run | str | Path,
    path: str | Path,
    *,
    k: int = 10,
    known: Known = "mark",
    device: str | torch.device | None = None,
    trust_code: bool = False,
) -> FileOfQueries:
    """Read a file of queries for a run; iterate over the result, or `save` it as .tsv or .jsonl.

    The lines have head, relation and tail, separated by tabs, with ? for the part to predict.

    Args:
        run: A run, or its folder.
        path: File of queries.
        k: Number of predictions for a query.
        known: "mark" or "omit" known answers.
        device: Where the model runs; a GPU by default, if there is one.
        trust_code: Whether the recipe may name classes that are not part of dualkg.

    Returns:
        The queries with their predictions.

    Examples:
        >>> from pathlib import Path
        >>> written = Path("queries.tsv").write_text("France\\tborders\\t?\\n", encoding="utf-8")
        >>> saved = kg.predict_file(run, "queries.tsv", k=3).save("found.tsv")
    """
    predictor = Predictor.of(open_run(run, device=device, trust_code=trust_code))
    return FileOfQueries(predictor, read_queries(Path(path), predictor.graph), k, known)


def check_suffix(path: str | Path) -> Path:
    """The path of a file of predictions; refuse another format."""
    path = Path(path)
    if path.suffix.lower() not in SUFFIXES:
        raise InvalidValue("out", expected="a file that ends with .tsv or .jsonl", found=path.name)
    return path


def predict_queries(
    predictor: Predictor, queries: Sequence[Given], *, top: int, known: Known = "mark"
) -> list[list[Prediction]]:
    """The best answers to queries (head, relation, tail) with None for the part that is missing.

    A query without None scores the triple. The entity of a query is no answer, unless the graph
    contains that triple or the relation often has self-loops.
    """
    graph = predictor.graph
    vocabularies = (graph.entities, graph.relations, graph.entities)
    # The ids of the given parts by the type of the query and by its row.
    ids_by_type: dict[QueryType, dict[int, tuple[int, ...]]] = {}
    for row, given in enumerate(queries):
        parts = zip(vocabularies, given, strict=True)
        ids = tuple(names.id(part) for names, part in parts if part is not None)
        ids_by_type.setdefault(query_type(given), {})[row] = ids

    answers: list[list[Prediction]] = [[] for _ in queries]
    for kind, ids_by_row in ids_by_type.items():
        batch = [Query(ids, top, known) for ids in ids_by_row.values()]
        predicted = predictor.predict(kind, batch)
        for row, predictions in zip(ids_by_row, predicted, strict=True):
            answers[row] = predictions
    return answers


def query_type(given: Sequence[object | None]) -> QueryType:
    """The type of a query (head, relation, tail) by its part that is None."""
    types: tuple[QueryType, ...] = ("heads", "relations", "tails")
    return types[given.index(None)] if None in given else "triple"


def read_queries(path: Path, graph: Graph) -> list[tuple[int, Given]]:
    """The queries of a file by ids, each with its line number; - is the standard input.

    Cells are head, relation and tail, or in the order of a header that names them. Blank lines are
    skipped.
    """
    if path == STANDARD_INPUT:
        content = sys.stdin.buffer.read()
    elif path.is_file():
        content = read_bytes(path, max_bytes=MAX_QUERY_FILE)
    else:
        raise RequestError(f"{path} is not a file; {EXPECTED_LINES}")

    queries: list[tuple[int, Given]] = []
    mistakes: list[str] = []
    columns = _Columns()
    lines = content.removeprefix(BYTE_ORDER_MARK).split(b"\n")
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            cells = _cells(line)
            if number == 1 and set(PARTS) <= set(_folded(cells)):
                columns = _Columns.of_header(cells)
            else:
                queries.append((number, columns.query(cells, graph)))
        except RequestError as error:
            mistakes.append(f"Line {number:,}: {error}")
            if len(mistakes) == MAX_MISTAKES:
                mistakes.append("Later lines were not read.")
                break
    if mistakes:
        raise DataError(" ".join([f"{path} cannot be used.", *mistakes]))
    if not queries:
        raise RequestError(f"{path} has no queries; {EXPECTED_LINES}")
    return queries


@dataclass(frozen=True)
class _Columns:
    """The positions of head, relation and tail in lines of `width` cells."""

    positions: tuple[int, ...] = (0, 1, 2)
    width: int = 3

    @classmethod
    def of_header(cls, cells: Sequence[str]) -> _Columns:
        folded = _folded(cells)
        return cls(tuple(folded.index(part) for part in PARTS), len(cells))

    def query(self, cells: list[str], graph: Graph) -> Given:
        """The ids of a line, with None for the part to predict."""
        # Some editors strip a tab at the end of a line.
        if len(cells) == self.width - 1:
            cells = [*cells, ""]
        if len(cells) != self.width:
            raise RequestError(
                f"{self.width} cells should be separated by tabs; found {len(cells)}."
            )
        head, relation, tail = (cells[position] for position in self.positions)
        num_unknown = sum(cell in UNKNOWN for cell in (head, relation, tail))
        if num_unknown > 1:
            raise RequestError(
                f"Only one of head, relation and tail may be ? or empty; {num_unknown} are."
            )
        return (
            None if head in UNKNOWN else graph.entities.id(head),
            None if relation in UNKNOWN else graph.relations.id(relation),
            None if tail in UNKNOWN else graph.entities.id(tail),
        )


def _cells(line: bytes) -> list[str]:
    try:
        text = line.decode("utf-8")
    except UnicodeDecodeError:
        raise RequestError("It is not valid UTF-8.") from None
    return [cell.strip() for cell in text.rstrip("\r").split("\t")]


def _folded(cells: Sequence[str]) -> list[str]:
    return [cell.casefold() for cell in cells]


def _probability_text(probability: float | None) -> str:
    return "" if probability is None else f"{probability:.6g}"


def _tsv_line(answer: AnsweredQuery, rank: int, prediction: Prediction, *, has_labels: bool) -> str:
    given = (answer.head, answer.relation, answer.tail)
    triple = [prediction.name if name is None else name for name in given]
    cells = [str(answer.line), str(rank), *triple]
    if has_labels:
        cells.append(" ".join(prediction.label.split()))
    cells.append(f"{prediction.score:.6g}")
    cells.append(_probability_text(prediction.probability))
    cells.append(prediction.split or "")
    cells.append(_probability_text(prediction.answer_probability))
    return tsv_line(cells, instead="JSON lines, with `out='predictions.jsonl'`")
