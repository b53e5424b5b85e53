"""What a worker does: convert the inputs of one unit into shards of its own."""

from __future__ import annotations

import os
import pickle
import stat
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import IO, Any, Final, NamedTuple

import numpy as np

from shardio.conversion.plan import Unit
from shardio.conversion.source import OUTCOMES, Input, Outcome, Source
from shardio.errors import InvalidArgument, MediaError
from shardio.format.schema import Schema
from shardio.writer import ShardSummary, ShardWriter

SPOOL_BYTES: Final = 64 << 20
"""Samples of one input that wait in memory for its end; more go to an unlinked file."""
_MAX_REASON: Final = 1000  # characters of a reason that are kept


@dataclass(frozen=True, slots=True)
class Job:
    """What all units of a conversion have in common; travels to the workers once."""

    source: Source
    folder: str
    shard_bytes: int
    keep_partial: bool
    stop_at_broken: bool


class InputDone(NamedTuple):
    """One input is finished: `position` among all inputs."""

    unit: int
    position: int
    outcome: Outcome
    n_samples: int


class ShardDone(NamedTuple):
    """A shard of a unit lies finished in the job's folder."""

    unit: int
    shard: ShardSummary


class UnitDone(NamedTuple):
    """A unit is finished; `stopped`: at a broken input, the ones after it were not looked at."""

    unit: int
    stopped: bool


UnitEvent = InputDone | ShardDone | UnitDone


def convert_unit(unit: Unit, job: Job, tell: Callable[[UnitEvent], None]) -> None:
    """Convert the inputs of one unit in order, and tell of each input and shard.

    Raises:
        OSError: the disk refuses; shards that are finished stay in the folder.
    """
    stopped = False
    with _Shards(unit.number, job) as shards:
        for position, source in enumerate(unit.inputs, unit.first):
            with _Spool(job.folder) as spool:
                outcome = _read(source, job, spool)
                for sample in spool:
                    shards.append(sample)
                tell(InputDone(unit.number, position, outcome, spool.n_samples))
            if outcome.kind == "broken" and job.stop_at_broken:
                stopped = True
                break
        for shard in shards.finish():
            tell(ShardDone(unit.number, shard))
    tell(UnitDone(unit.number, stopped))


def _read(source: Input, job: Job, spool: _Spool) -> Outcome:
    """Read one input to its end, into the spool, and say what became of it."""
    mode = os.stat(source.path).st_mode if os.path.exists(source.path) else stat.S_IFREG
    if not stat.S_ISREG(mode):  # opening a pipe would wait for its writer forever
        return Outcome("not_video", "not a regular file")
    try:
        outcome: object = _drain(job.source.samples(source), spool)
    except MediaError as error:
        outcome = Outcome("broken", str(error).removeprefix(f"{source.path}: "))
    if not isinstance(outcome, Outcome) or outcome.kind not in OUTCOMES:
        raise InvalidArgument(
            f"the converter {job.source.kind!r} returned {outcome!r} for {source.name}; "
            f"`samples` must return an Outcome of one of the kinds {', '.join(OUTCOMES)}"
        )
    if outcome.kind == "broken" and not job.keep_partial:
        spool.clear()
    # Reasons are kept in the dataset, which holds no path of this machine.
    reason = outcome.reason.replace(source.path, source.name)
    return replace(outcome, reason=reason[:_MAX_REASON])


def _drain(samples: Iterator[Mapping[str, Any]], spool: _Spool) -> object:
    """Put all samples into the spool; what the generator returned at its end."""
    while True:
        try:
            spool.append(next(samples))
        except StopIteration as end:
            return end.value


class _Shards:
    """Writes the shards of a unit: `UUUUUU-PPP.shard`, each closed once it holds `shard_bytes`."""

    def __init__(self, number: int, job: Job) -> None:
        self._number, self._folder, self._shard_bytes = number, job.folder, job.shard_bytes
        self._schema: Schema = job.source.schema()
        self._writer: ShardWriter | None = None
        self._finished: list[ShardSummary] = []

    def append(self, sample: Mapping[str, Any]) -> None:
        if self._writer is None:
            name = f"{self._number:06d}-{len(self._finished):03d}.shard"
            self._writer = ShardWriter(os.path.join(self._folder, name), self._schema)
        self._writer.append(sample)
        if self._writer.n_bytes >= self._shard_bytes:
            self.finish()

    def finish(self) -> list[ShardSummary]:
        """Close the shard that is being written, and give all that are finished."""
        if self._writer is not None:
            self._finished.append(self._writer.close())
            self._writer = None
        return self._finished

    def __enter__(self) -> _Shards:
        return self

    def __exit__(self, *_: object) -> None:
        if self._writer is not None:
            self._writer.abort()


class _Spool:
    """Holds the samples of one input until it is known whether they are kept.

    In memory up to SPOOL_BYTES, then in an unlinked file in `folder`, which the shards will fill
    anyway: an hour of video is gigabytes of samples. The file is private to this process.
    """

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._file: IO[bytes] | None = None
        self.clear()

    def clear(self) -> None:
        """Forget all samples."""
        self._waiting: list[Mapping[str, Any]] = []
        self._waiting_bytes = 0
        self._n_in_file = 0
        self.n_samples = 0
        if self._file is not None:
            self._file.close()
            self._file = None

    def append(self, sample: Mapping[str, Any]) -> None:
        self._waiting.append(sample)
        self._waiting_bytes += sum(map(_size, sample.values()))
        self.n_samples += 1
        if self._waiting_bytes < SPOOL_BYTES:
            return
        if self._file is None:
            self._file = tempfile.TemporaryFile(dir=self._folder)
        for waiting in self._waiting:
            pickle.dump(waiting, self._file, protocol=5)
        self._n_in_file += len(self._waiting)
        self._waiting, self._waiting_bytes = [], 0

    def __iter__(self) -> Iterator[Mapping[str, Any]]:
        if self._file is not None:
            self._file.seek(0)
            for _ in range(self._n_in_file):
                yield pickle.load(self._file)
        yield from self._waiting

    def __enter__(self) -> _Spool:
        return self

    def __exit__(self, *_: object) -> None:
        self.clear()


def _size(value: object) -> int:
    if isinstance(value, np.ndarray):
        return value.nbytes
    return len(value) if isinstance(value, bytes | str) else 8
