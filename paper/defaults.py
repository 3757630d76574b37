"""The study `defaults`: automatic tuning beside the fixed defaults and the best recipe of the same model."""

import time
from collections.abc import Mapping
from typing import Any

from dualkg.data.graph import Graph
from dualkg.errors import RequestError
from dualkg.training.api import choose_device, data_of, default_recipe, train_recipe
from dualkg.training.recipe import Recipe, list_recipes, load_recipe
from dualkg.training.run import Run
from dualkg.tuning.fit import Search, starting_recipe
from paper.config import Config, find_record
from paper.tables import MISSING, Table, duration, over_seeds

SMALL_GRAPHS = ("UMLS", "Kinship", "Nations", "Countries-S1", "Countries-S2", "Countries-S3", "world")
DEFAULT_GRAPHS = (*SMALL_GRAPHS, "WN18RR", "FB15k-237", "YAGO3-10-quarter")
WAYS = {"tuned": "default", "fixed": "--no-tune", "recipe": "best recipe"}


def best_recipe(graph: str, dim: int) -> tuple[str, Recipe] | None:
    """The ComplEx-DURA recipe of a graph with relation prediction if there is one, at the dimension of the default."""
    names = [f"{graph.lower()}/complex-dura{ending}" for ending in ("-relation-prediction", "")]
    name = next((name for name in names if name in list_recipes()), None)
    return (name, load_recipe(name, changes={"model.dim": dim})) if name else None


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


def measure_defaults(config: Config, graph: Graph) -> tuple[dict[str, Any], None]:
    """Test MRR of `dualkg train GRAPH` without options, of `--no-tune`, and of the best recipe of the same model."""
    if not len(graph.test):
        raise RequestError(f"{graph.name} has no test triples.")
    device = choose_device(config.device)
    results: list[dict[str, Any]] = []
    for seed in range(config.seeds):
        changes = {"model.name": "ComplEx", "training.seed": seed}
        start = starting_recipe(data_of(graph), graph, device, changes)
        began = time.perf_counter()
        chosen, search = Search(start, tuple(changes), None).run(graph, device)
        tuning_seconds = time.perf_counter() - began
        config.log(f"{graph.name}, seed {seed}: {search.summary}")
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
        tuned = {"tuning_seconds": round(tuning_seconds, 1), "trials": len(search.trials), "chosen": search.summary}
        results.append({"seed": seed, **runs, "tuned": runs["tuned"] | tuned})
    return {"dim": start.model.dim, "epochs": start.training.epochs, "seeds": results}, None


def run_facts(run: Run) -> dict[str, float]:
    return {"valid": run.reports["valid"].mrr, "test": run.report.mrr, "seconds": _seconds(run.costs or {})}


def _seconds(costs: Mapping[str, float | None]) -> float:
    return round(sum(costs.get(name) or 0.0 for name in ("warm_up_seconds", "training_seconds")), 1)


def defaults_tables(results: dict[str, Any], graph: str) -> list[Table]:
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
