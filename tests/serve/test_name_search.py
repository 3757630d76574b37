"""Search for names: what is found first, and how fast."""

import random
import time

import pytest

import dualkg as kg
from dualkg.serve.name_search import NameSearch, normalize_name

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


def matches_of(finder: NameSearch, text: str, limit: int = 10) -> list[tuple[str, str]]:
    return [(NAMES[match.id], match.match_type) for match in finder.search(text, limit=limit)]


@pytest.mark.parametrize(
    ("text", "first_matches"),
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
def test_order_of_matches(finder, text, first_matches):
    matches = matches_of(finder, text)
    assert matches[: len(first_matches)] == first_matches
    assert bool(first_matches) == bool(matches)


def test_limit(finder):
    assert len(matches_of(finder, "par", limit=2)) == 2


def test_empty_vocabulary():
    assert NameSearch(kg.Vocabulary([])).search("paris", limit=5) == []


def test_normalization():
    assert normalize_name("  São_Tomé-1 ") == "sao tome 1"
    assert normalize_name("ΣΊΣΥΦΟΣ") == normalize_name("σίσυφος")


def test_fuzzy_matches_are_ordered_by_edits_of_their_prefix_and_then_by_length():
    names = ["Copenhagen", "Copenhagen Airport", "Compiègne", "Kopenick"]
    finder = NameSearch(kg.Vocabulary(names))
    for misspelt in ("Copenhagan", "Kopenhagn"):
        matches = finder.search(misspelt, limit=5)
        assert [names[match.id] for match in matches] == ["Copenhagen", "Copenhagen Airport"]


def test_long_texts_have_no_fuzzy_matches():
    finder = NameSearch(kg.Vocabulary(["Copenhagen" * 5]))
    assert finder.search("Copenhagan" * 5, limit=5) == []


def test_a_name_is_found_without_as_many_characters_as_edits_are_allowed():
    finder = NameSearch(kg.Vocabulary(["Gothenburg Airport", "Hamburg"]))
    assert [match.id for match in finder.search("otenburg", limit=5)] == [0]


@pytest.mark.slow
def test_40_000_names_are_searched_quickly():
    """A few milliseconds are usual; the bound leaves room for a busy machine."""
    generator = random.Random(0)
    words = []
    for _ in range(3000):
        letters = generator.choices("aeioulnrst", k=generator.randint(3, 9))
        words.append("".join(letters))
    names = []
    for number in range(40_000):
        names.append(f"{generator.choice(words)} {generator.choice(words)} {number}")

    finder = NameSearch(kg.Vocabulary(names))
    misspelt = names[9][:3] + "x" + names[9][4:]
    for text in ("a", "st", names[500][:5], "ions", names[7][1:9], "qqqq", misspelt):
        times = []
        for _ in range(5):
            started = time.process_time()
            finder.search(text, limit=10)
            times.append(time.process_time() - started)
        assert min(times) < 0.03
