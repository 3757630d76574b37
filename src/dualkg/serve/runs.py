"""The runs that are served, by name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from dualkg.answers import Predictor
from dualkg.answers.beliefs import load_beliefs
from dualkg.answers.lookup import Finder
from dualkg.answers.many import ManyPredictor
from dualkg.data.loops import looping_relations
from dualkg.data.vocabulary import Vocabulary
from dualkg.errors import RequestError
from dualkg.training import Run, RunFolder, load_run
from dualkg.training.start import choose_device


class UnknownError(RequestError):
    """A name that nothing has; `near` are names that may have been meant."""

    def __init__(self, sentence: str, near: Sequence[str] = ()) -> None:
        super().__init__(sentence)
        self.near = list(near)


@dataclass(frozen=True, eq=False)
class ServedRun:
    """A run with all that answering takes."""

    name: str
    run: Run
    predictor: Predictor
    checks: dict[str, Any] = field(default_factory=dict)  # how its probabilities held on test

    @classmethod
    def of(cls, run: Run, *, name: str, device: str | None = None) -> ServedRun:
        """With probabilities and answer sets where the run has been calibrated."""
        run.model = run.model.to(choose_device(device))
        if not run.folder or not RunFolder(run.folder).calibration.exists():
            return cls(name, run, Predictor(run.model, run.graph, recipe=run.recipe))
        beliefs = load_beliefs(run.folder, run.graph)
        predictor = Predictor(
            run.model,
            run.graph,
            recipe=run.recipe,
            calibration=beliefs.calibration,
            answer_sets=beliefs.answer_sets,
        )
        return cls(name, run, predictor, beliefs.checks)

    @property
    def entities(self) -> Vocabulary:
        return self.run.graph.entities

    @property
    def relations(self) -> Vocabulary:
        return self.run.graph.relations

    @cached_property
    def many(self) -> ManyPredictor:
        return ManyPredictor(self.predictor)

    @cached_property
    def finder(self) -> Finder:
        return Finder(self.entities)

    @cached_property
    def looping(self) -> frozenset[int]:
        """The relations by which an entity may be its own answer."""
        return looping_relations(self.run.graph)

    def id_of(self, vocabulary: Vocabulary, name: str | int) -> int:
        """The id of a name; where there is none, the command line's sentence and the nearest names."""
        try:
            return vocabulary.id(name)
        except RequestError as error:
            near = self.finder.find(name, most=5) if vocabulary is self.entities and isinstance(name, str) else []
            raise UnknownError(str(error), [self.entities[match.id] for match in near]) from None

    def warm(self) -> None:
        """Make what the first requests would wait for."""
        _ = self.finder, self.many, self.looping, self.predictor._known, self.predictor.all_known
        self.entities.id(0)
        _ = "" in self.entities, "" in self.relations


class ServedRuns:
    """Runs by name; the first is the one that is asked where none is named."""

    def __init__(self, runs: Sequence[ServedRun]) -> None:
        if not runs:
            raise RequestError("Name at least one run to serve.")
        names = [run.name for run in runs]
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise RequestError(f"Two of the runs are called '{twice}'. Serve runs from folders with different names.")
        self._runs = {run.name: run for run in runs}

    @classmethod
    def load(cls, paths: Sequence[Path], *, device: str | None = None) -> ServedRuns:
        """Runs from their folders, each called as its folder is."""
        return cls([ServedRun.of(load_run(path), name=path.resolve().name, device=device) for path in paths])

    @property
    def names(self) -> list[str]:
        return list(self._runs)

    def __iter__(self) -> Any:
        return iter(self._runs.values())

    def __len__(self) -> int:
        return len(self._runs)

    def get(self, name: str | None) -> ServedRun:
        if name is None:
            return next(iter(self._runs.values()))
        if name not in self._runs:
            served = ", ".join(f"'{known}'" for known in self._runs)
            raise UnknownError(f"No run that is served is named '{name}'. There are: {served}.", self.names)
        return self._runs[name]
