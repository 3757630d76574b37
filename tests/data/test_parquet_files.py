"""Parquet and Arrow files whose few bytes stand for gigabytes."""

import io
import random
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from benchmarks.torture.mutations import expanding_parquet, with_smaller_sums
from hypothesis import given
from hypothesis import strategies as st

import dualkg as kg
from dualkg.data.errors import ExpandsTooMuch, UnusableData
from dualkg.data.formats import parquet
from dualkg.data.graph import load_saved_graph, save_graph
from dualkg.data.parquet_files import DELTA_BYTE_ARRAY, content_of, read_parquet
from tests.conftest import graph_of
from tests.processes import run_python
from tests.raising import refused

COLUMNS = ["head", "relation", "tail"]
LONG = "x" * 100_000
NUM_ROWS = 100_000  # of 100 kB each: 10 GB
Write = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Write:
    monkeypatch.setenv("DUALKG_CACHE", str(tmp_path / "cache"))

    def write(columns: dict[str, Any], **options: Any) -> Path:
        path = tmp_path / "mine.parquet"
        options = {"compression": "zstd", "store_schema": False, **options}
        pq.write_table(pa.table(columns), path, **options)
        return path

    return write


def repeated(text: str = LONG, num_rows: int = NUM_ROWS) -> pa.DictionaryArray:
    return pa.DictionaryArray.from_arrays(
        pa.array(np.zeros(num_rows, np.int32)), pa.array([text, "other"])
    )


def parquet_of(columns: dict[str, Any]) -> io.BytesIO:
    sink = io.BytesIO()
    pq.write_table(pa.table(columns), sink, store_schema=False)
    return sink


def read(path: Path) -> kg.Graph:
    return kg.load_graph(path, split="100/0/0")


@given(
    st.lists(st.text(max_size=20), max_size=30),
    st.sampled_from(["zstd", "none", "gzip", "snappy"]),
    st.sampled_from(["1.0", "2.0"]),
    st.booleans(),
    st.integers(1, 40),
)
def test_the_sizes_of_pages_are_those_that_the_file_ends_with(
    texts: list[str], compression: str, version: str, use_dictionary: bool, group: int
) -> None:
    numbers = list(range(len(texts)))
    lists = [[text] * (number % 3) for number, text in enumerate(texts)]
    columns = {
        "text": pa.array(texts, pa.string()),
        "number": pa.array(numbers, pa.int64()),
        "list": pa.array(lists, pa.list_(pa.string())),
    }
    table = pa.table(columns)
    sink = io.BytesIO()
    pq.write_table(
        table,
        sink,
        compression=compression,
        data_page_version=version,
        use_dictionary=use_dictionary,
        row_group_size=group,
        data_page_size=16,
    )
    metadata = pq.ParquetFile(sink).metadata
    content = content_of(sink, metadata.schema)
    assert content.num_rows == len(texts)
    groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
    for place in range(metadata.num_columns):
        chunks = [group.column(place) for group in groups]
        if not texts:
            continue
        column = content.columns[chunks[0].path_in_schema]
        assert column.num_values == sum(chunk.num_values for chunk in chunks)
        # The sizes at the end include the headers.
        largest = sum(chunk.total_uncompressed_size for chunk in chunks)
        assert column.num_bytes <= largest
        assert column.has_dictionary == any(chunk.has_dictionary_page for chunk in chunks)


def test_rows_that_repeat_a_long_name_are_not_expanded(write: Write) -> None:
    path = write(dict.fromkeys(COLUMNS, repeated()))
    assert path.stat().st_size < 10_000
    graph = read(path)
    assert graph.entities.names.to_pylist() == [LONG]
    assert len(graph.train) == 1


def test_a_file_of_the_package_that_expands_is_refused(write: Write) -> None:
    path = write({"name": repeated()})
    with refused(UnusableData, source=str(path)):
        read_parquet(path)


def test_lists_of_a_long_name_are_refused(write: Write) -> None:
    lists = pa.ListArray.from_arrays(pa.array([0, NUM_ROWS]), repeated())
    path = write({"tail_candidates": lists})
    with refused(UnusableData):
        read_parquet(path)
    short = pa.ListArray.from_arrays(pa.array([0, 5]), repeated("a", 5))
    assert read_parquet(write({"tail_candidates": short})).num_rows == 1


def test_a_graph_of_a_run_whose_names_expand_is_refused(tmp_path: Path) -> None:
    save_graph(graph_of([(0, 0, 1), (1, 0, 2)]), tmp_path / "graph")
    pq.write_table(
        pa.table({"name": repeated()}), tmp_path / "graph" / "entities.parquet", store_schema=False
    )
    with pytest.raises(ValueError, match="expands to more than 16 MiB"):
        load_saved_graph(tmp_path / "graph")


def test_texts_that_continue_each_other_are_read_in_small_blocks(write: Write) -> None:
    """100 MB in three columns, of which few rows are read at a time."""
    texts = pa.array([LONG] * 1000)
    columns = {"head": texts, "relation": texts, "tail": texts}
    encodings = dict.fromkeys(COLUMNS, "DELTA_BYTE_ARRAY")
    path = write(columns, use_dictionary=False, column_encoding=encodings)
    schema = pq.ParquetFile(path).schema
    with path.open("rb") as stream:
        assert DELTA_BYTE_ARRAY in content_of(stream, schema).columns["head"].encodings
    assert read(path).entities.names.to_pylist() == [LONG]
    with refused(UnusableData):
        read_parquet(path)


def test_a_block_of_texts_that_continue_each_other_is_limited_for_all_columns(
    write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = []

    def measured(reader: object, names: object, batches: Iterator[pa.RecordBatch]) -> Any:
        for batch in batches:
            sizes.append(batch.nbytes)
        return iter(())

    monkeypatch.setattr(parquet, "MAX_EXPANDED", 4 * 10**6)
    monkeypatch.setattr(parquet.ParquetReader, "table_blocks", measured)
    texts = pa.array([LONG] * 100)
    encodings = dict.fromkeys(COLUMNS, "DELTA_BYTE_ARRAY")
    columns = dict.fromkeys(COLUMNS, texts)
    with suppress(kg.DualkgError):  # no triple is passed on
        read(write(columns, use_dictionary=False, column_encoding=encodings))
    assert sum(sizes) > 3 * 100 * len(LONG)
    assert max(sizes) < 4 * 10**6


def test_pages_that_are_larger_than_the_end_of_the_file_says_are_refused(write: Write) -> None:
    texts = pa.array([f"{number:09d}" + "x" * 100_000 for number in range(500)])
    path = write(dict.fromkeys(COLUMNS, texts), use_dictionary=False)
    path.write_bytes(with_smaller_sums(path.read_bytes()))
    assert pq.ParquetFile(path).metadata.row_group(0).total_byte_size == 1
    with pytest.raises(ExpandsTooMuch):
        read(path)
    with refused(UnusableData):
        read_parquet(path)


def test_values_of_a_fixed_length_are_counted(write: Write) -> None:
    kind = pa.binary(100_000)
    path = write({"name": pa.array([b"x" * 100_000] * 400, kind)})
    assert path.stat().st_size < 20_000
    with refused(UnusableData):
        read_parquet(path)


def footer_of(content: bytes) -> bytes:
    num_bytes = int.from_bytes(content[-8:-4], "little")
    return content[-8 - num_bytes :]


@pytest.mark.parametrize(
    "header", [b"", b"\x15", b"\x15" * 5000, b"\x1c" * 200, b"\x19" * 5000, b"\xff" * 300]
)
def test_malformed_headers_of_pages_are_refused(write: Write, header: bytes) -> None:
    path = write({"head": ["a"], "relation": ["r"], "tail": ["b"]}, use_dictionary=False)
    stream = io.BytesIO(b"PAR1" + header + footer_of(path.read_bytes()))
    with pytest.raises(pa.ArrowInvalid, match="header"):
        content_of(stream, pq.ParquetFile(path).schema)


@given(st.binary(max_size=200), st.booleans())
def test_headers_of_any_bytes_end_in_an_error_or_in_pages(content: bytes, is_footer: bool) -> None:
    sink = io.BytesIO()
    pq.write_table(pa.table({"head": ["a"]}), sink)
    schema = pq.ParquetFile(sink).schema
    if is_footer:
        malformed = b"PAR1" + content + len(content).to_bytes(4, "little") + b"PAR1"
    else:
        malformed = b"PAR1" + content + footer_of(sink.getvalue())
    with suppress(pa.ArrowInvalid):
        content_of(io.BytesIO(malformed), schema)


def test_a_list_without_end_is_refused_at_once() -> None:
    """A list of 2^60 numbers with a point, of which the file has none."""
    schema = pq.ParquetFile(parquet_of({"head": ["a"]})).schema
    footer = b"\x19" + b"\xf7" + b"\xff" * 8 + b"\x0f"
    malformed = b"PAR1" + footer + len(footer).to_bytes(4, "little") + b"PAR1"
    with pytest.raises(pa.ArrowInvalid, match="incomplete"):
        content_of(io.BytesIO(malformed), schema)


@pytest.mark.parametrize("bits", [7, pytest.param(1, marks=pytest.mark.slow)])
def test_no_flipped_bit_of_the_end_of_a_file_aborts_the_process(tmp_path: Path, bits: int) -> None:
    """PyArrow's description of a column would, as for the histograms of levels."""
    good = parquet_of({"name": ["a", "b", None], "size": [1, 2, 3]}).getvalue()
    (tmp_path / "good.parquet").write_bytes(good)
    ended = run_python(FLIP, tmp_path / "good.parquet", bits)
    assert ended.code == 0, ended.err
    refused_flips, num_flips = map(int, ended.out.split())
    assert num_flips == -(-8 * len(footer_of(good)) // bits)
    assert 0 < refused_flips < num_flips


FLIP = """
import sys
from pathlib import Path

from dualkg.data.graph import DAMAGE
from dualkg.data.parquet_files import read_parquet

path = Path(sys.argv[1])
bits = int(sys.argv[2])
good = path.read_bytes()
begin = len(good) - 8 - int.from_bytes(good[-8:-4], "little")
refused = 0
flips = range(8 * begin, 8 * len(good), bits)
for place in flips:
    damaged = bytearray(good)
    damaged[place // 8] ^= 1 << place % 8
    path.write_bytes(damaged)
    try:
        read_parquet(path)
    except (*DAMAGE, ValueError, OSError):
        refused += 1
print(refused, len(flips))
"""


def test_entries_that_no_row_has_do_not_matter(write: Write) -> None:
    """And two entries of the same name are one."""
    dictionary = pa.array(["", "b ", "b", None, "a"])
    head = pa.DictionaryArray.from_arrays(pa.array([4, 1, 2], pa.int32()), dictionary)
    graph = kg.Graph.from_dataframe(
        pa.table({"head": head, "relation": ["r"] * 3, "tail": ["x", "y", "z"]}), split="100/0/0"
    )
    assert graph.entities.names.to_pylist() == ["a", "x", "b", "y", "z"]
    for bad, problem in ((0, "is empty"), (3, "is missing")):
        head = pa.DictionaryArray.from_arrays(pa.array([4, bad, 2], pa.int32()), dictionary)
        table = pa.table({"head": head, "relation": ["r"] * 3, "tail": ["x", "y", "z"]})
        with refused(UnusableData, place="row 2", problem=f"the head {problem}"):
            kg.Graph.from_dataframe(table, split="100/0/0")


@pytest.mark.parametrize("seed", range(4))
def test_the_campaign_makes_small_files_that_expand(write: Write, seed: int) -> None:
    content = expanding_parquet(COLUMNS, random.Random(seed))
    assert len(content) < 100_000
    path = write({"head": ["a"]})
    path.write_bytes(content)
    with pytest.raises(UnusableData):
        read_parquet(path)
