"""The map: all entities in the plane, coloured by the answers of a question."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Literal

from fastapi import Query, Request, Response

from dualkg.serve.limits import LONGEST_NAME
from dualkg.serve.pages.layout import Child, Markup, address, page, page_router, shown, spoken, tag
from dualkg.serve.routes.queries import Asked, AskedRun, router
from dualkg.serve.routes.runs import entity_map
from dualkg.serve.schemas import Thing

routes = page_router()
programs = router("pages")
MOST_RELATIONS = 2000  # that are sent with the page
Name = Annotated[str, Query(max_length=LONGEST_NAME)]
HELP = "All entities. Arrows move the map, plus and minus zoom, 0 shows all of it. The list has the same answers."


@routes.get("/map")
async def map_page(
    request: Request,
    context: AskedRun,
    entity: Name = "",
    relation: Name = "",
    find: Literal["tail", "head"] = "tail",
) -> Response:
    """The frame; a script draws the map, since it moves."""
    service, run = context
    graph = run.run.graph
    about = Thing.of(graph.entities, await service.entity(run, entity)) if entity else None
    by = Thing.of(graph.relations, await service.relation(run, relation)) if relation else None
    number = f"{len(run.entities):,} entities"
    heading = tag(
        "div",
        tag("h1", "Map"),
        tag("p", f"{number}, where their vectors put them. Ask, and the answers light up.", class_="lead"),
    )
    return page(
        request,
        context,
        tag(
            "div", tag("div", heading, _form(context, about, by, find), class_="head"), _map(), _aside(), class_="atlas"
        ),
        title="Map",
        here="Map",
        scripts=["map.js"],
        styles=["map.css"],
        json=address("/map.json", context),
        wide=True,
    )


@programs.get("/map.json", include_in_schema=False)
async def map_as_json(context: AskedRun) -> Response:
    return await entity_map(context)


routes.include_router(programs)


def _form(context: Asked, entity: Thing | None, relation: Thing | None, find: str) -> Markup:
    relations = context.run.relations
    things = [Thing.of(relations, id) for id in range(min(len(relations), MOST_RELATIONS))]
    finding = [
        tag("label", tag("input", type="radio", name="find", value=part, checked=part == find), f"{part}s")
        for part in ("tail", "head")
    ]
    return tag(
        "form",
        None
        if context.run.name == context.service.runs.names[0]
        else tag("input", type="hidden", name="run", value=context.run.name),
        _slot("entity", entity, shown),
        _slot("relation", relation, spoken, list="relations"),
        tag("fieldset", tag("legend", "Which answers", class_="visually-hidden"), finding, class_="choice"),
        tag("button", "Colour"),
        tag(
            "datalist",
            [tag("option", value=one.name, label=spoken(one.label)) for one in things],
            id="relations",
        ),
        action="/map",
        autocomplete="off",
        role="search",
        aria_label="A question to colour the map by",
        class_="asking",
        data_asking=True,
    )


def _slot(name: str, thing: Thing | None, said: Callable[[str], str], **more: str) -> Markup:
    field = tag(
        "input",
        id=name,
        name=name,
        value=said(thing.label) if thing else None,
        placeholder=f"{name} …",
        dir="auto",
        data_name=thing.name if thing else None,
        **more,
    )
    return tag("div", tag("label", name.capitalize(), for_=name), field, class_=f"slot for-{name}")


def _map() -> Markup:
    def button(sign: Child, said: str, does: str, *, hidden: bool = False) -> Markup:
        told = {"aria_label": said, "title": said, "data_map_does": does}
        return tag("button", sign, type="button", class_="plain", hidden=hidden, **told)

    return tag(
        "section",
        tag("canvas", tabindex=0, role="application", aria_roledescription="map", aria_label=HELP, data_canvas=True),
        tag("p", "Loading the map …", class_="veil", role="status", data_veil=True),
        tag("div", class_="tip", hidden=True, data_tip=True),
        tag(
            "div",
            button("+", "Zoom in", "in"),
            button("−", "Zoom out", "out"),
            button("All", "Show all of it", "all"),
            button("Answers", "Show the answers", "answers", hidden=True),
            class_="zooms",
        ),
        tag("noscript", tag("p", "The map is drawn by a script.", class_="problem")),
        class_="plane",
        aria_label="The map",
        data_plane=True,
    )


def _aside() -> Markup:
    legend = [
        tag("li", tag("i", class_=f"dot {kind}"), f" {said}")
        for kind, said in (
            ("asked", "the question"),
            ("believed", "an answer, stronger where likelier"),
            ("known", "known"),
        )
    ]
    return tag(
        "section",
        tag("ul", legend, class_="legend list small soft", hidden=True, data_legend=True),
        tag("p", role="status", class_="soft", data_said=True),
        tag("details", tag("summary", "Known answers"), tag("ol", class_="found list"), hidden=True, data_folded=True),
        tag("ol", class_="found list", data_found=True),
        aria_label="The coloured answers",
        class_="beside",
    )
