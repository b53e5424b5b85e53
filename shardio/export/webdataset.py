"""Export a dataset as tar files in the format of WebDataset."""

from __future__ import annotations

import tarfile
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Final

import numpy as np

from shardio.errors import InvalidArgument, SchemaError
from shardio.export.formats import (
    Encode,
    ExportOptions,
    Prepare,
    SampleBatch,
    SampleReader,
    file_encoder,
    file_suffix,
    has_type_suffix,
    safe_path,
)
from shardio.format.checksum import hash_bytes
from shardio.format.schema import Schema
from shardio.format.types import Bytes, Field
from shardio.storage.fs import create, sync

_TAR_BLOCK_BYTES: Final = 512
_TAR_END_BYTES: Final = 2 * _TAR_BLOCK_BYTES
_TAR_RECORD_BYTES: Final = 20 * _TAR_BLOCK_BYTES  # the size of a tar is a multiple of this
_KEY_FIELD: Final = "key"


class WebDatasetExporter:
    """An exporter that writes the files 000000.tar, 000001.tar, ….

    A *member* of a tar has the name KEY.FIELD.SUFFIX, or KEY.FIELD if FIELD ends in a suffix. If
    the texts in the field `key` are all valid and distinct, they are the KEYs. Otherwise, the
    KEYs are the sample indices.
    """

    schema_spec = None  # not needed: the names and the .npy headers determine the types

    def __init__(self, options: ExportOptions) -> None:
        self._options = options
        self._has_keys = _has_usable_keys(options)
        self._encoders: dict[str, tuple[str, Encode]] = {}
        refused = {}
        for name, field in options.fields.items():
            if self._has_keys and name == _KEY_FIELD:
                continue
            if "/" in name:
                refused[name] = "name has a slash"
            elif (encode := file_encoder(name, field)) is not None:
                self._encoders[name] = "" if has_type_suffix(name, field) else name, encode
            else:
                refused[name] = "a tar member cannot hold a list of arrays"
        options.refuse(refused)
        _check_names(options, {name: options.fields[name] for name in self._encoders})
        self.prepare: Prepare = options.muxers
        self._folder = self._path = Path()
        self._file: IO[bytes] | None = None
        self._n_files = self._n_bytes = 0

    def open(self, folder: Path) -> None:
        """Start writing the first tar in `folder`."""
        self._folder = folder
        self._file = self._open_next()

    def write(self, batch: SampleBatch) -> None:
        """Append a batch. Before each sample, start a new tar if the last exceeds `shard_bytes`."""
        for number, sample in zip(batch.numbers, batch.samples(), strict=True):
            if self._file is None or self._n_bytes > self._options.shard_bytes:
                self.finish()
                self._file = self._open_next()
            key = sample[_KEY_FIELD] if self._has_keys else f"{number:09d}"
            is_empty = True
            for name, (stem, encode) in self._encoders.items():
                value = sample[name]
                if value is None and self._options.fields[name].optional:
                    continue
                suffix, data = encode(value)
                self._write_member(self._file, f"{key}.{stem + suffix if stem else name}", data)
                is_empty = False
            if is_empty:
                raise InvalidArgument(
                    f"{self._options.dataset.current_path}: sample {number} has none of the "
                    "fields, and a tar cannot hold a sample without members: export a field that "
                    "all samples have (--fields)"
                )

    def finish(self) -> None:
        """Complete the current tar, and sync it to the disk."""
        if self._file is not None:
            n_zeros = _TAR_END_BYTES + -(self._n_bytes + _TAR_END_BYTES) % _TAR_RECORD_BYTES
            self._file.write(bytes(n_zeros))
            sync(self._file, self._path)
            self.close()

    def close(self) -> None:
        """Close the current tar."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _open_next(self) -> IO[bytes]:
        self._path = self._folder / f"{self._n_files:06d}.tar"
        self._n_files += 1
        self._n_bytes = 0
        return create(self._path)

    def _write_member(self, file: IO[bytes], name: str, data: bytes) -> None:
        member = tarfile.TarInfo(name)
        member.size = len(data)
        head, fill = member.tobuf(tarfile.PAX_FORMAT, "utf-8"), bytes(-len(data) % _TAR_BLOCK_BYTES)
        for part in (head, data, fill):
            file.write(part)
        self._n_bytes += len(head) + len(data) + len(fill)


def _check_names(options: ExportOptions, fields: Mapping[str, Field]) -> None:
    """Raise InvalidArgument unless the members' names are distinct and valid as field names."""
    if not fields:
        raise InvalidArgument(
            f"{options.dataset.current_path}: select a field besides {_KEY_FIELD!r} for the tar"
        )
    found: set[str] = set()
    for name, field in fields.items():
        # ".any" stands for a suffix that depends on the content.
        suffix = "" if has_type_suffix(name, field) else file_suffix(name, field) or ".any"
        member_name = f"{name}{suffix}".lower()
        if member_name in found:
            options.refuse({name: f"another field is also named {member_name!r} in a tar"})
        found.add(member_name)
    try:
        Schema(dict.fromkeys(found, Bytes()))
    except SchemaError as error:
        raise InvalidArgument(
            f"{options.dataset.current_path}: invalid member names in a tar: {error}"
        ) from error


def _has_usable_keys(options: ExportOptions) -> bool:
    field = options.fields.get(_KEY_FIELD)
    if field is None or not field.is_utf8 or field.optional:
        return False
    hashes: list[int] = []
    for batch in SampleReader(options.dataset, {_KEY_FIELD: field}, skip_damaged=True):
        for key in batch.records[_KEY_FIELD]:
            if safe_path(key) != key or "." in key.rpartition("/")[2]:
                return False
            hashes.append(hash_bytes(key.encode()))
    return len(np.unique(np.array(hashes, np.uint64))) == len(hashes)
