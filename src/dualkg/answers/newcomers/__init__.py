"""New entities: a row for each from a few triples, by the convex problem of that entity alone."""

from __future__ import annotations

from dualkg.answers.newcomers.extension import Extension, extended, with_newcomer
from dualkg.answers.newcomers.files import extend_run
from dualkg.answers.newcomers.problem import Problem
from dualkg.answers.newcomers.study import Measured, counted, study
from dualkg.answers.newcomers.surroundings import Surroundings

__all__ = [
    "Extension",
    "Measured",
    "Problem",
    "Surroundings",
    "counted",
    "extend_run",
    "extended",
    "study",
    "with_newcomer",
]
