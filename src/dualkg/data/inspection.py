"""Inspect a graph: degrees, cardinalities, components, unseen entities, redundancy and leakage."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from dualkg.data.triples import Triples, is_among, sorted_distinct
from dualkg.data.vocabulary import Vocabulary

Ids = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]
Means = npt.NDArray[np.float64]

CARDINALITIES = ("1-1", "1-N", "N-1", "N-N", "unseen")
MANY = 1.5  # answers per query, on average
MIN_OVERLAP = 0.8  # the least share of the entity pairs of two redundant relations that both have
MIN_COMMON = 5  # entity pairs; fewer in common may be chance
MAX_LEAKED = 0.1  # the share of leaked triples in valid or test from which there is a warning
MAX_UNSEEN = 0.05  # the share of triples with unseen entities or relations, likewise
MIN_RELATIONS = 100  # with more than these and than half of the entities, there is a warning
NUM_HUBS = 5
HELD_OUT = ("valid", "test")
REDUNDANCIES = ("duplicate", "inverse", "symmetric")


@dataclass(frozen=True)
class Degrees:
    """Training triples per entity of train; each counts once, a self-loop for both of its ends."""

    mean: float
    median: float
    percentile_90: float
    percentile_99: float
    max: int
    # The numbers of entities with degree 1, 2 to 3, 4 to 7, and so on.
    distribution: list[dict[str, int]]
    hubs: list[dict[str, Any]]  # the entities of the highest degrees


@dataclass(frozen=True)
class Components:
    """Connected components of train, regardless of direction; `largest` counts entities."""

    number: int
    largest: int
    share: float


@dataclass(frozen=True)
class RelationFacts:
    """Triples of a relation, and its cardinality in train.

    `symmetry` is the share of its triples whose reverse it also has.
    """

    train: int
    valid: int
    test: int
    cardinality: str
    tails_per_head: float
    heads_per_tail: float
    self_loops: int
    symmetry: float


@dataclass(frozen=True)
class RedundantRelations:
    """Two relations with almost the same entity pairs (duplicate), or the same reversed (inverse).

    A symmetric relation is redundant by itself.
    """

    kind: str
    relation: str
    other: str
    common: int  # entity pairs of both, counted on all splits, without self-loops
    overlap: tuple[float, float]  # `common` as a share of the pairs of either relation
    leaked: dict[str, int]  # the triples of valid and test that train has under the other relation


@dataclass(frozen=True)
class HeldOut:
    """Numbers of triples (h, r, t) of valid or test, unseen or with a counterpart in train."""

    unseen_entities: int
    unseen_relations: int
    unseen_triples: int  # triples with an unseen entity or relation
    copies: int  # train has the triple itself
    duplicate: int  # train has (h, r', t), and r' is a duplicate of r
    inverse: int  # train has (t, r', h), and r' is an inverse of r
    symmetric: int  # train has (t, r, h), and r is symmetric
    leaked: int  # any of these four
    reverse: int  # train has (t, r', h) for any relation r'; in a dense graph, often by chance
    parallel: int  # train has (h, r', t) for any other relation r'


@dataclass(frozen=True, eq=False)
class Inspection:
    """Statistics of a graph, each computed when it is first read."""

    graph: str
    entities: Vocabulary
    relations: Vocabulary
    triples: Mapping[str, Triples] = field(repr=False)
    notes: tuple[str, ...] = ()
    # Two relations are redundant if they have this share and this number of pairs in common.
    min_overlap: float = field(default=MIN_OVERLAP, repr=False)
    min_common: int = field(default=MIN_COMMON, repr=False)

    @cached_property
    def counts(self) -> dict[str, dict[str, int]]:
        """By split: triples, duplicates, self-loops, and entities and relations that occur."""
        counts = {}
        for split, triples in self.triples.items():
            entities, relations = self._occurring(split)
            counts[split] = {
                "triples": len(triples),
                "duplicates": len(triples) - len(self._distinct[split]),
                "self_loops": int((triples[:, 0] == triples[:, 2]).sum()),
                "entities": int(entities.sum()),
                "relations": int(relations.sum()),
            }
        return counts

    @cached_property
    def degrees(self) -> Degrees:
        ends = self._ends(self._distinct["train"] // self._width)
        degree_of_entity = np.bincount(np.concatenate(ends), minlength=len(self.entities))
        degrees = degree_of_entity[degree_of_entity > 0]
        if not len(degrees):
            return Degrees(0.0, 0.0, 0.0, 0.0, 0, [], [])

        # Bin number i has the degrees from 2^i to 2^(i + 1) − 1.
        bins = np.bincount(np.frexp(degrees)[1] - 1).tolist()
        distribution = [
            {"from": 2**i, "to": 2 ** (i + 1) - 1, "entities": number}
            for i, number in enumerate(bins)
        ]
        by_degree = np.argsort(-degree_of_entity, kind="stable")
        hubs = [
            {"entity": self.entities[id], "degree": int(degree_of_entity[id])}
            for id in by_degree[: min(NUM_HUBS, len(degrees))].tolist()
        ]
        median, percentile_90, percentile_99 = np.percentile(degrees, (50, 90, 99)).tolist()
        return Degrees(
            mean=float(degrees.mean()),
            median=median,
            percentile_90=percentile_90,
            percentile_99=percentile_99,
            max=int(degrees.max()),
            distribution=distribution,
            hubs=hubs,
        )

    @cached_property
    def components(self) -> Components:
        pairs = sorted_distinct(self._distinct["train"] // self._width)
        root = connected_components(*self._ends(pairs), len(self.entities))
        in_train, _ = self._occurring("train")
        sizes = np.bincount(root[in_train], minlength=1)
        largest = int(sizes.max())
        share = largest / max(int(sizes.sum()), 1)
        return Components(number=int((sizes > 0).sum()), largest=largest, share=share)

    @cached_property
    def by_relation(self) -> dict[str, RelationFacts]:
        """Facts of every relation, in the order of ids."""
        num_relations = len(self.relations)
        train = self.triples["train"]
        numbers = {
            split: np.bincount(triples[:, 1], minlength=num_relations).tolist()
            for split, triples in self.triples.items()
        }
        tails_per_head, heads_per_tail = answers_per_query(
            train, (len(self.entities), num_relations)
        )
        is_loop = train[:, 0] == train[:, 2]
        num_loops = np.bincount(train[is_loop, 1], minlength=num_relations)

        _, first, second, common = self._overlaps
        is_own = first == second
        num_reversed = np.bincount(first[is_own], weights=common[is_own], minlength=num_relations)
        columns = {
            **numbers,
            "cardinality": _classes(tails_per_head, heads_per_tail),
            "tails_per_head": tails_per_head.tolist(),
            "heads_per_tail": heads_per_tail.tolist(),
            "self_loops": num_loops.tolist(),
            "symmetry": (num_reversed / np.maximum(self._sizes, 1)).tolist(),
        }
        facts = {}
        for id, name in enumerate(self.relations.names.to_pylist()):
            row: dict[str, Any] = {fact: column[id] for fact, column in columns.items()}
            facts[name] = RelationFacts(**row)
        return facts

    @property
    def by_cardinality(self) -> dict[str, dict[str, int]]:
        """The relations of each cardinality, and their triples in each split."""
        counts = {}
        for cardinality in CARDINALITIES:
            relations = [
                facts for facts in self.by_relation.values() if facts.cardinality == cardinality
            ]
            if relations:
                numbers = {
                    split: sum(getattr(facts, split) for facts in relations)
                    for split in self.triples
                }
                counts[cardinality] = {"relations": len(relations), **numbers}
        return counts

    @property
    def redundant(self) -> list[RedundantRelations]:
        """Duplicate, inverse and symmetric relations, those that leak most of test first."""
        return self._leakage[0]

    @cached_property
    def held_out(self) -> dict[str, HeldOut]:
        """What valid and test have that train has not, and what train gives away of them."""
        in_train = self._distinct["train"]
        pairs, keys = self._pairs_and_keys
        ordered_pairs = in_train // max(len(self.relations), 1)
        num_in_train = np.bincount(ordered_pairs, minlength=2 * len(pairs))
        seen, seen_relation = self._occurring("train")
        held_out = {}
        for split, by_kind in self._leakage[1].items():
            head, relation, tail = self.triples[split].T
            entities, relations = self._occurring(split)
            copies = is_among(keys[split], in_train)
            ordered = keys[split] // max(len(self.relations), 1)
            flags = {
                "unseen_entities": entities & ~seen,
                "unseen_relations": relations & ~seen_relation,
                "unseen_triples": ~(seen[head] & seen[tail] & seen_relation[relation]),
                "copies": copies,
                **by_kind,
                "leaked": np.logical_or.reduce([copies, *by_kind.values()]),
                "reverse": (num_in_train[ordered ^ 1] > 0) & (head != tail),
                "parallel": num_in_train[ordered] > copies,
            }
            counts = {name: int(flag.sum()) for name, flag in flags.items()}
            held_out[split] = HeldOut(**counts)
        return held_out

    def warnings(self) -> list[str]:
        """A sentence if `MAX_LEAKED` is reached, one if `MAX_UNSEEN` is, and `many_relations`.

        The first two are about test, or about valid where test is not concerned.
        """
        sentences: list[str] = []
        leakage = self._worst("leaked", MAX_LEAKED)
        if leakage:
            sentences.append(self._leakage_warning(*leakage))
        unseen = self._worst("unseen_triples", MAX_UNSEEN)
        if unseen:
            sentences.append(_unseen_warning(*unseen))
        question = many_relations(len(self.entities), len(self.relations))
        if question:
            sentences.append(question)
        return sentences

    def _leakage_warning(self, split: str, share: float, facts: HeldOut) -> str:
        reason = "occur in train too"
        if facts.copies <= facts.leaked / 2:
            worst = max(self.redundant, key=lambda row: row.leaked[split])
            names = " and ".join(dict.fromkeys((worst.relation, worst.other)))
            relations = f"duplicate, inverse or symmetric relations (such as {names})"
            reason = f"follow from train by {relations}"
        return f"Leakage: {share:.1%} of the {split} triples {reason}; metrics are too optimistic."

    def _worst(self, name: str, most: float) -> tuple[str, float, HeldOut] | None:
        """The first of test and valid with this share of such triples; its share and its facts."""
        for split in ("test", "valid"):
            share = getattr(self.held_out[split], name) / max(len(self.triples[split]), 1)
            if share >= most:
                return split, share, self.held_out[split]
        return None

    def as_dict(self) -> dict[str, Any]:
        """Everything, for JSON."""
        return {
            "graph": self.graph,
            "entities": len(self.entities),
            "relations": len(self.relations),
            "splits": self.counts,
            "held_out": {split: asdict(facts) for split, facts in self.held_out.items()},
            "degrees": asdict(self.degrees),
            "components": asdict(self.components),
            "by_cardinality": self.by_cardinality,
            "by_relation": {name: asdict(row) for name, row in self.by_relation.items()},
            "redundant_relations": [asdict(row) for row in self.redundant],
            "notes": list(self.notes),
            "warnings": self.warnings(),
        }

    # A triple is encoded as one number, from the pair of its entities (smaller id first), its
    # direction and its relation. Sorting brings all triples between two entities together. Pairs
    # are numbered before, so that 63 bits suffice for any graph.

    @property
    def _width(self) -> int:
        return 2 * max(len(self.relations), 1)

    @cached_property
    def _pairs_and_keys(self) -> tuple[Ids, dict[str, Ids]]:
        """The distinct pairs of entities, and a key for each triple of each split.

        A pair is `low * num_entities + high`, and a key is
        `(pair * 2 + swapped) * num_relations + relation`.
        """
        head, relation, tail = np.concatenate(list(self.triples.values())).astype(np.int64).T
        joined = np.minimum(head, tail) * len(self.entities) + np.maximum(head, tail)
        pairs, pair = np.unique(joined, return_inverse=True)
        keys = pair.reshape(-1) * self._width + (head > tail) * len(self.relations) + relation
        ends = np.cumsum([len(triples) for triples in self.triples.values()])[:-1]
        return pairs, dict(zip(self.triples, np.split(keys, ends), strict=True))

    @cached_property
    def _distinct(self) -> dict[str, Ids]:
        return {split: sorted_distinct(keys) for split, keys in self._pairs_and_keys[1].items()}

    def _ends(self, pair: Ids) -> tuple[Ids, Ids]:
        """The two entities of each pair."""
        low, high = np.divmod(self._pairs_and_keys[0][pair], max(len(self.entities), 1))
        return low, high

    def _occurring(self, split: str) -> tuple[Flags, Flags]:
        """Whether each entity, and each relation, occurs in a split."""
        entities = np.zeros(len(self.entities), dtype=bool)
        relations = np.zeros(len(self.relations), dtype=bool)
        entities[self.triples[split][:, [0, 2]]] = True
        relations[self.triples[split][:, 1]] = True
        return entities, relations

    @cached_property
    def _without_loops(self) -> Ids:
        """The distinct triples of all splits without self-loops, sorted."""
        keys = sorted_distinct(np.concatenate(list(self._distinct.values())))
        low, high = self._ends(keys // self._width)
        return np.compress(low != high, keys)

    @cached_property
    def _sizes(self) -> Ids:
        """The number of entity pairs of each relation."""
        relation = self._without_loops % max(len(self.relations), 1)
        return np.bincount(relation, minlength=len(self.relations)).astype(np.int64)

    @cached_property
    def _overlaps(self) -> Ids:
        """Columns (opposite, relation, other, common) of two relations of similar size.

        `common` is the number of entity pairs that both have. Triples between two entities are
        neighbours: each is compared with the next, then with the one after that, as long as any two
        are left.
        """
        size = max(len(self.relations), 1)
        sizes = self._sizes
        pair, directed = np.divmod(self._without_loops, 2 * size)
        codes = [np.zeros(0, dtype=np.int64)]
        left = np.arange(len(pair))
        distance = 0
        while len(left):
            distance += 1
            left = left[: np.searchsorted(left, len(pair) - distance)]
            left = left[pair[left] == pair[left + distance]]
            first = directed[left]
            second = directed[left + distance]
            opposite = (first < size) & (second >= size)
            first = first % size
            second = second % size
            low = np.minimum(first, second)
            high = np.maximum(first, second)
            smaller = np.minimum(sizes[low], sizes[high])
            larger = np.maximum(sizes[low], sizes[high])
            is_similar = smaller >= self.min_overlap * larger
            codes.append(((opposite * size + low) * size + high)[is_similar])
        distinct, common = np.unique(np.concatenate(codes), return_counts=True)
        rest, second = np.divmod(distinct, size)
        opposite, first = np.divmod(rest, size)
        # Of a symmetric relation both triples of a pair count.
        return np.stack([opposite, first, second, np.where(first == second, 2, 1) * common])

    @cached_property
    def _leakage(self) -> tuple[list[RedundantRelations], dict[str, dict[str, Flags]]]:
        """The redundant relations, and whether each triple of valid and test is leaked.

        The flags are by split and by kind of redundancy.
        """
        flags = {
            split: {kind: np.zeros(len(self.triples[split]), bool) for kind in REDUNDANCIES}
            for split in HELD_OUT
        }
        rows_by_relation = {split: self._rows_by_relation(split) for split in HELD_OUT}

        _, firsts, seconds, commons = self._overlaps
        larger = np.maximum(self._sizes[firsts], self._sizes[seconds])
        is_redundant = commons >= np.maximum(self.min_common, self.min_overlap * larger)
        redundant = []
        for opposite, first, second, common in self._overlaps[:, is_redundant].T.tolist():
            kind = _redundancy(first, second, opposite)
            leaked = {}
            for split in HELD_OUT:
                # Each of the two relations gives away the other.
                leaked_rows = [
                    self._with_counterpart(
                        split, rows_by_relation[split][relation], counterpart, opposite
                    )
                    for relation, counterpart in {(first, second), (second, first)}
                ]
                flags[split][kind][np.concatenate(leaked_rows)] = True
                leaked[split] = sum(len(rows) for rows in leaked_rows)
            overlap = common / int(self._sizes[first]), common / int(self._sizes[second])
            redundant.append(
                RedundantRelations(
                    kind=kind,
                    relation=self.relations[first],
                    other=self.relations[second],
                    common=common,
                    overlap=overlap,
                    leaked=leaked,
                )
            )
        return sorted(redundant, key=lambda row: (-row.leaked["test"], -row.common)), flags

    def _rows_by_relation(self, split: str) -> list[Ids]:
        """The rows of a split with each relation."""
        relations = self.triples[split][:, 1]
        ends = np.cumsum(np.bincount(relations, minlength=len(self.relations)))[:-1]
        return np.split(np.argsort(relations, kind="stable"), ends)

    def _with_counterpart(self, split: str, rows: Ids, relation: int, opposite: int) -> Ids:
        """Those of some rows that train has with another relation, without self-loops.

        `opposite` is 1 if train has them in the opposite direction.
        """
        rows = rows[self.triples[split][rows, 0] != self.triples[split][rows, 2]]
        size = len(self.relations)
        counterparts = (self._pairs_and_keys[1][split][rows] // size ^ opposite) * size + relation
        return rows[is_among(counterparts, self._distinct["train"])]


def many_relations(num_entities: int, num_relations: int) -> str | None:
    """A question if there are so many relations that the columns may be in another order."""
    if num_relations <= MIN_RELATIONS or 2 * num_relations <= num_entities:
        return None
    return (
        f"There are {num_relations:,} relations and {num_entities:,} entities, which is unusual. "
        "If the columns are in another order than head, relation and tail, choose them, such as "
        "`columns=(1, 3, 2)`."
    )


def _redundancy(first: int, second: int, opposite: int) -> str:
    if first == second:
        return "symmetric"
    return "inverse" if opposite else "duplicate"


def _unseen_warning(split: str, share: float, facts: HeldOut) -> str:
    counts = []
    if facts.unseen_entities:
        noun = "entity" if facts.unseen_entities == 1 else "entities"
        counts.append(f"{facts.unseen_entities:,} {noun}")
    if facts.unseen_relations:
        noun = "relation" if facts.unseen_relations == 1 else "relations"
        counts.append(f"{facts.unseen_relations:,} {noun}")
    return (
        f"Unseen: {share:.1%} of the {split} triples contain entities or relations that "
        f"train lacks ({' and '.join(counts)})."
    )


def connected_components(sources: Ids, targets: Ids, num_nodes: int) -> Ids:
    """The smallest node of the component of each node, `(num_nodes,)`.

    An edge joins a node of `sources` and one of `targets`, in no direction.
    """
    root = np.arange(num_nodes)
    while len(sources):
        np.minimum.at(root, np.maximum(sources, targets), np.minimum(sources, targets))
        above = root[root]
        while (root != above).any():
            root = above
            above = root[root]
        # Edges within a component are done.
        sources = root[sources]
        targets = root[targets]
        is_open = sources != targets
        sources = sources[is_open]
        targets = targets[is_open]
    return root


def cardinalities(train: Triples, shape: tuple[int, int]) -> list[str]:
    """The class of each relation, counted on train.

    N means 1.5 or more answers per query on average.
    """
    return _classes(*answers_per_query(train, shape))


def _classes(tails_per_head: Means, heads_per_tail: Means) -> list[str]:
    classes = []
    for heads, tails in zip(heads_per_tail.tolist(), tails_per_head.tolist(), strict=True):
        head_side = "N" if heads >= MANY else "1"
        tail_side = "N" if tails >= MANY else "1"
        classes.append(f"{head_side}-{tail_side}" if tails else "unseen")
    return classes


def answers_per_query(train: Triples, shape: tuple[int, int]) -> tuple[Means, Means]:
    """For each relation the mean number of tails per head, and of heads per tail.

    Repeated triples count once.
    """
    num_entities, num_relations = (max(number, 1) for number in shape)
    heads, relations, tails = train.astype(np.int64).T
    head_queries, query = np.unique(heads * num_relations + relations, return_inverse=True)
    tail_queries = sorted_distinct(tails * num_relations + relations)
    distinct = sorted_distinct(query.reshape(-1) * num_entities + tails)
    triples = head_queries[distinct // num_entities]

    def by_relation(keys: Ids) -> Ids:
        return np.bincount(keys % num_relations, minlength=shape[1])

    num_triples = by_relation(triples)
    num_heads = by_relation(head_queries)
    num_tails = by_relation(tail_queries)
    return num_triples / np.maximum(num_heads, 1), num_triples / np.maximum(num_tails, 1)
