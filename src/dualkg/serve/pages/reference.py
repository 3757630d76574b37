"""The page of all API routes, made from the OpenAPI description."""

from fastapi.responses import HTMLResponse

from dualkg.serve.service import Context
from dualkg.serve.templating import page, page_router

routes = page_router()
POLICY = "default-src 'none'; style-src 'self'; base-uri 'none'; frame-ancestors 'none'"


@routes.get("/docs")
async def reference_page(context: Context) -> HTMLResponse:
    response = page(context, "reference.html", api=context.request.app.openapi())
    response.headers["Content-Security-Policy"] = POLICY
    return response
