"""Finding names by a few letters: how they begin, what they hold, and what was misspelt."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal

from dualkg.answers.lookup.folding import folded
from dualkg.answers.lookup.letters import CommonLetters
from dualkg.answers.lookup.slips import slips_from_beginnings
from dualkg.data.vocabulary import Vocabulary

How = Literal["same", "beginning", "word", "inside", "misspelt"]
WORTH: dict[How, int] = {"same": 0, "beginning": 1, "word": 2, "inside": 3, "misspelt": 4}  # the least is the best
LOOKED_AT = 500  # matches of one kind; of more, the first in the order of the alphabet or of ids
COMPARED = 40  # names that a misspelt word is held against letter by letter
LONGEST = 48  # letters of a word that may be misspelt
PART = "\n"  # between names in one text; no folded name has it


@dataclass(frozen=True)
class Match:
    """An entity or relation, and how it was found."""

    id: int
    how: How


class Finder:
    """Finds names and labels by what people type; 100,000 of them in a few milliseconds.

    All folded names stand in one text, which is searched for what they hold; and sorted, for how they begin.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        names = vocabulary.names.to_pylist()
        labels = vocabulary.labels.to_pylist() if vocabulary.labels is not None else []
        pairs = [(folded(name), id) for id, name in enumerate(names)]
        pairs += [(folded(label), id) for id, label in enumerate(labels) if label and label != names[id]]
        self._words = [word for word, _ in pairs]
        self._ids = [id for _, id in pairs]
        self._text = PART + PART.join(self._words) + PART
        self._starts = list(accumulate((len(word) + 1 for word in self._words), initial=1))
        self._order = sorted(range(len(pairs)), key=self._words.__getitem__)
        self._sorted = [self._words[place] for place in self._order]
        self._letters = CommonLetters(self._words)

    def find(self, typed: str, *, most: int) -> list[Match]:
        """Best first: the same, then names that begin so, that have a word that does, that hold it; then misspelt."""
        word = folded(typed)
        if not word or PART in word:
            return []
        found: dict[int, tuple[How, str]] = {}
        for search in (self._beginning, self._inside):
            self._add(found, search(word))
            if len(found) >= most:
                break
        if not found:
            self._add(found, self._misspelt(word))
            return [Match(id, how) for id, (how, _) in list(found.items())[:most]]
        best = sorted((WORTH[how], len(known), known, id, how) for id, (how, known) in found.items())
        return [Match(id, how) for _, _, _, id, how in best[:most]]

    def _add(self, found: dict[int, tuple[How, str]], matches: Iterator[tuple[int, How]]) -> None:
        """Each id once, by the first and so the best way it was found."""
        for place, how in matches:
            id = self._ids[place]
            if id not in found or WORTH[how] < WORTH[found[id][0]]:
                found[id] = (how, self._words[place])

    def _beginning(self, word: str) -> Iterator[tuple[int, How]]:
        start = bisect_left(self._sorted, word)
        for number in range(start, min(start + LOOKED_AT, len(self._sorted))):
            known = self._sorted[number]
            if not known.startswith(word):
                return
            yield self._order[number], "same" if known == word else "beginning"

    def _inside(self, word: str) -> Iterator[tuple[int, How]]:
        at, seen = self._text.find(word), 0
        while at >= 0 and seen < LOOKED_AT:
            place = bisect_right(self._starts, at) - 1
            seen += 1
            before = self._text[at - 1]
            yield place, "beginning" if before == PART else "word" if before == " " else "inside"
            at = self._text.find(word, at + 1)

    def _misspelt(self, word: str) -> Iterator[tuple[int, How]]:
        """Names with few slips, fewest first; where the word is the beginning of a longer name, of that beginning."""
        if len(word) > LONGEST:
            return
        allowed = 1 if len(word) < 5 else 2 if len(word) < 9 else 3
        near = []
        for place in self._letters.nearest(word, most=COMPARED):
            known = self._words[place]
            slips = min(slips_from_beginnings(word, known[: len(word) + allowed]))
            if slips <= allowed:
                near.append((slips, abs(len(known) - len(word)), place))
        for _, _, place in sorted(near):
            yield place, "misspelt"
