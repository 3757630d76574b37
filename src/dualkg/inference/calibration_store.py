"""What is believed of a run, kept in its folder: made the first time it is needed, read after that."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dualkg.data.graph import Graph
from dualkg.errors import RequestError
from dualkg.files import read_json, write_text
from dualkg.inference.calibration import NUM_PATTERNS, Calibration, calibrate
from dualkg.inference.prediction_sets import PredictionSets
from dualkg.training.run import Run

FILE = "calibration.json"


@dataclass(frozen=True, eq=False)
class SavedCalibration:
    """Probabilities and prediction sets of one model, both from the valid split; and how they held on test."""

    calibration: Calibration
    prediction_sets: PredictionSets
    checks: dict[str, Any] = field(default_factory=dict)  # the reports of `dualkg calibrate`, as they were written

    @classmethod
    def of(cls, run: Run, *, seed: int = 0) -> SavedCalibration:
        """Make them again."""
        return cls(calibrate(run.model, run.graph, seed=seed), PredictionSets.fit(run.model, run.graph))


def save_calibration(calibration_data: SavedCalibration, folder: str | Path) -> Path:
    """Write `calibration.json` into the folder of a run."""
    path = Path(folder) / FILE
    facts = {
        "calibration": calibration_data.calibration.as_dict(),
        "prediction_sets": calibration_data.prediction_sets.as_dict(),
        "checks": calibration_data.checks,
    }
    write_text(path, json.dumps(facts, ensure_ascii=False))
    return path


def load_calibration(folder: str | Path, graph: Graph) -> SavedCalibration:
    """Read `calibration.json` of a run of this graph; one that is damaged is told in a sentence."""
    path, num_relations = Path(folder) / FILE, graph.shape.num_relations
    found = read_json(path)
    try:
        calibration = Calibration.from_dict(found["calibration"])
        lengths = {len(table) for table in (calibration.slopes, calibration.offsets, calibration.relation_specific)}
        if lengths != {num_relations}:
            raise ValueError(f"it should have {num_relations:,} relations, and has {' or '.join(map(str, lengths))}")
        if tuple(calibration.offsets.shape) != (num_relations, NUM_PATTERNS):
            raise ValueError(f"each relation should have {NUM_PATTERNS} offsets")
        if not bool((calibration.slopes > 0).all()):
            raise ValueError("a slope is not above 0")
        prediction_sets = PredictionSets.from_dict(found["prediction_sets"], num_relations)
        return SavedCalibration(calibration, prediction_sets, dict(found.get("checks", {})))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        why = f"there is no {error}" if isinstance(error, KeyError) else str(error)
        raise RequestError(
            f"{path} is damaged: {why}. Make it again: dualkg calibrate {Path(folder)} --again"
        ) from None


def calibration_for(run: Run, *, again: bool = False) -> SavedCalibration:
    """The calibration_data of a run: from its folder where they are kept, else made now, and kept if it has a folder."""
    if run.folder and (run.folder / FILE).exists() and not again:
        return load_calibration(run.folder, run.graph)
    made = SavedCalibration.of(run)
    if run.folder:
        save_calibration(made, run.folder)
    return made


def ensure_calibration(run: Run) -> Calibration:
    """The calibration of a run, as `calibration_for` finds or makes it."""
    return calibration_for(run).calibration
