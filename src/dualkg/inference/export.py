"""Export of the embeddings of a run: NumPy, TSV or safetensors, with a manifest that says how they
make a score.
"""

import json
import tomllib
from importlib import resources
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError
from safetensors.numpy import save_file

from dualkg.errors import RequestError
from dualkg.files import atomic_folder, check_new_folder, file_record, locks, writing
from dualkg.models import MODELS
from dualkg.models.base import Model
from dualkg.tables.base import TABLE_NAMES
from dualkg.training.classes import name_of
from dualkg.training.recipe import ModelConfig
from dualkg.training.run import Run, RunFolder, environment

FORMATS = ("numpy", "tsv", "safetensors")
MANIFEST_FORMAT = 1  # increased when a reader of earlier manifests would misread this one
ROWS = {
    **dict.fromkeys(TABLE_NAMES, "entities"),
    "relations": "relations",
}  # whose names the rows of a table have

ABOUT: dict[str, dict[str, Any]] = tomllib.loads(
    (resources.files("dualkg.inference") / "export.toml").read_text(encoding="utf-8")
)


def describe_score(model: Model) -> dict[str, Any]:
    """The score of a triple as a formula, and as the source of a NumPy function; None for a model
    of the user's own.
    """
    embedding = model.embedding
    config = ModelConfig.of(model)
    about = ABOUT["models"].get(config.name)
    if about is None:
        return {"formula": (type(embedding).__doc__ or "").strip() or None, "numpy": None}
    formula = about.get("score")
    lines = about.get("numpy", "").splitlines()
    if formula is None:
        formula, lines = _bilinear(config, lines)
    elif "norm" in config.options:
        norm, by_numpy = ABOUT["norms"][str(config.options["norm"])]
        formula = f"−{norm} with x = {formula}"
        lines = [*lines, f"return -{by_numpy}"]
    tails = "tails" if embedding.two_entity_tables else "entities"
    rows = f'h, r, t = arrays["entities"][head], arrays["relations"][relation], arrays["{tails}"][tail]'
    body = [f"    {line}" for line in (f"d = {embedding.dim}", rows, *lines)]
    source = ["import numpy as np", "", "", "def score(arrays, head, relation, tail):", *body]
    return {"formula": f"s(h, r, t) = {formula}", "numpy": source}


def _bilinear(config: ModelConfig, lines: list[str]) -> tuple[str, list[str]]:
    """The formula and all lines of a bilinear model or its dual, after the lines that prepare the
    rows.
    """
    about = ABOUT["models"][config.name]
    given, other = ("tail", "h") if config.dual == "head" else ("head", "t")
    words, mapped = about[given]
    product, by_numpy = about.get("product", ("⟨x, t⟩", "(x * t).sum()"))
    if config.dual != "none":
        product = f"−‖x − {other}‖₂²"
        by_numpy = f"-(np.abs(x - {other}) ** 2).sum()"
    after = [f"x = {mapped}", f"return {by_numpy}"]
    if config.options.get("normalized"):
        words += ", with r divided by its moduli"
        lines = [*lines, ABOUT["options"]["normalized"]]
    if config.options.get("batch_norm") and given == "head":
        words += ", with batch normalization of h and of the result"
        lines = [*lines, *ABOUT["options"]["batch_norm"].splitlines()]
        after.insert(1, 'x = normalize(x, "after")')
    return f"{product} with x = {words}", [*lines, *after]


@locks("folder")
def export(run: Run, folder: str | Path, *, format: str = "numpy") -> list[Path]:
    """Write all tables of a model, rows in the order of ids, the names of the rows as JSON, and the
    manifest.
    """
    folder = Path(folder)
    if format not in FORMATS:
        raise RequestError(f"The format must be one of {', '.join(FORMATS)}; got '{format}'.")
    check_new_folder(folder)
    tables = {
        name: value.detach().cpu().numpy()
        for name, value in run.model.embedding.state_dict().items()
    }
    names = {
        "entities": run.graph.entities.names.to_pylist(),
        "relations": run.graph.relations.names.to_pylist(),
    }
    if run.model.reciprocal:
        names["relations"] = names["relations"] + [
            f"{relation}⁻¹" for relation in names["relations"]
        ]
    with atomic_folder(folder) as fresh:
        if format == "safetensors":
            with writing(path := fresh / "tables.safetensors", SafetensorError):
                save_file({name: np.ascontiguousarray(one) for name, one in tables.items()}, path)
        for name, table in tables.items():
            if format == "numpy":
                np.save(fresh / f"{name}.npy", table)
            elif format == "tsv":
                _write_tsv(
                    np.atleast_1d(table), names.get(ROWS.get(name, "")), fresh / f"{name}.tsv"
                )
        for name, rows in names.items():
            (fresh / f"{name}.json").write_text(
                json.dumps(rows, ensure_ascii=False, indent=0), encoding="utf-8"
            )
        manifest = json.dumps(_manifest(run, tables, format, fresh), ensure_ascii=False, indent=1)
        (fresh / "manifest.json").write_text(manifest, encoding="utf-8")
    return sorted(folder.iterdir())


def _manifest(
    run: Run, tables: dict[str, npt.NDArray[Any]], format: str, folder: Path
) -> dict[str, Any]:
    model = run.model
    graph = run.graph
    config = {
        key: value
        for key, value in ModelConfig.of(model).model_dump().items()
        if key != "init_scale"
    }
    made = environment(model.device, fingerprint=graph.fingerprint)
    trained = RunFolder(run.folder).saved_environment if run.folder else {}
    versions = ("date", "python", "packages", "commit")
    num_relations = graph.shape.num_relations
    about = "There are none: heads of (?, r, t) are ranked by score(head, r, t)."
    if model.reciprocal:
        about = (
            f"Row r + {num_relations} of the relations is the inverse of row r. Tails of (h, r, "
            "?) are ranked by score(h, r, tail), heads of (?, r, t) by score(t, r + "
            f"{num_relations}, head)."
        )
    return {
        "manifest": MANIFEST_FORMAT,
        "model": config,
        "graph": {"name": graph.name, **graph.shape._asdict(), "fingerprint": graph.fingerprint},
        "score": {**describe_score(model), "order": "A higher score is a more plausible triple."},
        "inverse_relations": {
            "first_row": num_relations if model.reciprocal else None,
            "meaning": about,
        },
        "arrays": {name: _describe(name, table, model, format) for name, table in tables.items()},
        "names": {name: f"{name}.json" for name in ("entities", "relations")},
        "files": {path.name: file_record(path) for path in sorted(folder.iterdir())},
        "exported_with": {key: made[key] for key in versions},
        "trained_with": {key: trained.get(key) for key in versions} if trained else None,
    }


def _describe(name: str, table: npt.NDArray[Any], model: Model, format: str) -> dict[str, Any]:
    meaning = ABOUT["arrays"].get(name.rpartition(".")[2], "a parameter of the model")
    if name == "entities" and model.embedding.two_entity_tables:
        meaning += " as heads"
    if name.startswith(("before.", "after.")):
        meaning += " (of heads)" if name.startswith("before.") else " (of mapped heads)"
    found: dict[str, Any] = {
        "file": "tables.safetensors"
        if format == "safetensors"
        else f"{name}.{'npy' if format == 'numpy' else 'tsv'}",
        "shape": list(table.shape),
        "dtype": str(table.dtype),
        "rows": ROWS.get(name),
        "meaning": meaning,
    }
    if name in ROWS:
        about = ABOUT["models"].get(name_of(model.embedding, MODELS))
        key, biases = (
            ("relation", 0) if name == "relations" else ("entity", model.embedding.num_biases)
        )
        parts = about.get(key, ["coordinates"]) if about else []
        width = (table.shape[1] - biases) // max(len(parts) - biases, 1)
        ends = list(accumulate([width] * (len(parts) - biases) + [1] * biases))
        found["columns"] = [
            {"part": part, "from": start, "to": end}
            for part, start, end in zip(parts, [0, *ends], ends, strict=False)
        ]
    return found


def _write_tsv(table: npt.NDArray[np.float32], names: list[str] | None, path: Path) -> None:
    with path.open("w", encoding="utf-8") as file:
        names = names or [str(number) for number in range(len(table))]
        for name, row in zip(names, table.reshape(len(table), -1), strict=True):
            # A tab or a line end in a name would break the table; the text of a float32 reads back
            # exactly.
            clean = name.replace("\t", " ").replace("\n", " ").replace("\r", " ")
            file.write("\t".join([clean, *(str(value) for value in row)]) + "\n")
