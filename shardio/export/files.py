"""Exports samples to a folder of files, with a table that has all else, and the files' names."""

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

from shardio._base.file_names import local_name
from shardio.export.formats import Asked, Batch, Prepare, refuse
from shardio.export.value_files import (
    Encode,
    distinct_names,
    dtype_out,
    encoder_of,
    numbers_out,
    prepare_of,
    safe_path,
    word_of,
)
from shardio.format.fields import Array, Bytes, Field, Json, Text
from shardio.storage.fs import create, make_folder, perform

TABLE: Final = "samples.jsonl"
_MOST_IN_TABLE: Final = 1024
"""Numbers of an array of fixed shape that stand in the table; larger ones are files."""
_SYNCS_AT_ONCE: Final = 16
"""Disks answer many in about the time of one: 1,000 small files took 0.5 s, and 5.4 s in turn."""


class Files:
    """Writes CLASS/NAME.jpg and the like, and `samples.jsonl`, in which each sample is a line.

    Where several fields are files, each has a folder. NAME is that of the source, if it is
    exported, else the sample's number; CLASS is that of the label, if it is.
    """

    def __init__(self, asked: Asked) -> None:
        self._encoders: dict[str, Encode] = {}
        words: dict[str, str] = {}
        prepare, refused = {}, {}
        for name, field in asked.fields.items():
            words[name] = word_of(field)
            if _is_in_table(field):
                continue
            encode = encoder_of("", field)
            if encode is None:
                refused[name] = "no file holds a list of arrays"
                continue
            self._encoders[name] = encode
            if isinstance(field, Array | Bytes):
                words[name] = "file?" if field.optional else "file"
            if (made := prepare_of(field)) is not None:
                prepare[name] = made
        refuse(asked, refused)
        self.words: Mapping[str, str] = words
        self.prepare: Prepare = prepare
        self._fields = asked.fields
        self._numbers = {n: numbers_out(f) for n, f in asked.fields.items() if isinstance(f, Array)}
        several = len(self._encoders) > 1
        self._folders = (
            distinct_names(self._encoders, TABLE) if several else dict.fromkeys(words, "")
        )
        self._classes = _classes(asked)
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

    def add(self, batch: Batch) -> None:
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
        with ThreadPoolExecutor(_SYNCS_AT_ONCE) as pool:
            while some := [*islice(paths, 256 * _SYNCS_AT_ONCE)]:
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
        return field.is_fixed and math.prod(n or 0 for n in field.shape) <= _MOST_IN_TABLE
    return isinstance(field, Text | Json)


def _classes(asked: Asked) -> list[str]:
    """The folder of each class; none where labels are not exported, or say none."""
    label = asked.fields.get("label")
    if not isinstance(label, Array) or label.shape or dtype_out(label).kind not in "iu":
        return []
    return list(distinct_names(asked.dataset.classes, TABLE).values())
