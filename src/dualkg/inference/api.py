"""Entry points for a run or its folder: calibrate it, and complete its graph."""

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from dualkg.data.entity_types import EntityTypes
from dualkg.errors import PYTHON, RequestError, Words
from dualkg.files import locked
from dualkg.inference.calibration import (
    Calibration,
    calibration_for,
    fit_calibration,
    save_calibration,
)
from dualkg.inference.completion import Completion, check_file, completion_reliability
from dualkg.inference.completion import complete as complete_graph
from dualkg.inference.prediction_sets import PredictionSets
from dualkg.inference.reliability import (
    CalibrationReport,
    CoverageReport,
    ReliabilityBin,
    evaluate_calibration,
    evaluate_coverage,
)
from dualkg.training.api import choose_device, wrong_argument
from dualkg.training.ensemble import load_run
from dualkg.training.run import Run, RunFolder
from dualkg.without_torch.priors import AssumedMissing, check_missing_share


class RunReplaced(RequestError):
    """Another run has taken the place of a run in its folder since it was loaded."""

    def __init__(self, path: Path) -> None:
        super().__init__(f"{path} was replaced after it was loaded. Load the run again.")
        self.path = path


@dataclass(frozen=True, eq=False)
class CheckedCalibration:
    """Calibration and prediction sets of a run, fitted on valid, and their evaluation on test.

    `new_triples` is the reliability of the probabilities of a completion; None if it was not
    measured. `missing` are the triples that the probabilities take the graph to lack.
    """

    calibration: Calibration
    prediction_sets: PredictionSets
    report: CalibrationReport
    coverage: CoverageReport
    new_triples: tuple[ReliabilityBin, ...] | None = None
    missing: AssumedMissing | None = None

    def as_dict(self) -> dict[str, Any]:
        """The evaluation, and what cross-fitting says about a recalibration, for JSON."""
        cross_fit = self.calibration.cross_fit
        types = self.calibration.types
        recalibration = None
        if cross_fit is not None:
            recalibration = {
                "used": self.calibration.recalibration is not None,
                **asdict(cross_fit),
            }
        return {
            "calibration": self.report.as_dict(),
            "recalibration": recalibration,
            "coverage": self.coverage.as_dict(),
            "types": types and {"source": types.source, "entities": types.num_entities},
            "new_triples": self.new_triples and [asdict(bin) for bin in self.new_triples],
            "missing": self.missing and self.missing._asdict(),
        }


class TwoSourcesOfTypes(RequestError):
    """Types of entities are asked for from a relation and from a file."""

    def __init__(self) -> None:
        super().__init__()

    def message(self, words: Words = PYTHON) -> str:
        relation = words.option("type_relation", "instance_of")
        file = words.option("types_file", "types.tsv")
        return f"Types are from a relation or from a file: give {relation} or {file}, not both."


def calibrate(
    run: Run | str | Path,
    *,
    coverage: float = 0.9,
    missing_share: float | None = None,
    overwrite: bool = False,
    type_relation: str | None = None,
    types_file: str | Path | None = None,
    device: str | torch.device | None = None,
    trust_code: bool = False,
) -> CheckedCalibration:
    """Fit probabilities and prediction sets on valid, save them in the run, check them on test.

    An existing calibration is checked again, unless `overwrite` replaces it; `coverage` is that of
    the sets to check. Types of entities, from a relation or a file, are saved with it; they say how
    probable a triple is of which an entity has no triple of that relation yet.

    Args:
        run: A run, or its folder.
        coverage: Coverage of the sets that are checked.
        missing_share: Share of the true triples that the graph lacks. By default, it lacks as many
            as valid has; an existing calibration keeps its share.
        overwrite: Whether to replace an existing calibration, and its types.
        type_relation: Relation whose tails are the types of entities, such as `instance_of`.
        types_file: File of types, with lines of entity and type, separated by a tab.
        device: Where the model runs; a GPU by default, if there is one.
        trust_code: Whether the recipe may name classes that are not part of dualkg.

    Returns:
        The calibration, and its evaluation on test.

    Examples:
        >>> checked = kg.calibrate(run)
        >>> 0 <= checked.report.likely.ece <= 1
        True
    """
    if missing_share is not None:
        check_missing_share(missing_share)
    if type_relation is not None and types_file is not None:
        raise TwoSourcesOfTypes
    run = open_run(run, device=device, trust_code=trust_code)
    types = None
    if type_relation is not None:
        types = EntityTypes.of_relation(run.graph, type_relation)
    elif types_file is not None:
        types = EntityTypes.read(types_file, run.graph)
    with locked(run.folder):
        has_calibration = run.folder is not None and RunFolder(run.folder).has_calibration
        # It is saved once, with its checks: a kill or a full disk leaves the former one.
        is_fitted = overwrite or not has_calibration
        saved = fit_calibration(run) if is_fitted else calibration_for(run)
        if missing_share is not None:
            # The fit does not depend on the share, so that an existing one need not be repeated.
            calibration = replace(saved.calibration, missing_share=missing_share)
            saved = replace(saved, calibration=calibration)
        if types is not None:
            saved = replace(saved, calibration=replace(saved.calibration, types=types))
        checked = CheckedCalibration(
            saved.calibration,
            saved.prediction_sets,
            evaluate_calibration(saved.calibration, run.model, run.graph),
            evaluate_coverage(saved.prediction_sets, run.model, run.graph, coverage=coverage),
            completion_reliability(run.model, run.graph, saved.calibration),
            saved.calibration.assumed_missing(run.graph),
        )
        if run.folder:
            if not run.is_current:
                raise RunReplaced(run.folder)
            final = replace(saved, checks=checked.as_dict())
            save_calibration(final, run.folder, run.graph)
    return checked


def complete(
    run: Run | str | Path,
    *,
    top: int = 10_000,
    out: str | Path | None = None,
    device: str | torch.device | None = None,
    trust_code: bool = False,
    **options: Any,
) -> Completion:
    """Find the `top` most probable triples that the graph of a run does not contain.

    `options` are those of `dualkg.inference.completion.complete`: relations, heads, types, loops,
    min_probability and on_progress. A run that is not calibrated is calibrated first. With `out`,
    a new file .tsv or .parquet, the triples are written. Of several processes that share the model,
    the first writes.

    Args:
        run: A run, or its folder.
        top: Number of triples.
        out: A new file, .tsv or .parquet.
        device: Where the model runs; a GPU by default, if there is one.
        trust_code: Whether the recipe may name classes that are not part of dualkg.
        options: Other options, such as `min_probability`.

    Returns:
        The triples, best first, with probabilities.

    Examples:
        >>> completion = kg.complete(run, top=5, relations=["capital"], types=True)
        >>> len(completion)
        5
    """
    run = open_run(run, device=device, trust_code=trust_code)
    with locked(out if run.model.is_first else None):
        path = None if out is None else check_file(out, run.graph)
        calibration = calibration_for(run).calibration
        completion = complete_graph(
            run.model, run.graph, top=top, calibration=calibration, **options
        )
        if path is not None and run.model.is_first:
            completion.save(path)
    return completion


def open_run(
    run: Run | str | Path, *, device: str | torch.device | None = None, trust_code: bool = False
) -> Run:
    """A run as it is, or loaded from its folder, on a device.

    A run that is loaded is on a GPU by default if there is one; another stays where it is.
    """
    if isinstance(run, Run):
        if device is not None:
            run.model.to(choose_device(device))
        return run
    if not isinstance(run, (str, Path)):
        raise wrong_argument(
            "run",
            expected="a run or the folder of one, such as 'runs/world'",
            found=f"an object of type {type(run).__name__}",
        )
    loaded = load_run(run, trust_code=trust_code)
    loaded.model.to(choose_device(device))
    return loaded
