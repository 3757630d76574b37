"""Rules counted in train: where a path of relations joins two entities, how often another does.

A body is a list of relation ids, with those of inverse relations. It joins two different entities x
and y if there is a path from x to y along its relations that visits no entity twice.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from dualkg.data.graph import Graph
from dualkg.data.triples import is_among

Ids = tuple[int, int, int]
Keys = npt.NDArray[np.int64]

MAX_LENGTH = 3
MAX_PRODUCTS = 10_000_000  # multiplications in one product of matrices


class RuleCount(NamedTuple):
    """In how many cases the body of a rule holds, and in how many of these its head also does.

    For a rule that is not counted, both are None, and `obstacle` completes "The rule is not counted
    because".
    """

    num_cases: int | None
    num_true: int | None
    obstacle: str | None = None

    @property
    def confidence(self) -> float | None:
        """The share of the cases in which the head holds; None without a case."""
        if not self.num_cases or self.num_true is None:
            return None
        return self.num_true / self.num_cases


def count_rule(body: Sequence[int], triple: Ids, graph: Graph) -> RuleCount:
    """Count the cases of a rule with the relation of a triple as its head.

    A case is a pair of different entities that the body joins. The triple is left out, as if it
    were not known, and its two entities are no case.
    """
    head, relation, tail = triple
    if len(body) > MAX_LENGTH:
        return RuleCount(None, None, f"it has more than {MAX_LENGTH} steps")
    if head == tail:
        return RuleCount(None, None, "head and tail are the same entity")
    if len(body) == 3:
        relations = _pairs(body, triple, graph)
        if relations[1].num_products(relations[2]) < relations[0].num_products(relations[1]):
            # The path from the other end is the same, and its first product is smaller.
            num_relations = graph.shape.num_relations
            inverses = [(id + num_relations) % (2 * num_relations) for id in reversed(body)]
            return _count(inverses, (tail, relation + num_relations, head), graph)
    return _count(body, triple, graph)


def _count(body: Sequence[int], triple: Ids, graph: Graph) -> RuleCount:
    num_entities = graph.shape.num_entities
    head, relation, tail = triple
    *relations, wanted = _pairs([*body, relation], triple, graph)
    try:
        cases = _joined(relations)
    except _TooManyProducts:
        return RuleCount(None, None, f"it has more than {MAX_PRODUCTS:,} paths")
    cases = cases[cases != head * num_entities + tail]
    num_true = int(is_among(wanted.keys, cases).sum())
    return RuleCount(len(cases), num_true)


class _TooManyProducts(Exception):
    """A product of matrices would take too long."""


class _Pairs(NamedTuple):
    """Pairs of different entities x and y as sorted keys x · num_entities + y.

    `counts` are the numbers of paths that join them.
    """

    keys: Keys
    counts: Keys
    num_entities: int

    @property
    def firsts(self) -> Keys:
        return self.keys // self.num_entities

    @property
    def seconds(self) -> Keys:
        return self.keys % self.num_entities

    def reversed_keys(self) -> Keys:
        """The keys of (y, x), in the order of the pairs."""
        return self.seconds * self.num_entities + self.firsts

    def num_products(self, other: _Pairs) -> int:
        """The number of paths of two steps, along these pairs and then along others."""
        degrees = np.bincount(other.firsts, minlength=self.num_entities)
        return int(degrees[self.seconds].sum())

    def product(self, other: _Pairs) -> _Pairs:
        """The pairs of different entities that these pairs and then others join."""
        if self.num_products(other) > MAX_PRODUCTS:
            raise _TooManyProducts
        with warnings.catch_warnings():
            # PyTorch calls one of its sparse formats, which it uses here, a beta version.
            warnings.simplefilter("ignore", UserWarning)
            product = torch.sparse.mm(self._matrix(), other._matrix()).coalesce()
        firsts, seconds = product.indices().numpy()
        different = firsts != seconds
        keys = firsts * self.num_entities + seconds
        counts = product.values().long().numpy()
        return _Pairs(keys[different], counts[different], self.num_entities)

    def _matrix(self) -> torch.Tensor:
        indices = torch.from_numpy(np.stack([self.firsts, self.seconds]))
        counts = torch.from_numpy(self.counts).double()
        shape = (self.num_entities, self.num_entities)
        return torch.sparse_coo_tensor(
            indices, counts, shape, check_invariants=False, is_coalesced=True
        )


def _pairs(relations: Sequence[int], triple: Ids, graph: Graph) -> list[_Pairs]:
    """The pairs of different entities that each relation joins in train, without a triple."""
    num_entities, num_relations = graph.shape
    head, relation, tail = triple
    if relation >= num_relations:
        head, relation, tail = tail, relation - num_relations, head
    pairs = []
    for id in relations:
        triples = graph.train[graph.train[:, 1] == id % num_relations].astype(np.int64)
        heads = triples[:, 0]
        tails = triples[:, 2]
        counts = heads != tails
        if id % num_relations == relation:
            counts &= (heads != head) | (tails != tail)
        firsts = heads if id < num_relations else tails
        seconds = tails if id < num_relations else heads
        keys = np.unique((firsts * num_entities + seconds)[counts])
        pairs.append(_Pairs(keys, np.ones_like(keys), num_entities))
    return pairs


def _joined(relations: Sequence[_Pairs]) -> Keys:
    """The keys of all pairs that one, two or three relations join, sorted."""
    if len(relations) == 1:
        return relations[0].keys
    first, second, *others = relations
    two_steps = first.product(second)
    if not others:
        return two_steps.keys
    [third] = others
    three_steps = two_steps.product(third)
    num_returning = _returning(three_steps, first, second, third)
    return three_steps.keys[three_steps.counts > num_returning]


def _returning(pairs: _Pairs, first: _Pairs, second: _Pairs, third: _Pairs) -> Keys:
    """The numbers of paths x → y → z → y with z ≠ x, which visit y twice, for pairs (x, y)."""
    num_entities = pairs.num_entities
    back_and_forth = np.intersect1d(second.keys, third.reversed_keys(), assume_unique=True)
    by_entity = np.bincount(back_and_forth // num_entities, minlength=num_entities)
    through_x = is_among(first.reversed_keys(), second.keys) & is_among(first.keys, third.keys)
    numbers = by_entity[first.seconds] - through_x

    returning = np.zeros(len(pairs.keys), dtype=np.int64)
    is_joined = is_among(first.keys, pairs.keys)
    places = np.searchsorted(pairs.keys, first.keys[is_joined])
    returning[places] = numbers[is_joined]
    return returning
