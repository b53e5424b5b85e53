"""The converter of Zarr stores, in folders or .zarr.zip: one sample per row, or one per store."""

from __future__ import annotations

import contextlib
import json
import lzma
import os
import struct
import warnings
import zipfile
import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache, partial
from importlib import import_module
from math import prod
from posixpath import basename, dirname
from typing import Any, ClassVar, Final

import numpy as np
import numpy.typing as npt

from shardio import Input, MediaError
from shardio_converters.arrays.array_samples import (
    ArraySamples,
    NamedArray,
    block_array,
    check_text,
    dtype_name,
    refuse_bomb,
)
from shardio_converters.arrays.npy import SINGLE_ARRAY
from shardio_converters.files import damage, named_path

# Names of metadata files. The root file of a store is the first of these in the store's folder.
ROOTS: Final = ("zarr.json", ".zgroup", ".zarray")
ZIP: Final = ".zarr.zip"

_MAX_TEXT: Final = 16 << 20  # the maximum size of a metadata file in bytes
# The exceptions that zarr and its codecs raise for damaged chunks and metadata
_DAMAGE: Final = (
    *(OSError, EOFError, RuntimeError, ValueError, TypeError, LookupError, MemoryError),
    *(AttributeError, AssertionError, ArithmeticError, BufferError),
    *(zlib.error, lzma.LZMAError, struct.error, zipfile.BadZipFile),
)


@dataclass(frozen=True)
class _Store:
    """An open store of `n_bytes` bytes; `sizes` maps file paths to sizes, sorted by path.

    `read(name, n_bytes)` returns up to `n_bytes` bytes from the beginning of a file.
    `path_of(folder)` converts the folder of an array to the path that `zarr.open_array` expects.
    """

    zarr: Any
    store: Any
    sizes: Mapping[str, int]
    n_bytes: int
    read: Callable[[str, int], bytes]
    path_of: Callable[[str], str] = str


def _store_of(name: str, roots: Mapping[str, str]) -> str | None:
    """Return the root of the outermost store that contains the file `name`, or None.

    `roots` maps the folder of each store to its root.
    """
    parts = name.split("/")[:-1]
    folders = ("/".join(parts[:n]) for n in range(len(parts) + 1))
    return next((roots[folder] for folder in folders if folder in roots), None)


def _open_folder(zarr: Any, source: Input) -> _Store:
    folder = os.path.dirname(source.path)
    every = [source, *source.parts]
    n_root = len(source.name) - len(basename(source.name))
    paths = {one.name[n_root:]: one.path for one in every}

    def read(name: str, n_bytes: int) -> bytes:
        with open(paths[name], "rb") as file:
            return file.read(n_bytes)

    store = zarr.storage.LocalStore(folder, read_only=True)
    # Do not use the sizes in `every`: the files may have changed since they were listed.
    sizes = {name: os.path.getsize(path) for name, path in sorted(paths.items())}
    return _Store(zarr, store, sizes, sum(sizes.values()), read, partial(named_path, ""))


def _open_zip(zarr: Any, source: Input, files: ExitStack) -> _Store:
    archive = files.enter_context(zipfile.ZipFile(source.path))
    sizes = dict(sorted((member.filename, member.file_size) for member in archive.infolist()))
    if len(sizes) < len(archive.infolist()):
        raise MediaError("damaged: two members of the archive have one name")
    # Opening a member checks its name. If the name of a chunk were damaged, zarr would treat the
    # chunk as missing, and return the array's fill value for its elements.
    for member in archive.infolist():
        archive.open(member).close()

    def read(name: str, n_bytes: int) -> bytes:
        with archive.open(name) as file:
            return file.read(n_bytes)

    store = zarr.storage.ZipStore(source.path, mode="r", read_only=True)
    files.callback(_close, store)
    return _Store(zarr, store, sizes, source.n_bytes, read)


def _close(store: Any) -> None:
    # If nothing was read from a store, closing it makes zarr raise AttributeError.
    with contextlib.suppress(AttributeError):
        store.close()


def _arrays_of(found: _Store) -> dict[str, dict[str, Any]]:
    """Return the metadata of all arrays by folder; consolidated metadata is ignored."""
    arrays: dict[str, dict[str, Any]] = {}
    for name in found.sizes:
        if basename(name) not in ROOTS:
            continue
        about = _description(found, name)
        if basename(name) == ".zgroup" or about.get("node_type") == "group":
            continue
        folder = dirname(name)
        if folder in arrays:
            raise MediaError(f"{name}: there is more than one metadata file for this array")
        arrays[folder] = about
        _refuse_pickle({**about, "attributes": None}, name)
    folders = {folder: folder or SINGLE_ARRAY for folder in arrays}
    for name in found.sizes:
        is_known = basename(name) in ROOTS or basename(name).startswith(".") or name.endswith("/")
        if not is_known and _store_of(name, folders) is None:
            raise MediaError(f"{name}: belongs to no array, so it would be lost")
    return arrays


def _description(found: _Store, name: str) -> dict[str, Any]:
    text = found.read(name, _MAX_TEXT + 1)
    if len(text) > _MAX_TEXT:
        raise MediaError(f"{name}: expected at most {_MAX_TEXT:,} bytes, found more")
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise MediaError(f"{name}: not JSON: {error}") from error
    if not isinstance(content, dict):
        raise MediaError(f"{name}: expected an object, found {text[:80]!r}")
    return content


def _refuse_pickle(content: Any, name: str) -> None:
    """Raise MediaError if metadata names the pickle codec, which would run code from chunks."""
    if isinstance(content, dict):
        for key in ("id", "name"):
            if "pickle" in str(content.get(key, "")):
                raise MediaError(f"{name}: codec {content[key]!r}: a pickle can run any code")
    for each in content.values() if isinstance(content, dict) else content:
        if isinstance(each, dict | list):
            _refuse_pickle(each, name)


def _open_array(found: _Store, folder: str, about: dict[str, Any]) -> NamedArray:
    what = f"array {folder or SINGLE_ARRAY!r}"
    version = about.get("zarr_format")
    array = found.zarr.open_array(
        found.store, path=found.path_of(folder), mode="r", zarr_format=version
    )
    checks = partial(_check_blosc, found, folder, {"codecs": [about.get("compressor")], **about})
    dtype, shape = array.dtype, array.shape
    known = dtype_name(dtype, what)
    # The shape of the unit that is read and decoded as a whole: a shard, or else a chunk.
    pieces = array.shards or array.chunks
    n_bytes = max(prod(shape), prod(pieces)) * dtype.itemsize
    refuse_bomb(what, n_bytes, found.n_bytes)
    return block_array(
        folder.replace("/", ".") or SINGLE_ARRAY,
        known,
        shape,
        partial(_read, array, what, cache(checks)),
        prod(shape[1:]) * dtype.itemsize,
        max(1, pieces[0]) if pieces else 1,
    )


def _check_blosc(found: _Store, folder: str, about: Mapping[str, Any]) -> None:
    """Check the lengths of Blosc chunks, because the decoder would read beyond a short chunk."""
    last = (about.get("codecs") or [None])[-1] or {}
    if "blosc" not in (last.get("id"), last.get("name")):
        return
    below = f"{folder}/" if folder else ""
    for name, n_bytes in found.sizes.items():
        if not name.startswith(below) or basename(name) in ROOTS or basename(name).startswith("."):
            continue
        head = found.read(name, 16)
        if len(head) < 16 or int.from_bytes(head[12:], "little") != n_bytes:
            raise MediaError(f"{name}: damaged: its Blosc header does not state {n_bytes:,} bytes")


def _read(array: Any, what: str, check: Callable[[], None], which: Any) -> npt.NDArray[Any]:
    check()
    with damage(_DAMAGE, what):
        try:
            found = np.asarray(array[which])
        except OSError as error:  # `damage` would not convert an OSError that names a chunk file
            raise MediaError(f"{what}: damaged: {error}") from error
    check_text(found, what)
    is_text = found.dtype.kind in "UT"
    return found if is_text else found.astype(found.dtype.newbyteorder("<"), copy=False)


@dataclass(frozen=True, kw_only=True)
class Zarr(ArraySamples):
    """A converter that makes samples from the arrays in Zarr stores.

    The array in the folder `a/b` becomes the field `a.b`; an array at the root becomes `array`.
    By default, each row is a sample if the arrays within each store have equally many rows;
    otherwise, each store is a sample.
    """

    kind: ClassVar[str] = "zarr"
    version: ClassVar[str] = "1"
    what: ClassVar[str] = "Zarr store"
    rows_of_many: ClassVar[bool] = True

    def parts(self, inputs: Sequence[Input]) -> Mapping[str, Sequence[str]]:
        """Map the root file of each store folder to the other files of the store."""
        names = sorted(one.name for one in inputs)
        roots: dict[str, str] = {}
        at_root = [name for name in names if basename(name) in ROOTS]
        for name in sorted(
            at_root, key=lambda name: (name.count("/"), ROOTS.index(basename(name)))
        ):
            if _store_of(name, roots) is None:
                roots[dirname(name)] = name
        found: dict[str, list[str]] = {root: [] for root in roots.values()}
        for name in names:
            root = _store_of(name, roots)
            if root is not None and root != name:
                found[root].append(name)
        return found

    def open(self, source: Input, files: ExitStack) -> Sequence[NamedArray] | None:
        """Return a store's arrays; None if the input is neither a .zarr.zip nor a root file."""
        zarr = import_module("zarr")
        with damage(_DAMAGE), warnings.catch_warnings():
            # Ignore warnings about features that other versions of zarr may not support.
            warnings.simplefilter("ignore")
            if source.name.lower().endswith(ZIP):
                found = _open_zip(zarr, source, files)
            elif basename(source.name) in ROOTS:
                found = _open_folder(zarr, source)
            else:
                return None
            return [_open_array(found, *each) for each in _arrays_of(found).items()]

    def name_of(self, source: Input) -> str:
        """Return the name of the store's folder or zip file."""
        if source.name.lower().endswith(ZIP):
            return source.name
        folder = dirname(source.name)
        return folder or os.path.basename(os.path.dirname(source.path))

    def libraries(self) -> Mapping[str, str]:
        """Return the versions of zarr and numcodecs."""
        return {name: import_module(name).__version__ for name in ("zarr", "numcodecs")}
