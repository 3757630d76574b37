"""`calibrate`, and what `evaluate` does for other tasks than link prediction."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer
from rich.markup import escape

from dualkg.cli import options, show
from dualkg.errors import RequestError

if TYPE_CHECKING:
    from dualkg.answers.beliefs import CalibrationReport, ClassificationReport, CoverageReport
    from dualkg.data.graph import Split

TASKS = ("link", "classification", "relation")


def calibrate(
    run: options.RunPath,
    coverage: Annotated[float, typer.Option(help="How often an answer set shall have the answer.")] = 0.9,
    figure: Annotated[Path | None, typer.Option(help="Also draw the reliability diagram, as PNG and SVG.")] = None,
    again: Annotated[bool, typer.Option("--again", help="Make anew what the run has already.")] = False,
    device: options.Device = None,
    threads: options.Threads = None,
    as_json: options.Json = False,
) -> None:
    """Learn probabilities and answer sets on valid, keep them with the run, and check them on test."""
    from dualkg.answers.beliefs import beliefs_of, check_answer_sets, check_calibration, save_beliefs

    options.set_threads(threads)
    loaded = options.load_on(run, device)
    model = loaded.model
    beliefs = beliefs_of(loaded, again=again)
    held = check_calibration(beliefs.calibration, model, loaded.graph)
    sets = check_answer_sets(beliefs.answer_sets, model, loaded.graph, coverage=coverage)
    checks = {"calibration": held.as_dict(), "coverage": sets.as_dict()}
    save_beliefs(replace(beliefs, checks=checks), run)
    drawn = draw(held, figure) if figure else []
    if as_json:
        show.print_json({"run": str(run), **checks, "figures": [str(path) for path in drawn]})
        return
    print_calibration(held)
    print_coverage(sets)
    for path in drawn:
        show.err.print(f"Drawn: [bold]{escape(str(path))}[/bold]", soft_wrap=True)


def draw(held: CalibrationReport, path: Path) -> list[Path]:
    """The reliability diagram of the candidates that are at all probable."""
    from dualkg.analysis.figures.reliability import draw_reliability

    if not held.likely.bins:
        raise RequestError(
            f"No candidate of {held.graph} has a probability of 1 % or more, so there is nothing to draw. "
            f"Train the model longer."
        )
    points = [(one.predicted, one.found, one.chance) for one in held.likely.bins]
    title = f"{held.graph} {held.split}"
    return draw_reliability({title: points}, graph=title, ece=held.likely.ece).save(path)


def print_calibration(held: CalibrationReport) -> None:
    """The errors, then the reliability table."""
    table = show.plain_table(f"{held.graph} {held.split}", "ECE", "by chance", "Brier", "candidates", "true")
    for name, part in (("all candidates", held.whole), ("with p ≥ .01", held.likely)):
        numbers = [f"{value:.2e}" if value < 1e-3 else f"{value:.4f}" for value in (part.ece, part.chance, part.brier)]
        table.add_row(name, *(numbers if part.bins else ["–"] * 3), f"{part.num_candidates:,.0f}", f"{part.num_true:,}")
    show.out.print(table)
    show.out.print()
    table = show.plain_table("predicted", "found", "by chance", "candidates", "true", left=0)
    for one in held.likely.bins:
        numbers = [f"{one.predicted:.4f}", f"{one.found:.4f}", f"± {one.chance:.4f}"]
        table.add_row(*numbers, f"{one.num_candidates:,.0f}", f"{one.num_true:,}")
    show.out.print(table)
    show.out.print()


def print_coverage(sets: CoverageReport) -> None:
    """How often answer sets have the answer: all, by direction, by relation."""
    table = show.plain_table(f"answer sets for {sets.wanted:.0%}", "coverage", "mean size", "median", "questions", "")
    parts = {"all questions": sets.whole, "  for tails": sets.by_direction["tail"]}
    parts |= {"  for heads": sets.by_direction["head"]}
    parts |= dict(sorted(sets.by_relation.items(), key=lambda item: -item[1].num_questions))
    for name, part in parts.items():
        sizes = f"{part.mean_size:,.1f}", f"{part.median_size:,.0f}"
        own = "own threshold" if part.own else ""
        table.add_row(escape(name), f"{part.share:.1%}", *sizes, f"{part.num_questions:,}", own)
    table.columns[-1].justify, table.columns[-1].style = "left", "dim"
    show.out.print(table)


def evaluate_task(
    run: Path,
    task: str,
    *,
    split: str,
    by: str | None = None,
    negatives: Path | None = None,
    device: str | None = None,
    as_json: bool = False,
) -> None:
    """Triple classification or relation prediction of a run, printed."""
    check_task(task, by=by, negatives=negatives)
    if task == "relation":
        _relation_prediction(run, split, device=device, as_json=as_json)
    else:
        _classification(run, split, by=by, negatives=negatives, device=device, as_json=as_json)


def check_task(task: str, *, by: str | None, negatives: Path | None) -> None:
    """Refuse a task that is not known, and options that it has no use for."""
    options.check_choice("--task", task, TASKS)
    if negatives is not None and task != "classification":
        raise RequestError("--negatives is for --task classification: the other tasks rank against all candidates.")
    if task == "relation" and by is not None:
        raise RequestError("--task relation is reported as a whole. Leave out --by.")
    if task == "classification" and by not in (None, "relation"):
        raise RequestError(f"--task classification is reported by relation; '{by}' came.")


def _relation_prediction(path: Path, split: str, *, device: str | None, as_json: bool) -> None:
    from dualkg.evaluation import evaluate_relations
    from dualkg.training import load_run
    from dualkg.training.start import choose_device

    run = load_run(path)
    if not len(run.graph.split(split)):
        raise RequestError(f"The graph of {path} has no {split} triples to rank.")
    metrics = evaluate_relations(run.model.to(choose_device(device)), run.graph, split=cast("Split", split))
    if as_json:
        show.print_json({"graph": run.graph.name, "split": split, "task": "relation", "metrics": metrics.as_dict()})
    else:
        show.print_metrics({f"{run.graph.name} {split}, (head, ?, tail)": metrics})


def _classification(
    path: Path, split: str, *, by: str | None, negatives: Path | None, device: str | None, as_json: bool
) -> None:
    from dualkg.answers.beliefs import evaluate_classification, read_negatives
    from dualkg.answers.beliefs.negatives import beside
    from dualkg.training import load_run
    from dualkg.training.start import choose_device

    run = load_run(path)
    for_valid = beside(negatives, split) if negatives else None
    report = evaluate_classification(
        run.model.to(choose_device(device)),
        run.graph,
        split=cast("Split", split),
        negatives=read_negatives(negatives, run.graph) if negatives else None,
        valid_negatives=read_negatives(for_valid, run.graph) if for_valid else None,
    )
    if as_json:
        show.print_json({"task": "classification", **report.as_dict()})
    else:
        print_classification(report, by=by)


def print_classification(report: ClassificationReport, *, by: str | None) -> None:
    """The whole, then by relation where that was asked for; and where the false triples came from."""
    columns = ("accuracy", "F1", "precision", "recall", "AUC", "true", "false")
    table = show.plain_table("", *columns)
    parts = {f"{report.graph} {report.split}": report.metrics}
    if by:
        parts |= dict(sorted(report.by_relation.items(), key=lambda item: -item[1].num_true))
    for name, part in parts.items():
        shares = [f"{value:.4f}" for value in (part.accuracy, part.f1, part.precision, part.recall)]
        area = "–" if part.auc is None else f"{part.auc:.4f}"
        table.add_row(escape(name), *shares, area, f"{part.num_true:,}", f"{part.num_false:,}")
    show.out.print(table)
    false = "given" if report.negatives == "given" else "sampled, one for each true one"
    show.out.print(
        f"[dim]False triples: {false}; thresholds: chosen on valid, false ones {report.valid_negatives}.[/dim]"
    )
