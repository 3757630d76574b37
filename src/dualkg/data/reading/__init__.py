"""Reading triples and labels from files and archives."""

from dualkg.data.reading.columns import Columns
from dualkg.data.reading.sources import Source, find_sources, holds_triples, one_source
from dualkg.data.reading.text import read_labels
from dualkg.data.reading.triples import ReadTriples, read_triples

__all__ = [
    "Columns",
    "ReadTriples",
    "Source",
    "find_sources",
    "holds_triples",
    "one_source",
    "read_labels",
    "read_triples",
]
