"""Exports fields as arrays: a .npy of all samples for each.

Exports samples to a folder of files, with a table that has all else, and the files' names.
"""

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

_MAGIC: Final = b"\x93NUMPY\x01\x00"
_MAX_CHARACTERS: Final = 1024
"""Every string of an array takes four bytes for each character of the longest one."""


class NpyExporter:
    """Writes NAME.npy for each field: arrays of one shape, and text as `<U`."""

    prepare: Prepare = {}
    words = None

    def __init__(self, asked: ExportOptions) -> None:
        self._asked = asked
        self._files = ExitStack()
        self._n_written = 0
        refuse_fields(asked, _variable_shape_reasons(asked.fields))
        texts = {n: f for n, f in asked.fields.items() if isinstance(f, Text)}
        lengths, refused = _measure_texts(asked, texts) if texts else ({}, {})
        for name, field in asked.fields.items():
            if field.optional and (lacking := _first_missing(asked, name)) is not None:
                refused[name] = f"sample {lacking} lacks it, and a .npy has no empty place"
        refuse_fields(asked, refused)
        self._kinds: dict[str, tuple[np.dtype[Any], tuple[int, ...]]] = {}
        for name, field in asked.fields.items():
            if isinstance(field, Array):
                self._kinds[name] = export_dtype(field), tuple(n or 0 for n in field.shape)
            else:
                self._kinds[name] = np.dtype(f"<U{lengths[name] or 1}"), ()
        self._names = distinct_names(asked.fields)
        self._open: dict[str, tuple[Path, IO[bytes]]] = {}

    def begin(self, folder: Path) -> None:
        """Make a file for each field, with room for its head."""
        for name, stem in self._names.items():
            path = folder / local_name(f"{stem}.npy")
            file = self._files.enter_context(create(path))
            file.write(self._head(name, len(self._asked.dataset)))
            self._open[name] = path, file

    def add(self, batch: SampleBatch) -> None:
        """Write the rows of some samples."""
        for name, (dtype, shape) in self._kinds.items():
            field = self._asked.fields[name]
            values: Any = batch.columns[name] if name in batch.columns else batch.records[name]
            if isinstance(field, Array):
                values = number_converter(field)(np.asarray(values, field.numpy))
            rows = np.ascontiguousarray(values, dtype).reshape(len(batch), *shape)
            self._open[name][1].write(rows.data if rows.size else b"")
        self._n_written += len(batch)

    def end(self) -> None:
        """Write the heads anew, for as many samples as there are."""
        for name, (path, file) in self._open.items():
            file.seek(0)
            file.write(self._head(name, self._n_written))
            sync(file, path)
        self.close()

    def close(self) -> None:
        """Let go of the files."""
        self._files.close()

    def _head(self, name: str, n_samples: int) -> bytes:
        """The head of a file, which has room for any number up to that of all samples."""
        dtype, shape = self._kinds[name]
        said = {"descr": dtype.str, "fortran_order": False, "shape": (n_samples, *shape)}
        room = 20 - len(str(n_samples))
        text = f"{said}{' ' * room}"
        text += " " * (-(len(_MAGIC) + 2 + len(text) + 1) % 64) + "\n"
        return _MAGIC + len(text).to_bytes(2, "little") + text.encode("ascii")


def _variable_shape_reasons(fields: Mapping[str, Field]) -> dict[str, str]:
    """Why some fields are not of one shape, by their names."""
    return {
        name: "its shape varies" if isinstance(field, Array) else "no array, nor text"
        for name, field in fields.items()
        if not (isinstance(field, Text) or (isinstance(field, Array) and field.is_fixed))
    }


def _measure_texts(
    asked: ExportOptions, texts: Mapping[str, Field]
) -> tuple[dict[str, int], dict[str, str]]:
    """How many characters the longest text of each field has; and which cannot be stored, why."""
    longest, refused = dict.fromkeys(texts, 0), dict[str, str]()
    for batch in SampleReader(asked.dataset, texts, skips=True):
        for name, values in batch.records.items():
            longest[name] = max(longest[name], *(len(text or "") for text in values))
            for number, text in zip(batch.numbers, values, strict=True):
                if text is not None and text.endswith("\0"):
                    refused[name] = f"sample {number} ends with U+0000, which NumPy takes off"
    for name, n_characters in longest.items():
        if n_characters > _MAX_CHARACTERS:
            refused[name] = (
                f"a text of {n_characters:,} characters, and a .npy takes as much for each; "
                f"{_MAX_CHARACTERS:,} at most"
            )
    return longest, refused


def _first_missing(asked: ExportOptions, name: str) -> int | None:
    """The first sample that lacks an optional field."""
    dataset, found = asked.dataset, []
    rows = dataset.rows.at(np.arange(len(dataset)))
    shards = dataset.locate(rows)
    for shard in np.unique(shards).tolist():
        here = np.flatnonzero(shards == shard)
        present = dataset.reader(shard, name).present(name, rows[here] - dataset.starts[shard])
        found += here[~present][:1].tolist()
    return min(found, default=None)


TABLE: Final = "samples.jsonl"
_MAX_TABLE_ITEMS: Final = 1024
"""Numbers of an array of fixed shape that stand in the table; larger ones are files."""
_CONCURRENT_SYNCS: Final = 16
"""Disks answer many in about the time of one: 1,000 small files took 0.5 s, and 5.4 s in turn."""


class FilesExporter:
    """Writes CLASS/NAME.jpg and the like, and `samples.jsonl`, in which each sample is a line.

    Where several fields are files, each has a folder. NAME is that of the source, if it is
    exported, else the sample's number; CLASS is that of the label, if it is.
    """

    def __init__(self, asked: ExportOptions) -> None:
        self._encoders: dict[str, Encode] = {}
        words: dict[str, str] = {}
        prepare, refused = {}, {}
        for name, field in asked.fields.items():
            words[name] = field_spec(field)
            if _is_in_table(field):
                continue
            encode = file_encoder("", field)
            if encode is None:
                refused[name] = "no file holds a list of arrays"
                continue
            self._encoders[name] = encode
            if isinstance(field, Array | Bytes):
                words[name] = "file?" if field.optional else "file"
            if (made := preparation_of(field)) is not None:
                prepare[name] = made
        refuse_fields(asked, refused)
        self.words: Mapping[str, str] = words
        self.prepare: Prepare = prepare
        self._fields = asked.fields
        self._numbers = {
            n: number_converter(f) for n, f in asked.fields.items() if isinstance(f, Array)
        }
        several = len(self._encoders) > 1
        self._folders = (
            distinct_names(self._encoders, TABLE) if several else dict.fromkeys(words, "")
        )
        self._classes = _class_folders(asked)
        self._has_source = isinstance(asked.fields.get("source"), Text)
        self._root = Path()
        self._made: set[Path] = set()
        self._table: IO[bytes] | None = None

    def begin(self, folder: Path) -> None:
        """Make the table, and the folders of classes."""
        self._root = folder
        self._table = create(folder / TABLE)
        for name in self._encoders:
            for place in ("", *self._classes):
                self._make(folder / local_name(os.path.join(self._folders[name], place)))

    def add(self, batch: SampleBatch) -> None:
        """Write samples."""
        if self._table is None:
            return
        for number, sample in zip(batch.numbers, batch.samples(), strict=True):
            place = self._place(number, sample)
            for name, encode in self._encoders.items():
                if (value := sample[name]) is not None:
                    ending, data = encode(value)
                    sample[name] = self._write(self._folders[name], place, number, ending, data)
            for name, numbers in self._numbers.items():
                if name not in self._encoders and sample[name] is not None:
                    sample[name] = numbers(np.asarray(sample[name])).tolist()
            line = json.dumps({name: sample[name] for name in self._fields}, ensure_ascii=False)
            self._table.write(line.encode() + b"\n")

    def end(self) -> None:
        """See to it that all files are on the disk, and the folders that name them."""
        self.close()
        paths = (
            os.path.join(place, name)
            for place, _, names in os.walk(self._root)
            for name in ("", *names)
        )
        with ThreadPoolExecutor(_CONCURRENT_SYNCS) as pool:
            while some := [*islice(paths, 256 * _CONCURRENT_SYNCS)]:
                deque(pool.map(_sync, some), maxlen=0)

    def close(self) -> None:
        """Let go of the table."""
        if self._table is not None:
            self._table.close()
            self._table = None

    def _place(self, number: int, sample: Mapping[str, Any]) -> str:
        """Where the files of a sample lie, but for how their names end."""
        name = f"{number:09d}"
        if self._has_source and sample["source"]:
            stem, dot, ending = sample["source"].rpartition(".")
            name = safe_path(stem if dot and "/" not in ending else sample["source"])
        if not self._classes:
            return name
        label = sample["label"]
        is_class = label is not None and 0 <= int(label) < len(self._classes)
        return os.path.join(self._classes[int(label)] if is_class else "", os.path.basename(name))

    def _write(self, folder: str, place: str, number: int, ending: str, data: bytes) -> str:
        """Write a file; returns its name, which another one may have had before."""
        stem = os.path.join(folder, place)
        try:
            self._make((self._root / local_name(stem)).parent)
        except (FileExistsError, NotADirectoryError):  # a file has the name of this folder
            stem = os.path.join(folder, f"{number:09d}")
        for name in (stem, f"{stem}-{number}", *(f"{stem}-{number}-{i}" for i in range(2, 99))):
            path = self._root / local_name(f"{name}{ending}")
            try:
                file = create(path)
            except FileExistsError:
                continue
            with file:
                file.write(data)
            return f"{name}{ending}"
        raise FileExistsError(f"{self._root / stem}{ending}")

    def _make(self, folder: Path) -> None:
        if folder not in self._made:
            make_folder(folder)
            self._made.add(folder)


def _sync(path: str) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        perform("fsync", path, os.fsync, fd)
    finally:
        os.close(fd)


def _is_in_table(field: Field) -> bool:
    """Whether a field's values stand in the table themselves."""
    if isinstance(field, Array):
        return field.is_fixed and math.prod(n or 0 for n in field.shape) <= _MAX_TABLE_ITEMS
    return isinstance(field, Text | Json)


def _class_folders(asked: ExportOptions) -> list[str]:
    """The folder of each class; none where labels are not exported, or say none."""
    label = asked.fields.get("label")
    if not isinstance(label, Array) or label.shape or export_dtype(label).kind not in "iu":
        return []
    return list(distinct_names(asked.dataset.classes, TABLE).values())
