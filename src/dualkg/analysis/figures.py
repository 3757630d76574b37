"""Figures: their common style, saving as PNG and SVG, the reliability diagram, and the picture of a
graph.
"""

from __future__ import annotations

import warnings
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
    "text.parse_math": False,  # a name may contain $
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "dualkg",
}


@dataclass(frozen=True, eq=False)
class Drawing:
    """A figure and its caption."""

    figure: Figure
    caption: str

    def save(self, path: str | Path) -> list[Path]:
        """Write the figure as PNG and as SVG, next to each other; the same figure gives the same
        bytes.
        """
        path = Path(path)
        stem = path.stem if path.suffix in (".png", ".svg") else path.name
        targets = {
            path.with_name(f"{stem}.png"): ["Software"],
            path.with_name(f"{stem}.svg"): ["Date", "Creator"],
        }
        with figure_style(), warnings.catch_warnings():
            warnings.filterwarnings(
                "ignore", "Glyph .* missing"
            )  # the SVG keeps text as text, for any font
            for target, varying in targets.items():
                metadata = {**dict.fromkeys(varying), "Description": self.caption}
                with atomic_write(target) as fresh:
                    self.figure.savefig(
                        fresh, format=target.suffix[1:], dpi=DOTS_PER_INCH, metadata=metadata
                    )
        return list(targets)


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
    return Figure(
        figsize=(WIDTH, height), layout=ConstrainedLayoutEngine(**layout), facecolor=PAPER
    )


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


Point = tuple[
    float, float, float
]  # predicted, observed, and their expected difference by chance alone
TICKS = {0.001: "0.1%", 0.01: "1%", 0.1: "10%", 1.0: "100%"}
# About 95 of 100 bins with correct probabilities lie within this multiple of the expected
# difference.
BAND = 2.5


def draw_reliability(
    panels: Mapping[str, Sequence[Point]], *, graph: str = "", ece: float | None = None
) -> Drawing:
    """A reliability diagram: panel title → its bins. Axes are logarithmic, because most
    probabilities are small.
    """
    if not panels or not all(panels.values()):
        raise RequestError("A reliability diagram needs at least one bin in each panel.")
    smallest = min(
        value for points in panels.values() for point in points for value in point[:2] if value > 0
    )
    low = max(min(smallest / 1.6, 0.008), 1e-7)
    with figure_style():
        figure, all_axes = new_figure(
            5.2 if len(panels) == 1 else 8.6 / len(panels) + 0.4, columns=len(panels)
        )
        for axes, (title, points) in zip(all_axes, panels.items(), strict=True):
            set_titles(axes, title)
            _set_log_axes(axes, low)
            _plot_bins(axes, sorted(points), low)
        all_axes[0].set_ylabel("observed frequency")
    error = f" Expected calibration error: {ece:.4f}." if ece is not None else ""
    return Drawing(
        figure,
        f"Candidates{' of ' * bool(graph)}{graph} in bins of equal mass: the observed frequency "
        "of true triples against the predicted probability. On the dashed line the two agree; "
        f"the grey band is the deviation expected by chance.{error}",
    )


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
    for x, y, point in zip(
        predicted, observed, points, strict=True
    ):  # hollow where no candidate was true
        face = ACCENT if point[1] > 0 else PAPER
        axes.scatter(x, y, s=34, color=face, edgecolors=ACCENT, zorder=4, clip_on=False)


# -- the picture of a graph --------------------------------------------------

NUM_BARS = 12  # relations that are drawn
MAX_LETTERS = 38  # of the name of a relation
BAR_LABEL: dict[str, Any] = {"padding": 4, "fontsize": 8, "color": QUIET}
CARDINALITY_COLORS = {
    "1-1": "#7fb8a4",
    "1-N": "#8ec1e3",
    "N-1": CONTRAST,
    "N-N": ACCENT,
    "unseen": FAINT,
}
SHARES = {
    "unseen_triples": "unseen entity\nor relation",
    "leaked": "leaked by copies or\nredundant relations",
    "reverse": "any reverse\nin train",
    "parallel": "another relation\nin train",
}


def draw_inspection(found: Inspection) -> Drawing:
    """Degrees, unseen and leaked triples, and the largest relations coloured by cardinality."""
    top = 3.3
    bottom = 1.0 + 0.24 * min(len(found.relations), NUM_BARS)  # inches
    sizes = {split: len(part) for split, part in found.triples.items()}
    leaks = [
        f"{facts.leaked / max(sizes[split], 1):.1%} of {split}"
        for split, facts in found.held_out.items()
    ]
    counts = (
        (len(found.entities), "entities"),
        (len(found.relations), "relations"),
        (sum(sizes.values()), "triples"),
    )
    title = f"{found.graph}: {', '.join(f'{number:,} {kind}' for number, kind in counts)}"
    with figure_style():
        figure = _white_figure(0.4 + top + bottom, w_pad=0.1, h_pad=0.1)
        figure.suptitle(title, x=0.0125, horizontalalignment="left", fontsize=13, fontweight="bold")
        above, below = figure.subfigures(2, 1, height_ratios=(top, bottom), squeeze=False)[:, 0]
        left, right = above.subfigures(1, 2, width_ratios=(0.46, 0.54), squeeze=False)[0]
        _draw_degrees(left.subplots(), found)
        _draw_shares(right.subplots(), found)
        _draw_relations(below.subplots(), found)
    return Drawing(
        figure,
        f"Degrees, relations and leakage of {found.graph}. Train leaks {' and '.join(leaks)}.",
    )


def _draw_degrees(axes: Axes, found: Inspection) -> None:
    degrees = found.degrees
    bins = found.degrees.distribution
    set_titles(
        axes,
        "Degrees in train",
        f"median {degrees.median:g}, mean {degrees.mean:.1f}, maximum {degrees.max:,}",
    )
    axes.bar(range(len(bins)), [one["entities"] for one in bins], width=0.86, color=ACCENT)
    labelled = range(0, len(bins), 1 + len(bins) // 8)
    axes.set_xticks(
        labelled, [_degree_label(bins[place]["from"], bins[place]["to"]) for place in labelled]
    )
    axes.set(xlabel="triples per entity", ylabel="entities")
    axes.grid(True, axis="y")
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.spines["left"].set_visible(False)


def _degree_label(low: int, high: int) -> str:
    """`1`, `4–7`, `64+`, `4k+`, `1M+`."""
    if high < 32:
        return str(low) if low == high else f"{low}–{high}"
    return f"{low}+" if low < 2**10 else f"{low // 2**10}k+" if low < 2**20 else f"{low // 2**20}M+"


def _draw_shares(axes: Axes, found: Inspection) -> None:
    set_titles(axes, "Unseen or leaked", "share of triples")
    for offset, (split, color) in enumerate((("valid", "#9cc3df"), ("test", ACCENT))):
        shares = [
            getattr(found.held_out[split], name) / max(len(found.triples[split]), 1)
            for name in SHARES
        ]
        places = [row + 0.38 * (offset - 0.5) for row in range(len(SHARES))]
        bars = axes.barh(places, shares, height=0.34, color=color, label=split)
        axes.bar_label(bars, [f"{share:.1%}" if share else "0" for share in shares], **BAR_LABEL)
    axes.set_yticks(range(len(SHARES)), list(SHARES.values()))
    axes.set_xticks((0, 0.25, 0.5, 0.75, 1), ("0", "25%", "50%", "75%", "100%"))
    axes.set_xlim(0, 1.14)
    axes.grid(True, axis="x")
    _list_downwards(axes)


def _draw_relations(axes: Axes, found: Inspection) -> None:
    from matplotlib.patches import Patch

    rows = sorted(found.by_relation.items(), key=lambda item: -item[1].train)[:NUM_BARS]
    some = len(found.relations) > NUM_BARS
    subtitle = f"largest {NUM_BARS} of {len(found.relations):,}" if some else "by cardinality"
    set_titles(axes, "Training triples by relation", subtitle)
    names = [found.relations.label(found.relations.id(name)) for name, _ in rows]
    # Of a long path the end says more than the beginning.
    names = [name if len(name) <= MAX_LETTERS else f"…{name[1 - MAX_LETTERS :]}" for name in names]
    colors = [CARDINALITY_COLORS[row.cardinality] for _, row in rows]
    bars = axes.barh(range(len(rows)), [row.train for _, row in rows], height=0.74, color=colors)
    axes.bar_label(bars, [f"{row.train:,}" for _, row in rows], **BAR_LABEL)
    axes.set_yticks(range(len(rows)), names)
    axes.set_xticks([])
    axes.margins(x=0.1, y=0.01)
    axes.spines["bottom"].set_visible(False)
    total = max(len(found.triples["train"]), 1)
    labels = {
        kind: f"{kind}: {facts['train'] / total:.0%}"
        for kind, facts in found.by_cardinality.items()
    }
    _list_downwards(
        axes, [Patch(color=CARDINALITY_COLORS[kind], label=label) for kind, label in labels.items()]
    )


def _list_downwards(axes: Axes, patches: Sequence[Any] | None = None) -> None:
    """The first bar on top, no axis line beside the names, and the legend right above."""
    axes.invert_yaxis()
    axes.tick_params(axis="y", labelcolor=INK)
    axes.spines["left"].set_visible(False)
    options: dict[str, Any] = {
        "ncols": 5,
        "handlelength": 1,
        "handleheight": 1,
        "columnspacing": 1.2,
    }
    axes.legend(handles=patches, loc="lower right", bbox_to_anchor=(1, 1), **options)
