"""Compile the numba kernels of training and ranking into their cache, before `make unit` tests."""

import dualkg as kg
from dualkg.losses.base import Loss
from tests.golden import adapter, record
from tests.golden.cases import network_cases

LOSSES: tuple[Loss, ...] = (
    kg.OneVsAll(relation_weight=0.5),
    kg.SampledSoftmax(num_negatives=10),
)


def main() -> None:
    rows = [(f"e{number % 7}", f"r{number % 2}", f"e{number % 5}") for number in range(40)]
    graph = kg.Graph.from_triples(rows, valid=rows[:2], test=rows[2:4], name="compiled")
    for loss in LOSSES:
        for model in (kg.ComplEx(graph, dim=4), kg.CP(graph, dim=4)):
            kg.train(model, graph, loss=loss, epochs=1, device="cpu")
    kg.train(kg.PathNetwork(graph, dim=16, steps=2), graph, epochs=1, device="cpu")
    # Kernels of path networks are compiled for each dim and precision: these are what tests use.
    record.network_record(
        next(iter(network_cases().values())), adapter.small_graph(), compiled=True
    )


if __name__ == "__main__":
    main()
