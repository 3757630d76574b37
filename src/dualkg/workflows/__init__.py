"""Workflows: what `kg.fit`, `kg.train_recipe`, `kg.resume` and the commands do, step by step.

Each step is one function, and reports typed events.
"""

from dualkg.workflows import events
from dualkg.workflows.extend import extend_run
from dualkg.workflows.predict import FileOfQueries, predict_file
from dualkg.workflows.processes import in_first_process, is_first_process, num_processes, opened
from dualkg.workflows.sources import check_graph, read_source, run_name
from dualkg.workflows.train import (
    SeedResults,
    fit,
    resume,
    train_recipe,
    train_seeds,
    train_source,
    train_source_seeds,
)

__all__ = [
    "FileOfQueries",
    "SeedResults",
    "check_graph",
    "events",
    "extend_run",
    "fit",
    "in_first_process",
    "is_first_process",
    "num_processes",
    "opened",
    "predict_file",
    "read_source",
    "resume",
    "run_name",
    "train_recipe",
    "train_seeds",
    "train_source",
    "train_source_seeds",
]
