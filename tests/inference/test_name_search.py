"""Search for names: what is found first, and how fast."""

import random
import time

import pytest

import dualkg as kg
from dualkg.inference.name_search import NameSearch, normalize_name

NAMES = [
    "Paris",
    "Parma",
    "New Paris",
    "Comparison",
    "São Tomé",
    "Côte-d'Or",
    "东京",
    "dog.n.01",
    "__",
    "Paris",
]


@pytest.fixture
def finder() -> NameSearch:
    return NameSearch(kg.Vocabulary(NAMES, {"dog.n.01": "dog", "Parma": "Parma (Italy)"}))


def found(finder, typed, most=10):
    return [(NAMES[match.id], match.match_type) for match in finder.search(typed, limit=most)]


@pytest.mark.parametrize(
    ("typed", "wanted"),
    [
        (
            "paris",
            [
                ("Paris", "exact"),
                ("Paris", "exact"),
                ("New Paris", "word"),
                ("Comparison", "substring"),
            ],
        ),
        (
            "PAR",
            [("Paris", "prefix"), ("Paris", "prefix"), ("Parma", "prefix"), ("New Paris", "word")],
        ),
        ("sao tome", [("São Tomé", "exact")]),
        ("cote d or", [("Côte-d'Or", "exact")]),
        ("京", [("东京", "substring")]),
        ("dog", [("dog.n.01", "exact")]),
        ("italy", [("Parma", "word")]),
        ("pasri", [("Paris", "fuzzy"), ("Paris", "fuzzy")]),
        ("__", [("__", "exact")]),
        ("", []),
        ("zzz", []),
    ],
)
def test_order_of_matches(finder, typed, wanted):
    assert found(finder, typed)[: len(wanted)] == wanted
    assert bool(wanted) == bool(found(finder, typed))


def test_limit(finder):
    assert len(found(finder, "par", most=2)) == 2


def test_empty_vocabulary():
    assert NameSearch(kg.Vocabulary([])).search("paris", limit=5) == []


def test_normalization():
    assert normalize_name("  São_Tomé-1 ") == "sao tome 1"
    assert normalize_name("ΣΊΣΥΦΟΣ") == normalize_name("σίσυφος")


def test_fuzzy_matches_are_ordered_by_edits_of_their_prefix_and_then_by_length():
    names = ["Copenhagen", "Copenhagen Airport", "Compiègne", "Kopenick"]
    search = NameSearch(kg.Vocabulary(names))
    assert [names[match.id] for match in search.search("Copenhagan", limit=5)] == [
        "Copenhagen",
        "Copenhagen Airport",
    ]
    assert [names[match.id] for match in search.search("Kopenhagn", limit=5)] == [
        "Copenhagen",
        "Copenhagen Airport",
    ]
    assert search.search("Copenhagan" * 5, limit=5) == []  # too long for a misspelt name


def test_a_name_is_found_without_as_many_characters_as_edits_are_allowed():
    search = NameSearch(kg.Vocabulary(["Gothenburg Airport", "Hamburg"]))
    assert [match.id for match in search.search("otenburg", limit=5)] == [0]


@pytest.mark.slow
def test_40_000_names_are_searched_quickly():
    """A few milliseconds are usual; the bound leaves room for a busy machine."""
    chance = random.Random(0)
    words = ["".join(chance.choices("aeioulnrst", k=chance.randint(3, 9))) for _ in range(3000)]
    names = [f"{chance.choice(words)} {chance.choice(words)} {number}" for number in range(40_000)]
    finder = NameSearch(kg.Vocabulary(names))
    for typed in (
        "a",
        "st",
        names[500][:5],
        "ions",
        names[7][1:9],
        "qqqq",
        names[9][:3] + "x" + names[9][4:],
    ):
        times = []
        for _ in range(5):
            started = time.process_time()
            finder.search(typed, limit=10)
            times.append(time.process_time() - started)
        assert min(times) < 0.03
