"""Runs: their details, two compared, health and metrics; and the page of a run, or of two side by
side.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, NamedTuple

import numpy as np
from fastapi import Depends, Query, Response
from fastapi.responses import PlainTextResponse
from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4

from dualkg.analysis.sparsity import storage_of
from dualkg.errors import RequestError
from dualkg.evaluation.comparison import (
    check_comparable,
    compare_ranks,
    largest_differences,
    stack_mean_ranks,
)
from dualkg.evaluation.metrics import METRICS
from dualkg.inference.calibration import load_calibration
from dualkg.serve import schemas
from dualkg.serve.limits import MAX_NAME_LENGTH
from dualkg.serve.schemas import ComparisonResponse, DifferingQuery, RunDetails, RunPage
from dualkg.serve.service import Context, ServedRun, Service, service_of
from dualkg.serve.templating import TEMPLATES, api_router, minus, page, page_router, page_url
from dualkg.training.run import RunFolder

routes = api_router("runs")
pages = page_router()
BOOTSTRAP_SAMPLES = 2000  # enough for a page, and fast
PAGE_QUERIES = 20  # differing queries on the page of two runs
LETTERS = "ab"  # CSS classes of the first and the second run
CurrentService = Annotated[Service, Depends(service_of)]
RunName = Annotated[str | None, Query(max_length=MAX_NAME_LENGTH)]
OtherRun = Annotated[
    str | None, Query(alias="with", max_length=MAX_NAME_LENGTH, description="Another run.")
]
Series = Sequence[Sequence[tuple[float, ...]]]


@routes.get("/health")
async def health() -> dict[str, str]:
    """Answers while the server runs; needs no token."""
    return {"status": "ok"}


@routes.get("/metrics", response_class=PlainTextResponse)
async def metrics(service: CurrentService) -> Response:
    """Counters and latencies in Prometheus' text format."""
    return Response(service.metrics.text(), media_type=CONTENT_TYPE_PLAIN_0_0_4)


@routes.get("/api/runs")
async def run_names(service: CurrentService) -> dict[str, list[str]]:
    """The names of the served runs; the first is the default."""
    return {"runs": service.runs.names}


@routes.get("/api/run")
async def run_details(context: Context) -> RunDetails:
    """Recipe, history, reports, calibration and sparsity of a run."""
    return await context.in_thread(lambda: _details(context.run))


@routes.get("/api/compare")
async def compare(
    service: CurrentService,
    a: RunName = None,
    b: RunName = None,
    most: Annotated[int, Query(ge=0, le=1000, description="Number of queries.")] = 20,
) -> ComparisonResponse:
    """Two runs on test: whether one is better, and the queries on which they differ most.

    By default the first two runs are compared.
    """
    if len(service.runs) < 2 and (a is None or b is None):
        raise RequestError(
            "A comparison needs two runs, and one is served. Serve both: dualkg serve RUN RUN"
        )
    names = service.runs.names
    sides = (
        service.runs.get(names[0] if a is None else a),
        service.runs.get(names[1] if b is None else b),
    )
    return await service.in_thread(lambda: _comparison(*sides, most=most))


@routes.get("/run.json", include_in_schema=False)
async def run_page(context: Context, other: OtherRun = None) -> RunPage:
    """A run, and next to it another one if it is named; of two served runs both, unless `with=` is
    empty.
    """
    served = context.service.runs
    if other is None and len(served) == 2:
        other = next(name for name in served.names if name != context.run.name)
    if not other or other == context.run.name:
        return RunPage(runs=[await run_details(context)])
    runs = [await run_details(context), await run_details(replace(context, run=served.get(other)))]
    try:
        return RunPage(
            runs=runs,
            comparison=await compare(context.service, context.run.name, other, PAGE_QUERIES),
        )
    except RequestError as error:  # such as two graphs
        return RunPage(runs=runs, problem=str(error))


def _details(served: ServedRun) -> RunDetails:
    run = served.run
    graph = served.graph
    folder = RunFolder(run.folder) if run.folder else None
    checks = (
        load_calibration(folder.path, graph).checks
        if folder and folder.calibration.exists()
        else {}
    )
    if folder and folder.report.exists():
        reports = folder.saved_reports()
    else:
        if folder and len(graph.test):  # of several seeds, which has no report of its own
            run.report_on("test")
        reports = {name: one.as_dict() for name, one in run.reports.items()}
    try:
        storage = storage_of(run.model)
        sparsity = {"share": storage.share, "storage": storage.as_dict(), "pruning": run.sparsity}
    except RequestError:  # a model whose vectors are not a table
        sparsity = None
    return RunDetails(
        run=served.name,
        model=run.model_name,
        engine=folder.saved_environment.get("engine") if folder else None,
        graph=schemas.GraphSummary(
            name=graph.name, counts=graph.counts, notes=list(map(str, graph.notes.sentences()))
        ),
        relations=served.relations,
        recipe=run.settings,
        recipe_toml=run.settings_text,
        history=run.history,
        reports=reports,
        costs=run.costs,
        calibrated=served.predictor.calibration is not None,
        reliability=checks.get("calibration"),
        coverage=checks.get("coverage"),
        sparsity=sparsity,
    )


def _comparison(a: ServedRun, b: ServedRun, *, most: int) -> ComparisonResponse:
    report_a, report_b = (side.run.report_on("test").ranks for side in (a, b))
    check_comparable((a.name, a.graph, report_a.triples), (b.name, b.graph, report_b.triples))
    ranks_a = stack_mean_ranks([report_a])
    ranks_b = stack_mean_ranks([report_b])
    found = compare_ranks(ranks_a, ranks_b, samples=BOOTSTRAP_SAMPLES)
    differing = largest_differences(ranks_a, ranks_b, report_a.triples, most=most)
    return ComparisonResponse(
        a=a.name,
        b=b.name,
        graph=a.graph.name,
        split="test",
        sentence=found.sentence(a.name, b.name),
        metrics={name: difference.as_dict() for name, difference in found.differences.items()},
        **{name: getattr(found, name) for name in ("better", "worse", "equal", "num_triples")},
        queries=[DifferingQuery.of(a.graph, **vars(query)) for query in differing],
    )


@pages.get("/run")
async def page_of_run(context: Context, other: OtherRun = None) -> Response:
    """One run; next to it another one, if two are served or one was named."""
    found = await run_page(context, other)
    runs = found.runs
    second = runs[1].run if len(runs) == 2 else ""
    params = {"with": second if len(context.service.runs) > 1 else None}
    reports = [run.reports["test"] for run in runs if run.reports.get("test")]
    return page(
        context,
        "run.html",
        json=page_url(context, "/run.json", **params),
        found=found,
        metrics={name: metric.label for name, metric in METRICS.headlines().items()},
        compared={name: metric.title for name, metric in METRICS.compared().items()},
        runs=list(zip(runs, LETTERS, strict=False)),
        second=second,
        reports=reports if len(reports) == len(runs) else [],
        labels={item.name: item.label for run in runs for item in run.relations},
        curves={
            "Loss": line_chart(_history(runs, "loss"), text="{:.2f}".format),
            "MRR on valid": line_chart(_history(runs, "valid_mrr"), text=metric_text, dots=True),
        },
        reliability=reliability_diagram(
            [(run.reliability or {}).get("likely") or {} for run in runs]
        ),
        settings=_settings(runs),
    )


def metric_text(value: float | None, metric: str = "mrr") -> str:
    """A metric as papers write it: .479, and mean ranks in full."""
    if value is None:
        return "–"
    if metric == "mr":
        return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"
    return f"{value:.3f}".replace("0.", ".", 1)


def signed(value: float) -> str:
    return minus(f"{value:+.3f}".replace("0.", ".", 1))


def duration(number: float) -> str:
    minutes, seconds = divmod(round(number), 60)
    return f"{minutes:,} min {seconds} s" if minutes else f"{number:.{0 if number >= 10 else 1}f} s"


TEMPLATES.filters |= {"metric_text": metric_text, "signed": signed, "duration": duration}


def _settings(runs: Sequence[RunDetails]) -> list[tuple[str, str, list[Any], bool]]:
    """Section, name and values of every recipe key, and whether they agree; keys without a value
    are left out.
    """
    flat = [
        {
            (section, name): value
            for section, values in run.recipe.items()
            for name, value in (values.items() if isinstance(values, dict) else [("", values)])
            if value not in (None, {}, [])
        }
        for run in runs
    ]
    values = {key: [one.get(key) for one in flat] for one in flat for key in one}
    return [(*key, found, found[0] == found[-1]) for key, found in values.items()]


class Axis(NamedTuple):
    """From numbers to pixels."""

    low: float
    high: float
    first: float  # pixel of the lowest number
    last: float
    log: bool = False

    def __call__(self, value: float) -> float:
        numbers = [max(value, self.low), self.low, self.high]
        at, *ends = [math.log(number) for number in numbers] if self.log else numbers
        return round(float(np.interp(at, ends, (self.first, self.last))), 1)


@dataclass(frozen=True)
class Chart:
    """Values of one or two runs, and the axes that `templates/charts.html` draws them with."""

    series: Series
    x: Axis
    y: Axis
    x_ticks: Sequence[float]
    y_ticks: Sequence[float]
    text: Callable[[float], str]  # a value in words
    dots: bool = True


def _history(runs: Sequence[RunDetails], key: str) -> Series:
    return [
        [(one["epoch"], one[key]) for one in run.history if one.get(key) is not None]
        for run in runs
    ]


def line_chart(series: Series, *, text: Callable[[float], str], dots: bool = False) -> Chart | None:
    """Values over epochs; those that are not finite are left out."""
    finite = [[point for point in line if math.isfinite(point[1])] for line in series]
    points = [point for line in finite for point in line]
    if not points:
        return None
    epochs, values = zip(*points, strict=True)
    last = max(1, *epochs)
    y_ticks = ticks(min(values), max(values))
    x_ticks = [tick for tick in ticks(0, last) if tick <= last and tick == int(tick)]
    x = Axis(0, last, 46, 388)
    y = Axis(y_ticks[0], y_ticks[-1], 206, 14)
    return Chart(finite, x, y, x_ticks, y_ticks, text, dots)


def reliability_diagram(checks: Sequence[dict[str, Any]]) -> Chart | None:
    """Predicted probability, observed frequency and its standard error; on the diagonal the first
    two agree.
    """
    series = [
        [(bin["predicted"], bin["observed"], bin["noise"]) for bin in one.get("bins") or []]
        for one in checks
    ]
    if not any(series):
        return None
    least = min(one["min_probability"] for one in checks if one)
    steps = [step for step in (0.01, 0.03, 0.1, 0.3, 1.0) if step >= least]
    x = Axis(least, 1, 46, 324, log=True)
    y = Axis(least, 1, 306, 14, log=True)
    return Chart(series, x, y, steps, steps, lambda share: f"{100 * share:g} %")


def ticks(low: float, high: float) -> list[float]:
    """About four round numbers, from below the lowest to above the highest."""
    if high <= low:
        low = low - 0.5
        high = high + 0.5
    rough = (high - low) / 4
    size: float = 10.0 ** math.floor(math.log10(rough))
    step = next(size * factor for factor in (1, 2, 2.5, 5, 10) if size * factor >= rough * 0.999)
    first = math.floor(low / step + 1e-9)
    last = math.ceil(high / step - 1e-9)
    return [round(number * step, 10) for number in range(first, last + 1)]
