"""MRR with entity embeddings rounded to storage formats of fewer bytes."""

from collections.abc import Iterator
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor

import dualkg as kg
from dualkg.analysis.sparsity import entity_tables, find_thresholds, sparsified
from dualkg.training.checkpoint import compress

SHARES = (0.5, 0.6, 0.7, 0.8, 0.9)  # of zeros, in sparse tables


def int8(table: Tensor) -> tuple[Tensor, int]:
    """Codes from −127 to 127 and a scale for each row, decoded, and their bytes."""
    scales = table.abs().amax(1) / 127
    codes = (table / scales.clamp(min=1e-30)[:, None]).round()
    return codes * scales[:, None], table.numel() + 4 * len(table)


def bf16(table: Tensor) -> tuple[Tensor, int]:
    return table.bfloat16().float(), 2 * table.numel()


def float32(table: Tensor) -> tuple[Tensor, int]:
    return table, 4 * table.numel()


def sparse(table: Tensor) -> tuple[Tensor, int]:
    """The CSR form of run folders."""
    return table, sum(part.nbytes for part in compress(table.cpu()).values())


FORMATS = {"float32": float32, "bf16": bf16, "int8": int8}


@torch.no_grad()
def measure(model: kg.Model, graph: kg.Graph) -> Iterator[dict[str, Any]]:
    """Test metrics and bytes of entity tables in dense formats, then with more and more zeros."""
    thresholds = find_thresholds(entity_tables(model).values(), SHARES)
    jobs = [(model, name, 0.0) for name in FORMATS]
    for share, threshold in zip(SHARES, thresholds, strict=True):
        jobs.append((sparsified(model, threshold), "sparse", share))
    for pruned, name, share in jobs:
        copy = deepcopy(pruned)
        num_bytes = 0
        for table in entity_tables(copy).values():
            stored, bytes_of_table = FORMATS.get(name, sparse)(table)
            table.copy_(stored)
            num_bytes += bytes_of_table
        metrics = kg.evaluate(copy, graph).metrics.as_dict()
        yield {"storage": name, "share": share, "bytes": num_bytes, "metrics": metrics}
