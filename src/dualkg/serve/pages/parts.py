"""Parts that several pages show."""

from __future__ import annotations

from dualkg.serve.pages.links import address
from dualkg.serve.pages.markup import Markup, tag
from dualkg.serve.routes.choices import Asked


def percent(probability: float) -> str:
    """0.05312 is 5.3 %."""
    if probability > 0.999:
        return ">99.9 %"
    if probability < 0.001:
        return "<0.1 %"
    return f"{100 * probability:.{1 if probability < 0.0995 or probability >= 0.995 else 0}f} %"


def bar(share: float, *, known: bool = False) -> Markup:
    """A share as a bar; the number is written beside it."""
    rect = tag("rect", width=f"{100 * min(1.0, max(0.0, share)):.1f}%", height="100%")
    return tag("svg", rect, class_="bar known" if known else "bar", aria_hidden="true", focusable="false")


def why_link(triple: tuple[str, str, str], whom: Asked, *, about: str) -> Markup:
    """Opens the reasons in place; without scripts, on a page of their own."""
    head, relation, tail = triple
    where = address("/why", whom, head=head, relation=relation, tail=tail)
    hidden = tag("span", f" {about}", class_="visually-hidden")
    return tag("a", "Why?", hidden, href=where, class_="button plain", data_why=True)
