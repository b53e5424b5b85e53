"""Write the shards of a new dataset, or new shards for an existing dataset, and publish them."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Self

from shardio._base.callers import expand_home, refuses
from shardio.dataset.external_lists import ShardList
from shardio.dataset.generation import ColumnGroup, Generation
from shardio.dataset.manifest import (
    check_classes,
    check_folder_name,
    publish,
    publish_next,
    recover,
    refuse_existing,
    refuse_nested,
)
from shardio.dataset.transaction import (
    StagingFolder,
    explain_error,
    id_of,
    link_staged,
    remove_leftovers,
)
from shardio.errors import (
    ClosedError,
    DatasetConflict,
    InvalidArgument,
    MediaError,
    SchemaError,
    ShardChanged,
)
from shardio.format.schema import Schema
from shardio.shard.writer import (
    APPEND_ADVICE,
    SampleWriter,
    ShardSummary,
    ShardWriter,
    check_schema,
)
from shardio.storage import fs

SHARD_BYTES: Final = 256 << 20
"""The default target size of a shard in bytes."""


class GenerationWriter:
    """A writer of the shards of one generation, which is one published state of a dataset.

    Until the end of the `with` block, the writer owns a hidden staging folder with the new shards.
    `publish` gives them their final names and publishes the generation. Existing files stay. If
    `previous` is given, the new generation follows it; otherwise the folder must be missing or
    empty. Errors name `shown_path` as the dataset, by default `folder`.

    Raises:
        DatasetExists: the folder of a new dataset is not empty.
        DatasetCorrupt: the previous generation's list of input files is damaged.
        DatasetConflict: (from `publish`) another writer has published a generation since `previous`
            was read, or has used the folder of the new dataset.
        UnsupportedEnvironment: the file system has no locks.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        schema: Schema,
        *,
        shard_bytes: int = SHARD_BYTES,
        previous: Generation | None = None,
        shown_path: str | os.PathLike[str] | None = None,
    ) -> None:
        check_shard_bytes(shard_bytes)
        check_folder_name(folder)
        if previous is not None:
            previous.check_inputs()
        self._given, self.root, self.schema = folder, Path(os.path.abspath(folder)), schema
        self._shard_bytes, self._previous = shard_bytes, previous
        self._parts: list[ShardSummary] = []
        self._staged: set[str] = set()
        self._shard: ShardWriter | None = None
        self._shown_path = os.fspath(folder if shown_path is None else shown_path)
        self._created_root, self._n_names = False, 0

    def __enter__(self) -> Self:
        if self._previous is None:
            if self.root.is_dir():
                remove_leftovers(self.root)
            refuse_existing(self._given)
            self._created_root = not self.root.exists()
            fs.make_folder(self.root)
        else:
            recover(self.root)
        self._staging = StagingFolder(self.root)
        self.staging = self._staging.path
        return self

    def append(self, sample: Mapping[str, Any]) -> None:
        """Add a sample to the current shard. Finish the shard if it has reached its target size."""
        if self._shard is None:
            self._shard = ShardWriter(self.staging / self._next_name(), self.schema)
        try:
            self._shard.append(sample)
        except (SchemaError, MediaError) as error:  # the error names the staged shard
            place = f"{self._shown_path}, sample {self.n_samples}"
            raise type(error)(f"{place}: {error.__cause__}") from error
        if self._shard.n_bytes >= self._shard_bytes:
            self.finish_shard()

    def finish_shard(self) -> None:
        """Finish the current shard, if there is one; the next sample starts a new shard."""
        if self._shard is not None:
            shard, self._shard = self._shard, None
            self._add_staged(shard.close())

    def add_copy(self, path: str | os.PathLike[str], summary: ShardSummary) -> None:
        """Copy the finished shard at `path` byte for byte, and add the copy.

        Raises ShardChanged if the file is not the shard with this summary: it was replaced or cut.
        """
        self.finish_shard()
        name = self._next_name()
        copy = self.staging / name
        fs.copy(path, copy)
        found: Any = os.path.getsize(copy)
        expected: Any = summary.n_bytes
        if found == expected:
            found, expected = id_of(copy), summary.id
        if found != expected:
            what, shown = "the shard was changed after it was verified", os.fspath(path)
            facts: Any = {"expected": expected, "found": found}
            raise ShardChanged(what, code="replaced", path=shown, **facts)
        fs.sync_path(copy)
        self._add_staged(dataclasses.replace(summary, name=name))

    def add_moved(self, path: str, summary: ShardSummary) -> None:
        """Move the finished shard at `path` into the staging folder, and add it."""
        self.finish_shard()
        name = self._next_name()
        fs.rename(path, self.staging / name)
        self._add_staged(dataclasses.replace(summary, name=name))

    def add_unchanged(self, summary: ShardSummary) -> None:
        """Add a shard of the previous generation. Its file stays as it is."""
        self.finish_shard()
        self._parts.append(summary)

    def set_previous(self, generation: Generation) -> None:
        """Use `generation` as the previous generation; insert its shards before all others."""
        self.finish_shard()
        self._previous = generation
        self._parts[:0] = generation.shards

    def _next_name(self) -> str:
        return f"{len(self._parts):06d}.shard"

    def _add_staged(self, summary: ShardSummary) -> None:
        self._staged.add(summary.name)
        self._parts.append(summary)

    def publish(self, **details: Any) -> Generation:
        """Give the new shards their final names, and publish a generation with all added shards.

        `details` are further attributes of the generation. If no shard was added, an empty shard is
        published, because the schema is stored in shards.
        """
        self.finish_shard()
        if not self._parts:
            with ShardWriter(self.staging / self._next_name(), self.schema) as writer:
                self._add_staged(writer.close())
        shards = self._link_shards()
        if self._previous is None:
            return publish(self.root, schema=self.schema, shards=shards, **details)
        return publish_next(self.root, self._previous, shards=shards, **details)

    def publish_columns(self, **details: Any) -> Generation:
        """Publish the previous generation with one more column, stored in the new shards."""
        if self._previous is None:
            raise AssertionError("a new dataset has no shards to add columns to")
        added = ColumnGroup(self.schema, ShardList.of(self._link_shards()))
        groups = (*self._previous.column_groups, added)
        return publish_next(self.root, self._previous, column_groups=groups, **details)

    @property
    def n_samples(self) -> int:
        """The number of samples in all shards added so far, including the current shard."""
        n_in_shard = 0 if self._shard is None else self._shard.n_samples
        return sum(part.n_samples for part in self._parts) + n_in_shard

    @property
    def n_written(self) -> int:
        """The number of new shards, without those that `add_unchanged` or `set_previous` added."""
        return len(self._staged)

    def explain_error(self, error: OSError) -> None:
        """Name the dataset in `error` instead of a staged file; if the disk is full, add a hint."""
        explain_error(error, self.staging, self._shown_path)

    def _link_shards(self) -> tuple[ShardSummary, ...]:
        shards = tuple(self._link_shard(part) for part in self._parts)
        fs.sync_path(self.root)
        return shards

    def _link_shard(self, part: ShardSummary) -> ShardSummary:
        if part.name not in self._staged:
            return part
        while True:
            prefix = f"g{self._previous.number + 1:06d}" if self._previous else "000000"
            name = f"{prefix}-{self._n_names:03d}.shard"
            self._n_names += 1
            try:
                link_staged(self.staging / part.name, self.root / name)
            except DatasetConflict:
                if self._previous is None:
                    raise
                # A file with this name exists: a killed writer has left the file, or another writer
                # is about to publish the file. Try the next name.
                continue
            return dataclasses.replace(part, name=name)

    def __exit__(self, kind: object, error: BaseException | None, *_: object) -> None:
        if isinstance(error, OSError):
            self.explain_error(error)
        if self._shard is not None:
            self._shard.abort()
        with contextlib.suppress(OSError):  # if this fails, the next operation removes the folder
            self._staging.remove(error)
        if self._created_root:
            with contextlib.suppress(OSError):
                fs.remove_folder(self.root)  # has no effect unless the folder is empty


def check_shard_bytes(shard_bytes: object) -> None:
    """Raise InvalidArgument unless `shard_bytes` is a positive integer."""
    if type(shard_bytes) is not int or shard_bytes < 1:
        raise InvalidArgument(f"shard_bytes must be an integer from 1 up; found {shard_bytes!r}")


_CONVERT: Final = "write shardio.convert(samples, path, schema=schema, {}=True)"
_ADVICE: Final = {
    "columns": "write schema=shardio.Schema({…})",
    "compression": "write it as codec= of a field",
    **dict.fromkeys(("append", "mode"), _CONVERT.format("append")),
    **dict.fromkeys(("exist_ok", "force", "overwrite", "replace"), _CONVERT.format("overwrite")),
}
"""Options of other libraries' writers, and what to write instead."""


@refuses(_ADVICE)
class DatasetWriter(SampleWriter):
    """A writer of a new dataset. It writes shard after shard, and `close` publishes the dataset.

    Before `close`, the shards are in a hidden folder in the folder of the dataset. If the process
    is killed, the next writer to the same path removes the hidden folder.

    Args:
        path: the folder of the dataset, which must be missing or empty.
        schema: the schema of the samples.
        shard_bytes: the target size of a shard in bytes.
        classes: the names of the classes. A label is an index into this sequence.

    Raises:
        DatasetExists: the folder is not empty, or another writer is using the folder.
        DatasetConflict: (from `close`) another writer has used the folder in the meantime.
        SchemaError: (from `append`) the sample is invalid. More samples can still be appended.
        UnsupportedEnvironment: the file system has no locks.
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
        self.path, self.schema = os.fspath(path := expand_home(path)), check_schema(schema)
        self._classes = check_classes(classes)
        refuse_nested(path)
        output = GenerationWriter(path, schema, shard_bytes=shard_bytes)
        self._closing = contextlib.ExitStack()
        self._output = self._closing.enter_context(output)
        self._is_open = True

    def __repr__(self) -> str:
        end = ", closed" if self._is_closed else " so far"
        return f"DatasetWriter({self.path!r}: {self._output.n_samples} samples{end})"

    @refuses(APPEND_ADVICE, "writer.append")
    def append(self, sample: Mapping[str, Any]) -> None:
        """Add a sample: a dict with a value for every field of the schema, and no other keys."""
        self._check_open()
        try:
            self._output.append(sample)
        except OSError as error:
            self._output.explain_error(error)
            raise

    def close(self) -> Generation:
        """Finish the last shard and publish the dataset."""
        self._check_open()
        self._is_open = False
        with self._closing:
            return self._output.publish(classes=self._classes)

    def abort(self) -> None:
        """Remove all files that were written. Nothing is published. Idempotent."""
        self._is_open = False
        self._closing.close()

    def _check_open(self) -> None:
        if not self._is_open:
            raise ClosedError(
                f"{self.path}: the writer is closed; to add samples to the finished dataset, write "
                "shardio.convert(samples, path, append=True)"
            )

    @property
    def _is_closed(self) -> bool:
        return not self._is_open
