"""Runs: their details, two compared, health and metrics; and the page of one run or of two."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, NamedTuple

import numpy as np
from fastapi import Depends, Query, Response
from fastapi.responses import PlainTextResponse
from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4

from dualkg.errors import RequestError
from dualkg.evaluation.comparison import (
    check_comparable,
    compare_ranks,
    largest_differences,
    stack_mean_ranks,
)
from dualkg.evaluation.metrics import METRICS
from dualkg.inference.probability import Calibration
from dualkg.serve import schemas
from dualkg.serve.downloads import Table, flat_bin, table, triple_row
from dualkg.serve.schemas import (
    MAX_NAME_LENGTH,
    ComparisonResponse,
    DifferingQuery,
    RunDetails,
    RunPage,
)
from dualkg.serve.served import ServedRun
from dualkg.serve.service import Context, Service, service_of
from dualkg.serve.templating import TEMPLATES, api_router, minus, page, page_router, page_url
from dualkg.training.run import Run, TrainedRun
from dualkg.training.run_folder import RunFolder

routes = api_router("runs")
pages = page_router()
PAGE_QUERIES = 20  # differing queries on the page of two runs
RUN_CLASSES = ("a", "b")  # in CSS
CurrentService = Annotated[Service, Depends(service_of)]
RunName = Annotated[str | None, Query(max_length=MAX_NAME_LENGTH)]
OtherRun = Annotated[
    str | None, Query(alias="with", max_length=MAX_NAME_LENGTH, description="Another run.")
]
# The points of each run.
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


@dataclass(frozen=True)
class RunSummary:
    """A run as a row of the table of all."""

    run: str
    model: str
    dim: int | None
    graph: str
    metrics: dict[str, Any]
    history: list[dict[str, Any]]


def _summary(served: ServedRun) -> RunSummary:
    run = served.run
    folder = RunFolder(run.folder) if run.folder else None
    report = _reports(run, folder).get("test") or {}
    return RunSummary(
        run=served.name,
        model=run.model_name,
        dim=run.settings.get("model", {}).get("dim"),
        graph=served.graph.name,
        metrics=report.get("metrics", {}),
        history=run.history if isinstance(run, TrainedRun) else [],
    )


async def _overview(context: Context) -> list[RunSummary]:
    """All served runs; fewer than three are on the page as they are."""
    served = list(context.service.runs)
    if len(served) < 3:
        return []
    return await context.in_thread(lambda: [_summary(run) for run in served])


@table("runs")
async def runs_table(context: Context) -> Table:
    """All served runs and their metrics on test."""
    served = list(context.service.runs)
    summaries = await context.in_thread(lambda: [_summary(run) for run in served])
    rows = []
    for summary in summaries:
        row = {"run": summary.run, "model": summary.model, "dim": summary.dim}
        rows.append(row | {"graph": summary.graph, **summary.metrics})
    return Table(context.run.name, rows)


@routes.get("/api/compare")
async def compare(
    service: CurrentService,
    a: Annotated[RunName, Query(description="A run; by default the first one.")] = None,
    b: Annotated[RunName, Query(description="Another run; by default the second one.")] = None,
    most: Annotated[int, Query(ge=0, le=1000, description="Number of queries.")] = 20,
) -> ComparisonResponse:
    """Two runs on test: whether one is better, and the queries on which they differ most.

    By default the first two runs are compared.
    """
    names = service.runs.names
    if len(names) < 2 and (a is None or b is None):
        raise RequestError(
            "A comparison needs two runs, and one is served. Serve both: dualkg serve RUN RUN"
        )
    run_a = service.runs.get(names[0] if a is None else a)
    run_b = service.runs.get(names[1] if b is None else b)
    return await service.in_thread(lambda: _comparison(run_a, run_b, most=most))


@routes.get("/run.json", include_in_schema=False)
async def run_page(context: Context, other: OtherRun = None) -> RunPage:
    """A run, and next to it another one if it is named.

    Of two served runs both are shown, unless `with=` is empty.
    """
    served = context.service.runs
    if other is None and len(served) == 2:
        other = next(name for name in served.names if name != context.run.name)
    if not other or other == context.run.name:
        return RunPage(runs=[await run_details(context)])

    runs = [
        await run_details(context),
        await run_details(replace(context, named_run=served.get(other))),
    ]
    try:
        comparison = await compare(context.service, context.run.name, other, PAGE_QUERIES)
    except RequestError as error:  # such as two graphs
        return RunPage(runs=runs, problem=str(error))
    return RunPage(runs=runs, comparison=comparison)


def _details(served: ServedRun) -> RunDetails:
    run = served.run
    graph = served.graph
    folder = RunFolder(run.folder) if run.folder else None
    checks = calibration_checks(run)
    trained = run if isinstance(run, TrainedRun) else None
    return RunDetails(
        run=served.name,
        model=run.model_name,
        engine=folder.saved_environment.get("engine") if folder else None,
        graph=schemas.GraphSummary(name=graph.name, counts=graph.counts, notes=list(graph.notes)),
        relations=served.relations,
        recipe=run.settings,
        recipe_toml=run.settings_text,
        history=trained.history if trained else [],
        reports=_reports(run, folder),
        costs=trained.costs if trained else None,
        calibrated=served.predictor.calibration is not None,
        reliability=checks.get("calibration"),
        coverage=checks.get("coverage"),
        sparsity=_sparsity(run),
    )


def calibration_checks(run: Run) -> dict[str, Any]:
    """What `dualkg calibrate` found on test, if it was run."""
    folder = RunFolder(run.folder) if run.folder else None
    if folder is None or not folder.has_calibration:
        return {}
    return dict(Calibration.load(folder.path, run.graph, identity=run.identity).checks)


def _reports(run: Run, folder: RunFolder | None) -> dict[str, Any]:
    if folder and folder.report.exists():
        return folder.saved_reports()
    if folder and len(run.graph.test):
        # A run of several seeds has no saved report of its own.
        run.report_on("test")
    return {split: report.as_dict() for split, report in run.reports.items()}


def _sparsity(run: Run) -> dict[str, Any] | None:
    from dualkg.analysis.sparsity import storage_of  # which imports all that trains

    try:
        storage = storage_of(run.model)
    except RequestError:  # a model whose vectors are not a table
        return None
    pruning = run.sparsity if isinstance(run, TrainedRun) else None
    return {"share": storage.share, "storage": storage.as_dict(), "pruning": pruning}


def _comparison(a: ServedRun, b: ServedRun, *, most: int) -> ComparisonResponse:
    report_a = a.run.report_on("test").ranks
    report_b = b.run.report_on("test").ranks
    check_comparable((a.name, a.graph, report_a.triples), (b.name, b.graph, report_b.triples))

    ranks_a = stack_mean_ranks([report_a])
    ranks_b = stack_mean_ranks([report_b])
    comparison = compare_ranks(ranks_a, ranks_b)
    differing = largest_differences(ranks_a, ranks_b, report_a.triples, most=most)
    return ComparisonResponse(
        a=a.name,
        b=b.name,
        graph=a.graph.name,
        split="test",
        sentence=comparison.sentence(a.name, b.name),
        metrics={name: metric.as_dict() for name, metric in comparison.differences.items()},
        better=comparison.better,
        worse=comparison.worse,
        equal=comparison.equal,
        num_triples=comparison.num_triples,
        queries=[DifferingQuery.of(a.graph, **vars(query)) for query in differing],
    )


@pages.get("/run")
async def page_of_run(context: Context, other: OtherRun = None) -> Response:
    """One run; next to it another one, if two are served or one was named."""
    page_of_runs = await run_page(context, other)
    runs = page_of_runs.runs
    second = runs[1].run if len(runs) == 2 else ""
    reports = [run.reports["test"] for run in runs if run.reports.get("test")]
    reliabilities = [run.reliability or {} for run in runs]
    params = {"with": second if len(context.service.runs) > 1 else None}
    overview = await _overview(context)
    return page(
        context,
        "run.html",
        overview=overview,
        overview_curves=_curves(overview),
        json=page_url(context, "/run.json", **params),
        page_of_runs=page_of_runs,
        metrics={name: metric.label for name, metric in METRICS.headlines().items()},
        compared={name: metric.title for name, metric in METRICS.compared().items()},
        runs=list(zip(runs, RUN_CLASSES, strict=False)),
        second=second,
        params=params,
        reports=reports if len(reports) == len(runs) else [],
        labels={item.name: item.label for run in runs for item in run.relations},
        curves=_curves(runs),
        reliability=reliability_diagram([checks.get("likely") or {} for checks in reliabilities]),
        settings=_settings(runs),
    )


def _grouped_table(kind: str) -> None:
    """Serve the metrics on test of each group of queries."""

    @table(f"by-{kind}")
    async def by_group(context: Context, other: OtherRun = None) -> Table:
        rows = []
        for run in (await run_page(context, other)).runs:
            groups = (run.reports.get("test") or {}).get(f"by_{kind}") or {}
            rows += [{"run": run.run, kind: name, **group} for name, group in groups.items()]
        return Table(context.run.name, rows)


for _kind in ("relation", "cardinality", "direction"):
    _grouped_table(_kind)


@table("metrics")
async def metrics_table(context: Context, other: OtherRun = None) -> Table:
    """The metrics on all splits that were ranked."""
    rows = []
    for run in (await run_page(context, other)).runs:
        for split, report in run.reports.items():
            rows.append({"run": run.run, "split": split, **report["metrics"]})
    return Table(context.run.name, rows)


@table("history")
async def history_table(context: Context, other: OtherRun = None) -> Table:
    """What was measured after each epoch."""
    runs = (await run_page(context, other)).runs
    rows = [{"run": run.run, **epoch} for run in runs for epoch in run.history]
    return Table(context.run.name, rows)


@table("differences")
async def differences_table(context: Context, other: OtherRun = None) -> Table:
    """The queries on which two runs differ most."""
    comparison = (await run_page(context, other)).comparison
    rows = []
    for query in comparison.queries if comparison else []:
        row = triple_row(query) | {"missing": query.direction}
        row |= {"rank_a": query.rank_a, "rank_b": query.rank_b}
        rows.append(row | {"difference": query.difference})
    return Table(context.run.name, rows)


@table("recipe")
async def recipe_table(context: Context, other: OtherRun = None) -> Table:
    """The recipes, key by key."""
    runs = (await run_page(context, other)).runs
    rows = []
    for section, name, values, _ in _settings(runs):
        key = f"{section}.{name}" if name else section
        given = {run.run: value for run, value in zip(runs, values, strict=True)}
        rows.append({"key": key, **given})
    return Table(context.run.name, rows)


@table("reliability")
async def reliability_table(context: Context, other: OtherRun = None) -> Table:
    """How often answers to test queries were true, by predicted probability."""
    rows = []
    for run in (await run_page(context, other)).runs:
        bins = (run.reliability or {}).get("table") or []
        rows += [{"run": run.run, **flat_bin(bin)} for bin in bins]
    return Table(context.run.name, rows)


@table("sparsity")
async def sparsity_table(context: Context, other: OtherRun = None) -> Table:
    """Zeros in the entity tables, and the bytes of the tables by storage format."""
    rows = []
    for run in (await run_page(context, other)).runs:
        if run.sparsity is not None:
            formats = run.sparsity["storage"]["entity_tables"]
            sizes = {f"{kind}_bytes": formats[kind]["bytes"] for kind in ("dense", "CSR", "CSC")}
            rows.append({"run": run.run, "zeros": run.sparsity["share"], **sizes})
    return Table(context.run.name, rows)


def metric_text(value: float | None, metric: str = "mrr") -> str:
    """A metric as papers write it: .479, and mean ranks in full."""
    if value is None:
        return "–"
    if metric == "mr":
        return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"
    return f"{value:.3f}".replace("0.", ".", 1)


def signed(value: float) -> str:
    """A difference of metrics: +.012, −.003."""
    return minus(f"{value:+.3f}".replace("0.", ".", 1))


def duration(total_seconds: float) -> str:
    """2 min 5 s, 12 s, or 3.4 s."""
    minutes, seconds = divmod(round(total_seconds), 60)
    if minutes:
        return f"{minutes:,} min {seconds} s"
    num_decimals = 0 if total_seconds >= 10 else 1
    return f"{total_seconds:.{num_decimals}f} s"


TEMPLATES.filters |= {"metric_text": metric_text, "signed": signed, "duration": duration}


def _settings(runs: Sequence[RunDetails]) -> list[tuple[str, str, list[Any], bool]]:
    """Section, name and values of every recipe key, and whether the values agree."""
    by_run = [_flat(run.recipe) for run in runs]
    keys = dict.fromkeys(key for settings in by_run for key in settings)
    rows = []
    for section, name in keys:
        values = [settings.get((section, name)) for settings in by_run]
        agree = values[0] == values[-1]
        rows.append((section, name, values, agree))
    return rows


def _flat(recipe: dict[str, Any]) -> dict[tuple[str, str], Any]:
    """The settings of a recipe by section and name; those without a value are left out."""
    settings: dict[tuple[str, str], Any] = {}
    for section, values in recipe.items():
        # A key outside all sections is shown as a section without names.
        named_values = values if isinstance(values, dict) else {"": values}
        for name, value in named_values.items():
            if value not in (None, {}, []):
                settings[section, name] = value
    return settings


class Axis(NamedTuple):
    """From numbers to pixels; `first` is the pixel of the lowest number."""

    low: float
    high: float
    first: float
    last: float
    log: bool = False

    def __call__(self, value: float) -> float:
        value = max(value, self.low)
        ends = (self.low, self.high)
        if self.log:
            value = math.log(value)
            ends = (math.log(self.low), math.log(self.high))
        pixel = np.interp(value, ends, (self.first, self.last))
        return round(float(pixel), 1)


@dataclass(frozen=True)
class Chart:
    """Values of some runs, and the axes that `templates/charts.html` draws them with."""

    series: Series
    x: Axis
    y: Axis
    x_ticks: Sequence[float]
    y_ticks: Sequence[float]
    text: Callable[[float], str]  # a value in words
    dots: bool = True


def _curves(runs: Sequence[RunDetails] | Sequence[RunSummary]) -> dict[str, Chart | None]:
    """The curves of training, by what they show."""
    return {
        "Loss": line_chart(_history(runs, "loss"), text="{:.2f}".format),
        "MRR on valid": line_chart(_history(runs, "valid_mrr"), text=metric_text, dots=True),
    }


def _history(runs: Sequence[RunDetails] | Sequence[RunSummary], key: str) -> Series:
    """The values of a key of the histories, with their epochs; not all epochs have one."""
    series = []
    for run in runs:
        epochs = [epoch for epoch in run.history if epoch.get(key) is not None]
        series.append([(epoch["epoch"], epoch[key]) for epoch in epochs])
    return series


def line_chart(series: Series, *, text: Callable[[float], str], dots: bool = False) -> Chart | None:
    """Values over epochs; those that are not finite are left out."""
    finite = [[point for point in line if math.isfinite(point[1])] for line in series]
    points = [point for line in finite for point in line]
    if not points:
        return None

    epochs, values = zip(*points, strict=True)
    last_epoch = max(1, *epochs)
    x_ticks = [tick for tick in ticks(0, last_epoch) if tick <= last_epoch and tick == int(tick)]
    y_ticks = ticks(min(values), max(values))
    return Chart(
        finite,
        x=Axis(0, last_epoch, first=46, last=388),
        y=Axis(y_ticks[0], y_ticks[-1], first=206, last=14),
        x_ticks=x_ticks,
        y_ticks=y_ticks,
        text=text,
        dots=dots,
    )


def reliability_diagram(checks: Sequence[dict[str, Any]]) -> Chart | None:
    """Predicted probability, observed frequency and its standard error.

    On the diagonal the first two agree.
    """
    series = []
    for check in checks:
        bins = check.get("bins") or []
        series.append([(bin["predicted"], bin["observed"], bin["noise"]) for bin in bins])
    if not any(series):
        return None

    lowest = min(check["min_probability"] for check in checks if check)
    steps = [step for step in (0.01, 0.03, 0.1, 0.3, 1.0) if step >= lowest]
    return Chart(
        series,
        x=Axis(lowest, 1, first=46, last=324, log=True),
        y=Axis(lowest, 1, first=306, last=14, log=True),
        x_ticks=steps,
        y_ticks=steps,
        text=lambda share: f"{100 * share:g} %",
    )


def ticks(low: float, high: float) -> list[float]:
    """About four round numbers, from below the lowest to above the highest."""
    if high <= low:
        low -= 0.5
        high += 0.5
    smallest_step = (high - low) / 4
    power_of_ten: float = 10.0 ** math.floor(math.log10(smallest_step))
    round_steps = [power_of_ten * factor for factor in (1, 2, 2.5, 5, 10)]
    step = next(step for step in round_steps if step >= smallest_step * 0.999)
    first = math.floor(low / step + 1e-9)
    last = math.ceil(high / step - 1e-9)
    return [round(number * step, 10) for number in range(first, last + 1)]
