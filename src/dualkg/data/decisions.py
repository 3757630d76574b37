"""Decisions on new facts as training data: accepted facts and rejected ones."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np

from dualkg.data.graph import SPLITS, Graph, Triples, distinct_triples, triple_keys
from dualkg.errors import InvalidValue
from dualkg.files import read_bytes

FILE = "decisions.jsonl"  # in a run folder
NamedTriple = tuple[str, str, str]


def with_decisions(graph: Graph, path: str | Path) -> Graph:
    """A graph with decisions of a run, given its folder or a file of JSON lines.

    Accepted facts become training triples, and rejected ones `graph.rejected`. A decision on a
    symmetric relation holds in both directions. What some split has already is left out, so that
    no triple of valid or test is trained on; and so is what names other entities or relations.
    """
    path = Path(path)
    if path.is_dir():
        path = path / FILE
    by_verdict: dict[str, list[list[int]]] = {"accepted": [], "rejected": []}
    num_foreign = 0
    for verdict, triple in _read(path):
        head, relation, tail = triple
        entities = graph.entities
        if head not in entities or tail not in entities or relation not in graph.relations:
            num_foreign += 1
            continue
        ids = [entities.id(head), graph.relations.id(relation), entities.id(tail)]
        by_verdict[verdict].append(ids)
        if graph.symmetric_relations[ids[1]]:
            by_verdict[verdict].append(ids[::-1])

    accepted = _new(by_verdict["accepted"], graph)
    rejected = _new(by_verdict["rejected"], graph)
    text = f"{path}: {len(accepted):,} accepted triples were added to train"
    text += f", and {len(rejected):,} rejected ones are negatives."
    if num_foreign:
        text += f" {num_foreign:,} decisions are on names that the graph does not have."
    changed = replace(
        graph,
        train=np.concatenate([graph.train, accepted]) if len(accepted) else graph.train,
        rejected=rejected,
        notes=(*graph.notes, text),
        read_options={**graph.read_options, "decisions": str(path)},
    )
    return changed.with_fingerprint()


def _read(path: Path) -> Iterator[tuple[str, NamedTriple]]:
    """The verdicts and triples of a file."""
    try:
        lines = read_bytes(path).split(b"\n")
    except OSError as error:
        raise InvalidValue(
            "data.decisions",
            expected="a run folder with decisions, or a file of them",
            found=f"{path} ({error.strerror})",
        ) from None
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            decision = json.loads(line)
            triple = (decision["head"], decision["relation"], decision["tail"])
            verdict = decision["verdict"]
        except (ValueError, KeyError, TypeError, RecursionError):
            triple = (None, None, None)
            verdict = None
        is_triple = all(isinstance(name, str) for name in triple)
        if verdict not in ("accepted", "rejected") or not is_triple:
            raise InvalidValue(
                "data.decisions",
                expected="a file of JSON lines with head, relation, tail and verdict",
                found=f"line {number:,} of {path}",
            )
        yield verdict, triple


def _new(ids: list[list[int]], graph: Graph) -> Triples:
    """The distinct triples of a list that no split has."""
    triples = np.array(ids, dtype=np.int32).reshape(-1, 3)
    distinct = distinct_triples(triples, graph.shape)
    splits = [graph.split(split) for split in SPLITS]
    # Past 63 bits, keys are comparable only among triples that are encoded together.
    keys = triple_keys(np.concatenate([distinct, *splits]), graph.shape)
    is_known = np.isin(keys[: len(distinct)], keys[len(distinct) :])
    new: Triples = distinct[~is_known]
    return new
