"""The file from which an interrupted search resumes."""

import hashlib
import reprlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dualkg.data.graph import SPLITS
from dualkg.errors import PYTHON, DualkgError, RequestError, Words
from dualkg.inference.completion.candidates import CandidateFilter
from dualkg.inference.completion.search import NEW_TRIPLE, SearchState
from dualkg.models.base import Model
from dualkg.models.partial import PartialModel
from dualkg.tables.files import is_divided
from dualkg.training.checkpoint import load_tensors, save_tensors
from dualkg.without_torch.query_classes import NUM_CLASSES

Options = dict[str, Any]


class UnusableCheckpoint(RequestError):
    """The checkpoint of a search cannot be read; `cause` is the error that says why."""

    def __init__(self, path: Path, cause: DualkgError) -> None:
        super().__init__()
        self.path = path
        self.cause = cause

    def message(self, words: Words = PYTHON) -> str:
        return f"{self.cause.message(words)} Remove it to start again."


class OtherSearch(RequestError):
    """A checkpoint is of a search with other options.

    `changes` has the options that differ, each with its value then and now.
    """

    def __init__(self, path: Path, changes: Mapping[str, tuple[object, object]]) -> None:
        super().__init__()
        self.path = path
        self.changes = changes

    def message(self, words: Words = PYTHON) -> str:
        differences = [
            f"{name} was {reprlib.repr(before)} and is now {reprlib.repr(now)}"
            for name, (before, now) in self.changes.items()
        ]
        return (
            f"{self.path} is of a search with other options: {'; '.join(differences)}. Use the "
            "same options to resume it, or remove the file to start again."
        )


class SearchCheckpoint:
    """A file with the state of a search, and the options on which its result depends."""

    def __init__(
        self, path: str | Path, model: Model, candidates: CandidateFilter, *, start: SearchState
    ) -> None:
        self.path = Path(path)
        self._start = start
        self._options = _options(model, candidates, start)
        self._model = model

    def save(self, state: SearchState) -> None:
        """Write the file; of several processes the first does."""
        if not self._model.is_first:
            return
        tensors = {"triples": torch.from_numpy(state.triples.view(np.uint8))}
        if state.cache is not None:
            # As bytes, since its NaN would be refused.
            tensors["cache"] = state.cache.cpu().view(torch.uint8)
        about = {"num_done": state.num_done, "options": self._options}
        save_tensors({"search": tensors}, self.path, about=about)

    def load(self) -> SearchState:
        """The state to resume from, which is the start if there is no file.

        A file of a search with other options is refused. Of several processes the first reads it.
        """
        return self._shared(self._read() if self._model.is_first else self._start)

    def _shared(self, state: SearchState) -> SearchState:
        """The state of the first process, in all of them."""
        sizes = [state.num_done, len(state.triples), 0 if state.cache is None else 1]
        num_done, num_triples, has_cache = self._model.share(torch.tensor(sizes)).tolist()
        triples = np.zeros(num_triples, NEW_TRIPLE)
        cache = torch.zeros(2, self._model.shape.num_entities) if has_cache else None
        if self._model.is_first:
            triples[:] = state.triples
            cache = state.cache
        if num_triples:
            self._model.share(torch.from_numpy(triples.view(np.uint8)))
        if cache is not None:
            cache = self._model.share(cache.contiguous())
        return replace(state, triples=triples, num_done=num_done, cache=cache)

    def _read(self) -> SearchState:
        if not self.path.exists():
            return self._start
        try:
            groups, about = load_tensors(self.path, check=True)
        except RequestError as error:
            raise UnusableCheckpoint(self.path, error) from None
        self._check_options(about.get("options", {}))

        tensors = groups["search"]
        cache = None
        if "cache" in tensors:
            cache = tensors["cache"].view(torch.float32)
        return replace(
            self._start,
            triples=tensors["triples"].numpy().view(NEW_TRIPLE),
            num_done=about["num_done"],
            cache=cache,
        )

    def _check_options(self, saved: Options) -> None:
        changes = {}
        for name, value in self._options.items():
            if saved.get(name) != value:
                changes[name] = (saved.get(name), value)
        if changes:
            raise OtherSearch(self.path, changes)

    def remove(self) -> None:
        if self._model.is_first:
            self.path.unlink(missing_ok=True)


def _options(model: Model, candidates: CandidateFilter, start: SearchState) -> Options:
    """All that the result of a search depends on; tables by their checksums."""
    graph = candidates.graph
    relations = [graph.relations[id] for id in candidates.relations.tolist()]
    heads = None
    if candidates.heads is not None:
        heads = [graph.entities[id] for id in candidates.heads.tolist()]

    checksum_of_calibration = None
    if start.prior_correction is not None:
        calibration = start.prior_correction.calibration
        tables = [calibration.slopes, calibration.offsets]
        if calibration.recalibration is not None:
            tables += [calibration.recalibration.knots, calibration.recalibration.values]
        if calibration.types is not None:
            pairs = (calibration.types.entities, calibration.types.types)
            tables += [torch.from_numpy(column) for column in pairs]
        checksum = _checksum(tables)
        # Queries are searched by class; the file of a version with other classes is refused.
        classes = f"{NUM_CLASSES} classes"
        checksum_of_calibration = f"{checksum} {calibration.max_probability} {classes}"
        if calibration.missing_share is not None:
            checksum_of_calibration += f" {calibration.missing_share} missing"

    return {
        "top": start.top,
        "min_probability": start.min_probability,
        "types": candidates.types,
        "loops": candidates.loops,
        "relations": relations,
        "heads": heads,
        "known splits": list(candidates.known),
        "checksum of the graph": _checksum(torch.from_numpy(graph.split(name)) for name in SPLITS),
        "checksum of the weights": _checksum(_weights(model)),
        "checksum of the calibration": checksum_of_calibration,
    }


def _weights(model: Model) -> Iterator[Tensor]:
    """All weights of a model; of tables that several processes divide, in blocks of rows."""
    for name, table in model.whole.state_dict().items():
        if isinstance(model, PartialModel) and is_divided(name):
            yield from model.tables.rows_of_all(table)
        else:
            yield table


def _checksum(tensors: Iterable[Tensor]) -> str:
    checksum = hashlib.sha256()
    for tensor in tensors:
        checksum.update(np.ascontiguousarray(tensor.detach().cpu().numpy()).data)
    return checksum.hexdigest()[:16]
