"""Completing a graph: the most plausible triples that it does not have."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from dualkg.data.graph import SPLITS, Graph
from dualkg.data.vocabulary import Vocabulary
from dualkg.errors import RequestError
from dualkg.evaluation.ranking import eval_mode, full_precision
from dualkg.files import atomic_write
from dualkg.inference.calibration import Calibration, PriorCorrection
from dualkg.inference.completion_search import CandidateFilter, Column, Names, Search, State, TopTriples, TripleColumns
from dualkg.models.base import Model

SECONDS = 5.0  # between two savings: what a kill may cost


def choices_of(model: Model, candidate_filter: CandidateFilter, pool: TopTriples) -> dict[str, Any]:
    """All that a list depends on; what is large by its digest."""
    graph, prior_correction = candidate_filter.graph, pool.prior_correction
    weights = {name: value.detach().cpu().numpy() for name, value in model.state_dict().items()}
    return {
        "top": pool.top,
        "min_probability": pool.least,
        "types": candidate_filter.types,
        "loops": candidate_filter.loops,
        "relations": [graph.relations[id] for id in candidate_filter.relations.tolist()],
        "heads": None
        if candidate_filter.heads is None
        else [graph.entities[id] for id in candidate_filter.heads.tolist()],
        "known splits": list(candidate_filter.known),
        "graph": _digest({name: graph.split(name) for name in ("train", "valid", "test")}),
        "weights": _digest(weights),
        "calibration": _digest(_tables(prior_correction.calibration)) if prior_correction else None,
    }


def _tables(calibration: Calibration) -> dict[str, np.ndarray[Any, Any]]:
    tables = {name: getattr(calibration, name).numpy() for name in ("slopes", "offsets")}
    return {**tables, "ceiling": np.array(calibration.max_probability)}


def _digest(arrays: dict[str, np.ndarray[Any, Any]]) -> str:
    found = hashlib.sha256()
    for name, array in arrays.items():
        found.update(f"{name} {array.shape} {array.dtype}".encode())
        found.update(np.ascontiguousarray(array).data)
    return found.hexdigest()[:16]


@dataclass
class CompletionCheckpoint:
    """The file of a search that is under way; it is written at once or not at all."""

    path: Path
    choices: dict[str, Any]
    _saved: float = field(default_factory=time.monotonic)

    def keep(self, state: State) -> None:
        """Save a state where the last one is old."""
        if time.monotonic() - self._saved >= SECONDS:
            self.save(state)

    def save(self, state: State) -> None:
        tensors = {name: torch.from_numpy(column) for name, column in state.pool.found._asdict().items()}
        if state.asked is not None:
            tensors["asked"] = state.asked.cpu()
        with atomic_write(self.path) as fresh:
            about = {"num_done": str(state.num_done), "choices": json.dumps(self.choices)}
            save_file(tensors, fresh, metadata=about)
        self._saved = time.monotonic()

    def load(self, beginning: State) -> State:
        """The state to go on from; the beginning where none was kept."""
        if not self.path.exists():
            return beginning
        try:
            with safe_open(self.path, framework="pt") as file:
                about = file.metadata()
                self._check(json.loads(about["choices"]))
                found = TripleColumns(*(file.get_tensor(name).numpy() for name in TripleColumns._fields))
                asked = file.get_tensor("asked") if "asked" in file.keys() else None  # noqa: SIM118
                return State(replace(beginning.pool, found=found, known=None), int(about["num_done"]), asked)
        except (SafetensorError, KeyError, TypeError, ValueError, OSError) as error:
            raise RequestError(f"{self.path} cannot be read ({error}). Remove it to begin again.") from None

    def _check(self, found: dict[str, Any]) -> None:
        differing = [name for name, value in self.choices.items() if found.get(name) != value]
        if differing:
            told = " and ".join(_told(name, found.get(name), self.choices[name]) for name in differing)
            raise RequestError(
                f"{self.path} is a list that was begun with other choices: {told}. Give the same ones to go on, or "
                f"remove it to begin again."
            )

    def remove(self) -> None:
        self.path.unlink(missing_ok=True)


def _told(name: str, before: Any, now: Any) -> str:
    if name in ("graph", "weights", "calibration"):
        return f"the {name} {'were' if name == 'weights' else 'was'} not the same"
    shown = [_shown(value) for value in (before, now)]
    return f"{name.replace('_', '-')} was {shown[0]} and is now {shown[1]}"


def _shown(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(value[:3]) + (f" and {len(value) - 3:,} more" if len(value) > 3 else "")
    if isinstance(value, bool):
        return "on" if value else "off"
    return "all" if value is None else f"{value:,}"


BREAKS = "[\t\n\r]"  # what a TSV file has no way to hold inside a name
LINES_AT_ONCE = 100_000


@dataclass(frozen=True, eq=False)
class Completion:
    """New triples, best first: `(num_triples,)` each. Without a calibration there is no probability."""

    graph: Graph
    heads: Column  # ids
    relations: Column
    tails: Column
    probability: Column | None  # of the triple
    answer_probability: Column | None  # the same if its questions are known to lack an answer
    score: Column
    log_probability: Column

    @classmethod
    def of(cls, graph: Graph, pool: TopTriples) -> Completion:
        found = pool.ordered()
        probability, answer_probability = (
            None if one is None else one.astype(np.float32)
            for one in (pool.probability(found), pool.answer_probability(found))
        )
        ids = found.heads, found.relations, found.tails
        return cls(graph, *ids, probability, answer_probability, found.score, found.log_probability)

    def __len__(self) -> int:
        return len(self.heads)

    @property
    def triples(self) -> Column:
        """Ids of head, relation and tail, `(num_triples, 3)`."""
        return np.stack([self.heads, self.relations, self.tails], axis=1)

    def table(self) -> pa.Table:
        """By name, with the rank, and with labels where people have others than the names."""
        entities, relations = self.graph.entities, self.graph.relations
        sides = {
            "head": (entities, self.heads),
            "relation": (relations, self.relations),
            "tail": (entities, self.tails),
        }
        columns: dict[str, pa.Array] = {"rank": pa.array(np.arange(1, len(self) + 1))}
        columns |= {name: vocabulary.names.take(pa.array(ids)) for name, (vocabulary, ids) in sides.items()}
        columns |= {
            f"{name}_label": _labels(vocabulary).take(pa.array(ids))
            for name, (vocabulary, ids) in sides.items()
            if vocabulary.labels is not None
        }
        for name in ("probability", "answer_probability"):
            if (sure := getattr(self, name)) is not None:
                columns[name] = pa.array(sure)
        return pa.table({**columns, "score": pa.array(self.score), "log_probability": pa.array(self.log_probability)})

    def save(self, path: str | Path) -> Path:
        """Write the table as TSV or Parquet, as the file's ending says."""
        path = check_file(path, self.graph)
        with atomic_write(path) as fresh:
            WRITERS[path.suffix.lower()](self.table(), fresh)
        return path


def check_file(path: str | Path, graph: Graph) -> Path:
    """Refuse a file that could not be written at the end, before anything is searched for."""
    path = Path(path)
    if path.suffix.lower() not in WRITERS:
        raise RequestError(f"New triples go to a file that ends with .tsv or .parquet; '{path.name}' does not.")
    if path.exists():
        raise RequestError(f"{path} exists already. Name another file, or remove it.")
    if path.suffix.lower() == ".tsv":
        for vocabulary in (graph.entities, graph.relations):
            broken = vocabulary.names.filter(pc.match_substring_regex(vocabulary.names, BREAKS))
            if len(broken):
                raise RequestError(
                    f"The {vocabulary.kind} {broken[0].as_py()!r} has a tab or a line end in its name, which a TSV "
                    f"file cannot hold. Write Parquet instead, to {path.with_suffix('.parquet')}."
                )
    try:
        with atomic_write(path) as fresh:
            fresh.touch()
            raise _WritableError
    except _WritableError:
        return path
    except OSError as error:
        raise RequestError(f"{path} cannot be written: {error.strerror or error}.") from None


class _WritableError(Exception):
    """What leaves no file behind where one could be written."""


def _labels(vocabulary: Vocabulary) -> pa.Array:
    """What people call each name, on one line."""
    return pc.replace_substring_regex(pc.coalesce(vocabulary.labels, vocabulary.names), BREAKS, " ")


def _write_tsv(table: pa.Table, path: Path) -> None:
    """Lines of tab-separated columns without any quoting, as they are read."""
    with path.open("w", encoding="utf-8", newline="\n") as file:
        file.write("\t".join(table.column_names) + "\n")
        for batch in table.to_batches(LINES_AT_ONCE):
            cells = [column.cast(pa.string()) for column in batch.columns]
            lines = pc.binary_join_element_wise(*cells, "\t").to_pylist()
            file.writelines(f"{line}\n" for line in lines)


def _write_parquet(table: pa.Table, path: Path) -> None:
    pa.parquet.write_table(table, path)


WRITERS: dict[str, Callable[[pa.Table, Path], None]] = {".tsv": _write_tsv, ".parquet": _write_parquet}


OnProgress = Callable[[int, int], None]


@torch.no_grad()
def complete(
    model: Model,
    graph: Graph,
    *,
    top: int = 10_000,
    calibration: Calibration | None = None,
    relations: Names | None = None,
    heads: Names | None = None,
    min_probability: float = 0.0,
    types: bool = False,
    loops: bool = False,
    known: Sequence[str] = SPLITS,
    on_progress: OnProgress | None = None,
    checkpoint: str | Path | None = None,
) -> Completion:
    """The `top` most plausible triples that no split of `known` has, best first.

    They are ordered by their probability (see `PriorCorrection`), or without a calibration by their log_probability. Probabilities
    are among all entities, however the search is narrowed. Triples of an entity with itself are left out, unless they
    are common among those of the relation in train, or `loops` are asked for. `on_progress` is told how many queries of how
    many are done. `checkpoint` is a file to keep the search in while it lasts: called again after a kill, it goes on from
    there.
    """
    model.check_shape(graph.shape)
    _check(top, min_probability, calibration, graph)
    candidate_filter = CandidateFilter.of(
        graph, relations=relations, heads=heads, types=types, loops=loops, known=known
    )
    prior_correction = PriorCorrection.of(calibration, graph) if calibration is not None else None
    search = Search(model, candidate_filter, prior_correction)
    state = State(TopTriples(top, prior_correction, min_probability))
    saved = (
        CompletionCheckpoint(Path(checkpoint), choices_of(model, candidate_filter, state.pool))
        if checkpoint is not None
        else None
    )
    state = saved.load(state) if saved else state
    with full_precision(), eval_mode(model):
        state = _run(search, state, saved, on_progress)
    if saved:
        saved.remove()
    return Completion.of(graph, state.pool)


def _run(search: Search, state: State, saved: CompletionCheckpoint | None, on_progress: OnProgress | None) -> State:
    """The search to its end; where it is stopped, what was done is kept."""
    try:
        for after in search.run(state):
            state = after
            if saved:
                saved.keep(state)
            if on_progress:
                on_progress(state.num_done, search.num_queries)
    except KeyboardInterrupt:
        if saved:
            saved.save(state)
        raise
    return state


def _check(top: int, min_probability: float, calibration: Calibration | None, graph: Graph) -> None:
    if top < 1:
        raise RequestError(f"At least one triple must be asked for; top is {top:,}.")
    if not 0 <= min_probability <= 1:
        raise RequestError(f"A probability is between 0 and 1; min_probability is {min_probability}.")
    if calibration is None and min_probability > 0:
        raise RequestError("min_probability needs a calibration: without one there are no probabilities.")
    if calibration is not None and len(calibration.slopes) != graph.shape.num_relations:
        raise RequestError(
            f"The calibration is of {len(calibration.slopes):,} relations; the graph has {graph.shape.num_relations:,}."
        )
