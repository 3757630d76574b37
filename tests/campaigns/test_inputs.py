"""Changed inputs: a command that reads them ends in a sentence, never in a traceback or a crash."""

import gzip
import io
import json
import lzma
import random
import shutil
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dualkg.errors import MAX_SENTENCE
from tests.campaigns.arena import CPU

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

NUM_INPUTS = 150  # of each seed
TRIPLES = [(f"e{number % 20}", f"r{number % 3}", f"e{number * 7 % 19}") for number in range(60)]
ODD_NAMES = ["", "é", "日本", "\u202egnp", "=1+1", "x" * 3000, "\0", '"', "a b", "<b>", "NaN"]
ODD_VALUES = [0, -1, 2**63, 1e308, float("nan"), "", None, [], {}, [[[[]]]], "x" * 5000, True]
QUERY = ("--head", "thing1", "--relation", "colour")


def changed_bytes(content: bytes, draw: random.Random) -> bytes:
    """Bytes that are flipped, removed, repeated, added or cut off at up to three places."""
    changed = bytearray(content)
    for _ in range(draw.randint(1, 3)):
        place = draw.randrange(len(changed) + 1)
        length = draw.choice((1, 4, 64))
        kind = draw.randrange(5)
        if kind == 0 and changed:
            changed[place - 1] ^= 1 << draw.randrange(8)
        elif kind == 1:
            del changed[place : place + length]
        elif kind == 2:
            changed[place:place] = changed[place : place + length]
        elif kind == 3:
            changed[place:place] = draw.choice((b"\0", b"\xff", b"9", b"[", b"\n")) * length
        else:
            del changed[place:]
    return bytes(changed)


def changed_tree(tree: object, draw: random.Random) -> object:
    """A value somewhere in nested tables and lists that is another one, removed or renamed."""
    tree = json.loads(json.dumps(tree))
    here = tree
    while isinstance(here, (dict, list)) and here:
        key = draw.choice(list(here) if isinstance(here, dict) else range(len(here)))
        if isinstance(here[key], (dict, list)) and here[key] and draw.random() < 0.8:
            here = here[key]
            continue
        if draw.random() < 0.3:
            del here[key]
        else:
            here[key] = draw.choice([*ODD_VALUES, *ODD_NAMES])
        break
    return tree


def changed_rows(draw: random.Random) -> list[list[str]]:
    """Triples of which some have another name, or another number of columns."""
    rows = [list(triple) for triple in TRIPLES]
    for _ in range(draw.randrange(4)):
        row = draw.choice(rows)
        if draw.random() < 0.7 and row:
            row[draw.randrange(len(row))] = draw.choice(ODD_NAMES)
        else:
            row[draw.randrange(len(row) + 1) :] = draw.choice(([], ["more", "and more"]))
    return rows


# -- one file of each kind ---------------------------------------------------


def text_file(draw: random.Random) -> tuple[str, bytes]:
    suffix, separator = draw.choice(((".tsv", "\t"), (".csv", ","), (".txt", " ")))
    lines = [separator.join(row) for row in changed_rows(draw)]
    content = draw.choice(("\n", "\r\n")).join(lines).encode("utf-8", "replace")
    return f"mine{suffix}", draw.choice((b"", b"\xef\xbb\xbf", b"\xff\xfe")) + content


def json_lines(draw: random.Random) -> tuple[str, bytes]:
    rows = [dict(zip(("head", "relation", "tail"), row, strict=False)) for row in TRIPLES]
    lines = [json.dumps(changed_tree(row, draw) if draw.random() < 0.1 else row) for row in rows]
    return "mine.jsonl", "\n".join(lines).encode()


def parquet_file(draw: random.Random) -> tuple[str, bytes]:
    columns = [list(column) for column in zip(*TRIPLES, strict=True)]
    names = draw.choice((("head", "relation", "tail"), ("a", "b", "c"), ("head", "tail", "x")))
    sink = io.BytesIO()
    pq.write_table(pa.table(dict(zip(names, columns, strict=True))), sink)
    return "mine.parquet", sink.getvalue()


def rdf_file(draw: random.Random) -> tuple[str, bytes]:
    lines = []
    for row in changed_rows(draw):
        terms = [f"<http://example.org/{name}>" for name in row]
        if draw.random() < 0.05:
            terms[-1:] = draw.choice((['"a text"@en'], ["_:b0"], ["<"], ['"5"^^<x>']))
        lines.append(" ".join([*terms, "."]))
    return draw.choice(("mine.nt", "mine.ttl")), "\n".join(lines).encode("utf-8", "replace")


def archive(draw: random.Random) -> tuple[str, bytes]:
    content = "\n".join("\t".join(row) for row in changed_rows(draw)).encode("utf-8", "replace")
    if draw.random() < 0.1:
        content = b"a\tb\tc\n" * (4 << 20)  # expands to 24 MiB, from some hundredth of that
    kind = draw.randrange(4)
    if kind == 0:
        return "mine.tsv.gz", gzip.compress(content)
    if kind == 1:
        return "mine.tsv.xz", lzma.compress(content)
    name = draw.choice(("train.txt", "../train.txt", "/train.txt", "a/b/train.txt", "x"))
    sink = io.BytesIO()
    if kind == 2:
        with zipfile.ZipFile(sink, "w", zipfile.ZIP_DEFLATED) as zipped:
            zipped.writestr(name, content)
        return "mine.zip", sink.getvalue()
    with tarfile.open(fileobj=sink, mode="w:gz") as tar:
        member = tarfile.TarInfo(name)
        member.size = len(content)
        if draw.random() < 0.2:
            member.type = draw.choice((tarfile.SYMTYPE, tarfile.DIRTYPE, tarfile.CHRTYPE))
        tar.addfile(member, io.BytesIO(content))
    return "mine.tar.gz", sink.getvalue()


GRAPH_FILES = (text_file, json_lines, parquet_file, rdf_file, archive)


# -- cases -------------------------------------------------------------------


def graph_case(here: Path, draw: random.Random) -> list[str]:
    """A command that reads a file of triples."""
    name, content = draw.choice(GRAPH_FILES)(draw)
    if draw.random() < 0.5:
        content = changed_bytes(content, draw)
    (here / name).write_bytes(content)
    train = ["train", name, "--no-tune", "--epochs", "1", "--dim", "2", "--out", "new"]
    return draw.choice((["inspect", name], train, ["extend", "run", name, "--out", "new"]))


def run_case(here: Path, draw: random.Random) -> list[str]:
    """A command that reads a run with a changed file."""
    folder = draw.choice(("run", "run", "stopped"))
    path = draw.choice(sorted(path for path in (here / folder).rglob("*") if path.is_file()))
    content = path.read_bytes()
    if path.suffix == ".json" and draw.random() < 0.5:
        path.write_text(json.dumps(changed_tree(json.loads(content), draw)))
    elif draw.random() < 0.1:
        path.unlink()
    else:
        path.write_bytes(changed_bytes(content, draw))
    if folder == "stopped":
        return ["resume", "stopped"]
    commands = (
        ["predict", "run", *QUERY],
        ["explain", "run", *QUERY, "--tail", "colour1"],
        ["evaluate", "run"],
        ["calibrate", "run", "--overwrite"],
        ["complete", "run", "--top", "5"],
        ["export", "run", "--out", "new"],
        ["check", "run"],
    )
    return draw.choice(commands)


def argument_case(here: Path, draw: random.Random) -> list[str]:
    """A command with arguments of any kind."""
    words = [name for name in ODD_NAMES if "\0" not in name] + ["-1", "1e999", "a/../b", "//"]
    word = draw.choice(words)
    commands = (
        ["predict", "run", f"--head={word}", "--relation=colour"],
        ["predict", word, *QUERY],
        ["train", word, "--no-tune", "--epochs=1"],
        ["train", "mine.tsv", f"--set={word}={word}", "--no-tune"],
        ["train", "mine.tsv", f"--set=training.seed={word}", "--no-tune", "--out=new"],
        ["inspect", "mine.tsv", f"--columns={word}"],
        ["inspect", "mine.tsv", f"--split={word}"],
        ["complete", "run", f"--relation={word}", f"--top={word}"],
        ["export", "run", f"--out={word}"],
    )
    return draw.choice(commands)


CASES = (graph_case, graph_case, run_case, argument_case)


@pytest.mark.parametrize("seed", range(8))
def test_a_changed_input_ends_in_a_sentence(
    seed: int, good: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run_cli: Callable
):
    draw = random.Random(seed)
    for number in range(NUM_INPUTS):
        here = tmp_path / str(number)
        shutil.copytree(good, here)
        monkeypatch.chdir(here)
        words = draw.choice(CASES)(here, draw)
        threads = CPU if words[0] in ("train", "resume") else ()
        result = run_cli(*words, *map(str, threads))  # an exception is a failure, too
        assert result.code in (0, 1, 2), words
        assert "Traceback" not in result.err, words
        assert result.code == 0 or len(result.err) < 2 * MAX_SENTENCE, words
        shutil.rmtree(here)
