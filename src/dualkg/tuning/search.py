"""Search a space for the best recipe by Optuna: `kg.search`, `dualkg tune`."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dualkg.data.graph import Graph
from dualkg.data.loading import load_graph
from dualkg.errors import DamagedFile, DualkgError, InvalidValue, PathExists, RequestError
from dualkg.extras import optional_import
from dualkg.files import locked
from dualkg.logs import ProgressLog, TimeLeft
from dualkg.training.api import choose_device, load_recipe_graph
from dualkg.training.errors import InterruptedRunError
from dualkg.training.run_folder import RunFolder
from dualkg.tuning.results import OnProgress, TuningProgress, TuningResult
from dualkg.tuning.space import SearchSpace, load_space, space_from


def search(
    space: SearchSpace | str | Path | Mapping[str, Any],
    *,
    out: str | Path | None = None,
    graph: Graph | str | None = None,
    device: str | torch.device | None = None,
    storage: str | None = None,
    on_progress: OnProgress | None = None,
) -> TuningResult:
    """Search a space for the recipe with the best validation MRR; called again, it resumes.

    Called in several processes with the same `out` or `storage`, they share the trials. The test
    split is never used.

    Args:
        space: A `SearchSpace`, its file, or the tables of the file as a mapping.
        out: Folder of the search, which resumes there. Default: runs/tune-NAME.
        graph: Used in place of the graph that the space names.
        device: Default: a GPU if there is one.
        storage: URL of a database that several machines may share, such as
            `postgresql://user@server/searches`. Default: the SQLite file study.db in `out`.
        on_progress: Called with progress events.

    Returns:
        The trials, and the best recipe.

    Examples:
        >>> space = {"training": {"epochs": 1}, "space": {"model.dim": [4, 8]}}
        >>> result = kg.search(space, graph=graph, out="runs/search")  # doctest: +SKIP
    """
    with optional_import("optuna", purpose="Tuning"):
        from optuna.exceptions import StorageInternalError

        from dualkg.tuning.study import SearchStudy, create_database, open_study

    space = _as_space(space)
    graph = _training_graph(space, graph)
    out = Path(out or space.folder)
    if RunFolder(out).recipe.exists():
        kind = "the folder of a run, and a search needs a folder of its own"
        raise PathExists(out, what=kind, overwritable=False)
    out.mkdir(parents=True, exist_ok=True)
    where = "The storage" if storage else str(out)

    try:
        url = storage or create_database(out / "study.db")
        study = SearchStudy(
            open_study(space, url, data=graph.fingerprint, where=where),
            space,
            graph,
            device=choose_device(device),
            on_progress=_reporter(space, graph, on_progress),
        )
        num_before = study.result().num_done
        started = time.monotonic()
        interrupted = False
        try:
            study.run()
        except (KeyboardInterrupt, InterruptedRunError):
            interrupted = True
        result = study.result()
    except StorageInternalError as error:
        raise _storage_error(where, error) from None

    num_new = result.num_done - num_before
    if num_new > 0:
        minutes = (time.monotonic() - started) / 60
        result = replace(result, per_minute=round(num_new / minutes, 2))
    # Processes that share the study end at the same time, and may share the folder too.
    with locked(out, wait=True):
        result.write(out)
    if interrupted:
        raise InterruptedRunError(
            f"Stopped; {result.num_done} of {space.num_trials} trials are done and saved."
        )
    return result


def _as_space(space: SearchSpace | str | Path | Mapping[str, Any]) -> SearchSpace:
    if isinstance(space, SearchSpace):
        return space
    if isinstance(space, Mapping):
        return space_from(space, source="The search space")
    if isinstance(space, (str, Path)):
        return load_space(space)
    raise InvalidValue(
        "space",
        expected="a .toml file, a mapping of its tables, or a SearchSpace",
        found=space,
    )


def _training_graph(space: SearchSpace, graph: Graph | str | None) -> Graph:
    """The graph of a search without its test triples, which are not even used as a filter."""
    if isinstance(graph, str):
        graph = load_graph(graph)
    elif graph is None:
        graph = load_recipe_graph(space.base)
    if not len(graph.valid):
        raise RequestError(
            f"{graph.name} has no validation triples, and tuning selects by their MRR."
        )
    return replace(graph, test=np.empty((0, 3), dtype=np.int32))


def _reporter(space: SearchSpace, graph: Graph, on_progress: OnProgress | None) -> OnProgress:
    """What logs the progress of a search, with the time left."""
    log = ProgressLog(f"Tuning {space.base.model.name} on {graph.name}")
    estimate = TimeLeft()

    def report(event: TuningProgress) -> None:
        seconds_left = estimate(event.num_parts_done, event.num_trials)
        event = replace(event, seconds_left=seconds_left)
        is_last = event.num_done >= event.num_trials
        if on_progress:
            on_progress(event)
        log(
            lambda: event.text if is_last else f"{event.text}  {event.time_left}".rstrip(),
            last=is_last,
        )

    return report


def _storage_error(where: str, error: Exception) -> DualkgError:
    """What a storage says of a failure, without the statement of SQL that failed."""
    reason = str(error.__cause__ or error).splitlines()[0]
    reason = re.sub(r"^\([\w.]+\) ", "", reason)
    if "malformed" in reason:
        return DamagedFile(where, reason, advice="Search in another folder.")
    return DualkgError(f"{where} failed: {reason}. Finished trials are saved in it.")
