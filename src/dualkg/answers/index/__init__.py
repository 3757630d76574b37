"""An index: the best answers of a million without scoring them all, and the tables it searches in fewer bytes."""

from __future__ import annotations

from dualkg.answers.index.approximate import FaissIndex
from dualkg.answers.index.base import Found, Index
from dualkg.answers.index.building import Facts, ModelIndex, build_index
from dualkg.answers.index.exact import ExactIndex
from dualkg.answers.index.forms import FormPoint, measure_forms
from dualkg.answers.index.predictor import IndexedPredictor
from dualkg.answers.index.storage import load_index, save_index

__all__ = [
    "ExactIndex",
    "Facts",
    "FaissIndex",
    "FormPoint",
    "Found",
    "Index",
    "IndexedPredictor",
    "ModelIndex",
    "build_index",
    "load_index",
    "measure_forms",
    "save_index",
]
