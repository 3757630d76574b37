"""Tables of the page of a run: metrics, relations, cardinalities, choices, questions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dualkg.serve.pages.curves import LETTERS
from dualkg.serve.pages.links import address, entity_link, relation_said, spoken
from dualkg.serve.pages.markup import Child, Markup, shown, tag
from dualkg.serve.routes.choices import Asked
from dualkg.serve.shapes.runs import Comparison, DifferingQuestion, RunFacts

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
        items.append(tag("div", tag("dt", name), values, _between(metric, comparison)))
    return tag("dl", items, class_="headline")


def _between(metric: str, comparison: Comparison | None) -> Markup | None:
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


def questions_table(whom: Asked, comparison: Comparison) -> Markup:
    """The questions on which two runs differ most, each asked again by a click."""
    rows = [tag("tr", _question(whom, one)) for one in comparison.questions]
    sides = [
        _column(f"Rank {shown(name)}", number=True, letter=letter)
        for letter, name in zip(LETTERS, (comparison.a, comparison.b), strict=True)
    ]
    head = tag("thead", tag("tr", _column("Question"), _column("Answer"), sides))
    return tag(
        "div", tag("table", head, tag("tbody", rows), data_sortable=True, class_="asked"), class_="scroll", tabindex=0
    )


def _question(whom: Asked, one: DifferingQuestion) -> list[Markup]:
    given = one.head if one.asked == "tail" else one.tail
    answer = one.tail if one.asked == "tail" else one.head
    said, gap = tag("bdi", shown(given.label), class_="name"), tag("span", "?", class_="gap")
    parts = (said, " ", relation_said(one.relation), " ", gap)
    kept = {"head": given.name} if one.asked == "tail" else {"tail": given.name}
    where = address("/", whom, find=one.asked, relation=one.relation.name, **kept)
    question = tag("a", parts if one.asked == "tail" else parts[::-1], href=where)
    ranks = [_cell(rank, f"{rank:,.10g}") for rank in (one.rank_a, one.rank_b)]
    return [tag("td", question, data_value=given.label), tag("td", entity_link(answer, whom)), *ranks]
