"""Serving: runs asked over HTTP. The only room that knows of it.

A request passes the guards (guards/), is read by a route (routes/), asked together with others that wait (asking/),
and answered in a typed shape (shapes/). Pages for people are in pages/.
"""

from __future__ import annotations

from dualkg.serve.extra import needing
from dualkg.serve.limits import Limits

with needing("fastapi"):
    import fastapi  # noqa: F401

from dualkg.serve.application import application
from dualkg.serve.once import Reply, ask_once
from dualkg.serve.runs import ServedRun, ServedRuns

__all__ = ["Limits", "Reply", "ServedRun", "ServedRuns", "application", "ask_once"]
