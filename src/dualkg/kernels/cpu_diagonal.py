"""numba kernels of diagonal models on a CPU: mapped vectors, squared norms, and their gradients.

A row of a complex model holds all real parts, then all imaginary parts. Every kernel has a form for
real rows and one for complex rows. The plain form of a step is `FusedStep` in PyTorch.
"""

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from dualkg.kernels.cpu import compiled, in_parallel

FAST = ("contract", "reassoc")


class Squares(NamedTuple):
    """The weights of the squared norms of the vectors of a triple in a penalty."""

    head: float = 0.0
    tail: float = 0.0
    relation: float = 0.0
    mapped_head: float = 0.0
    mapped_tail: float = 0.0


class DiagonalTables(NamedTuple):
    """The tables of a diagonal model, `(rows, width)` each, and whether its numbers are complex."""

    heads: Tensor
    relations: Tensor
    tails: Tensor
    is_complex: bool

    def arrays(self) -> tuple[Any, Any, Any]:
        return self.heads.numpy(), self.relations.numpy(), self.tails.numpy()


class MappedTriples(NamedTuple):
    """What is known of triples before they are scored, `(batch, width)` each."""

    mapped_heads: Tensor
    tails: Tensor
    penalties: Tensor  # `(batch,)`
    relation_queries: Tensor | None  # the rows q with ⟨h R, t⟩ = ⟨q, r⟩


class TripleGradients(NamedTuple):
    """Gradients of the rows of each triple, `(batch, width)`, and of the table of relations."""

    heads: Tensor
    tails: Tensor
    relations: Tensor


def map_triples(
    tables: DiagonalTables, triples: Tensor, squares: Squares, *, predict_relations: bool
) -> MappedTriples:
    """Map the heads of triples `(batch, 3)`, and weigh their squared norms."""
    num = len(triples)
    width = tables.heads.shape[1]
    mapped = torch.empty(num, width)
    tails = torch.empty(num, width)
    penalties = torch.empty(num)
    queries = torch.empty(num if predict_relations else 0, width)
    in_parallel(
        _map_complex if tables.is_complex else _map_real,
        num,
        *tables.arrays(),
        triples.contiguous().numpy(),
        np.array(squares, dtype=np.float32),
        mapped.numpy(),
        tails.numpy(),
        penalties.numpy(),
        queries.numpy(),
    )
    return MappedTriples(mapped, tails, penalties, queries if predict_relations else None)


def triple_gradients(
    tables: DiagonalTables,
    triples: Tensor,
    squares: Squares,
    to_mapped_heads: Tensor,
    to_relation_queries: Tensor | None,
) -> TripleGradients:
    """The gradients of triples `(batch, 3)` from those of what was made of their heads and tails.

    `squares` are the weights of the squared norms. Each thread adds up relations on its own.
    """
    num = len(triples)
    width = tables.heads.shape[1]
    num_threads = max(1, min(torch.get_num_threads(), num))
    to_heads = torch.empty(num, width)
    to_tails = torch.empty(num, width)
    to_relations = torch.zeros(num_threads, *tables.relations.shape)
    if to_relation_queries is None:
        to_relation_queries = torch.empty(0, width)
    in_parallel(
        _complex_gradients if tables.is_complex else _real_gradients,
        num,
        *tables.arrays(),
        triples.contiguous().numpy(),
        2 * np.array(squares, dtype=np.float32),
        to_mapped_heads.contiguous().numpy(),
        to_relation_queries.contiguous().numpy(),
        to_heads.numpy(),
        to_tails.numpy(),
        to_relations.numpy(),
    )
    return TripleGradients(to_heads, to_tails, to_relations.sum(0))


@compiled(*FAST)
def _map_real(
    first, last, heads, relations, tails, triples, squares, mapped, answers, penalties, queries
):
    of_head, of_tail, of_relation, of_mapped_head, of_mapped_tail = squares
    predicts_relations = len(queries) > 0
    for row in range(first, last):
        h = heads[triples[row, 0]]
        r = relations[triples[row, 1]]
        t = tails[triples[row, 2]]
        penalty = np.float32(0)
        for i in range(len(h)):
            m = h[i] * r[i]
            n = t[i] * r[i]
            mapped[row, i] = m
            answers[row, i] = t[i]
            penalty += of_head * h[i] * h[i] + of_tail * t[i] * t[i] + of_relation * r[i] * r[i]
            penalty += of_mapped_head * m * m + of_mapped_tail * n * n
        if predicts_relations:
            for i in range(len(h)):
                queries[row, i] = h[i] * t[i]
        penalties[row] = penalty


@compiled(*FAST)
def _map_complex(
    first, last, heads, relations, tails, triples, squares, mapped, answers, penalties, queries
):
    """h R is the product of complex numbers, and t Rᵀ that with the conjugate of r."""
    of_head, of_tail, of_relation, of_mapped_head, of_mapped_tail = squares
    predicts_relations = len(queries) > 0
    half = heads.shape[1] // 2
    for row in range(first, last):
        h_re = heads[triples[row, 0], :half]
        h_im = heads[triples[row, 0], half:]
        r_re = relations[triples[row, 1], :half]
        r_im = relations[triples[row, 1], half:]
        t_re = tails[triples[row, 2], :half]
        t_im = tails[triples[row, 2], half:]
        m_re = mapped[row, :half]
        m_im = mapped[row, half:]
        a_re = answers[row, :half]
        a_im = answers[row, half:]
        penalty = np.float32(0)
        for i in range(half):
            m_re[i] = h_re[i] * r_re[i] - h_im[i] * r_im[i]
            m_im[i] = h_re[i] * r_im[i] + h_im[i] * r_re[i]
            a_re[i] = t_re[i]
            a_im[i] = t_im[i]
            # Moduli multiply.
            h = h_re[i] * h_re[i] + h_im[i] * h_im[i]
            r = r_re[i] * r_re[i] + r_im[i] * r_im[i]
            t = t_re[i] * t_re[i] + t_im[i] * t_im[i]
            penalty += of_head * h + of_tail * t + of_relation * r
            penalty += (of_mapped_head * h + of_mapped_tail * t) * r
        if predicts_relations:
            for i in range(half):
                queries[row, i] = h_re[i] * t_re[i] + h_im[i] * t_im[i]
                queries[row, half + i] = h_re[i] * t_im[i] - h_im[i] * t_re[i]
        penalties[row] = penalty


@compiled(*FAST)
def _real_gradients(
    first,
    last,
    heads,
    relations,
    tails,
    triples,
    slopes,
    to_mapped,
    to_queries,
    to_heads,
    to_tails,
    to_relations,
):
    of_head, of_tail, of_relation, of_mapped_head, of_mapped_tail = slopes
    predicts_relations = len(to_queries) > 0
    # The number of this range of rows.
    thread = (first * len(to_relations) + len(triples) - 1) // len(triples)
    for row in range(first, last):
        h = heads[triples[row, 0]]
        r = relations[triples[row, 1]]
        t = tails[triples[row, 2]]
        to_h = to_heads[row]
        to_t = to_tails[row]
        to_r = to_relations[thread, triples[row, 1]]
        to_m = to_mapped[row]
        for i in range(len(h)):
            m = to_m[i] + of_mapped_head * h[i] * r[i]
            n = of_mapped_tail * t[i] * r[i]
            to_h[i] = of_head * h[i] + m * r[i]
            to_t[i] = of_tail * t[i] + n * r[i]
            to_r[i] += of_relation * r[i] + m * h[i] + n * t[i]
        if predicts_relations:
            q = to_queries[row]
            for i in range(len(h)):
                to_h[i] += t[i] * q[i]
                to_t[i] += h[i] * q[i]


@compiled(*FAST)
def _complex_gradients(
    first,
    last,
    heads,
    relations,
    tails,
    triples,
    slopes,
    to_mapped,
    to_queries,
    to_heads,
    to_tails,
    to_relations,
):
    """The gradient of ⟨h R, g⟩ is g Rᵀ in h, and h̄ g in r.

    That of ⟨q, r⟩ is t q̄ in h, and h q in t.
    """
    of_head, of_tail, of_relation, of_mapped_head, of_mapped_tail = slopes
    predicts_relations = len(to_queries) > 0
    half = heads.shape[1] // 2
    # The number of this range of rows.
    thread = (first * len(to_relations) + len(triples) - 1) // len(triples)
    for row in range(first, last):
        relation = triples[row, 1]
        h_re = heads[triples[row, 0], :half]
        h_im = heads[triples[row, 0], half:]
        r_re = relations[relation, :half]
        r_im = relations[relation, half:]
        t_re = tails[triples[row, 2], :half]
        t_im = tails[triples[row, 2], half:]
        g_re = to_mapped[row, :half]
        g_im = to_mapped[row, half:]
        to_h_re = to_heads[row, :half]
        to_h_im = to_heads[row, half:]
        to_t_re = to_tails[row, :half]
        to_t_im = to_tails[row, half:]
        to_r_re = to_relations[thread, relation, :half]
        to_r_im = to_relations[thread, relation, half:]
        for i in range(half):
            # The squares of the mapped vectors add multiples of h, t and r to the gradients.
            h = h_re[i] * h_re[i] + h_im[i] * h_im[i]
            r = r_re[i] * r_re[i] + r_im[i] * r_im[i]
            t = t_re[i] * t_re[i] + t_im[i] * t_im[i]
            in_h = of_head + of_mapped_head * r
            in_t = of_tail + of_mapped_tail * r
            in_r = of_relation + of_mapped_head * h + of_mapped_tail * t
            to_h_re[i] = in_h * h_re[i] + g_re[i] * r_re[i] + g_im[i] * r_im[i]
            to_h_im[i] = in_h * h_im[i] + g_im[i] * r_re[i] - g_re[i] * r_im[i]
            to_t_re[i] = in_t * t_re[i]
            to_t_im[i] = in_t * t_im[i]
            to_r_re[i] += in_r * r_re[i] + h_re[i] * g_re[i] + h_im[i] * g_im[i]
            to_r_im[i] += in_r * r_im[i] + h_re[i] * g_im[i] - h_im[i] * g_re[i]
        if predicts_relations:
            q_re = to_queries[row, :half]
            q_im = to_queries[row, half:]
            for i in range(half):
                to_h_re[i] += t_re[i] * q_re[i] + t_im[i] * q_im[i]
                to_h_im[i] += t_im[i] * q_re[i] - t_re[i] * q_im[i]
                to_t_re[i] += h_re[i] * q_re[i] - h_im[i] * q_im[i]
                to_t_im[i] += h_re[i] * q_im[i] + h_im[i] * q_re[i]
