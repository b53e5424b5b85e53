"""Export a dataset as a folder of files, such as images, and a table of all samples."""

from __future__ import annotations

import json
import math
import os
from collections import deque
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import IO, Any, Final

import numpy as np

from shardio.export.formats import (
    Encode,
    ExportOptions,
    Prepare,
    SampleBatch,
    distinct_names,
    export_dtype,
    field_spec,
    file_encoder,
    number_converter,
    safe_path,
)
from shardio.format.types import Field
from shardio.storage.fs import create, make_folder, sync_path

TABLE_FILE: Final = "samples.jsonl"
_MAX_TABLE_ITEMS: Final = 1024
"""The maximum number of elements of an array that is stored in the table. Larger arrays, and arrays
of variable shape, are stored as files."""
_CONCURRENT_SYNCS: Final = 16
"""The number of files that are synced at the same time. A disk syncs several files in about the
time of one file: 1,000 small files took 0.5 s instead of 5.4 s."""


class FilesExporter:
    """An exporter that writes files such as CLASS/NAME.jpg, and the table `samples.jsonl`.

    A line of the table is the JSON of a sample: small values, and the paths of the files that store
    the other values. If several fields are stored as files, each has a folder. NAME is the path in
    the field `source` without its suffix, or else the index of the sample. CLASS is the name of the
    sample's class, if the field `label` is exported and is the index of a class.
    """

    def __init__(self, options: ExportOptions) -> None:
        self._encoders: dict[str, Encode] = {}
        specs: dict[str, str] = {}
        refused = {}
        for name, field in options.fields.items():
            specs[name] = field_spec(field)
            if _is_in_table(field):
                continue
            encode = file_encoder("", field)
            if encode is None:
                refused[name] = "a file cannot hold a list of arrays"
                continue
            self._encoders[name] = encode
            if field.array or field.is_opaque:
                specs[name] = "file?" if field.optional else "file"
        options.refuse(refused)
        self.schema_spec: Mapping[str, str] = specs
        self.prepare: Prepare = options.muxers
        self._fields = options.fields
        self._number_converters = {
            n: number_converter(f.array) for n, f in options.fields.items() if f.array
        }
        several = len(self._encoders) > 1
        self._folders = (
            distinct_names(self._encoders, TABLE_FILE) if several else dict.fromkeys(specs, "")
        )
        self._classes = _class_folders(options)
        source = options.fields.get("source")
        self._has_source = source is not None and source.is_utf8
        self._root = Path()
        self._created_folders: set[Path] = set()
        self._table: IO[bytes] | None = None

    def open(self, folder: Path) -> None:
        """Create the table and, in the folder of each field, a folder for each class."""
        self._root = folder
        self._table = create(folder / TABLE_FILE)
        for name in self._encoders:
            for label in ("", *self._classes):
                self._make_folder(folder / _local_name(os.path.join(self._folders[name], label)))

    def write(self, batch: SampleBatch) -> None:
        """Write the files of all samples of a batch, and their lines in the table."""
        if self._table is None:
            return
        for number, sample in zip(batch.numbers, batch.samples(), strict=True):
            stem = self._stem(number, sample)
            for name, encode in self._encoders.items():
                if (value := sample[name]) is not None:
                    suffix, data = encode(value)
                    sample[name] = self._write_file(self._folders[name], stem, number, suffix, data)
            for name, numbers in self._number_converters.items():
                if name not in self._encoders and sample[name] is not None:
                    sample[name] = numbers(np.asarray(sample[name])).tolist()
            line = json.dumps({name: sample[name] for name in self._fields}, ensure_ascii=False)
            self._table.write(line.encode() + b"\n")

    def finish(self) -> None:
        """Sync all files, and the folders that contain the files, to the disk."""
        self.close()
        paths = (
            os.path.join(folder, name)
            for folder, _, names in os.walk(self._root)
            for name in ("", *names)
        )
        with ThreadPoolExecutor(_CONCURRENT_SYNCS) as pool:
            while chunk := [*islice(paths, 256 * _CONCURRENT_SYNCS)]:
                deque(pool.map(sync_path, chunk), maxlen=0)

    def close(self) -> None:
        """Close the table."""
        if self._table is not None:
            self._table.close()
            self._table = None

    def _stem(self, number: int, sample: Mapping[str, Any]) -> str:
        """Return the path of a sample's file without its suffix, relative to a field's folder."""
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
        """Write a file and return its path in the export; add `number` to a name that is taken."""
        stem = os.path.join(folder, sample_stem)
        try:
            self._make_folder((self._root / _local_name(stem)).parent)
        except (FileExistsError, NotADirectoryError):  # a file has the name of the folder
            stem = os.path.join(folder, f"{number:09d}")
        for name in (stem, f"{stem}-{number}", *(f"{stem}-{number}-{i}" for i in range(2, 99))):
            path = self._root / _local_name(f"{name}{suffix}")
            try:
                file = create(path)
            except FileExistsError:
                continue
            with file:
                file.write(data)
            return f"{name}{suffix}"
        raise FileExistsError(f"{self._root / stem}{suffix}")

    def _make_folder(self, folder: Path) -> None:
        if folder not in self._created_folders:
            make_folder(folder)
            self._created_folders.add(folder)


def _local_name(text: str) -> str:
    """Return a UTF-8 file name as Python decodes it in the current locale."""
    return os.fsdecode(text.encode())


def _is_in_table(field: Field) -> bool:
    if (array := field.array) is not None:
        return array.is_fixed and math.prod(n or 0 for n in array.shape) <= _MAX_TABLE_ITEMS
    return field.is_utf8 or field.is_json


def _class_folders(options: ExportOptions) -> list[str]:
    """Return the name of each class's folder; none if there is no field of labels."""
    field = options.fields.get("label")
    label = field.array if field else None
    if label is None or label.shape or export_dtype(label).kind not in "iu":
        return []
    return list(distinct_names(options.dataset.classes, TABLE_FILE).values())
