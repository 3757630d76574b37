"""All entities of a run in the plane, laid out once by t-SNE and kept with the run."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from dualkg.analysis.projection import Vectors, tail_embeddings
from dualkg.analysis.tsne import check_numbers, place
from dualkg.errors import RequestError
from dualkg.files import replacing
from dualkg.models.base import Model
from dualkg.training import Run, RunFolder

MOST_AXES = 50  # principal components that t-SNE is given; neighbours are then found in a fraction of the time


def entity_map(run: Run) -> Vectors:
    """Places `(num_entities, 2)`, each axis from −1 to 1: those kept with the run, or new ones, which are then kept."""
    kept = RunFolder(run.folder).map if run.folder else None
    if kept and kept.exists():
        return load_map(kept, len(run.graph.entities))
    places = lay_out(run.model)
    if kept:
        save_map(places, kept)
    return places


def lay_out(model: Model, *, seed: int = 0) -> Vectors:
    """t-SNE of the vectors that entities have as tails; the same for the same seed."""
    vectors = tail_embeddings(model, np.arange(model.shape.num_entities))
    check_numbers(vectors)
    device = model.embedding.tail_table.device
    places = place(principal(vectors, axes=MOST_AXES), seed=seed, device=device)
    places = places - (places.max(0) + places.min(0)) / 2
    scaled: Vectors = np.round(places / max(float(np.abs(places).max()), 1e-12), 5)
    return scaled


def principal(vectors: Vectors, *, axes: int) -> Vectors:
    """Vectors `(n, width)` along their first principal axes, `(n, axes)`; few enough are left as they are."""
    if vectors.shape[1] <= axes:
        return vectors
    centred = torch.from_numpy(vectors - vectors.mean(0))
    _, directions = torch.linalg.eigh(centred.T @ centred)
    found: Vectors = (centred @ directions[:, -axes:].flip(1)).numpy()
    return found


def save_map(places: Vectors, path: Path) -> None:
    with replacing(path) as fresh:
        columns = {name: pa.array(places[:, axis].astype(np.float32)) for axis, name in enumerate(("x", "y"))}
        pq.write_table(pa.table(columns), fresh, compression="zstd")


def load_map(path: Path, num_entities: int) -> Vectors:
    """Places that `save_map` wrote; what cannot be such is told in a sentence."""
    try:
        table = pq.ParquetFile(path).read()
        places = np.stack([table[name].to_numpy() for name in ("x", "y")], axis=1).astype(np.float64)
    except (OSError, KeyError, pa.ArrowException) as error:
        raise RequestError(f"{path} is damaged ({error}). Remove it, and the map is made anew.") from None
    if len(places) != num_entities:
        raise RequestError(
            f"{path} has {len(places):,} places and the graph {num_entities:,} entities. Remove it, and the map is "
            f"made anew."
        )
    return places
