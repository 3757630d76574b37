"""Looking up: the names that someone may mean who has typed a few letters."""

from __future__ import annotations

from dualkg.answers.lookup.finder import Finder, Match

__all__ = ["Finder", "Match"]
