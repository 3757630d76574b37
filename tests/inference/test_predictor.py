import numpy as np
import pytest
import torch

import dualkg as kg
from dualkg.errors import InvalidValue
from dualkg.inference.prediction_sets import PredictionSets
from dualkg.inference.predictor import best_columns
from dualkg.inference.probability import triple_log_probabilities
from tests.conftest import graph_of
from tests.inference.calibrations import calibration_on


@pytest.fixture
def predictor() -> kg.Predictor:
    """Four entities on a line: DistMult with one coordinate scores h·r·t."""
    graph = graph_of([(3, 0, 3), (0, 1, 2)], [(3, 0, 2)], [(3, 0, 1)], num_entities=4)
    model = kg.DistMult(graph.shape, dim=1, reciprocal=False)
    model.load_state_dict(
        {
            "entities": torch.tensor([[-1.0], [1.0], [2.0], [3.0]]),
            "relations": torch.tensor([[1.0], [-1.0]]),
        }
    )
    return kg.Predictor(model, graph)


def test_tails_are_sorted_and_known_ones_are_marked(predictor):
    answers = predictor.tails("e3", "r0", k=4)
    assert [(a.entity, a.score, a.known, a.split) for a in answers] == [
        ("e3", 9.0, True, "train"),
        ("e2", 6.0, True, "valid"),
        ("e1", 3.0, True, "test"),
        ("e0", -3.0, False, None),
    ]


def test_known_answers_can_be_omitted(predictor):
    assert [a.entity for a in predictor.tails("e3", "r0", known="omit")] == ["e0"]


def test_heads_mark_known_heads(predictor):
    assert [(a.entity, a.split) for a in predictor.heads("r1", "e2")] == [
        ("e0", "train"),
        ("e1", None),
        ("e3", None),
    ]


def entities(answers):
    return [answer.entity for answer in answers]


@pytest.mark.parametrize("kind", ["tails", "heads"])
def test_the_entity_of_a_query_is_no_answer(kind):
    """Relation 0 has a self-loop in train, relation 1 only one in valid, relation 2 has none."""
    graph = graph_of([(0, 0, 0), (1, 0, 2), (3, 1, 4), (3, 2, 4)], [(0, 1, 0)], num_entities=5)
    model = kg.DistMult(graph.shape, dim=4, reciprocal=False)
    predictor = kg.Predictor(model, graph)
    unrestricted = kg.Predictor(model, graph, loops=True)

    def predict(predictor, entity, relation, **options):
        given = (entity, relation) if kind == "tails" else (relation, entity)
        return entities(getattr(predictor, kind)(*given, **options))

    for entity, relation in [("e1", "r0"), ("e0", "r1")]:
        answers = predict(predictor, entity, relation)
        assert answers == predict(unrestricted, entity, relation)
        assert entity in answers
    assert "e0" not in predict(predictor, "e0", "r1", known="omit")

    everything = predict(unrestricted, "e0", "r2")
    assert "e0" in everything
    others = [name for name in everything if name != "e0"]
    assert predict(predictor, "e0", "r2") == others
    assert predict(predictor, "e0", "r2", k=3) == others[:3]


def test_heads_through_reciprocal_relations(small_graph):
    model = kg.ComplEx(small_graph.shape, dim=4, init_scale=1.0)
    answers = kg.Predictor(model, small_graph, loops=True).heads("r2", "e5", k=30)
    scores = model.score_tails(torch.tensor([5]), torch.tensor([2 + 4]))[0]
    assert [a.id for a in answers] == scores.argsort(descending=True).tolist()
    known = {
        tuple(t) for split in ("train", "valid", "test") for t in small_graph.split(split).tolist()
    }
    assert all(a.known == ((a.id, 2, 5) in known) for a in answers)


def test_relations_are_those_of_the_graph(predictor, small_graph):
    assert [(a.relation, a.known) for a in predictor.relations("e0", "e2")] == [
        ("r1", True),
        ("r0", False),
    ]
    model = kg.CP(small_graph.shape, dim=4, init_scale=1.0)
    assert len(kg.Predictor(model, small_graph).relations(0, 1)) == 4


def test_score_and_triple(predictor):
    assert predictor.score("e3", "r0", "e1") == 3.0
    assert predictor.triple("e3", "r0", "e1").split == "test"
    assert predictor.triple("e0", "r0", "e1").split is None


def test_similar_excludes_the_entity_itself(predictor):
    answers = predictor.similar("e3", k=10)
    assert sorted(a.entity for a in answers[:2]) == ["e1", "e2"]
    assert (answers[2].entity, answers[2].score) == ("e0", -1.0)
    assert len(answers) == 3


def test_ids_can_be_given_for_names(predictor):
    assert predictor.tails(3, 0) == predictor.tails("e3", "r0")


def test_unknown_names_are_refused(predictor):
    for given in [("e33", "r0"), ("e3", "zzz"), (99, "r0")]:
        with pytest.raises(kg.RequestError):
            predictor.tails(*given)


@pytest.mark.parametrize(
    ("option", "expected"),
    [
        ({"k": 0}, "at least 1"),
        ({"k": "3"}, "a whole number"),
        ({"known": "hide"}, "'mark' or 'omit'"),
    ],
)
def test_invalid_options_are_refused(predictor, option, expected):
    with pytest.raises(InvalidValue) as error:
        predictor.tails("e3", "r0", **option)
    assert {error.value.setting: error.value.found} == option
    assert error.value.expected == expected


def test_a_model_of_another_graph_is_refused(predictor):
    with pytest.raises(kg.RequestError):
        kg.Predictor(kg.CP(kg.GraphShape(2, 1), dim=1), predictor.graph)


def test_probabilities_with_a_calibration(predictor):
    calibration = calibration_on(predictor.graph, slopes=0.5, offsets=(0.5, 0.1, 0.2, 0.3))
    believing = kg.Predictor(predictor.model, predictor.graph, calibration=calibration)
    answers = believing.tails("e3", "r0", k=4)
    triples = np.array([(3, 0, answer.id) for answer in answers[1:]])
    expected = calibration.of_triples(triples, triple_log_probabilities(predictor.model, triples))
    assert answers[0].probability is None  # what train has is no candidate
    assert [a.answer_probability for a in answers[1:]] == expected.answer_probability.tolist()
    assert [a.probability for a in answers[1:]] == expected.probability.tolist()
    assert sorted(expected.probability, reverse=True) == expected.probability.tolist()
    assert believing.triple("e3", "r0", "e0").probability == answers[3].probability
    assert {a.id: a.probability for a in believing.heads("r0", "e0")}[3] == pytest.approx(
        answers[3].probability
    )
    assert {a.id: a.probability for a in believing.relations("e3", "e0")}[0] == pytest.approx(
        answers[3].probability
    )
    assert all(a.probability is None for a in predictor.tails("e3", "r0"))


def test_prediction_sets_by_name(small_graph):
    model = kg.ComplEx(small_graph.shape, dim=4, init_scale=1.0)
    predictor = kg.Predictor(model, small_graph)
    sets = PredictionSets.fit(model, small_graph)
    tails = predictor.prediction_set("e5", "r2", coverage=0.6)
    heads = predictor.prediction_set(None, "r2", "e5", coverage=0.6)
    known = kg.KnownAnswers.of(small_graph)
    assert [a.id for a in tails] == sets.of(model, known, 5, 2, coverage=0.6).entities.tolist()
    assert [a.id for a in heads] == sets.of(
        model, known, 5, 2, side="head", coverage=0.6
    ).entities.tolist()
    assert not any(a.known for a in tails + heads)
    best = predictor.tails("e5", "r2", k=len(tails), known="omit")
    assert [(a.id, a.score) for a in tails] == [(a.id, pytest.approx(a.score)) for a in best]
    for head, tail in [("e5", "e6"), (None, None)]:
        with pytest.raises(kg.RequestError, match="needs a relation and exactly one of head and"):
            predictor.prediction_set(head, "r2", tail)


def test_a_run_makes_its_predictor(small_graph, tmp_path):
    model = kg.ComplEx(small_graph.shape, dim=4, init_scale=1.0)
    run = kg.train(model, small_graph, epochs=1, out=tmp_path / "run")
    assert run.predictor().tails("e5", "r2") == kg.Predictor(run.model, small_graph).tails(
        "e5", "r2"
    )
    assert run.predictor().calibration is None
    calibrated = run.predictor(calibrated=True, cache=True)
    assert run.predictor().calibration is not None  # read from the folder
    found = [prediction.probability for prediction in calibrated.tails("e5", "r2")]
    assert found == pytest.approx(
        [one.probability for one in run.predictor().tails("e5", "r2")], abs=1e-5
    )
    assert calibrated.recipe is run.recipe


def test_lists_are_batches_of_queries(small_graph):
    predictor = kg.Predictor(kg.ComplEx(small_graph.shape, dim=4, init_scale=1.0), small_graph)
    heads, relations, tails = [["e3", 5, "e3"], ["r0", "r1", 2], np.array([1, 2, 3])]
    for batch, one in (
        (predictor.tails(heads, relations, k=4), predictor.tails),
        (predictor.heads(relations, tails, k=4), predictor.heads),
        (predictor.relations(heads, tails, k=4), predictor.relations),
    ):
        given = {
            "tails": (heads, relations),
            "heads": (relations, tails),
            "relations": (heads, tails),
        }[one.__name__]
        assert [[(a.id, a.split) for a in found] for found in batch] == [
            [(a.id, a.split) for a in one(*names, k=4)] for names in zip(*given, strict=True)
        ]
    assert predictor.tails(heads, "r1", known="omit") == predictor.tails(
        heads, ["r1"] * 3, known="omit"
    )
    assert predictor.heads("r1", tuple(heads)) == predictor.heads(["r1"] * 3, heads)
    assert predictor.tails([], []) == predictor.tails([], "r0") == []
    assert len(predictor.tails(["e1"], "r0", k=2)) == 1


def test_wrong_batches_are_refused(predictor):
    with pytest.raises(kg.RequestError, match="got 2 heads and 1 relations"):
        predictor.tails(["e1", "e2"], ["r0"])
    with pytest.raises(kg.RequestError, match=r"Query 1 of the batch: .*'e33'"):
        predictor.heads("r0", ["e1", "e33"])
    with pytest.raises(kg.RequestError, match="^`entity` should be"):
        predictor.tails(None, "r0")


def test_known_relations_are_those_of_all_splits(small_graph):
    predictor = kg.Predictor(kg.ComplEx(small_graph.shape, dim=4), small_graph)
    for head, tail in {
        (h, t) for split in ("train", "test") for h, _, t in small_graph.split(split).tolist()[:20]
    }:
        wanted: dict[int, str] = {}
        for split in ("train", "valid", "test"):
            for h, r, t in small_graph.split(split).tolist():
                if (h, t) == (head, tail):
                    wanted.setdefault(r, split)
        assert predictor.known_relations(head, tail) == wanted


@pytest.mark.parametrize("num_columns", [200, 64 * 40, 64 * 40 + 17])
def test_best_columns_are_those_of_topk(num_columns):
    """Of a wide table they are searched in blocks; the last columns are in none."""
    scores = torch.randperm(5 * num_columns).view(5, num_columns).float()
    best = best_columns(scores, 10)
    expected = scores.topk(10)
    assert best.values.tolist() == expected.values.tolist()
    assert best.indices.tolist() == expected.indices.tolist()


@pytest.mark.parametrize("known", ["mark", "omit"])
def test_omitted_candidates_are_left_out_of_the_best(known):
    """Few are taken among the best and left out, many are masked before."""
    tails = [(0, 0, tail) for tail in range(1, 60)]
    graph = graph_of([*tails, (1, 0, 2)], num_entities=300)
    model = kg.DistMult(graph.shape, dim=4, reciprocal=False)
    predictor = kg.Predictor(model, graph)
    scores = model.predict_tails(torch.tensor([0, 1]), torch.tensor([0, 0]))
    omitted = [{0, *range(1, 60)} if known == "omit" else {0}, {1, 2} if known == "omit" else {1}]
    for heads in ([0, 1], [1, 1]):
        for head, answers in zip(heads, predictor.tails(heads, 0, k=20, known=known), strict=True):
            ranked = scores[head].argsort(descending=True).tolist()
            kept = [id for id in ranked if id not in omitted[head]]
            assert [answer.id for answer in answers] == kept[:20]
