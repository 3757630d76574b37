"""Names by a few letters."""

from __future__ import annotations

import random
import time

import pytest

import dualkg as kg
from dualkg.errors import edit_distance
from dualkg.inference.names import NameSearch, normalize_name, prefix_edit_distances

NAMES = ["Paris", "Parma", "New Paris", "Comparison", "São Tomé", "Côte-d'Or", "东京", "dog.n.01", "__", "Paris"]


@pytest.fixture
def finder() -> NameSearch:
    return NameSearch(kg.Vocabulary(NAMES, {"dog.n.01": "dog", "Parma": "Parma (Italy)"}))


def found(finder, typed, most=10):
    return [(NAMES[match.id], match.match_type) for match in finder.search(typed, limit=most)]


@pytest.mark.parametrize(
    ("typed", "wanted"),
    [
        ("paris", [("Paris", "exact"), ("Paris", "exact"), ("New Paris", "word"), ("Comparison", "substring")]),
        ("PAR", [("Paris", "prefix"), ("Paris", "prefix"), ("Parma", "prefix"), ("New Paris", "word")]),
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
def test_what_is_found_first(finder, typed, wanted):
    assert found(finder, typed)[: len(wanted)] == wanted
    assert bool(wanted) == bool(found(finder, typed))


def test_no_more_than_are_wanted(finder):
    assert len(found(finder, "par", most=2)) == 2


def test_no_names_at_all():
    assert NameSearch(kg.Vocabulary([])).search("paris", limit=5) == []


def test_words_as_they_are_compared():
    assert normalize_name("  São_Tomé-1 ") == "sao tome 1"
    assert normalize_name("ΣΊΣΥΦΟΣ") == normalize_name("σίσυφος")


def test_slips_are_counted_as_one_by_one():
    chance = random.Random(0)
    for _ in range(500):
        word, name = ("".join(chance.choices("abc", k=chance.randint(0, 9))) for _ in range(2))
        wanted = [edit_distance(word, name[:length]) for length in range(len(name) + 1)]
        assert list(prefix_edit_distances(word, name)) == wanted


def test_a_hundred_thousand_names_are_found_quickly():
    """A few milliseconds are usual; the bound leaves room for a busy machine."""
    chance = random.Random(0)
    words = ["".join(chance.choices("aeioulnrst", k=chance.randint(3, 9))) for _ in range(3000)]
    names = [f"{chance.choice(words)} {chance.choice(words)} {number}" for number in range(100_000)]
    finder = NameSearch(kg.Vocabulary(names))
    for typed in ("a", "st", names[500][:5], "ions", names[7][1:9], "qqqq", names[9][:3] + "x" + names[9][4:]):
        times = []
        for _ in range(5):
            started = time.perf_counter()
            finder.search(typed, limit=10)
            times.append(time.perf_counter() - started)
        assert min(times) < 0.02
