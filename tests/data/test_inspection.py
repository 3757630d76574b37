"""Statistics of graphs worked out by hand, and of random graphs by plain loops."""

import json
from dataclasses import asdict, replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import dualkg as kg
from dualkg.data.inspection import Inspection, connected_components
from tests.conftest import graph_of

ISA, HAS, ALSO, NEXT, PLAIN, RARE = range(
    6
)  # HAS is the inverse of ISA, ALSO a duplicate of it, NEXT symmetric


@pytest.fixture(scope="module")
def found() -> Inspection:
    isa = [(i, ISA, i + 10) for i in range(6)]
    has = [(i + 10, HAS, i) for i in range(5)]
    also = [(i, ALSO, i + 10) for i in range(5)]
    following = [(0, NEXT, 1), (1, NEXT, 0), (2, NEXT, 3), (3, NEXT, 2), (4, NEXT, 5)]
    plain = [(20, PLAIN, 20), (20, PLAIN, 21), (20, PLAIN, 21), (20, PLAIN, 22)]
    valid = [(5, ALSO, 15)]  # by ISA in train
    test = [
        (15, HAS, 5),  # by ISA in train; ALSO has the pair in valid only
        (5, NEXT, 4),  # symmetric
        (0, ISA, 10),  # in train itself, and by HAS and ALSO
        (0, PLAIN, 23),  # 23 is unseen
        (20, RARE, 0),  # RARE is unseen
        (21, ISA, 20),  # PLAIN has the reverse, and is no inverse of ISA
        (20, ISA, 22),  # PLAIN has the same pair, and is no duplicate of ISA
        (20, NEXT, 20),  # a self-loop has no reverse; PLAIN has the same pair
    ]
    return graph_of(isa + has + also + following + plain, valid, test).inspect()


def test_counts(found):
    empty = {"duplicates": 0, "self_loops": 0}
    assert found.counts == {
        "train": {"triples": 25, "duplicates": 1, "self_loops": 1, "entities": 15, "relations": 5},
        "valid": {"triples": 1, **empty, "entities": 2, "relations": 1},
        "test": {"triples": 8, "duplicates": 0, "self_loops": 1, "entities": 9, "relations": 5},
    }


def test_degrees_of_distinct_training_triples(found):
    # 0 to 4: ISA, HAS, ALSO and NEXT once or twice; 5: ISA and NEXT; 10 to 14: 3; 15: 1; 20: 2 + 1
    # + 1; 21 and 22: 1
    degrees = [5, 5, 5, 5, 4, 2, 3, 3, 3, 3, 3, 1, 4, 1, 1]
    assert sum(degrees) == 2 * 24
    assert found.degrees.mean == pytest.approx(48 / 15)
    assert (found.degrees.median, found.degrees.max) == (3, 5)
    assert [tuple(one.values()) for one in found.degrees.distribution] == [
        (1, 1, 3),
        (2, 3, 6),
        (4, 7, 6),
    ]
    assert found.degrees.hubs[0] == {"entity": "e0", "degree": 5}
    assert [hub["degree"] for hub in found.degrees.hubs] == [5, 5, 5, 5, 4]


def test_components_of_train(found):
    # {0, 1, 10, 11}, {2, 3, 12, 13}, {4, 5, 14, 15} and {20, 21, 22}
    assert asdict(found.components) == {"number": 4, "largest": 4, "share": 4 / 15}


def test_relations_and_cardinalities(found):
    isa = found.by_relation["r0"]
    plain = found.by_relation["r4"]
    assert asdict(isa) == {
        **{"train": 6, "valid": 0, "test": 3, "cardinality": "1-1"},
        **{"tails_per_head": 1, "heads_per_tail": 1, "self_loops": 0, "symmetry": 0},
    }
    assert (plain.train, plain.cardinality, plain.tails_per_head, plain.heads_per_tail) == (
        4,
        "1-N",
        3,
        1,
    )
    assert plain.self_loops == 1
    assert found.by_relation["r3"].symmetry == 1
    assert found.by_cardinality == {
        "1-1": {"relations": 4, "train": 21, "valid": 1, "test": 6},
        "1-N": {"relations": 1, "train": 4, "valid": 0, "test": 1},
        "unseen": {"relations": 1, "train": 0, "valid": 0, "test": 1},
    }


def test_redundant_relations(found):
    """ISA has 8 pairs, two of which (in test) the others lack; NEXT and its reverse are the
    same 6.
    """
    rows = {(row.kind, row.relation, row.other): row for row in found.redundant}
    assert rows.keys() == {("inverse", "r1", "r2"), ("symmetric", "r3", "r3")}
    assert rows["inverse", "r1", "r2"].common == 6
    assert rows["inverse", "r1", "r2"].overlap == (1, 1)
    assert rows["symmetric", "r3", "r3"].leaked == {"valid": 0, "test": 1}
    assert found.redundant[0].kind == "symmetric"  # it leaks most of test


def test_held_out_triples(found):
    nothing = dict.fromkeys(asdict(found.held_out["valid"]), 0)
    assert asdict(found.held_out["valid"]) == nothing | {"parallel": 1}
    common = {
        "unseen_entities": 1,
        "unseen_relations": 1,
        "unseen_triples": 2,
        "copies": 1,
        "symmetric": 1,
    }
    test = nothing | common | {"leaked": 2, "reverse": 4, "parallel": 3}
    assert asdict(found.held_out["test"]) == test
    looser = replace(found, min_overlap=0.75)  # 6 of the 8 pairs of ISA
    assert [(row.kind, row.relation, row.other) for row in looser.redundant[:2]] == [
        ("inverse", "r0", "r1"),
        ("duplicate", "r0", "r2"),
    ]
    assert looser.redundant[0].overlap == (6 / 8, 1)
    assert looser.redundant[0].leaked == {"valid": 0, "test": 2}
    assert looser.redundant[1].leaked == {"valid": 1, "test": 1}
    assert asdict(looser.held_out["valid"]) == nothing | {
        "duplicate": 1,
        "leaked": 1,
        "parallel": 1,
    }
    assert asdict(looser.held_out["test"]) == test | {"duplicate": 1, "inverse": 2, "leaked": 3}


def test_warnings_name_the_split_and_the_reason(found):
    assert found.warnings() == [
        "Leakage: 25.0% of the test triples follow from train by duplicate, inverse or symmetric "
        "relations (such as r3); metrics are too optimistic.",
        "Unseen: 25.0% of the test triples contain entities or relations that train lacks (1 "
        "entity and 1 relation).",
    ]
    copied = graph_of([(0, 0, 1), (1, 0, 2)], [(0, 0, 1), (1, 0, 2)], [(2, 0, 0)] * 20)
    assert copied.inspect().warnings() == [
        "Leakage: 100.0% of the valid triples occur in train too; metrics are too optimistic."
    ]


def test_warnings_begin_at_their_thresholds():
    """10 % leaked, 5 % unseen."""
    train = [(i, 0, i + 1) for i in range(40)]
    clean = [(i, 0, i + 2) for i in range(40)]
    assert graph_of(train, [], clean[:19] + train[:2]).inspect().warnings() == []
    assert "9.5%" not in str(graph_of(train, [], clean[:18] + train[:2]).inspect().warnings())
    assert "10.0%" in graph_of(train, [], clean[:18] + train[:2]).inspect().warnings()[0]
    assert graph_of(train, [], [*clean[:20], (0, 0, 50)]).inspect().warnings() == []
    assert "5.0%" in graph_of(train, [], [*clean[:19], (0, 0, 50)]).inspect().warnings()[0]


def test_a_graph_with_nothing_held_out_and_an_empty_graph():
    assert graph_of([(0, 0, 1)]).inspect().held_out["test"].leaked == 0
    empty = graph_of([]).inspect().as_dict()
    assert empty["degrees"]["max"] == empty["components"]["number"] == 0
    assert empty["warnings"] == []


def test_as_dict_is_json(found):
    about = found.as_dict()
    assert json.loads(json.dumps(about))["held_out"]["test"]["leaked"] == 2
    assert about["by_relation"].keys() == {f"r{i}" for i in range(6)}


def test_splits_of_a_single_file_leak_nothing(tmp_path):
    """Pairs stay together, and everything of valid and test occurs in train."""
    rows = [
        (i, name, (i * step + 1) % 50) for i in range(50) for name, step in (("a", 3), ("b", 7))
    ]
    lines = [f"e{h}\t{r}\te{t}\ne{t}\tinverse_{r}\te{h}" for h, r, t in rows]
    (tmp_path / "mine.tsv").write_text("\n".join(lines))
    found = kg.load_graph(tmp_path / "mine.tsv").inspect()
    assert {row.kind for row in found.redundant} == {"inverse"}
    assert found.held_out["test"].leaked == found.held_out["test"].unseen_triples == 0


# -- against plain loops -----------------------------------------------------

Row = tuple[int, int, int]
entities = st.integers(0, 6)
relations = st.integers(0, 3)
rows = st.lists(st.tuples(entities, relations, entities), max_size=40)


def naive(
    train: list[Row], valid: list[Row], test: list[Row], *, overlap: float, least: int
) -> dict:
    """The definitions of the module, one triple after the other."""
    known = set(train)
    pairs = {
        r: {(h, t) for h, s, t in [*train, *valid, *test] if s == r and h != t} for r in range(4)
    }
    redundant = set()
    for one in range(4):
        for other in range(one, 4):
            turned = {(t, h) for h, t in pairs[other]}
            for kind, others in (("duplicate", pairs[other]), ("inverse", turned)):
                common = len(pairs[one] & others)
                enough = common >= max(least, overlap * max(len(pairs[one]), len(pairs[other])))
                if enough and (one != other or kind == "inverse"):
                    redundant.add(("symmetric" if one == other else kind, one, other, common))

    def leaks(triple: Row) -> set[str]:
        head, relation, tail = triple
        found = {"copies"} if triple in known else set()
        for kind, one, other, _ in redundant:
            for source, target in {(one, other), (other, one)}:
                counterpart = (head, target, tail) if kind == "duplicate" else (tail, target, head)
                if source == relation and head != tail and counterpart in known:
                    found.add(kind)
        return found | ({"leaked"} if found else set())

    held_out = {}
    seen = {x for h, _, t in train for x in (h, t)}
    seen_relations = {r for _, r, _ in train}
    for split, triples in (("valid", valid), ("test", test)):
        kinds = [leaks(triple) for triple in triples]
        names = ("copies", "duplicate", "inverse", "symmetric", "leaked")
        held_out[split] = {name: sum(name in kind for kind in kinds) for name in names} | {
            "unseen_entities": len({x for h, _, t in triples for x in (h, t)} - seen),
            "unseen_relations": len({r for _, r, _ in triples} - seen_relations),
            "unseen_triples": sum(
                not {h, t} <= seen or r not in seen_relations for h, r, t in triples
            ),
            "reverse": sum(
                h != t and any((t, s, h) in known for s in range(4)) for h, _, t in triples
            ),
            "parallel": sum(
                any((h, s, t) in known for s in range(4) if s != r) for h, r, t in triples
            ),
        }
    return {"redundant": redundant, "held_out": held_out}


@given(rows, rows, rows, st.sampled_from([(0.8, 5), (0.4, 2), (1.0, 1)]))
def test_redundancy_and_leakage_are_those_of_plain_loops(train, valid, test, limits):
    overlap, least = limits
    expected = naive(train, valid, test, overlap=overlap, least=least)
    graph = graph_of(train, valid, test, num_entities=7, num_relations=4)
    found = replace(graph.inspect(), min_overlap=overlap, min_common=least)
    listed = {
        (row.kind, int(row.relation[1]), int(row.other[1]), row.common) for row in found.redundant
    }
    assert listed == expected["redundant"]
    assert {split: asdict(facts) for split, facts in found.held_out.items()} == expected["held_out"]


@given(rows)
def test_degrees_and_components_are_those_of_plain_loops(train):
    found = graph_of(train, num_entities=7, num_relations=4).inspect()
    degree = [sum((h == e) + (t == e) for h, _, t in set(train)) for e in range(7)]
    assert found.degrees.max == max(degree)
    assert sum(one["entities"] for one in found.degrees.distribution) == sum(
        number > 0 for number in degree
    )
    groups = {entity: {entity} for h, _, t in train for entity in (h, t)}
    for h, _, t in train:
        joined = groups[h] | groups[t]
        groups |= dict.fromkeys(joined, joined)
    components = {frozenset(group) for group in groups.values()}
    assert found.components.number == len(components)
    assert found.components.largest == max(map(len, components), default=0)


def test_a_long_path_is_one_component():
    order = np.random.default_rng(0).permutation(2000)
    assert not connected_components(order[:-1], order[1:], 2000).any()


def test_ids_of_a_huge_graph_do_not_overflow():
    """All possible triples could not be numbered by 63 bits."""
    num_entities = 2**31 - 1

    class Names(list):
        def __len__(self):
            return num_entities

    last = num_entities - 1
    train = np.array([(last, 0, last - 1), (last - 1, 1, last)], dtype=np.int32)
    test = np.array([(last - 1, 0, last), (last, 1, last - 1)], dtype=np.int32)
    relations = kg.Vocabulary([f"r{i}" for i in range(5000)], kind="relation")
    found = Inspection(
        "huge", Names(), relations, {"train": train, "valid": test[:0], "test": test}
    )
    assert found.redundant == []
    pairs, keys = found._pairs_and_keys
    assert pairs.tolist() == [(last - 1) * num_entities + last]
    assert sorted(np.concatenate(list(keys.values())).tolist()) == [0, 1, 5000, 5001]


# -- benchmark graphs --------------------------------------------------------


def test_wn18rr_has_unseen_entities_and_symmetric_relations(data_folder):
    found = kg.load_graph("WN18RR").inspect()
    assert found.held_out["test"].unseen_triples == 210
    assert found.held_out["test"].leaked == found.held_out["test"].symmetric == 1052
    assert found.redundant[0].relation == "_derivationally_related_form"
    assert len(found.warnings()) == 2


@pytest.mark.slow
def test_fb15k_237_has_no_pair_of_entities_in_both_train_and_test(data_folder):
    found = kg.load_graph("FB15k-237").inspect()
    assert (
        found.held_out["test"].leaked,
        found.held_out["test"].reverse,
        found.held_out["test"].parallel,
    ) == (0, 0, 0)
    assert found.warnings() == []
