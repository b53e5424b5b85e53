"""Exports fields as arrays: a .npy of all samples for each."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Any, Final

import numpy as np

from shardio._base.file_names import local_name
from shardio.export.formats import Asked, Batch, Prepare, Samples, refuse
from shardio.export.value_files import distinct_names, dtype_out, numbers_out
from shardio.format.fields import Array, Field, Text
from shardio.storage.fs import create, sync

_MAGIC: Final = b"\x93NUMPY\x01\x00"
_MAX_CHARACTERS: Final = 1024
"""Every string of an array takes four bytes for each character of the longest one."""


class Arrays:
    """Writes NAME.npy for each field: arrays of one shape, and text as `<U`."""

    prepare: Prepare = {}
    words = None

    def __init__(self, asked: Asked) -> None:
        self._asked = asked
        self._files = ExitStack()
        self._n_written = 0
        refuse(asked, _shapeless(asked.fields))
        texts = {n: f for n, f in asked.fields.items() if isinstance(f, Text)}
        lengths, refused = _measured(asked, texts) if texts else ({}, {})
        for name, field in asked.fields.items():
            if field.optional and (lacking := _first_lacking(asked, name)) is not None:
                refused[name] = f"sample {lacking} lacks it, and a .npy has no empty place"
        refuse(asked, refused)
        self._kinds: dict[str, tuple[np.dtype[Any], tuple[int, ...]]] = {}
        for name, field in asked.fields.items():
            if isinstance(field, Array):
                self._kinds[name] = dtype_out(field), tuple(n or 0 for n in field.shape)
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

    def add(self, batch: Batch) -> None:
        """Write the rows of some samples."""
        for name, (dtype, shape) in self._kinds.items():
            field = self._asked.fields[name]
            values: Any = batch.columns[name] if name in batch.columns else batch.records[name]
            if isinstance(field, Array):
                values = numbers_out(field)(np.asarray(values, field.numpy))
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


def _shapeless(fields: Mapping[str, Field]) -> dict[str, str]:
    """Why some fields are not of one shape, by their names."""
    return {
        name: "its shape varies" if isinstance(field, Array) else "no array, nor text"
        for name, field in fields.items()
        if not (isinstance(field, Text) or (isinstance(field, Array) and field.is_fixed))
    }


def _measured(asked: Asked, texts: Mapping[str, Field]) -> tuple[dict[str, int], dict[str, str]]:
    """How many characters the longest text of each field has; and which cannot be stored, why."""
    longest, refused = dict.fromkeys(texts, 0), dict[str, str]()
    for batch in Samples(asked.dataset, texts, skips=True):
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


def _first_lacking(asked: Asked, name: str) -> int | None:
    """The first sample that lacks an optional field."""
    dataset, found = asked.dataset, []
    rows = dataset.rows.at(np.arange(len(dataset)))
    shards = dataset.locate(rows)
    for shard in np.unique(shards).tolist():
        here = np.flatnonzero(shards == shard)
        present = dataset.reader(shard, name).present(name, rows[here] - dataset.starts[shard])
        found += here[~present][:1].tolist()
    return min(found, default=None)
