"""How likely a triple is: its probability, and how often such answers were true on test."""

from typing import Annotated, Any

from fastapi import Query, Response

from dualkg.serve import schemas
from dualkg.serve.limits import MAX_NAME_LENGTH
from dualkg.serve.queries import score
from dualkg.serve.runs import calibration_checks
from dualkg.serve.service import Context
from dualkg.serve.templating import page, page_router, page_url

pages = page_router()
Name = Annotated[str, Query(max_length=MAX_NAME_LENGTH)]


@pages.get("/likely")
async def likely_page(context: Context, head: Name, relation: Name, tail: Name) -> Response:
    """The probability of a triple beside the reliability of its range."""
    response = await score(context, head, relation, tail)
    [fact] = schemas.Scores.model_validate_json(bytes(response.body)).scores
    run = context.run.run
    checks = await context.in_thread(lambda: calibration_checks(run))
    bins = checks.get("calibration", {}).get("table", [])
    params = {"head": head, "relation": relation, "tail": tail}
    return page(
        context,
        "likely.html",
        json=page_url(context, "/api/score", **params),
        fact=fact,
        bins=bins,
        own=_own_bin(bins, fact.answer_probability),
    )


def _own_bin(bins: list[dict[str, Any]], probability: float | None) -> dict[str, Any] | None:
    """The range of the reliability table that a probability is in."""
    if probability is None:
        return None
    of_range = [bin for bin in bins if bin["lower"] <= probability < bin["upper"]]
    return of_range[0] if of_range else None
