"""The paper's numbers, as it printed them."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

COLUMNS = {"MRR": "mrr", "H@1": "hits_at_1", "H@10": "hits_at_10"}
"""What the paper's tables show, by its title."""
TABLES = ("main_results", "regularizers", "reg_p1", "published_elsewhere", "published_since")


@cache
def published() -> dict[str, Any]:
    """All that is shipped of the paper's tables, and of what was published since."""
    found: dict[str, Any] = json.loads(Path(__file__).with_name("published.json").read_text(encoding="utf-8"))
    return found


def published_metrics(row: str, graph: str) -> dict[str, float]:
    """The figures printed for a system on a graph, such as CP-DURA on WN18RR; those it leaves out are missing."""
    for table in TABLES:
        figures = published()[table].get(row, {}).get(graph)
        if figures:
            return {key: figure for key, figure in zip(COLUMNS.values(), figures, strict=True) if figure is not None}
    return {}
