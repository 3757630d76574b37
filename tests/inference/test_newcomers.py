"""New entities: their problem against one written out plainly, its solution, and the runs that keep them."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import torch

import dualkg as kg
from dualkg.data.filters import with_reciprocals
from dualkg.evaluation.report import Metrics
from dualkg.inference import inductive, inductive_solver
from dualkg.inference.extension import extend_run, extended, with_inductive_entity, with_rows
from dualkg.inference.inductive import (
    RIDGE,
    FrozenContext,
    Near,
    Penalty,
    Problem,
    Rising,
    least,
    log_sums_with_slopes,
    num_examples,
    queries_of,
)
from dualkg.inference.inductive_solver import embed_entities, minimise, plainly
from dualkg.training.registry import describe_regularizer
from paper.inductive_study import Measured, counted, study
from tests.conftest import graph_of

BILINEAR = [kg.CP, kg.DistMult, kg.ComplEx, kg.RESCAL, kg.SimplE, kg.QuatE, kg.TuckER]
WEIGHT, PLAIN, MAPPED = 0.05, 0.5, 1.5
DURA = kg.DURA(WEIGHT, plain=PLAIN, mapped=MAPPED)
NEW = 12
OF_NEW = torch.tensor([(NEW, 0, 3), (NEW, 0, 4), (5, 1, NEW), (NEW, 1, NEW)])


@pytest.fixture
def graph() -> kg.Graph:
    random = np.random.default_rng(0)
    return graph_of(np.unique(np.stack([random.integers(0, n, 40) for n in (12, 2, 12)], axis=1), axis=0))


def model_of(kind, graph, *, reciprocal=True):
    return kind(graph.shape, dim=3, init_scale=0.7, reciprocal=reciprocal, seed=1).double().eval()


def recipe_of(regularizer=DURA, **loss) -> kg.Recipe:
    return kg.Recipe(regularizer=describe_regularizer(regularizer), loss=kg.Loss(**loss))


def rows_of(model, *, seed=0):
    shape = (2 if model.two_entity_tables else 1, model.head_table.shape[1])
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def written_out(model, graph, rows):
    """The objective of OF_NEW's inductive_entity, example by example, with a model that has its row."""
    larger = with_rows(model, rows[None])
    known = list(range(NEW))
    total = torch.zeros((), dtype=torch.float64)

    def loss(example, asked, *, share):
        head, relation, tail = (torch.tensor([int(id)]) for id in example)
        scores = larger.score_tails(head, relation)[0] if asked == "tail" else larger.score_heads(relation, tail)[0]
        given, answer = (int(head), int(tail)) if asked == "tail" else (int(tail), int(head))
        if given == NEW:  # which is no candidate for its own queries
            return share * (torch.logsumexp(scores[known], 0) - scores[answer])
        found = share * (torch.logsumexp(scores, 0) - scores[answer])
        return found if answer == NEW else found - share * (torch.logsumexp(scores[known], 0) - scores[answer])

    own = [triple for triple in OF_NEW.numpy() if triple[0] != triple[2]]
    examples = np.concatenate([np.array(own), graph.train])
    if model.reciprocal:
        examples = with_reciprocals(examples, 2)
    for example in examples:
        for asked in ("tail",) if model.reciprocal else ("tail", "head"):
            total = total + loss(example, asked, share=1.0 if model.reciprocal else 0.5)
        if NEW in example[[0, 2]]:
            f = larger.factors(*(torch.tensor([int(id)]) for id in example))
            total = total + WEIGHT * DURA.per_triple(f)[0]
    return total


@pytest.mark.parametrize("reciprocal", [True, False])
@pytest.mark.parametrize("kind", BILINEAR)
def test_the_objective_is_that_of_training_but_for_constants(kind, reciprocal, graph):
    model = model_of(kind, graph, reciprocal=reciprocal)
    problem = Problem.of(NEW, OF_NEW, FrozenContext.of(model, graph, recipe=recipe_of()))
    with torch.no_grad():
        here, there = rows_of(model, seed=1), rows_of(model, seed=2)
        wanted = written_out(model, graph, here) - written_out(model, graph, there)
        torch.testing.assert_close(problem(here) - problem(there), wanted)


@pytest.mark.parametrize("reciprocal", [True, False])
@pytest.mark.parametrize("kind", BILINEAR)
def test_the_problem_is_strongly_convex_and_solved(kind, reciprocal, graph):
    model = model_of(kind, graph, reciprocal=reciprocal)
    problem = Problem.of(NEW, OF_NEW, FrozenContext.of(model, graph, recipe=recipe_of()))
    here, direction, step = rows_of(model), rows_of(model, seed=3), 1e-5
    _, slope = problem.slope(here)
    with torch.no_grad():
        difference = (problem(here + step * direction) - problem(here - step * direction)) / (2 * step)
    torch.testing.assert_close((slope * direction).sum(), difference, rtol=1e-6, atol=1e-7)
    hessian = torch.autograd.functional.hessian(problem, here).reshape(here.numel(), -1)
    # Each example adds λ λ1 ‖row‖²; the third triple is with itself, and the rows of CP have half of the examples each.
    num_examples = 3 if model.two_entity_tables or not reciprocal else 6
    if model.two_entity_tables and not reciprocal:
        num_examples = 1
    assert float(torch.linalg.eigvalsh(hessian)[0]) >= 2 * WEIGHT * PLAIN * num_examples - 1e-9
    value, slope = problem.slope(minimise(problem, problem.start()))
    assert float(slope.abs().max()) < 1e-8
    assert float(value) < float(problem.slope(here)[0])


@pytest.mark.parametrize("kind", BILINEAR)
def test_numbers_of_32_bits_are_enough(kind, graph):
    """What is solved to four digits answers as what is solved to ten."""
    model = model_of(kind, graph)
    exact, short = (
        Problem.of(NEW, OF_NEW, FrozenContext.of(some, graph, recipe=recipe_of()))
        for some in (model, model_of(kind, graph).float())
    )
    wanted, found = (minimise(problem, problem.start()) for problem in (exact, short))
    assert found.dtype == torch.float32
    assert float((found - wanted).norm()) < 3e-3 * float(wanted.norm())


def test_log_sums_have_the_slopes_of_what_they_stand_for():
    """Also the second ones, which explanations ask for."""
    random = torch.Generator().manual_seed(0)
    images, candidates = (torch.randn(num, 4, generator=random, dtype=torch.float64) for num in (3, 9))
    images.requires_grad_()
    wanted = torch.logsumexp(images @ candidates.T, dim=-1)
    torch.testing.assert_close(log_sums_with_slopes(images, candidates), wanted)
    assert torch.autograd.gradcheck(lambda some: log_sums_with_slopes(some, candidates), images)
    assert torch.autograd.gradgradcheck(lambda some: log_sums_with_slopes(some, candidates), images)


@pytest.mark.parametrize(
    ("regularizer", "keeps", "ridge"),
    [
        (DURA, True, 0.0),
        (kg.Frobenius(0.1), True, 0.0),
        (kg.N3(0.1), True, RIDGE),
        (kg.BasicDURA(0.1), True, RIDGE),
        (kg.DURA(0.1, plain=0.0), True, RIDGE),
        (kg.DURA(0.0), False, RIDGE),
        (kg.RegP1(0.1), False, RIDGE),
        (kg.UnweightedDURA(0.1), False, RIDGE),
        (kg.NoRegularizer(), False, RIDGE),
    ],
)
def test_where_squares_of_the_rows_are_missing_there_is_a_ridge(regularizer, keeps, ridge, graph):
    penalty = Penalty.of(regularizer)
    assert (penalty.regularizer is not None, penalty.ridge) == (keeps, ridge)
    problem = Problem.of(NEW, OF_NEW, FrozenContext.of(model_of(kg.CP, graph), graph, recipe=recipe_of(regularizer)))
    _, slope = problem.slope(minimise(problem, problem.start()))
    assert float(slope.abs().max()) < 1e-8


def test_answers_count_by_their_frequency_as_in_training(graph):
    context = FrozenContext.of(model_of(kg.CP, graph), graph, recipe=recipe_of(frequency_weight=0.4))
    train = np.concatenate([graph.train, OF_NEW[:3].numpy().astype(np.int32)])
    weights = context.with_inductive_entities(1, train).weights_of(torch.arange(13))
    counts = np.bincount(train[:, [0, 2]].reshape(-1))
    wanted = 0.4 * counts / counts.max() + 0.6
    wanted /= wanted[train[:, [0, 2]]].mean()
    np.testing.assert_allclose(weights.numpy(), wanted)


def test_a_known_entity_is_left_out_of_the_sums_that_it_stands_against(graph):
    model = model_of(kg.ComplEx, graph)
    [queries] = queries_of(model, graph.train)
    others = [id for id in range(12) if id != 4]
    wanted = torch.logsumexp(queries.images @ model.entities[others].T, dim=1)
    torch.testing.assert_close(queries.sums_without(model.entities[4]), wanted)
    weights = queries.weights_without(4, torch.ones(len(queries.answers), dtype=torch.float64))
    assert float(weights.sum()) == 2 * len(graph.train) - 2 * int((graph.train[:, [0, 2]] == 4).any(1).sum())


def test_of_many_examples_some_are_drawn_and_count_for_all(graph):
    [queries] = queries_of(model_of(kg.CP, graph), graph.train, most=10)
    assert len(queries.answers) == 10
    assert queries.share * 10 == 2 * len(graph.train)


@pytest.mark.parametrize(("num_entities", "wanted"), [(100, 5_000), (10_000_000, 2_500), (100_000_000, 1_000)])
def test_the_more_numbers_entities_have_the_fewer_examples_are_looked_at(num_entities, wanted):
    with torch.device("meta"):
        model = kg.ComplEx(kg.GraphShape(num_entities, 1), dim=2)
    assert num_examples(model) == wanted


def test_newcomers_with_triples_of_each_other_are_solved_in_turns(graph):
    model = model_of(kg.DistMult, graph)
    triples = np.array([(12, 0, 3), (12, 1, 13), (13, 0, 14), (5, 1, 14)], dtype=np.int32)
    train = np.concatenate([graph.train, triples])
    context = FrozenContext.of(model, graph, recipe=recipe_of()).with_inductive_entities(3, train)
    rows = embed_entities(triples, context)
    context = replace(context, inductive_entities=rows)
    for entity in (12, 13, 14):
        mine = torch.from_numpy(triples[(triples[:, [0, 2]] == entity).any(1)]).long()
        problem = Problem.of(entity, mine, context, bystanding=len(mine) / context.usual_triples)
        best = minimise(problem, problem.start())
        torch.testing.assert_close(rows[entity - 12], best, rtol=0.02, atol=0.02)


# -- few rivals in the place of all -------------------------------------------------------------------------


def agrees(problem, rows, *, seed):
    """Near some rows a problem of few has the objective and the gradient there; how far off it is elsewhere."""
    near, far = Near.of(problem).looked(rows.numpy()), rows_of(problem.context.model, seed=seed)
    (value, slope), (wanted, wanted_slope) = near(rows.numpy()), problem.slope(rows)
    assert value == pytest.approx(float(wanted), rel=1e-12)
    np.testing.assert_allclose(slope, wanted_slope.numpy(), rtol=1e-9, atol=1e-11)
    there, step = far.numpy(), 1e-5 * rows_of(problem.context.model, seed=seed + 1).numpy()
    difference = (near(there + step)[0] - near(there - step)[0]) / 2
    assert np.vdot(near(there)[1], step) == pytest.approx(difference, rel=1e-6)
    return abs(float(problem.slope(far)[0]) - near(there)[0])


def test_log_sums_of_few_rivals_are_nowhere_above_those_of_all(monkeypatch):
    monkeypatch.setattr(inductive, "FEW", 5)
    random = np.random.default_rng(0)
    candidates, images = (torch.from_numpy(random.normal(size=(num, 4))) for num in (30, 3))
    few = inductive.Few.of(candidates, images)
    for there in (images, images + 1, 3 * images, -images):
        sums, wanted = few(there.numpy())[0], (there @ candidates.T).logsumexp(1).numpy()
        assert (sums <= wanted + 1e-12).all()
        assert (np.abs(sums - wanted).max() < 1e-12) == (there is images)


def test_few_that_rise_stand_for_all_where_they_were_chosen(monkeypatch):
    monkeypatch.setattr(inductive, "FEW", 5)
    random = np.random.default_rng(0)
    vectors, constants, weights = random.normal(size=(30, 4)), random.normal(size=30), random.random(30)
    everyone, row = Rising(vectors, constants, weights), random.normal(size=4)
    few = everyone.looked(row)
    assert len(few.vectors) == 6
    assert few(row)[0] == pytest.approx(everyone(row)[0], rel=1e-12)
    np.testing.assert_allclose(few(row)[1], everyone(row)[1], rtol=1e-10)
    assert few(row + 0.1)[0] == pytest.approx(everyone(row + 0.1)[0], rel=0.01)
    steepest = np.argsort(weights / (1 + np.exp(-vectors @ row - constants)))[-5:]
    np.testing.assert_array_equal(np.sort(few.constants[:-1]), np.sort(constants[steepest]))
    assert Rising(vectors[:5], constants[:5], weights[:5]).looked(row)(row + 1)[0] == pytest.approx(
        weights[:5] @ np.logaddexp(0, vectors[:5] @ (row + 1) + constants[:5])
    )


@pytest.mark.parametrize("weights", [np.zeros(9), np.full(9, 1e-40), np.r_[np.ones(5), np.zeros(4)]])
def test_of_those_that_weigh_nothing_nothing_is_left(weights, monkeypatch):
    monkeypatch.setattr(inductive, "FEW", 5)
    vectors = np.random.default_rng(0).normal(size=(9, 4))
    everyone, row = Rising(vectors, np.full(9, -50.0), weights), np.ones(4)
    value, slope = everyone.looked(row)(row)
    assert value == pytest.approx(everyone(row)[0], abs=1e-12)
    np.testing.assert_allclose(slope, everyone(row)[1], atol=1e-12)


@pytest.mark.parametrize("reciprocal", [True, False])
@pytest.mark.parametrize("kind", BILINEAR)
def test_few_rivals_stand_for_all_where_they_were_chosen(kind, reciprocal, graph, monkeypatch):
    model = model_of(kind, graph, reciprocal=reciprocal)
    problem = Problem.of(NEW, OF_NEW, FrozenContext.of(model, graph, recipe=recipe_of()))
    assert agrees(problem, rows_of(model), seed=5) < 1e-9  # all of them are few
    monkeypatch.setattr(inductive, "FEW", 3)
    assert agrees(problem, rows_of(model), seed=5) > 1e-6


@pytest.mark.parametrize("kind", [kg.CP, kg.QuatE, kg.RESCAL])
@pytest.mark.parametrize("regularizer", [kg.Frobenius(0.1), kg.N3(0.1), kg.BasicDURA(0.1), kg.NoRegularizer()])
def test_their_penalty_is_that_of_all(kind, regularizer, graph, monkeypatch):
    if kind is kg.RESCAL and isinstance(regularizer, kg.N3):
        pytest.skip("N3 is for diagonal models")
    monkeypatch.setattr(inductive, "FEW", 3)
    model = model_of(kind, graph)
    problem = Problem.of(NEW, OF_NEW, FrozenContext.of(model, graph, recipe=recipe_of(regularizer)))
    agrees(problem, rows_of(model), seed=7)


def test_an_answer_that_is_no_rival_counts_beside_the_few(graph, monkeypatch):
    monkeypatch.setattr(inductive, "FEW", 3)
    model = model_of(kg.ComplEx, graph)
    context = FrozenContext.of(model, graph, recipe=recipe_of())
    context = replace(context, inductive_entities=torch.stack([rows_of(model, seed=8), rows_of(model, seed=9)]))
    problem = Problem.of(NEW, torch.tensor([(NEW, 0, 3), (NEW, 1, NEW + 1), (NEW, 0, NEW + 1)]), context)
    assert any(role.apart.any() and role.asks for role in problem.roles)
    agrees(problem, rows_of(model), seed=5)


@pytest.fixture
def crowded(monkeypatch):
    """The problem of an entity with 600 rivals, of context 40 are looked at; and the same in numbers of 64 bits."""
    monkeypatch.setattr(inductive, "FEW", 40)
    random = np.random.default_rng(1)
    triples = np.unique(np.stack([random.integers(0, n, 900) for n in (600, 3, 600)], axis=1), axis=0)
    graph = graph_of(triples, num_entities=600, num_relations=3)
    model = kg.ComplEx(graph.shape, dim=6, init_scale=0.8, seed=2)
    mine = torch.tensor([(600, 0, 3), (600, 2, 9), (5, 1, 600)])
    return [
        Problem.of(600, mine, FrozenContext.of(some, graph, recipe=recipe_of()))
        for some in (model.eval(), kg.ComplEx(graph.shape, dim=6, init_scale=0.8, seed=2).double().eval())
    ]


def test_few_rivals_at_a_time_lead_to_the_least_point_of_all(crowded, monkeypatch):
    problem, exact = crowded
    wanted = plainly(exact, exact.start().numpy(), tolerance=1e-10)
    looks, look = [], inductive.Few.of
    monkeypatch.setattr(inductive.Few, "of", lambda *given: looks.append(1) or look(*given))
    monkeypatch.setattr(inductive_solver, "plainly", None)
    found = minimise(problem, problem.start())
    assert 2 < len(looks) <= inductive_solver.MOST_LOOKS
    assert float(problem.slope(found)[1].abs().max()) / 3 < 2 * inductive_solver.TOLERANCE
    np.testing.assert_allclose(found.numpy(), wanted, atol=2e-3 * np.abs(wanted).max())


def test_where_few_rivals_do_not_lead_there_every_step_looks_at_all(crowded, monkeypatch):
    _, exact = crowded
    monkeypatch.setattr(inductive_solver, "MOST_LOOKS", 2)
    _, slope = exact.slope(minimise(exact, exact.start()))
    assert float(slope.abs().max()) < 1e-8


def test_least_finds_the_end_of_a_long_valley():
    curvature = np.logspace(0, 3, 20)
    found = least(
        lambda x: (float(curvature @ np.square(x - 1)) / 2, curvature * (x - 1)), np.zeros(20), tolerance=1e-9
    )
    np.testing.assert_allclose(found, np.ones(20), rtol=1e-7)
    calls = []

    def softplus(x):
        calls.append(1)
        return float(np.logaddexp(0, -9 * x).sum() + x.sum() / 10), -9 / (1 + np.exp(9 * x)) + 0.1

    found = least(softplus, np.zeros(1), tolerance=1e-9)
    assert found == pytest.approx(np.log(89) / 9)
    assert len(calls) < 30


# -- names, graphs, models ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def beads() -> kg.Run:
    """Beads whose colour tells their shape and their maker; trained in seconds."""
    kinds = ("colour", "shape", "maker")
    named = [(f"bead {n}", kind, f"{kind} {n % 4}") for n in range(40) for kind in kinds]
    entities = list(dict.fromkeys(name for head, _, tail in named for name in (head, tail)))
    ids = np.array([(entities.index(h), kinds.index(r), entities.index(t)) for h, r, t in named], dtype=np.int32)
    held = np.arange(len(ids)) % 29 == 0
    graph = kg.Graph(
        "beads", kg.Vocabulary(entities), kg.Vocabulary(kinds, kind="relation"), ids[~held], ids[:0], ids[held]
    )
    choice = kg.Optimizer(learning_rate=0.3)
    return kg.train(kg.ComplEx(graph.shape, dim=8), graph, regularizer=DURA, optimizer=choice, epochs=20, batch_size=50)


def test_a_newcomer_answers_what_its_triples_imply(beads):
    found = with_inductive_entity(beads.model, beads.graph, "bead 99", triples=[("bead 99", "colour", "colour 3")])
    predictor = kg.Predictor(found.model, found.graph)
    assert predictor.tails("bead 99", "shape", k=1)[0].entity == "shape 3"
    assert predictor.tails("bead 99", "maker", k=1)[0].entity == "maker 3"
    assert predictor.tails("bead 99", "colour", k=1)[0].split == "train"
    assert "bead 99" in {answer.entity for answer in predictor.heads("shape", "shape 3", k=11)}


def test_predictor_add_gives_another_predictor(beads):
    predictor = kg.Predictor(beads.model, beads.graph, recipe=beads.recipe)
    more = predictor.add("bead 99", triples=[("bead 99", "colour", "colour 1")])
    more = more.add("bead 100", triples=[("bead 100", "maker", "maker 2"), ("bead 100", "colour", "colour 2")])
    assert more.tails("bead 99", "maker", k=1)[0].entity == "maker 1"
    assert more.tails("bead 100", "shape", k=1)[0].entity == "shape 2"
    assert len(predictor.graph.entities) == len(more.graph.entities) - 2


def test_what_was_given_stays_as_it_was(beads):
    before = {name: table.clone() for name, table in beads.model.state_dict().items()}
    triples = [("a", "colour", "colour 1"), ("b", "maker", "a"), ("a", "colour", "colour 1")]
    found = extended(beads.model, beads.graph, triples, recipe=beads.recipe)
    assert found.inductive_entities == {"a": 2, "b": 1}
    assert found.graph.entities.names.to_pylist()[-2:] == ["a", "b"]
    assert len(found.graph.train) == len(beads.graph.train) + 2
    assert found.graph.fingerprint != beads.graph.fingerprint
    for name, table in beads.model.state_dict().items():
        torch.testing.assert_close(table, before[name])
        torch.testing.assert_close(found.model.state_dict()[name][: len(table)], table)


def test_labels_stay_and_names_are_found_as_questions_find_them(graph):
    labelled = replace(graph, entities=kg.Vocabulary(graph.entities.names, {"e3": "three"}))
    found = extended(model_of(kg.CP, labelled), labelled, [("new", "r0", "three"), (5, "R1", "new")])
    assert found.graph.train[-2:].tolist() == [[5, 1, 12], [12, 0, 3]]
    assert [found.graph.entities.label(id) for id in (3, 12)] == ["three", "new"]


def test_refusals(beads, graph):
    def add(name, *triples):
        return with_inductive_entity(beads.model, beads.graph, name, triples=list(triples))

    with pytest.raises(kg.RequestError, match="'Bead 3' is an entity that the graph knows already"):
        add("Bead 3", ("Bead 3", "colour", "colour 1"))
    with pytest.raises(kg.RequestError, match="placed by at least one triple; none came for 'x'"):
        add("x")
    with pytest.raises(kg.RequestError, match=r"\(bead 1, colour, colour 1\) is no triple of 'x'"):
        add("x", ("bead 1", "colour", "colour 1"))
    with pytest.raises(kg.RequestError, match="No entity is named 'colour 11' among the 52 known. Did you mean"):
        add("x", ("x", "colour", "colour 11"))
    with pytest.raises(kg.RequestError, match="No relation is named 'color' among the 3 known. Did you mean 'colour'"):
        add("x", ("x", "color", "colour 1"))
    with pytest.raises(kg.RequestError, match="'x' has no triple that leads to an entity that the graph knows"):
        add("x", ("x", "colour", "x"))
    with pytest.raises(kg.RequestError, match="'x', 'y' have no triple that leads"):
        extended(beads.model, beads.graph, [("x", "colour", "y")])
    with pytest.raises(kg.RequestError, match="has no new entity: the graph knows both"):
        extended(beads.model, beads.graph, [("bead 1", "colour", "colour 2")])
    for model in (kg.TransE(graph.shape, dim=2), kg.Dual(kg.CP(graph.shape, dim=2)), tucker(graph)):
        with pytest.raises(kg.RequestError, match=f"convex problem of its own.*This {type(model).__name__} is none"):
            with_inductive_entity(model, graph, "x", triples=[("x", "r0", "e1")])


def tucker(graph):
    return kg.TuckER(graph.shape, dim=2, batch_norm=True)


class Biased(kg.DistMult):
    """A model with a number of its own for each entity."""

    def __init__(self, shape, **choices):
        super().__init__(shape, **choices)
        self.biases = torch.nn.Parameter(torch.zeros(shape.num_entities))


def test_a_model_with_other_tables_of_entities_is_refused(graph):
    with pytest.raises(kg.RequestError, match="Biased has numbers of its entities in other tables"):
        extended(Biased(graph.shape, dim=2), graph, [("x", "r0", "e1")])


# -- files --------------------------------------------------------------------------------------------------

LINES = """bead 70\tcolour\tcolour 2
bead 70\tmaker\tmaker 2
bead 70\tgrown in\tEgypt
bead 71\tmaker\tmaker 0
bead 71\tcolour\tcolour 9
bead 3\tcolour\tcolour 2
lost\tcolour\talone
"""


@pytest.fixture
def kept(beads, tmp_path):
    replace(beads, graph=beads.graph).save(tmp_path / "beads")
    (tmp_path / "new.tsv").write_text(LINES, encoding="utf-8")
    return tmp_path


def test_a_file_extends_a_run_that_can_be_asked(run_cli, kept):
    told = run_cli("extend", kept / "beads", kept / "new.tsv", "--out", kept / "more", "--device", "cpu", "--json")
    assert told.code == 0, told.err
    note = json.loads((kept / "more" / "extension.json").read_text(encoding="utf-8"))
    assert note == told.json["extension"]
    assert note["entities"] == {"bead 70": 2, "bead 71": 2, "colour 9": 1}
    assert (note["num_entities"], note["num_triples"]) == (3, 4)
    assert note["remarks"] == [
        "1 triple is left out: the run knows no relation 'grown in'.",
        "1 triple is left out: the run knows both entities, and is not trained again.",
        "No triple leads from 'Egypt', 'lost', 'alone' to an entity that the run knows: left out.",
    ]
    asked = run_cli("predict", kept / "more", "--head", "bead 70", "--relation", "shape", "--top", 1, "--json")
    assert asked.json["answers"][0]["name"] == "shape 2"
    run = kg.load_run(kept / "more")
    assert run.report.metrics.num_queries == 2 * len(run.graph.test)
    assert kg.evaluate(run.model, run.graph).mrr == pytest.approx(run.report.mrr)


def test_what_is_told_of_an_extension(run_cli, kept):
    told = run_cli("extend", kept / "beads", kept / "new.tsv", "--out", kept / "more", "--device", "cpu")
    assert [" ".join(line.split()) for line in told.out.splitlines()[:3]] == ["new triples", "bead 70 2", "bead 71 2"]
    assert "Kept in" in told.err
    assert "dualkg predict" in told.err
    again = run_cli("extend", kept / "beads", kept / "new.tsv", "--out", kept / "more")
    assert (again.code, "exists already. Name a new folder with --out" in again.err) == (2, True)
    kg.training.RunFolder(kept / "more").check_free(overwrite=True)


def test_an_extended_run_can_be_extended(kept):
    extend_run(kept / "beads", kept / "new.tsv", out=kept / "more", device="cpu")
    (kept / "again.csv").write_text("tail,relation,head\nbead 70,maker,bead 80\n", encoding="utf-8")
    _, note = extend_run(kept / "more", kept / "again.csv", out=kept / "most", device="cpu")
    assert note["entities"] == {"bead 80": 1}
    assert list(note["before"]["entities"]) == ["bead 70", "bead 71", "colour 9"]


def test_a_file_without_newcomers_is_refused(run_cli, kept):
    (kept / "old.tsv").write_text("bead 3\tcolour\tcolour 2\n", encoding="utf-8")
    told = run_cli("extend", kept / "beads", kept / "old.tsv", "--out", kept / "more")
    assert told.code == 2
    assert "joins no new entity to the 52 that the run knows. 1 triple is left out: the run knows both" in told.err
    assert not (kept / "more").exists()
    (kept / "odd.tsv").write_text("x\tcolor\tcolour 2\n", encoding="utf-8")
    assert "Did you mean 'colour'?" in run_cli("extend", kept / "beads", kept / "odd.tsv", "--out", kept / "more").err


# -- the study ----------------------------------------------------------------------------------------------


def test_newcomers_are_counted():
    one = Measured("extended", 0, 1, 1724, 5, *[Metrics.of(np.ones(3))] * 4, seconds=1.0)
    assert counted([one, one]) == "1,724 entities"
    assert counted([one, replace(one, num_new=722)]) == "722 to 1,724 entities"


def test_the_study_compares_with_training_anew(beads):
    graph = replace(beads.graph, test=beads.graph.train[::7], train=np.delete(beads.graph.train, np.s_[::7], axis=0))
    recipe = beads.recipe.with_changes({"training.epochs": 3})
    found = study(graph, recipe, share=0.2, counts=(1, None), seeds=(1,), device="cpu")
    assert [(one.way, one.given) for one in found] == [
        ("extended", 1),
        ("retrained", 1),
        ("extended", None),
        ("retrained", None),
        ("mean", 0),
        ("random", 0),
    ]
    assert {one.seed for one in found} == {1}
    assert len({one.inductive_entities.num_queries for one in found}) == 1
    best, mean = found[2], found[4]
    assert best.inductive_entities.mrr > mean.inductive_entities.mrr
    assert found[0].num_given == found[1].num_given < best.num_given
    assert json.loads(json.dumps(best.as_dict()))["inductive_entities"]["mrr"] == best.inductive_entities.mrr
    with pytest.raises(kg.RequestError, match="lies between 0 and 1; it is 2"):
        study(graph, recipe, share=2)
