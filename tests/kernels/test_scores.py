"""Counts of better and tied candidates, by PyTorch and by numba, against a definition in plain
Python.
"""

import importlib.util
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dualkg.kernels import cpu_ranks
from dualkg.kernels import scores as scores_module
from dualkg.kernels.cpu import in_parallel
from dualkg.kernels.scores import RankTargets, count_with_torch

needs_numba = pytest.mark.skipif(
    not importlib.util.find_spec("numba"), reason="numba is not installed"
)
forms = pytest.mark.parametrize("form", ["torch", pytest.param("numba", marks=needs_numba)])
DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16]


def counter(name: str) -> Callable[..., torch.Tensor]:
    if name == "torch":
        return count_with_torch
    if name == "numba":
        return cpu_ranks.count_better_and_tied
    from dualkg.kernels.gpu.scores import count_better_and_tied

    return count_better_and_tied


def by_definition(
    scores: torch.Tensor, known: torch.Tensor, targets: RankTargets
) -> list[list[int]]:
    """One candidate at a time."""
    found = []
    for row, answer, first, last in zip(*(values.tolist() for values in targets), strict=True):
        values = scores[row].tolist()
        excluded = set(known[first:last].tolist())
        others = [value for id, value in enumerate(values) if id != answer and id not in excluded]
        if torch.isfinite(scores[row]).all():
            found.append(
                [sum(v > values[answer] for v in others), sum(v == values[answer] for v in others)]
            )
        else:
            found.append([-1, -1])
    return found


def rank_targets(
    answers: list[list[int]], known: list[list[int]]
) -> tuple[torch.Tensor, RankTargets]:
    """The answers to rank in each row, and the known answers of each row, as the kernels take
    them.
    """
    rows = torch.tensor(
        [row for row, wanted in enumerate(answers) for _ in wanted], dtype=torch.int64
    )
    ends = torch.tensor([0, *(len(found) for found in known)]).cumsum(0)
    joined = torch.tensor([id for found in known for id in sorted(found)], dtype=torch.int32)
    flat = torch.tensor([id for row in answers for id in row], dtype=torch.int64)
    return joined, RankTargets(rows, flat, ends[rows], ends[rows + 1])


@st.composite
def counts(draw):
    num_rows = draw(st.integers(1, 4))
    num_candidates = draw(st.integers(1, 7))
    candidate = st.integers(0, num_candidates - 1)
    value = st.sampled_from(
        [-2.0, -1.0, 0.0, 1.0, 2.0] * 4 + [float("nan"), float("inf"), -float("inf")]
    )
    scores = [
        draw(st.lists(value, min_size=num_candidates, max_size=num_candidates))
        for _ in range(num_rows)
    ]
    answers = [draw(st.lists(candidate, max_size=4)) for _ in range(num_rows)]
    known = [draw(st.sets(candidate)) for _ in range(num_rows)]
    return torch.tensor(scores, dtype=draw(st.sampled_from(DTYPES))), *rank_targets(answers, known)


@forms
@given(counts())
def test_counts_match_their_definition(form, drawn):
    scores, known, targets = drawn
    assert counter(form)(scores, known, targets).tolist() == by_definition(scores, known, targets)


def wide(dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor, RankTargets]:
    """Rows longer than a chunk, of no round length; the first has 50 answers to rank."""
    random = torch.Generator().manual_seed(0)
    num_rows = 7
    num_candidates = 9001
    scores = torch.randint(-9, 10, (num_rows, num_candidates), generator=random).to(dtype)
    pick = torch.randint(0, num_candidates, (num_rows, 900), generator=random).tolist()
    answers = [pick[row][:1] for row in range(num_rows)]
    answers[0] = pick[0][:50]
    return scores, *rank_targets(
        answers, [list(set(pick[row][: 150 * row])) for row in range(num_rows)]
    )


@forms
@pytest.mark.parametrize("dtype", DTYPES)
def test_counts_of_wide_rows(form, dtype, monkeypatch):
    monkeypatch.setattr(scores_module, "PIECE_ELEMENTS", 20_000)
    scores, known, targets = wide(dtype)
    assert counter(form)(scores, known, targets).tolist() == by_definition(scores, known, targets)


@forms
@pytest.mark.parametrize("place", [0, 4095, 4096, 9000])
@pytest.mark.parametrize("bad", ["nan", "inf", "-inf"])
def test_a_nonfinite_score_marks_only_its_row(form, place, bad):
    scores, known, targets = wide()
    good = counter(form)(scores, known, targets)
    scores[0, place] = float(bad)
    found = counter(form)(scores, known, targets)
    assert (found[targets.rows == 0] == -1).all()
    assert torch.equal(found[targets.rows > 0], good[targets.rows > 0])


@forms
def test_scores_may_be_a_view_that_requires_a_gradient(form):
    scores, known, targets = wide()
    padded = torch.cat([scores, torch.full((len(scores), 3), torch.nan)], dim=1).requires_grad_()
    assert torch.equal(
        counter(form)(padded[:, :-3], known, targets), counter(form)(scores, known, targets)
    )
    assert torch.equal(
        counter(form)(scores.T.contiguous().T, known, targets),
        counter(form)(scores, known, targets),
    )


@forms
def test_no_targets_have_no_counts(form):
    empty = torch.zeros(0, dtype=torch.int64)
    known = torch.zeros(0, dtype=torch.int32)
    assert counter(form)(torch.zeros(0, 3), known, RankTargets(*[empty] * 4)).shape == (0, 2)


@pytest.mark.parametrize("num_threads", [1, 2, 3])
@pytest.mark.parametrize("num_rows", [0, 1, 2, 7])
def test_threads_share_all_rows(num_threads, num_rows, monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: num_threads)
    ranges = []
    in_parallel(lambda start, stop, more: ranges.append((start, stop, more)), num_rows, "more")
    assert sorted(row for start, stop, _ in ranges for row in range(start, stop)) == list(
        range(num_rows)
    )
    assert len(ranges) <= num_threads
    assert {more for *_, more in ranges} == {"more"}


def test_an_error_in_a_thread_is_raised(monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    with pytest.raises(ZeroDivisionError):
        in_parallel(lambda start, stop: 1 // (1 - start), 2)


@pytest.mark.parametrize("flush", [True, False])
def test_denormal_scores_of_a_collapsed_model_have_possible_ranks(flush):
    """Only the calling thread flushes denormal numbers; known answers were once subtracted more
    often than counted.
    """
    denormal = torch.arange(1, 2001, dtype=torch.int32).view(torch.float32).repeat(600, 1)
    known, targets = rank_targets([[1000]] * 600, [list(range(40))] * 600)
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    torch.set_flush_denormal(flush)
    try:
        better, tied = count_with_torch(denormal, known, targets).unbind(1)
    finally:
        torch.set_flush_denormal(False)
        torch.set_num_threads(threads)
    assert ((better >= 0) & (tied >= 0) & (better + tied <= 1999 - 40)).all()
