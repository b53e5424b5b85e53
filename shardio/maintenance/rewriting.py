"""Write the shards of a new dataset, or of the next generation of a dataset.

Shards are staged in a hidden folder until all are written; then they are renamed, and a generation
that names them is published. Existing files are not touched.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import types
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self

from shardio.dataset.generation import ColumnGroup, Generation
from shardio.dataset.manifest import (
    check_folder_name,
    publish,
    publish_next,
    refuse_existing,
)
from shardio.dataset.transaction import StagingFolder, link_staged, sweep
from shardio.errors import DatasetConflict, InvalidArgument
from shardio.format.schema import Schema
from shardio.shard.writer import ShardSummary, ShardWriter
from shardio.storage import fs

SHARD_BYTES: Final = 256 << 20
"""The default target size of a rewritten shard."""


@dataclass(frozen=True, slots=True)
class MaintenanceReport:
    """The generation that an operation published, or the current one if nothing had to be done.

    `n_rewritten` counts the new shards, `n_removed` the old ones that were removed. `n_bytes`
    includes the shards of column groups, `n_shards` does not.
    """

    dataset: Path
    generation: int
    n_samples: int
    n_shards: int
    n_bytes: int
    n_rewritten: int
    n_removed: int = 0

    @classmethod
    def of(
        cls,
        folder: str | os.PathLike[str],
        generation: Generation,
        n_rewritten: int,
        n_removed: int = 0,
    ) -> Self:
        """Return the report on a generation of the dataset in `folder`."""
        return cls(
            Path(folder),
            generation.number,
            generation.n_samples,
            len(generation.shards),
            sum(shard.n_bytes for shard, _ in generation.files),
            n_rewritten,
            n_removed,
        )

    def as_json(self) -> dict[str, Any]:
        """Return a JSON-serializable dict."""
        return {**dataclasses.asdict(self), "dataset": str(self.dataset)}


class Rewriting:
    """A writer of the shards of one generation. It owns a hidden folder for the length of a `with`.

    Published shards stay.

    Args:
        folder: the folder of the dataset; missing or empty for a new dataset.
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
        self._folder = folder
        self.root, self.schema = Path(os.path.abspath(folder)), schema
        self._shard_bytes, self._previous = shard_bytes, previous
        self._parts: list[ShardSummary] = []
        self._staged: set[str] = set()
        self._shard: ShardWriter | None = None
        self._made_root, self._n_names = False, 0

    def __enter__(self) -> Self:
        if self._previous is None:
            if self.root.is_dir():
                sweep(self.root)
            refuse_existing(self.root)
            self._made_root = not self.root.exists()
            fs.make_folder(self.root)
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

    def add_shard(self, samples: Iterable[Mapping[str, Any]]) -> None:
        """Add a shard of exactly these samples, whatever its size."""
        self.cut()
        with ShardWriter(self.staging / self._next_name(), self.schema) as writer:
            for sample in samples:
                writer.append(sample)
            self._enter_staged(writer.close())

    def cut(self) -> None:
        """Finish the shard that is being written."""
        if self._shard is not None:
            shard, self._shard = self._shard, None
            self._enter_staged(shard.close())

    def adopt(self, path: str | os.PathLike[str], summary: ShardSummary) -> None:
        """Add a byte-for-byte copy of a finished shard from another folder."""
        self.cut()
        name = self._next_name()
        fs.copy(path, self.staging / name)
        fs.sync_path(self.staging / name)
        self._enter_staged(dataclasses.replace(summary, name=name))

    def take(self, path: str, summary: ShardSummary) -> None:
        """Move a finished shard into the hidden folder."""
        self.cut()
        name = self._next_name()
        fs.rename(path, self.staging / name)
        self._enter_staged(dataclasses.replace(summary, name=name))

    def keep(self, summary: ShardSummary) -> None:
        """Add a shard of the previous generation, unchanged."""
        self.cut()
        self._parts.append(summary)

    def come_behind(self, generation: Generation) -> None:
        """Follow this generation: its shards come first, then the shards written so far."""
        self.cut()
        self._previous = generation
        self._parts[:0] = generation.shards

    def _next_name(self) -> str:
        return f"{len(self._parts):06d}.shard"

    def _enter_staged(self, summary: ShardSummary) -> None:
        self._staged.add(summary.name)
        self._parts.append(summary)

    def publish(self, **details: Any) -> Generation:
        """Name the shards, and publish a generation with them and `details`.

        If no shard was written, an empty one is added to hold the schema.
        """
        self.cut()
        if not self._parts:
            self.add_shard([])
        shards = self._placed()
        if self._previous is None:
            return publish(self.root, schema=self.schema, shards=shards, **details)
        return publish_next(self.root, self._previous, shards=shards, **details)

    def report_beside(self, **details: Any) -> MaintenanceReport:
        """Publish the shards as a column group of the previous generation; return the report."""
        if self._previous is None:
            raise AssertionError("a new dataset has no shards to add columns to")
        groups = (*self._previous.column_groups, ColumnGroup(self.schema, self._placed()))
        found = publish_next(self.root, self._previous, column_groups=groups, **details)
        return MaintenanceReport.of(self._folder, found, len(self._staged))

    def _placed(self) -> tuple[ShardSummary, ...]:
        """Give all staged shards their final names, durably; return all shards with their names."""
        shards = tuple(self._place(part) for part in self._parts)
        fs.sync_folder(str(self.root))
        return shards

    def report(self, **details: Any) -> MaintenanceReport:
        """Publish, and return the report."""
        return MaintenanceReport.of(self._folder, self.publish(**details), len(self._staged))

    def _place(self, part: ShardSummary) -> ShardSummary:
        """Rename a staged shard to its final name."""
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
                continue  # left by a killed writer, or written by one about to publish
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
        if self._shard is not None:
            self._shard.abort()
        with contextlib.suppress(OSError):  # the next operation removes the folder
            self._staging.remove(error)
        if self._made_root:
            with contextlib.suppress(OSError):
                fs.remove_folder(self.root)  # unless the dataset is in it


def check_shard_bytes(shard_bytes: object) -> None:
    """Raise InvalidArgument unless the value is a positive integer."""
    if type(shard_bytes) is not int or shard_bytes < 1:
        raise InvalidArgument(f"shard_bytes must be an integer from 1 up; found {shard_bytes!r}")
