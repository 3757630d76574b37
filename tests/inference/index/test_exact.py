"""The exact index compared with a sort of all scores, for all storage formats, block sizes and
metrics.
"""

import json
import sys
from typing import get_args

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from dualkg.errors import InvalidValue
from dualkg.inference.index import STORAGE_FORMATS, ExactIndex, Metric, NotFinite, best_of
from tests.processes import run_python

METRICS = get_args(Metric)


def drawn(seed: int, rows: int, width: int, *, most: int = 3) -> Tensor:
    """Whole numbers, so that products are exact in every order and in every storage, and ties are
    many.
    """
    return torch.randint(
        -most, most + 1, (rows, width), generator=torch.Generator().manual_seed(seed)
    ).float()


def plainly(table: Tensor, queries: Tensor, metric: str, k: int) -> tuple[Tensor, Tensor]:
    """All scores, sorted; of equal ones the first row first."""
    if metric == "euclidean":
        scores = -(queries[:, None] - table).square().sum(-1)
    else:
        scores = queries @ table.T
    ids = scores.argsort(dim=1, descending=True, stable=True)[:, :k]
    return scores.gather(1, ids), ids


@given(
    seed=st.integers(0, 10**6),
    rows=st.integers(1, 70),
    width=st.integers(1, 9),
    num_queries=st.integers(1, 5),
    k=st.integers(1, 80),
    block=st.integers(1, 400),
    storage=st.sampled_from(["float32", "float16", "bf16", "sparse"]),
    metric=st.sampled_from(METRICS),
)
def test_blocks_agree_with_a_sort_of_all_scores(
    seed, rows, width, num_queries, k, block, storage, metric
):
    table = drawn(seed, rows, width)
    queries = drawn(seed + 1, num_queries, width)
    index = ExactIndex.build(table, metric, storage=storage)
    found = index.search(queries, k, block_elements=block)
    scores, ids = plainly(table, queries, metric, k)
    assert torch.equal(found.scores, scores)
    assert torch.equal(found.ids, ids)


@given(
    seed=st.integers(0, 10**6),
    rows=st.integers(1, 50),
    k=st.integers(1, 60),
    metric=st.sampled_from(METRICS),
)
def test_int8_search_agrees_with_the_decoded_table(seed, rows, k, metric):
    random = torch.Generator().manual_seed(seed)
    table = torch.randn(rows, 7, generator=random)
    queries = torch.randn(3, 7, generator=random)
    index = ExactIndex.build(table, metric, storage="int8")
    kept = index.parts["codes"].float() * index.parts["scales"][:, None]
    scores, ids = plainly(kept, queries, metric, k)
    found = index.search(queries, k)
    torch.testing.assert_close(found.scores, scores, rtol=1e-4, atol=1e-4)
    same = (
        plainly(kept, queries, metric, rows)[0].diff(dim=1).abs().amin() < 1e-4
        if rows > 1
        else False
    )
    assert same or torch.equal(found.ids, ids)


@given(
    seed=st.integers(0, 10**6),
    rows=st.integers(1, 12),
    columns=st.integers(1, 30),
    k=st.integers(1, 35),
)
def test_ties_are_in_the_order_of_rows(seed, rows, columns, k):
    scores = drawn(seed, rows, columns, most=1)
    ids = scores.argsort(dim=1, descending=True, stable=True)[:, :k]
    assert torch.equal(best_of(scores, k).ids, ids)


@pytest.mark.parametrize("storage", STORAGE_FORMATS)
def test_error_of_storage_formats(storage):
    table = torch.randn(40, 10, generator=torch.Generator().manual_seed(0))
    table[table.abs() < 1] = 0
    table[3] = 0  # a row of zeros has no scale
    stored = ExactIndex.build(table, storage=storage)
    step = {"int8": float(table.abs().max()) / 254 + 1e-6, "bf16": 0.01, "float16": 0.002}.get(
        storage, 0.0
    )
    assert (stored.rows() - table).abs().max() <= step
    nonzero = int(table.count_nonzero())
    expected = {
        "float32": 1600,
        "float16": 800,
        "bf16": 800,
        "int8": 400 + 160,
        "sparse": nonzero * 5 + 41,
    }
    assert stored.num_bytes == expected[storage]
    torch.testing.assert_close(stored.rows(7, 23), stored.rows()[7:23], rtol=0, atol=0)


@pytest.mark.parametrize("storage", STORAGE_FORMATS)
@pytest.mark.parametrize("in_memory", [True, False])
def test_round_trip(tmp_path, storage, in_memory):
    table = torch.randn(50, 6)
    queries = torch.randn(4, 6)
    index = ExactIndex.build(table, "euclidean", storage=storage)
    index.save(tmp_path)
    again = ExactIndex.load(tmp_path, "euclidean", (50, 6), in_memory=in_memory, **index.config)
    for one, other in zip(index.search(queries, 9), again.search(queries, 9), strict=True):
        assert torch.equal(one, other)


MAPPED = """
import json, sys
from pathlib import Path
import torch
from dualkg.inference.index import ExactIndex

def held():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon"))

index = ExactIndex.load(
    Path(sys.argv[1]), "inner product", (100_000, 200), storage="float32", in_memory=False
)
index.search(torch.ones(1, 200), 3)
before = held()
found = index.search(torch.ones(1, 200), 3)
print(json.dumps([held() - before, found.ids[0].tolist()]))
"""


@pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="only Linux tells which memory is a file's"
)
def test_a_memory_mapped_file_is_not_loaded(tmp_path):
    table = torch.zeros(100_000, 200)  # 80 MB
    table[[99_999, 5, 50_000]] = torch.tensor([[3.0], [2.0], [1.0]])
    ExactIndex.build(table).save(tmp_path)
    kib, ids = json.loads(run_python(MAPPED, tmp_path).out)
    assert ids == [99_999, 5, 50_000]
    assert kib < 20_000


@pytest.mark.parametrize("number", [torch.nan, torch.inf])
def test_vectors_that_are_not_finite_are_refused(number):
    index = ExactIndex.build(torch.ones(3, 2))
    with pytest.raises(NotFinite) as error:
        index.search(torch.full((1, 2), number), 1)
    assert error.value.what == "A query"
    assert "A query holds NaN or infinity" in str(error.value)
    with pytest.raises(NotFinite) as error:
        ExactIndex.build(torch.full((2, 2), number))
    assert error.value.what == "The table"


def test_an_unknown_storage_format_is_refused():
    with pytest.raises(InvalidValue) as error:
        ExactIndex.build(torch.ones(3, 2), storage="int4")
    assert (error.value.setting, error.value.found) == ("storage", "int4")
    assert all(storage in error.value.expected for storage in STORAGE_FORMATS)
