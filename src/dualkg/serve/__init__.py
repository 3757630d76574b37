"""Serving: link prediction with runs over HTTP, as a JSON API and as pages.

A request passes the middleware, is read by a route (`queries`, `entities`, `facts`, `runs`),
answered together with other pending queries (`service`), and returned in a schema (`schemas`).
Pages fill Jinja2 templates (`templates/`).
"""

from dualkg.extras import optional_import
from dualkg.serve.limits import Limits

with optional_import("fastapi", purpose="Serving a run"):
    import fastapi  # noqa: F401

from dualkg.serve.app import application
from dualkg.serve.server import Reply, request_once
from dualkg.serve.service import ServedRun, ServedRuns

__all__ = ["Limits", "Reply", "ServedRun", "ServedRuns", "application", "request_once"]
