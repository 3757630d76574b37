"""Relation patterns: trained models, algebraic reasons, and the tables of docs/models.md."""

import re

import pytest
import torch

import dualkg as kg
from dualkg.training.engines import Job, kernels_know_relations
from tests.families import BILINEAR, EMBEDDINGS
from tests.models.patterns import (
    CAPABILITIES,
    FOUND,
    IN_PRINCIPLE,
    MISSED,
    NO,
    PAGE,
    PATTERNS,
    YES,
    all_above_their_reverse,
    table,
    trained,
)
from tests.pairwise import every_nth

SHAPE = kg.GraphShape(30, 3)
EVERY_PAIR = [(a, b) for a in range(30) for b in range(30) if a != b]
NORMS = (1, 2, "squared")


@pytest.fixture(autouse=True)
def _one_thread():
    """On graphs this small, threads would wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def cells(word: str) -> set[tuple[str, str]]:
    return {
        (name, pattern)
        for name, row in CAPABILITIES.items()
        for pattern, said in row.items()
        if said == word
    }


# -- trained -----------------------------------------------------------------


@pytest.mark.parametrize(("name", "pattern"), every_nth(3, EMBEDDINGS, PATTERNS))
def test_trained_models_find_the_patterns_of_the_table(name, pattern):
    chosen = PATTERNS[pattern]
    run = trained(name, chosen.graph)
    if CAPABILITIES[name][pattern] != YES:
        assert run.report.mrr <= MISSED
        return
    assert run.report.mrr >= FOUND
    if pattern == "antisymmetry":
        assert all_above_their_reverse(run.model, chosen.withheld)


@pytest.mark.parametrize("pattern", PATTERNS.values(), ids=PATTERNS)
def test_withheld_triples_are_new_and_their_entities_are_known(pattern):
    assert pattern.withheld
    assert not set(pattern.train) & set(pattern.withheld)
    seen = {entity for head, _, tail in pattern.train for entity in (head, tail)}
    assert seen == set(range(pattern.graph.shape.num_entities))


def test_reciprocal_relations_tie_the_two_vectors_that_cp_has_of_an_entity():
    """Of r(a, b), a is a head and b a tail; of its inverse, b is a head and a a tail."""
    run = trained("CP", PATTERNS["inversion"].graph, reciprocal=True)
    assert run.report.mrr >= FOUND


# -- why not: what holds of any numbers --------------------------------------


def drawn(name: str, **options: object) -> kg.EmbeddingModel:
    """A model of any numbers at all."""
    return EMBEDDINGS[name](SHAPE, dim=4, init_scale=1.0, **options)


def scores(model: kg.Model, pairs: list[tuple[int, int]], relation: int = 0) -> torch.Tensor:
    heads, tails = torch.tensor(pairs).T
    return model.score(heads, torch.full_like(heads, relation), tails)


def reverses(pairs: list[tuple[int, int]]) -> list[tuple[int, int]]:
    return [(b, a) for a, b in pairs]


@pytest.mark.parametrize("reciprocal", [True, False])
def test_distmult_scores_a_triple_and_its_reverse_alike(reciprocal):
    """No for antisymmetry and inversion; a reciprocal relation is symmetric like any other."""
    model = drawn("DistMult", reciprocal=reciprocal)
    for relation in range(model.num_relation_ids):
        torch.testing.assert_close(
            scores(model, EVERY_PAIR, relation), scores(model, reverses(EVERY_PAIR), relation)
        )


def test_a_triple_and_its_reverse_share_no_parameters_in_cp():
    """No for symmetry and inversion, and for composition: b is a tail in r(a, b) and a head in
    r′(b, c).
    """
    model = drawn("CP", reciprocal=False)
    one, other = (
        torch.autograd.grad(scores(model, [pair]), (model.entities, model.tails))
        for pair in ((4, 9), (9, 4))
    )
    for of_one, of_other in zip(one, other, strict=True):
        assert of_one.any()
        assert of_other.any()
        assert not (of_one * of_other).any()


def gain_on_loops(model: kg.Model) -> torch.Tensor:
    """By how much r(a, b) and r(b, a) both score above r(a, a) and r(b, b): the lesser of the two,
    for every pair.
    """
    loops = scores(model, [(a, a) for a in range(30)])
    there = scores(model, EVERY_PAIR)
    back = scores(model, reverses(EVERY_PAIR))
    one, other = torch.tensor(EVERY_PAIR).T
    return torch.minimum(there - loops[one], back - loops[other])


@pytest.mark.parametrize("norm", NORMS)
def test_transe_never_scores_both_directions_above_self_loops(norm):
    """No for symmetry: the middle of r − d and r + d is r."""
    assert gain_on_loops(drawn("TransE", norm=norm)).max() <= 1e-5


@pytest.mark.parametrize("name", ["ComplEx", "RotatE", "ModE", "SE", "MuRP"])
def test_other_models_can_score_both_directions_above_self_loops(name):
    model = drawn(name)
    if name == "MuRP":
        model.relations.data[:, : model.dim] -= 2  # from near the identity to near its opposite
    assert gain_on_loops(model).max() > 0.01


# -- in principle: numbers that say it, written down -------------------------


def test_all_patterns_possible_in_principle_are_tested():
    assert cells(IN_PRINCIPLE) == {("MuRP", "symmetry"), ("SimplE", "composition")}


def test_murp_with_signs_finds_symmetry():
    graph = PATTERNS["symmetry"].graph
    model = kg.MuRP(graph.shape, dim=12, reciprocal=False, signs=True)
    run = kg.train(
        model,
        graph,
        optimizer=kg.Optimizer(learning_rate=0.1),
        epochs=100,
        batch_size=500,
        device="cpu",
    )
    assert run.report.mrr >= FOUND


def test_murp_represents_symmetry_by_a_point_reflection():
    """R = −1 takes b to a where it takes a to b, and no entity to itself."""
    graph = PATTERNS["symmetry"].graph
    model = kg.MuRP(graph.shape, dim=6, reciprocal=False, init_scale=0.3)
    model.entities.data[1::2] = -model.entities.data[::2]
    model.relations.data = torch.tensor([[-1.0] * 6 + [0.0] * 6])
    assert kg.evaluate(model, graph).mrr == 1


def test_simple_with_equal_halves_is_distmult_and_represents_composition():
    primal = drawn("DistMult", reciprocal=False)
    model = drawn("SimplE", reciprocal=False)
    model.entities.data = primal.entities.data.repeat(1, 2)
    model.relations.data = primal.relations.data.repeat(1, 2)
    torch.testing.assert_close(scores(model, EVERY_PAIR), scores(primal, EVERY_PAIR))
    assert CAPABILITIES["DistMult"]["composition"] == YES


def test_composed_maps_of_simple_are_not_a_map_of_simple():
    """One map exchanges the halves of a vector, so two of them leave each in its place."""
    model = drawn("SimplE", reciprocal=False)
    half = torch.cat([torch.ones(1, 4), torch.zeros(1, 4)], dim=-1)
    once = model.map_head(half, torch.tensor([0]))
    twice = model.map_head(once, torch.tensor([1]))
    assert not once[:, :4].any()
    assert not twice[:, 4:].any()
    assert once[:, 4:].all()
    assert twice[:, :4].all()


# -- the distance model behind a factorization model -------------------------


def test_se_with_identity_for_tails_is_the_dual_of_rescal():
    """As RotatE is of ComplEx and ModE of DistMult, in test_distance.py."""
    model = drawn("SE", norm="squared")
    primal = drawn("RESCAL")
    same = torch.eye(4).flatten().expand(len(primal.relations), -1)
    model.entities.data = primal.entities.data
    model.relations.data = torch.cat([primal.relations.data, same], dim=-1)
    found = scores(model, EVERY_PAIR)
    expected = scores(kg.Dual(primal, "tail"), EVERY_PAIR)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


# -- the page ----------------------------------------------------------------


def test_docs_have_every_model_and_pattern():
    assert set(CAPABILITIES) == set(EMBEDDINGS)
    for row in CAPABILITIES.values():
        assert list(row) == list(PATTERNS)
        assert set(row.values()) <= {YES, NO, IN_PRINCIPLE}


def test_docs_explain_every_missing_pattern():
    text = PAGE.read_text(encoding="utf-8")
    for word in (NO, IN_PRINCIPLE):
        for name, pattern in cells(word):
            reasons = re.findall(rf"^- \*\*{name}\*\*, ([^:]*): {word}", text, re.M)
            assert any(pattern in reason for reason in reasons), f"{name}, {pattern}: {word}"


def test_docs_have_the_table_of_capabilities():
    def says(name: str) -> dict[str, str]:
        model = EMBEDDINGS[name](SHAPE, dim=2)
        return {
            "dual": "yes" if name in BILINEAR else "no",
            "DURA": "yes" if model.has_adjoint else "no",
            "N3": "yes" if model.diagonal and model.euclidean else "no",
            "fast engine": "yes" if model.score_form else "no",
            "GPU kernels": "yes"
            if kernels_know_relations(Job(model, kg.OneVsAll(), kg.DURA(1.0), "Adagrad"))
            else "no",
        }

    expected = {name: says(name) for name in EMBEDDINGS}
    for name in ("TransE", "RotatE", "ModE"):
        expected[name]["fast engine"] = 'norm "squared"'
        assert EMBEDDINGS[name](SHAPE, dim=2, norm="squared").score_form == "squared distances"
    expected["QuatE"]["GPU kernels"] = "not normalized"
    scaling = kg.QuatE(SHAPE, dim=2, normalized=False)
    assert kernels_know_relations(Job(scaling, kg.OneVsAll(), kg.DURA(1.0), "Adagrad"))
    assert table("model | dual") == expected


def test_docs_have_the_numbers_of_parameters():
    said = {**table("bilinear model | h R"), **table("distance model | mapped head")}
    assert set(said) == set(EMBEDDINGS)
    for name, row in said.items():
        model = EMBEDDINGS[name](SHAPE, dim=3, **({"relation_dim": 5} if name == "TuckER" else {}))
        dim = 3
        counted = {"dim": dim, "dim²": dim * dim, "relation_dim": 5}
        entity = sum(
            table.shape[1] for table in model.parameters() if table.shape[0] == SHAPE.num_entities
        )
        for found, column in (
            (entity, "parameters per entity"),
            (model.relations.shape[1], "parameters per relation"),
        ):
            assert _count(row[column], counted) == found, f"{name}, {column}"


def _count(text: str, counted: dict[str, int]) -> int:
    """`2 · dim + 2`, or `dim as head, dim as tail`, with numbers for its words."""
    terms = re.split(r" \+ |, ", re.sub(r" as \w+", "", text.replace("`", "")))
    total = 0
    for term in terms:
        *times, word = term.split(" · ")
        total += (int(times[0]) if times else 1) * (counted[word] if word in counted else int(word))
    return total
