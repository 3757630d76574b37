"""The served runs: each with its predictor, and with what pages look up in its graph."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Self

import numpy as np
import numpy.typing as npt

from dualkg.data.entity_types import EntityTypes
from dualkg.data.graph import SPLITS, Graph
from dualkg.data.inspection import Inspection
from dualkg.data.roles import EntityRoles
from dualkg.errors import RequestError
from dualkg.inference.completion import Completion, complete, warm_up_kernels
from dualkg.inference.explanation import has_supporting_triples, is_same_graph
from dualkg.inference.predictor import Predictor
from dualkg.serve.entity_facts import Remarker
from dualkg.serve.entity_paths import Neighbours
from dualkg.serve.errors import BusyError, NotFound
from dualkg.serve.name_search import NameSearch
from dualkg.serve.schemas import Item
from dualkg.training.ensemble import load_run
from dualkg.training.errors import RunInTraining
from dualkg.training.run import Run
from dualkg.training.run_folder import RunFolder

# Coordinates of entities in the plane, `(num_entities, 2)`.
Positions = npt.NDArray[np.float64]
# Scores of a search for new facts that begins when a page is open: some seconds on two cores.
MAX_SCORES = 10**9


def compute_map(
    run: Run,
    *,
    on_progress: Callable[[float], None],
    on_positions: Callable[[Positions], None],
) -> Positions:
    """The position of each entity, from the file of the map or computed."""
    from dualkg.analysis.projection import entity_map  # few requests are for a map

    return entity_map(run, on_progress=on_progress, on_positions=on_positions)


@dataclass(frozen=True, eq=False)
class ServedRun:
    """A run with its predictor and name index, and with the functions that take long."""

    name: str
    run: Run
    predictor: Predictor
    complete: Callable[..., Completion] = complete
    compute_map: Callable[..., Positions] = compute_map

    @classmethod
    def of(cls, run: Run, *, name: str, device: str | None = None) -> Self:
        """A run with its probabilities and prediction sets, if it has been calibrated."""
        from dualkg.training.api import choose_device  # it imports all that trains

        run.model = run.model.to(choose_device(device))
        return cls(name, run, Predictor.of(run, cache=True))

    @property
    def graph(self) -> Graph:
        return self.run.graph

    @cached_property
    def decisions_file(self) -> Path | None:
        """The file of the decisions on the run, if it has a folder."""
        folder = self.run.folder
        return None if folder is None else RunFolder(folder).decisions

    @cached_property
    def name_search(self) -> NameSearch:
        return NameSearch(self.graph.entities)

    @cached_property
    def relation_search(self) -> NameSearch:
        return NameSearch(self.graph.relations)

    @cached_property
    def roles(self) -> EntityRoles:
        return EntityRoles.of(self.graph)

    @cached_property
    def neighbours(self) -> Neighbours:
        return Neighbours.of(self.graph)

    @cached_property
    def num_triples(self) -> list[int]:
        """The number of known triples of each relation."""
        relations = np.concatenate([self.graph.split(split)[:, 1] for split in SPLITS])
        counts: list[int] = np.bincount(relations, minlength=len(self.graph.relations)).tolist()
        return counts

    def search_takes_long(self, relation: Item | None = None) -> bool:
        """Whether a search for new facts among all entities takes more than some seconds."""
        shape = self.graph.shape
        num_relations = 1 if relation else shape.num_relations
        return num_relations * shape.num_entities**2 > MAX_SCORES

    @cached_property
    def remarker(self) -> Remarker:
        calibration = self.predictor.calibration
        classes = calibration.query_classes if calibration else None
        return Remarker.of(self.graph, self.predictor.all_known, classes)

    @property
    def types(self) -> EntityTypes | None:
        """The types of entities that the calibration has."""
        calibration = self.predictor.calibration
        return calibration.types if calibration else None

    @cached_property
    def type_labels(self) -> list[str]:
        """The names of the types; those that are entities have the labels of these."""
        if self.types is None:
            return []
        entities = self.graph.entities
        return [
            entities.label(entities.id(name)) if name in entities else name
            for name in self.types.names
        ]

    def types_of(self, entity: int) -> list[str]:
        """The types of an entity, without those that the graph does not have."""
        if self.types is None:
            return []
        first, last = np.searchsorted(self.types.entities, [entity, entity + 1])
        return [self.type_labels[number] for number in self.types.types[first:last].tolist()]

    @cached_property
    def inspection(self) -> Inspection:
        return self.graph.inspect()

    @cached_property
    def has_explanations(self) -> bool:
        """Whether predictions can be explained by the run alone.

        Those of an ensemble, and of a model without an adjoint, cannot.
        """
        return self.is_path_network or has_supporting_triples(self.run.model)

    @property
    def is_path_network(self) -> bool:
        return self.run.model.path_network is not None

    @cached_property
    def relations(self) -> list[Item]:
        return [Item.of(self.graph.relations, id) for id in range(len(self.graph.relations))]

    def warm_up(self) -> None:
        """Compute everything that is cached, so that the first requests do not wait for it."""
        _ = self.name_search, self.relation_search, self.roles
        self.predictor.warm_up()
        _ = self.remarker
        warm_up_kernels()  # else the first search for new facts would wait for numba
        # Looking up an id and a name builds the dictionaries of the vocabularies.
        self.graph.entities.id(0)
        _ = "" in self.graph.entities
        _ = "" in self.graph.relations


class ServedRuns:
    """Runs by name; the first is the default. `in_training` are folders of others."""

    def __init__(self, runs: Sequence[ServedRun], *, in_training: Sequence[Path] = ()) -> None:
        if not runs and not in_training:
            raise RequestError("Name at least one run to serve.")
        self.in_training = list(in_training)
        self.names = [run.name for run in runs]
        for name, number in Counter(self.names).items():
            if number > 1:
                raise RequestError(
                    f"Two of the runs are named '{name}'. Serve runs from folders with different "
                    "names."
                )
        self._runs = {run.name: run for run in runs}
        self._networks: dict[str, ServedRun | None] = {}

    @classmethod
    def load(cls, paths: Sequence[Path], *, device: str | None = None) -> Self:
        """Runs from their folders, each named as its folder.

        A run that another process trains is shown as such until it is finished.
        """
        runs = []
        in_training: list[Path] = []
        for path in paths:
            name = path.resolve().name
            try:
                runs.append(ServedRun.of(load_run(path), name=name, device=device))
            except RunInTraining:
                in_training.append(path)
        return cls(runs, in_training=in_training)

    def add(self, run: ServedRun) -> None:
        """Serve another run, whose name must be new."""
        assert run.name not in self._runs, run.name
        self._runs = {**self._runs, run.name: run}
        self.names = [*self.names, run.name]
        self._networks = {}

    def __iter__(self) -> Iterator[ServedRun]:
        return iter(self._runs.values())

    def __len__(self) -> int:
        return len(self._runs)

    @property
    def default(self) -> ServedRun:
        if not self.names:
            names = ", ".join(folder.resolve().name for folder in self.in_training)
            raise BusyError(f"{names}: still in training. /train shows how far that is.")
        return self._runs[self.names[0]]

    def get(self, name: str | None) -> ServedRun:
        """The run of a name, or the default."""
        if name is None:
            return self.default
        if name not in self._runs:
            served = ", ".join(f"'{one}'" for one in self.names)
            raise NotFound(
                f"No served run is named '{name}'. Available: {served}.", suggestions=self.names
            )
        return self._runs[name]

    def network_for(self, run: ServedRun) -> ServedRun | None:
        """The path network whose paths explain predictions of a run, if there is one.

        It is the run itself, or the first path network of the same graph.
        """
        if run.is_path_network:
            return run
        if run.name not in self._networks:
            networks = [other for other in self if other.is_path_network]
            same = (other for other in networks if is_same_graph(other.graph, run.graph))
            self._networks[run.name] = next(same, None)
        return self._networks[run.name]
