"""Files of arrays: .npy, .npz and .safetensors, opened without pickle."""

from __future__ import annotations

import io
import json
import math
import os
import struct
import tokenize
import zipfile
from collections.abc import Callable
from contextlib import ExitStack
from functools import lru_cache, partial
from typing import IO, Any, Final

import numpy as np

from shardio import MediaError
from shardio_converters.arrays.stored_array import NOT_ZIP, TEXT, Part, StoredArray
from shardio_converters.field_specs import DTYPES

SUFFIXES: Final = (".npy", ".npz", ".safetensors")
Header = tuple[tuple[int, ...], bool, np.dtype[Any]]
"""Shape, whether it is in Fortran order, dtype."""

ONLY: Final = "array"
"""What the one array of a .npy is called."""
_NPY_MAGIC: Final = b"\x93NUMPY"
_MAX_HEADER: Final = 100_000_000  # bytes of a safetensors header: what its own library allows
_TENSORS: Final = {
    "BOOL": "bool",
    "I8": "int8",
    "I16": "int16",
    "I32": "int32",
    "I64": "int64",
    "U8": "uint8",
    "U16": "uint16",
    "U32": "uint32",
    "U64": "uint64",
    "F16": "float16",
    "BF16": "bfloat16",
    "F32": "float32",
    "F64": "float64",
}
_REFUSED: Final = {
    "O": "objects are stored as a pickle, which can run any code: save numbers or strings",
    "V": "a structured dtype: save each of its fields as an array of a .npz",
    "M": "dates: save them as int64",
    "m": "spans of time: save them as int64",
    "S": "bytes that end where a zero begins: save uint8, or strings",
}
_NOT_NPY: Final = (
    *(ValueError, SyntaxError, TypeError, LookupError, ArithmeticError, MemoryError),
    *(tokenize.TokenError, RecursionError),
)


def open_arrays(path: str, name: str, files: ExitStack) -> list[StoredArray] | None:
    """The arrays of a file, as its name or its first bytes say; None where it is of another kind.

    They can be read as long as `files` are not closed.

    Raises:
        MediaError: it is damaged, or holds what no dataset can.
        OSError: it cannot be read.
    """
    suffix = next((each for each in SUFFIXES if name.lower().endswith(each)), "")
    try:
        if suffix == ".npz":
            return _open_npz(files.enter_context(zipfile.ZipFile(path)))
        if suffix == ".safetensors":
            return _open_tensors(files.enter_context(open(path, "rb")))
        file = files.enter_context(open(path, "rb"))
        if not suffix and file.read(len(_NPY_MAGIC)) != _NPY_MAGIC:
            return None
        file.seek(0)
        header = _read_header(file, ONLY)
        n_bytes = os.fstat(file.fileno()).st_size - file.tell()
        begin = partial(Part, file, file.tell(), n_bytes)
        return [_npy_array(ONLY, header, n_bytes, begin)]
    except MediaError:
        raise
    except NOT_ZIP as error:
        raise MediaError(f"damaged: {error}") from error


def array_in(data: bytes, name: str, n_bytes: int) -> StoredArray:
    """The array of a .npy of `n_bytes`, of which `data` is all, or the beginning.

    Raises:
        MediaError: it is damaged, or holds what no dataset can.
    """
    file = io.BytesIO(data)
    header = _read_header(file, name)
    start = file.tell()
    return _npy_array(name, header, n_bytes - start, lambda: io.BytesIO(data[start:]))


def _open_npz(archive: zipfile.ZipFile) -> list[StoredArray]:
    found: dict[str, StoredArray] = {}
    for member in archive.namelist():
        if not member.endswith(".npy"):
            raise MediaError(f"member {member!r} is no array: expected a name in .npy")
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
    name: str, header: Header, n_bytes: int, begin: Callable[[], IO[bytes] | Part]
) -> StoredArray:
    shape, is_fortran, dtype = header
    if dtype.kind != "U" and dtype.name not in DTYPES:
        why = _REFUSED.get(dtype.kind, f"expected one of {', '.join(sorted(DTYPES))}, or strings")
        raise MediaError(f"array {name!r}: found dtype {dtype}: {why}")
    if (expected := math.prod(shape) * dtype.itemsize) != n_bytes:
        raise MediaError(f"array {name!r}: expected {expected:,} bytes, found {n_bytes:,}")
    known = TEXT if dtype.kind == "U" else dtype.name
    return StoredArray(name, known, dtype, shape, is_fortran, begin)


def _read_header(file: IO[bytes], name: str) -> Header:
    """Read what comes before the numbers; the file stands where they begin."""
    try:
        version = np.lib.format.read_magic(file)
        if version not in ((1, 0), (2, 0), (3, 0)):
            raise ValueError(f"version {version} is not known")
        length = file.read(2 if version == (1, 0) else 4)
        return _parse_header(version, length + file.read(int.from_bytes(length, "little")))
    except _NOT_NPY as error:
        raise MediaError(f"array {name!r}: the header is damaged: {error}") from error


@lru_cache(maxsize=64)  # as a rule all files have the same
def _parse_header(version: tuple[int, int], header: bytes) -> Header:
    """What a header says; versions 2 and 3 differ in what names of fields may be."""
    read = np.lib.format.read_array_header_2_0
    if version == (1, 0):
        read = np.lib.format.read_array_header_1_0
    shape, is_fortran, dtype = read(io.BytesIO(header))
    if any(type(n) is not int or n < 0 for n in shape):
        raise ValueError(f"the shape is {shape}")
    return shape, is_fortran, dtype


def _open_tensors(file: IO[bytes]) -> list[StoredArray]:
    """The tensors of a safetensors file: a length, so many bytes of JSON, and their numbers."""
    n_bytes = os.fstat(file.fileno()).st_size
    if n_bytes < 8:
        raise MediaError(f"{n_bytes} bytes; expected 8 at least, the length of the header")
    (n_header,) = struct.unpack("<Q", file.read(8))
    if n_header > min(_MAX_HEADER, n_bytes - 8):
        raise MediaError(f"the header has {n_header:,} bytes, the file {n_bytes:,}")
    try:
        header = json.loads(file.read(n_header).decode("utf-8"), object_pairs_hook=_once)
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


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a name is there twice")
    return found


def _tensor(name: str, entry: Any, file: IO[bytes], start: int) -> tuple[int, int, StoredArray]:
    """Where a tensor begins and ends behind the header, and what it is."""
    begins, ends = entry["data_offsets"]
    shape = tuple(entry["shape"])
    if any(type(n) is not int or n < 0 for n in (begins, ends, *shape)):
        raise ValueError(f"tensor {name!r}: shape {shape}, bytes {begins} to {ends}")
    if entry["dtype"] not in _TENSORS:
        raise MediaError(
            f"tensor {name!r}: found dtype {entry['dtype']}; expected one of {', '.join(_TENSORS)}"
        )
    dtype = _TENSORS[entry["dtype"]]
    numpy = np.dtype("uint16" if dtype == "bfloat16" else dtype).newbyteorder("<")
    if ends - begins != math.prod(shape) * numpy.itemsize:
        raise ValueError(f"tensor {name!r}: {ends - begins} bytes for shape {shape} of {dtype}")
    begin = partial(Part, file, start + begins, ends - begins)
    return begins, ends, StoredArray(name, dtype, numpy, shape, False, begin)
