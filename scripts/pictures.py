"""Draw the pictures of the site in light and dark: duality, and speed beside others.

python scripts/pictures.py            # write docs/pictures/
python scripts/pictures.py --check    # fail if a picture is out of date
"""

import argparse
import math
import sys
from dataclasses import dataclass
from pathlib import Path

from paper.pages import measured_speeds

FOLDER = Path(__file__).parents[1] / "docs" / "pictures"


@dataclass(frozen=True)
class Palette:
    """Colours of the explorer's pages: ink, faint lines, and one colour for each thing drawn."""

    text: str
    faint: str
    first: str
    second: str
    third: str


PALETTES = {
    "light": Palette("#25303b", "#c3cad2", "#1d5fa6", "#c8451b", "#2c7d59"),
    "dark": Palette("#e3e8ee", "#4a5563", "#82b4ee", "#ff8a5c", "#6cc9a0"),
}
Point = tuple[float, float]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="write nothing")
    check = parser.parse_args().check
    FOLDER.mkdir(exist_ok=True)
    for name, text in pictures().items():
        path = FOLDER / name
        if not check:
            path.write_text(text, encoding="utf-8")
        elif not path.exists() or path.read_text(encoding="utf-8") != text:
            sys.exit(f"{name} is out of date. Run: python scripts/pictures.py")


def pictures() -> dict[str, str]:
    """The SVG of each picture by its file name."""
    drawn = {}
    for mode, palette in PALETTES.items():
        drawn[f"duality-{mode}.svg"] = duality(palette)
        drawn[f"speed-{mode}.svg"] = speed(palette)
    return drawn


# -- duality -------------------------------------------------------------------

HEAD: Point = (1.0, 0.25)
TAIL: Point = (1.05, 0.8)
ROTATION = math.radians(62)  # what the relation does to a complex coordinate
SCALE = 1.15
UNIT = 120.0


def duality(palette: Palette) -> str:
    """One complex coordinate of ComplEx: the map, the inner product, and the distance."""
    mapped = (
        SCALE * (HEAD[0] * math.cos(ROTATION) - HEAD[1] * math.sin(ROTATION)),
        SCALE * (HEAD[0] * math.sin(ROTATION) + HEAD[1] * math.cos(ROTATION)),
    )
    product = mapped[0] * TAIL[0] + mapped[1] * TAIL[1]
    squared_norm = TAIL[0] ** 2 + TAIL[1] ** 2
    foot = (product / squared_norm * TAIL[0], product / squared_norm * TAIL[1])
    distance = (mapped[0] - TAIL[0]) ** 2 + (mapped[1] - TAIL[1]) ** 2

    panels = [
        [
            *axes(palette, "The relation maps the head", "hR: a rotation and a scale"),
            arc(palette),
            arrow((0, 0), HEAD, palette.first, "h"),
            arrow((0, 0), mapped, palette.second, "hR"),
        ],
        [
            *axes(palette, "Factorization: an inner product", f"⟨hR, t⟩ = {product:.2f}"),
            arrow((0, 0), mapped, palette.second, "hR"),
            arrow((0, 0), TAIL, palette.third, "t"),
            line(mapped, foot, palette.faint, dashed=True),
            line((0, 0), foot, palette.second, width=6, opacity=0.35),
        ],
        [
            *axes(palette, "Its dual: a distance", f"‖hR − t‖² = {distance:.2f}"),
            arrow((0, 0), mapped, palette.second, "hR"),
            arrow((0, 0), TAIL, palette.third, "t"),
            line(mapped, TAIL, palette.first, width=4),
        ],
    ]
    groups = [
        f'<g transform="translate({30 + 300 * column} 30)">{"".join(parts)}</g>'
        for column, parts in enumerate(panels)
    ]
    norms = mapped[0] ** 2 + mapped[1] ** 2 + squared_norm
    identity = (
        f"−‖hR − t‖² = 2⟨hR, t⟩ − (‖hR‖² + ‖t‖²):   "
        f"−{distance:.2f} = 2 · {product:.2f} − {norms:.2f}"
    )
    groups.append(text(450, 296, identity, palette.text, size=17, anchor="middle"))
    groups.append(
        text(
            450,
            322,
            "What the two differ in is the regularizer: DURA keeps ‖hR‖² + ‖t‖² small.",
            palette.text,
            size=15,
            anchor="middle",
        )
    )
    return svg(900, 340, groups)


def axes(palette: Palette, title: str, caption: str) -> list[str]:
    return [
        text(0, 0, title, palette.text, size=15, weight=600),
        text(0, 22, caption, palette.text, size=15),
        line((-0.15, 0), (1.45, 0), palette.faint),
        line((0, -0.15), (0, 1.45), palette.faint),
    ]


def arc(palette: Palette) -> str:
    """The rotation from the head to the mapped head."""
    start = math.atan2(HEAD[1], HEAD[0])
    ends = [(0.55 * math.cos(angle), 0.55 * math.sin(angle)) for angle in (start, start + ROTATION)]
    (x1, y1), (x2, y2) = (place(end) for end in ends)
    radius = 0.55 * UNIT
    return (
        f'<path d="M{x1:.1f} {y1:.1f} A{radius:.0f} {radius:.0f} 0 0 0 {x2:.1f} {y2:.1f}" '
        f'fill="none" stroke="{palette.text}" stroke-width="1.5" stroke-dasharray="3 4"/>'
    )


def place(point: Point) -> Point:
    """Where a point of the plane is in a panel."""
    return 20 + UNIT * point[0], 225 - UNIT * point[1]


def arrow(start: Point, end: Point, colour: str, name: str) -> str:
    """A vector with its name at the tip."""
    (x1, y1), (x2, y2) = place(start), place(end)
    angle = math.atan2(y2 - y1, x2 - x1)
    corners = [(x2, y2)]
    for turn in (2.75, -2.75):
        corners.append((x2 + 12 * math.cos(angle + turn), y2 + 12 * math.sin(angle + turn)))
    tip = " ".join(f"{x:.1f},{y:.1f}" for x, y in corners)
    return (
        line(start, end, colour, width=2.5)
        + f'<polygon points="{tip}" fill="{colour}"/>'
        + text(x2 + 8, y2 - 6, name, colour, size=17, weight=600)
    )


def line(
    start: Point,
    end: Point,
    colour: str,
    *,
    width: float = 1.2,
    dashed: bool = False,
    opacity: float = 1,
) -> str:
    (x1, y1), (x2, y2) = place(start), place(end)
    dashes = ' stroke-dasharray="4 4"' if dashed else ""
    return (
        f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{colour}" '
        f'stroke-width="{width}" opacity="{opacity}"{dashes}/>'
    )


# -- speed ---------------------------------------------------------------------


def speed(palette: Palette) -> str:
    """Two bars for each job: the seconds of somebody else's program, and ours."""
    parts = []
    y = 24
    for job in measured_speeds():
        parts.append(text(10, y, job.name, palette.text, size=15, weight=600))
        longest = max(job.theirs, job.ours)
        for name, seconds, colour in (
            (job.peer, job.theirs, palette.faint),
            ("dualkg", job.ours, palette.second),
        ):
            y += 26
            length = 520 * seconds / longest
            parts.append(text(190, y, name, palette.text, size=14, anchor="end"))
            parts.append(
                f'<rect x="200" y="{y - 13}" width="{length:.1f}" height="17" rx="2" '
                f'fill="{colour}"/>'
            )
            parts.append(text(208 + length, y, f"{seconds:.3g} s", palette.text, size=14))
        parts.append(
            text(890, y, f"{job.theirs / job.ours:.1f}×", palette.second, size=18, anchor="end")
        )
        y += 40
    return svg(900, y - 10, parts)


def text(
    x: float,
    y: float,
    content: str,
    colour: str,
    *,
    size: int,
    anchor: str = "start",
    weight: int = 400,
) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" fill="{colour}" font-size="{size}" '
        f'text-anchor="{anchor}" font-weight="{weight}">{content}</text>'
    )


def svg(width: int, height: int, parts: list[str]) -> str:
    font = "system-ui, 'Segoe UI', Helvetica, Arial, sans-serif"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'font-family="{font}">\n' + "\n".join(parts) + "\n</svg>\n"
    )


if __name__ == "__main__":
    main()
