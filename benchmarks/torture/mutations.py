"""Malformed files: bytes, values, cells, columns and tensors are changed, lost or added.

Most changes stay within the structure of a format, so that its parser accepts the file and the
program has to refuse it.
"""

import bz2
import gzip
import hashlib
import io
import json
import lzma
import random
import struct
import tarfile
import tomllib
import zipfile
from pathlib import Path
from typing import Any

from dualkg.files import NO_CHECKSUM

NAMES = [
    "a",
    "é",
    "日本",
    "e\u0301",
    "\u202egnp",
    "=1+1",
    "x" * 3000,
    "\0",
    "'",
    '"',
    "a b",
    "<b>",
    "\ufeff",
    "NaN",
    "-1",
    "%",
]
NUMBERS = [
    0,
    -1,
    1,
    2**31,
    2**53,
    2**63,
    2**64,
    10**30,
    0.5,
    1e308,
    -0.0,
    1e-320,
    float("nan"),
    float("inf"),
]
WEIGHTS = (float("nan"), float("inf"), 1e38, 0.0, 3.0)
STRUCTURED = (".json", ".toml", ".parquet", ".safetensors", ".jsonl")
DECOMPRESS = {".gz": gzip.decompress, ".xz": lzma.decompress, ".bz2": bz2.decompress}


# -- bytes and values --------------------------------------------------------


def mutated_bytes(content: bytes, draw: random.Random) -> bytes:
    """Flip, cut, repeat or insert bytes at one to three places."""
    changed = bytearray(content)
    for _ in range(draw.randint(1, 3)):
        place = draw.randrange(len(changed) + 1)
        length = draw.choice((1, 1, 4, 64))
        kind = draw.randrange(6)
        if kind == 0 and changed:
            changed[place - 1] ^= 1 << draw.randrange(8)
        elif kind == 1:
            del changed[place : place + length]
        elif kind == 2:
            changed[place:place] = changed[place : place + length]
        elif kind == 3:
            changed[place:place] = draw.randbytes(length)
        elif kind == 4:
            byte = draw.choice((b"\0", b"\xff", b"9", b"[", b"\n"))
            changed[place : place + length] = byte * length
        else:
            del changed[draw.randrange(len(changed) + 1) :]
    return bytes(changed)


def sometimes_mutated(content: bytes, draw: random.Random) -> bytes:
    """The bytes, changed in two of five cases."""
    return mutated_bytes(content, draw) if draw.random() < 0.4 else content


def random_value(draw: random.Random, depth: int = 2) -> Any:
    """A value of any kind that JSON and TOML have."""
    kind = draw.randrange(8 if depth else 5)
    if kind < 2:
        return draw.choice(NUMBERS)
    if kind < 4:
        return draw.choice(NAMES)
    if kind == 4:
        return draw.choice((True, False, "", []))
    if kind == 5:
        return [random_value(draw, depth - 1) for _ in range(draw.randrange(4))]
    if kind == 6:
        table = {}
        for _ in range(draw.randrange(4)):
            name = draw.choice(NAMES)
            table[name] = random_value(draw, depth - 1)
        return table
    nested: Any = []
    for _ in range(draw.choice((3, 50, 400))):
        nested = [nested]
    return nested


def mutated_tree(tree: Any, draw: random.Random) -> Any:
    """Change, remove, rename or add one to three values anywhere in nested tables and lists."""
    tree = json.loads(json.dumps(tree))
    for _ in range(draw.randint(1, 3)):
        here = tree
        while isinstance(here, (dict, list)) and here:
            keys = list(here) if isinstance(here, dict) else list(range(len(here)))
            key = draw.choice(keys)
            is_leaf = not isinstance(here[key], (dict, list)) or not here[key]
            if is_leaf or draw.random() < 0.2:
                _change_value(here, key, draw)
                break
            here = here[key]
    return tree


def _change_value(holder: Any, key: Any, draw: random.Random) -> None:
    """Change, remove or rename one value of a table or a list, in place."""
    value = holder[key]
    kind = draw.randrange(6)
    if kind == 0:
        del holder[key]
    elif kind == 1 and isinstance(holder, dict):
        name = draw.choice(NAMES)
        holder[name] = holder.pop(key)
    elif kind == 2 and isinstance(value, (int, float)):
        holder[key] = draw.choice((-value, value + 1, value * 10**6, str(value)))
    else:
        holder[key] = random_value(draw)


# -- the structure of each format --------------------------------------------


def as_json(tree: Any) -> bytes:
    return json.dumps(tree, ensure_ascii=False).encode("utf-8", "replace")


def with_checksum(content: bytes) -> bytes:
    """A file of `write_json` that somebody has changed, with the checksum of what it is now."""
    try:
        tree = json.loads(content)
    except (ValueError, RecursionError):
        return content
    if not isinstance(tree, dict):
        return content
    blank = as_json({**tree, "sha256": NO_CHECKSUM})
    checksum = hashlib.sha256(blank).hexdigest()
    before, after = blank.rsplit(NO_CHECKSUM.encode(), 1)
    return before + checksum.encode() + after


def as_toml(tree: Any) -> bytes:
    """Tables as TOML: nested ones inline."""
    lines: list[str] = []
    for name, table in tree.items() if isinstance(tree, dict) else ():
        if not isinstance(table, dict):
            # Values at the top come before the first table.
            lines.insert(0, f"{json.dumps(name)} = {_inline(table)}")
            continue
        lines.append(f"[{json.dumps(name)}]")
        for key, value in table.items():
            lines.append(f"{json.dumps(key)} = {_inline(value)}")
    return "\n".join(lines).encode("utf-8", "replace")


def _inline(value: Any) -> str:
    """A value of TOML in one line."""
    if isinstance(value, dict):
        pairs = [f"{json.dumps(key)} = {_inline(item)}" for key, item in value.items()]
        return f"{{{', '.join(pairs)}}}"
    if isinstance(value, list):
        return f"[{', '.join(map(_inline, value))}]"
    if isinstance(value, float):
        return repr(value)
    return json.dumps("" if value is None else value).replace("\x7f", "\\u007f")


def mutated_safetensors(content: bytes, draw: random.Random) -> bytes:
    """Change the header of a file of tensors, or the bytes of its tensors.

    The rest stays consistent.
    """
    (size,) = struct.unpack("<Q", content[:8])
    header = json.loads(content[8 : 8 + size])
    body = content[8 + size :]
    kind = draw.randrange(4)
    if kind == 0 and "__metadata__" in header:
        about = json.loads(header["__metadata__"].get("about", "{}"))
        changed_about = mutated_tree(about, draw)
        other = random_value(draw)
        header["__metadata__"]["about"] = as_json(draw.choice((changed_about, other))).decode()
    elif kind == 1:
        header = mutated_tree(header, draw)
    elif kind == 2:
        name = draw.choice([key for key in header if key != "__metadata__"] or [""])
        if name:
            new_name = draw.choice(NAMES)
            header[new_name] = header.pop(name)
    else:
        body = _mutated_weights(body, draw)
    text = as_json(header)
    return struct.pack("<Q", len(text)) + text + body


def _mutated_weights(body: bytes, draw: random.Random) -> bytes:
    """Overwrite one to four numbers of four bytes."""
    changed = bytearray(body)
    for _ in range(draw.randint(1, 4) if changed else 0):
        place = 4 * draw.randrange(len(changed) // 4)
        changed[place : place + 4] = struct.pack("<f", draw.choice(WEIGHTS))
    return bytes(changed)


def mutated_parquet(content: bytes, draw: random.Random) -> bytes:
    """Change a column of a Parquet file: its type, its values, its name, or whether it is there."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    table = pq.read_table(io.BytesIO(content))
    for _ in range(draw.randint(1, 2)):
        if not table.num_columns:
            break
        place = draw.randrange(table.num_columns)
        kind = draw.randrange(7)
        if kind == 0:
            table = table.remove_column(place)
        elif kind == 1:
            names = [*table.column_names]
            names[place] = draw.choice([*NAMES, *names])
            table = table.rename_columns(names)
        elif kind == 2:
            start = draw.randrange(table.num_rows + 1)
            table = table.slice(start, draw.randrange(table.num_rows + 1))
        elif kind == 3:
            table = pa.concat_tables([table] * draw.randint(2, 4))
        else:
            column = pa.array(_random_column(table.num_rows, draw))
            table = table.set_column(place, table.column_names[place], column)
    if draw.random() < 0.1:
        return expanding_parquet(table.column_names, draw)
    sink = io.BytesIO()
    pq.write_table(table, sink, compression=draw.choice(("zstd", "none", "gzip")))
    return sink.getvalue()


def expanding_parquet(names: list[str], draw: random.Random) -> bytes:
    """A small file whose columns take gigabytes: each row repeats an entry, or continues a text."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    num_rows = draw.choice((1000, 20_000))
    text = "x" * draw.choice((100_000, 1_000_000))
    sink = io.BytesIO()
    if draw.random() < 0.5:
        indices = pa.array([0] * num_rows, pa.int32())
        column = pa.DictionaryArray.from_arrays(indices, pa.array([text]))
        table = pa.table(dict.fromkeys(names, column))
        # Without the schema of Arrow, a reader does not know that it was a dictionary.
        pq.write_table(table, sink, compression="zstd", store_schema=False)
    else:
        # The file is written from few rows, and has more of them where they cost nothing.
        column = pa.array([text] * (100_000_000 // len(text)))
        table = pa.table(dict.fromkeys(names, column))
        encodings = dict.fromkeys(names, "DELTA_BYTE_ARRAY")
        pq.write_table(
            table, sink, compression="zstd", use_dictionary=False, column_encoding=encodings
        )
    return with_smaller_sums(sink.getvalue()) if draw.random() < 0.5 else sink.getvalue()


def with_smaller_sums(content: bytes) -> bytes:
    """A Parquet file whose end says that its columns are smaller than they are."""
    import pyarrow.parquet as pq

    metadata = pq.ParquetFile(io.BytesIO(content)).metadata
    footer_start = len(content) - 8 - struct.unpack("<I", content[-8:-4])[0]
    footer = content[footer_start:]
    for group in range(metadata.num_row_groups):
        sizes = [metadata.row_group(group).total_byte_size]
        for place in range(metadata.num_columns):
            sizes.append(metadata.row_group(group).column(place).total_uncompressed_size)
        for size in sizes:
            number = _varint(2 * size)
            if len(number) > 2:
                # A number of as many bytes: 1, and then nothing.
                footer = footer.replace(number, b"\x82" + b"\x80" * (len(number) - 2) + b"\0")
    return content[:footer_start] + footer


def _varint(number: int) -> bytes:
    digits = []
    while True:
        number, digit = divmod(number, 128)
        digits.append(digit | (128 if number else 0))
        if not number:
            return bytes(digits)


def _random_column(num_rows: int, draw: random.Random) -> list[Any]:
    """Values of one type: numbers, names, lists, bytes, nothing or tables."""
    columns: tuple[list[Any], ...] = (
        [draw.choice((0, -1, 2**31 - 1, 7)) for _ in range(num_rows)],
        [draw.choice((2**40, 1)) for _ in range(num_rows)],
        [draw.choice((0.5, float("nan"))) for _ in range(num_rows)],
        [draw.choice(NAMES) for _ in range(num_rows)],
        [[f"e{draw.randrange(9)}"] * draw.randrange(3) for _ in range(num_rows)],
        [draw.choice((b"\xff\xfe", b"ok")) for _ in range(num_rows)],
        [None] * num_rows,
        [{"a": 1}] * num_rows,
    )
    return draw.choice(columns)


def mutated_file(name: str, content: bytes, draw: random.Random) -> bytes:
    """Change a file within the structure of its format, or byte by byte in one of four cases."""
    suffix = Path(name).suffix
    if draw.random() < 0.25 or suffix not in STRUCTURED:
        return mutated_bytes(content, draw)
    if suffix == ".json":
        if draw.random() < 0.9:
            return as_json(mutated_tree(json.loads(content), draw))
        return as_json(random_value(draw))
    if suffix == ".toml":
        return as_toml(mutated_tree(tomllib.loads(content.decode()), draw))
    if suffix == ".jsonl":
        lines = []
        for line in content.splitlines():
            tree = json.loads(line)
            lines.append(mutated_tree(tree, draw) if draw.random() < 0.1 else tree)
        return b"\n".join(map(as_json, lines))
    if suffix == ".parquet":
        return mutated_parquet(content, draw)
    return mutated_safetensors(content, draw)


# -- the first parser --------------------------------------------------------


def is_parsed(name: str, content: bytes) -> bool:
    """Whether the parser of a format accepts a file."""
    suffixes = Path(name).suffixes
    try:
        for suffix, decompress in DECOMPRESS.items():
            if name.lower().endswith(suffix):
                content = decompress(content)
                suffixes = suffixes[:-1]
        return _parse(content, suffixes[-1] if suffixes else "")
    except Exception:  # a parser may raise anything
        return False


def _parse(content: bytes, suffix: str) -> bool:
    """Parse a file by the ending of its name; an error of any kind is raised."""
    if suffix == ".toml":
        tomllib.loads(content.decode())
    elif suffix == ".json":
        json.loads(content)
    elif suffix == ".jsonl":
        for line in content.splitlines():
            if line.strip():
                json.loads(line)
    elif suffix == ".parquet":
        import pyarrow.parquet as pq

        # A few rows: all may take gigabytes.
        next(pq.ParquetFile(io.BytesIO(content)).iter_batches(1), None)
    elif suffix == ".safetensors":
        from safetensors import deserialize

        deserialize(content)  # type: ignore[no-untyped-call]
    elif suffix == ".zip":
        zipfile.ZipFile(io.BytesIO(content)).testzip()
    elif suffix == ".tar":
        tarfile.TarFile(fileobj=io.BytesIO(content)).getmembers()
    elif suffix in (".nt", ".ttl"):
        import pyoxigraph as ox

        rdf_format = ox.RdfFormat.N_TRIPLES if suffix == ".nt" else ox.RdfFormat.TURTLE
        for _ in ox.parse(content, format=rdf_format):
            pass
    elif suffix in (".tsv", ".csv", ".txt"):
        first_line = content.decode("utf-8-sig").lstrip("\r\n").splitlines()[0]
        return max(len(first_line.split(separator)) for separator in "\t,; ") >= 3
    return True
