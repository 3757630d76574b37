"""Where a search starts, and goes on."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from dualkg.data.graph import Graph
from dualkg.errors import DualkgError, RequestError
from dualkg.search.result import SearchResult, collect
from dualkg.search.space import Space, load_space
from dualkg.training.loop import InterruptedRunError, Moment
from dualkg.training.run import RunFolder
from dualkg.training.start import choose_device, load_recipe_graph

if TYPE_CHECKING:
    from dualkg.search.study import Standing


@dataclass(frozen=True)
class SearchMoment:
    """What a progress display needs to know; `training` is of the trial at work in this process."""

    num_done: int
    num_trials: int
    best: float | None
    training: Moment | None


Watch = Callable[[SearchMoment], None]


def search(
    space: Space | str | Path,
    *,
    out: str | Path,
    graph: Graph | None = None,
    device: str | torch.device | None = None,
    storage: str | None = None,
    jobs: int = 1,
    watch: Watch | None = None,
) -> SearchResult:
    """Search a space for the recipe of the best validation MRR; called again, it goes on where it was.

    The study is kept in `out`/study.db, or in the database of the URL `storage`, which machines may share. With
    `jobs` above 1, so many processes train side by side. The test split is not looked at.
    """
    _need_optuna()
    space = space if isinstance(space, Space) else load_space(space)
    graph = graph or load_recipe_graph(space.base)
    if not len(graph.valid):
        raise RequestError(f"{graph.name} has no valid triples, and a search chooses by them.")
    out, chosen = Path(out), str(choose_device(device))
    if RunFolder(out).recipe.exists():
        raise RequestError(f"{out} holds a run; a search needs a folder of its own: use --out.")
    out.mkdir(parents=True, exist_ok=True)
    return _search(space, graph, out, device=chosen, storage=storage, jobs=jobs, watch=watch or (lambda moment: None))


def _search(
    space: Space, graph: Graph, out: Path, *, device: str, storage: str | None, jobs: int, watch: Watch
) -> SearchResult:
    import optuna

    from dualkg.search.jobs import Job, work_side_by_side
    from dualkg.search.study import url_of
    from dualkg.search.work import without_test

    def tell(standing: Standing, moment: Moment | None) -> None:
        watch(SearchMoment(standing.num_done, standing.num_trials, standing.best, moment))

    optuna.logging.set_verbosity(optuna.logging.ERROR)  # what it warns of is told in our own words
    graph = without_test(graph)
    job = Job(space, storage or url_of(out / "study.db"), "The storage" if storage else str(out), device)
    study = job.study(graph)
    started, before = time.monotonic(), collect(study, space, graph=graph.name).num_done
    try:
        if jobs == 1:
            job.work(graph, tell)
        else:
            work_side_by_side(job, graph, jobs, tell=tell)
    except (KeyboardInterrupt, InterruptedRunError):
        done = collect(study, space, graph=graph.name)
        done.write(out)
        raise InterruptedRunError(f"Stopped; {done.num_done} of {space.num_trials} trials are done and kept.") from None
    except optuna.exceptions.StorageInternalError as error:
        raise DualkgError(f"{job.where} failed: {error.__cause__ or error}. Finished trials are kept in it.") from None
    result = collect(study, space, graph=graph.name)
    if result.num_done > before:
        minutes = (time.monotonic() - started) / 60
        result = replace(result, per_minute=round((result.num_done - before) / minutes, 2))
    result.write(out)
    return result


def _need_optuna() -> None:
    try:
        import optuna  # noqa: F401
    except ImportError:
        raise RequestError("A search needs Optuna. Install it: pip install 'dualkg[search]'") from None
