"""Studies of inference: completion, calibration, quantization, inductive entities, and explanations.

Inductive entities and explanations are compared with training again."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from math import inf
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from dualkg.analysis.figures import Drawing, draw_reliability
from dualkg.data.filters import KnownAnswers
from dualkg.data.graph import SPLITS, Graph, Triples
from dualkg.data.vocabulary import Vocabulary
from dualkg.errors import RequestError
from dualkg.evaluation.ranking import rank
from dualkg.evaluation.report import Metrics
from dualkg.extras import optional_import
from dualkg.inference.calibration import calibration_for
from dualkg.inference.completion import check_completion
from dualkg.inference.explanation import Influence, influence
from dualkg.inference.extension import extend_by_ids, with_rows
from dualkg.inference.index import measure_storage_formats
from dualkg.inference.inductive import FrozenContext, with_adjoint
from dualkg.inference.reliability import evaluate_calibration, evaluate_coverage
from dualkg.models.base import Model
from dualkg.training.api import choose_device, train_recipe
from dualkg.training.recipe import Recipe
from paper import figures
from paper.config import FB15K237, Config, Results, Study
from paper.registry import Row, model_row, recipe_of, rows_with_recipes
from paper.tables import Table, grouped, over_seeds

Device = str | torch.device | None
Rows = npt.NDArray[np.int64]
STUDIED = Row("ComplEx-DURA", "complex-dura-dim-500")


def measure_completion(config: Config, graph: Graph) -> tuple[Results, None]:
    """How many held-out test triples are among the most probable new triples."""
    run = config.load_trained(STUDIED, graph, 0)
    check = check_completion(run.model, graph, calibration=calibration_for(run).calibration)
    keys = ("sizes", "found", "expected", "by_degree", "at_random", "num_test", "num_triples")
    return {key: getattr(check, key) for key in keys}, None


def completion_tables(results: Results, graph: str) -> list[Table]:
    columns = {"sizes": ",", "found": ",", "expected": ",.1f", "by_degree": ",.1f", "at_random": ",.3g"}
    values = zip(*(results[key] for key in columns), strict=True)
    rows = [list(map(format, row, columns.values())) for row in values]
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
    found = {key: getattr(coverage.overall, key) for key in ("coverage", "num_queries", "median_size")}
    results: Results = {"calibration": {}, "coverage": {"target": coverage.target_coverage, **found}}
    for name, part in {"all candidates": report.overall, "with p ≥ .01": report.likely}.items():
        bins = [{key: getattr(one, key) for key in ("predicted", "observed", "noise")} for one in part.bins]
        about = {key: getattr(part, key) for key in ("ece", "noise", "num_candidates", "num_true")}
        results["calibration"][name] = {**about, "bins": bins}
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


# -- inductive entities -----------------------------------------------------------------------------------


def measure_inductive(config: Config, graph: Graph) -> tuple[Results, None]:
    """Held-out entities embedded from a few of their triples, against training again with these triples."""
    config.log(f"{STUDIED.name} on {graph.name}: trained with and without 5 % of the entities.")
    recipe, seeds = recipe_of(STUDIED, graph.name), range(config.seeds)
    return study_inductive(graph, recipe, seeds=seeds, device=choose_device(config.device)), None


def study_inductive(
    graph: Graph,
    recipe: Recipe,
    *,
    share: float = 0.05,
    counts: Sequence[int | None] = (1, 3, 10, None),
    seeds: Sequence[int] = (0,),
    device: Device = None,
) -> list[dict[str, Any]]:
    """Metrics of held-out triples by method: embedded from some triples, or trained again with these triples.

    `counts` are triples given per entity; None is all. The baselines are the mean embedding and random embeddings.
    """
    if not 0 < share < 1:
        raise RequestError(f"The share of entities to hold out must be between 0 and 1; it is {share}.")
    results = []
    for seed in seeds:
        split = InductiveSplit.of(graph, share, seed=seed)
        seeded = recipe.with_changes({"training.seed": seed})
        model = with_adjoint(train_recipe(seeded, graph=split.known, device=device).model)
        context = FrozenContext.of(model, split.known, recipe=seeded)
        for count in counts:
            triples = split.given(count)
            more = replace(split.whole, train=np.concatenate([split.known.train, triples]))
            started = time.perf_counter()
            models = {"embedded": extend_by_ids(context, split.names, triples).model}
            embedded = time.perf_counter()
            models["retrained"] = train_recipe(seeded, graph=more, device=device).model
            seconds = {"embedded": embedded - started, "retrained": time.perf_counter() - embedded}
            about = {"triples_given": count, "num_triples": len(triples)}
            results += [split.evaluate(one, key, seconds=seconds[key], **about) for key, one in models.items()]
        for method, rows in split.baselines(context).items():
            about = {"triples_given": 0, "num_triples": 0, "seconds": 0.0}
            results.append(split.evaluate(with_rows(model, rows), method, **about))
    return results


@dataclass(frozen=True, eq=False)
class InductiveSplit:
    """A graph whose last entities are held out, and the graph of its known entities alone."""

    whole: Graph
    known: Graph
    seed: int

    @classmethod
    def of(cls, graph: Graph, share: float, *, seed: int) -> InductiveSplit:
        """Hold out random entities, except those that train joins to other held-out entities only."""
        num_entities = len(graph.entities)
        held_out, joined = np.zeros((2, num_entities), dtype=bool)
        held_out[np.random.default_rng(seed).permutation(num_entities)[: max(1, round(share * num_entities))]] = True
        heads, tails = graph.train[:, 0], graph.train[:, 2]
        joined[heads[~held_out[tails]]] = joined[tails[~held_out[heads]]] = True
        held_out &= joined
        if not held_out.any():
            raise RequestError(f"{graph.name} has too few entities to hold out a share of {share:g}.")
        order = np.argsort(held_out, kind="stable")
        new_ids, num_known = np.argsort(order).astype(np.int32), int((~held_out).sum())
        splits = {name: graph.split(name).copy() for name in SPLITS}
        for triples in splits.values():
            triples[:, [0, 2]] = new_ids[triples[:, [0, 2]]]
        whole = replace(graph, entities=Vocabulary(graph.entities.names.take(order)), **splits)
        known = {name: triples[(triples[:, [0, 2]] < num_known).all(1)] for name, triples in splits.items()}
        return cls(whole, replace(whole, entities=Vocabulary(whole.entities.names.slice(0, num_known)), **known), seed)

    @property
    def names(self) -> list[str]:
        return self.whole.entities.names.slice(len(self.known.entities)).to_pylist()

    def given(self, count: int | None) -> Triples:
        """At most `count` training triples per held-out entity, first those with known entities; None is all."""
        num_known, ends = len(self.known.entities), self.whole.train[:, [0, 2]]
        order = np.random.default_rng(self.seed).permutation(len(ends))
        order = order[np.argsort((ends >= num_known)[order].all(1), kind="stable")]
        chosen = np.zeros(len(ends), dtype=bool)
        for entity in range(num_known, len(self.whole.entities)):
            chosen[order[(ends[order] == entity).any(1)][:count]] = True
        return self.whole.train[chosen]

    def evaluate(self, model: Model, method: str, **about: Any) -> dict[str, Any]:
        """Metrics of the valid and test triples of held-out entities, and of the test triples of known entities."""
        held_out = np.concatenate([self.whole.valid, self.whole.test])
        new = held_out[:, [0, 2]] >= len(self.known.entities)
        held_out, (new_head, new_tail) = held_out[new.any(1)], new[new.any(1)].T
        filtered = KnownAnswers.of(self.whole)
        tails, heads = rank(model, replace(self.whole, test=held_out), known=filtered).mean
        ranks = {
            "all_queries": np.stack([tails, heads]),
            "as_query": np.concatenate([tails[new_head], heads[new_tail]]),
            "as_answer": np.concatenate([tails[new_tail], heads[new_head]]),
            "known_entities": rank(model, replace(self.whole, test=self.known.test), known=filtered).mean,
        }
        metrics = {kind: Metrics.of(values).as_dict() for kind, values in ranks.items()}
        return {"method": method, "seed": self.seed, "num_entities": len(self.names), **about, **metrics}

    def baselines(self, context: FrozenContext) -> dict[str, torch.Tensor]:
        tables = (context.model.head_table, context.model.tail_table)[: context.new_rows.shape[1]]
        mean, sd = (torch.stack([part(table, 0).detach() for table in tables]) for part in (torch.mean, torch.std))
        noise = torch.randn(len(self.names), *mean.shape, generator=torch.Generator().manual_seed(self.seed))
        return {"mean": mean.expand(len(self.names), -1, -1), "random": mean + sd * noise.to(mean)}


def inductive_tables(results: Results, graph: str) -> list[Table]:
    rows, ordered = [], sorted(results, key=lambda one: (one["method"], one["triples_given"] or inf))  # None: all
    for (method, count), ones in grouped(ordered, "method", "triples_given").items():
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


# -- explanations -----------------------------------------------------------------------------------------


def measure_explanations(config: Config, graph: Graph) -> tuple[Results, None]:
    """Test triples after training without the training triples that support or oppose them most."""
    row, *_ = rows_with_recipes((STUDIED, model_row("ComplEx-DURA")), graph.name)
    config.log(f"{row.name} on {graph.name}: trained with and without the supporting triples of test triples.")
    recipe, seeds = recipe_of(row, graph.name), range(config.seeds)
    return study_explanations(graph, recipe, seeds=seeds, device=choose_device(config.device)), None


def study_explanations(
    graph: Graph,
    recipe: Recipe,
    *,
    counts: Sequence[int] = (1, 3),
    max_triples: int = 150,
    seeds: Sequence[int] = (0,),
    device: Device = None,
) -> list[dict[str, Any]]:
    """Metrics of test triples after training without the most supporting, the most opposing or random triples.

    `counts` are training triples removed per test triple. The test triples have no common entity, so that one training
    serves all of them. Removed triples are still filtered in ranking.
    """
    triples = disjoint_triples(graph, np.random.default_rng(0), min_degree=max(counts) + 1, max_triples=max_triples)
    known, results = KnownAnswers.of(graph), []
    for seed in seeds:
        seeded, random = recipe.with_changes({"training.seed": seed}), np.random.default_rng(seed)
        model = with_adjoint(train_recipe(seeded, graph=graph, device=device).model)
        context = FrozenContext.of(model, graph, recipe=seeded)
        influences = [influence((head, relation, tail), context) for head, relation, tail in triples.tolist()]
        scores, removals = _scores(model, triples), {("nothing", 0): [np.zeros(0, dtype=np.int64)]}
        for count in counts:
            selected = select_triples(influences, count, random)
            removals |= {(removed, count): rows for removed, rows in selected.items()}
        for (removed, count), rows in removals.items():
            gone, drops = np.unique(np.concatenate(rows)), {}
            if count:
                rest = replace(graph, train=np.delete(graph.train, gone, axis=0))
                model = train_recipe(seeded, graph=rest, device=device).model
                actual = scores - _scores(model, triples)
                pairs = zip(influences, rows, strict=True)
                expected = np.array([float(one.score_drops[np.isin(one.rows, some)].sum()) for one, some in pairs])
                drops = {"score_drop": float(actual.mean()), "expected_drop": float(expected.mean())}
                drops["rank_correlation"] = rank_correlation(actual, expected)
            metrics = Metrics.of(rank(model, replace(graph, test=triples), known=known).mean).as_dict()
            about = {"removed": removed, "seed": seed, "count": count, "num_triples": len(triples)}
            results.append({**about, "metrics": metrics, "num_removed": len(gone), **drops})
    return results


def disjoint_triples(graph: Graph, random: np.random.Generator, *, min_degree: int, max_triples: int) -> Triples:
    """Test triples without a common entity, whose entities have at least `min_degree` training triples."""
    used = np.bincount(graph.train[:, [0, 2]].ravel(), minlength=len(graph.entities)) < min_degree
    rows: list[int] = []
    for row in random.permutation(len(graph.test)).tolist():
        head, _, tail = graph.test[row].tolist()
        if len(rows) < max_triples and head != tail and not (used[head] or used[tail]):
            rows.append(row)
            used[[head, tail]] = True
    if len(rows) < 2:
        raise RequestError(f"{graph.name} has too few test triples whose entities have {min_degree} training triples.")
    return graph.test[rows]


def select_triples(influences: Sequence[Influence], count: int, random: np.random.Generator) -> dict[str, list[Rows]]:
    """The rows of train to remove for each test triple, by kind."""
    return {
        "supporting": [one.rows[np.argsort(-one.score_drops, kind="stable")[:count]] for one in influences],
        "random": [random.permutation(one.rows)[:count] for one in influences],
        "opposing": [one.rows[np.argsort(one.score_drops, kind="stable")[:count]] for one in influences],
    }


@torch.no_grad()
def _scores(model: Model, triples: Triples) -> npt.NDArray[np.float64]:
    return model.score(*torch.from_numpy(triples).long().to(model.device).unbind(1)).double().cpu().numpy()


def rank_correlation(a: npt.NDArray[np.float64], b: npt.NDArray[np.float64]) -> float:
    """Spearman's rank correlation; 0 if one of the two is constant."""
    with optional_import("scipy", purpose="The study of explanations"):
        from scipy.stats import spearmanr
    return 0.0 if np.ptp(a) == 0 or np.ptp(b) == 0 else float(spearmanr(a, b).statistic)


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


STUDIES = (
    Study("completion", measure_completion, completion_tables),
    Study("calibration", measure_calibration, calibration_tables, draw_calibration),
    Study("quantization", measure_quantization, quantization_tables, figures.draw_quantization, FB15K237),
    Study("inductive", measure_inductive, inductive_tables, figures.draw_inductive, FB15K237, True),
    Study("explanations", measure_explanations, explanations_tables, figures.draw_explanations, ("world",), True),
)
