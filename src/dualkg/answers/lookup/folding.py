"""Words as they are compared: without case, accents and marks between words."""

from __future__ import annotations

import unicodedata


def folded(text: str) -> str:
    """`São_Tomé` → `sao tome`. Letters of other scripts stay; what is no letter and no digit parts words."""
    if not text.isascii():
        parted = unicodedata.normalize("NFKD", text)
        text = "".join(letter for letter in parted if not unicodedata.combining(letter))
    text = text.casefold()
    return " ".join("".join(letter if letter.isalnum() else " " for letter in text).split()) or text.strip()
