"""Finding names by a few letters: how they begin, what they hold, and what was misspelt."""

from __future__ import annotations

import unicodedata
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal

import numpy as np
import numpy.typing as npt

from dualkg.data.vocabulary import Vocabulary


def normalize_name(text: str) -> str:
    """`São_Tomé` → `sao tome`. Letters of other scripts stay; what is no letter and no digit parts words."""
    if not text.isascii():
        parted = unicodedata.normalize("NFKD", text)
        text = "".join(letter for letter in parted if not unicodedata.combining(letter))
    text = text.casefold()
    return " ".join("".join(letter if letter.isalnum() else " " for letter in text).split()) or text.strip()


Ids = npt.NDArray[np.int64]
RUN = 3  # letters


class CommonLetters:
    """For every run of three letters, the names that have it; kept as sorted runs, offsets and names."""

    def __init__(self, names: Sequence[str]) -> None:
        """Each name begins with a mark, so that a common beginning counts for more."""
        runs, owners = _runs(names)
        order = np.lexsort((owners, runs))
        runs, owners = runs[order], owners[order]
        fresh = np.ones(len(runs), dtype=bool)
        fresh[1:] = (runs[1:] != runs[:-1]) | (owners[1:] != owners[:-1])
        runs, self._owners = runs[fresh], owners[fresh].astype(np.int32)
        self._runs, starts = np.unique(runs, return_index=True)
        self._offsets = np.append(starts, len(runs))
        self._sizes = np.maximum(np.bincount(self._owners, minlength=len(names)), 1)

    def nearest(self, word: str, *, most: int) -> list[int]:
        """Places of the names that have most in common with a word, best first; none that has nothing."""
        runs = np.unique(_runs([word])[0])
        places = np.searchsorted(self._runs, runs)
        there = [place for place in places[places < len(self._runs)].tolist() if self._runs[place] in runs]
        if not there:
            return []
        lists = [self._owners[self._offsets[place] : self._offsets[place + 1]] for place in there]
        common = np.bincount(np.concatenate(lists), minlength=len(self._sizes))
        alike = 2 * common / (self._sizes + len(runs))
        best = np.argpartition(-alike, min(most, len(alike) - 1))[:most]
        best = best[np.lexsort((best, -alike[best]))]
        return [int(place) for place in best if common[place]]


def _runs(names: Sequence[str]) -> tuple[Ids, Ids]:
    """All runs of three letters as numbers, and the name each is of."""
    marked = [f"\x02{name}\x03" if name else "" for name in names]
    letters = np.frombuffer("".join(marked).encode("utf-32-le", "surrogatepass"), dtype=np.uint32).astype(np.int64)
    lengths = np.array([len(name) for name in marked], dtype=np.int64)
    owners = np.repeat(np.arange(len(names)), lengths)
    if len(letters) < RUN:
        return np.empty(0, np.int64), np.empty(0, np.int64)
    first, second, third = letters[:-2], letters[1:-1], letters[2:]
    whole = owners[:-2] == owners[2:]
    return ((first << 42) | (second << 21) | third)[whole], owners[:-2][whole]


def prefix_edit_distances(word: str, name: str) -> Iterator[int]:
    """The slips between a word and the first 0, 1, 2, … letters of a name; the last is that of the whole name.

    All letters of the word are compared at once, as bits of one number (Myers, 1999): a column of the usual table
    differs from place to place by −1, 0 or 1, and is kept as the bits that rise and the bits that fall.
    """
    if not word:
        yield from range(len(name) + 1)
        return
    places: dict[str, int] = {}
    for place, letter in enumerate(word):
        places[letter] = places.get(letter, 0) | 1 << place
    whole, last = (1 << len(word)) - 1, 1 << (len(word) - 1)
    rises, falls, slips = whole, 0, len(word)
    yield slips
    for letter in name:
        same = places.get(letter, 0)
        across = (((same & rises) + rises) ^ rises) | same
        up, down = falls | ~(across | rises) & whole, rises & across
        slips += bool(up & last) - bool(down & last)
        yield slips
        up, down, beside = up << 1 | 1, down << 1, same | falls
        rises, falls = (down | ~(beside | up)) & whole, up & beside & whole


MatchType = Literal["exact", "prefix", "word", "substring", "fuzzy"]
WORTH: dict[MatchType, int] = {"exact": 0, "prefix": 1, "word": 2, "substring": 3, "fuzzy": 4}  # the least is the best
LOOKED_AT = 500  # matches of one kind; of more, the first in the order of the alphabet or of ids
COMPARED = 40  # names that a misspelt word is held against letter by letter
LONGEST = 48  # letters of a word that may be misspelt
PART = "\n"  # between names in one text; no normalize_name name has it


@dataclass(frozen=True)
class Match:
    """An entity or relation, and how it was found."""

    id: int
    match_type: MatchType


class NameSearch:
    """Finds names and labels by what people type; 100,000 of them in a few milliseconds.

    All normalize_name names stand in one text, which is searched for what they hold; and sorted, for how they begin.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        names = vocabulary.names.to_pylist()
        labels = vocabulary.labels.to_pylist() if vocabulary.labels is not None else []
        pairs = [(normalize_name(name), id) for id, name in enumerate(names)]
        pairs += [(normalize_name(label), id) for id, label in enumerate(labels) if label and label != names[id]]
        self._words = [word for word, _ in pairs]
        self._ids = [id for _, id in pairs]
        self._text = PART + PART.join(self._words) + PART
        self._starts = list(accumulate((len(word) + 1 for word in self._words), initial=1))
        self._order = sorted(range(len(pairs)), key=self._words.__getitem__)
        self._sorted = [self._words[place] for place in self._order]
        self._letters = CommonLetters(self._words)

    def search(self, typed: str, *, limit: int) -> list[Match]:
        """Best first: the same, then names that begin so, that have a word that does, that hold it; then misspelt."""
        word = normalize_name(typed)
        if not word or PART in word:
            return []
        found: dict[int, tuple[MatchType, str]] = {}
        for search in (self._beginning, self._inside):
            self._add(found, search(word))
            if len(found) >= limit:
                break
        if not found:
            self._add(found, self._misspelt(word))
            return [Match(id, how) for id, (how, _) in list(found.items())[:limit]]
        best = sorted((WORTH[how], len(known), known, id, how) for id, (how, known) in found.items())
        return [Match(id, how) for _, _, _, id, how in best[:limit]]

    def _add(self, found: dict[int, tuple[MatchType, str]], matches: Iterator[tuple[int, MatchType]]) -> None:
        """Each id once, by the first and so the best way it was found."""
        for place, how in matches:
            id = self._ids[place]
            if id not in found or WORTH[how] < WORTH[found[id][0]]:
                found[id] = (how, self._words[place])

    def _beginning(self, word: str) -> Iterator[tuple[int, MatchType]]:
        start = bisect_left(self._sorted, word)
        for number in range(start, min(start + LOOKED_AT, len(self._sorted))):
            known = self._sorted[number]
            if not known.startswith(word):
                return
            yield self._order[number], "exact" if known == word else "prefix"

    def _inside(self, word: str) -> Iterator[tuple[int, MatchType]]:
        at, seen = self._text.find(word), 0
        while at >= 0 and seen < LOOKED_AT:
            place = bisect_right(self._starts, at) - 1
            seen += 1
            before = self._text[at - 1]
            yield place, "prefix" if before == PART else "word" if before == " " else "substring"
            at = self._text.find(word, at + 1)

    def _misspelt(self, word: str) -> Iterator[tuple[int, MatchType]]:
        """Names with few slips, fewest first; where the word is the beginning of a longer name, of that beginning."""
        if len(word) > LONGEST:
            return
        allowed = 1 if len(word) < 5 else 2 if len(word) < 9 else 3
        near = []
        for place in self._letters.nearest(word, most=COMPARED):
            known = self._words[place]
            slips = min(prefix_edit_distances(word, known[: len(word) + allowed]))
            if slips <= allowed:
                near.append((slips, abs(len(known) - len(word)), place))
        for _, _, place in sorted(near):
            yield place, "fuzzy"
