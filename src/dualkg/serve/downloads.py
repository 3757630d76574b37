"""Tables of pages as CSV for spreadsheets and as JSON for programs.

A table is a function that returns rows, with the parameters of its page. `@table("answers")` serves
it as `/table/answers.csv` and `/table/answers.json`.
"""

import csv
import io
import re
from collections.abc import Awaitable, Callable, Iterable
from functools import wraps
from typing import Any, NamedTuple

from fastapi import Response
from fastapi.responses import JSONResponse

from dualkg.inference.decisions import without_formula
from dualkg.serve.templating import page_router

routes = page_router()
Row = dict[str, Any]
TableFunction = Callable[..., Awaitable["Table"]]


class Table(NamedTuple):
    """Rows with the same columns, and the run that they are of."""

    run: str
    rows: list[Row]


def table(name: str) -> Callable[[TableFunction], TableFunction]:
    """Serve the rows that a function returns."""

    def register(make_rows: TableFunction) -> TableFunction:
        # FastAPI reads the parameters of the function that is wrapped.
        @wraps(make_rows)
        async def send_csv(*args: Any, **parameters: Any) -> Response:
            made = await make_rows(*args, **parameters)
            filename = re.sub(r"[^a-zA-Z0-9._-]", "_", f"{made.run}-{name}.csv")
            headers = {"Content-Disposition": f'attachment; filename="{filename}"'}
            # Spreadsheets recognize UTF-8 by a byte order mark.
            body = as_csv(made.rows).encode("utf-8-sig")
            return Response(body, media_type="text/csv; charset=utf-8", headers=headers)

        @wraps(make_rows)
        async def send_json(*args: Any, **parameters: Any) -> Response:
            made = await make_rows(*args, **parameters)
            return JSONResponse({"run": made.run, "rows": made.rows})

        routes.add_api_route(f"/table/{name}.csv", send_csv, response_model=None)
        routes.add_api_route(f"/table/{name}.json", send_json, response_model=None)
        return make_rows

    return register


def as_csv(rows: Iterable[Row]) -> str:
    """Rows as CSV with a header; no cell is a formula."""
    listed = list(rows)
    columns = list(dict.fromkeys(column for row in listed for column in row))
    out = io.StringIO()
    writer = csv.writer(out, quoting=csv.QUOTE_ALL)
    writer.writerow(columns)
    for row in listed:
        writer.writerow([_cell(row.get(column)) for column in columns])
    return out.getvalue()


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    # A negative number is no formula.
    return str(value) if isinstance(value, int | float) else without_formula(str(value))


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


def item_row(item: Any, part: str) -> Row:
    """The name of an entity or a relation, and its label where there is one."""
    row = {part: item.name}
    if item.label != item.name:
        row[f"{part}_label"] = item.label
    return row
