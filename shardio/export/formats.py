"""The interface between an export and its formats, and helpers that formats share."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass, field
from operator import attrgetter
from pathlib import Path
from typing import Any, Final, Protocol

import numpy as np
import numpy.typing as npt

from shardio.dataset.dataset import Dataset
from shardio.errors import DataError, InvalidArgument
from shardio.format.types import Array, Field
from shardio.media import mux

Prepare = Mapping[str, Callable[[Any], Any]]
"""Functions to apply to the values of fields that are not columns, before writing."""


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

    @property
    def muxing(self) -> dict[str, Callable[[Any], Any]]:
        """For each field of streams, the function that muxes values as they are read."""
        return {name: mux for name, field in self.fields.items() if field.is_streamed}

    def refuse(self, reasons: Mapping[str, str]) -> None:
        """Raise InvalidArgument if there are fields that a format cannot hold.

        `reasons` maps each such field to the reason; the message also lists the other fields.
        """
        if not reasons:
            return
        why = "; ".join(f"field {name!r}: {reason}" for name, reason in reasons.items())
        others = ",".join(name for name in self.fields if name not in reasons)
        hint = f"export the others (--fields {others})" if others else "choose another format"
        raise InvalidArgument(f"{self.dataset_name}: {why}; {hint}")


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


_MAX_ROWS: Final = 4096
_MAX_BYTES: Final = 16 << 20
"""The maximum size of a batch's columns, and of its other values; a larger sample is one batch."""
_NUMBER_BYTES: Final = 8  # approximate; true, false and null count the same
Rows = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Skipped:
    """A damaged sample that was skipped: its number and the reason."""

    sample: int
    reason: str


@dataclass(slots=True)
class SampleBatch:
    """Consecutive samples by field: columns as arrays, other fields as lists.

    `present` has a mask for each optional column, True where a sample has a value. In lists, a
    missing value is None.
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

    A damaged sample raises an error; with `skip_damaged` it is skipped and listed in `skipped`.
    """

    dataset: Dataset
    fields: Mapping[str, Field]
    prepare: Prepare = field(default_factory=dict)
    skip_damaged: bool = False
    skipped: list[Skipped] = field(default_factory=list)

    def __iter__(self) -> Iterator[SampleBatch]:
        columns = [n for n, f in self.fields.items() if f.column is not None]
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
            for i in range(len(rows)):  # read each sample separately, to find the damaged ones
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
        """Yield (indices into rows, values) for fields that are not columns, in limited batches."""
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
                sample[name] = prepare(sample[name])  # even None, which may be JSON's null
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


def widen_bfloat16(bits: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
    """Return the float32 values of bfloat16 numbers, given as uint16 bits."""
    found: npt.NDArray[np.float32] = np.left_shift(bits.astype("<u4"), 16).view("<f4")
    return found


def export_dtype(field: Array) -> np.dtype[Any]:
    """Return the dtype in which a field is exported: bfloat16 as float32, others unchanged."""
    return np.dtype("<f4") if field.dtype == "bfloat16" else field.numpy


def number_converter(field: Array) -> Callable[[Any], npt.NDArray[Any]]:
    """Return a function that converts a field's numbers to `export_dtype`."""
    return widen_bfloat16 if field.dtype == "bfloat16" else np.asarray


def field_spec(field: Field) -> str:
    """Return the spec string that converters take for a field: `float32[3,*]`, `text?`."""
    if field.item is not None:
        spec = f"list[{field_spec(field.item)}]"
    elif (array := field.array) is not None:
        dims = ",".join("*" if n is None else str(n) for n in array.shape)
        spec = f"{export_dtype(array).name}{f'[{dims}]' if array.shape else ''}"
    else:
        spec = field.word()
    return f"{spec}?" if field.optional else spec


Encode = Callable[[Any], tuple[str, bytes]]
"""A function that returns the suffix, with its dot, and the bytes of a value's file."""

_INTEGER_SUFFIXES: Final = ("cls", "cls2", "id", "index", "inx")
_SUFFIXES: Final = {
    "array": ("npy",),
    "text": ("txt", "text", "transcript"),
    "json": ("json", "jsn"),
    "image": (
        *("avif", "bmp", "dib", "gif", "jfif", "jpe", "jpeg", "jpg", "pbm", "pgm", "png", "pnm"),
        *("ppm", "qoi", "tif", "tiff", "webp"),
    ),
    "video": ("avi", "flv", "m4v", "mkv", "mov", "mp4", "mpeg", "mpg", "ogv", "webm", "wmv"),
    "audio": ("aac", "aiff", "flac", "m4a", "mp3", "ogg", "opus", "wav", "wma"),
}
"""Suffixes by field type that WebDataset readers decode as this type."""
_NOT_BYTES_SUFFIXES: Final = {*_INTEGER_SUFFIXES, "npz", "pickle", "pkl", "pt", "pth", "pyd"}.union(
    *_SUFFIXES.values()
)
_IMAGE_SIGNATURES: Final = (
    (b"\xff\xd8", ".jpg"),
    (b"\x89PNG", ".png"),
    (b"GIF8", ".gif"),
    (b"BM", ".bmp"),
    (b"II*\0", ".tiff"),
    (b"MM\0*", ".tiff"),
    (b"qoif", ".qoi"),
    *((f"P{n}".encode(), ".ppm") for n in range(1, 8)),
)


def has_suffix(name: str, field: Field) -> bool:
    """Return True if a field's name ends in a suffix that readers decode as its type."""
    suffix = name.lower().rpartition(".")[2]
    if field.is_opaque:
        return suffix not in _NOT_BYTES_SUFFIXES
    if suffix in _INTEGER_SUFFIXES:
        return is_int64_scalar(field)
    return suffix in _SUFFIXES.get(field.word(), ())


def is_int64_scalar(field: Field) -> bool:
    """Return True if a field is a single int64, as class labels are."""
    array = field.array
    return array is not None and (array.dtype, array.shape) == ("int64", ())


def suffix_of(name: str, field: Field) -> str:
    """Return the suffix of a field's files, with its dot; "" if it depends on the bytes."""
    if is_int64_scalar(field) and (
        name == "label" or name.lower().rpartition(".")[2] in _INTEGER_SUFFIXES
    ):
        return ".cls"
    suffixes = {"array": ".npy", "text": ".txt", "json": ".json", "bytes": ".bin"}
    return suffixes.get(field.word(), "")


def file_encoder(name: str, field: Field) -> Encode | None:
    """Return the function that encodes a field's values as files; None if no file can hold them.

    The values of streams are muxed.
    """
    suffix = suffix_of(name, field)
    if suffix == ".cls":
        return lambda value: (suffix, str(int(value)).encode())
    if field.is_streamed:
        return attrgetter("suffix", "data")
    if field.medium == "image":
        return lambda value: (image_suffix(value), value)
    if field.array is not None:
        array = npy_encoder(field.array)
        return lambda value: (suffix, array(value))
    encode = _ENCODERS.get(field.word())
    return None if encode is None else lambda value: (suffix, encode(value))


_ENCODERS: Final[dict[str, Callable[[Any], bytes]]] = {
    "text": str.encode,
    "json": lambda value: json.dumps(value, ensure_ascii=False).encode(),
    "bytes": bytes,
}
"""Functions that encode a value as the bytes of a file, for fields without arrays or media."""


def npy_encoder(field: Array) -> Callable[[Any], bytes]:
    """Return a function that encodes arrays as .npy; headers are cached by shape."""
    dtype, numbers = export_dtype(field), number_converter(field)
    heads: dict[tuple[int, ...], bytes] = {}

    def encode(value: Any) -> bytes:
        array = numbers(np.asarray(value, field.numpy))
        head = heads.get(array.shape)
        if head is None:
            if len(heads) > 4096:  # limit the cache: every sample may have another shape
                heads.clear()
            header = {"descr": dtype.str, "fortran_order": False, "shape": array.shape}
            file = io.BytesIO()
            np.lib.format.write_array_header_1_0(file, header)
            head = heads[array.shape] = file.getvalue()
        return head + array.tobytes()

    return encode


def image_suffix(data: bytes) -> str:
    """Return the suffix of an image file, from its signature."""
    if data[:4] == b"RIFF":
        return ".webp"
    if data[4:8] == b"ftyp":
        return ".avif"
    return next((suffix for start, suffix in _IMAGE_SIGNATURES if data.startswith(start)), ".jpg")


_MAX_NAME_BYTES: Final = 120
"""Maximum bytes of one path part; leaves room for a suffix and a number."""


def safe_part(text: str) -> str:
    """Return a text as one file or folder name: never empty or hidden, and without separators."""
    kept = "".join("_" if c in '/\\:*?"<>|' or not c.isprintable() else c for c in text)
    kept = kept.encode()[:_MAX_NAME_BYTES].decode(errors="ignore").rstrip(". ")
    if kept.startswith((".", "_", "~")):
        kept = f"x{kept}"
    return kept or "x"


def safe_path(text: str) -> str:
    """Return a text as a relative path of up to 8 parts."""
    parts = [safe_part(part) for part in text.split("/") if part not in ("", ".", "..")]
    return "/".join(parts[-8:]) or "x"


def distinct_names(names: Iterable[str], *reserved: str) -> dict[str, str]:
    """Map names to safe file names that differ even where case is ignored."""
    found: dict[str, str] = {}
    taken = {*reserved}
    for name in names:
        base = made = safe_part(name)
        number = 1
        while made.casefold() in taken:
            number += 1
            made = f"{base}-{number}"
        taken.add(made.casefold())
        found[name] = made
    return found
