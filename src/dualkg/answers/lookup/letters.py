"""Names with letters in common: which of many share most runs of three letters with a word."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

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
