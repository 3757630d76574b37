"""Knowledge graphs: loading, splits, vocabularies and known answers."""

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dualkg.data.filters import KnownAnswers
    from dualkg.data.graph import Graph, GraphShape
    from dualkg.data.loading import load_graph
    from dualkg.data.vocabulary import Vocabulary

__all__ = ["Graph", "GraphShape", "KnownAnswers", "Vocabulary", "load_graph"]
MODULES = {
    "Graph": "graph",
    "GraphShape": "graph",
    "KnownAnswers": "filters",
    "Vocabulary": "vocabulary",
    "load_graph": "loading",
}


def __getattr__(name: str) -> object:
    """Load a module on first use: known answers need torch, and a saved graph does not."""
    if name in MODULES:
        return getattr(import_module(f"dualkg.data.{MODULES[name]}"), name)
    if name.startswith("_") or find_spec(f"dualkg.data.{name}") is None:
        raise AttributeError(f"module 'dualkg.data' has no attribute {name!r}")
    return import_module(f"dualkg.data.{name}")
