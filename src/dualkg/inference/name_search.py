"""Search for names: exact, by prefix, by word, by substring, and by edit distance for misspelt
ones.
"""

import unicodedata
from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from itertools import accumulate
from typing import Any, Literal, NamedTuple

import numpy as np

from dualkg.data.vocabulary import Vocabulary

MatchType = Literal["exact", "prefix", "word", "substring", "fuzzy"]
ORDER: dict[MatchType, int] = {"exact": 0, "prefix": 1, "word": 2, "substring": 3, "fuzzy": 4}
# Matches of one type; of more, the first in the order of the alphabet or of ids are taken.
MAX_MATCHES = 500
MAX_FUZZY_LENGTH = 48  # characters of a text that is searched by edit distance
SEPARATOR = "\n"  # between names in one text; normalized names do not contain it


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
    """Searches the names and labels of a vocabulary; 100,000 names take milliseconds.

    Normalized names are sorted for prefixes, and joined to one text for substrings.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        names = vocabulary.names.to_pylist()
        self._names = [normalize_name(name) for name in names]
        self._ids = list(range(len(names)))
        if vocabulary.labels is not None:
            for id, label in enumerate(vocabulary.labels.to_pylist()):
                if label and label != names[id]:
                    self._names.append(normalize_name(label))
                    self._ids.append(id)

        self._text = SEPARATOR + SEPARATOR.join(self._names) + SEPARATOR
        self._starts = list(accumulate((len(name) + 1 for name in self._names), initial=1))
        self._order = sorted(range(len(self._names)), key=self._names.__getitem__)
        self._sorted = [self._names[place] for place in self._order]

    def search(self, text: str, *, limit: int) -> list[Match]:
        """Find at most `limit` names: exact matches, then prefixes, words and substrings.

        Fuzzy matches are searched if there are none of these.
        """
        text = normalize_name(text)
        if not text or SEPARATOR in text:
            return []
        matches = self._literal_matches(text, limit=limit)
        if not matches:
            ids = dict.fromkeys(self._ids[place] for place in self._fuzzy(text))
            return [Match(id, "fuzzy") for id in ids][:limit]

        best = sorted(
            (ORDER[match_type], len(name), name, id, match_type)
            for id, (match_type, name) in matches.items()
        )
        return [Match(id, match_type) for _, _, _, id, match_type in best[:limit]]

    def _literal_matches(self, text: str, *, limit: int) -> dict[int, tuple[MatchType, str]]:
        """How each id matches best, and by which name; substrings only if prefixes are too few."""
        matches: dict[int, tuple[MatchType, str]] = {}
        for search in (self._prefixes, self._substrings):
            for place, match_type in search(text):
                id = self._ids[place]
                if id not in matches or ORDER[match_type] < ORDER[matches[id][0]]:
                    matches[id] = (match_type, self._names[place])
            if len(matches) >= limit:
                break
        return matches

    def _prefixes(self, text: str) -> Iterator[tuple[int, MatchType]]:
        start = bisect_left(self._sorted, text)
        part = slice(start, start + MAX_MATCHES)
        for place, name in zip(self._order[part], self._sorted[part], strict=True):
            if not name.startswith(text):
                return
            yield place, "exact" if name == text else "prefix"

    def _substrings(self, text: str) -> Iterator[tuple[int, MatchType]]:
        position = self._text.find(text)
        num_matches = 0
        while position >= 0 and num_matches < MAX_MATCHES:
            num_matches += 1
            place = bisect_right(self._starts, position) - 1
            yield place, _match_type_after(self._text[position - 1])
            position = self._text.find(text, position + 1)

    def _fuzzy(self, text: str) -> list[int]:
        """Places of names that have a prefix with few edits from the text.

        Those with the fewest edits come first, then those of the most similar length.
        """
        if len(text) > MAX_FUZZY_LENGTH:
            return []
        from rapidfuzz.distance import Levenshtein
        from rapidfuzz.process import cdist

        def edits(names: list[str], length: int, cutoff: int) -> Any:
            prefixes = [name[:length] for name in names]
            return cdist([text], prefixes, scorer=Levenshtein.distance, score_cutoff=cutoff)[0]

        # One pass over all names rules out most. The best prefix differs in length by at most as
        # many characters as edits are allowed, and each is one more edit from the prefix that is as
        # long as the text.
        allowed = _allowed_edits(text)
        near = np.flatnonzero(edits(self._names, len(text), 2 * allowed) <= 2 * allowed)
        names = [self._names[place] for place in near]

        lengths = range(len(text) - allowed, len(text) + allowed + 1)
        fewest = np.min([edits(names, length, allowed) for length in lengths], axis=0)
        differences = np.abs(np.fromiter(map(len, names), dtype=np.int64) - len(text))
        order = np.lexsort((near, differences, fewest))
        return [int(near[place]) for place in order if fewest[place] <= allowed]


def _match_type_after(character: str) -> MatchType:
    """The type of a substring match, by the character before it."""
    if character == SEPARATOR:
        return "prefix"
    return "word" if character == " " else "substring"


def _allowed_edits(text: str) -> int:
    if len(text) < 5:
        return 1
    return 2 if len(text) < 9 else 3
