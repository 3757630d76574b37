"""Names by a few letters."""

from __future__ import annotations

import random
import time

import pytest

import dualkg as kg
from dualkg.errors import num_slips
from dualkg.inference.names import Finder, folded, slips_from_beginnings

NAMES = ["Paris", "Parma", "New Paris", "Comparison", "São Tomé", "Côte-d'Or", "东京", "dog.n.01", "__", "Paris"]


@pytest.fixture
def finder() -> Finder:
    return Finder(kg.Vocabulary(NAMES, {"dog.n.01": "dog", "Parma": "Parma (Italy)"}))


def found(finder, typed, most=10):
    return [(NAMES[match.id], match.how) for match in finder.find(typed, most=most)]


@pytest.mark.parametrize(
    ("typed", "wanted"),
    [
        ("paris", [("Paris", "same"), ("Paris", "same"), ("New Paris", "word"), ("Comparison", "inside")]),
        ("PAR", [("Paris", "beginning"), ("Paris", "beginning"), ("Parma", "beginning"), ("New Paris", "word")]),
        ("sao tome", [("São Tomé", "same")]),
        ("cote d or", [("Côte-d'Or", "same")]),
        ("京", [("东京", "inside")]),
        ("dog", [("dog.n.01", "same")]),
        ("italy", [("Parma", "word")]),
        ("pasri", [("Paris", "misspelt"), ("Paris", "misspelt")]),
        ("__", [("__", "same")]),
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
    assert Finder(kg.Vocabulary([])).find("paris", most=5) == []


def test_words_as_they_are_compared():
    assert folded("  São_Tomé-1 ") == "sao tome 1"
    assert folded("ΣΊΣΥΦΟΣ") == folded("σίσυφος")


def test_slips_are_counted_as_one_by_one():
    chance = random.Random(0)
    for _ in range(500):
        word, name = ("".join(chance.choices("abc", k=chance.randint(0, 9))) for _ in range(2))
        wanted = [num_slips(word, name[:length]) for length in range(len(name) + 1)]
        assert list(slips_from_beginnings(word, name)) == wanted


def test_a_hundred_thousand_names_are_found_quickly():
    """A few milliseconds are usual; the bound leaves room for a busy machine."""
    chance = random.Random(0)
    words = ["".join(chance.choices("aeioulnrst", k=chance.randint(3, 9))) for _ in range(3000)]
    names = [f"{chance.choice(words)} {chance.choice(words)} {number}" for number in range(100_000)]
    finder = Finder(kg.Vocabulary(names))
    for typed in ("a", "st", names[500][:5], "ions", names[7][1:9], "qqqq", names[9][:3] + "x" + names[9][4:]):
        times = []
        for _ in range(5):
            started = time.perf_counter()
            finder.find(typed, most=10)
            times.append(time.perf_counter() - started)
        assert min(times) < 0.02
