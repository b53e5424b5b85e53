"""Exporter for Parquet, with the column metadata that Hugging Face readers and shardio use."""

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
from shardio.export.formats import (
    ExportOptions,
    Prepare,
    SampleBatch,
    export_dtype,
    field_spec,
    number_converter,
    preparation_of,
    refuse_fields,
)
from shardio.format.types import Array, Audio, Bytes, Field, Image, Json, List, Text, Video
from shardio.storage.fs import create, sync

_GROUP_BYTES: Final = 64 << 20
"""The size at which rows are written as a row group."""
_MEDIA: Final[dict[type, str]] = {Image: "Image", Audio: "Audio", Video: "Video"}
_FILE: Final = pa.struct([("bytes", pa.binary()), ("path", pa.string())])


class ParquetExporter:
    """An exporter that writes 000000.parquet, 000001.parquet, …, with records as structs."""

    def __init__(self, options: ExportOptions) -> None:
        self._options = options
        arrays = {n: field.array or field.item for n, field in options.fields.items()}
        why = "a dimension after the first varies, and empty lists do not record it"
        refuse_fields(
            options, {n: why for n, array in arrays.items() if array and None in array.shape[1:]}
        )
        self.schema_spec: Mapping[str, str] = {
            n: field_spec(field) for n, field in options.fields.items()
        }
        prepare: dict[str, Any] = {}
        for name, field in options.fields.items():
            if (made := preparation_of(field)) is not None:
                prepare[name] = made
            elif isinstance(field, Json):
                prepare[name] = _as_json
        self.prepare: Prepare = prepare
        self._tree = _field_tree(options.fields)
        columns = [_column(name, inner) for name, inner in self._tree.items()]
        self._schema = pa.schema(columns, metadata=_metadata(options))
        self._pending: list[pa.RecordBatch] = []
        self._n_pending = self._n_written = self._n_files = 0
        self._folder = self._path = Path()
        self._file: IO[bytes] | None = None
        self._writer: Any = None

    def open(self, folder: Path) -> None:
        """Start the first file in a folder."""
        self._folder = folder
        self._open_next()

    def write(self, batch: SampleBatch) -> None:
        """Append a batch; a new file starts once the current one exceeds `shard_bytes`."""
        if self._n_written > self._options.shard_bytes:
            self.finish()
        if self._writer is None:
            self._open_next()
        try:
            arrays = [self._array(name, inner, batch) for name, inner in self._tree.items()]
        except pa.ArrowInvalid as error:  # such as values too long for 32-bit offsets
            numbers = f"samples {batch.numbers[0]} to {batch.numbers[-1]}"
            raise InvalidArgument(
                f"{self._options.dataset_name}: {numbers}: cannot write as Parquet: {error}"
            ) from error
        made = pa.RecordBatch.from_arrays(arrays, schema=self._schema)
        self._pending.append(made)
        self._n_pending += made.nbytes
        self._n_written += made.nbytes
        if self._n_pending > _GROUP_BYTES:
            self._write_group()

    def finish(self) -> None:
        """Complete and sync the current file."""
        if self._writer is not None and self._file is not None:
            self._write_group()
            self._writer.close()
            self._writer = None
            sync(self._file, self._path)
        self.close()

    def close(self) -> None:
        """Close the current file."""
        if self._file is not None:
            self._writer = None
            self._file.close()
            self._file = None

    def _open_next(self) -> None:
        self._path = self._folder / f"{self._n_files:06d}.parquet"
        self._n_files += 1
        self._n_written = 0
        self._file = create(self._path)
        self._writer = pq.ParquetWriter(
            self._file, self._schema, compression="zstd", write_page_checksum=True
        )

    def _write_group(self) -> None:
        if self._pending:
            table = pa.Table.from_batches(self._pending, self._schema)
            self._writer.write_table(table, row_group_size=max(1, table.num_rows))
        self._pending, self._n_pending = [], 0

    def _array(self, name: str, inner: Any, batch: SampleBatch) -> Any:
        """Return the values of a field, or of all fields of a record, as an Arrow array."""
        if not isinstance(inner, dict):
            return _values(inner, name, batch)
        fields = [_column(key, each) for key, each in inner.items()]
        arrays = [self._array(f"{name}.{key}", each, batch) for key, each in inner.items()]
        return pa.StructArray.from_arrays(arrays, fields=fields)


def _as_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _field_tree(fields: Mapping[str, Field]) -> dict[str, Any]:
    """Return the fields as a tree: records are dicts, keyed by the parts of dotted names."""
    tree: dict[str, Any] = {}
    for name, field in fields.items():
        *path, last = name.split(".")
        node = tree
        for key in path:
            node = node.setdefault(key, {})
        node[last] = field
    return tree


def _column(name: str, inner: Any) -> Any:
    if isinstance(inner, dict):
        return pa.field(name, pa.struct([_column(*each) for each in inner.items()]), nullable=False)
    # Hugging Face's readers recognize columns of files and of classes only if they are nullable.
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


def _metadata(options: ExportOptions) -> dict[str, str]:
    """Return Hugging Face's metadata: the features of media columns, and class names."""
    features: dict[str, Any] = {}
    for name, field in options.fields.items():
        if (kind := _MEDIA.get(type(field))) is not None:
            *path, last = name.split(".")
            node = features
            for key in path:
                node = node.setdefault(key, {})
            node[last] = {"_type": kind}
    label, classes = options.fields.get("label"), options.dataset.classes
    if isinstance(label, Array) and (label.dtype, label.shape) == ("int64", ()) and classes:
        features["label"] = {"names": list(classes), "_type": "ClassLabel"}
    return {"huggingface": json.dumps({"info": {"features": features}})} if features else {}


def _values(field: Field, name: str, batch: SampleBatch) -> Any:
    """Return the values of a field as an Arrow array."""
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
    missing = pa.array([value is None for value in values])
    parts = [pa.array(files, pa.binary()), pa.nulls(len(files), pa.string())]
    return pa.StructArray.from_arrays(parts, fields=list(_FILE), mask=missing)


def _fixed_arrays(
    field: Array, block: npt.NDArray[Any], missing: npt.NDArray[np.bool_] | None
) -> Any:
    """Return arrays of one shape, (rows, …), as an Arrow array; `missing` masks null rows."""
    flat = number_converter(field)(block).reshape(-1)
    if not field.shape:
        return pa.array(flat, mask=missing)
    found = pa.array(flat)
    for depth in reversed(range(len(field.shape))):
        size = field.shape[depth] or 0
        type_ = pa.list_(_element(found.type), size)
        mask = pa.array(missing) if depth == 0 and missing is not None else None
        found = pa.FixedSizeListArray.from_arrays(found, type=type_, mask=mask)
    return found


def _list_arrays(field: Array | List, values: list[Any]) -> Any:
    """Return variable-length or compressed arrays, or lists of arrays, as an Arrow array."""
    missing = np.array([value is None for value in values], bool)
    if isinstance(field, Array) and field.is_fixed:
        block = np.zeros((len(values), *(n or 0 for n in field.shape)), field.numpy)
        for i in np.flatnonzero(~missing).tolist():
            block[i] = values[i]
        return _fixed_arrays(field, block, missing if field.optional else None)
    there = [value for value in values if value is not None]
    if isinstance(field, List):
        elements = _list_arrays(field.element, [array for value in there for array in value])
    else:
        row = Array(field.dtype, field.shape[1:])
        none = np.empty((0, *(n or 0 for n in row.shape)), field.numpy)
        elements = _fixed_arrays(row, np.concatenate([none, *there]), None)
    lengths = [0 if value is None else len(value) for value in values]
    offsets = pa.array(np.concatenate([[0], np.cumsum(lengths)]), pa.int32())
    mask = pa.array(missing) if field.optional else None
    type_ = pa.list_(_element(elements.type))
    return pa.ListArray.from_arrays(offsets, elements, type=type_, mask=mask)
