"""Plots of lines and of dots as SVG files, for pages of the documentation."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final
from xml.etree import ElementTree

# The palette of Okabe and Ito, which colour-blind readers can distinguish.
_COLOURS: Final = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00")
_WIDTH, _HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM = 920, 380, 76, 220, 56, 52
_NAMES, _ROW = 250, 26

Points = Sequence[tuple[float, float]]


@dataclass(frozen=True, slots=True)
class Axis:
    """One axis of a plot, from its first tick to its last."""

    title: str
    ticks: Sequence[float]
    is_log: bool = False

    def at(self, value: float) -> float:
        """Return the place of a value, from 0 to 1."""
        low, high = self._scaled(self.ticks[0]), self._scaled(self.ticks[-1])
        return min(1.0, max(0.0, (self._scaled(value) - low) / (high - low)))

    def _scaled(self, value: float) -> float:
        return math.log(max(value, 1e-12)) if self.is_log else value


def plot(title: str, x: Axis, y: Axis, lines: Mapping[str, Points]) -> str:
    """Return the text of an SVG file with lines by name."""
    root = _canvas(_HEIGHT)
    _text(root, _LEFT, 22, title, weight="bold")
    for value in y.ticks:
        at = _down(y, value)
        _add(root, "line", x1=_LEFT, x2=_WIDTH - _RIGHT, y1=at, y2=at, stroke="#dddddd")
        _text(root, _LEFT - 8, at + 4, _label(value), anchor="end")
    for value in x.ticks:
        at = _along(x, value)
        _add(root, "line", x1=at, x2=at, y1=_TOP, y2=_HEIGHT - _BOTTOM, stroke="#eeeeee")
        _text(root, at, _HEIGHT - _BOTTOM + 18, _label(value), anchor="middle")
    _text(root, (_LEFT + _WIDTH - _RIGHT) / 2, _HEIGHT - 10, x.title, anchor="middle")
    _text(root, _LEFT, _TOP - 12, y.title)
    for number, (name, points) in enumerate(lines.items()):
        colour = _COLOURS[number % len(_COLOURS)]
        path = " ".join(f"{_along(x, a):.1f},{_down(y, b):.1f}" for a, b in points)
        _add(root, "polyline", points=path, fill="none", stroke=colour, stroke_width=2)
        for a, b in points:
            _add(
                root, "circle", cx=f"{_along(x, a):.1f}", cy=f"{_down(y, b):.1f}", r=3, fill=colour
            )
        place = _TOP + 16 + 18 * number
        _add(root, "rect", x=_WIDTH - _RIGHT + 20, y=place - 9, width=12, height=10, fill=colour)
        _text(root, _WIDTH - _RIGHT + 38, place, name)
    return _written(root)


@dataclass(frozen=True, slots=True)
class Dot:
    """A row of a dot plot: a value, and the range around it."""

    name: str
    low: float
    value: float
    high: float
    is_marked: bool = False


def dots(title: str, x: Axis, rows: Sequence[Dot]) -> str:
    """Return the text of an SVG file with a row for each value: a dot, and a line for its range."""
    height = _TOP + _ROW * len(rows) + _BOTTOM
    root = _canvas(height)
    _text(root, _NAMES, 22, title, weight="bold")
    for value in x.ticks:
        at = _across(x, value)
        _add(root, "line", x1=at, x2=at, y1=_TOP - 12, y2=height - _BOTTOM, stroke="#dddddd")
        _text(root, at, height - _BOTTOM + 18, _label(value), anchor="middle")
    _text(root, (_NAMES + _WIDTH - _LEFT) / 2, height - 10, x.title, anchor="middle")
    for number, row in enumerate(rows):
        y = _TOP + _ROW * (number + 0.5) - 6
        colour, weight = (_COLOURS[1], "bold") if row.is_marked else (_COLOURS[0], "normal")
        _text(root, _NAMES - 12, y + 4, row.name, anchor="end", weight=weight)
        low, high = _across(x, row.low), _across(x, row.high)
        _add(root, "line", x1=low, x2=high, y1=y, y2=y, stroke=colour, stroke_width=3)
        _add(root, "circle", cx=_across(x, row.value), cy=y, r=5, fill=colour)
    return _written(root)


def _across(x: Axis, value: float) -> float:
    return _NAMES + x.at(value) * (_WIDTH - _LEFT - _NAMES)


def _canvas(height: int) -> ElementTree.Element:
    size = {"width": str(_WIDTH), "height": str(height), "viewBox": f"0 0 {_WIDTH} {height}"}
    root = ElementTree.Element("svg", {"xmlns": "http://www.w3.org/2000/svg", **size})
    _add(root, "rect", width=_WIDTH, height=height, fill="white")
    return root


def _written(root: ElementTree.Element) -> str:
    ElementTree.indent(root)
    return ElementTree.tostring(root, encoding="unicode") + "\n"


def _along(x: Axis, value: float) -> float:
    return _LEFT + x.at(value) * (_WIDTH - _LEFT - _RIGHT)


def _down(y: Axis, value: float) -> float:
    return _HEIGHT - _BOTTOM - y.at(value) * (_HEIGHT - _TOP - _BOTTOM)


def _label(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 or value == int(value) else f"{value:g}"


def _add(root: ElementTree.Element, tag: str, **given: object) -> None:
    named = {name.replace("_", "-"): _number(value) for name, value in given.items()}
    ElementTree.SubElement(root, tag, named)


def _number(value: object) -> str:
    return f"{value:.1f}" if isinstance(value, float) else str(value)


def _text(
    root: ElementTree.Element,
    x: float,
    y: float,
    content: str,
    *,
    anchor: str = "start",
    weight: str = "normal",
) -> None:
    font = {"font-family": "sans-serif", "font-size": "13", "font-weight": weight}
    place = {"x": f"{x:.1f}", "y": f"{y:.1f}", "text-anchor": anchor, **font}
    ElementTree.SubElement(root, "text", place).text = content
