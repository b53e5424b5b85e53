"""Samples in batches, every byte verified; what is damaged ends the reading, or is left out.

What an export is asked for, and what all formats have in common.
"""

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

_MAX_ROWS: Final = 4096
_MAX_BYTES: Final = 16 << 20
"""Of columns, and of all else, in one batch; a sample of more is a batch of its own."""
_NUMBER_BYTES: Final = 8  # about; of true, false and null as well

Rows = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Skipped:
    """A sample that is damaged, by its number, and why it was left out."""

    sample: int
    reason: str


@dataclass(slots=True)
class SampleBatch:
    """Samples that follow one another, by field: of columns an array, of others a list.

    `present` says of each optional column which samples have it; in lists, None stands for what is
    not there.
    """

    numbers: list[int]
    columns: dict[str, npt.NDArray[Any]]
    present: dict[str, npt.NDArray[np.bool_]]
    records: dict[str, list[Any]]

    def __len__(self) -> int:
        return len(self.numbers)

    def samples(self) -> Iterator[dict[str, Any]]:
        """The samples one by one; None for what is not there."""
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
    """The samples of a dataset, some fields of them, in order; `prepare` is done to records.

    Without `skips`, the first that is damaged ends it; with it, `skipped` lists those left out.
    """

    dataset: Dataset
    fields: Mapping[str, Field]
    prepare: Mapping[str, Callable[[Any], Any]] = field(default_factory=dict)
    skips: bool = False
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
        """The samples in some rows of a shard, in as many batches as their size asks for."""
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
                self._leave_out(int(numbers[0]), error)
                return
            for i in range(len(rows)):  # to know which one it is
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
        """What is no column, of as many samples at a time as `_MAX_BYTES` allow."""
        if not names:
            yield slice(None), {}
            return
        kept, values, n_bytes = list[int](), dict[str, list[Any]](), 0
        for i, row in enumerate(rows.tolist()):
            try:
                sample = self._record(shard, row, names)
            except DataError as error:
                self._leave_out(int(numbers[i]), error)
                continue
            kept.append(i)
            for name, value in sample.items():
                values.setdefault(name, []).append(value)
            n_bytes += _size_of(sample.values())
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

    def _leave_out(self, number: int, error: DataError) -> None:
        if not self.skips:
            error.add_note(
                f"that is sample {number:,} of the dataset; "
                "on_error='skip' (--on-error skip) exports the others"
            )
            raise error
        self.skipped.append(Skipped(number, str(error)))


def _size_of(values: Iterable[Any]) -> int:
    """Return about how many bytes values take; a Json field may hold any kind of value."""
    n_bytes = 0
    for value in values:
        if isinstance(value, dict):
            n_bytes += _size_of(value.keys()) + _size_of(value.values())
        elif isinstance(value, list | tuple):
            n_bytes += _size_of(value)
        elif isinstance(value, Sized):
            n_bytes += value.nbytes if hasattr(value, "nbytes") else len(value)
        else:
            n_bytes += _NUMBER_BYTES
    return n_bytes


Prepare = Mapping[str, Callable[[Any], Any]]
"""What becomes of the values of fields that are no columns, before they are written."""


@dataclass(frozen=True, slots=True)
class ExportOptions:
    """The samples to export, which of their fields, and how much goes into one file."""

    dataset: Dataset
    fields: Mapping[str, Field]
    shard_bytes: int

    @property
    def names(self) -> str:
        """The name of the dataset, for messages."""
        return self.dataset.place


class Exporter(Protocol):
    """Writes samples in one format.

    Made with what is `Asked`, it refuses with InvalidArgument what the format cannot hold, before
    anything is written.
    """

    prepare: Prepare
    words: Mapping[str, str] | None
    """The fields as the option --schema of a conversion back takes them; None: it finds them."""

    def begin(self, folder: Path) -> None:
        """Write into an empty folder from now on."""

    def add(self, batch: SampleBatch) -> None:
        """Write samples, behind those before."""

    def end(self) -> None:
        """Finish all files; they are on the disk then."""

    def close(self) -> None:
        """Let go of files that are still open. Idempotent."""


def refuse_fields(asked: ExportOptions, reasons: Mapping[str, str]) -> None:
    """Refuse fields that a format cannot hold, if there are any; the message says what is left.

    Raises:
        InvalidArgument: there are.
    """
    if not reasons:
        return
    why = "; ".join(f"field {name!r}: {reason}" for name, reason in reasons.items())
    others = ",".join(name for name in asked.fields if name not in reasons)
    way = f"export the others (--fields {others})" if others else "choose another format"
    raise InvalidArgument(f"{asked.names}: {why}; {way}")
