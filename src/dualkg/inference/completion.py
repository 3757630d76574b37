"""Completing a graph: the most probable triples that it does not have, as columns, as a table and as a file."""

import hashlib
import json
import reprlib
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from dualkg.data.graph import SPLITS, Graph, distinct_triples, triple_keys
from dualkg.errors import RequestError
from dualkg.evaluation.ranking import eval_mode, full_precision
from dualkg.files import atomic_write, remove_strays, writing
from dualkg.inference.calibration import Calibration, PriorCorrection
from dualkg.inference.completion_search import (
    NEW_TRIPLE,
    CandidateFilter,
    Names,
    SearchState,
    TopTriples,
    best_first,
    calibration_inputs,
    plan_search,
    run_search,
)
from dualkg.inference.scoring import Ids
from dualkg.logs import ProgressLog
from dualkg.models.base import Model

SAVE_INTERVAL = 5.0  # seconds between two checkpoints
LINES_PER_BATCH = 100_000
TSV_SEPARATORS = "[\t\n\r]"
CHECK_SIZES = (100, 1_000, 10_000, 100_000)
CHECK_KNOWN = ("train", "valid")

Column = npt.NDArray[Any]
OnProgress = Callable[[int, int], None]


@dataclass(frozen=True, eq=False)
class Completion:
    """New triples, the best first, by column `(num_triples,)`; without a calibration they have no probabilities."""

    graph: Graph
    heads: Column  # ids
    relations: Column
    tails: Column
    probability: Column | None  # of the triple
    answer_probability: Column | None  # of the triple, if each of its queries has an answer that is missing
    score: Column
    log_probability: Column

    @classmethod
    def of(cls, graph: Graph, top: TopTriples) -> Self:
        triples, correction = best_first(top.triples), top.prior_correction
        probability = answer_probability = None
        if correction is not None:
            inputs = calibration_inputs(triples, correction)
            probability = correction.probability(*inputs).numpy().astype(np.float32)
            answer_probability = correction.calibration.probability(*inputs).numpy().astype(np.float32)
        heads, relations, tails, score, log_probability = (
            triples[name].copy() for name in ("head", "relation", "tail", "score", "log_probability")
        )
        return cls(graph, heads, relations, tails, probability, answer_probability, score, log_probability)

    def __len__(self) -> int:
        return len(self.heads)

    @property
    def triples(self) -> Column:
        """Ids of head, relation and tail, `(num_triples, 3)`."""
        return np.stack([self.heads, self.relations, self.tails], axis=1)

    def table(self) -> pa.Table:
        """Names with rank and numbers, and labels where the graph has any."""
        import pyarrow.compute as pc  # slow to import, and `import dualkg` loads this module

        entities, relations = self.graph.entities, self.graph.relations
        ids = {"head": (entities, self.heads), "relation": (relations, self.relations), "tail": (entities, self.tails)}
        columns: dict[str, pa.Array] = {"rank": pa.array(np.arange(1, len(self) + 1))}
        columns |= {name: vocabulary.names.take(pa.array(one)) for name, (vocabulary, one) in ids.items()}
        for name, (vocabulary, one) in ids.items():
            if vocabulary.labels is not None:
                labels = pc.coalesce(vocabulary.labels, vocabulary.names)
                columns[f"{name}_label"] = pc.replace_substring_regex(labels, TSV_SEPARATORS, " ").take(pa.array(one))
        for name in ("probability", "answer_probability", "score", "log_probability"):
            if (numbers := getattr(self, name)) is not None:
                columns[name] = pa.array(numbers)
        return pa.table(columns)

    def save(self, path: str | Path) -> Path:
        """Write the table as .tsv or .parquet."""
        path = check_file(path, self.graph)
        with atomic_write(path) as file:
            WRITERS[path.suffix.lower()](self.table(), file)
        return path


def check_file(path: str | Path, graph: Graph) -> Path:
    """Refuse, before the search, a file that could not be written after it."""
    import pyarrow.compute as pc  # slow to import, and `import dualkg` loads this module

    path = Path(path)
    if path.suffix.lower() not in WRITERS:
        raise RequestError(f"New triples go to a file that ends with .tsv or .parquet; '{path.name}' does not.")
    if path.exists():
        raise RequestError(f"{path} exists already. Name another file, or remove it.")
    if path.suffix.lower() == ".tsv":
        for vocabulary in (graph.entities, graph.relations):
            broken = vocabulary.names.filter(pc.match_substring_regex(vocabulary.names, TSV_SEPARATORS))
            if len(broken):
                raise RequestError(
                    f"The {vocabulary.kind} {broken[0].as_py()!r} has a tab or a line end in its name, which a TSV "
                    f"file cannot hold. Write Parquet instead, to {path.with_suffix('.parquet')}."
                )
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=path.parent).close()
    except OSError as error:
        raise RequestError(f"{path} cannot be written: {error.strerror or error}.") from None
    return path


def _write_tsv(table: pa.Table, path: Path) -> None:
    """Write lines of tab-separated columns without quotes."""
    import pyarrow.compute as pc  # slow to import, and `import dualkg` loads this module

    with path.open("w", encoding="utf-8", newline="\n") as file:
        file.write("\t".join(table.column_names) + "\n")
        for batch in table.to_batches(LINES_PER_BATCH):
            cells = [column.cast(pa.string()) for column in batch.columns]
            file.writelines(f"{line}\n" for line in pc.binary_join_element_wise(*cells, "\t").to_pylist())


WRITERS: dict[str, Callable[[pa.Table, Path], None]] = {".tsv": _write_tsv, ".parquet": pa.parquet.write_table}


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
    """Find the `top` most probable triples that no split of `known` has.

    They are ordered by prior-corrected probability, or without a calibration by log-probability; both are among all
    entities, whatever the filters. `relations` and `heads` restrict the search; with `types`, heads and tails must be
    in the domain and range of their relation in train; with `loops`, self-loops are candidates for all relations.
    `on_progress` is called with the number of queries that are done, and of all. `checkpoint` is a file that exists
    during the search: after a kill, the same call resumes from it.
    """
    model.check_shape(graph.shape)
    if not isinstance(top, (int, np.integer)) or top < 1:
        raise RequestError(f"At least one triple must be requested; top is {top!r}.")
    if not 0 <= min_probability <= 1:
        raise RequestError(f"A probability is between 0 and 1; min_probability is {min_probability}.")
    if calibration is None and min_probability > 0:
        raise RequestError("min_probability needs a calibration: without one there are no probabilities.")
    if calibration is not None and len(calibration.slopes) != graph.shape.num_relations:
        raise RequestError(
            f"The calibration is of {len(calibration.slopes):,} relations; the graph has {graph.shape.num_relations:,}."
        )
    candidates = CandidateFilter(graph, relations=relations, heads=heads, types=types, loops=loops, known=known)
    prior_correction = PriorCorrection.of(calibration, graph) if calibration is not None else None
    parts = plan_search(candidates, prior_correction)
    num_queries = sum(part.num_queries for part in parts)
    state = SearchState(TopTriples(top, prior_correction, min_probability))
    saved = None
    if checkpoint is not None:
        saved = CompletionCheckpoint(Path(checkpoint), _options(model, candidates, state.top))
        state = saved.load(state)
    log = ProgressLog(f"Completing {graph.name}")
    with full_precision(), eval_mode(model):
        try:
            for state in run_search(model, candidates, parts, state):  # noqa: B020
                if saved and time.monotonic() >= saved.saved_at + SAVE_INTERVAL:
                    saved.save(state)
                log.count(state.num_done, num_queries, "queries")
                if on_progress:
                    on_progress(state.num_done, num_queries)
        except KeyboardInterrupt:
            if saved:
                saved.save(state)
            raise
    if saved:
        saved.path.unlink(missing_ok=True)
    return Completion.of(graph, state.top)


@dataclass
class CompletionCheckpoint:
    """The file of a search that has not finished."""

    path: Path
    options: dict[str, Any]  # what the result depends on
    saved_at: float = field(default_factory=time.monotonic)

    def save(self, state: SearchState) -> None:
        tensors = {"triples": torch.from_numpy(state.top.triples.view(np.uint8))}
        if state.cache is not None:
            tensors["cache"] = state.cache.cpu()
        metadata = {"num_done": str(state.num_done), "options": json.dumps(self.options)}
        with atomic_write(self.path, apart=True) as file, writing(file, SafetensorError):
            save_file(tensors, file, metadata=metadata)
        self.saved_at = time.monotonic()

    def load(self, start: SearchState) -> SearchState:
        """The state to resume from: the start if there is no file."""
        remove_strays(self.path, inside=False)
        if not self.path.exists():
            return start
        try:
            with safe_open(self.path, framework="pt") as file:
                metadata = file.metadata()
                self._check(json.loads(metadata["options"]))
                tensors: dict[str, Tensor] = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            top = replace(start.top, triples=tensors["triples"].numpy().view(NEW_TRIPLE))
            return SearchState(top, int(metadata["num_done"]), tensors.get("cache"))
        except (SafetensorError, KeyError, TypeError, ValueError, OSError) as error:
            raise RequestError(f"{self.path} cannot be read ({error}). Remove it to start again.") from None

    def _check(self, saved: dict[str, Any]) -> None:
        changes = [
            f"{name} was {reprlib.repr(saved.get(name))} and is now {reprlib.repr(now)}"
            for name, now in self.options.items()
            if saved.get(name) != now
        ]
        if changes:
            raise RequestError(
                f"{self.path} is of a search with other options: {'; '.join(changes)}. Use the same options to "
                f"resume it, or remove the file to start again."
            )


def _options(model: Model, candidates: CandidateFilter, top: TopTriples) -> dict[str, Any]:
    """All that the result depends on; tables by their checksums."""
    graph, correction = candidates.graph, top.prior_correction
    tables = [correction.calibration.slopes, correction.calibration.offsets] if correction else []
    return {
        "top": top.size,
        "min_probability": top.min_probability,
        "types": candidates.types,
        "loops": candidates.loops,
        "relations": [graph.relations[id] for id in candidates.relations.tolist()],
        "heads": None if candidates.heads is None else [graph.entities[id] for id in candidates.heads.tolist()],
        "known splits": list(candidates.known),
        "checksum of the graph": _checksum(torch.from_numpy(graph.split(name)) for name in SPLITS),
        "checksum of the weights": _checksum(model.state_dict().values()),
        "checksum of the calibration": correction and f"{_checksum(tables)} {correction.calibration.max_probability}",
    }


def _checksum(tensors: Iterable[Tensor]) -> str:
    checksum = hashlib.sha256()
    for tensor in tensors:
        checksum.update(np.ascontiguousarray(tensor.detach().cpu().numpy()).data)
    return checksum.hexdigest()[:16]


# -- check ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CompletionCheck:
    """The number of test triples among the best of each size, with two baselines.

    `expected` is the number by the probabilities of the triples, None without a calibration: they are calibrated to as
    many missing triples as valid has, so their sum is scaled to the size of test. The baseline by degree orders pairs
    by the number of training triples of the relation with that head, times the number with that tail. Ties are in
    random order, so both baselines are expected numbers.
    """

    sizes: list[int]
    found: list[int]
    expected: list[float] | None
    by_degree: list[float]
    at_random: list[float]
    num_test: int  # test triples that are candidates
    num_triples: int  # candidates

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def sizes_up_to(top: int) -> list[int]:
    """The usual sizes below `top`, and `top`."""
    return [*(size for size in CHECK_SIZES if size < top), top]


def check_completion(
    model: Model, graph: Graph, *, sizes: Sequence[int] = CHECK_SIZES, **options: Any
) -> CompletionCheck:
    """Complete a graph as if its test triples were unknown, and look for them; `options` are those of `complete`."""
    filters = {name: options[name] for name in ("relations", "heads", "types", "loops") if name in options}
    candidates = CandidateFilter(graph, **filters, known=CHECK_KNOWN)
    distinct = distinct_triples(graph.test, graph.shape)
    test, degrees, products, counts = _degree_products(candidates, distinct.astype(np.int64))
    if not len(test):
        raise RequestError(f"None of the {len(distinct):,} test triples of {graph.name} is a candidate of this search.")
    made = complete(model, graph, top=max(sizes), known=CHECK_KNOWN, **options)
    joined = np.concatenate([made.triples, test]).astype(np.int32)  # past 63 bits, keys depend on all triples
    keys, test_keys = np.split(triple_keys(joined, graph.shape), [len(made)])
    hits = np.append(0, np.cumsum(np.isin(keys, test_keys)))
    expected = None
    if made.probability is not None:
        sums = np.append(0, np.cumsum(made.probability, dtype=np.float64)) * len(graph.test) / max(1, len(graph.valid))
        expected = [float(sums[min(size, len(made))]) for size in sizes]
    num_triples = counts.sum(keepdims=True)
    return CompletionCheck(
        list(sizes),
        [int(hits[min(size, len(made))]) for size in sizes],
        expected,
        _expected_hits(products, counts, degrees, sizes),
        _expected_hits(np.zeros(1), num_triples, np.zeros(len(test)), sizes),
        len(test),
        int(num_triples[0]),
    )


def _degree_products(candidates: CandidateFilter, test: Ids) -> tuple[Ids, Ids, Ids, Ids]:
    """The candidates in test and the products of their degrees; all products and how many candidates have each."""
    chosen, degrees, products, counts = [test[:0]], [test[:0, 0]], [test[:0, 0]], [test[:0, 0]]
    num_entities = candidates.graph.shape.num_entities
    for relation in candidates.relations.tolist():
        ends, train = candidates.heads_and_tails(relation), candidates.train[relation]
        by_head, by_tail = (np.bincount(train[:, column], minlength=num_entities) for column in (0, 2))
        excluded, triples = candidates.excluded_pairs(relation), test[test[:, 1] == relation]
        excluded, pairs = (
            each[np.isin(each[:, 0], ends[0]) & np.isin(each[:, 1], ends[1])] for each in (excluded, triples[:, [0, 2]])
        )
        pairs = pairs[~np.isin(pairs @ [num_entities, 1], excluded @ [num_entities, 1])]
        chosen.append(np.insert(pairs, 1, relation, axis=1))
        degrees.append(by_head[pairs[:, 0]] * by_tail[pairs[:, 1]])
        heads, num_heads = np.unique(by_head[ends[0]], return_counts=True)
        tails, num_tails = np.unique(by_tail[ends[1]], return_counts=True)
        products += [np.outer(heads, tails).ravel(), by_head[excluded[:, 0]] * by_tail[excluded[:, 1]]]
        counts += [np.outer(num_heads, num_tails).ravel(), np.full(len(excluded), -1)]
    distinct, positions = np.unique(np.concatenate(products), return_inverse=True)
    totals = np.zeros(len(distinct), np.int64)
    np.add.at(totals, positions, np.concatenate(counts))
    return np.concatenate(chosen), np.concatenate(degrees), distinct, totals


def _expected_hits(values: Column, counts: Column, sought: Column, sizes: Sequence[int]) -> list[float]:
    """The expected number of sought triples among the best of each size, by a value that `counts` triples share."""
    hits = np.bincount(np.searchsorted(values, sought), minlength=len(values))[::-1]
    so_far, hits_so_far = (np.append(0, np.cumsum(number)) for number in (counts[::-1], hits))
    return [float(value) for value in np.interp(sizes, so_far, hits_so_far)]
