"""A trace of a loader: when workers filled batches, and what the training loop was doing.

The file is JSON in Google's Trace Event Format, with times in microseconds.
"""

from __future__ import annotations

import io
import itertools
import json
import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import IO, Any, Final, NamedTuple, Self

from shardio._base.callers import expand_home
from shardio._base.classes import Listed
from shardio._base.statistics import now_ns
from shardio._engine.dispatch.counters import FillRecord
from shardio._engine.dispatch.engine import Engine
from shardio._engine.dispatch.iterations import EpochIteration
from shardio._loading.iterator import BatchAssembler, LoaderIterator
from shardio.batch.batch import Batch
from shardio.errors import InvalidArgument
from shardio.storage.fs import create

Event = dict[str, Any]

_N_DELIVERIES: Final = 4096
_MAIN: Final = 0
"""The index of the row of the main process; the row of worker k has the index k + 1."""


class Delivery(NamedTuple):
    """The delivery of a batch: requested at `asked_ns`, available after `waited_ns` of waiting.

    `iteration_ns` identifies the iteration, as in a FillRecord.
    """

    iteration_ns: int
    step: int
    asked_ns: int
    waited_ns: int
    got_ns: int


class Trace(Listed):
    """A recording of a loader's work during a `with` block. Borrows `engine`.

    If there is a `path`, the file is opened at the beginning of the block, and written at its end,
    even after an exception.
    """

    _public = "save"

    def __init__(self, engine: Engine, path: str | os.PathLike[str] | None = None) -> None:
        self._engine: Engine | None = engine
        self._path = path
        self._file: IO[str] | None = None
        self._began_ns = 0
        self._fillings: Sequence[Sequence[FillRecord]] = ()
        self._deliveries: deque[Delivery] = deque(maxlen=_N_DELIVERIES)
        self._epochs: dict[int, int] = {}
        self.is_recording = False

    def __enter__(self) -> Self:
        if self._engine is None or self.is_recording:
            raise InvalidArgument("a trace is used in one `with`; call loader.trace() for another")
        if self._path is not None:
            self._file = _open(self._path)
        self._began_ns = now_ns()
        self._engine.counters.set_recording(is_recording=True)
        self.is_recording = True
        return self

    def __exit__(self, *exception: object) -> None:
        if self._engine is None:
            return
        engine, self._engine = self._engine, None
        self.is_recording = False
        engine.counters.set_recording(is_recording=False)
        self._fillings = [
            [one for one in kept if one.start_ns >= self._began_ns]
            for kept in engine.counters.fill_records()
        ]
        if self._file is not None:
            with self._file as file:
                self._write(file)

    def iterator(
        self, loader: object, engine: Engine, assembler: BatchAssembler, iteration: EpochIteration
    ) -> LoaderIterator:
        timer = iteration.timer
        iteration_ns = timer.began_ns - timer.head_start_ns  # as in FillRecord
        self._epochs[iteration_ns] = iteration.plan.epoch
        record = partial(Delivery, iteration_ns)
        return _TracedIterator(self._deliveries, record, loader, engine, assembler, iteration)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the trace to a file; replace an existing file. Call it after the `with` block."""
        with _open(path) as file:
            self._write(file)

    def _write(self, file: IO[str]) -> None:
        json.dump({"traceEvents": self.events(), "displayTimeUnit": "ms"}, file)

    def events(self) -> list[Event]:
        """Return all events of the trace. Call it after the `with` block."""
        found: list[Event] = [_metadata("process_name", "shardio", _MAIN)]
        found.append(_metadata("thread_name", "main", _MAIN))
        for worker, fillings in enumerate(self._fillings):
            found.append(_metadata("thread_name", f"worker {worker}", worker + 1))
            for one in fillings:
                found += self._events_of_filling(one, worker + 1)
        found += self._events_of_main()
        found += self._ready_counts()
        return found

    def _events_of_filling(self, one: FillRecord, row: int) -> Iterator[Event]:
        """Yield an event for a batch that a worker filled, and one for each phase of the filling.

        Only the total time of each phase is known, so the phases are shown one after another.
        """
        whole_ns = one.end_ns - one.start_ns
        details: dict[str, int] = {"step": one.step}
        if one.iteration_ns in self._epochs:
            details["epoch"] = self._epochs[one.iteration_ns]
        yield self._span(f"batch {one.step}", row, one.start_ns, whole_ns, details)
        # The times of checking and of decompressing are estimates: one record in seven is timed,
        # and its time counts seven times. With few records, an estimate may exceed `whole_ns`.
        check_ns = min(one.check_ns, whole_ns)
        decode_ns = min(one.decode_ns, whole_ns - check_ns)
        transform_ns = min(one.transform_ns, whole_ns - check_ns - decode_ns)
        start_ns = one.start_ns
        for name, phase_ns in (
            ("reading", whole_ns - check_ns - decode_ns - transform_ns),
            ("checking hashes", check_ns),
            ("decompressing", decode_ns),
            ("transforming", transform_ns),
        ):
            if phase_ns:
                yield self._span(name, row, start_ns, phase_ns)
                start_ns += phase_ns

    def _events_of_main(self) -> Iterator[Event]:
        deliveries = list(self._deliveries)
        for i, one in enumerate(deliveries):
            details = {"step": one.step, "epoch": self._epochs[one.iteration_ns]}
            waited_until_ns = one.asked_ns + one.waited_ns
            yield self._span("waiting", _MAIN, one.asked_ns, one.waited_ns, details)
            over_ns = one.got_ns - waited_until_ns
            yield self._span("handing over", _MAIN, waited_until_ns, over_ns, details)
            # The body of the loop lasts until the next request of the same iteration.
            if i + 1 < len(deliveries) and deliveries[i + 1].iteration_ns == one.iteration_ns:
                body_ns = deliveries[i + 1].asked_ns - one.got_ns
                yield self._span("the loop's body", _MAIN, one.got_ns, body_ns, details)

    def _ready_counts(self) -> Iterator[Event]:
        got_ns = {(one.iteration_ns, one.step): one.got_ns for one in self._deliveries}
        latest = {one.iteration_ns: one.step for one in self._deliveries}
        changes = []
        for filled in itertools.chain.from_iterable(self._fillings):
            key = filled.iteration_ns, filled.step
            # Skip a batch that the loop received before the first recorded delivery.
            if key in got_ns or filled.step > latest.get(filled.iteration_ns, -1):
                changes.append((filled.end_ns, 1))
                if key in got_ns:
                    changes.append((got_ns[key], -1))
        n_ready = 0
        for moment_ns, change in sorted(changes):
            n_ready += change
            yield {
                "name": "ready batches",
                "ph": "C",
                "pid": 0,
                "ts": self._microseconds(moment_ns),
                "args": {"batches": n_ready},
            }

    def _span(
        self, name: str, row: int, start_ns: int, elapsed_ns: int, details: object = None
    ) -> Event:
        found: Event = {
            "name": name,
            "ph": "X",
            "pid": 0,
            "tid": row,
            "ts": self._microseconds(start_ns),
            "dur": elapsed_ns / 1e3,
        }
        if details is not None:
            found["args"] = details
        return found

    def _microseconds(self, moment_ns: int) -> float:
        return (moment_ns - self._began_ns) / 1e3


def _metadata(kind: str, name: str, row: int) -> Event:
    return {"name": kind, "ph": "M", "pid": 0, "tid": row, "args": {"name": name}}


class _TracedIterator(LoaderIterator):
    def __init__(
        self, deliveries: deque[Delivery], record: Callable[..., Delivery], *arguments: Any
    ) -> None:
        super().__init__(*arguments)
        self._deliveries, self._record = deliveries, record

    def __next__(self) -> Batch:
        timer = self._timer
        asked_ns, waited_ns = now_ns(), timer.waited_ns
        batch = super().__next__()
        waited_ns = timer.waited_ns - waited_ns
        self._deliveries.append(self._record(batch.step, asked_ns, waited_ns, now_ns()))
        return batch


def _open(path: str | os.PathLike[str]) -> IO[str]:
    return io.TextIOWrapper(create(expand_home(path), replace=True), encoding="utf-8")
