"""Exporters for plain files: one file per value in folders, or one .npy array per field."""

from __future__ import annotations

import json
import math
import os
from collections import deque
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from itertools import islice
from pathlib import Path
from typing import IO, Any, Final

import numpy as np

from shardio._base.file_names import local_name
from shardio.export.formats import ExportOptions, Prepare, SampleBatch, SampleReader, refuse_fields
from shardio.export.value_files import (
    Encode,
    distinct_names,
    export_dtype,
    field_spec,
    file_encoder,
    number_converter,
    preparation_of,
    safe_path,
)
from shardio.format.fields import Array, Bytes, Field, Json, Text
from shardio.storage.fs import create, make_folder, perform, sync

TABLE: Final = "samples.jsonl"
_MAX_TABLE_ITEMS: Final = 1024
"""Fixed-shape arrays of up to this many numbers are stored in the table; larger ones are files."""
_CONCURRENT_SYNCS: Final = 16
"""Disks sync many files in about the time of one: 1,000 small ones took 0.5 s, not 5.4 s."""


class FilesExporter:
    """An exporter that writes CLASS/NAME.jpg and the like, and `samples.jsonl`, a sample a line.

    If several fields are stored as files, each gets a folder. NAME comes from the field `source` if
    it is exported, else from the sample's number. CLASS is the folder of the label's class, if
    labels are exported.
    """

    def __init__(self, options: ExportOptions) -> None:
        self._encoders: dict[str, Encode] = {}
        specs: dict[str, str] = {}
        prepare, refused = {}, {}
        for name, field in options.fields.items():
            specs[name] = field_spec(field)
            if _is_in_table(field):
                continue
            encode = file_encoder("", field)
            if encode is None:
                refused[name] = "a file cannot hold a list of arrays"
                continue
            self._encoders[name] = encode
            if isinstance(field, Array | Bytes):
                specs[name] = "file?" if field.optional else "file"
            if (preparation := preparation_of(field)) is not None:
                prepare[name] = preparation
        refuse_fields(options, refused)
        self.schema_spec: Mapping[str, str] = specs
        self.prepare: Prepare = prepare
        self._fields = options.fields
        self._numbers = {
            n: number_converter(f) for n, f in options.fields.items() if isinstance(f, Array)
        }
        several = len(self._encoders) > 1
        self._folders = (
            distinct_names(self._encoders, TABLE) if several else dict.fromkeys(specs, "")
        )
        self._classes = _class_folders(options)
        self._has_source = isinstance(options.fields.get("source"), Text)
        self._root = Path()
        self._created: set[Path] = set()
        self._table: IO[bytes] | None = None

    def open(self, folder: Path) -> None:
        """Create the table and the folders of the classes."""
        self._root = folder
        self._table = create(folder / TABLE)
        for name in self._encoders:
            for label in ("", *self._classes):
                self._make_folder(folder / local_name(os.path.join(self._folders[name], label)))

    def write(self, batch: SampleBatch) -> None:
        """Write the files and table lines of a batch."""
        if self._table is None:
            return
        for number, sample in zip(batch.numbers, batch.samples(), strict=True):
            stem = self._stem(number, sample)
            for name, encode in self._encoders.items():
                if (value := sample[name]) is not None:
                    suffix, data = encode(value)
                    sample[name] = self._write_file(self._folders[name], stem, number, suffix, data)
            for name, numbers in self._numbers.items():
                if name not in self._encoders and sample[name] is not None:
                    sample[name] = numbers(np.asarray(sample[name])).tolist()
            line = json.dumps({name: sample[name] for name in self._fields}, ensure_ascii=False)
            self._table.write(line.encode() + b"\n")

    def finish(self) -> None:
        """Sync all files and the folders that contain them."""
        self.close()
        paths = (
            os.path.join(folder, name)
            for folder, _, names in os.walk(self._root)
            for name in ("", *names)
        )
        with ThreadPoolExecutor(_CONCURRENT_SYNCS) as pool:
            while chunk := [*islice(paths, 256 * _CONCURRENT_SYNCS)]:
                deque(pool.map(_sync, chunk), maxlen=0)

    def close(self) -> None:
        """Close the table."""
        if self._table is not None:
            self._table.close()
            self._table = None

    def _stem(self, number: int, sample: Mapping[str, Any]) -> str:
        """Return the path of a sample's files without suffix, relative to the field's folder."""
        name = f"{number:09d}"
        if self._has_source and sample["source"]:
            stem, dot, suffix = sample["source"].rpartition(".")
            name = safe_path(stem if dot and "/" not in suffix else sample["source"])
        if not self._classes:
            return name
        label = sample["label"]
        is_class = label is not None and 0 <= int(label) < len(self._classes)
        return os.path.join(self._classes[int(label)] if is_class else "", os.path.basename(name))

    def _write_file(
        self, folder: str, sample_stem: str, number: int, suffix: str, data: bytes
    ) -> str:
        """Write a file and return its relative path; the sample's number makes a name unique."""
        stem = os.path.join(folder, sample_stem)
        try:
            self._make_folder((self._root / local_name(stem)).parent)
        except (FileExistsError, NotADirectoryError):  # a file already has the name of this folder
            stem = os.path.join(folder, f"{number:09d}")
        for name in (stem, f"{stem}-{number}", *(f"{stem}-{number}-{i}" for i in range(2, 99))):
            path = self._root / local_name(f"{name}{suffix}")
            try:
                file = create(path)
            except FileExistsError:
                continue
            with file:
                file.write(data)
            return f"{name}{suffix}"
        raise FileExistsError(f"{self._root / stem}{suffix}")

    def _make_folder(self, folder: Path) -> None:
        if folder not in self._created:
            make_folder(folder)
            self._created.add(folder)


def _sync(path: str) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        perform("fsync", path, os.fsync, fd)
    finally:
        os.close(fd)


def _is_in_table(field: Field) -> bool:
    """Return True if the values of a field are stored in the table itself."""
    if isinstance(field, Array):
        return field.is_fixed and math.prod(n or 0 for n in field.shape) <= _MAX_TABLE_ITEMS
    return isinstance(field, Text | Json)


def _class_folders(options: ExportOptions) -> list[str]:
    """Return the folder name of each class; empty if labels are not exported, or not integers."""
    label = options.fields.get("label")
    if not isinstance(label, Array) or label.shape or export_dtype(label).kind not in "iu":
        return []
    return list(distinct_names(options.dataset.classes, TABLE).values())


_MAGIC: Final = b"\x93NUMPY\x01\x00"
_MAX_CHARACTERS: Final = 1024
"""Maximum text length: NumPy stores every string with 4 bytes per character of the longest one."""


class NpyExporter:
    """An exporter that writes NAME.npy for each field: fixed-shape arrays, and text as `<U`."""

    prepare: Prepare = {}
    schema_spec = None

    def __init__(self, options: ExportOptions) -> None:
        self._options = options
        self._files = ExitStack()
        self._n_written = 0
        refuse_fields(options, _variable_shape_reasons(options.fields))
        texts = {n: f for n, f in options.fields.items() if isinstance(f, Text)}
        lengths, refused = _measure_texts(options, texts) if texts else ({}, {})
        for name, field in options.fields.items():
            if field.optional and (missing := _first_missing(options, name)) is not None:
                refused[name] = f"sample {missing} has no value, and a .npy cannot hold nulls"
        refuse_fields(options, refused)
        self._layouts: dict[str, tuple[np.dtype[Any], tuple[int, ...]]] = {}
        for name, field in options.fields.items():
            if isinstance(field, Array):
                self._layouts[name] = export_dtype(field), tuple(n or 0 for n in field.shape)
            else:
                self._layouts[name] = np.dtype(f"<U{lengths[name] or 1}"), ()
        self._names = distinct_names(options.fields)
        self._open: dict[str, tuple[Path, IO[bytes]]] = {}

    def open(self, folder: Path) -> None:
        """Create a file for each field, with space reserved for its header."""
        for name, stem in self._names.items():
            path = folder / local_name(f"{stem}.npy")
            file = self._files.enter_context(create(path))
            file.write(self._header(name, len(self._options.dataset)))
            self._open[name] = path, file

    def write(self, batch: SampleBatch) -> None:
        """Write the rows of a batch."""
        for name, (dtype, shape) in self._layouts.items():
            field = self._options.fields[name]
            values: Any = batch.columns[name] if name in batch.columns else batch.records[name]
            if isinstance(field, Array):
                values = number_converter(field)(np.asarray(values, field.numpy))
            rows = np.ascontiguousarray(values, dtype).reshape(len(batch), *shape)
            self._open[name][1].write(rows.data if rows.size else b"")
        self._n_written += len(batch)

    def finish(self) -> None:
        """Rewrite the headers with the final number of samples, and sync the files."""
        for name, (path, file) in self._open.items():
            file.seek(0)
            file.write(self._header(name, self._n_written))
            sync(file, path)
        self.close()

    def close(self) -> None:
        """Close the files."""
        self._files.close()

    def _header(self, name: str, n_samples: int) -> bytes:
        """Return a file's header, padded to the length of one for all samples of the dataset."""
        dtype, shape = self._layouts[name]
        header = {"descr": dtype.str, "fortran_order": False, "shape": (n_samples, *shape)}
        room = 20 - len(str(n_samples))
        text = f"{header}{' ' * room}"
        text += " " * (-(len(_MAGIC) + 2 + len(text) + 1) % 64) + "\n"
        return _MAGIC + len(text).to_bytes(2, "little") + text.encode("ascii")


def _variable_shape_reasons(fields: Mapping[str, Field]) -> dict[str, str]:
    """Return the fields that are neither text nor arrays of one shape, each with the reason."""
    return {
        name: "its shape varies" if isinstance(field, Array) else "neither an array nor text"
        for name, field in fields.items()
        if not (isinstance(field, Text) or (isinstance(field, Array) and field.is_fixed))
    }


def _measure_texts(
    options: ExportOptions, texts: Mapping[str, Field]
) -> tuple[dict[str, int], dict[str, str]]:
    """Return the longest text of each field in characters, and why some texts do not fit."""
    longest, refused = dict.fromkeys(texts, 0), dict[str, str]()
    for batch in SampleReader(options.dataset, texts, skip_damaged=True):
        for name, values in batch.records.items():
            longest[name] = max(longest[name], *(len(text or "") for text in values))
            for number, text in zip(batch.numbers, values, strict=True):
                if text is not None and text.endswith("\0"):
                    refused[name] = f"sample {number} ends with U+0000, which NumPy strips"
    for name, n_characters in longest.items():
        if n_characters > _MAX_CHARACTERS:
            refused[name] = (
                f"a text of {n_characters:,} characters, and a .npy pads all texts to the longest; "
                f"at most {_MAX_CHARACTERS:,} are allowed"
            )
    return longest, refused


def _first_missing(options: ExportOptions, name: str) -> int | None:
    """Return the number of the first sample without a value for an optional field, or None."""
    dataset, found = options.dataset, []
    rows = dataset.rows.at(np.arange(len(dataset)))
    shards = dataset.locate(rows)
    for shard in np.unique(shards).tolist():
        here = np.flatnonzero(shards == shard)
        present = dataset.reader(shard, name).present(name, rows[here] - dataset.starts[shard])
        found += here[~present][:1].tolist()
    return min(found, default=None)
