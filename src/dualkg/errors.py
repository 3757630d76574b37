"""What can go wrong, as sentences: what was expected, what came, what to do."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


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


def closest(name: str, names: Iterable[str], *, most: int = 3) -> list[str]:
    """The names most like `name`, best first; case is ignored."""
    by_folded: dict[str, str] = {}
    for known in names:
        by_folded.setdefault(known.casefold(), known)
    folded = name.casefold()
    matches = difflib.get_close_matches(folded, by_folded, n=4 * most, cutoff=0.6)
    # difflib likes long common runs; people make single slips.
    matches.sort(key=lambda match: num_slips(folded, match))
    return [by_folded[match] for match in matches[:most]]


def num_slips(one: str, other: str) -> int:
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
    matches = [f"'{match}'" for match in closest(name, names)]
    if not matches:
        return ""
    listed = matches[0] if len(matches) == 1 else f"{', '.join(matches[:-1])} or {matches[-1]}"
    return f" Did you mean {listed}?"
