"""The page of all that can be asked, made from the OpenAPI description."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from typing import Any

from fastapi import Request
from fastapi.responses import HTMLResponse

from dualkg.serve.routes.queries import router

routes = router("pages")
STYLE = """
:root { color-scheme: light dark }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 52rem; margin: 2rem auto; padding: 0 1rem }
h2 { font: 600 1.05rem/1.4 ui-monospace, monospace; margin: 2rem 0 0 } p { margin: .3rem 0 }
table { border-collapse: collapse; width: 100% } td { padding: .15rem 1rem .15rem 0; vertical-align: top }
td:first-child { font-family: ui-monospace, monospace; white-space: nowrap } .choice { opacity: .7 }
"""
POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; frame-ancestors 'none'"


@routes.get("/docs", include_in_schema=False, response_class=HTMLResponse)
async def reference(request: Request) -> HTMLResponse:
    page = "".join(_page(request.app.openapi()))
    return HTMLResponse(page, headers={"Content-Security-Policy": POLICY})


def _page(described: dict[str, Any]) -> Iterator[str]:
    about = described["info"]
    yield f"<!doctype html><html lang=en><meta charset=utf-8><title>{escape(about['title'])}: what can be asked</title>"
    yield f"<meta name=viewport content='width=device-width'><style>{STYLE}</style>"
    yield f"<main><h1>What can be asked</h1><p>{escape(about['description'])}"
    yield "<p>The same for programs: <a href='/openapi.json'>openapi.json</a>."
    for path, ways in described["paths"].items():
        for method, way in ways.items():
            yield f"<h2>{escape(method.upper())} {escape(path)}</h2><p>{escape(way.get('description', ''))}"
            yield "<table>"
            for parameter in way.get("parameters", []):
                yield f"<tr><td>{escape(parameter['name'])}<td>{escape(parameter.get('description', ''))}"
                yield f" <span class=choice>{escape(_choice(parameter))}</span>"
            if "requestBody" in way:
                [content] = way["requestBody"]["content"].values()
                shape = described["components"]["schemas"][content["schema"]["$ref"].rpartition("/")[2]]
                yield f"<tr><td>body<td>{escape(shape.get('description', ''))}"
            yield "</table>"
    yield "</main></html>"


def _choice(parameter: dict[str, Any]) -> str:
    """Needed or not, and within which bounds."""
    schema = parameter.get("schema", {})
    parts = ["needed" if parameter.get("required") else ""]
    parts += [" or ".join(map(str, schema.get("enum", [])))]
    if "minimum" in schema and "maximum" in schema:
        parts.append(f"{schema['minimum']:,} to {schema['maximum']:,}")
    if "default" in schema and schema["default"] not in (None, []):
        parts.append(f"default {schema['default']}")
    return ", ".join(part for part in parts if part)
