"""New facts: what the model would add, for a curator to accept or reject."""

from __future__ import annotations

from typing import Annotated

from fastapi import Query, Request, Response

from dualkg.serve.limits import LONGEST_NAME
from dualkg.serve.pages.layout import Markup, address, page, page_router, shown, spoken, tag
from dualkg.serve.routes.decisions import decisions
from dualkg.serve.routes.queries import Asked, AskedRun
from dualkg.serve.schemas import Thing

routes = page_router()
LENGTHS = (50, 100, 500, 2000)
SHOWN = {"all": "All", "open": "Undecided", "accepted": "Accepted", "rejected": "Rejected"}
KEYS = {
    ("j", "k"): "next, previous",
    ("a",): "accept",
    ("r",): "reject",
    ("u",): "take back the last",
    ("Enter",): "why",
}


@routes.get("/facts")
async def facts(
    request: Request,
    context: AskedRun,
    relation: Annotated[str, Query(max_length=LONGEST_NAME)] = "",
    min_probability: Annotated[float, Query(ge=0, le=1)] = 0.0,
    top: Annotated[int, Query(ge=1, le=LENGTHS[-1])] = LENGTHS[1],
) -> Response:
    """The frame of the list; a script reads the list itself, as it is found."""
    service, run = context
    chosen = await service.relation(run, relation) if relation else None
    made = await decisions(context)
    counts = tag(
        "p",
        tag("span", tag("b", f"{made.accepted:,}", data_count="accepted"), " accepted"),
        tag("span", tag("b", f"{made.rejected:,}", data_count="rejected"), " rejected"),
        tag("a", "Accepted ones as TSV", href=address("/facts.tsv", context), class_="button plain", download=True),
        class_="tally",
    )
    graph = tag("bdi", shown(run.run.graph.name))
    beginning = tag(
        "div",
        tag("h1", "New facts"),
        tag("p", "What the model would add to ", graph, ", the most plausible first. ", _lead(context), class_="lead"),
        class_="beginning",
    )
    listed = tag(
        "section",
        tag("div", _status(), _shown_choice(), class_="above"),
        tag("ol", class_="facts", data_facts=True, aria_label="New facts"),
        tag("noscript", tag("p", "The list needs scripts. Programs find it as JSON, below.", class_="problem")),
        aria_label="The list",
        data_list=True,
        data_can_decide=made.can_decide,
        data_relation=None if chosen is None else run.relations[chosen],
        data_min_probability=min_probability,
        data_top=top,
    )
    choices = {"relation": relation or None, "min_probability": min_probability or None, "top": top}
    return page(
        request,
        context,
        tag("div", beginning, counts, class_="between"),
        _form(context, chosen, min_probability, top),
        listed,
        _keys() if made.can_decide else None,
        title="New facts",
        here="New facts",
        scripts=["facts.js"],
        styles=["facts.css"],
        json=address("/facts.json", context, **choices),
    )


def _lead(context: Asked) -> str:
    if context.service.read_only:
        return "This server takes no decisions: it was started with --read-only."
    if context.run.run.folder is None:
        return "This run is in no folder, so decisions cannot be kept."
    return "Accept what is right: it is kept beside the run."


def _status() -> Markup:
    bar = tag("progress", max=1, value=0, hidden=True, data_progress=True, aria_label="How much is searched")
    return tag("div", tag("p", role="status", data_status=True), bar)


def _shown_choice() -> Markup:
    """Which of those in the list to see."""
    buttons = [
        tag("label", tag("input", type="radio", name="show", value=key, checked=key == "all"), name)
        for key, name in SHOWN.items()
    ]
    return tag("fieldset", tag("legend", "Show", class_="visually-hidden"), buttons, class_="choice", data_show=True)


def _form(context: Asked, chosen: int | None, least: float, top: int) -> Markup:
    """Works without scripts: its choices are in the address."""
    relations = context.run.relations
    things = sorted((Thing.of(relations, id) for id in range(len(relations))), key=lambda one: spoken(one.label))
    options = [tag("option", spoken(one.label), value=one.name, selected=one.id == chosen) for one in things]
    calibrated = context.run.predictor.calibration is not None
    lengths = sorted({*LENGTHS, top})
    probability = tag(
        "input",
        id="least",
        type="range",
        name="min_probability",
        min=0,
        max=0.95,
        step=0.05,
        value=least,
        disabled=not calibrated,
        data_least=True,
    )
    hint = None if calibrated else tag("span", "after dualkg calibrate", class_="small soft")
    is_first = context.run.name == context.service.runs.names[0]
    return tag(
        "form",
        None if is_first else tag("input", type="hidden", name="run", value=context.run.name),
        tag(
            "div",
            tag("label", "Relation", for_="relation"),
            tag("select", tag("option", "All relations", value=""), options, id="relation", name="relation"),
        ),
        tag(
            "div",
            tag("label", "At least ", tag("output", f"{100 * least:.0f} %", data_said=True), for_="least"),
            hint or probability,
        ),
        tag(
            "div",
            tag("label", "How many", for_="top"),
            tag(
                "select",
                [tag("option", f"{number:,}", value=number, selected=number == top) for number in lengths],
                id="top",
                name="top",
            ),
        ),
        tag("button", "Find"),
        action="/facts",
        class_="sieve",
        role="search",
        aria_label="Which new facts",
        data_sieve=True,
    )


def _keys() -> Markup:
    items = [
        tag("span", [[tag("kbd", key), " "] for key in keys], meaning, class_="key") for keys, meaning in KEYS.items()
    ]
    return tag("p", items, class_="keys small soft", aria_label="Keys")
