"""Completing a whole graph: the most plausible triples that it does not have."""

from __future__ import annotations

from dualkg.answers.completion.check import Check, sizes_up_to, study
from dualkg.answers.completion.completion import complete
from dualkg.answers.completion.listing import Completion, check_file

__all__ = ["Check", "Completion", "check_file", "complete", "sizes_up_to", "study"]
