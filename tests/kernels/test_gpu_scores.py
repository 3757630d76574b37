"""Counts by Triton against a definition in plain Python, and ranks on a GPU against those on a
CPU.
"""

import warnings

import numpy as np
import pytest
import torch
from hypothesis import given, settings

import dualkg as kg
from dualkg.kernels.scores import RankTargets
from tests.kernels.test_scores import DTYPES, by_definition, counter, counts, wide

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device here"),
]


def on_gpu(scores: torch.Tensor, known: torch.Tensor, targets: RankTargets) -> torch.Tensor:
    return counter("triton")(
        scores.cuda(), known.cuda(), RankTargets(*(values.cuda() for values in targets))
    ).cpu()


@settings(max_examples=100)
@given(counts())
def test_counts_match_their_definition(drawn):
    scores, known, targets = drawn
    assert on_gpu(scores, known, targets).tolist() == by_definition(scores, known, targets)


@pytest.mark.parametrize("dtype", DTYPES)
def test_counts_of_wide_rows(dtype):
    scores, known, targets = wide(dtype)
    assert on_gpu(scores, known, targets).tolist() == by_definition(scores, known, targets)


@pytest.mark.parametrize("place", [0, 2047, 2048, 9000])
@pytest.mark.parametrize("bad", ["nan", "inf", "-inf"])
def test_a_nonfinite_score_marks_only_its_row(place, bad):
    scores, known, targets = wide()
    scores[0, place] = float(bad)
    assert on_gpu(scores, known, targets).tolist() == by_definition(scores, known, targets)


def test_padding_is_never_read_as_a_score():
    scores, known, targets = wide()
    padded = torch.cat([scores, torch.full((len(scores), 3), torch.nan)], dim=1).cuda()
    targets_on_gpu = RankTargets(*(values.cuda() for values in targets))
    found = counter("triton")(padded[:, :-3], known.cuda(), targets_on_gpu)
    assert torch.equal(found.cpu(), on_gpu(scores, known, targets))


def test_no_targets_have_no_counts():
    empty = torch.zeros(0, dtype=torch.int64)
    known = torch.zeros(0, dtype=torch.int32)
    assert on_gpu(torch.zeros(0, 3), known, RankTargets(*[empty] * 4)).shape == (0, 2)


def test_counting_does_not_synchronize():
    arrays = [tensor.cuda() for tensor in (wide()[0], wide()[1], *wide()[2])]
    count = counter("triton")
    targets = RankTargets(*arrays[2:])
    count(arrays[0], arrays[1], targets)  # compiled here
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch says that this mode is new
        torch.cuda.set_sync_debug_mode("error")
    try:
        count(arrays[0], arrays[1], targets)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("reciprocal", [True, False])
@pytest.mark.parametrize("dual", [None, "tail", "head"])
def test_ranks_on_a_gpu_equal_those_on_a_cpu(small_graph, dual, reciprocal):
    model = kg.ComplEx(small_graph.shape, dim=3, reciprocal=reciprocal)
    random = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        parameter.data = torch.randint(-2, 3, parameter.shape, generator=random).float()
    scored = kg.Dual(model, dual) if dual else model
    here = kg.rank(scored, small_graph)
    there = kg.rank(scored.cuda(), small_graph)
    np.testing.assert_array_equal(here.optimistic, there.optimistic)
    np.testing.assert_array_equal(here.pessimistic, there.pessimistic)


def test_a_diverged_model_is_refused_on_a_gpu(small_graph):
    model = kg.ComplEx(small_graph.shape, dim=3)
    model.entities.data[0, 0] = torch.nan
    with pytest.raises(kg.DivergedError, match="scores NaN or infinity for the query"):
        kg.rank(model.cuda(), small_graph)


def test_relations_on_a_gpu_are_ranked_as_on_a_cpu(small_graph):
    model = kg.DistMult(small_graph.shape, dim=3)
    for parameter in model.parameters():
        parameter.data = parameter.data.sign()
    here = kg.evaluate_relations(model, small_graph)
    assert kg.evaluate_relations(model.cuda(), small_graph) == here


def test_known_answers_stay_on_the_gpu(small_graph):
    known = kg.KnownAnswers.of(small_graph)
    device = torch.device("cuda", 0)
    assert known.on(device) is known.on(device)
    assert known.on(device).answers.device == device
