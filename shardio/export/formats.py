"""Define the interface of exporters, each of which writes one format, and helpers for exporters."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass, field
from functools import lru_cache
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
"""A dict from names of fields to functions that are applied to the values before writing.

Only fields whose values have varying sizes (fields that are not columns) may be in the dict.
"""


@dataclass(frozen=True, slots=True)
class ExportOptions:
    """The dataset, the fields to export, and the approximate size of an output file."""

    dataset: Dataset
    fields: Mapping[str, Field]
    shard_bytes: int

    @property
    def muxers(self) -> dict[str, Callable[[Any], Any]]:
        """For each field of video or audio, the function that converts a stream to a media file."""
        return {name: mux for name, field in self.fields.items() if field.is_streamed}

    def refuse(self, reasons: Mapping[str, str]) -> None:
        """Raise InvalidArgument if there are fields that the format cannot represent.

        `reasons` maps the names of these fields to the reasons.
        """
        if not reasons:
            return
        why = "; ".join(f"field {name!r}: {reason}" for name, reason in reasons.items())
        others = ",".join(name for name in self.fields if name not in reasons)
        hint = f"export the others (--fields {others})" if others else "choose another format"
        raise InvalidArgument(f"{self.dataset.current_path}: {why}; {hint}")


class Exporter(Protocol):
    """A writer of samples in one format, constructed with ExportOptions.

    The constructor writes nothing, and raises InvalidArgument if the format cannot represent one of
    the fields.
    """

    prepare: Prepare
    """Functions that are applied to values before `write` gets them."""
    schema_spec: Mapping[str, str] | None
    """The types of the fields for `shardio convert --schema`; None if the files determine them."""

    def open(self, folder: Path) -> None:
        """Start writing. `folder` is an empty folder for the files of the export."""

    def write(self, batch: SampleBatch) -> None:
        """Append a batch of samples."""

    def finish(self) -> None:
        """Complete all files, and wait until they are on the disk."""

    def close(self) -> None:
        """Close files that are still open. Idempotent."""


_MAX_ROWS: Final = 4096
_MAX_BYTES: Final = 16 << 20
"""The maximum size of the columns of a batch, and the approximate maximum size of its other values.
A larger sample is a batch of its own."""
_NUMBER_BYTES: Final = 8  # the approximate size of a number; also used for true, false and null
Rows = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Skipped:
    """A damaged sample that was skipped: its index in the dataset, and the reason."""

    sample: int
    reason: str


@dataclass(slots=True)
class SampleBatch:
    """Consecutive samples of a dataset, whose indices are `numbers`.

    `columns` maps the name of each column to an array with one row per sample. `records` maps the
    name of each other field to a list of values, in which None is a missing value. `present` maps
    the name of each optional column to a mask of the samples that have a value.
    """

    numbers: list[int]
    columns: dict[str, npt.NDArray[Any]]
    present: dict[str, npt.NDArray[np.bool_]]
    records: dict[str, list[Any]]

    def __len__(self) -> int:
        return len(self.numbers)

    def samples(self) -> Iterator[dict[str, Any]]:
        """Yield each sample as a dict, in which None is a missing value."""
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
    """An iterable over batches of all samples of a dataset, in order. The samples are verified.

    A damaged sample raises DataError; with `skip_damaged`, it is left out and added to `skipped`.
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
        starts = self.dataset.shard_starts
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
        """Yield the samples at `rows` of a shard; `numbers` are their indices in the dataset."""
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
            for i in range(len(rows)):  # read each sample separately, to find the damaged samples
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
        """Yield batches of limited size: indices in `rows`, and a dict from fields to values.

        The fields `names` are not columns. Damaged samples are left out.
        """
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
                # In an optional field, None is a missing value. In other fields, None is a null of
                # JSON.
                sample[name] = prepare(sample[name])
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
    """Return the approximate size of values, which may be nested values of JSON."""
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


def export_dtype(field: Array) -> np.dtype[Any]:
    """Return the dtype in which a field is exported: float32 for bfloat16."""
    return np.dtype("<f4") if field.dtype == "bfloat16" else field.numpy


def number_converter(field: Array) -> Callable[[Any], npt.NDArray[Any]]:
    """Return a function that converts numbers of a field to the dtype `export_dtype(field)`."""
    if field.dtype == "bfloat16":  # the bits of a bfloat16 are the upper half of a float32
        return lambda bits: np.left_shift(bits.astype("<u4"), 16).view("<f4")
    return np.asarray


def field_spec(field: Field) -> str:
    """Return a field type in the notation of converter options, such as `float32[3,*]`, `text?`."""
    if field.item is not None:
        spec = f"list[{field_spec(field.item)}]"
    elif (array := field.array) is not None:
        dims = ",".join("*" if n is None else str(n) for n in array.shape)
        spec = f"{export_dtype(array).name}{f'[{dims}]' if array.shape else ''}"
    else:
        spec = field.spec_name()
    return f"{spec}?" if field.optional else spec


Encode = Callable[[Any], tuple[str, bytes]]
"""A function that encodes a value as a file; returns a suffix with its dot, and the content."""

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
"""For each field type, the suffixes of the files that WebDataset readers decode to this type."""
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


def has_type_suffix(name: str, field: Field) -> bool:
    """Return True if a field's name ends in a suffix that states the type, such as `a.jpg`."""
    suffix = name.lower().rpartition(".")[2]
    if field.is_opaque:
        return suffix not in _NOT_BYTES_SUFFIXES
    if suffix in _INTEGER_SUFFIXES:
        return is_int64_scalar(field)
    return suffix in _SUFFIXES.get(field.spec_name(), ())


def is_int64_scalar(field: Field) -> bool:
    """Return True if the values of a field are single int64 numbers, such as class labels."""
    array = field.array
    return array is not None and (array.dtype, array.shape) == ("int64", ())


def file_suffix(name: str, field: Field) -> str:
    """Return the suffix of the files of a field, with its dot; "" if it depends on the content."""
    if is_int64_scalar(field) and (
        name == "label" or name.lower().rpartition(".")[2] in _INTEGER_SUFFIXES
    ):
        return ".cls"
    suffixes = {"array": ".npy", "text": ".txt", "json": ".json", "bytes": ".bin"}
    return suffixes.get(field.spec_name(), "")


def file_encoder(name: str, field: Field) -> Encode | None:
    """Return a function that encodes a value of a field as a file; None if that is impossible.

    For a field of video or audio, the values are the media files that `ExportOptions.muxers` makes.
    """
    suffix = file_suffix(name, field)
    if suffix == ".cls":
        return lambda value: (suffix, str(int(value)).encode())
    if field.is_streamed:
        return attrgetter("suffix", "data")
    if field.medium == "image":
        return lambda value: (image_suffix(value), value)
    if field.array is not None:
        array = npy_encoder(field.array)
        return lambda value: (suffix, array(value))
    encode = _ENCODERS.get(field.spec_name())
    return None if encode is None else lambda value: (suffix, encode(value))


_ENCODERS: Final[dict[str, Callable[[Any], bytes]]] = {
    "text": str.encode,
    "json": lambda value: json.dumps(value, ensure_ascii=False).encode(),
    "bytes": bytes,
}
"""For each field type that is neither array nor media, the function that encodes a value."""


def npy_encoder(field: Array) -> Callable[[Any], bytes]:
    """Return a function that encodes an array as a .npy file, with a cached header per shape."""
    dtype, numbers = export_dtype(field), number_converter(field)

    @lru_cache(maxsize=4096)  # every sample may have a new shape
    def head(shape: tuple[int, ...]) -> bytes:
        file = io.BytesIO()
        header = {"descr": dtype.str, "fortran_order": False, "shape": shape}
        np.lib.format.write_array_header_1_0(file, header)
        return file.getvalue()

    def encode(value: Any) -> bytes:
        array = numbers(np.asarray(value, field.numpy))
        return head(array.shape) + array.tobytes()

    return encode


def image_suffix(data: bytes) -> str:
    """Return the suffix of an image file, from its first bytes."""
    if data[:4] == b"RIFF":
        return ".webp"
    if data[4:8] == b"ftyp":
        return ".avif"
    return next((suffix for start, suffix in _IMAGE_SIGNATURES if data.startswith(start)), ".jpg")


_MAX_NAME_BYTES: Final = 120  # file systems allow 255; the rest is for a suffix and a number


def safe_part(text: str) -> str:
    """Turn a text into the name of a file or folder that is neither hidden nor special."""
    kept = "".join("_" if c in '/\\:*?"<>|' or not c.isprintable() else c for c in text)
    kept = kept.encode()[:_MAX_NAME_BYTES].decode(errors="ignore").rstrip(". ")
    if kept.startswith((".", "_", "~")):
        kept = f"x{kept}"
    return kept or "x"


def safe_path(text: str) -> str:
    """Turn a text into a relative path of at most 8 names, which are separated by slashes."""
    parts = [safe_part(part) for part in text.split("/") if part not in ("", ".", "..")]
    return "/".join(parts[-8:]) or "x"


def distinct_names(names: Iterable[str], *reserved: str) -> dict[str, str]:
    """Map `names` to safe file names that, ignoring case, are distinct and not in `reserved`."""
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
