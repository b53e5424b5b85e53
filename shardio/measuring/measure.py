"""Measure how fast a dataset is loaded, and conclude what limits the speed and what to change.

The speed of copying memory is a limit for every loader. A *run* with one number of workers reads
some samples once, and then again with the files in memory: the *warm* readings.
"""

from __future__ import annotations

import itertools
import math
import os
import random
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass, fields
from enum import StrEnum
from functools import partial
from typing import Any, Final

import numpy as np

from shardio._base.classes import one_line
from shardio._base.statistics import LoadingStats
from shardio._loading.trace import Trace
from shardio._workers.processes.limits import available_bytes, usable_cpus
from shardio.errors import InvalidArgument
from shardio.loader import ShardLoader
from shardio.samples.open_dataset import OpenDataset
from shardio.samples.shard_dataset import ShardDataset
from shardio.samples.view import SampleView
from shardio.storage.file_access import PAGE_BYTES, is_cached

_SOURCE_BYTES: Final = 64 << 20
"""The size of the memory from which bytes are copied, which is larger than the caches of a CPU."""
_MIN_COPY_BYTES: Final = 1 << 20
_N_PROBES: Final = 256
"""The number of random pages of the files that `cached_share` checks."""


def copy_bytes_per_s(n_threads: int, block_bytes: int, *, seconds: float) -> float:
    """Measure and return how many bytes per second `n_threads` threads copy together.

    As in a loader, each thread copies into a block of its own again and again. The size of a block
    is `block_bytes`, but at least 1 MiB and at most 64 MiB.
    """
    size = min(_SOURCE_BYTES, max(block_bytes, _MIN_COPY_BYTES))
    source = np.ones(_SOURCE_BYTES, np.uint8)
    blocks = [np.ones(size, np.uint8) for _ in range(n_threads)]
    end_s = time.perf_counter() + seconds

    def copy(block: np.ndarray[tuple[int], np.dtype[np.uint8]]) -> int:
        n_bytes = 0
        while time.perf_counter() < end_s or not n_bytes:
            start = n_bytes % (_SOURCE_BYTES - size + 1)
            np.copyto(block, source[start : start + size])
            n_bytes += size
        return n_bytes

    start_s = time.perf_counter()
    with ThreadPoolExecutor(n_threads) as threads:
        n_bytes = sum(threads.map(copy, blocks))
    return n_bytes / (time.perf_counter() - start_s)


def cached_share(paths: Sequence[str]) -> float | None:
    """Estimate the share of the content of files that is in the page cache; None if unknown."""
    sizes = [os.path.getsize(path) for path in paths]
    if not sum(sizes):
        return None
    chance = random.Random(0)
    n_cached = 0
    for number in chance.choices(range(len(paths)), weights=sizes, k=_N_PROBES):
        offset = chance.randrange(sizes[number]) // PAGE_BYTES * PAGE_BYTES
        with open(paths[number], "rb", buffering=0) as file:
            found = is_cached(file.fileno(), offset)
        if found is None:
            return None
        n_cached += found
    return n_cached / _N_PROBES


_COPY_SHARE: Final = 0.05
"""The duration of one measurement of copying, as a share of the duration of one reading."""
_N_COPY_TIMES: Final = 3  # the number of measurements of copying; the fastest counts


@dataclass(frozen=True, slots=True)
class LoadingRun:
    """The figures for one number of workers.

    `first` contains the statistics of the first reading, `warm` the sums over all warm readings.
    `first_main_cpu_s` and `main_cpu_s` are the CPU times of the iterating thread in the first and
    in the warm readings. `limit_bytes_per_s` is the speed at which memory is copied with one thread
    per worker.
    """

    n_workers: int
    first: LoadingStats
    warm: LoadingStats
    main_cpu_s: float
    first_main_cpu_s: float
    limit_bytes_per_s: float

    def __repr__(self) -> str:
        speed = f"{self.samples_per_s:,.0f} samples/s", f"{self.bytes_per_s / 1e9:.2f} GB/s"
        return one_line(self, (), *speed)

    @property
    def samples_per_s(self) -> float:
        """The number of samples per second in the warm readings."""
        return self.warm.n_samples / (self.warm.elapsed_s or math.inf)

    @property
    def bytes_per_s(self) -> float:
        """The number of bytes per second in the warm readings."""
        return self.warm.n_bytes / (self.warm.elapsed_s or math.inf)

    @property
    def first_samples_per_s(self) -> float:
        """The number of samples per second in the first reading."""
        return self.first.n_samples / (self.first.elapsed_s or math.inf)

    def as_json(self) -> dict[str, Any]:
        """Return all figures, including the rates, as JSON values."""
        rates = ("samples_per_s", "bytes_per_s", "first_samples_per_s")
        stats = {"first": self.first.as_json(), "warm": self.warm.as_json()}
        return {name: getattr(self, name) for name in rates} | asdict(self) | stats


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
            else "more memory (to keep the files in the page cache), a faster disk, or "
            "shuffle='blocks' (which reads neighbouring samples together)",
            "fewer bytes: select the needed fields (fields), or store fields compressed",
        )
    if stats.n_bytes / stats.n_batches < _SMALL_BATCH_BYTES:
        return ("a larger batch_size: requesting such a small batch takes longer than copying it",)
    return ("fewer bytes or fewer fields: select the needed fields (fields)",)


@dataclass(frozen=True, slots=True)
class LoadingReport:
    """The measurements of a dataset, and the conclusions from them.

    `conclusion` is drawn from the warm readings of the fastest run, and `first_conclusion` from the
    first reading of the first run. `cached_share` is the share of the dataset's files that was in
    the page cache at the start; None if unknown. `trace` is the trace of a separate short run.
    """

    path: str
    n_samples: int
    batch_size: int
    n_cpus: int
    cached_share: float | None
    runs: tuple[LoadingRun, ...]
    conclusion: Conclusion
    first_conclusion: Conclusion
    trace: Trace | None = None

    def __repr__(self) -> str:
        best = self.best
        speed = f"{best.samples_per_s:,.0f} samples/s with {best.n_workers} workers"
        return one_line(self, [self.path], speed, self.conclusion.because)

    @property
    def best(self) -> LoadingRun:
        """The run with the most samples per second in its warm readings."""
        return max(self.runs, key=lambda run: run.samples_per_s)

    def as_json(self) -> dict[str, Any]:
        """Return all figures and conclusions as JSON values, without the trace."""
        found = {each.name: getattr(self, each.name) for each in fields(self)}
        del found["trace"]
        return found | {
            "runs": [run.as_json() for run in self.runs],
            "best_n_workers": self.best.n_workers,
            "conclusion": asdict(self.conclusion),
            "first_conclusion": asdict(self.first_conclusion),
        }


def measure_loading(
    dataset: str | os.PathLike[str] | OpenDataset | SampleView,
    batch_size: int = 32,
    *,
    n_workers: Sequence[int] | None = None,
    seconds: float = 2.0,
    wants_trace: bool = False,
    progress: Callable[[int], None] | None = None,
    **options: Any,
) -> LoadingReport:
    """Measure how fast a dataset loads on this machine, and find what limits the speed.

    In a run, samples are first read for `seconds`, but for one epoch at most. Then the same samples
    are read again, repeatedly, for `seconds`. The first reading of the first run shows the speed
    with the page cache as it was before the call; the first reading of every run checks hashes.

    Args:
        dataset: a folder, an open dataset, or a view of a dataset.
        batch_size: the number of samples per batch.
        n_workers: the numbers of worker processes to try; by default 0, 1, 2, 4 and so on, up to
            the number of CPUs.
        seconds: the duration of the first reading in a run, and of all repeated readings.
        wants_trace: True to also record a trace, in another run with the best number of workers.
        progress: a function that is called before each run, with the number of workers.
        **options: other options of ShardLoader, such as transform. By default, shuffle is True and
            output is "numpy".

    Raises:
        InvalidArgument: the dataset is empty, or an option is invalid.
        DatasetNotFound, ShardCorrupt, …: errors of the loader.
    """
    n_cpus = usable_cpus()
    counts = _counts_to_try(n_workers, n_cpus, options)
    if not counts or not 0 < seconds < math.inf:
        raise InvalidArgument(
            "n_workers must not be empty, and seconds must be above 0 and finite; "
            f"found {counts}, {seconds}"
        )
    options = {"shuffle": True, "output": "numpy", **options}
    with ExitStack() as stack:
        if not isinstance(dataset, OpenDataset | SampleView):
            dataset = stack.enter_context(ShardDataset(dataset))
        source = dataset.dataset if isinstance(dataset, SampleView) else dataset
        shards = itertools.chain(source.shards, *source.column_groups.values())
        files = [os.path.join(source.path, shard.name) for shard in shards]
        cached = cached_share(files)
        runs = []
        for count in counts:
            if progress is not None:
                progress(count)
            runs.append(_run(dataset, batch_size, count, seconds, options))
        best, one = max(runs, key=lambda run: run.samples_per_s), runs[0]
        fits_in_memory = sum(map(os.path.getsize, files)) <= available_bytes()
        figures = partial(
            Figures,
            n_cpus=n_cpus,
            verify=source.verify,
            worker_counts=tuple(counts),
            fits_in_memory=fits_in_memory,
        )
        warm = figures(
            best.warm,
            best.n_workers,
            main_cpu_s=best.main_cpu_s,
            copy_bytes_per_s=best.limit_bytes_per_s,
        )
        first = figures(
            one.first,
            one.n_workers,
            main_cpu_s=one.first_main_cpu_s,
            copy_bytes_per_s=one.limit_bytes_per_s,
            cached_share=cached,
        )
        return LoadingReport(
            path=source.path,
            n_samples=len(dataset),
            batch_size=batch_size,
            n_cpus=n_cpus,
            cached_share=cached,
            runs=tuple(runs),
            conclusion=conclude(warm),
            first_conclusion=conclude(first),
            trace=_trace(dataset, batch_size, best.n_workers, options) if wants_trace else None,
        )


def _counts_to_try(
    n_workers: Sequence[int] | None, n_cpus: int, options: Mapping[str, Any]
) -> list[int]:
    """Return the distinct numbers of workers to try; `options` are the caller's other options."""
    if "num_workers" in options or isinstance(n_workers, int):
        found: Any = n_workers
        if "num_workers" in options:
            found = f"num_workers={options['num_workers']}"
        raise InvalidArgument(
            f"n_workers must list the worker counts to try, such as n_workers=[0, 4]; found {found}"
        )
    if n_workers is None:
        n_workers = [0, *(1 << k for k in range(n_cpus.bit_length()) if 1 << k < n_cpus), n_cpus]
    return list(dict.fromkeys(n_workers))


def _run(
    dataset: OpenDataset | SampleView,
    batch_size: int,
    n_workers: int,
    seconds: float,
    options: dict[str, Any],
) -> LoadingRun:
    with ShardLoader(dataset, batch_size, num_workers=n_workers, **options) as loader:
        start = loader.state_dict()
        # Read one batch to start the workers, and go back to the beginning of the epoch.
        _iterate(loader, 1)
        loader.load_state_dict(start)
        begin_s = time.thread_time()
        n_batches = _iterate(loader, len(loader), seconds)
        first_main_cpu_s = time.thread_time() - begin_s
        first = loader.stats().latest
        if not n_batches:
            raise InvalidArgument(f"{loader.dataset.path}: no batch to measure")
        warm, main_cpu_s, end_s = LoadingStats(), 0.0, time.perf_counter() + seconds
        while not warm.n_batches or time.perf_counter() < end_s:
            # Read the same samples again, from files in memory.
            loader.load_state_dict(start)
            begin_s = time.thread_time()
            _iterate(loader, n_batches)
            main_cpu_s += time.thread_time() - begin_s
            warm += loader.stats().latest
    block_bytes = first.n_bytes // n_batches
    limit = max(
        copy_bytes_per_s(max(1, n_workers), block_bytes, seconds=seconds * _COPY_SHARE)
        for _ in range(_N_COPY_TIMES)
    )
    return LoadingRun(n_workers, first, warm, main_cpu_s, first_main_cpu_s, limit)


def _iterate(loader: ShardLoader, n_batches: int, seconds: float = math.inf) -> int:
    """Read `n_batches` batches, or fewer in `seconds`; return the number that was read."""
    n_taken, end_s = 0, time.perf_counter() + seconds
    for n_taken, _ in enumerate(loader, start=1):
        if n_taken == n_batches or time.perf_counter() > end_s:
            break
    return n_taken


def _trace(
    dataset: OpenDataset | SampleView, batch_size: int, n_workers: int, options: dict[str, Any]
) -> Trace:
    """Return a trace of warm readings, with another loader, because tracing slows a loader down."""
    with ShardLoader(dataset, batch_size, num_workers=n_workers, **options) as loader:
        start = loader.state_dict()
        _iterate(loader, len(loader), 1.0)
        loader.load_state_dict(start)
        with loader.trace() as trace:
            _iterate(loader, len(loader), 1.0)
    return trace
