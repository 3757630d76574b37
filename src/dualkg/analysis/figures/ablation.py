"""MRR over the two weights of DURA, λ1 on the plain norms and λ2 on the mapped ones."""

from __future__ import annotations

from collections.abc import Mapping

from dualkg.analysis.figures import style
from dualkg.analysis.figures.style import Drawing
from dualkg.errors import RequestError

LIGHT, DARK = (0.93, 0.96, 0.98), (0.07, 0.33, 0.54)


def draw_ablation(
    mrr: Mapping[tuple[float, float], float],
    *,
    chosen: tuple[float, float] | None = None,
    title: str = "",
) -> Drawing:
    """(λ1, λ2) → MRR as squares with their numbers; the best in bold, the `chosen` one framed, missing ones empty."""
    if not mrr:
        raise RequestError("A heat map needs the MRR of at least one pair of weights, and none came.")
    plain, mapped = (sorted({pair[side] for pair in mrr}) for side in (0, 1))
    low, high = min(mrr.values()), max(mrr.values())
    with style.in_style():
        from matplotlib.patches import Rectangle

        figure, [axes] = style.sheet(1.5 + 0.62 * len(plain))
        style.entitle(axes, title, "MRR; the darker the better")
        for row, weight in enumerate(plain):
            for column, other in enumerate(mapped):
                value = mrr.get((weight, other))
                share = 0.0 if value is None or high == low else (value - low) / (high - low)
                colour = "#f6f7f8" if value is None else _between(share)
                corner = (column - 0.5, row - 0.5)
                axes.add_patch(Rectangle(corner, 1, 1, facecolor=colour, edgecolor=style.PAPER, linewidth=2))
                axes.text(
                    column,
                    row,
                    "–" if value is None else f"{value:.3f}",
                    color=style.QUIET if value is None else style.PAPER if share > 0.7 else style.INK,
                    fontweight="bold" if value == high else "normal",
                    horizontalalignment="center",
                    verticalalignment="center",
                )
        if chosen and chosen in mrr:
            place = (mapped.index(chosen[1]) - 0.5, plain.index(chosen[0]) - 0.5)
            axes.add_patch(Rectangle(place, 1, 1, fill=False, edgecolor=style.CONTRAST, linewidth=2.2, zorder=3))
        axes.set(xlim=(-0.5, len(mapped) - 0.5), ylim=(len(plain) - 0.5, -0.5))
        axes.set_xticks(range(len(mapped)), [f"{weight:g}" for weight in mapped])
        axes.set_yticks(range(len(plain)), [f"{weight:g}" for weight in plain])
        axes.set(xlabel="λ2, on the mapped norms", ylabel="λ1, on the plain norms")
        axes.tick_params(length=0)
        axes.spines[:].set_visible(False)
    return Drawing(figure, _caption(mrr, chosen))


def _between(share: float) -> tuple[float, float, float]:
    red, green, blue = (light + share * (dark - light) for light, dark in zip(LIGHT, DARK, strict=True))
    return red, green, blue


def _caption(mrr: Mapping[tuple[float, float], float], chosen: tuple[float, float] | None) -> str:
    (plain, mapped), best = max(mrr.items(), key=lambda item: item[1])
    framed = f" Framed: λ1 = {chosen[0]:g} and λ2 = {chosen[1]:g}." if chosen and chosen in mrr else ""
    return f"MRR over the two weights of DURA. Best is {best:.3f}, at λ1 = {plain:g} and λ2 = {mapped:g}.{framed}"
