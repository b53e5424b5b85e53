"""Write samples to a new dataset, shard after shard."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from shardio._base.classes import Publishing
from shardio.dataset.generation import Generation
from shardio.dataset.manifest import (
    check_classes,
    check_folder_name,
    holds_dataset,
    publish,
    refuse_existing,
)
from shardio.errors import ClosedError, DatasetConflict, InvalidArgument
from shardio.format.schema import Schema
from shardio.shard.writer import ShardSummary, ShardWriter, check_schema
from shardio.storage.fs import make_folder, remove_folder, unlink


class DatasetWriter(Publishing):
    """Writes samples to a new dataset, shard after shard; `close()` publishes it.

    Args:
        path: a folder that is missing or empty.
        schema: the schema of the samples.
        shard_bytes: the target size of a shard.
        classes: the class names; a label is an index into them.

    Raises:
        DatasetExists: the folder is not empty.
        DatasetConflict: (also from `append`) another writer uses this folder.
        SchemaError: (from `append`) the sample is invalid; the writer stays usable.
        OSError: writing failed; nothing is published.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        schema: Schema,
        *,
        shard_bytes: int = 256 << 20,
        classes: Sequence[str] = (),
    ) -> None:
        if type(shard_bytes) is not int or shard_bytes < 1:
            raise InvalidArgument(f"shard_bytes must be an integer from 1 up; found {shard_bytes}")
        check_folder_name(path)
        self.path = os.fspath(path)
        self._root = os.path.abspath(path)
        self.schema = check_schema(schema)
        self._shard_bytes, self._classes = shard_bytes, check_classes(classes)
        refuse_existing(path)
        self._made_folder = not os.path.exists(path)
        make_folder(path)
        self._done: list[ShardSummary] = []
        self._shard: ShardWriter | None = None
        self._closed = False

    def __repr__(self) -> str:
        n_samples = sum(one.n_samples for one in self._done)
        n_samples += 0 if self._shard is None else self._shard.n_samples
        return f"DatasetWriter({self.path!r}: {n_samples} samples so far)"

    def append(self, sample: Mapping[str, Any]) -> None:
        """Add a sample: a dict with a value for every field of the schema, and no other keys."""
        if self._closed:
            raise ClosedError(f"{self.path}: the writer is closed")
        if self._shard is None:
            self._shard = self._next()
        self._shard.append(sample)
        if self._shard.n_bytes >= self._shard_bytes:
            self._finish(self._shard)
            self._shard = None

    def _next(self) -> ShardWriter:
        name = f"000000-{len(self._done):03d}.shard"
        try:
            return ShardWriter(os.path.join(self._root, name), self.schema)
        except FileExistsError as error:
            raise self._conflict(error) from error

    def _finish(self, shard: ShardWriter) -> None:
        try:
            self._done.append(shard.close())
        except FileExistsError as error:
            raise self._conflict(error) from error

    def _conflict(self, error: FileExistsError) -> DatasetConflict:
        return DatasetConflict(f"another writer uses this folder: {error}")

    def close(self) -> Generation:
        """Finish the last shard and publish the dataset."""
        if self._closed:
            raise ClosedError(f"{self.path}: the writer is closed")
        try:
            if self._shard is None and not self._done:
                self._shard = self._next()  # an empty dataset has one empty shard, with its schema
            if self._shard is not None:
                self._finish(self._shard)
                self._shard = None
            found = publish(
                self._root, schema=self.schema, shards=self._done, classes=self._classes
            )
        except BaseException:
            if not holds_dataset(self._root):
                self.abort()
            raise
        finally:
            self._closed = True
        return found

    def abort(self) -> None:
        """Remove everything written; nothing is published. Idempotent."""
        if self._closed:
            return
        self._closed = True
        if self._shard is not None:
            self._shard.abort()
        for summary in self._done:
            unlink(os.path.join(self._root, summary.name))
        if self._made_folder:
            remove_folder(self._root)

    @property
    def _is_closed(self) -> bool:
        return self._closed
