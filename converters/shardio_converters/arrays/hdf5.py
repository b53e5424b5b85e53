"""The converter of HDF5 files: one sample per row, or one sample per file.

HDF5 calls an array a dataset. External data, which a file keeps in other files, is never read.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any, ClassVar, Final

import numpy as np

from shardio import Input, MediaError
from shardio_converters.arrays.array_samples import (
    TEXT,
    ArraySamples,
    NamedArray,
    block_array,
    dtype_name,
    refuse_bomb,
)
from shardio_converters.files import damage
from shardio_converters.schema_spec import DTYPES, STEP_S

SUFFIXES: Final = (".h5", ".hdf5", ".he5", ".nxs")
# h5py has no error classes of its own
DAMAGE: Final = (OSError, RuntimeError, ValueError, KeyError, TypeError, MemoryError)

_REFUSED: Final = {
    "O": "a reference, or variable-length elements that are not numbers",
    "V": "compound or opaque: store each of its fields as a dataset",
    "c": "complex: store real and imaginary part",
}


def _walk(h5py: Any, file: Any) -> Iterator[tuple[str, Any]]:
    """Yield the path and the dataset for every dataset of a file, in the order of the names.

    A dataset with several hard links is yielded once; soft links are ignored.
    """
    seen: set[int] = set()
    waiting: list[tuple[str, Any]] = [("", file)]
    while waiting:
        path, one = waiting.pop()
        address = h5py.h5o.get_info(one.id).addr
        if address in seen:  # This dataset or group has another path, which was visited before.
            continue
        seen.add(address)
        if isinstance(one, h5py.Dataset):
            yield path, one
            continue
        if not isinstance(one, h5py.Group):
            continue  # This is a named datatype, which has no data.
        below = []
        names = list(one)
        if unnamed := [name for name in names if not isinstance(name, str)]:
            raise MediaError(f"{unnamed[0]!r} in group {path!r}: names must be text in UTF-8")
        for name in sorted(names):
            where = f"{path}/{name}" if path else name
            kind = one.id.links.get_info(name.encode()).type
            if kind == h5py.h5l.TYPE_HARD:
                below.append((where, one[name]))
            elif kind != h5py.h5l.TYPE_SOFT:
                raise MediaError(f"{where}: links to another file, which is not supported")
        waiting += reversed(below)


def _open(h5py: Any, dataset: Any, path: str, place: str) -> NamedArray:
    """Return a dataset of the file `place` as an array; refuse unsupported storage and types."""
    name = path.replace("/", ".")
    plist = dataset.id.get_create_plist()
    if plist.get_layout() == h5py.h5d.VIRTUAL or plist.get_external_count():
        raise MediaError(f"dataset {path!r}: stored in other files, which is not supported")
    for number in range(plist.get_nfilters()):
        code, _, _, label = plist.get_filter(number)
        if not h5py.h5z.filter_avail(code):
            raise MediaError(
                f"dataset {path!r}: its filter {code} ({label.decode(errors='replace')}) is not "
                "installed; for common filters: pip install hdf5plugin"
            )
    shape = dataset.shape
    if shape is None:
        raise MediaError(f"dataset {path!r}: has no value, not even a shape (a null dataspace)")
    dtype, is_ragged = _type_of(h5py, dataset, path)
    if is_ragged and len(shape) != 1:
        raise MediaError(f"dataset {path!r}: lists in {len(shape)} dimensions, expected 1")
    row_bytes = int(np.prod(shape[1:], dtype=object)) * dataset.dtype.itemsize
    refuse_bomb(f"dataset {path!r}", (shape[0] if shape else 1) * row_bytes, os.path.getsize(place))
    return block_array(
        name,
        dtype,
        (*shape, None) if is_ragged else shape,
        partial(_read, dataset, path, dtype, is_ragged),
        row_bytes,
        dataset.chunks[0] if dataset.chunks else 1,
    )


def _type_of(h5py: Any, dataset: Any, path: str) -> tuple[str, bool]:
    """Return the dtype, and True if each element is a vector of numbers of this dtype."""
    try:
        dtype = dataset.dtype
    except TypeError as error:  # h5py raises it for times and for integers of 3 bytes, for example.
        raise MediaError(f"dataset {path!r}: found a type that NumPy lacks: {error}") from error
    if h5py.check_string_dtype(dtype) is not None:
        return TEXT, False
    element = h5py.check_vlen_dtype(dtype)
    if element is not None and element.name in DTYPES and element.kind != "O":
        if element != element.newbyteorder("<"):
            raise MediaError(
                f"dataset {path!r}: found big-endian {element.name} of variable length, whose "
                "bytes h5py reads in the wrong order; expected little-endian"
            )
        return element.name, True
    if isinstance(dataset.id.get_type(), h5py.h5t.TypeBitfieldID | h5py.h5t.TypeTimeID):
        raise MediaError(f"dataset {path!r}: found a bit field or time: expected numbers")
    return dtype_name(dtype, f"dataset {path!r}", _REFUSED), False


def _read(dataset: Any, path: str, dtype: str, is_ragged: bool, which: Any) -> Any:  # noqa: FBT001
    with damage(DAMAGE, f"dataset {path!r}"):
        found = (dataset.asstr() if dtype == TEXT else dataset)[which]
    if dtype == TEXT:
        return found
    if is_ragged:
        return [each.astype(dtype, copy=False) for each in found]
    return np.asarray(found).astype(dtype, copy=False)


@dataclass(frozen=True, kw_only=True)
class Hdf5(ArraySamples):
    """A converter that makes samples from the datasets of HDF5 files.

    The dataset at the path `a/b` becomes the field `a.b`. By default, each row is a sample if the
    datasets within each file have equally many rows; otherwise, each file is a sample.
    """

    kind: ClassVar[str] = "hdf5"
    version: ClassVar[str] = "1"
    splits_by_file_name: ClassVar[bool] = True
    what: ClassVar[str] = "HDF5"
    rows_of_many: ClassVar[bool] = True
    step_s: ClassVar[float] = STEP_S

    def open(self, source: Input, files: ExitStack) -> Sequence[NamedArray] | None:
        """Return the datasets of a file; None if the file is not HDF5."""
        h5py = import_module("h5py")
        with contextlib.suppress(ModuleNotFoundError):
            import_module("hdf5plugin")  # If this package is installed, it registers more filters.
        with open(source.path, "rb"):
            pass  # If the file cannot be opened, `open` gives the reason, but h5py does not.
        if not h5py.is_hdf5(source.path):
            if source.name.lower().endswith(SUFFIXES):
                raise MediaError("not HDF5: signature not found")
            return None
        with damage(DAMAGE):
            # Do not lock the file: it is only read, and the conversion detects if it changes.
            file = files.enter_context(h5py.File(source.path, "r", locking=False))
            return [_open(h5py, one, where, source.path) for where, one in _walk(h5py, file)]

    def libraries(self) -> Mapping[str, str]:
        """Return the versions of h5py and HDF5."""
        version = import_module("h5py").version
        return {"h5py": version.version, "hdf5": version.hdf5_version}
