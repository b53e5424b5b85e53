"""Convert files of named arrays, in any format, to samples: one per file, or one per row."""

from __future__ import annotations

import sys
from abc import abstractmethod
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, Final, Self

import numpy as np
import numpy.typing as npt

from shardio import Input, InvalidArgument, MediaError, Outcome
from shardio_converters.inference import InputProbe, SchemaInference, common_dtype, widen
from shardio_converters.options import check_flag
from shardio_converters.schema_spec import (
    DTYPES,
    Field,
    InferringConverter,
    check_names,
    fits,
    format_spec,
)

_BLOCK_BYTES: Final = 4 << 20  # the target size of one read
_MAX_BLOCK_BYTES: Final = 256 << 20  # the maximum; a larger chunk is decoded again for each read
_MAX_PLAIN_BYTES: Final = 1 << 30  # `refuse_bomb` accepts any array up to this size
_MAX_DIMS: Final = 16
_MAX_RATIO: Final = 1000  # the maximum ratio of declared to stored bytes; deflate reaches it


TEXT: Final = "text"  # the value of `NamedArray.dtype` for arrays of strings
_REFUSED: Final = {
    "O": "objects are stored as a pickle, which can run any code: store numbers or strings",
    "V": "a structured dtype, or plain bytes: store each of its fields as an array",
    "M": "dates: store them as int64",
    "m": "spans of time: store them as int64",
    "S": "NumPy drops zeros at the end of bytes: store uint8, or strings",
    "c": "complex: store real and imaginary part",
}
Shape = tuple[int | None, ...]


@dataclass(frozen=True)
class NamedArray:
    """An array in a file; a row is an entry along the first axis.

    `dtype` is shardio's name of the dtype, or `TEXT`. The last dimension of `shape` is None if the
    rows are vectors of different lengths. `whole` reads all rows, and `rows` yields them.
    """

    name: str
    dtype: str
    shape: Shape
    whole: Callable[[], npt.NDArray[Any]]
    rows: Callable[[], Iterator[Any]]


def block_array(
    name: str, dtype: str, shape: Shape, read: Callable[[Any], Any], row_bytes: int, chunk_rows: int
) -> NamedArray:
    """Return an array whose rows are read in ranges; its chunks have `chunk_rows` rows each.

    `read` returns the rows of a slice, or the whole array for `()`. `row_bytes` is the size of a
    row in memory. Whole chunks are read, up to _MAX_BLOCK_BYTES at once.
    """

    def rows() -> Iterator[Any]:
        n_rows, n_bytes = shape[0] or 0, max(1, row_bytes)
        n_block = max(1, _BLOCK_BYTES // n_bytes // chunk_rows) * chunk_rows
        n_block = max(1, min(n_block, _MAX_BLOCK_BYTES // n_bytes))
        for first in range(0, n_rows, n_block):
            yield from read(slice(first, min(first + n_block, n_rows)))

    return NamedArray(name, dtype, shape, partial(read, ()), rows)


def refuse_bomb(what: str, n_bytes: int, n_stored: int) -> None:
    """Raise MediaError if an array of `n_bytes` is implausible in a file of `n_stored` bytes."""
    if n_bytes > max(_MAX_PLAIN_BYTES, n_stored * _MAX_RATIO):
        raise MediaError(
            f"{what}: declares {n_bytes:,} bytes, but {n_stored:,} are stored; expected at most "
            f"{_MAX_RATIO} times as many"
        )


def dtype_name(dtype: np.dtype[Any], what: str, refused: Mapping[str, str] = _REFUSED) -> str:
    """Return shardio's name of a dtype, or `TEXT`; `refused` maps refused kinds to reasons."""
    if dtype.kind in "UT":
        return TEXT
    if dtype.name not in DTYPES:
        why = refused.get(dtype.kind, f"expected one of {', '.join(sorted(DTYPES))}, or strings")
        raise MediaError(f"{what}: found dtype {dtype}: {why}")
    return dtype.name


@dataclass(frozen=True, kw_only=True)
class ArraySamples(InferringConverter):
    """A base of converters that make samples of named arrays; subclasses open the files.

    A sample is a whole file, or a row with its index in the field `row`. If the files differ in a
    dimension, the inferred field accepts any size. If they differ in dtype, the dtype of the field
    can represent the values of all files. An array that some files lack is optional.
    """

    what: ClassVar[str]  # the name of the kind of files, for messages
    # True if rows are samples by default even if there are several files
    rows_of_many: ClassVar[bool]

    rows: bool | None = None
    """One sample per row; with --no-rows one per file (default: rows, except for several .npy, .npz
    or .safetensors)."""

    def __post_init__(self) -> None:
        check_flag("rows", self.rows)
        super().__post_init__()

    def check_field(self, name: str, word: str, field: Field) -> None:
        """Check that a declared field is an array or text."""
        if not (field.array or field.is_utf8):
            raise InvalidArgument(f"field {name!r}: found {word!r}; expected an array, or text")

    @abstractmethod
    def open(self, source: Input, files: ExitStack) -> Sequence[NamedArray] | None:
        """Open a file and return its arrays, or None for another kind; `files` closes the file."""

    def name_of(self, source: Input) -> str:
        """Return the value of the field `source`."""
        return source.name

    def fitted(self, inputs: Sequence[Input]) -> Self:
        """Return a converter with the missing options `rows` and `fields` inferred."""
        if self.rows is not None and self.fields is not None:
            return self
        merged = {by_rows: SchemaInference("arrays", widens=True) for by_rows in (False, True)}
        reasons = dict.fromkeys(merged, "")
        probe = InputProbe(inputs)
        n_files, agree = 0, True
        for one in probe.files():
            if one.part_of:
                continue
            arrays: Sequence[NamedArray] | None = ()
            with probe.skip_broken(one), ExitStack() as files:
                arrays = self.open(one, files)
            if arrays is None:
                continue
            n_files += 1
            if arrays:
                agree = agree and _n_rows(arrays) is not None
                for by_rows, inference in merged.items():
                    # If a file does not agree with earlier files, ignore the error here. The file
                    # is reported as broken when its samples are read.
                    try:
                        inference.add(_samples_of(arrays, rows=by_rows))
                    except MediaError as error:
                        reasons[by_rows] = reasons[by_rows] or f"; {one.name}: {error}"
        rows = self.rows
        if rows is None:
            rows = agree and bool(merged[True].n_samples) and (n_files == 1 or self.rows_of_many)
        found = merged[rows]
        if not found.n_samples and self.fields is None:
            raise probe.nothing_usable(f"{self.what} that can be read", reasons[rows])
        return replace(self, rows=rows, fields=self.fields or found.as_specs())

    def samples(self, source: Input) -> Generator[Mapping[str, Any], None, Outcome]:
        """Yield the samples of a file."""
        with ExitStack() as files:
            arrays = self.open(source, files)
            if arrays is None:
                return Outcome("unsupported", f"no {self.what}")
            if not arrays:
                return Outcome("empty", "holds no array")
            self._refuse_others(arrays)
            about = self.additional_values(source, source=self.name_of(source), row=0)
            missing = (self.fields or {}).keys() - {each.name for each in arrays}
            about |= dict.fromkeys(missing)
            has_row = "row" in about
            n_samples = 0
            for sample in self._samples(arrays):
                sample.update(about)
                if has_row:
                    # Use np.int64: for an int, the writer would have to check the range.
                    sample["row"] = np.int64(n_samples)
                yield sample
                n_samples += 1
        return Outcome("converted") if n_samples else Outcome("empty", "holds no row")

    def all_additional_fields(self) -> Mapping[str, str]:
        """Return the specs of the fields that samples have besides the arrays."""
        return (
            {**super().all_additional_fields(), "row": "int64"}
            if self.rows
            else super().all_additional_fields()
        )

    def _samples(self, arrays: Sequence[NamedArray]) -> Iterator[dict[str, Any]]:
        if not self.rows:
            yield {each.name: self._maker(each)(each.whole()) for each in arrays}
            return
        names = [each.name for each in arrays]
        for values in zip(*(map(self._maker(each), each.rows()) for each in arrays), strict=True):
            yield dict(zip(names, values, strict=True))

    def _maker(self, array: NamedArray) -> Callable[[npt.NDArray[Any]], Any]:
        field = self.schema()[array.name].array
        if field and field.dtype != array.dtype:
            return partial(_widened, array, field.dtype)
        return partial(_value, array)

    def _refuse_others(self, arrays: Sequence[NamedArray]) -> None:
        schema = self.schema()
        for name, (dtype, shape) in _samples_of(arrays, rows=bool(self.rows)).items():
            found = format_spec(dtype, shape)
            if name not in (self.fields or ()):
                raise MediaError(f"array {name!r}: found {found}, expected no such array")
            field = schema[name].array
            known = (field.dtype, field.shape) if field else (TEXT, ())
            if common_dtype(dtype, known[0]) != known[0] or not fits(shape, known[1]):
                raise MediaError(f"array {name!r}: expected {format_spec(*known)}, found {found}")
        self.refuse_missing({each.name for each in arrays}, "array")


def _samples_of(arrays: Sequence[NamedArray], *, rows: bool) -> dict[str, tuple[str, Shape]]:
    check_names((each.name for each in arrays), "arrays")
    if rows and _n_rows(arrays) is None:
        shapes = ", ".join(f"{each.name!r} {each.shape}" for each in arrays)
        raise MediaError(f"expected arrays with the same number of rows, found {shapes}")
    found = {each.name: (each.dtype, each.shape[1:] if rows else each.shape) for each in arrays}
    for name, (dtype, shape) in found.items():
        if len(shape) > _MAX_DIMS:
            raise MediaError(f"array {name!r}: found {len(shape)} dimensions; {_MAX_DIMS} at most")
        if None in shape and not rows:
            raise MediaError(f"array {name!r}: rows of varying length need rows=True")
        if dtype == TEXT and shape:
            raise MediaError(
                f"array {name!r}: expected one string, found {format_spec(dtype, shape)}"
            )
    return found


def _n_rows(arrays: Sequence[NamedArray]) -> int | None:
    """Return the number of rows, which is the same in all arrays; None if it is not."""
    lengths = {each.shape[0] if each.shape else None for each in arrays}
    return lengths.pop() if len(lengths) == 1 else None


def _widened(array: NamedArray, dtype: str, value: npt.NDArray[Any]) -> npt.NDArray[Any]:
    try:
        return np.asarray(widen(np.asarray(value), dtype), order="C")
    except MediaError as error:
        raise MediaError(f"array {array.name!r}: {error}") from error


def _value(array: NamedArray, value: npt.NDArray[Any]) -> Any:
    if array.dtype != TEXT:
        return np.asarray(value, order="C")
    text = str(value)
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise MediaError(f"array {array.name!r}: {text!r} cannot be written in UTF-8") from error
    return text


def check_text(array: npt.NDArray[Any], what: str) -> None:
    """Check that all code points are valid: NumPy cannot convert strings with invalid ones."""
    if array.dtype.kind == "U" and array.nbytes:
        numbers = np.ascontiguousarray(array).reshape(-1).view(f"{array.dtype.byteorder}u4")
        if (most := int(numbers.max())) > sys.maxunicode:
            raise MediaError(f"{what}: found character {most:#x}; {sys.maxunicode:#x} at most")
