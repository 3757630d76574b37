"""Export of the embeddings of a run: NumPy, TSV or safetensors."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import numpy.typing as npt
from safetensors.numpy import save_file

from dualkg.errors import RequestError
from dualkg.files import atomic_folder, check_new_folder
from dualkg.training.run import Run

FORMATS = ("numpy", "tsv", "safetensors")
NAMED_TABLES = ("entities", "tails", "biases", "relations")  # with a row for each entity or relation


def export(run: Run, folder: str | Path, *, format: str = "numpy") -> list[Path]:
    """Write all tables of a model, rows in the order of ids, and the names of the rows as JSON."""
    folder = Path(folder)
    if format not in FORMATS:
        raise RequestError(f"The format must be one of {', '.join(FORMATS)}; got '{format}'.")
    check_new_folder(folder)
    tables = {name: value.detach().cpu().numpy() for name, value in run.model.embedding.state_dict().items()}
    names = {"entities": run.graph.entities.names.to_pylist(), "relations": run.graph.relations.names.to_pylist()}
    if run.model.reciprocal:
        names["relations"] = names["relations"] + [f"{relation}⁻¹" for relation in names["relations"]]
    with atomic_folder(folder) as fresh:
        if format == "safetensors":
            save_file({name: np.ascontiguousarray(one) for name, one in tables.items()}, fresh / "tables.safetensors")
        for name, table in tables.items():
            if format == "numpy":
                np.save(fresh / f"{name}.npy", table)
            elif format == "tsv":
                rows = names["relations"] if name == "relations" else names["entities"]
                _write_tsv(np.atleast_1d(table), rows if name in NAMED_TABLES else None, fresh / f"{name}.tsv")
        for name, rows in names.items():
            (fresh / f"{name}.json").write_text(json.dumps(rows, ensure_ascii=False, indent=0), encoding="utf-8")
    return sorted(folder.iterdir())


def _write_tsv(table: npt.NDArray[np.float32], names: list[str] | None, path: Path) -> None:
    with path.open("w", encoding="utf-8") as file:
        names = names or [str(number) for number in range(len(table))]
        for name, row in zip(names, table.reshape(len(table), -1), strict=True):
            # A tab or a line end in a name would break the table; the text of a float32 reads back exactly.
            clean = name.replace("\t", " ").replace("\n", " ").replace("\r", " ")
            file.write("\t".join([clean, *(str(value) for value in row)]) + "\n")
