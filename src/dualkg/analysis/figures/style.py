"""What all figures share: colours, type, the empty sheet, and files that do not change between two runs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from dualkg.analysis.extra import needing
from dualkg.files import replacing

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK, QUIET, FAINT, PAPER = "#1f2933", "#6b7782", "#e4e8eb", "#ffffff"
ACCENT, CONTRAST = "#1b6ca8", "#d9822b"
# Ten that stay apart for colour-blind eyes (Petroff, Accessible color sequences for data visualization, 2021).
TEN_COLOURS = (
    "#3f90da",
    "#ffa90e",
    "#bd1f01",
    "#94a4a2",
    "#832db6",
    "#a96b59",
    "#e76300",
    "#b9ac70",
    "#717581",
    "#92dadd",
)
WIDTH = 8.0  # inches: 800 pixels at 100 dots an inch
DOTS_PER_INCH = 200
STYLE: dict[str, Any] = {
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans", "Verdana", "sans-serif"],  # the first comes with matplotlib, so it is there
    "font.size": 9,
    "text.color": INK,
    "axes.labelcolor": QUIET,
    "axes.labelsize": 9,
    "axes.edgecolor": QUIET,
    "axes.linewidth": 0.6,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlelocation": "left",
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "axes.titlecolor": INK,
    "axes.axisbelow": True,
    "grid.color": FAINT,
    "grid.linewidth": 0.7,
    "xtick.color": QUIET,
    "ytick.color": QUIET,
    "xtick.labelsize": 8.5,
    "ytick.labelsize": 8.5,
    "xtick.major.size": 3,
    "ytick.major.size": 0,
    "xtick.major.width": 0.6,
    "legend.frameon": False,
    "legend.fontsize": 8.5,
    "lines.solid_capstyle": "round",
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "dualkg",
}


@dataclass(frozen=True, eq=False)
class Drawing:
    """A figure and what is to be said below it."""

    figure: Figure
    caption: str

    def save(self, path: str | Path) -> list[Path]:
        """Write the figure as PNG and as SVG, `path` with each ending; the same figure makes the same bytes."""
        path = Path(path)
        stem = path.stem if path.suffix in (".png", ".svg") else path.name
        targets = [path.with_name(f"{stem}.{kind}") for kind in ("png", "svg")]
        about: list[dict[str, Any]] = [
            {"Software": None, "Description": self.caption},
            {"Date": None, "Creator": None, "Description": self.caption},
        ]
        with in_style():
            for target, metadata in zip(targets, about, strict=True):
                with replacing(target) as fresh:
                    self.figure.savefig(fresh, format=target.suffix[1:], dpi=DOTS_PER_INCH, metadata=metadata)
        return targets


@contextmanager
def in_style() -> Iterator[None]:
    """Draw as the house does, whatever the user has set for pictures of their own."""
    with needing("matplotlib", to="A figure"):
        import matplotlib.style
    with matplotlib.style.context(["default", STYLE]):
        yield


def squares(columns: int, *, legend_rows: int) -> tuple[Figure, list[Axes]]:
    """A white figure of square panels from left to right, with room for titles above and for a legend below."""
    with needing("matplotlib", to="A figure"):
        from matplotlib.figure import Figure
    margin, between, above, below = 0.1, 0.2, 0.58, 0.3 + 0.195 * legend_rows
    side = min((WIDTH - 2 * margin - between * (columns - 1)) / columns, 5.5)
    height = below + side + above
    left = (WIDTH - columns * side - between * (columns - 1)) / 2
    figure = Figure(figsize=(WIDTH, height), facecolor=PAPER)
    corners = [left + (side + between) * column for column in range(columns)]
    return figure, [figure.add_axes((x / WIDTH, below / height, side / WIDTH, side / height)) for x in corners]


def sheet(height: float, *, columns: int = 1, gap: float = 0.02, **choices: Any) -> tuple[Figure, list[Axes]]:
    """A white figure as wide as the page, and its panels from left to right."""
    with needing("matplotlib", to="A figure"):
        from matplotlib.figure import Figure
        from matplotlib.layout_engine import ConstrainedLayoutEngine
    layout = ConstrainedLayoutEngine(w_pad=0.08, h_pad=0.08, wspace=gap)
    figure = Figure(figsize=(WIDTH, height), layout=layout, facecolor=PAPER)
    panels = figure.subplots(1, columns, squeeze=False, **choices)
    return figure, list(panels[0])


def entitle(axes: Axes, title: str, below: str = "") -> None:
    """A panel's title at its left, and below it in quiet ink what is to be read first."""
    axes.set_title(title, pad=22 if below else 8)
    if below:
        axes.annotate(below, (0, 1), (0, 8), xycoords="axes fraction", textcoords="offset points", color=QUIET)


def line_of_seeds(axes: Axes, values: Mapping[float, Sequence[float]], *, name: str, colour: str) -> None:
    """Place → a value for each seed: a line through their means, and a dot for each."""
    axes.plot(list(values), [fmean(some) for some in values.values()], color=colour, linewidth=1.8, label=name)
    for place, some in values.items():
        axes.scatter([place] * len(some), some, s=16, color=colour, zorder=4, clip_on=False)


def without_axes(axes: Axes) -> None:
    """A panel whose coordinates mean nothing: a faint frame and no numbers."""
    axes.set(xticks=[], yticks=[])
    for spine in axes.spines.values():
        spine.set(visible=True, color=FAINT, linewidth=0.8)


def spaced(wanted: list[float], gap: float, *, least: float) -> list[float]:
    """Places at least `gap` apart and not below `least`, in the order of the wanted ones and as near them as can be."""
    order = sorted(range(len(wanted)), key=lambda place: wanted[place])
    groups: list[list[int]] = []
    centres: list[float] = []
    for place in order:
        groups.append([place])
        centres.append(wanted[place])
        while len(groups) > 1 and centres[-1] - centres[-2] < gap * (len(groups[-1]) + len(groups[-2])) / 2:
            merged = groups.pop(-2) + groups.pop()
            del centres[-2:]
            groups.append(merged)
            centres.append(sum(wanted[one] for one in merged) / len(merged))
    places = dict[int, float]()
    for centre, group in zip(centres, groups, strict=True):
        for number, place in enumerate(group):
            places[place] = centre + gap * (number - (len(group) - 1) / 2)
    for number, place in enumerate(order):
        places[place] = max(places[place], least + gap * number)
    return [places[place] for place in range(len(wanted))]
