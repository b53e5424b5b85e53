"""What a worker does: convert the inputs of one unit into shards of its own."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from shardio.conversion.inputs import State, content_of, states_of
from shardio.conversion.journal import read_record, write_record
from shardio.conversion.patience import limit_s, limited
from shardio.conversion.plan import InputBegun, InputDone, Unit, UnitDone, UnitEvent
from shardio.conversion.source import OUTCOMES, Input, Outcome, Source
from shardio.conversion.spool import Spool
from shardio.errors import InvalidArgument, MediaError
from shardio.format.schema import Schema
from shardio.shard.writer import ShardSummary, ShardWriter
from shardio.storage.fs import make_folder, remove_tree
from shardio.storage.mmap import sync_folder

_MAX_REASON: Final = 1000  # characters of a reason that are kept
_OF_THE_MACHINE: Final = frozenset(
    (errno.EDQUOT, errno.EFBIG, errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOSPC)
)
"""Errors that have another cause than the file at which they strike."""


@dataclass(frozen=True, slots=True)
class Job:
    """What all units of a conversion have in common; travels to the workers once.

    `step_s` is how long the source may take over a step, where a worker may be ended for it.
    """

    source: Source
    folder: str
    shard_bytes: int
    keep_partial: bool
    stop_at_broken: bool
    step_s: float | None = None


def convert_unit(unit: Unit, job: Job, tell: Callable[[UnitEvent], None]) -> None:
    """Convert the inputs of one unit in order, and tell of each; what is recorded already is kept.

    Raises:
        OSError: the disk refuses.
    """
    folder = Path(job.folder, unit.key)
    if kept := read_record(folder, unit):
        done, end = kept
        for one in done:
            tell(one)
    else:
        remove_tree(folder)  # what an earlier attempt left
        make_folder(folder)
        sync_folder(job.folder)
        end = _convert(unit, job, folder, tell)
    tell(end)


def _convert(unit: Unit, job: Job, folder: Path, tell: Callable[[UnitEvent], None]) -> UnitDone:
    """Convert all inputs into shards in `folder`, and record that."""
    lost, done, stopped = dict(unit.lost), [], False
    with _Shards(str(folder), job) as shards:
        for position, source in enumerate(unit.inputs, unit.first):
            tell(InputBegun(unit.number, position))
            with Spool(str(folder)) as spool:
                states, content = states_of(source), ""
                if position in lost:
                    outcome = Outcome("broken", lost[position])
                elif source.part_of:
                    outcome = Outcome("part", f"of {source.part_of}")
                else:
                    outcome, content = _read(source, states, job, spool)
                shards.extend(spool)
                n_bytes = sum(state.n_bytes for state in states.values() if state)
                done.append(
                    InputDone(unit.number, position, outcome, spool.n_samples, n_bytes, content)
                )
                tell(done[-1])
            if outcome.kind == "broken" and job.stop_at_broken:
                stopped = True
                break
        end = UnitDone(unit.number, stopped, tuple(shards.finish()))
    write_record(folder, done, end)
    return end


def _read(
    source: Input, before: Mapping[str, State | None], job: Job, spool: Spool
) -> tuple[Outcome, str]:
    """Read one input to its end, into the spool: what became of it, its hash if it gave samples."""
    content = ""
    state = before[source.name]
    if state is not None and not stat.S_ISREG(state.mode):
        return _read_other(source.path, state.mode), ""
    for part in source.parts:
        if (state := before[part.name]) is None or not stat.S_ISREG(state.mode):
            what = "is gone, or leads nowhere" if state is None else "is not a regular file"
            return Outcome("broken", f"{part.name}, a part of it, {what}"), ""
    outcome = _convert_input(source, job, spool)
    if outcome.kind == "broken" and not job.keep_partial:
        spool.clear()
    if spool.n_samples:
        with contextlib.suppress(OSError):  # then it is known by its name alone
            content = content_of(source)
    if (after := states_of(source)) != before:  # samples may be of both states, or of neither
        spool.clear()
        name = next(name for name, state in after.items() if state != before[name])
        which = "" if name == source.name else f"{name}, a part of it, "
        what = "changed" if after[name] else "vanished"
        return Outcome("broken", f"{which}{what} while it was read"), ""
    reason = _without_paths(outcome.reason, source)
    return replace(outcome, reason=reason[:_MAX_REASON]), content


def _without_paths(reason: str, source: Input) -> str:
    """Reasons are kept in the dataset, which holds no path of this machine."""
    for each in (*source.parts, source) if reason else ():
        reason = reason.replace(each.path, each.name)
    return reason


def _convert_input(source: Input, job: Job, spool: Spool) -> Outcome:
    """Have the converter read an input; its samples are in the spool then."""
    samples = job.source.samples(source)
    if job.step_s is not None:
        samples = limited(samples, limit_s(job.step_s, source))
    try:
        outcome = _drain(samples, source, spool)
    except MediaError as error:
        return Outcome("broken", str(error).removeprefix(f"{source.path}: "))
    if isinstance(outcome, Outcome) and outcome.kind in OUTCOMES:
        return outcome
    raise InvalidArgument(
        f"the converter {job.source.kind!r} returned {outcome!r} for {source.name}; "
        f"`samples` must return an Outcome of one of the kinds {', '.join(OUTCOMES)}"
    )


def _is_about(error: OSError, source: Input) -> bool:
    """Whether what reads fails for an input, or a part of it: its error names that, or nothing."""
    if error.errno in _OF_THE_MACHINE:
        return False
    named, every = error.filename, (source, *source.parts)
    return named is None or any(named in (each.path, os.fsencode(each.path)) for each in every)


def _read_other(path: str, mode: int) -> Outcome:
    """What becomes of an input that is no file."""
    if not stat.S_ISDIR(mode):  # opening a pipe would wait for its writer forever
        return Outcome("unsupported", "not a regular file")
    try:
        os.listdir(path)
    except OSError as error:
        return Outcome("broken", f"a folder that cannot be listed: {error.strerror}")
    return Outcome("broken", "a folder that could not be listed when the plan was made")


def _drain(samples: Iterator[Mapping[str, Any]], source: Input, spool: Spool) -> object:
    """Put all samples into the spool; what the generator returned at its end."""
    while True:
        try:
            sample = next(samples)
        except StopIteration as end:
            return end.value
        except OSError as error:
            if not _is_about(error, source):
                raise
            return Outcome("broken", f"cannot be read: {error.strerror or error}")
        spool.append(sample)


class _Shards:
    """Writes the shards of a unit: `PPP.shard`, each closed once it holds `shard_bytes`."""

    def __init__(self, folder: str, job: Job) -> None:
        self._folder, self._shard_bytes = folder, job.shard_bytes
        self._schema: Schema = job.source.schema()
        self._writer: ShardWriter | None = None
        self._finished: list[ShardSummary] = []

    def append(self, sample: Mapping[str, Any]) -> None:
        if self._writer is None:
            name = f"{len(self._finished):03d}.shard"
            self._writer = ShardWriter(os.path.join(self._folder, name), self._schema)
        self._writer.append(sample)
        if self._writer.n_bytes >= self._shard_bytes:
            self.finish()

    def extend(self, samples: Iterable[Mapping[str, Any]]) -> None:
        for sample in samples:
            self.append(sample)

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
