"""Figures: their common style, saving as PNG and SVG, and the reliability diagram."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dualkg.errors import RequestError
from dualkg.extras import optional_import
from dualkg.files import atomic_write

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


INK, QUIET, FAINT, PAPER = "#1f2933", "#6b7782", "#e4e8eb", "#ffffff"
ACCENT, CONTRAST = "#1b6ca8", "#d9822b"
WIDTH = 8.0  # inches: 800 pixels at 100 dots an inch
DOTS_PER_INCH = 200
STYLE: dict[str, Any] = {
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans", "Verdana", "sans-serif"],  # the first ships with matplotlib
    **dict.fromkeys(("text.color", "axes.titlecolor"), INK),
    **dict.fromkeys(("axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), QUIET),
    "grid.color": FAINT,
    **dict.fromkeys(("font.size", "axes.labelsize"), 9),
    **dict.fromkeys(("xtick.labelsize", "ytick.labelsize", "legend.fontsize"), 8.5),
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.axisbelow": True,
    **dict.fromkeys(("axes.spines.top", "axes.spines.right", "legend.frameon"), False),
    **dict.fromkeys(("axes.linewidth", "xtick.major.width"), 0.6),
    "grid.linewidth": 0.7,
    "xtick.major.size": 3,
    "ytick.major.size": 0,
    "lines.solid_capstyle": "round",
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "dualkg",
}


@dataclass(frozen=True, eq=False)
class Drawing:
    """A figure and its caption."""

    figure: Figure
    caption: str

    def save(self, path: str | Path) -> list[Path]:
        """Write the figure as PNG and as SVG, next to each other; the same figure gives the same bytes."""
        path = Path(path)
        stem = path.stem if path.suffix in (".png", ".svg") else path.name
        metadata: dict[str, dict[str, Any]] = {"png": {"Software": None}, "svg": {"Date": None, "Creator": None}}
        targets = []
        with figure_style():
            for format_, fields in metadata.items():
                targets.append(path.with_name(f"{stem}.{format_}"))
                fields["Description"] = self.caption
                with atomic_write(targets[-1]) as fresh:
                    self.figure.savefig(fresh, format=format_, dpi=DOTS_PER_INCH, metadata=fields)
        return targets


@contextmanager
def figure_style() -> Iterator[None]:
    """Draw in the style of this module, whatever the user's matplotlib settings are."""
    with optional_import("matplotlib", purpose="A figure"):
        import matplotlib.style
    with matplotlib.style.context(["default", STYLE]):
        yield


def new_figure(height: float, *, columns: int = 1, gap: float = 0.02, **options: Any) -> tuple[Figure, list[Axes]]:
    """A white figure of the width of the page with panels from left to right."""
    with optional_import("matplotlib", purpose="A figure"):
        from matplotlib.figure import Figure
        from matplotlib.layout_engine import ConstrainedLayoutEngine
    layout = ConstrainedLayoutEngine(w_pad=0.08, h_pad=0.08, wspace=gap)
    figure = Figure(figsize=(WIDTH, height), layout=layout, facecolor=PAPER)
    panels = figure.subplots(1, columns, squeeze=False, **options)
    return figure, list(panels[0])


def set_titles(axes: Axes, title: str, subtitle: str = "") -> None:
    axes.set_title(title, pad=22 if subtitle else 8)
    if subtitle:
        axes.annotate(subtitle, (0, 1), (0, 8), xycoords="axes fraction", textcoords="offset points", color=QUIET)


Point = tuple[float, float, float]  # predicted, observed, and their expected difference by chance alone
TICKS = {0.001: "0.1%", 0.01: "1%", 0.1: "10%", 1.0: "100%"}
BAND = 2.5  # about 95 of 100 bins with correct probabilities lie within this multiple of the expected difference


def draw_reliability(panels: Mapping[str, Sequence[Point]], *, graph: str = "", ece: float | None = None) -> Drawing:
    """A reliability diagram: panel title → its bins. Axes are logarithmic, because most probabilities are small."""
    if not panels or not all(panels.values()):
        raise RequestError("A reliability diagram needs at least one bin in each panel.")
    smallest = min(value for points in panels.values() for point in points for value in point[:2] if value > 0)
    low = max(min(smallest / 1.6, 0.008), 1e-7)
    with figure_style():
        figure, all_axes = new_figure(5.2 if len(panels) == 1 else 8.6 / len(panels) + 0.4, columns=len(panels))
        for axes, (title, points) in zip(all_axes, panels.items(), strict=True):
            set_titles(axes, title)
            _set_log_axes(axes, low)
            _plot_bins(axes, sorted(points), low)
        all_axes[0].set_ylabel("observed frequency")
    error = f" Expected calibration error: {ece:.4f}." if ece is not None else ""
    return Drawing(
        figure,
        f"Candidates{' of ' * bool(graph)}{graph} in bins of equal mass: the observed frequency of true triples "
        f"against the predicted probability. On the dashed line the two agree; the grey band is the deviation expected "
        f"by chance.{error}",
    )


def _set_log_axes(axes: Axes, low: float) -> None:
    from matplotlib.ticker import NullLocator

    axes.set(xscale="log", yscale="log", xlim=(low, 1.05), ylim=(low, 1.05), xlabel="predicted probability")
    ticks = [value for value in TICKS if value >= low]
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_minor_locator(NullLocator())
        axis.set_ticks(ticks, [TICKS[value] for value in ticks])
        axis.grid(True)
    axes.set_aspect("equal")
    axes.spines["left"].set_visible(False)


def _plot_bins(axes: Axes, points: Sequence[Point], low: float) -> None:
    axes.plot([low, 1], [low, 1], color=QUIET, linewidth=0.8, linestyle=(0, (4, 3)), zorder=2)
    predicted = [point[0] for point in points]
    lower = [max(low, value - BAND * noise) for value, _, noise in points]
    upper = [min(1.0, value + BAND * noise) for value, _, noise in points]
    axes.fill_between(predicted, lower, upper, color=FAINT, linewidth=0, zorder=1)
    observed = [max(point[1], low) for point in points]
    axes.plot(predicted, observed, color=ACCENT, linewidth=1.4, zorder=3)
    for x, y, point in zip(predicted, observed, points, strict=True):  # hollow where no candidate was true
        face = ACCENT if point[1] > 0 else PAPER
        axes.scatter(x, y, s=34, color=face, edgecolors=ACCENT, zorder=4, clip_on=False)
