"""Figures: style, saving as PNG and SVG, the reliability diagram, the picture of a graph."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dualkg.errors import InvalidValue
from dualkg.extras import optional_import
from dualkg.files import atomic_write

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from dualkg.data.inspection import Inspection


INK = "#1f2933"
QUIET = "#6b7782"
FAINT = "#e4e8eb"
PAPER = "#ffffff"
ACCENT = "#1b6ca8"
CONTRAST = "#d9822b"
WIDTH = 8.0  # inches: 800 pixels at 100 dots an inch
DOTS_PER_INCH = 200
STYLE: dict[str, Any] = {
    # Fonts. DejaVu Sans ships with matplotlib.
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans", "Verdana", "sans-serif"],
    "font.size": 9,
    "axes.labelsize": 9,
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "xtick.labelsize": 8.5,
    "ytick.labelsize": 8.5,
    "legend.fontsize": 8.5,
    # Colours.
    "text.color": INK,
    "axes.titlecolor": INK,
    "axes.labelcolor": QUIET,
    "axes.edgecolor": QUIET,
    "xtick.color": QUIET,
    "ytick.color": QUIET,
    "grid.color": FAINT,
    # Lines.
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.linewidth": 0.6,
    "xtick.major.width": 0.6,
    "xtick.major.size": 3,
    "ytick.major.size": 0,
    "grid.linewidth": 0.7,
    "lines.solid_capstyle": "round",
    "legend.frameon": False,
    # Text stays text in an SVG, and a name may contain $.
    "text.parse_math": False,
    "svg.fonttype": "none",
    "svg.hashsalt": "dualkg",
}


@dataclass(frozen=True, eq=False)
class Drawing:
    """A figure and its caption."""

    figure: Figure
    caption: str

    def save(self, path: str | Path) -> list[Path]:
        """Write the figure as PNG and as SVG, next to each other.

        The same figure gives the same bytes: dates and versions are left out of the metadata.
        """
        path = Path(path)
        stem = path.stem if path.suffix in (".png", ".svg") else path.name
        png = path.with_name(f"{stem}.png")
        svg = path.with_name(f"{stem}.svg")
        with figure_style(), warnings.catch_warnings():
            # The SVG keeps text as text, so that its reader may have a font with the glyph.
            warnings.filterwarnings("ignore", "Glyph .* missing")
            self._write(png, format="png", omitted=("Software",))
            self._write(svg, format="svg", omitted=("Date", "Creator"))
        return [png, svg]

    def _write(self, path: Path, *, format: str, omitted: Sequence[str]) -> None:
        metadata = {**dict.fromkeys(omitted), "Description": self.caption}
        with atomic_write(path) as fresh:
            self.figure.savefig(fresh, format=format, dpi=DOTS_PER_INCH, metadata=metadata)


@contextmanager
def figure_style() -> Iterator[None]:
    """Draw in the style of this module, whatever the user's matplotlib settings are."""
    with optional_import("matplotlib", purpose="A figure"):
        import matplotlib.style
    with matplotlib.style.context(["default", STYLE]):
        yield


def new_figure(
    height: float, *, columns: int = 1, gap: float = 0.02, **options: Any
) -> tuple[Figure, list[Axes]]:
    """A white figure of the width of the page with panels from left to right."""
    figure = _white_figure(height, w_pad=0.08, h_pad=0.08, wspace=gap)
    return figure, list(figure.subplots(1, columns, squeeze=False, **options)[0])


def _white_figure(height: float, **layout: Any) -> Figure:
    with optional_import("matplotlib", purpose="A figure"):
        from matplotlib.figure import Figure
        from matplotlib.layout_engine import ConstrainedLayoutEngine
    engine = ConstrainedLayoutEngine(**layout)
    return Figure(figsize=(WIDTH, height), layout=engine, facecolor=PAPER)


def set_titles(axes: Axes, title: str, subtitle: str = "") -> None:
    axes.set_title(title, pad=22 if subtitle else 8)
    if subtitle:
        axes.annotate(
            subtitle,
            (0, 1),
            (0, 8),
            xycoords="axes fraction",
            textcoords="offset points",
            color=QUIET,
        )


# -- the reliability diagram ---------------------------------------------------

# Predicted probability, observed frequency, and their expected difference by chance alone.
Point = tuple[float, float, float]
TICKS = {0.001: "0.1%", 0.01: "1%", 0.1: "10%", 1.0: "100%"}
# About 95 of 100 bins with correct probabilities lie within this multiple of the expected
# difference.
BAND = 2.5


def draw_reliability(
    panels: Mapping[str, Sequence[Point]], *, graph: str = "", ece: float | None = None
) -> Drawing:
    """A reliability diagram: panel title → its bins.

    Axes are logarithmic, because most probabilities are small.
    """
    if not panels or not all(panels.values()):
        raise InvalidValue(
            "panels", expected="panels with at least one bin each", found=dict(panels)
        )
    low = _lowest_value(panels)
    height = 5.2 if len(panels) == 1 else 8.6 / len(panels) + 0.4
    with figure_style():
        figure, all_axes = new_figure(height, columns=len(panels))
        for axes, (title, points) in zip(all_axes, panels.items(), strict=True):
            set_titles(axes, title)
            _set_log_axes(axes, low)
            _plot_bins(axes, sorted(points), low)
        all_axes[0].set_ylabel("observed frequency")

    candidates = f"Candidates of {graph}" if graph else "Candidates"
    caption = (
        f"{candidates} in bins of equal mass: the observed frequency of true triples against the "
        "predicted probability. On the dashed line the two agree; the grey band is the deviation "
        "expected by chance."
    )
    if ece is not None:
        caption += f" Expected calibration error: {ece:.4f}."
    return Drawing(figure, caption)


def _lowest_value(panels: Mapping[str, Sequence[Point]]) -> float:
    """Where the logarithmic axes begin: a little below the smallest positive value."""
    positive = []
    for points in panels.values():
        for predicted, observed, _ in points:
            positive += [value for value in (predicted, observed) if value > 0]
    return max(min(min(positive) / 1.6, 0.008), 1e-7)


def _set_log_axes(axes: Axes, low: float) -> None:
    from matplotlib.ticker import NullLocator

    axes.set(
        xscale="log",
        yscale="log",
        xlim=(low, 1.05),
        ylim=(low, 1.05),
        xlabel="predicted probability",
    )
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
    for x, y, point in zip(predicted, observed, points, strict=True):
        # A bin without a true candidate is a hollow circle.
        face = ACCENT if point[1] > 0 else PAPER
        axes.scatter(x, y, s=34, color=face, edgecolors=ACCENT, zorder=4, clip_on=False)


# -- the picture of a graph --------------------------------------------------

NUM_BARS = 12  # relations that are drawn
MAX_LETTERS = 38  # characters that are shown of a relation's name
BAR_LABEL: dict[str, Any] = {"padding": 4, "fontsize": 8, "color": QUIET}
CARDINALITY_COLORS = {
    "1-1": "#7fb8a4",
    "1-N": "#8ec1e3",
    "N-1": CONTRAST,
    "N-N": ACCENT,
    "unseen": FAINT,
}
# Fields of a held-out split whose share of its triples is drawn, with their labels.
SHARES = {
    "unseen_triples": "unseen entity\nor relation",
    "leaked": "leaked by copies or\nredundant relations",
    "reverse": "any reverse\nin train",
    "parallel": "another relation\nin train",
}


def draw_inspection(inspection: Inspection) -> Drawing:
    """Degrees, unseen and leaked triples, and the largest relations coloured by cardinality."""
    top_height = 3.3
    bottom_height = 1.0 + 0.24 * min(len(inspection.relations), NUM_BARS)
    with figure_style():
        figure = _white_figure(0.4 + top_height + bottom_height, w_pad=0.1, h_pad=0.1)
        figure.suptitle(
            _inspection_title(inspection),
            x=0.0125,
            horizontalalignment="left",
            fontsize=13,
            fontweight="bold",
        )
        height_ratios = (top_height, bottom_height)
        above, below = figure.subfigures(2, 1, height_ratios=height_ratios, squeeze=False)[:, 0]
        left, right = above.subfigures(1, 2, width_ratios=(0.46, 0.54), squeeze=False)[0]
        _draw_degrees(left.subplots(), inspection)
        _draw_shares(right.subplots(), inspection)
        _draw_relations(below.subplots(), inspection)

    leaks = []
    for split, facts in inspection.held_out.items():
        num_triples = max(len(inspection.triples[split]), 1)
        leaks.append(f"{facts.leaked / num_triples:.1%} of {split}")
    caption = (
        f"Degrees, relations and leakage of {inspection.graph}. Train leaks {' and '.join(leaks)}."
    )
    return Drawing(figure, caption)


def _inspection_title(inspection: Inspection) -> str:
    num_triples = sum(len(triples) for triples in inspection.triples.values())
    return (
        f"{inspection.graph}: {len(inspection.entities):,} entities, "
        f"{len(inspection.relations):,} relations, {num_triples:,} triples"
    )


def _draw_degrees(axes: Axes, inspection: Inspection) -> None:
    degrees = inspection.degrees
    bins = degrees.distribution
    subtitle = f"median {degrees.median:g}, mean {degrees.mean:.1f}, maximum {degrees.max:,}"
    set_titles(axes, "Degrees in train", subtitle)
    counts = [degree_bin["entities"] for degree_bin in bins]
    axes.bar(range(len(bins)), counts, width=0.86, color=ACCENT)

    labelled = range(0, len(bins), 1 + len(bins) // 8)
    labels = [_degree_label(bins[index]["from"], bins[index]["to"]) for index in labelled]
    axes.set_xticks(labelled, labels)
    axes.set(xlabel="triples per entity", ylabel="entities")
    axes.grid(True, axis="y")
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.spines["left"].set_visible(False)


def _degree_label(low: int, high: int) -> str:
    """`1`, `4–7`, `64+`, `4k+`, `1M+`."""
    if high < 32:
        return str(low) if low == high else f"{low}–{high}"
    if low < 2**10:
        return f"{low}+"
    if low < 2**20:
        return f"{low // 2**10}k+"
    return f"{low // 2**20}M+"


def _draw_shares(axes: Axes, inspection: Inspection) -> None:
    set_titles(axes, "Unseen or leaked", "share of triples")
    for offset, (split, color) in enumerate((("valid", "#9cc3df"), ("test", ACCENT))):
        facts = inspection.held_out[split]
        num_triples = max(len(inspection.triples[split]), 1)
        shares = [getattr(facts, name) / num_triples for name in SHARES]
        positions = [row + 0.38 * (offset - 0.5) for row in range(len(SHARES))]
        bars = axes.barh(positions, shares, height=0.34, color=color, label=split)
        labels = [f"{share:.1%}" if share else "0" for share in shares]
        axes.bar_label(bars, labels, **BAR_LABEL)
    axes.set_yticks(range(len(SHARES)), list(SHARES.values()))
    axes.set_xticks((0, 0.25, 0.5, 0.75, 1), ("0", "25%", "50%", "75%", "100%"))
    axes.set_xlim(0, 1.14)
    axes.grid(True, axis="x")
    _list_downwards(axes)


def _draw_relations(axes: Axes, inspection: Inspection) -> None:
    from matplotlib.patches import Patch

    relations = inspection.relations
    largest_first = sorted(inspection.by_relation.items(), key=lambda item: -item[1].train)
    rows = largest_first[:NUM_BARS]
    subtitle = "by cardinality"
    if len(relations) > NUM_BARS:
        subtitle = f"largest {NUM_BARS} of {len(relations):,}"
    set_titles(axes, "Training triples by relation", subtitle)

    counts = [facts.train for _, facts in rows]
    colors = [CARDINALITY_COLORS[facts.cardinality] for _, facts in rows]
    bars = axes.barh(range(len(rows)), counts, height=0.74, color=colors)
    axes.bar_label(bars, [f"{number:,}" for number in counts], **BAR_LABEL)
    labels = [_with_short_path(relations.label(relations.id(name))) for name, _ in rows]
    axes.set_yticks(range(len(rows)), labels)
    axes.set_xticks([])
    axes.margins(x=0.1, y=0.01)
    axes.spines["bottom"].set_visible(False)

    total = max(len(inspection.triples["train"]), 1)
    patches = []
    for cardinality, facts in inspection.by_cardinality.items():
        label = f"{cardinality}: {facts['train'] / total:.0%}"
        patches.append(Patch(color=CARDINALITY_COLORS[cardinality], label=label))
    _list_downwards(axes, patches)


def _with_short_path(name: str) -> str:
    """The end of a long name: of a path, it says more than the beginning."""
    return name if len(name) <= MAX_LETTERS else f"…{name[1 - MAX_LETTERS :]}"


def _list_downwards(axes: Axes, patches: Sequence[Any] | None = None) -> None:
    """The first bar on top, no axis line beside the names, and the legend right above."""
    axes.invert_yaxis()
    axes.tick_params(axis="y", labelcolor=INK)
    axes.spines["left"].set_visible(False)
    axes.legend(
        handles=patches,
        loc="lower right",
        bbox_to_anchor=(1, 1),
        ncols=5,
        handlelength=1,
        handleheight=1,
        columnspacing=1.2,
    )
