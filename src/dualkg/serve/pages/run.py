"""The page of a run: how it was made, how it learned, how good it is; and two of them side by side."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

from fastapi import Query, Request, Response

from dualkg.errors import RequestError
from dualkg.serve.limits import LONGEST_NAME
from dualkg.serve.pages.curves import LETTERS, curves, reliability
from dualkg.serve.pages.layout import page, page_router
from dualkg.serve.pages.links import address
from dualkg.serve.pages.markup import Child, Markup, shown, tag
from dualkg.serve.pages.reports import choices_shown, headline, percent, questions_table, report_table, written
from dualkg.serve.routes.choices import Asked, AskedRun, router
from dualkg.serve.routes.runs import compare, run_facts
from dualkg.serve.shapes.run_page import RunPage
from dualkg.serve.shapes.runs import RunFacts

routes = page_router()
programs = router("pages")
MOST_QUESTIONS = 20
Other = Annotated[str | None, Query(alias="with", max_length=LONGEST_NAME, description="Another run.")]


@routes.get("/run")
async def run_page(request: Request, whom: AskedRun, other: Other = None) -> Response:
    """One run; beside it another, where two are served or one was named."""
    found = await _found(whom, other)
    runs, comparison = found.runs, found.comparison
    titles = [tag("bdi", tag("i", class_=f"key {letter}"), shown(one.run)) for one, letter in _lettered(runs)]
    about = [tag("p", _about(one), class_="lead") for one in runs[:1]] if len(runs) == 1 else None
    sentence = comparison.sentence if comparison else None
    beside = runs[1].run if len(runs) == 2 else ""
    return page(
        request,
        whom,
        tag(
            "h1",
            titles[0],
            [tag("span", "and", class_="soft"), titles[1]] if len(titles) == 2 else None,
            class_="titles",
        ),
        about,
        tag("p", sentence, class_="lead") if sentence else None,
        tag("p", found.problem, class_="problem", role="note") if found.problem else None,
        _chooser(whom, beside),
        tag("section", tag("h2", "On test"), headline(runs, comparison), _protocol(runs)),
        _learning(runs),
        _between(whom, found),
        _reports(runs),
        _beliefs(runs),
        _sparsity(runs),
        _recipe(runs),
        title=" and ".join(one.run for one in runs),
        here="Run",
        scripts=["run.js"],
        styles=["run.css"],
        json=address("/run.json", whom, **{"with": beside if len(whom.service.runs) > 1 else None}),
    )


@programs.get("/run.json", include_in_schema=False)
async def run_as_json(whom: AskedRun, other: Other = None) -> RunPage:
    return await _found(whom, other)


routes.include_router(programs)


async def _found(whom: Asked, other: str | None) -> RunPage:
    """Where two runs are served, the other is beside it unless `with=` is empty."""
    served = whom.service.runs
    if other is None and len(served) == 2:
        other = next(name for name in served.names if name != whom.run.name)
    if not other or other == whom.run.name:
        return RunPage(runs=[await run_facts(whom)])
    second = Asked(whom.service, served.get(other))
    runs = [await run_facts(whom), await run_facts(second)]
    try:
        comparison = await compare(whom.service, whom.run.name, other, MOST_QUESTIONS)
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


def _chooser(whom: Asked, beside: str) -> Markup | None:
    """Which other run to see beside this one."""
    others = [name for name in whom.service.runs.names if name != whom.run.name]
    if not others:
        return None
    links = [
        tag(
            "a",
            shown(name) if name else "alone",
            href=address("/run", whom, **{"with": name}),
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


def _between(whom: Asked, found: RunPage) -> Markup | None:
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
    return tag("section", heading, tag("p", told), strip, questions_table(whom, comparison))


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
    series = [[(b["predicted"], b["found"], b["chance"]) for b in one.get("bins") or []] for one in likely]
    least = min((one["least_probability"] for one in likely if one), default=0.01)
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
        ("Calibration error", f"{likely['ece']:.4f}", f"chance alone would leave {likely['chance']:.4f}"),
        ("Brier score", f"{likely['brier']:.4f}", f"of candidates with p ≥ {likely['least_probability']:g}"),
        ("Candidates", f"{likely['num_candidates']:,.0f}", f"{likely['num_true']:,} of them true"),
    ]
    if run.coverage:
        whole = run.coverage["whole"]
        promised, half = percent(run.coverage["wanted"]), f"{whole['median_size']:,.10g}"
        size = f"{promised} were promised; half of the sets have at most {half}"
        rows.append(("Answer sets hold", percent(whole["share"], 1), size))
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
