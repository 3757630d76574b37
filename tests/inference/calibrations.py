"""Calibrations with given lines."""

from collections.abc import Sequence
from typing import Any

import numpy as np

import dualkg as kg
from dualkg.inference.probability import Calibration
from dualkg.inference.recalibration import Recalibration


def calibration_on(
    graph: kg.Graph,
    *,
    slopes: float | Sequence[float] = 1.0,
    offsets: float | Sequence[float] = 0.0,
    **settings: Any,
) -> Calibration:
    """A calibration with a slope for all relations or for each, and an offset for all patterns or
    for each.
    """
    num_relations = graph.shape.num_relations
    return Calibration(
        graph,
        slopes=np.broadcast_to(np.float32(slopes), (num_relations,)).copy(),
        offsets=np.broadcast_to(np.float32(offsets), (num_relations, 4)).copy(),
        relation_specific=np.ones(num_relations, dtype=bool),
        **settings,
    )


def recalibration_of(knots: Sequence[float], values: Sequence[float]) -> Recalibration:
    return Recalibration(np.array(knots, dtype=np.float64), np.array(values, dtype=np.float64))
