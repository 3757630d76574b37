"""JSON lines: the keys of triples, arrays, and errors that name the line."""

from collections.abc import Callable
from pathlib import Path

import pytest

from dualkg.errors import RequestError

Write = Callable[[str, bytes], Path]
ABC = [("a", "r", "b"), ("c", "7", "d")]


@pytest.mark.parametrize(
    ("content", "columns"),
    [
        (
            b'{"id": 1, "head": "a", "relation": "r", "tail": "b"}\n\n'
            b'{"tail": "d", "relation": 7, "head": "c"}',
            None,
        ),
        (
            b'\xef\xbb\xbf{"x": "a", "y": "r", "z": "b", "w": null}\r\n'
            b'{"x": "c", "y": 7, "z": " d"}\r\n',
            ("x", "y", "z"),
        ),
        (b'["a", "r", "b"]\n["c", 7, "d"]\n', None),
        (b'["b", "r", "a"]\n["d", 7, "c"]\n', (3, 2, 1)),
    ],
)
def test_keys_and_positions(kit, write: Write, content: bytes, columns: object) -> None:
    read = kit.read(write("mine.jsonl", content), columns, block_rows=1)
    assert kit.named(read) == ABC


def test_three_unknown_keys_are_taken_in_order_and_reported(kit, write: Write) -> None:
    path = write(
        "mine.jsonl",
        b'{"von": "a", "kante": "r", "nach": "b"}\n{"nach": "d", "kante": "7", "von": "c"}\n',
    )
    read = kit.read(path)
    assert kit.named(read) == ABC
    expected = f"{path}: head, relation and tail are its keys von, kante, nach."
    assert read.notes == [expected]


def test_a_json_array_of_objects(kit, write: Write) -> None:
    content = b'[{"s": "a", "p": "r", "o": "b"},\n {"s": "c", "p": 7, "o": "d"}]'
    assert kit.named(kit.read(write("mine.json", content))) == ABC


@pytest.mark.parametrize(
    ("content", "columns", "sentence"),
    [
        (
            b'{"h": "a", "r": "r", "t": "b"}\nnot json\n',
            None,
            ", line 2: this is not JSON (Expecting value: line 1 column",
        ),
        (
            b'{"h": "a", "r": "r", "t": "b"}\n{"h": "a"}\n',
            None,
            ", line 2: expected the keys 'h', 'r', 't', found {'h': 'a'}.",
        ),
        (
            b'{"h": "a", "r": "r", "t": null}\n',
            None,
            ", line 1: the tail should be text or a whole number, and it is None.",
        ),
        (
            b'{"h": "a", "r": true, "t": "b"}\n',
            None,
            ", line 1: the relation should be text or a whole number, and it is True.",
        ),
        (
            b'{"h": "a", "r": "r", "t": "\xff"}\n',
            None,
            ", line 1: this is not valid UTF-8. Save the file as UTF-8.",
        ),
        (
            b'{"h": "", "r": "r", "t": "b"}\n',
            None,
            ", line 1: the head is empty. Give it a name, or remove the row.",
        ),
        (
            b'{"x": 1, "y": 2, "z": 3, "w": 4}\n',
            None,
            " should have three keys, or some named head, relation and tail; its keys",
        ),
        (
            b'{"x": 1, "y": 2, "z": 3}\n',
            ("x", "y", "zz"),
            " has no column named 'zz'. Its columns are 'x', 'y', 'z'.",
        ),
        (
            b'{"x": 1, "y": 2, "z": 3}\n',
            (1, 2, 3),
            " has rows with keys. Choose columns by their names, not by number.",
        ),
        (
            b'["a", "r"]\n',
            None,
            ", line 1: expected head, relation and tail, found ['a', 'r']. Correct the row, or "
            "remove it.",
        ),
        (b'"a"\n', None, ", line 1: expected head, relation and tail, found 'a'."),
        (b"\n", None, " holds no triples; at least one is expected."),
    ],
)
def test_bad_lines_are_errors(
    kit, write: Write, content: bytes, columns: object, sentence: str
) -> None:
    path = write("m.jsonl", content)
    with pytest.raises(RequestError) as caught:
        kit.read(path, columns)
    assert str(caught.value).startswith(f"{path}{sentence}")
