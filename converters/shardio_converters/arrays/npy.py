"""The converter of .npy, .npz and .safetensors files, which are parsed here, never with pickle."""

from __future__ import annotations

import io
import json
import lzma
import math
import os
import re
import struct
import tokenize
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import IO, Any, ClassVar, Final

import numpy as np
import numpy.typing as npt

from shardio import Input, MediaError
from shardio_converters.arrays.array_samples import ArraySamples, NamedArray, check_text, dtype_name
from shardio_converters.files import damage
from shardio_converters.parsing import unique_names

# The exceptions, besides OSError, that `zipfile` raises for damaged archives
ZIP_DAMAGE: Final = (
    *(zipfile.BadZipFile, zlib.error, lzma.LZMAError, struct.error),
    *(EOFError, NotImplementedError, RuntimeError, ValueError),
)
_BLOCK_BYTES: Final = 1 << 20  # the size of the rows that are read at once


def _stored(
    name: str,
    known: str,
    shape: tuple[int, ...],
    dtype: np.dtype[Any],
    is_fortran: bool,  # noqa: FBT001
    begin: Callable[[], IO[bytes] | FileSlice],
) -> NamedArray:
    """Return an array of consecutive numbers; `begin` opens the file at the first number.

    `dtype` is the dtype in the file, with its byte order. In Fortran order, the numbers of a row
    are scattered, so the whole array is read at once.
    """

    def whole() -> npt.NDArray[Any]:
        with begin() as file, damage(ZIP_DAMAGE, f"array {name!r}"):
            found = _read(file, dtype, shape[::-1] if is_fortran else shape, name)
            _check_end(file, name)
        return found.T if is_fortran else found

    def rows() -> Iterator[npt.NDArray[Any]]:
        if is_fortran:
            yield from whole()
            return
        with begin() as file, damage(ZIP_DAMAGE, f"array {name!r}"):
            n_left, n_bytes = shape[0], math.prod(shape[1:]) * dtype.itemsize
            n_block = max(1, _BLOCK_BYTES // max(1, n_bytes))
            while n_left:
                n_read = min(n_block, n_left)
                yield from _read(file, dtype, (n_read, *shape[1:]), name)
                n_left -= n_read
            _check_end(file, name)

    return NamedArray(name, known, shape, whole, rows)


class FileSlice:
    """A range of bytes of an open file that is read like a file; the caller owns the file."""

    def __init__(self, file: IO[bytes], start: int, n_bytes: int) -> None:
        self._fd, self._at, self._end = file.fileno(), start, start + n_bytes

    def read(self, n_bytes: int) -> bytes:
        """Return up to `n_bytes` bytes."""
        data = os.pread(self._fd, min(n_bytes, self._end - self._at), self._at)
        self._at += len(data)
        return data

    def readinto(self, buffer: memoryview) -> int:
        """Fill a buffer; return the number of bytes, fewer at the end of the range."""
        n_bytes = os.preadv(self._fd, [buffer[: self._end - self._at]], self._at)
        self._at += n_bytes
        return n_bytes

    def __enter__(self) -> FileSlice:
        return self

    def __exit__(self, *_: object) -> None:
        """Do nothing: the file stays open, because other arrays are read from it too."""


def _read(
    file: IO[bytes] | FileSlice, dtype: np.dtype[Any], shape: tuple[int, ...], name: str
) -> npt.NDArray[Any]:
    try:
        found = np.empty(shape, dtype)
    except (MemoryError, ValueError) as error:
        raise MediaError(f"array {name!r}: shape {shape} of {dtype}: {error}") from error
    if found.nbytes:
        _fill(file, found.reshape(-1).view(np.uint8).data, name)
    if dtype.kind == "b" and (found.view(np.uint8) > 1).any():
        raise MediaError(f"array {name!r}: a bool is neither 0 nor 1")
    check_text(found, f"array {name!r}")
    return found.astype(dtype.newbyteorder("<"), copy=False)


def _fill(file: IO[bytes] | FileSlice, view: memoryview, name: str) -> None:
    n_filled = 0
    while n_filled < len(view):
        n_bytes: int = file.readinto(view[n_filled:])  # type: ignore[union-attr]
        if not n_bytes:
            missing = len(view) - n_filled
            raise MediaError(f"array {name!r}: the file ends {missing:,} bytes too early")
        n_filled += n_bytes


def _check_end(file: IO[bytes] | FileSlice, name: str) -> None:
    """Check that no bytes follow an array; in a .npz, this makes `zipfile` verify the checksum."""
    if file.read(1):
        raise MediaError(f"array {name!r}: bytes follow it; expected the end of the file")


SUFFIXES: Final = (".npy", ".npz", ".safetensors")
Header = tuple[tuple[int, ...], bool, np.dtype[Any]]  # the shape, True for Fortran order, the dtype

SINGLE_ARRAY: Final = "array"  # the name of the array of a .npy file
_NPY_MAGIC: Final = b"\x93NUMPY"
_MAX_HEADER: Final = 100_000_000  # bytes, as in the safetensors library
_TENSORS: Final = {
    **{"BOOL": "bool", "BF16": "bfloat16"},
    **{f"F{bits}": f"float{bits}" for bits in (16, 32, 64)},
    **{f"I{bits}": f"int{bits}" for bits in (8, 16, 32, 64)},
    **{f"U{bits}": f"uint{bits}" for bits in (8, 16, 32, 64)},
}
_NPY_DAMAGE: Final = (
    *(ValueError, SyntaxError, TypeError, LookupError, ArithmeticError, MemoryError),
    *(tokenize.TokenError, RecursionError),
)


def array_in(data: bytes, name: str, n_bytes: int) -> NamedArray:
    """Return the array of a .npy of `n_bytes`; `data` may be its header if values are not read."""
    file = io.BytesIO(data)
    header = _read_header(file, name)
    start = file.tell()
    return _npy_array(name, header, n_bytes - start, lambda: io.BytesIO(data[start:]))


def _open_npz(archive: zipfile.ZipFile) -> list[NamedArray]:
    found: dict[str, NamedArray] = {}
    for member in archive.namelist():
        if not member.endswith(".npy"):
            raise MediaError(f"member {member!r} is not an array: expected a name in .npy")
        name = member.removesuffix(".npy")
        if name in found:
            raise MediaError(f"two members are named {member!r}")
        with archive.open(member) as file:
            header = _read_header(file, name)
            n_bytes = archive.getinfo(member).file_size - file.tell()
            begin = partial(_begin_member, archive, member, file.tell())
        found[name] = _npy_array(name, header, n_bytes, begin)
    return [*found.values()]


def _begin_member(archive: zipfile.ZipFile, member: str, start: int) -> IO[bytes]:
    file = archive.open(member)
    file.read(start)
    return file


def _npy_array(
    name: str, header: Header, n_bytes: int, begin: Callable[[], IO[bytes] | FileSlice]
) -> NamedArray:
    shape, is_fortran, dtype = header
    known = dtype_name(dtype, f"array {name!r}")
    if (expected := math.prod(shape) * dtype.itemsize) != n_bytes:
        raise MediaError(f"array {name!r}: expected {expected:,} bytes, found {n_bytes:,}")
    return _stored(name, known, shape, dtype, is_fortran, begin)


def _read_header(file: IO[bytes], name: str) -> Header:
    try:
        version = np.lib.format.read_magic(file)
        if version not in ((1, 0), (2, 0), (3, 0)):
            raise ValueError(f"version {version} is not known")
        length = file.read(2 if version == (1, 0) else 4)
        return _parse_header(version, length + file.read(int.from_bytes(length, "little")))
    except _NPY_DAMAGE as error:
        reason = re.sub(r" object at 0x[0-9a-f]+", "", str(error))  # addresses differ between runs
        raise MediaError(f"array {name!r}: the header is damaged: {reason}") from error


@lru_cache(maxsize=64)  # The headers of many files are usually the same.
def _parse_header(version: tuple[int, int], header: bytes) -> Header:
    read = np.lib.format.read_array_header_2_0
    if version == (1, 0):
        read = np.lib.format.read_array_header_1_0
    shape, is_fortran, dtype = read(io.BytesIO(header))
    if any(type(n) is not int or n < 0 for n in shape):
        raise ValueError(f"the shape is {shape}")
    return shape, is_fortran, dtype


def _open_tensors(file: IO[bytes]) -> list[NamedArray]:
    n_bytes = os.fstat(file.fileno()).st_size
    if n_bytes < 8:
        raise MediaError(f"{n_bytes} bytes; expected at least 8 for the length of the header")
    (n_header,) = struct.unpack("<Q", file.read(8))
    if n_header > min(_MAX_HEADER, n_bytes - 8):
        raise MediaError(f"the header has {n_header:,} bytes, the file {n_bytes:,}")
    try:
        header = json.loads(file.read(n_header).decode("utf-8"), object_pairs_hook=unique_names)
        header.pop("__metadata__", None)
        placed = [_tensor(name, entry, file, 8 + n_header) for name, entry in header.items()]
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise MediaError(f"the header is damaged: {error!r}") from error
    position = 0
    for begins, ends, array in sorted(placed, key=lambda one: one[:2]):
        if begins != position:
            raise MediaError(f"tensor {array.name!r}: expected at byte {position}, found {begins}")
        position = ends
    if 8 + n_header + position != n_bytes:
        raise MediaError(f"expected {8 + n_header + position:,} bytes, found {n_bytes:,}")
    return [array for _, _, array in placed]


def _tensor(name: str, entry: Any, file: IO[bytes], start: int) -> tuple[int, int, NamedArray]:
    """Return the start and end offsets of a tensor, relative to `start`, and the tensor."""
    begins, ends = entry["data_offsets"]
    shape = tuple(entry["shape"])
    if any(type(n) is not int or n < 0 for n in (begins, ends, *shape)):
        raise ValueError(f"tensor {name!r}: shape {shape}, bytes {begins} to {ends}")
    if entry["dtype"] not in _TENSORS:
        raise MediaError(
            f"tensor {name!r}: dtype {entry['dtype']}, expected one of {', '.join(_TENSORS)}"
        )
    dtype = _TENSORS[entry["dtype"]]
    numpy = np.dtype("uint16" if dtype == "bfloat16" else dtype).newbyteorder("<")
    if ends - begins != math.prod(shape) * numpy.itemsize:
        raise ValueError(f"tensor {name!r}: {ends - begins} bytes for shape {shape} of {dtype}")
    begin = partial(FileSlice, file, start + begins, ends - begins)
    return begins, ends, _stored(name, dtype, shape, numpy, False, begin)


@dataclass(frozen=True, kw_only=True)
class Arrays(ArraySamples):
    """A converter that makes samples of the arrays in .npy, .npz and .safetensors files.

    A field has the name of its array, or `array` for a .npy. By default, the rows of a single file
    are samples if all its arrays have the same number of rows; otherwise, files are samples.
    """

    kind: ClassVar[str] = "arrays"
    version: ClassVar[str] = "1"
    what: ClassVar[str] = ".npy, .npz or .safetensors"
    rows_of_many: ClassVar[bool] = False

    def open(self, source: Input, files: ExitStack) -> Sequence[NamedArray] | None:
        """Return the arrays of a file; None if the file is of another kind."""
        suffix = next((each for each in SUFFIXES if source.name.lower().endswith(each)), "")
        with damage(ZIP_DAMAGE):
            if suffix == ".npz":
                return _open_npz(files.enter_context(zipfile.ZipFile(source.path)))
            if suffix == ".safetensors":
                return _open_tensors(files.enter_context(open(source.path, "rb")))
            file = files.enter_context(open(source.path, "rb"))
            if not suffix and file.read(len(_NPY_MAGIC)) != _NPY_MAGIC:
                return None
            file.seek(0)
            header = _read_header(file, SINGLE_ARRAY)
            n_bytes = os.fstat(file.fileno()).st_size - file.tell()
            begin = partial(FileSlice, file, file.tell(), n_bytes)
            return [_npy_array(SINGLE_ARRAY, header, n_bytes, begin)]
