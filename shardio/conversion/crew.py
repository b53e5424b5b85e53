"""Runs the units of a plan in worker processes, and decides what a process that ends is to mean.

A process may be ended by the file it reads (a decoder that crashes) or by something else (the
kernel was short of memory). So the unit is begun again in a new process; an input that ends a
second one is lost: it is broken, with that as the reason, and all others are converted.
"""

from __future__ import annotations

import os
import pickle
import signal
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Final

from shardio._workers.processes.channel import Channel
from shardio._workers.processes.crew import Crew, Died, Event, Failed
from shardio._workers.processes.pieces import Pieces, send_whole
from shardio.conversion.journal import forget_record
from shardio.conversion.ledger import Ledger, UnitLog
from shardio.conversion.plan import InputBegun, InputDone, Unit, UnitDone
from shardio.conversion.source import Input
from shardio.conversion.worker import ENDS, Job, convert_unit, limit_s
from shardio.errors import ShardioError, WorkerDied
from shardio.storage.fs import create, unlink

MAX_DEATHS: Final = 2
"""As many processes may end over one input, or over a unit between inputs."""


def run_crew(
    units: Sequence[Unit],
    job: Job,
    n_workers: int,
    ledger: Ledger | UnitLog,
    lock_fds: Sequence[int] = (),
) -> None:
    """Keep `n_workers` processes busy with one unit each until the ledger is finished.

    The workers hold `lock_fds` as well: a lock lasts as long as any of them can write.

    Raises:
        WorkerDied: a worker ended MAX_DEATHS times without an input to blame, or raised.
        OSError, ShardioError: as a unit raised it.
    """
    with Crew(n_workers, partial(_serve, job), fds=lock_fds, preload=(__name__,)) as crew:
        run = _Run(units, job, ledger, crew)
        for worker in range(n_workers):
            run.start(worker)
        while not ledger.is_finished():
            for event in crew.wait():
                run.take(event)


class _Run:
    """Which worker does what; borrows the crew and the ledger."""

    def __init__(
        self, units: Sequence[Unit], job: Job, ledger: Ledger | UnitLog, crew: Crew
    ) -> None:
        self._units, self._job, self._ledger, self._crew = list(units), job, ledger, crew
        self._pieces = Pieces()
        self._doing: dict[int, int] = {}  # the unit of each worker
        self._reading: dict[int, int] = {}  # the position of the input that each unit reads
        self._n_deaths: Counter[tuple[int, int | None]] = Counter()

    def start(self, worker: int) -> None:
        """Give a worker its next unit, if there is one."""
        number = self._ledger.next_unit()
        if number is not None:
            self._send(worker, number)

    def _send(self, worker: int, number: int) -> None:
        """A unit travels as a file: its list of inputs may be longer than a message can be."""
        place = os.path.join(self._job.folder, f"{number:06d}-{sum(self._n_deaths.values())}.unit")
        with create(place) as file:
            pickle.dump(self._units[number], file)
        self._doing[worker] = number
        self._crew.send(worker, os.fsencode(place))

    def take(self, event: Event) -> None:
        """Act upon what has happened to a worker."""
        if isinstance(event, Died):
            self._begin_again(event)
        elif isinstance(event, Failed):
            raise WorkerDied(f"a worker raised an exception{self._over(event)}\n{event.text}")
        elif (whole := self._pieces.take(event.worker, event.data)) is not None:
            told = pickle.loads(whole)
            if isinstance(told, Exception):
                raise told
            if isinstance(told, InputBegun):
                self._reading[told.unit] = told.position
            elif isinstance(told, InputDone | UnitDone):
                self._reading.pop(told.unit, None)
                self._ledger.take(told)
            if isinstance(told, UnitDone):
                del self._doing[event.worker]
                self.start(event.worker)

    def _begin_again(self, event: Died) -> None:
        """Have another process do the unit of one that has ended, without what ended two."""
        self._pieces.forget(event.worker)
        number = self._doing.get(event.worker)
        if number is None:
            return  # it had nothing to do, and there is nothing more
        position = self._reading.pop(number, None)
        self._n_deaths[number, position] += 1
        if position is None:  # perhaps over the check of what is recorded: a page that is not read
            forget_record(Path(self._job.folder, self._units[number].key))
        if self._n_deaths[number, position] == MAX_DEATHS:
            if position is None:
                raise WorkerDied(
                    f"{MAX_DEATHS} workers ended with {_how(event)}{self._over(event)}"
                )
            unit = self._units[number]
            reason = self._reason(event, unit.inputs[position - unit.first])
            self._units[number] = replace(unit, lost=(*unit.lost, (position, reason)))
        self._crew.restart(event.worker)
        self._send(event.worker, number)

    def _reason(self, event: Died, source: Input) -> str:
        """Why an input is lost."""
        if event.signal == ENDS and self._job.step_s is not None:
            seconds = limit_s(self._job.step_s, source)
            return (
                f"damaged: its library comes to no end over it, in {seconds:.0f} s of a processor"
            )
        return f"{MAX_DEATHS} processes that read it ended with {_how(event)}"

    def _over(self, event: Failed | Died) -> str:
        """Say over what a worker ended."""
        number = self._doing.get(event.worker)
        if number is None:
            return ""
        unit = self._units[number]
        if (position := self._reading.get(number)) is not None:
            return f" while converting {unit.inputs[position - unit.first].name}"
        return f" while finishing {unit.inputs[0].name} to {unit.inputs[-1].name}"


def _how(event: Died) -> str:
    if event.pid is None:
        return "no process: it could not be started"
    if not event.signal:
        return f"exit code {event.exit_code}"
    try:
        return f"signal {event.signal} ({signal.Signals(event.signal).name})"
    except ValueError:  # a real-time signal
        return f"signal {event.signal}"


def _serve(job: Job, channel: Channel) -> None:
    """Convert the units that arrive, until main closes the crew. Runs in a worker."""
    while (place := channel.recv()) is not None:
        with open(place, "rb") as file:
            unit = pickle.load(file)
        try:
            unlink(os.fsdecode(place))
            convert_unit(unit, job, lambda event: send_whole(channel, pickle.dumps(event)))
        except (OSError, ShardioError) as error:  # the caller is to see it as it is
            send_whole(channel, pickle.dumps(error))
