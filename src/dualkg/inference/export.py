"""A run's embeddings for other programs: NumPy, TSV or safetensors."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt
from safetensors.numpy import save_file

from dualkg.data.vocabulary import Vocabulary
from dualkg.errors import RequestError
from dualkg.files import atomic_folder
from dualkg.training.run import Run

Tables = dict[str, npt.NDArray[np.float32]]


def export(run: Run, folder: str | Path, *, format: str = "numpy") -> list[Path]:
    """Write every table of a model, its rows in the order of ids, and the names of the rows beside them."""
    folder = Path(folder)
    if format not in FORMATS:
        raise RequestError(f"Embeddings are exported as {', '.join(FORMATS)}; '{format}' was asked for.")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise RequestError(f"{folder} exists already. Name a new folder with --out.")
    tables = {name: value.detach().cpu().numpy() for name, value in run.model.embedding.state_dict().items()}
    with atomic_folder(folder) as fresh:
        FORMATS[format](tables, run, fresh)
        for vocabulary, name in ((run.graph.entities, "entities"), (run.graph.relations, "relations")):
            text = json.dumps(row_names(vocabulary, name, run), ensure_ascii=False, indent=0)
            (fresh / f"{name}.json").write_text(text, encoding="utf-8")
    return sorted(folder.iterdir())


def row_names(vocabulary: Vocabulary, name: str, run: Run) -> list[str]:
    """The names of a table's rows; reciprocal relations follow the relations as `name⁻¹`."""
    names: list[str] = vocabulary.names.to_pylist()
    if name == "relations" and run.model.reciprocal:
        names = names + [f"{relation}⁻¹" for relation in names]
    return names


def _numpy(tables: Tables, run: Run, folder: Path) -> None:
    for name, table in tables.items():
        np.save(folder / f"{name}.npy", table)


def _safetensors(tables: Tables, run: Run, folder: Path) -> None:
    save_file({name: np.ascontiguousarray(table) for name, table in tables.items()}, folder / "tables.safetensors")


def _tsv(tables: Tables, run: Run, folder: Path) -> None:
    of_entities = row_names(run.graph.entities, "entities", run)
    named = {
        "entities": of_entities,
        "tails": of_entities,
        "biases": of_entities,
        "relations": row_names(run.graph.relations, "relations", run),
    }
    for name, table in ((name, np.atleast_1d(table)) for name, table in tables.items()):
        names = named.get(name) or [str(number) for number in range(len(table))]
        with (folder / f"{name}.tsv").open("w", encoding="utf-8") as file:
            for row_name, row in zip(names, table.reshape(len(table), -1), strict=True):
                # A tab or a line end inside a name would break the table; repr of a float32 reads back exactly.
                clean = row_name.replace("\t", " ").replace("\n", " ").replace("\r", " ")
                file.write("\t".join([clean, *(str(value) for value in row)]) + "\n")


FORMATS: dict[str, Callable[[Tables, Run, Path], None]] = {"numpy": _numpy, "tsv": _tsv, "safetensors": _safetensors}
