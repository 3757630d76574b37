"""Studies of trained models: what each measures, its tables and its figure.

A study's results are plain data, saved as `records/figures/NAME-GRAPH.json`; its tables are made from them."""

import statistics
import time
from collections.abc import Mapping
from itertools import cycle, islice
from typing import Any

import torch

from dualkg.analysis.figures import Drawing
from dualkg.analysis.sparsity import SHARES, CurvePoint, rotated, sparsity_curve
from dualkg.data.filters import KnownAnswers
from dualkg.data.graph import Graph
from dualkg.errors import RequestError
from dualkg.evaluation.report import evaluate
from dualkg.models.base import Model
from dualkg.models.bilinear import Dual
from dualkg.models.distance import ModE, RotatE
from dualkg.training.api import choose_device, data_of, default_recipe, spread, train_recipe
from dualkg.training.ensemble import Ensemble
from dualkg.training.recipe import Recipe, RegularizerConfig, list_recipes, load_recipe
from dualkg.training.run import Run, describe_device
from dualkg.training.trainer import Trainer
from dualkg.tuning.automatic import AutomaticTuner, starting_recipe
from paper import figures, inference, registry
from paper.config import FB15K237, Config, Results, Study, find_record
from paper.projection import METRICS, Projection, compute_plane, find_queries, pick_query, project
from paper.registry import GRAPHS, MAIN, Row, model_row, published, recipe_of, rows_with_recipes
from paper.tables import MISSING, Table, duration, grouped, over_seeds

# -- training cost ----------------------------------------------------------------------------------------

COMPARED = ("none", "Frobenius", "DURA")


def measure_cost(config: Config, graph: Graph) -> tuple[Results, None]:
    """Time of a training step with DURA, the Frobenius norm, and no regularizer (Appendix C)."""
    results = []
    for row in MAIN.dura_rows:
        config.log(f"{row.name} on {graph.name}: steps with three regularizers.")
        results.append(time_steps(recipe_of(row, graph.name), graph, device=choose_device(config.device)))
    return results, None


def time_steps(
    recipe: Recipe, graph: Graph, *, device: torch.device, steps: int = 30, rounds: int = 7
) -> dict[str, Any]:
    """Seconds per training step with each regularizer, in alternating rounds; the median over the rounds."""
    trainers = {}
    for name in COMPARED:
        weight = None if name == "none" else recipe.regularizer.weight
        other = recipe.model_copy(update={"regularizer": RegularizerConfig(name=name, weight=weight)})
        one = recipe if name == "DURA" else other
        model = one.model.build(graph.shape, seed=one.training.seed).to(device)
        trainers[name] = Trainer(model, graph, one, one.regularizer.build())
        _seconds_per_step(trainers[name], steps=8)  # warm-up
    times = [[_seconds_per_step(trainer, steps) for trainer in trainers.values()] for _ in range(rounds)]
    medians = map(statistics.median, zip(*times, strict=True))
    about = {"model": recipe.model.name, "dim": recipe.model.dim, "batch": recipe.training.batch_size}
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


def cost_tables(results: Results, graph: str) -> list[Table]:
    columns = ("", "dim", "batch", *(f"{name}, ms per step" for name in COMPARED), "Frobenius adds", "DURA adds")
    rows = []
    for one in results:
        step = one["seconds_per_step"]
        adds = [f"{step[name] / step['none'] - 1:+.1%}" for name in COMPARED[1:]]
        milliseconds = [f"{1000 * step[name]:.3f}" for name in COMPARED]
        rows.append([one["model"], str(one["dim"]), str(one["batch"]), *milliseconds, *adds])
    title = f"Cost of DURA (Appendix C): {graph} on {results[0]['device']}"
    return [Table(title, columns, rows, results)]


# -- defaults --------------------------------------------------------------------------------------------

DEFAULT_GRAPHS = ("UMLS", "Kinship", "Nations", "Countries-S1", "Countries-S2", "Countries-S3", "world")
DEFAULT_GRAPHS += ("WN18RR", "FB15k-237", "YAGO3-10-quarter")
WAYS = {"tuned": "default", "fixed": "--no-tune", "recipe": "best recipe"}


def best_recipe(graph: str, dim: int) -> tuple[str, Recipe] | None:
    """The ComplEx-DURA recipe of a graph with relation prediction if there is one, at the dimension of the default."""
    for name in (f"{graph.lower()}/complex-dura{ending}" for ending in ("-relation-prediction", "")):
        if name in list_recipes():
            return name, load_recipe(name, changes={"model.dim": dim})
    return None


def _recorded(config: Config, name: str, recipe: Recipe, graph: Graph, device: str) -> dict[int, dict[str, float]]:
    """What is recorded of a recipe on this kind of device, by seed."""
    record = find_record(config.records / name, recipe, graph)
    if record is None:
        return {}
    return {
        run["seed"]: {"valid": run["valid"]["mrr"], "test": test.mrr, "seconds": _seconds(run["costs"])}
        for run, test in zip(record.runs, record.test_metrics, strict=True)
        if ("NVIDIA" in str(run["environment"]["device"])) == (device == "cuda")
    }


def measure_defaults(config: Config, graph: Graph) -> tuple[Results, None]:
    """Test MRR of `dualkg train GRAPH` without options, of `--no-tune`, and of the best recipe of the same model."""
    if not len(graph.test):
        raise RequestError(f"{graph.name} has no test triples.")
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
        runs = {}
        if found := best_recipe(graph.name, start.model.dim):
            recorded = _recorded(config, *found, graph, device.type)
            if seed in recorded:
                runs["recipe"] = recorded[seed]
            else:
                recipes["recipe"] = found[1].with_changes({"training.seed": seed})
        runs |= {
            way: run_facts(train_recipe(recipe, graph=graph, device=device, on_progress=config.on_progress))
            for way, recipe in recipes.items()
        }
        tuned = {"tuning_seconds": round(tuning_seconds, 1), "trials": len(tuner.trials), "chosen": tuner.summary()}
        results.append({"seed": seed, **runs, "tuned": runs["tuned"] | tuned})
    return {"dim": start.model.dim, "epochs": start.training.epochs, "seeds": results}, None


def run_facts(run: Run) -> dict[str, float]:
    return {"valid": run.reports["valid"].mrr, "test": run.report.mrr, "seconds": _seconds(run.costs or {})}


def _seconds(costs: Mapping[str, float | None]) -> float:
    return round(sum(costs.get(name) or 0.0 for name in ("warm_up_seconds", "training_seconds")), 1)


def defaults_tables(results: Results, graph: str) -> list[Table]:
    rows, facts = [], []
    for way, title in WAYS.items():
        runs = [seed[way] for seed in results["seeds"] if way in seed]
        if runs:
            mrr = [over_seeds([run[split] for run in runs]) for split in ("valid", "test")]
            mean = {key: sum(run.get(key, 0.0) for run in runs) / len(runs) for key in ("tuning_seconds", "seconds")}
            tuning = duration(mean["tuning_seconds"]) if way == "tuned" else MISSING
            rows.append([title, *mrr, str(len(runs)), tuning, duration(mean["seconds"])])
            facts += [{"graph": graph, "way": way, **run} for run in runs]
    columns = ("", "valid MRR", "test MRR", "seeds", "tuning", "training")
    notes = [f"Seed {seed['seed']}: {seed['tuned']['chosen']}" for seed in results["seeds"]]
    if results.get("shared_device"):
        notes.append("Times are upper bounds, because other work ran on the same device.")
    title = f"Defaults: {graph}, ComplEx dim {results['dim']}, {results['epochs']} epochs"
    return [Table(title, columns, rows, facts, notes)]


# -- duality ----------------------------------------------------------------------------------------------

DUALITY_ROWS = ("CP", "CP-DURA", "RESCAL", "RESCAL-DURA", "ComplEx", "ComplEx-DURA", "RotatE", "ModE")
SCORES = ("as trained", "inner product", "distance, tail's side", "distance, head's side")


def scoring_models(model: Model) -> dict[str, Model]:
    """The model as trained, and the primal and dual models with the same embeddings."""
    primal = model.primal() if isinstance(model, RotatE | ModE) else model
    return dict(zip(SCORES, (model, primal, Dual(primal, "tail"), Dual(primal, "head")), strict=True))


def measure_duality(config: Config, graph: Graph) -> tuple[Results, None]:
    """Test MRR of the same embeddings scored by inner product and by both distances."""
    known = KnownAnswers.of(graph)
    results = []
    for row in rows_with_recipes(map(model_row, DUALITY_ROWS), graph.name):
        mrr: dict[str, list[float]] = {name: [] for name in SCORES}
        for seed in range(config.seeds):
            for name, model in scoring_models(config.load_trained(row, graph, seed).model).items():
                mrr[name].append(evaluate(model, graph, split="test", known=known).mrr)
        results.append({"row": row.name, "mrr": mrr})
    return results, None


def duality_tables(results: Results, graph: str) -> list[Table]:
    rows = [
        [one["row"], *(over_seeds(one["mrr"][name]) for name in SCORES), str(len(one["mrr"][SCORES[0]]))]
        for one in results
    ]
    note = (
        "A row has the same embeddings. Inner product and distance differ by two norms, which DURA bounds. RotatE and "
        "ModE are trained by a distance with another norm; their primal models are ComplEx and DistMult."
    )
    columns = ("test MRR by score", *SCORES, "seeds")
    return [Table(f"Inner product and distance: {graph}", columns, rows, results, [note])]


# -- the weights of DURA ----------------------------------------------------------------------------------


def measure_dura_weights(config: Config, graph: Graph) -> tuple[Results, None]:
    """Validation MRR over λ1 and λ2, by a grid of trainings; an interrupted search resumes."""
    from dualkg.tuning.space import load_space
    from dualkg.tuning.tune import tune

    name = f"{graph.name.lower()}-complex-dura-weights"
    space = load_space(registry.SPACES / f"{name}.toml")
    config.log(f"{space.num_trials} trainings of {space.base.model.name} on {graph.name}.")
    result = tune(space, out=config.runs / "searches" / name, device=config.device)
    result.write(config.records / "searches" / name)
    grid = [
        {"plain": row.params["regularizer.plain"], "mapped": row.params["regularizer.mapped"], "valid_mrr": row.mrr}
        for row in result.ranked
        if row.mrr is not None
    ]
    chosen = space.base.regularizer
    base = {"model": space.base.model.name, "chosen": [chosen.plain, chosen.mapped]}
    return {**base, "grid": sorted(grid, key=lambda one: (one["plain"], one["mapped"]))}, None


def _mrr_by_weights(results: Results) -> dict[tuple[float, float], float]:
    return {(float(one["plain"]), float(one["mapped"])): one["valid_mrr"] for one in results["grid"]}


def dura_weights_tables(results: Results, graph: str) -> list[Table]:
    mrr = _mrr_by_weights(results)
    mapped = sorted({other for _, other in mrr})
    rows = [
        [f"λ1 = {plain:g}", *(f"{mrr[plain, other]:.4f}" if (plain, other) in mrr else "–" for other in mapped)]
        for plain in sorted({plain for plain, _ in mrr})
    ]
    columns = ("validation MRR, filtered by train and valid", *(f"λ2 = {other:g}" for other in mapped))
    return [Table(f"Weights λ1 and λ2 of DURA: {graph}", columns, rows, results["grid"])]


def draw_dura_weights(results: Results, graph: str) -> Drawing:
    title = f"λ1 and λ2 of DURA: {results['model']} on {graph}"
    return figures.draw_dura_weights(_mrr_by_weights(results), chosen=tuple(results["chosen"]), title=title)


# -- Figures 1, 2 and 3 -----------------------------------------------------------------------------------

FIGURE1_ROWS = (Row("CP", "cp-dim-2"), Row("CP-DURA", "cp-dura-dim-2"))
ROTATED, ROTATION_SHARE = "RESCAL-DURA, rotated", 0.8
SPARSITY_PANELS = {"CP": ("CP", "CP-N3", "CP-DURA"), "RESCAL": ("RESCAL", "RESCAL-DURA", ROTATED)}
STORAGE_SHARES = (0.5, 0.6, 0.7, 0.8, 0.9)


def measure_tsne(config: Config, graph: Graph) -> tuple[Results, Drawing]:
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


def tsne_tables(results: Results, graph: str) -> list[Table]:
    rows = [
        [name, *(over_seeds([one["silhouettes"][metric] for one in ones]) for metric in METRICS), str(len(ones))]
        for (name,), ones in grouped(results, "row").items()
    ]
    return [Table(f"t-SNE: {graph}", ("silhouette of ten queries", *METRICS, "seeds"), rows, results)]


def measure_figure1(config: Config, graph: Graph) -> tuple[Results, Drawing]:
    """The tails of one query in models of dim 2, with and without DURA."""
    query = pick_query(graph)
    planes = {row.name: compute_plane(config.load_trained(row, graph, 0).model, graph, query) for row in FIGURE1_ROWS}
    return {name: plane.as_dict() for name, plane in planes.items()}, figures.draw_planes(planes, graph=graph.name)


def figure1_tables(results: Results, graph: str) -> list[Table]:
    columns = ("distance of the tails", "from their centroid", "from hR", "median query: centroid", "median query: hR")
    rows = [
        [name, *(f"{one[kind][centre]:.3f}" for kind in ("distances", "medians") for centre in ("centroid", "hR"))]
        for name, one in results.items()
    ]
    note = (
        "In the paper's illustration, DURA moves the tails into a small region near hR. The second column is their "
        "distance from hR. The first, their distance from each other relative to all entities, need not become smaller."
    )
    return [Table(f"Figure 1 at dim 2: {graph}", columns, rows, [results], [note])]


def measure_sparsity(config: Config, graph: Graph) -> tuple[Results, None]:
    """MRR against the sparsity of entity embeddings (Figure 3), and the storage it saves."""
    results = []
    for name in sum(SPARSITY_PANELS.values(), ()):
        for seed in range(config.seeds):
            model = config.load_trained(model_row(name.removesuffix(", rotated")), graph, seed).model
            model = rotated(model, share=ROTATION_SHARE) if name == ROTATED else model
            points = [_sparsity_point(point) for point in sparsity_curve(model, graph)]
            results.append({"row": name, "seed": seed, "points": points})
    return results, None


def _sparsity_point(point: CurvePoint) -> dict[str, Any]:
    sizes = {"entity_tables": point.storage.entity_tables["CSR"], "whole_model": point.storage.whole_model["CSR"]}
    saved = {name: {"numbers": size.numbers_saved, "bytes": size.bytes_saved} for name, size in sizes.items()}
    about = {"target_share": point.target_share, "share": point.share, "threshold": point.threshold}
    return {**about, "metrics": point.metrics.as_dict(), "csr_saves": saved}


def sparsity_tables(results: Results, graph: str) -> list[Table]:
    rows, facts = [], []
    for (name,), ones in grouped(results, "row").items():
        curves = [[point["metrics"]["mrr"] for point in one["points"]] for one in ones]
        spreads = [spread(list(values)) for values in zip(*curves, strict=True)]
        rows.append([name, *(f"{mean:.4f}" for mean, _ in spreads), str(len(curves))])
        points = zip(SHARES, spreads, strict=True)
        facts.append({"row": name, "mrr": [{"share": share, "mean": mean, "sd": sd} for share, (mean, sd) in points]})
    note = (
        f"A rotated model is the same model in the axes in which {100 * ROTATION_SHARE:.0f} % of zeros cost least; "
        f"rotation alone changes no score."
    )
    columns = ("entries set to zero", *(f"{share:.0%}" for share in SHARES), "seeds")
    return [Table(f"MRR against sparsity: {graph}", columns, rows, facts, [note]), _storage_table(results, graph)]


def _storage_table(results: Results, graph: str) -> Table:
    """The storage that CSR saves against dense, in numbers as the paper counts them and in bytes."""
    rows, facts = [], []
    for name in ("CP-DURA", "RESCAL-DURA"):
        points = next(one["points"] for one in results if one["row"] == name)
        for point in (one for one in points if one["target_share"] in STORAGE_SHARES):
            parts = [point["csr_saves"][part] for part in ("entity_tables", "whole_model")]
            saved = [part[unit] for part in parts for unit in ("numbers", "bytes")]
            rows.append([name, f"{point['share']:.0%}", *(f"{share:.1%}" for share in saved)])
            facts.append({"row": name, "share": point["share"], "saved": saved})
    columns = ("CSR saves", "zeros", "entity tables, numbers", "bytes", "whole model, numbers", "bytes")
    note = (
        "Numbers are the paper's 2a + n + 1; bytes have the narrowest indices. The paper's 65 % less at 70 % zeros "
        "does not follow from its count, which saves 40 % there: 65 % needs 82.5 % zeros."
    )
    return Table(f"Storage of sparse tables: {graph}", columns, rows, facts, [note])


def draw_sparsity(results: Results, graph: str) -> Drawing:
    curves = {
        name: [{point["target_share"]: point["metrics"]["mrr"] for point in one["points"]} for one in ones]
        for (name,), ones in grouped(results, "row").items()
    }
    lines = {panel: [name for name in names if name in curves] for panel, names in SPARSITY_PANELS.items()}
    panels = {panel: {name: curves[name] for name in names} for panel, names in lines.items()}
    return figures.draw_sparsity(panels, published=published_sparsity(graph), graph=graph)


def published_sparsity(graph: str) -> dict[str, dict[float, float]]:
    """Points of the paper by row: `mrr_at_60_percent` → 0.6."""
    numbers = published()["sparsity"]
    if numbers["dataset"] != graph:
        return {}
    return {
        name: {int(key.split("_")[2]) / 100: mrr for key, mrr in row.items()}
        for name, row in numbers.items()
        if isinstance(row, dict)
    }


SAMPLES = [(0, ""), *((num, kind) for num in (500, 4000) for kind in ("uniform", "log-uniform"))]


def measure_sampled(config: Config, graph: Graph) -> tuple[Results, None]:
    """Sampled softmax with DURA beside full softmax: the same recipe with another loss."""
    row, *_ = rows_with_recipes((inference.STUDIED, model_row("ComplEx-DURA")), graph.name)
    device, results = choose_device(config.device), []
    for seed in range(config.seeds):
        recipe = recipe_of(row, graph.name).with_changes({"training.seed": seed, "model.dim": 500})
        for num, kind in SAMPLES:
            config.log(f"{row.name} on {graph.name}, seed {seed}: {num or 'all'} negatives {kind}")
            sampled = {"loss.name": "SampledSoftmax", "loss.num_negatives": num, "loss.distribution": kind}
            chosen = recipe.with_changes(sampled if num else {})
            run = train_recipe(chosen, graph=graph, device=device, on_progress=config.on_progress)
            results.append({"negatives": num, "distribution": kind, "seed": seed, **run_facts(run)})
    return results, None


def sampled_tables(results: Results, graph: str) -> list[Table]:
    rows = []
    for (num, kind), ones in grouped(results, "negatives", "distribution").items():
        mrr = [over_seeds([one[split] for one in ones]) for split in ("valid", "test")]
        name = f"{num:,} {kind} negatives" if num else "full softmax"
        rows.append([name, *mrr, f"{statistics.mean(one['seconds'] for one in ones):.1f}", str(len(ones))])
    note = "ComplEx-DURA, dim 500. The recipe is that of full softmax, also where negatives are sampled."
    columns = ("loss", "valid MRR", "test MRR", "seconds", "seeds")
    return [Table(f"Sampled softmax: {graph}", columns, rows, results, [note])]


ENSEMBLE_ROWS = (model_row("RESCAL-DURA"), model_row("HAKE"))


def measure_ensemble(config: Config, graph: Graph) -> tuple[Results, None]:
    """RESCAL-DURA and HAKE as an ensemble with weights fitted on validation, beside each alone."""
    results = []
    for seed in range(config.seeds):
        ensemble = Ensemble([config.load_trained(row, graph, seed) for row in ENSEMBLE_ROWS])
        names, runs = [*(row.name for row in ENSEMBLE_ROWS), "ensemble"], [*ensemble.members, ensemble]
        for name, run, weight in zip(names, runs, [*ensemble.model.weights, None], strict=True):
            mrr = {split: run.report_on(split).mrr for split in ("valid", "test")}
            results.append({"row": name, "seed": seed, "weight": weight, **mrr})
    return results, None


def ensemble_tables(results: Results, graph: str) -> list[Table]:
    rows = []
    for (name,), ones in grouped(results, "row").items():
        weights = [one["weight"] for one in ones if one["weight"] is not None]
        mrr = [over_seeds([one[split] for one in ones]) for split in ("valid", "test")]
        rows.append([name, over_seeds(weights, digits=2) if weights else MISSING, *mrr, str(len(ones))])
    return [Table(f"Ensemble: {graph}", ("", "weight", "valid MRR", "test MRR", "seeds"), rows, results)]


_STUDIES = (
    Study("cost", measure_cost, cost_tables),
    Study("duality", measure_duality, duality_tables, several_seeds=True),
    Study("defaults", measure_defaults, defaults_tables, graphs=DEFAULT_GRAPHS, several_seeds=True),
    Study("sampled", measure_sampled, sampled_tables, graphs=GRAPHS[:2] + GRAPHS[3:4], several_seeds=True),
    Study("ensemble", measure_ensemble, ensemble_tables, graphs=("WN18RR",), several_seeds=True),
    Study("dura-weights", measure_dura_weights, dura_weights_tables, draw_dura_weights),
    Study("figure1", measure_figure1, figure1_tables, graphs=FB15K237),
    Study("tsne", measure_tsne, tsne_tables, graphs=FB15K237, several_seeds=True),
    Study("sparsity", measure_sparsity, sparsity_tables, draw_sparsity, FB15K237, several_seeds=True),
    *inference.STUDIES,
)
STUDIES = {study.name: study for study in _STUDIES}
