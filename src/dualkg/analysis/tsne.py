"""How near points are to each other, as probabilities: each point has the same number of neighbours, in effect."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dualkg.errors import RequestError
from dualkg.kernels.cpu.compile import HAS_NUMBA, compiled, in_parallel

# Between nodes, where what is summed has the width 1.
FINE = 0.375  # sums err by about a hundredth where places are sparse, and by less where they are dense
COARSE = 0.5  # by a few hundredths, in half the time
FEWEST, MOST = 32, 2048  # nodes along a side that places lie between
ROUND = 16  # sides are a multiple of this many nodes, so that a grid fits for many steps
MARGIN = 4  # nodes around, which splines reach
APART = 16  # nodes around a grid and its periodic copies, where corrections for splines die away

Vectors = npt.NDArray[np.float64]


def usual_perplexity(num_points: int) -> float:
    """How many neighbours t-SNE tries to keep a point near: 30, or of few points a third."""
    return min(30.0, (num_points - 1) / 3)


def fitting(places: Tensor, *, cell: float = FINE) -> tuple[float, int]:
    """Spacing, about `cell`, and nodes along a side of a grid for places `(2, n)`.

    The same for many places of about that extent. Where there would be too few nodes, they are closer by powers of
    two; where too many, farther.
    """
    extent = max(float((places.amax(1) - places.amin(1)).max()), 1e-20)
    halvings = max(0, math.ceil(math.log2(cell * FEWEST / extent)))
    doublings = max(0, math.ceil(math.log2(extent / cell / MOST)))
    cell *= 2.0 ** (doublings - halvings)
    return cell, ROUND * math.ceil((extent / cell + MARGIN) / ROUND)


class Grid:
    """Square, with `side` nodes a side that are `cell` apart."""

    def __init__(self, cell: float, side: int, *, device: torch.device | str = "cpu") -> None:
        self.key = (cell, side)
        self.cell = cell
        self.side = side
        self._period = _quick_length(2 * side + APART)
        self._transforms = _transforms(cell, self._period, torch.device(device))

    def sums(self, places: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Σ_j of 1 / (1 + ‖d‖²) and of both axes of d / (1 + ‖d‖²)², d = y_i − y_j, for each of the places `(2, n)`."""
        nodes, shares = self._around(places)
        charges = _added_up(nodes.flatten(), shares.flatten(), self.side**2)
        fields = self._convolved(charges.view(self.side, self.side)).flatten(1)
        near, across, up = (
            field.index_select(0, nodes.flatten()).view_as(shares).mul_(shares).sum(0) for field in fields
        )
        return near, across, up

    def _around(self, places: Tensor) -> tuple[Tensor, Tensor]:
        """The 16 nodes around each place, `(16, n)`, and its share in each."""
        middle = (places.amax(1, keepdim=True) + places.amin(1, keepdim=True)) / 2
        at = (places - middle) / self.cell + (self.side - 1) / 2
        second = at.floor()
        corner = (second[0].long() - 1) * self.side + second[1].long() - 1
        offsets = torch.arange(4, device=places.device)
        offsets = (offsets[:, None] * self.side + offsets).flatten()
        shares = _spline(at - second)
        return corner + offsets[:, None], (shares[:, None, 0] * shares[None, :, 1]).flatten(0, 1)

    def _convolved(self, charges: Tensor) -> Tensor:
        """Charges `(side, side)` → three fields `(3, side, side)`. Rows of zeros are not transformed."""
        rows = torch.fft.rfft(charges, n=self._period, dim=1)
        transform = torch.fft.fft(rows.T.contiguous(), n=self._period, dim=1)
        columns = torch.fft.ifft(transform * self._transforms, dim=2)[:, :, : self.side]
        fields: Tensor = torch.fft.irfft(columns.mT.contiguous(), n=self._period, dim=2)
        return fields[:, :, : self.side].contiguous()


def _transforms(cell: float, period: int, device: torch.device) -> Tensor:
    """Of the three functions, `(3, period // 2 + 1, period)`, the axes changed over as `Grid` has them.

    Corrected for splines twice: for where charges come from, and for where fields are read.
    """
    steps = torch.fft.fftfreq(period, d=1 / period, dtype=torch.float64, device=device)
    across, up = steps[:, None] * cell, steps * cell
    near = (1 + across.square() + up.square()).reciprocal()
    functions = torch.stack([near, across * near.square(), up * near.square()])
    spline = (2 + torch.cos(2 * math.pi * steps / period)) / 3  # of a cubic B-spline at the nodes: 1/6, 4/6, 1/6
    corrections = (spline[:, None] * spline).square()
    transforms: Tensor = torch.fft.fft2(functions) / corrections
    return transforms[:, :, : period // 2 + 1].mT.to(torch.complex64).contiguous()


def _spline(beyond: Tensor) -> Tensor:
    """Values of the cubic B-splines of four nodes, `(4, …)`, at places this far, from 0 to 1, beyond the second."""
    t, s = beyond, 1 - beyond
    inner = (4 - 3 * t.square() * (1 + s)) / 6
    outer = (4 - 3 * s.square() * (1 + t)) / 6
    return torch.stack([s**3 / 6, inner, outer, t**3 / 6])


def _added_up(places: Tensor, values: Tensor, num: int) -> Tensor:
    """Sums of the values that go to each of some places, always in the same order."""
    sums = values.new_zeros(num)
    if values.is_cuda:
        return sums.index_put_((places,), values, accumulate=True)  # sorts, where scatter_add_ takes any order
    return sums.scatter_add_(0, places, values)


def _quick_length(least: int) -> int:
    """An even number, from `least`, of which a Fourier transform is quick: without a prime factor above 5."""
    length = least + least % 2
    while _without_small_factors(length) > 1:
        length += 2
    return length


def _without_small_factors(number: int) -> int:
    for factor in (2, 3, 5):
        while number % factor == 0:
            number //= factor
    return number


NUMBERS = 2**25  # distances, or coordinates of neighbours, that are held at once
GROUP = 16  # distances that are first looked at by their least


class Neighbours(NamedTuple):
    """Ids `(n, k)`, and the squares of their Euclidean distances."""

    ids: Tensor
    squares: Tensor


def nearest(points: Tensor, k: int) -> Neighbours:
    """The k nearest others of each of the points `(n, width)`, in no order; k is below n.

    They are chosen by ‖y‖² − 2⟨x, y⟩, one matrix product, and their distances are then taken from the differences, so
    that a point and its copy are at distance 0.
    """
    num, width = points.shape
    num_groups = math.ceil(num / GROUP)
    table = points.new_zeros(num_groups * GROUP, width + 1)
    table[:num, :-1] = points
    table[:, -1] = math.inf  # of rows that only fill up the last groups: never near
    table[:num, -1] = points.square().sum(1)
    found = [_of_block(points, table, ids, k) for ids in _blocks(points, k)]
    return Neighbours(torch.cat([ids for ids, _ in found]), torch.cat([squares for _, squares in found]))


def _of_block(points: Tensor, table: Tensor, own: Tensor, k: int) -> Neighbours:
    """Of the points `own`; a row of the table is y and ‖y‖², and is multiplied by −2x and 1."""
    block = points[own]
    distances = torch.cat([-2 * block, block.new_ones(len(own), 1)], 1) @ table.T
    distances[torch.arange(len(own), device=own.device), own] = math.inf
    ids = _least(distances, k)
    others = points.index_select(0, ids.flatten()).view(*ids.shape, -1)
    return Neighbours(ids, others.sub_(block[:, None]).square_().sum(2))


def _least(values: Tensor, k: int) -> Tensor:
    """Columns of the k least of each row, `(rows, k)`.

    Each is in one of the k groups whose least value is least: were it not, k others would be as small. A group is
    every so manieth column, for then the least of all groups are found by passing along the rows.
    """
    num_groups = values.shape[1] // GROUP
    if num_groups <= k:
        return values.topk(k, 1, largest=False, sorted=False).indices
    groups = values.view(-1, GROUP, num_groups).amin(1).topk(k, 1, largest=False, sorted=False).indices
    columns = (groups[:, None] + num_groups * torch.arange(GROUP, device=values.device)[:, None]).flatten(1)
    return columns.gather(1, values.gather(1, columns).topk(k, 1, largest=False, sorted=False).indices)


def _blocks(points: Tensor, k: int) -> Iterator[Tensor]:
    num, width = points.shape
    size = max(1, NUMBERS // max(num, k * width))
    for first in range(0, num, size):
        yield torch.arange(first, min(first + size, num), device=points.device)


REACH = 3  # neighbours looked at, by perplexity; a Gaussian has next to nothing beyond
SHARPEST = 25.0  # of the logarithms that precisions are looked for between, where a mean distance is 1
HALVINGS = 34


@dataclass(frozen=True, eq=False)
class Affinities:
    """p of pairs of points, both ways, by the first: those of point i are `starts[i]` to `starts[i + 1]`.

    They add up to 1, and p of (i, j) is that of (j, i). Pairs that are not here have p = 0.
    """

    starts: Tensor
    rows: Tensor
    columns: Tensor
    weights: Tensor

    @property
    def num_points(self) -> int:
        return len(self.starts) - 1


def affinities_of(points: Tensor, *, perplexity: float) -> Affinities:
    """Of points `(n, width)`, two or more; at most n − 1 neighbours can be had."""
    found = nearest(points, min(len(points) - 1, math.ceil(REACH * max(perplexity, 1.0))))
    return symmetric(found, calibrated(found.squares, perplexity=perplexity))


def calibrated(squares: Tensor, *, perplexity: float) -> Tensor:
    """p of each neighbour given the point, `(n, k)`: Gaussian, as wide as makes exp(entropy) the perplexity.

    The width is found by bisection for all points at once. Where no width will do (more copies at one distance than
    the perplexity, or fewer neighbours), the nearest that can be had is taken.
    """
    target = math.log(min(max(perplexity, 1.0), squares.shape[1]))
    beyond = squares - squares.amin(1, keepdim=True)
    typical = beyond.mean(1, keepdim=True)
    beyond = beyond / torch.where(typical > 0, typical, 1.0)
    low = torch.full_like(typical, -SHARPEST)
    high = torch.full_like(typical, SHARPEST)
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        too_wide = _entropy(beyond, middle.exp()) > target
        low, high = torch.where(too_wide, middle, low), torch.where(too_wide, high, middle)
    return (-beyond * ((low + high) / 2).exp()).softmax(1)


def _entropy(beyond: Tensor, precision: Tensor) -> Tensor:
    weights = (-beyond * precision).exp_()
    total = weights.sum(1, keepdim=True)
    return total.log() + precision * (weights * beyond).sum(1, keepdim=True) / total


def symmetric(found: Neighbours, given: Tensor) -> Affinities:
    """The mean of p of a neighbour given the point and of the point given the neighbour, as parts of 1."""
    num, k = given.shape
    points = torch.arange(num, device=given.device)[:, None].expand(num, k).flatten()
    others = found.ids.flatten()
    keys, order = torch.cat([points * num + others, others * num + points]).sort()
    values = (given.flatten() / (2 * num)).repeat(2)[order]
    again = torch.zeros_like(keys, dtype=torch.bool)  # a pair comes twice where each is a neighbour of the other
    again[1:] = keys[1:] == keys[:-1]
    values[:-1] += torch.where(again[1:], values[1:], 0.0)
    keys, values = keys[~again], values[~again]
    rows = keys // num
    starts = torch.searchsorted(rows, torch.arange(num + 1, device=rows.device))
    return Affinities(starts, rows.int(), (keys % num).int(), values)


WORTH_NUMBA = 2**18  # pairs; for fewer it is not worth loading


def attraction(affinities: Affinities, places: Tensor) -> Tensor:
    """Σ_j p_ij (y_i − y_j) / (1 + ‖y_i − y_j‖²) for each of the places `(2, n)`; faster where numba is installed."""
    large = places.device.type == "cpu" and len(affinities.weights) >= WORTH_NUMBA
    kernel = _kernel() if large else None
    if kernel:
        return kernel(affinities.starts, affinities.columns, affinities.weights, places)
    return attraction_in_torch(affinities, places)


def attraction_in_torch(affinities: Affinities, places: Tensor) -> Tensor:
    """The same, by whole arrays of pairs."""
    across, up = differences(affinities, places)
    pulls = (across * across).addcmul_(up, up).add_(1).reciprocal_().mul_(affinities.weights)
    return torch.stack([_by_row(axis.mul_(pulls), affinities) for axis in (across, up)])


def differences(affinities: Affinities, places: Tensor) -> tuple[Tensor, Tensor]:
    """y_i − y_j of each pair, axis by axis."""
    across, up = (
        axis.index_select(0, affinities.rows).sub_(axis.index_select(0, affinities.columns)) for axis in places
    )
    return across, up


def _by_row(values: Tensor, affinities: Affinities) -> Tensor:
    """Sums over the pairs of each point, always in the same order."""
    sums: Tensor = torch.segment_reduce(values, "sum", offsets=affinities.starts, axis=0, unsafe=True)
    return sums


@cache
def _kernel() -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor] | None:
    from dualkg.kernels.cpu.compile import HAS_NUMBA

    return attraction_by_row if HAS_NUMBA else None


FEW = 600  # places for which all pairs take less time than a grid


class Repulsion(NamedTuple):
    """Σ_j d / (1 + ‖d‖²)², d = y_i − y_j, for each of the places, `(2, n)`, and Σ_ij 1 / (1 + ‖d‖²) with i ≠ j."""

    pushes: Tensor
    total: Tensor


class Repeller:
    """Finds the repulsion of places `(2, n)`: of few by all pairs, of many on a grid, which is kept while it fits."""

    def __init__(self, cell: float = FINE) -> None:
        self._cell = cell
        self._grid: Grid | None = None

    def __call__(self, places: Tensor) -> Repulsion:
        if places.shape[1] <= FEW:
            return exact_repulsion(places)
        asked = fitting(places, cell=self._cell)
        if self._grid is None or self._grid.key != asked:
            self._grid = Grid(*asked, device=places.device)
        return repulsion_on(self._grid, places)


def exact_repulsion(places: Tensor) -> Repulsion:
    """By all pairs: the definition, which the grid is tested against."""
    across, up = (axis[:, None] - axis for axis in places)
    near = (1 + across * across + up * up).reciprocal().fill_diagonal_(0)  # none pushes itself
    pushes = near.square()
    return Repulsion(
        torch.stack([(pushes * across).sum(1), (pushes * up).sum(1)]),
        near.sum(),
    )


def repulsion_on(grid: Grid, places: Tensor) -> Repulsion:
    """By three sums on the grid."""
    near, across, up = grid.sums(places)
    total = near.sum() - places.shape[1]  # less what each is to itself, which is 1 but for the grid's error
    return Repulsion(torch.stack([across, up]), total.clamp(min=1.0))


EXAGGERATION = 12.0  # of the attraction at first, so that what belongs together finds together


class Phase(NamedTuple):
    """Some steps alike; `cell` is the spacing of the grid for repulsion."""

    num_steps: int
    exaggeration: float
    momentum: float
    cell: float


PHASES = (
    Phase(250, exaggeration=EXAGGERATION, momentum=0.5, cell=COARSE),
    Phase(500, exaggeration=1.0, momentum=0.8, cell=COARSE),
    Phase(250, exaggeration=1.0, momentum=0.8, cell=FINE),
)


def descend(affinities: Affinities, places: Tensor) -> Tensor:
    """From places `(2, n)` to those of small divergence. The rate is n / exaggeration (Belkina et al., 2019)."""
    velocity, gains = torch.zeros_like(places), torch.ones_like(places)
    for phase in PHASES:
        repeller, rate = Repeller(phase.cell), affinities.num_points / phase.exaggeration
        for _ in range(phase.num_steps):
            pushes, total = repeller(places)
            slope = phase.exaggeration * attraction(affinities, places) - pushes / total
            # An axis that keeps its direction gets faster (Jacobs, 1988): velocity is against the slope then.
            gains = torch.where(slope * velocity < 0, gains + 0.2, gains * 0.8).clamp_(min=0.01)
            velocity = phase.momentum * velocity - rate * gains * slope
            places = places + velocity
            places = places - places.mean(1, keepdim=True)
    return places


def divergence(affinities: Affinities, places: Tensor) -> float:
    """Kullback and Leibler's: Σ p log(p / q), where q is 1 / (1 + ‖y_i − y_j‖²) as part of its sum over all pairs."""
    across, up = differences(affinities, places)
    _, total = Repeller()(places)
    weights = affinities.weights.double()
    logs = weights.clamp(min=1e-300).log() + (1 + across * across + up * up).double().log() + total.double().log()
    return float((weights * logs).sum())


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


__all__ = ["HAS_NUMBA", "attraction_by_row"]

ONE, ZERO = np.float32(1), np.float32(0)


def attraction_by_row(starts: Tensor, columns: Tensor, weights: Tensor, places: Tensor) -> Tensor:
    """Σ_j p_ij (y_i − y_j) / (1 + ‖y_i − y_j‖²) for places `(2, n)` in float32, p by compressed rows."""
    found = torch.empty_like(places, memory_format=torch.contiguous_format)
    arrays = (array.numpy() for array in (starts, columns, weights, places, found))
    in_parallel(_rows, places.shape[1], *arrays)
    return found


@compiled("contract", "reassoc")
def _rows(first: int, last: int, starts: Any, columns: Any, weights: Any, places: Any, found: Any) -> None:
    x, y = places[0], places[1]
    for row in range(first, last):
        to_x, to_y = ZERO, ZERO
        for pair in range(starts[row], starts[row + 1]):
            column = columns[pair]
            across, up = x[row] - x[column], y[row] - y[column]
            pull = weights[pair] / (ONE + across * across + up * up)
            to_x += pull * across
            to_y += pull * up
        found[0, row], found[1, row] = to_x, to_y
