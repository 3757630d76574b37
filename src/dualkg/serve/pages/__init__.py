"""Pages for browsers, one module for each; their markup is in `templates/`."""

from dualkg.serve.pages import entity, facts, map, query, reference, run

MODULES = (query, entity, facts, map, run, reference)
