"""The limit of a loader's speed, and the option to change: derived from figures alone."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

from shardio._base.statistics import LoadingStats

_MAX: Final = 0.75
"""From this share of its time on, somebody is busy."""
_NEAR_LIMIT: Final = 0.7
"""From this share of the bare copy speed on, memory is the limit."""
_CACHED: Final = 0.9
_IDLE: Final = 0.1
_SMALL_BATCH_BYTES: Final = 256 << 10


class Limit(StrEnum):
    """The resource that limits a loader's speed."""

    BODY = "the loop's body"
    MAIN = "the main process"
    COPY = "copying memory"
    STORAGE = "storage"
    READING = "reading"
    HASHING = "hashing"
    DECODING = "decompression"
    TRANSFORM = "the transform"
    CPUS = "the CPUs"
    ROUND_TRIPS = "round trips"


@dataclass(frozen=True, slots=True)
class Figures:
    """The figures that a conclusion is derived from.

    Args:
        stats: of one iteration, or of several.
        n_workers: of the loader; 0 for none.
        n_cpus: that this process may use.
        main_cpu_s: CPU time of the thread that iterates.
        copy_bytes_per_s: the maximum copying speed of the machine.
        verify: when hashes are checked, as the dataset says.
        cached_share: of the files in the page cache before; None if unknown.
        idle_share: of the time of this machine's CPUs; None if unknown.
        tried: other numbers of workers that were measured, and are no faster.
        has_body: True if the loop does anything with its batches.
        fits: True if the files fit into the available memory.
    """

    stats: LoadingStats
    n_workers: int
    n_cpus: int
    main_cpu_s: float
    copy_bytes_per_s: float
    verify: str = "first"
    cached_share: float | None = None
    idle_share: float | None = None
    tried: tuple[int, ...] = ()
    has_body: bool = True
    fits: bool = False


@dataclass(frozen=True, slots=True)
class Conclusion:
    """The limit, the figures that show it, and the remedies, the best first."""

    limit: Limit
    because: str
    advice: tuple[str, ...]

    def as_json(self) -> dict[str, Any]:
        """Return the same as JSON values."""
        return {"limit": str(self.limit), "because": self.because, "advice": list(self.advice)}


def conclude(figures: Figures) -> Conclusion:
    """Return the limit of a loader, from figures of at least one batch."""
    stats, n_workers = figures.stats, figures.n_workers
    elapsed_s = max(stats.elapsed_s, 1e-9)
    if figures.has_body and stats.body_s > 0.5 * elapsed_s:
        return Conclusion(
            Limit.BODY,
            f"the loop's own code takes {stats.body_s / elapsed_s:.0%} of the time, and waits for "
            f"batches {stats.waiting_s / elapsed_s:.0%} of it",
            ("the loader is not the limit: speed up the loop",),
        )
    speed = stats.n_bytes / elapsed_s
    if speed >= _NEAR_LIMIT * figures.copy_bytes_per_s:
        return Conclusion(
            Limit.COPY,
            f"batches come at {speed / 1e9:.2f} GB/s, {speed / figures.copy_bytes_per_s:.0%} of "
            f"the {figures.copy_bytes_per_s / 1e9:.2f} GB/s that this machine copies at most",
            ("read fewer bytes: name what is needed in fields, or store smaller types",),
        )
    busy = stats.filling_s / (max(1, n_workers) * elapsed_s)
    main = figures.main_cpu_s / elapsed_s
    if n_workers and main >= _MAX and main >= busy:
        return _main_limits(figures, main)
    if busy >= _MAX or not n_workers:
        return _workers_limit(figures, busy)
    return _round_trips_limit(figures, busy, main)


def _main_limits(figures: Figures, main: float) -> Conclusion:
    stats = figures.stats
    per_batch_us = figures.main_cpu_s / max(1, stats.n_batches) * 1e6
    return Conclusion(
        Limit.MAIN,
        f"the thread that iterates is busy {main:.0%} of the time: {per_batch_us:.0f} µs for each "
        f"batch of {stats.n_bytes / max(1, stats.n_batches) / 1e3:,.0f} KB",
        (
            "a larger batch_size: a batch costs the main process the same whatever is in it",
            "reuse=True, if each batch is done with before the next",
        ),
    )


def _workers_limit(figures: Figures, busy: float) -> Conclusion:
    """Return the conclusion for workers (or main, without any) that are always busy filling."""
    stats = figures.stats
    whole_s = max(stats.filling_s, 1e-9)
    phases = {
        Limit.READING: stats.reading_s,
        Limit.HASHING: stats.checking_s,
        Limit.DECODING: stats.decoding_s,
        Limit.TRANSFORM: stats.transforming_s,
    }
    limit = max(phases, key=lambda phase: phases[phase])
    cached = 1.0 if figures.cached_share is None else figures.cached_share
    if limit is Limit.READING and cached < _CACHED:
        limit = Limit.STORAGE
    parts = ", ".join(f"{phase} {s / whole_s:.0%}" for phase, s in phases.items() if s > 0)
    who = {0: "without workers, main is", 1: "the worker is"}.get(
        figures.n_workers, f"{figures.n_workers} workers are"
    )
    because = f"{who} busy filling batches {min(1.0, busy):.0%} of the time: {parts}"
    if limit is Limit.STORAGE:
        because += f"; of the files, {1 - cached:.0%} was not in the page cache"
    return Conclusion(limit, because, (*_more_workers(figures), *_advice_on(limit, figures)))


def _more_workers(figures: Figures) -> tuple[str, ...]:
    """Advise more processes, up to the number of CPUs."""
    n_cpus = figures.n_cpus
    if figures.n_workers >= n_cpus or n_cpus in figures.tried:
        return ()
    return (f"num_workers={n_cpus}: as many CPUs may be used",)


def _advice_on(limit: Limit, figures: Figures) -> tuple[str, ...]:
    if limit is Limit.TRANSFORM:
        return ("a cheaper transform, or do during conversion what is the same in every epoch",)
    if limit is Limit.DECODING:
        return (
            "store the compressed fields raw, if the disk has room, or leave them out (fields)",
        )
    if limit is Limit.HASHING:
        if figures.verify == "always":
            return (
                'shardio.open(path, verify="first"): every byte is hashed once, not in each epoch',
            )
        return ("nothing: this is the first epoch only, in which every byte is hashed",)
    if limit is Limit.STORAGE:
        return (
            "preload=True: the files fit into memory, and reading them once in a row is faster"
            if figures.fits
            else "more memory, so that the files stay in the page cache, or a faster disk; or "
            "shuffle='blocks', which reads neighbours together",
            "fewer bytes: name what is needed in fields, or store fields compressed",
        )
    batch_bytes = figures.stats.n_bytes / max(1, figures.stats.n_batches)
    if batch_bytes < _SMALL_BATCH_BYTES:
        return ("a larger batch_size: requesting so small a batch costs more than copying it",)
    return ("fewer bytes or fewer fields: name what is needed in fields",)


def _round_trips_limit(figures: Figures, busy: float, main: float) -> Conclusion:
    """Nobody is busy all the time: they wait for one another, or for a CPU."""
    because = (
        f"nobody is busy: filling batches takes {busy:.0%} of the workers' time, and the main "
        f"process is busy {main:.0%} of its own"
    )
    if figures.idle_share is not None and figures.idle_share < _IDLE:
        because += f"; yet the CPUs of this machine are idle {figures.idle_share:.0%} of the time"
        return Conclusion(Limit.CPUS, because, ("fewer other programs on this machine",))
    advice = [
        "a larger batch_size: fewer round trips for the same samples",
        "a larger prefetch: more batches under way",
    ]
    if figures.n_workers > figures.n_cpus:
        advice.insert(0, f"num_workers={figures.n_cpus}: that is the number of CPUs")
    return Conclusion(Limit.ROUND_TRIPS, because, tuple(advice))
