"""Pages: Jinja2 templates with autoescape, their filters and addresses, errors as pages, and the
query of a page as text to copy.
"""

import json
import re
import shlex
from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple
from urllib.parse import quote, urlencode

from fastapi import APIRouter, Request, Response
from fastapi.responses import HTMLResponse
from fastapi.routing import APIRoute
from jinja2 import Environment, PackageLoader, StrictUndefined
from jinja2.ext import Extension
from markupsafe import Markup, escape

from dualkg import errors
from dualkg.inference.explanation import relation_words, share_text
from dualkg.serve.errors import RESPONSES, ErrorReply
from dualkg.serve.service import RequestContext, context_of, service_of

Options = Mapping[str, str | int | float | bool | None]
MAX_SHORT = 160  # characters of a name within a list
ERROR_TITLES = {404: "Not found", 500: "The server failed"}


def visible(name: str) -> str:
    """A name without invisible characters, and in quotes if it is blank."""
    text = errors.visible(name)
    return text if text.strip() else f"“{text}”"


def short(name: str, length: int = MAX_SHORT) -> str:
    """The same for a list, at most `length` characters."""
    text = visible(name)
    return text if len(text) <= length else f"{text[: length - 1].rstrip()}…"


def relation_text(label: str, length: int = MAX_SHORT) -> str:
    """A relation in words: `spoken_language` is displayed as "spoken language"."""
    return short(relation_words(label), length)


def percent(probability: float) -> str:
    """0.05312 is displayed as 5.3 %."""
    if probability > 0.999:
        return ">99.9 %"
    if probability < 0.001:
        return "<0.1 %"
    rounds_to_two_digits = 0.0995 <= probability < 0.995
    num_decimals = 0 if rounds_to_two_digits else 1
    return f"{100 * probability:.{num_decimals}f} %"


def frequency(share: float) -> str:
    """A counted share; unlike a probability, it may be 0 % or 100 %."""
    return f"{share:.0%}".replace("%", " %") if share in (0.0, 1.0) else percent(share)


def minus(text: str) -> str:
    """A formatted number with a minus sign in place of a hyphen."""
    return text.replace("-", "−")


def decimals(value: float, format: str) -> str:
    return minus(f"{value:{format}}")


def code_spans(text: str) -> Markup:
    """A text whose parts between backticks are code."""
    parts = [escape(part) for part in text.split("`")]
    marked = [
        Markup("<code>{}</code>").format(part) if n % 2 else part for n, part in enumerate(parts)
    ]
    return Markup("").join(marked)


def sentence(error: errors.DualkgError | str) -> Markup:
    """The sentence of an error, in which options are marked by backticks."""
    return code_spans(visible(str(error)))


class LineBreaks(Extension):
    """Drops line breaks next to a tag, so that the layout of a template adds no space to a page."""

    def preprocess(self, source: str, name: str | None, filename: str | None = None) -> str:
        source = re.sub(r"(?<=[>}])\s*\n\s*|\s*\n\s*(?=[<{])", "", source.strip())
        return re.sub(r"\s*\n\s*", " ", source)


TEMPLATES = Environment(
    loader=PackageLoader("dualkg.serve"),
    extensions=[LineBreaks],
    autoescape=True,
    undefined=StrictUndefined,
    auto_reload=False,  # an upgrade must not change the pages of a server that runs
)
TEMPLATES.filters |= {
    "visible": visible,
    "short": short,
    "relation_text": relation_text,
    "percent": percent,
    "frequency": frequency,
    "share": share_text,
    "thousands": "{:,}".format,
    "decimals": decimals,
    "code_spans": code_spans,
    "sentence": sentence,
}


def page_url(context: RequestContext, path: str, **params: Any) -> str:
    """The address of a page; the run is added unless it is the default."""
    query = {name: value for name, value in params.items() if value is not None}
    if not context.is_default_run:
        query["run"] = context.run.name
    return f"{path}?{urlencode(query)}" if query else path


def entity_url(context: RequestContext, name: str) -> str:
    """`/entity/NAME`, or `/entity?name=NAME` for names that would be read as something else."""
    is_folder = name in ("", ".", "..")  # to a browser
    if is_folder or name.endswith(".json"):
        return page_url(context, "/entity", name=name)
    return page_url(context, f"/entity/{quote(name, safe='')}")


def relation_url(context: RequestContext, name: str) -> str:
    """`/relation/NAME`, or `/relation?name=NAME`, as for entities."""
    is_folder = name in ("", ".", "..")
    if is_folder or name.endswith(".json"):
        return page_url(context, "/relation", name=name)
    return page_url(context, f"/relation/{quote(name, safe='')}")


# The fit of a type, the worst last.
FITS: dict[str, str] = {"known": "seen in train", "likely": "likely", "unusual": "unusual"}


def facet_values(
    context: RequestContext, fact: Any, *, decided_by: str | None = None
) -> dict[str, list[str]]:
    """The values of each facet of a fact, by which lists are filtered."""
    values = {"Relation": [relation_text(fact.relation.label)]}
    run = context.run
    if run.types is not None:
        for facet, item in (("Type of head", fact.head), ("Type of tail", fact.tail)):
            values[facet] = [short(name) for name in run.types_of(item.id)] or ["no type"]
    fits = {getattr(fact, name, None) for name in ("head_type", "tail_type")}
    if None not in fits:
        values["Types"] = [text for fit, text in FITS.items() if fit in fits][-1:]
    if decided_by:
        values["Decided by"] = [short(decided_by)]
    return values


def facets(context: RequestContext, fact: Any, *, decided_by: str | None = None) -> str:
    """The same as JSON, for a script."""
    return json.dumps(facet_values(context, fact, decided_by=decided_by), ensure_ascii=False)


def fill(context: RequestContext, template: str, **values: Any) -> Markup:
    """A filled template."""
    html = TEMPLATES.get_template(template).render(
        context=context,
        url=partial(page_url, context),
        entity_url=partial(entity_url, context),
        relation_url=partial(relation_url, context),
        facets=partial(facets, context),
        **values,
    )
    # Browsers would turn carriage returns into line feeds.
    return Markup(html.replace("\r", "&#13;"))


def page(
    context: RequestContext, template: str, *, json: str = "", status: int = 200, **values: Any
) -> HTMLResponse:
    """A page; `json` is the address of the same content as JSON."""
    return HTMLResponse(fill(context, template, json=json, **values), status_code=status)


class PageRoute(APIRoute):
    """A route whose errors are pages too."""


def page_router() -> APIRouter:
    return APIRouter(route_class=PageRoute, include_in_schema=False)


def api_router(tag: str) -> APIRouter:
    return APIRouter(tags=[tag], responses=RESPONSES)


async def error_response(request: Request, reply: ErrorReply) -> Response:
    """An error as a page for pages and browsers, else as JSON.

    All addresses below /api and those that end in .json are JSON.
    """
    path = request.url.path
    accepted = request.headers.get("accept", "").lower()
    is_api = path == "/api" or path.startswith("/api/") or path.endswith(".json")
    is_page = request.method == "GET" and isinstance(request.scope.get("route"), PageRoute)
    if is_api or not (is_page or "text/html" in accepted):
        return reply.as_json()
    service = await service_of(request)
    context = context_of(request, service, None)
    title = ERROR_TITLES.get(reply.status, "That cannot be answered")
    response = page(context, "error.html", status=reply.status, title=title, reply=reply)
    response.headers.update(reply.headers)
    return response


class Snippet(NamedTuple):
    """A text to copy, and what it is for."""

    title: str
    text: str


class CopiedQuery(NamedTuple):
    """A query in the three ways to send it.

    `path` and `parameters` are those of the API, `options` those of `command`. In `python`, RUN
    stands for the run.
    """

    path: str
    parameters: Options
    command: str
    options: Options
    python: str


def snippets(context: RequestContext, query: CopiedQuery) -> list[Snippet]:
    """The texts for a query; the command and Python read the run by its name."""
    return [
        Snippet("curl", _curl(context, query)),
        Snippet("Python", query.python.replace("RUN", repr(context.run.name), 1)),
        Snippet("command", command(query.command, context.run.name, query.options)),
    ]


def _curl(context: RequestContext, query: CopiedQuery) -> str:
    parameters = {
        name: str(value).lower() if isinstance(value, bool) else value
        for name, value in query.parameters.items()
        if value is not None
    }
    if not context.is_default_run:
        parameters["run"] = context.run.name
    request = context.request
    address = f"{request.url.scheme}://{request.headers.get('host', 'localhost')}{query.path}"
    if parameters:
        address = f"{address}?{urlencode(parameters)}"
    header = ""
    if context.service.needs_token:
        # The token itself is a secret, and no part of a page.
        header = ' -H "Authorization: Bearer $DUALKG_TOKEN"'
    return f"curl{header} {shell_word(address)}"


def predictor_call(method: str, *arguments: object, **options: object) -> str:
    """Python that loads the run RUN and calls a method of its predictor."""
    return (
        "import dualkg as kg\n\n"
        "predictor = kg.load_run(RUN).predictor()\n"
        f"predictor.{method}({call_arguments(*arguments, **options)})"
    )


def call_arguments(*arguments: object, **options: object) -> str:
    texts = [repr(argument) for argument in arguments]
    texts += [f"{name}={value!r}" for name, value in options.items() if value is not None]
    return ", ".join(texts)


def command(name: str, run: str, options: Options) -> str:
    """A command of dualkg; a value that begins with a hyphen is joined to its option."""
    folder = f"./{run}" if run.startswith("-") else run
    words = ["dualkg", name, shell_word(folder)]
    for option, value in options.items():
        flag = f"--{option.replace('_', '-')}"
        if value is None or value is False:
            continue
        if value is True:
            words.append(flag)
        elif str(value).startswith("-"):
            words.append(f"{flag}={shell_word(str(value))}")
        else:
            words += [flag, shell_word(str(value))]
    return " ".join(words)


def shell_word(text: str) -> str:
    """A text as one word of a shell, without line ends and characters that are not seen."""
    if text.isprintable():
        return shlex.quote(text)
    escaped = text.replace("\\", "\\\\").replace("'", "\\'")
    return "$'" + "".join(_shown(letter) for letter in escaped) + "'"


def _shown(letter: str) -> str:
    return letter if letter.isprintable() else f"\\U{ord(letter):08x}"
