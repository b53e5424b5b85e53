"""Assign units to worker processes, track the state of each unit, and handle worker crashes.

The unit of a crashed worker is converted again in a new process. An input that crashes two
processes is skipped and reported as broken; all other inputs of its unit are converted.

On a Ray cluster, a machine that is presumed dead may still run. Each attempt to convert a unit
therefore writes its shards to a new folder, and only the main process moves the folder of a
finished attempt to the final path of the unit.
"""

from __future__ import annotations

import contextlib
import functools
import os
import platform
import secrets
import traceback
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple

from shardio._workers.processes.serialization import add_note
from shardio._workers.processes.worker_pool import MAX_CRASHES, WorkerExit
from shardio._workers.processes.zygote import Zygote, acquire
from shardio._workers.ray_cluster import Cluster, Engine
from shardio._workers.tasks.calls import FailedCall, ResultChunks
from shardio._workers.tasks.task_pool import TaskPool
from shardio.conversion.inputs import Listing
from shardio.conversion.journal import (
    RECORD_FILE,
    InputDone,
    Unit,
    UnitEvent,
    conversion_settings,
    different_settings,
    has_items,
    read_record,
)
from shardio.conversion.report import InputReport, Progress, StoreChoice
from shardio.conversion.worker import CPU_LIMIT_SIGNAL, ConversionJob, convert_unit, cpu_limit_s
from shardio.errors import ShardioError, UnsupportedEnvironment, WorkerDied
from shardio.shard.writer import ShardSummary
from shardio.storage.fs import make_folder, remove_tree, rename, sync_path, unlink


class ConversionState:
    """The state of all units, and the results that their workers have sent so far.

    `on_shard` is called for each shard of a finished unit. It receives the path of the shard
    relative to the job's folder, and a summary with the shard's name in the dataset. If a unit
    stopped at a broken input, the results of all later units are ignored, even if they finished
    before that unit.
    """

    def __init__(
        self,
        listing: Listing,
        units: Sequence[Unit],
        progress: Callable[[Progress], None] | None,
        on_shard: Callable[[str, ShardSummary], object] | None = None,
        choice: StoreChoice | None = None,
    ) -> None:
        self.listing, self.units, self._n_started = listing, units, 0
        self._progress, self._on_shard, self._choice = progress, on_shard, choice
        self._running: set[int] = set()
        self._done: dict[int, InputDone] = {}
        self._shards: dict[int, tuple[ShardSummary, ...]] = {}
        files = () if has_items(listing.inputs) else listing.inputs
        self._n_bytes = sum(file.n_bytes for file in files)
        self._n_bytes_done = self._n_samples = self._n_broken = 0
        self.stopped_at: int | None = None

    def next_unit(self) -> Unit | None:
        """Return the next unit to start; None if there are no more."""
        if self.stopped_at is not None or self._n_started == len(self.units):
            return None
        unit = self.units[self._n_started]
        self._running.add(self._n_started)
        self._n_started += 1
        return unit

    def is_finished(self) -> bool:
        """Return True if all units that the result needs are done."""
        if self.stopped_at is None:
            return not self._running and self._n_started == len(self.units)
        return not any(number <= self.stopped_at for number in self._running)

    def handle(self, event: UnitEvent) -> None:
        """Record an event of a unit, and report finished inputs to `progress`.

        If the unit is converted again after a crash, an input may finish twice. `progress` is
        called only the first time, but the result is that of the last event.
        """
        if isinstance(event, InputDone):
            is_new = event.position not in self._done
            self._done[event.position] = event
            if is_new:
                self.report_progress(event)
            return
        self._shards[event.unit] = event.shards
        self._running.discard(event.unit)
        if event.stopped and (self.stopped_at is None or event.unit < self.stopped_at):
            self.stopped_at = event.unit
        if self._on_shard is not None and self._is_included(event.unit):
            for path, shard in self._shards_of(event.unit):
                self._on_shard(path, shard)

    def _is_included(self, unit: int) -> bool:
        return self.stopped_at is None or unit <= self.stopped_at

    def _shards_of(self, unit: int) -> list[tuple[str, ShardSummary]]:
        planned = self.units[unit]
        return [
            (f"{planned.key}/{one.name}", planned.published_shard(one))
            for one in self._shards[unit]
        ]

    def shards(self) -> list[tuple[str, ShardSummary]]:
        """Return the path and the summary of each shard, in the order of the units."""
        units = [unit for unit in sorted(self._shards) if self._is_included(unit)]
        return [placed for unit in units for placed in self._shards_of(unit)]

    def reports(self) -> list[InputReport]:
        """Return the reports on all inputs; inputs without a result are "not_processed"."""
        reports = []
        for position, source in enumerate(self.listing.inputs):
            done = self._done.get(position)
            if done is not None and self._is_included(done.unit):
                reports.append(done.report)
            else:
                name, n_bytes, label = source.name, source.n_bytes, source.label
                reports.append(InputReport(name, "not_processed", "", 0, n_bytes, label=label))
        return reports

    def report_progress(self, done: InputDone | None = None) -> None:
        """Call `progress` after an input is finished, or before the first input."""
        latest: dict[str, Any] = {}
        if done is not None:
            report = done.report
            if self._n_bytes:  # items of Python objects have no size to show
                self._n_bytes_done += self.listing.inputs[done.position].n_bytes
            self._n_samples += report.n_samples
            self._n_broken += report.outcome == "broken"
            latest = {"name": report.name, "outcome": report.outcome, "reason": report.reason}
        if self._progress is None:
            return
        self._progress(
            Progress(
                n_inputs_done=len(self._done),
                n_inputs=len(self.listing.inputs),
                n_bytes_done=self._n_bytes_done,
                n_bytes=self._n_bytes,
                n_samples=self._n_samples,
                n_broken=self._n_broken,
                choice=self._choice,
                **latest,
            )
        )


NextUnit = Callable[[], Unit | None]


def run_in_workers(
    next_unit: NextUnit, job: ConversionJob, n_workers: int, lock_fds: Sequence[int] = ()
) -> Generator[UnitEvent, None, None]:
    """Convert units in `n_workers` processes, and yield the events of the units as they arrive.

    Every worker inherits `lock_fds`, so that these locks are held until the last worker has exited.
    If the generator is closed, the workers are stopped. Errors in workers are raised here.
    WorkerDied is raised if workers crash repeatedly while they are not reading an input.
    """
    running: dict[int, Unit] = {}  # keys: the indices that the pool gave to the units
    n_crashes: Counter[tuple[int, int | None]] = Counter()
    with TaskPool(
        partial(_events_of, job),
        n_workers,
        max_items=n_workers,
        depth=1,
        in_order=False,
        preload=[__name__, *shared_modules(job)],
        name="the conversion",
        on_crash=UnitCrash,
        held_fds=lock_fds,
    ) as pool:
        while True:
            while pool.has_room and (unit := next_unit()) is not None:
                running[pool.put(unit, unit.title)] = unit
            if not running:
                return
            pool.wait()
            while (taken := pool.take()) is not None:
                item, found = taken
                if isinstance(found, UnitCrash):
                    unit = _unit_after_crash(running.pop(item), found, job, n_crashes)
                    running[pool.put(unit, unit.title)] = unit
                    continue
                if isinstance(found, FailedCall):  # for example, the converter called sys.exit
                    raise WorkerDied(f"a worker ended its unit: {found.error!r}") from found.error
                for event in found:
                    if isinstance(event, Exception):
                        raise event
                    yield event
                if pool.has_more(item):
                    pool.resume(item)
                else:
                    del running[item]


_MODULES: Final = {"av": "av", "pillow": "PIL.Image", "simplejpeg": "simplejpeg"}
"""The modules to import before workers are forked, by the names of libraries in a converter's
`libraries()`: importing PyAV takes 50 ms in each worker. Other libraries may start threads, which
forks would lack."""


def shared_modules(job: ConversionJob) -> list[str]:
    """Return the modules that all workers of a conversion need, and that start no thread."""
    return [_MODULES[name] for name in job.source.libraries() if name in _MODULES]


class UnitCrash(NamedTuple):
    """The crash of a worker.

    `position` is the index in the unit of the input that was being converted; None if none was.
    """

    position: int | None
    died: WorkerExit


def _unit_after_crash(
    unit: Unit, crash: UnitCrash, job: ConversionJob, n_crashes: Counter[tuple[int, int | None]]
) -> Unit:
    """Return the unit to convert again, without an input that always crashes workers."""
    position, died = crash
    n_crashes[unit.number, position] += 1
    if position is None:
        # The worker may have crashed while it verified the shards of an earlier conversion, which
        # the unit's journal record lists. Delete the record: the next worker then writes the shards
        # again instead of verifying them.
        unlink(Path(job.folder, unit.key, RECORD_FILE))
    if n_crashes[unit.number, position] < MAX_CRASHES:
        return unit
    if position is None:
        raise WorkerDied(
            f"{MAX_CRASHES} workers crashed while finishing {unit.title}; the last {died.cause}"
        )
    reason = f"{MAX_CRASHES} processes crashed while reading it; the last {died.cause}"
    if died.signal == CPU_LIMIT_SIGNAL and job.step_s is not None:
        seconds = cpu_limit_s(job.step_s, unit.inputs[position])
        reason = f"timed out after {seconds:.0f} s of CPU time; the file is probably corrupt"
    return replace(unit, skipped=(*unit.skipped, (unit.first + position, reason)))


def _events_of(job: ConversionJob, unit: Unit) -> ResultChunks:
    return ResultChunks(_events_or_error(job, unit), "the conversion")


def _events_or_error(job: ConversionJob, unit: Unit) -> Iterator[UnitEvent | Exception]:
    """Convert a unit and yield its events. If it fails, yield the exception as the last event."""
    n_done = 0
    try:
        for event in convert_unit(unit, job):
            n_done += isinstance(event, InputDone)
            yield event
    except (OSError, ShardioError) as error:
        yield error
    # The converter may raise anything; the main process gets the exception as text.
    except Exception:  # noqa: BLE001
        text = f"a worker raised an exception {_when(unit, n_done)}\n{traceback.format_exc()}"
        yield WorkerDied(text)


def convert_here(job: ConversionJob, unit: Unit) -> Iterator[UnitEvent]:
    """Convert a unit in this process; an exception of the converter gets a note with the input."""
    n_done = 0
    try:
        for event in convert_unit(unit, job):
            n_done += isinstance(event, InputDone)
            yield event
    except (OSError, ShardioError):
        raise
    except Exception as error:
        add_note(error, _when(unit, n_done))
        raise


def _when(unit: Unit, n_done: int) -> str:
    if n_done < len(unit.inputs):
        return f"while converting {unit.inputs[n_done].name}"
    return f"while finishing {unit.title}"


class UnitAttempt(NamedTuple):
    """The events of a unit, the folder of its new shards, and a path that the worker cannot see.

    `folder` is "" if the unit was already finished; `missing_path` is "" if all paths are visible.
    """

    events: tuple[UnitEvent, ...]
    folder: str
    missing_path: str


def _attempt_unit(
    job: ConversionJob, attempts: str, settings: Mapping[str, Any], unit: Unit
) -> UnitAttempt:
    """Convert a unit on a machine of the cluster, in a new folder inside `attempts`."""
    found = conversion_settings(settings["converter"], job.source.libraries())
    if differences := [
        f"{name.removeprefix('versions.')} is {here}, the conversion started with {recorded}"
        for name, recorded, here in different_settings(settings, found)
    ]:
        raise UnsupportedEnvironment(
            f"machine {platform.node()} of the Ray cluster would produce different bytes: "
            f"{'; '.join(differences)}; install the same versions everywhere"
        )
    missing_path = _first_invisible(unit)
    if kept := read_record(Path(job.folder, unit.key), unit):
        done, end = kept
        return UnitAttempt((*done, end), "", missing_path)
    folder = os.path.join(attempts, secrets.token_hex(8))
    make_folder(folder)
    _shared_zygote()
    units = iter([unit])
    events = tuple(run_in_workers(lambda: next(units, None), replace(job, folder=folder), 1))
    return UnitAttempt(events, os.path.join(folder, unit.key), missing_path)


@functools.cache
def _shared_zygote() -> Zygote:
    """Return this process's zygote and keep it: starting it takes 0.5 s, more than most units."""
    return acquire()


def run_on_ray(
    next_unit: NextUnit,
    job: ConversionJob,
    engine: Engine,
    n_at_once: int | None,
    settings: Mapping[str, Any],
) -> Generator[UnitEvent, None, None]:
    """Convert units on the machines of a Ray cluster, and yield the events of the units.

    At most `n_at_once` units are on the cluster at the same time. None means two units per CPU, one
    of which waits. Raise UnsupportedEnvironment if a machine cannot see the files, or if its
    processor type or its versions differ from this machine's.
    """
    attempts = os.path.join(job.folder, f"attempts-{secrets.token_hex(8)}")
    make_folder(attempts)
    running: dict[int, Unit] = {}

    def next_job() -> tuple[int, Unit] | None:
        if (unit := next_unit()) is None:
            return None
        running[unit.number] = unit
        return unit.number, unit

    try:
        with Cluster(engine, shared_path=attempts, n_at_once=n_at_once) as cluster:
            attempt = partial(_attempt_unit, job, attempts, settings)
            for number, found in cluster.run(attempt, next_job, lambda n: running[n].title):
                # If this machine does not see the file either, it was deleted meanwhile.
                if found.missing_path and os.path.lexists(found.missing_path):
                    raise UnsupportedEnvironment(
                        f"a machine of the Ray cluster cannot see {found.missing_path}: the source "
                        "must be on a file system that all machines mount at the same path"
                    )
                unit = running.pop(number)
                if found.folder:
                    path = os.path.join(job.folder, unit.key)
                    # An earlier conversion may have left an unfinished unit here.
                    remove_tree(path)
                    rename(found.folder, path)
                    sync_path(job.folder)
                yield from found.events
    finally:
        # A machine that was presumed dead, but still runs, cannot write any more once the folder
        # is gone. If the folder cannot be removed now, the next conversion removes it.
        with contextlib.suppress(OSError):
            remove_tree(attempts)


def _first_invisible(unit: Unit) -> str:
    """Return the first path that the main process could see, but this machine cannot; else ""."""
    for one in unit.inputs:
        for each in (one, *one.parts):
            if each.stamp != (0, 0) and not os.path.lexists(each.path):
                return each.path
    return ""
