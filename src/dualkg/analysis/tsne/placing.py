"""Points in, places out."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from dualkg.analysis.projection import Vectors, usual_perplexity
from dualkg.analysis.tsne.affinities import affinities_of
from dualkg.analysis.tsne.descent import descend
from dualkg.errors import RequestError

SPREAD = 1e-4  # of the places at first, along the axis where they are spread most
UNREST = 1e-6  # at random, so that copies of a point part, and points on a line leave it


def place(
    vectors: Vectors, *, perplexity: float | None = None, seed: int = 0, device: torch.device | str = "cpu"
) -> Vectors:
    """Vectors `(n, width)` → places in the plane, `(n, 2)`, whose neighbours are the same as far as can be.

    It begins at the two principal components. The same vectors and seed give the same places, on the same device with
    as many threads.
    """
    check_numbers(vectors)
    if perplexity is not None and not 0 < perplexity < max(len(vectors), 2):
        raise RequestError(
            f"A perplexity is above 0 and below the number of points, {len(vectors):,}; {perplexity:g} came."
        )
    if len(vectors) < 2:
        return np.zeros((len(vectors), 2))
    perplexity = usual_perplexity(len(vectors)) if perplexity is None else perplexity
    points = torch.from_numpy(np.asarray(vectors, dtype=np.float64)).to(device)
    points = points / max(float(points.abs().max()), 1e-300)  # squares of any numbers then fit into float32
    points = points - points.mean(0)
    places = beginning(points, seed=seed)
    if len(points) > 2:  # of two, each is the other's neighbour wherever they are
        places = descend(affinities_of(points.float(), perplexity=perplexity), places)
    return places.T.double().cpu().numpy()


def beginning(points: Tensor, *, seed: int) -> Tensor:
    """Two principal components of centred points, small and a little shaken: `(2, n)` in float32."""
    _, directions = torch.linalg.eigh(points.T @ points)
    axes = directions[:, -2:].flip(1)
    largest = axes.gather(0, axes.abs().argmax(0, keepdim=True))
    components = points @ (axes * torch.where(largest < 0, -1.0, 1.0))  # of an axis and its opposite, always the same
    spread = float(components[:, 0].square().mean().sqrt())
    generator = torch.Generator().manual_seed(seed)
    places = UNREST * torch.randn(2, len(points), generator=generator, dtype=torch.float64)
    places = places.to(points.device)
    places[: components.shape[1]] += SPREAD / max(spread, 1e-12) * components.T
    return places.float()


def check_numbers(vectors: Vectors) -> None:
    """Refuse what is no table of finite numbers."""
    if vectors.ndim != 2 or vectors.shape[1] < 1:
        raise RequestError(f"t-SNE places vectors, (n, width), one a row; an array {vectors.shape} came.")
    finite = np.isfinite(vectors).all(1)
    if not finite.all():
        raise RequestError(
            f"t-SNE needs numbers, and {int((~finite).sum()):,} of {len(vectors):,} vectors have NaN or infinity; the "
            f"first is number {int((~finite).argmax()):,}."
        )
