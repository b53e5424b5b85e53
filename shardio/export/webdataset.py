"""Exports samples to WebDataset's tars: the fields of each as members of one key."""

from __future__ import annotations

import tarfile
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Final

import numpy as np

from shardio.errors import InvalidArgument, SchemaError
from shardio.export.formats import ExportOptions, Prepare, SampleBatch, SampleReader, refuse_fields
from shardio.export.value_files import (
    Encode,
    file_encoder,
    has_suffix,
    preparation_of,
    safe_path,
    suffix_of,
)
from shardio.format.checksum import hash_bytes
from shardio.format.fields import Bytes, Field, Text
from shardio.format.schema import Schema
from shardio.storage.fs import create, sync

_BLOCK: Final = 512
_END_BYTES: Final = 2 * _BLOCK
_RECORD: Final = 20 * _BLOCK  # what tar fills its files up to
_KEY: Final = "key"


class WebDatasetExporter:
    """Writes 000000.tar, 000001.tar, …: a member for each field, behind the key and a dot.

    The key is the sample's number, or its field `key` where that is text that can be one.
    """

    words = None  # names and heads of members say all

    def __init__(self, asked: ExportOptions) -> None:
        self._asked = asked
        self._has_keys = _has_usable_keys(asked)
        self._encoders: dict[str, tuple[str, Encode]] = {}
        prepare, refused = {}, {}
        for name, field in asked.fields.items():
            if self._has_keys and name == _KEY:
                continue
            encode = file_encoder(name, field)
            if encode is None or "/" in name:
                refused[name] = "a tar has no lists of arrays" if encode is None else "has a slash"
                continue
            self._encoders[name] = "" if has_suffix(name, field) else name, encode
            if (made := preparation_of(field)) is not None:
                prepare[name] = made
        refuse_fields(asked, refused)
        _check_names(asked, {name: asked.fields[name] for name in self._encoders})
        self.prepare: Prepare = prepare
        self._folder = self._path = Path()
        self._file: IO[bytes] | None = None
        self._n_files = self._n_bytes = 0

    def begin(self, folder: Path) -> None:
        """Write tars into a folder."""
        self._folder = folder
        self._file = self._next()

    def add(self, batch: SampleBatch) -> None:
        """Write samples."""
        for number, sample in zip(batch.numbers, batch.samples(), strict=True):
            if self._file is None or self._n_bytes > self._asked.shard_bytes:
                self.end()
                self._file = self._next()
            key = sample[_KEY] if self._has_keys else f"{number:09d}"
            is_empty = True
            for name, (stem, encode) in self._encoders.items():
                value = sample[name]
                if value is None and self._asked.fields[name].optional:
                    continue
                ending, data = encode(value)
                self._write(self._file, f"{key}.{stem + ending if stem else name}", data)
                is_empty = False
            if is_empty:
                raise InvalidArgument(
                    f"{self._asked.names}: sample {number} has none of the fields, and a tar has "
                    "no sample without a member: export a field that all samples have (--fields)"
                )

    def end(self) -> None:
        """Finish the tar that is being written."""
        if self._file is not None:
            n_zeros = _END_BYTES + -(self._n_bytes + _END_BYTES) % _RECORD
            self._file.write(bytes(n_zeros))
            sync(self._file, self._path)
            self.close()

    def close(self) -> None:
        """Let go of it."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _next(self) -> IO[bytes]:
        self._path = self._folder / f"{self._n_files:06d}.tar"
        self._n_files += 1
        self._n_bytes = 0
        return create(self._path)

    def _write(self, file: IO[bytes], name: str, data: bytes) -> None:
        member = tarfile.TarInfo(name)
        member.size = len(data)
        head, fill = member.tobuf(tarfile.PAX_FORMAT, "utf-8"), bytes(-len(data) % _BLOCK)
        for part in (head, data, fill):
            file.write(part)
        self._n_bytes += len(head) + len(data) + len(fill)


def _check_names(asked: ExportOptions, fields: Mapping[str, Field]) -> None:
    """Make sure that members of a sample have names that differ, and that can be fields again.

    Raises:
        InvalidArgument: they have not.
    """
    if not fields:
        raise InvalidArgument(f"{asked.names}: a tar needs a field beside {_KEY!r}")
    found: set[str] = set()
    for name, field in fields.items():
        # What ends as its bytes say has all endings.
        ending = "" if has_suffix(name, field) else suffix_of(name, field) or ".any"
        made = f"{name}{ending}".lower()
        if made in found:
            refuse_fields(asked, {name: f"another field is {made!r} in a tar, too"})
        found.add(made)
    try:
        Schema(dict.fromkeys(found, Bytes()))
    except SchemaError as error:
        raise InvalidArgument(f"{asked.names}: fields as members of a tar: {error}") from error


def _has_usable_keys(asked: ExportOptions) -> bool:
    """Whether the field `key` has a text of its own for each sample, that can be one's key."""
    field = asked.fields.get(_KEY)
    if not isinstance(field, Text) or field.optional:
        return False
    hashes: list[int] = []
    for batch in SampleReader(asked.dataset, {_KEY: field}, skips=True):
        for key in batch.records[_KEY]:
            if safe_path(key) != key or "." in key.rpartition("/")[2]:
                return False
            hashes.append(hash_bytes(key.encode()))
    return len(np.unique(np.array(hashes, np.uint64))) == len(hashes)
