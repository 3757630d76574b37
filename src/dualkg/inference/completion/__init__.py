"""Completing a graph: the most probable triples that it does not have, as columns, as a table and
as a file.
"""

from dualkg.inference.completion.check import (
    CompletionCheck,
    check_completion,
    completion_reliability,
    sizes_up_to,
)
from dualkg.inference.completion.result import Completion, check_file, check_path
from dualkg.inference.completion.search import CompletionSettings, complete, warm_up_kernels

__all__ = [
    "Completion",
    "CompletionCheck",
    "CompletionSettings",
    "check_completion",
    "check_file",
    "check_path",
    "complete",
    "completion_reliability",
    "sizes_up_to",
    "warm_up_kernels",
]
