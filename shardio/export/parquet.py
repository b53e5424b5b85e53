"""Export a dataset as Parquet files, with the metadata that Hugging Face's readers use."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import partial
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
    is_int64_scalar,
    number_converter,
)
from shardio.format.types import Array, Field
from shardio.storage.fs import create, sync

_ROW_GROUP_BYTES: Final = 64 << 20
"""When the pending rows exceed this size, they are written to the file as one row group."""
_ARROW_TYPES: Final[dict[str, Any]] = {
    "text": pa.string(),
    "json": pa.json_() if hasattr(pa, "json_") else pa.string(),
}
"""The Arrow types of fields that are neither arrays nor media. Fields of other types are binary."""
_FILE_TYPE: Final = pa.struct([("bytes", pa.binary()), ("path", pa.string())])


class ParquetExporter:
    """An exporter that writes the files 000000.parquet, 000001.parquet, ….

    A nested record of the schema becomes a column of Arrow's struct type.
    """

    def __init__(self, options: ExportOptions) -> None:
        self._options = options
        arrays = {n: field.array or field.item for n, field in options.fields.items()}
        why = "a dimension after the first varies, and an empty Parquet list does not store it"
        options.refuse(
            {name: why for name, array in arrays.items() if array and None in array.shape[1:]}
        )
        fields = options.fields.items()
        self.schema_spec: Mapping[str, str] = {name: field_spec(field) for name, field in fields}
        as_json = partial(json.dumps, ensure_ascii=False)
        texts = {name: as_json for name, field in fields if field.is_json}
        self.prepare: Prepare = {**options.muxers, **texts}
        self._tree = _field_tree(options.fields)
        columns = [_column(name, inner) for name, inner in self._tree.items()]
        self._schema = pa.schema(columns, metadata=_metadata(options))
        self._pending: list[pa.RecordBatch] = []
        self._n_pending = self._n_written = self._n_files = 0
        self._folder = self._path = Path()
        self._file: IO[bytes] | None = None
        self._writer: Any = None

    def open(self, folder: Path) -> None:
        """Start writing the first Parquet file in `folder`."""
        self._folder = folder
        self._open_next()

    def write(self, batch: SampleBatch) -> None:
        """Append a batch, which may stay in memory until later calls."""
        if self._n_written > self._options.shard_bytes:
            self.finish()
        if self._writer is None:
            self._open_next()
        try:
            arrays = [self._array(name, inner, batch) for name, inner in self._tree.items()]
        except pa.ArrowInvalid as error:  # for example, values are too long for 32-bit offsets
            numbers = f"samples {batch.numbers[0]} to {batch.numbers[-1]}"
            raise InvalidArgument(
                f"{self._options.dataset.current_path}: {numbers}: cannot write as Parquet: {error}"
            ) from error
        made = pa.RecordBatch.from_arrays(arrays, schema=self._schema)
        self._pending.append(made)
        self._n_pending += made.nbytes
        self._n_written += made.nbytes
        if self._n_pending > _ROW_GROUP_BYTES:
            self._write_row_group()

    def finish(self) -> None:
        """Complete the current file, and sync it to the disk."""
        if self._writer is not None and self._file is not None:
            self._write_row_group()
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

    def _write_row_group(self) -> None:
        if self._pending:
            table = pa.Table.from_batches(self._pending, self._schema)
            self._writer.write_table(table, row_group_size=max(1, table.num_rows))
        self._pending, self._n_pending = [], 0

    def _array(self, name: str, inner: Any, batch: SampleBatch) -> Any:
        """Return the values of a field, or of all fields of a nested record, as an Arrow array."""
        if not isinstance(inner, dict):
            return _values(inner, name, batch)
        fields = [_column(key, each) for key, each in inner.items()]
        arrays = [self._array(f"{name}.{key}", each, batch) for key, each in inner.items()]
        return pa.StructArray.from_arrays(arrays, fields=fields)


def _field_tree(fields: Mapping[str, Field]) -> dict[str, Any]:
    """Return the fields as nested dicts: the field `a.b` becomes the entry `b` of the dict `a`."""
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
    # The readers of Hugging Face recognize a column of files, or of class labels, only if the
    # column is nullable.
    may_lack = inner.optional or inner.medium or name == "label"
    return pa.field(name, _type(inner), nullable=bool(may_lack))


def _type(field: Field) -> Any:
    if (array := field.array) is not None:
        found = pa.from_numpy_dtype(export_dtype(array))
        for n in reversed(array.shape):
            found = pa.list_(_element(found)) if n is None else pa.list_(_element(found), n)
        return found
    if field.item is not None:
        return pa.list_(_element(_type(field.item)))
    return _FILE_TYPE if field.medium else _ARROW_TYPES.get(field.spec_name(), pa.binary())


def _element(type_: Any) -> Any:
    return pa.field("element", type_, nullable=False)


def _metadata(options: ExportOptions) -> dict[str, str]:
    """Return the metadata of Hugging Face: the types of media columns, and the class names."""
    features: dict[str, Any] = {}
    for name, field in options.fields.items():
        if field.medium is not None:
            *path, last = name.split(".")
            node = features
            for key in path:
                node = node.setdefault(key, {})
            node[last] = {"_type": field.medium.capitalize()}
    label, classes = options.fields.get("label"), options.dataset.classes
    if label is not None and is_int64_scalar(label) and classes:
        features["label"] = {"names": list(classes), "_type": "ClassLabel"}
    return {"huggingface": json.dumps({"info": {"features": features}})} if features else {}


def _values(field: Field, name: str, batch: SampleBatch) -> Any:
    if field.column is not None:
        present = batch.present.get(name)
        missing = None if present is None else ~present
        return _fixed_arrays(field.column, batch.columns[name], missing)
    values = batch.records[name]
    if field.array or field.item:
        return _list_arrays(field, values)
    if not field.medium:
        type_ = _type(field)
        found = pa.array(values, getattr(type_, "storage_type", type_))
        is_plain = found.type == type_
        return found if is_plain else pa.ExtensionArray.from_storage(type_, found)
    files = [getattr(value, "data", value) for value in values]
    missing = pa.array([value is None for value in values])
    parts = [pa.array(files, pa.binary()), pa.nulls(len(files), pa.string())]
    return pa.StructArray.from_arrays(parts, fields=list(_FILE_TYPE), mask=missing)


def _fixed_arrays(
    field: Array, rows: npt.NDArray[Any], missing: npt.NDArray[np.bool_] | None
) -> Any:
    """Return an array of the shape (rows, …) as an Arrow array; rows in `missing` become null."""
    flat = number_converter(field)(rows).reshape(-1)
    if not field.shape:
        return pa.array(flat, mask=missing)
    found = pa.array(flat)
    for depth in reversed(range(len(field.shape))):
        size = field.shape[depth] or 0
        type_ = pa.list_(_element(found.type), size)
        mask = pa.array(missing) if depth == 0 and missing is not None else None
        found = pa.FixedSizeListArray.from_arrays(found, type=type_, mask=mask)
    return found


def _list_arrays(field: Field, values: list[Any]) -> Any:
    """Return the values of a field of arrays or lists, stored as records, as an Arrow array."""
    missing = np.array([value is None for value in values], bool)
    array = field.array
    if array is not None and array.is_fixed:
        rows = np.zeros((len(values), *(n or 0 for n in array.shape)), array.numpy)
        for i in np.flatnonzero(~missing).tolist():
            rows[i] = values[i]
        return _fixed_arrays(array, rows, missing if field.optional else None)
    there = [value for value in values if value is not None]
    elements: Any = None
    if field.item is not None:
        elements = _list_arrays(field.item, [each for value in there for each in value])
    elif array is not None:
        row = Array(array.dtype, array.shape[1:])
        none = np.empty((0, *(n or 0 for n in row.shape)), array.numpy)
        elements = _fixed_arrays(row, np.concatenate([none, *there]), None)
    lengths = [0 if value is None else len(value) for value in values]
    offsets = pa.array(np.concatenate([[0], np.cumsum(lengths)]), pa.int32())
    mask = pa.array(missing) if field.optional else None
    type_ = pa.list_(_element(elements.type))
    return pa.ListArray.from_arrays(offsets, elements, type=type_, mask=mask)
