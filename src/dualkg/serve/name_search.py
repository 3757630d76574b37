"""Search for names: exact, by prefix, by word, by substring, and by similarity if misspelt."""

import unicodedata
from typing import NamedTuple

import numpy as np
from rapidfuzz import fuzz
from rapidfuzz.process import cdist

from dualkg.data.vocabulary import Vocabulary
from dualkg.serve.schemas import MatchType

ORDER: dict[MatchType, int] = {"exact": 0, "prefix": 1, "word": 2, "substring": 3, "fuzzy": 4}
# The similarity of a misspelt name, of 100: twnty and twenty have 80, copenhagen and kopenick 77.
MIN_SIMILARITY = 78
MAX_FUZZY_LENGTH = 48  # characters of a misspelt name; longer texts are no names
MAX_COMPARED = 1000  # similar names that are ordered by length


def normalize_name(text: str) -> str:
    """`São_Tomé` → `sao tome`: words of letters and digits, without accents and case.

    A text that has no letters and digits of any script is only stripped.
    """
    if not text.isascii():
        decomposed = unicodedata.normalize("NFKD", text)
        text = "".join(
            character for character in decomposed if not unicodedata.combining(character)
        )
    text = text.casefold()
    spaced = "".join(character if character.isalnum() else " " for character in text)
    words = spaced.split()
    return " ".join(words) if words else text.strip()


class Match(NamedTuple):
    """The id of an entity or relation, and how its name or label matches."""

    id: int
    match_type: MatchType


class NameSearch:
    """Searches the names and labels of a vocabulary; 100,000 names take tens of milliseconds."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        names = vocabulary.names.to_pylist()
        self._names = [normalize_name(name) for name in names]
        self._ids = list(range(len(names)))
        if vocabulary.labels is not None:
            for id, label in enumerate(vocabulary.labels.to_pylist()):
                if label and label != names[id]:
                    self._names.append(normalize_name(label))
                    self._ids.append(id)

    def search(self, text: str, *, limit: int) -> list[Match]:
        """Find at most `limit` names: exact matches, then prefixes, words and substrings.

        Similar names are searched if there are none of these.
        """
        text = normalize_name(text)
        if not text:
            return []
        found = []
        for place, name in enumerate(self._names):
            if text in name:
                match_type = _match_type(text, name)
                found.append((ORDER[match_type], len(name), name, self._ids[place], match_type))
        if not found:
            similar = dict.fromkeys(self._ids[place] for place in self._similar(text))
            return [Match(id, "fuzzy") for id in similar][:limit]

        best: dict[int, Match] = {}
        for _, _, _, id, match_type in sorted(found):
            best.setdefault(id, Match(id, match_type))
        return list(best.values())[:limit]

    def _similar(self, text: str) -> list[int]:
        """Places of names that have a part that is similar to the text.

        The most similar ones come first, then those of the most similar length.
        """
        if len(text) > MAX_FUZZY_LENGTH or not self._names:
            return []
        [similarity] = cdist(
            [text], self._names, scorer=fuzz.partial_ratio, score_cutoff=MIN_SIMILARITY
        )
        places = np.argsort(-similarity, kind="stable")[:MAX_COMPARED]
        places = places[similarity[places] > 0]
        differences = [abs(len(self._names[place]) - len(text)) for place in places]
        order = np.lexsort((places, differences, -similarity[places]))
        ordered: list[int] = places[order].tolist()
        return ordered


def _match_type(text: str, name: str) -> MatchType:
    """How a name that contains a text matches it."""
    if name == text:
        return "exact"
    if name.startswith(text):
        return "prefix"
    return "word" if f" {text}" in name else "substring"
