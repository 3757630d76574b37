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
from dualkg.extras import optional_import

MatchType = Literal["exact", "prefix", "word", "substring", "fuzzy"]
ORDER: dict[MatchType, int] = {"exact": 0, "prefix": 1, "word": 2, "substring": 3, "fuzzy": 4}
MAX_MATCHES = 500  # of one type; of more, the first in the order of the alphabet or of ids
MAX_FUZZY_LENGTH = 48  # characters of a text that is searched by edit distance
SEPARATOR = "\n"  # between names in one text; normalized names do not contain it


def normalize_name(text: str) -> str:
    """`São_Tomé` → `sao tome`: no accents, case folded, words of letters and digits of any
    script.
    """
    if not text.isascii():
        decomposed = unicodedata.normalize("NFKD", text)
        text = "".join(
            character for character in decomposed if not unicodedata.combining(character)
        )
    text = text.casefold()
    return " ".join("".join(one if one.isalnum() else " " for one in text).split()) or text.strip()


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
        labels = vocabulary.labels.to_pylist() if vocabulary.labels is not None else []
        pairs = [(normalize_name(name), id) for id, name in enumerate(names)]
        pairs += [
            (normalize_name(label), id)
            for id, label in enumerate(labels)
            if label and label != names[id]
        ]
        self._names = [name for name, _ in pairs]
        self._ids = [id for _, id in pairs]
        self._text = SEPARATOR + SEPARATOR.join(self._names) + SEPARATOR
        self._starts = list(accumulate((len(name) + 1 for name in self._names), initial=1))
        self._order = sorted(range(len(pairs)), key=self._names.__getitem__)
        self._sorted = [self._names[place] for place in self._order]

    def search(self, text: str, *, limit: int) -> list[Match]:
        """Find at most `limit` names: exact matches, then prefixes, words, substrings; fuzzy ones
        if there are none.
        """
        text = normalize_name(text)
        if not text or SEPARATOR in text:
            return []
        found: dict[int, tuple[MatchType, str]] = {}
        for search in (self._prefixes, self._substrings):
            for place, match_type in search(text):
                id = self._ids[place]
                if id not in found or ORDER[match_type] < ORDER[found[id][0]]:
                    found[id] = (match_type, self._names[place])
            if len(found) >= limit:
                break
        if not found:
            return [
                Match(id, "fuzzy")
                for id in dict.fromkeys(self._ids[place] for place in self._fuzzy(text))
            ][:limit]
        best = sorted(
            (ORDER[match_type], len(name), name, id, match_type)
            for id, (match_type, name) in found.items()
        )
        return [Match(id, match_type) for _, _, _, id, match_type in best[:limit]]

    def _prefixes(self, text: str) -> Iterator[tuple[int, MatchType]]:
        start = bisect_left(self._sorted, text)
        part = slice(start, start + MAX_MATCHES)
        for place, name in zip(self._order[part], self._sorted[part], strict=True):
            if not name.startswith(text):
                return
            yield place, "exact" if name == text else "prefix"

    def _substrings(self, text: str) -> Iterator[tuple[int, MatchType]]:
        at = self._text.find(text)
        seen = 0
        while at >= 0 and seen < MAX_MATCHES:
            seen += 1
            before = self._text[at - 1]
            match_type: MatchType = (
                "prefix" if before == SEPARATOR else "word" if before == " " else "substring"
            )
            yield bisect_right(self._starts, at) - 1, match_type
            at = self._text.find(text, at + 1)

    def _fuzzy(self, text: str) -> list[int]:
        """Places of names that have a prefix with few edits from the text: fewest edits first, then
        nearest length.
        """
        if len(text) > MAX_FUZZY_LENGTH:
            return []
        with optional_import("rapidfuzz", purpose="Searching for names"):
            from rapidfuzz.distance import Levenshtein
            from rapidfuzz.process import cdist
        allowed = 1 if len(text) < 5 else 2 if len(text) < 9 else 3

        def edits(names: list[str], length: int, cutoff: int) -> Any:
            prefixes = [name[:length] for name in names]
            return cdist([text], prefixes, scorer=Levenshtein.distance, score_cutoff=cutoff)[0]

        # One pass over all names rules out most. The best prefix differs in length by at most as
        # many characters as edits are allowed, and each is one more edit from the prefix that is as
        # long as the text.
        near = np.flatnonzero(edits(self._names, len(text), 2 * allowed) <= 2 * allowed)
        names = [self._names[place] for place in near]
        lengths = range(len(text) - allowed, len(text) + allowed + 1)
        fewest = np.min([edits(names, length, allowed) for length in lengths], axis=0)
        differences = np.abs(np.fromiter(map(len, names), dtype=np.int64) - len(text))
        order = np.lexsort((near, differences, fewest))
        return [int(near[place]) for place in order if fewest[place] <= allowed]
