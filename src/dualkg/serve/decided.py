"""The files of decisions of the runs that are served."""

from __future__ import annotations

from threading import Lock

from dualkg.answers.decisions import Decisions
from dualkg.errors import RequestError
from dualkg.serve.runs import ServedRun
from dualkg.training import RunFolder


class DecisionFiles:
    """Of each run the file beside it. One thread at a time reads or writes: `lock`."""

    def __init__(self) -> None:
        self.lock = Lock()
        self._files: dict[str, Decisions] = {}

    def of(self, run: ServedRun) -> Decisions:
        if run.run.folder is None:
            raise RequestError(f"The run {run.name} is in no folder, so decisions cannot be kept. Save it first.")
        return self._files.setdefault(run.name, Decisions(RunFolder(run.run.folder).decisions))
