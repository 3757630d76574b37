"""How far a word is from the beginnings of a name, in letters added, left out or changed."""

from __future__ import annotations

from collections.abc import Iterator


def slips_from_beginnings(word: str, name: str) -> Iterator[int]:
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
