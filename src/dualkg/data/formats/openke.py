"""OpenKE: files of ids such as `train2id.txt`, and the names of the ids in files beside them."""

import io
from collections.abc import Generator

import pyarrow as pa

from dualkg.data.archives import Source
from dualkg.data.columns import ROLES
from dualkg.data.formats.delimited import Layout, quote, read_blocks
from dualkg.data.readers import Reader, reads
from dualkg.data.sniffing import first_row, readable
from dualkg.errors import DataError, RequestError

ENTITY_NAMES = "entity2id"
RELATION_NAMES = "relation2id"


@reads("2id.txt")
class OpenKeReader(Reader):
    """The number of triples, then ids of head, tail and relation; names come from other files."""

    takes_delimiter = True  # and ignores it, as the columns are always separated by blanks

    def blocks(self) -> Generator[pa.RecordBatch]:
        if self.columns is not None:
            raise RequestError(
                f"{self.name} is a file of OpenKE, whose columns are known. Leave columns out."
            )

        _, first = first_row(self.data, " ")
        if first is None or len(first.cells) != 1 or not first.cells[0].isdecimal():
            found = f"'{' '.join(first.cells)}'" if first else "nothing"
            problem = f"expected the number of triples, as in files of OpenKE, found {found}"
            raise self.unusable(problem, place="line 1")
        if not self.options.names_of_ids:
            self.notes.append(
                f"{self.name} is read without entity2id.txt and relation2id.txt: its ids are the "
                "names."
            )

        expected = int(first.cells[0])
        num_triples = 0
        layout = Layout(" ", 3, (0, 2, 1), ROLES, num_skipped=first.num_lines)
        for block in read_blocks(self.data, layout, self):
            num_triples += block.num_rows
            columns = [self._named(role, block.column(role)) for role in ROLES]
            yield pa.RecordBatch.from_arrays(columns, names=ROLES)
        self.check_number(num_triples, expected)

    def _named(self, role: str, column: pa.DictionaryArray) -> pa.DictionaryArray:
        """A column of ids as names."""
        file = RELATION_NAMES if role == "relation" else ENTITY_NAMES
        names = self.options.names_of_ids.get(file)
        if names is None:
            return column

        ids = column.dictionary.to_pylist()
        unknown = [id for id in ids if id not in names]
        if unknown:
            problem = (
                f"has the {role} {unknown[0]}, which is not one of the {len(names):,} ids of "
                f"{file}.txt"
            )
            raise self.unusable(problem)
        dictionary = pa.array([names[id] for id in ids], pa.string())
        return pa.DictionaryArray.from_arrays(column.indices, dictionary)


def read_names(source: Source) -> dict[str, str]:
    """Names by id, from `entity2id.txt` or `relation2id.txt`.

    The first line is the number of names, and each line below has a name and an id.
    """
    names: dict[str, str] = {}
    with source.open() as stream, io.TextIOWrapper(stream, "utf-8-sig", "surrogateescape") as text:
        numbered = ((number, line.strip()) for number, line in enumerate(text, start=1))
        lines = ((number, line) for number, line in numbered if line)
        next(lines, None)
        for number, line in lines:
            name, _, id = line.rpartition("\t" if "\t" in line else " ")
            if not name.strip() or not id.strip().isdecimal() or readable(line) != line:
                raise DataError(
                    f"{source.name}, line {number:,}: expected a name and its id, found "
                    f"{quote(line)}."
                )
            names[id.strip()] = name.strip()

    if len(set(names.values())) < len(names):
        raise DataError(
            f"{source.name} has ids with the same name. Give every id a name of its own."
        )
    return names
