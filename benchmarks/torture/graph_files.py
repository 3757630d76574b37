"""Files of triples with mistakes, in every format that dualkg reads, and in archives."""

import bz2
import contextlib
import gzip
import io
import lzma
import random
import tarfile
import zipfile
from collections.abc import Callable
from typing import Any, NamedTuple

from benchmarks.torture.mutations import (
    NAMES,
    as_json,
    mutated_bytes,
    mutated_file,
    mutated_tree,
    random_value,
    sometimes_mutated,
)

NUM_TRIPLES = 200
COLUMNS = ("head", "relation", "tail")
ODD_CELLS = ("", " ", "\t", "\n", "y" * 70_000)
SEPARATORS = (("\t", ".tsv"), (",", ".csv"), (";", ".csv"), (" ", ".txt"))
BYTE_ORDER_MARKS = (b"", b"", b"\xef\xbb\xbf", b"\xff\xfe")
ODD_TERMS = (
    '"text"',
    '"text"@en',
    "_:b",
    "<http://x.org/é>",
    "<http://x.org/%zz>",
    "<<<s> <p> <o>>>",
    '"1"^^<int>',
    "<>",
)
RDF_NAMES = ("mine.nt", "mine.ttl", "mine.nq", "mine.trig")
PARQUET_NAMES: tuple[tuple[str, Callable[[bytes], bytes]], ...] = (
    (".parquet", bytes),
    (".parquet", bytes),
    (".parquet.gz", gzip.compress),
    (".parquet.xz", lzma.compress),
)
ARCHIVES: tuple[tuple[str, Callable[[bytes], bytes]], ...] = (
    (".zip", bytes),
    (".tar", bytes),
    (".tar.gz", gzip.compress),
    (".tar.xz", lzma.compress),
    (".tsv.gz", gzip.compress),
    (".tsv.bz2", bz2.compress),
)
MEMBERS = (
    ["mine.tsv"],
    ["train.tsv", "valid.tsv", "test.tsv"],
    ["x/train.txt", "x/valid.txt", "x/test.txt", "readme"],
)
ODD_MEMBERS = (
    "../../up.tsv",
    "/etc/x.tsv",
    "a\0b.tsv",
    "y" * 200 + ".tsv",
    "",
    ".tsv",
    "..",
    "C:\\x.tsv",
)
TAR_FORMATS = (tarfile.PAX_FORMAT, tarfile.GNU_FORMAT, tarfile.USTAR_FORMAT)
TAR_TYPES = (b"S", b"2", b"x", b"L", b"5", b"g")
PAX_KEYS = ("GNU.sparse.map", "GNU.sparse.size", "GNU.sparse.major", "size", "path", "mtime")
# Six bytes each, of which a small archive holds millions.
REPEATED = (b"a\tr\tb\n", b"aaaaaa", b"[[[[[[", bytes(6))


class GraphFile(NamedTuple):
    """A file of triples, and the family that it is counted in."""

    family: str
    name: str
    content: bytes


def random_triple(draw: random.Random) -> list[str]:
    return [f"e{draw.randrange(30)}", f"r{draw.randrange(3)}", f"e{draw.randrange(30)}"]


def rows(draw: random.Random) -> list[list[str]]:
    """Triples with cells changed, lost or added."""
    triples = [random_triple(draw) for _ in range(NUM_TRIPLES)]
    for _ in range(draw.randrange(4)):
        row = draw.choice(triples)
        kind = draw.randrange(5)
        if kind == 0 and row:
            row.pop()
        elif kind == 1:
            row.append(draw.choice(NAMES))
        elif row:
            cell = draw.choice([*NAMES, *ODD_CELLS])
            row[draw.randrange(len(row))] = cell
    return triples


def as_tsv(triples: list[list[str]]) -> bytes:
    return "\n".join(map("\t".join, triples)).encode("utf-8", "replace")


# -- formats -----------------------------------------------------------------


def text(draw: random.Random) -> GraphFile:
    """TSV, CSV and lines separated by spaces.

    They have a header, a byte-order mark or Windows line ends, or not.
    """
    separator, suffix = draw.choice(SEPARATORS)
    lines = rows(draw)
    if draw.random() < 0.3:
        lines.insert(0, list(COLUMNS))
    if suffix == ".csv" and draw.random() < 0.5:
        lines = [[f'"{cell}"' for cell in row] for row in lines]
    line_end = draw.choice(("\n", "\n", "\r\n"))
    content = line_end.join(map(separator.join, lines)).encode("utf-8", "replace")
    content = draw.choice(BYTE_ORDER_MARKS) + content
    family = "CSV" if suffix == ".csv" else "TSV"
    return GraphFile(family, f"mine{suffix}", sometimes_mutated(content, draw))


def jsonl(draw: random.Random) -> GraphFile:
    """Lines or a list of tables, or of lists, some of them of another structure."""
    records = [dict(zip(COLUMNS, row, strict=False)) for row in rows(draw)]
    cells = [list(record.values()) for record in records]
    lines: list[Any] = draw.choice((records, cells))
    for _ in range(draw.randrange(3)):
        place = draw.randrange(len(lines))
        changed = mutated_tree(lines[place], draw)
        other = random_value(draw)
        lines[place] = draw.choice((changed, other))
    name = draw.choice(("mine.jsonl", "mine.json"))
    content = as_json(lines) if name == "mine.json" else b"\n".join(map(as_json, lines))
    return GraphFile("JSONL", name, sometimes_mutated(content, draw))


def rdf(draw: random.Random) -> GraphFile:
    """Triples of IRIs, and a few terms of other kinds."""

    def term(name: str) -> str:
        if draw.random() < 0.02:
            return draw.choice(ODD_TERMS)
        return f"<http://x.org/{name[:50].encode().hex()}>"

    lines = []
    for row in rows(draw):
        terms = [term(name) for name in row]
        lines.append(" ".join([*terms, "."]))
    content = sometimes_mutated("\n".join(lines).encode("utf-8", "replace"), draw)
    return GraphFile("RDF", draw.choice(RDF_NAMES), content)


def parquet(draw: random.Random) -> GraphFile:
    """A table of three columns, changed, and compressed as a whole or not."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    triples = [[*row, "", "", ""][:3] for row in rows(draw)]
    columns = [list(column) for column in zip(*triples, strict=True)]
    sink = io.BytesIO()
    pq.write_table(pa.table(dict(zip(COLUMNS, columns, strict=True))), sink)
    content = mutated_file("mine.parquet", sink.getvalue(), draw)
    suffix, compress = draw.choice(PARQUET_NAMES)
    content = compress(content)
    if suffix != ".parquet":
        content = sometimes_mutated(content, draw)
    return GraphFile("Parquet", f"mine{suffix}", content)


# -- archives ----------------------------------------------------------------


def archive(draw: random.Random) -> GraphFile:
    """Archives of mutated files, mutated archives, and files that expand to a large size."""
    content = as_tsv(rows(draw))
    is_bomb = draw.random() < 0.05
    names = draw.choice(MEMBERS)
    if draw.random() < 0.1:
        names = [draw.choice(ODD_MEMBERS)]
    suffix, compress = draw.choice(ARCHIVES)
    if is_bomb and suffix != ".tar":
        content = draw.choice(REPEATED) * (3 << 20)
    if suffix == ".zip":
        content = _zipped(names, content)
    elif suffix.startswith(".tar"):
        content = _tarred(names, content, draw)
    content = compress(content)
    if draw.random() < 0.5:
        content = mutated_bytes(content, draw)
    return GraphFile("archives", f"mine{suffix}", content)


def _zipped(names: list[str], content: bytes) -> bytes:
    sink = io.BytesIO()
    with zipfile.ZipFile(sink, "w", zipfile.ZIP_DEFLATED) as zipped:
        for name in names:
            zipped.writestr(name or "x", content)
    return sink.getvalue()


def _tarred(names: list[str], content: bytes, draw: random.Random) -> bytes:
    """An archive whose members may say that they are links, folders or sparse."""
    sink = io.BytesIO()
    tar_format = draw.choice(TAR_FORMATS)
    # Some names and headers cannot be written in each format.
    with (
        tarfile.open(fileobj=sink, mode="w", format=tar_format) as tar,
        contextlib.suppress(ValueError),
    ):
        for name in names:
            member = tarfile.TarInfo(name)
            member.size = len(content)
            if draw.random() < 0.2:
                member.type = draw.choice(TAR_TYPES)
            if draw.random() < 0.2 and tar_format == tarfile.PAX_FORMAT:
                key = draw.choice(PAX_KEYS)
                number = str(random_value(draw, 0))
                member.pax_headers = {key: number, "GNU.sparse.minor": "0"}
            tar.addfile(member, io.BytesIO(content))
    return sink.getvalue()
