"""What can go wrong, as sentences: what was expected, what came, what to do."""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Iterable

import numpy as np

ALIKE = 0.6  # the share of letters that two names must have in common
LOOKED_AT = 300  # names that are compared letter by letter


class DualkgError(Exception):
    """The run failed. The command line prints the sentence and exits with `exit_code`."""

    exit_code = 1


class RequestError(DualkgError):
    """The request was wrong: a name, a choice or a value that cannot be used."""

    exit_code = 2


class DataError(RequestError):
    """The triples cannot be read or are not what they claim to be."""


class DivergedError(DualkgError):
    """A loss or a score became NaN or infinite."""


def close_matches(name: str, names: Iterable[str], *, most: int = 3) -> list[str]:
    """The names most like `name`, best first; case is ignored."""
    by_folded: dict[str, str] = {}
    for known in names:
        by_folded.setdefault(known.casefold(), known)
    folded = name.casefold()
    matches = difflib.get_close_matches(folded, _with_its_letters(folded, list(by_folded)), n=4 * most, cutoff=ALIKE)
    # difflib likes long common runs; people make single slips.
    matches.sort(key=lambda match: edit_distance(folded, match))
    return [by_folded[match] for match in matches[:most]]


def _with_its_letters(name: str, names: list[str]) -> list[str]:
    """The names that have enough of a name's letters, in whatever order; where these are many, those that have most.

    All are counted at once. `difflib` asks the same, name by name, and takes seconds for 40,000.
    """
    if len(names) <= LOOKED_AT:
        return names
    letters = np.frombuffer("".join(f"{one}\n" for one in names).encode("utf-32-le", "surrogatepass"), dtype=np.uint32)
    lengths = np.array([len(one) + 1 for one in names])
    starts = np.cumsum(lengths) - lengths
    common = np.zeros(len(names), dtype=np.int64)
    for letter, number in Counter(name).items():
        common += np.minimum(np.add.reduceat(letters == ord(letter), starts, dtype=np.int64), number)
    shares = 2 * common / (lengths - 1 + len(name)).clip(1)
    best = np.argsort(-shares, kind="stable")[:LOOKED_AT]
    return [names[place] for place in best.tolist() if shares[place] >= ALIKE]


def edit_distance(one: str, other: str) -> int:
    """How many letters must be added, left out or changed to turn one word into the other."""
    above = list(range(len(other) + 1))
    for row, letter in enumerate(one, start=1):
        here = [row]
        for column, wanted in enumerate(other, start=1):
            here.append(min(above[column] + 1, here[-1] + 1, above[column - 1] + (letter != wanted)))
        above = here
    return above[-1]


def did_you_mean(name: str, names: Iterable[str]) -> str:
    """` Did you mean 'Paris'?`, or nothing where no name is near."""
    matches = [f"'{match}'" for match in close_matches(name, names)]
    if not matches:
        return ""
    listed = matches[0] if len(matches) == 1 else f"{', '.join(matches[:-1])} or {matches[-1]}"
    return f" Did you mean {listed}?"
