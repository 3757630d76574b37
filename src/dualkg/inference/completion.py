"""Completing a graph: the most probable triples that it does not have, as columns, as a table and
as a file.

The search is exact, resumable and in bounded memory. The log-probability of a triple is the mean of
log p(tail | head, relation) and log p(head | relation, tail), neither above 0. So the scores of one
query exclude most of its answers, and the query from the other end is scored only for answers that
may still be among the best.
"""

import hashlib
import reprlib
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from math import inf
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet
import torch
from torch import Tensor

from dualkg.data.graph import (
    SPLITS,
    Graph,
    Triples,
    distinct_triples,
    relations_with_self_loops,
    triple_keys,
)
from dualkg.data.vocabulary import Vocabulary
from dualkg.errors import RequestError
from dualkg.evaluation.ranking import eval_mode, full_precision
from dualkg.files import atomic_write, remove_strays
from dualkg.inference.calibration import Calibration, PriorCorrection, log_odds_of
from dualkg.inference.scoring import Ids, check_finite
from dualkg.logs import ProgressLog
from dualkg.models.base import Model, Side
from dualkg.models.bilinear import BilinearModel
from dualkg.models.ensemble import EnsembleModel
from dualkg.training.checkpoint import load_tensors, save_tensors

SAVE_INTERVAL = 5.0  # seconds between two checkpoints
TSV_SEPARATORS = "[\t\n\r]"
CHECK_SIZES = (100, 1_000, 10_000, 100_000)
CHECK_KNOWN = ("train", "valid")
MAX_SCORES = {
    "cpu": 2**22,
    "cuda": 2**26,
}  # of a block: few enough for a CPU's cache, enough to keep a GPU busy
MIN_SCORES_FOR_NUMBA = 2**20  # for fewer it is not worth loading
MIN_LOG_PROBABILITY = -1e30  # below that of any triple, and finite
SLACK = 1e-3  # relative; more than rounding can take from a triple that ties with the last one

Names = Sequence[str | int]
Column = npt.NDArray[Any]
# One new triple; its sort key is the log odds, or without a calibration the log-probability.
NEW_TRIPLE = np.dtype(
    [
        ("head", "i8"),
        ("relation", "i8"),
        ("tail", "i8"),
        ("score", "f4"),
        ("log_probability", "f4"),
        ("sort_key", "f8"),
    ]
)
NewTriples = npt.NDArray[Any]


# -- which triples are candidates --------------------------------------------


class CandidateFilter:
    """The candidate triples: for each of `relations` all pairs of a head and a tail, except known
    triples.

    Relations and heads are given by name, label or id. With `types`, a head or tail of a relation
    must be in its domain or range in train. Self-loops are excluded, without `loops`, unless they
    are common among the relation's training triples and one of these has the entity: models of
    symmetric relations find them the most plausible triples.
    """

    def __init__(
        self,
        graph: Graph,
        *,
        relations: Names | None = None,
        heads: Names | None = None,
        types: bool = False,
        loops: bool = False,
        known: Sequence[str] = SPLITS,
    ) -> None:
        self.graph = graph
        self.types = types
        self.loops = loops
        self.known = known
        self.relations = (
            np.arange(graph.shape.num_relations)
            if relations is None
            else _ids(graph.relations, relations)
        )
        self.heads = None if heads is None else _ids(graph.entities, heads)
        self.train = _by_relation(graph.train, graph.shape.num_relations)
        self._known = _by_relation(
            np.concatenate([graph.split(name) for name in known]), graph.shape.num_relations
        )
        self._with_self_loops = relations_with_self_loops(graph)

    def heads_and_tails(self, relation: int) -> tuple[Ids, Ids]:
        """The candidate heads and tails of a relation, ascending."""
        if self.types:
            heads, tails = (np.unique(self.train[relation][:, column]) for column in (0, 2))
        else:
            heads = tails = np.arange(self.graph.shape.num_entities)
        return heads if self.heads is None else np.intersect1d(heads, self.heads), tails

    def excluded_pairs(self, relation: int) -> Ids:
        """The pairs of head and tail that are known or self-loops, `(num_pairs, 2)`, ascending."""
        num_entities = self.graph.shape.num_entities
        keys = self._known[relation][:, [0, 2]] @ np.array([num_entities, 1])
        if not self.loops:
            looped = np.arange(num_entities)
            if relation in self._with_self_loops:
                looped = np.setdiff1d(looped, self.train[relation][:, [0, 2]])
            keys = np.concatenate([keys, looped * (num_entities + 1)])
        return np.stack(np.divmod(np.unique(keys), num_entities), axis=1)

    def new_to(self, relation: int) -> Ids:
        """Whether entities are new (1) to the domain and to the range of a relation in train, `(2,
        num_entities)`.
        """
        new = np.ones((2, self.graph.shape.num_entities), dtype=np.int64)
        new[0, self.train[relation][:, 0]] = new[1, self.train[relation][:, 2]] = 0
        return new


def _ids(vocabulary: Vocabulary, names: Names | str) -> Ids:
    names = [names] if isinstance(names, str) else names
    return np.unique(np.array([vocabulary.id(name) for name in names], dtype=np.int64))


def _by_relation(triples: Triples, num_relations: int) -> list[Ids]:
    """The triples of each relation."""
    ordered = triples[np.argsort(triples[:, 1], kind="stable")].astype(np.int64)
    return np.split(ordered, np.searchsorted(ordered[:, 1], np.arange(1, num_relations)))


# -- the parts of a search ---------------------------------------------------


@dataclass(frozen=True)
class SearchPart:
    """Queries of a relation from one side and candidate answers, each by whether it is new (1) to
    its side in train.
    """

    relation: int
    given: int  # 0: heads, to find tails; 1: tails, to find heads
    new_given: tuple[int, ...]
    new_answers: tuple[int, ...]
    num_queries: int
    prior: float  # of its most probable domain/range pattern

    def entities(self, candidates: CandidateFilter) -> tuple[Ids, Ids, Ids]:
        """The entities that the queries give and their candidate answers, ascending; and which
        answers are new.
        """
        ends = candidates.heads_and_tails(self.relation)
        new = candidates.new_to(self.relation)
        given = ends[self.given]
        answers = ends[1 - self.given]
        new_answers = new[1 - self.given]
        given = given[np.isin(new[self.given, given], self.new_given)]
        return given, answers[np.isin(new_answers[answers], self.new_answers)], new_answers


def plan_search(
    candidates: CandidateFilter, prior_correction: PriorCorrection | None = None
) -> list[SearchPart]:
    """The parts of a search, the most probable first and then the cheapest: good triples raise the
    bound for others.

    Without a calibration a relation is one part. With one, nearly all triples that can be among the
    best have an entity in the domain or range of their relation. So the few entities on one side
    are queried, then the few on the other side for answers that are new to the first, and at last
    the pairs in which both are new.
    """
    parts = []
    first_given = (0, 1) if prior_correction is None else (0,)
    for relation in candidates.relations.tolist():
        ends = candidates.heads_and_tails(relation)
        new = candidates.new_to(relation)
        counts = np.stack(
            [np.bincount(is_new[ids], minlength=2) for ids, is_new in zip(ends, new, strict=True)]
        )
        # Fewer queries first. If equal, those with more answers each: these are less likely, and
        # fewer pass.
        num_queries = counts[:, first_given].sum(1).tolist()
        num_known = (new == 0).sum(1).tolist()
        first = 0 if (num_queries[0], num_known[0]) <= (num_queries[1], num_known[1]) else 1
        choices: list[tuple[int, tuple[int, ...], tuple[int, ...]]] = [(first, first_given, (0, 1))]
        priors = torch.zeros(2, 2)  # by head, then by tail
        if prior_correction is not None:
            choices += [(1 - first, (0,), (1,)), (first, (1,), (1,))]
            priors = prior_correction.priors[relation].reshape(2, 2).T
        for given, new_given, new_answers in choices:
            number = int(counts[given, new_given].sum())
            if number and counts[1 - given, new_answers].any():
                prior = float(
                    (priors.T if given else priors)[new_given[0], list(new_answers)].max()
                )
                parts.append(SearchPart(relation, given, new_given, new_answers, number, prior))
    return sorted(parts, key=lambda part: (-part.prior, part.num_queries, part.relation))


# -- the best triples so far -------------------------------------------------


def best_first(triples: NewTriples) -> NewTriples:
    """By decreasing sort key; ties by log-probability and then by ascending ids."""
    ids = (triples["tail"], triples["relation"], triples["head"])
    return triples[np.lexsort((*ids, -triples["log_probability"], -triples["sort_key"]))]


def calibration_inputs(
    triples: NewTriples, correction: PriorCorrection
) -> tuple[Tensor, Tensor, Tensor]:
    """The log-probabilities, relations and domain/range patterns of triples."""
    ids = np.stack([triples[name] for name in ("head", "relation", "tail")], axis=1)
    columns = triples["log_probability"].astype(np.float64), ids[:, 1], correction.domain_range(ids)
    return tuple(map(torch.from_numpy, columns))  # type: ignore[return-value]


@dataclass(frozen=True, eq=False)
class SearchState:
    """The best `top` triples so far, none less probable than `min_probability`; the search resumes
    from here.
    """

    top: int
    prior_correction: PriorCorrection | None
    min_probability: float
    triples: NewTriples = field(default_factory=lambda: np.empty(0, NEW_TRIPLE))
    num_done: int = 0  # of the first queries of all parts
    cache: Tensor | None = None  # of the second queries of the current part

    def required(self, part: SearchPart) -> Tensor:
        """The log-probability that triples need, `(2,)`, by whether the answer is new; infinite
        without candidates.
        """
        last = float(self.triples["sort_key"].min()) if len(self.triples) >= self.top else -inf
        required = torch.full((2, 2), last, dtype=torch.float64)  # by head, then by tail
        if self.prior_correction is not None:
            last = max(last, log_odds_of(self.min_probability))
            required = self.prior_correction.required_log_probability(last, part.relation)
        required = torch.where(
            required.isfinite(), required - SLACK * (1 + required.abs()), required
        )
        found = (required.T if part.given else required)[part.new_given[0]].clone()
        found[[pattern for pattern in (0, 1) if pattern not in part.new_answers]] = inf
        return found

    def merge(self, others: NewTriples) -> Self:
        """With the best of these and other triples, whose sort keys are not set yet."""
        if not len(others):
            return self
        others["sort_key"] = others["log_probability"]
        if self.prior_correction is not None:
            inputs = calibration_inputs(others, self.prior_correction)
            others["sort_key"] = self.prior_correction.log_odds(*inputs).numpy()
            if self.min_probability > 0:
                others = others[
                    self.prior_correction.probability(*inputs).numpy() >= self.min_probability
                ]
        both = np.concatenate([self.triples, others])
        if len(both) > self.top:
            both = both[both["sort_key"] >= np.partition(both["sort_key"], -self.top)[-self.top]]
        if len(both) > self.top:  # some tie with the last one
            both = best_first(both)[: self.top]
        return replace(self, triples=both)


# -- scores ------------------------------------------------------------------


def logsumexp(scores: Tensor) -> Tensor:
    """`scores.logsumexp(-1)`; several times faster on a CPU with numba."""
    if (
        scores.numel() >= MIN_SCORES_FOR_NUMBA
        and scores.dtype == torch.float32
        and scores.device.type == "cpu"
    ):
        from dualkg.kernels import cpu

        if cpu.HAS_NUMBA:
            return cpu.logsumexp_rows(scores.contiguous())
    return scores.logsumexp(-1)


def _numbers_per_score(model: Model) -> int:
    """Numbers held for each score of candidates: other models than bilinear ones hold a vector."""
    if isinstance(model, EnsembleModel):
        return max(map(_numbers_per_score, model.members))
    return 1 if isinstance(model, BilinearModel) else model.embedding.entities.shape[1]


class RelationQueries:
    """All queries of a relation for one side: log p(answer | query) is a score minus the query's
    log-normalizer.

    `cache` `(2, num_entities)` holds the log-normalizer of each query, and the largest
    log-probability of its answers; NaN and 0 before the query is scored.
    """

    def __init__(
        self, model: Model, relation: int, target: Side, *, cache: Tensor | None = None
    ) -> None:
        self.model = model
        self.relation = relation
        self.target = target
        if cache is None:
            cache = torch.tensor([torch.nan, 0.0])[:, None].repeat(1, model.shape.num_entities)
        self.cache = cache.to(model.device)
        self.normalizers, self.max_log_probabilities = self.cache
        self.block_size = max(
            1, MAX_SCORES[model.device.type] // model.shape.num_entities
        )  # of queries

    def scores(self, given: Tensor) -> Tensor:
        """The scores of all entities as answers, `(batch, num_entities)`; fills the cache."""
        relations = torch.full_like(given, self.relation)
        if self.target == "tail":
            scores = self.model.predict_tails(given, relations)
        else:
            scores = self.model.predict_heads(relations, given)
        normalizers = logsumexp(scores)
        self.normalizers[given], self.max_log_probabilities[given] = (
            normalizers,
            scores.amax(-1) - normalizers,
        )
        check_finite(normalizers)
        return scores

    def fill_cache(self, given: Tensor) -> None:
        """Score the queries that are not in the cache."""
        for block in torch.split(given[self.normalizers[given].isnan()], self.block_size):
            if len(block):
                self.scores(block)

    def scores_of(self, given: Tensor, answers: Tensor) -> Tensor:
        """The scores of some entities as answers, `(batch, num_answers)`."""
        size = MAX_SCORES[self.model.device.type] // max(
            1, len(answers) * _numbers_per_score(self.model)
        )
        blocks = [
            self.model.predict_candidates(
                block, torch.full_like(block, self.relation), answers, self.target
            )
            for block in torch.split(given, max(1, size))
        ]
        return blocks[0] if len(blocks) == 1 else torch.cat(blocks)


# -- the search --------------------------------------------------------------


def search_block(
    first: RelationQueries,
    second: RelationQueries,
    given: Tensor,
    *,
    answers: Tensor,
    excluded: Tensor,
    new: Tensor,
    required: Tensor,
    top: int,
) -> NewTriples:
    """The triples of a block with the required log-probability: the best `top`, and ties of the
    last.

    `given` and the candidate `answers` are ascending ids; `excluded` `(num_pairs, 2)` pairs of
    both, by ascending given entities. `new` `(num_entities,)` is 1 for new answers; `required`
    `(2,)` is for answers that are known on their side in train and for new ones, and `top` triples
    of either are returned.
    """
    required = required.clamp(min=MIN_LOG_PROBABILITY).to(answers.device)
    scores = first.scores(given)
    ends = torch.searchsorted(excluded[:, 0].contiguous(), torch.stack([given[0], given[-1] + 1]))
    entities, others = excluded[ends[0] : ends[1]].T.contiguous()
    rows = torch.searchsorted(given, entities)
    present = given[rows] == entities
    scores[rows[present], others[present]] = -torch.inf
    if len(answers) < scores.shape[1]:
        scores = scores[:, answers]
    # Required of the first query's log-probability, if the second query's is as large as it can be.
    bound = 2 * required[new[answers]] - second.max_log_probabilities[answers]
    rows = scores.amax(1) >= first.normalizers[given] + bound.min()
    given = given[rows]
    scores = scores[rows]
    passing = scores >= first.normalizers[given, None] + bound
    rows = passing.any(1)
    columns = passing.any(0)
    given = given[rows]
    answers = answers[columns]
    scores = scores[rows][:, columns]
    if not scores.numel():
        return np.empty(0, NEW_TRIPLE)
    reverse = scores
    if second.model.reciprocal:  # without reciprocal relations both ends have the same score
        reverse = second.scores_of(
            answers, given
        ).T.contiguous()  # it is read row by row from here on
    # A normalizer is at least that of the block's entities; queries that this excludes are not
    # scored in full.
    floor = torch.where(
        second.normalizers[answers].isnan(), reverse.logsumexp(0), second.normalizers[answers]
    )
    bound = (scores - first.normalizers[given, None]).add_(reverse).sub_(floor)
    columns = (bound >= 2 * required[new[answers]]).any(0)
    answers = answers[columns]
    scores = scores[:, columns]
    reverse = reverse[:, columns]
    if not len(answers):
        return np.empty(0, NEW_TRIPLE)
    second.fill_cache(answers)
    log_probabilities = reverse - second.normalizers[answers]
    log_probabilities.add_(scores).sub_(first.normalizers[given, None]).div_(2)
    new = new[answers]
    for pattern in (0, 1):  # counted apart, since their log-probabilities do not compare
        chosen = log_probabilities[:, new == pattern]
        if int((chosen >= required[pattern]).sum()) > top:
            required[pattern] = chosen.flatten().topk(top).values[-1]
    rows, columns = (log_probabilities >= required[new]).nonzero(as_tuple=True)
    heads = given[rows]
    tails = answers[columns]
    if first.target == "head":
        heads, tails, scores = tails, heads, reverse
    found = np.empty(len(rows), NEW_TRIPLE)
    found["head"], found["tail"], found["relation"] = heads.cpu(), tails.cpu(), first.relation
    found["score"], found["log_probability"] = (
        one[rows, columns].cpu() for one in (scores, log_probabilities)
    )
    return found


def run_search(
    model: Model, candidates: CandidateFilter, parts: Sequence[SearchPart], state: SearchState
) -> Iterator[SearchState]:
    """The states after each block of queries, from a state on."""
    end = 0
    for part in parts:
        start = end
        end = end + part.num_queries
        if end <= state.num_done:
            continue
        if not bool((state.required(part) <= 0).any()):
            state = replace(state, num_done=end, cache=None)
            yield state
            continue
        excluded = candidates.excluded_pairs(part.relation)
        if part.given == 1:
            excluded = excluded[np.argsort(excluded[:, 1], kind="stable"), ::-1].copy()
        given, answers, new, pairs = (
            torch.from_numpy(ids).to(model.device) for ids in (*part.entities(candidates), excluded)
        )
        within = state.num_done - start
        sides: tuple[Side, Side] = ("head", "tail") if part.given else ("tail", "head")
        first = RelationQueries(model, part.relation, sides[0])
        second = RelationQueries(
            model, part.relation, sides[1], cache=state.cache if within else None
        )
        for block in torch.split(given[within:], first.block_size):
            required = state.required(part)
            promising = answers[(required <= 0).to(block.device)[new[answers]]]
            if len(promising):
                options = {
                    "answers": promising,
                    "excluded": pairs,
                    "new": new,
                    "required": required.float(),
                }
                state = state.merge(search_block(first, second, block, top=state.top, **options))
            state = replace(state, num_done=state.num_done + len(block), cache=second.cache.clone())
            yield state


# -- the result --------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Completion:
    """New triples, the best first, by column `(num_triples,)`; without a calibration they have no
    probabilities.
    """

    graph: Graph
    heads: Column  # ids
    relations: Column
    tails: Column
    probability: Column | None  # of the triple
    answer_probability: (
        Column | None
    )  # of the triple, if each of its queries has an answer that is missing
    score: Column
    log_probability: Column

    @classmethod
    def of(cls, graph: Graph, state: SearchState) -> Self:
        triples = best_first(state.triples)
        correction = state.prior_correction
        probabilities: list[Column | None] = [None, None]
        if correction is not None:
            inputs = calibration_inputs(triples, correction)
            both = correction, correction.calibration
            probabilities = [one.probability(*inputs).numpy().astype(np.float32) for one in both]
        columns = [
            triples[name].copy()
            for name in ("head", "relation", "tail", "score", "log_probability")
        ]
        return cls(graph, *columns[:3], *probabilities, *columns[3:])

    def __len__(self) -> int:
        return len(self.heads)

    @property
    def triples(self) -> Column:
        """Ids of head, relation and tail, `(num_triples, 3)`."""
        return np.stack([self.heads, self.relations, self.tails], axis=1)

    def table(self) -> pa.Table:
        """Names with rank and numbers, and labels where the graph has any."""
        import pyarrow.compute as pc  # slow to import, and `import dualkg` loads this module

        entities = self.graph.entities
        relations = self.graph.relations
        ids = {
            "head": (entities, self.heads),
            "relation": (relations, self.relations),
            "tail": (entities, self.tails),
        }
        columns: dict[str, pa.Array] = {"rank": pa.array(np.arange(1, len(self) + 1))}
        columns |= {
            name: vocabulary.names.take(pa.array(one)) for name, (vocabulary, one) in ids.items()
        }
        for name, (vocabulary, one) in ids.items():
            if vocabulary.labels is not None:
                labels = pc.coalesce(vocabulary.labels, vocabulary.names)
                columns[f"{name}_label"] = pc.replace_substring_regex(
                    labels, TSV_SEPARATORS, " "
                ).take(pa.array(one))
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
        raise RequestError(
            f"New triples go to a file that ends with .tsv or .parquet; '{path.name}' does not."
        )
    if path.exists():
        raise RequestError(f"{path} exists already. Name another file, or remove it.")
    if path.suffix.lower() == ".tsv":
        for vocabulary in (graph.entities, graph.relations):
            broken = vocabulary.names.filter(
                pc.match_substring_regex(vocabulary.names, TSV_SEPARATORS)
            )
            if len(broken):
                raise RequestError(
                    f"The {vocabulary.kind} {broken[0].as_py()!r} has a tab or a line end in its "
                    "name, which a TSV file cannot hold. Write Parquet instead, to "
                    f"{path.with_suffix('.parquet')}."
                )
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=path.parent).close()
    except OSError as error:
        raise RequestError(f"{path} cannot be written: {error.strerror or error}.") from None
    return path


def _write_tsv(table: pa.Table, path: Path) -> None:
    """Write lines of tab-separated columns without quotes, which `pyarrow.csv` refuses for names
    that have some.
    """
    import pyarrow.compute as pc  # slow to import, and `import dualkg` loads this module

    with path.open("w", encoding="utf-8", newline="\n") as file:
        file.write("\t".join(table.column_names) + "\n")
        for batch in table.to_batches(100_000):
            cells = [column.cast(pa.string()) for column in batch.columns]
            file.writelines(
                f"{line}\n" for line in pc.binary_join_element_wise(*cells, "\t").to_pylist()
            )


WRITERS: dict[str, Callable[[pa.Table, Path], None]] = {
    ".tsv": _write_tsv,
    ".parquet": pa.parquet.write_table,
}


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
    on_progress: Callable[[int, int], None] | None = None,
    checkpoint: str | Path | None = None,
) -> Completion:
    """Find the `top` most probable triples that no split of `known` has.

    They are ordered by prior-corrected probability, or without a calibration by log-probability;
    both are among all entities, whatever the filters, which are those of `CandidateFilter`.
    `on_progress` is called with the number of queries that are done, and of all. `checkpoint` is a
    file during the search: after a kill, the same call resumes.
    """
    model.check_shape(graph.shape)
    if not isinstance(top, (int, np.integer)) or top < 1:
        raise RequestError(f"At least one triple must be requested; top is {top!r}.")
    if not 0 <= min_probability <= 1:
        raise RequestError(
            f"A probability is between 0 and 1; min_probability is {min_probability}."
        )
    if calibration is None and min_probability > 0:
        raise RequestError(
            "min_probability needs a calibration: without one there are no probabilities."
        )
    if calibration is not None and len(calibration.slopes) != graph.shape.num_relations:
        raise RequestError(
            f"The calibration is of {len(calibration.slopes):,} relations; the graph has "
            f"{graph.shape.num_relations:,}."
        )
    candidates = CandidateFilter(
        graph, relations=relations, heads=heads, types=types, loops=loops, known=known
    )
    prior_correction = PriorCorrection.of(calibration, graph) if calibration is not None else None
    parts = plan_search(candidates, prior_correction)
    num_queries = sum(part.num_queries for part in parts)
    state = SearchState(top, prior_correction, min_probability)
    path = None if checkpoint is None else Path(checkpoint)
    options = {}
    if path:
        options = _options(model, candidates, state)
        state = _load_state(path, options, start=state)
    log = ProgressLog(f"Completing {graph.name}")
    saved_at = time.monotonic()
    with full_precision(), eval_mode(model):
        try:
            for state in run_search(model, candidates, parts, state):  # noqa: B020
                if path and time.monotonic() >= saved_at + SAVE_INTERVAL:
                    _save_state(path, options, state)
                    saved_at = time.monotonic()
                log.count(state.num_done, num_queries, "queries")
                if on_progress:
                    on_progress(state.num_done, num_queries)
        except KeyboardInterrupt:
            if path:
                _save_state(path, options, state)
            raise
    if path:
        path.unlink(missing_ok=True)
    return Completion.of(graph, state)


def _save_state(path: Path, options: dict[str, Any], state: SearchState) -> None:
    """Write the file of a search that has not finished."""
    tensors = {"triples": torch.from_numpy(state.triples.view(np.uint8))}
    if state.cache is not None:
        tensors["cache"] = state.cache.cpu().view(torch.uint8)  # its NaN would be refused
    save_tensors({"search": tensors}, path, about={"num_done": state.num_done, "options": options})


def _load_state(path: Path, options: dict[str, Any], *, start: SearchState) -> SearchState:
    """The state to resume from: the start if there is no file. One of a search with other options
    is refused.
    """
    remove_strays(path, inside=False)
    if not path.exists():
        return start
    try:
        groups, about = load_tensors(path, check=True)
    except RequestError as error:
        raise RequestError(f"{error} Remove it to start again.") from None
    saved = about.get("options", {})
    changes = [
        f"{name} was {reprlib.repr(saved.get(name))} and is now {reprlib.repr(now)}"
        for name, now in options.items()
        if saved.get(name) != now
    ]
    if changes:
        raise RequestError(
            f"{path} is of a search with other options: {'; '.join(changes)}. Use the same "
            "options to resume it, or remove the file to start again."
        )
    tensors = groups["search"]
    cache = tensors["cache"].view(torch.float32) if "cache" in tensors else None
    return replace(
        start,
        triples=tensors["triples"].numpy().view(NEW_TRIPLE),
        num_done=about["num_done"],
        cache=cache,
    )


def _options(model: Model, candidates: CandidateFilter, state: SearchState) -> dict[str, Any]:
    """All that the result depends on; tables by their checksums."""
    graph = candidates.graph
    correction = state.prior_correction
    tables = [correction.calibration.slopes, correction.calibration.offsets] if correction else []
    return {
        "top": state.top,
        "min_probability": state.min_probability,
        "types": candidates.types,
        "loops": candidates.loops,
        "relations": [graph.relations[id] for id in candidates.relations.tolist()],
        "heads": None
        if candidates.heads is None
        else [graph.entities[id] for id in candidates.heads.tolist()],
        "known splits": list(candidates.known),
        "checksum of the graph": _checksum(torch.from_numpy(graph.split(name)) for name in SPLITS),
        "checksum of the weights": _checksum(model.state_dict().values()),
        "checksum of the calibration": correction
        and f"{_checksum(tables)} {correction.calibration.max_probability}",
    }


def _checksum(tensors: Iterable[Tensor]) -> str:
    checksum = hashlib.sha256()
    for tensor in tensors:
        checksum.update(np.ascontiguousarray(tensor.detach().cpu().numpy()).data)
    return checksum.hexdigest()[:16]


# -- check -------------------------------------------------------------------


@dataclass(frozen=True)
class CompletionCheck:
    """The number of test triples among the best of each size, with two baselines, as means over the
    order of ties.

    `expected` follows from the probabilities of the triples, None without a calibration: they are
    calibrated to as many missing triples as valid has, so their sum is scaled to the size of test.
    The baseline by degree orders pairs by the number of training triples of the relation with that
    head, times the number with that tail.
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
    """Complete a graph as if its test triples were unknown, and look for them; `options` are those
    of `complete`.
    """
    filters = {
        name: options[name] for name in ("relations", "heads", "types", "loops") if name in options
    }
    candidates = CandidateFilter(graph, **filters, known=CHECK_KNOWN)
    distinct = distinct_triples(graph.test, graph.shape)
    test, degrees, products, counts = _degree_products(candidates, distinct.astype(np.int64))
    if not len(test):
        raise RequestError(
            f"None of the {len(distinct):,} test triples of {graph.name} is a candidate of this "
            "search."
        )
    made = complete(model, graph, top=max(sizes), known=CHECK_KNOWN, **options)
    joined = np.concatenate([made.triples, test]).astype(
        np.int32
    )  # past 63 bits, keys depend on all triples
    keys, test_keys = np.split(triple_keys(joined, graph.shape), [len(made)])
    hits = np.append(0, np.cumsum(np.isin(keys, test_keys)))
    ends = np.minimum(sizes, len(made))
    expected = None
    if made.probability is not None:
        sums = (
            np.append(0, np.cumsum(made.probability, dtype=np.float64))
            * len(graph.test)
            / max(1, len(graph.valid))
        )
        expected = sums[ends].tolist()
    num_triples = counts.sum(keepdims=True)
    return CompletionCheck(
        list(sizes),
        hits[ends].tolist(),
        expected,
        _expected_hits(products, counts, degrees, sizes),
        _expected_hits(np.zeros(1), num_triples, np.zeros(len(test)), sizes),
        len(test),
        int(num_triples[0]),
    )


def _degree_products(candidates: CandidateFilter, test: Ids) -> tuple[Ids, Ids, Ids, Ids]:
    """The candidates in test and the products of their degrees; all products and how many
    candidates have each.
    """
    chosen = [test[:0]]
    degrees = [test[:0, 0]]
    products = [test[:0, 0]]
    counts = [test[:0, 0]]
    num_entities = candidates.graph.shape.num_entities
    for relation in candidates.relations.tolist():
        ends = candidates.heads_and_tails(relation)
        train = candidates.train[relation]
        by_head, by_tail = (
            np.bincount(train[:, column], minlength=num_entities) for column in (0, 2)
        )
        excluded = candidates.excluded_pairs(relation)
        triples = test[test[:, 1] == relation]
        excluded, pairs = (
            each[np.isin(each[:, 0], ends[0]) & np.isin(each[:, 1], ends[1])]
            for each in (excluded, triples[:, [0, 2]])
        )
        pairs = pairs[~np.isin(pairs @ [num_entities, 1], excluded @ [num_entities, 1])]
        chosen.append(np.insert(pairs, 1, relation, axis=1))
        degrees.append(by_head[pairs[:, 0]] * by_tail[pairs[:, 1]])
        heads, num_heads = np.unique(by_head[ends[0]], return_counts=True)
        tails, num_tails = np.unique(by_tail[ends[1]], return_counts=True)
        products += [
            np.outer(heads, tails).ravel(),
            by_head[excluded[:, 0]] * by_tail[excluded[:, 1]],
        ]
        counts += [np.outer(num_heads, num_tails).ravel(), np.full(len(excluded), -1)]
    distinct, positions = np.unique(np.concatenate(products), return_inverse=True)
    totals = np.zeros(len(distinct), np.int64)
    np.add.at(totals, positions, np.concatenate(counts))
    return np.concatenate(chosen), np.concatenate(degrees), distinct, totals


def _expected_hits(
    values: Column, counts: Column, sought: Column, sizes: Sequence[int]
) -> list[float]:
    """The expected number of sought triples among the best of each size, by a value that `counts`
    triples share.
    """
    hits = np.bincount(np.searchsorted(values, sought), minlength=len(values))[::-1]
    so_far, hits_so_far = (np.append(0, np.cumsum(number)) for number in (counts[::-1], hits))
    expected: list[float] = np.interp(sizes, so_far, hits_so_far).tolist()
    return expected
