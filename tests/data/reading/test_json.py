"""JSON lines: the keys of triples, arrays, and errors that name the line."""

from collections.abc import Callable
from pathlib import Path

import pytest

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
