"""Parquet: columns by name, number or position, and bad rows by their number."""

from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dualkg.errors import DataError

Table = Callable[[dict[str, object]], Path]


@pytest.fixture
def table(tmp_path: Path) -> Table:
    def written(columns: dict[str, object]) -> Path:
        pq.write_table(pa.table(columns), tmp_path / "mine.parquet")
        return tmp_path / "mine.parquet"

    return written


def test_recognised_columns_in_any_order(kit, table: Table) -> None:
    path = table({"object": ["b"], "year": [1.5], "Subject": ["a"], "predicate": ["r"]})
    assert kit.named(kit.read(path)) == [("a", "r", "b")]


@pytest.mark.parametrize("columns", [("from", "link", "to"), (4, 2, 1), ("from", 2, "to")])
def test_columns_by_name_and_number(kit, table: Table, columns: tuple[str | int, ...]) -> None:
    path = table({"to": ["b"], "link": ["r"], "year": [None], "from": ["a"]})
    assert kit.named(kit.read(path, columns)) == [("a", "r", "b")]


@pytest.mark.parametrize(
    "kind",
    [
        pa.int64(),
        pa.uint8(),
        pa.string(),
        pa.large_string(),
        pa.string_view(),
        pa.binary(),
        pa.dictionary(pa.int8(), pa.string()),
        pa.dictionary(pa.int32(), pa.int64()),
    ],
)
def test_columns_of_every_text_and_integer_type(kit, table: Table, kind: pa.DataType) -> None:
    heads = pa.array(["7", "7", "12"]).cast(
        kind.value_type if pa.types.is_dictionary(kind) else kind
    )
    if pa.types.is_dictionary(kind):
        heads = heads.dictionary_encode().cast(kind)
    path = table({"head": heads, "relation": ["r", "r", "r"], "tail": ["12", "x", "7"]})
    read = kit.read(path)
    assert kit.named(read) == [("7", "r", "12"), ("7", "r", "x"), ("12", "r", "7")]
    assert read.entities.to_pylist() == ["7", "12", "x"]


def invalid(*values: bytes) -> pa.Array:
    return pa.array(values, pa.binary()).view(pa.string())


@pytest.mark.parametrize(
    ("tails", "expected"),
    [
        (["a", None, "b"], "row 2: the tail is missing."),
        (["a", "b", ""], "row 3: the tail is empty."),
        (invalid(b"a", b"\xff", b"b"), "row 2: the tail is not valid UTF-8."),
        (pa.array([b"a", b"b", b"\xff"]), "row 3: the tail is not valid UTF-8."),
    ],
)
@pytest.mark.parametrize("num_rows", [1, 2, 100])
def test_a_bad_row_is_named(kit, table: Table, tails: object, expected: str, num_rows: int) -> None:
    path = table({"head": ["x"] * 3, "relation": ["r"] * 3, "tail": tails})
    with pytest.raises(DataError) as caught:
        kit.read(path, block_rows=num_rows)
    assert str(caught.value) == f"{path}, {expected} Give it a name, or remove the row."
