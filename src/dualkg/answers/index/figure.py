"""MRR against the bytes of the entity tables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dualkg.analysis.extra import needing
from dualkg.analysis.figures import style
from dualkg.analysis.figures.style import Drawing
from dualkg.answers.index.forms import FormPoint
from dualkg.errors import RequestError


def draw_forms(points: Sequence[FormPoint], *, title: str = "", graph: str = "") -> Drawing:
    """A dot for each dense form, and a line along the shares of zeros; bytes on a logarithmic axis."""
    if not points:
        raise RequestError("A figure of forms needs a point, and none came.")
    with needing("matplotlib", to="A figure"):
        from matplotlib.ticker import LogLocator
    dense = [point for point in points if point.form != "sparse"]
    sparse = sorted((point for point in points if point.form == "sparse"), key=lambda point: point.share)
    with style.in_style():
        figure, [axes] = style.sheet(4.0)
        style.entitle(
            axes, title or "MRR against bytes", "dots: whole tables; line: float32 without so many of its entries"
        )
        axes.plot(*_places(sparse), color=style.CONTRAST, linewidth=1.8, marker="o", markersize=4, zorder=3)
        axes.plot(*_places(dense), color=style.ACCENT, linestyle="", marker="o", markersize=7, zorder=4)
        for group, colour, above in ((dense, style.ACCENT, 12), (sparse, style.CONTRAST, -12)):
            text: dict[str, Any] = {"color": colour, "ha": "center", "va": "center", "fontsize": 8.5}
            for point in group:
                place = (point.bytes, point.metrics.mrr)
                name = f"{point.share:.0%}" if group is sparse else point.name
                axes.annotate(name, place, (0, above), textcoords="offset points", **text)
        top = max(point.metrics.mrr for point in points)
        axes.set(xscale="log", xlabel="bytes of the entity tables", ylabel="MRR", ylim=(0, 1.15 * top))
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.xaxis.set_major_formatter(lambda value, _: short(value))
        axes.minorticks_off()
        axes.yaxis.grid(True)
        axes.margins(x=0.1)
    return Drawing(figure, _caption(graph))


def _places(points: Sequence[FormPoint]) -> tuple[list[int], list[float]]:
    return [point.bytes for point in points], [point.metrics.mrr for point in points]


def short(num_bytes: float) -> str:
    """Bytes as people say them: 1.5 MB."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if num_bytes >= size:
            return f"{num_bytes / size:.3g} {unit}"
    return f"{num_bytes:.0f} B"


def _caption(graph: str) -> str:
    return (
        f"MRR{' on ' * bool(graph)}{graph} against the bytes that the entity embeddings take: float32, bf16 and int8 "
        f"whole, and float32 without the smallest entries. Relations are float32 and are not counted."
    )
