"""The slow, exact reading of a text file that names its first bad line."""

from __future__ import annotations

import io
from collections.abc import Sequence

from dualkg.data.reading.layout import NEVER_CLOSED, SEPARATORS, Layout, rows
from dualkg.data.reading.sources import Source


def first_bad_line(source: Source, layout: Layout) -> str | None:
    """A sentence about the first line that is not as the layout says, or None where all are."""
    with source.open() as stream:
        stream.read(layout.start)
        with io.TextIOWrapper(stream, "utf-8", "surrogateescape", newline="") as text:
            for line, cells in rows(text, layout.separator, layout.quoted):
                if problem := _problem(cells, layout):
                    return f"{source.name}, line {line + layout.first_line - 1:,}: {problem}"
    return None


def _problem(cells: Sequence[str], layout: Layout) -> str | None:
    if not cells:
        return NEVER_CLOSED
    if len(cells) != layout.num_columns:
        return _wrong_number(cells, layout)
    for role, index in zip(layout.roles, layout.indices, strict=True):
        cell = cells[index]
        if not cell and role != "label":
            return f"the {role} is empty. Give it a name, or remove the line."
        if not _is_utf8(cell):
            return f"the {role} is not valid UTF-8 ({_shown(cell)}). Save the file as UTF-8."
    return None


def _wrong_number(cells: Sequence[str], layout: Layout) -> str:
    listed = ", ".join(_shown(cell) for cell in cells[:6]) + (", …" if len(cells) > 6 else "")
    return (
        f"expected {layout.num_columns} columns separated by {SEPARATORS[layout.separator]}, "
        f"found {len(cells)}: {listed}. {_advice(cells, layout)}"
    )


def _advice(cells: Sequence[str], layout: Layout) -> str:
    joined = layout.separator.join(cells)
    if not joined.strip():
        return "Remove the line."
    if len(cells) > layout.num_columns and layout.roles[0] == "head" and not layout.header:
        return "Correct the line, or choose three columns with columns=(1, 2, 3)."
    if len(cells) == 1 and layout.quoted and "\t" in joined:
        return "If tabs separate the columns, give the file a name that ends in .tsv."
    if len(cells) == 1 and not layout.quoted and ("," in joined or ";" in joined):
        return "If commas separate the columns, give the file a name that ends in .csv."
    if len(cells) == 1 and " " in joined:
        return f"If spaces separate the columns, replace them by {SEPARATORS[layout.separator]}."
    return "Correct the line, or remove it."


def _is_utf8(cell: str) -> bool:
    try:
        cell.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def _shown(cell: str) -> str:
    """A cell in quotes, short, with the bytes that are no text as `\\xff`."""
    text = cell.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
    visible = "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in text)
    return f"'{visible[:40]}{'…' if len(visible) > 40 else ''}'"
