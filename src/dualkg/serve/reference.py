"""What the page of the API shows: each operation of the OpenAPI description, with an example."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote, urlencode

from dualkg.serve.queries import examples_of
from dualkg.serve.service import RequestContext

NO_TOPIC = "server"


@dataclass(frozen=True)
class Parameter:
    """A parameter of an operation, and what its values may be."""

    name: str
    description: str
    values: str


@dataclass(frozen=True)
class Operation:
    """A method of an address."""

    method: str
    path: str
    topic: str
    description: str
    parameters: list[Parameter] = field(default_factory=list)
    body: str = ""

    @property
    def anchor(self) -> str:
        return f"{self.method}{self.path}".replace("/", "-").replace("{", "").replace("}", "")


def operations(api: dict[str, Any]) -> Iterator[Operation]:
    """The operations of an OpenAPI description, in its order."""
    for path, methods in api["paths"].items():
        for method, operation in methods.items():
            yield Operation(
                method=method.upper(),
                path=path,
                topic=operation.get("tags", [NO_TOPIC])[0],
                description=operation.get("description", ""),
                parameters=[_parameter(given) for given in operation.get("parameters", [])],
                body=_body(api, operation),
            )


def _parameter(given: dict[str, Any]) -> Parameter:
    schema = given["schema"]
    values = ["required"] if given.get("required") else []
    if schema.get("enum"):
        values.append(" or ".join(map(str, schema["enum"])))
    if "minimum" in schema and "maximum" in schema:
        values.append(f"{schema['minimum']:,} to {schema['maximum']:,}")
    if schema.get("default") not in (None, []):
        values.append(f"default {schema['default']}")
    return Parameter(given["name"], given.get("description", ""), ", ".join(values))


def _body(api: dict[str, Any], operation: dict[str, Any]) -> str:
    for content in operation.get("requestBody", {}).get("content", {}).values():
        name = content["schema"]["$ref"].rpartition("/")[2]
        described: str = api["components"]["schemas"][name].get("description", "")
        return described
    return ""


async def example_addresses(context: RequestContext) -> dict[str, str]:
    """An address that answers, for each operation that has one on the graph of the run."""
    graph = context.run.graph
    examples = examples_of(context)
    if not examples:
        return {}
    head, relation = (item.name for item in examples[0])
    triples = graph.test if len(graph.test) else graph.train
    head_id, relation_id = graph.entities.id(head), graph.relations.id(relation)
    of_query = triples[(triples[:, 0] == head_id) & (triples[:, 1] == relation_id)]
    tail = graph.entities[int(of_query[0, 2])]
    parameters: dict[str, dict[str, str | int]] = {
        "/api/tails": {"head": head, "relation": relation, "k": 5},
        "/api/heads": {"relation": relation, "tail": tail, "k": 5},
        "/api/relations": {"head": head, "tail": tail, "k": 5},
        "/api/similar": {"entity": head, "k": 5},
        "/api/score": {"head": head, "relation": relation, "tail": tail},
        "/api/explain": {"head": head, "relation": relation, "tail": tail},
        "/api/paths": {"start": head, "end": tail, "k": 3},
        "/api/entities": {"q": head[:3], "k": 5},
        "/api/complete": {"relation": relation, "top": 5},
        "/api/run": {},
        "/api/runs": {},
        "/api/decisions": {},
        "/api/map": {},
        "/health": {},
        "/metrics": {},
    }
    if context.run.predictor.prediction_sets is not None:
        parameters["/api/prediction-set"] = {"entity": head, "relation": relation, "k": 5}
    if len(context.service.runs) > 1:
        parameters["/api/compare"] = {"most": 5}
    addresses = {
        path: f"{path}?{urlencode(given)}" if given else path for path, given in parameters.items()
    }
    addresses["/api/entity/{name}"] = f"/api/entity/{quote(head, safe='')}"
    return addresses
