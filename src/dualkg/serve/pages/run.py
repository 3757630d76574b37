"""Curves and diagrams as SVG, drawn without scripts: how they look is in run.css."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from fastapi import Query, Request, Response

from dualkg.errors import RequestError
from dualkg.serve.limits import LONGEST_NAME
from dualkg.serve.pages.layout import (
    Child,
    Markup,
    address,
    entity_link,
    page,
    page_router,
    relation_said,
    shown,
    spoken,
    tag,
)
from dualkg.serve.routes.queries import Asked, AskedRun, router
from dualkg.serve.routes.runs import compare, run_facts
from dualkg.serve.schemas import Comparison, DifferingQuestion, RunFacts, RunPage

WIDTH, HEIGHT = 440, 240
LEFT, RIGHT, TOP, BOTTOM = 46, 52, 14, 34  # margins
LETTERS = "ab"  # the first run, and the second
Place = tuple[float, float]


@dataclass(frozen=True)
class Axis:
    """From numbers to pixels."""

    low: float
    high: float
    first: float  # pixel of the lowest
    last: float
    log: bool = False

    def __call__(self, value: float) -> float:
        low, high, at = self.low, self.high, min(max(value, self.low), self.high) if self.log else value
        if self.log:
            low, high, at = math.log(low), math.log(high), math.log(at)
        share = (at - low) / (high - low) if high > low else 0.5
        return round(self.first + share * (self.last - self.first), 1)


def curves(
    series: Sequence[Sequence[Place]], *, said: str, under: str, written: Callable[[float], str], dots: bool = False
) -> Markup | None:
    """Lines of one or two runs over epochs; `said` is for those who do not see it."""
    places = [place for line in series for place in line if math.isfinite(place[1])]
    if not places:
        return None
    steps = ticks(min(y for _, y in places), max(y for _, y in places))
    across = Axis(0, max(max(x for x, _ in places), 1), LEFT, WIDTH - RIGHT)
    up = Axis(steps[0], steps[-1], HEIGHT - BOTTOM, TOP)
    epochs = [step for step in ticks(0, across.high) if step <= across.high and step == int(step)]
    drawn: list[Child] = [_grid(across, up, epochs, steps, written=written, under=under)]
    ends: list[Place] = []
    for letter, line in zip(LETTERS, series, strict=False):
        pixels = [(across(x), up(y)) for x, y in line if math.isfinite(y)]
        if not pixels:
            continue
        path = "M" + "L".join(f"{x},{y}" for x, y in pixels)
        drawn.append(tag("path", d=path, class_=f"line {letter}"))
        if dots or len(pixels) == 1:
            drawn += [tag("circle", cx=x, cy=y, r=2.5, class_=f"spot {letter}") for x, y in pixels]
        x, y = pixels[-1]
        y = y - 14 if any(abs(x - left) < 50 and abs(y - top) < 13 for left, top in ends) else y
        ends.append((x, y))
        drawn.append(tag("text", written(line[-1][1]), x=x + 6, y=round(y + 4, 1), class_=f"end {letter}"))
    return tag("svg", drawn, viewBox=f"0 0 {WIDTH} {HEIGHT}", class_="curve", role="img", aria_label=said)


def reliability(series: Sequence[Sequence[tuple[float, float, float]]], *, least: float, said: str) -> Markup | None:
    """Points of what was said, what was found, and what chance leaves open; on the diagonal the two agree."""
    if not any(series):
        return None
    side = 340
    steps = [step for step in (0.01, 0.03, 0.1, 0.3, 1.0) if step >= least]
    across, up = Axis(least, 1, LEFT, side - 16, log=True), Axis(least, 1, side - BOTTOM, TOP, log=True)
    drawn: list[Child] = [
        _grid(
            across, up, steps, steps, written=lambda share: f"{100 * share:g} %", under="said", width=side, height=side
        ),
        tag("path", d=f"M{across(least)},{up(least)}L{across(1)},{up(1)}", class_="diagonal"),
        tag("text", "found", x=LEFT, y=TOP - 3, class_="axis"),
    ]
    for letter, points in zip(LETTERS, series, strict=False):
        for predicted, found, chance in points:
            x = across(predicted)
            drawn.append(tag("path", d=f"M{x},{up(found - chance)}V{up(found + chance)}", class_=f"whisker {letter}"))
            drawn.append(tag("circle", cx=x, cy=up(found), r=4.5, class_=f"spot {letter}"))
    return tag("svg", drawn, viewBox=f"0 0 {side} {side}", class_="curve square", role="img", aria_label=said)


def ticks(low: float, high: float, *, about: int = 4) -> list[float]:
    """Round numbers from below the lowest to above the highest."""
    if high <= low:
        low, high = low - 0.5, high + 0.5
    rough = (high - low) / about
    size: float = 10.0 ** math.floor(math.log10(rough))
    step = next(size * factor for factor in (1, 2, 2.5, 5, 10) if size * factor >= rough * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(number * step, 10) for number in range(first, last + 1)]


def _grid(
    across: Axis,
    up: Axis,
    columns: Sequence[float],
    rows: Sequence[float],
    *,
    written: Callable[[float], str],
    under: str,
    width: int = WIDTH,
    height: int = HEIGHT,
) -> list[Markup]:
    base = height - BOTTOM
    made = [tag("path", d=f"M{across.first},{up(row)}H{across.last}", class_="rule") for row in rows]
    made += [tag("text", written(row), x=LEFT - 7, y=up(row) + 4, class_="axis end-anchored") for row in rows]
    columns_said = written if across.log else "{:,.0f}".format
    made += [tag("text", columns_said(x), x=across(x), y=base + 18, class_="axis middle") for x in columns]
    made.append(tag("text", under, x=width - (16 if across.log else RIGHT), y=height - 3, class_="axis end-anchored"))
    return made


METRICS = {"mrr": "MRR", "hits_at_1": "Hits@1", "hits_at_3": "Hits@3", "hits_at_10": "Hits@10", "mr": "Mean rank"}
OF_COMPARISON = {"mrr": "MRR", "hits_at_1": "H@1", "hits_at_3": "H@3", "hits_at_10": "H@10"}
Groups = Mapping[str, Mapping[str, float]]


def written(metric: str, value: float | None) -> str:
    """As papers have them: .479, and mean ranks in full."""
    if value is None:
        return "–"
    if metric == "mr":
        return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"
    return f"{value:.3f}".replace("0.", ".", 1)


def percent(share: float, digits: int = 0) -> str:
    return f"{100 * share:.{digits}f} %"


def headline(runs: Sequence[RunFacts], comparison: Comparison | None) -> Markup | None:
    """The metrics on test, large; beside each other where there are two runs."""
    reports = [run.reports.get("test") for run in runs]
    if not all(reports):
        return None
    items = []
    for metric, name in METRICS.items():
        values = [
            tag("dd", tag("span", written(metric, report["metrics"][metric]), class_=f"large {letter}"))
            for letter, report in zip(LETTERS, reports, strict=False)
            if report
        ]
        items.append(tag("div", tag("dt", name), values, _metric_difference(metric, comparison)))
    return tag("dl", items, class_="headline")


def _metric_difference(metric: str, comparison: Comparison | None) -> Markup | None:
    found = comparison and comparison.metrics.get(OF_COMPARISON.get(metric, ""))
    if not found:
        return None
    signed = f"{found['difference']:+.3f}".replace("0.", ".", 1).replace("-", "−")
    interval = f"{found['low']:+.3f} to {found['high']:+.3f}".replace("0.", ".").replace("-", "−")
    noise = "within noise" if found["within_noise"] else f"p {_p(found['p_value'])}"
    return tag("dd", tag("b", signed), f" · {noise}", class_="small soft", title=f"95 %: {interval}")


def _p(value: float) -> str:
    return "≤ .001" if value <= 0.001 else f"= {value:.3f}".replace("0.", ".", 1)


def report_table(
    groups: Sequence[Groups], *, caption: str, kind: str, names: Sequence[str], labels: Mapping[str, str] | None = None
) -> Markup:
    """Metrics of each group, such as a relation; with two runs their MRR and what is between."""
    keys = list(dict.fromkeys(key for one in groups for key in one))
    two = len(groups) == 2
    columns = [_column(kind), _column("Questions", number=True)]
    if two:
        sides = [
            _column(f"MRR {name}", number=True, letter=letter) for letter, name in zip(LETTERS, names, strict=True)
        ]
        columns += [*sides, _column("Difference", number=True)]
    else:
        columns += [_column("MRR", number=True), *(_column(METRICS[name], number=True) for name in list(METRICS)[1:])]
    rows = []
    for key in keys:
        said = tag("bdi", spoken((labels or {}).get(key, key)), class_="relation" if labels else None)
        found = [one.get(key, {}) for one in groups]
        number = next((one["num_queries"] for one in found if one), 0)
        cells = [tag("td", said, data_value=(labels or {}).get(key, key)), _cell(number, f"{number:,.0f}")]
        if two:
            values = [one.get("mrr") for one in found]
            cells += [
                _cell(value, written("mrr", value), bar=letter) for letter, value in zip(LETTERS, values, strict=True)
            ]
            cells.append(_difference(*values))
        else:
            cells.append(_cell(found[0].get("mrr"), written("mrr", found[0].get("mrr")), bar="a"))
            cells += [_cell(found[0].get(name), written(name, found[0].get(name))) for name in list(METRICS)[1:]]
        rows.append(tag("tr", cells))
    head = tag("thead", tag("tr", columns))
    title = tag("caption", caption, class_="visually-hidden")
    return tag("div", tag("table", title, head, tag("tbody", rows), data_sortable=True), class_="scroll", tabindex=0)


def _column(name: str, *, number: bool = False, letter: str | None = None) -> Markup:
    mark = tag("i", class_=f"key {letter}") if letter else None
    return tag("th", mark, name, scope="col", class_="number" if number else None)


def _cell(value: float | None, text: str, *, bar: str | None = None) -> Markup:
    drawn = None
    if bar and value is not None:
        rect = tag("rect", width=f"{100 * value:.1f}%", height="100%")
        drawn = tag("svg", rect, class_=f"bar {bar}", aria_hidden="true", focusable="false")
    inner: Child = tag("span", drawn, tag("span", text), class_="barred") if drawn else text
    return tag("td", inner, class_="number", data_value="" if value is None else f"{value:.9g}")


def _difference(a: float | None, b: float | None) -> Markup:
    if a is None or b is None:
        return _cell(None, "–")
    return _cell(a - b, f"{a - b:+.3f}".replace("0.", ".", 1).replace("-", "−"))


def choices_shown(runs: Sequence[RunFacts]) -> list[Markup]:
    """Every choice of the recipe; of two runs those on which they differ, and the others folded."""
    found = [_flat(run.recipe) for run in runs]
    keys = list(dict.fromkeys(key for one in found for key in one))
    if len(runs) == 1:
        return [_choices(runs, found, keys)]
    apart = [key for key in keys if found[0].get(key) != found[1].get(key)]
    same = [key for key in keys if key not in apart]
    first = _choices(runs, found, apart) if apart else tag("p", "Both were made by the same choices.", class_="soft")
    summary = tag("summary", f"{len(same)} choices that are the same")
    return [first, tag("details", summary, _choices(runs[:1], found[:1], same, both=True))]


def _choices(
    runs: Sequence[RunFacts], found: Sequence[Mapping[str, Any]], keys: Sequence[str], *, both: bool = False
) -> Markup:
    rows = []
    for key in keys:
        section, _, name = key.partition(".")
        values = [tag("td", tag("bdi", _said(one.get(key)))) for one in found]
        rows.append(
            tag("tr", tag("th", tag("span", f"{section} ", class_="soft"), name.replace("_", " "), scope="row"), values)
        )
    names = [
        tag("th", "Both" if both else _name(run.run, letter), scope="col")
        for run, letter in zip(runs, LETTERS, strict=False)
    ]
    head = tag("thead", tag("tr", tag("th", "Choice", scope="col"), names))
    return tag("div", tag("table", head, tag("tbody", rows), class_="choices"), class_="scroll", tabindex=0)


def _name(name: str, letter: str) -> list[Markup]:
    return [tag("i", class_=f"key {letter}"), tag("bdi", shown(name))]


def _flat(recipe: Mapping[str, Any]) -> dict[str, Any]:
    """Choices by section and name; what is left to its default of none says nothing."""
    return {
        f"{section}.{name}": value
        for section, values in recipe.items()
        for name, value in (values.items() if isinstance(values, dict) else [("", values)])
        if value not in (None, {}, [])
    }


def _said(value: Any) -> str:
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:g}" if isinstance(value, float) else shown(str(value))


def questions_table(context: Asked, comparison: Comparison) -> Markup:
    """The questions on which two runs differ most, each asked again by a click."""
    rows = [tag("tr", _question(context, one)) for one in comparison.questions]
    sides = [
        _column(f"Rank {shown(name)}", number=True, letter=letter)
        for letter, name in zip(LETTERS, (comparison.a, comparison.b), strict=True)
    ]
    head = tag("thead", tag("tr", _column("Question"), _column("Answer"), sides))
    return tag(
        "div", tag("table", head, tag("tbody", rows), data_sortable=True, class_="asked"), class_="scroll", tabindex=0
    )


def _question(context: Asked, one: DifferingQuestion) -> list[Markup]:
    given = one.head if one.asked == "tail" else one.tail
    answer = one.tail if one.asked == "tail" else one.head
    said, gap = tag("bdi", shown(given.label), class_="name"), tag("span", "?", class_="gap")
    parts = (said, " ", relation_said(one.relation), " ", gap)
    kept = {"head": given.name} if one.asked == "tail" else {"tail": given.name}
    where = address("/", context, find=one.asked, relation=one.relation.name, **kept)
    question = tag("a", parts if one.asked == "tail" else parts[::-1], href=where)
    ranks = [_cell(rank, f"{rank:,.10g}") for rank in (one.rank_a, one.rank_b)]
    return [tag("td", question, data_value=given.label), tag("td", entity_link(answer, context)), *ranks]


routes = page_router()
programs = router("pages")
MOST_QUESTIONS = 20
Other = Annotated[str | None, Query(alias="with", max_length=LONGEST_NAME, description="Another run.")]


@routes.get("/run")
async def run_page(request: Request, context: AskedRun, other: Other = None) -> Response:
    """One run; beside it another, where two are served or one was named."""
    found = await _found(context, other)
    runs, comparison = found.runs, found.comparison
    titles = [tag("bdi", tag("i", class_=f"key {letter}"), shown(one.run)) for one, letter in _lettered(runs)]
    about = [tag("p", _about(one), class_="lead") for one in runs[:1]] if len(runs) == 1 else None
    sentence = comparison.sentence if comparison else None
    beside = runs[1].run if len(runs) == 2 else ""
    return page(
        request,
        context,
        tag(
            "h1",
            titles[0],
            [tag("span", "and", class_="soft"), titles[1]] if len(titles) == 2 else None,
            class_="titles",
        ),
        about,
        tag("p", sentence, class_="lead") if sentence else None,
        tag("p", found.problem, class_="problem", role="note") if found.problem else None,
        _chooser(context, beside),
        tag("section", tag("h2", "On test"), headline(runs, comparison), _protocol(runs)),
        _learning(runs),
        _between(context, found),
        _reports(runs),
        _beliefs(runs),
        _sparsity(runs),
        _recipe(runs),
        title=" and ".join(one.run for one in runs),
        here="Run",
        scripts=["run.js"],
        styles=["run.css"],
        json=address("/run.json", context, **{"with": beside if len(context.service.runs) > 1 else None}),
    )


@programs.get("/run.json", include_in_schema=False)
async def run_as_json(context: AskedRun, other: Other = None) -> RunPage:
    return await _found(context, other)


routes.include_router(programs)


async def _found(context: Asked, other: str | None) -> RunPage:
    """Where two runs are served, the other is beside it unless `with=` is empty."""
    served = context.service.runs
    if other is None and len(served) == 2:
        other = next(name for name in served.names if name != context.run.name)
    if not other or other == context.run.name:
        return RunPage(runs=[await run_facts(context)])
    second = Asked(context.service, served.get(other))
    runs = [await run_facts(context), await run_facts(second)]
    try:
        comparison = await compare(context.service, context.run.name, other, MOST_QUESTIONS)
    except RequestError as error:  # such as two graphs
        return RunPage(runs=runs, problem=str(error))
    return RunPage(runs=runs, comparison=comparison)


def _lettered(runs: Sequence[RunFacts]) -> list[tuple[RunFacts, str]]:
    return list(zip(runs, LETTERS, strict=False))


def _about(run: RunFacts) -> str:
    regularizer = run.recipe.get("regularizer", {}).get("name", "none")
    by = "" if regularizer == "none" else f" with {regularizer}"
    counts = run.graph.counts
    spent = (run.costs or {}).get("training_seconds")
    took = "" if spent is None else f", in {_seconds(spent)}"
    return (
        f"{run.model}{by}, dim {run.recipe['model']['dim']}, on the {counts['train']:,} training triples of "
        f"{run.graph.name}: {len(run.history):,} epochs{took}."
    )


def _seconds(number: float) -> str:
    minutes, seconds = divmod(round(number), 60)
    return f"{minutes:,} min {seconds} s" if minutes else f"{number:.{0 if number >= 10 else 1}f} s"


def _chooser(context: Asked, beside: str) -> Markup | None:
    """Which other run to see beside this one."""
    others = [name for name in context.service.runs.names if name != context.run.name]
    if not others:
        return None
    links = [
        tag(
            "a",
            shown(name) if name else "alone",
            href=address("/run", context, **{"with": name}),
            aria_current=name == beside,
        )
        for name in ("", *others)
    ]
    return tag(
        "p", tag("span", "Beside it ", class_="small soft"), tag("span", links, class_="choice"), class_="beside"
    )


def _protocol(runs: Sequence[RunFacts]) -> Markup | None:
    report = runs[0].reports.get("test")
    if not report:
        return None
    number = f"{report['metrics']['num_queries']:,} questions; {report['protocol']}."
    return tag("p", number, class_="small soft")


def _learning(runs: Sequence[RunFacts]) -> Markup | None:
    losses = [[(float(e["epoch"]), float(e["loss"])) for e in run.history if e.get("loss") is not None] for run in runs]
    mrrs = [[(float(e["epoch"]), float(e["valid_mrr"])) for e in run.history if e.get("valid_mrr")] for run in runs]
    drawn = [
        _figure("Loss", curves(losses, said=_told("Loss", runs, losses), under="epoch", written="{:.2f}".format)),
        _figure(
            "MRR on valid",
            curves(
                mrrs,
                said=_told("MRR on valid", runs, mrrs),
                under="epoch",
                written=lambda value: written("mrr", value),
                dots=True,
            ),
        ),
    ]
    if not any(mrrs):
        hint = "Valid was not ranked while training. --set validation.every=1 does it after each epoch."
        drawn[1] = tag("figure", tag("figcaption", "MRR on valid"), tag("p", hint, class_="soft small"))
    return tag("section", tag("h2", "Learning"), tag("div", drawn, class_="pair")) if any(losses) else None


def _figure(title: str, drawing: Markup | None) -> Markup | None:
    return tag("figure", tag("figcaption", title), drawing) if drawing else None


def _told(what: str, runs: Sequence[RunFacts], series: Sequence[Sequence[tuple[float, float]]]) -> str:
    """The curve in a sentence for each run."""
    return " ".join(
        f"{what} of {run.run}: from {line[0][1]:.3g} to {line[-1][1]:.3g} in {len(run.history)} epochs."
        for run, line in zip(runs, series, strict=True)
        if line
    )


def _between(context: Asked, found: RunPage) -> Markup | None:
    comparison = found.comparison
    if comparison is None:
        return None
    a, b = (tag("bdi", shown(name)) for name in (comparison.a, comparison.b))
    shares = [(comparison.better, "a"), (comparison.equal, "same"), (comparison.worse, "b")]
    at, strips = 0.0, []
    for share, kind in shares:
        strips.append(tag("rect", x=f"{100 * at:.2f}%", width=f"{100 * share:.2f}%", height="100%", class_=kind))
        at += share
    strip = tag("svg", strips, class_="strip", aria_hidden="true", focusable="false")
    told: Child = (
        [
            tag("i", class_="key a"),
            a,
            f" ranks {percent(comparison.better)} of the {comparison.num_triples:,} triples higher, ",
        ],
        [tag("i", class_="key b"), b, f" {percent(comparison.worse)}; {percent(comparison.equal)} are even."],
    )
    heading = tag("h2", "Where they differ most")
    return tag("section", heading, tag("p", told), strip, questions_table(context, comparison))


def _reports(runs: Sequence[RunFacts]) -> list[Markup]:
    reports = [run.reports.get("test") for run in runs]
    found = [report for report in reports if report]
    if len(found) != len(runs):
        return []
    names = [shown(run.run) for run in runs]
    labels = {one.name: one.label for run in runs for one in run.relations}
    made = []
    for kind, title, of in (
        ("by_relation", "By relation", labels),
        ("by_cardinality", "By cardinality", None),
        ("by_direction", "By direction", None),
    ):
        groups = [report.get(kind) or {} for report in found]
        if any(groups):
            first = {"by_relation": "Relation", "by_cardinality": "Cardinality", "by_direction": "Asked for"}[kind]
            table = report_table(groups, caption=f"Test, {title.lower()}", kind=first, names=names, labels=of)
            made.append(tag("section", tag("h2", title), table))
    return made


def _beliefs(runs: Sequence[RunFacts]) -> Markup:
    heading = tag("h2", "Whether probabilities hold")
    checked = [run.reliability for run in runs]
    if not any(checked):
        calibrated = any(run.calibrated for run in runs)
        missing = "Its probabilities were not held against test." if calibrated else "The run has no probabilities yet."
        how = tag("code", "dualkg calibrate RUN")
        return tag("section", heading, tag("p", missing, " ", how, " does it.", class_="soft"))
    likely: list[dict[str, Any]] = [(one or {}).get("likely") or {} for one in checked]
    series = [[(b["predicted"], b["observed"], b["noise"]) for b in one.get("bins") or []] for one in likely]
    least = min((one["min_probability"] for one in likely if one), default=0.01)
    said = "What was said against what was found; " + " ".join(
        f"{run.run}: expected calibration error {one['ece']:.3f}."
        for run, one in zip(runs, likely, strict=True)
        if one.get("ece") is not None
    )
    items = [_held(run, letter, one) for (run, letter), one in zip(_lettered(runs), likely, strict=True)]
    drawing = _figure("Of answers given p, is a share of p true?", reliability(series, least=least, said=said))
    return tag("section", heading, tag("div", drawing, tag("div", items), class_="pair"))


def _held(run: RunFacts, letter: str, likely: dict[str, Any]) -> Markup:
    name = tag("h3", tag("i", class_=f"key {letter}"), tag("bdi", shown(run.run)))
    if likely.get("ece") is None:
        return tag("div", name, tag("p", "Not checked on test.", class_="soft"), class_="held")
    rows = [
        ("Calibration error", f"{likely['ece']:.4f}", f"chance alone would leave {likely['noise']:.4f}"),
        ("Brier score", f"{likely['brier']:.4f}", f"of candidates with p ≥ {likely['min_probability']:g}"),
        ("Candidates", f"{likely['num_candidates']:,.0f}", f"{likely['num_true']:,} of them true"),
    ]
    if run.coverage:
        whole = run.coverage["overall"]
        promised, half = percent(run.coverage["target_coverage"]), f"{whole['median_size']:,.10g}"
        size = f"{promised} were promised; half of the sets have at most {half}"
        rows.append(("Answer sets hold", percent(whole["coverage"], 1), size))
    items = [
        tag("div", tag("dt", what), tag("dd", tag("b", value), tag("span", more)), class_="row")
        for what, value, more in rows
    ]
    return tag("div", name, tag("dl", items), class_="held")


def _sparsity(runs: Sequence[RunFacts]) -> Markup | None:
    rows = []
    for run, letter in _lettered(runs):
        if run.sparsity is None:
            continue
        tables = run.sparsity.storage["entity_tables"]
        cells = [
            tag("td", tag("i", class_=f"key {letter}"), tag("bdi", shown(run.run))),
            tag("td", percent(run.sparsity.share, 1), class_="number"),
            *(tag("td", _bytes(tables[kind]["bytes"]), class_="number") for kind in ("dense", "CSR", "CSC")),
        ]
        rows.append(tag("tr", cells))
    if not rows:
        return None
    names = ("Run", "Zeros", "Dense", "CSR", "CSC")
    head = [tag("th", name, scope="col", class_="number" if name != "Run" else None) for name in names]
    table = tag("table", tag("thead", tag("tr", head)), tag("tbody", rows))
    told = "Zeros among the entries of the entity tables, and what the tables take with and without them."
    return tag("section", tag("h2", "Sparsity"), tag("p", told, class_="soft"), tag("div", table, class_="scroll"))


def _bytes(number: float) -> str:
    return f"{number / 2**20:,.1f} MiB" if number >= 2**20 else f"{number / 2**10:,.0f} KiB"


def _recipe(runs: Sequence[RunFacts]) -> Markup:
    files = [
        tag(
            "details",
            tag("summary", "recipe.toml of ", tag("bdi", shown(run.run))),
            tag("pre", tag("code", run.recipe_toml)),
        )
        for run in runs
    ]
    return tag("section", tag("h2", "Recipe"), choices_shown(runs), files)
