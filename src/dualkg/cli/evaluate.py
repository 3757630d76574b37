"""`evaluate`, `compare` and `calibrate`: how good a run is."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

from typer import Argument, Option

import dualkg as kg
from dualkg.cli import common as cli
from dualkg.errors import RequestError

if TYPE_CHECKING:
    from dualkg.analysis.records import RankedRuns
    from dualkg.inference.query_classes import AssumedMissing

Task = Literal["link", "relation", "classification"]
TASK = "Rank heads and tails (link), rank relations, or classify triples as true or false."
HITS = "The k of Hits@k, such as 1,3,10,50 (default: 1,3,10)."
CANDIDATES = (
    "Rank among the candidates that this file lists for each triple (.parquet, .jsonl or .npz)."
)
QUERIES = "Rank a sample of N queries (default: all queries of the split)."
TYPES = "Rank only among entities that train has on the same side of the relation."
RUNS = "Folder of a run, an ensemble, runs with several seeds, or a record."
# What an option of `evaluate` is for, and the evaluations that take it.
PURPOSES = {
    "--by": ("reports of groups", ("--task link", "--task classification")),
    "--hits": ("rankings of entities or relations", ("--task link", "--task relation")),
    "--candidates": ("ranking heads and tails", ("--task link",)),
    "--type-constrained": ("ranking heads and tails", ("--task link",)),
    "--queries": ("ranking heads and tails", ("--task link",)),
    "--negatives": ("--task classification", ("--task classification",)),
}
SIGNIFICANT = 0.05  # p-values below it are printed bold
T = TypeVar("T")


@cli.command()
def evaluate(
    run: cli.RunPath,
    split: cli.SplitName = "test",
    by: cli.By = None,
    hits: Annotated[str | None, Option(help=HITS)] = None,
    candidates: Annotated[Path | None, Option(help=CANDIDATES)] = None,
    type_constrained: Annotated[bool, Option("--type-constrained", help=TYPES)] = False,
    queries: Annotated[int | None, Option(help=QUERIES)] = None,
    task: Annotated[Task, Option(help=TASK)] = "link",
    negatives: Annotated[
        Path | None, Option(help="False triples for classification (default: sampled).")
    ] = None,
    max_size: cli.MaxSize = None,
    device: cli.Device = None,
) -> cli.Output:
    """Evaluate a run: filtered ranking in both directions, ties at their mean rank.

    --task selects another task.
    """
    given = {
        "--by": by,
        "--hits": hits,
        "--candidates": candidates,
        "--type-constrained": type_constrained,
        "--queries": queries,
        "--negatives": negatives,
    }
    _check_evaluation(given, task=task)
    ks = cli.parse_hits(hits)
    if kg.workflows.num_processes() > 1:
        if task == "classification":
            raise cli.one_process_only("evaluate with --task classification")
        if not kg.workflows.is_first_process():
            cli.silence()
    with kg.workflows.opened(run, device=device) as opened:
        if not len(opened.graph.split(split)):
            raise RequestError(f"The graph of {run} has no {split} triples to evaluate on.")
        if task == "classification":
            output = _classify(opened, split, by=by, negatives=negatives, max_size=max_size)
        elif task == "relation":
            output = _rank_relations(opened, split, ks)
        else:
            report = kg.evaluate(
                opened.model,
                opened.graph,
                split=split,
                hits=ks,
                candidates=candidates,
                type_constrained=type_constrained,
                queries=queries,
            )
            output = _rank(report, by, ks)
        yield from output


def _check_evaluation(given: Mapping[str, object], *, task: Task) -> None:
    """Refuse options of `evaluate`, by name, that do not go together."""
    job = f"--task {task}"
    for option, value in given.items():
        purpose, jobs = PURPOSES[option]
        if value not in (None, False) and job not in jobs:
            raise RequestError(f"{option} is for {purpose}; {job} does not take it.")
    for other in ("--type-constrained", "--queries"):
        if given["--candidates"] and given[other] not in (None, False):
            raise RequestError(f"--candidates and {other} exclude each other. Leave out one.")
    if task == "classification" and given["--by"] not in (None, "relation"):
        raise RequestError(
            f"--task classification can be reported by relation; '{given['--by']}' was given."
        )


def _rank(report: kg.Report, by: str | None, ks: tuple[int, ...]) -> cli.Output:
    """All queries, then the bounds if ties make them differ, then a row for each group."""
    yield cli.Result(report.as_dict())
    rows = {f"{report.graph} {report.split}": report.metrics}
    if not math.isclose(report.optimistic.mrr, report.pessimistic.mrr):
        rows["  optimistic"] = report.optimistic
        rows["  pessimistic"] = report.pessimistic
    if report.num_unseen_triples:
        title = f"  without {report.num_unseen_triples:,} triples of unseen entities"
        rows[title] = report.without_unseen
    cli.print_metrics(rows, hits=ks, adjusted=True)
    if by:
        groups = _by_size(report.by(by), lambda metrics: metrics.num_queries)
        cli.stdout.print()
        cli.print_metrics(groups, title=by, hits=ks, adjusted=True)
    if report.sample:
        cli.stdout.print(f"[dim]Ranked: {report.sample}.[/dim]")
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
    *,
    by: str | None,
    negatives: Path | None,
    max_size: str | None,
) -> cli.Output:
    from dualkg.inference.classification import (
        evaluate_classification,
        matching_valid_file,
        read_negatives,
    )

    given: dict[str, Any] = {}
    if negatives:
        given["negatives"] = read_negatives(negatives, run.graph, max_size=max_size)
        valid_file = matching_valid_file(negatives, split)
        if valid_file:
            given["valid_negatives"] = read_negatives(valid_file, run.graph, max_size=max_size)
    report = evaluate_classification(run.model, run.graph, split=split, **given)
    yield cli.Result({"task": "classification", **report.as_dict()})

    groups = {f"{report.graph} {report.split}": report.metrics}
    if by:
        groups |= _by_size(report.by_relation, lambda metrics: metrics.num_true)
    rows = []
    for name, metrics in groups.items():
        row = [name, metrics.accuracy, metrics.f1, metrics.precision, metrics.recall]
        rows.append([*row, metrics.auc, metrics.num_true, metrics.num_false])
    columns = ["", "accuracy", "F1", "precision", "recall", "AUC", "true", "false"]
    cli.print_table(columns, rows)
    source = "given" if report.negatives == "given" else "sampled, one for each true triple"
    thresholds = f"chosen on valid with {report.valid_negatives} false triples"
    cli.stdout.print(f"[dim]False triples: {source}; thresholds: {thresholds}.[/dim]")


def _by_size(groups: Mapping[str, T], size: Callable[[T], int]) -> dict[str, T]:
    """Groups with the largest first."""
    return dict(sorted(groups.items(), key=lambda item: -size(item[1])))


@cli.command()
def calibrate(
    run: cli.RunPath,
    coverage: Annotated[float, Option(help="Coverage of the prediction sets to check.")] = 0.9,
    missing_share: Annotated[
        float | None,
        Option(
            help="Share of the true triples that the graph lacks, such as 0.4 (default: as many "
            "as the valid split has)."
        ),
    ] = None,
    figure: Annotated[
        Path | None, Option(help="Draw the reliability diagram (PNG and SVG).")
    ] = None,
    overwrite: Annotated[
        bool, Option("--overwrite", help="Replace an existing calibration.")
    ] = False,
    type_relation: Annotated[
        str | None,
        Option(metavar="NAME", help="Take types of entities from this relation (instance_of)."),
    ] = None,
    types_file: Annotated[
        Path | None, Option(help="Take types of entities from lines of entity, tab and type.")
    ] = None,
    device: cli.Device = None,
) -> cli.Output:
    """Fit probabilities and prediction sets on valid, save them, and check them on test."""
    cli.check_figure(figure, option="figure")
    calibration = kg.calibrate(
        run,
        coverage=coverage,
        missing_share=missing_share,
        overwrite=overwrite,
        type_relation=type_relation,
        types_file=types_file,
        device=device,
    )
    checks = calibration.checks
    figures = _draw_reliability(checks["calibration"], figure) if figure else []
    yield cli.Result({"run": str(run), **checks, "figures": [str(path) for path in figures]})
    _print_calibration(checks["calibration"], checks["recalibration"])
    cli.stdout.print()
    _print_coverage(checks["coverage"])
    cli.note(f"\n{missing_triples(calibration.assumed_missing)}", style=None)
    types = calibration.types
    if types is not None:
        number = f"{types.num_entities:,} entities have types from {types.source}."
        cli.note(f"{number} All pages and commands use them.", style=None)
    for path in figures:
        cli.note(f"Figure: {path}", style=None)


def missing_triples(missing: AssumedMissing) -> str:
    """What the probabilities of new triples assume."""
    sentence = f"Probabilities assume that the graph lacks {missing.share:.1%} of the true triples"
    if missing.per_valid == 1:
        return f"{sentence}, as many as valid has. If it lacks more: calibrate --missing-share."
    return f"{sentence}, {missing.number:,.0f} (--missing-share)."


def _draw_reliability(report: Mapping[str, Any], path: Path) -> list[Path]:
    from dualkg.analysis.figures import draw_reliability

    title = f"{report['graph']} {report['split']}"
    bins = report["likely"]["bins"]
    points = [(bin["predicted"], bin["observed"], bin["noise"]) for bin in bins]
    figure = draw_reliability({title: points}, graph=title, ece=report["likely"]["ece"])
    return list(figure.save(path))


def _print_calibration(report: Mapping[str, Any], recalibration: Mapping[str, Any] | None) -> None:
    """Errors of all candidates and of likely ones; the reliability table; the recalibration."""
    rows: list[Any] = []
    for name, part in (("all candidates", report["overall"]), ("with p ≥ .01", report["likely"])):
        errors: list[Any] = [None, None, None]
        if part["bins"]:
            errors = [_small(part[error]) for error in ("ece", "noise", "brier")]
        rows.append([name, *errors, round(part["num_candidates"]), part["num_true"]])
    title = f"{report['graph']} {report['split']}"
    cli.print_table([title, "ECE", "by chance", "Brier", "candidates", "true"], rows)
    cli.stdout.print()

    rows = []
    for group in report["table"]:
        least, most = group["interval"]
        rows.append(
            [
                f"{group['lower']:.2f} to {group['upper']:.2f}",
                round(group["num_candidates"]),
                group["num_true"],
                _small(group["predicted"]),
                _small(group["observed"]),
                f"{_small_text(least)} to {_small_text(most)}",
            ]
        )
    interval = f"{kg.inference.reliability.CONFIDENCE:.0%} interval"
    columns = ["probability", "candidates", "true", "predicted", "observed", interval]
    cli.print_table(columns, rows)

    sentence = f"Log loss {report['log_loss']:.4f}."
    if recalibration is not None:
        gain = f"{recalibration['gain']:+.4f} ± {recalibration['standard_error']:.4f}"
        used = "Recalibrated" if recalibration["used"] else "Not recalibrated"
        sentence += f" {used}: the cross-fitted gain in log loss on valid is {gain}."
    cli.stdout.print(f"[dim]{sentence}[/dim]", soft_wrap=True)


def _small(value: float) -> float | str:
    return f"{value:.2e}" if 0 < value < 1e-3 else value


def _small_text(value: float) -> str:
    small = _small(value)
    return small if isinstance(small, str) else f"{small:.4f}"


def _print_coverage(sets: Mapping[str, Any]) -> None:
    """Coverage and sizes of prediction sets: all, by direction and by relation."""
    groups = {"all queries": sets["overall"]}
    for side in ("tail", "head"):
        groups[f"  for {side}s"] = sets["by_direction"][side]
    groups |= _by_size(sets["by_relation"], lambda group: group["num_queries"])
    rows = []
    for name, group in groups.items():
        sizes = [f"{group['mean_size']:,.1f}", f"{group['median_size']:,.0f}"]
        threshold = "own threshold" if group.get("relation_specific") else ""
        rows.append([name, f"{group['coverage']:.1%}", *sizes, group["num_queries"], threshold])
    title = f"prediction sets for {sets['target_coverage']:.0%}"
    cli.print_table([title, "coverage", "mean size", "median", "queries", ""], rows)


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
    comparing = kg.evaluation.comparison
    comparing.check_comparable((str(run_a), a.graph, a.triples), (str(run_b), b.graph, b.triples))
    if a.name == b.name:
        a = replace(a, name=str(run_a))
        b = replace(b, name=str(run_b))

    comparison = kg.compare_ranks(a.ranks, b.ranks, samples=samples, seed=seed)
    groups = {}
    if by:
        groups = comparing.compare_by(
            a.ranks, b.ranks, a.triples, a.graph, view=by, samples=samples, seed=seed
        )
    queries = []
    for query in comparing.largest_differences(a.ranks, b.ranks, a.triples, most=differences):
        named: dict[str, Any] = asdict(query)
        named["head"] = a.graph.entities.label(query.head)
        named["relation"] = a.graph.relations.label(query.relation)
        named["tail"] = a.graph.entities.label(query.tail)
        queries.append(named)

    data: dict[str, Any] = {
        "graph": a.graph.name,
        "split": split,
        "seed": seed,
        "a": {"run": str(a.path), "name": a.name, "seeds": a.seeds},
        "b": {"run": str(b.path), "name": b.name, "seeds": b.seeds},
        "sentence": comparison.sentence(a.name, b.name),
        **comparison.as_dict(),
    }
    if by:
        data[f"by_{by}"] = {name: group.as_dict() for name, group in groups.items()}
    if differences:
        data["differences"] = queries
    yield cli.Result(data)

    _print_comparison(comparison, a, b, split=split)
    if by:
        _print_groups(groups, a, b, by=by)
    if differences:
        _print_differences(queries, a, b)


def _print_comparison(
    comparison: kg.Comparison, a: RankedRuns, b: RankedRuns, *, split: str
) -> None:
    """The differences of all metrics, and what they mean, in sentences."""
    rows = [
        [metric, *_cells(difference, difference.p_value)]
        for metric, difference in comparison.differences.items()
    ]
    cli.print_table([f"{a.graph.name} {split}", *_columns(a, b)], rows)
    lines = [
        "",
        comparison.sentence(a.name, b.name),
        f"{a.name} is better on {comparison.better:.0%}, worse on {comparison.worse:.0%} and equal "
        f"on {comparison.equal:.0%} of the {comparison.num_triples:,} triples.",
    ]
    for side in (a, b):
        if len(side.seeds) > 1:
            lines.append(f"{side.name} is the mean of {len(side.seeds)} seeds.")
    cli.stdout.print(*lines, sep="\n", soft_wrap=True, markup=False)


def _print_groups(
    groups: Mapping[str, kg.evaluation.comparison.GroupComparison],
    a: RankedRuns,
    b: RankedRuns,
    *,
    by: str,
) -> None:
    rows = []
    significant = []
    for number, (name, group) in enumerate(groups.items()):
        cells = _cells(group.comparison.mrr, group.p_corrected)
        rows.append([name, *cells, group.comparison.num_triples])
        if group.p_corrected < SIGNIFICANT:
            significant.append(number)
    cli.stdout.print()
    cli.print_table([by, *_columns(a, b), "triples"], rows, bold=significant)
    correction = f"p is corrected for {len(groups)} tests (Holm), bold if below .05"
    cli.stdout.print(f"[dim]MRR by {by}; {correction}.[/dim]", soft_wrap=True)


def _print_differences(queries: Sequence[dict[str, Any]], a: RankedRuns, b: RankedRuns) -> None:
    """The queries with the largest differences, their answers and both ranks."""
    rows = []
    for query in queries:
        direction = query["direction"]
        parts = {**query, direction: "?"}
        text = f"({parts['head']}, {parts['relation']}, {parts['tail']})"
        ranks = [f"{query['rank_a']:,.4g}", f"{query['rank_b']:,.4g}"]
        rows.append([text, query[direction], *ranks, _signed(query["difference"])])
    cli.stdout.print()
    columns = ["query", "answer", f"rank {a.name}", f"rank {b.name}", "1/rank"]
    cli.print_table(columns, rows, left=2)


def _columns(a: RankedRuns, b: RankedRuns) -> list[str]:
    return [a.name, b.name, "difference", "95 %", "p"]


def _cells(difference: kg.evaluation.comparison.Difference, p_value: float) -> list[Any]:
    """Both values, the difference, its interval and its p-value.

    There are dashes if the triples are too few.
    """
    short_decimal = kg.evaluation.comparison.short_decimal
    cells = [difference.a, difference.b, _signed(difference.difference)]
    if math.isnan(p_value):
        return [*cells, None, None]
    interval = f"{short_decimal(difference.low)} to {short_decimal(difference.high)}"
    return [*cells, interval, short_decimal(p_value)]


def _signed(number: float) -> str:
    sign = "+" if number > 0 else ""
    return sign + kg.evaluation.comparison.short_decimal(number)
