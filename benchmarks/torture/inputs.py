"""Mutated inputs: commands read files that were changed within their structure or byte by byte.

An input fails if it ends in a traceback, a crash, a message of more than `MAX_MESSAGE` characters,
after more than `MAX_SECONDS`, or with more than `MAX_MIB` of memory. Commands run in a worker
process, which is restarted when it crashes or hangs. An input that the parser of its format accepts
has come past the first parser, and is counted.
"""

import bz2
import contextlib
import gzip
import hashlib
import io
import json
import lzma
import multiprocessing
import os
import random
import re
import shutil
import struct
import sys
import tarfile
import tempfile
import time
import tomllib
import traceback
import zipfile
from collections import Counter
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.torture.common import MAX_FAILURES, ON_CPU, TRACEBACK
from dualkg.files import NO_CHECKSUM

MAX_SECONDS = 10.0
MAX_MIB = 1024
MAX_MESSAGE = 4000
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


class Case(NamedTuple):
    """The words of a command, and whether the parser of the format accepts what it reads."""

    family: str
    words: list[str]
    parsed: bool


# -- mutations ---------------------------------------------------------------


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
            changed[place : place + length] = (
                draw.choice((b"\0", b"\xff", b"9", b"[", b"\n")) * length
            )
        else:
            del changed[draw.randrange(len(changed) + 1) :]
    return bytes(changed)


def value(draw: random.Random, depth: int = 2) -> Any:
    """A value of any kind that JSON and TOML have."""
    kind = draw.randrange(8 if depth else 5)
    if kind < 2:
        return draw.choice(NUMBERS)
    if kind < 4:
        return draw.choice(NAMES)
    if kind == 4:
        return draw.choice((True, False, "", []))
    if kind == 5:
        return [value(draw, depth - 1) for _ in range(draw.randrange(4))]
    if kind == 6:
        return {draw.choice(NAMES): value(draw, depth - 1) for _ in range(draw.randrange(4))}
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
            if not isinstance(here[key], (dict, list)) or not here[key] or draw.random() < 0.2:
                kind = draw.randrange(6)
                if kind == 0:
                    del here[key]
                elif kind == 1 and isinstance(here, dict):
                    here[draw.choice(NAMES)] = here.pop(key)
                elif kind == 2 and isinstance(here[key], (int, float)):
                    here[key] = draw.choice(
                        (-here[key], here[key] + 1, here[key] * 10**6, str(here[key]))
                    )
                else:
                    here[key] = value(draw)
                break
            here = here[key]
    return tree


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
    return hashlib.sha256(blank).hexdigest().encode().join(blank.rsplit(NO_CHECKSUM.encode(), 1))


def as_toml(tree: Any) -> bytes:
    """Tables as TOML: nested ones inline."""

    def inline(one: Any) -> str:
        if isinstance(one, dict):
            return (
                "{"
                + ", ".join(f"{json.dumps(key)} = {inline(item)}" for key, item in one.items())
                + "}"
            )
        if isinstance(one, list):
            return "[" + ", ".join(map(inline, one)) + "]"
        if isinstance(one, float):
            return repr(one)
        return json.dumps("" if one is None else one).replace("\x7f", "\\u007f")

    lines = []
    for name, table in tree.items() if isinstance(tree, dict) else ():
        if isinstance(table, dict):
            lines += [
                f"[{json.dumps(name)}]",
                *(f"{json.dumps(key)} = {inline(one)}" for key, one in table.items()),
            ]
        else:
            lines.insert(0, f"{json.dumps(name)} = {inline(table)}")
    return "\n".join(lines).encode("utf-8", "replace")


def rows(draw: random.Random) -> list[list[str]]:
    """Triples with cells changed, lost or added."""
    triples = [random_triple(draw) for _ in range(200)]
    for _ in range(draw.randrange(4)):
        row = draw.choice(triples)
        kind = draw.randrange(5)
        if kind == 0 and row:
            row.pop()
        elif kind == 1:
            row.append(draw.choice(NAMES))
        elif row:
            row[draw.randrange(len(row))] = draw.choice([*NAMES, "", " ", "\t", "\n", "y" * 70_000])
    return triples


def random_triple(draw: random.Random) -> list[str]:
    return [f"e{draw.randrange(30)}", f"r{draw.randrange(3)}", f"e{draw.randrange(30)}"]


def mutated_safetensors(content: bytes, draw: random.Random) -> bytes:
    """Change the header of a file of tensors, or the bytes of its tensors.

    The rest stays consistent.
    """
    size = struct.unpack("<Q", content[:8])[0]
    header = json.loads(content[8 : 8 + size])
    body = content[8 + size :]
    kind = draw.randrange(4)
    if kind == 0 and "__metadata__" in header:
        about = json.loads(header["__metadata__"].get("about", "{}"))
        header["__metadata__"]["about"] = as_json(
            draw.choice((mutated_tree(about, draw), value(draw)))
        ).decode()
    elif kind == 1:
        header = mutated_tree(header, draw)
    elif kind == 2:
        one = draw.choice([key for key in header if key != "__metadata__"] or [""])
        if one:
            header[draw.choice(NAMES)] = header.pop(one)
    else:
        changed = bytearray(body)
        for _ in range(draw.randint(1, 4) if changed else 0):
            place = 4 * draw.randrange(len(changed) // 4)
            changed[place : place + 4] = struct.pack(
                "<f", draw.choice((float("nan"), float("inf"), 1e38, 0.0, 3.0))
            )
        body = bytes(changed)
    text = as_json(header)
    return struct.pack("<Q", len(text)) + text + body


def mutated_parquet(content: bytes, draw: random.Random) -> bytes:
    """Change a column of a Parquet file: its type, its values, its name, or whether it is there."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    table = pq.read_table(io.BytesIO(content))
    for _ in range(draw.randint(1, 2)):
        if not table.num_columns:
            break
        place = draw.randrange(table.num_columns)
        number = table.num_rows
        name = table.column_names[place]
        kind = draw.randrange(7)
        if kind == 0:
            table = table.remove_column(place)
        elif kind == 1:
            names = [*table.column_names]
            names[place] = draw.choice([*NAMES, *names])
            table = table.rename_columns(names)
        elif kind == 2:
            table = table.slice(draw.randrange(number + 1), draw.randrange(number + 1))
        elif kind == 3:
            table = pa.concat_tables([table] * draw.randint(2, 4))
        else:
            made: list[Any] = draw.choice(
                (
                    [draw.choice((0, -1, 2**31 - 1, 7)) for _ in range(number)],
                    [draw.choice((2**40, 1)) for _ in range(number)],
                    [draw.choice((0.5, float("nan"))) for _ in range(number)],
                    [draw.choice(NAMES) for _ in range(number)],
                    [[f"e{draw.randrange(9)}"] * draw.randrange(3) for _ in range(number)],
                    [draw.choice((b"\xff\xfe", b"ok")) for _ in range(number)],
                    [None] * number,
                    [{"a": 1}] * number,
                )
            )
            table = table.set_column(place, name, pa.array(made))
    sink = io.BytesIO()
    pq.write_table(table, sink, compression=draw.choice(("zstd", "none", "gzip")))
    return sink.getvalue()


def mutated_file(name: str, content: bytes, draw: random.Random) -> bytes:
    """Change a file within the structure of its format, or byte by byte in one of four cases."""
    suffix = Path(name).suffix
    if draw.random() < 0.25 or suffix not in (
        ".json",
        ".toml",
        ".parquet",
        ".safetensors",
        ".jsonl",
    ):
        return mutated_bytes(content, draw)
    if suffix == ".json":
        return as_json(
            mutated_tree(json.loads(content), draw) if draw.random() < 0.9 else value(draw)
        )
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


def is_parsed(name: str, content: bytes) -> bool:
    """Whether the parser of a format accepts a file."""
    suffixes = Path(name).suffixes
    name = name.lower()
    try:
        for suffix, expand in (
            (".gz", gzip.decompress),
            (".xz", lzma.decompress),
            (".bz2", bz2.decompress),
        ):
            if name.endswith(suffix):
                content = expand(content)
                suffixes = suffixes[:-1]
        suffix = suffixes[-1] if suffixes else ""
        if suffix == ".toml":
            tomllib.loads(content.decode())
        elif suffix == ".json":
            json.loads(content)
        elif suffix == ".jsonl":
            [json.loads(line) for line in content.splitlines() if line.strip()]
        elif suffix == ".parquet":
            import pyarrow.parquet as pq

            pq.ParquetFile(io.BytesIO(content)).read()
        elif suffix == ".safetensors":
            from safetensors import deserialize

            deserialize(content)  # type: ignore[no-untyped-call]
        elif suffix == ".zip":
            zipfile.ZipFile(io.BytesIO(content)).testzip()
        elif suffix == ".tar":
            tarfile.TarFile(fileobj=io.BytesIO(content)).getmembers()
        elif suffix in (".nt", ".ttl"):
            import pyoxigraph as ox

            list(
                ox.parse(
                    content,
                    format=ox.RdfFormat.N_TRIPLES if suffix == ".nt" else ox.RdfFormat.TURTLE,
                )
            )
        elif suffix in (".tsv", ".csv", ".txt"):
            first = content.decode("utf-8-sig").lstrip("\r\n").splitlines()[0]
            return max(len(first.split(separator)) for separator in "\t,; ") >= 3
    except Exception:  # a parser may raise anything
        return False
    return True


# -- families of inputs ------------------------------------------------------


class Inputs:
    """Good files and folders, made once, and one function for each family of changed ones."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.good = home / "good"
        self.here = home / "here"
        self.families: list[Callable[[random.Random], Case]] = [
            *(
                self.text,
                self.text,
                self.jsonl,
                self.rdf,
                self.parquet,
                self.archive,
                self.recipe,
                self.space,
            ),
            *(
                self.run,
                self.run,
                self.run,
                self.checkpoint,
                self.index,
                self.index,
                self.beside,
                self.words,
            ),
        ]

    def make(self) -> None:
        """Make what commands read: a graph, runs, indexes and candidates."""
        import dualkg as kg
        from dualkg.inference.index_build import build_index, save_index

        self.good.mkdir(parents=True)
        draw = random.Random(0)
        lines = sorted({"\t".join(random_triple(draw)) for _ in range(400)})
        (self.good / "graph.tsv").write_text("".join(f"{line}\n" for line in lines))
        changes = {
            "data.graph": str(self.good / "graph.tsv"),
            "model.dim": 4,
            "training.epochs": 2,
            "training.batch_size": 64,
        }
        recipe = kg.Recipe().with_changes(
            {**changes, "regularizer.name": "DURA", "regularizer.weight": 0.05}
        )
        run = kg.train_recipe(recipe, out=self.good / "run")
        kg.calibrate(run)
        decision = {
            "head": "e1",
            "relation": "r1",
            "tail": "e2",
            "verdict": "accepted",
            "probability": 0.5,
        }
        (self.good / "run" / "decisions.jsonl").write_bytes(
            as_json({**decision, "decided_at": "2026-01-01T00:00:00Z"})
        )
        for kind in ("exact", "ivf", "hnsw", "sq8"):
            save_index(
                build_index(run.model, run.graph, kind=kind, recall=0.5),
                self.good / f"index-{kind}",
            )

        def stop(event: Any) -> None:
            if event.epoch == 2:
                raise KeyboardInterrupt

        with contextlib.suppress(KeyboardInterrupt):
            quick = recipe.with_changes({"training.checkpoint_seconds": 0.0, "training.epochs": 3})
            kg.train_recipe(quick, out=self.good / "stopped", on_progress=stop)
        candidates = []
        for head, relation, tail in run.graph.test.tolist():
            candidates.append(
                {
                    "head": run.graph.entities[head],
                    "relation": run.graph.relations[relation],
                    "tail": run.graph.entities[tail],
                    "tail_candidates": ["e1", "e2"],
                    "head_candidates": ["e3"],
                }
            )
        (self.good / "candidates.jsonl").write_bytes(b"\n".join(map(as_json, candidates)))

    def case(self, draw: random.Random) -> Case:
        shutil.rmtree(self.here, ignore_errors=True)
        self.here.mkdir()
        return draw.choice(self.families)(draw)

    def _data(self, family: str, name: str, content: bytes, draw: random.Random) -> Case:
        path = self.here / name
        path.write_bytes(content)
        words = ["inspect", str(path), "--json"]
        kind = draw.randrange(8)
        if kind == 0:
            small = ["--no-tune", "--epochs", "1", "--dim", "2", "--batch-size", "50"]
            words = ["train", str(path), *small, "--out", str(self.here / "out")]
        elif kind == 1:
            words = ["extend", str(self.good / "run"), str(path), "--out", str(self.here / "out")]
        elif kind == 2:
            words = ["inspect", str(self.good / "graph.tsv"), "--labels", str(path)]
        elif kind == 3:
            words += ["--columns", draw.choice(("1,2,3", "head,relation,tail", "3,1,2", "1,2,99"))]
        return Case(family, words, is_parsed(name, content))

    def text(self, draw: random.Random) -> Case:
        """TSV, CSV and lines separated by spaces.

        They have a header, a byte-order mark or Windows line ends, or not.
        """
        separator, suffix = draw.choice(
            (("\t", ".tsv"), (",", ".csv"), (";", ".csv"), (" ", ".txt"))
        )
        lines = rows(draw)
        if draw.random() < 0.3:
            lines.insert(0, ["head", "relation", "tail"])
        if suffix == ".csv" and draw.random() < 0.5:
            lines = [[f'"{cell}"' for cell in row] for row in lines]
        content = (
            draw.choice(("\n", "\n", "\r\n"))
            .join(map(separator.join, lines))
            .encode("utf-8", "replace")
        )
        content = draw.choice((b"", b"", b"\xef\xbb\xbf", b"\xff\xfe")) + content
        if draw.random() < 0.4:
            content = mutated_bytes(content, draw)
        return self._data("CSV" if suffix == ".csv" else "TSV", f"mine{suffix}", content, draw)

    def jsonl(self, draw: random.Random) -> Case:
        lines: list[Any] = [
            dict(zip(("head", "relation", "tail"), row, strict=False)) for row in rows(draw)
        ]
        lines = draw.choice((lines, [list(line.values()) for line in lines]))
        for _ in range(draw.randrange(3)):
            place = draw.randrange(len(lines))
            lines[place] = draw.choice((mutated_tree(lines[place], draw), value(draw)))
        name = draw.choice(("mine.jsonl", "mine.json"))
        content = as_json(lines) if name == "mine.json" else b"\n".join(map(as_json, lines))
        return self._data(
            "JSONL", name, mutated_bytes(content, draw) if draw.random() < 0.4 else content, draw
        )

    def rdf(self, draw: random.Random) -> Case:
        terms = [
            '"text"',
            '"text"@en',
            "_:b",
            "<http://x.org/é>",
            "<http://x.org/%zz>",
            "<<<s> <p> <o>>>",
            '"1"^^<int>',
            "<>",
        ]

        def term(name: str) -> str:
            if draw.random() < 0.02:
                return draw.choice(terms)
            return f"<http://x.org/{name[:50].encode().hex()}>"

        lines = [" ".join([*map(term, row), "."]) for row in rows(draw)]
        content = "\n".join(lines).encode("utf-8", "replace")
        if draw.random() < 0.4:
            content = mutated_bytes(content, draw)
        return self._data(
            "RDF", draw.choice(("mine.nt", "mine.ttl", "mine.nq", "mine.trig")), content, draw
        )

    def parquet(self, draw: random.Random) -> Case:
        import pyarrow as pa
        import pyarrow.parquet as pq

        sink = io.BytesIO()
        columns = zip(*([*row, "", "", ""][:3] for row in rows(draw)), strict=True)
        pq.write_table(
            pa.table(dict(zip(("head", "relation", "tail"), map(list, columns), strict=True))), sink
        )
        content = mutated_file("mine.parquet", sink.getvalue(), draw)
        name, expand = draw.choice(
            (
                (".parquet", bytes),
                (".parquet", bytes),
                (".parquet.gz", gzip.compress),
                (".parquet.xz", lzma.compress),
            )
        )
        content = expand(content)
        if name != ".parquet" and draw.random() < 0.4:
            content = mutated_bytes(content, draw)
        return self._data("Parquet", f"mine{name}", content, draw)

    def archive(self, draw: random.Random) -> Case:
        """Archives of mutated files, mutated archives, and files that expand to a large size."""
        text = "\n".join(map("\t".join, rows(draw))).encode("utf-8", "replace")
        expands = draw.random() < 0.05
        names = draw.choice(
            (
                ["mine.tsv"],
                ["train.tsv", "valid.tsv", "test.tsv"],
                ["x/train.txt", "x/valid.txt", "x/test.txt", "readme"],
            )
        )
        if draw.random() < 0.1:
            names = [
                draw.choice(
                    [
                        "../../up.tsv",
                        "/etc/x.tsv",
                        "a\0b.tsv",
                        "y" * 200 + ".tsv",
                        "",
                        ".tsv",
                        "..",
                        "C:\\x.tsv",
                    ]
                )
            ]
        suffix, expand = draw.choice(
            (
                (".zip", bytes),
                (".tar", bytes),
                (".tar.gz", gzip.compress),
                (".tar.xz", lzma.compress),
                (".tsv.gz", gzip.compress),
                (".tsv.bz2", bz2.compress),
            )
        )
        if expands and suffix != ".tar":
            text = draw.choice((b"a\tr\tb\n", b"aaaaaa", b"[[[[[[", bytes(6))) * (3 << 20)
        sink = io.BytesIO()
        if suffix == ".zip":
            with zipfile.ZipFile(sink, "w", zipfile.ZIP_DEFLATED) as archive:
                for name in names:
                    archive.writestr(name or "x", text)
        elif suffix.startswith(".tar"):
            kind = draw.choice((tarfile.PAX_FORMAT, tarfile.GNU_FORMAT, tarfile.USTAR_FORMAT))
            with (
                tarfile.open(fileobj=sink, mode="w", format=kind) as tar,
                contextlib.suppress(ValueError),
            ):
                for name in names:
                    member = tarfile.TarInfo(name)
                    member.size = len(text)
                    if draw.random() < 0.2:
                        member.type = draw.choice((b"S", b"2", b"x", b"L", b"5", b"g"))
                    if draw.random() < 0.2 and kind == tarfile.PAX_FORMAT:
                        keys = draw.choice(
                            (
                                "GNU.sparse.map",
                                "GNU.sparse.size",
                                "GNU.sparse.major",
                                "size",
                                "path",
                                "mtime",
                            )
                        )
                        member.pax_headers = {keys: str(value(draw, 0)), "GNU.sparse.minor": "0"}
                    tar.addfile(member, io.BytesIO(text))
        else:
            sink.write(text)
        content = expand(sink.getvalue())
        if draw.random() < 0.5:
            content = mutated_bytes(content, draw)
        return self._data("archives", f"mine{suffix}", content, draw)

    def recipe(self, draw: random.Random) -> Case:
        import dualkg as kg

        content = mutated_file(
            "x.toml", kg.load_recipe(self.good / "run" / "recipe.toml").as_toml().encode(), draw
        )
        (self.here / "mine.toml").write_bytes(content)
        small = ["--epochs", "1", "--dim", "2", "--set", f"data.graph={self.good / 'graph.tsv'}"]
        words = ["train", str(self.here / "mine.toml"), *small, "--out", str(self.here / "out")]
        return Case("TOML", words, is_parsed("mine.toml", content))

    def space(self, draw: random.Random) -> Case:
        tree = {
            "recipe": str(self.good / "run" / "recipe.toml"),
            "search": {"method": "tpe", "trials": 1, "seed": 0, "prune": False},
            "space": {
                "model.dim": [2, 4],
                "regularizer.weight": {"low": 0.01, "high": 0.1, "log": True},
            },
        }
        if draw.random() < 0.75:
            content = as_toml(mutated_tree(tree, draw))
        else:
            content = mutated_bytes(as_toml(tree), draw)
        path = self.here / "space.toml"
        path.write_bytes(content)
        return Case("TOML", ["LOAD_SPACE", str(path)], is_parsed("space.toml", content))

    def _change_in(self, folder: Path, draw: random.Random, *, but: str = "") -> bool:
        """Change one file of a folder, and in half of the cases its checksums.

        Returns whether the parser of the file accepts it.
        """
        files = [file for file in folder.rglob("*") if file.is_file() and file.name != but]
        path = draw.choice(sorted(files))
        content = path.read_bytes()
        kind = draw.randrange(20)
        if kind < 3:
            path.unlink()
            if kind == 1:
                path.mkdir()
            elif kind == 2:
                path.symlink_to(path)
            return False
        made = b"" if kind == 3 else mutated_file(path.name, content, draw)
        if draw.random() < 0.6:
            name = path.relative_to(folder).as_posix()
            report = folder / "report.json"
            if path.suffix == ".json" and b'"sha256"' in content:
                made = with_checksum(made)
            if path != report and report.is_file():
                tree = json.loads(report.read_bytes())
                if name in tree["files"]:
                    tree["files"][name] = {
                        "bytes": len(made),
                        "sha256": hashlib.sha256(made).hexdigest(),
                    }
                    report.write_bytes(with_checksum(as_json(tree)))
        path.write_bytes(made)
        return is_parsed(path.name, made)

    def run(self, draw: random.Random) -> Case:
        folder = self.here / "run"
        shutil.copytree(self.good / "run", folder)
        parsed = self._change_in(folder, draw)
        query = ["--head", "e1", "--relation", "r1"]
        out = ["--out", str(self.here / "out")]
        words = draw.choice(
            (
                ["predict", "RUN", *query],
                ["predict", "RUN", *query, "--coverage", "0.9"],
                ["similar", "RUN", "e1"],
                ["explain", "RUN", *query, "--tail", "e2"],
                ["evaluate", "RUN", "--json", "--by", "cardinality"],
                ["evaluate", "RUN", "--type-constrained"],
                ["compare", "RUN", str(self.good / "run"), "--by", "relation"],
                ["calibrate", "RUN"],
                ["complete", "RUN", "--top", "5"],
                ["export", "RUN", *out, "--format", "tsv"],
                ["extend", "RUN", str(self.good / "graph.tsv"), *out],
                ["ensemble", "RUN", str(self.good / "run"), *out],
                ["sparsify", "RUN", "--share", "0.5", *out],
                ["nuclear-norm", "RUN"],
                ["check", "RUN"],
                [
                    "serve",
                    "RUN",
                    "--get",
                    draw.choice(
                        (
                            "/",
                            "/run",
                            "/api/runs",
                            "/api/decisions",
                            "/api/tails?head=e1&relation=r1",
                        )
                    ),
                ],
            )
        )
        return Case(
            "run folders", [str(folder) if word == "RUN" else word for word in words], parsed
        )

    def checkpoint(self, draw: random.Random) -> Case:
        from dualkg.training.checkpoint import load_tensors, save_tensors

        folder = self.here / "stopped"
        shutil.copytree(self.good / "stopped", folder)
        path = folder / "checkpoint.safetensors"
        if draw.random() < 0.3:
            return Case(
                "checkpoints",
                ["resume", str(folder)],
                self._change_in(folder, draw, but="recipe.toml"),
            )
        if draw.random() < 0.3:
            groups, about = load_tensors(path)
            save_tensors(groups, path, about=mutated_tree(about, draw))  # with its checksum
        else:
            path.write_bytes(mutated_file(path.name, path.read_bytes(), draw))
        return Case("checkpoints", ["resume", str(folder)], is_parsed(path.name, path.read_bytes()))

    def index(self, draw: random.Random) -> Case:
        folder = self.here / "index"
        shutil.copytree(self.good / f"index-{draw.choice(('exact', 'ivf', 'hnsw', 'sq8'))}", folder)
        parsed = self._change_in(folder, draw)
        query = ["--head", "e1", "--relation", "r1", "--index", str(folder)]
        return Case("indexes", ["predict", str(self.good / "run"), *query], parsed)

    def beside(self, draw: random.Random) -> Case:
        """Files that a command reads beside a run: queries, candidates, false triples."""
        run = str(self.good / "run")
        kind = draw.randrange(3)
        if kind == 0:
            content = mutated_file("x.jsonl", (self.good / "candidates.jsonl").read_bytes(), draw)
            (self.here / "candidates.jsonl").write_bytes(content)
            words = ["evaluate", run, "--candidates", str(self.here / "candidates.jsonl")]
            return Case("JSONL", words, is_parsed("candidates.jsonl", content))
        content = "\n".join(map("\t".join, rows(draw))).encode("utf-8", "replace")
        content = content.replace(b"\tr1\t", b"\t?\t") if kind == 1 else content
        content = mutated_bytes(content, draw) if draw.random() < 0.4 else content
        (self.here / "mine.tsv").write_bytes(content)
        words = ["evaluate", run, "--task", "classification", "--negatives"]
        if kind == 1:
            words = ["predict", run, "--queries"]
        return Case("TSV", [*words, str(self.here / "mine.tsv")], is_parsed("mine.tsv", content))

    def words(self, draw: random.Random) -> Case:
        """Arguments of any kind: names, numbers, paths."""
        odd = [
            *(name for name in NAMES if "\0" not in name),
            "~nobody/x",
            "/dev/null",
            str(self.good),
            "y" * 5000,
            "1e999",
            "-",
            "a/../b",
            "//",
        ]
        run = str(self.good / "run")
        one = draw.choice(odd)
        other = draw.choice(odd)
        words = draw.choice(
            (
                ["predict", run, f"--head={one}", f"--relation={other}"],
                ["predict", one, f"--head={other}", "--relation=r1"],
                [
                    "train",
                    one,
                    "--no-tune",
                    "--epochs=1",
                    "--dim=2",
                    "--out",
                    str(self.here / "out"),
                ],
                ["inspect", one, f"--split={other}"],
                [
                    "inspect",
                    str(self.good / "graph.tsv"),
                    f"--columns={one}",
                    f"--delimiter={other}",
                ],
                ["inspect", str(self.good / "graph.tsv"), f"--max-size={one}"],
                ["evaluate", run, f"--hits={one}"],
                [
                    "train",
                    str(self.good / "graph.tsv"),
                    f"--set={one}={other}",
                    "--no-tune",
                    "--epochs=1",
                ],
                [
                    "train",
                    str(self.good / "graph.tsv"),
                    f"--set=training.seed={one}",
                    "--no-tune",
                    "--epochs=1",
                    "--dim=2",
                    "--out",
                    str(self.here / "out"),
                ],
                ["complete", run, f"--relation={one}", f"--min-probability={draw.choice(NUMBERS)}"],
                ["similar", run, f" {one}"],
                [
                    "sparsify",
                    run,
                    f"--share={draw.choice(NUMBERS)}",
                    "--out",
                    str(self.here / "out"),
                ],
                ["export", run, f"--out={self.here / 'deep' / one[:200].replace('/', '_')}"],
                ["serve", run, f"--get=/{one}"],
            )
        )
        return Case("words", words, False)


# -- running -----------------------------------------------------------------


def run_command(words: list[str]) -> tuple[object, str]:
    """Run a command in this process; return its exit status and its output.

    After an exception, its place is returned instead of a status.
    """
    from dualkg.cli import common
    from dualkg.cli.main import main

    out = io.StringIO()
    common.stdout.file = common.stderr.file = out
    sys.argv = ["dualkg", *words]
    code: object = 0
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
            main()
    except SystemExit as end:
        code = end.code or 0
    except BaseException as error:
        # Such an error is what the campaign looks for.
        place = ""
        for frame in traceback.extract_tb(error.__traceback__):
            if "dualkg" in frame.filename:
                place = f"{Path(frame.filename).name}:{frame.lineno}"
        code = f"{type(error).__name__} at {place}: {str(error)[:200]}"
    return code, out.getvalue()


def run_case(case: Case) -> str | None:
    """Run a case in this process; return what is wrong with how it ended."""
    if case.words[0] == "LOAD_SPACE":
        from dualkg.errors import DualkgError
        from dualkg.tuning import load_space

        try:
            load_space(case.words[1])
        except DualkgError as error:
            num_characters = len(str(error))
            if num_characters > MAX_MESSAGE:
                return f"a message of {num_characters:,} characters"
        except Exception as error:
            return f"{type(error).__name__}: {str(error)[:200]}"
        return None
    code, text = run_command(case.words)
    if code not in (0, 1, 2):
        return str(code)
    if TRACEBACK in text:
        last_traceback = text[text.rindex(TRACEBACK) :]
        error_line = re.search(r"(\w+(?:Error|Exception)): [^\n\\]{0,150}", last_traceback)
        details = error_line[0] if error_line else text[-200:]
        return f"a traceback in the output: {details}"
    if code and len(text) > MAX_MESSAGE:
        return f"a message of {len(text):,} characters"
    return None


def peak_mib(*, reset: bool = False) -> int:
    """The largest memory of this process since the last reset."""
    if reset:
        with contextlib.suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")
    found = re.search(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())
    return int(found[1]) >> 10 if found else 0


def worker(pipe: Connection, home: str, seed: int) -> None:
    """Run the cases whose numbers arrive.

    Answers are the family, the words and whether the input was parsed; then the peak memory and
    what is wrong.
    """
    os.environ |= {"DUALKG_CACHE": str(Path(home) / "cache"), "COLUMNS": "120", **ON_CPU}
    os.environ.pop("DUALKG_DATA", None)
    # Libraries write to stderr.
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    import torch

    torch.set_num_threads(1)
    inputs = Inputs(Path(home))
    if not inputs.good.exists():
        inputs.make()
    os.chdir(home)
    pipe.send("ready")
    while (number := pipe.recv()) is not None:
        case = inputs.case(random.Random(f"{seed}-{number}"))
        pipe.send((case.family, case.words, case.parsed))
        peak_mib(reset=True)
        problem = run_case(case)
        pipe.send((peak_mib(), problem))


class Worker:
    """A worker process, started again when it crashed or was ended."""

    def __init__(self, home: str, seed: int) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=worker, args=(theirs, home, seed), daemon=True)
        self.process.start()
        theirs.close()
        if not self.pipe.poll(300) or self.pipe.recv() != "ready":
            raise RuntimeError("the worker did not start")

    def run(self, number: int) -> tuple[Case, int, float, str | None]:
        """A case, its peak memory, its seconds, and what is wrong."""
        case = Case("?", [], False)
        try:
            self.pipe.send(number)
            case = Case(*self.pipe.recv())
            started = time.monotonic()
            if not self.pipe.poll(MAX_SECONDS):
                return case, 0, MAX_SECONDS, f"longer than {MAX_SECONDS:g} seconds"
            peak, problem = self.pipe.recv()
            seconds = time.monotonic() - started
        except EOFError:
            self.process.join()
            return case, 0, 0.0, f"the process ended with status {self.process.exitcode}"
        if peak > MAX_MIB:
            problem = problem or f"{peak:,} MiB of memory"
        return case, peak, seconds, problem

    def end(self) -> None:
        self.process.kill()
        self.process.join()


def campaign(*, minutes: float, seed: int, first: int = 0) -> dict[str, Any]:
    """Run inputs `first`, `first` + 1, … of a seed for some minutes."""
    counts = Counter[str]()
    parsed = Counter[str]()
    seconds_of = Counter[str]()
    failures = list[dict[str, Any]]()
    most_mib = 0
    longest = 0.0
    number = first
    kinds = Counter[str]()
    ends = time.monotonic() + 60 * minutes
    with tempfile.TemporaryDirectory(prefix="dualkg-inputs-") as home:
        process = Worker(home, seed)
        try:
            while time.monotonic() < ends:
                case, peak, seconds, problem = process.run(number)
                counts[case.family] += 1
                parsed[case.family] += case.parsed
                seconds_of[" ".join(case.words[:1])] += seconds  # type: ignore[assignment]
                most_mib = max(most_mib, peak)
                longest = max(longest, seconds)
                if problem:
                    kinds[re.sub(r"\d+", "#", problem)[:120]] += 1
                    if len(failures) < MAX_FAILURES:
                        command = " ".join(word[:100] for word in case.words).replace(home, "HOME")
                        failures.append({"number": number, "command": command, "problem": problem})
                    if "seconds" in problem or "process" in problem or "memory" in problem:
                        process.end()
                        process = Worker(home, seed)
                number += 1
        finally:
            process.end()
    by_family = {}
    for family in sorted(counts):
        by_family[family] = {
            "inputs": counts[family],
            "past_the_first_parser": parsed[family],
        }
    total = counts.total()
    return {
        "inputs": total,
        "first": first,
        "past_the_first_parser": parsed.total(),
        "share_past_the_first_parser": round(parsed.total() / max(1, total), 3),
        "by_family": by_family,
        "most_mib": most_mib,
        "longest_seconds": round(longest, 2),
        "failed": sum(kinds.values()),
        "problems": dict(kinds.most_common()),
        "seconds": {name: round(seconds, 1) for name, seconds in seconds_of.most_common()},
        "failures": failures,
    }


def main() -> None:
    """Run inputs of a seed for some minutes from the number `--first`, or `--only` one input."""
    import argparse

    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--only", type=int)
    given = parser.parse_args()
    if given.only is None:
        figures = campaign(minutes=given.minutes, seed=given.seed, first=given.first)
        print(json.dumps(figures, indent=1))
        return
    with tempfile.TemporaryDirectory(prefix="dualkg-inputs-") as home:
        inputs = Inputs(Path(home))
        inputs.make()
        case = inputs.case(random.Random(f"{given.seed}-{given.only}"))
        print(case)
        shutil.copytree(home, f"/tmp/dualkg-input-{given.only}", dirs_exist_ok=True, symlinks=True)
        print(run_case(case))


if __name__ == "__main__":
    main()
