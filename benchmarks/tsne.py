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
    chosen = centres[random.integers(clusters, size=num_points)]
    return (chosen + random.standard_normal((num_points, width))) * scales


def neighbour_recall(
    points: np.ndarray, positions: np.ndarray, *, k: int = 10, sample: int = 2000
) -> float:
    """The mean share of the nearest neighbours of a point that are also nearest in the plane."""
    chosen = np.random.default_rng(1).choice(len(points), min(sample, len(points)), replace=False)

    def neighbours(vectors: np.ndarray) -> np.ndarray:
        table = torch.from_numpy(vectors).float()
        distances = torch.cdist(table[chosen], table)
        # A point is not its own neighbour.
        distances[torch.arange(len(chosen)), torch.from_numpy(chosen)] = torch.inf
        return distances.topk(k, largest=False).indices.numpy()

    shares = []
    for in_space, in_plane in zip(neighbours(points), neighbours(positions), strict=True):
        shares.append(len(np.intersect1d(in_space, in_plane)) / k)
    return float(np.mean(shares))


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
    started = time.perf_counter()
    cpu_started = time.process_time()
    positions = tsne(points)
    seconds = time.perf_counter() - started
    cpu_seconds = time.process_time() - cpu_started
    figures = {
        "points": len(points),
        "threads": options.threads,
        "seconds": round(seconds, 1),
        "cpu_seconds": round(cpu_seconds, 1),
        "neighbour_recall": round(neighbour_recall(points, positions), 4),
    }
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
