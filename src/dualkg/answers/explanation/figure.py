"""How answers rank where some of the triples that speak for them are left out of train."""

from __future__ import annotations

from collections.abc import Sequence

from dualkg.analysis.figures import style
from dualkg.analysis.figures.style import Drawing
from dualkg.answers.explanation.study import LeftOut
from dualkg.errors import RequestError

WAYS = {
    "against": ("what speaks most against them", style.CONTRAST),
    "any": ("any triples of their entities", style.QUIET),
    "reasons": ("their best reasons", style.ACCENT),
}


def draw_reasons(found: Sequence[LeftOut], *, title: str = "", graph: str = "") -> Drawing:
    """A line for each way over the number of triples left out, a dot for each seed."""
    if not any(one.way in WAYS for one in found):
        raise RequestError("A figure of reasons needs some that were left out, and none came.")
    before = [one.metrics.mrr for one in found if one.way == "nothing"]
    counts = sorted({one.count for one in found})
    with style.in_style():
        figure, [axes] = style.sheet(3.7)
        style.entitle(axes, title or "Reasons left out", "trained anew without some training triples of each answer")
        for way, (name, colour) in WAYS.items():
            after: dict[float, list[float]] = {
                place: _mrr(found, way, count) or before for place, count in enumerate(counts)
            }
            style.line_of_seeds(axes, after, name=name, colour=colour)
        top = max(one.metrics.mrr for one in found)
        axes.set_xticks(range(len(counts)), [f"{count}" for count in counts])
        axes.set(xlim=(-0.2, len(counts) - 0.8), ylim=(0, 1.15 * top), ylabel="MRR of the answers")
        axes.set_xlabel("triples of each answer that are left out")
        axes.yaxis.grid(True)
        axes.spines["left"].set_visible(False)
        axes.legend(loc="lower left")
    return Drawing(figure, _caption(found, graph))


def _mrr(found: Sequence[LeftOut], way: str, count: int) -> list[float]:
    return [one.metrics.mrr for one in found if one.way == way and one.count == count]


def _caption(found: Sequence[LeftOut], graph: str) -> str:
    return (
        f"{found[0].num_answers:,} test triples{' of ' * bool(graph)}{graph} without an entity in common, ranked after "
        f"training without some triples of train: those that support each most, those that speak most against it, or "
        f"any of its two entities. A dot is a seed."
    )
