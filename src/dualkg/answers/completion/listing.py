"""A list of new triples, as arrays, as a table of names, and as a file."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet

from dualkg.answers.completion.pool import Column, Pool
from dualkg.data.graph import Graph
from dualkg.data.vocabulary import Vocabulary
from dualkg.errors import RequestError
from dualkg.files import replacing

BREAKS = "[\t\n\r]"  # what a TSV file has no way to hold inside a name
LINES_AT_ONCE = 100_000


@dataclass(frozen=True, eq=False)
class Completion:
    """New triples, best first: `(num_triples,)` each. Without a calibration there is no probability."""

    graph: Graph
    heads: Column  # ids
    relations: Column
    tails: Column
    probability: Column | None  # of the triple
    as_answer: Column | None  # the same if its questions are known to lack an answer
    score: Column
    evidence: Column

    @classmethod
    def of(cls, graph: Graph, pool: Pool) -> Completion:
        found = pool.ordered()
        probability, as_answer = (
            None if one is None else one.astype(np.float32) for one in (pool.probability(found), pool.as_answer(found))
        )
        ids = found.heads, found.relations, found.tails
        return cls(graph, *ids, probability, as_answer, found.score, found.evidence)

    def __len__(self) -> int:
        return len(self.heads)

    @property
    def triples(self) -> Column:
        """Ids of head, relation and tail, `(num_triples, 3)`."""
        return np.stack([self.heads, self.relations, self.tails], axis=1)

    def table(self) -> pa.Table:
        """By name, with the rank, and with labels where people have others than the names."""
        entities, relations = self.graph.entities, self.graph.relations
        sides = {
            "head": (entities, self.heads),
            "relation": (relations, self.relations),
            "tail": (entities, self.tails),
        }
        columns: dict[str, pa.Array] = {"rank": pa.array(np.arange(1, len(self) + 1))}
        columns |= {name: vocabulary.names.take(pa.array(ids)) for name, (vocabulary, ids) in sides.items()}
        columns |= {
            f"{name}_label": _labels(vocabulary).take(pa.array(ids))
            for name, (vocabulary, ids) in sides.items()
            if vocabulary.labels is not None
        }
        for name in ("probability", "as_answer"):
            if (sure := getattr(self, name)) is not None:
                columns[name] = pa.array(sure)
        return pa.table({**columns, "score": pa.array(self.score), "evidence": pa.array(self.evidence)})

    def save(self, path: str | Path) -> Path:
        """Write the table as TSV or Parquet, as the file's ending says."""
        path = check_file(path, self.graph)
        with replacing(path) as fresh:
            WRITERS[path.suffix.lower()](self.table(), fresh)
        return path


def check_file(path: str | Path, graph: Graph) -> Path:
    """Refuse a file that could not be written at the end, before anything is searched for."""
    path = Path(path)
    if path.suffix.lower() not in WRITERS:
        raise RequestError(f"New triples go to a file that ends with .tsv or .parquet; '{path.name}' does not.")
    if path.exists():
        raise RequestError(f"{path} exists already. Name another file, or remove it.")
    if path.suffix.lower() == ".tsv":
        for vocabulary in (graph.entities, graph.relations):
            broken = vocabulary.names.filter(pc.match_substring_regex(vocabulary.names, BREAKS))
            if len(broken):
                raise RequestError(
                    f"The {vocabulary.kind} {broken[0].as_py()!r} has a tab or a line end in its name, which a TSV "
                    f"file cannot hold. Write Parquet instead, to {path.with_suffix('.parquet')}."
                )
    try:
        with replacing(path) as fresh:
            fresh.touch()
            raise _WritableError
    except _WritableError:
        return path
    except OSError as error:
        raise RequestError(f"{path} cannot be written: {error.strerror or error}.") from None


class _WritableError(Exception):
    """What leaves no file behind where one could be written."""


def _labels(vocabulary: Vocabulary) -> pa.Array:
    """What people call each name, on one line."""
    return pc.replace_substring_regex(pc.coalesce(vocabulary.labels, vocabulary.names), BREAKS, " ")


def _write_tsv(table: pa.Table, path: Path) -> None:
    """Lines of tab-separated columns without any quoting, as they are read."""
    with path.open("w", encoding="utf-8", newline="\n") as file:
        file.write("\t".join(table.column_names) + "\n")
        for batch in table.to_batches(LINES_AT_ONCE):
            cells = [column.cast(pa.string()) for column in batch.columns]
            lines = pc.binary_join_element_wise(*cells, "\t").to_pylist()
            file.writelines(f"{line}\n" for line in lines)


def _write_parquet(table: pa.Table, path: Path) -> None:
    pa.parquet.write_table(table, path)


WRITERS: dict[str, Callable[[pa.Table, Path], None]] = {".tsv": _write_tsv, ".parquet": _write_parquet}
