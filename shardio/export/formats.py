"""The interface between an export and its formats: options, batches of samples, exporters."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Protocol

import numpy as np
import numpy.typing as npt

from shardio.dataset.dataset import Dataset
from shardio.errors import DataError, InvalidArgument
from shardio.format.fields import Array, Field

Prepare = Mapping[str, Callable[[Any], Any]]
"""Functions applied to values of fields that are not columns, before they are written."""


@dataclass(frozen=True, slots=True)
class ExportOptions:
    """The dataset to export, the selected fields, and the approximate size of one output file."""

    dataset: Dataset
    fields: Mapping[str, Field]
    shard_bytes: int

    @property
    def dataset_name(self) -> str:
        """The name of the dataset in messages."""
        return self.dataset.place


class Exporter(Protocol):
    """A writer of samples in one format.

    The constructor takes `ExportOptions` and raises InvalidArgument for fields that the format
    cannot hold, before anything is written.
    """

    prepare: Prepare
    schema_spec: Mapping[str, str] | None
    """Field specs for --schema when converting back; None if the files are self-describing."""

    def open(self, folder: Path) -> None:
        """Start writing into an empty folder."""

    def write(self, batch: SampleBatch) -> None:
        """Append a batch of samples."""

    def finish(self) -> None:
        """Complete all files and sync them to disk."""

    def close(self) -> None:
        """Close files that are still open. Idempotent."""


def refuse_fields(options: ExportOptions, reasons: Mapping[str, str]) -> None:
    """Raise if there are fields that a format cannot hold.

    Raises:
        InvalidArgument: `reasons` is not empty; the message names the fields that can be exported.
    """
    if not reasons:
        return
    why = "; ".join(f"field {name!r}: {reason}" for name, reason in reasons.items())
    others = ",".join(name for name in options.fields if name not in reasons)
    hint = f"export the others (--fields {others})" if others else "choose another format"
    raise InvalidArgument(f"{options.dataset_name}: {why}; {hint}")


_MAX_ROWS: Final = 4096
_MAX_BYTES: Final = 16 << 20
"""Maximum bytes of columns, and of all other values, in one batch; a larger sample is its own
batch.
"""
_NUMBER_BYTES: Final = 8  # approximate; true, false and null count the same
Rows = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Skipped:
    """A damaged sample that was left out: its number and the reason."""

    sample: int
    reason: str


@dataclass(slots=True)
class SampleBatch:
    """Consecutive samples by field: columns as arrays, other fields as lists.

    `present` masks each optional column: True where a sample has a value. In lists, a missing value
    is None.
    """

    numbers: list[int]
    columns: dict[str, npt.NDArray[Any]]
    present: dict[str, npt.NDArray[np.bool_]]
    records: dict[str, list[Any]]

    def __len__(self) -> int:
        return len(self.numbers)

    def samples(self) -> Iterator[dict[str, Any]]:
        """Yield the samples one by one; missing values are None."""
        for i in range(len(self)):
            sample: dict[str, Any] = {}
            for name, column in self.columns.items():
                mask = self.present.get(name)
                sample[name] = column[i] if mask is None or mask[i] else None
            for name, values in self.records.items():
                sample[name] = values[i]
            yield sample


@dataclass(slots=True)
class SampleReader:
    """An iterable over batches of a dataset's samples, in order, with every byte verified.

    `prepare` maps fields that are not columns to a function applied to their values. A damaged
    sample raises an error; with `skip_damaged` it is left out and listed in `skipped`.
    """

    dataset: Dataset
    fields: Mapping[str, Field]
    prepare: Mapping[str, Callable[[Any], Any]] = field(default_factory=dict)
    skip_damaged: bool = False
    skipped: list[Skipped] = field(default_factory=list)

    def __iter__(self) -> Iterator[SampleBatch]:
        columns = [n for n, f in self.fields.items() if isinstance(f, Array) and f.is_column]
        records = [name for name in self.fields if name not in columns]
        n_bytes = sum(self.dataset.schema.columns[name].row_bytes or 0 for name in columns)
        n_rows = max(1, min(_MAX_ROWS, _MAX_BYTES // max(1, n_bytes)))
        starts = self.dataset.starts
        for start in range(0, len(self.dataset), n_rows):
            numbers = np.arange(start, min(start + n_rows, len(self.dataset)))
            rows = self.dataset.rows.at(numbers)
            shards = self.dataset.locate(rows)
            ends = [*(np.flatnonzero(np.diff(shards)) + 1).tolist(), len(rows)]
            begin = 0
            for end in ends:
                shard = int(shards[begin])
                part = rows[begin:end] - starts[shard]
                yield from self._read(shard, numbers[begin:end], part, columns, records)
                begin = end

    def _read(
        self, shard: int, numbers: Rows, rows: Rows, columns: Sequence[str], records: Sequence[str]
    ) -> Iterator[SampleBatch]:
        """Yield some rows of a shard, in batches of limited size."""
        found: dict[str, npt.NDArray[Any]] = {}
        present: dict[str, npt.NDArray[np.bool_]] = {}
        try:
            for name in columns:
                reader = self.dataset.reader(shard, name)
                found[name] = reader.column(name, rows)
                if self.fields[name].optional:
                    present[name] = reader.present(name, rows)
        except DataError as error:
            if len(rows) == 1:
                self._skip(int(numbers[0]), error)
                return
            for i in range(len(rows)):  # one by one, to find the damaged sample
                one = slice(i, i + 1)
                yield from self._read(shard, numbers[one], rows[one], columns, records)
            return
        for kept, values in self._records(shard, numbers, rows, records):
            yield SampleBatch(
                numbers[kept].tolist(),
                {name: column[kept] for name, column in found.items()},
                {name: mask[kept] for name, mask in present.items()},
                values,
            )

    def _records(
        self, shard: int, numbers: Rows, rows: Rows, names: Sequence[str]
    ) -> Iterator[tuple[list[int] | slice, dict[str, list[Any]]]]:
        """Yield (positions read, values) of fields that are not columns, `_MAX_BYTES` at a time."""
        if not names:
            yield slice(None), {}
            return
        kept, values, n_bytes = list[int](), dict[str, list[Any]](), 0
        for i, row in enumerate(rows.tolist()):
            try:
                sample = self._record(shard, row, names)
            except DataError as error:
                self._skip(int(numbers[i]), error)
                continue
            kept.append(i)
            for name, value in sample.items():
                values.setdefault(name, []).append(value)
            n_bytes += _memory_bytes(sample.values())
            if n_bytes > _MAX_BYTES:
                yield kept, values
                kept, values, n_bytes = [], {}, 0
        if kept:
            yield kept, values

    def _record(self, shard: int, row: int, names: Sequence[str]) -> dict[str, Any]:
        sample = self.dataset.sample(shard, row, names)
        for name, prepare in self.prepare.items():
            if sample[name] is not None or not self.fields[name].optional:
                sample[name] = prepare(sample[name])  # None may be a value: JSON's null
        return sample

    def _skip(self, number: int, error: DataError) -> None:
        if not self.skip_damaged:
            error.add_note(
                f"this is sample {number:,} of the dataset; "
                "on_error='skip' (--on-error skip) exports the others"
            )
            raise error
        self.skipped.append(Skipped(number, str(error)))


def _memory_bytes(values: Iterable[Any]) -> int:
    """Return the approximate size of values in bytes; a Json field may hold values of any type."""
    n_bytes = 0
    for value in values:
        if isinstance(value, dict):
            n_bytes += _memory_bytes(value.keys()) + _memory_bytes(value.values())
        elif isinstance(value, list | tuple):
            n_bytes += _memory_bytes(value)
        elif isinstance(value, Sized):
            n_bytes += value.nbytes if hasattr(value, "nbytes") else len(value)
        else:
            n_bytes += _NUMBER_BYTES
    return n_bytes
