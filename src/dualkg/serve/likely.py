"""How likely a triple is: its probability, and how often such triples were true on test."""

from typing import Annotated, Any

from fastapi import Query, Response

from dualkg.serve import schemas
from dualkg.serve.downloads import Table, flat_bin, table
from dualkg.serve.limits import MAX_NAME_LENGTH
from dualkg.serve.queries import score
from dualkg.serve.runs import calibration_checks
from dualkg.serve.service import Context, RequestContext
from dualkg.serve.snippets import CopiedQuery, predictor_call, snippets
from dualkg.serve.templating import page, page_router, page_url

pages = page_router()
Name = Annotated[str, Query(max_length=MAX_NAME_LENGTH)]
Bins = list[dict[str, Any]]


@pages.get("/likely")
async def likely_page(context: Context, head: Name, relation: Name, tail: Name) -> Response:
    """The probability of a triple beside the reliability of its range.

    A calibration of an earlier version has the reliability of answers to test queries alone.
    """
    response = await score(context, head, relation, tail)
    [fact] = schemas.Scores.model_validate_json(bytes(response.body)).scores
    of_triples, of_answers = await _reliability(context)
    params = {"head": head, "relation": relation, "tail": tail}
    copied = CopiedQuery(
        path="/api/score",
        parameters=params,
        command="predict",
        options=params,
        python=predictor_call("triple", head, relation, tail),
    )
    return page(
        context,
        "likely.html",
        json=page_url(context, "/api/score", **params),
        fact=fact,
        bins=of_triples or of_answers,
        is_of_triples=bool(of_triples),
        own=_own_bin(of_triples, fact.probability),
        own_answer=_own_bin(of_answers, fact.answer_probability),
        copies=snippets(context, copied),
    )


@table("likely")
async def likely_table(context: Context) -> Table:
    """How often new triples, and answers to test queries, of some probability were true."""
    of_triples, of_answers = await _reliability(context)
    rows = [{"of": "new triples", **flat_bin(bin)} for bin in of_triples]
    rows += [{"of": "answers", **flat_bin(bin)} for bin in of_answers]
    return Table(context.run.name, rows)


async def _reliability(context: RequestContext) -> tuple[Bins, Bins]:
    """The reliability of new triples, and of answers to test queries, by predicted range."""
    run = context.run.run
    checks = await context.in_thread(lambda: calibration_checks(run))
    of_answers: Bins = (checks.get("calibration") or {}).get("table") or []
    of_triples: Bins = checks.get("new_triples") or []
    return of_triples, of_answers


def _own_bin(bins: Bins, probability: float | None) -> dict[str, Any] | None:
    """The range of a reliability table that a probability is in."""
    if probability is None:
        return None
    of_range = [bin for bin in bins if bin["lower"] <= probability < bin["upper"]]
    return of_range[0] if of_range else None
