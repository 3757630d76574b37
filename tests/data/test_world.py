"""The bundled graph `world`: its files, read as they are shipped."""

import re
import unicodedata
from collections import Counter
from importlib.resources import files
from itertools import combinations

import pytest

from dualkg.data.graph import SPLITS

Triple = tuple[str, ...]
WORLD = files("dualkg.data") / "world"


@pytest.fixture(scope="module")
def splits() -> dict[str, list[Triple]]:
    texts = {name: (WORLD / f"{name}.tsv").read_text(encoding="utf-8") for name in SPLITS}
    return {
        name: [tuple(line.split("\t")) for line in text.splitlines()]
        for name, text in texts.items()
    }


@pytest.fixture(scope="module")
def triples(splits: dict[str, list[Triple]]) -> list[Triple]:
    return [triple for rows in splits.values() for triple in rows]


def test_the_splits_have_the_usual_sizes(
    splits: dict[str, list[Triple]], triples: list[Triple]
) -> None:
    assert {len(triple) for triple in triples} == {3}
    assert 8_000 < len(triples) < 10_000
    assert 0.84 < len(splits["train"]) / len(triples) < 0.87
    assert 0.9 < len(splits["valid"]) / len(splits["test"]) < 1.1


def test_no_triple_is_repeated(triples: list[Triple]) -> None:
    assert [triple for triple, count in Counter(triples).items() if count > 1] == []


def test_lines_of_each_file_are_sorted(splits: dict[str, list[Triple]]) -> None:
    assert all(rows == sorted(rows) for rows in splits.values())


def test_no_two_splits_join_the_same_pair(splits: dict[str, list[Triple]]) -> None:
    pairs = {
        name: {frozenset((head, tail)) for head, _, tail in rows} for name, rows in splits.items()
    }
    for one, other in combinations(SPLITS, 2):
        assert pairs[one] & pairs[other] == set()


def test_train_has_seen_every_entity_and_relation(splits: dict[str, list[Triple]]) -> None:
    entities = {name for head, _, tail in splits["train"] for name in (head, tail)}
    relations = {relation for _, relation, _ in splits["train"]}
    for name in ("valid", "test"):
        assert {end for head, _, tail in splits[name] for end in (head, tail)} <= entities
        assert {relation for _, relation, _ in splits[name]} <= relations


@pytest.mark.parametrize(
    "fact",
    [
        ("France", "capital", "Paris"),
        ("Paris", "located_in", "France"),
        ("Barcelona (Spain)", "located_in", "Spain"),
        ("Barcelona (Venezuela)", "located_in", "Venezuela"),
        ("Singapore", "capital", "Singapore (city)"),
        ("France", "borders", "Spain"),
        ("Spain", "borders", "France"),
        ("Japan", "currency", "Japanese Yen"),
        ("Swiss Franc", "kind_of", "franc"),
        ("Estonia", "former_currency", "Soviet Rouble"),
        ("Brazil", "official_language", "Portuguese"),
        ("Switzerland", "spoken_language", "Italian"),
        ("Russian", "written_in", "Cyrillic script"),
        ("Kenya", "continent", "Africa"),
        ("Italy", "part_of", "European Union"),
        ("Western Europe", "part_of", "Europe"),
        ("Mumbai", "time_zone", "India Standard Time"),
        ("Brno", "near", "Vienna"),
        ("Mexico", "celebrates", "Christmas Day"),
        ("Egypt", "first_day_of_week", "Saturday"),
    ],
)
def test_well_known_facts_are_in_the_graph(fact: Triple, triples: list[Triple]) -> None:
    assert fact in triples


def test_false_facts_are_not_in_the_graph(triples: list[Triple]) -> None:
    assert ("United States", "borders", "Cuba") not in triples
    assert all(head != tail for head, _, tail in triples)


@pytest.mark.parametrize("relation", ["borders", "near"])
def test_symmetric_relations_are_listed_both_ways(relation: str, triples: list[Triple]) -> None:
    found = {(head, tail) for head, name, tail in triples if name == relation}
    assert len(found) > 500
    assert {(tail, head) for head, tail in found} == found


@pytest.mark.parametrize("relation", ["capital", "continent", "first_day_of_week", "located_in"])
def test_functional_relations_have_one_answer(relation: str, triples: list[Triple]) -> None:
    answers = Counter(head for head, name, _ in triples if name == relation)
    assert max(answers.values()) == 1


def test_names_contain_no_codes(triples: list[Triple]) -> None:
    names = {name for head, _, tail in triples for name in (head, tail)}
    # 'Ho' and 'Bo' are cities, 'Ga' is a language: two letters, but one capital only.
    odd = [
        name
        for name in names
        if re.fullmatch(r"[A-Z]{2,3}|\d+|[a-z]{2,3}_.*|.*[’‘ʼ_&;].*|.*/.*", name)
    ]
    assert odd == []
    assert [name for name in names if name != " ".join(name.split())] == []
    assert [name for name in names if name != unicodedata.normalize("NFC", name)] == []


def test_no_two_names_differ_only_in_case_or_accents(triples: list[Triple]) -> None:
    def plain(name: str) -> str:
        letters = unicodedata.normalize("NFKD", name)
        return "".join(letter for letter in letters if not unicodedata.combining(letter)).casefold()

    names = {name for head, _, tail in triples for name in (head, tail)}
    assert len({plain(name) for name in names}) == len(names)


def test_relation_names_need_no_shell_quotes(triples: list[Triple]) -> None:
    assert all(re.fullmatch(r"[a-z]+(_[a-z]+)*", relation) for _, relation, _ in triples)


def test_the_source_page_counts_what_the_files_hold(
    splits: dict[str, list[Triple]], triples: list[Triple]
) -> None:
    page = (WORLD / "SOURCE.md").read_text(encoding="utf-8")
    lines = re.findall(
        r"^\| `(\w+)` \|[^|]*\|[^|]*\|([\d, |]+)\| ([^|]+) → ([^|]+) \|$", page, re.MULTILINE
    )
    counted = {
        relation: [int(cell.replace(",", "")) for cell in cells.split("|")]
        for relation, cells, _, _ in lines
    }
    by_split = {name: Counter(relation for _, relation, _ in rows) for name, rows in splits.items()}
    total = Counter(relation for _, relation, _ in triples)
    assert counted == {r: [total[r], *(by_split[name][r] for name in SPLITS)] for r in total}
    assert all((head, relation, tail) in triples for relation, _, head, tail in lines)
    assert f"{len(triples):,} triples about" in page
