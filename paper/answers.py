"""What the answers of a trained model are worth: new triples, probabilities, inductive_entities, reasons, and fewer bytes."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from typing import Any

from dualkg.extras import check_figure_packages
from dualkg.inference.calibration_store import calibration_for
from dualkg.inference.completion_check import study as study_completion
from dualkg.inference.quantization import measure_storage_formats
from dualkg.inference.reliability import evaluate_calibration, evaluate_coverage
from dualkg.training.api import choose_device
from paper.explanation_study import LeftOut
from paper.explanation_study import study as study_reasons
from paper.inductive_study import VIEWS, InductiveResult, count_text
from paper.inductive_study import study as study_inductive
from paper.plan import Row, recipe_of, rows_with_recipes
from paper.setting import Setting
from paper.sheets import Sheet, over_seeds

ASKED = Row("ComplEx-DURA", "complex-dura-dim-500")  # whose answers they are
GRAPH = "FB15k-237"
SMALL_GRAPH, SMALL = "world", Row("ComplEx-DURA", "complex-dura")  # to be trained a dozen times
COVERAGE = 0.9


def completion(setting: Setting) -> list[Sheet]:
    """How many withheld triples stand among the most plausible ones that train and valid do not have."""
    sheets = []
    for name in setting.graphs:
        graph = setting.graph(name)
        run = setting.trained(ASKED, graph, 0)
        found = study_completion(run.model, graph, calibration=calibration_for(run).calibration)
        rows = [
            [f"{size:,}", f"{hits:,}", f"{promised:,.1f}", f"{degree:,.1f}", f"{chance:,.3g}"]
            for size, hits, promised, degree, chance in zip(
                found.sizes, found.found, found.expected or (), found.by_degree, found.at_random, strict=True
            )
        ]
        note = f"{ASKED.name}. {found.num_test:,} test triples are among the {found.num_triples:,} that could be new."
        columns = ("in the best", "test triples", "promised", "by degree", "at random")
        sheet = Sheet(f"Test triples among new ones: {graph.name}", columns, rows, [found.as_dict()], [note])
        sheets.append(setting.keep("completion", sheet, found.as_dict(), graph=graph))
    return sheets


def calibration(setting: Setting) -> list[Sheet]:
    """How far probabilities learned on valid are from what test finds, and how often prediction sets hold the answer."""
    from dualkg.analysis.figures import draw_reliability

    check_figure_packages()
    sheets = []
    for name in setting.graphs:
        graph = setting.graph(name)
        run = setting.trained(ASKED, graph, 0)
        calibration_data = calibration_for(run)
        held = evaluate_calibration(calibration_data.calibration, run.model, graph)
        sets = evaluate_coverage(calibration_data.prediction_sets, run.model, graph, coverage=COVERAGE)
        rows = [
            [what, f"{part.ece:.2g}", f"{part.noise:.2g}", f"{part.num_candidates:,.0f}", f"{part.num_true:,}"]
            for what, part in (("all", held.overall), ("with p ≥ .01", held.likely))
        ]
        note = (
            f"{ASKED.name}. Answer sets for {sets.target_coverage:.0%} hold the answer of {sets.overall.coverage:.1%} of "
            f"{sets.overall.num_queries:,} questions; half of the sets have at most {sets.overall.median_size:,.0f} "
            f"entities."
        )
        columns = ("candidates", "ECE", "by chance", "number", "true")
        facts = {"calibration": held.as_dict(), "coverage": sets.as_dict()}
        sheet = Sheet(f"Probabilities: {graph.name}", columns, rows, [facts], [note])
        points = {f"{graph.name} test": [(one.predicted, one.observed, one.noise) for one in held.likely.bins]}
        drawing = draw_reliability(points, graph=f"{graph.name} test", ece=held.likely.ece)
        sheets.append(setting.keep("calibration", sheet, facts, drawing, graph=graph))
    return sheets


def forms(setting: Setting) -> list[Sheet]:
    """MRR against the bytes that entities are kept in."""
    from paper.figures import draw_storage_formats, short

    check_figure_packages()
    graph = setting.graph(GRAPH)
    points = measure_storage_formats(setting.trained(ASKED, graph, 0).model, graph)
    rows = [[point.name, short(point.bytes), *point.metrics.row()[:3]] for point in points]
    facts = [point.as_dict() for point in points]
    columns = ("entities as", "bytes", "MRR", "H@1", "H@3")
    sheet = Sheet(f"Entities in fewer bytes: {graph.name}", columns, rows, facts, [f"{ASKED.name}."])
    drawing = draw_storage_formats(points, title=ASKED.name, graph=graph.name)
    return [setting.keep("forms", sheet, facts, drawing, graph=graph)]


def inductive_entities(setting: Setting) -> list[Sheet]:
    """Entities that were withheld and embedded by a few of their triples, compared with retraining."""
    from paper.figures import draw_inductive

    check_figure_packages()
    graph = setting.graph(GRAPH)
    recipe = recipe_of(ASKED, graph.name)
    setting.tell(f"{ASKED.name} on {graph.name}: trained with and without 5 % of the entities.")
    found = study_inductive(graph, recipe, seeds=range(setting.seeds), device=choose_device(setting.device))
    facts = [one.as_dict() for one in found]
    columns = ("method", "triples of each", "MRR", "as query", "as answer", "known entities", "seconds", "seeds")
    note = (
        f"{ASKED.name}. Metrics of the held-out triples of {count_text(found)}: of all queries, of those that give the "
        f"inductive entity, and of those that it answers; and of test triples of known entities. Seconds: of embedding "
        f"all inductive entities, or of retraining."
    )
    title = f"Inductive entities: {graph.name}"
    sheet = Sheet(title, columns, list(_inductive_rows(found)), facts, [note], num_left=2)
    return [setting.keep("inductive", sheet, facts, draw_inductive(found, graph=graph.name), graph=graph)]


def _inductive_rows(found: list[InductiveResult]) -> Iterator[list[str]]:
    """A row for each method and number of triples, over the seeds."""

    def kind(one: InductiveResult) -> tuple[str, float]:
        return one.method, float("inf") if one.triples_per_entity is None else one.triples_per_entity

    for (method, count), group in groupby(sorted(found, key=kind), key=kind):
        ones = list(group)
        views: list[Any] = [[getattr(one, view).mrr for one in ones] for view in VIEWS]
        seconds = sum(one.seconds for one in ones) / len(ones)
        number = "all" if count == float("inf") else f"{count:.0f}"
        cells = [over_seeds(values) for values in views]
        yield [method, number, *cells, f"{seconds:.1f}" if seconds else "–", str(len(ones))]


def reasons(setting: Setting) -> list[Sheet]:
    """Test triples before and after training again without what supports them most."""
    from paper.figures import draw_reasons

    check_figure_packages()
    graph = setting.graph(SMALL_GRAPH)
    row, *_ = rows_with_recipes((ASKED, SMALL), graph.name)
    setting.tell(f"{row.name} on {graph.name}: trained with and without the reasons of test triples.")
    seeds, device = range(setting.seeds), choose_device(setting.device)
    found = study_reasons(graph, recipe_of(row, graph.name), seeds=seeds, device=device)
    facts = [one.as_dict() for one in found]
    columns = ("left out of train", "of each", "MRR", "H@1", "score falls by", "as told", "agreement", "seeds")
    note = (
        f"{row.name}. {found[0].num_answers:,} test triples without an entity in common, ranked after training without "
        f"some training triples of each: its best reasons, those that speak most against it, or any of its two "
        f"entities. Told is what influence expects, and agreement the rank correlation of what it expects with what "
        f"happened."
    )
    sheet = Sheet(f"Reasons left out: {graph.name}", columns, list(_reason_rows(found)), facts, [note], num_left=2)
    return [setting.keep("reasons", sheet, facts, draw_reasons(found, title=row.name, graph=graph.name), graph=graph)]


def _reason_rows(found: list[LeftOut]) -> Iterator[list[str]]:
    """A row for each method and number of triples, over the seeds."""
    for way, count in dict.fromkeys((one.way, one.count) for one in found):
        ones = [one for one in found if (one.way, one.count) == (way, count)]
        numbers = [[one.metrics.mrr for one in ones], [one.metrics.hits_at_1 for one in ones]]
        falls = [[getattr(one, name) for one in ones] for name in ("fall", "expected", "agreement")] if count else []
        cells = [over_seeds(values) for values in numbers]
        cells += [over_seeds(values, digits=2) for values in falls] or ["–"] * 3
        yield [way, str(count), *cells, str(len(ones))]
