"""Explanations: influence compared with leaving triples out, and sentences."""

from dataclasses import replace

import numpy as np
import pytest
import torch

import dualkg as kg
from dualkg.inference.explanation import (
    conjugate_gradients,
    explain,
    influence,
    score_drops,
    score_gradient,
)
from dualkg.inference.inductive import EmbeddingProblem, FrozenContext, minimize
from tests.conftest import graph_of
from tests.pairwise import every_nth

DURA = kg.DURA(0.05, plain=0.5, mapped=1.5)


def with_row(context: FrozenContext, entity: int, rows: torch.Tensor) -> FrozenContext:
    """The same frozen_context where one entity stands at the least point of its problem."""
    tables = dict(context.model.state_dict())
    tables["entities"][entity] = rows[0]
    if context.model.two_entity_tables:
        tables["tails"][entity] = rows[-1]
    context.model.load_state_dict(tables)
    return context


@pytest.mark.parametrize(
    ("kind", "reciprocal"), every_nth(2, [kg.CP, kg.ComplEx, kg.RESCAL], [True, False])
)
def test_influence_approximates_leaving_a_triple_out(kind, reciprocal, small_graph):
    """Each triple of the head is left out, and the problem of the head solved again, all else as it
    was.
    """
    model = (
        kind(small_graph.shape, dim=4, init_scale=0.4, reciprocal=reciprocal, seed=2)
        .double()
        .eval()
    )
    context = FrozenContext.of(model, small_graph)
    head = 3
    relation = 1
    tail = 8
    triples = small_graph.train[(small_graph.train[:, [0, 2]] == head).any(1)]
    found = torch.from_numpy(triples).long()

    def solved_for(triples):
        problem = EmbeddingProblem.of(torch.tensor([head]), triples, context, negative_weight=1.0)
        return minimize(problem, context.rows_of(head)[None])[0]

    context = with_row(context, head, solved_for(found))
    slope = score_gradient(head, (head, relation, tail), context)
    falls = score_drops(head, triples, slope, context)
    rows = solved_for(found)
    true = []
    for number in range(len(triples)):
        fewer = found[torch.arange(len(found)) != number]
        true.append(float((slope * (rows - solved_for(fewer))).sum()))
    assert np.corrcoef(falls, true)[0, 1] > 0.98
    assert np.argmax(falls) == np.argmax(true)


def test_influence_goes_through_both_entities(small_graph):
    model = kg.ComplEx(small_graph.shape, dim=4, init_scale=0.4).double().eval()
    context = FrozenContext.of(model, small_graph)
    head, relation, tail = (int(id) for id in small_graph.train[0])
    found = influence((head, relation, tail), context)
    ends = small_graph.train[found.rows][:, [0, 2]]
    assert ((found.by_head != 0) == (ends == head).any(1)).all()
    assert ((found.by_tail != 0) == (ends == tail).any(1)).all()
    assert 0 in found.rows[found.score_drops > 0]
    loop = influence((head, relation, head), context)
    assert not loop.by_tail.any()
    assert loop.by_head.any()


def test_a_sparse_row_under_n3_has_an_influence(small_graph):
    """At an exact zero autograd finds no second derivative of |x|³, which is 0 there."""
    model = kg.ComplEx(small_graph.shape, dim=4, init_scale=0.4)
    with torch.no_grad():
        model.entities[:, ::2] = 0
    recipe = kg.Recipe(regularizer={"name": "N3", "weight": 0.1})
    assert np.isfinite(
        influence((1, 0, 2), FrozenContext.of(model, small_graph, recipe=recipe)).score_drops
    ).all()


def test_conjugate_gradients():
    matrix = torch.diag(torch.tensor([1.0, 10.0, 100.0])) + 0.5
    wanted = torch.tensor([1.0, 2.0, 3.0])
    torch.testing.assert_close(
        conjugate_gradients(lambda x: matrix @ x, wanted), torch.linalg.solve(matrix, wanted)
    )
    assert not conjugate_gradients(lambda x: matrix @ x, torch.zeros(3)).any()


# -- what people see ---------------------------------------------------------


@pytest.fixture(scope="module")
def people() -> kg.Run:
    """Who lives where speaks what: the language follows from the country."""
    names = (
        [f"p{i}" for i in range(24)]
        + ["France", "Spain", "Italy"]
        + ["French", "Spanish", "Italian"]
    )
    lives = [(i, 0, 24 + i % 3) for i in range(24)]
    speaks = [(i, 1, 27 + i % 3) for i in range(24)]
    train = np.array([*lives, *speaks[3:]], dtype=np.int32)
    held = np.array(speaks[:3], dtype=np.int32)
    relations = kg.Vocabulary(["lives_in", "speaks"], kind="relation")
    graph = kg.Graph("people", kg.Vocabulary(names), relations, train, held[:0], held)
    choice = kg.Optimizer(learning_rate=0.3)
    return kg.train(
        kg.ComplEx(graph.shape, dim=8),
        graph,
        regularizer=DURA,
        optimizer=choice,
        epochs=40,
        batch_size=20,
    )


def test_the_first_supporting_triple_is_the_premise(people):
    found = explain(
        FrozenContext.of(people.model, people.graph, recipe=people.recipe),
        ("p0", "speaks", "French"),
    )
    assert found.split == "test"
    assert found.supporting_triples[0].triple.text == "(p0, lives_in, France)"
    assert found.supporting_triples[0].by_tail == 0
    falls = [reason.score_drop for reason in found.supporting_triples]
    assert falls == sorted(falls, reverse=True)
    assert min(falls) > 0
    assert {one.triple.tail for one in found.similar_entities} == {"French"}
    assert {one.entity for one in found.similar_entities} <= {f"p{i}" for i in range(3, 24, 3)}


def test_the_sentences(people):
    found = explain(
        FrozenContext.of(people.model, people.graph, recipe=people.recipe),
        ("p0", "speaks", "French"),
        k=1,
    )
    first, reason, likeness = found.sentences()
    assert first == f"(p0, speaks, French) has score {found.score:.3f}; it is known (test)."
    fall = found.supporting_triples[0].score_drop
    assert (
        reason
        == f"(p0, lives_in, France) is known: without it the score drops by about {fall:.2g}."
    )
    one = found.similar_entities[0]
    assert likeness == (
        f"{one.entity} is similar to p0 (cosine {one.cosine:.2f}), and ({one.entity}, speaks, "
        "French) is known."
    )
    known = explain(
        FrozenContext.of(people.model, people.graph, recipe=people.recipe),
        ("p3", "speaks", "French"),
    )
    assert any("(p3, speaks, French) itself is known" in sentence for sentence in known.sentences())
    assert found.as_dict()["supporting_triples"][0]["triple"]["head"] == "p0"


def test_predictor_explain(people):
    predictor = kg.Predictor(people.model, people.graph, recipe=people.recipe)
    assert predictor.explain("p0", "speaks", "French", k=2) == explain(
        FrozenContext.of(people.model, people.graph, recipe=people.recipe),
        ("p0", "speaks", "French"),
        k=2,
    )


def test_entities_without_training_triples_have_no_supporting_triples():
    graph = graph_of([(0, 0, 1)], num_entities=4)
    found = explain(FrozenContext.of(kg.CP(graph.shape, dim=2), graph), ("e2", "r0", "e3"))
    assert found.sentences()[1:] == ["No training triple of its two entities supports it."]


def test_refusals(people, small_graph):
    context = FrozenContext.of(people.model, people.graph)
    with pytest.raises(kg.RequestError, match="k must be at least 1; got 0"):
        explain(context, ("p0", "speaks", "French"), k=0)
    with pytest.raises(
        kg.RequestError,
        match="No entity is named 'Frensh' among the 30 known. Did you mean 'French'",
    ):
        explain(context, ("p0", "speaks", "Frensh"))
    with pytest.raises(
        kg.RequestError,
        match="No relation is named 'speak' among the 2 known. Did you mean 'speaks'",
    ):
        explain(context, ("p0", "speak", "French"))
    with pytest.raises(kg.RequestError, match="scores by ⟨h R, t⟩.*RotatE is none of them"):
        FrozenContext.of(kg.RotatE(small_graph.shape, dim=2), small_graph)


def test_the_command(run_cli, people, tmp_path):
    replace(people).save(tmp_path / "people")
    question = ("--head", "p0", "--relation", "speaks", "--tail", "French", "--device", "cpu")
    told = run_cli("explain", tmp_path / "people", *question, "--top", 2)
    assert told.code == 0, told.err
    assert told.out.splitlines()[1].startswith(
        "(p0, lives_in, France) is known: without it the score drops by"
    )
    facts = run_cli("explain", tmp_path / "people", *question, "--json").json
    assert facts["triple"]["tail"] == "French"
    assert facts["supporting_triples"][0]["triple"]["relation"] == "lives_in"
    wrong = run_cli("explain", tmp_path / "people", *question[:4], "--tail", "Frensh")
    assert (wrong.code, "Did you mean 'French'?" in wrong.err) == (2, True)


@pytest.mark.slow
def test_influence_agrees_with_training_again(people):
    """Each training triple of the asked head is left out, and the model trained again without
    it.
    """
    triple = ("p0", "speaks", "French")
    ids = (0, 1, 27)
    graph = people.graph
    mean = score_without(people, ids, None)
    found = influence(ids, FrozenContext.of(people.model, graph, recipe=people.recipe))
    best = found.rows[np.argsort(-found.score_drops)]
    strongest = [mean - score_without(people, ids, place) for place in best[:2].tolist()]
    weakest = [mean - score_without(people, ids, place) for place in best[-4:].tolist()]
    assert (
        explain(FrozenContext.of(people.model, graph), triple).supporting_triples[0].triple.text
        == "(p0, lives_in, France)"
    )
    assert strongest[0] > max(weakest)


def score_without(run: kg.Run, ids: tuple[int, int, int], place: int | None) -> float:
    """The score of a triple where one of train is left out, as the mean of two seeds."""
    train = run.graph.train if place is None else np.delete(run.graph.train, place, axis=0)
    graph = replace(run.graph, train=train)
    scores = []
    for seed in (0, 1):
        model = kg.train_recipe(run.recipe.with_changes({"training.seed": seed}), graph=graph).model
        scores.append(
            float(model.score(*(torch.tensor([id], device=model.device) for id in ids)).detach())
        )
    return float(np.mean(scores))
