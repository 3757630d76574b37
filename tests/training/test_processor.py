from __future__ import annotations

import pytest
import torch

from dualkg.training.trainer import flush_denormals


def halved() -> float:
    """Half of the smallest number that is not tiny."""
    return float(torch.tensor([2.0**-126]) * 0.5)


@pytest.mark.skipif(not torch.set_flush_denormal(False), reason="this processor cannot")
def test_tiny_numbers_are_zero_inside_and_as_before_outside():
    assert halved() > 0
    with flush_denormals():
        assert halved() == 0
        with flush_denormals():
            assert halved() == 0
        assert halved() == 0
    assert halved() > 0
