"""Asking: from a request to a predictor, alone or together with others that wait."""

from __future__ import annotations

from dualkg.serve.asking.asker import Asker, BusyError
from dualkg.serve.asking.one_by_one import OneByOne
from dualkg.serve.asking.together import Together

__all__ = ["Asker", "BusyError", "OneByOne", "Together"]
