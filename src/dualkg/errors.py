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
    matches = difflib.get_close_matches(name.casefold(), by_folded, n=most, cutoff=0.6)
    return [by_folded[match] for match in matches]


def did_you_mean(name: str, names: Iterable[str]) -> str:
    """` Did you mean 'Paris'?`, or nothing where no name is near."""
    matches = [f"'{match}'" for match in closest(name, names)]
    if not matches:
        return ""
    listed = matches[0] if len(matches) == 1 else f"{', '.join(matches[:-1])} or {matches[-1]}"
    return f" Did you mean {listed}?"
