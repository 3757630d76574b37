"""New facts: the triples that a model would add, for a curator to accept or reject."""

import json
from typing import Annotated

from fastapi import Query, Response
from fastapi.responses import StreamingResponse

from dualkg.serve.limits import MAX_NAME_LENGTH
from dualkg.serve.routes.completion import Options, stream
from dualkg.serve.routes.decisions import decisions, load_decisions
from dualkg.serve.schemas import CompletionLine
from dualkg.serve.service import Context
from dualkg.serve.templating import fill, page, page_router, page_url, relation_text

routes = page_router()
LENGTHS = (50, 100, 500, 2000)


@routes.get("/facts")
async def facts_page(
    context: Context,
    relation: Annotated[str, Query(max_length=MAX_NAME_LENGTH)] = "",
    min_probability: Annotated[float, Query(ge=0, le=1)] = 0.0,
    top: Annotated[int, Query(ge=1, le=LENGTHS[-1])] = LENGTHS[1],
) -> Response:
    """The frame of the list; a script adds the rows as they are found."""
    chosen = await context.id(relation, "relation") if relation else None
    params = {"relation": relation or None, "min_probability": min_probability or None, "top": top}
    return page(
        context,
        "facts.html",
        json=page_url(context, "/facts.json", **params),
        relations=sorted(context.run.relations, key=lambda item: relation_text(item.label)),
        chosen=None if chosen is None else context.run.relations[chosen],
        min_probability=min_probability,
        top=top,
        lengths=sorted({*LENGTHS, top}),
        decisions=await decisions(context),
    )


@routes.get("/facts/rows")
async def fact_rows(context: Context, options: Options) -> StreamingResponse:
    """The lines of `/api/complete`, with each triple as a row of the page."""
    decided, status = await load_decisions(context), await decisions(context)

    def dump(line: CompletionLine) -> str:
        if not (line.head and line.relation and line.tail):
            return line.model_dump_json(exclude_none=True)
        decision = decided.get((line.head.name, line.relation.name, line.tail.name))
        values = {"fact": line, "verdict": decision and decision.verdict, "can_decide": status.can_decide}
        return json.dumps({"kind": line.kind, "html": fill(context, "fact_row.html", **values)})

    return stream(context, options, dump)
