"""Export of the embeddings of a run to files for other programs, with a manifest."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from safetensors.numpy import save_file

from dualkg.errors import InvalidValue
from dualkg.files import atomic_folder, check_new_folder, contents, file_record, locked
from dualkg.models.base import Model
from dualkg.tables.base import TABLE_NAMES
from dualkg.training.environment import environment
from dualkg.training.recipe import ModelConfig
from dualkg.training.run import Run
from dualkg.training.run_folder import RunFolder

Arrays = dict[str, npt.NDArray[Any]]
FORMATS = ("numpy", "tsv", "safetensors")
MANIFEST_FORMAT = 2  # increased when a reader of earlier manifests would misread this one
# Whether the rows of a table are entities or relations; other arrays have no named rows.
ROWS = {**dict.fromkeys(TABLE_NAMES, "entities"), "relations": "relations"}
VERSIONS = ("date", "python", "packages", "commit")


def export(run: Run, folder: str | Path, *, format: str = "numpy") -> list[Path]:
    """Write all arrays of a model, the names of their rows as JSON, and the manifest.

    Rows are in the order of ids. Of several processes the first writes, and returns the paths.
    """
    folder = Path(folder)
    if format not in FORMATS:
        raise InvalidValue("format", expected=f"one of {', '.join(FORMATS)}", found=format)
    arrays = arrays_of(run.model)
    if not run.model.is_first:
        return []

    names = _row_names(run)
    with locked(folder):
        check_new_folder(folder)
        with atomic_folder(folder) as fresh:
            files = _write_arrays(arrays, names, fresh, format=format)
            for name, rows in names.items():
                text = json.dumps(rows, ensure_ascii=False, indent=0)
                (fresh / f"{name}.json").write_text(text, encoding="utf-8")
            manifest = _manifest(run, arrays, files, fresh)
            text = json.dumps(manifest, ensure_ascii=False, indent=1)
            (fresh / "manifest.json").write_text(text, encoding="utf-8")
        return [folder / name for name in contents(folder)]


def arrays_of(model: Model) -> Arrays:
    """All arrays of a model by name, the rows of entities in the order of ids.

    Several processes gather their entity tables.
    """
    tables = model.tables
    arrays = {}
    for name, table in model.embedding.state_dict().items():
        if name in TABLE_NAMES and not tables.has_all_entities:
            table = torch.cat([rows.cpu() for rows in tables.rows_of_all(table)])
        arrays[name] = table.cpu().contiguous().numpy()
    return arrays


def _row_names(run: Run) -> dict[str, list[str]]:
    """The names of entities and of relations; inverse relations follow the others."""
    entities = run.graph.entities.names.to_pylist()
    relations = run.graph.relations.names.to_pylist()
    if run.model.reciprocal:
        relations = relations + [f"{relation}⁻¹" for relation in relations]
    return {"entities": entities, "relations": relations}


def _write_arrays(
    arrays: Arrays, names: dict[str, list[str]], folder: Path, *, format: str
) -> dict[str, str]:
    """Write the arrays; return the file of each."""
    if format == "safetensors":
        save_file(arrays, folder / "tables.safetensors")
        return dict.fromkeys(arrays, "tables.safetensors")

    files = {}
    for name, array in arrays.items():
        files[name] = f"{name}.npy" if format == "numpy" else f"{name}.tsv"
        if format == "numpy":
            np.save(folder / files[name], array)
        else:
            _write_tsv(array, names.get(ROWS.get(name, "")), folder / files[name])
    return files


def _write_tsv(array: npt.NDArray[Any], names: list[str] | None, path: Path) -> None:
    """Write lines of a name, or else a number, and the numbers of a row.

    The text of a float32 reads back exactly. In names, white space is one space: the exact names
    are in the files of JSON.
    """
    rows = np.atleast_1d(array)
    with path.open("w", encoding="utf-8") as file:
        for number, row in enumerate(rows.reshape(len(rows), -1)):
            name = str(number) if names is None else " ".join(names[number].split())
            file.write("\t".join([name, *(str(value) for value in row)]) + "\n")


def _manifest(run: Run, arrays: Arrays, files: dict[str, str], folder: Path) -> dict[str, Any]:
    model = run.model
    graph = run.graph
    config = ModelConfig.of(model).model_dump()
    config.pop("init_scale")
    exported = environment(model.device, fingerprint=graph.fingerprint)
    trained = RunFolder(run.folder).saved_environment if run.folder else {}
    return {
        "manifest": MANIFEST_FORMAT,
        "model": config,
        "graph": {"name": graph.name, **graph.shape._asdict(), "fingerprint": graph.fingerprint},
        # The row r + num_relations of the relations is the inverse of row r, by which heads of
        # (?, r, t) are ranked as tails of (t, r⁻¹, ?).
        "inverse_relations": model.shape.num_relations if model.reciprocal else None,
        "arrays": {
            name: {
                "file": files[name],
                "shape": list(array.shape),
                "dtype": str(array.dtype),
                "rows": ROWS.get(name),
            }
            for name, array in arrays.items()
        },
        "names": {name: f"{name}.json" for name in ("entities", "relations")},
        "files": {path.name: file_record(path) for path in sorted(folder.iterdir())},
        "exported_with": {key: exported[key] for key in VERSIONS},
        "trained_with": {key: trained.get(key) for key in VERSIONS} if trained else None,
    }
