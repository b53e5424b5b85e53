"""Benchmark cases: lanes that run in turns, the figures that they return, and limits of figures.

A case is a generator function. It sets up, yields lanes, and cleans up; it may do so several times.
A lane is a function that measures once and returns figures by unit. A round runs every lane once,
so that other load on the machine affects all lanes alike.
"""

from __future__ import annotations

import inspect
import math
import shutil
import statistics
import tempfile
import traceback
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from benchmarks.child import NotMeasured
from benchmarks.data import Cache

Lane = Callable[[], Mapping[str, float]]
Lanes = Generator[Mapping[str, Lane], None, None]


class WrongResult(Exception):
    """Raised by a lane that delivered wrong data, and whose figures therefore mean nothing."""


@dataclass(frozen=True)
class Limit:
    """A bound of the median of a lane's figure, or of its ratio to the figure of another lane.

    The ratio is the median of the ratios in each round or, with `of_best`, the ratio of the best
    figures of all rounds, which converges as rounds are added.
    """

    lane: str
    unit: str
    beside: str = ""
    at_most: float = math.inf
    at_least: float = -math.inf
    of_best: bool = False

    def __str__(self) -> str:
        beside = f" ÷ {self.beside}" if self.beside else ""
        bounds = [f"at least {self.at_least:g}"] if self.at_least > -math.inf else []
        bounds += [f"at most {self.at_most:g}"] if self.at_most < math.inf else []
        return f"{self.lane}{beside}, {self.unit}: {', '.join(bounds)}"


@dataclass
class Figure:
    """The values that a lane returned for a unit, one for each round."""

    lane: str
    unit: str
    values: list[float] = field(default_factory=list)

    @property
    def best(self) -> float:
        """The largest rate, or the smallest time or size."""
        return max(self.values) if self.unit.endswith("/s") else min(self.values)

    @property
    def median(self) -> float:
        """The median of all rounds."""
        return statistics.median(self.values)


@dataclass(frozen=True)
class Case:
    """A named benchmark of a group."""

    name: str
    group: str
    run: Callable[..., Lanes]
    limits: tuple[Limit, ...]
    rounds: int
    for_gate: bool = False

    @property
    def description(self) -> str:
        """The first line of the case's docstring."""
        return (self.run.__doc__ or "").partition("\n")[0]

    @property
    def parameters(self) -> dict[str, Any]:
        """The parameters that `--set` may change, with their defaults."""
        found = list(inspect.signature(self.run).parameters.values())[1:]
        return {parameter.name: parameter.default for parameter in found}


@dataclass
class Bench:
    """The surroundings of one run of a case: cached datasets, temporary folders, notes.

    `versions` maps lanes to the versions of packages that this interpreter may lack. `outcomes`
    maps lanes to results in words.
    """

    cache: Cache
    notes: list[str] = field(default_factory=list)
    versions: dict[str, dict[str, str]] = field(default_factory=dict)
    outcomes: dict[str, dict[str, str]] = field(default_factory=dict)
    _folders: list[Path] = field(default_factory=list)

    def note(self, text: str) -> None:
        """Add a line to the report, for example about a missing peer."""
        self.notes.append(text)

    def temporary(self, parent: str | None = None) -> Path:
        """Return a new folder, which is removed at the end of the case."""
        self._folders.append(Path(tempfile.mkdtemp(prefix="bench-", dir=parent)))
        return self._folders[-1]

    def close(self) -> None:
        """Remove temporary folders."""
        for folder in self._folders:
            shutil.rmtree(folder, ignore_errors=True)


@dataclass
class Result:
    """The outcome of a case. `error` is empty, or states why there are no figures."""

    case: Case
    rounds: int = 0
    figures: dict[tuple[str, str], Figure] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    versions: dict[str, dict[str, str]] = field(default_factory=dict)
    outcomes: dict[str, dict[str, str]] = field(default_factory=dict)
    error: str = ""
    is_unavailable: bool = False

    def add(self, lane: str, found: Mapping[str, float]) -> None:
        """Add the figures of a lane in one round."""
        for unit, value in found.items():
            figure = self.figures.setdefault((lane, unit), Figure(lane, unit))
            figure.values.append(float(value))

    def extend(self, other: Result) -> None:
        """Add the rounds of another run of the case."""
        self.rounds += other.rounds
        self.error = other.error
        for key, figure in other.figures.items():
            self.figures[key].values += figure.values

    def value_of(self, limit: Limit) -> float | None:
        """Return the figure or ratio that a limit bounds; None if its lane was not measured."""
        figure = self.figures.get((limit.lane, limit.unit))
        if figure is None:
            return None
        if not limit.beside:
            return figure.median
        other = self.figures.get((limit.beside, limit.unit))
        if other is None:
            return None
        if limit.of_best:
            return figure.best / other.best
        pairs = zip(figure.values, other.values, strict=True)
        return statistics.median(one / two for one, two in pairs)

    def is_met(self, limit: Limit) -> bool:
        """Return False if a limit is exceeded; a limit of a lane that is missing is met."""
        value = self.value_of(limit)
        return value is None or limit.at_least <= value <= limit.at_most

    @property
    def is_good(self) -> bool:
        """True if the case ran, or cannot run here, and every limit is met."""
        has_run = not self.error or self.is_unavailable
        return has_run and all(map(self.is_met, self.case.limits))


CASES: Final[dict[str, Case]] = {}


def case(
    *limits: Limit, rounds: int = 5, name: str = "", for_gate: bool = False
) -> Callable[[Callable[..., Lanes]], Callable[..., Lanes]]:
    """Register a generator function as a case of the group that is named after its module."""

    def register(run: Callable[..., Lanes]) -> Callable[..., Lanes]:
        group = run.__module__.rpartition(".")[2]
        full = f"{group}.{name or run.__name__.replace('_', '-')}"
        if full in CASES:
            raise ValueError(f"two cases are named {full}")
        CASES[full] = Case(full, group, run, limits, rounds, for_gate)
        return run

    return register


def measure(
    case: Case, cache: Cache, *, rounds: int | None = None, options: Mapping[str, Any] | None = None
) -> Result:
    """Run every lane of a case once per round. An error of the case becomes part of the result."""
    result, bench, at = Result(case, rounds or case.rounds), Bench(cache), "set-up"
    try:
        for lanes in case.run(bench, **(options or {})):
            for _ in range(result.rounds):
                for lane, run in lanes.items():
                    at = lane
                    result.add(lane, run())
    except NotMeasured as error:
        result.error, result.is_unavailable = str(error), True
    except Exception as error:  # noqa: BLE001 - the other cases still run
        error.add_note(f"at {at}")
        result.error = "".join(traceback.format_exception(error)).rstrip()
    finally:
        bench.close()
    result.notes, result.versions, result.outcomes = bench.notes, bench.versions, bench.outcomes
    return result


def choose(names: Sequence[str]) -> list[Case]:
    """Return the cases of these names and groups; raise KeyError with a name that is neither."""
    chosen = []
    for name in names:
        found = [each for each in CASES.values() if name in (each.name, each.group)]
        if not found:
            raise KeyError(name)
        chosen += [each for each in found if each not in chosen]
    return chosen
