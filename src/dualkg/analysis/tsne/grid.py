"""Sums over all places of a smooth function of the difference: on a grid, by a Fourier transform.

The idea is that of Linderman et al. (2019, "Fast interpolation-based t-SNE"): each place hands its unit of charge to
the nodes around it, the nodes act on one another by a convolution, and each place reads the result off the nodes
around it. Two things differ. Polynomials are pieced together smoothly, as cubic B-splines, which at the same spacing
err several times less; that a spline through given values has other coefficients than the values is made good in the
transform of the function. And (y_i − y_j) / (1 + ‖y_i − y_j‖²)² is itself such a function, so that one charge will do.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

# Between nodes, where what is summed has the width 1.
FINE = 0.375  # sums err by about a hundredth where places are sparse, and by less where they are dense
COARSE = 0.5  # by a few hundredths, in half the time
FEWEST, MOST = 32, 2048  # nodes along a side that places lie between
ROUND = 16  # sides are a multiple of this many nodes, so that a grid fits for many steps
MARGIN = 4  # nodes around, which splines reach
APART = 16  # nodes around a grid and its periodic copies, where corrections for splines die away


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
