"""Studies of trained models: what each measures, its tables and its figure.

A study's results are plain data, saved as `records/figures/NAME-GRAPH.json`; its tables are made from them."""

import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import cycle, islice
from math import inf
from pathlib import Path
from typing import Any

import torch

from dualkg.analysis.figures import Drawing, draw_reliability
from dualkg.analysis.sparsity import SHARES, CurvePoint, rotated, sparsity_curve
from dualkg.data.filters import KnownAnswers
from dualkg.data.graph import Graph
from dualkg.data.loading import load_graph
from dualkg.evaluation.report import evaluate
from dualkg.extras import optional_import
from dualkg.files import read_json, write_text
from dualkg.inference.calibration import calibration_for
from dualkg.inference.completion import check_completion
from dualkg.inference.index import measure_storage_formats
from dualkg.inference.reliability import evaluate_calibration, evaluate_coverage
from dualkg.models.base import Model
from dualkg.models.bilinear import BilinearModel, Dual
from dualkg.models.distance import ModE, RotatE
from dualkg.training.api import choose_device, spread, train_recipe
from dualkg.training.ensemble import Ensemble
from dualkg.training.recipe import Recipe, RegularizerConfig
from dualkg.training.run import describe_device, environment
from dualkg.training.trainer import Trainer
from paper import figures
from paper.config import Config
from paper.defaults import DEFAULT_GRAPHS, defaults_tables, measure_defaults, run_facts
from paper.explanations import study_explanations
from paper.inductive import study_inductive
from paper.projection import METRICS, Projection, compute_plane, find_queries, pick_query, project
from paper.registry import (
    GRAPHS,
    MAIN,
    PUBLISHED_GRAPHS,
    SPACES,
    Row,
    model_row,
    published,
    recipe_of,
    rows_with_recipes,
)
from paper.tables import MISSING, Table, grouped, over_seeds

Results = Any  # whatever JSON holds
FB15K237 = ("FB15k-237",)
STUDIED = Row("ComplEx-DURA", "complex-dura-dim-500")


@dataclass(frozen=True)
class Study:
    """A study: a function that measures it on a graph, and functions that make its tables and its figure.

    The docstring of `measure` is the help of its command. A figure of data that the results do not contain, such as
    positions in the plane, is returned by `measure`.
    """

    name: str
    measure: Callable[[Config, Graph], tuple[Results, Drawing | None]]
    tables: Callable[[Results, str], list[Table]]
    draw: Callable[[Results, str], Drawing] | None = None
    graphs: tuple[str, ...] = PUBLISHED_GRAPHS
    several_seeds: bool = False

    def run(self, config: Config) -> list[Table]:
        """Measure it on the graphs of the configuration, and save results and figure."""
        with optional_import("matplotlib", purpose="A figure"):  # before a long computation
            import matplotlib.figure  # noqa: F401
        with optional_import("scikit-learn", purpose="A figure"):
            import sklearn.manifold  # noqa: F401
        tables = []
        for name in config.graphs(self.graphs):
            graph = load_graph(name)
            results, drawing = self.measure(config, graph)
            made = environment(choose_device(config.device), fingerprint=graph.fingerprint)
            self.save(config.records, graph.name, results, drawing=drawing, environment=made)
            tables += self.tables(results, graph.name)
        return tables

    def path(self, records: Path, graph: str) -> Path:
        return records / "figures" / f"{self.name}-{graph.lower()}.json"

    def saved(self, records: Path) -> list[Path]:
        """The files of saved results, by graph."""
        graphs = dict.fromkeys((*GRAPHS, *self.graphs))
        return [path for path in (self.path(records, graph) for graph in graphs) if path.exists()]

    def save(
        self, records: Path, graph: str, results: Results, *, drawing: Drawing | None, environment: dict[str, Any]
    ) -> None:
        path = self.path(records, graph)
        drawing = self.draw(results, graph) if self.draw else drawing
        saved: dict[str, Any] = {"graph": graph, "environment": environment}
        if drawing:
            drawing.save(path.with_suffix(""))
            saved["caption"] = drawing.caption
        saved["results"] = results
        write_text(path, json.dumps(saved, indent=1, ensure_ascii=False, allow_nan=False) + "\n")

    def redraw(self, path: Path) -> None:
        """Draw the figure of saved results again."""
        saved = read_json(path)
        if self.draw:
            about = saved["environment"]
            self.save(path.parents[1], saved["graph"], saved["results"], drawing=None, environment=about)

    def page(self, path: Path) -> str:
        """Tables, figure and caption of saved results as Markdown."""
        saved = read_json(path)
        tables = self.tables(saved["results"], saved["graph"])
        parts = [table.as_markdown() for table in tables]
        if "caption" in saved:
            parts[1:1] = [f"![{tables[0].title}](figures/{path.stem}.png)", saved["caption"]]
        return "\n\n".join(parts)


# -- training cost ----------------------------------------------------------------------------------------

COMPARED = ("none", "Frobenius", "DURA")


def measure_cost(config: Config, graph: Graph) -> tuple[Results, None]:
    """Time of a training step with DURA, the Frobenius norm, and no regularizer (Appendix C)."""
    device = choose_device(config.device)
    results = []
    for row in MAIN.dura_rows:
        config.log(f"{row.name} on {graph.name}: steps with three regularizers.")
        results.append(time_steps(recipe_of(row, graph.name), graph, device=device))
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
    times: dict[str, list[float]] = {name: [] for name in COMPARED}
    for _ in range(rounds):
        for name, trainer in trainers.items():
            times[name].append(_seconds_per_step(trainer, steps))
    about = {"model": recipe.model.name, "dim": recipe.model.dim, "batch": recipe.training.batch_size}
    about |= {"device": describe_device(device), "engine": str(trainers["DURA"].engine)}
    return {**about, "seconds_per_step": {name: statistics.median(values) for name, values in times.items()}}


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


# -- duality ----------------------------------------------------------------------------------------------

DUALITY_ROWS = tuple(
    map(model_row, ("CP", "CP-DURA", "RESCAL", "RESCAL-DURA", "ComplEx", "ComplEx-DURA", "RotatE", "ModE"))
)
SCORES = ("as trained", "inner product", "distance, tail's side", "distance, head's side")


def scoring_models(model: Model) -> dict[str, Model]:
    """The model as trained, and the primal and dual models with the same embeddings."""
    primal = model.primal() if isinstance(model, RotatE | ModE) else model
    assert isinstance(primal, BilinearModel), "each of DUALITY_ROWS has a bilinear primal"
    return dict(zip(SCORES, (model, primal, Dual(primal, "tail"), Dual(primal, "head")), strict=True))


def measure_duality(config: Config, graph: Graph) -> tuple[Results, None]:
    """Test MRR of the same embeddings scored by inner product and by both distances."""
    known = KnownAnswers.of(graph)
    results = []
    for row in rows_with_recipes(DUALITY_ROWS, graph.name):
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
    space = load_space(SPACES / f"{name}.toml")
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
    plain, mapped = results["chosen"]
    chosen = None if plain is None or mapped is None else (plain, mapped)
    title = f"λ1 and λ2 of DURA: {results['model']} on {graph}"
    return figures.draw_dura_weights(_mrr_by_weights(results), chosen=chosen, title=title)


# -- Figures 1, 2 and 3 -----------------------------------------------------------------------------------

FIGURE1_ROWS = (Row("CP", "cp-dim-2"), Row("CP-DURA", "cp-dura-dim-2"))
SPARSITY_PANELS = {"CP": ("CP", "CP-N3", "CP-DURA"), "RESCAL": ("RESCAL", "RESCAL-DURA")}
ROTATED, ROTATION_SHARE = "RESCAL-DURA, rotated", 0.8
DRAWN_PANELS = {**SPARSITY_PANELS, "RESCAL": (*SPARSITY_PANELS["RESCAL"], ROTATED)}
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
    for row in map(model_row, sum(SPARSITY_PANELS.values(), ())):
        for seed in range(config.seeds):
            model = config.load_trained(row, graph, seed).model
            models = {row.name: model}
            if row.name == "RESCAL-DURA":
                models[ROTATED] = rotated(model, share=ROTATION_SHARE)
            for name, one in models.items():
                points = [_sparsity_point(point) for point in sparsity_curve(one, graph)]
                results.append({"row": name, "seed": seed, "points": points})
    names = sum(DRAWN_PANELS.values(), ())
    return sorted(results, key=lambda one: (names.index(one["row"]), one["seed"])), None


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
    panels = {panel: {name: curves[name] for name in names if name in curves} for panel, names in DRAWN_PANELS.items()}
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


# -- inference --------------------------------------------------------------------------------------------


def measure_completion(config: Config, graph: Graph) -> tuple[Results, None]:
    """How many held-out test triples are among the most probable new triples."""
    run = config.load_trained(STUDIED, graph, 0)
    check = check_completion(run.model, graph, calibration=calibration_for(run).calibration)
    keys = ("sizes", "found", "expected", "by_degree", "at_random", "num_test", "num_triples")
    return {key: getattr(check, key) for key in keys}, None


def completion_tables(results: Results, graph: str) -> list[Table]:
    columns = {"sizes": ",", "found": ",", "expected": ",.1f", "by_degree": ",.1f", "at_random": ",.3g"}
    values = zip(*(results[key] for key in columns), strict=True)
    rows = [[format(value, spec) for value, spec in zip(row, columns.values(), strict=True)] for row in values]
    note = (
        f"{STUDIED.name}. {results['num_test']:,} test triples are among the {results['num_triples']:,} candidates. "
        f"Expected: the sum of the predicted probabilities."
    )
    titles = ("top", "test triples", "expected", "by degree", "at random")
    return [Table(f"Test triples among new triples: {graph}", titles, rows, [results], [note])]


def measure_calibration(config: Config, graph: Graph) -> tuple[Results, None]:
    """Calibration of probabilities and coverage of prediction sets on test, both fitted on valid."""
    run = config.load_trained(STUDIED, graph, 0)
    fitted = calibration_for(run)
    report = evaluate_calibration(fitted.calibration, run.model, graph)
    coverage = evaluate_coverage(fitted.prediction_sets, run.model, graph, coverage=0.9)
    overall = coverage.overall
    sets = {"target": coverage.target_coverage, "coverage": overall.coverage, "num_queries": overall.num_queries}
    results: Results = {"calibration": {}, "coverage": {**sets, "median_size": overall.median_size}}
    for name, part in {"all candidates": report.overall, "with p ≥ .01": report.likely}.items():
        bins = [{"predicted": b.predicted, "observed": b.observed, "noise": b.noise} for b in part.bins]
        counts = {"num_candidates": part.num_candidates, "num_true": part.num_true}
        results["calibration"][name] = {"ece": part.ece, "noise": part.noise, **counts, "bins": bins}
    return results, None


def calibration_tables(results: Results, graph: str) -> list[Table]:
    rows = [
        [name, f"{part['ece']:.2g}", f"{part['noise']:.2g}", f"{part['num_candidates']:,.0f}", f"{part['num_true']:,}"]
        for name, part in results["calibration"].items()
    ]
    sets = results["coverage"]
    note = (
        f"{STUDIED.name}. Prediction sets for {sets['target']:.0%} coverage contain the answer of "
        f"{sets['coverage']:.1%} of {sets['num_queries']:,} queries; their median size is {sets['median_size']:,.0f} "
        f"entities."
    )
    columns = ("", "ECE", "ECE by chance", "candidates", "true")
    return [Table(f"Calibration: {graph}", columns, rows, [results], [note])]


def draw_calibration(results: Results, graph: str) -> Drawing:
    likely = results["calibration"]["with p ≥ .01"]
    bins = [(one["predicted"], one["observed"], one["noise"]) for one in likely["bins"]]
    return draw_reliability({f"{graph} test": bins}, graph=f"{graph} test", ece=likely["ece"])


def measure_quantization(config: Config, graph: Graph) -> tuple[Results, None]:
    """MRR with entity embeddings in storage formats of fewer bytes."""
    points = measure_storage_formats(config.load_trained(STUDIED, graph, 0).model, graph)
    return [{**asdict(point), "metrics": point.metrics.as_dict()} for point in points], None


def quantization_tables(results: Results, graph: str) -> list[Table]:
    rows = []
    for one in results:
        name = f"sparse {one['share']:.0%}" if one["storage"] == "sparse" else one["storage"]
        metrics = [f"{one['metrics'][key]:.4f}" for key in ("mrr", "hits_at_1", "hits_at_3")]
        rows.append([name, figures.format_bytes(one["bytes"]), *metrics])
    columns = ("storage format", "bytes", "MRR", "H@1", "H@3")
    return [Table(f"Quantized entity embeddings: {graph}", columns, rows, results, [f"{STUDIED.name}."])]


def measure_inductive(config: Config, graph: Graph) -> tuple[Results, None]:
    """Held-out entities embedded from a few of their triples, against training again with these triples."""
    config.log(f"{STUDIED.name} on {graph.name}: trained with and without 5 % of the entities.")
    recipe, seeds = recipe_of(STUDIED, graph.name), range(config.seeds)
    return study_inductive(graph, recipe, seeds=seeds, device=choose_device(config.device)), None


def inductive_tables(results: Results, graph: str) -> list[Table]:
    def key(one: dict[str, Any]) -> tuple[str, float]:
        return one["method"], inf if one["triples_given"] is None else one["triples_given"]

    rows = []
    for (method, count), ones in grouped(sorted(results, key=key), "method", "triples_given").items():
        metrics = [over_seeds([one[kind]["mrr"] for one in ones]) for kind in ("all_queries", *figures.QUERY_PANELS)]
        seconds = sum(one["seconds"] for one in ones) / len(ones)
        number = "all" if count is None else f"{count:.0f}"
        rows.append([method, number, *metrics, f"{seconds:.1f}" if seconds else "–", str(len(ones))])
    note = (
        f"{STUDIED.name}. MRR of the held-out triples of {figures.num_entities(results)}: of all queries, of those "
        f"that contain the unseen entity, and of those that it answers; and of the test triples of known entities. "
        f"Seconds: of training again, or of embedding all unseen entities."
    )
    columns = ("method", "triples per entity", "MRR", "in the query", "as the answer", "known entities", "seconds")
    return [Table(f"Inductive entities: {graph}", (*columns, "seeds"), rows, results, [note], num_left=2)]


def measure_explanations(config: Config, graph: Graph) -> tuple[Results, None]:
    """Test triples after training without the training triples that support or oppose them most."""
    row, *_ = rows_with_recipes((STUDIED, model_row("ComplEx-DURA")), graph.name)
    config.log(f"{row.name} on {graph.name}: trained with and without the supporting triples of test triples.")
    recipe, seeds = recipe_of(row, graph.name), range(config.seeds)
    return study_explanations(graph, recipe, seeds=seeds, device=choose_device(config.device)), None


def explanations_tables(results: Results, graph: str) -> list[Table]:
    rows = []
    for (removed, count), ones in grouped(results, "removed", "count").items():
        cells = [over_seeds([one["metrics"][key] for one in ones]) for key in ("mrr", "hits_at_1")]
        for key in ("score_drop", "expected_drop", "rank_correlation"):
            cells.append(over_seeds([one[key] for one in ones], digits=2) if count else "–")
        rows.append([removed, str(count), *cells, str(len(ones))])
    note = (
        f"{STUDIED.name}. {results[0]['num_triples']:,} test triples without a common entity, ranked after training "
        f"without some training triples of their entities: the most supporting, the most opposing, or random ones. "
        f"The expected score drop is that of influence functions; the rank correlation compares it with the actual one."
    )
    columns = ("removed from train", "per test triple", "MRR", "H@1", "score drop", "expected", "rank correlation")
    return [Table(f"Explanations: {graph}", (*columns, "seeds"), rows, results, [note], num_left=2)]


SAMPLES = [(0, ""), *((num, kind) for num in (500, 4000) for kind in ("uniform", "log-uniform"))]


def measure_sampled(config: Config, graph: Graph) -> tuple[Results, None]:
    """Sampled softmax with DURA beside full softmax: the same recipe with another loss."""
    row, *_ = rows_with_recipes((STUDIED, model_row("ComplEx-DURA")), graph.name)
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
    Study("completion", measure_completion, completion_tables),
    Study("calibration", measure_calibration, calibration_tables, draw_calibration),
    Study("quantization", measure_quantization, quantization_tables, figures.draw_quantization, graphs=FB15K237),
    Study("inductive", measure_inductive, inductive_tables, figures.draw_inductive, FB15K237, several_seeds=True),
    Study(
        "explanations",
        measure_explanations,
        explanations_tables,
        figures.draw_explanations,
        ("world",),
        several_seeds=True,
    ),
)
STUDIES = {study.name: study for study in _STUDIES}
