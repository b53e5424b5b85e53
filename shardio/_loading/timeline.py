"""A timeline of workers and batches: when each batch was filled, and what main did.

It is drawn with one lane for each worker, with a bar for every batch that it filled, one lane for
main, and below them the number of filled batches that were ready. An SVG file, for any browser.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple
from xml.etree import ElementTree

from shardio._engine.dispatch.counters import FillRecord, IterationTimer
from shardio.errors import InvalidArgument

_S_PER_NS = 1e-9


def timeline_of(
    title: str, fillings: Sequence[Sequence[FillRecord]], timer: IterationTimer
) -> Timeline:
    """Return the timeline of one iteration.

    Args:
        title: names it.
        fillings: of each worker.
        timer: main's timings.
    """
    began_ns = timer.began_ns
    main = [
        DeliveryEvent(
            one.step,
            (one.asked_ns - began_ns) * _S_PER_NS,
            one.waited_ns * _S_PER_NS,
            (one.got_ns - began_ns) * _S_PER_NS,
        )
        for one in timer.moments
    ]
    return Timeline(title, [[_filled(one, began_ns) for one in each] for each in fillings], main)


def _filled(one: FillRecord, began_ns: int) -> FillEvent:
    whole_ns = one.end_ns - one.start_ns
    # One record in seven is timed: with few records, the estimate may exceed the whole.
    check_ns = min(one.check_ns, whole_ns)
    decode_ns = min(one.decode_ns, whole_ns - check_ns)
    transform_ns = min(one.transform_ns, whole_ns - check_ns - decode_ns)
    phases_ns = {
        READING: whole_ns - check_ns - decode_ns - transform_ns,
        CHECKING: check_ns,
        DECODING: decode_ns,
        TRANSFORMING: transform_ns,
    }
    return FillEvent(
        one.step,
        (one.start_ns - began_ns) * _S_PER_NS,
        (one.end_ns - began_ns) * _S_PER_NS,
        {kind: ns * _S_PER_NS for kind, ns in phases_ns.items()},
    )


Element = ElementTree.Element

READING, CHECKING, DECODING = "reading", "checking hashes", "decompressing"
TRANSFORMING = "transforming"
WAITING, HANDING_OVER, BODY = "waiting", "handing over", "the loop's body"

# Distinguishable for colour-blind readers: the palette of Okabe and Ito.
_COLOURS: Final = {
    READING: "#0072b2",
    CHECKING: "#e69f00",
    DECODING: "#009e73",
    TRANSFORMING: "#cc79a7",
    WAITING: "#dddddd",
    HANDING_OVER: "#d55e00",
    BODY: "#56b4e9",
}
N_SHOWN: Final = 100
"""The number of batches drawn: more would be too narrow to see."""

_WIDTH, _LEFT, _RIGHT, _TOP = 1280, 96, 24, 84
_LANE, _BAR, _DEPTH, _AXIS = 34, 22, 72, 46
_MIN_NAMED: Final = 22
"""A bar of this many pixels has room for the number of its step."""
_N_TICKS: Final = 12


class FillEvent(NamedTuple):
    """A batch that a worker filled: seconds since the iteration began, and its phases' seconds."""

    step: int
    start_s: float
    end_s: float
    phases_s: dict[str, float]


class DeliveryEvent(NamedTuple):
    """A batch that the loop got: when it asked, how long it waited, and when it had the batch."""

    step: int
    asked_s: float
    waited_s: float
    got_s: float


class _Bar(NamedTuple):
    kind: str
    start_s: float
    end_s: float
    said: str


@dataclass(frozen=True, slots=True)
class Timeline:
    """The latest batches of one iteration: those each worker filled, and those the loop got."""

    title: str
    workers: Sequence[Sequence[FillEvent]]
    main: Sequence[DeliveryEvent]

    def svg(self, n_batches: int = N_SHOWN) -> str:
        """Draw the latest n_batches that the loop got, 1 or more; the text of an SVG file.

        Raises:
            InvalidArgument: n_batches is below 1.
        """
        if n_batches < 1:
            raise InvalidArgument(f"n_batches must be an integer from 1 up; found {n_batches!r}")
        shown = self.main[-n_batches:]
        if not shown:
            return _Drawing(f"{self.title}: no batch was delivered", 0, 0, 1).text()
        start_s, end_s = shown[0].asked_s, shown[-1].got_s
        steps = f"batches {shown[0].step} to {shown[-1].step}"
        drawing = _Drawing(f"{self.title}: {steps}", len(self.workers) + 1, start_s, end_s)
        for number, filled in enumerate(self.workers):
            drawing.lane(number, f"worker {number}")
            for one in filled:
                drawing.group(number, _phases_of(one), one.step)
        drawing.lane(len(self.workers), "main")
        for bars, step in zip(_bars_of(shown), shown, strict=True):
            drawing.group(len(self.workers), bars, step.step)
        drawing.depth(_depths(self.workers, self.main, start_s, end_s))
        drawing.axis()
        return drawing.text()

    def save(self, path: str | os.PathLike[str], n_batches: int = N_SHOWN) -> None:
        """Write the drawing to a file, replacing an earlier one."""
        with open(path, "w", encoding="utf-8") as file:
            file.write(self.svg(n_batches))


def _phases_of(filled: FillEvent) -> list[_Bar]:
    """Return a worker's batch as bars by phase: durations, not moments."""
    bars, start_s = [], filled.start_s
    whole_s = filled.end_s - filled.start_s
    parts = ", ".join(f"{kind} {_duration(s)}" for kind, s in filled.phases_s.items() if s)
    said = f"batch {filled.step}: filled in {_duration(whole_s)} ({parts})"
    for kind, phase_s in filled.phases_s.items():
        if phase_s > 0:
            bars.append(_Bar(kind, start_s, min(filled.end_s, start_s + phase_s), said))
            start_s += phase_s
    return bars


def _bars_of(main: Sequence[DeliveryEvent]) -> Iterator[list[_Bar]]:
    """Yield main's work for each batch, and the loop's body after it."""
    for i, one in enumerate(main):
        begun_s = one.asked_s + one.waited_s
        waited = f"batch {one.step}: waited {_duration(one.waited_s)}"
        over = f"batch {one.step}: handed over in {_duration(one.got_s - begun_s)}"
        bars = [
            _Bar(WAITING, one.asked_s, begun_s, waited),
            _Bar(HANDING_OVER, begun_s, one.got_s, over),
        ]
        if i + 1 < len(main):
            end_s = main[i + 1].asked_s
            said = f"batch {one.step}: the loop's body took {_duration(end_s - one.got_s)}"
            bars.append(_Bar(BODY, one.got_s, end_s, said))
        yield bars


def _depths(
    workers: Sequence[Sequence[FillEvent]],
    main: Sequence[DeliveryEvent],
    start_s: float,
    end_s: float,
) -> list[tuple[float, int]]:
    """Return the number of ready batches over time: a moment and the number from then on."""
    got_s = {one.step: one.got_s for one in main}
    last = main[-1].step
    changes = []
    for one in (one for filled in workers for one in filled):
        # Batches delivered before the first recorded one do not count.
        if one.step in got_s or one.step > last:
            changes.append((one.end_s, 1))
            if one.step in got_s:
                changes.append((got_s[one.step], -1))
    depth, found = 0, [(start_s, 0)]
    for moment_s, change in sorted(changes):
        depth += change
        if moment_s <= start_s:
            found[0] = start_s, depth
        elif moment_s <= end_s:
            found.append((moment_s, depth))
    return found


def _duration(s: float) -> str:
    """Format a duration in a readable unit."""
    for unit, factor in (("s", 1.0), ("ms", 1e3)):
        if s * factor >= 1:
            return f"{s * factor:.3g} {unit}"
    return f"{s * 1e6:.3g} µs"


class _Drawing:
    """The SVG elements of a timeline from start_s to end_s, with n_lanes of bars."""

    def __init__(self, title: str, n_lanes: int, start_s: float, end_s: float) -> None:
        self._start_s, self._end_s = start_s, max(end_s, start_s + 1e-6)
        self._foot = _TOP + n_lanes * _LANE
        height = self._foot + _DEPTH + _AXIS
        self._root = Element(
            "svg",
            {
                "xmlns": "http://www.w3.org/2000/svg",
                "viewBox": f"0 0 {_WIDTH} {height}",
                "width": str(_WIDTH),
                "height": str(height),
                "font-family": "sans-serif",
                "font-size": "12",
            },
        )
        self._add("title").text = title
        self._add("rect", width=_WIDTH, height=height, fill="white")
        self._text(_LEFT, 28, title, size=16)
        if n_lanes:
            self._legend()

    def text(self) -> str:
        """Return the whole file."""
        ElementTree.indent(self._root)
        return ElementTree.tostring(self._root, encoding="unicode") + "\n"

    def _add(self, tag: str, parent: Element | None = None, **attributes: object) -> Element:
        words = {
            name.replace("_", "-"): f"{value:.2f}" if isinstance(value, float) else str(value)
            for name, value in attributes.items()
        }
        return ElementTree.SubElement(self._root if parent is None else parent, tag, words)

    def _text(
        self, x: float, y: float, text: str, *, anchor: str = "start", size: int = 12
    ) -> Element:
        found = self._add("text", x=float(x), y=float(y), text_anchor=anchor, font_size=size)
        found.text = text
        return found

    def _x(self, moment_s: float) -> float:
        part = (moment_s - self._start_s) / (self._end_s - self._start_s)
        return _LEFT + (_WIDTH - _LEFT - _RIGHT) * min(1.0, max(0.0, part))

    def _legend(self) -> None:
        x = float(_LEFT)
        for kind, colour in _COLOURS.items():
            self._add("rect", x=x, y=46, width=12, height=12, fill=colour)
            self._text(x + 18, 56, kind)
            x += 34 + 7 * len(kind)

    def lane(self, number: int, name: str) -> None:
        """Begin a lane: its name, and its ground."""
        y = _TOP + number * _LANE
        self._text(_LEFT - 10, y + _BAR - 6, name, anchor="end")
        width = _WIDTH - _LEFT - _RIGHT
        self._add("rect", x=_LEFT, y=y, width=width, height=_BAR, fill="#f6f6f6")

    def group(self, lane: int, bars: Sequence[_Bar], step: int) -> None:
        """Draw the bars of one batch, with its number where there is room for it."""
        y = _TOP + lane * _LANE
        for kind, start_s, end_s, said in bars:
            x, end = self._x(start_s), self._x(end_s)
            if end - x < 0.01:
                continue
            bar = self._add("rect", x=x, y=y, width=end - x, height=_BAR, fill=_COLOURS[kind])
            self._add("title", bar).text = said
        if not bars:
            return
        x, end = self._x(bars[0].start_s), self._x(bars[-1].end_s)
        if end > x:
            self._add("line", x1=x, x2=x, y1=y, y2=y + _BAR, stroke="white", stroke_width=0.8)
        if end - x >= _MIN_NAMED:
            number = self._text((x + end) / 2, y + _BAR - 7, str(step), anchor="middle", size=10)
            # Legible on any colour, and transparent to the pointer, so that the bar's tooltip
            # appears.
            halo = {"paint-order": "stroke", "stroke": "white", "stroke-width": "2.5"}
            number.attrib |= {"pointer-events": "none", **halo}

    def depth(self, depths: Sequence[tuple[float, int]]) -> None:
        """Draw how many batches lay ready."""
        most = max(1, *(depth for _, depth in depths))
        floor, scale = self._foot + _DEPTH - 8, (_DEPTH - 16) / most
        points = [f"{_LEFT},{floor}"]
        before = depths[0][1]
        for moment_s, depth in depths:
            x = self._x(moment_s)
            points += [f"{x:.2f},{floor - before * scale:.2f}"]
            points += [f"{x:.2f},{floor - depth * scale:.2f}"]
            before = depth
        right = _WIDTH - _RIGHT
        points += [f"{right},{floor - before * scale:.2f}", f"{right},{floor}"]
        self._add("polygon", points=" ".join(points), fill="#bbbbbb")
        self._text(_LEFT - 10, floor - _DEPTH / 2 + 8, "ready", anchor="end")
        for depth in (0, most):
            y = floor - depth * scale
            self._add("line", x1=_LEFT - 4, x2=right, y1=y, y2=y, stroke="#888888")
            self._text(_LEFT - 8, y + 4, str(depth), anchor="end", size=10)

    def axis(self) -> None:
        """Draw the axis of time, in milliseconds since the iteration began."""
        y = self._foot + _DEPTH
        span_s = self._end_s - self._start_s
        tick_s = _round_number(span_s / _N_TICKS)
        number = int(self._start_s / tick_s) + 1
        while number * tick_s <= self._end_s:
            x = self._x(number * tick_s)
            self._add("line", x1=x, x2=x, y1=_TOP - 6, y2=y + 4, stroke="#cccccc", stroke_width=0.5)
            self._text(x, y + 18, f"{number * tick_s * 1e3:,.6g}", anchor="middle", size=10)
            number += 1
        middle = (_LEFT + _WIDTH - _RIGHT) / 2
        self._text(middle, y + 36, "milliseconds since the epoch began", anchor="middle")


def _round_number(least: float) -> float:
    """Return the smallest of 1, 2, 5, 10, … times a power of ten that is at least `least`."""
    power = 10.0 ** math.floor(math.log10(least))
    return next(power * step for step in (1.0, 2.0, 5.0, 10.0, 20.0) if power * step >= least)
