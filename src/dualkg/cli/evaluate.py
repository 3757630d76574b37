"""`evaluate`, `compare` and `calibrate`: how good a run is."""

from __future__ import annotations

import math
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any, Literal, cast

from typer import Argument, Option

import dualkg as kg
from dualkg.cli import common as cli
from dualkg.errors import RequestError

Task = Literal["link", "relation", "classification"]
TASK = "Rank heads and tails (link), rank relations, or classify triples as true or false."
HITS = "The k of Hits@k, such as 1,3,10,50 (default: 1,3,10)."
CANDIDATES = (
    "Rank among the candidates that this file lists for each triple (.parquet, .jsonl or .npz)."
)
TYPES = "Rank only among entities that train has on the same side of the relation."
STORAGE = "Storage formats of the entity table to compare: float32,float16,bf16,int8,sparse:0.9 (90 % zeros)."


@cli.command()
def evaluate(
    run: cli.RunPath,
    split: cli.SplitName = "test",
    by: cli.By = None,
    hits: Annotated[str | None, Option(help=HITS)] = None,
    candidates: Annotated[Path | None, Option(help=CANDIDATES)] = None,
    type_constrained: Annotated[bool, Option("--type-constrained", help=TYPES)] = False,
    task: Annotated[Task, Option(help=TASK)] = "link",
    negatives: Annotated[
        Path | None, Option(help="False triples for classification (default: sampled).")
    ] = None,
    storage: Annotated[str | None, Option(help=STORAGE)] = None,
    max_size: cli.MaxSize = None,
    device: cli.Device = None,
) -> cli.Output:
    """Evaluate a run: filtered ranking in both directions, ties at their mean rank. Or another
    task.
    """
    if negatives is not None and task != "classification":
        raise RequestError(
            "--negatives is for --task classification; the other tasks rank all candidates."
        )
    if (by and task == "relation") or (storage and (by or task != "link")):
        wrong = "--by" if by else f"--task {task}"
        raise RequestError(
            f"{'--storage' if storage else '--task relation'} reports totals only. Leave out "
            f"{wrong}."
        )
    if task == "classification" and by not in (None, "relation"):
        raise RequestError(f"--task classification can be reported by relation; got '{by}'.")
    restricted = (
        "--candidates" if candidates else "--type-constrained" if type_constrained else None
    )
    if restricted and (storage or task != "link"):
        raise RequestError(
            f"{restricted} is for ranking heads and tails. Leave it out, or leave out "
            "--task/--storage."
        )
    if candidates and type_constrained:
        raise RequestError("--candidates and --type-constrained exclude each other. Leave out one.")
    if hits and (storage or task == "classification"):
        raise RequestError("--hits is for rankings of entities or relations. Leave it out.")
    ks = cli.parse_hits(hits)
    loaded = cli.load_on_device(run, device)
    if not len(loaded.graph.split(split)):
        raise RequestError(f"The graph of {run} has no {split} triples to evaluate on.")
    if storage:
        return _evaluate_storage(loaded, split, storage)
    if task == "classification":
        return _classify(loaded, split, by, negatives, max_size)
    if task == "relation":
        return _rank_relations(loaded, split, ks)
    lists: dict[str, Any] = {"candidates": candidates, "type_constrained": type_constrained}
    return _rank(kg.evaluate(loaded.model, loaded.graph, split=split, hits=ks, **lists), by, ks)


def _rank(report: kg.Report, by: str | None, ks: tuple[int, ...]) -> cli.Output:
    """All queries, then the bounds if ties make them differ, then a row for each group."""
    yield cli.Result(report.as_dict())
    rows = {f"{report.graph} {report.split}": report.metrics}
    if not math.isclose(report.optimistic.mrr, report.pessimistic.mrr):
        rows |= {"  optimistic": report.optimistic, "  pessimistic": report.pessimistic}
    if report.num_unseen_triples:
        rows[f"  without {report.num_unseen_triples:,} triples of unseen entities"] = (
            report.without_unseen
        )
    cli.print_metrics(rows, hits=ks, adjusted=True)
    if by:
        groups = dict(sorted(report.by(by).items(), key=lambda item: -item[1].num_queries))
        cli.stdout.print()
        cli.print_metrics(groups, title=by, hits=ks, adjusted=True)
    if report.candidates != "all entities":
        cli.stdout.print(f"[dim]Candidates: {report.candidates}, without known answers.[/dim]")


def _rank_relations(run: kg.Run, split: kg.data.graph.Split, ks: tuple[int, ...]) -> cli.Output:
    metrics = kg.evaluate_relations(run.model, run.graph, split=split, hits=ks)
    yield cli.Result(
        {"graph": run.graph.name, "split": split, "task": "relation", "metrics": metrics.as_dict()}
    )
    cli.print_metrics({f"{run.graph.name} {split}, (head, ?, tail)": metrics}, hits=ks)


def _classify(
    run: kg.Run,
    split: kg.data.graph.Split,
    by: str | None,
    negatives: Path | None,
    max_size: str | None,
) -> cli.Output:
    from dualkg.inference.classification import (
        evaluate_classification,
        matching_valid_file,
        read_negatives,
    )

    files = {
        "negatives": negatives,
        "valid_negatives": matching_valid_file(negatives, split) if negatives else None,
    }
    given: Any = {
        key: read_negatives(file, run.graph, max_size=max_size)
        for key, file in files.items()
        if file
    }
    report = evaluate_classification(run.model, run.graph, split=split, **given)
    yield cli.Result({"task": "classification", **report.as_dict()})
    groups = {f"{report.graph} {report.split}": report.metrics}
    if by:
        groups |= dict(sorted(report.by_relation.items(), key=lambda item: -item[1].num_true))
    cli.print_table(
        ["", "accuracy", "F1", "precision", "recall", "AUC", "true", "false"],
        [
            [
                name,
                part.accuracy,
                part.f1,
                part.precision,
                part.recall,
                part.auc,
                part.num_true,
                part.num_false,
            ]
            for name, part in groups.items()
        ],
    )
    source = "given" if report.negatives == "given" else "sampled, one for each true triple"
    thresholds = f"chosen on valid with {report.valid_negatives} false triples"
    cli.stdout.print(f"[dim]False triples: {source}; thresholds: {thresholds}.[/dim]")


def _evaluate_storage(run: kg.Run, split: kg.data.graph.Split, storage: str) -> cli.Output:
    index = kg.inference.index
    metrics = kg.evaluation.metrics.columns()
    dense: list[kg.inference.index.StorageFormat] = []
    shares: list[float] = []
    for name, _, share in (text.strip().partition(":") for text in storage.split(",")):
        if name not in index.STORAGE_FORMATS:
            raise RequestError(
                f"--storage should be one of {', '.join(index.STORAGE_FORMATS)}; got '{name}'."
            )
        if name == "sparse":
            shares += cli.parse_numbers("--storage sparse:SHARE", share) if share else index.SHARES
        else:
            dense.append(cast("kg.inference.index.StorageFormat", name))
    points = index.measure_storage_formats(
        run.model, run.graph, formats=dense, shares=shares, split=split
    )
    rows = [[point.name, point.bytes, *point.metrics.row()[: len(metrics)]] for point in points]
    columns = [f"{run.graph.name} {split}", "bytes", *metrics]
    yield cli.Result([point.as_dict() for point in points])
    cli.print_table(columns, rows)


@cli.command()
def calibrate(
    run: cli.RunPath,
    coverage: Annotated[float, Option(help="Coverage of the prediction sets to check.")] = 0.9,
    figure: Annotated[
        Path | None, Option(help="Draw the reliability diagram (PNG and SVG).")
    ] = None,
    overwrite: Annotated[
        bool, Option("--overwrite", help="Replace an existing calibration.")
    ] = False,
    device: cli.Device = None,
) -> cli.Output:
    """Fit probabilities and prediction sets on valid, save them with the run, and check them on
    test.
    """
    checked = kg.calibrate(run, coverage=coverage, overwrite=overwrite, device=device)
    report = checked.report
    sets = checked.coverage
    figures = []
    if figure:
        from dualkg.analysis.figures import draw_reliability

        points = [(one.predicted, one.observed, one.noise) for one in report.likely.bins]
        title = f"{report.graph} {report.split}"
        figures = draw_reliability({title: points}, graph=title, ece=report.likely.ece).save(figure)
    yield cli.Result(
        {"run": str(run), **checked.as_dict(), "figures": [str(path) for path in figures]}
    )
    rows: list[Any] = []
    for name, part in (("all candidates", report.overall), ("with p ≥ .01", report.likely)):
        errors = [
            f"{value:.2e}" if value < 1e-3 else value
            for value in (part.ece, part.noise, part.brier)
        ]
        rows.append(
            [
                name,
                *(errors if part.bins else [None] * 3),
                round(part.num_candidates),
                part.num_true,
            ]
        )
    cli.print_table(
        [f"{report.graph} {report.split}", "ECE", "by chance", "Brier", "candidates", "true"], rows
    )
    cli.stdout.print()
    rows = [
        [one.predicted, one.observed, f"± {one.noise:.4f}", round(one.num_candidates), one.num_true]
        for one in report.likely.bins
    ]
    cli.print_table(["predicted", "observed", "by chance", "candidates", "true"], rows, left=0)
    cli.stdout.print()
    groups = {"all queries": sets.overall}
    groups |= {f"  for {side}s": sets.by_direction[side] for side in ("tail", "head")}
    groups |= dict(sorted(sets.by_relation.items(), key=lambda item: -item[1].num_queries))
    rows = []
    for name, size in groups.items():
        own = "own threshold" if size.relation_specific else ""
        numbers = (
            f"{size.coverage:.1%}",
            f"{size.mean_size:,.1f}",
            f"{size.median_size:,.0f}",
            size.num_queries,
        )
        rows.append([name, *numbers, own])
    title = f"prediction sets for {sets.target_coverage:.0%}"
    cli.print_table([title, "coverage", "mean size", "median", "queries", ""], rows)
    for path in figures:
        cli.note(f"Figure: {path}", style=None)


RUNS = "Folder of a run, an ensemble, runs with several seeds, or a record."


@cli.command()
def compare(
    run_a: Annotated[Path, Argument(metavar="RUN_A", help=RUNS, show_default=False)],
    run_b: Annotated[Path, Argument(metavar="RUN_B", help=RUNS, show_default=False)],
    split: cli.SplitName = "test",
    by: cli.By = None,
    differences: Annotated[
        int, Option(min=0, help="Number of queries with the largest difference to print.")
    ] = 0,
    samples: Annotated[int, Option(help="Number of bootstrap samples.")] = 10_000,
    seed: Annotated[int, Option(help="Random seed of the bootstrap.")] = 0,
) -> cli.Output:
    """Test whether one run is better than another by a paired bootstrap over triples."""
    from dualkg.analysis.records import load_ranked_runs

    a = load_ranked_runs(run_a, split)
    b = load_ranked_runs(run_b, split)
    for side in (a, b):
        if side.num_unfinished:
            total = side.num_unfinished + len(side.seeds)
            cli.note(
                f"{side.num_unfinished} of the {total} runs in {side.path} are not finished and "
                "are left out."
            )
    kg.evaluation.comparison.check_comparable(
        (str(run_a), a.graph, a.triples), (str(run_b), b.graph, b.triples)
    )
    if a.name == b.name:
        a = replace(a, name=str(run_a))
        b = replace(b, name=str(run_b))
    bootstrap = {"samples": samples, "seed": seed}
    comparison = kg.compare_ranks(a.ranks, b.ranks, **bootstrap)
    compare_by = kg.evaluation.comparison.compare_by
    groups = compare_by(a.ranks, b.ranks, a.triples, a.graph, view=by, **bootstrap) if by else {}
    named: list[dict[str, Any]] = []
    for query in kg.evaluation.comparison.largest_differences(
        a.ranks, b.ranks, a.triples, most=differences
    ):
        ends = {key: a.graph.entities.label(getattr(query, key)) for key in ("head", "tail")}
        named.append({**asdict(query), **ends, "relation": a.graph.relations.label(query.relation)})
    data = {"graph": a.graph.name, "split": split, "seed": seed}
    data |= {
        key: {"run": str(one.path), "name": one.name, "seeds": one.seeds}
        for key, one in (("a", a), ("b", b))
    }
    data |= {"sentence": comparison.sentence(a.name, b.name), **comparison.as_dict()}
    if by:
        data[f"by_{by}"] = {name: group.as_dict() for name, group in groups.items()}
    if differences:
        data["differences"] = named
    yield cli.Result(data)
    columns = [a.name, b.name, "difference", "95 %", "p"]
    rows = [[metric, *_cells(one, one.p_value)] for metric, one in comparison.differences.items()]
    cli.print_table([f"{a.graph.name} {split}", *columns], rows)
    better, worse, equal = (
        f"{share:.0%}" for share in (comparison.better, comparison.worse, comparison.equal)
    )
    shares = f"{a.name} is better on {better}, worse on {worse} and equal on {equal} of the"
    lines = [
        "",
        comparison.sentence(a.name, b.name),
        f"{shares} {comparison.num_triples:,} triples.",
    ]
    lines += [
        f"{side.name} is the mean of {len(side.seeds)} seeds."
        for side in (a, b)
        if len(side.seeds) > 1
    ]
    cli.stdout.print(*lines, sep="\n", soft_wrap=True, markup=False)
    if by:
        rows = [
            [name, *_cells(group.comparison.mrr, group.p_corrected), group.comparison.num_triples]
            for name, group in groups.items()
        ]
        significant = [
            number for number, group in enumerate(groups.values()) if group.p_corrected < 0.05
        ]
        cli.stdout.print()
        cli.print_table([by, *columns, "triples"], rows, bold=significant)
        correction = f"p is corrected for {len(groups)} tests (Holm), bold if below .05"
        cli.stdout.print(f"[dim]MRR by {by}; {correction}.[/dim]", soft_wrap=True)
    if differences:
        rows = []
        for one in named:
            text = ", ".join(
                "?" if part == one["direction"] else one[part]
                for part in ("head", "relation", "tail")
            )
            ranks = f"{one['rank_a']:,.4g}", f"{one['rank_b']:,.4g}"
            rows.append([f"({text})", one[one["direction"]], *ranks, _signed(one["difference"])])
        cli.stdout.print()
        cli.print_table(
            ["query", "answer", f"rank {a.name}", f"rank {b.name}", "1/rank"], rows, left=2
        )


def _cells(difference: kg.evaluation.comparison.Difference, p_value: float) -> list[Any]:
    """Both values, the difference, its interval and its p-value; dashes if there are too few
    triples.
    """
    short_decimal = kg.evaluation.comparison.short_decimal
    cells = [difference.a, difference.b, _signed(difference.difference)]
    if math.isnan(p_value):
        return [*cells, None, None]
    interval = f"{short_decimal(difference.low)} to {short_decimal(difference.high)}"
    return [*cells, interval, short_decimal(p_value)]


def _signed(number: float) -> str:
    return ("+" if number > 0 else "") + kg.evaluation.comparison.short_decimal(number)
