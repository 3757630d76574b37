"""Knowledge graphs: loading, splits, vocabularies and known answers."""

from dualkg.data.filters import KnownAnswers
from dualkg.data.graph import Graph, GraphShape
from dualkg.data.loading import load_graph
from dualkg.data.vocabulary import Vocabulary

__all__ = ["Graph", "GraphShape", "KnownAnswers", "Vocabulary", "load_graph"]
