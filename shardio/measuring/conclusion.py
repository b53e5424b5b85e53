"""Conclusions from measurements of a loader: what limits the speed, and which option to change."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from shardio._base.statistics import LoadingStats

_BUSY_SHARE: Final = 0.75
"""The main process (or the workers, on average) must be busy for this share of the time to be the
limit."""
_NEAR_LIMIT: Final = 0.7
"""Copying memory is the limit if batches arrive at this share, or more, of the copying speed."""
_CACHED_SHARE: Final = 0.9
"""Storage limits reading if less than this share of the files was in the page cache."""
_SMALL_BATCH_BYTES: Final = 256 << 10
"""For batches smaller than this, requesting a batch takes longer than copying it."""


class Limit(StrEnum):
    """The process, resource or step that limits the speed of a loader."""

    MAIN = "the main process"
    COPY = "copying memory"
    STORAGE = "storage"
    READING = "reading"
    HASHING = "hashing"
    DECODING = "decoding"
    TRANSFORM = "the transform"
    ROUND_TRIPS = "round trips"


@dataclass(frozen=True, slots=True)
class Figures:
    """The measurements of a loop that does nothing with the batches of a loader.

    Args:
        stats: the statistics of one or more iterations.
        n_workers: the number of worker processes of the loader; 0 for none.
        n_cpus: the number of CPUs that this process may use.
        main_cpu_s: the CPU time of the thread that iterates over the loader.
        copy_bytes_per_s: the total speed at which memory is copied with one thread per worker.
        verify: the option `verify` of the dataset.
        cached_share: the share of the files that was in the page cache; None if unknown.
        worker_counts: all numbers of workers that were measured.
        fits_in_memory: True if the files of the dataset fit into the available memory.
    """

    stats: LoadingStats
    n_workers: int
    n_cpus: int
    main_cpu_s: float
    copy_bytes_per_s: float
    verify: str = "first"
    cached_share: float | None = None
    worker_counts: tuple[int, ...] = ()
    fits_in_memory: bool = False


@dataclass(frozen=True, slots=True)
class Conclusion:
    """The limit of a loader, the figures that show it, and advice, the most effective first."""

    limit: Limit
    because: str
    advice: tuple[str, ...]


def conclude(figures: Figures) -> Conclusion:
    """Draw a conclusion from figures of at least one batch."""
    stats, n_workers = figures.stats, figures.n_workers
    elapsed_s = max(stats.elapsed_s, 1e-9)
    speed = stats.n_bytes / elapsed_s
    if speed >= _NEAR_LIMIT * figures.copy_bytes_per_s:
        return Conclusion(
            Limit.COPY,
            f"batches arrive at {speed / 1e9:.2f} GB/s, {speed / figures.copy_bytes_per_s:.0%} of "
            f"this machine's copying speed of {figures.copy_bytes_per_s / 1e9:.2f} GB/s",
            ("read fewer bytes: select the needed fields (fields), or store smaller types",),
        )
    busy = stats.filling_s / (max(1, n_workers) * elapsed_s)
    main = figures.main_cpu_s / elapsed_s
    if n_workers and main >= _BUSY_SHARE and main >= busy:
        per_batch_us = figures.main_cpu_s / stats.n_batches * 1e6
        return Conclusion(
            Limit.MAIN,
            f"the thread that iterates is busy {main:.0%} of the time: {per_batch_us:.0f} µs for "
            f"each batch of {stats.n_bytes / stats.n_batches / 1e3:,.0f} KB",
            (
                "a larger batch_size: the main process needs the same time for a batch of any size",
                "reuse=True, if the loop does not keep batches",
            ),
        )
    if busy >= _BUSY_SHARE or not n_workers:
        return _workers_limit(figures, busy)
    fewer = (f"num_workers={figures.n_cpus}: the number of available CPUs",)
    return Conclusion(
        Limit.ROUND_TRIPS,
        f"no process is always busy: workers fill batches {busy:.0%} of the time, and the main "
        f"process is busy {main:.0%} of the time",
        (
            *(fewer if n_workers > figures.n_cpus else ()),
            "a larger batch_size: fewer round trips for the same samples",
            "a larger prefetch: more batches in progress",
        ),
    )


def _workers_limit(figures: Figures, busy: float) -> Conclusion:
    """Return the conclusion if filling batches, by workers or the main process, is the limit."""
    stats, n_cpus = figures.stats, figures.n_cpus
    phases = {
        Limit.READING: stats.reading_s,
        Limit.HASHING: stats.checking_s,
        Limit.DECODING: stats.decoding_s,
        Limit.TRANSFORM: stats.transforming_s,
    }
    limit = max(phases, key=lambda phase: phases[phase])
    whole_s = max(stats.filling_s, 1e-9)
    parts = ", ".join(f"{phase} {s / whole_s:.0%}" for phase, s in phases.items() if s > 0)
    who = {0: "without workers, the main process is", 1: "the worker is"}.get(
        figures.n_workers, f"{figures.n_workers} workers are"
    )
    because = f"{who} busy filling batches {min(1.0, busy):.0%} of the time: {parts}"
    cached = 1.0 if figures.cached_share is None else figures.cached_share
    if limit is Limit.READING and cached < _CACHED_SHARE:
        limit = Limit.STORAGE
        because += f"; {1 - cached:.0%} of the files was not in the page cache"
    advice = _advice_for(limit, figures)
    if figures.n_workers < n_cpus and n_cpus not in figures.worker_counts:
        advice = (f"num_workers={n_cpus}: the number of available CPUs", *advice)
    return Conclusion(limit, because, advice)


def _advice_for(limit: Limit, figures: Figures) -> tuple[str, ...]:
    stats = figures.stats
    if limit is Limit.TRANSFORM:
        return ("a cheaper transform; move work that is the same in every epoch to the conversion",)
    if limit is Limit.DECODING:
        return (
            "store the fields raw, if the disk has space (shardio convert --store raw), or leave "
            "them out (fields)",
        )
    if limit is Limit.HASHING and figures.verify == "always":
        return ('shardio.open(path, verify="first"): every byte is hashed once, not in each epoch',)
    if limit is Limit.HASHING:
        return ("nothing: bytes are hashed in the first epoch only",)
    if limit is Limit.STORAGE:
        return (
            "dataset.preload(): the files fit into memory, and one sequential read is faster"
            if figures.fits_in_memory
            else "more memory, to keep the files in the page cache, a faster disk, or "
            "shuffle='blocks', which reads neighbouring samples together",
            "fewer bytes: select the needed fields (fields), or store fields compressed",
        )
    if stats.n_bytes / stats.n_batches < _SMALL_BATCH_BYTES:
        return ("a larger batch_size: requesting such a small batch takes longer than copying it",)
    return ("fewer bytes or fewer fields: select the needed fields (fields)",)
