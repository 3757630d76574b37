"""The frame of every page: header, navigation, the chooser of runs, footer; and refusals as pages."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse
from fastapi.routing import APIRoute

from dualkg.errors import DualkgError
from dualkg.serve.guards.replies import problem
from dualkg.serve.guards.sentences import Refusal, refusal_of
from dualkg.serve.pages.links import address
from dualkg.serve.pages.markup import Child, Markup, shown, tag
from dualkg.serve.routes.choices import Asked
from dualkg.serve.service import service_of

PAGES = {"Ask": "/", "Map": "/map", "New facts": "/facts", "Run": "/run"}
TITLES = {404: "Not found", 500: "The server failed"}  # of refusals
MARK = Markup(
    '<svg class="mark" viewBox="0 0 32 20" aria-hidden="true" focusable="false">'
    '<circle cx="10" cy="10" r="8.5"/><circle cx="22" cy="10" r="8.5"/></svg>'
)


def page(
    request: Request,
    whom: Asked,
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
        _header(request, whom, here),
        tag("main", children, id="main", tabindex=-1, class_="wide" if wide else None),
        _footer(whom, json),
        data_run=whom.run.name,
        data_first_run=whom.service.runs.names[0],
    )
    html = tag("html", head, body, lang="en")
    return HTMLResponse(f"<!doctype html>{html}", status_code=status)


def _header(request: Request, whom: Asked, here: str) -> Markup:
    links = [
        tag("li", tag("a", name, href=address(path, whom), aria_current="page" if name == here else None))
        for name, path in PAGES.items()
    ]
    return tag(
        "header",
        tag("a", MARK, tag("span", "dualkg"), class_="brand", href=address("/", whom), aria_label="dualkg, to Ask"),
        tag("nav", tag("ul", links), aria_label="Pages"),
        tag("div", _run_chooser(request, whom), _theme_button(), class_="tools"),
        class_="top",
    )


def _run_chooser(request: Request, whom: Asked) -> Markup | None:
    """Where several runs are served: the same page of another."""
    names = whom.service.runs.names
    if len(names) < 2:
        return None
    kept = [(key, value) for key, value in request.query_params.multi_items() if key != "run"]
    return tag(
        "form",
        [tag("input", type="hidden", name=key, value=value) for key, value in kept],
        tag("label", "Run", for_="run"),
        tag(
            "select",
            [tag("option", name, value=name, selected=name == whom.run.name) for name in names],
            id="run",
            name="run",
            data_runs=True,
        ),
        tag("noscript", tag("button", "Show")),
        class_="runs",
    )


def _theme_button() -> Markup:
    return tag("button", "Dark", type="button", class_="plain theme", data_theme_toggle=True, hidden=True)


def _footer(whom: Asked, json: str | None) -> Markup:
    graph, run = whom.run.run.graph, whom.run.run
    about = f"{type(run.model.embedding).__name__} on {graph.name}"
    return tag(
        "footer",
        tag("p", tag("bdi", whom.run.name), f" · {about} · ", f"{len(graph.entities):,} entities"),
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
    whom = Asked(service, service.runs.get(None))
    names = [tag("li", tag("bdi", shown(name))) for name in refusal.near]
    title = TITLES.get(refusal.status, "That cannot be answered")
    main = (
        tag("h1", title),
        tag("p", refusal.sentence, class_="lead"),
        tag("ul", names, aria_label="Names alike") if names else None,
    )
    made = page(request, whom, main, title=title, status=refusal.status)
    made.headers.update(refusal.headers)
    return made
