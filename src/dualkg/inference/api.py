"""Entry points for a run or its folder: calibrate it, and complete its graph."""

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from dualkg.data.entity_types import EntityTypes
from dualkg.errors import RequestError
from dualkg.files import locked
from dualkg.inference.completion import Completion, check_file, completion_reliability
from dualkg.inference.completion import complete as complete_graph
from dualkg.inference.probability import Calibration, calibration_for, has_calibration
from dualkg.inference.query_classes import check_missing_share
from dualkg.inference.reliability import evaluate_calibration, evaluate_coverage
from dualkg.training.api import choose_device, wrong_argument
from dualkg.training.ensemble import load_run
from dualkg.training.run import Run


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
) -> Calibration:
    """Fit probabilities and prediction sets on valid, save them in the run, check them on test.

    An existing calibration is checked again, unless `overwrite` replaces it. Types of entities,
    from a relation or a file, are saved with it; they say how probable a triple is if one of its
    entities has no triple of that relation yet.

    Args:
        run: A run, or its folder.
        coverage: Coverage of the prediction sets that are checked.
        missing_share: Share of the true triples that the graph lacks. By default, it lacks as many
            as valid has; an existing calibration keeps its share.
        overwrite: Whether to replace an existing calibration, and its types.
        type_relation: Relation whose tails are the types of entities, such as `instance_of`.
        types_file: File of types, with lines of entity and type, separated by a tab.
        device: Where the model runs; a GPU by default, if there is one.
        trust_code: Whether the recipe may name classes that are not part of dualkg.

    Returns:
        The calibration, whose `checks` are the evaluation on test.

    Examples:
        >>> calibration = kg.calibrate(run)
        >>> sorted(calibration.checks)
        ['calibration', 'coverage', 'missing', 'new_triples', 'recalibration', 'types']
    """
    if missing_share is not None:
        check_missing_share(missing_share)
    if type_relation is not None and types_file is not None:
        raise RequestError(
            "Types are from a relation or from a file: give `type_relation` or `types_file`, not "
            "both."
        )
    run = open_run(run, device=device, trust_code=trust_code)
    types = None
    if type_relation is not None:
        types = EntityTypes.of_relation(run.graph, type_relation)
    elif types_file is not None:
        types = EntityTypes.read(types_file, run.graph)
    with locked(run.folder):
        # It is saved once, with its checks: a kill or a full disk leaves the former one.
        if overwrite or not has_calibration(run):
            calibration = Calibration.fit(run.model, run.graph)
        else:
            calibration = calibration_for(run)
        # The fit depends neither on the share nor on types, so it need not be repeated.
        if missing_share is not None:
            calibration = replace(calibration, missing_share=missing_share)
        if types is not None:
            calibration = replace(calibration, types=types)
        calibration = replace(calibration, checks=_checks(calibration, run, coverage=coverage))
        if run.folder:
            if not run.is_current:
                raise RequestError(
                    f"{run.folder} was replaced after it was loaded. Load the run again."
                )
            calibration.save(run.folder)
    return calibration


def _checks(calibration: Calibration, run: Run, *, coverage: float) -> dict[str, Any]:
    """The evaluation of a calibration on test, and what it assumes, as plain data."""
    assert calibration.prediction_sets is not None
    reliability = evaluate_calibration(calibration, run.model, run.graph)
    sets = evaluate_coverage(calibration.prediction_sets, run.model, run.graph, coverage=coverage)
    new_triples = completion_reliability(run.model, run.graph, calibration)
    types = calibration.types
    recalibration = None
    if calibration.cross_fit is not None:
        is_used = calibration.recalibration is not None
        recalibration = {"used": is_used, **calibration.cross_fit._asdict()}
    return {
        "calibration": reliability.as_dict(),
        "recalibration": recalibration,
        "coverage": sets.as_dict(),
        "types": types and {"source": types.source, "entities": types.num_entities},
        "new_triples": new_triples and [asdict(bin) for bin in new_triples],
        "missing": calibration.assumed_missing._asdict(),
    }


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
        calibration = calibration_for(run)
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
