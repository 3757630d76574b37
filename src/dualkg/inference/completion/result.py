"""The best new triples: those that a search has found so far, and its result as columns, as a
table and as a file.
"""

import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from math import inf
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet
import torch

from dualkg.data.graph import Graph
from dualkg.data.vocabulary import Vocabulary
from dualkg.delimited import SEPARATORS, check_tsv_cell, tsv_line
from dualkg.errors import InvalidValue, RequestError
from dualkg.files import atomic_write, check_new_file
from dualkg.inference.probability import Calibration, TripleProbabilities

# `pyarrow.compute` is imported in functions: it is slow to import, and `import dualkg` loads this
# module.

LINES_AT_ONCE = 10_000
# One new triple. Its sort key is the log odds, or without a calibration the log-probability.
NEW_TRIPLE = np.dtype(
    [
        ("head", "i8"),
        ("relation", "i8"),
        ("tail", "i8"),
        ("score", "f4"),
        ("log_probability", "f4"),
        ("sort_key", "f8"),
    ]
)
NewTriples = npt.NDArray[Any]
Column = npt.NDArray[Any]


# -- the best triples so far -------------------------------------------------


def best_first(triples: NewTriples) -> NewTriples:
    """By decreasing sort key; ties by log-probability and then by ascending ids."""
    ids = (triples["tail"], triples["relation"], triples["head"])
    return triples[np.lexsort((*ids, -triples["log_probability"], -triples["sort_key"]))]


def _probabilities_of(triples: NewTriples, calibration: Calibration) -> TripleProbabilities:
    ids = np.stack([triples["head"], triples["relation"], triples["tail"]], axis=1)
    return calibration.of_triples(ids, torch.from_numpy(triples["log_probability"].copy()))


@dataclass(frozen=True, eq=False)
class BestTriples:
    """The best `top` triples so far, none less probable than `min_probability`."""

    top: int
    calibration: Calibration | None
    min_probability: float
    triples: NewTriples = field(default_factory=lambda: np.empty(0, NEW_TRIPLE))

    @property
    def last_sort_key(self) -> float:
        """That of the last triple, once there are `top`."""
        return float(self.triples["sort_key"].min()) if len(self.triples) >= self.top else -inf

    def merge(self, new: NewTriples) -> Self:
        """The best of these triples and of new ones, whose sort keys are not set."""
        if not len(new):
            return self
        triples = np.concatenate([self.triples, self._with_sort_keys(new)])
        if len(triples) > self.top:
            sort_keys = triples["sort_key"]
            last_sort_key = np.partition(sort_keys, -self.top)[-self.top]
            triples = triples[sort_keys >= last_sort_key]
        if len(triples) > self.top:  # Some tie with the last one.
            triples = best_first(triples)[: self.top]
        return replace(self, triples=triples)

    def _with_sort_keys(self, new: NewTriples) -> NewTriples:
        """A copy with sort keys, without triples that are less probable than the minimum."""
        new = new.copy()
        if self.calibration is None:
            new["sort_key"] = new["log_probability"]
            return new

        probabilities = _probabilities_of(new, self.calibration)
        new["sort_key"] = probabilities.log_odds
        return new[probabilities.probability >= self.min_probability]


# -- the result --------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Completion:
    """New triples, the best first, by column `(num_triples,)`; `heads`, `relations` and `tails` are
    ids.

    `probability` is the probability that the triple is true, and `answer_probability` the same if
    each of its queries is known to lack an answer. Both are None without a calibration.
    """

    graph: Graph
    heads: Column
    relations: Column
    tails: Column
    probability: Column | None
    answer_probability: Column | None
    score: Column
    log_probability: Column

    @classmethod
    def of(cls, graph: Graph, best: BestTriples) -> Self:
        triples = best_first(best.triples)
        calibration = best.calibration
        probability: Column | None = None
        answer_probability: Column | None = None
        if calibration is not None:
            of_triples = _probabilities_of(triples, calibration)
            probability = of_triples.probability.astype(np.float32)
            answer_probability = of_triples.answer_probability.astype(np.float32)
        return cls(
            graph=graph,
            heads=triples["head"].copy(),
            relations=triples["relation"].copy(),
            tails=triples["tail"].copy(),
            probability=probability,
            answer_probability=answer_probability,
            score=triples["score"].copy(),
            log_probability=triples["log_probability"].copy(),
        )

    def __len__(self) -> int:
        return len(self.heads)

    def first(self, number: int) -> Self:
        """The first triples."""
        columns: dict[str, Any] = {
            name: value[:number]
            for name, value in vars(self).items()
            if isinstance(value, np.ndarray)
        }
        return replace(self, **columns)

    @property
    def triples(self) -> Column:
        """Ids of head, relation and tail, `(num_triples, 3)`."""
        return np.stack([self.heads, self.relations, self.tails], axis=1)

    def table(self) -> pa.Table:
        """Names with rank and numbers, and labels where the graph has any."""
        parts = [
            ("head", self.graph.entities, pa.array(self.heads)),
            ("relation", self.graph.relations, pa.array(self.relations)),
            ("tail", self.graph.entities, pa.array(self.tails)),
        ]
        columns: dict[str, pa.Array] = {"rank": pa.array(np.arange(1, len(self) + 1))}
        for part, vocabulary, ids in parts:
            columns[part] = vocabulary.names.take(ids)
        for part, vocabulary, ids in parts:
            if vocabulary.labels is not None:
                columns[f"{part}_label"] = _label_lines(vocabulary).take(ids)
        for name in ("probability", "answer_probability", "score", "log_probability"):
            numbers = getattr(self, name)
            if numbers is not None:
                columns[name] = pa.array(numbers)
        return pa.table(columns)

    def save(self, path: str | Path) -> Path:
        """Write the table as .tsv or .parquet."""
        path = check_file(path, self.graph)
        write = WRITERS[path.suffix.lower()]
        with atomic_write(path) as file:
            write(self.table(), file)
        return path


def _label_lines(vocabulary: Vocabulary) -> pa.Array:
    """The labels of all ids without tabs and line ends; a name where there is no label."""
    import pyarrow.compute as pc

    labels = pc.coalesce(vocabulary.labels, vocabulary.names)
    return pc.replace_substring_regex(labels, SEPARATORS, " ")


def check_file(path: str | Path, graph: Graph) -> Path:
    """Refuse, before the search, a file that could not be written after it."""
    path = check_path(path)
    if path.suffix.lower() == ".tsv":
        _check_names_for_tsv(graph.entities, path)
        _check_names_for_tsv(graph.relations, path)
    return path


def check_path(path: str | Path) -> Path:
    """Refuse a file that exists, cannot be made, or has another suffix."""
    path = Path(path)
    suffix = path.suffix.lower()
    if suffix not in WRITERS:
        raise InvalidValue(
            "out", expected="a file that ends with .tsv or .parquet", found=path.name
        )
    check_new_file(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=path.parent).close()
    except OSError as error:
        reason = error.strerror or str(error)
        raise RequestError(f"{path} cannot be written: {reason}.") from None
    return path


def _check_names_for_tsv(vocabulary: Vocabulary, path: Path) -> None:
    import pyarrow.compute as pc

    has_separator = pc.match_substring_regex(vocabulary.names, SEPARATORS)
    broken_names = vocabulary.names.filter(has_separator)
    if len(broken_names):
        parquet = path.with_suffix(".parquet")
        check_tsv_cell(broken_names[0].as_py(), instead=f"Parquet, to {parquet}")


def _write_tsv(table: pa.Table, path: Path) -> None:
    """Write lines of tab-separated columns without quotes.

    `pyarrow.csv` refuses to write names that have quotes without quoting them.
    """
    with path.open("w", encoding="utf-8", newline="\n") as file:
        file.write("\t".join(table.column_names) + "\n")
        for batch in table.to_batches(LINES_AT_ONCE):
            columns = [column.cast(pa.string()).to_pylist() for column in batch.columns]
            for cells in zip(*columns, strict=True):
                file.write(tsv_line(cells, instead="Parquet") + "\n")


WRITERS: dict[str, Callable[[pa.Table, Path], None]] = {
    ".tsv": _write_tsv,
    ".parquet": pa.parquet.write_table,
}
