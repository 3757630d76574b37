"""The calibration of a run in its folder: fitted when it is first needed, read after that."""

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
from dualkg.training.run import Run, RunFolder


@dataclass(frozen=True, eq=False)
class SavedCalibration:
    """Calibration and prediction sets of a model, both fitted on the valid split, and their evaluation on test."""

    calibration: Calibration
    prediction_sets: PredictionSets
    checks: dict[str, Any] = field(default_factory=dict)  # the reports of `dualkg calibrate`

    @classmethod
    def fit(cls, run: Run, *, seed: int = 0) -> SavedCalibration:
        return cls(calibrate(run.model, run.graph, seed=seed), PredictionSets.fit(run.model, run.graph))


def save_calibration(saved: SavedCalibration, folder: str | Path) -> Path:
    """Write `calibration.json` into a run folder."""
    path = RunFolder(folder).calibration
    content = {
        "calibration": saved.calibration.as_dict(),
        "prediction_sets": saved.prediction_sets.as_dict(),
        "checks": saved.checks,
    }
    write_text(path, json.dumps(content, ensure_ascii=False))
    return path


def load_calibration(folder: str | Path, graph: Graph) -> SavedCalibration:
    """Read `calibration.json` from the folder of a run on this graph; a damaged file is refused."""
    path, num_relations = RunFolder(folder).calibration, graph.shape.num_relations
    found = read_json(path)
    try:
        calibration = Calibration.from_dict(found["calibration"])
        tables = (calibration.slopes, calibration.offsets, calibration.relation_specific)
        if (lengths := {len(table) for table in tables}) != {num_relations}:
            raise ValueError(f"it should have {num_relations:,} relations, and has {' or '.join(map(str, lengths))}")
        if tuple(calibration.offsets.shape) != (num_relations, NUM_PATTERNS):
            raise ValueError(f"each relation should have {NUM_PATTERNS} offsets")
        if not bool((calibration.slopes > 0).all()):
            raise ValueError("a slope is not above 0")
        prediction_sets = PredictionSets.from_dict(found["prediction_sets"], num_relations)
        return SavedCalibration(calibration, prediction_sets, dict(found.get("checks", {})))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        reason = f"there is no {error}" if isinstance(error, KeyError) else str(error)
        raise RequestError(
            f"{path} is damaged: {reason}. Make it again: dualkg calibrate {Path(folder)} --overwrite"
        ) from None


def calibration_for(run: Run, *, overwrite: bool = False) -> SavedCalibration:
    """Read the calibration of a run from its folder, or fit it now and save it if the run has a folder."""
    if run.folder and RunFolder(run.folder).calibration.exists() and not overwrite:
        return load_calibration(run.folder, run.graph)
    made = SavedCalibration.fit(run)
    if run.folder:
        save_calibration(made, run.folder)
    return made
