"""Serving: runs asked over HTTP. The only room that knows of it.

A request passes the guards (guards/), is read by a route (routes/), asked together with others that wait (asking/),
and answered in a typed shape (shapes/). Pages for people are in pages/.
"""

from __future__ import annotations

from dualkg.extras import optional_import
from dualkg.serve.limits import Limits

with optional_import("fastapi", purpose="Serving a run"):
    import fastapi  # noqa: F401

from dualkg.serve.app import application
from dualkg.serve.server import Reply, request_once
from dualkg.serve.state import ServedRun, ServedRuns

__all__ = ["Limits", "Reply", "ServedRun", "ServedRuns", "application", "request_once"]
