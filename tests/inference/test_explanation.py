"""Explanations: influence compared with leaving triples out, and sentences."""

from dataclasses import replace

import numpy as np
import pytest
import torch

import dualkg as kg
from dualkg.errors import InvalidValue, UnknownName
from dualkg.inference.explanation import (
    Explanation,
    conjugate_gradients,
    explain,
    influence,
    score_drops,
    score_gradient,
)
from dualkg.inference.inductive import EmbeddingProblem, FrozenContext
from tests.conftest import graph_of
from tests.pairwise import every_nth
from tests.raising import refused as raises_error

DURA = kg.DURA(0.05, plain=0.5, mapped=1.5)


def with_row(context: FrozenContext, entity: int, rows: torch.Tensor) -> FrozenContext:
    """The context with other rows of one entity."""
    tables = dict(context.model.state_dict())
    tables["entities"][entity] = rows[0]
    if context.model.two_entity_tables:
        tables["tails"][entity] = rows[-1]
    context.model.load_state_dict(tables)
    return context


@pytest.mark.parametrize(
    ("model_class", "reciprocal"), every_nth(2, [kg.CP, kg.ComplEx, kg.RESCAL], [True, False])
)
def test_influence_approximates_leaving_a_triple_out(model_class, reciprocal, small_graph):
    """Each triple of the head is left out, and the problem of the head solved again, all else as it
    was.
    """
    model = model_class(small_graph.shape, dim=4, init_scale=0.4, reciprocal=reciprocal, seed=2)
    context = FrozenContext.of(model.double().eval(), small_graph)
    head, relation, tail = (3, 1, 8)
    triples = small_graph.train[(small_graph.train[:, [0, 2]] == head).any(1)]
    ids = torch.from_numpy(triples).long()

    def solved_for(ids):
        problem = EmbeddingProblem.of(torch.tensor([head]), ids, context, negative_weight=1.0)
        return problem.minimum(context.rows_of(head)[None])[0]

    context = with_row(context, head, solved_for(ids))
    gradient = score_gradient(head, (head, relation, tail), context)
    drops = score_drops(head, triples, gradient, context=context)

    rows = solved_for(ids)
    true_drops = []
    for number in range(len(triples)):
        others = ids[torch.arange(len(ids)) != number]
        change = rows - solved_for(others)
        true_drops.append(float((gradient * change).sum()))
    assert np.corrcoef(drops, true_drops)[0, 1] > 0.98
    assert np.argmax(drops) == np.argmax(true_drops)


def test_influence_goes_through_both_entities(small_graph):
    model = kg.ComplEx(small_graph.shape, dim=4, init_scale=0.4).double().eval()
    context = FrozenContext.of(model, small_graph)
    head, relation, tail = (int(id) for id in small_graph.train[0])
    influences = influence((head, relation, tail), context)
    ends = small_graph.train[influences.rows][:, [0, 2]]
    assert ((influences.by_head != 0) == (ends == head).any(1)).all()
    assert ((influences.by_tail != 0) == (ends == tail).any(1)).all()
    assert 0 in influences.rows[influences.score_drops > 0]

    loop = influence((head, relation, head), context)
    assert not loop.by_tail.any()
    assert loop.by_head.any()


def test_a_sparse_row_under_n3_has_an_influence(small_graph):
    """At an exact zero autograd finds no second derivative of |x|³, which is 0 there."""
    model = kg.ComplEx(small_graph.shape, dim=4, init_scale=0.4)
    with torch.no_grad():
        model.entities[:, ::2] = 0
    recipe = kg.Recipe(regularizer={"name": "N3", "weight": 0.1})
    context = FrozenContext.of(model, small_graph, recipe=recipe)
    assert np.isfinite(influence((1, 0, 2), context).score_drops).all()


def test_conjugate_gradients():
    matrix = torch.diag(torch.tensor([1.0, 10.0, 100.0])) + 0.5
    target = torch.tensor([1.0, 2.0, 3.0])
    solution = conjugate_gradients(matrix.matmul, target)
    torch.testing.assert_close(solution, torch.linalg.solve(matrix, target))
    assert not conjugate_gradients(matrix.matmul, torch.zeros(3)).any()


# -- what people see ---------------------------------------------------------


@pytest.fixture(scope="module")
def people() -> kg.Run:
    """Who lives where speaks what: the language follows from the country."""
    persons = [f"p{number}" for number in range(24)]
    countries = ["France", "Spain", "Italy"]
    languages = ["French", "Spanish", "Italian"]
    lives_in = [(person, 0, 24 + person % 3) for person in range(24)]
    speaks = [(person, 1, 27 + person % 3) for person in range(24)]
    train = np.array([*lives_in, *speaks[3:]], dtype=np.int32)
    test = np.array(speaks[:3], dtype=np.int32)
    graph = kg.Graph(
        "people",
        kg.Vocabulary([*persons, *countries, *languages]),
        kg.Vocabulary(["lives_in", "speaks"], kind="relation"),
        train,
        test[:0],
        test,
    )
    return kg.train(
        kg.ComplEx(graph.shape, dim=8),
        graph,
        regularizer=DURA,
        optimizer=kg.Optimizer(learning_rate=0.3),
        epochs=40,
        batch_size=20,
    )


def explain_in(run: kg.Run, *triple: str, **options) -> Explanation:
    context = FrozenContext.of(run.model, run.graph, recipe=run.recipe)
    return explain(context, triple, **options)


def test_the_first_supporting_triple_is_the_premise(people):
    explanation = explain_in(people, "p0", "speaks", "French")
    assert explanation.split == "test"
    premise = explanation.supporting_triples[0]
    assert premise.triple.text == "(p0, lives_in, France)"
    assert premise.by_tail == 0

    drops = [support.score_drop for support in explanation.supporting_triples]
    assert drops == sorted(drops, reverse=True)
    assert min(drops) > 0

    speakers = {f"p{number}" for number in range(3, 24, 3)}
    assert {similar.triple.tail for similar in explanation.similar_entities} == {"French"}
    assert {similar.entity for similar in explanation.similar_entities} <= speakers


def test_the_sentences(people):
    explanation = explain_in(people, "p0", "speaks", "French", k=1)
    [support] = explanation.supporting_triples
    [similar] = explanation.similar_entities
    assert explanation.sentences() == [
        f"(p0, speaks, French) has score {explanation.score:.3f}; it is known (test).",
        "(p0, lives_in, France) is known: without it the score drops by about "
        f"{support.score_drop:.2g}.",
        f"{similar.entity} is similar to p0 (cosine {similar.cosine:.2f}), and "
        f"({similar.entity}, speaks, French) is known.",
    ]
    assert explanation.as_dict()["supporting_triples"][0]["triple"]["head"] == "p0"


def test_a_known_triple_supports_itself(people):
    sentences = explain_in(people, "p3", "speaks", "French").sentences()
    assert any("(p3, speaks, French) itself is known" in sentence for sentence in sentences)


def test_predictor_explain(people):
    predictor = kg.Predictor(people.model, people.graph, recipe=people.recipe)
    expected = explain_in(people, "p0", "speaks", "French", k=2)
    assert predictor.explain("p0", "speaks", "French", k=2) == expected


def test_entities_without_training_triples_have_no_supporting_triples():
    graph = graph_of([(0, 0, 1)], num_entities=4)
    context = FrozenContext.of(kg.CP(graph.shape, dim=2), graph)
    explanation = explain(context, ("e2", "r0", "e3"))
    assert explanation.sentences()[1:] == ["No training triple of its two entities supports it."]


def test_a_number_of_supporting_triples_below_one_is_refused(people):
    with pytest.raises(InvalidValue) as error:
        explain_in(people, "p0", "speaks", "French", k=0)
    assert (error.value.setting, error.value.found) == ("k", 0)
    assert str(error.value) == "`k` should be at least 1; 0 was given."


@pytest.mark.parametrize(
    ("triple", "kind", "name", "suggestion"),
    [
        (("p0", "speaks", "Frensh"), "entity", "Frensh", "French"),
        (("p0", "speak", "French"), "relation", "speak", "speaks"),
    ],
)
def test_unknown_names_are_refused(people, triple, kind, name, suggestion):
    with raises_error(UnknownName, kind=kind, name=name, suggestions=[suggestion]):
        explain_in(people, *triple)


def test_models_that_are_not_bilinear_are_refused(small_graph):
    with pytest.raises(kg.RequestError, match="RotatE is none of them"):
        FrozenContext.of(kg.RotatE(small_graph.shape, dim=2), small_graph)


def test_the_command(run_cli, people, tmp_path):
    path = replace(people).save(tmp_path / "people")
    query = ("--head", "p0", "--relation", "speaks", "--device", "cpu")
    printed = run_cli("explain", path, *query, "--tail", "French", "--top", 2)
    assert printed.code == 0, printed.err
    first_support = printed.out.splitlines()[1]
    assert first_support.startswith("(p0, lives_in, France) is known: without it the score drops")

    content = run_cli("explain", path, *query, "--tail", "French", "--json").json
    assert content["triple"]["tail"] == "French"
    assert content["supporting_triples"][0]["triple"]["relation"] == "lives_in"

    refused = run_cli("explain", path, *query, "--tail", "Frensh")
    assert refused.code == 2
    assert "Did you mean 'French'?" in refused.err


@pytest.mark.slow
def test_influence_agrees_with_training_again(people):
    """Training triples of the head are left out, and the model is trained again without each."""
    ids = (0, 1, 27)
    context = FrozenContext.of(people.model, people.graph, recipe=people.recipe)
    influences = influence(ids, context)
    rows = influences.rows[np.argsort(-influences.score_drops)].tolist()

    score = score_without(people, ids, None)
    strongest = score - score_without(people, ids, rows[0])
    weakest = [score - score_without(people, ids, row) for row in rows[-4:]]
    premise = explain_in(people, "p0", "speaks", "French").supporting_triples[0]
    assert premise.triple.text == "(p0, lives_in, France)"
    assert strongest > max(weakest)


def score_without(run: kg.Run, ids: tuple[int, int, int], row: int | None) -> float:
    """The score of a triple if a row of train is left out, as the mean of two seeds."""
    train = run.graph.train
    if row is not None:
        train = np.delete(train, row, axis=0)
    graph = replace(run.graph, train=train)

    scores = []
    for seed in (0, 1):
        recipe = run.recipe.with_changes({"training.seed": seed})
        model = kg.train_recipe(recipe, graph=graph).model
        head, relation, tail = (torch.tensor([id], device=model.device) for id in ids)
        scores.append(float(model.score(head, relation, tail).detach()))
    return float(np.mean(scores))
