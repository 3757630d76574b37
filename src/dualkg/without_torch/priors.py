"""Priors of queries, and what else the probabilities of triples need to know of a graph."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import numpy as np
import numpy.typing as npt

from dualkg.data.entity_types import EntityTypes
from dualkg.data.graph import SPLITS, Graph, GraphShape
from dualkg.errors import InvalidValue
from dualkg.without_torch.domain_range import DomainRange
from dualkg.without_torch.query_classes import NUM_CLASSES, QueryClasses
from dualkg.without_torch.scores import Floats, Ids

Doubles = npt.NDArray[np.float64]
Arrays = dict[str, npt.NDArray[Any]]


@dataclass(frozen=True, eq=False)
class QueryPriors:
    """The classes of queries with the prior of each, and the domains and ranges of relations.

    `heads` `(num_relations, NUM_CLASSES)` are the priors of queries (h, r, ?), and `tails` those of
    (?, r, t).
    """

    domain_range: DomainRange
    query_classes: QueryClasses
    heads: Floats
    tails: Floats

    @classmethod
    def of(cls, graph: Graph, *, types: EntityTypes | None, missing_share: float | None) -> Self:
        """The priors by the triples of train that valid answers.

        They are multiplied by the number of triples that the graph lacks for each of valid, so that
        the order of triples does not change.
        """
        query_classes = QueryClasses.of(graph, types=types)
        heads, tails = answered_shares(query_classes, QueryClasses.of(graph, split="valid"))
        per_valid = assumed_missing(graph, missing_share).per_valid
        domain_range = DomainRange.of(graph, symmetric=graph.symmetric_relations)
        return cls(domain_range, query_classes, heads * per_valid, tails * per_valid)

    def of_triples(self, triples: Ids) -> Doubles:
        """The priors of triples `(num_triples, 3)`: the means of those of their two queries."""
        heads, relations, tails = np.asarray(triples, dtype=np.int64).T
        classes = self.query_classes
        of_heads = classes.of_pairs(heads, classes.roles(relations, tails=False))
        of_tails = classes.of_pairs(tails, classes.roles(relations, tails=True))
        priors: Doubles = (self.heads[relations, of_heads] + self.tails[relations, of_tails]) / 2
        return priors

    def as_arrays(self) -> Arrays:
        """All but the types, for a file."""
        arrays = {
            "heads": self.heads,
            "tails": self.tails,
            "domains": self.domain_range.heads,
            "ranges": self.domain_range.tails,
            "symmetric": self.query_classes.symmetric,
            "keys": self.query_classes.keys,
            "counts": self.query_classes.counts,
        }
        if self.query_classes.has_evidence:
            arrays["shares"] = self.query_classes.shares
        return arrays

    @classmethod
    def of_arrays(cls, arrays: Arrays, shape: GraphShape, types: EntityTypes | None) -> Self:
        """The inverse of `as_arrays`; arrays that are not of the graph are a `ValueError`."""
        num_entities, num_relations = shape
        priors_shape = (num_relations, NUM_CLASSES)
        if not (arrays["heads"].shape == arrays["tails"].shape == priors_shape):
            raise ValueError(f"it should have priors of {num_relations:,} relations")
        symmetric = arrays["symmetric"]
        keys = arrays["keys"]
        query_classes = QueryClasses(
            num_entities,
            num_relations,
            keys,
            arrays["counts"],
            symmetric,
            types,
            saved_shares=arrays.get("shares"),
        )
        shares_shape = query_classes.shares.shape if query_classes.has_evidence else None
        if symmetric.shape != (num_relations,) or keys.shape != arrays["counts"].shape:
            raise ValueError("its arrays do not fit together")
        if shares_shape not in (None, (query_classes.num_roles, query_classes.num_columns)):
            raise ValueError("its shares are not of these relations and types")
        domain_range = DomainRange(num_entities, arrays["domains"], arrays["ranges"], symmetric)
        return cls(domain_range, query_classes, arrays["heads"], arrays["tails"])


def answered_shares(train: QueryClasses, valid: QueryClasses) -> tuple[Floats, Floats]:
    """The shares of queries with a valid answer by class, for heads and for tails.

    Both are `(num_relations, NUM_CLASSES)`. Additive smoothing towards the share of the class in
    all relations adds one answered query to 1 / share queries. If no relation has an answered query
    of a class, one is assumed.
    """
    num_queries = train.num_queries()
    num_answered = train.num_answered(valid)
    share_of_all = np.maximum(num_answered.sum(0), 1) / np.maximum(num_queries.sum(0), 1)
    shares = (num_answered + 1) / (num_queries + 1 / share_of_all)
    priors = np.minimum(shares, 1.0)
    return priors[: train.num_relations], priors[train.num_relations :]


class AssumedMissing(NamedTuple):
    """The true triples that a graph is taken to lack: their number, their share of all true
    triples, and their number for each validation triple.
    """

    number: float
    share: float
    per_valid: float


def check_missing_share(share: float) -> None:
    """Refuse a share of the true triples that cannot be missing."""
    if not 0 < share < 1:
        raise InvalidValue(
            "missing_share", expected="above 0 and below 1, such as 0.4", found=share
        )


def assumed_missing(graph: Graph, missing_share: float | None) -> AssumedMissing:
    """The triples that a graph lacks: as many as valid has, if no share is given."""
    num_known = sum(len(graph.split(name)) for name in SPLITS)
    num_valid = len(graph.valid)
    if missing_share is None:
        share = num_valid / max(1, num_known + num_valid)
        return AssumedMissing(float(num_valid), share, per_valid=1.0)
    number = num_known * missing_share / (1 - missing_share)
    return AssumedMissing(number, missing_share, per_valid=number / max(1, num_valid))
