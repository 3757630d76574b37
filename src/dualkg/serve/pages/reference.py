"""The OpenAPI description, and the page of all API routes that is made from it."""

from fastapi import FastAPI
from fastapi.responses import HTMLResponse, JSONResponse, Response

from dualkg.serve.service import Context
from dualkg.serve.templating import page, page_router

routes = page_router()
POLICY = "default-src 'none'; style-src 'self'; base-uri 'none'; frame-ancestors 'none'"


def description(app: FastAPI) -> bytes:
    """The description as JSON. It takes half a second to make and 2 ms to write, so it is made once."""
    if not hasattr(app.state, "description"):
        app.state.description = JSONResponse(app.openapi()).body
    made: bytes = app.state.description
    return made


@routes.get("/openapi.json")
async def openapi(context: Context) -> Response:
    return Response(description(context.request.app), media_type="application/json")


@routes.get("/docs")
async def reference_page(context: Context) -> HTMLResponse:
    response = page(context, "reference.html", api=context.request.app.openapi())
    response.headers["Content-Security-Policy"] = POLICY
    return response
