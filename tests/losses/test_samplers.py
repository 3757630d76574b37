"""Which negatives are drawn: reproducibly, evenly, and never a known answer that counts."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import dualkg as kg
from dualkg.errors import InvalidValue
from dualkg.losses.negative_sampling import BoundSampledLoss, CorruptedSide, Draws
from dualkg.losses.queries import TrainingAnswers
from tests.losses.test_queries import CPU, answers_of
from tests.raising import refused


def factors_of(batch, *, num_entities: int = 7, num_relations: int = 3, reciprocal: bool = False):
    model = kg.DistMult(kg.GraphShape(num_entities, num_relations), dim=2, reciprocal=reciprocal)
    return model, model.factors(*torch.tensor(batch).T)


def corrupted(batch, *, seed: int = 0, side: str = "tail", **shape) -> CorruptedSide:
    _, f = factors_of(batch, **shape)
    return CorruptedSide(f, side, Draws.of(f, seed=seed), f.tails if side == "tail" else f.heads)


def negatives(
    kind: str,
    num_entities: int,
    part: CorruptedSide,
    *,
    known: TrainingAnswers | None = None,
    num: int = 5,
):
    settings = {} if kind == "in-batch" else {"num_negatives": num}
    loss = kg.NegativeSampling(sampler=kind, filtered=known is not None, **settings)
    return BoundSampledLoss(loss, num_entities, known).negatives(part)


def corrupt(model, f, head_probabilities=None, **settings) -> list[CorruptedSide]:
    return BoundSampledLoss(kg.NegativeSampling(**settings), 7, None, head_probabilities).corrupt(
        model, f
    )


# -- draws -------------------------------------------------------------------


def test_draws_are_reproducible_by_batch_and_seed():
    batch = [(0, 0, 1), (2, 1, 3), (4, 2, 5)]
    draws = [
        Draws.of(factors_of(rows)[1], seed=seed).entities(50, 10**6)
        for rows, seed in ((batch, 0), (batch, 0))
    ]
    assert torch.equal(*draws)
    others = [
        Draws.of(factors_of(rows)[1], seed=seed)
        for rows, seed in (
            (batch, 1),
            ([batch[0], batch[2], batch[1]], 0),
            ([batch[0], batch[1], (4, 2, 6)], 0),
        )
    ]
    for other in others:  # another seed, another order behind it, another triple behind it
        assert not torch.equal(other.entities(50, 10**6)[0], draws[0][0])


def test_repeated_triples_of_a_batch_draw_different_entities():
    drawn = Draws.of(factors_of([(0, 0, 1), (0, 0, 1)])[1], seed=0).entities(50, 10**6)
    assert (drawn[0] != drawn[1]).all()


def test_redraws_differ():
    draws = Draws.of(factors_of([(0, 0, 1), (2, 1, 3)])[1], seed=0)
    first, second = (draws.entities(50, 10**6, redraw=redraw) for redraw in (0, 1))
    assert not torch.isin(first, second).any()


def test_entities_are_drawn_uniformly():
    draws = Draws.of(factors_of([(0, 0, 1)] * 400)[1], seed=3)
    for drawn in (draws.entities(100, 10), draws.entities(40_000, 10, shared=True)):
        counts = torch.bincount(drawn.flatten(), minlength=10)
        assert len(counts) == 10
        assert (counts - 4000).abs().max() < 5 * 60  # five deviations of √(40,000 · 0.1 · 0.9)


def test_a_part_of_a_batch_has_the_draws_of_the_whole():
    draws = Draws.of(factors_of([(0, 0, 1), (2, 1, 3), (4, 2, 5)])[1], seed=0)
    rows = torch.tensor([2, 0])
    assert torch.equal(draws.at(rows).entities(9, 100), draws.entities(9, 100)[rows])
    assert torch.equal(
        draws.at(rows).entities(9, 100, shared=True), draws.entities(9, 100, shared=True)
    )


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device here")
@pytest.mark.parametrize("kind", ["uniform", "shared", "in-batch"])
def test_a_gpu_draws_the_same(kind):
    triples = [(i % 7, i % 3, (3 * i + i // 7) % 7) for i in range(60)]
    found = []
    for device in (CPU, torch.device("cuda")):
        known = TrainingAnswers(
            torch.tensor(triples).int().numpy(), kg.GraphShape(7, 3), device=device
        )
        f = (
            kg.DistMult(known.shape, dim=2)
            .to(device)
            .factors(*torch.tensor(triples, device=device).T)
        )
        draws = Draws.of(f, seed=5)
        candidates, allowed = negatives(
            kind, 7, CorruptedSide(f, "tail", draws, f.tails), known=known
        )
        found.append([draws.sides().cpu(), candidates.cpu(), allowed.cpu()])
    assert all(torch.equal(*pair) for pair in zip(*found, strict=True))


# -- what counts -------------------------------------------------------------


def test_negatives_of_the_batch_by_hand():
    """(0, r, 1), (0, r, 2), (3, r, 1): for 0 both tails are known, for 3 only 1 is."""
    batch = [(0, 0, 1), (0, 0, 2), (3, 0, 1)]
    known = answers_of(batch, 7, 3)
    candidates, allowed = negatives("in-batch", 7, corrupted(batch), known=known)
    assert candidates.tolist() == [1, 2, 1]
    assert allowed.int().tolist() == [[0, 0, 0], [0, 0, 0], [0, 1, 0]]
    assert negatives("in-batch", 7, corrupted(batch))[1].int().tolist() == [
        [0, 1, 0],
        [1, 0, 1],
        [0, 1, 0],
    ]
    candidates, allowed = negatives("in-batch", 7, corrupted(batch, side="head"), known=known)
    assert candidates.tolist() == [0, 0, 3]
    assert allowed.int().tolist() == [[0, 0, 0], [0, 0, 1], [0, 0, 0]]


def test_known_answers_are_drawn_again():
    """Half of all entities are known; without redraws half of the negatives would not be
    allowed.
    """
    batch = [(0, 0, tail) for tail in range(50)]
    known = answers_of(batch, 100, 1)
    part = corrupted(batch, num_entities=100, num_relations=1)
    _, allowed = negatives("uniform", 100, part, known=known, num=200)
    assert float(allowed.double().mean()) == pytest.approx(1 - 0.5**3, abs=0.02)
    candidates, allowed = negatives("shared", 100, part, known=known, num=200)
    assert candidates.shape == (200,)
    assert float(allowed.double().mean()) == pytest.approx(0.5, abs=0.15)


triples = st.lists(
    st.tuples(st.integers(0, 6), st.integers(0, 2), st.integers(0, 6)), min_size=2, max_size=40
)


@given(
    triples,
    st.integers(0, 2**32 - 1),
    st.sampled_from(["uniform", "shared", "in-batch"]),
    st.booleans(),
)
def test_known_answers_are_never_allowed(found, seed, kind, reciprocal):
    """On both sides, and whatever part of the training triples is the batch."""
    both = found + [(t, r + 3, h) for h, r, t in found] if reciprocal else found
    model, f = factors_of(both, reciprocal=reciprocal)
    settings = {} if kind == "in-batch" else {"num_negatives": 5}
    bound = BoundSampledLoss(
        kg.NegativeSampling(sampler=kind, **settings), 7, answers_of(found, 7, 3), seed=seed
    )
    seen = 0
    for part in bound.corrupt(model, f):
        candidates, allowed = bound.negatives(part)
        candidates = candidates.expand(allowed.shape)
        ids = torch.stack([part.factors.heads, part.factors.relations, part.factors.tails], dim=1)
        for (h, r, t), row, good in zip(
            ids.tolist(), candidates.tolist(), allowed.tolist(), strict=True
        ):
            made = [(h, r, entity) if part.side == "tail" else (entity, r, t) for entity in row]
            assert good == [triple not in both for triple in made]
            seen += 1
    assert seen == len(both)


@given(triples, st.sampled_from(["uniform", "shared", "in-batch"]))
def test_without_filtering_only_the_own_answer_is_not_allowed(found, kind):
    part = corrupted(found)
    candidates, allowed = negatives(kind, 7, part)
    assert torch.equal(
        allowed, candidates.expand(allowed.shape) != part.factors.answers(part.side)[:, None]
    )


def test_the_own_answer_is_not_allowed_even_if_it_is_not_known():
    """A batch may hold triples that training does not."""
    batch = [(0, 0, 1), (2, 0, 3)]
    known = answers_of([(5, 1, 6)], 7, 3)
    for kind in ("uniform", "shared", "in-batch"):
        candidates, allowed = negatives(kind, 7, corrupted(batch), known=known, num=50)
        assert torch.equal(allowed, candidates.expand(allowed.shape) != torch.tensor([[1], [3]]))


def test_less_than_one_negative_is_refused():
    with refused(
        InvalidValue, setting="loss.num_negatives", expected="greater than or equal to 1", found=0
    ):
        kg.NegativeSampling(num_negatives=0)


# -- sides -------------------------------------------------------------------


def test_with_reciprocals_only_tails_are_corrupted():
    model, f = factors_of([(0, 0, 1), (1, 3, 0)], reciprocal=True)
    (part,) = corrupt(model, f)
    assert part.factors is f
    given = part.factors.given(part.side)
    answers = part.factors.answers(part.side)
    assert (part.side, given.tolist(), answers.tolist()) == ("tail", [0, 1], [1, 0])


def test_without_reciprocals_one_side_of_each_triple_is_corrupted():
    batch = [(i % 7, i % 3, (i // 7) % 7) for i in range(2000)]
    model, f = factors_of(batch)
    tails, heads = corrupt(model, f)
    assert (tails.side, heads.side) == ("tail", "head")
    assert len(heads.factors.given("head")) == pytest.approx(1000, abs=5 * 22.4)
    assert torch.equal(heads.factors.given("head"), heads.factors.tails)
    joined = torch.cat(
        [
            torch.stack([p.factors.heads, p.factors.relations, p.factors.tails], 1)
            for p in (tails, heads)
        ]
    )
    assert sorted(map(tuple, joined.tolist())) == sorted(batch)


def test_the_side_has_the_probability_of_the_relation():
    batch = [(i % 7, i % 3, (i // 7) % 7) for i in range(3000)]
    model, f = factors_of(batch)
    _, heads = corrupt(model, f, torch.tensor([0.0, 0.25, 1.0]))
    counts = torch.bincount(heads.factors.relations, minlength=3).tolist()
    assert counts == [0, pytest.approx(250, abs=5 * 13.7), 1000]


def test_a_side_without_triples_is_left_out():
    model, f = factors_of([(0, 0, 1), (2, 0, 3)])
    (part,) = corrupt(model, f, torch.tensor([1.0, 0.5, 0.5]))
    assert part.side == "head"


def test_both_sides_can_be_corrupted_with_different_negatives():
    batch = [(0, 0, 1), (2, 1, 3), (4, 2, 5)]
    model, f = factors_of(batch, num_entities=10**6)
    tails, heads = corrupt(model, f, corruption="both")
    assert [tails.side, heads.side] == ["tail", "head"]
    assert tails.factors is heads.factors is f
    assert (f.answers("tail").tolist(), f.answers("head").tolist()) == ([1, 3, 5], [0, 2, 4])
    for kind in ("uniform", "shared"):
        one, other = (negatives(kind, 10**6, part, num=9)[0] for part in (tails, heads))
        assert not set(one.flatten().tolist()) & set(other.flatten().tolist())
