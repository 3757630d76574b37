"""Tables of pages as CSV for spreadsheets and as JSON; tables of facts in more formats.

A file of a list has the rows that its page shows: scripts filter the rows of a page by facets, and
the files are filtered here.

A table is a function that returns rows, with the parameters of its page. `@table("answers")` serves
it as `/table/answers.csv` and `/table/answers.json`. Rows that are triples are also served as TSV,
with exact names, and as N-Triples: `@table("new-facts", of_facts=True)`.
"""

import re
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import wraps
from typing import Annotated, Any, NamedTuple

from fastapi import Depends, Query, Response
from fastapi.responses import JSONResponse
from pydantic import Field

from dualkg.delimited import csv_text, tsv_line, without_formula
from dualkg.inference.decision_files import as_ntriples
from dualkg.serve.service import RequestContext
from dualkg.serve.templating import facet_values, page_router

routes = page_router()
# Media types by the endings of files.
FORMATS = {
    "csv": "text/csv",
    "json": "application/json",
    "tsv": "text/tab-separated-values",
    "nt": "application/n-triples",
}
MAX_CHOSEN = 100  # values of all facets
MAX_VALUE_LENGTH = 300  # characters, of a facet and its value
UNDECIDED = "undecided"
Value = Annotated[str, Field(max_length=MAX_VALUE_LENGTH)]
Row = dict[str, Any]
TableFunction = Callable[..., Awaitable["Table"]]


class Table(NamedTuple):
    """Rows with the same columns, and the run that they are of."""

    run: str
    rows: list[Row]


def table(name: str, *, of_facts: bool = False) -> Callable[[TableFunction], TableFunction]:
    """Serve the rows that a function returns, which are triples with `of_facts`."""

    def register(make_rows: TableFunction) -> TableFunction:
        for suffix in FORMATS if of_facts else ("csv", "json"):
            send = _sender(make_rows, name, suffix)
            routes.add_api_route(f"/table/{name}.{suffix}", send, response_model=None)
        return make_rows

    return register


def _sender(make_rows: TableFunction, name: str, suffix: str) -> Callable[..., Any]:
    """A route that sends a table in a format."""

    @wraps(make_rows)  # FastAPI reads the parameters of the function that is wrapped
    async def send(*args: Any, **parameters: Any) -> Response:
        made = await make_rows(*args, **parameters)
        if suffix == "json":
            return JSONResponse({"run": made.run, "rows": made.rows})
        if suffix == "csv":
            text = as_csv(made.rows)
        elif suffix == "tsv":
            text = as_tsv(made.rows)
        else:
            text = as_ntriples((row["head"], row["relation"], row["tail"]) for row in made.rows)
        return attachment(text, f"{made.run}-{name}.{suffix}")

    return send


def attachment(text: str, filename: str) -> Response:
    """A file to save, whose format is the ending of its name."""
    suffix = filename.rpartition(".")[2]
    filename = re.sub(r"[^a-zA-Z0-9._-]", "_", filename)
    return Response(
        # Spreadsheets recognize UTF-8 by a byte order mark.
        text.encode("utf-8-sig" if suffix == "csv" else "utf-8"),
        media_type=f"{FORMATS[suffix]}; charset=utf-8",
        headers={"Content-Disposition": f'attachment; filename="{filename}"'},
    )


def as_csv(rows: Iterable[Row]) -> str:
    """Rows as CSV with a header; no cell is a formula."""
    listed = list(rows)
    columns = _columns(listed)
    cells = ([_cell(row.get(column)) for column in columns] for row in listed)
    return csv_text([columns, *cells])


def as_tsv(rows: Iterable[Row]) -> str:
    """Rows as TSV with a header, with exact names; one with a tab or a line end is refused."""
    listed = list(rows)
    columns = _columns(listed)
    cells = ([_text(row.get(column)) for column in columns] for row in listed)
    lines = [tsv_line(line, instead="CSV") for line in (columns, *cells)]
    return "".join(f"{line}\n" for line in lines)


def _columns(rows: list[Row]) -> list[str]:
    return list(dict.fromkeys(column for row in rows for column in row))


def _cell(value: Any) -> str:
    # A negative number is no formula.
    return _text(value) if isinstance(value, int | float) else without_formula(_text(value))


def _text(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    return str(value)


def flat_bin(bin: Row) -> Row:
    """A range of a reliability table whose interval is two columns."""
    row = {name: value for name, value in bin.items() if name != "interval"}
    low, high = bin.get("interval") or (None, None)
    return {**row, "interval_low": low, "interval_high": high}


def triple_row(fact: Any) -> Row:
    """The names of a triple, and its labels where they are not the names."""
    row: Row = {}
    for part in ("head", "relation", "tail"):
        row |= item_row(getattr(fact, part), part)
    return row


def fact_row(fact: Any) -> Row:
    """A new fact with what the model and train say about it, and the decision on it."""
    figures = ("probability", "answer_probability", "head_type", "tail_type", "verdict")
    return triple_row(fact) | {name: getattr(fact, name) for name in figures}


def item_row(item: Any, part: str) -> Row:
    """The name of an entity or a relation, and its label where there is one."""
    row = {part: item.name}
    if item.label != item.name:
        row[f"{part}_label"] = item.label
    return row


@dataclass(frozen=True)
class ListFilter:
    """The chosen values of each facet, and whether facts of an unusual type are left out."""

    chosen: Mapping[str, set[str]]
    hide_unusual: bool = False

    def admits(self, context: RequestContext, fact: Any, *, decided_by: str | None = None) -> bool:
        """Whether a fact has one of the chosen values of each facet."""
        if self.hide_unusual and is_unusual(fact):
            return False
        if not self.chosen:
            return True
        values = facet_values(context, fact, decided_by=decided_by)
        values["Verdict"] = [fact.verdict or UNDECIDED]
        return all(chosen & set(values.get(facet, ())) for facet, chosen in self.chosen.items())


NO_FILTER = ListFilter({})


def is_unusual(fact: Any) -> bool:
    """Whether the head or the tail of a new fact is of an unusual type."""
    return "unusual" in (getattr(fact, "head_type", None), getattr(fact, "tail_type", None))


async def list_filter(
    facet: Annotated[
        list[Value], Query(max_length=MAX_CHOSEN, description="FACET:VALUE; repeatable.")
    ] = [],  # noqa: B006
    hide_unusual: Annotated[
        bool, Query(description="Leave out facts of an unusual type from the list.")
    ] = False,
) -> ListFilter:
    chosen: dict[str, set[str]] = {}
    for text in facet:
        name, _, value = text.partition(":")
        chosen.setdefault(name, set()).add(value)
    return ListFilter(chosen, hide_unusual)


Filtered = Annotated[ListFilter, Depends(list_filter)]
