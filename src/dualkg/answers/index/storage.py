"""The folder of an index: index.json, and a folder for each table that is searched."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from dualkg.answers.index.approximate import KINDS, FaissIndex
from dualkg.answers.index.base import Index
from dualkg.answers.index.building import Facts, ModelIndex
from dualkg.answers.index.exact import ExactIndex
from dualkg.errors import RequestError
from dualkg.files import read_json, replacing_folder, write_text
from dualkg.models.base import Side

ABOUT = "index.json"


def check_free(folder: Path) -> None:
    """Refuse a folder that holds anything, before an index is built for it."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise RequestError(f"{folder} exists already. Name a new folder with --out.")


def save_index(index: ModelIndex, folder: str | Path) -> ModelIndex:
    """Write an index, whole or not at all; what comes back knows how many bytes its files have."""
    folder = Path(folder)
    check_free(folder)
    with replacing_folder(folder, last=ABOUT) as fresh:
        for side, one in index.indexes.items():
            (fresh / side).mkdir()
            one.save(fresh / side)
        sizes = {side: sum(path.stat().st_size for path in (fresh / side).iterdir()) for side in index.indexes}
        saved = replace(index, facts={side: replace(facts, bytes=sizes[side]) for side, facts in index.facts.items()})
        write_text(fresh / ABOUT, json.dumps(about(saved), indent=1))
    return saved


def about(index: ModelIndex) -> dict[str, Any]:
    """All that is known of an index but for its rows."""
    return {
        "kind": index.kind,
        "model": index.model,
        "metric": index.metric,
        "tables": {
            side: {
                "shape": list(one.shape),
                "choices": one.choices,
                "fingerprint": index.fingerprints[side],
                "facts": index.facts[side].as_dict(),
            }
            for side, one in index.indexes.items()
        },
    }


def load_index(folder: str | Path, *, in_memory: bool = True) -> ModelIndex:
    """Read an index. Unless `in_memory`, an exact one is searched in its file, however large that is."""
    folder = Path(folder)
    if not (folder / ABOUT).exists():
        raise RequestError(f"{folder} holds no index (there is no {ABOUT}). Make one with: dualkg index RUN")
    saved = read_json(folder / ABOUT)
    indexes: dict[Side, Index] = {}
    facts: dict[Side, Facts] = {}
    try:
        for side, table in saved["tables"].items():
            indexes[cast(Side, side)] = _load(folder / side, saved, table, in_memory=in_memory)
            numbers = table["facts"]
            facts[cast(Side, side)] = Facts(**{**numbers, "recall": {int(k): r for k, r in numbers["recall"].items()}})
        made = {cast(Side, side): table["fingerprint"] for side, table in saved["tables"].items()}
        return ModelIndex(saved["model"], saved["metric"], {"tail": indexes["tail"], **indexes}, facts, made)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        told = f"{error} is missing" if isinstance(error, KeyError) else str(error)
        raise RequestError(f"The index {folder} is damaged: {told}. Make it anew: dualkg index RUN") from None


def _load(folder: Path, saved: dict[str, Any], table: dict[str, Any], *, in_memory: bool) -> Index:
    rows, width = map(int, table["shape"])
    choices, kind = dict(table["choices"]), saved["kind"]
    if kind == "exact":
        return ExactIndex.load(folder, saved["metric"], (rows, width), in_memory=in_memory, **choices)
    if kind not in KINDS:
        raise ValueError(f"its kind is '{kind}'")
    return FaissIndex.load(folder, saved["metric"], (rows, width), **choices)
