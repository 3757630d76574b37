"""Names, labels and ids."""

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dualkg.data import vocabulary
from dualkg.data.vocabulary import NameIndex, Vocabulary
from dualkg.errors import RequestError, UnknownName
from tests.raising import refused

NAMES = st.lists(st.text(st.characters(exclude_categories=["Cs"]), min_size=1), unique=True)


@pytest.fixture
def cities() -> Vocabulary:
    return Vocabulary(
        ["Q90", "Q64", "Paris", "Q5083"], {"Q90": "Paris", "Q64": "Berlin", "Q5083": "Seattle"}
    )


@given(NAMES)
def test_ids_and_names_are_each_others_inverse(names: list[str]) -> None:
    known = Vocabulary(names)
    assert len(known) == len(names)
    assert [known[id] for id in range(len(known))] == names
    assert known.ids(names) == list(range(len(names)))


@given(NAMES)
def test_without_labels_a_name_is_its_label(names: list[str]) -> None:
    known = Vocabulary(pa.array(names, pa.string()))
    assert [known.label(id) for id in range(len(known))] == names


def test_a_label_is_preferred_to_a_name(cities: Vocabulary) -> None:
    assert [cities.label(id) for id in range(4)] == ["Paris", "Berlin", "Paris", "Seattle"]


def test_labels_of_unknown_names_are_ignored() -> None:
    assert Vocabulary(["a"], {"b": "Bee"}).labels is None


def test_an_empty_label_does_not_count() -> None:
    assert Vocabulary(["a", "b"], {"a": "", "b": "Bee"}).label(0) == "a"


def test_names_with_labels_of_several_ids() -> None:
    vocabulary = Vocabulary(["a", "b", "c"], {"a": "", "b": "Bee"})
    assert vocabulary.with_labels([1, 0, 1]) == [("b", "Bee"), ("a", "a"), ("b", "Bee")]
    assert Vocabulary(["a", "b"]).with_labels([1]) == [("b", "b")]
    assert vocabulary.with_labels([]) == []


def test_a_name_precedes_a_label(cities: Vocabulary) -> None:
    assert cities.id("Paris") == 2


def test_an_id_is_found_by_its_label(cities: Vocabulary) -> None:
    assert cities.id("Berlin") == 1


@pytest.mark.parametrize(("written", "id"), [("BERLIN", 1), ("q90", 0), ("seattle", 3)])
def test_case_is_ignored_without_an_exact_match(cities: Vocabulary, written: str, id: int) -> None:
    assert cities.id(written) == id


def test_an_exact_match_precedes_other_cases() -> None:
    known = Vocabulary(["may", "May"])
    assert (known.id("may"), known.id("May")) == (0, 1)


def test_a_name_and_label_that_differ_in_case_only_are_one_entity() -> None:
    assert Vocabulary(["paris", "rome"], {"paris": "Paris"}).id("PARIS") == 0


def test_an_ambiguous_label_lists_the_names() -> None:
    known = Vocabulary(["Q1", "Q2", "Q3"], {"Q1": "Springfield", "Q2": "Springfield"})
    with pytest.raises(RequestError) as caught:
        known.id("Springfield")
    assert (
        str(caught.value) == "'Springfield' matches 2 entities: 'Q1', 'Q2'. Use one of these names."
    )


def test_an_ambiguous_case_lists_the_names() -> None:
    with pytest.raises(RequestError, match="'MAY' matches 2 relations: 'may', 'May'"):
        Vocabulary(["may", "May"], kind="relation").id("MAY")


def test_an_unknown_name_gets_suggestions() -> None:
    known = Vocabulary(["Paris", "London", "Rome"])
    with pytest.raises(RequestError) as caught:
        known.id("Parris")
    assert str(caught.value) == "No entity is named 'Parris'. Did you mean 'Paris'?"


def test_suggestions_include_labels(cities: Vocabulary) -> None:
    with refused(UnknownName, kind="entity", name="Berlim", suggestions=["Berlin"]):
        cities.id("Berlim")


def test_without_similar_names_there_is_no_suggestion() -> None:
    with refused(UnknownName, kind="relation", name="zzzz", suggestions=[]):
        Vocabulary(["capital"], kind="relation").id("zzzz")


def test_an_empty_vocabulary_knows_no_names() -> None:
    known = Vocabulary([])
    with refused(UnknownName, kind="entity", name="a"):
        known.id("a")
    with pytest.raises(RequestError, match="none is known"):
        known.id(0)


def test_very_many_names_are_first_filtered_by_length_and_first_letter(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(vocabulary, "MANY_NAMES", 3)
    known = Vocabulary(["Paris", "parish", "Aris", "Parisian people", "東京"])
    for _ in range(2):
        # 'Aris' begins otherwise.
        with refused(UnknownName, name="Pariz", suggestions=["Paris", "parish"]):
            known.id("Pariz")


@pytest.mark.parametrize("id", [0, 3, np.int32(3)])
def test_a_number_is_an_id(cities: Vocabulary, id: int) -> None:
    assert cities.id(id) == int(id)


@pytest.mark.parametrize("id", [4, -1])
def test_a_number_beyond_the_ids_is_refused(cities: Vocabulary, id: int) -> None:
    with pytest.raises(RequestError, match="ids go from 0 to 3"):
        cities.id(id)


def test_equality_is_of_names_in_order() -> None:
    assert Vocabulary(["a", "b"]) == Vocabulary(["a", "b"], {"a": "A"})
    assert Vocabulary(["a", "b"]) != Vocabulary(["b", "a"])
    assert Vocabulary(["a"]) != ["a"]


def test_repr_shows_the_size() -> None:
    assert repr(Vocabulary(["a", "b"], kind="relation")) == "Vocabulary(2 names of kind 'relation')"


@given(st.lists(st.text(), max_size=30, unique=True))
def test_very_many_names_are_found_by_their_hashes(names: list[str]) -> None:
    index = NameIndex(pa.array(names, pa.string()))
    assert [index.get(name) for name in names] == list(range(len(names)))
    assert index.get("x" * 50) is None
    assert None not in index


def test_names_with_equal_hashes_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vocabulary, "hash", lambda name: 0, raising=False)
    monkeypatch.setattr(vocabulary, "INDEXED_NAMES", 1)
    known = Vocabulary(["a", "b", "B", "cc"])
    assert [known.id(name) for name in ("a", "b", "B", "CC")] == [0, 1, 2, 3]
    assert "d" not in known
    assert known.ids_ignoring_case("B") == [1, 2]
