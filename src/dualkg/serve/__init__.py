"""Serving: link prediction with runs over HTTP, as a JSON API and as pages.

A request passes the middleware, is read by a route (`queries`, `triples`, `entities`, `facts`,
`runs` and others), answered together with other pending queries (`service`, `batching`), and
returned in a schema (`schemas`). Pages fill Jinja2 templates (`templates/`).
"""

from dualkg.extras import optional_import

with optional_import("fastapi", purpose="Serving a run"):
    import fastapi  # noqa: F401

from dualkg.serve.app import application
from dualkg.serve.served import ServedRun, ServedRuns
from dualkg.serve.server import Reply, request_once
from dualkg.serve.service import Limits

__all__ = ["Limits", "Reply", "ServedRun", "ServedRuns", "application", "request_once"]
