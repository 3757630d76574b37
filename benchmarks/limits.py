"""The operations of matrix products and the bytes that a training step or a ranking needs.

Time can be no less than the larger of operations / matrix rate and bytes / copy bandwidth; their
sum is what one gets when products and passes over memory follow one another.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

FLOAT = 4  # bytes
ADAGRAD = 4 * FLOAT  # a number and its sum of squares, both read and both written


class Work(NamedTuple):
    """Operations of matrix products, and bytes that are read or written."""

    operations: float
    bytes: float


class Limit(NamedTuple):
    """The least seconds that a machine could take: the larger of the two, and their sum."""

    larger: float
    sum: float


@dataclass(frozen=True)
class Step:
    """The sizes of a step of 1-vs-all training with reciprocal relations, Adagrad and DURA."""

    batch: int
    num_entities: int
    width: int  # numbers of an entity
    relation_width: int  # numbers of a relation
    present_heads: float  # distinct ones in a batch, on average
    present_relations: float
    two_entity_tables: bool
    bf16: bool  # whether products are taken in bfloat16, from a copy of the table

    def work(self) -> Work:
        """The operations and the fewest bytes of a step; see `operations` and `bytes`."""
        return Work(self.operations(), self.bytes())

    def operations(self) -> float:
        """Three products of batch × entities × width: scores, and gradients of both factors.

        A relation that is a matrix adds its two maps, h R and t Rᵀ, each with the gradients of both
        its factors.
        """
        products = 3 * 2 * self.batch * self.num_entities * self.width
        has_matrices = self.relation_width > self.width
        maps = 6 * 2 * self.batch * self.relation_width if has_matrices else 0
        return products + maps

    def bytes(self) -> float:
        """The fewest bytes that a step reads and writes.

        Gradients of tables go from the product to the optimizer without being stored. The parts:

        - Every number of the table of tails: those of Adagrad, and the copy for products, which is
          written once and read by two products.
        - Rows of heads and relations that are in the batch: those of Adagrad. Relations are also
          read in both directions of the map.
        - Scores: written by one product and read by two. The softmax needs no pass of its own.
        - Vectors of the batch: rows of heads and tails are read. What is computed from them is
          small, and can stay in a cache.
        """
        product_bytes = 2 if self.bf16 else FLOAT
        copy_bytes = product_bytes if self.bf16 else 0
        tails = self.num_entities * self.width * (ADAGRAD + copy_bytes + 2 * product_bytes)
        heads = self.present_heads * self.width * ADAGRAD if self.two_entity_tables else 0
        relations = self.present_relations * self.relation_width * (ADAGRAD + 2 * FLOAT)
        scores = self.batch * self.num_entities * 3 * product_bytes
        vectors = self.batch * self.width * 2 * FLOAT
        return tails + heads + relations + scores + vectors


def ranking_work(num_queries: int, num_entities: int, width: int) -> Work:
    """One product in float32.

    The table and the rows of the queries are read; scores are written and read.
    """
    operations = 2 * num_queries * num_entities * width
    vectors = (num_entities + num_queries) * width * FLOAT
    scores = num_queries * num_entities * 2 * FLOAT
    return Work(operations, vectors + scores)


def limit(work: Work, ceilings: dict[str, Any], *, bf16: bool, times: float = 1) -> Limit | None:
    """Seconds for `times` such pieces of work on a machine with these ceilings.

    None where the ceilings were not measured.
    """
    rate = ceilings.get("bf16_operations_per_second" if bf16 else "float32_operations_per_second")
    bandwidth = ceilings.get("copied_bytes_per_second")
    if not rate or not bandwidth:
        return None
    computing = times * work.operations / rate
    moving = times * work.bytes / bandwidth
    return Limit(max(computing, moving), computing + moving)
