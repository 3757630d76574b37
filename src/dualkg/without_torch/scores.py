"""Scores of a saved model by NumPy: the maps of relations, then products or distances.

The products of coordinates are those of the models (`kernels.products`). A test compares every
model that is listed here with its class.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from dualkg.kernels import products

Side = Literal["head", "tail"]
Ids = npt.NDArray[np.int64]
Floats = npt.NDArray[np.floating[Any]]
Flags = npt.NDArray[np.bool_]
Tables = Mapping[str, Floats]
Parts = tuple[Floats, ...]

DIFFERENCES = 2**21  # numbers in an array of differences of vectors


@dataclass(frozen=True)
class SavedModel(ABC):
    """A model by its tables `(rows, width)`, with the settings of its recipe."""

    tables: Tables
    reciprocal: bool
    options: Mapping[str, Any]
    is_dual: bool = False

    # Arrays that the file of weights has besides those of entities and relations.
    arrays: ClassVar[tuple[str, ...]] = ()
    known_options: ClassVar[tuple[str, ...]] = ()

    @classmethod
    def supports(cls, *, reciprocal: bool, dual: str) -> bool:
        """Whether tails and heads are predicted by one map and one table each."""
        return reciprocal and dual == "none"

    @property
    def heads(self) -> Floats:
        return self.tables["entities"]

    @property
    def tails(self) -> Floats:
        return self.tables.get("tails", self.heads)

    @property
    def relations(self) -> Floats:
        return self.tables["relations"]

    @abstractmethod
    def map_head(self, heads: Floats, relations: Ids) -> Floats:
        """The mapped heads of vectors `(n, width)`."""

    @abstractmethod
    def scores(self, mapped: Floats, table: Floats) -> Floats:
        """Scores of the rows of a table with mapped vectors `(batch, width)`, `(batch, rows)`."""

    def score_queries(self, entities: Ids, relations: Ids) -> Floats:
        """Scores of all entities; relation `r + num_relations` asks for heads.

        Without reciprocal relations, all queries are in one direction.
        """
        return self.scores(self.map_head(self.heads[entities], relations), self.tails)

    def score_relations(self, head: int, tail: int) -> Floats:
        """Scores of all relations of the graph between two entities, `(num_relations,)`."""
        relations = np.arange(self.num_relations)
        heads = np.repeat(self.heads[[head]], self.num_relations, axis=0)
        return self.scores(self.map_head(heads, relations), self.tails[[tail]])[:, 0]

    @property
    def num_relations(self) -> int:
        return len(self.relations) // (2 if self.reciprocal else 1)


# -- products ----------------------------------------------------------------


class SavedBilinear(SavedModel):
    """Scores by ⟨h R, t⟩; the dual on the side of tails by −‖h R − t‖²."""

    @classmethod
    def supports(cls, *, reciprocal: bool, dual: str) -> bool:
        return dual == "none" or (dual == "tail" and reciprocal)

    @abstractmethod
    def map_tail(self, tails: Floats, relations: Ids) -> Floats:
        """The mapped tails of vectors `(n, width)`."""

    def score_queries(self, entities: Ids, relations: Ids) -> Floats:
        num_relations = self.num_relations
        if self.reciprocal or bool((relations < num_relations).all()):
            return super().score_queries(entities, relations)
        mapped = self.map_tail(self.tails[entities], relations - num_relations)
        return self.scores(mapped, self.heads)

    def scores(self, mapped: Floats, table: Floats) -> Floats:
        inner: Floats = mapped @ table.T
        return minus_squared_distances(inner, mapped, table) if self.is_dual else inner


class CoordinateProduct(NamedTuple):
    """The product of two coordinates, and the conjugate."""

    times: Callable[[Any, Any], Any]
    conjugate: Callable[[Any], Any]


class SavedDiagonal(SavedBilinear):
    """A relation multiplies the coordinates of an entity elementwise."""

    num_parts: ClassVar[int] = 1
    product: ClassVar[CoordinateProduct] = CoordinateProduct(
        products.real_product, products.real_conjugate
    )

    def multipliers(self, relations: Ids) -> Parts:
        return split(self.relations[relations], self.num_parts)

    def map_head(self, heads: Floats, relations: Ids) -> Floats:
        return joined(self.product.times(split(heads, self.num_parts), self.multipliers(relations)))

    def map_tail(self, tails: Floats, relations: Ids) -> Floats:
        conjugates = self.product.conjugate(self.multipliers(relations))
        return joined(self.product.times(split(tails, self.num_parts), conjugates))


class SavedComplEx(SavedDiagonal):
    num_parts = 2
    product = CoordinateProduct(products.complex_product, products.complex_conjugate)


class SavedCP(SavedDiagonal):
    arrays = ("tails",)


class SavedDistMult(SavedDiagonal):
    pass


class SavedQuatE(SavedDiagonal):
    num_parts = 4
    known_options = ("normalized",)
    product = CoordinateProduct(products.quaternion_product, products.quaternion_conjugate)

    def multipliers(self, relations: Ids) -> Parts:
        stored = super().multipliers(relations)
        if not self.options.get("normalized", True):
            return stored
        moduli = modulus(stored)
        divisors = np.where(moduli == 0, np.float32(1), moduli)
        return tuple(part / divisors for part in stored)


class SavedSimplE(SavedDiagonal):
    num_parts = 2
    product = CoordinateProduct(products.swapped_product, products.swapped_conjugate)


class SavedRESCAL(SavedBilinear):
    def matrices(self, relations: Ids) -> Floats:
        dim = self.heads.shape[1]
        return self.relations[relations].reshape(-1, dim, dim)

    def map_head(self, heads: Floats, relations: Ids) -> Floats:
        return multiplied(heads, self.matrices(relations))

    def map_tail(self, tails: Floats, relations: Ids) -> Floats:
        return multiplied(tails, self.matrices(relations).swapaxes(1, 2))


class SavedTuckER(SavedRESCAL):
    arrays = ("core",)
    known_options = ("relation_dim",)

    def matrices(self, relations: Ids) -> Floats:
        mixed: Floats = np.tensordot(self.relations[relations], self.tables["core"], axes=1)
        return mixed


# -- distances ---------------------------------------------------------------


class SavedNorm(SavedModel):
    """Scores by minus the norm of the difference of the mapped head and the tail."""

    num_parts: ClassVar[int] = 1
    known_options = ("norm",)

    def scores(self, mapped: Floats, table: Floats) -> Floats:
        norm = self.options.get("norm", 1)
        if norm == "squared":
            return minus_squared_distances(mapped @ table.T, mapped, table)
        size = max(1, DIFFERENCES // mapped.size)
        blocks = []
        for start in range(0, len(table), size):
            differences = mapped[:, None] - table[None, start : start + size]
            if norm == 1:
                blocks.append(-modulus(split(differences, self.num_parts)).sum(-1))
            else:
                blocks.append(-np.sqrt(np.square(differences).sum(-1)))
        return np.concatenate(blocks, axis=1)


class SavedTransE(SavedNorm):
    def map_head(self, heads: Floats, relations: Ids) -> Floats:
        return heads + self.relations[relations]


class SavedModE(SavedNorm):
    def map_head(self, heads: Floats, relations: Ids) -> Floats:
        [mapped] = products.real_product((heads,), (self.relations[relations],))
        return np.asarray(mapped)


class SavedRotatE(SavedNorm):
    arrays = ("half_turn",)
    num_parts = 2

    def map_head(self, heads: Floats, relations: Ids) -> Floats:
        scale = np.float32(math.pi) / self.tables["half_turn"]
        angles = self.relations[relations] * scale
        rotations = (np.cos(angles), np.sin(angles))
        return joined(products.complex_product(split(heads, 2), rotations))


MODELS: dict[str, type[SavedModel]] = {
    "ComplEx": SavedComplEx,
    "CP": SavedCP,
    "DistMult": SavedDistMult,
    "QuatE": SavedQuatE,
    "SimplE": SavedSimplE,
    "RESCAL": SavedRESCAL,
    "TuckER": SavedTuckER,
    "TransE": SavedTransE,
    "ModE": SavedModE,
    "RotatE": SavedRotatE,
}


def saved_model(settings: Mapping[str, Any], tables: Tables) -> SavedModel | None:
    """The model of the table `[model]` of a recipe; None if only PyTorch can score with it."""
    kind = MODELS.get(str(settings.get("name")))
    options = settings.get("options", {})
    reciprocal = settings.get("reciprocal") is True
    dual = str(settings.get("dual", "none"))
    if kind is None or not kind.supports(reciprocal=reciprocal, dual=dual):
        return None
    if not set(options) <= set(kind.known_options) or isinstance(options.get("norm"), bool):
        return None
    # The dual of a model has its tables.
    tables = {name.removeprefix("primal."): table for name, table in tables.items()}
    if set(tables) != {"entities", "relations", *kind.arrays}:
        return None
    return kind(tables, reciprocal, options, is_dual=dual != "none")


# -- arithmetic --------------------------------------------------------------


def split(vectors: Floats, num_parts: int) -> Parts:
    """The numbers of all coordinates: all first ones, all second ones, and so on."""
    return tuple(np.split(vectors, num_parts, axis=-1))


def joined(parts: Parts) -> Floats:
    return parts[0] if len(parts) == 1 else np.concatenate(parts, axis=-1)


def modulus(parts: Parts) -> Floats:
    """|x| of coordinates of some parts."""
    if len(parts) == 1:
        return np.abs(parts[0])
    squares: Floats = np.sum([np.square(part) for part in parts], axis=0)
    return np.sqrt(squares)


def multiplied(vectors: Floats, matrices: Floats) -> Floats:
    """Each vector `(n, width)` times its matrix `(n, width, width)`."""
    product: Floats = (vectors[:, None] @ matrices)[:, 0]
    return product


def minus_squared_distances(inner: Floats, mapped: Floats, table: Floats) -> Floats:
    """−‖x − t‖² of mapped vectors and rows, by their inner products `(batch, rows)`."""
    squares = np.square(mapped).sum(-1, keepdims=True) + np.square(table).sum(-1)
    distances: Floats = squares - 2 * inner
    return -distances
