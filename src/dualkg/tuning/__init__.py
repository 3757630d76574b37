"""Search over recipes: a full grid, or sampled; many processes may share one."""

from __future__ import annotations

from dualkg.tuning.search import SearchProgress, search
from dualkg.tuning.space import Space, load_space, space_from
from dualkg.tuning.study import SearchResult, TrialRow

__all__ = ["SearchProgress", "SearchResult", "Space", "TrialRow", "load_space", "search", "space_from"]
