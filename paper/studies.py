"""Studies of trained models: what each measures, its tables and its figure.

A study's results are plain data, saved as `records/figures/NAME-GRAPH.json`; its tables are made
from them.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import cycle, islice
from math import inf
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

import dualkg as kg
from dualkg.analysis.figures import Drawing, draw_reliability
from dualkg.analysis.sparsity import SHARES, CurvePoint, rotated, sparsity_curve
from dualkg.data.filters import Ids
from dualkg.data.graph import SPLITS, Triples
from dualkg.extras import optional_import
from dualkg.inference import calibration, completion, extension, index, inductive, reliability
from dualkg.inference.explanation import Influence, influence
from dualkg.training.api import choose_device, data_of, default_recipe, spread
from dualkg.training.recipe import RegularizerConfig
from dualkg.training.run import describe_device
from dualkg.training.trainer import Trainer
from dualkg.tuning.automatic import AutomaticTuner, starting_recipe
from paper import figures, registry
from paper.figures import (
    Projection,
    compute_plane,
    draw_inductive,
    find_queries,
    inductive_fields,
    pick_query,
    project,
)
from paper.records import Config
from paper.registry import GRAPHS, MAIN, Row, model_row, published, recipe_of, rows_with_recipes
from paper.tables import MISSING, Results, Study, cell, duration, grouped, over_seeds

FB15K237 = ("FB15k-237",)
SAMPLES = [(0, ""), *((num, kind) for num in (500, 4000) for kind in ("uniform", "log-uniform"))]
ENSEMBLE_ROWS = (model_row("RESCAL-DURA"), model_row("HAKE"))
STUDIED = Row("ComplEx-DURA", "complex-dura-dim-500")


# -- training cost -----------------------------------------------------------

COMPARED = ("none", "Frobenius", "DURA")


def measure_cost(config: Config, graph: kg.Graph) -> Iterator[Results]:
    """Time of a training step with DURA, the Frobenius norm, and no regularizer (Appendix C)."""
    for row in MAIN.dura_rows:
        config.log(f"{row.name} on {graph.name}: steps with three regularizers.")
        yield time_steps(recipe_of(row, graph.name), graph, device=choose_device(config.device))


def time_steps(
    recipe: kg.Recipe, graph: kg.Graph, *, device: torch.device, steps: int = 30, rounds: int = 7
) -> Any:
    """Seconds per training step with each regularizer, in alternating rounds; the median over the
    rounds.
    """
    trainers = {}
    for name in COMPARED:
        weight = None if name == "none" else recipe.regularizer.weight
        other = recipe.model_copy(
            update={"regularizer": RegularizerConfig(name=name, weight=weight)}
        )
        one = recipe if name == "DURA" else other
        model = one.model.build(graph.shape, seed=one.training.seed).to(device)
        trainers[name] = Trainer(model, graph, one, one.regularizer.build())
        _seconds_per_step(trainers[name], steps=8)  # warm-up
    times = [
        [_seconds_per_step(trainer, steps) for trainer in trainers.values()] for _ in range(rounds)
    ]
    medians = map(statistics.median, zip(*times, strict=True))
    about = {
        "model": recipe.model.name,
        "dim": recipe.model.dim,
        "batch": recipe.training.batch_size,
    }
    about |= {"device": describe_device(device), "engine": str(trainers["DURA"].engine)}
    return {**about, "seconds_per_step": dict(zip(COMPARED, medians, strict=True))}


def _seconds_per_step(trainer: Trainer, steps: int) -> float:
    """Of full batches only: the last batch of an epoch may be short."""
    size = min(trainer.recipe.training.batch_size, len(trainer.examples))
    full = [batch for batch in islice(trainer.batches(0), steps) if len(batch) == size]
    synchronize = torch.cuda.synchronize if trainer.model.device.type == "cuda" else lambda: None
    synchronize()
    started = time.perf_counter()
    for batch in islice(cycle(full), steps):
        trainer.step(batch, 1e-3)
    synchronize()
    return (time.perf_counter() - started) / steps


def cost_rows(results: Results) -> Iterator[list[str]]:
    for one in results:
        step = one["seconds_per_step"]
        adds = [f"{step[name] / step['none'] - 1:+.1%}" for name in COMPARED[1:]]
        milliseconds = [f"{1000 * step[name]:.3f}" for name in COMPARED]
        yield [one["model"], str(one["dim"]), str(one["batch"]), *milliseconds, *adds]


# -- defaults ----------------------------------------------------------------

DEFAULT_GRAPHS = (
    "UMLS",
    "Kinship",
    "Nations",
    "Countries-S1",
    "Countries-S2",
    "Countries-S3",
    "world",
)
DEFAULT_GRAPHS += ("WN18RR", "FB15k-237", "YAGO3-10-quarter")
WAYS = {"tuned": "default", "fixed": "--no-tune", "recipe": "best recipe"}


def best_recipe(graph: str, dim: int) -> kg.Recipe | None:
    """The ComplEx-DURA recipe of a graph with relation prediction if there is one, at the dimension
    of the default.
    """
    for name in (
        f"{graph.lower()}/complex-dura{ending}" for ending in ("-relation-prediction", "")
    ):
        if name in kg.list_recipes():
            return kg.load_recipe(name, changes={"model.dim": dim})
    return None


def measure_defaults(config: Config, graph: kg.Graph) -> Results:
    """Test MRR of `dualkg train GRAPH` without options, of `--no-tune`, and of the best recipe of
    the same model.
    """
    if not len(graph.test):
        raise kg.RequestError(f"{graph.name} has no test triples.")
    device = choose_device(config.device)
    results: list[dict[str, Any]] = []
    for seed in range(config.seeds):
        changes = {"model.name": "ComplEx", "training.seed": seed}
        start = starting_recipe(data_of(graph), graph, device, changes)
        began = time.perf_counter()
        tuner = AutomaticTuner(start, graph, device=device, fixed=tuple(changes))
        chosen = tuner.run()
        tuning_seconds = time.perf_counter() - began
        config.log(f"{graph.name}, seed {seed}: {tuner.summary()}")
        recipes = {"tuned": chosen, "fixed": default_recipe(data_of(graph), graph, changes)}
        if found := best_recipe(graph.name, start.model.dim):
            recipes["recipe"] = found.with_changes({"training.seed": seed})
        runs = {
            way: run_facts(
                kg.train_recipe(recipe, graph=graph, device=device, on_progress=config.on_progress)
            )
            for way, recipe in recipes.items()
        }
        tuned = {
            "tuning_seconds": round(tuning_seconds, 1),
            "trials": len(tuner.trials),
            "chosen": tuner.summary(),
        }
        results.append({"seed": seed, **runs, "tuned": runs["tuned"] | tuned})
    return {"dim": start.model.dim, "epochs": start.training.epochs, "seeds": results}


def run_facts(run: kg.Run) -> dict[str, float]:
    seconds = sum(
        (run.costs or {}).get(name) or 0.0 for name in ("warm_up_seconds", "training_seconds")
    )
    return {"valid": run.reports["valid"].mrr, "test": run.report.mrr, "seconds": round(seconds, 1)}


def defaults_rows(results: Results) -> Iterator[list[str]]:
    for way, title in WAYS.items():
        if runs := [seed[way] for seed in results["seeds"] if way in seed]:
            mrr = [over_seeds([run[split] for run in runs]) for split in ("valid", "test")]
            mean = {
                key: sum(run.get(key, 0.0) for run in runs) / len(runs)
                for key in ("tuning_seconds", "seconds")
            }
            tuning = duration(mean["tuning_seconds"]) if way == "tuned" else MISSING
            yield [title, *mrr, str(len(runs)), tuning, duration(mean["seconds"])]


def defaults_fields(results: Results) -> dict[str, str]:
    notes = [f"Seed {seed['seed']}: {seed['tuned']['chosen']}" for seed in results["seeds"]]
    if results.get("shared_device"):
        notes.append("Times are upper bounds, because other work ran on the same device.")
    return {"notes": "\n\n".join(notes)}


# -- duality -----------------------------------------------------------------

DUALITY_ROWS = (
    "CP",
    "CP-DURA",
    "RESCAL",
    "RESCAL-DURA",
    "ComplEx",
    "ComplEx-DURA",
    "RotatE",
    "ModE",
)
SCORES = ("as trained", "inner product", "distance, tail's side", "distance, head's side")


def scoring_models(model: kg.Model) -> dict[str, kg.Model]:
    """The model as trained, and the primal and dual models with the same embeddings."""
    primal = model.primal() if isinstance(model, kg.RotatE | kg.ModE) else model
    return dict(
        zip(SCORES, (model, primal, kg.Dual(primal, "tail"), kg.Dual(primal, "head")), strict=True)
    )


def measure_duality(config: Config, graph: kg.Graph) -> Iterator[Results]:
    """Test MRR of the same embeddings scored by inner product and by both distances."""
    known = kg.KnownAnswers.of(graph)
    for row in rows_with_recipes(map(model_row, DUALITY_ROWS), graph.name):
        mrr: dict[str, list[float]] = {name: [] for name in SCORES}
        for seed in range(config.seeds):
            for name, model in scoring_models(config.load_trained(row, graph, seed).model).items():
                mrr[name].append(kg.evaluate(model, graph, split="test", known=known).mrr)
        yield {"row": row.name, "mrr": mrr}


def duality_rows(results: Results) -> Iterator[list[str]]:
    for one in results:
        yield [
            one["row"],
            *(over_seeds(one["mrr"][name]) for name in SCORES),
            str(len(one["mrr"][SCORES[0]])),
        ]


def measure_dura_weights(config: Config, graph: kg.Graph) -> Results:
    """Validation MRR over λ1 and λ2, by a grid of trainings; an interrupted search resumes."""
    from dualkg.tuning.search import search
    from dualkg.tuning.space import load_space

    name = f"{graph.name.lower()}-complex-dura-weights"
    space = load_space(registry.SPACES / f"{name}.toml")
    config.log(f"{space.num_trials} trainings of {space.base.model.name} on {graph.name}.")
    result = search(space, out=config.runs / "searches" / name, device=config.device)
    result.write(config.records / "searches" / name)
    keys = ("regularizer.plain", "regularizer.mapped")
    found = sorted(
        (*(row.params[key] for key in keys), row.mrr)
        for row in result.ranked
        if row.mrr is not None
    )
    grid = [{"plain": plain, "mapped": mapped, "valid_mrr": mrr} for plain, mapped, mrr in found]
    chosen = space.base.regularizer
    return {"model": space.base.model.name, "chosen": [chosen.plain, chosen.mapped], "grid": grid}


def _mrr_by_weights(results: Results) -> dict[tuple[float, float], float]:
    return {
        (float(one["plain"]), float(one["mapped"])): one["valid_mrr"] for one in results["grid"]
    }


def dura_weights_rows(results: Results) -> Iterator[list[str]]:
    mrr = _mrr_by_weights(results)
    mapped = sorted({other for _, other in mrr})
    yield ["validation MRR, filtered by train and valid", *(f"λ2 = {other:g}" for other in mapped)]
    for plain in sorted({plain for plain, _ in mrr}):
        yield [f"λ1 = {plain:g}", *(cell(mrr.get((plain, other)), ".4f") for other in mapped)]


def draw_dura_weights(results: Results, graph: str) -> Drawing:
    title = f"λ1 and λ2 of DURA: {results['model']} on {graph}"
    return figures.draw_dura_weights(
        _mrr_by_weights(results), chosen=tuple(results["chosen"]), title=title
    )


# -- Figures 1, 2 and 3 ------------------------------------------------------

FIGURE1_ROWS = (Row("CP", "cp-dim-2"), Row("CP-DURA", "cp-dura-dim-2"))
ROTATED = "RESCAL-DURA, rotated"
ROTATION_SHARE = 0.8
SPARSITY_PANELS = {"CP": ("CP", "CP-N3", "CP-DURA"), "RESCAL": ("RESCAL", "RESCAL-DURA", ROTATED)}
STORAGE_SHARES = (0.5, 0.6, 0.7, 0.8, 0.9)


def measure_tsne(config: Config, graph: kg.Graph) -> tuple[Results, Drawing]:
    """t-SNE of the answers of ten queries (Figure 2), and the silhouettes of the queries."""
    queries = find_queries(graph, published()["tsne_queries"])
    first: dict[str, Projection] = {}
    results = []
    for row in (model_row("CP"), model_row("CP-DURA")):
        for seed in range(config.seeds):
            projection = project(config.load_trained(row, graph, seed).model, queries)
            first.setdefault(row.name, projection)
            results.append({"row": row.name, "seed": seed, **projection.as_dict()})
    return results, figures.draw_projections(first, graph=graph.name)


def tsne_rows(results: Results) -> Iterator[list[str]]:
    for (name,), ones in grouped(results, "row").items():
        means = [
            over_seeds([one["silhouettes"][metric] for one in ones])
            for metric in ("euclidean", "cosine")
        ]
        yield [name, *means, str(len(ones))]


def measure_figure1(config: Config, graph: kg.Graph) -> tuple[Results, Drawing]:
    """The tails of one query in models of dim 2, with and without DURA."""
    query = pick_query(graph)
    planes = {
        row.name: compute_plane(config.load_trained(row, graph, 0).model, graph, query)
        for row in FIGURE1_ROWS
    }
    return {name: plane.about for name, plane in planes.items()}, figures.draw_planes(
        planes, graph=graph.name
    )


def figure1_rows(results: Results) -> Iterator[list[str]]:
    for name, one in results.items():
        both = (
            one[kind][centre] for kind in ("distances", "medians") for centre in ("centroid", "hR")
        )
        yield [name, *(f"{value:.3f}" for value in both)]


def measure_sparsity(config: Config, graph: kg.Graph) -> Iterator[Results]:
    """MRR against the sparsity of entity embeddings (Figure 3), and the storage it saves."""
    for name in sum(SPARSITY_PANELS.values(), ()):
        for seed in range(config.seeds):
            model = config.load_trained(
                model_row(name.removesuffix(", rotated")), graph, seed
            ).model
            model = rotated(model, share=ROTATION_SHARE) if name == ROTATED else model
            points = [_sparsity_point(point) for point in sparsity_curve(model, graph)]
            yield {"row": name, "seed": seed, "points": points}


def _sparsity_point(point: CurvePoint) -> dict[str, Any]:
    sizes = {
        "entity_tables": point.storage.entity_tables["CSR"],
        "whole_model": point.storage.whole_model["CSR"],
    }
    saved = {
        name: {"numbers": size.numbers_saved, "bytes": size.bytes_saved}
        for name, size in sizes.items()
    }
    about = {"target_share": point.target_share, "share": point.share, "threshold": point.threshold}
    return {**about, "metrics": point.metrics.as_dict(), "csr_saves": saved}


def sparsity_rows(results: Results) -> Iterator[list[str]]:
    yield ["entries set to zero", *(f"{share:.0%}" for share in SHARES), "seeds"]
    for (name,), ones in grouped(results, "row").items():
        curves = [[point["metrics"]["mrr"] for point in one["points"]] for one in ones]
        means = [spread(list(values))[0] for values in zip(*curves, strict=True)]
        yield [name, *(f"{mean:.4f}" for mean in means), str(len(curves))]


def storage_rows(results: Results) -> Iterator[list[str]]:
    """The storage that CSR saves against dense, in numbers as the paper counts them and in
    bytes.
    """
    for name in ("CP-DURA", "RESCAL-DURA"):
        for point in next(one["points"] for one in results if one["row"] == name):
            if point["target_share"] in STORAGE_SHARES:
                saved = [point["csr_saves"][part] for part in ("entity_tables", "whole_model")]
                shares = [f"{one[unit]:.1%}" for one in saved for unit in ("numbers", "bytes")]
                yield [name, f"{point['share']:.0%}", *shares]


def draw_sparsity(results: Results, graph: str) -> Drawing:
    curves = {}
    for (name,), ones in grouped(results, "row").items():
        curves[name] = [
            {point["target_share"]: point["metrics"]["mrr"] for point in one["points"]}
            for one in ones
        ]
    panels = {
        panel: {name: curves[name] for name in names} for panel, names in SPARSITY_PANELS.items()
    }
    return figures.draw_sparsity(panels, published=published_sparsity(graph), graph=graph)


def published_sparsity(graph: str) -> dict[str, dict[float, float]]:
    """Points of the paper by row: share of zeros → MRR."""
    rows = published()["sparsity"].get(graph, {})
    return {
        name: {float(share): mrr for share, mrr in points.items()} for name, points in rows.items()
    }


def measure_sampled(config: Config, graph: kg.Graph) -> Iterator[Results]:
    """Sampled softmax with DURA beside full softmax: the same recipe with another loss."""
    row, *_ = rows_with_recipes((STUDIED, model_row("ComplEx-DURA")), graph.name)
    for seed in range(config.seeds):
        recipe = recipe_of(row, graph.name).with_changes({"training.seed": seed, "model.dim": 500})
        for num, kind in SAMPLES:
            config.log(f"{row.name} on {graph.name}, seed {seed}: {num or 'all'} negatives {kind}")
            sampled = {
                "loss.name": "SampledSoftmax",
                "loss.num_negatives": num,
                "loss.distribution": kind,
            }
            chosen = recipe.with_changes(sampled if num else {})
            run = kg.train_recipe(
                chosen, graph=graph, device=config.device, on_progress=config.on_progress
            )
            yield {"negatives": num, "distribution": kind, "seed": seed, **run_facts(run)}


def sampled_rows(results: Results) -> Iterator[list[str]]:
    for (num, kind), ones in grouped(results, "negatives", "distribution").items():
        mrr = [over_seeds([one[split] for one in ones]) for split in ("valid", "test")]
        name = f"{num:,} {kind} negatives" if num else "full softmax"
        yield [name, *mrr, f"{statistics.mean(one['seconds'] for one in ones):.1f}", str(len(ones))]


def measure_ensemble(config: Config, graph: kg.Graph) -> Iterator[Results]:
    """RESCAL-DURA and HAKE as an ensemble with weights fitted on validation, beside each alone."""
    for seed in range(config.seeds):
        ensemble = kg.Ensemble([config.load_trained(row, graph, seed) for row in ENSEMBLE_ROWS])
        names = [*(row.name for row in ENSEMBLE_ROWS), "ensemble"]
        runs = [*ensemble.members, ensemble]
        for name, run, weight in zip(names, runs, [*ensemble.model.weights, None], strict=True):
            mrr = {split: run.report_on(split).mrr for split in ("valid", "test")}
            yield {"row": name, "seed": seed, "weight": weight, **mrr}


def ensemble_rows(results: Results) -> Iterator[list[str]]:
    for (name,), ones in grouped(results, "row").items():
        weights = [one["weight"] for one in ones if one["weight"] is not None]
        mrr = [over_seeds([one[split] for one in ones]) for split in ("valid", "test")]
        yield [name, over_seeds(weights, digits=2) if weights else MISSING, *mrr, str(len(ones))]


# -- inference ---------------------------------------------------------------


def measure_completion(config: Config, graph: kg.Graph) -> Results:
    """How many held-out test triples are among the most probable new triples."""
    run = config.load_trained(STUDIED, graph, 0)
    fitted = calibration.calibration_for(run).calibration
    return completion.check_completion(run.model, graph, calibration=fitted).as_dict()


def completion_rows(results: Results) -> Iterator[list[str]]:
    columns = {
        "sizes": ",",
        "found": ",",
        "expected": ",.1f",
        "by_degree": ",.1f",
        "at_random": ",.3g",
    }
    for row in zip(*(results[key] for key in columns), strict=True):
        yield list(map(format, row, columns.values()))


def measure_calibration(config: Config, graph: kg.Graph) -> Results:
    """Calibration of probabilities and coverage of prediction sets on test, both fitted on
    valid.
    """
    run = config.load_trained(STUDIED, graph, 0)
    fitted = calibration.calibration_for(run)
    report = reliability.evaluate_calibration(fitted.calibration, run.model, graph)
    coverage = reliability.evaluate_coverage(fitted.prediction_sets, run.model, graph, coverage=0.9)
    parts = {"all candidates": report.overall, "with p ≥ .01": report.likely}
    sets = {"target": coverage.target_coverage, **asdict(coverage.overall)}
    return {"calibration": {name: part.as_dict() for name, part in parts.items()}, "coverage": sets}


def calibration_rows(results: Results) -> Iterator[list[str]]:
    columns = {"ece": ".2g", "noise": ".2g", "num_candidates": ",.0f", "num_true": ","}
    for name, part in results["calibration"].items():
        yield [name, *(format(part[key], style) for key, style in columns.items())]


def draw_calibration(results: Results, graph: str) -> Drawing:
    likely = results["calibration"]["with p ≥ .01"]
    bins = [(one["predicted"], one["observed"], one["noise"]) for one in likely["bins"]]
    return draw_reliability({f"{graph} test": bins}, graph=f"{graph} test", ece=likely["ece"])


def measure_quantization(config: Config, graph: kg.Graph) -> Iterator[Results]:
    """MRR with entity embeddings in storage formats of fewer bytes."""
    for point in index.measure_storage_formats(config.load_trained(STUDIED, graph, 0).model, graph):
        yield {**asdict(point), "metrics": point.metrics.as_dict()}


def quantization_rows(results: Results) -> Iterator[list[str]]:
    for one in results:
        name = f"sparse {one['share']:.0%}" if one["storage"] == "sparse" else one["storage"]
        metrics = [f"{one['metrics'][key]:.4f}" for key in ("mrr", "hits_at_1", "hits_at_3")]
        yield [name, figures.format_bytes(one["bytes"]), *metrics]


def measure_inductive(config: Config, graph: kg.Graph) -> Iterator[Results]:
    """Held-out entities embedded from a few of their triples, against training again with these
    triples.
    """
    config.log(f"{STUDIED.name} on {graph.name}: trained with and without 5 % of the entities.")
    return study_inductive(
        graph, recipe_of(STUDIED, graph.name), seeds=range(config.seeds), device=config.device
    )


def study_inductive(
    graph: kg.Graph,
    recipe: kg.Recipe,
    *,
    share: float = 0.05,
    counts: Sequence[int | None] = (1, 3, 10, None),
    seeds: Sequence[int] = (0,),
    device: str | torch.device | None = None,
) -> Iterator[dict[str, Any]]:
    """Metrics of held-out triples by method: embedded from some triples, or trained again with
    these triples.

    `counts` are triples given per entity; None is all. The baselines are the mean embedding and
    random embeddings.
    """
    if not 0 < share < 1:
        raise kg.RequestError(
            f"The share of entities to hold out must be between 0 and 1; it is {share}."
        )
    for seed in seeds:
        split = InductiveSplit.of(graph, share, seed=seed)
        seeded = recipe.with_changes({"training.seed": seed})
        model = inductive.with_adjoint(
            kg.train_recipe(seeded, graph=split.known, device=device).model
        )
        context = inductive.FrozenContext.of(model, split.known, recipe=seeded)
        for count in counts:
            triples = split.given(count)
            more = replace(split.whole, train=np.concatenate([split.known.train, triples]))
            started = time.perf_counter()
            models = {"embedded": extension.extend_by_ids(context, split.names, triples).model}
            embedded = time.perf_counter()
            models["retrained"] = kg.train_recipe(seeded, graph=more, device=device).model
            seconds = {"embedded": embedded - started, "retrained": time.perf_counter() - embedded}
            about = {"triples_given": count, "num_triples": len(triples)}
            for method, one in models.items():
                yield split.evaluate(one, method, seconds=seconds[method], **about)
        for method, rows in split.baselines(context).items():
            about = {"triples_given": 0, "num_triples": 0, "seconds": 0.0}
            yield split.evaluate(extension.with_rows(model, rows), method, **about)


@dataclass(frozen=True, eq=False)
class InductiveSplit:
    """A graph whose last entities are held out, and the graph of its known entities alone."""

    whole: kg.Graph
    known: kg.Graph
    seed: int

    @classmethod
    def of(cls, graph: kg.Graph, share: float, *, seed: int) -> InductiveSplit:
        """Hold out random entities, except those that train joins to other held-out entities
        only.
        """
        num_entities = len(graph.entities)
        held_out, joined = np.zeros((2, num_entities), dtype=bool)
        held_out[
            np.random.default_rng(seed).permutation(num_entities)[
                : max(1, round(share * num_entities))
            ]
        ] = True
        heads = graph.train[:, 0]
        tails = graph.train[:, 2]
        joined[heads[~held_out[tails]]] = joined[tails[~held_out[heads]]] = True
        held_out &= joined
        if not held_out.any():
            raise kg.RequestError(
                f"{graph.name} has too few entities to hold out a share of {share:g}."
            )
        order = np.argsort(held_out, kind="stable")
        new_ids = np.argsort(order).astype(np.int32)
        num_known = int((~held_out).sum())
        splits = {name: graph.split(name).copy() for name in SPLITS}
        for triples in splits.values():
            triples[:, [0, 2]] = new_ids[triples[:, [0, 2]]]
        whole = replace(graph, entities=kg.Vocabulary(graph.entities.names.take(order)), **splits)
        known = {
            name: triples[(triples[:, [0, 2]] < num_known).all(1)]
            for name, triples in splits.items()
        }
        names = whole.entities.names.slice(0, num_known)
        return cls(whole, replace(whole, entities=kg.Vocabulary(names), **known), seed)

    @property
    def names(self) -> list[str]:
        return self.whole.entities.names.slice(len(self.known.entities)).to_pylist()

    def given(self, count: int | None) -> Triples:
        """At most `count` training triples per held-out entity, first those with known entities;
        None is all.
        """
        num_known = len(self.known.entities)
        ends = self.whole.train[:, [0, 2]]
        order = np.random.default_rng(self.seed).permutation(len(ends))
        order = order[np.argsort((ends >= num_known)[order].all(1), kind="stable")]
        chosen = np.zeros(len(ends), dtype=bool)
        for entity in range(num_known, len(self.whole.entities)):
            chosen[order[(ends[order] == entity).any(1)][:count]] = True
        return self.whole.train[chosen]

    def evaluate(self, model: kg.Model, method: str, **about: Any) -> dict[str, Any]:
        """Metrics of the valid and test triples of held-out entities, and of the test triples of
        known entities.
        """
        held_out = np.concatenate([self.whole.valid, self.whole.test])
        new = held_out[:, [0, 2]] >= len(self.known.entities)
        held_out, (new_head, new_tail) = held_out[new.any(1)], new[new.any(1)].T
        filtered = kg.KnownAnswers.of(self.whole)
        tails, heads = kg.rank(model, replace(self.whole, test=held_out), known=filtered).mean
        ranks = {
            "all_queries": np.stack([tails, heads]),
            "as_query": np.concatenate([tails[new_head], heads[new_tail]]),
            "as_answer": np.concatenate([tails[new_tail], heads[new_head]]),
            "known_entities": kg.rank(
                model, replace(self.whole, test=self.known.test), known=filtered
            ).mean,
        }
        metrics = {kind: kg.Metrics.of(values).as_dict() for kind, values in ranks.items()}
        return {
            "method": method,
            "seed": self.seed,
            "num_entities": len(self.names),
            **about,
            **metrics,
        }

    def baselines(self, context: inductive.FrozenContext) -> dict[str, torch.Tensor]:
        tables = (context.model.head_table, context.model.tail_table)[: context.new_rows.shape[1]]
        mean, sd = (
            torch.stack([part(table, 0).detach() for table in tables])
            for part in (torch.mean, torch.std)
        )
        noise = torch.randn(
            len(self.names), *mean.shape, generator=torch.Generator().manual_seed(self.seed)
        )
        return {"mean": mean.expand(len(self.names), -1, -1), "random": mean + sd * noise.to(mean)}


def inductive_rows(results: Results) -> Iterator[list[str]]:
    ordered = sorted(
        results, key=lambda one: (one["method"], one["triples_given"] or inf)
    )  # None: all
    for (method, count), ones in grouped(ordered, "method", "triples_given").items():
        metrics = [
            over_seeds([one[kind]["mrr"] for one in ones])
            for kind in ("all_queries", *figures.QUERY_PANELS)
        ]
        seconds = sum(one["seconds"] for one in ones) / len(ones)
        number = "all" if count is None else f"{count:.0f}"
        yield [method, number, *metrics, f"{seconds:.1f}" if seconds else MISSING, str(len(ones))]


def measure_explanations(
    config: Config, graph: kg.Graph, *, counts: Sequence[int] = (1, 3), max_triples: int = 150
) -> Iterator[Results]:
    """Test triples after training without the training triples that support or oppose them most."""
    # `counts` are training triples removed per test triple. The test triples have no common entity,
    # so that one training serves all of them. Removed triples are still filtered in ranking.
    row, *_ = rows_with_recipes((STUDIED, model_row("ComplEx-DURA")), graph.name)
    config.log(
        f"{row.name} on {graph.name}: trained with and without the supporting triples of test "
        "triples."
    )
    triples = disjoint_triples(
        graph, np.random.default_rng(0), min_degree=max(counts) + 1, max_triples=max_triples
    )
    known = kg.KnownAnswers.of(graph)
    for seed in range(config.seeds):
        random = np.random.default_rng(seed)
        recipe = recipe_of(row, graph.name).with_changes({"training.seed": seed})
        model = inductive.with_adjoint(
            kg.train_recipe(recipe, graph=graph, device=config.device).model
        )
        context = inductive.FrozenContext.of(model, graph, recipe=recipe)
        influences = [influence(tuple(triple), context) for triple in triples.tolist()]
        scores = _scores(model, triples)
        removals = {("nothing", 0): [np.zeros(0, dtype=np.int64)]}
        for count in counts:
            selected = select_triples(influences, count, random)
            removals |= {(removed, count): rows for removed, rows in selected.items()}
        for (removed, count), rows in removals.items():
            gone = np.unique(np.concatenate(rows))
            drops = {}
            if count:
                rest = replace(graph, train=np.delete(graph.train, gone, axis=0))
                model = kg.train_recipe(recipe, graph=rest, device=config.device).model
                actual = scores - _scores(model, triples)
                pairs = zip(influences, rows, strict=True)
                expected = np.array(
                    [float(one.score_drops[np.isin(one.rows, some)].sum()) for one, some in pairs]
                )
                drops = {
                    "score_drop": float(actual.mean()),
                    "expected_drop": float(expected.mean()),
                }
                drops["rank_correlation"] = rank_correlation(actual, expected)
            metrics = kg.Metrics.of(
                kg.rank(model, replace(graph, test=triples), known=known).mean
            ).as_dict()
            about = {"removed": removed, "seed": seed, "count": count, "num_triples": len(triples)}
            yield {**about, "metrics": metrics, "num_removed": len(gone), **drops}


def disjoint_triples(
    graph: kg.Graph, random: np.random.Generator, *, min_degree: int, max_triples: int
) -> Triples:
    """Test triples without a common entity, whose entities have at least `min_degree` training
    triples.
    """
    used = np.bincount(graph.train[:, [0, 2]].ravel(), minlength=len(graph.entities)) < min_degree
    rows: list[int] = []
    for row in random.permutation(len(graph.test)).tolist():
        head, _, tail = graph.test[row].tolist()
        if len(rows) < max_triples and head != tail and not (used[head] or used[tail]):
            rows.append(row)
            used[[head, tail]] = True
    if len(rows) < 2:
        found = f"{graph.name} has too few test triples whose entities have {min_degree} training triples."
        raise kg.RequestError(found)
    return graph.test[rows]


def select_triples(
    influences: Sequence[Influence], count: int, random: np.random.Generator
) -> dict[str, list[Ids]]:
    """The rows of train to remove for each test triple, by kind."""
    return {
        "supporting": [
            one.rows[np.argsort(-one.score_drops, kind="stable")[:count]] for one in influences
        ],
        "random": [random.permutation(one.rows)[:count] for one in influences],
        "opposing": [
            one.rows[np.argsort(one.score_drops, kind="stable")[:count]] for one in influences
        ],
    }


@torch.no_grad()
def _scores(model: kg.Model, triples: Triples) -> npt.NDArray[np.float64]:
    return (
        model.score(*torch.from_numpy(triples).long().to(model.device).unbind(1))
        .double()
        .cpu()
        .numpy()
    )


def rank_correlation(a: npt.NDArray[np.float64], b: npt.NDArray[np.float64]) -> float:
    """Spearman's rank correlation; 0 if one of the two is constant."""
    with optional_import("scipy", purpose="The study of explanations"):
        from scipy.stats import spearmanr
    return 0.0 if np.ptp(a) == 0 or np.ptp(b) == 0 else float(spearmanr(a, b).statistic)


def explanations_rows(results: Results) -> Iterator[list[str]]:
    for (removed, count), ones in grouped(results, "removed", "count").items():
        cells = [over_seeds([one["metrics"][key] for one in ones]) for key in ("mrr", "hits_at_1")]
        for key in ("score_drop", "expected_drop", "rank_correlation"):
            cells.append(over_seeds([one[key] for one in ones], digits=2) if count else MISSING)
        yield [removed, str(count), *cells, str(len(ones))]


_STUDIES = (
    Study("cost", measure_cost, cost_rows),
    Study("duality", measure_duality, duality_rows, several_seeds=True),
    Study(
        "defaults",
        measure_defaults,
        defaults_rows,
        None,
        DEFAULT_GRAPHS,
        True,
        fields=defaults_fields,
    ),
    Study(
        "sampled",
        measure_sampled,
        sampled_rows,
        graphs=GRAPHS[:2] + GRAPHS[3:4],
        several_seeds=True,
    ),
    Study("ensemble", measure_ensemble, ensemble_rows, graphs=("WN18RR",), several_seeds=True),
    Study("dura-weights", measure_dura_weights, dura_weights_rows, draw_dura_weights),
    Study("figure1", measure_figure1, figure1_rows, graphs=FB15K237),
    Study("tsne", measure_tsne, tsne_rows, graphs=FB15K237, several_seeds=True),
    Study(
        "sparsity",
        measure_sparsity,
        sparsity_rows,
        draw_sparsity,
        FB15K237,
        True,
        {"storage": storage_rows},
    ),
    Study("completion", measure_completion, completion_rows),
    Study("calibration", measure_calibration, calibration_rows, draw_calibration),
    Study(
        "quantization", measure_quantization, quantization_rows, figures.draw_quantization, FB15K237
    ),
    Study(
        "inductive",
        measure_inductive,
        inductive_rows,
        draw_inductive,
        FB15K237,
        True,
        fields=inductive_fields,
    ),
    Study(
        "explanations",
        measure_explanations,
        explanations_rows,
        figures.draw_explanations,
        ("world",),
        True,
    ),
)
STUDIES = {study.name: study for study in _STUDIES}
