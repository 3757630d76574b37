"""Entry points for a run or its folder: calibrate it, and complete its graph."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from dualkg.errors import RequestError
from dualkg.files import locked, locks
from dualkg.inference.calibration import Calibration, calibration_for, save_calibration
from dualkg.inference.completion import Completion, check_file
from dualkg.inference.completion import complete as complete_graph
from dualkg.inference.prediction_sets import PredictionSets
from dualkg.inference.reliability import (
    CalibrationReport,
    CoverageReport,
    evaluate_calibration,
    evaluate_coverage,
)
from dualkg.training.api import choose_device
from dualkg.training.run import Run, load_run


@dataclass(frozen=True, eq=False)
class CheckedCalibration:
    """Calibration and prediction sets of a run, fitted on valid, and their evaluation on test."""

    calibration: Calibration
    prediction_sets: PredictionSets
    report: CalibrationReport
    coverage: CoverageReport

    def as_dict(self) -> dict[str, Any]:
        """The evaluation, for JSON."""
        return {"calibration": self.report.as_dict(), "coverage": self.coverage.as_dict()}


def calibrate(
    run: Run | str | Path,
    *,
    coverage: float = 0.9,
    overwrite: bool = False,
    device: str | torch.device | None = None,
    trust_code: bool = False,
) -> CheckedCalibration:
    """Fit probabilities and prediction sets on valid, save them in the folder of the run, and check
    them on test.

    An existing calibration is checked again, unless `overwrite` replaces it; `coverage` is that of
    the sets to check.
    """
    run = open_run(run, device=device, trust_code=trust_code)
    with locked(run.folder):
        saved = calibration_for(run, overwrite=overwrite)
        report = evaluate_calibration(saved.calibration, run.model, run.graph)
        covered = evaluate_coverage(saved.prediction_sets, run.model, run.graph, coverage=coverage)
        checked = CheckedCalibration(saved.calibration, saved.prediction_sets, report, covered)
        if run.folder and not run.is_current:
            raise RequestError(
                f"{run.folder} was replaced after it was loaded. Run the command again."
            )
        if run.folder:
            save_calibration(replace(saved, checks=checked.as_dict()), run.folder)
    return checked


@locks("out")
def complete(
    run: Run | str | Path,
    *,
    top: int = 10_000,
    out: str | Path | None = None,
    device: str | torch.device | None = None,
    trust_code: bool = False,
    **options: Any,
) -> Completion:
    """Find the `top` most probable triples that the graph of a run does not contain, and write them
    to a new file.

    `options` are those of `dualkg.inference.completion.complete`: relations, heads, types, loops,
    min_probability and on_progress. A run that is not calibrated is calibrated first. With `out`,
    .tsv or .parquet, the same call resumes after an interrupt.
    """
    run = open_run(run, device=device, trust_code=trust_code)
    path = None if out is None else check_file(out, run.graph)
    if path is not None:
        options["checkpoint"] = path.with_name(f"{path.name}.checkpoint")
    found = complete_graph(
        run.model, run.graph, top=top, calibration=calibration_for(run).calibration, **options
    )
    if path is not None:
        found.save(path)
    return found


def open_run(
    run: Run | str | Path, *, device: str | torch.device | None = None, trust_code: bool = False
) -> Run:
    """A run as it is, on another device if one is given; or loaded from its folder, on a GPU if
    available.
    """
    if not isinstance(run, (Run, str, Path)):
        kind = type(run).__name__
        raise RequestError(
            "A run or the folder of one was expected, such as 'runs/world'; got an object of "
            f"type {kind}."
        )
    opened = run if isinstance(run, Run) else load_run(run, trust_code=trust_code)
    if opened is not run or device is not None:
        opened.model.to(choose_device(device))
    return opened
