"""Curves and diagrams as SVG, drawn without scripts: how they look is in run.css."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from dualkg.serve.pages.markup import Child, Markup, tag

WIDTH, HEIGHT = 440, 240
LEFT, RIGHT, TOP, BOTTOM = 46, 52, 14, 34  # margins
LETTERS = "ab"  # the first run, and the second
Place = tuple[float, float]


@dataclass(frozen=True)
class Axis:
    """From numbers to pixels."""

    low: float
    high: float
    first: float  # pixel of the lowest
    last: float
    log: bool = False

    def __call__(self, value: float) -> float:
        low, high, at = self.low, self.high, min(max(value, self.low), self.high) if self.log else value
        if self.log:
            low, high, at = math.log(low), math.log(high), math.log(at)
        share = (at - low) / (high - low) if high > low else 0.5
        return round(self.first + share * (self.last - self.first), 1)


def curves(
    series: Sequence[Sequence[Place]], *, said: str, under: str, written: Callable[[float], str], dots: bool = False
) -> Markup | None:
    """Lines of one or two runs over epochs; `said` is for those who do not see it."""
    places = [place for line in series for place in line if math.isfinite(place[1])]
    if not places:
        return None
    steps = ticks(min(y for _, y in places), max(y for _, y in places))
    across = Axis(0, max(max(x for x, _ in places), 1), LEFT, WIDTH - RIGHT)
    up = Axis(steps[0], steps[-1], HEIGHT - BOTTOM, TOP)
    epochs = [step for step in ticks(0, across.high) if step <= across.high and step == int(step)]
    drawn: list[Child] = [_grid(across, up, epochs, steps, written=written, under=under)]
    ends: list[Place] = []
    for letter, line in zip(LETTERS, series, strict=False):
        pixels = [(across(x), up(y)) for x, y in line if math.isfinite(y)]
        if not pixels:
            continue
        path = "M" + "L".join(f"{x},{y}" for x, y in pixels)
        drawn.append(tag("path", d=path, class_=f"line {letter}"))
        if dots or len(pixels) == 1:
            drawn += [tag("circle", cx=x, cy=y, r=2.5, class_=f"spot {letter}") for x, y in pixels]
        x, y = pixels[-1]
        y = y - 14 if any(abs(x - left) < 50 and abs(y - top) < 13 for left, top in ends) else y
        ends.append((x, y))
        drawn.append(tag("text", written(line[-1][1]), x=x + 6, y=round(y + 4, 1), class_=f"end {letter}"))
    return tag("svg", drawn, viewBox=f"0 0 {WIDTH} {HEIGHT}", class_="curve", role="img", aria_label=said)


def reliability(series: Sequence[Sequence[tuple[float, float, float]]], *, least: float, said: str) -> Markup | None:
    """Points of what was said, what was found, and what chance leaves open; on the diagonal the two agree."""
    if not any(series):
        return None
    side = 340
    steps = [step for step in (0.01, 0.03, 0.1, 0.3, 1.0) if step >= least]
    across, up = Axis(least, 1, LEFT, side - 16, log=True), Axis(least, 1, side - BOTTOM, TOP, log=True)
    drawn: list[Child] = [
        _grid(
            across, up, steps, steps, written=lambda share: f"{100 * share:g} %", under="said", width=side, height=side
        ),
        tag("path", d=f"M{across(least)},{up(least)}L{across(1)},{up(1)}", class_="diagonal"),
        tag("text", "found", x=LEFT, y=TOP - 3, class_="axis"),
    ]
    for letter, points in zip(LETTERS, series, strict=False):
        for predicted, found, chance in points:
            x = across(predicted)
            drawn.append(tag("path", d=f"M{x},{up(found - chance)}V{up(found + chance)}", class_=f"whisker {letter}"))
            drawn.append(tag("circle", cx=x, cy=up(found), r=4.5, class_=f"spot {letter}"))
    return tag("svg", drawn, viewBox=f"0 0 {side} {side}", class_="curve square", role="img", aria_label=said)


def ticks(low: float, high: float, *, about: int = 4) -> list[float]:
    """Round numbers from below the lowest to above the highest."""
    if high <= low:
        low, high = low - 0.5, high + 0.5
    rough = (high - low) / about
    size: float = 10.0 ** math.floor(math.log10(rough))
    step = next(size * factor for factor in (1, 2, 2.5, 5, 10) if size * factor >= rough * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(number * step, 10) for number in range(first, last + 1)]


def _grid(
    across: Axis,
    up: Axis,
    columns: Sequence[float],
    rows: Sequence[float],
    *,
    written: Callable[[float], str],
    under: str,
    width: int = WIDTH,
    height: int = HEIGHT,
) -> list[Markup]:
    base = height - BOTTOM
    made = [tag("path", d=f"M{across.first},{up(row)}H{across.last}", class_="rule") for row in rows]
    made += [tag("text", written(row), x=LEFT - 7, y=up(row) + 4, class_="axis end-anchored") for row in rows]
    columns_said = written if across.log else "{:,.0f}".format
    made += [tag("text", columns_said(x), x=across(x), y=base + 18, class_="axis middle") for x in columns]
    made.append(tag("text", under, x=width - (16 if across.log else RIGHT), y=height - 3, class_="axis end-anchored"))
    return made
