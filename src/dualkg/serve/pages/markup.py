"""HTML from Python, safe unless said otherwise: text is escaped, and only `Markup` is not."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

VOID = frozenset({"br", "hr", "img", "input", "link", "meta"})
# Letters that nobody sees, or that HTML would change, are shown by others.
PICTURES = dict.fromkeys((*range(32), 127), "�") | {ord("\t"): "⇥", ord("\n"): "↵", ord("\r"): "↵"}
LONGEST_SHOWN = 160  # letters of a name within a list


class Markup(str):
    """Text that is HTML already."""

    __slots__ = ()


Child = str | int | None | Iterable["Child"]
Attribute = str | int | float | bool | None


def tag(name: str, /, *children: Child, **attributes: Attribute) -> Markup:
    """An element. `class_` and `data_name` are written `class` and `data-name`; what is None or False is left out.

    There are neither scripts nor styles in what it makes: the pages' policy would not run them.
    """
    written = "".join(_attribute(key, value) for key, value in attributes.items())
    if name in VOID:
        return Markup(f"<{name}{written}>")
    return Markup(f"<{name}{written}>{joined(children)}</{name}>")


def joined(children: Child) -> Markup:
    """Children one after another, those escaped that are mere text."""
    if children is None:
        return Markup("")
    if isinstance(children, Markup):
        return children
    if isinstance(children, str | int):
        return Markup(escape(str(children)))
    return Markup("".join(joined(child) for child in children))


def shown(name: str) -> str:
    """A name as people can see it: neither empty, nor with letters that have no shape."""
    seen = name.replace("\r\n", "\n").translate(PICTURES)
    return seen if seen.strip() else f"“{seen}”"


def shortened(name: str) -> str:
    """The same within a list; all of it is on the entity's page."""
    seen = shown(name)
    return seen if len(seen) <= LONGEST_SHOWN else f"{seen[: LONGEST_SHOWN - 1].rstrip()}…"


def _attribute(key: str, value: Attribute) -> str:
    if value is None or value is False:
        return ""
    key = key.rstrip("_").replace("_", "-")
    if value is True:
        return f" {key}"
    # A browser reads a carriage return as a line end, unless it is spelled out.
    written = escape(str(value)).replace("\r", "&#13;")
    return f' {key}="{written}"'
