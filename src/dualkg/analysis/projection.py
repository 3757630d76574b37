"""t-SNE of embeddings: of some vectors, and of all entities of a run (the map of the service)."""

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from dualkg.data.parquet_files import read_parquet
from dualkg.errors import DamagedFile, InvalidValue, RequestError
from dualkg.extras import optional_import
from dualkg.files import atomic_write
from dualkg.logs import logger
from dualkg.models.base import Model
from dualkg.training.errors import OtherSource
from dualkg.training.run import Run
from dualkg.training.run_folder import RunFolder, check_source

Vectors = npt.NDArray[np.float64]
# A map reduces its vectors to this number of principal components first, as van der Maaten and
# Hinton (2008) do: neighbours are found much faster.
MAX_COMPONENTS = 50
NUM_SAMPLED = 5000  # vectors from which the axes of the first positions are computed
NEIGHBOUR_SHARE = 0.2  # of the time of a map, in which openTSNE finds neighbours
ITERATIONS = (250, 500)  # with early exaggeration, and after it: the defaults of openTSNE
REPORT_EVERY = 5  # iterations
# Called with the share of a map that is done; what it raises ends the computation.
OnProgress = Callable[[float], None]
# Called with the positions so far, at first along two principal components.
OnPositions = Callable[[Vectors], None]


def default_perplexity(num_points: int) -> float:
    """30, or a third of the other points if there are few."""
    return min(30.0, (num_points - 1) / 3)


def tail_embeddings(model: Model, entities: npt.ArrayLike) -> Vectors:
    """Rows of the table that tails are looked up in, `(num_entities, width)`.

    CP has a table for tails alone.
    """
    table = model.embedding.tail_table.detach()
    ids = torch.as_tensor(np.asarray(entities, dtype=np.int64), device=table.device)
    return table[ids].double().cpu().numpy()


def _ignore(report: float | Vectors) -> None:
    """Report nothing."""


def tsne(
    vectors: Vectors,
    *,
    perplexity: float | None = None,
    seed: int = 0,
    on_progress: OnProgress = _ignore,
    on_positions: OnPositions = _ignore,
) -> Vectors:
    """Vectors `(num_points, width)` → positions in the plane `(num_points, 2)`.

    The same for the same seed and number of threads. It starts from the first two principal
    components, so that the large-scale structure is kept.
    """
    check_vectors(vectors)
    num_points = len(vectors)
    if perplexity is not None and not 0 < perplexity < max(num_points, 2):
        raise InvalidValue(
            "perplexity",
            expected=f"above 0 and below the number of points, {num_points:,}",
            found=perplexity,
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
    if perplexity is None:
        perplexity = default_perplexity(num_points)
    else:
        perplexity = min(perplexity, (num_points - 1) / 3)
    on_progress(0.0)
    threads = torch.get_num_threads()
    affinities = PerplexityBasedNN(scaled, perplexity=perplexity, n_jobs=threads, random_state=seed)
    method = TSNE(
        initialization=start,
        random_state=seed,
        n_jobs=threads,
        early_exaggeration_iter=ITERATIONS[0],
        n_iter=ITERATIONS[1],
        callbacks=_iteration_counter(on_progress, on_positions),
        callbacks_every_iters=REPORT_EVERY,
    )
    return np.asarray(method.fit(affinities=affinities), dtype=np.float64)


def _iteration_counter(on_progress: OnProgress, on_positions: OnPositions) -> Callable[..., None]:
    """A callback of openTSNE, which counts the iterations of each of its two parts from 1."""
    num_before = 0
    last = 0

    def count(iteration: int, error: float, embedding: Any) -> None:
        nonlocal num_before, last
        if iteration <= last:
            num_before = ITERATIONS[0]
        last = iteration
        share = (num_before + iteration) / sum(ITERATIONS)
        on_progress(NEIGHBOUR_SHARE + (1 - NEIGHBOUR_SHARE) * min(share, 1.0))
        on_positions(np.array(embedding, dtype=np.float64))

    return count


def _initial_positions(vectors: Vectors, *, seed: int) -> Vectors:
    """The first two principal components with standard deviation 1e-4, and a little noise.

    The noise separates equal vectors.
    """
    components = principal_components(vectors, 2)
    scale = 1e-4 / max(float(components[:, 0].std()), 1e-12)
    positions = 1e-7 * np.random.default_rng(seed).standard_normal((len(vectors), 2))
    positions[:, : components.shape[1]] += scale * components
    return positions


def principal_components(
    vectors: Vectors, count: int, *, num_sampled: int | None = None
) -> Vectors:
    """Vectors `(n, width)` along their first principal axes, `(n, min(count, width))`.

    If `num_sampled` is given, the axes are computed from about that number of vectors. The sign of
    an axis is arbitrary, so it is chosen such that its largest entry is positive.
    """
    centred = vectors - vectors.mean(0)
    every = 1 if num_sampled is None else -(-len(vectors) // num_sampled)
    sample = centred[::every]
    _, axes = np.linalg.eigh(sample.T @ sample)
    axes = axes[:, ::-1][:, :count]
    largest = np.take_along_axis(axes, np.abs(axes).argmax(0)[None], axis=0)
    signs = np.where(largest < 0, -1.0, 1.0)
    components: Vectors = centred @ (axes * signs)
    return components


def check_vectors(vectors: Vectors) -> None:
    """Refuse anything but a matrix of finite numbers."""
    if vectors.ndim != 2 or vectors.shape[1] < 1:
        raise InvalidValue(
            "vectors",
            expected="a matrix (n, width) with one vector a row",
            found=f"an array of shape {vectors.shape}",
        )
    invalid = ~np.isfinite(vectors).all(1)
    if invalid.any():
        raise RequestError(
            f"t-SNE needs finite numbers, and {invalid.sum():,} of {len(vectors):,} vectors have "
            f"NaN or infinity; the first is number {invalid.argmax():,}."
        )


# -- the map of a run ----------------------------------------------------------


def entity_map(
    run: Run, *, on_progress: OnProgress = _ignore, on_positions: OnPositions = _ignore
) -> Vectors:
    """Positions of all entities between −1 and 1, `(num_entities, 2)`.

    They are computed once and saved with the run; `on_positions` is called while they are computed.
    A map of another run is computed again.
    """
    path = RunFolder(run.folder).map if run.folder else None
    if path and path.exists():
        try:
            return load_map(path, len(run.graph.entities), identity=run.identity)
        except OtherSource as error:
            logger.warning("%s It is computed again.", error)
    positions = compute_map(run.model, on_progress=on_progress, on_positions=on_positions)
    if path and run.is_current:
        with suppress(OSError):  # a disk that cannot be written: it is computed again next time
            save_map(positions, path, made_from=run.identity)
    return positions


def compute_map(
    model: Model,
    *,
    seed: int = 0,
    on_progress: OnProgress = _ignore,
    on_positions: OnPositions = _ignore,
) -> Vectors:
    """t-SNE of the tail embeddings of all entities, scaled to the square from −1 to 1."""
    vectors = tail_embeddings(model, np.arange(model.shape.num_entities))
    check_vectors(vectors)
    on_positions(_spread(vectors))
    if vectors.shape[1] > MAX_COMPONENTS:
        vectors = principal_components(vectors, MAX_COMPONENTS)
    positions = tsne(
        vectors,
        seed=seed,
        on_progress=on_progress,
        on_positions=lambda positions: on_positions(_scaled(positions)),
    )
    return _scaled(positions)


def _scaled(positions: Vectors) -> Vectors:
    """Positions in the square from −1 to 1."""
    centre = (positions.max(0) + positions.min(0)) / 2
    centred = positions - centre
    radius = max(float(np.abs(centred).max()), 1e-12)
    scaled: Vectors = np.round(centred / radius, 5)
    return scaled


def first_positions(model: Model) -> Vectors:
    """The positions of all entities with which a map begins, in a second."""
    vectors = tail_embeddings(model, np.arange(model.shape.num_entities))
    check_vectors(vectors)
    return _spread(vectors)


def _spread(vectors: Vectors) -> Vectors:
    """The first two principal components of vectors as positions in the square.

    Most entities are close to the middle; roots of the distances from it draw them apart.
    """
    components = principal_components(vectors, 2, num_sampled=NUM_SAMPLED)
    positions = np.zeros((len(components), 2))
    positions[:, : components.shape[1]] = components - np.median(components, axis=0)
    distances = np.linalg.norm(positions, axis=1, keepdims=True)
    return _scaled(positions / np.sqrt(np.maximum(distances, 1e-12)))


def save_map(positions: Vectors, path: Path, *, made_from: str | None = None) -> None:
    """Write positions, and the identity of their run."""
    coordinates = positions.astype(np.float32)
    table = pa.table({"x": pa.array(coordinates[:, 0]), "y": pa.array(coordinates[:, 1])})
    table = table.replace_schema_metadata({"made_from": made_from or ""})
    with atomic_write(path) as fresh:
        pq.write_table(table, fresh, compression="zstd")


def load_map(path: Path, num_entities: int, *, identity: str | None = None) -> Vectors:
    """Read positions that `save_map` wrote; refuse positions of another run."""
    try:
        table = read_parquet(path)
        coordinates = np.stack([table["x"].to_numpy(), table["y"].to_numpy()], axis=1)
        positions = coordinates.astype(np.float64)
    except (OSError, ValueError, KeyError, pa.ArrowException) as error:
        raise _damaged_map(path, str(error)) from None
    made_from = (table.schema.metadata or {}).get(b"made_from", b"")
    check_source(path, made_from.decode(errors="replace") or None, identity)
    if len(positions) != num_entities:
        raise _damaged_map(
            path, f"it has {len(positions):,} positions and the graph {num_entities:,} entities"
        )
    return positions


def _damaged_map(path: Path, reason: str) -> DamagedFile:
    return DamagedFile(path, reason, advice="Remove it, and the map is computed again.")
