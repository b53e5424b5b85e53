"""Statistics of datasets, loaders, items and pipelines, and the phase timers that feed them.

Each thread adds its times for hashing, decoding and transforms to `PHASE_TIMES`. The code that
fills a batch reads and resets these times.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any, Final, NoReturn, Self

from shardio._base.callers import missing_attribute
from shardio._base.classes import listed, one_line
from shardio._base.html import format_number, fragment, listing, note, table
from shardio._base.progress import counted


@dataclass(frozen=True, slots=True)
class LoadingStats:
    """Times (in seconds) and counters of one iteration, or the sum of several.

    `elapsed_s`, from the start of the loop to its end or until now, is the sum of `waiting_s` (for
    data), `hand_over_s` (building batches and sending tasks), and `body_s` (the body of the loop).

    `filling_s`, summed over workers, is the sum of `reading_s` (copying stored values),
    `checking_s` (hashes), `decoding_s` (compressed records and media), and `transforming_s`
    (transform, batch_transform and a collate function). Only one in seven checked or
    decompressed records is timed, and its time is multiplied by seven. Without workers, `filling_s`
    is part of `waiting_s`.

    `ready_s` is the time that filled batches waited for the loop, summed over batches.
    """

    elapsed_s: float = 0.0
    waiting_s: float = 0.0
    hand_over_s: float = 0.0
    filling_s: float = 0.0
    checking_s: float = 0.0
    decoding_s: float = 0.0
    transforming_s: float = 0.0
    ready_s: float = 0.0
    n_batches: int = 0
    n_samples: int = 0
    n_bytes: int = 0
    """Bytes of the values in the batches."""
    n_skipped: int = 0
    """Samples that were replaced by others; `n_samples` includes them."""
    n_copies: int = 0
    """Batches copied out of their blocks because user code held all other blocks."""
    n_restarts: int = 0
    """Workers that crashed and were replaced."""

    @property
    def body_s(self) -> float:
        return max(0.0, self.elapsed_s - self.waiting_s - self.hand_over_s)

    @property
    def reading_s(self) -> float:
        """The rest of `filling_s`: copying stored values."""
        apart_s = self.checking_s + self.decoding_s + self.transforming_s
        return max(0.0, self.filling_s - apart_s)

    @property
    def queue_depth(self) -> float:
        """The average number of filled batches that wait for the loop."""
        return self.ready_s / self.elapsed_s if self.elapsed_s else 0.0

    def __add__(self, other: Self) -> LoadingStats:
        names = [field.name for field in fields(self)]
        return LoadingStats(**{name: getattr(self, name) + getattr(other, name) for name in names})

    def __repr__(self) -> str:
        return f"LoadingStats({_speed_of(self)})"

    def as_json(self) -> dict[str, Any]:
        """Return all figures, including the computed ones, as JSON values."""
        derived = {name: getattr(self, name) for name in ("body_s", "reading_s", "queue_depth")}
        return asdict(self) | derived


def _speed_of(stats: LoadingStats) -> str:
    elapsed_s = stats.elapsed_s or 1.0
    rate, waiting = stats.n_samples / elapsed_s, stats.waiting_s / elapsed_s
    counts = f"{stats.n_samples:,} samples at {rate:,.0f}/s, {stats.n_skipped:,} skipped"
    return f"{counts}, waiting {waiting:.0%} of {stats.elapsed_s:.2f} s"


@dataclass(frozen=True, slots=True)
class LoaderStats:
    """The result of `loader.stats()`: the latest iteration, and the total of all iterations."""

    epoch: int
    n_workers: int
    latest: LoadingStats
    total: LoadingStats

    if not TYPE_CHECKING:  # for type checkers, the figures would have every attribute

        def __getattr__(self, name: str) -> Any:
            rate = "write stats.latest.n_samples / stats.latest.elapsed_s"
            advice = dict.fromkeys(("samples_per_s", "samples_per_second"), rate)
            if name[:1] != "_" and hasattr(LoadingStats, name):
                advice = {name: f"write stats.latest.{name}, or stats.total.{name}"}
            return missing_attribute(self, name, advice)

    def __repr__(self) -> str:
        return one_line(self, (), f"epoch {self.epoch}", _speed_of(self.latest))

    def _repr_html_(self) -> str:
        facts = f"epoch {self.epoch}", counted(self.n_workers, "workers"), _speed_of(self.latest)
        both = self.latest.as_json(), self.total.as_json()
        rows = ((name, *(each[name] for each in both)) for name in both[0])
        return fragment(
            "LoaderStats", "", facts, table(("", "latest", "total"), rows, len(both[0]))
        )

    def as_json(self) -> dict[str, Any]:
        """Return all figures as JSON values."""
        return asdict(self) | {"latest": self.latest.as_json(), "total": self.total.as_json()}


@dataclass(frozen=True, slots=True)
class SkippedItem:
    """An item that failed and was skipped (with on_error="skip").

    `index` counts items from 0; `item` is a shortened repr; `error` is the exception's class name.
    """

    index: int
    item: str
    error: str
    text: str


@dataclass(frozen=True, slots=True)
class ItemStats:
    """Counters of `load_with_workers` so far."""

    n_put: int = 0
    """Items that were sent to workers, or are waiting for a worker."""
    n_taken: int = 0
    """Items whose values were returned."""
    n_skipped: int = 0
    """Items that failed and were skipped."""
    n_restarts: int = 0
    """Workers that crashed and were replaced."""
    n_copies: int = 0
    """Values copied out of their blocks because user code held all other blocks."""
    n_bytes: int = 0
    """Bytes of the values that arrived in blocks; small values arrive in messages instead."""
    calling_s: float = 0.0
    """Time in the function, summed over workers."""

    def __repr__(self) -> str:
        return one_line(self, (), f"{self.calling_s:.3g} s in the function")


@dataclass(frozen=True, slots=True)
class StageStats:
    """The figures of one stage in one iteration so far; times in seconds."""

    name: str
    concurrency: int
    """The maximum number of concurrent calls."""
    n_in: int
    """Items received."""
    n_out: int
    """Results passed on."""
    n_dropped: int
    """Results that were None, and were therefore dropped."""
    n_failed: int
    busy_s: float
    """Time in the stage's function, summed over calls."""
    waiting_s: float
    """Time from the arrival of an item to the start of its call, summed over items."""
    elapsed_s: float
    """The time from the start of the iteration to its end or until now."""

    def __repr__(self) -> str:
        return one_line(self, (), self.name, f"{self.busy_s:.3g} s in the function")

    @property
    def queue_depth(self) -> float:
        """The average number of items that wait for the stage."""
        return self.waiting_s / self.elapsed_s if self.elapsed_s else 0.0

    @property
    def n_busy(self) -> float:
        """The average number of concurrent calls; near `concurrency`, the stage is a bottleneck."""
        return self.busy_s / self.elapsed_s if self.elapsed_s else 0.0


@dataclass(frozen=True, slots=True)
class PipelineStats:
    """The figures of the latest iteration of a DataLoader or Pipeline so far."""

    stages: tuple[StageStats, ...]
    """The stages in the order of the pipeline; steps that only form batches are left out."""
    n_results: int
    """Results received by the loop."""
    skipped: tuple[SkippedItem, ...]
    """Failed items or batches (with on_error="skip"); a batch has the index of its last item."""
    waiting_s: float
    """Time that the loop has waited for results."""
    elapsed_s: float
    """Time from the start of the iteration to its end or until now."""
    buffer_depth: float
    """The average number of results that wait for the loop."""

    def __repr__(self) -> str:
        waiting = f"waiting {self.waiting_s:.2f} of {self.elapsed_s:.2f} s"
        return one_line(self, (), waiting, stages=len(self.stages), skipped=self.n_skipped)

    @property
    def n_skipped(self) -> int:
        """The number of calls that failed and were skipped."""
        return len(self.skipped)

    def as_json(self) -> dict[str, Any]:
        """Return all figures, including the computed ones, as JSON values."""
        derived = [{"queue_depth": s.queue_depth, "n_busy": s.n_busy} for s in self.stages]
        stages = [asdict(s) | more for s, more in zip(self.stages, derived, strict=True)]
        return asdict(self) | {"stages": stages}


CHECK, DECODE, TRANSFORM = range(3)
"""Indexes into `PHASE_TIMES.sums_ns`."""

TIMED_EVERY: Final = 7
"""Only one record in seven is timed, and its time is multiplied by seven, because reading the clock
twice takes as long as hashing a short record. With 8 instead of 7, only one clip of every video of
8 clips would be timed."""

now_ns = perf_counter_ns
"""The clock of all timers; its readings can be compared between processes."""


class _PhaseTimes(threading.local):
    def __init__(self) -> None:
        self.sums_ns = [0, 0, 0]


PHASE_TIMES: Final = _PhaseTimes()


_FIGURES: Final = ("count", "mean", "std", "min", "max", "missing")
_NONE: Final = "no statistics: shardio.maintenance.compute_stats(path) computes and stores them"


class DatasetStats(dict[str, Any]):
    """A dict of stored statistics: "whole" for all samples, "subsets" for each subset.

    `shardio.maintenance.StatsReport` describes the statistics of each. They are read from a file
    and not checked, so malformed parts are skipped.
    """

    if not TYPE_CHECKING:  # for type checkers, the statistics would have every attribute

        def __getattr__(self, name: str) -> Any:
            return missing_attribute(
                self, name, {} if name[:1] == "_" else {name: self._hint(name)}
            )

    def __missing__(self, name: str) -> NoReturn:
        raise KeyError(f"{name!r}: {self._hint(name)}")

    def _hint(self, name: str) -> str:
        """Return how to get the statistics of the subset or field with this name, or of any."""
        if name in _dict(self, "subsets"):
            return f"write dataset.stats['subsets'][{name!r}]"
        parts = reversed([*self._parts()])  # the whole dataset replaces its subsets
        homes = {field: subset for subset, part in parts for field in _dict(part, "fields")}
        if not homes:
            return _NONE
        field = name if name in homes else next(iter(homes))
        part = f"['subsets'][{homes[field]!r}]" if homes[field] else "['whole']"
        return f"write dataset.stats{part}['fields'][{field!r}]" + "['mean']" * (field != name)

    def __repr__(self) -> str:
        facts = [
            f"{f'subset {name!r} ' if name else ''}{counted(part['samples'], 'samples')}"
            for name, part in self._parts()
            if isinstance(part.get("samples"), int)
        ]
        fields = {field: None for _, part in self._parts() for field in _dict(part, "fields")}
        facts += [f"fields {listed(fields, 80)}"] if fields else []
        return f"DatasetStats({listed(facts or [_NONE], 180)})"

    def _repr_html_(self) -> str:
        whole = self.get("whole")
        n = whole.get("samples") if isinstance(whole, Mapping) else None
        facts = [counted(n, "samples") if isinstance(n, int) else "", "" if self else _NONE]
        return fragment("DatasetStats", "", facts, *self.html_parts())

    def html_parts(self) -> Iterator[str]:
        """Yield the parts of a fragment: classes, a table of the fields, notes on their pixels."""
        classes = _dict(_dict(self, "whole"), "classes")
        yield listing(
            "classes", (f"{name} {format_number(n)}" for name, n in classes.items()), len(classes)
        )
        found = [
            (name, field, figures)
            for name, part in self._parts()
            for field, figures in _dict(part, "fields").items()
            if isinstance(figures, Mapping)
        ]
        rows = ((name, field, *map(figures.get, _FIGURES)) for name, field, figures in found)
        yield table(("subset", "field", *_FIGURES), rows, len(found))
        yield from (
            note(_pixels_text(f"{n} {field}".strip(), figures)) for n, field, figures in found
        )

    def _parts(self) -> Iterator[tuple[str, Mapping[str, Any]]]:
        """Yield the statistics of all samples with "", then those of each subset with its name."""
        if whole := _dict(self, "whole"):
            yield "", whole
        subsets = _dict(self, "subsets")
        yield from ((name, part) for name in subsets if (part := _dict(subsets, name)))


def _dict(found: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = found.get(name)
    return value if isinstance(value, Mapping) else {}


def _pixels_text(name: str, found: Mapping[str, Any]) -> str:
    """Return a call of Normalize with the statistics of a field's pictures, and the frame count."""
    if not (found.get("pictures") and found.get("count") and "channels" in found):
        return ""
    mean, std = (
        ", ".join(f"{level / 255:.4f}" for level in found["channels"][key])
        for key in ("mean", "std")
    )
    n = found.get("frames_per_video", 0)
    frames = "" if n == 0 else f" (of {'all' if n is None else n} frames of each video)"
    return f"{name}: Normalize(mean=({mean}), std=({std})){frames}"
