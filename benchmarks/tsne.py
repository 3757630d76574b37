"""t-SNE of 40,000 points by `dualkg.analysis.projection.tsne`: `python benchmarks/tsne.py`.

Prints seconds, CPU seconds and the quality of the positions as JSON. Points are 100 Gaussian
clusters in 50 dimensions, the width that entity embeddings are reduced to before t-SNE. Quality is
the share of the 10 nearest neighbours of a point that are among its 10 nearest in the plane, over
2,000 points. results/tsne.json compares openTSNE with the implementation that dualkg had before
version 0.2.
"""

import argparse
import json
import time

import numpy as np
import torch


def clustered_points(
    num_points: int, *, width: int = 50, clusters: int = 100, seed: int = 0
) -> np.ndarray:
    random = np.random.default_rng(seed)
    centres = 2 * random.standard_normal((clusters, width))
    scales = np.geomspace(1, 0.1, width)
    return (
        centres[random.integers(clusters, size=num_points)]
        + random.standard_normal((num_points, width))
    ) * scales


def neighbour_recall(
    points: np.ndarray, positions: np.ndarray, *, k: int = 10, sample: int = 2000
) -> float:
    chosen = np.random.default_rng(1).choice(len(points), min(sample, len(points)), replace=False)
    near = []
    for table in (torch.from_numpy(points).float(), torch.from_numpy(positions).float()):
        distances = torch.cdist(table[chosen], table)
        distances[torch.arange(len(chosen)), torch.from_numpy(chosen)] = torch.inf
        near.append(distances.topk(k, largest=False).indices.numpy())
    return float(
        np.mean([len(np.intersect1d(one, other)) / k for one, other in zip(*near, strict=True)])
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--points", type=int, default=40_000)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--quick", action="store_true", help="500 points, to see that it runs")
    options = parser.parse_args()
    from dualkg.analysis.projection import tsne

    torch.set_num_threads(options.threads)
    points = clustered_points(500 if options.quick else options.points)
    wall = time.perf_counter()
    cpu = time.process_time()
    positions = tsne(points)
    wall = time.perf_counter() - wall
    cpu = time.process_time() - cpu
    recall = neighbour_recall(points, positions)
    facts = {
        "points": len(points),
        "threads": options.threads,
        "seconds": round(wall, 1),
        "cpu_seconds": round(cpu, 1),
    }
    print(json.dumps({**facts, "neighbour_recall": round(recall, 4)}))


if __name__ == "__main__":
    main()
