"""The JSON API, one module for each kind of request."""

from dualkg.serve.routes import completion, decisions, entities, queries, runs

MODULES = (queries, entities, completion, decisions, runs)
