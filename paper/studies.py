"""Studies of trained models: what each measures, its tables and its figure.

A study's results are plain data, saved as `records/figures/NAME-GRAPH.json`; its tables are made
from them.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import chain, cycle, islice
from math import inf
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

import dualkg as kg
from dualkg.analysis.figures import Drawing, draw_reliability
from dualkg.analysis.sparsity import SHARES, CurvePoint, rotated, sparsity_curve
from dualkg.data.filters import Ids, KnownAnswers, with_reciprocals
from dualkg.data.graph import SPLITS, Triples
from dualkg.errors import InvalidValue, RequestError
from dualkg.extras import optional_import
from dualkg.inference import completion, extension, inductive, reliability
from dualkg.inference.explanation import Influence, influence
from dualkg.inference.probability import calibration_for
from dualkg.training.api import HELD_OUT, choose_device, data_of, default_recipe, spread
from dualkg.training.costs import WorkEstimate
from dualkg.training.environment import describe_device
from dualkg.training.recipe import RegularizerConfig
from dualkg.training.trainer import Trainer
from dualkg.tuning.automatic import AutomaticTuner, starting_recipe
from dualkg.tuning.plan import SearchPlan
from dualkg.tuning.starting_recipe import fast_softmax
from paper import figures, quantization, registry
from paper.deletion import correct_triples, delete_paths
from paper.figures import (
    Projection,
    compute_plane,
    draw_inductive,
    find_queries,
    inductive_fields,
    pick_query,
    project,
)
from paper.records import Config, recipe_digest
from paper.registry import (
    MAIN,
    METRICS,
    PATH_NETWORK,
    PATHS,
    Row,
    model_row,
    published,
    recipe_of,
    recipe_path,
    rows_with_recipes,
)
from paper.tables import MISSING, Results, Study, cell, duration, grouped, over_seeds

FB15K237 = ("FB15k-237",)
# Numbers of negatives and their distributions; 0 is the full softmax.
SAMPLES = (
    (0, ""),
    (500, "uniform"),
    (500, "log-uniform"),
    (4000, "uniform"),
    (4000, "log-uniform"),
)
ENSEMBLE_ROWS = (model_row("RESCAL-DURA"), model_row("HAKE"))
STUDIED = Row("ComplEx-DURA", "complex-dura-dim-500")
UNSEEN_SHARE = 0.05  # of the entities
SMALL_GRAPHS = ("UMLS", "Kinship", "Nations")
# Of the score of (t, r⁻¹, h), beside 1 for that of (h, r, t).
INVERSE_WEIGHTS = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 1.0)


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
    """Median seconds per training step with each regularizer, measured in alternating rounds."""
    trainers = {}
    for name in COMPARED:
        compared = recipe
        if name != "DURA":
            weight = None if name == "none" else recipe.regularizer.weight
            regularizer = RegularizerConfig(name=name, weight=weight)
            compared = recipe.model_copy(update={"regularizer": regularizer})
        model = compared.model.build(graph.shape, seed=compared.training.seed).to(device)
        trainers[name] = Trainer(model, graph, compared, compared.regularizer.build())
        _seconds_per_step(trainers[name], steps=8)  # warm-up

    times: dict[str, list[float]] = {name: [] for name in COMPARED}
    for _ in range(rounds):
        for name, trainer in trainers.items():
            times[name].append(_seconds_per_step(trainer, steps))
    return {
        "model": recipe.model.name,
        "dim": recipe.model.dim,
        "batch": recipe.training.batch_size,
        "device": describe_device(device),
        "engine": str(trainers["DURA"].engine),
        "seconds_per_step": {name: statistics.median(times[name]) for name in COMPARED},
    }


def _seconds_per_step(trainer: Trainer, steps: int) -> float:
    """Seconds per step of full batches: the last batch of an epoch may be short."""
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
    for result in results:
        seconds = result["seconds_per_step"]
        milliseconds = [f"{1000 * seconds[name]:.3f}" for name in COMPARED]
        increases = [f"{seconds[name] / seconds['none'] - 1:+.1%}" for name in COMPARED[1:]]
        about = [result["model"], str(result["dim"]), str(result["batch"])]
        yield [*about, *milliseconds, *increases]


# -- defaults ----------------------------------------------------------------

DEFAULT_GRAPHS = (
    *SMALL_GRAPHS,
    "Countries-S1",
    "Countries-S2",
    "Countries-S3",
    "world",
    "WN18RR",
    "FB15k-237",
    "YAGO3-10-quarter",
)
MAX_RECIPE_WORK = 3600.0  # of the best recipe of a graph; on a CPU it may take days
WAYS = {"tuned": "default", "fixed": "--no-tune", "recipe": "best recipe"}


def best_recipe(graph: str, dim: int) -> kg.Recipe | None:
    """The ComplEx-DURA recipe of a graph at a dimension, with relation prediction if possible."""
    plain_name = f"{graph.lower()}/complex-dura"
    for name in (f"{plain_name}-relation-prediction", plain_name):
        if name in kg.list_recipes():
            return kg.load_recipe(name, changes={"model.dim": dim})
    return None


def measure_defaults(config: Config, graph: kg.Graph, *, plan: SearchPlan | None = None) -> Results:
    """Test MRR of `dualkg train GRAPH`, of `--no-tune`, and of the best recipe of embeddings."""
    if not len(graph.test):
        raise RequestError(f"{graph.name} has no test triples.")
    device = choose_device(config.device)
    work = WorkEstimate.of(graph, device)
    results: list[dict[str, Any]] = []
    for seed in range(config.seeds):
        changes = {"training.seed": seed}
        start = starting_recipe(data_of(graph), graph, device, changes)
        began = time.perf_counter()
        tuner = AutomaticTuner(start, graph, device=device, fixed=tuple(changes), plan=plan)
        chosen = tuner.run()
        tuning_seconds = time.perf_counter() - began
        config.log(f"{graph.name}, seed {seed}: {tuner.summary()}")
        fixed = {**fast_softmax(graph, device, changes), **changes}
        recipes = {"tuned": chosen, "fixed": default_recipe(data_of(graph), graph, fixed)}
        recipe_of_graph = best_recipe(graph.name, start.model.dim)
        if recipe_of_graph and work.training(recipe_of_graph) <= MAX_RECIPE_WORK:
            recipes["recipe"] = recipe_of_graph.with_changes({"training.seed": seed})

        result: dict[str, Any] = {"seed": seed}
        for way, recipe in recipes.items():
            run = kg.train_recipe(
                recipe, graph=graph, device=device, on_progress=config.on_progress
            )
            result[way] = run_facts(run)
        result["tuned"] |= {
            "tuning_seconds": round(tuning_seconds, 1),
            "trials": len(tuner.trials),
            "chosen": tuner.summary(),
        }
        results.append(result)
    return {
        "dim": start.model.dim,
        "epochs": start.training.epochs,
        "device": describe_device(device),
        "seeds": results,
    }


def run_facts(run: kg.Run) -> dict[str, float]:
    """MRR of valid and test, and the seconds of warm-up and training."""
    costs = run.costs or {}
    seconds = (costs.get("warm_up_seconds") or 0.0) + (costs.get("training_seconds") or 0.0)
    return {"valid": run.reports["valid"].mrr, "test": run.report.mrr, "seconds": round(seconds, 1)}


def defaults_rows(results: Results) -> Iterator[list[str]]:
    for way, title in WAYS.items():
        runs = [seed[way] for seed in results["seeds"] if way in seed]
        if not runs:
            continue
        tuning = MISSING
        if way == "tuned":
            tuning = duration(sum(run["tuning_seconds"] for run in runs) / len(runs))
        yield [
            title,
            *_valid_and_test(runs),
            str(len(runs)),
            tuning,
            duration(sum(run["seconds"] for run in runs) / len(runs)),
        ]


def _valid_and_test(runs: Sequence[dict[str, Any]]) -> list[str]:
    """Two cells: the MRR of valid and of test over the seeds."""
    return [over_seeds([run[split] for run in runs]) for split in ("valid", "test")]


def defaults_fields(results: Results) -> dict[str, str]:
    notes = [f"Seed {seed['seed']}: {seed['tuned']['chosen']}" for seed in results["seeds"]]
    if results.get("shared_device"):
        notes.append("Times are upper bounds, because other work ran on the same device.")
    device = " on a CPU" if results.get("device") == "cpu" else ""
    return {"notes": "\n\n".join(notes), "device": device}


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
    models = (model, primal, kg.Dual(primal, "tail"), kg.Dual(primal, "head"))
    return dict(zip(SCORES, models, strict=True))


def measure_duality(config: Config, graph: kg.Graph) -> Iterator[Results]:
    """Test MRR of the same embeddings scored by inner product and by both distances."""
    known = kg.KnownAnswers.of(graph)
    for row in rows_with_recipes(map(model_row, DUALITY_ROWS), graph.name):
        mrr: dict[str, list[float]] = {name: [] for name in SCORES}
        for seed in range(config.seeds):
            trained = config.load_trained(row, graph, seed).model
            for name, model in scoring_models(trained).items():
                mrr[name].append(kg.evaluate(model, graph, split="test", known=known).mrr)
        yield {"row": row.name, "mrr": mrr}


def duality_rows(results: Results) -> Iterator[list[str]]:
    for result in results:
        mrr = result["mrr"]
        num_seeds = len(mrr[SCORES[0]])
        yield [result["row"], *(over_seeds(mrr[name]) for name in SCORES), str(num_seeds)]


# -- weights of DURA -----------------------------------------------------------


def measure_dura_weights(config: Config, graph: kg.Graph) -> Results:
    """Validation MRR over λ1 and λ2, by a grid of trainings; an interrupted search resumes."""
    from dualkg.tuning.search import search
    from dualkg.tuning.space import load_space

    name = f"{graph.name.lower()}-complex-dura-weights"
    space = load_space(registry.SPACES / f"{name}.toml")
    config.log(f"{space.num_trials} trainings of {space.base.model.name} on {graph.name}.")
    result = search(space, out=config.runs / "searches" / name, device=config.device)
    result.write(config.records / "searches" / name)
    grid = []
    for trial in result.ranked:
        if trial.mrr is not None:
            plain = trial.params["regularizer.plain"]
            mapped = trial.params["regularizer.mapped"]
            grid.append({"plain": plain, "mapped": mapped, "valid_mrr": trial.mrr})
    grid.sort(key=lambda point: (point["plain"], point["mapped"]))
    chosen = space.base.regularizer
    return {"model": space.base.model.name, "chosen": [chosen.plain, chosen.mapped], "grid": grid}


def _mrr_by_weights(results: Results) -> dict[tuple[float, float], float]:
    mrr = {}
    for point in results["grid"]:
        mrr[float(point["plain"]), float(point["mapped"])] = point["valid_mrr"]
    return mrr


def dura_weights_rows(results: Results) -> Iterator[list[str]]:
    mrr = _mrr_by_weights(results)
    plain_weights = sorted({plain for plain, _ in mrr})
    mapped_weights = sorted({mapped for _, mapped in mrr})
    columns = [f"λ2 = {mapped:g}" for mapped in mapped_weights]
    yield ["validation MRR, filtered by train and valid", *columns]
    for plain in plain_weights:
        cells = [cell(mrr.get((plain, mapped)), ".4f") for mapped in mapped_weights]
        yield [f"λ1 = {plain:g}", *cells]


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
    for (name,), runs in grouped(results, "row").items():
        euclidean = over_seeds([run["silhouettes"]["euclidean"] for run in runs])
        cosine = over_seeds([run["silhouettes"]["cosine"] for run in runs])
        yield [name, euclidean, cosine, str(len(runs))]


def measure_figure1(config: Config, graph: kg.Graph) -> tuple[Results, Drawing]:
    """The tails of one query in models of dim 2, with and without DURA."""
    query = pick_query(graph)
    planes = {}
    for row in FIGURE1_ROWS:
        model = config.load_trained(row, graph, 0).model
        planes[row.name] = compute_plane(model, graph, query)
    results = {name: plane.about for name, plane in planes.items()}
    return results, figures.draw_planes(planes, graph=graph.name)


def figure1_rows(results: Results) -> Iterator[list[str]]:
    for name, plane in results.items():
        lengths = []
        for kind in ("distances", "medians"):
            lengths += [plane[kind]["centroid"], plane[kind]["hR"]]
        yield [name, *(f"{length:.3f}" for length in lengths)]


def measure_sparsity(config: Config, graph: kg.Graph) -> Iterator[Results]:
    """MRR against the sparsity of entity embeddings (Figure 3), and the storage it saves."""
    for name in chain.from_iterable(SPARSITY_PANELS.values()):
        row = model_row(name.removesuffix(", rotated"))
        for seed in range(config.seeds):
            model = config.load_trained(row, graph, seed).model
            if name == ROTATED:
                model = rotated(model, share=ROTATION_SHARE)
            points = [_sparsity_point(point) for point in sparsity_curve(model, graph)]
            yield {"row": name, "seed": seed, "points": points}


def _sparsity_point(point: CurvePoint) -> dict[str, Any]:
    entity_tables = point.storage.entity_tables["CSR"]
    whole_model = point.storage.whole_model["CSR"]
    return {
        "target_share": point.target_share,
        "share": point.share,
        "threshold": point.threshold,
        "metrics": point.metrics.as_dict(),
        "csr_saves": {
            "entity_tables": {
                "numbers": entity_tables.numbers_saved,
                "bytes": entity_tables.bytes_saved,
            },
            "whole_model": {
                "numbers": whole_model.numbers_saved,
                "bytes": whole_model.bytes_saved,
            },
        },
    }


def sparsity_rows(results: Results) -> Iterator[list[str]]:
    yield ["entries set to zero", *(f"{share:.0%}" for share in SHARES), "seeds"]
    for (name,), runs in grouped(results, "row").items():
        curves = [[point["metrics"]["mrr"] for point in run["points"]] for run in runs]
        means = [spread(list(values))[0] for values in zip(*curves, strict=True)]
        yield [name, *(f"{mean:.4f}" for mean in means), str(len(curves))]


def storage_rows(results: Results) -> Iterator[list[str]]:
    """The storage that CSR saves, in numbers as the paper counts them and in bytes."""
    for name in ("CP-DURA", "RESCAL-DURA"):
        first_run = next(run for run in results if run["row"] == name)
        for point in first_run["points"]:
            if point["target_share"] not in STORAGE_SHARES:
                continue
            cells = [name, f"{point['share']:.0%}"]
            for tables in ("entity_tables", "whole_model"):
                saved = point["csr_saves"][tables]
                cells += [f"{saved['numbers']:.1%}", f"{saved['bytes']:.1%}"]
            yield cells


def draw_sparsity(results: Results, graph: str) -> Drawing:
    curves: dict[str, list[dict[float, float]]] = {}
    for run in results:
        curve = {point["target_share"]: point["metrics"]["mrr"] for point in run["points"]}
        curves.setdefault(run["row"], []).append(curve)
    panels = {}
    for panel, names in SPARSITY_PANELS.items():
        panels[panel] = {name: curves[name] for name in names}
    return figures.draw_sparsity(panels, published=published_sparsity(graph), graph=graph)


def published_sparsity(graph: str) -> dict[str, dict[float, float]]:
    """Points of the paper by row: share of zeros → MRR."""
    curves = {}
    for name, points in published()["sparsity"].get(graph, {}).items():
        # The keys of a JSON object are text.
        curves[name] = {float(share): mrr for share, mrr in points.items()}
    return curves


# -- sampled softmax and ensembles ---------------------------------------------


def measure_sampled(config: Config, graph: kg.Graph) -> Iterator[Results]:
    """Sampled softmax with DURA beside full softmax: the same recipe with another loss."""
    row, *_ = rows_with_recipes((STUDIED, model_row("ComplEx-DURA")), graph.name)
    for seed in range(config.seeds):
        recipe = recipe_of(row, graph.name).with_changes({"training.seed": seed, "model.dim": 500})
        for num_negatives, distribution in SAMPLES:
            config.log(
                f"{row.name} on {graph.name}, seed {seed}: {num_negatives or 'all'} negatives "
                f"{distribution}"
            )
            chosen = recipe
            if num_negatives:
                chosen = recipe.with_changes(
                    {
                        "loss.name": "SampledSoftmax",
                        "loss.num_negatives": num_negatives,
                        "loss.distribution": distribution,
                    }
                )
            run = kg.train_recipe(
                chosen, graph=graph, device=config.device, on_progress=config.on_progress
            )
            yield {
                "negatives": num_negatives,
                "distribution": distribution,
                "seed": seed,
                **run_facts(run),
            }


def sampled_rows(results: Results) -> Iterator[list[str]]:
    for (negatives, distribution), runs in grouped(results, "negatives", "distribution").items():
        name = f"{negatives:,} {distribution} negatives" if negatives else "full softmax"
        seconds = statistics.mean(run["seconds"] for run in runs)
        yield [name, *_valid_and_test(runs), f"{seconds:.1f}", str(len(runs))]


def measure_ensemble(config: Config, graph: kg.Graph) -> Iterator[Results]:
    """RESCAL-DURA and HAKE as an ensemble with weights fitted on validation, beside each alone."""
    for seed in range(config.seeds):
        ensemble = kg.Ensemble([config.load_trained(row, graph, seed) for row in ENSEMBLE_ROWS])
        names = [*(row.name for row in ENSEMBLE_ROWS), "ensemble"]
        runs = [*ensemble.members, ensemble]
        weights = [*ensemble.model.weights, None]
        for name, run, weight in zip(names, runs, weights, strict=True):
            mrr = {split: run.report_on(split).mrr for split in ("valid", "test")}
            yield {"row": name, "seed": seed, "weight": weight, **mrr}


def measure_path_ensemble(config: Config, graph: kg.Graph) -> Iterator[Results]:
    """PathNetwork and other rows as an ensemble with weights fitted on validation."""
    rows = (PATH_NETWORK, *(PATHS.row(name) for name in config.rows))
    recipes = [recipe_of(row, graph.name) for row in rows]
    about = {"row": " + ".join(row.name for row in rows), "recipes": recipe_digest(*recipes)}
    device = choose_device(config.device)
    for seed in config.missing_seeds(**about):
        ensemble = kg.Ensemble([config.load_trained(row, graph, seed) for row in rows])
        members = ensemble.members
        best = max(members, key=lambda member: member.report_on("valid").mrr)
        comparison = kg.compare_ranks(
            ensemble.report.ranks.mean[None], best.report.ranks.mean[None], seed=0
        )
        yield {
            **about,
            "seed": seed,
            "weights": list(ensemble.model.weights),
            "valid": ensemble.report_on("valid").metrics.as_dict(),
            "test": ensemble.report.metrics.as_dict(),
            "members": [run_facts(member) | {"model": member.model_name} for member in members],
            "best_member": rows[members.index(best)].name,
            "over_best_member": comparison.mrr.as_dict(),
            "device": describe_device(device),
            "shared_device": config.shared_device,
        }


def measure_path_duality(config: Config, graph: kg.Graph) -> Iterator[Results]:
    """PathNetwork asked in both directions: (h, r, t) and (t, r⁻¹, h), weighted on validation."""
    about = {
        "row": PATH_NETWORK.name,
        "recipes": recipe_digest(recipe_of(PATH_NETWORK, graph.name)),
    }
    for seed in config.missing_seeds(**about):
        run = config.load_trained(PATH_NETWORK, graph, seed)
        yield {**about, "seed": seed, **study_path_duality(run, graph)}


def mrr_by_weight(
    both: kg.EnsembleModel, graph: kg.Graph, weights: Sequence[float]
) -> dict[float, float]:
    """The validation MRR by the weight of the second member, filtered by train and valid."""
    known = KnownAnswers.of(graph, ("train", "valid"))
    mrrs = {}
    for weight in weights:
        both.weights = [1.0, weight]
        mrrs[weight] = kg.evaluate(both, graph, split="valid", known=known).mrr
    return mrrs


def study_path_duality(run: kg.Run, graph: kg.Graph) -> dict[str, Any]:
    """Metrics of a network, and of its score plus that of its inverse, weighted on validation."""
    inverse = kg.InverseModel(run.model.eval())
    both = kg.EnsembleModel([run.model, inverse]).eval()
    held_out = np.concatenate([graph.split(split) for split in HELD_OUT])
    queries = torch.from_numpy(with_reciprocals(held_out, graph.shape.num_relations)).long()
    with torch.no_grad():
        inverse.keep(*queries.to(inverse.device)[:, :2].unbind(1))
    choices = []
    validation = {}
    for normalized in (False, True):
        inverse.normalized = normalized
        mrrs = mrr_by_weight(both, graph, INVERSE_WEIGHTS)
        validation[str(normalized)] = list(mrrs.items())
        weight = max(mrrs, key=lambda weight: mrrs[weight])
        choices.append((mrrs[weight], normalized, weight))
    _, normalized, weight = max(choices, key=lambda choice: choice[0])
    inverse.normalized = normalized
    both.weights = [1.0, weight]
    results: dict[str, Any] = {
        "normalized": normalized,
        "weight": weight,
        "valid_by_weight": validation,
    }
    for split in HELD_OUT:
        report = kg.evaluate(both, graph, split=split)
        alone = run.report_on(split)
        comparison = kg.compare_ranks(report.ranks.mean[None], alone.ranks.mean[None], seed=0)
        results[split] = {
            "alone": alone.metrics.as_dict(),
            "both": report.metrics.as_dict(),
            "gain": comparison.mrr.as_dict(),
        }
    return results


def path_duality_rows(results: Results) -> Iterator[list[str]]:
    for (name,), runs in grouped(results, "row").items():
        for title, key in ((name, "alone"), ("both directions", "both")):
            cells = [over_seeds([run[split][key]["mrr"] for run in runs]) for split in HELD_OUT]
            for metric in ("hits_at_1", "hits_at_10"):
                cells.append(over_seeds([run["test"][key][metric] for run in runs]))
            weight = MISSING
            if key == "both":
                weight = over_seeds([run["weight"] for run in runs], digits=2)
            yield [title, weight, *cells, str(len(runs))]


def path_duality_fields(results: Results) -> dict[str, str]:
    notes = []
    for result in results:
        gain = result["test"]["gain"]
        interval = ""
        if gain["low"] is not None:
            interval = f" (95 %: {gain['low']:+.4f} to {gain['high']:+.4f})"
        notes.append(f"Seed {result['seed']}: {gain['difference']:+.4f} test MRR{interval}.")
    return {"notes": " ".join(notes)}


def path_ensemble_rows(results: Results) -> Iterator[list[str]]:
    for (name,), runs in grouped(results, "row").items():
        weights = []
        for of_member in zip(*(run["weights"] for run in runs), strict=True):
            weights.append(over_seeds(list(of_member), digits=2))
        metrics = [over_seeds([run["valid"]["mrr"] for run in runs])]
        for metric in METRICS.values():
            metrics.append(over_seeds([run["test"][metric] for run in runs]))
        gain = over_seeds([run["over_best_member"]["difference"] for run in runs])
        yield [name, ", ".join(weights), *metrics, gain, str(len(runs))]


def path_ensemble_fields(results: Results) -> dict[str, str]:
    notes = []
    for result in results:
        gain = result["over_best_member"]
        interval = ""
        if gain["low"] is not None:
            interval = f" (95 %: {gain['low']:+.4f} to {gain['high']:+.4f})"
        notes.append(
            f"{result['row']}, seed {result['seed']}: {gain['difference']:+.4f} MRR over "
            f"{result['best_member']}{interval}."
        )
    return {"notes": " ".join(notes)}


def ensemble_rows(results: Results) -> Iterator[list[str]]:
    for (name,), runs in grouped(results, "row").items():
        weights = [run["weight"] for run in runs if run["weight"] is not None]
        weight = over_seeds(weights, digits=2) if weights else MISSING
        yield [name, weight, *_valid_and_test(runs), str(len(runs))]


# -- inference ---------------------------------------------------------------


def measure_completion(config: Config, graph: kg.Graph) -> Results:
    """How many held-out test triples are among the most probable new triples."""
    # A small graph has a recipe of the main table alone.
    row = STUDIED if recipe_path(STUDIED, graph.name) else MAIN.row(STUDIED.name)
    run = config.load_trained(row, graph, 0)
    fitted = calibration_for(run)
    of_all = completion.check_completion(run.model, graph, calibration=fitted)
    of_types = completion.check_completion(run.model, graph, calibration=fitted, types=True)
    return {**of_all.as_dict(), "types": of_types.as_dict()}


def completion_rows(results: Results) -> Iterator[list[str]]:
    columns = {
        "sizes": ",",
        "found": ",",
        "expected": ",.1f",
        "by_degree": ",.1f",
        "at_random": ",.3g",
    }
    # Records of earlier versions have no search that leaves out unusual types.
    found_of_types: dict[int, int] = {}
    if "types" in results:
        of_types = results["types"]
        found_of_types = dict(zip(of_types["sizes"], of_types["found"], strict=True))
    for row in zip(*(results[key] for key in columns), strict=True):
        found = found_of_types.get(row[0])
        cells = list(map(format, row, columns.values()))
        yield [*cells, MISSING if found is None else f"{found:,}"]


def measure_calibration(config: Config, graph: kg.Graph) -> Results:
    """Calibration of probabilities and coverage of prediction sets on test; fitted on valid."""
    run = config.load_trained(STUDIED, graph, 0)
    fitted = calibration_for(run)
    assert fitted.prediction_sets is not None
    report = reliability.evaluate_calibration(fitted, run.model, graph)
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
    points = [(point["predicted"], point["observed"], point["noise"]) for point in likely["bins"]]
    title = f"{graph} test"
    return draw_reliability({title: points}, graph=title, ece=likely["ece"])


def measure_quantization(config: Config, graph: kg.Graph) -> Iterator[Results]:
    """MRR with entity embeddings in storage formats of fewer bytes."""
    model = config.load_trained(STUDIED, graph, 0).model
    yield from quantization.measure(model, graph)


def quantization_rows(results: Results) -> Iterator[list[str]]:
    for result in results:
        name = result["storage"]
        if name == "sparse":
            name += f" {result['share']:.0%}"
        metrics = [f"{result['metrics'][key]:.4f}" for key in ("mrr", "hits_at_1", "hits_at_3")]
        yield [name, figures.format_bytes(result["bytes"]), *metrics]


# -- inductive entities --------------------------------------------------------


def measure_inductive(config: Config, graph: kg.Graph) -> Iterator[Results]:
    """Held-out entities embedded from a few of their triples, against training again with them."""
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
    """Metrics of held-out triples by method: embedded from some triples, or trained again.

    `counts` are triples given per entity; None is all. The baselines are the mean embedding and
    random embeddings.
    """
    if not 0 < share < 1:
        raise InvalidValue("share", expected="a share of entities between 0 and 1", found=share)
    for seed in seeds:
        split = InductiveSplit.of(graph, share, seed=seed)
        seeded = recipe.with_changes({"training.seed": seed})
        trained = kg.train_recipe(seeded, graph=split.known, device=device).model
        model = inductive.with_adjoint(trained)
        context = inductive.FrozenContext.of(model, split.known, recipe=seeded)
        for count in counts:
            triples = split.given(count)
            extended_train = np.concatenate([split.known.train, triples])
            extended_graph = replace(split.whole, train=extended_train)

            started = time.perf_counter()
            embedded = extension.extend_by_ids(context, split.names, triples).model
            embedding_seconds = time.perf_counter() - started
            started = time.perf_counter()
            retrained = kg.train_recipe(seeded, graph=extended_graph, device=device).model
            training_seconds = time.perf_counter() - started

            about = {"triples_given": count, "num_triples": len(triples)}
            yield split.evaluate(embedded, "embedded", seconds=embedding_seconds, **about)
            yield split.evaluate(retrained, "retrained", seconds=training_seconds, **about)
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
        """Hold out random entities, except those with training triples of held-out ones only."""
        num_entities = len(graph.entities)
        num_held_out = max(1, round(share * num_entities))
        held_out = np.zeros(num_entities, dtype=bool)
        held_out[np.random.default_rng(seed).permutation(num_entities)[:num_held_out]] = True

        heads = graph.train[:, 0]
        tails = graph.train[:, 2]
        has_known_neighbour = np.zeros(num_entities, dtype=bool)
        has_known_neighbour[heads[~held_out[tails]]] = True
        has_known_neighbour[tails[~held_out[heads]]] = True
        held_out &= has_known_neighbour
        if not held_out.any():
            raise RequestError(
                f"{graph.name} has too few entities to hold out a share of {share:g}."
            )

        # The held-out entities get the last ids.
        order = np.argsort(held_out, kind="stable")
        new_ids = np.argsort(order).astype(np.int32)
        num_known = int((~held_out).sum())
        splits = {name: graph.split(name).copy() for name in SPLITS}
        for triples in splits.values():
            triples[:, [0, 2]] = new_ids[triples[:, [0, 2]]]
        whole = replace(graph, entities=kg.Vocabulary(graph.entities.names.take(order)), **splits)
        known_splits = {}
        for name, triples in splits.items():
            is_known = (triples[:, [0, 2]] < num_known).all(1)
            known_splits[name] = triples[is_known]
        known_entities = kg.Vocabulary(whole.entities.names.slice(0, num_known))
        return cls(whole, replace(whole, entities=known_entities, **known_splits), seed)

    @property
    def names(self) -> list[str]:
        return self.whole.entities.names.slice(len(self.known.entities)).to_pylist()

    def given(self, count: int | None) -> Triples:
        """At most `count` training triples per held-out entity; None is all.

        Triples with a known entity come first.
        """
        num_known = len(self.known.entities)
        ends = self.whole.train[:, [0, 2]]
        order = np.random.default_rng(self.seed).permutation(len(ends))
        both_held_out = (ends >= num_known).all(1)
        order = order[np.argsort(both_held_out[order], kind="stable")]
        chosen = np.zeros(len(ends), dtype=bool)
        for entity in range(num_known, len(self.whole.entities)):
            has_entity = (ends[order] == entity).any(1)
            chosen[order[has_entity][:count]] = True
        return self.whole.train[chosen]

    def evaluate(
        self, model: kg.Model, method: str, *, known_entities: bool = True, **about: Any
    ) -> dict[str, Any]:
        """Metrics of valid and test triples of held-out entities, and of other test triples.

        Without `known_entities`, the others are not ranked.
        """
        triples = np.concatenate([self.whole.valid, self.whole.test])
        is_new = triples[:, [0, 2]] >= len(self.known.entities)
        has_new = is_new.any(1)
        new_head, new_tail = is_new[has_new].T

        filtered = kg.KnownAnswers.of(self.whole)
        new_graph = replace(self.whole, test=triples[has_new])
        tail_ranks, head_ranks = kg.rank(model, new_graph, known=filtered).mean
        ranks = {
            "all_queries": np.stack([tail_ranks, head_ranks]),
            "as_query": np.concatenate([tail_ranks[new_head], head_ranks[new_tail]]),
            "as_answer": np.concatenate([tail_ranks[new_tail], head_ranks[new_head]]),
        }
        if known_entities:
            known_graph = replace(self.whole, test=self.known.test)
            ranks["known_entities"] = kg.rank(model, known_graph, known=filtered).mean
        metrics = {kind: kg.Metrics.of(values).as_dict() for kind, values in ranks.items()}
        return {
            "method": method,
            "seed": self.seed,
            "num_entities": len(self.names),
            **about,
            **metrics,
        }

    def baselines(self, context: inductive.FrozenContext) -> dict[str, torch.Tensor]:
        """The mean embedding, and random ones with the same mean and standard deviation."""
        num_tables = context.new_rows.shape[1]  # a model with one entity table has it on both sides
        tables = (context.model.head_table, context.model.tail_table)[:num_tables]
        mean = torch.stack([table.mean(0).detach() for table in tables])
        sd = torch.stack([table.std(0).detach() for table in tables])
        num_entities = len(self.names)
        generator = torch.Generator().manual_seed(self.seed)
        noise = torch.randn(num_entities, *mean.shape, generator=generator)
        return {"mean": mean.expand(num_entities, -1, -1), "random": mean + sd * noise.to(mean)}


def measure_inductive_models(config: Config, graph: kg.Graph) -> Iterator[Results]:
    """Unseen entities added to a path network and to embeddings, by all their training triples."""
    return study_inductive_models(
        graph, inductive_recipes(graph, epochs=config.epochs), config=config
    )


def inductive_recipes(graph: kg.Graph, *, epochs: int | None = None) -> dict[str, kg.Recipe]:
    """The recipes of the graph by the names of their rows, or the defaults where it has none."""
    recipes = {}
    for row, model in ((PATH_NETWORK, "PathNetwork"), (STUDIED, "ComplEx")):
        if recipe_path(row, graph.name):
            recipes[row.name] = recipe_of(row, graph.name)
        else:
            recipes[row.name] = default_recipe(data_of(graph), graph, {"model.name": model})
    if epochs is not None:
        of_paths = recipes[PATH_NETWORK.name]
        recipes[PATH_NETWORK.name] = of_paths.with_changes({"training.epochs": epochs})
    return recipes


def study_inductive_models(
    graph: kg.Graph,
    recipes: Mapping[str, kg.Recipe],
    *,
    config: Config,
    share: float = UNSEEN_SHARE,
) -> Iterator[dict[str, Any]]:
    """Metrics of the held-out triples of unseen entities, by row and seed.

    The entities of `InductiveSplit` are unseen in training. `extend` adds them by all their
    training triples, and ranks are those of their validation and test triples.
    """
    device = choose_device(config.device)
    for name, recipe in recipes.items():
        about = {"row": name, "recipes": recipe_digest(recipe), "share": share}
        for seed in config.missing_seeds(**about):
            split = InductiveSplit.of(graph, share, seed=seed)
            seeded = recipe.with_changes({"training.seed": seed})
            config.log(
                f"{name} on {graph.name} without {len(split.names):,} entities, seed {seed}."
            )
            # Ranks of the known entities are not needed.
            known = replace(split.known, test=split.known.test[:0])
            run = kg.train_recipe(
                seeded, graph=known, device=device, on_progress=config.on_progress
            )
            triples = split.given(None)
            started = time.perf_counter()
            context = extension.extension_context(run.model, known, recipe=seeded)
            extended = extension.extend_by_ids(context, split.names, triples).model
            seconds = time.perf_counter() - started
            result = split.evaluate(extended, "extended", known_entities=False)
            del result["method"]
            yield {
                **about,
                **result,
                "num_triples": len(triples),
                "dim": recipe.model.dim,
                "epochs": recipe.training.epochs,
                "training_seconds": round(sum(entry["seconds"] for entry in run.history), 1),
                "extending_seconds": round(seconds, 2),
                "device": describe_device(device),
                "shared_device": config.shared_device,
            }


def inductive_models_rows(results: Results) -> Iterator[list[str]]:
    for (name,), runs in grouped(results, "row").items():
        mrr = []
        for kind in ("all_queries", "as_query", "as_answer"):
            mrr.append(over_seeds([run[kind]["mrr"] for run in runs]))
        hits = over_seeds([run["all_queries"]["hits_at_10"] for run in runs])
        seconds = []
        for part in ("training_seconds", "extending_seconds"):
            mean = sum(run[part] for run in runs) / len(runs)
            is_bound = all(run["shared_device"] for run in runs)
            seconds.append(f"≤ {duration(mean)}" if is_bound else duration(mean))
        yield [name, *mrr, hits, *seconds, str(len(runs))]


def inductive_models_fields(results: Results) -> dict[str, str]:
    settings = []
    for name, dim, epochs in grouped(results, "row", "dim", "epochs"):
        settings.append(f"{name}: dim {dim}, {epochs} epoch{'' if epochs == 1 else 's'}.")
    return {**inductive_fields(results), "settings": " ".join(settings)}


def inductive_rows(results: Results) -> Iterator[list[str]]:
    # All triples of an entity, which is None, come after the numbers.
    ordered = sorted(results, key=lambda result: (result["method"], result["triples_given"] or inf))
    for (method, count), runs in grouped(ordered, "method", "triples_given").items():
        number = "all" if count is None else f"{count:.0f}"
        kinds = ("all_queries", *figures.QUERY_PANELS)
        mrr = [over_seeds([run[kind]["mrr"] for run in runs]) for kind in kinds]
        seconds = sum(run["seconds"] for run in runs) / len(runs)
        yield [method, number, *mrr, f"{seconds:.1f}" if seconds else MISSING, str(len(runs))]


# -- explanations --------------------------------------------------------------


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
        trained = kg.train_recipe(recipe, graph=graph, device=config.device).model
        model = inductive.with_adjoint(trained)
        context = inductive.FrozenContext.of(model, graph, recipe=recipe)
        influences = [influence(tuple(triple), context) for triple in triples.tolist()]
        scores = _scores(model, triples)

        # The rows of train to remove for each test triple, by kind and number.
        removals = {("nothing", 0): [np.zeros(0, dtype=np.int64)]}
        for count in counts:
            for removed, rows in select_triples(influences, count, random).items():
                removals[removed, count] = rows
        for (removed, count), rows in removals.items():
            all_rows = np.unique(np.concatenate(rows))
            drops = {}
            if count:
                rest = replace(graph, train=np.delete(graph.train, all_rows, axis=0))
                model = kg.train_recipe(recipe, graph=rest, device=config.device).model
                drops = _score_drops(scores - _scores(model, triples), influences, rows)
            ranks = kg.rank(model, replace(graph, test=triples), known=known).mean
            yield {
                "removed": removed,
                "seed": seed,
                "count": count,
                "num_triples": len(triples),
                "metrics": kg.Metrics.of(ranks).as_dict(),
                "num_removed": len(all_rows),
                **drops,
            }


def _score_drops(
    actual: npt.NDArray[np.float64], influences: Sequence[Influence], rows: Sequence[Ids]
) -> dict[str, float]:
    """Mean actual and expected score drops of test triples, and their rank correlation."""
    expected = []
    for triple_influence, removed in zip(influences, rows, strict=True):
        is_removed = np.isin(triple_influence.rows, removed)
        expected.append(float(triple_influence.score_drops[is_removed].sum()))
    expected_drops = np.array(expected)
    return {
        "score_drop": float(actual.mean()),
        "expected_drop": float(expected_drops.mean()),
        "rank_correlation": rank_correlation(actual, expected_drops),
    }


def disjoint_triples(
    graph: kg.Graph, random: np.random.Generator, *, min_degree: int, max_triples: int
) -> Triples:
    """Test triples without a common entity, whose entities have enough training triples."""
    degrees = np.bincount(graph.train[:, [0, 2]].ravel(), minlength=len(graph.entities))
    excluded = degrees < min_degree
    rows: list[int] = []
    for row in random.permutation(len(graph.test)).tolist():
        head, _, tail = graph.test[row].tolist()
        if len(rows) < max_triples and head != tail and not (excluded[head] or excluded[tail]):
            rows.append(row)
            excluded[[head, tail]] = True
    if len(rows) < 2:
        raise RequestError(
            f"{graph.name} has too few test triples whose entities have {min_degree} training "
            "triples."
        )
    return graph.test[rows]


def select_triples(
    influences: Sequence[Influence], count: int, random: np.random.Generator
) -> dict[str, list[Ids]]:
    """The rows of train to remove for each test triple, by kind."""
    selected: dict[str, list[Ids]] = {"supporting": [], "random": [], "opposing": []}
    for triple in influences:
        most_supporting = np.argsort(-triple.score_drops, kind="stable")
        most_opposing = np.argsort(triple.score_drops, kind="stable")
        selected["supporting"].append(triple.rows[most_supporting[:count]])
        selected["random"].append(random.permutation(triple.rows)[:count])
        selected["opposing"].append(triple.rows[most_opposing[:count]])
    return selected


@torch.no_grad()
def _scores(model: kg.Model, triples: Triples) -> npt.NDArray[np.float64]:
    heads, relations, tails = torch.from_numpy(triples).long().to(model.device).unbind(1)
    return model.score(heads, relations, tails).double().cpu().numpy()


def rank_correlation(a: npt.NDArray[np.float64], b: npt.NDArray[np.float64]) -> float:
    """Spearman's rank correlation; 0 if one of the two is constant."""
    with optional_import("scipy", purpose="The study of explanations"):
        from scipy.stats import spearmanr
    if np.ptp(a) == 0 or np.ptp(b) == 0:
        return 0.0
    return float(spearmanr(a, b).statistic)


def explanations_rows(results: Results) -> Iterator[list[str]]:
    for (removed, count), runs in grouped(results, "removed", "count").items():
        cells = [removed, str(count)]
        for metric in ("mrr", "hits_at_1"):
            cells.append(over_seeds([run["metrics"][metric] for run in runs]))
        for drop in ("score_drop", "expected_drop", "rank_correlation"):
            cells.append(over_seeds([run[drop] for run in runs], digits=2) if count else MISSING)
        yield [*cells, str(len(runs))]


# -- deletion of supporting paths ------------------------------------------------


def measure_deletion(
    config: Config, graph: kg.Graph, *, counts: Sequence[int] = (1, 3, 5), max_triples: int = 200
) -> Iterator[Results]:
    """Scores and ranks of correct predictions of a path network without their supporting paths."""
    for seed in range(config.seeds):
        network = config.load_trained(PATH_NETWORK, graph, seed).model
        assert isinstance(network, kg.PathNetwork)
        triples = correct_triples(network, graph, max_triples=max_triples, seed=seed)
        if not len(triples):
            raise RequestError(f"{PATH_NETWORK.name} predicts no test triple of {graph.name}.")
        for result in delete_paths(network, graph, triples, counts=counts, seed=seed):
            yield {"seed": seed, **result.as_dict()}


def deletion_rows(results: Results) -> Iterator[list[str]]:
    for (deleted, count), runs in grouped(results, "deleted", "paths").items():
        yield [
            deleted,
            str(count),
            over_seeds([run["num_deleted"] for run in runs], digits=1),
            over_seeds([run["score_drop"] for run in runs], digits=2),
            over_seeds([run["mrr"] for run in runs]),
            str(len(runs)),
        ]


# -- all studies ---------------------------------------------------------------


_STUDIES = (
    Study("cost", measure_cost, cost_rows),
    Study("duality", measure_duality, duality_rows, several_seeds=True),
    Study(
        "defaults",
        measure_defaults,
        defaults_rows,
        graphs=DEFAULT_GRAPHS,
        several_seeds=True,
        fields=defaults_fields,
        by_device=True,
    ),
    Study(
        "sampled",
        measure_sampled,
        sampled_rows,
        graphs=("WN18RR", "FB15k-237", "YAGO3-10-quarter"),
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
        graphs=FB15K237,
        several_seeds=True,
        further={"storage": storage_rows},
    ),
    Study("completion", measure_completion, completion_rows, other_graphs=("world",)),
    Study("calibration", measure_calibration, calibration_rows, draw_calibration),
    Study(
        "quantization",
        measure_quantization,
        quantization_rows,
        figures.draw_quantization,
        graphs=FB15K237,
    ),
    Study(
        "inductive",
        measure_inductive,
        inductive_rows,
        draw_inductive,
        graphs=FB15K237,
        several_seeds=True,
        fields=inductive_fields,
    ),
    Study(
        "inductive-models",
        measure_inductive_models,
        inductive_models_rows,
        other_graphs=SMALL_GRAPHS,
        several_seeds=True,
        fields=inductive_models_fields,
        merges=True,
    ),
    Study(
        "path-ensemble",
        measure_path_ensemble,
        path_ensemble_rows,
        several_seeds=True,
        fields=path_ensemble_fields,
        merges=True,
    ),
    Study(
        "path-duality",
        measure_path_duality,
        path_duality_rows,
        other_graphs=("world", *SMALL_GRAPHS),
        several_seeds=True,
        fields=path_duality_fields,
        merges=True,
    ),
    Study(
        "explanations",
        measure_explanations,
        explanations_rows,
        figures.draw_explanations,
        graphs=("world",),
        several_seeds=True,
    ),
    Study("deletion", measure_deletion, deletion_rows, graphs=("WN18RR",), several_seeds=True),
)
STUDIES = {study.name: study for study in _STUDIES}
