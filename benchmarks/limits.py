"""What a step of training, or a ranking, cannot do without: operations of matrix products, and
bytes moved.

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
        """Three products of batch × entities × width: the scores, and the gradients of both their
        factors.

        A relation that is a matrix adds its two maps, h R and t Rᵀ, each with the gradients of both
        its factors.
        """
        products = 3 * 2 * self.batch * self.num_entities * self.width
        maps = 6 * 2 * self.batch * self.relation_width if self.relation_width > self.width else 0
        return products + maps

    def bytes(self) -> float:
        """The fewest bytes, gradients of tables going from the product to the optimizer without
        being stored.

        - Every number of the table of tails: Adagrad's; the copy for products, written; and read by two of them.
        - Rows of a table of heads, and of relations, that the batch holds: Adagrad's; relations are also read in both
          directions of the map.
        - Scores: written by one product and read by two, the softmax riding along.
        - Vectors of the batch: rows of heads and tails read. What is made of them is small, and can stay in a cache.


        """
        number = 2 if self.bf16 else FLOAT
        table = ADAGRAD + (number if self.bf16 else 0) + 2 * number
        found = self.num_entities * self.width * table
        if self.two_entity_tables:
            found += self.present_heads * self.width * ADAGRAD
        found += self.present_relations * self.relation_width * (ADAGRAD + 2 * FLOAT)
        found += self.batch * self.num_entities * 3 * number
        return found + self.batch * self.width * 2 * FLOAT


def ranking_work(num_queries: int, num_entities: int, width: int) -> Work:
    """One product in float32; the table and the rows of the queries read, scores written and
    read.
    """
    moved = (num_entities + num_queries) * width * FLOAT + num_queries * num_entities * 2 * FLOAT
    return Work(2 * num_queries * num_entities * width, moved)


def limit(work: Work, ceilings: dict[str, Any], *, bf16: bool, times: float = 1) -> Limit | None:
    """Seconds for `times` such pieces of work on a machine with these ceilings; None where they
    were not measured.
    """
    rate = ceilings.get("bf16_operations_per_second" if bf16 else "float32_operations_per_second")
    bandwidth = ceilings.get("copied_bytes_per_second")
    if not rate or not bandwidth:
        return None
    parts = times * work.operations / rate, times * work.bytes / bandwidth
    return Limit(max(parts), sum(parts))
