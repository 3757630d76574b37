"""Embeddings that were trained elsewhere, as a run that can be evaluated, queried and saved."""

import math
from collections.abc import Mapping, Sequence
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dualkg.data.graph import SPLITS, Graph, GraphShape, Triples
from dualkg.data.triples import NO_TRIPLES, notes_on_repeats
from dualkg.data.vocabulary import Vocabulary
from dualkg.errors import RequestError
from dualkg.evaluation.ranking import eval_mode
from dualkg.files import read_text, regular_file
from dualkg.models import MODELS
from dualkg.models.base import EmbeddingModel
from dualkg.models.diagonal import SimplE
from dualkg.models.distance import AngleModel, RotatE
from dualkg.tables.base import TABLE_NAMES, local_tables
from dualkg.training.checkpoint import load_weights
from dualkg.training.classes import find_class
from dualkg.training.recipe import Data, ModelConfig, Recipe
from dualkg.training.run import TrainedRun

Array = npt.ArrayLike
MAX_DATASET = 4 << 30  # bytes of a file of LibKGE's
UNIT = 1e-3  # how far the modulus of a rotation may be from 1
PYKEEN_MODELS = (
    "ComplEx",
    "CP",
    "DistMult",
    "QuatE",
    "RESCAL",
    "RotatE",
    "SE",
    "SimplE",
    "TransE",
    "TuckER",
)
LIBKGE_MODELS = {
    name.lower(): name
    for name in ("ComplEx", "CP", "DistMult", "RESCAL", "RotatE", "SimplE", "TransE")
}
LIBKGE_MODELS["relational_tucker3"] = "TuckER"


def refused(what: str, reason: str, *, advice: str = "") -> RequestError:
    """The error of embeddings that cannot be imported."""
    return RequestError(f"{what} {reason}. {advice}".rstrip())


def from_arrays(
    model: str,
    *,
    entities: Array,
    relations: Array,
    tails: Array | None = None,
    parameters: Mapping[str, Array] | None = None,
    options: Mapping[str, Any] | None = None,
    graph: Graph | None = None,
    entity_names: Sequence[str] | None = None,
    relation_names: Sequence[str] | None = None,
) -> TrainedRun:
    """Make a run from tables `(num_entities, width)` and `(num_relations or twice that, …)`.

    Complex arrays become all real parts, then all imaginary parts. Angles are in radians.

    Args:
        model: Name of the model.
        entities: Rows of the entities.
        relations: Rows of the relations. With twice as many rows, those of the reciprocals follow.
        tails: The second entity table, which CP needs.
        parameters: Other arrays of the model by name, such as the `core` of TuckER.
        options: Options of the model class, such as `norm`.
        graph: The graph whose ids the rows have.
        entity_names: Names of the rows of entities, where the graph has another order or is
            missing.
        relation_names: Names of the rows of relations, likewise.

    Returns:
        A run, which predicts and can be saved.

    Examples:
        >>> import numpy as np
        >>> tables = {"entities": np.eye(3), "relations": np.ones((1, 3))}
        >>> names = {"entity_names": ["a", "b", "c"], "relation_names": ["same"]}
        >>> imported = kg.from_arrays("DistMult", **tables, **names)
        >>> imported.predictor().score("a", "same", "b")
        0.0
    """
    kind = find_class(model, MODELS, EmbeddingModel)
    given = {"entities": entities, "relations": relations, "tails": tails}
    tables = {name: _real(table, name, kind) for name, table in given.items() if table is not None}
    tables |= {name: _tensor(value) for name, value in (parameters or {}).items()}
    if issubclass(kind, AngleModel):
        tables.setdefault("half_turn", torch.tensor(math.pi))
    if graph is None:
        if entity_names is None or relation_names is None:
            raise refused(
                "from_arrays",
                "needs a graph, or entity_names and relation_names, to name the rows",
            )
        graph = _graph("imported", entity_names, relation_names, {})
    num_rows = len(tables["relations"])
    num_relations = graph.shape.num_relations
    if num_rows not in (num_relations, 2 * num_relations):
        raise refused(
            "The relation table",
            f"should have {num_relations:,} rows, or {2 * num_relations:,} with reciprocals; it "
            f"has {num_rows:,}",
        )
    if entity_names is not None:
        for name in TABLE_NAMES:
            if name in tables:
                tables[name] = _in_graph_order(tables[name], entity_names, graph.entities)
    if relation_names is not None:
        tables["relations"] = _in_graph_order(tables["relations"], relation_names, graph.relations)
    dim = (tables["entities"].shape[1] - kind.num_biases) // kind.numbers_per_coordinate
    reciprocal = num_rows == 2 * num_relations
    config = ModelConfig(name=model, dim=dim, reciprocal=reciprocal, options=dict(options or {}))
    zeros = local_tables(len(graph.entities), initialize=False)
    built = config.build(graph.shape, seed=0, tables=zeros)
    load_weights(built, tables, source="The set of arrays")
    return TrainedRun(built.eval(), graph, Recipe(data=Data(graph=graph.name), model=config))


def _graph(
    name: str, entities: Sequence[str], relations: Sequence[str], splits: Mapping[Any, Triples]
) -> Graph:
    """A graph whose ids are the positions of the names."""
    triples: dict[str, Triples] = {split: splits.get(split, NO_TRIPLES) for split in SPLITS}
    vocabularies = Vocabulary(list(entities)), Vocabulary(list(relations), kind="relation")
    shape = GraphShape(len(entities), len(relations))
    ends = [shape.num_entities, shape.num_relations, shape.num_entities]
    for split, rows in triples.items():
        if len(rows) and (rows.min() < 0 or (rows.max(axis=0) >= ends).any()):
            raise refused(
                f"The {split} triples",
                f"have ids that are not among the {shape.num_entities:,} entities and "
                f"{shape.num_relations:,} relations",
            )
    notes = tuple(notes_on_repeats(triples, shape))
    graph = Graph(name, *vocabularies, **triples, notes=notes)  # type: ignore[arg-type]
    return graph.with_fingerprint()


def _numpy(values: Array) -> npt.NDArray[Any]:
    return values.detach().cpu().numpy() if isinstance(values, Tensor) else np.asarray(values)


def _tensor(values: Array) -> Tensor:
    return torch.from_numpy(np.array(_numpy(values), dtype=np.float32))


def _real(table: Array, name: str, kind: type[EmbeddingModel]) -> Tensor:
    values = _numpy(table)
    if values.ndim < 2:
        reason = f"should be a table with a row for each name; its shape is {values.shape}"
        raise refused(name, reason)
    values = values.reshape(len(values), -1)
    if np.iscomplexobj(values) and kind is RotatE and name == "relations":
        if (error := np.abs(np.abs(values) - 1).max(initial=0)) > UNIT:
            raise refused(
                "The relations of RotatE",
                "are complex numbers of modulus 1, or angles in radians; there is a modulus that "
                f"differs from 1 by {error:.2g}",
            )
        values = np.angle(values)
    elif np.iscomplexobj(values):
        if (
            kind.numbers_per_coordinate != 2 or kind is SimplE
        ):  # one of its two numbers is for heads, one for tails
            raise refused(name, f"are complex numbers; {kind.__name__} has real ones")
        values = np.concatenate([values.real, values.imag], axis=1)
    return _tensor(values)


def _in_graph_order(table: Tensor, names: Sequence[str], vocabulary: Vocabulary) -> Tensor:
    row_of = {name: row for row, name in enumerate(names)}
    wanted = vocabulary.names.to_pylist()
    if len(row_of) < len(names):
        num_repeated = len(names) - len(row_of)
        raise refused(f"{num_repeated:,} of the {len(names):,} names of rows", "are repeated")
    if len(table) not in (
        len(names),
        2 * len(names) if vocabulary.kind == "relation" else len(names),
    ):
        raise refused("There", f"are {len(names):,} names for {len(table):,} rows")
    missing = [name for name in wanted if name not in row_of]
    if missing:
        raise refused(
            "The arrays",
            f"have no row for {len(missing):,} names of the graph, such as '{missing[0]}'",
        )
    order = torch.tensor([row_of[name] for name in wanted], dtype=torch.long)
    return torch.cat([rows[order] for rows in torch.split(table, len(names))])


def from_pykeen(
    model: Any, factory: Any, *, valid: Any = None, test: Any = None, graph: Graph | None = None
) -> TrainedRun:
    """Make a run from a trained model of PyKEEN.

    Representations are taken as the model uses them in evaluation, after normalization.

    Args:
        model: A trained model of PyKEEN.
        factory: The triples factory that it was trained with, or the dataset.
        valid: Factory of the validation split, which a dataset has.
        test: Factory of the test split, which a dataset has.
        graph: A graph, in the order of whose names the rows are put.

    Returns:
        A run, with reports if there are splits.

    Examples:
        >>> from pykeen.pipeline import pipeline  # doctest: +SKIP
        >>> result = pipeline(model="ComplEx", dataset="nations")  # doctest: +SKIP
        >>> run = kg.from_pykeen(result.model, result.training)  # doctest: +SKIP
    """
    attributes = ("interaction", "entity_representations", "relation_representations")
    if not all(hasattr(model, name) for name in attributes):
        raise refused(
            "A model of PyKEEN",
            f"was expected; it is {type(model).__name__}",
            advice=_supported(PYKEEN_MODELS),
        )
    if hasattr(factory, "training"):
        dataset = factory
        factory = factory.training
        valid = dataset.validation if valid is None else valid
        test = dataset.testing if test is None else test
    if not hasattr(factory, "mapped_triples"):
        raise refused(
            "A triples factory or a dataset of PyKEEN",
            f"was expected; it is {type(factory).__name__}",
        )
    # In evaluation there is no dropout, and batch normalization uses its running statistics.
    with torch.no_grad(), eval_mode(model):
        entities = [part(indices=None).detach().cpu() for part in model.entity_representations]
        relations = [part(indices=None).detach().cpu() for part in model.relation_representations]
        relations = _reciprocals_last(model, relations, factory.real_num_relations)
        arrays = _pykeen_arrays(model, entities, relations)
    entity_names = _pykeen_names(factory, "entity", factory.num_entities)
    relation_names = _pykeen_names(factory, "relation", factory.real_num_relations)
    if len(arrays["entities"]) != factory.num_entities:
        raise refused(
            "The model",
            f"has {len(arrays['entities']):,} entities and the factory {factory.num_entities:,}",
            advice=SAME_FACTORY,
        )
    splits = {}
    for split, split_factory in {"train": factory, "valid": valid, "test": test}.items():
        if split_factory is not None:
            _check_same_ids(split, split_factory, factory)
            splits[split] = split_factory.mapped_triples.cpu().numpy().astype(np.int32)
    graph = graph or _graph("pykeen", entity_names, relation_names, splits)
    return from_arrays(
        **arrays, graph=graph, entity_names=entity_names, relation_names=relation_names
    )


SAME_FACTORY = "Give the factory that the model was trained with."


def _check_same_ids(split: str, factory: Any, training: Any) -> None:
    for kind in ("entity_to_id", "relation_to_id"):
        if getattr(factory, kind, None) != getattr(training, kind, None):
            raise refused(
                f"The {split} factory",
                f"has other ids than that of training: its {kind} differs",
                advice="Create it with entity_to_id=training.entity_to_id and "
                "relation_to_id=training.relation_to_id.",
            )


def _supported(names: Sequence[str]) -> str:
    return f"These can be imported: {', '.join(names)}."


def _pykeen_names(factory: Any, kind: str, num: int) -> list[str]:
    names: Mapping[int, object] | None = getattr(factory, f"{kind}_id_to_label", None)
    return [str(id if names is None else names[id]) for id in range(num)]


def _reciprocals_last(model: Any, tables: Sequence[Tensor], num_relations: int) -> list[Tensor]:
    """Rows of all relations, then of their inverses; PyKEEN alternates them."""
    expected = num_relations * (2 if model.use_inverse_triples else 1)
    if any(len(table) != expected for table in tables):
        raise refused(
            "The model",
            f"has {len(tables[0]):,} relation rows and the factory needs {expected:,}",
            advice=SAME_FACTORY,
        )
    if not model.use_inverse_triples:
        return list(tables)
    triples = torch.arange(num_relations).repeat(3, 1).T
    order = torch.cat(
        [model.relation_inverter.map(triples, invert=inverse)[:, 1] for inverse in (False, True)]
    )
    return [table[order] for table in tables]


def _pykeen_arrays(model: Any, entities: list[Tensor], relations: list[Tensor]) -> dict[str, Any]:
    """Keywords of `from_arrays` with the same scores as the interaction of the model."""
    interaction = _without_clamp(model.interaction)
    name = type(interaction).__name__.removesuffix("Interaction")
    if name not in PYKEEN_MODELS:
        raise refused(
            f"{type(model).__name__} of PyKEEN",
            f"scores by {name}",
            advice=_supported(PYKEEN_MODELS),
        )
    arrays: dict[str, Any] = {"model": name, "entities": entities[0], "relations": relations[0]}
    match name:
        case "TransE":
            arrays["options"] = {"norm": _norm(interaction.p, squared=interaction.power_norm)}
        case "RotatE":
            arrays["options"] = {"norm": 2}  # whatever its `p` is
        case "CP":
            arrays["tails"] = entities[1]
        case "SimplE":
            arrays |= _simple(interaction, entities, relations)
        case "SE":  # a matrix there is multiplied by a column
            arrays["relations"] = torch.stack([matrices.mT for matrices in relations], dim=1)
            arrays["options"] = {"norm": _norm(interaction.p, squared=interaction.power_norm)}
        case "QuatE":  # (dim, 4) there, and the score is −⟨h ⊗ r, t⟩
            unit = bool((relations[0].norm(dim=-1) - 1).abs().max() < UNIT)
            arrays["entities"] = entities[0].mT
            arrays["relations"] = -relations[0].mT
            arrays["options"] = {"normalized": unit}
        case "TuckER":
            arrays |= _tucker(
                interaction, entities[0], relations[0], reciprocal=model.use_inverse_triples
            )
    return arrays


def _without_clamp(interaction: Any) -> Any:
    """The interaction that a wrapper of PyKEEN's calls, if it does not clamp the scores."""
    if type(interaction).__name__ != "ClampedInteraction":
        return interaction
    if interaction.clamp_score is not None:
        raise refused(
            "Its scores",
            "are clamped, which makes ties; a model without clamp_score can be imported",
        )
    return interaction.base


def _simple(interaction: Any, entities: list[Tensor], relations: list[Tensor]) -> dict[str, Any]:
    """SimplE; PyKEEN 1.11 multiplies the same half of both entities, as two DistMult models do."""
    tables = {"entities": torch.cat(entities, dim=1), "relations": torch.cat(relations, dim=1)}
    first_half = (torch.ones(1), torch.zeros(1))
    if interaction(first_half, first_half, first_half):
        return {"model": "DistMult", **tables, "relations": tables["relations"] / 2}
    return tables


def _norm(p: float, *, squared: bool = False) -> int | str:
    norms: dict[float, int | str] = {1: 1, 2: "squared" if squared else 2}
    if p not in norms:
        raise refused(
            "Its distance",
            f"is the {p:g}-norm; distances of norm 1, norm 2 and its square are known",
        )
    return norms[p]


def _tucker(
    interaction: Any, entities: Tensor, relations: Tensor, *, reciprocal: bool
) -> dict[str, Any]:
    """Batch normalization as it is, or as part of the core where heads are predicted by the same
    relation.

    In evaluation it is x∘a + b. One more coordinate, which is 1 for every entity and relation,
    makes that linear.
    """
    core = interaction.core_tensor.detach().cpu().transpose(0, 1)  # (head, relation, tail) there
    if interaction.head_batch_norm is None:
        return {"parameters": {"core": core}, "options": {"relation_dim": len(core)}}
    norms = {"before": interaction.head_batch_norm, "after": interaction.head_relation_batch_norm}
    if reciprocal:
        names = {
            "scale": "weight",
            "shift": "bias",
            "mean": "running_mean",
            "variance": "running_var",
        }
        parameters = {"core": core}
        for place, norm in norms.items():
            for name, pykeen_name in names.items():
                parameters[f"{place}.{name}"] = getattr(norm, pykeen_name)
        options = {"relation_dim": len(core), "batch_norm": True}
        return {"parameters": parameters, "options": options}
    affine = []  # the factor and the summand of each
    for norm in norms.values():
        parts = (norm.weight, norm.bias, norm.running_mean, norm.running_var)
        weight, bias, mean, variance = (part.detach().cpu().double() for part in parts)
        factor = weight / (variance + norm.eps).sqrt()
        affine.append((factor, bias - mean * factor))
    (a, b), (c, d) = affine
    num, dim, _ = core.shape
    folded = torch.zeros(num + 1, dim + 1, dim + 1, dtype=torch.float64)
    folded[:num, :dim, :dim] = a[:, None] * core * c
    folded[:num, dim, :dim] = b @ core.double() * c
    folded[num, dim, :dim] = d
    tables = {"entities": entities, "relations": relations}
    with_one = {
        name: torch.cat([table, torch.ones(len(table), 1)], dim=1) for name, table in tables.items()
    }
    return {**with_one, "parameters": {"core": folded}, "options": {"relation_dim": num + 1}}


class _Config:
    """What LibKGE's `Config` is read as: its `options` are nested tables."""

    options: dict[str, Any]


def from_libkge(
    path: str | Path, *, data: str | Path | None = None, graph: Graph | None = None
) -> TrainedRun:
    """Make a run from a checkpoint or a packaged model of LibKGE, which need not be installed.

    `data` is the folder of the dataset in LibKGE, with names and triples in `.del` files. Without
    it, names come from a packaged model, and the run has the triples of `graph` or none.

    Args:
        path: Checkpoint or packaged model.
        data: Folder of the dataset in LibKGE.
        graph: Graph of the run, if there is no such folder.

    Returns:
        A run.

    Examples:
        >>> run = kg.from_libkge("checkpoint_best.pt", data="data/fb15k-237")  # doctest: +SKIP
    """
    checkpoint = _load_checkpoint(Path(path))
    try:
        state = checkpoint["model"][0]
        config = checkpoint["config"]
        options = config.options if isinstance(config, _Config) else config
        arrays = _libkge_arrays(state, options)
    except (KeyError, IndexError, TypeError) as error:
        reason = f"is not a checkpoint of LibKGE: {error} was not found in it"
        raise refused(str(path), reason) from None
    if data is not None:
        dataset = _read_dataset(Path(data))
        entity_names = dataset.entities.names.to_pylist()
        relation_names = dataset.relations.names.to_pylist()
        graph = graph or dataset
    else:
        try:
            meta = checkpoint["dataset"]["meta"]
            entity_names = [str(name) for name in meta["entity_ids"]]
            relation_names = [str(name) for name in meta["relation_ids"]]
        except (KeyError, TypeError):
            raise refused(
                str(path),
                "has no names of entities and relations",
                advice="Name the folder of its dataset in LibKGE with data=, or package the "
                f"model: kge package {path}",
            ) from None
    return from_arrays(
        **arrays, graph=graph, entity_names=entity_names, relation_names=relation_names
    )


def _load_checkpoint(path: Path) -> dict[str, Any]:
    """Read a file of `torch.save` without running code of it."""
    scalar = np._core.multiarray.scalar  # type: ignore[attr-defined]
    numbers = [type(np.dtype(kind)) for kind in ("f4", "f8", "i4", "i8", "?")]
    allowed = [
        (_Config, "kge.config.Config"),
        (scalar, "numpy.core.multiarray.scalar"),
        scalar,
        np.dtype,
        *numbers,
    ]
    try:
        with torch.serialization.safe_globals(allowed):
            checkpoint: dict[str, Any] = torch.load(
                regular_file(path), map_location="cpu", weights_only=True
            )
    except OSError as error:
        raise refused(str(path), f"cannot be read: {error.strerror or error}") from None
    except Exception as error:  # a file of another kind may raise anything
        reason = "cannot be read as a checkpoint of LibKGE"
        for line in str(error).splitlines():
            if "Unsupported" in line or "GLOBAL" in line:
                reason += f": {line.strip()}"
                break
        raise refused(str(path), reason) from None
    return checkpoint


def _libkge_arrays(state: Mapping[str, Tensor], options: Mapping[str, Any]) -> dict[str, Any]:
    """Keywords of `from_arrays` for the tables of a model; LibKGE's real and imaginary parts are
    halves of a row.
    """
    kind = options["model"]
    section = options.get(kind, {})
    if reciprocal := kind == "reciprocal_relations_model":
        section = section["base_model"]
        kind = section["type"]
    if kind not in LIBKGE_MODELS:
        advice = _supported(sorted(LIBKGE_MODELS))
        raise refused("It", f"is a model of the type {kind}", advice=advice)
    prefix = "_base_model." if reciprocal else ""
    entities, relations = (
        _libkge_table(state, f"{prefix}_{part}_embedder.") for part in ("entity", "relation")
    )
    arrays: dict[str, Any] = {
        "model": LIBKGE_MODELS[kind],
        "entities": entities,
        "relations": relations,
    }
    if kind in ("transe", "rotate"):
        norm = section.get("l_norm", options.get(kind, {}).get("l_norm", 1))
        arrays["options"] = {"norm": _norm(float(norm))}
    elif kind == "cp":
        arrays["entities"], arrays["tails"] = entities.chunk(2, dim=1)
    elif kind == "relational_tucker3":
        inner = f"{prefix}_relation_embedder."
        weight = state[f"{inner}projection.weight"]
        dim = entities.shape[1]
        arrays |= {
            "relations": _libkge_table(state, f"{inner}base_embedder."),
            "parameters": {"core": weight.T.reshape(-1, dim, dim)},
            "options": {"relation_dim": weight.shape[1]},
        }
    return arrays


def _libkge_table(state: Mapping[str, Tensor], prefix: str) -> Tensor:
    """The rows of an embedder: a table, or the linear projection of one."""
    if (weight := state.get(f"{prefix}projection.weight")) is not None:
        return _libkge_table(state, f"{prefix}base_embedder.") @ weight.T
    old = state.get(f"{prefix}embeddings.weight")  # in files of 2020
    return state[f"{prefix}_embeddings.weight"] if old is None else old


def _read_dataset(folder: Path) -> Graph:
    """The names and triples of a dataset in LibKGE's format: tables of ids with the suffix
    `.del`.
    """
    names: list[list[str]] = []
    try:
        for kind in ("entity", "relation"):
            lines = read_text(folder / f"{kind}_ids.del", max_bytes=MAX_DATASET).split("\n")
            rows = sorted(
                (int(id), name) for id, name in (line.split("\t", 1) for line in lines if line)
            )
            if [id for id, _ in rows] != list(range(len(rows))):
                raise ValueError(f"the ids of {kind}_ids.del are not 0 to {len(rows) - 1:,}")
            names.append([name for _, name in rows])
        texts = {
            split: read_text(folder / f"{split}.del", max_bytes=MAX_DATASET) for split in SPLITS
        }
        splits = {
            split: np.loadtxt(StringIO(text), np.int32, ndmin=2)[:, :3]
            for split, text in texts.items()
            if text
        }
    except OSError as error:
        raise refused(
            str(error.filename),
            "cannot be read",
            advice="A dataset of LibKGE has entity_ids.del, relation_ids.del, train.del, "
            "valid.del and test.del.",
        ) from None
    except ValueError as error:
        raise refused(str(folder), f"is not a dataset of LibKGE: {error}") from None
    return _graph(folder.resolve().name, names[0], names[1], splits)
