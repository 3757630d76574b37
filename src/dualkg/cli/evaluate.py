"""`calibrate`, and what `evaluate` does for other tasks than link prediction."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer
from rich.markup import escape

from dualkg.cli import options, output
from dualkg.errors import RequestError

if TYPE_CHECKING:
    from dualkg.data.graph import Graph, Split, Triples
    from dualkg.evaluation.comparison import Comparison, Difference, Floats, GroupComparison, QueryDifference
    from dualkg.evaluation.ranking import Ranks
    from dualkg.inference.classification import ClassificationReport
    from dualkg.inference.reliability import CalibrationReport, CoverageReport
    from dualkg.training.recipe import Recipe
    from dualkg.training.run import RunFolder


TASKS = ("link", "classification", "relation")


def calibrate(
    run: options.RunPath,
    coverage: Annotated[float, typer.Option(help="How often an prediction set shall have the answer.")] = 0.9,
    figure: Annotated[Path | None, typer.Option(help="Also draw the reliability diagram, as PNG and SVG.")] = None,
    again: Annotated[bool, typer.Option("--again", help="Make again what the run has already.")] = False,
    device: options.Device = None,
    threads: options.Threads = None,
    as_json: options.Json = False,
) -> None:
    """Learn probabilities and prediction sets on valid, keep them with the run, and check them on test."""
    from dualkg.inference.calibration_store import calibration_for, save_calibration
    from dualkg.inference.reliability import evaluate_calibration, evaluate_coverage

    options.set_threads(threads)
    loaded = options.load_on(run, device)
    model = loaded.model
    calibration_data = calibration_for(loaded, again=again)
    held = evaluate_calibration(calibration_data.calibration, model, loaded.graph)
    sets = evaluate_coverage(calibration_data.prediction_sets, model, loaded.graph, coverage=coverage)
    checks = {"calibration": held.as_dict(), "coverage": sets.as_dict()}
    save_calibration(replace(calibration_data, checks=checks), run)
    drawn = draw(held, figure) if figure else []
    if as_json:
        output.print_json({"run": str(run), **checks, "figures": [str(path) for path in drawn]})
        return
    print_calibration(held)
    print_coverage(sets)
    for path in drawn:
        output.err.print(f"Drawn: [bold]{escape(str(path))}[/bold]", soft_wrap=True)


def draw(held: CalibrationReport, path: Path) -> list[Path]:
    """The reliability diagram of the candidates that are at all probable."""
    from dualkg.analysis.figures import draw_reliability

    if not held.likely.bins:
        raise RequestError(
            f"No candidate of {held.graph} has a probability of 1 % or more, so there is nothing to draw. "
            f"Train the model longer."
        )
    points = [(one.predicted, one.observed, one.noise) for one in held.likely.bins]
    title = f"{held.graph} {held.split}"
    return draw_reliability({title: points}, graph=title, ece=held.likely.ece).save(path)


def print_calibration(held: CalibrationReport) -> None:
    """The errors, then the reliability table."""
    table = output.plain_table(f"{held.graph} {held.split}", "ECE", "by chance", "Brier", "candidates", "true")
    for name, part in (("all candidates", held.overall), ("with p ≥ .01", held.likely)):
        numbers = [f"{value:.2e}" if value < 1e-3 else f"{value:.4f}" for value in (part.ece, part.noise, part.brier)]
        table.add_row(name, *(numbers if part.bins else ["–"] * 3), f"{part.num_candidates:,.0f}", f"{part.num_true:,}")
    output.out.print(table)
    output.out.print()
    table = output.plain_table("predicted", "found", "by chance", "candidates", "true", left=0)
    for one in held.likely.bins:
        numbers = [f"{one.predicted:.4f}", f"{one.observed:.4f}", f"± {one.noise:.4f}"]
        table.add_row(*numbers, f"{one.num_candidates:,.0f}", f"{one.num_true:,}")
    output.out.print(table)
    output.out.print()


def print_coverage(sets: CoverageReport) -> None:
    """How often prediction sets have the answer: all, by direction, by relation."""
    table = output.plain_table(
        f"prediction sets for {sets.target_coverage:.0%}", "coverage", "mean size", "median", "questions", ""
    )
    parts = {"all questions": sets.overall, "  for tails": sets.by_direction["tail"]}
    parts |= {"  for heads": sets.by_direction["head"]}
    parts |= dict(sorted(sets.by_relation.items(), key=lambda item: -item[1].num_queries))
    for name, part in parts.items():
        sizes = f"{part.mean_size:,.1f}", f"{part.median_size:,.0f}"
        own = "own threshold" if part.relation_specific else ""
        table.add_row(escape(name), f"{part.coverage:.1%}", *sizes, f"{part.num_queries:,}", own)
    table.columns[-1].justify, table.columns[-1].style = "left", "dim"
    output.out.print(table)


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
    from dualkg.evaluation.report import evaluate_relations
    from dualkg.training.api import choose_device
    from dualkg.training.run import load_run

    run = load_run(path)
    if not len(run.graph.split(split)):
        raise RequestError(f"The graph of {path} has no {split} triples to rank.")
    metrics = evaluate_relations(run.model.to(choose_device(device)), run.graph, split=cast("Split", split))
    if as_json:
        output.print_json({"graph": run.graph.name, "split": split, "task": "relation", "metrics": metrics.as_dict()})
    else:
        output.print_metrics({f"{run.graph.name} {split}, (head, ?, tail)": metrics})


def _classification(
    path: Path, split: str, *, by: str | None, negatives: Path | None, device: str | None, as_json: bool
) -> None:
    from dualkg.inference.classification import evaluate_classification, matching_valid_file, read_negatives
    from dualkg.training.api import choose_device
    from dualkg.training.run import load_run

    run = load_run(path)
    for_valid = matching_valid_file(negatives, split) if negatives else None
    report = evaluate_classification(
        run.model.to(choose_device(device)),
        run.graph,
        split=cast("Split", split),
        negatives=read_negatives(negatives, run.graph) if negatives else None,
        valid_negatives=read_negatives(for_valid, run.graph) if for_valid else None,
    )
    if as_json:
        output.print_json({"task": "classification", **report.as_dict()})
    else:
        print_classification(report, by=by)


def print_classification(report: ClassificationReport, *, by: str | None) -> None:
    """The whole, then by relation where that was asked for; and where the false triples came from."""
    columns = ("accuracy", "F1", "precision", "recall", "AUC", "true", "false")
    table = output.plain_table("", *columns)
    parts = {f"{report.graph} {report.split}": report.metrics}
    if by:
        parts |= dict(sorted(report.by_relation.items(), key=lambda item: -item[1].num_true))
    for name, part in parts.items():
        shares = [f"{value:.4f}" for value in (part.accuracy, part.f1, part.precision, part.recall)]
        area = "–" if part.auc is None else f"{part.auc:.4f}"
        table.add_row(escape(name), *shares, area, f"{part.num_true:,}", f"{part.num_false:,}")
    output.out.print(table)
    false = "given" if report.negatives == "given" else "sampled, one for each true one"
    output.out.print(
        f"[dim]False triples: {false}; thresholds: chosen on valid, false ones {report.valid_negatives}.[/dim]"
    )


@dataclass(frozen=True)
class Side:
    """One of the two: what it is called, the runs that it is the mean of, and their ranks."""

    path: Path
    name: str
    seeds: list[int]
    graph: Graph
    triples: Triples
    ranks: Floats

    def as_dict(self) -> dict[str, Any]:
        return {"run": str(self.path), "name": self.name, "seeds": self.seeds}


def load_sides(run_a: Path, run_b: Path, split: Split) -> tuple[Side, Side]:
    """Both sides; refused where they are not of the same triples of the same graph."""
    from dualkg.evaluation.comparison import check_comparable

    a, b = load_side(run_a, split), load_side(run_b, split)
    check_comparable((str(run_a), a.graph, a.triples), (str(run_b), b.graph, b.triples))
    if a.name == b.name:  # then what they are kept in tells them apart
        a, b = (replace(side, name=str(side.path)) for side in (a, b))
    return a, b


def load_side(path: Path, split: Split) -> Side:
    return recorded_side(path, split) if (path / "record.json").exists() else trained_side(path, split)


def recorded_side(path: Path, split: Split) -> Side:
    """The runs of a record, whose ranks of the test split it keeps; its triples are those of the graph that is here."""
    from dualkg.analysis.records import load_record
    from dualkg.training.api import load_recipe_graph

    record = load_record(path)
    ranks, graph = record.ranks(), load_recipe_graph(record.recipe)
    if split != "test" or ranks is None:
        kept = "none" if ranks is None else "those of test alone"
        raise RequestError(
            f"A record keeps the ranks of test queries, and {path} has {kept}. Compare the runs instead."
        )
    if graph.fingerprint != record.data:
        raise RequestError(
            f"{path} was recorded on other data than {graph.name} is here, so its triples are not known."
        )
    return Side(path, name_of(record.recipe), record.seeds, graph, graph.test, ranks)


def trained_side(path: Path, split: Split) -> Side:
    from dualkg.analysis.records import whatever_seed
    from dualkg.evaluation.comparison import stack_mean_ranks
    from dualkg.training.recipe import load_recipe

    folders = finished_runs(path)
    recipes = [load_recipe(folder.recipe) for folder in folders]
    if len({whatever_seed(recipe) for recipe in recipes}) > 1:
        raise RequestError(f"The runs in {path} are not of one recipe, so they have no mean. Name one of them.")
    if len({folder.saved_environment.get("data") for folder in folders}) > 1:
        raise RequestError(f"The runs in {path} are not of the same data, so they have no mean. Name one of them.")
    graph = folders[0].load_graph()
    if not len(graph.split(split)):
        raise RequestError(f"The graph of {path} has no {split} triples to compare by.")
    ranks = [saved_ranks(folder, split) for folder in folders]
    return Side(
        path=path,
        name=name_of(recipes[0]),
        seeds=[recipe.training.seed for recipe in recipes],
        graph=graph,
        triples=ranks[0].triples,
        ranks=stack_mean_ranks(ranks),
    )


def name_of(recipe: Recipe) -> str:
    """ComplEx-DURA, say."""
    choice, kept_small = recipe.model, recipe.regularizer.name
    dual = "" if choice.dual == "none" else f"-dual-{choice.dual}"
    return choice.name + dual + ("" if kept_small == "none" else f"-{kept_small}")


def finished_runs(path: Path) -> list[RunFolder]:
    """The run that a folder is, or the finished ones that lie in it."""
    from dualkg.analysis.records import find_runs
    from dualkg.training.run import RunFolder

    own = RunFolder(path)
    inside = [own] if own.recipe.exists() else [RunFolder(found.parent) for found in path.glob("seed-*/recipe.toml")]
    if not inside:
        own.check_is_run()
    unfinished = [folder for folder in inside if not folder.finished]
    if len(unfinished) == len(inside):
        raise RequestError(f"{path} holds no finished run. {unfinished[0].how_to_go_on()}")
    if unfinished:
        count = f"{len(unfinished)} of the {len(inside)} runs in {path}"
        output.err.print(f"[dim]{escape(count)} are not finished, and left out.[/dim]", soft_wrap=True)
    return [RunFolder(found) for found in find_runs([path])]


def saved_ranks(folder: RunFolder, split: Split) -> Ranks:
    """The ranks that are kept with the run, or where they are not, as for train, those of its model."""
    from dualkg.evaluation.report import load_ranks
    from dualkg.training.run import load_run

    kept = folder.ranks(split)
    return load_ranks(kept) if kept.exists() else load_run(folder.path).report_on(split).ranks


SIDE = "The folder of a run, of runs of several seeds, or of a record."


def compare(
    run_a: Annotated[Path, typer.Argument(metavar="RUN_A", help=SIDE, show_default=False)],
    run_b: Annotated[Path, typer.Argument(metavar="RUN_B", help=SIDE, show_default=False)],
    split: options.Split = "test",
    by: options.By = None,
    differences: Annotated[int, typer.Option(min=0, help="Show so many questions that they answer most unlike.")] = 0,
    samples: Annotated[int, typer.Option(help="How often the triples are drawn again.")] = 10_000,
    seed: Annotated[int, typer.Option(help="Of the draws.")] = 0,
    threads: options.Threads = None,
    as_json: options.Json = False,
) -> None:
    """Tell whether one run is better than another, or within noise: a paired bootstrap over triples."""
    from dualkg.evaluation.comparison import compare_by, compare_ranks, largest_differences

    options.set_threads(threads)
    options.check_split(split)
    options.check_by(by)
    a, b = load_sides(run_a, run_b, cast("Split", split))
    whole = compare_ranks(a.ranks, b.ranks, samples=samples, seed=seed)
    parts = compare_by(a.ranks, b.ranks, a.triples, a.graph, view=by, samples=samples, seed=seed) if by else {}
    apart = largest_differences(a.ranks, b.ranks, a.triples, most=differences)
    if as_json:
        facts = {"graph": a.graph.name, "split": split, "seed": seed, "a": a.as_dict(), "b": b.as_dict()}
        facts |= {"sentence": whole.sentence(a.name, b.name), **whole.as_dict()}
        views = {f"by_{by}": {name: part.as_dict() for name, part in parts.items()}} if by else {}
        questions = {"differences": [named(question, a.graph) for question in apart]} if differences else {}
        output.print_json({**facts, **views, **questions})
        return
    print_comparison(whole, a, b, title=f"{a.graph.name} {split}")
    if by:
        print_parts(parts, a, b, title=by)
    if differences:
        print_questions(apart, a, b)


def named(question: QueryDifference, graph: Graph) -> dict[str, Any]:
    """A question with the names of what it is about."""
    names = {key: graph.entities.label(getattr(question, key)) for key in ("head", "tail")}
    return {**asdict(question), **names, "relation": graph.relations.label(question.relation)}


def print_comparison(found: Comparison, a: Side, b: Side, *, title: str) -> None:
    table = output.plain_table(escape(title), escape(a.name), escape(b.name), "difference", "95 %", "p")
    for metric, difference in found.differences.items():
        table.add_row(metric, f"{difference.a:.4f}", f"{difference.b:.4f}", *_cells(difference, difference.p_value))
    output.out.print(table)
    output.out.print()
    output.out.print(escape(found.sentence(a.name, b.name)), soft_wrap=True)
    shares = f"better on {found.better:.0%}, worse on {found.worse:.0%} and equal on {found.equal:.0%}"
    output.out.print(f"{escape(a.name)} is {shares} of the {found.num_triples:,} triples.", soft_wrap=True)
    for side in (a, b):
        if len(side.seeds) > 1:
            output.out.print(f"[dim]{escape(side.name)} is the mean of {len(side.seeds)} seeds.[/dim]", soft_wrap=True)


def print_parts(parts: dict[str, GroupComparison], a: Side, b: Side, *, title: str) -> None:
    """MRR by a view; bold where it lies outside of noise even for so many looks."""
    table = output.plain_table(title, escape(a.name), escape(b.name), "difference", "95 %", "p", "triples")
    table.columns[0].overflow = "fold"
    for name, part in parts.items():
        found, p_value = part.comparison.mrr, part.p_corrected
        cells = (f"{found.a:.4f}", f"{found.b:.4f}", *_cells(found, p_value), f"{part.comparison.num_triples:,}")
        table.add_row(escape(name), *cells, style="bold" if p_value < 0.05 else None)
    output.out.print()
    output.out.print(table)
    note = f"MRR by {title}; p is corrected for {len(parts)} looks (Holm), and bold where it is below .05."
    output.out.print(f"[dim]{note}[/dim]", soft_wrap=True)


def print_questions(apart: list[QueryDifference], a: Side, b: Side) -> None:
    table = output.plain_table(
        "question", "answer", f"rank {escape(a.name)}", f"rank {escape(b.name)}", "1/rank", left=2
    )
    table.columns[1].no_wrap = False
    for question in apart:
        names = named(question, a.graph)
        answer = names.pop(question.direction)
        asked = {"head": "?", "tail": "?", **names}
        words = f"({asked['head']}, {asked['relation']}, {asked['tail']})"
        ranks = (f"{question.rank_a:,.4g}", f"{question.rank_b:,.4g}")
        table.add_row(escape(words), escape(answer), *ranks, _signed(question.difference))
    output.out.print()
    output.out.print(table)


def _cells(difference: Difference, p_value: float) -> tuple[str, str, str]:
    """The difference, its interval and its p-value; dashes where they are not known."""
    from dualkg.evaluation.comparison import short_decimal

    if math.isnan(p_value):
        return _signed(difference.difference), "–", "–"
    interval = f"{short_decimal(difference.low)} to {short_decimal(difference.high)}"
    return _signed(difference.difference), interval, short_decimal(p_value)


def _signed(number: float) -> str:
    from dualkg.evaluation.comparison import short_decimal

    return ("+" if number > 0 else "") + short_decimal(number)
