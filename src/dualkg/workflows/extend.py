"""Extending a run by the new entities of a file."""

from itertools import compress
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from dualkg.data.columns import Columns
from dualkg.data.encoding import ReadTriples, read_triples
from dualkg.data.graph import Graph, Triples
from dualkg.data.readers import one_source
from dualkg.errors import RequestError, did_you_mean
from dualkg.files import check_new_folder, locked, read_json
from dualkg.inference.extension import (
    check_extensible,
    connected,
    extend_by_ids,
    extension_context,
    find_id,
    listed,
)
from dualkg.training.api import choose_device, evaluate_held_out
from dualkg.training.ensemble import load_trained_run
from dualkg.training.run import TrainedRun
from dualkg.training.run_folder import RunFolder

CALIBRATION_NOT_KEPT = (
    "The calibration of the run is not kept: it was fitted without the new entities, which are "
    "candidates now. Calibrate the extended run."
)


def extend_run(
    path: str | Path,
    file: str | Path,
    *,
    out: str | Path,
    columns: Columns | None = None,
    max_size: int | str | None = None,
    delimiter: str | None = None,
    device: str | None = None,
) -> tuple[TrainedRun, dict[str, Any]]:
    """Make a run with the new entities of a file.

    The second value is the content of its extension.json. The new run is not calibrated; a remark
    says so if the other one `was_calibrated`.
    """
    out = Path(out)
    with locked(out):
        check_new_folder(out)
        run = load_trained_run(path)
        check_extensible(run.model)  # before the file is read
        read = read_triples(
            {"triples": one_source(file, max_size=max_size)}, columns=columns, delimiter=delimiter
        )
        names, triples, remarks = _new_triples(read, run.graph, source=str(file))
        model = run.model.to(choose_device(device))
        context = extension_context(model, run.graph, recipe=run.recipe)
        extension = extend_by_ids(context, names, triples, labels=read.labels)

        reports = evaluate_held_out(extension.model, extension.graph)
        folder = RunFolder(path)
        was_calibrated = folder.has_calibration
        if was_calibrated:
            remarks.append(CALIBRATION_NOT_KEPT)
        note: dict[str, Any] = {
            "source": str(path),
            "made_from": run.identity,
            "file": str(file),
            "num_entities": len(extension.new_entities),
            "num_triples": len(extension.graph.train) - len(run.graph.train),
            "entities": extension.new_entities,
            "remarks": remarks,
            "was_calibrated": was_calibrated,
        }
        if folder.extension.exists():
            note["previous"] = read_json(folder.extension)
        larger = TrainedRun(
            extension.model,
            extension.graph,
            run.recipe,
            run.history,
            reports,
            sparsity=run.sparsity,
        )
        larger.extension = note
        larger.save(out)
        return larger, note


def _new_triples(
    read: ReadTriples, graph: Graph, *, source: str
) -> tuple[list[str], Triples, list[str]]:
    """Names of new entities, and the triples by id that connect them to the graph.

    The third value is a list of remarks on triples that are left out.
    """
    remarks = list(read.notes)
    num_known = len(graph.entities)
    names = read.entities.to_pylist()
    relations = read.relations.to_pylist()
    ids = np.array([find_id(graph.entities, name) for name in names], dtype=np.int64)
    relation_ids = np.array([find_id(graph.relations, name) for name in relations])
    triples = read.triples["triples"]

    is_unknown = relation_ids[triples[:, 1]] < 0
    if is_unknown.any():
        missing = list(compress(relations, relation_ids < 0))
        similar = ""
        if len(missing) == 1:
            similar = did_you_mean(missing[0], graph.relations.names.to_pylist())
        remarks.append(
            f"{_left_out(is_unknown)}: the run has no relation {listed(missing)}.{similar}"
        )

    is_old = ~is_unknown & (ids[triples[:, [0, 2]]] >= 0).all(1)
    if is_old.any():
        remarks.append(
            f"{_left_out(is_old)}: both entities are in the run, which is not trained again."
        )
    triples = triples[~is_unknown & ~is_old]

    is_connected = connected(triples, ids >= 0)
    isolated = list(compress(names, ~is_connected))
    if isolated:
        remarks.append(f"No triple connects {listed(isolated)} to an entity of the run: left out.")
    triples = triples[is_connected[triples[:, 0]] & is_connected[triples[:, 2]]]
    if not len(triples):
        sentence = f"{source} connects no new entity to the {num_known:,} of the run."
        raise RequestError(" ".join([sentence, *remarks]))

    positions = np.unique(triples[:, [0, 2]]).tolist()
    new_positions = [position for position in positions if ids[position] < 0]
    ids[new_positions] = num_known + np.arange(len(new_positions))
    by_id = np.stack([ids[triples[:, 0]], relation_ids[triples[:, 1]], ids[triples[:, 2]]], axis=1)
    new_names = [names[position] for position in new_positions]
    return new_names, by_id.astype(np.int32), remarks


def _left_out(is_chosen: npt.NDArray[np.bool_]) -> str:
    number = int(is_chosen.sum())
    if number == 1:
        return "1 triple is left out"
    return f"{number:,} triples are left out"
