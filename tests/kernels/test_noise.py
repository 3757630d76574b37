"""Random numbers of rows that are drawn by themselves."""

import numpy as np
import pytest
import torch

from dualkg.kernels import noise
from dualkg.kernels.hashing import UNSIGNED_STEP, splitmix64
from dualkg.kernels.noise import fill_normal_, fill_uniform_, normal_segments, table_key

IDS = torch.tensor([0, 1, 5, 86_054_150, 7])


def fill(kind: str, numbers: torch.Tensor, rows: torch.Tensor, key: int = 12) -> torch.Tensor:
    if kind == "normal":
        return fill_normal_(numbers, rows, key=key)
    return fill_uniform_(numbers, rows, key=key, bound=0.3)


@pytest.mark.parametrize("kind", ["normal", "uniform"])
@pytest.mark.parametrize("key", [0, -(2**63), 2**63 - 1, table_key(3, 1)])
def test_the_compiled_numbers_have_the_bits_of_the_plain_ones(monkeypatch, kind, key):
    compiled = fill(kind, torch.empty(5, 133), IDS, key)
    monkeypatch.setattr(noise, "_is_compiled", lambda numbers: False)
    assert torch.equal(fill(kind, torch.empty(5, 133), IDS, key), compiled)
    assert torch.equal(fill(kind, torch.empty(5, 133).double(), IDS, key), compiled.double())


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["normal", "uniform"])
def test_a_gpu_has_the_bits_of_a_cpu(kind):
    on_gpu = fill(kind, torch.empty(5, 133, device="cuda"), IDS.cuda())
    assert torch.equal(on_gpu.cpu(), fill(kind, torch.empty(5, 133), IDS))


@pytest.mark.parametrize("kind", ["normal", "uniform"])
def test_a_row_is_the_same_in_any_part_of_a_table(kind):
    whole = fill(kind, torch.empty(20, 6), torch.arange(20))
    part = fill(kind, torch.empty(3, 6), torch.tensor([17, 4, 0]))
    assert torch.equal(part, whole[[17, 4, 0]])
    assert not torch.equal(whole, fill(kind, torch.empty(20, 6), torch.arange(20), key=13))
    assert len(whole.unique()) == 120


def test_numbers_by_hand():
    """Column 1 of row 3 in a table of width 4 is the 14th state of the sequence after the key."""
    state = (5 + 14 * UNSIGNED_STEP) % 2**64
    bits = int(splitmix64(torch.tensor([state - 2**64 if state >= 2**63 else state]))) % 2**64
    uniform = fill_uniform_(torch.empty(1, 4), torch.tensor([3]), key=5, bound=0.5)
    assert uniform[0, 1] == np.float32((2 * (bits >> 40) + 1 - 2**24) / 2**25)

    starts, steps = normal_segments()
    segment = bits >> 49
    position = 2 * ((bits >> 37) & (2**12 - 1)) + 1
    expected = np.float32(float(starts[segment]) + float(steps[segment]) * position)
    normal = fill_normal_(torch.empty(1, 4), torch.tensor([3]), key=5)
    assert normal[0, 1] == (-expected if bits % 2 else expected)


def test_every_product_of_a_step_is_exact():
    """So a fused multiply and add, which some devices have, rounds as often as the two do."""
    _, steps = normal_segments()
    for position in (0, 1, 2**12 - 2, 2**12 - 1):
        odd = 2 * position + 1
        assert torch.equal((steps * odd).double(), steps.double() * odd)


@pytest.mark.slow
def test_the_distribution_is_that_of_normal_numbers():
    """By all numbers that can be drawn: their moments, and the distribution function."""
    starts, steps = (table.double()[:, None] for table in normal_segments())
    positions = torch.arange(2**12).double()
    numbers = starts + steps * (2 * positions + 1)
    squares = numbers.square()
    assert float(squares.mean()) == pytest.approx(1, abs=1e-5)
    assert float(squares.square_().mean()) == pytest.approx(3, abs=1e-3)
    assert float(numbers.max()) == pytest.approx(4.6, abs=0.05)
    # The function is smooth within a segment: each 33rd position and the last one show it.
    segments = torch.arange(len(starts)).double()[:, None]
    shown = torch.cat([torch.arange(0, 2**12, 33), torch.tensor([2**12 - 1])])
    below = (segments + (positions[shown] + 0.5) / 2**12) / len(starts)
    differences = 2 * torch.special.ndtr(numbers[:, shown]) - 1 - below
    assert float(differences.abs().max()) < 1e-5


@pytest.mark.parametrize("seed", [0, 1])
def test_a_sample_has_the_moments_of_its_distribution(seed):
    """Six standard errors of a million numbers."""
    key = table_key(seed, 1)
    normal = fill_normal_(torch.empty(2_000, 500), torch.arange(2_000), key=key).double()
    assert abs(float(normal.mean())) < 6e-3
    assert abs(float(normal.var()) - 1) < 6 * 2**0.5 * 1e-3
    assert abs(float((normal[:, 1:] * normal[:, :-1]).mean())) < 6e-3
    assert abs(float((normal[1:] * normal[:-1]).mean())) < 6e-3
    uniform = fill_uniform_(torch.empty(2_000, 500), torch.arange(2_000), key=key, bound=1).double()
    assert abs(float(uniform.mean())) < 6e-3 / 3**0.5
    assert float(uniform.abs().max()) < 1
    assert float(uniform.var()) == pytest.approx(1 / 3, abs=6e-3)
