"""Export of the embeddings of a run, with a manifest that says how they make a score.

The tables are NumPy, TSV or safetensors files, which are written in blocks of rows: several
processes send theirs to the first one. What the manifest says of a model comes from its class
attribute `score_text`.
"""

import json
import math
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from torch import Tensor

from dualkg.errors import InvalidValue
from dualkg.files import atomic_folder, check_new_folder, contents, file_record, locked
from dualkg.models.base import EmbeddingModel, Model
from dualkg.models.score_text import ScoreText
from dualkg.tables.lookup import TABLE_NAMES
from dualkg.training.environment import environment
from dualkg.training.recipe import ModelConfig
from dualkg.training.run import Run, RunFolder

Rows = npt.NDArray[Any]
FORMATS = ("numpy", "tsv", "safetensors")
BLOCK_ROWS = 2**14  # rows of an array that are written at a time
SAFETENSORS_TYPES = {"float16": "F16", "float32": "F32", "float64": "F64", "int64": "I64"}
SAFETENSORS_TYPES |= {"bool": "BOOL", "int32": "I32"}
MANIFEST_FORMAT = 1  # increased when a reader of earlier manifests would misread this one
# Whether the rows of a table are entities or relations; other arrays have no named rows.
ROWS = {**dict.fromkeys(TABLE_NAMES, "entities"), "relations": "relations"}
MEANINGS = {
    "entities": "embeddings of the entities",
    "tails": "embeddings of the entities as tails; the array entities is for heads",
    "relations": "parameters of the relations",
}
VERSIONS = ("date", "python", "packages", "commit")


# -- the score ---------------------------------------------------------------


def score_text_of(embedding: EmbeddingModel) -> ScoreText | None:
    """The text that a class has itself: a subclass may score otherwise than its parent."""
    text: ScoreText | None = vars(type(embedding)).get("score_text")
    return text


def describe_score(model: Model) -> dict[str, Any]:
    """The score of a triple as a formula, and as the source of a NumPy function.

    A model without a `score_text` has its docstring as the formula, and no function.
    """
    embedding = model.embedding
    text = score_text_of(embedding)
    if text is None:
        docstring = (type(embedding).__doc__ or "").strip()
        return {"formula": docstring or None, "numpy": None}

    config = ModelConfig.of(model)
    words, lines = text.describe(config.options, dual=config.dual)
    tails = "tails" if embedding.two_entity_tables else "entities"
    body = [
        f"d = {embedding.dim}",
        'h = arrays["entities"][head]',
        'r = arrays["relations"][relation]',
        f't = arrays["{tails}"][tail]',
        *lines,
    ]
    source = ["import numpy as np", "", "", "def score(arrays, head, relation, tail):"]
    source += [f"    {line}" for line in body]
    return {"formula": f"s(h, r, t) = {words}", "numpy": source}


# -- arrays ------------------------------------------------------------------


class Array(NamedTuple):
    """An array of a model, which `blocks` reads once in blocks of rows."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    blocks: Callable[[], Iterator[Rows]]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


Arrays = Mapping[str, Array]


def arrays_of(model: Model) -> dict[str, Array]:
    """All arrays of a model by name, the rows of entities in the order of ids.

    Several processes read the blocks of their entity tables together.
    """
    tables = model.tables
    arrays = {}
    for name, table in model.embedding.state_dict().items():
        is_divided = name in TABLE_NAMES and not tables.has_all_entities
        shape = (tables.num_entities, *table.shape[1:]) if is_divided else tuple(table.shape)
        blocks = tables.rows_of_all if is_divided else _blocks
        dtype = np.dtype(str(table.dtype).removeprefix("torch."))
        arrays[name] = Array(shape, dtype, partial(_as_numpy, blocks, table))
    return arrays


def _blocks(table: Tensor) -> Iterator[Tensor]:
    if not table.dim():
        yield table
        return
    for start in range(0, len(table), BLOCK_ROWS):
        yield table[start : start + BLOCK_ROWS]


def _as_numpy(blocks: Callable[[Tensor], Iterator[Tensor]], table: Tensor) -> Iterator[Rows]:
    for block in blocks(table.detach()):
        yield np.ascontiguousarray(block.cpu().numpy())


# -- files -------------------------------------------------------------------


def export(run: Run, folder: str | Path, *, format: str = "numpy") -> list[Path]:
    """Write all tables of a model, the names of their rows as JSON, and the manifest.

    Rows are in the order of ids. Of several processes the first writes, and returns the paths.
    """
    folder = Path(folder)
    if format not in FORMATS:
        raise InvalidValue("format", expected=f"one of {', '.join(FORMATS)}", found=format)
    arrays = arrays_of(run.model)
    if not run.model.is_first:
        for array in arrays.values():
            for _ in array.blocks():
                """The first process has it now, too."""
        return []

    names = _row_names(run)
    with locked(folder):
        check_new_folder(folder)
        with atomic_folder(folder) as fresh:
            _write_tables(arrays, names, fresh, format=format)
            for name, rows in names.items():
                _write_json(fresh / f"{name}.json", rows, indent=0)
            manifest = _manifest(run, arrays, fresh, format=format)
            _write_json(fresh / "manifest.json", manifest, indent=1)
        return [folder / name for name in contents(folder)]


def _row_names(run: Run) -> dict[str, list[str]]:
    """The names of entities and of relations; inverse relations follow the others."""
    entities = run.graph.entities.names.to_pylist()
    relations = run.graph.relations.names.to_pylist()
    if run.model.reciprocal:
        relations = relations + [f"{relation}⁻¹" for relation in relations]
    return {"entities": entities, "relations": relations}


def _write_tables(
    arrays: Arrays, names: Mapping[str, list[str]], folder: Path, *, format: str
) -> None:
    if format == "safetensors":
        _write_safetensors(arrays, folder / "tables.safetensors")
        return

    for name, array in arrays.items():
        if format == "numpy":
            _write_npy(array, folder / f"{name}.npy")
        else:
            row_names = names.get(ROWS.get(name, ""))
            _write_tsv(array, row_names, folder / f"{name}.tsv")


def _write_npy(array: Array, path: Path) -> None:
    """Write what `numpy.save` writes."""
    description = np.lib.format.dtype_to_descr(array.dtype)
    header = {"descr": description, "fortran_order": False, "shape": array.shape}
    with path.open("wb") as file:
        np.lib.format.write_array_header_1_0(file, header)
        for block in array.blocks():
            file.write(block.data)


def _write_safetensors(arrays: Arrays, path: Path) -> None:
    """Write the header with the places of all arrays, and the arrays; the library writes a whole.

    The largest numbers come first, which keeps all of them aligned.
    """
    header: dict[str, Any] = {}
    ordered = sorted(arrays, key=lambda name: (-arrays[name].dtype.itemsize, name))
    end = 0
    for name in ordered:
        array = arrays[name]
        start = end
        end += array.num_bytes
        header[name] = {
            "dtype": SAFETENSORS_TYPES[array.dtype.name],
            "shape": list(array.shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in ordered:
            for block in arrays[name].blocks():
                file.write(block.data)


def _write_tsv(array: Array, names: list[str] | None, path: Path) -> None:
    """Write lines of a name, or else a number, and the numbers of a row.

    The text of a float32 reads back exactly.
    """
    number = 0
    with path.open("w", encoding="utf-8") as file:
        for block in array.blocks():
            rows = np.atleast_1d(block)
            for row in rows.reshape(len(rows), -1):
                name = str(number) if names is None else names[number]
                # A tab or a line end in a name would break the table.
                clean = name.replace("\t", " ").replace("\n", " ").replace("\r", " ")
                cells = [clean, *(str(value) for value in row)]
                file.write("\t".join(cells) + "\n")
                number += 1


def _write_json(path: Path, content: object, *, indent: int) -> None:
    path.write_text(json.dumps(content, ensure_ascii=False, indent=indent), encoding="utf-8")


# -- the manifest ------------------------------------------------------------


def _manifest(run: Run, arrays: Arrays, folder: Path, *, format: str) -> dict[str, Any]:
    model = run.model
    graph = run.graph
    config = ModelConfig.of(model).model_dump()
    config.pop("init_scale")
    exported = environment(model.device, fingerprint=graph.fingerprint)
    trained = RunFolder(run.folder).saved_environment if run.folder else {}
    trained_with = {key: trained.get(key) for key in VERSIONS} if trained else None
    return {
        "manifest": MANIFEST_FORMAT,
        "model": config,
        "graph": {"name": graph.name, **graph.shape._asdict(), "fingerprint": graph.fingerprint},
        "score": {**describe_score(model), "order": "A higher score is a more plausible triple."},
        "inverse_relations": _inverse_relations(model),
        "arrays": {
            name: _describe_array(name, array, model, format=format)
            for name, array in arrays.items()
        },
        "names": {name: f"{name}.json" for name in ("entities", "relations")},
        "files": {path.name: file_record(path) for path in sorted(folder.iterdir())},
        "exported_with": {key: exported[key] for key in VERSIONS},
        "trained_with": trained_with,
    }


def _inverse_relations(model: Model) -> dict[str, Any]:
    """Which rows of the relations are inverse ones, and how heads are ranked."""
    if not model.reciprocal:
        meaning = "There are none: heads of (?, r, t) are ranked by score(head, r, t)."
        return {"first_row": None, "meaning": meaning}
    num_relations = model.shape.num_relations
    meaning = (
        f"Row r + {num_relations} of the relations is the inverse of row r. Tails of (h, r, ?) are "
        f"ranked by score(h, r, tail), heads of (?, r, t) by score(t, r + {num_relations}, head)."
    )
    return {"first_row": num_relations, "meaning": meaning}


def _describe_array(name: str, array: Array, model: Model, *, format: str) -> dict[str, Any]:
    """File, shape and meaning of an array; of a table also the parts of its columns."""
    embedding = model.embedding
    text = score_text_of(embedding)
    meanings = MEANINGS if text is None else {**MEANINGS, **text.arrays}
    meaning = meanings.get(name, "a parameter of the model")
    if name == "entities" and embedding.two_entity_tables:
        meaning += " as heads"

    files = {
        "numpy": f"{name}.npy",
        "tsv": f"{name}.tsv",
        "safetensors": "tables.safetensors",
    }
    about: dict[str, Any] = {
        "file": files[format],
        "shape": list(array.shape),
        "dtype": str(array.dtype),
        "rows": ROWS.get(name),
        "meaning": meaning,
    }
    if name in ROWS:
        about["columns"] = _columns(name, array.shape[1], embedding)
    return about


def _columns(name: str, width: int, embedding: EmbeddingModel) -> list[dict[str, Any]]:
    """The parts of the rows of a table, each with its first column and the one after its last."""
    text = score_text_of(embedding)
    if text is None:
        return []
    parts = text.relation if name == "relations" else text.entity
    num_biases = 0 if name == "relations" else embedding.num_biases
    num_vectors = len(parts) - num_biases
    vector_width = (width - num_biases) // max(num_vectors, 1)

    widths = [vector_width] * num_vectors + [1] * num_biases
    ends = list(accumulate(widths))
    starts = [0, *ends[:-1]]
    return [
        {"part": part, "from": start, "to": end}
        for part, start, end in zip(parts, starts, ends, strict=True)
    ]
