"""Entity embeddings in the plane by t-SNE: of some vectors, and of all entities of a run (the map
of the service).
"""

from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from dualkg.data.archives import read_parquet
from dualkg.errors import RequestError
from dualkg.extras import optional_import
from dualkg.files import atomic_write
from dualkg.models.base import Model
from dualkg.training.run import Run, RunFolder

Vectors = npt.NDArray[np.float64]
MAX_COMPONENTS = (
    50  # principal components that t-SNE works on; finding neighbours is then much faster
)


def default_perplexity(num_points: int) -> float:
    """30, or a third of the other points if there are few."""
    return min(30.0, (num_points - 1) / 3)


def tail_embeddings(model: Model, entities: npt.ArrayLike) -> Vectors:
    """Rows of the table that tails are looked up in, `(num_entities, width)`; CP has a table for
    tails alone.
    """
    table = model.embedding.tail_table.detach()
    rows = table[torch.as_tensor(np.asarray(entities, dtype=np.int64), device=table.device)]
    return rows.double().cpu().numpy()


def tsne(vectors: Vectors, *, perplexity: float | None = None, seed: int = 0) -> Vectors:
    """Vectors `(num_points, width)` → positions in the plane `(num_points, 2)`.

    The same for the same seed and number of threads. It starts from the first two principal
    components, so that the large-scale structure is kept.
    """
    check_vectors(vectors)
    num_points = len(vectors)
    if perplexity is not None and not 0 < perplexity < max(num_points, 2):
        raise RequestError(
            f"The perplexity must be above 0 and below the number of points, {num_points:,}; it "
            f"is {perplexity:g}."
        )
    if num_points < 2:
        return np.zeros((num_points, 2))
    scaled = vectors / max(float(np.abs(vectors).max()), 1e-300)
    start = _initial_positions(scaled, seed=seed)
    if num_points == 2:
        return start
    with optional_import("openTSNE", purpose="t-SNE"):
        from openTSNE import TSNE
        from openTSNE.affinity import PerplexityBasedNN
        from openTSNE.nearest_neighbors import PrecomputedNeighbors
    perplexity = (
        default_perplexity(num_points)
        if perplexity is None
        else min(perplexity, (num_points - 1) / 3)
    )
    threads = torch.get_num_threads()
    neighbours = PrecomputedNeighbors(
        *_nearest_neighbours(scaled, min(num_points - 1, int(3 * perplexity)))
    )
    affinities = PerplexityBasedNN(perplexity=perplexity, knn_index=neighbours, n_jobs=threads)
    method = TSNE(initialization=start, random_state=seed, n_jobs=threads)
    return np.asarray(method.fit(affinities=affinities), dtype=np.float64)


def _nearest_neighbours(
    vectors: Vectors, count: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]:
    """Indices and distances `(n, count)` of the nearest other vectors: exact and faster than
    openTSNE's Annoy.
    """
    points = torch.from_numpy(vectors).float()
    parts = []
    for start in range(0, len(points), 512):
        distances = torch.cdist(points[start : start + 512], points)
        distances.diagonal(start).fill_(torch.inf)  # of a point to itself
        parts.append(distances.topk(count, largest=False))
    return torch.cat([part.indices for part in parts]).numpy(), torch.cat(
        [part.values for part in parts]
    ).numpy()


def _initial_positions(vectors: Vectors, *, seed: int) -> Vectors:
    """The first two principal components with standard deviation 1e-4, and noise that separates
    equal vectors.
    """
    components = principal_components(vectors, 2)
    positions = 1e-7 * np.random.default_rng(seed).standard_normal((len(vectors), 2))
    positions[:, : components.shape[1]] += (
        1e-4 / max(float(components[:, 0].std()), 1e-12) * components
    )
    return positions


def principal_components(vectors: Vectors, count: int) -> Vectors:
    """Vectors `(n, width)` along their first principal axes `(n, min(count, width))`, with signs
    that do not vary.
    """
    centred = vectors - vectors.mean(0)
    _, axes = np.linalg.eigh(centred.T @ centred)
    axes = axes[:, ::-1][:, :count]
    largest = np.take_along_axis(axes, np.abs(axes).argmax(0)[None], axis=0)
    projected: Vectors = centred @ (axes * np.where(largest < 0, -1.0, 1.0))
    return projected


def check_vectors(vectors: Vectors) -> None:
    """Refuse anything but a matrix of finite numbers."""
    if vectors.ndim != 2 or vectors.shape[1] < 1:
        raise RequestError(
            f"t-SNE expects vectors (n, width), one per row; the shape is {vectors.shape}."
        )
    finite = np.isfinite(vectors).all(1)
    if not finite.all():
        raise RequestError(
            f"t-SNE needs finite numbers, and {int((~finite).sum()):,} of {len(vectors):,} "
            f"vectors have NaN or infinity; the first is number {int((~finite).argmax()):,}."
        )


def entity_map(run: Run) -> Vectors:
    """Positions of all entities `(num_entities, 2)` between −1 and 1: computed once and saved with
    the run.
    """
    path = RunFolder(run.folder).map if run.folder else None
    if path and path.exists():
        return load_map(path, len(run.graph.entities))
    positions = compute_map(run.model)
    if path and run.is_current:
        save_map(positions, path)
    return positions


def compute_map(model: Model, *, seed: int = 0) -> Vectors:
    """t-SNE of the tail embeddings of all entities, scaled to the square from −1 to 1."""
    vectors = tail_embeddings(model, np.arange(model.shape.num_entities))
    check_vectors(vectors)
    if vectors.shape[1] > MAX_COMPONENTS:
        vectors = principal_components(vectors, MAX_COMPONENTS)
    positions = tsne(vectors, seed=seed)
    positions = positions - (positions.max(0) + positions.min(0)) / 2
    scaled: Vectors = np.round(positions / max(float(np.abs(positions).max()), 1e-12), 5)
    return scaled


def save_map(positions: Vectors, path: Path) -> None:
    columns = {
        name: pa.array(positions[:, axis].astype(np.float32))
        for axis, name in enumerate(("x", "y"))
    }
    with atomic_write(path) as fresh:
        pq.write_table(pa.table(columns), fresh, compression="zstd")


def load_map(path: Path, num_entities: int) -> Vectors:
    """Read positions that `save_map` wrote."""
    try:
        table = read_parquet(path)
        positions = np.stack([table[name].to_numpy() for name in ("x", "y")], axis=1).astype(
            np.float64
        )
        if len(positions) != num_entities:
            raise ValueError(
                f"it has {len(positions):,} positions and the graph {num_entities:,} entities"
            )
        return positions
    except (OSError, ValueError, KeyError, pa.ArrowException) as error:
        raise RequestError(
            f"{path} is damaged: {error}. Remove it, and the map is computed again."
        ) from None
