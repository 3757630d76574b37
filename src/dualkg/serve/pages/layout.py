"""The files that pages load: styles and scripts, all of them in this package."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from html import escape
from importlib import resources
from typing import Any
from urllib.parse import quote, urlencode

from fastapi import APIRouter, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException

from dualkg.errors import DualkgError
from dualkg.serve.middleware import Refusal, problem, refusal_of
from dualkg.serve.routes.queries import Asked, router
from dualkg.serve.schemas import Thing
from dualkg.serve.state import service_of

routes = router("pages")
KINDS = {
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml; charset=utf-8",
}


@dataclass(frozen=True)
class StaticFile:
    """A file as it is sent."""

    body: bytes
    kind: str
    etag: str


@cache
def static_files() -> dict[str, StaticFile]:
    """By name. A request can only name one of these, so that no address is a path."""
    found = {}
    for file in resources.files("dualkg.serve").joinpath("static").iterdir():
        kind = KINDS.get(file.name.rpartition(".")[2])
        if kind is not None:
            body = file.read_bytes()
            found[file.name] = StaticFile(body, kind, f'"{hashlib.sha256(body).hexdigest()[:20]}"')
    return found


@routes.api_route("/static/{name}", methods=["GET", "HEAD"], include_in_schema=False)
async def static_file(request: Request, name: str) -> Response:
    """Kept by browsers, who ask each time whether it is still the same."""
    file = static_files().get(name)
    if file is None:
        raise HTTPException(404)
    headers = {"ETag": file.etag, "Cache-Control": "no-cache"}
    given = [tag.strip().removeprefix("W/") for tag in request.headers.get("if-none-match", "").split(",")]
    if file.etag in given or "*" in given:
        return Response(status_code=304, headers=headers)
    return Response(file.body, media_type=file.kind, headers=headers)


VOID = frozenset({"br", "hr", "img", "input", "link", "meta"})
# Letters that nobody sees, or that HTML would change, are shown by others.
PICTURES = dict.fromkeys((*range(32), 127), "�") | {ord("\t"): "⇥", ord("\n"): "↵", ord("\r"): "↵"}
LONGEST_SHOWN = 160  # letters of a name within a list


class Markup(str):
    """Text that is HTML already."""

    __slots__ = ()


Child = str | int | None | Iterable["Child"]
Attribute = str | int | float | bool | None


def tag(name: str, /, *children: Child, **attributes: Attribute) -> Markup:
    """An element. `class_` and `data_name` are written `class` and `data-name`; what is None or False is left out.

    There are neither scripts nor styles in what it makes: the pages' policy would not run them.
    """
    written = "".join(_attribute(key, value) for key, value in attributes.items())
    if name in VOID:
        return Markup(f"<{name}{written}>")
    return Markup(f"<{name}{written}>{joined(children)}</{name}>")


def joined(children: Child) -> Markup:
    """Children one after another, those escaped that are mere text."""
    if children is None:
        return Markup("")
    if isinstance(children, Markup):
        return children
    if isinstance(children, str | int):
        return Markup(escape(str(children)))
    return Markup("".join(joined(child) for child in children))


def shown(name: str) -> str:
    """A name as people can see it: neither empty, nor with letters that have no shape."""
    seen = name.replace("\r\n", "\n").translate(PICTURES)
    return seen if seen.strip() else f"“{seen}”"


def shortened(name: str) -> str:
    """The same within a list; all of it is on the entity's page."""
    seen = shown(name)
    return seen if len(seen) <= LONGEST_SHOWN else f"{seen[: LONGEST_SHOWN - 1].rstrip()}…"


def _attribute(key: str, value: Attribute) -> str:
    if value is None or value is False:
        return ""
    key = key.rstrip("_").replace("_", "-")
    if value is True:
        return f" {key}"
    # A browser reads a carriage return as a line end, unless it is spelled out.
    written = escape(str(value)).replace("\r", "&#13;")
    return f' {key}="{written}"'


def address(path: str, context: Asked, **choices: str | int | float | None) -> str:
    """A page with some choices; the run is named where it is not the one that is asked anyway."""
    given = {key: value for key, value in choices.items() if value is not None}
    if context.run.name != context.service.runs.names[0]:
        given["run"] = context.run.name
    return f"{path}?{urlencode(given)}" if given else path


def entity_address(name: str, context: Asked) -> str:
    """`/entity/NAME`; names that an address would change or mistake are asked for as `/entity?name=NAME`.

    Browsers take `.` and `..` for folders, and what ends in .json is another page.
    """
    if name in ("", ".", "..") or name.endswith(".json"):
        return address("/entity", context, name=name)
    return address(f"/entity/{quote(name, safe='')}", context)


def entity_link(entity: Thing, context: Asked, **attributes: Attribute) -> Markup:
    """An entity by its label, as a link to its page."""
    whole = shown(entity.label) if len(entity.label) > LONGEST_SHOWN else None
    attributes = {"class_": "name", "dir": "auto", "title": whole, **attributes}
    return tag("a", shortened(entity.label), href=entity_address(entity.name, context), **attributes)


def said(thing: Thing) -> Markup:
    """A label as text of its own direction, without a link."""
    return tag("bdi", shortened(thing.label), class_="name")


def relation_said(relation: Thing) -> Markup:
    """A relation as people say it: `spoken_language` is spoken language."""
    return tag("bdi", spoken(relation.label), class_="relation")


def spoken(label: str) -> str:
    return shortened(label.strip("_").replace("_", " ") or label)


PAGES = {"Ask": "/", "Map": "/map", "New facts": "/facts", "Run": "/run"}
TITLES = {404: "Not found", 500: "The server failed"}  # of refusals
MARK = Markup(
    '<svg class="mark" viewBox="0 0 32 20" aria-hidden="true" focusable="false">'
    '<circle cx="10" cy="10" r="8.5"/><circle cx="22" cy="10" r="8.5"/></svg>'
)


def page(
    request: Request,
    context: Asked,
    *children: Child,
    title: str,
    here: str = "",
    scripts: Sequence[str] = (),
    styles: Sequence[str] = (),
    json: str | None = None,
    wide: bool = False,
    status: int = 200,
) -> HTMLResponse:
    """A page whose main part is `children`.

    `here` is its name in the navigation; `scripts` and `styles` are names of static files, the former ES modules;
    `json` is the address of the same for programs; a `wide` page uses the whole window.
    """
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("title", f"{title} · dualkg"),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"),
        tag("link", rel="icon", href="/static/icon.svg", type="image/svg+xml"),
        [tag("link", rel="stylesheet", href=f"/static/{name}") for name in ("style.css", *styles)],
        tag("script", src="/static/theme.js"),
        [tag("script", src=f"/static/{name}", type="module") for name in ("common.js", *scripts)],
        tag("link", rel="alternate", type="application/json", href=json) if json else None,
    )
    body = tag(
        "body",
        tag("a", "Skip to the content", class_="skip", href="#main"),
        _header(request, context, here),
        tag("main", children, id="main", tabindex=-1, class_="wide" if wide else None),
        _footer(context, json),
        data_run=context.run.name,
        data_first_run=context.service.runs.names[0],
    )
    html = tag("html", head, body, lang="en")
    return HTMLResponse(f"<!doctype html>{html}", status_code=status)


def _header(request: Request, context: Asked, here: str) -> Markup:
    links = [
        tag("li", tag("a", name, href=address(path, context), aria_current="page" if name == here else None))
        for name, path in PAGES.items()
    ]
    return tag(
        "header",
        tag("a", MARK, tag("span", "dualkg"), class_="brand", href=address("/", context), aria_label="dualkg, to Ask"),
        tag("nav", tag("ul", links), aria_label="Pages"),
        tag("div", _run_chooser(request, context), _theme_button(), class_="tools"),
        class_="top",
    )


def _run_chooser(request: Request, context: Asked) -> Markup | None:
    """Where several runs are served: the same page of another."""
    names = context.service.runs.names
    if len(names) < 2:
        return None
    kept = [(key, value) for key, value in request.query_params.multi_items() if key != "run"]
    return tag(
        "form",
        [tag("input", type="hidden", name=key, value=value) for key, value in kept],
        tag("label", "Run", for_="run"),
        tag(
            "select",
            [tag("option", name, value=name, selected=name == context.run.name) for name in names],
            id="run",
            name="run",
            data_runs=True,
        ),
        tag("noscript", tag("button", "Show")),
        class_="runs",
    )


def _theme_button() -> Markup:
    return tag("button", "Dark", type="button", class_="plain theme", data_theme_toggle=True, hidden=True)


def _footer(context: Asked, json: str | None) -> Markup:
    graph, run = context.run.run.graph, context.run.run
    about = f"{type(run.model.embedding).__name__} on {graph.name}"
    return tag(
        "footer",
        tag("p", tag("bdi", context.run.name), f" · {about} · ", f"{len(graph.entities):,} entities"),
        tag(
            "p",
            [tag("a", "This page as JSON", href=json), " · "] if json else None,
            tag("a", "What programs can ask", href="/docs"),
        ),
        class_="bottom",
    )


class PageRoute(APIRoute):
    """A route whose refusals are pages too, with the sentence that the command line would give."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handler = super().get_route_handler()

        async def answer(request: Request) -> Response:
            try:
                return await handler(request)
            except (DualkgError, RequestValidationError) as error:
                return await refusal_page(request, refusal_of(error, request.method))

        return answer


def page_router() -> APIRouter:
    """For routes that answer with pages; those for `.json` belong to a `router` of their own."""
    return APIRouter(route_class=PageRoute, include_in_schema=False)


async def told(request: Request, refusal: Refusal) -> Response:
    """A refusal as a page where a browser asks for one, else as JSON."""
    if is_for_people(request):
        return await refusal_page(request, refusal)
    return problem(refusal.status, refusal.sentence, near=refusal.near, headers=refusal.headers)


def is_for_people(request: Request) -> bool:
    """Browsers ask for HTML where a person opens an address; under /api, and as .json, programs ask."""
    path = request.url.path
    of_programs = path == "/api" or path.startswith("/api/") or path.endswith(".json")
    return not of_programs and "text/html" in request.headers.get("accept", "").lower()


async def refusal_page(request: Request, refusal: Refusal) -> HTMLResponse:
    """What could not be answered, as a page of the run that is asked anyway."""
    service = await service_of(request)
    context = Asked(service, service.runs.get(None))
    names = [tag("li", tag("bdi", shown(name))) for name in refusal.near]
    title = TITLES.get(refusal.status, "That cannot be answered")
    main = (
        tag("h1", title),
        tag("p", refusal.sentence, class_="lead"),
        tag("ul", names, aria_label="Names alike") if names else None,
    )
    made = page(request, context, main, title=title, status=refusal.status)
    made.headers.update(refusal.headers)
    return made


def percent(probability: float) -> str:
    """0.05312 is 5.3 %."""
    if probability > 0.999:
        return ">99.9 %"
    if probability < 0.001:
        return "<0.1 %"
    return f"{100 * probability:.{1 if probability < 0.0995 or probability >= 0.995 else 0}f} %"


def bar(share: float, *, known: bool = False) -> Markup:
    """A share as a bar; the number is written beside it."""
    rect = tag("rect", width=f"{100 * min(1.0, max(0.0, share)):.1f}%", height="100%")
    return tag("svg", rect, class_="bar known" if known else "bar", aria_hidden="true", focusable="false")


def why_link(triple: tuple[str, str, str], context: Asked, *, about: str) -> Markup:
    """Opens the reasons in place; without scripts, on a page of their own."""
    head, relation, tail = triple
    where = address("/why", context, head=head, relation=relation, tail=tail)
    hidden = tag("span", f" {about}", class_="visually-hidden")
    return tag("a", "Why?", hidden, href=where, class_="button plain", data_why=True)
