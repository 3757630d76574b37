"""The page of all API routes, made from the OpenAPI description."""

from __future__ import annotations

from typing import Any

from fastapi import Request
from fastapi.responses import HTMLResponse

from dualkg.serve.service import Context
from dualkg.serve.templating import fill, page_router

routes = page_router()
POLICY = "default-src 'none'; style-src 'self'; base-uri 'none'; frame-ancestors 'none'"


@routes.get("/docs")
async def reference_page(request: Request, context: Context) -> HTMLResponse:
    html = fill(context, "reference.html", api=request.app.openapi(), body_of=_body_of, bounds_of=_bounds_of)
    return HTMLResponse(html, headers={"Content-Security-Policy": POLICY})


def _body_of(api: dict[str, Any], operation: dict[str, Any]) -> str | None:
    """The description of the body's schema."""
    if "requestBody" not in operation:
        return None
    [content] = operation["requestBody"]["content"].values()
    return str(api["components"]["schemas"][content["schema"]["$ref"].rpartition("/")[2]].get("description", ""))


def _bounds_of(parameter: dict[str, Any]) -> str:
    """Whether a parameter is required, its values, its range and its default."""
    schema = parameter.get("schema", {})
    parts = ["needed" if parameter.get("required") else "", " or ".join(map(str, schema.get("enum", [])))]
    if "minimum" in schema and "maximum" in schema:
        parts.append(f"{schema['minimum']:,} to {schema['maximum']:,}")
    if schema.get("default") not in (None, []):
        parts.append(f"default {schema['default']}")
    return ", ".join(part for part in parts if part)
