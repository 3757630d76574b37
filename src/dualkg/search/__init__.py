"""Search over recipes: a full grid, or sampled; many processes may share one."""

from __future__ import annotations

from dualkg.search.result import SearchResult, TrialRow
from dualkg.search.space import Space, load_space, space_from
from dualkg.search.start import SearchMoment, search

__all__ = ["SearchMoment", "SearchResult", "Space", "TrialRow", "load_space", "search", "space_from"]
