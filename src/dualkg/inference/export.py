"""Export of the embeddings of a run: NumPy, TSV or safetensors, with a manifest that says how they make a score."""

import json
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
from dualkg.models.sharded import TABLES
from dualkg.training.recipe import ModelConfig, name_of
from dualkg.training.run import Run, RunFolder, environment

FORMATS = ("numpy", "tsv", "safetensors")
MANIFEST_FORMAT = 1  # increased when a reader of earlier manifests would misread this one
ROWS = {**dict.fromkeys(TABLES, "entities"), "relations": "relations"}  # whose names the rows of a table have

COMPLEX = "h, r, t = (x[:d] + 1j * x[d:] for x in (h, r, t))"
NORMS = {
    1: ("‖x‖₁ (the sum of the moduli)", "np.abs(x).sum()"),
    2: ("‖x‖₂", "np.linalg.norm(x)"),
    "squared": ("‖x‖₂²", "np.linalg.norm(x) ** 2"),
}
# The map of the head and of the tail, in words, then in NumPy after some lines that prepare the rows h, r and t.
BILINEAR: dict[str, tuple[str, str, list[str], str, str]] = {
    "CP": ("h ∘ r", "t ∘ r", [], "h * r", "t * r"),
    "DistMult": ("h ∘ r", "t ∘ r", [], "h * r", "t * r"),
    "ComplEx": ("h ∘ r, complex", "t ∘ r̄, complex", [COMPLEX], "h * r", "t * r.conj()"),
    "RESCAL": ("h R", "t Rᵀ", ["R = r.reshape(d, d)"], "h @ R", "t @ R.T"),
    "TuckER": ("h Σₖ rₖ Wₖ", "t Σₖ rₖ Wₖᵀ", ['R = np.tensordot(r, arrays["core"], axes=1)'], "h @ R", "t @ R.T"),
    "SimplE": (
        "½ (h″ ∘ r″, h′ ∘ r′)",
        "½ (t″ ∘ r′, t′ ∘ r″)",
        [],
        "np.concatenate([h[d:] * r[d:], h[:d] * r[:d]]) / 2",
        "np.concatenate([t[d:] * r[:d], t[:d] * r[d:]]) / 2",
    ),
    "QuatE": (
        "h ⊗ r, the Hamilton product of quaternions",
        "t ⊗ r̄, the Hamilton product of quaternions",
        [
            "h, r, t = (x.reshape(4, d) for x in (h, r, t))",
            "times = lambda x, y: np.stack([",
            "    x[0] * y[0] - x[1] * y[1] - x[2] * y[2] - x[3] * y[3],",
            "    x[0] * y[1] + x[1] * y[0] + x[2] * y[3] - x[3] * y[2],",
            "    x[0] * y[2] - x[1] * y[3] + x[2] * y[0] + x[3] * y[1],",
            "    x[0] * y[3] + x[1] * y[2] - x[2] * y[1] + x[3] * y[0],",
            "])",
        ],
        "times(h, r)",
        "times(t, np.stack([r[0], -r[1], -r[2], -r[3]]))",
    ),
}
# In words, then as the lines of NumPy: the score, or the difference x whose norm is the distance.
DISTANCE: dict[str, tuple[str, list[str]]] = {
    "TransE": ("h + r − t", ["x = h + r - t"]),
    "ModE": ("h ∘ r − t", ["x = h * r - t"]),
    "RotatE": (
        "h ∘ exp(iθ) − t, complex, with the angles θ = π r / half_turn",
        [
            "h, t = (x[:d] + 1j * x[d:] for x in (h, t))",
            'angle = np.pi * r / arrays["half_turn"]',
            "x = h * np.exp(1j * angle) - t",
        ],
    ),
    "SE": ("h R₁ − t R₂", ["R = r.reshape(2, d, d)", "x = h @ R[0] - t @ R[1]"]),
    "HAKE": (
        "−a ‖h′ ∘ (m + b) − t′ ∘ (1 − b)‖₂ − c Σ |sin((h″ + r″ − t″) / 2)|, with m = |r′|, b limited to −m ≤ b ≤ 1, "
        "angles in units of half_turn / π, and (a, c) = scales",
        [
            'angle = np.pi * (h[d:] + r[2 * d :] - t[d:]) / arrays["half_turn"]',
            "m = np.abs(r[:d])",
            "b = np.maximum(np.minimum(r[d : 2 * d], 1), -m)",
            "x = h[:d] * (m + b) - t[:d] * (1 - b)",
            'a, c = arrays["scales"]',
            "return -a * np.linalg.norm(x) - c * np.abs(np.sin(angle / 2)).sum()",
        ],
    ),
    "MuRP": (
        "−d(R h, t ⊕ r)² + b_h + b_t in the Poincaré ball; a stored vector v is the point tanh(‖v‖) v / ‖v‖, "
        "⊕ is Möbius addition, and R is diagonal",
        [
            "length = lambda v: max(np.linalg.norm(v), 1e-15**0.5)",
            "ball = lambda v: min(np.tanh(length(v)), 1 - 1e-5) / length(v) * v",
            "x, y, s = ball(h[:d] * r[:d]), ball(t[:d]), ball(r[d:])",
            "y = ((1 + 2 * y @ s + s @ s) * y + (1 - y @ y) * s) / (1 + 2 * y @ s + (y @ y) * (s @ s))",
            "distance = 2 * np.arcsinh(np.linalg.norm(x - y) / np.sqrt((1 - x @ x) * (1 - y @ y)))",
            "return h[d] + t[d + 1] - distance**2",
        ],
    ),
}
# Parts of a row, equally long; the biases of an entity are one number each.
PARTS: dict[str, tuple[list[str], list[str]]] = {
    "ComplEx": (["real parts", "imaginary parts"], ["real parts", "imaginary parts"]),
    "QuatE": (["real parts", "i parts", "j parts", "k parts"], ["real parts", "i parts", "j parts", "k parts"]),
    "SimplE": (["h′, the vector as head", "h″, the vector as tail"], ["r′, the relation", "r″, its inverse"]),
    "RESCAL": (["coordinates"], ["the matrix R, dim × dim, row by row"]),
    "SE": (["coordinates"], ["R₁ of heads, dim × dim, row by row", "R₂ of tails, dim × dim, row by row"]),
    "RotatE": (["real parts", "imaginary parts"], ["angles, of which half_turn is π"]),
    "HAKE": (
        ["moduli h′", "angles h″, of which half_turn is π"],
        ["moduli r′", "biases b", "angles r″, of which half_turn is π"],
    ),
    "MuRP": (
        ["tangent vector at the origin", "bias as head", "bias as tail"],
        ["diagonal of R", "tangent vector of r"],
    ),
}
MEANINGS = {
    "entities": "embeddings of the entities",
    "tails": "embeddings of the entities as tails; the array entities is for heads",
    "relations": "parameters of the relations",
    "core": "the matrices Wₖ that all relations share: [k, row, column]",
    "scales": "the weights a of moduli and c of angles",
    "half_turn": "the stored number of the angle π",
    "mean": "batch normalization: mean",
    "variance": "batch normalization: variance, to which 1e-5 is added",
    "scale": "batch normalization: factor",
    "shift": "batch normalization: summand",
}


def describe_score(model: Model) -> dict[str, Any]:
    """The score of a triple as a formula, and as the source of a NumPy function; None for a model of the user's own."""
    embedding, config = model.embedding, ModelConfig.of(model)
    if config.name in BILINEAR:
        formula, lines = _bilinear(config)
    elif config.name in DISTANCE:
        formula, lines = DISTANCE[config.name]
        if "norm" in config.options:
            norm, by_numpy = NORMS[config.options["norm"]]
            formula, lines = f"−{norm} with x = {formula}", [*lines, f"return -{by_numpy}"]
    else:
        return {"formula": (type(embedding).__doc__ or "").strip() or None, "numpy": None}
    tails = "tails" if embedding.two_entity_tables else "entities"
    rows = f'h, r, t = arrays["entities"][head], arrays["relations"][relation], arrays["{tails}"][tail]'
    body = [f"    {line}" for line in (f"d = {embedding.dim}", rows, *lines)]
    source = ["import numpy as np", "", "", "def score(arrays, head, relation, tail):", *body]
    return {"formula": f"s(h, r, t) = {formula}", "numpy": source}


def _bilinear(config: ModelConfig) -> tuple[str, list[str]]:
    of_head, of_tail, lines, mapped_head, mapped_tail = BILINEAR[config.name]
    if config.options.get("normalized"):
        of_head, of_tail = (f"{words}, with r divided by its moduli" for words in (of_head, of_tail))
        at = lines.index("times = lambda x, y: np.stack([")
        lines = [*lines[:at], "r = r / np.maximum(np.linalg.norm(r, axis=0), 1e-30)", *lines[at:]]
    if config.dual == "head":
        return f"−‖x − h‖₂² with x = {of_tail}", [*lines, f"x = {mapped_tail}", "return -(np.abs(x - h) ** 2).sum()"]
    mapped = [f"x = {mapped_head}"]
    if config.options.get("batch_norm"):
        of_head += ", with batch normalization of h and of the result"
        normalize = [
            "def normalize(x, name):",
            '    mean, variance = arrays[f"{name}.mean"], arrays[f"{name}.variance"]',
            '    return (x - mean) / np.sqrt(variance + 1e-5) * arrays[f"{name}.scale"] + arrays[f"{name}.shift"]',
        ]
        lines = [*lines, *normalize, 'h = normalize(h, "before")']
        mapped.append('x = normalize(x, "after")')
    if config.dual == "tail":
        return f"−‖x − t‖₂² with x = {of_head}", [*lines, *mapped, "return -(np.abs(x - t) ** 2).sum()"]
    product = "(x * t.conj()).sum().real" if config.name == "ComplEx" else "(x * t).sum()"
    words = "Re Σ xᵢ t̄ᵢ" if config.name == "ComplEx" else "⟨x, t⟩"
    return f"{words} with x = {of_head}", [*lines, *mapped, f"return {product}"]


@locks("folder")
def export(run: Run, folder: str | Path, *, format: str = "numpy") -> list[Path]:
    """Write all tables of a model, rows in the order of ids, the names of the rows as JSON, and the manifest."""
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
            with writing(path := fresh / "tables.safetensors", SafetensorError):
                save_file({name: np.ascontiguousarray(one) for name, one in tables.items()}, path)
        for name, table in tables.items():
            if format == "numpy":
                np.save(fresh / f"{name}.npy", table)
            elif format == "tsv":
                _write_tsv(np.atleast_1d(table), names.get(ROWS.get(name, "")), fresh / f"{name}.tsv")
        for name, rows in names.items():
            (fresh / f"{name}.json").write_text(json.dumps(rows, ensure_ascii=False, indent=0), encoding="utf-8")
        manifest = json.dumps(_manifest(run, tables, format, fresh), ensure_ascii=False, indent=1)
        (fresh / "manifest.json").write_text(manifest, encoding="utf-8")
    return sorted(folder.iterdir())


def _manifest(run: Run, tables: dict[str, npt.NDArray[Any]], format: str, folder: Path) -> dict[str, Any]:
    model, graph = run.model, run.graph
    config = {key: value for key, value in ModelConfig.of(model).model_dump().items() if key != "init_scale"}
    made = environment(model.device, fingerprint=graph.fingerprint)
    trained = RunFolder(run.folder).saved_environment if run.folder else {}
    versions = ("date", "python", "packages", "commit")
    num_relations = graph.shape.num_relations
    about = "There are none: heads of (?, r, t) are ranked by score(head, r, t)."
    if model.reciprocal:
        about = (
            f"Row r + {num_relations} of the relations is the inverse of row r. Tails of (h, r, ?) are ranked by "
            f"score(h, r, tail), heads of (?, r, t) by score(t, r + {num_relations}, head)."
        )
    return {
        "manifest": MANIFEST_FORMAT,
        "model": config,
        "graph": {"name": graph.name, **graph.shape._asdict(), "fingerprint": graph.fingerprint},
        "score": {**describe_score(model), "order": "A higher score is a more plausible triple."},
        "inverse_relations": {"first_row": num_relations if model.reciprocal else None, "meaning": about},
        "arrays": {name: _describe(name, table, model, format) for name, table in tables.items()},
        "names": {name: f"{name}.json" for name in ("entities", "relations")},
        "files": {path.name: file_record(path) for path in sorted(folder.iterdir())},
        "exported_with": {key: made[key] for key in versions},
        "trained_with": {key: trained.get(key) for key in versions} if trained else None,
    }


def _describe(name: str, table: npt.NDArray[Any], model: Model, format: str) -> dict[str, Any]:
    kind = name_of(model.embedding, MODELS)
    meaning = MEANINGS.get(name.rpartition(".")[2], "a parameter of the model")
    if name == "entities" and model.embedding.two_entity_tables:
        meaning += " as heads"
    if name.startswith(("before.", "after.")):
        meaning += " (of heads)" if name.startswith("before.") else " (of mapped heads)"
    found: dict[str, Any] = {
        "file": "tables.safetensors" if format == "safetensors" else f"{name}.{'npy' if format == 'numpy' else 'tsv'}",
        "shape": list(table.shape),
        "dtype": str(table.dtype),
        "rows": ROWS.get(name),
        "meaning": meaning,
    }
    if name in ROWS:
        entity, relation = PARTS.get(kind, (["coordinates"], ["coordinates"])) if kind in MODELS else ([], [])
        parts, biases = (relation, 0) if name == "relations" else (entity, model.embedding.num_biases)
        width = (table.shape[1] - biases) // max(len(parts) - biases, 1)
        ends = list(accumulate([width] * (len(parts) - biases) + [1] * biases))
        found["columns"] = [
            {"part": part, "from": start, "to": end} for part, start, end in zip(parts, [0, *ends], ends, strict=False)
        ]
    return found


def _write_tsv(table: npt.NDArray[np.float32], names: list[str] | None, path: Path) -> None:
    with path.open("w", encoding="utf-8") as file:
        names = names or [str(number) for number in range(len(table))]
        for name, row in zip(names, table.reshape(len(table), -1), strict=True):
            # A tab or a line end in a name would break the table; the text of a float32 reads back exactly.
            clean = name.replace("\t", " ").replace("\n", " ").replace("\r", " ")
            file.write("\t".join([clean, *(str(value) for value in row)]) + "\n")
