"""Line charts on logarithmic axes as SVG text: the same input always gives the same bytes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from html import escape

_WIDTH, _HEIGHT = 640, 360
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 150, 36, 48
_COLOURS = {"fast": "#0b6e4f", "small": "#1f4e9c", "field": "#b3401f"}
_OTHER = "#666666"


@dataclass(frozen=True)
class Series:
    """`points`: (x, y), both above 0; others cannot be drawn on these axes and are left out."""

    name: str
    points: tuple[tuple[float, float], ...]
    dashed: bool = False

    @property
    def colour(self) -> str:
        return _COLOURS.get(self.name.split()[0], _OTHER)


@dataclass(frozen=True)
class Chart:
    title: str
    x: str
    y: str
    series: tuple[Series, ...]
    x_text: Callable[[float], str] = "{:g}".format


class _Axis:
    """Values to pixels, logarithmically."""

    def __init__(self, values: Iterable[float], start: float, end: float) -> None:
        known = list(values) or [1.0]
        self._low = math.log10(min(known)) - 0.05
        self._high = max(math.log10(max(known)) + 0.05, self._low + 0.3)
        self._start, self._end = start, end

    def at(self, value: float) -> float:
        share = (math.log10(value) - self._low) / (self._high - self._low)
        return self._start + share * (self._end - self._start)

    def ticks(self) -> list[float]:
        decades = range(math.floor(self._low), math.ceil(self._high) + 1)
        found = [step * 10.0**decade for decade in decades for step in (1, 2, 5)]
        return [tick for tick in found if self._low <= math.log10(tick) <= self._high]


def svg(chart: Chart) -> str:
    shown = [Series(one.name, tuple(p for p in one.points if min(p) > 0), one.dashed) for one in chart.series]
    points = [point for one in shown for point in one.points]
    x = _Axis((point[0] for point in points), _LEFT, _WIDTH - _RIGHT)
    y = _Axis((point[1] for point in points), _HEIGHT - _BOTTOM, _TOP)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="white"/>',
        _text(_LEFT, 20, chart.title, weight="bold"),
        *_grid(x, y, chart),
        *(_line(one, x, y) for one in shown if one.points),
        *_legend(shown),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def _grid(x: _Axis, y: _Axis, chart: Chart) -> list[str]:
    bottom, right = _HEIGHT - _BOTTOM, _WIDTH - _RIGHT
    parts = []
    for tick in x.ticks():
        parts.append(_rule(x.at(tick), _TOP, x.at(tick), bottom))
        parts.append(_text(x.at(tick), bottom + 16, chart.x_text(tick), anchor="middle"))
    for tick in y.ticks():
        parts.append(_rule(_LEFT, y.at(tick), right, y.at(tick)))
        parts.append(_text(_LEFT - 6, y.at(tick) + 4, f"{tick:g}", anchor="end"))
    parts.append(_text((_LEFT + right) / 2, _HEIGHT - 10, chart.x, anchor="middle"))
    middle = (_TOP + bottom) / 2
    turned = f'transform="rotate(-90 14 {middle:.0f})"'
    parts.append(_text(14, middle, chart.y, anchor="middle", more=turned))
    return parts


def _line(one: Series, x: _Axis, y: _Axis) -> str:
    places = [f"{x.at(a):.1f},{y.at(b):.1f}" for a, b in one.points]
    dash = ' stroke-dasharray="5 4"' if one.dashed else ""
    line = f'<polyline points="{" ".join(places)}" fill="none" stroke="{one.colour}" stroke-width="2"{dash}/>'
    dots = (
        f'<circle cx="{place.split(",")[0]}" cy="{place.split(",")[1]}" r="3" fill="{one.colour}"/>'
        for place in places
    )
    return "\n".join([line, *dots])


def _legend(shown: Sequence[Series]) -> list[str]:
    parts = []
    for number, one in enumerate(shown):
        at = _TOP + 12 + 18 * number
        left = _WIDTH - _RIGHT + 12
        dash = ' stroke-dasharray="5 4"' if one.dashed else ""
        parts.append(
            f'<line x1="{left}" y1="{at}" x2="{left + 22}" y2="{at}" stroke="{one.colour}" '
            f'stroke-width="2"{dash}/>'
        )
        parts.append(_text(left + 28, at + 4, one.name))
    return parts


def _rule(x1: float, y1: float, x2: float, y2: float) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="#dddddd"/>'


def _text(
    x: float, y: float, text: str, *, anchor: str = "start", weight: str = "normal", more: str = ""
) -> str:
    place = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-weight="{weight}"'
    return f"<text {place}{' ' + more if more else ''}>{escape(text)}</text>"
