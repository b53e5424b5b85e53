"""Writers of datasets: new shards for a new dataset, or for the next generation of one."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import os
import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Self

from shardio._base.classes import Publishing
from shardio.dataset.generation import ColumnGroup, Generation
from shardio.dataset.manifest import (
    check_classes,
    check_folder_name,
    publish,
    publish_next,
    recover,
    refuse_existing,
)
from shardio.dataset.transaction import StagingFolder, link_staged, remove_leftovers
from shardio.errors import ClosedError, DatasetConflict, InvalidArgument
from shardio.format.schema import Schema
from shardio.shard.writer import ShardSummary, ShardWriter, check_schema
from shardio.storage import fs

SHARD_BYTES: Final = 256 << 20
"""The default size of a shard."""


class GenerationWriter:
    """Writes the shards of one generation. Owns a hidden folder within the `with` block.

    The shards are in the hidden folder until all are written. Then the shards get their final
    names, and a generation that names them is published. Existing files do not change.

    Args:
        folder: the folder of the dataset; for a new dataset, missing or empty.
        schema: the schema of the samples.
        shard_bytes: the target size of a shard.
        previous: the generation that the new one follows; None for a new dataset.

    Raises:
        DatasetExists: the folder of a new dataset is not empty.
        DatasetCorrupt: the list of inputs of `previous` is damaged.
        DatasetConflict: (from `publish`) another writer published first.
        OSError: writing failed; nothing is published.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        schema: Schema,
        *,
        shard_bytes: int = SHARD_BYTES,
        previous: Generation | None = None,
    ) -> None:
        check_shard_bytes(shard_bytes)
        check_folder_name(folder)
        if previous is not None:
            previous.check_inputs()
        self.root, self.schema = Path(os.path.abspath(folder)), schema
        self._shard_bytes, self._previous = shard_bytes, previous
        self._parts: list[ShardSummary] = []
        self._staged: set[str] = set()
        self._shard: ShardWriter | None = None
        self._made_root, self._n_names = False, 0

    def __enter__(self) -> Self:
        if self._previous is None:
            if self.root.is_dir():
                remove_leftovers(self.root)
            refuse_existing(self.root)
            self._made_root = not self.root.exists()
            fs.make_folder(self.root)
        else:
            recover(self.root)
        self._staging = StagingFolder(self.root)
        self.staging = self._staging.path
        return self

    def append(self, sample: Mapping[str, Any]) -> None:
        """Add a sample to the shard that is being written."""
        if self._shard is None:
            self._shard = ShardWriter(self.staging / self._next_name(), self.schema)
        self._shard.append(sample)
        if self._shard.n_bytes >= self._shard_bytes:
            self.cut()

    def cut(self) -> None:
        """Finish the shard that is being written."""
        if self._shard is not None:
            shard, self._shard = self._shard, None
            self._add_staged(shard.close())

    def adopt(self, path: str | os.PathLike[str], summary: ShardSummary) -> None:
        """Add a byte-for-byte copy of a finished shard from another folder."""
        self.cut()
        name = self._next_name()
        fs.copy(path, self.staging / name)
        fs.sync_path(self.staging / name)
        self._add_staged(dataclasses.replace(summary, name=name))

    def take(self, path: str, summary: ShardSummary) -> None:
        """Move a finished shard into the hidden folder."""
        self.cut()
        name = self._next_name()
        fs.rename(path, self.staging / name)
        self._add_staged(dataclasses.replace(summary, name=name))

    def keep(self, summary: ShardSummary) -> None:
        """Add a shard of the previous generation, unchanged."""
        self.cut()
        self._parts.append(summary)

    def follow(self, generation: Generation) -> None:
        """Use `generation` as the previous one; its shards precede the shards written so far."""
        self.cut()
        self._previous = generation
        self._parts[:0] = generation.shards

    def _next_name(self) -> str:
        return f"{len(self._parts):06d}.shard"

    def _add_staged(self, summary: ShardSummary) -> None:
        self._staged.add(summary.name)
        self._parts.append(summary)

    def publish(self, **details: Any) -> Generation:
        """Give the shards their final names, and publish a generation with them and `details`.

        If no shard was written, an empty shard is added to store the schema.
        """
        self.cut()
        if not self._parts:
            with ShardWriter(self.staging / self._next_name(), self.schema) as writer:
                self._add_staged(writer.close())
        shards = self._placed()
        if self._previous is None:
            return publish(self.root, schema=self.schema, shards=shards, **details)
        return publish_next(self.root, self._previous, shards=shards, **details)

    def publish_columns(self, **details: Any) -> Generation:
        """Publish the shards as a column group of the previous generation."""
        if self._previous is None:
            raise AssertionError("a new dataset has no shards to add columns to")
        groups = (*self._previous.column_groups, ColumnGroup(self.schema, self._placed()))
        return publish_next(self.root, self._previous, column_groups=groups, **details)

    @property
    def n_samples(self) -> int:
        """The number of samples in all shards so far."""
        n_in_shard = 0 if self._shard is None else self._shard.n_samples
        return sum(part.n_samples for part in self._parts) + n_in_shard

    @property
    def n_written(self) -> int:
        """The number of shards that were written."""
        return len(self._staged)

    def explain(self, error: OSError) -> None:
        """Make an error in the hidden folder name the dataset; add a hint if the disk is full."""
        if not os.fsdecode(error.filename or "").startswith(str(self.staging)):
            return
        error.filename = str(self.root)
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            error.strerror = (
                f"{error.strerror}; nothing was published: free some space and start again, or "
                "choose a folder on another disk"
            )
            error.args = (error.errno, error.strerror)  # `args` is what pickle stores

    def _placed(self) -> tuple[ShardSummary, ...]:
        """Give all staged shards their final names, durably; return all shards with their names."""
        shards = tuple(self._place(part) for part in self._parts)
        fs.sync_path(self.root)
        return shards

    def _place(self, part: ShardSummary) -> ShardSummary:
        """Give a staged shard its final name."""
        if part.name not in self._staged:
            return part
        while True:
            name = self._final_name()
            self._n_names += 1
            try:
                link_staged(self.staging / part.name, self.root / name)
            except DatasetConflict:
                if self._previous is None:
                    raise
                continue  # a killed writer left this file, or another writer is about to publish it
            return dataclasses.replace(part, name=name)

    def _final_name(self) -> str:
        if self._previous is None:
            return f"000000-{self._n_names:03d}.shard"
        return f"g{self._previous.number + 1:06d}-{self._n_names:03d}.shard"

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: types.TracebackType | None,
    ) -> None:
        if isinstance(error, OSError):
            self.explain(error)
        if self._shard is not None:
            self._shard.abort()
        with contextlib.suppress(OSError):  # the next operation removes the folder
            self._staging.remove(error)
        if self._made_root:
            with contextlib.suppress(OSError):
                fs.remove_folder(self.root)  # has no effect unless the folder is empty


def check_shard_bytes(shard_bytes: object) -> None:
    """Raise InvalidArgument unless the value is a positive integer."""
    if type(shard_bytes) is not int or shard_bytes < 1:
        raise InvalidArgument(f"shard_bytes must be an integer from 1 up; found {shard_bytes!r}")


class DatasetWriter(Publishing):
    """Writes samples to a new dataset, shard after shard; `close()` publishes it.

    Until then the shards are in a hidden folder. If the process is killed, the next writer to the
    same path removes the hidden folder.

    Args:
        path: a folder that is missing or empty.
        schema: the schema of the samples.
        shard_bytes: the target size of a shard.
        classes: the class names; a label is an index into them.

    Raises:
        DatasetExists: the folder is not empty, or another writer uses it.
        DatasetConflict: (from `close`) another writer used this folder.
        SchemaError: (from `append`) the sample is invalid; the writer stays usable.
        OSError: writing failed; nothing is published.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        schema: Schema,
        *,
        shard_bytes: int = SHARD_BYTES,
        classes: Sequence[str] = (),
    ) -> None:
        self.path, self.schema = os.fspath(path), check_schema(schema)
        self._classes = check_classes(classes)
        output = GenerationWriter(path, schema, shard_bytes=shard_bytes)
        self._closing = contextlib.ExitStack()
        self._output = self._closing.enter_context(output)
        self._is_open = True

    def __repr__(self) -> str:
        return f"DatasetWriter({self.path!r}: {self._output.n_samples} samples so far)"

    def append(self, sample: Mapping[str, Any]) -> None:
        """Add a sample: a dict with a value for every field of the schema, and no other keys."""
        self._check_open()
        try:
            self._output.append(sample)
        except OSError as error:
            self._output.explain(error)
            raise

    def close(self) -> Generation:
        """Finish the last shard and publish the dataset."""
        self._check_open()
        self._is_open = False
        with self._closing:
            return self._output.publish(classes=self._classes)

    def abort(self) -> None:
        """Remove everything written; nothing is published. Idempotent."""
        self._is_open = False
        self._closing.close()

    def _check_open(self) -> None:
        if not self._is_open:
            raise ClosedError(f"{self.path}: the writer is closed")

    @property
    def _is_closed(self) -> bool:
        return not self._is_open
