"""Convert the inputs of one unit into shards, in a worker process.

Some C libraries loop forever on damaged files, and neither an exception nor Ctrl-C interrupts them.
A limit on the CPU time therefore kills a worker whose converter loops. Time in which the worker
waits, for example for a slow disk, does not count.
"""

from __future__ import annotations

import contextlib
import errno
import os
import pickle
import signal
import stat
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from sys import getsizeof
from typing import IO, Any, Final

import numpy as np

from shardio._workers.tasks.calls import note_part
from shardio.conversion.converter import OUTCOMES, Converter, Input, Outcome
from shardio.conversion.inputs import InputState, input_hash, input_states
from shardio.conversion.journal import (
    InputDone,
    Unit,
    UnitDone,
    UnitEvent,
    read_record,
    write_record,
)
from shardio.conversion.report import InputReport
from shardio.errors import InvalidArgument, MediaError, SchemaError
from shardio.format.schema import Schema
from shardio.format.types.streams import EncodedStream
from shardio.shard.writer import ShardSummary, ShardWriter
from shardio.storage.fs import create_unnamed, make_folder, remove_tree, sync_path

_MAX_REASON: Final = 1000  # the maximum length of a recorded reason, in characters
_MACHINE_ERRNOS: Final = frozenset(
    (errno.EDQUOT, errno.EFBIG, errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOSPC)
)
"""The errors whose cause is the machine, not the file that is being read."""


LABEL: Final = "label"


@dataclass(frozen=True, slots=True)
class ConversionJob:
    """The settings that all units share.

    `step_s` is the converter's limit on the CPU time; None without workers. If `drops_label` is
    True, the field `label` of samples is not stored, because there are no classes.
    """

    source: Converter
    folder: str
    shard_bytes: int
    keep_partial: bool
    stop_at_broken: bool
    step_s: float | None = None
    drops_label: bool = False

    @property
    def schema(self) -> Schema:
        """The schema of the stored samples."""
        schema = self.source.schema()
        if not self.drops_label:
            return schema
        return Schema({name: field for name, field in schema.items() if name != LABEL})


def convert_unit(unit: Unit, job: ConversionJob) -> Iterator[UnitEvent]:
    """Convert the inputs of one unit in order, and yield the events of the unit.

    If an earlier conversion has finished the unit, and its shards are intact, the recorded events
    are yielded instead. An OSError while an input is read makes the input broken. An OSError while
    shards are written is raised, and so is an error that the machine causes, such as a full disk.
    """
    folder = Path(job.folder, unit.key)
    if kept := read_record(folder, unit):
        done, end = kept
        yield from done
    else:
        remove_tree(folder)  # A worker that crashed or was killed may have left files here.
        make_folder(folder)
        sync_path(job.folder)
        end = yield from _convert(unit, job, folder)
    yield end


def _convert(unit: Unit, job: ConversionJob, folder: Path) -> Generator[InputDone, None, UnitDone]:
    skipped, done, stopped = dict(unit.skipped), [], False
    with _RollingShardWriter(str(folder), job) as shards:
        for position, source in enumerate(unit.inputs, unit.first):
            note_part(position - unit.first)
            with SampleBuffer(str(folder)) as buffer:
                states, content = input_states(source), ""
                if position in skipped:
                    outcome = Outcome("broken", skipped[position])
                elif source.part_of:
                    outcome = Outcome("part", f"of {source.part_of}")
                else:
                    outcome, content = _read_input(source, states, job, buffer)
                shards.extend(buffer, source.path)
                report = InputReport(
                    source.name,
                    outcome.kind,
                    outcome.reason,
                    buffer.n_samples,
                    sum(state.n_bytes for state in states.values() if state),
                    dict(outcome.detail),
                    source.label,
                    content,
                )
                done.append(InputDone(unit.number, position, report))
            note_part(None)
            yield done[-1]
            if outcome.kind == "broken" and job.stop_at_broken:
                stopped = True
                break
        end = UnitDone(unit.number, stopped, tuple(shards.finish()))
    write_record(folder, done, end)
    return end


def _read_input(
    source: Input, before: Mapping[str, InputState | None], job: ConversionJob, buffer: SampleBuffer
) -> tuple[Outcome, str]:
    """Write the samples of one input to the buffer; return the outcome and the hash of the content.

    The hash is "" if there are no samples, or if the content cannot be read again.
    """
    content = ""
    state = before[source.name]
    if state is not None and not stat.S_ISREG(state.mode):
        return _classify_non_file(source.path, state.mode), ""
    for part in source.parts:
        if (state := before[part.name]) is None or not stat.S_ISREG(state.mode):
            what = "is missing, or a broken link" if state is None else "is not a regular file"
            return Outcome("broken", f"its part {part.name} {what}"), ""
    outcome = _convert_input(source, job, buffer)
    if outcome.kind == "broken" and not job.keep_partial:
        buffer.clear()
    if buffer.n_samples:
        # If the file cannot be read again, no hash is recorded. A later append then recognizes the
        # file by its name alone, and does not notice if its content changes.
        with contextlib.suppress(OSError):
            content = input_hash(source)
    # If a file changed while it was read, some samples may have the old content and others the new
    # content.
    if (after := input_states(source)) != before:
        buffer.clear()
        name = next(name for name, state in after.items() if state != before[name])
        prefix = "" if name == source.name else f"its part {name} "
        what = "changed" if after[name] else "vanished"
        return Outcome("broken", f"{prefix}{what} while it was read"), ""
    # The reason is recorded in the dataset, which must not depend on paths of this machine.
    reason = outcome.reason
    for each in (*source.parts, source) if reason else ():
        reason = reason.replace(each.path, each.name)
    return replace(outcome, reason=reason[:_MAX_REASON]), content


def _convert_input(source: Input, job: ConversionJob, buffer: SampleBuffer) -> Outcome:
    samples = job.source.samples(source)
    if job.step_s is not None:
        samples = limit_cpu(samples, cpu_limit_s(job.step_s, source))
    try:
        outcome = _fill_buffer(samples, source, buffer)
    except MediaError as error:
        return Outcome("broken", str(error).removeprefix(f"{source.path}: "))
    if isinstance(outcome, Outcome) and outcome.kind in OUTCOMES:
        return outcome
    raise InvalidArgument(
        f"the converter {job.source.kind!r} returned {outcome!r} for {source.name}; "
        f"`samples` must return an Outcome with one of the kinds {', '.join(OUTCOMES)}"
    )


def _is_read_error(error: OSError, source: Input) -> bool:
    """Return True if an input cannot be read: the error names a file of the input, or no file.

    An error that the machine causes, such as a full disk, does not count.
    """
    if error.errno in _MACHINE_ERRNOS:
        return False
    named, every = error.filename, (source, *source.parts)
    return named is None or any(named in (each.path, os.fsencode(each.path)) for each in every)


def _classify_non_file(path: str, mode: int) -> Outcome:
    if not stat.S_ISDIR(mode):  # Do not try to read it: opening a pipe could block forever.
        return Outcome("unsupported", "not a regular file")
    try:
        os.listdir(path)
    except OSError as error:
        return Outcome("broken", f"a folder that cannot be listed: {error.strerror}")
    return Outcome("broken", "a folder that could not be listed when the conversion was planned")


def _fill_buffer(
    samples: Iterator[Mapping[str, Any]], source: Input, buffer: SampleBuffer
) -> object:
    """Append all samples of a generator to the buffer; return the return value of the generator."""
    while True:
        try:
            sample = next(samples)
        except StopIteration as end:
            return end.value
        except OSError as error:
            if not _is_read_error(error, source):
                raise
            return Outcome("broken", f"cannot be read: {error.strerror or error}")
        buffer.append(sample)


class _RollingShardWriter:
    """Writes the shards of a unit: 000.shard, 001.shard and so on, each of about `shard_bytes`."""

    def __init__(self, folder: str, job: ConversionJob) -> None:
        self._folder, self._shard_bytes = folder, job.shard_bytes
        self._schema, self._drops_label = job.schema, job.drops_label
        self._writer: ShardWriter | None = None
        self._finished: list[ShardSummary] = []

    def extend(self, samples: Iterable[Mapping[str, Any]], path: str) -> None:
        """Append the samples of the input at `path`, which errors name instead of the shard."""
        for number, sample in enumerate(samples):
            if self._writer is None:
                name = f"{len(self._finished):03d}.shard"
                self._writer = ShardWriter(os.path.join(self._folder, name), self._schema)
            if self._drops_label:
                sample = {name: value for name, value in sample.items() if name != LABEL}
            try:
                self._writer.append(sample)
            except (MediaError, SchemaError) as error:
                reason = error.__cause__ or error
                raise type(error)(f"{path}, sample {number}: {reason}") from error
            if self._writer.n_bytes >= self._shard_bytes:
                self.finish()

    def finish(self) -> list[ShardSummary]:
        """Close the current shard, and return all finished shards."""
        if self._writer is not None:
            self._finished.append(self._writer.close())
            self._writer = None
        return self._finished

    def __enter__(self) -> _RollingShardWriter:
        return self

    def __exit__(self, *_: object) -> None:
        if self._writer is not None:
            self._writer.abort()


BUFFER_BYTES: Final = 64 << 20
_N_PICKLES: Final = 64
"""The number of pickles into which BUFFER_BYTES are divided; they are loaded one at a time."""
_FLAT_TYPES: Final = frozenset({*np.sctypeDict.values(), bool, bytes, float, int, str, type(None)})
"""The types of values that contain no other values."""
Sample = Mapping[str, Any]


class SampleBuffer:
    """A buffer for the samples of one input, until the outcome of the input is known.

    The samples of an hour of video take up gigabytes. Whenever the samples in memory reach
    BUFFER_BYTES, they are therefore written to an unnamed file in `folder`. The file vanishes when
    this process exits.
    """

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._file: IO[bytes] | None = None
        self.clear()

    def clear(self) -> None:
        """Discard all samples."""
        self._in_memory: list[Sample] = []
        self._in_memory_bytes = 0
        self._n_pickles = 0
        self.n_samples = 0
        if self._file is not None:
            self._file.close()
            self._file = None

    def append(self, sample: Sample) -> None:
        """Add a sample. The caller must not change the sample afterwards."""
        self._in_memory.append(sample)
        self._in_memory_bytes += getsizeof(sample) + sum(map(_memory_bytes, sample.values()))
        self.n_samples += 1
        if self._in_memory_bytes >= BUFFER_BYTES:
            self._spill()

    def _spill(self) -> None:
        if self._file is None:
            self._file = create_unnamed(self._folder)
        n_samples = len(self._in_memory)
        n_per_pickle = -(-n_samples // _N_PICKLES)
        for start in range(0, n_samples, n_per_pickle):
            stacked = _transpose(self._in_memory[start : start + n_per_pickle])
            pickle.dump(stacked, self._file, protocol=5)
            self._n_pickles += 1
        self._in_memory, self._in_memory_bytes = [], 0

    def __iter__(self) -> Iterator[Sample]:
        if self._file is not None:
            self._file.seek(0)
            for _ in range(self._n_pickles):
                names, columns = pickle.load(self._file)
                for values in zip(*columns, strict=True):
                    yield dict(zip(names, values, strict=True)) if names else values[0]
        yield from self._in_memory

    def __enter__(self) -> SampleBuffer:
        return self

    def __exit__(self, *_: object) -> None:
        self.clear()


def _transpose(samples: Sequence[Sample]) -> tuple[tuple[str, ...], list[Any]]:
    """Return the names of the fields, and for each field a list or array of its values.

    Numbers of one dtype, and arrays of one dtype and shape, are combined into one array: pickling
    each NumPy object takes 5 µs, which would double the time to convert a table. If the samples do
    not have the same fields, return no names, and a list that contains the list of the samples.
    """
    names = tuple(samples[0])
    if not names or any(sample.keys() != samples[0].keys() for sample in samples):
        return (), [samples]
    return names, [_stack([sample[name] for sample in samples]) for name in names]


def _stack(values: list[Any]) -> Any:
    """Return the values as one array if its entries equal the values; else return `values`."""
    kinds = set(map(type, values))
    kind = kinds.pop()
    if kinds or not issubclass(kind, np.number | np.bool_ | np.ndarray):
        return values
    first = values[0]
    if kind is np.ndarray:
        # Do not combine arrays without dimensions: the entries of the result would be scalars
        # instead of arrays. Combine other arrays only if they hold numbers in native byte order:
        # the entries of the result then have the same dtype, and hold no Python objects.
        if not first.ndim or first.dtype.kind not in "biuf" or not first.dtype.isnative:
            return values
        if any(each.dtype != first.dtype or each.shape != first.shape for each in values):
            return values
        return np.stack(values)
    return np.array(values, first.dtype) if issubclass(kind, np.generic) else values


def _memory_bytes(value: object) -> int:
    if type(value) in _FLAT_TYPES:
        return getsizeof(value)
    if isinstance(value, np.ndarray) and value.base is not None:
        return getsizeof(value) + value.nbytes
    if isinstance(value, list | tuple):
        return getsizeof(value) + sum(map(_memory_bytes, value))
    if isinstance(value, dict):
        return (
            getsizeof(value)
            + sum(map(_memory_bytes, value))
            + sum(map(_memory_bytes, value.values()))
        )
    if isinstance(value, EncodedStream):
        return len(value.data) + value.packets.nbytes
    return getsizeof(value)


CPU_LIMIT_SIGNAL: Final = signal.SIGPROF
_BYTES_PER_S: Final = 1 << 20
"""A step may take a second longer per MiB of the input, because it may read the whole file."""


def cpu_limit_s(step_s: float, source: Input) -> float:
    """Return the CPU time in seconds that a step of the converter may take for an input."""
    n_bytes = source.n_bytes + sum(part.n_bytes for part in source.parts)
    return step_s + n_bytes / _BYTES_PER_S


def limit_cpu(
    samples: Generator[Mapping[str, Any], None, Any], seconds: float
) -> Generator[Mapping[str, Any], None, Any]:
    """Delegate to a generator; kill this process if one step takes `seconds` of CPU time."""
    try:
        while True:
            signal.setitimer(signal.ITIMER_PROF, seconds)
            try:
                sample = next(samples)
            except StopIteration as end:
                return end.value
            yield sample
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
