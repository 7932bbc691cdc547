"""The plots of the HTML report: elements that escape what they hold, and SVG made of them.

Text and attribute values are escaped where an element is made; only `Html`, which is an element already, passes as it
is. Colours are classes, so that the page's style sheet decides them for light and dark; hovering shows a mark's
numbers (`<title>`). A heat map's shade tells rows / mean rows of the layer, in doublings:

    ... [1/4, 1/2)  [1/2, 1)  [1, 2)  [2, 4) ...

What this file does not know: where the numbers come from.
"""

from __future__ import annotations

import html
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff]")

PANEL_WIDTH, PANEL_HEIGHT = 360, 150
PLOT_LEFT, PLOT_RIGHT, PLOT_TOP, PLOT_BOTTOM = 36, 352, 8, 128
SHADE_LIMITS = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0)
SHADE_NAMES = ("< 1/4 of the mean", "1/4 – 1/2", "1/2 – 1", "1 – 2 times", "2 – 4", "4 – 8", "≥ 8 times")
HEAT_WIDTH, HEAT_LEFT, HEAT_TOP = 1080, 34, 18


class Html(str):
    """Text that is markup already: never escaped again."""


def el(name: str, *children: str, **attributes: object) -> Html:
    """An element. `class_` is class, `stroke_width` is stroke-width; an attribute that is None is left out."""
    inner = "".join(child if isinstance(child, Html) else escape(child) for child in children)
    named = [(key.rstrip("_").replace("_", "-"), value) for key, value in attributes.items() if value is not None]
    written = "".join(f' {key}="{escape(_number(value))}"' for key, value in named)
    return Html(f"<{name}{written}>{inner}</{name}>")


def escape(value: str) -> str:
    """Text as HTML; control characters and halves of characters, which a page cannot hold, become U+FFFD."""
    return html.escape(CONTROL.sub("\ufffd", value))


def _number(value: object) -> str:
    return f"{round(value, 1):g}" if isinstance(value, float) else str(value)


# --- points over layers ------------------------------------------------------------------------


@dataclass(frozen=True)
class Point:
    """One layer of a series: the value of all its modules together, the extremes of single ones, and what to tell."""

    layer: int
    value: float
    low: float
    high: float
    note: str


@dataclass(frozen=True)
class Scale:
    """Layers and values of a plot; panels that share one can be compared."""

    last_layer: int
    low: float
    high: float

    def x(self, layer: float) -> float:
        """Pixels from the left."""
        return PLOT_LEFT + 6 + (PLOT_RIGHT - PLOT_LEFT - 12) * (layer / self.last_layer if self.last_layer else 0.5)

    def y(self, value: float) -> float:
        """Pixels from the top; values beyond the scale lie on its edge."""
        share = (min(max(value, self.low), self.high) - self.low) / (self.high - self.low)
        return PLOT_BOTTOM - (PLOT_BOTTOM - PLOT_TOP) * share


def scale_of(points: Sequence[Point], ceiling: float, least: float = 1.0) -> Scale:
    """A scale that holds all points below `ceiling` and spans at least `least`, so that noise does not look like news.

    Points at the ceiling (no error at all) would flatten the others.
    """
    values = [value for point in points for value in (point.low, point.value, point.high) if value < ceiling]
    low, high = (min(values), max(values)) if values else (ceiling - least, ceiling)
    margin = max(0.06 * (high - low), (least - (high - low)) / 2)
    return Scale(max((point.layer for point in points), default=0), low - margin, high + margin)


def ticks(low: float, high: float, most: int = 5) -> list[float]:
    """Round numbers between low and high: at most `most`, steps of 1, 2 or 5 times a power of ten."""
    power = 10 ** math.floor(math.log10((high - low) / most))
    step = next(s * power for s in (1, 2, 5, 10, 20) if (high - low) / (s * power) <= most - 1 or s == 20)
    return [i * step for i in range(math.ceil(low / step), math.floor(high / step) + 1)]


def layer_panel(points: Sequence[Point], scale: Scale, label: str) -> Html:
    """Dots joined by a line, and a band from the lowest to the highest module of each layer.

    `label`: what a screen reader says.
    """
    marks: list[Html] = list(_axes(scale))
    ordered = sorted(points, key=lambda point: point.layer)
    for run in _runs(ordered):
        if any(point.low < point.high for point in run):
            marks.append(_band(run, scale))
        line = " ".join(f"{scale.x(p.layer):.1f},{scale.y(p.value):.1f}" for p in run)
        marks.append(el("polyline", points=line, class_="line"))
    radius = 4.0 if len(ordered) <= 16 else 2.5
    for point in ordered:
        dot = el("circle", cx=scale.x(point.layer), cy=scale.y(point.value), r=radius, class_="dot")
        # The hit area is larger than the dot, and as high as the plot.
        width = max(5.0, (PLOT_RIGHT - PLOT_LEFT) / (scale.last_layer + 1))
        area = {"x": scale.x(point.layer) - width / 2, "y": PLOT_TOP, "height": PLOT_BOTTOM - PLOT_TOP}
        hit = el("rect", **area, width=width, class_="hit")
        marks.append(el("g", el("title", point.note), dot, hit, class_="point"))
    return el("svg", *marks, viewBox=f"0 0 {PANEL_WIDTH} {PANEL_HEIGHT}", role="img", aria_label=label)


def _runs(points: Sequence[Point]) -> list[list[Point]]:
    """Stretches of consecutive layers: what lies between two layers that are apart was not measured."""
    runs: list[list[Point]] = []
    for point in points:
        if runs and point.layer == runs[-1][-1].layer + 1:
            runs[-1].append(point)
        else:
            runs.append([point])
    return runs


def _axes(scale: Scale) -> Iterator[Html]:
    for value in ticks(scale.low, scale.high):
        yield el("line", x1=PLOT_LEFT, x2=PLOT_RIGHT, y1=scale.y(value), y2=scale.y(value), class_="grid")
        yield el("text", f"{value:.4g}", x=PLOT_LEFT - 6, y=scale.y(value) + 3.5, class_="tick end")
    yield el("line", x1=PLOT_LEFT, x2=PLOT_RIGHT, y1=PLOT_BOTTOM, y2=PLOT_BOTTOM, class_="axis")
    step = max(1, math.ceil((scale.last_layer + 1) / 8))
    for layer in range(0, scale.last_layer + 1, step):
        yield el("text", str(layer), x=scale.x(layer), y=PLOT_BOTTOM + 14, class_="tick middle")


def _band(points: Sequence[Point], scale: Scale) -> Html:
    """The area between the extremes, layer by layer; a single layer gets a bar."""
    if len(points) == 1:
        x, low, high = scale.x(points[0].layer), scale.y(points[0].low), scale.y(points[0].high)
        corners = [(x - 4, low), (x - 4, high), (x + 4, high), (x + 4, low)]
    else:
        upper = [(scale.x(p.layer), scale.y(p.high)) for p in points]
        corners = upper + [(scale.x(p.layer), scale.y(p.low)) for p in reversed(points)]
    return el("polygon", points=" ".join(f"{x:.1f},{y:.1f}" for x, y in corners), class_="band")


# --- heat map ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class HeatRow:
    """A layer's experts: the rows each saw, those that saw none, and those that saw few."""

    label: str
    rows: Sequence[int]
    starved: frozenset[int]
    rare: frozenset[int]


def shade(rows: int, mean: float) -> int:
    """The heat map's step for an expert, 0 (few) to 6 (many)."""
    return sum(rows >= limit * mean for limit in SHADE_LIMITS)


def heat_map(layers: Sequence[HeatRow], label: str) -> Html:
    """Layers downwards, experts to the right."""
    experts = max(len(layer.rows) for layer in layers)
    pitch = min(26.0, max(6.0, (HEAT_WIDTH - HEAT_LEFT) / experts))  # beyond that the page scrolls sideways
    height = min(20.0, max(9.0, pitch))
    marks = []
    step = next(s for s in (1, 2, 4, 8, 16, 32, 64, 128) if s * pitch >= 24 or s == 128)
    for expert in range(0, experts, step):
        marks.append(el("text", str(expert), x=HEAT_LEFT + (expert + 0.5) * pitch, y=12, class_="tick middle"))
    every = math.ceil(12 / height)  # labels that do not touch
    for index, layer in enumerate(layers):
        cells = [cell for expert in range(len(layer.rows)) for cell in _cell(layer, expert, pitch, height)]
        shown = layer.label if index % every == 0 else ""
        name = el("text", shown, x=HEAT_LEFT - 6, y=height / 2 + 3.5, class_="tick end")
        marks.append(el("g", name, *cells, transform=f"translate(0 {HEAT_TOP + index * height:g})"))
    width, bottom = math.ceil(HEAT_LEFT + experts * pitch), math.ceil(HEAT_TOP + len(layers) * height)
    size = {"width": width, "height": bottom, "viewBox": f"0 0 {width} {bottom}"}
    return el("svg", *marks, **size, role="img", aria_label=label, class_="heat")


def _cell(layer: HeatRow, expert: int, pitch: float, height: float) -> Iterator[Html]:
    """A square with a gap around it; a cross in those without tokens and a dot in those with few."""
    rows, mean = layer.rows[expert], sum(layer.rows) / len(layer.rows)
    gap = 2.0 if pitch > 12 else 1.0
    x, width, tall = HEAT_LEFT + expert * pitch, pitch - gap, height - gap
    kind = "none" if expert in layer.starved else "rare" if expert in layer.rare else f"h{shade(rows, mean)}"
    title = el("title", f"layer {layer.label}, expert {expert}: {rows:,}")
    yield el("rect", title, x=x, y=0, width=width, height=tall, class_=kind)
    middle, half = x + width / 2, min(width, tall) * 0.24
    if kind == "none":
        ends = (f"M{middle - half:.1f} {tall / 2 - half:.1f}l{2 * half:.1f} {2 * half:.1f}"
                f"m{-2 * half:.1f} 0l{2 * half:.1f} {-2 * half:.1f}")  # fmt: skip
        yield el("path", d=ends, class_="cross")
    elif kind == "rare":
        yield el("circle", cx=middle, cy=tall / 2, r=half * 0.8, class_="few")


def heat_legend(counts: tuple[int, int]) -> Html:
    """What the shades and marks mean. `counts`: experts without rows, and with few."""
    parts = [el("span", el("i", class_=f"k{step}"), name) for step, name in enumerate(SHADE_NAMES)]
    none = el("span", el("i", "×", class_="knone"), f"no token ({counts[0]:,})")
    rare = el("span", el("i", "•", class_="krare"), f"below 5 % of the mean ({counts[1]:,})")
    return el("p", none, rare, *parts, class_="legend")
