"""Training with decisions: accepted facts are training triples, rejected ones hard negatives."""

import json

import numpy as np
import pytest
import torch

import dualkg as kg
from dualkg.data.decisions import with_decisions
from dualkg.data.graph import load_saved_graph, save_graph
from dualkg.errors import InvalidValue
from dualkg.evaluation import evaluate
from dualkg.losses.rejected import WithRejected, unlikelihood
from dualkg.tables.scores import EntityScores
from dualkg.tables.shard import Shard
from tests.conftest import graph_of
from tests.raising import refused

NUM_PERSONS = 60
NUM_CITIES = 12
NUM_COUNTRIES = 4
LIVES, LOCATED, CITIZEN, SPEAKS = range(4)


def decisions_file(path, graph, accepted=(), rejected=()):
    lines = []
    for verdict, triples in (("accepted", accepted), ("rejected", rejected)):
        for head, relation, tail in triples:
            names = (graph.entities[head], graph.relations[relation], graph.entities[tail])
            decision = dict(zip(("head", "relation", "tail"), names, strict=True))
            lines.append(json.dumps({**decision, "verdict": verdict}))
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


def test_accepted_facts_are_trained_on_and_those_of_other_splits_are_not(tmp_path):
    graph = graph_of([(0, 0, 1), (1, 0, 2)], [(2, 0, 3)], [(3, 0, 4)], num_entities=6)
    path = decisions_file(
        tmp_path / "decisions.jsonl",
        graph,
        accepted=[(4, 0, 5), (2, 0, 3), (3, 0, 4), (0, 0, 1), (4, 0, 5)],
        rejected=[(5, 0, 0)],
    )
    for source in (path, tmp_path):  # the file, and the folder of a run
        changed = with_decisions(graph, source)
        assert changed.train.tolist() == [[0, 0, 1], [1, 0, 2], [4, 0, 5]]
        assert changed.rejected.tolist() == [[5, 0, 0]]
        assert changed.valid is graph.valid
        assert changed.test is graph.test
        assert "1 accepted triples were added" in changed.notes[-1]
    assert changed.fingerprint != with_decisions(graph, tmp_path / "decisions.jsonl").name

    save_graph(changed, tmp_path / "graph")
    saved = load_saved_graph(tmp_path / "graph")
    assert saved.rejected.tolist() == changed.rejected.tolist()
    assert saved.with_fingerprint().fingerprint == changed.fingerprint
    assert saved.fingerprint != graph.with_fingerprint().fingerprint


def test_a_decision_on_a_symmetric_fact_holds_in_both_directions(tmp_path):
    pairs = [(number, 0, number + 1) for number in range(6)]
    graph = graph_of([*pairs, *(pair[::-1] for pair in pairs)], num_entities=10)
    path = decisions_file(tmp_path / "some.jsonl", graph, [(7, 0, 8)], [(8, 0, 9)])
    changed = with_decisions(graph, path)
    assert changed.train[-2:].tolist() == [[7, 0, 8], [8, 0, 7]]
    assert changed.rejected.tolist() == [[8, 0, 9], [9, 0, 8]]


@pytest.mark.parametrize("text", ["no JSON", '{"head": "e0"}', '["e0"]', "{}"])
def test_a_file_that_has_no_decisions_is_refused(tmp_path, text):
    path = tmp_path / "bad.jsonl"
    path.write_text(f"\n{text}")
    graph = graph_of([(0, 0, 1)])
    with refused(InvalidValue, setting="data.decisions", found=f"line 2 of {path}"):
        with_decisions(graph, path)
    with pytest.raises(InvalidValue, match="No such file"):
        with_decisions(graph, tmp_path / "none")


def test_unlikelihood_by_hand():
    """Two entities with scores 0 and log 3: the answer has probability 3/4, in both queries."""

    class Fixed:
        reciprocal = False

        def queries(self, given, relations, side):
            return None

        def entity_scores(self, factors, side):
            scores = torch.tensor([[0.0, np.log(3)]])
            return EntityScores(
                scores if side == "tail" else scores.flip(1), Shard(2, is_whole=True)
            )

    loss = unlikelihood(Fixed(), torch.tensor([[0, 0, 1]]))
    assert float(loss) == pytest.approx(np.log(4))


def world_of_persons(seed):
    """Persons live in cities of countries, are their citizens and speak their languages.

    Most of what follows from a home is left out: the rest of the truth is to be found.
    """
    random = np.random.default_rng(seed)
    cities = NUM_PERSONS + np.arange(NUM_CITIES)
    countries = NUM_PERSONS + NUM_CITIES + np.arange(NUM_COUNTRIES)
    languages = countries + NUM_COUNTRIES
    homes = random.integers(0, NUM_CITIES, NUM_PERSONS)
    train = [(city, LOCATED, countries[i % NUM_COUNTRIES]) for i, city in enumerate(cities)]
    derived = []
    for person, home in enumerate(homes):
        train.append((person, LIVES, cities[home]))
        derived.append((person, CITIZEN, countries[home % NUM_COUNTRIES]))
        derived.append((person, SPEAKS, languages[home % NUM_COUNTRIES]))
    derived = random.permutation(np.array(derived))
    num_known = 24
    graph = graph_of(
        [*train, *derived[:num_known]],
        derived[num_known : num_known + 8],
        [(0, LIVES, cities[homes[0]])],
        num_entities=int(languages[-1]) + 1,
        num_relations=4,
    )
    return graph, {tuple(triple) for triple in derived[num_known + 8 :].tolist()}


def train_on(graph, seed):
    model = kg.ComplEx(graph.shape, dim=16, seed=seed)
    return kg.train(
        model, graph, regularizer=kg.DURA(0.02), batch_size=32, epochs=40, seed=seed
    ).model


def mrr(model, graph, held_out, decided):
    """The MRR of triples that no training has seen; other true answers are filtered."""
    triples = np.array(sorted(held_out), dtype=np.int32)
    true = np.array(sorted(decided), dtype=np.int32).reshape(-1, 3)
    known = np.concatenate([graph.train, true])
    asked = kg.Graph("asked", graph.entities, graph.relations, known, graph.valid, triples)
    return evaluate(model, asked).metrics["mrr"]


@pytest.mark.slow
@pytest.mark.parametrize("verdicts", ["accepted", "rejected", "both"])
def test_decisions_help_on_triples_that_nobody_has_seen(tmp_path, verdicts):
    """A curator who knows the truth decides on the first answer to two of three queries; the true
    answers that were not among them are held out.
    """
    gains = []
    for seed in range(4):
        graph, truth = world_of_persons(seed)
        before = train_on(graph, seed)
        queries = [triple[:2] for index, triple in enumerate(sorted(truth)) if index % 3]
        heads, relations = (list(ids) for ids in zip(*queries, strict=True))
        answers = kg.Predictor(before, graph).tails(heads, relations, k=1, known="omit")
        decided = {(*query, answer.id) for query, [answer] in zip(queries, answers, strict=True)}
        held_out = truth - decided
        accepted = decided & truth if verdicts != "rejected" else ()
        rejected = decided - truth if verdicts != "accepted" else ()
        path = decisions_file(tmp_path / f"{seed}.jsonl", graph, accepted, rejected)
        after = train_on(with_decisions(graph, path), seed)
        figures = [mrr(model, graph, held_out, decided & truth) for model in (before, after)]
        gains.append(figures[1] - figures[0])
    print(verdicts, gains)
    assert sum(gain > 0 for gain in gains) >= 3
    assert np.mean(gains) > 0.02


def test_steps_take_turns_on_many_rejected_triples(small_graph):
    model = kg.ComplEx(small_graph.shape, dim=2)
    rejected = torch.zeros(300, 3, dtype=torch.long)
    rejected[:, 0] = torch.arange(300)
    loss = WithRejected(lambda model, factors: torch.tensor(0.0), rejected)
    batch = torch.from_numpy(small_graph.train[:4]).long()
    drawn = loss._drawn(model.factors(*batch.T))
    again = loss._drawn(model.factors(*batch.T))
    other = loss._drawn(model.factors(*batch.flip(0)[:3].T))
    assert len(drawn) == 128
    assert torch.equal(drawn, again)
    assert not torch.equal(drawn, other)
