"""Exports samples to Parquet, with what Hugging Face's readers and ours want to know of columns."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from shardio.errors import InvalidArgument
from shardio.export.formats import ExportOptions, Prepare, SampleBatch, refuse_fields
from shardio.export.value_files import export_dtype, field_spec, number_converter, preparation_of
from shardio.format.fields import (
    Array,
    Audio,
    Bytes,
    Field,
    Image,
    Json,
    List,
    Text,
    Video,
    array_of,
)
from shardio.storage.fs import create, sync

_GROUP_BYTES: Final = 64 << 20
"""What is collected before it is written as a group of rows."""
_MEDIA: Final[dict[type, str]] = {Image: "Image", Audio: "Audio", Video: "Video"}
_FILE: Final = pa.struct([("bytes", pa.binary()), ("path", pa.string())])


class ParquetExporter:
    """Writes 000000.parquet, 000001.parquet, …: a column for each field, records as structs."""

    def __init__(self, asked: ExportOptions) -> None:
        self._asked = asked
        arrays = {n: array_of(field) for n, field in asked.fields.items()}
        why = "a dimension behind its first one varies, and empty lists do not say it"
        refuse_fields(
            asked, {n: why for n, array in arrays.items() if array and None in array.shape[1:]}
        )
        self.words: Mapping[str, str] = {n: field_spec(field) for n, field in asked.fields.items()}
        prepare: dict[str, Any] = {}
        for name, field in asked.fields.items():
            if (made := preparation_of(field)) is not None:
                prepare[name] = made
            elif isinstance(field, Json):
                prepare[name] = _as_json
        self.prepare: Prepare = prepare
        self._tree = _field_tree(asked.fields)
        columns = [_column(name, inner) for name, inner in self._tree.items()]
        self._schema = pa.schema(columns, metadata=_metadata(asked))
        self._waiting: list[pa.RecordBatch] = []
        self._n_waiting = self._n_written = self._n_files = 0
        self._folder = self._path = Path()
        self._file: IO[bytes] | None = None
        self._writer: Any = None

    def begin(self, folder: Path) -> None:
        """Write files into a folder."""
        self._folder = folder
        self._next()

    def add(self, batch: SampleBatch) -> None:
        """Write samples."""
        if self._n_written > self._asked.shard_bytes:
            self.end()
        if self._writer is None:
            self._next()
        try:
            arrays = [self._array(name, inner, batch) for name, inner in self._tree.items()]
        except pa.ArrowInvalid as error:  # as of what is longer than its offsets can say
            numbers = f"samples {batch.numbers[0]} to {batch.numbers[-1]}"
            raise InvalidArgument(
                f"{self._asked.names}: {numbers}: for Parquet: {error}"
            ) from error
        made = pa.RecordBatch.from_arrays(arrays, schema=self._schema)
        self._waiting.append(made)
        self._n_waiting += made.nbytes
        self._n_written += made.nbytes
        if self._n_waiting > _GROUP_BYTES:
            self._write_group()

    def end(self) -> None:
        """Finish the file that is being written."""
        if self._writer is not None and self._file is not None:
            self._write_group()
            self._writer.close()
            self._writer = None
            sync(self._file, self._path)
        self.close()

    def close(self) -> None:
        """Let go of it."""
        if self._file is not None:
            self._writer = None
            self._file.close()
            self._file = None

    def _next(self) -> None:
        self._path = self._folder / f"{self._n_files:06d}.parquet"
        self._n_files += 1
        self._n_written = 0
        self._file = create(self._path)
        self._writer = pq.ParquetWriter(
            self._file, self._schema, compression="zstd", write_page_checksum=True
        )

    def _write_group(self) -> None:
        if self._waiting:
            table = pa.Table.from_batches(self._waiting, self._schema)
            self._writer.write_table(table, row_group_size=max(1, table.num_rows))
        self._waiting, self._n_waiting = [], 0

    def _array(self, name: str, inner: Any, batch: SampleBatch) -> Any:
        """The values of a field, or of all fields of a record."""
        if not isinstance(inner, dict):
            return _values(inner, name, batch)
        fields = [_column(key, each) for key, each in inner.items()]
        arrays = [self._array(f"{name}.{key}", each, batch) for key, each in inner.items()]
        return pa.StructArray.from_arrays(arrays, fields=fields)


def _as_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _field_tree(fields: Mapping[str, Field]) -> dict[str, Any]:
    """Fields as a tree of records."""
    tree: dict[str, Any] = {}
    for name, field in fields.items():
        *path, last = name.split(".")
        place = tree
        for key in path:
            place = place.setdefault(key, {})
        place[last] = field
    return tree


def _column(name: str, inner: Any) -> Any:
    if isinstance(inner, dict):
        return pa.field(name, pa.struct([_column(*each) for each in inner.items()]), nullable=False)
    # Hugging Face's readers know a column of files, or of classes, only if it may have nulls.
    may_lack = inner.optional or type(inner) in _MEDIA or name == "label"
    return pa.field(name, _type(inner), nullable=may_lack)


def _type(field: Field) -> Any:
    if isinstance(field, Array):
        found = pa.from_numpy_dtype(export_dtype(field))
        for n in reversed(field.shape):
            found = pa.list_(_element(found)) if n is None else pa.list_(_element(found), n)
        return found
    if isinstance(field, List):
        return pa.list_(_element(_type(field.element)))
    if isinstance(field, Json):
        return pa.json_() if hasattr(pa, "json_") else pa.string()
    kinds: dict[type, Any] = {Text: pa.string(), Bytes: pa.binary()}
    return kinds.get(type(field), _FILE)


def _element(type_: Any) -> Any:
    return pa.field("element", type_, nullable=False)


def _metadata(asked: ExportOptions) -> dict[str, str]:
    """What Hugging Face keeps of columns: those of files, and the names of classes."""
    features: dict[str, Any] = {}
    for name, field in asked.fields.items():
        if (kind := _MEDIA.get(type(field))) is not None:
            *path, last = name.split(".")
            place = features
            for key in path:
                place = place.setdefault(key, {})
            place[last] = {"_type": kind}
    label, classes = asked.fields.get("label"), asked.dataset.classes
    if isinstance(label, Array) and (label.dtype, label.shape) == ("int64", ()) and classes:
        features["label"] = {"names": list(classes), "_type": "ClassLabel"}
    return {"huggingface": json.dumps({"info": {"features": features}})} if features else {}


def _values(field: Field, name: str, batch: SampleBatch) -> Any:
    """The values of a field as an array of Arrow's."""
    if isinstance(field, Array) and name in batch.columns:
        present = batch.present.get(name)
        return _fixed_arrays(field, batch.columns[name], None if present is None else ~present)
    values = batch.records[name]
    if isinstance(field, Array | List):
        return _list_arrays(field, values)
    if isinstance(field, Text):
        return pa.array(values, pa.string())
    if isinstance(field, Bytes):
        return pa.array(values, pa.binary())
    if isinstance(field, Json):
        strings = pa.array(values, pa.string())
        is_plain = not hasattr(pa, "json_")
        return strings if is_plain else pa.ExtensionArray.from_storage(pa.json_(), strings)
    files = [getattr(value, "data", value) for value in values]
    lacking = pa.array([value is None for value in values])
    parts = [pa.array(files, pa.binary()), pa.nulls(len(files), pa.string())]
    return pa.StructArray.from_arrays(parts, fields=list(_FILE), mask=lacking)


def _fixed_arrays(
    field: Array, block: npt.NDArray[Any], lacking: npt.NDArray[np.bool_] | None
) -> Any:
    """Arrays of one shape, (rows, …); `lacking` says which rows are not there."""
    flat = number_converter(field)(block).reshape(-1)
    if not field.shape:
        return pa.array(flat, mask=lacking)
    found = pa.array(flat)
    for depth in reversed(range(len(field.shape))):
        size = field.shape[depth] or 0
        type_ = pa.list_(_element(found.type), size)
        mask = pa.array(lacking) if depth == 0 and lacking is not None else None
        found = pa.FixedSizeListArray.from_arrays(found, type=type_, mask=mask)
    return found


def _list_arrays(field: Array | List, values: list[Any]) -> Any:
    """Arrays whose first dimension varies, those of a codec, or lists of arrays."""
    lacking = np.array([value is None for value in values], bool)
    if isinstance(field, Array) and field.is_fixed:
        block = np.zeros((len(values), *(n or 0 for n in field.shape)), field.numpy)
        for i in np.flatnonzero(~lacking).tolist():
            block[i] = values[i]
        return _fixed_arrays(field, block, lacking if field.optional else None)
    there = [value for value in values if value is not None]
    if isinstance(field, List):
        elements = _list_arrays(field.element, [array for value in there for array in value])
    else:
        row = Array(field.dtype, field.shape[1:])
        none = np.empty((0, *(n or 0 for n in row.shape)), field.numpy)
        elements = _fixed_arrays(row, np.concatenate([none, *there]), None)
    lengths = [0 if value is None else len(value) for value in values]
    offsets = pa.array(np.concatenate([[0], np.cumsum(lengths)]), pa.int32())
    mask = pa.array(lacking) if field.optional else None
    type_ = pa.list_(_element(elements.type))
    return pa.ListArray.from_arrays(offsets, elements, type=type_, mask=mask)
