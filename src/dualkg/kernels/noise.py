"""Random numbers that follow from a key, a row and a column alone, with the same bits everywhere.

They are for tables that are made in parts: any row can be drawn by itself, on any device. Each
number is made from 28 or 24 bits of the SplitMix64 hash of its place by operations that round at
most once, because functions such as the logarithm differ between devices.
"""

from functools import cache

import torch
from torch import Tensor

from dualkg.kernels.hashing import STEP, hash_columns, shift_right, splitmix64

# A normal number is ± start[segment] + step[segment] · (2 · position + 1): the quantile function of
# |x| in segments of equal probability, and linear in each of them.
SEGMENT_DIGITS = 15
POSITION_DIGITS = 12
STEP_DIGITS = 23 - POSITION_DIGITS  # binary digits of a step, so that its product is exact
UNIFORM_DIGITS = 24


def table_key(seed: int, number: int) -> int:
    """The key of one of several tables of random numbers."""
    return int(hash_columns(seed, torch.tensor([number], device="cpu"))[0])


@cache
def normal_segments() -> tuple[Tensor, Tensor]:
    """Start and step of each segment of |x|, in float32.

    The last segment ends where the variance of its numbers is that of the tail.
    """
    num = 2**SEGMENT_DIGITS
    probabilities = 0.5 + torch.arange(num, dtype=torch.float64, device="cpu") / (2 * num)
    starts = torch.special.ndtri(probabilities)
    last = starts[-1]
    density = (-last.square() / 2).exp() / (2 * torch.pi) ** 0.5
    second_moment = 1 + last * density * (2 * num)
    # (a² + ab + b²) / 3 of a uniform number between a and b.
    end = (-last + (12 * second_moment - 3 * last.square()).sqrt()) / 2
    widths = torch.cat([starts, end[None]]).diff()
    steps = widths / 2 ** (POSITION_DIGITS + 1)
    unit = 2.0 ** (steps.log2().floor() - STEP_DIGITS + 1)
    rounded = (steps / unit).round() * unit
    return starts.float(), rounded.float()


def fill_normal_(numbers: Tensor, rows: Tensor, *, key: int) -> Tensor:
    """Fill `(n, width)` with the numbers from N(0, 1) of some rows `(n,)`.

    The largest is 4.6, and the distribution function differs from that of N(0, 1) by at most 10⁻⁵.
    """
    starts, steps = normal_segments()
    if _is_compiled(numbers):
        from dualkg.kernels.cpu_noise import normal_rows_

        normal_rows_(numbers, rows, key, starts, steps)
        return numbers
    bits = _bits(rows, numbers.shape[1], key)
    segments = shift_right(bits, 64 - SEGMENT_DIGITS)
    positions = shift_right(bits, 64 - SEGMENT_DIGITS - POSITION_DIGITS) % 2**POSITION_DIGITS
    products = steps.to(bits.device)[segments] * (2 * positions + 1).float()
    values = starts.to(bits.device)[segments] + products
    is_negative = torch.bitwise_and(bits, 1) == 1
    return numbers.copy_(torch.where(is_negative, -values, values))


def fill_uniform_(numbers: Tensor, rows: Tensor, *, key: int, bound: float) -> Tensor:
    """Fill `(n, width)` with uniform numbers between −bound and bound of some rows `(n,)`."""
    step = torch.tensor(bound / 2**UNIFORM_DIGITS, dtype=torch.float32)
    if _is_compiled(numbers):
        from dualkg.kernels.cpu_noise import uniform_rows_

        uniform_rows_(numbers, rows, key, step)
        return numbers
    bits = _bits(rows, numbers.shape[1], key)
    drawn = 2 * shift_right(bits, 64 - UNIFORM_DIGITS) + 1 - 2**UNIFORM_DIGITS
    return numbers.copy_(drawn.float() * step)


def _is_compiled(numbers: Tensor) -> bool:
    if not numbers.is_cpu or numbers.dtype != torch.float32 or not numbers.is_contiguous():
        return False
    from dualkg.kernels.cpu import HAS_NUMBA  # It imports numba.

    return HAS_NUMBA


def _bits(rows: Tensor, width: int, key: int) -> Tensor:
    """64 bits of each number, `(n, width)`: the SplitMix64 sequence that starts at the key."""
    columns = torch.arange(1, width + 1, device=rows.device)
    return splitmix64(key + (rows[:, None] * width + columns) * STEP)
