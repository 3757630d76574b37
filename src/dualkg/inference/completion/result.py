"""New triples as columns, as a table and as a file."""

import tempfile
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet

from dualkg.data.graph import Graph
from dualkg.data.vocabulary import Vocabulary
from dualkg.delimited import SEPARATORS, check_tsv_cell, tsv_line
from dualkg.errors import InvalidValue, RequestError
from dualkg.files import atomic_write, check_new_file
from dualkg.inference.completion.search import SearchState, best_first, probabilities_of

# `pyarrow.compute` is imported in functions: it is slow to import, and `import dualkg` loads this
# module.

LINES_AT_ONCE = 10_000

Column = npt.NDArray[Any]


@dataclass(frozen=True, eq=False)
class Completion:
    """New triples, the best first, by column `(num_triples,)`; `heads`, `relations` and `tails` are
    ids.

    `probability` is that of the triple, and `answer_probability` that of the triple if each of its
    queries has an answer that is missing. Both are None without a calibration.
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
    def of(cls, graph: Graph, state: SearchState) -> Self:
        triples = best_first(state.triples)
        correction = state.prior_correction
        probability: Column | None = None
        answer_probability: Column | None = None
        if correction is not None:
            of_triples = probabilities_of(triples, correction)
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
        columns: dict[str, Any] = {}
        for field in fields(self):
            value = getattr(self, field.name)
            is_column = isinstance(value, np.ndarray)
            columns[field.name] = value[:number] if is_column else value
        return type(self)(**columns)

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
