"""Lines of tab-separated values for programs, and comma-separated values for spreadsheets.

TSV has no quotes, so that names are exact; a name with a tab or a line end is refused. In CSV,
`without_formula` puts an apostrophe before a cell that a spreadsheet would take for a formula.
"""

import csv
import io
import re
from collections.abc import Iterable, Sequence
from unicodedata import category, normalize

from dualkg.errors import RequestError

SEPARATORS = "[\t\n\r]"  # a regular expression that Arrow understands as well
FORMULA = set("=+-@")  # the characters that a formula of a spreadsheet begins with
INVISIBLE = ("C", "Z", "M")  # categories: control and format characters, spaces and marks


def tsv_line(cells: Sequence[str], *, instead: str) -> str:
    """Cells joined by tabs; a cell with a tab or a line end is refused.

    `instead` completes the advice "Write".
    """
    for cell in cells:
        check_tsv_cell(cell, instead=instead)
    return "\t".join(cells)


def check_tsv_cell(cell: str, *, instead: str) -> None:
    """Refuse a cell that would break a line of TSV."""
    if re.search(SEPARATORS, cell):
        raise RequestError(
            f"{cell!r} has a tab or a line end, which a TSV file cannot hold. Write {instead}."
        )


def csv_text(rows: Iterable[Sequence[str]]) -> str:
    """Rows as CSV. All cells are quoted, since some spreadsheets separate them by semicolons."""
    out = io.StringIO()
    csv.writer(out, quoting=csv.QUOTE_ALL).writerows(rows)
    return out.getvalue()


def without_formula(cell: str) -> str:
    """A cell that no spreadsheet takes for a formula.

    Some skip characters that are not seen before the first, and read wide or small ones as ASCII.
    """
    seen = next((letter for letter in cell if not category(letter).startswith(INVISIBLE)), "")
    is_formula = normalize("NFKC", seen)[:1] in FORMULA if seen else False
    has_control = category(cell[:1] or "x").startswith("C")
    # A name that looks guarded gets a guard of its own, so that it is read back as it is.
    is_ambiguous = cell.startswith("'") and without_formula(cell[1:]) == cell
    return f"'{cell}" if is_formula or has_control or is_ambiguous else cell


def with_formula(cell: str) -> str:
    """The cell that `without_formula` was given."""
    rest = cell[1:]
    return rest if cell.startswith("'") and without_formula(rest) == cell else cell
