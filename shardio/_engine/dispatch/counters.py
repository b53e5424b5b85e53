"""Shared memory of a loader's iterations: counters of each worker, and cancellation flags.

While a trace is recorded, every worker also writes the times of its latest batches.
"""

from __future__ import annotations

import mmap
import os
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from shardio._base.classes import undo_on_error
from shardio._base.statistics import CHECK, DECODE, PHASE_TIMES, TRANSFORM, LoadingStats, now_ns
from shardio._workers.processes.shared_memory import sparse_memory_file
from shardio.order.ranks import RankPartition

# The file consists of lines of 8 words of 8 bytes, each as long as a cache line. The first line is
# the header, which the main process writes. The counters follow: for each slot (the index of an
# iteration), one line per worker. Last, each worker has a ring buffer: a line whose first word is
# the number of records written so far, and then one line per record. While an iteration runs, only
# one worker writes to each line; the main process only sets the last word of a line of counters.
#
# `_N_FILLED` to `_IS_CANCELLED` are the indices of the words in a line of counters; `_N_WORKERS` to
# `_IS_RECORDING` are those of the words in the header.
_LINE: Final = 8
_N_FILLED, _FILL_NS, _READY_NS, _BEGAN_NS, _CHECK_NS, _DECODE_NS, _TRANSFORM_NS, _IS_CANCELLED = (
    range(8)
)
_N_WORKERS, _N_SLOTS, _N_RECORDS, _IS_RECORDING = range(4)

N_RECORDS: Final = 512
"""The number of batches that a trace records for each worker (32 KiB per worker).

A larger file could exceed the process's limit on file sizes.
"""

_S_PER_NS: Final = 1e-9


class FillRecord(NamedTuple):
    """The times of filling a batch, in ns; `iteration_ns` is the start of its iteration."""

    iteration_ns: int
    step: int
    start_ns: int
    end_ns: int
    check_ns: int
    decode_ns: int
    transform_ns: int


class IterationCounters:
    """The counters that one worker writes to the borrowed file `fd` of a `CounterTable`."""

    def __init__(self, fd: int, worker: int) -> None:
        self._words = words = memoryview(mmap.mmap(fd, 0)).cast("Q")
        n_workers, n_slots, self._n_records = words[: _N_RECORDS + 1]
        self._first, self._stride = _LINE * (1 + worker), _LINE * n_workers
        self._ring = _LINE * (1 + n_slots * n_workers + worker * (1 + self._n_records))

    def is_cancelled(self, slot: int) -> bool:
        return self._words[self._first + slot * self._stride + _IS_CANCELLED] != 0

    def start(self) -> int:
        """Start timing a batch; return the time for `add`."""
        PHASE_TIMES.sums_ns[:] = 0, 0, 0
        return now_ns()

    def add(self, slot: int, step: int, start_ns: int) -> int:
        """Count a batch that was begun at `start_ns`; return the ns since then."""
        end_ns = now_ns()
        words, line = self._words, self._first + slot * self._stride
        words[line + _N_FILLED] += 1
        words[line + _FILL_NS] += end_ns - start_ns
        words[line + _READY_NS] += end_ns - words[line + _BEGAN_NS]
        sums_ns = PHASE_TIMES.sums_ns
        if any(sums_ns):
            words[line + _CHECK_NS] += sums_ns[CHECK]
            words[line + _DECODE_NS] += sums_ns[DECODE]
            words[line + _TRANSFORM_NS] += sums_ns[TRANSFORM]
        if words[_IS_RECORDING]:
            self._record(words[line + _BEGAN_NS], step, start_ns, end_ns, sums_ns)
        return end_ns - start_ns

    def _record(
        self, iteration_ns: int, step: int, start_ns: int, end_ns: int, sums_ns: list[int]
    ) -> None:
        words, ring = self._words, self._ring
        start = ring + _LINE * (1 + words[ring] % self._n_records)
        for i, value in enumerate((iteration_ns, step, start_ns, end_ns, *sums_ns)):
            words[start + i] = value
        words[ring] += 1  # counted last, so that the count never includes an unfinished record


class CounterTable:
    """The counters of all workers in up to `n_slots` iterations. The caller owns `fd`."""

    def __init__(self, n_slots: int, n_workers: int, n_records: int = N_RECORDS) -> None:
        self.n_workers, self._n_records = n_workers, n_records
        n_lines = 1 + (n_slots + 1 + n_records) * n_workers
        self.fd = sparse_memory_file(n_lines * _LINE * 8, "the counters of iterations")
        with undo_on_error(os.close, self.fd):
            whole = np.frombuffer(mmap.mmap(self.fd, 0), np.uint64).reshape(n_lines, _LINE)
        whole[0, : _N_RECORDS + 1] = n_workers, n_slots, n_records
        self._head = whole[0]
        self._has_recorded = False
        end = 1 + n_slots * n_workers
        self._lines = whole[1:end].reshape(n_slots, n_workers, _LINE)
        self._rings = whole[end:].reshape(n_workers, 1 + n_records, _LINE)
        self._n_begun = 0

    def begin(self, slot: int, began_ns: int) -> None:
        """Reset the counters of a slot to which no worker writes any more."""
        self._n_begun = max(self._n_begun, slot + 1)
        self._lines[slot] = 0
        self._lines[slot, :, _BEGAN_NS] = began_ns

    def cancel(self, slot: int) -> None:
        """Make workers drop the tasks of an iteration that they have not begun."""
        self._lines[slot, :, _IS_CANCELLED] = 1

    def set_recording(self, *, is_recording: bool) -> None:
        self._has_recorded = self._has_recorded or is_recording
        self._head[_IS_RECORDING] = is_recording

    def close(self) -> None:
        """Unmap the table; the counters stay readable."""
        self._lines = self._lines[: self._n_begun].copy()
        # Without records, the ring buffers take no memory in the file, but a copy would.
        self._rings = self._rings.copy() if self._has_recorded else self._rings[:0].copy()
        self._head = self._head.copy()

    def sums(self, slot: int) -> npt.NDArray[np.uint64]:
        sums: npt.NDArray[np.uint64] = self._lines[slot].sum(axis=0)
        return sums

    def fill_records(self) -> list[list[FillRecord]]:
        """Return the latest records of each worker, ordered by time."""
        found: list[list[FillRecord]] = []
        for ring in self._rings if self._has_recorded else ():
            lines = ring[1 : 1 + min(int(ring[0, 0]), self._n_records), :7].tolist()
            found.append(sorted((FillRecord(*line) for line in lines), key=lambda r: r.start_ns))
        return found


@dataclass(slots=True, eq=False)
class IterationTimer:
    """The timings of one iteration in the main process.

    Moments are in ns since `began_ns`, a reading of the clock. `left_ns - entered_ns` is the total
    time that the loop has spent in requests.
    """

    began_ns: int = field(default_factory=now_ns)
    head_start_ns: int = 0
    """For an iteration begun ahead, the time from its start until a loop took it over; else 0."""
    n_filled_ahead: int = 0
    """The number of batches that were filled before `began_ns`, while the iteration was ahead."""
    ready_ahead_ns: int = 0
    """For batches filled ahead, the sum of the times from the iteration's start to the filling."""
    entered_ns: int = 0
    """The sum of the moments at which the loop requested a batch."""
    left_ns: int = 0
    """The sum of the moments at which the loop received a batch."""
    waited_ns: int = 0
    ended_ns: int | None = None
    """The reading of the clock at the end of the iteration; None while the iteration runs."""
    heap_bytes: int = 0
    """The bytes of values with varying sizes, in the batches that the loop received."""
    n_copies: int = 0
    n_restarts: int = 0

    def restarted(self, words: npt.NDArray[np.uint64]) -> IterationTimer:
        """Return a new timer that starts when a loop takes over an iteration begun ahead."""
        n_filled, ready_ns, now = int(words[_N_FILLED]), int(words[_READY_NS]), now_ns()
        return IterationTimer(now, now - self.began_ns, n_filled, ready_ns)

    def start(self) -> None:
        """Count the time since `began_ns` as time in a request, as if the loop had waited."""
        self.entered_ns -= now_ns() - self.began_ns

    def end(self) -> None:
        if self.ended_ns is None:
            self.ended_ns = now_ns()

    def stats(
        self,
        partition: RankPartition,
        next_loop_step: int,
        row_bytes: int,
        words: npt.NDArray[np.uint64],
    ) -> LoadingStats:
        """Return the figures so far.

        `next_loop_step` is the step of the next batch to hand over, `row_bytes` the size of a
        sample without its values of varying sizes, and `words` the summed counters of all workers.
        """
        elapsed_ns = (now_ns() if self.ended_ns is None else self.ended_ns) - self.began_ns
        inside_ns = self.left_ns - self.entered_ns
        if inside_ns < 0:  # a request has not returned: count it until now
            inside_ns += elapsed_ns
        n_batches, n_filled = next_loop_step - partition.first_step, int(words[_N_FILLED])
        # A batch is ready from its filling until its delivery, or until now if it is not delivered.
        # A batch that was filled before `began_ns` counts as filled at the moment 0.
        n_filled_since = n_filled - self.n_filled_ahead
        filled_ns = (
            int(words[_READY_NS]) - self.ready_ahead_ns - n_filled_since * self.head_start_ns
        )
        ready_ns = self.left_ns + max(0, n_filled - n_batches) * elapsed_ns - filled_ns
        n_samples = partition.n_samples(next_loop_step)
        return LoadingStats(
            elapsed_s=elapsed_ns * _S_PER_NS,
            waiting_s=self.waited_ns * _S_PER_NS,
            hand_over_s=max(0, inside_ns - self.waited_ns) * _S_PER_NS,
            filling_s=int(words[_FILL_NS]) * _S_PER_NS,
            checking_s=int(words[_CHECK_NS]) * _S_PER_NS,
            decoding_s=int(words[_DECODE_NS]) * _S_PER_NS,
            transforming_s=int(words[_TRANSFORM_NS]) * _S_PER_NS,
            ready_s=max(0, ready_ns) * _S_PER_NS,
            n_batches=n_batches,
            n_samples=n_samples,
            n_bytes=n_samples * row_bytes + self.heap_bytes,
            n_copies=self.n_copies,
            n_restarts=self.n_restarts,
        )
