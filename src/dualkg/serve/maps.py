"""Maps of all entities, made once in the background."""

from __future__ import annotations

from concurrent.futures import Future
from threading import Lock, Thread

from dualkg.analysis.entity_map import entity_map
from dualkg.analysis.projection import Vectors
from dualkg.serve.runs import ServedRun


class Maps:
    """The map of each run: read from its folder, or made and kept there, one run after the other.

    A large one takes a minute or two. Its thread is a daemon, so that a server which is stopped does not wait for it.
    """

    def __init__(self) -> None:
        self._one_at_a_time = Lock()
        self._maps: dict[str, Future[Vectors]] = {}

    def of(self, run: ServedRun) -> Future[Vectors]:
        """The same future for the same run; one that failed is tried again."""
        made = self._maps.get(run.name)
        if made is None or (made.done() and made.exception() is not None):
            made = self._maps[run.name] = Future()
            made.set_running_or_notify_cancel()
            Thread(target=self._make, args=(run, made), name=f"map of {run.name}", daemon=True).start()
        return made

    def _make(self, run: ServedRun, made: Future[Vectors]) -> None:
        try:
            with self._one_at_a_time:
                places = entity_map(run.run)
        except Exception as error:
            made.set_exception(error)
        else:
            made.set_result(places)
