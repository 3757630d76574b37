"""t-SNE of 40,000 points: openTSNE against the implementation that dualkg had until 0.2, `dualkg.analysis.tsne`.

python benchmarks/tsne.py openTSNE        # seconds, CPU seconds and the quality of the map, as JSON

Points are 100 Gaussian clusters in 50 dimensions, the width that entity embeddings are reduced to before t-SNE. Quality
is the share of the 10 nearest neighbours of a point that are among its 10 nearest in the plane (2,000 points).
"""

from __future__ import annotations

import argparse
import json
import time

import numpy as np
import torch


def clustered_points(num_points: int, *, width: int = 50, clusters: int = 100, seed: int = 0) -> np.ndarray:
    random = np.random.default_rng(seed)
    centres = 2 * random.standard_normal((clusters, width))
    scales = np.geomspace(1, 0.1, width)
    return (centres[random.integers(clusters, size=num_points)] + random.standard_normal((num_points, width))) * scales


def neighbour_recall(points: np.ndarray, positions: np.ndarray, *, k: int = 10, sample: int = 2000) -> float:
    chosen = np.random.default_rng(1).choice(len(points), min(sample, len(points)), replace=False)
    near = []
    for table in (torch.from_numpy(points).float(), torch.from_numpy(positions).float()):
        distances = torch.cdist(table[chosen], table)
        distances[torch.arange(len(chosen)), torch.from_numpy(chosen)] = torch.inf
        near.append(distances.topk(k, largest=False).indices.numpy())
    return float(np.mean([len(np.intersect1d(one, other)) / k for one, other in zip(*near, strict=True)]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("implementation", choices=["openTSNE", "dualkg"])
    parser.add_argument("--points", type=int, default=40_000)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    points = clustered_points(options.points)
    wall, cpu = time.perf_counter(), time.process_time()
    if options.implementation == "dualkg":
        from dualkg.analysis.tsne import place

        positions = place(points)
    else:
        from openTSNE import TSNE

        positions = np.asarray(TSNE(n_jobs=options.threads, random_state=0).fit(points))
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    print(
        json.dumps(
            {
                "implementation": options.implementation,
                "points": options.points,
                "threads": options.threads,
                "seconds": round(wall, 1),
                "cpu_seconds": round(cpu, 1),
                "neighbour_recall": round(neighbour_recall(points, positions), 4),
            }
        )
    )


if __name__ == "__main__":
    main()
