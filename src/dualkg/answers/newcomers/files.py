"""A run extended by a file of triples, kept as a new run."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from dualkg.answers.newcomers.extension import Extension, Finder, extended_by_ids, joined_to_known, listed
from dualkg.answers.newcomers.surroundings import Surroundings, with_two_maps
from dualkg.data.graph import Graph, Triples
from dualkg.data.reading import Columns, ReadTriples, one_source, read_triples
from dualkg.errors import RequestError, did_you_mean
from dualkg.files import read_json, write_text
from dualkg.training import Run, load_run
from dualkg.training.start import choose_device, evaluate_held_out

NOTE = "extension.json"


@dataclass(frozen=True, eq=False)
class Sifted:
    """Of a file the triples that place newcomers, by ids; and in sentences what was left out."""

    names: list[str]
    triples: Triples
    remarks: tuple[str, ...]


def extend_run(
    path: str | Path,
    file: str | Path,
    *,
    out: str | Path,
    columns: Columns | None = None,
    device: str | None = None,
) -> tuple[Run, dict[str, Any]]:
    """Make a new run of a finished one, with a row for each new entity of a file; and the note that it keeps of it."""
    out = Path(out)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise RequestError(f"{out} exists already. Name a new folder with --out.")
    run = load_run(path)
    model = with_two_maps(run.model)
    read = read_triples({"triples": one_source(file)}, columns=columns)
    sifted = sift(read, run.graph, source=str(file))
    around = Surroundings.of(model.to(choose_device(device)), run.graph, recipe=run.recipe)
    found = extended_by_ids(around, run.graph, sifted.names, sifted.triples, labels=read.labels)
    reports = evaluate_held_out(found.model, found.graph)
    larger = Run(found.model, found.graph, run.recipe, run.history, reports, sparsity=run.sparsity)
    larger.save(out)
    note = _note(path, file, found, sifted, num_triples=len(found.graph.train) - len(run.graph.train))
    earlier = Path(path) / NOTE
    if earlier.exists():
        note["before"] = read_json(earlier)
    write_text(out / NOTE, json.dumps(note, indent=1, ensure_ascii=False))
    return larger, note


def sift(read: ReadTriples, graph: Graph, *, source: str) -> Sifted:
    """Keep the triples that join a newcomer to what the graph knows, directly or through other newcomers."""
    remarks = list(read.remarks)
    entities, relations = Finder(graph.entities), Finder(graph.relations)
    names = read.entities.to_pylist()
    known = np.array([-1 if (id := entities(name)) is None else id for name in names], dtype=np.int64)
    of_relation = [relations(name) for name in read.relations.to_pylist()]
    triples = read.triples["triples"]
    strange = np.array([id is None for id in of_relation])[triples[:, 1]]
    if strange.any():
        unknown = [name for name, id in zip(read.relations.to_pylist(), of_relation, strict=True) if id is None]
        near = did_you_mean(unknown[0], graph.relations.names.to_pylist()) if len(unknown) == 1 else ""
        remarks.append(f"{_left_out(strange)}: the run knows no relation {listed(unknown)}.{near}")
    settled = ~strange & (known[triples[:, [0, 2]]] >= 0).all(1)
    if settled.any():
        remarks.append(f"{_left_out(settled)}: the run knows both entities, and is not trained anew.")
    kept = triples[~strange & ~settled]
    joined = _joined(kept, known, len(graph.entities))
    lost = [name for name, id, there in zip(names, known, joined, strict=True) if id < 0 and not there]
    if lost:
        remarks.append(f"No triple leads from {listed(lost)} to an entity that the run knows: left out.")
    kept = kept[joined[kept[:, 0]] & joined[kept[:, 2]]]
    if not len(kept):
        told = " ".join(["", *remarks])
        raise RequestError(f"{source} joins no new entity to the {len(graph.entities):,} that the run knows.{told}")
    new = [place for place in np.unique(kept[:, [0, 2]]).tolist() if known[place] < 0]
    known[new] = len(graph.entities) + np.arange(len(new))
    found = np.stack([known[kept[:, 0]], np.array([id or 0 for id in of_relation])[kept[:, 1]], known[kept[:, 2]]], 1)
    return Sifted([names[place] for place in new], found.astype(np.int32), tuple(remarks))


def _joined(triples: Triples, known: npt.NDArray[np.int64], num_known: int) -> npt.NDArray[np.bool_]:
    """Which entities of the file are known, or joined to one that is."""
    ids = known.copy()
    ids[known < 0] = num_known + np.arange(int((known < 0).sum()))
    by_id = triples.copy()
    by_id[:, 0], by_id[:, 2] = ids[triples[:, 0]], ids[triples[:, 2]]
    found = known >= 0
    found[known < 0] = joined_to_known(by_id, num_known, int((known < 0).sum()))
    return found


def _left_out(chosen: npt.NDArray[np.bool_]) -> str:
    number = int(chosen.sum())
    return "1 triple is left out" if number == 1 else f"{number:,} triples are left out"


def _note(path: str | Path, file: str | Path, found: Extension, sifted: Sifted, *, num_triples: int) -> dict[str, Any]:
    return {
        "source": str(path),
        "file": str(file),
        "num_entities": len(found.newcomers),
        "num_triples": num_triples,
        "entities": found.newcomers,
        "remarks": list(sifted.remarks),
    }
