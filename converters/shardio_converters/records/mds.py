"""MosaicML's MDS shards, read without the streaming package and without pickle.

A shard consists of the number n of its samples, n + 1 offsets (of the samples and of the end), a
JSON text about the columns, and the samples. A sample consists of the sizes of those columns whose
size varies, then the values of all columns. The number, offsets and sizes are little-endian u32.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import IO, Any, ClassVar, Final

import numpy as np
import numpy.typing as npt
import xxhash
import zstandard

from shardio import Array, Input, InvalidArgument, MediaError, Outcome
from shardio_converters.files import damage, data_name, media_value, named_path, read_up_to
from shardio_converters.inference import DtypeShape, SchemaInference, infer_fields
from shardio_converters.parsing import OutOfRange, float_of, read_int, read_json, read_text
from shardio_converters.records.zstd_files import open_zstd
from shardio_converters.schema_spec import DTYPES, Field, InferringConverter, refuse_other

_SCALARS: Final = tuple(name for name in DTYPES if name != "bool")
_WORDS: Final = {
    "bytes": "bytes",
    "str": "text",
    "int": "int64",
    "json": "json",
    "jpeg": "image",
    "png": "image",
    "str_int": "int64",
    "str_float": "float64",
    "str_decimal": "text",
    **{name: name for name in _SCALARS},
}
_REFUSED: Final = {
    "pkl": "a pickle, which can run any code: write it as json, ndarray or bytes",
    "pil": "raw pixels of a picture: write it as png, which is lossless too",
}
_ARRAY_DTYPES: Final = {
    **{8: "uint8", 9: "int8", 16: "uint16", 17: "int16", 18: "float16", 32: "uint32"},
    **{33: "int32", 34: "float32", 64: "uint64", 65: "int64", 66: "float64"},
}
"""The dtypes by code; an array begins with a code if its column does not state the dtype."""
_DIM_DTYPES: Final = ("<u1", "<u2", "<u4", "<u8")
_MAX_DIMS: Final = 16

Piece = bytes | memoryview
"""The bytes of one column in one sample; for an array, a view of the sample's bytes."""


@dataclass(frozen=True)
class MdsColumn:
    """A column of a shard; `n_bytes` is the size of each value, or None if the size varies.

    Raises MediaError if a dataset cannot store the column, and ValueError for an invalid
    description.
    """

    name: str
    encoding: str
    n_bytes: int | None

    def __post_init__(self) -> None:
        if self.n_bytes is not None and (type(self.n_bytes) is not int or self.n_bytes < 1):
            raise ValueError(f"a column has {self.n_bytes} bytes")
        if not self.is_array and self.encoding not in _WORDS:
            why = _REFUSED.get(self.encoding, f"expected ndarray, or one of {', '.join(_WORDS)}")
            raise MediaError(f"column {self.name!r}: found encoding {self.encoding!r}: {why}")
        dtype, shape = self._stated
        is_known = dtype is None or dtype in _SCALARS or not self.is_array
        if not is_known or (shape and (len(shape) > _MAX_DIMS or min(shape) < 1)):
            raise MediaError(f"column {self.name!r}: found encoding {self.encoding!r}")

    @property
    def facts(self) -> DtypeShape | None:
        """The dtype and shape of the field; None if only the samples state them."""
        if not self.is_array:
            return _WORDS[self.encoding], ()
        dtype, shape = self._stated
        return None if dtype is None or shape is None else (dtype, shape)

    def facts_of(self, data: Piece) -> DtypeShape:
        """Return the dtype and shape of an array in a sample."""
        value = self._array(data)
        return value.dtype.name, value.shape

    def decoder(self, field: Field) -> Callable[[Any], Any]:
        """Return the function that decodes the bytes of the column to a value of `field`."""
        if field.is_opaque:
            return bytes
        if self.is_array and field.array:
            return partial(self._checked, field)
        dtype = field.dtype if field.array else ""
        word = _WORDS.get(self.encoding)
        if (dtype or field.spec_name()) != word:
            raise MediaError(
                f"column {self.name!r}: expected {type(field).__name__} {dtype}, found "
                f"encoding {self.encoding!r}"
            )
        named: dict[str, Callable[[bytes], Any]] = {
            **{"str": read_text, "str_decimal": read_text, "json": read_json},
            **dict.fromkeys(("jpeg", "png"), partial(media_value, field)),
            **{"str_int": read_int, "str_float": _number},
        }
        if self.encoding in named:
            return named[self.encoding]
        return partial(_scalar, np.dtype(word).newbyteorder("<"))

    @property
    def is_array(self) -> bool:
        """True if the values are arrays, which can be decoded from views as well as bytes."""
        return self.encoding.partition(":")[0] == "ndarray"

    @cached_property
    def _stated(self) -> tuple[str | None, tuple[int, ...] | None]:
        """The dtype and shape that an encoding such as `ndarray:int32:2,3` states; else None."""
        _, _, stated = self.encoding.partition(":")
        dtype, _, shape = stated.partition(":")
        return dtype or None, tuple(map(int, shape.split(","))) if shape else None

    def _checked(self, field: Array, data: Piece) -> npt.NDArray[Any]:
        value = self._array(data)
        refuse_other(value.dtype.name, value.shape, field)
        return value

    def _array(self, data: Piece) -> npt.NDArray[Any]:
        dtype, shape = self._stated
        at = 0
        try:
            if dtype is None:
                dtype = _ARRAY_DTYPES[data[0]]
                at = 1
            if shape is None:
                n_dims, dim_dtype = data[at] >> 2, np.dtype(_DIM_DTYPES[data[at] & 3])
                end = at + 1 + n_dims * dim_dtype.itemsize
                shape = tuple(np.frombuffer(data[at + 1 : end], dim_dtype).tolist())
                if len(shape) != n_dims or not 1 <= n_dims <= _MAX_DIMS:
                    raise ValueError(f"{n_dims} dimensions")
                at = end
            numpy = np.dtype(dtype).newbyteorder("<")
            if math.prod(shape) * numpy.itemsize != len(data) - at:
                raise ValueError(f"{len(data) - at:,} bytes for shape {shape} of {dtype}")
            return np.frombuffer(data, numpy, offset=at).reshape(shape)
        except (ValueError, KeyError, IndexError) as error:
            raise MediaError(f"damaged array: {error!r}") from error


def _number(data: bytes) -> np.float64:
    try:
        return np.float64(float_of(read_text(data)))
    except OutOfRange as error:
        raise MediaError(str(error)) from error
    except ValueError as error:
        raise MediaError(f"expected a number, found {data[:40]!r}") from error


def _scalar(dtype: np.dtype[Any], data: bytes) -> Any:
    if len(data) != dtype.itemsize:
        raise MediaError(f"expected {dtype.itemsize} bytes, found {len(data)}")
    return np.frombuffer(data, dtype)[0]


INDEX: Final = "index.json"
SUFFIXES: Final = (".mds", ".mds.zstd")

_MAX_TEXT: Final = 256 << 20  # maximum bytes of an index, or of the JSON text of a shard
_U32: Final = np.dtype("<u4")
_DAMAGED: Final = (zstandard.ZstdError, EOFError)


def _open_shard(
    path: str, name: str, files: ExitStack, *, is_checked: bool = True
) -> tuple[list[MdsColumn], Iterator[list[Piece]]]:
    """Return the columns of a shard, and an iterator over its samples: the bytes of each column.

    With `is_checked`, the shard is first checked against the index in its folder. The shard
    stays open until `files` is closed.
    """
    file: IO[bytes] = files.enter_context(open(path, "rb"))
    is_packed = name.lower().endswith(SUFFIXES[1])
    if is_checked:
        _compare(file, path, "zip_data" if is_packed else "raw_data")
        file.seek(0)
    if is_packed:
        file = files.enter_context(open_zstd(file))
        n_bytes = None
    else:
        n_bytes = os.fstat(file.fileno()).st_size
    n_samples = int.from_bytes(_read(file, 4, n_bytes), "little")
    offsets = np.frombuffer(_read(file, 4 * (n_samples + 1), n_bytes), _U32).astype(np.int64)
    start = 4 + offsets.size * 4
    if offsets[0] < start or (np.diff(offsets) < 0).any() or offsets[0] - start > _MAX_TEXT:
        raise MediaError("the offsets of samples do not increase from the end of the table")
    if n_bytes not in (None, int(offsets[-1])):
        raise MediaError(f"expected {int(offsets[-1]):,} bytes, found {n_bytes:,}")
    columns = _columns(_read(file, int(offsets[0]) - start, n_bytes))
    return columns, _rows(file, columns, np.diff(offsets), n_bytes)


def _check_index(path: str) -> int:
    """Check that all shards in an index exist, in its folder or below; return their number."""
    shards = _read_index(path)
    folder = os.path.dirname(path)
    for entry in shards:
        names = [one["basename"] for one in (entry["raw_data"], entry.get("zip_data")) if one]
        names = [name for name in names if name.endswith(SUFFIXES)] or names
        if not any(name.endswith(SUFFIXES) and _is_below(folder, name) for name in names):
            raise MediaError(
                f"expected {' or '.join(map(repr, names))} beside it, found neither; "
                "shards in br, bz2, gz and snappy are not read: decompress them"
            )
    return len(shards)


def _is_below(folder: str, name: str) -> bool:
    """Return True if `name` is a file in a folder or, as in a merged index, below it."""
    leads_out = name.startswith("/") or ".." in name.split("/")
    return not leads_out and os.path.isfile(named_path(folder, name))


def _read_index(path: str) -> list[dict[str, Any]]:
    """Return the shards that an index names; none if it is not an index of MDS."""
    if os.path.getsize(path) > _MAX_TEXT:
        raise MediaError(f"an index of more than {_MAX_TEXT:,} bytes")
    try:
        content = json.loads(Path(path).read_bytes())
    except (ValueError, RecursionError) as error:
        raise MediaError(f"not JSON: {error}") from error
    shards = content.get("shards") if isinstance(content, dict) else None
    if not isinstance(shards, list) or not any(
        isinstance(entry, dict) and entry.get("format") == "mds" for entry in shards
    ):
        return []
    for entry in shards:
        try:
            files = (entry["raw_data"], entry.get("zip_data") or entry["raw_data"])
            is_known = (entry["format"], entry["version"]) == ("mds", 2)
            is_known = is_known and all(isinstance(one["basename"], str) for one in files)
        except (KeyError, TypeError, AttributeError):
            is_known = False
        if not is_known:
            raise MediaError(f"expected MDS shards of version 2, found {str(entry)[:80]}")
    return shards


def _compare(file: IO[bytes], path: str, key: str) -> None:
    """Check a shard against the index in its folder, if there is one."""
    index = os.path.join(os.path.dirname(path), INDEX)
    if not os.path.isfile(index):
        return
    try:
        shards = _read_index(index)
    except MediaError as error:
        raise MediaError(f"{INDEX} beside it: {error}") from error
    if not shards:
        return  # not an index of MDS
    name = data_name(os.path.basename(path))
    found = [entry[key] for entry in shards if entry.get(key) and entry[key]["basename"] == name]
    if not found:
        raise MediaError(f"{INDEX} beside it names {len(shards):,} shards, and not this one")
    n_bytes = os.fstat(file.fileno()).st_size
    if found[0].get("bytes") != n_bytes:
        raise MediaError(f"{INDEX}: expected {found[0].get('bytes')} bytes, found {n_bytes}")
    known = found[0].get("hashes") or {}
    if not isinstance(known, dict):
        raise MediaError(f"{INDEX}: expected hashes by algorithm, found {known!r:.80}")
    for algorithm, expected in known.items():
        if (digest := _digest(file, algorithm)) not in (None, expected):
            raise MediaError(f"{algorithm}: expected {expected}, found {digest}")


def _digest(file: IO[bytes], algorithm: str) -> str | None:
    """Return the hash of a file; None for an unknown algorithm."""
    file.seek(0)
    try:
        make: Any = getattr(xxhash, algorithm, algorithm)
        return hashlib.file_digest(file, make).hexdigest()  # type: ignore[arg-type]  # reads as files do
    except (ValueError, TypeError, AttributeError):
        return None


def _columns(content: bytes) -> list[MdsColumn]:
    try:
        about = json.loads(content)
        names, encodings = about["column_names"], about["column_encodings"]
        sizes = about["column_sizes"]
        if len({*names}) < len(names) or not all(isinstance(n, str) for n in (*names, *encodings)):
            raise ValueError(f"the columns are {names}, in {encodings}")
        columns = [MdsColumn(*each) for each in zip(names, encodings, sizes, strict=True)]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise MediaError(f"the description of its columns is damaged: {error!r}") from error
    if about.get("format") != "mds" or about.get("version") != 2:
        raise MediaError(f"expected mds, version 2, found {str(about)[:80]}")
    return columns


def _rows(
    file: IO[bytes], columns: Sequence[MdsColumn], sizes: npt.NDArray[np.int64], n_bytes: int | None
) -> Iterator[list[Piece]]:
    fixed = [column.n_bytes for column in columns]
    arrays = [column.is_array for column in columns]  # arrays are decoded from views, not copies
    n_head = 4 * fixed.count(None)
    for number, size in enumerate(sizes.tolist()):
        data = _read(file, size, n_bytes)
        head = iter(np.frombuffer(data[:n_head], _U32).tolist() if size >= n_head else [])
        lengths = [next(head, 0) if n is None else n for n in fixed]
        if sum(lengths) + n_head != size:
            raise MediaError(
                f"sample {number:,}: expected columns of {size - n_head:,} bytes, found "
                f"{sum(lengths):,}"
            )
        row, at, view = list[Piece](), n_head, memoryview(data)
        for length, is_array in zip(lengths, arrays, strict=True):
            row.append((view if is_array else data)[at : at + length])
            at += length
        yield row
    with damage(_DAMAGED):
        behind = file.read(1)
    if behind:
        raise MediaError("bytes follow the last sample; expected the end")


def _read(file: IO[bytes], n_bytes: int, n_file: int | None) -> bytes:
    """Read exactly `n_bytes`; `n_file` is the size of the file, None if compressed."""
    if n_file is not None and n_bytes > n_file:
        raise MediaError(f"a part of {n_bytes:,} bytes; the file has {n_file:,}")
    try:
        data = read_up_to(file.read, n_bytes)
    except _DAMAGED as error:
        raise MediaError(f"damaged: {error}") from error
    if len(data) < n_bytes:
        raise MediaError(f"ends {n_bytes - len(data):,} bytes too early")
    return data


@dataclass(frozen=True, kw_only=True)
class Mds(InferringConverter):
    """A converter that makes one sample per sample of MDS shards; each shard is an input.

    A shard must have the size and checksums in the `index.json` of its folder, if there is one. By
    default, fields are inferred from the encodings of columns or, where these do not state dtype
    and shape, from all samples; a dimension with differing sizes becomes variable.
    """

    kind: ClassVar[str] = "mds"
    version: ClassVar[str] = "1"

    def check_field(self, name: str, word: str, field: Field) -> None:
        """Check that columns can be converted to a field of this type."""
        if field.item or field.is_streamed:
            raise InvalidArgument(
                f"field {name!r}: found {field.spec_name()}; expected an array, text, "
                "json, image or bytes"
            )

    def fitted(self, inputs: Sequence[Input]) -> Mds:
        """Return the converter with `fields` inferred from the shards."""
        what = "MDS shard with samples that can be read"
        return replace(self, fields=self.fields or infer_fields(inputs, _fields_of, what))

    def ordered(self, fields: Mapping[str, str]) -> dict[str, str]:
        """Return all field specs, `label` and `source` first, whatever the order in the data."""
        there = {*fields, *self.additional_fields()}
        return {
            **{name: word for name, word in self.all_additional_fields().items() if name in there},
            **fields,
        }

    def samples(self, source: Input) -> Generator[Mapping[str, Any], None, Outcome]:
        """Yield the samples of a shard."""
        if os.path.basename(source.name) == INDEX:
            n_shards = _check_index(source.path)
            if not n_shards:
                return Outcome("unsupported", "does not name an MDS shard")
            return Outcome("part", f"of the {n_shards:,} shards beside it")
        if not source.name.lower().endswith(SUFFIXES):
            return Outcome("unsupported", "not an MDS shard")
        if source.path.endswith(SUFFIXES[1:]) and os.path.exists(os.path.splitext(source.path)[0]):
            beside = os.path.splitext(os.path.basename(source.name))[0]
            return Outcome("part", f"of {beside} beside it, the same shard uncompressed")
        schema, fields = self.schema(), self.fields or {}
        about = self.additional_values(source)
        n_samples = 0
        with ExitStack() as files:
            columns, rows = _open_shard(source.path, source.name, files)
            names = {one.name for one in columns}
            if others := sorted(names - fields.keys()):
                raise MediaError(f"column {others[0]!r}: expected one of {', '.join(fields)}")
            self.refuse_missing(names, "column")
            about |= dict.fromkeys(fields.keys() - names)
            taken = [(one, one.decoder(schema[one.name])) for one in columns]
            for row in rows:
                sample = dict(about)
                for (column, decode), data in zip(taken, row, strict=True):
                    try:
                        sample[column.name] = decode(data)
                    except MediaError as error:
                        raise MediaError(
                            f"sample {n_samples:,}, column {column.name!r}: {error}"
                        ) from error
                yield sample
                n_samples += 1
        return Outcome("converted") if n_samples else Outcome("empty", "holds no sample")


def _fields_of(source: Input) -> SchemaInference:
    found = SchemaInference()
    if not source.name.lower().endswith(SUFFIXES):
        return found
    with ExitStack() as files:
        columns, rows = _open_shard(source.path, source.name, files, is_checked=False)
        for row in rows:
            pairs = zip(columns, row, strict=True)
            found.add({one.name: one.facts or one.facts_of(data) for one, data in pairs})
            if all(column.facts for column in columns):
                break
    return found
