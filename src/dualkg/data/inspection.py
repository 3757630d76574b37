"""Inspect a graph: degrees, cardinalities, components, unseen entities, redundant relations and
what they leak.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from dualkg.data.triples import Triples, is_among, sorted_distinct
from dualkg.data.vocabulary import Vocabulary
from dualkg.errors import Sentence

Ids = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]
Means = npt.NDArray[np.float64]

CARDINALITIES = ("1-1", "1-N", "N-1", "N-N", "unseen")
MANY = 1.5  # answers per query, on average
MIN_OVERLAP = (
    0.8  # the least share of the entity pairs of each of two redundant relations that both have
)
MIN_COMMON = 5  # entity pairs; fewer in common may be chance
MAX_LEAKED = 0.1  # the share of leaked triples in valid or test from which there is a warning
MAX_UNSEEN = (
    0.05  # the share of triples in valid or test with unseen entities or relations, likewise
)
NUM_HUBS = 5
HELD_OUT = ("valid", "test")


@dataclass(frozen=True)
class Degrees:
    """Training triples per entity of train; each triple counts once, a self-loop for both of its
    ends.
    """

    mean: float
    median: float
    percentile_90: float
    percentile_99: float
    max: int
    distribution: list[
        dict[str, int]
    ]  # the numbers of entities with degree 1, 2 to 3, 4 to 7, and so on
    hubs: list[dict[str, Any]]  # the entities of the highest degrees


@dataclass(frozen=True)
class Components:
    """Connected components of train, regardless of direction: their number, and the entities of the
    largest.
    """

    number: int
    largest: int
    share: float


@dataclass(frozen=True)
class RelationFacts:
    """Triples of a relation, its cardinality in train, and the share of its triples whose reverse
    it also has.
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
    """Two relations with almost the same entity pairs (duplicate) or the same reversed (inverse);
    or one, symmetric.
    """

    kind: str
    relation: str
    other: str
    common: int  # entity pairs of both, counted on all splits, without self-loops
    overlap: tuple[float, float]  # `common` as a share of the pairs of either relation
    leaked: dict[str, int]  # the triples of valid and test that train has under the other relation


@dataclass(frozen=True)
class HeldOut:
    """Numbers of triples (h, r, t) of valid or test with something unseen, or with a counterpart in
    train.
    """

    unseen_entities: int
    unseen_relations: int
    unseen_triples: int  # triples with an unseen entity or relation
    copies: int  # train has the triple itself
    duplicate: int  # train has (h, r', t), and r' is a duplicate of r
    inverse: int  # train has (t, r', h), and r' is an inverse of r
    symmetric: int  # train has (t, r, h), and r is symmetric
    leaked: int  # any of these four
    reverse: (
        int  # train has (t, r', h) for any relation r'. In a dense graph this need not be leakage
    )
    parallel: int  # train has (h, r', t) for any other relation r'


@dataclass(frozen=True, eq=False)
class Inspection:
    """Statistics of a graph, each computed when it is first read."""

    graph: str
    entities: Vocabulary
    relations: Vocabulary
    triples: Mapping[str, Triples] = field(repr=False)
    notes: tuple[Sentence, ...] = ()

    @cached_property
    def counts(self) -> dict[str, dict[str, int]]:
        """By split: triples, repeated triples, self-loops, and the entities and relations that
        occur.
        """
        found = {}
        for split, triples in self.triples.items():
            entities, relations = self._occurring(split)
            found[split] = {
                "triples": len(triples),
                "duplicates": len(triples) - len(self._distinct[split]),
                "self_loops": int((triples[:, 0] == triples[:, 2]).sum()),
                "entities": int(entities.sum()),
                "relations": int(relations.sum()),
            }
        return found

    @cached_property
    def degrees(self) -> Degrees:
        ends = self._ends(self._distinct["train"] // self._width)
        degree = np.bincount(np.concatenate(ends), minlength=len(self.entities))
        found = degree[degree > 0]
        if not len(found):
            return Degrees(0.0, 0.0, 0.0, 0.0, 0, [], [])
        median, high, higher = np.percentile(found, (50, 90, 99)).tolist()
        power = np.bincount(np.frexp(found)[1] - 1).tolist()  # degrees from 2^i to 2^(i + 1) - 1
        distribution = [
            {"from": 2**i, "to": 2 ** (i + 1) - 1, "entities": n} for i, n in enumerate(power)
        ]
        top = np.argsort(-degree, kind="stable")[: min(NUM_HUBS, len(found))].tolist()
        hubs = [{"entity": self.entities[id], "degree": int(degree[id])} for id in top]
        return Degrees(
            float(found.mean()), median, high, higher, int(found.max()), distribution, hubs
        )

    @cached_property
    def components(self) -> Components:
        pair = sorted_distinct(self._distinct["train"] // self._width)
        root = connected_components(*self._ends(pair), len(self.entities))
        sizes = np.bincount(root[self._occurring("train")[0]], minlength=1)
        largest = int(sizes.max())
        return Components(int((sizes > 0).sum()), largest, largest / max(int(sizes.sum()), 1))

    @cached_property
    def by_relation(self) -> dict[str, RelationFacts]:
        """Facts of every relation, in the order of ids."""
        size = len(self.relations)
        train = self.triples["train"]
        numbers = [
            np.bincount(triples[:, 1], minlength=size).tolist() for triples in self.triples.values()
        ]
        answers = answers_per_query(train, (len(self.entities), size))
        loops = np.bincount(train[train[:, 0] == train[:, 2], 1], minlength=size)
        _, one, other, common = self._overlaps
        symmetric = np.bincount(one[one == other], weights=common[one == other], minlength=size)
        symmetry = symmetric / np.maximum(self._sizes, 1)
        means = (column.tolist() for column in (*answers, loops, symmetry))
        rows = zip(*numbers, _classes(*answers), *means, strict=True)
        return {
            name: RelationFacts(*row)
            for name, row in zip(self.relations.names.to_pylist(), rows, strict=True)
        }

    @property
    def by_cardinality(self) -> dict[str, dict[str, int]]:
        """The relations of each cardinality, and their triples in each split."""
        found = {}
        for kind in CARDINALITIES:
            if rows := [row for row in self.by_relation.values() if row.cardinality == kind]:
                numbers = {
                    split: sum(getattr(row, split) for row in rows) for split in self.triples
                }
                found[kind] = {"relations": len(rows), **numbers}
        return found

    @property
    def redundant(self) -> list[RedundantRelations]:
        """Duplicate, inverse and symmetric relations, those that leak most of test first."""
        return self._leakage[0]

    @cached_property
    def held_out(self) -> dict[str, HeldOut]:
        """What valid and test have that train has not, and what train gives away of them."""
        in_train, (pairs, keys) = self._distinct["train"], self._pairs_and_keys
        num_in_train = np.bincount(
            in_train // max(len(self.relations), 1), minlength=2 * len(pairs)
        )
        seen, seen_relation = self._occurring("train")
        found = {}
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
            found[split] = HeldOut(**{name: int(flag.sum()) for name, flag in flags.items()})
        return found

    def warnings(self) -> list[str]:
        """A sentence if leakage is large (`MAX_LEAKED`), and one if many triples have unseen
        entities (`MAX_UNSEEN`).

        They are about test, or about valid where test is not concerned.
        """
        sentences = []
        if leaks := self._worst("leaked", MAX_LEAKED):
            split, share, facts = leaks
            reason = "occur in train too"
            if facts.copies <= facts.leaked / 2:
                worst = max(self.redundant, key=lambda row: row.leaked[split])
                names = " and ".join(dict.fromkeys((worst.relation, worst.other)))
                reason = f"follow from train by duplicate, inverse or symmetric relations (such as {names})"
            sentences.append(
                f"Leakage: {share:.1%} of the {split} triples {reason}; metrics are too optimistic."
            )
        if unseen := self._worst("unseen_triples", MAX_UNSEEN):
            split, share, facts = unseen
            numbers = (
                (facts.unseen_entities, "entity", "entities"),
                (facts.unseen_relations, "relation", "relations"),
            )
            listed = " and ".join(
                f"{n:,} {one if n == 1 else many}" for n, one, many in numbers if n
            )
            sentences.append(
                f"Unseen: {share:.1%} of the {split} triples contain entities or relations that "
                f"train lacks ({listed})."
            )
        return sentences

    def _worst(self, name: str, most: float) -> tuple[str, float, HeldOut] | None:
        """The first of test and valid with at least this share of such triples, its share and its
        facts.
        """
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
            "notes": [str(note) for note in self.notes],
            "warnings": self.warnings(),
        }

    # A triple becomes one number, of its pair of entities, smaller id first, its direction and its
    # relation. Sorted, the triples between two entities are neighbours. Pairs are numbered first:
    # 63 bits suffice for any graph.

    @property
    def _width(self) -> int:
        return 2 * max(len(self.relations), 1)

    @cached_property
    def _pairs_and_keys(self) -> tuple[Ids, dict[str, Ids]]:
        """The distinct pairs of entities, `low * num_entities + high`; and of each split, for each
        triple `(pair * 2 + swapped) * num_relations + relation`.
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
        entities, relations = (
            np.zeros(len(names), dtype=bool) for names in (self.entities, self.relations)
        )
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
        """Columns (opposite, relation, other, common): the pairs that two relations of similar size
        have in common.

        Triples between two entities are neighbours: each is compared with the next, then with the
        one after that, as long as any two are left.
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
            similar = np.minimum(sizes[low], sizes[high]) >= MIN_OVERLAP * np.maximum(
                sizes[low], sizes[high]
            )
            codes.append(((opposite * size + low) * size + high)[similar])
        distinct, common = np.unique(np.concatenate(codes), return_counts=True)
        rest, other = np.divmod(distinct, size)
        opposite, one = np.divmod(rest, size)
        # Of a symmetric relation both triples of a pair count.
        return np.stack([opposite, one, other, np.where(one == other, 2, 1) * common])

    @cached_property
    def _leakage(self) -> tuple[list[RedundantRelations], dict[str, dict[str, Flags]]]:
        """The redundant relations; and for valid and test, by kind, whether each triple has a
        counterpart in train.
        """
        kinds = ("duplicate", "inverse", "symmetric")
        rows_of = {}
        rows = []
        flags = {
            split: {kind: np.zeros(len(self.triples[split]), bool) for kind in kinds}
            for split in HELD_OUT
        }
        for split in HELD_OUT:
            ends = np.cumsum(np.bincount(self.triples[split][:, 1], minlength=len(self.relations)))[
                :-1
            ]
            rows_of[split] = np.split(
                np.argsort(self.triples[split][:, 1], kind="stable"), ends
            )  # by relation
        _, one, other, common = self._overlaps
        enough = common >= np.maximum(
            MIN_COMMON, MIN_OVERLAP * np.maximum(self._sizes[one], self._sizes[other])
        )
        for opposite, one, other, common in self._overlaps[:, enough].T.tolist():
            kind = "symmetric" if one == other else "inverse" if opposite else "duplicate"
            leaked = dict[str, int]()
            for split in HELD_OUT:
                found = [
                    self._with_counterpart(split, rows_of[split][relation], counterpart, opposite)
                    for relation, counterpart in {
                        (one, other),
                        (other, one),
                    }  # each of the two gives away the other
                ]
                flags[split][kind][np.concatenate(found)] = True
                leaked[split] = sum(map(len, found))
            overlap = common / int(self._sizes[one]), common / int(self._sizes[other])
            rows.append(
                RedundantRelations(
                    kind, self.relations[one], self.relations[other], common, overlap, leaked
                )
            )
        return sorted(rows, key=lambda row: (-row.leaked["test"], -row.common)), flags

    def _with_counterpart(self, split: str, rows: Ids, relation: int, opposite: int) -> Ids:
        """Those of some rows, without self-loops, that train has with another relation, in the same
        or the opposite direction.
        """
        rows = rows[self.triples[split][rows, 0] != self.triples[split][rows, 2]]
        size = len(self.relations)
        counterparts = (self._pairs_and_keys[1][split][rows] // size ^ opposite) * size + relation
        return rows[is_among(counterparts, self._distinct["train"])]


def connected_components(one: Ids, other: Ids, num_nodes: int) -> Ids:
    """The smallest node of the component of each node, `(num_nodes,)`, for edges between `one` and
    `other`.
    """
    root = np.arange(num_nodes)
    while len(one):
        np.minimum.at(root, np.maximum(one, other), np.minimum(one, other))
        while (root != (above := root[root])).any():
            root = above
        one = root[one]
        other = root[other]
        one, other = one[one != other], other[one != other]
    return root


def cardinalities(train: Triples, shape: tuple[int, int]) -> list[str]:
    """The class of each relation, counted on train: N means 1.5 or more answers per query on
    average.
    """
    return _classes(*answers_per_query(train, shape))


def _classes(tails_per_head: Means, heads_per_tail: Means) -> list[str]:
    return [
        "unseen"
        if not tails
        else f"{'N' if heads >= MANY else '1'}-{'N' if tails >= MANY else '1'}"
        for heads, tails in zip(heads_per_tail.tolist(), tails_per_head.tolist(), strict=True)
    ]


def answers_per_query(train: Triples, shape: tuple[int, int]) -> tuple[Means, Means]:
    """For each relation the mean number of tails per head, and of heads per tail; repeated triples
    count once.
    """
    num_entities, num_relations = (max(number, 1) for number in shape)
    head, relation, tail = train.astype(np.int64).T
    by_head, query = np.unique(head * num_relations + relation, return_inverse=True)
    by_tail = sorted_distinct(tail * num_relations + relation)
    triples = by_head[sorted_distinct(query.reshape(-1) * num_entities + tail) // num_entities]
    found = (triples, by_head, by_tail)
    answers, heads, tails = (
        np.bincount(keys % num_relations, minlength=shape[1]) for keys in found
    )
    return answers / np.maximum(heads, 1), answers / np.maximum(tails, 1)
