"""Open the files of a dataset on demand, and record which parts of the files are verified.

A *unit* is a range of bytes of a file with one hash and one *mark*: a byte that is 1 if the unit
has been verified. One table contains the marks of all files, one file after another. The table
outlives the readers, so that a unit is not verified again when its file is reopened.

The number of units of a file is known only once the file has been opened. If the files cannot all
be open at once, an upper bound on this number determines the room for a file in the table.
"""

from __future__ import annotations

import bisect
import itertools
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from shardio._base.classes import undo_on_error
from shardio.dataset.external_lists import ShardList
from shardio.dataset.open_files import OpenFiles, ShardStorage
from shardio.errors import DatasetCorrupt, ShardCorrupt
from shardio.format.checksum import distinct
from shardio.format.schema import Schema
from shardio.format.sections import max_units
from shardio.shard.reader import ShardReader
from shardio.shard.verification import Rows, Verify
from shardio.shard.writer import ShardSummary
from shardio.storage.content import PreadFile
from shardio.storage.file_access import Access, lazy_zeros, prefetch_ends

Marks = npt.NDArray[np.uint8]


class FileGroup(NamedTuple):
    """The shards (`name` is ""), or the files of the added field `name`, one for each shard."""

    name: str
    schema: Schema
    shards: ShardList


def _find_group(groups: Sequence[FileGroup], name: str | None) -> FileGroup:
    """Return the group that stores the field `name`; for None, the group of the shards."""
    return next((group for group in groups if group.name == name), groups[0])


class SourceFiles(NamedTuple):
    """The files of one dataset, and their storage. `groups` begin with the group of the shards."""

    storage: ShardStorage
    groups: Sequence[FileGroup]

    def groups_with(self, names: Iterable[str]) -> list[FileGroup]:
        """Return the groups that store the fields `names`, each group once."""
        groups = [_find_group(self.groups, name) for name in names]
        return list({group.name: group for group in groups}.values())


class DatasetFiles:
    """The files of a dataset or a mixture. Owns the open files and the storages until `close`.

    Files have indices: first all shards, then all files of the first added field, and so on. Not
    thread-safe.

    Args:
        sources: the files of the dataset; for a mixture, the files of each dataset in it.
        groups: the groups of the dataset. In a mixture, each group contains the files of all
            sources, one source after another, and only the fields that all sources have in common
            are in the schemas.
    """

    def __init__(
        self,
        sources: Sequence[SourceFiles],
        groups: Sequence[FileGroup],
        *,
        verify: Verify,
        access: Access,
        path: str,
    ) -> None:
        self.sources: Final = tuple(sources)
        self._groups, self.n_shards, self._verify = groups, len(groups[0].shards), verify
        self.access: Final = access
        lengths = [len(source.groups[0].shards) for source in sources]
        self._source_starts = [0, *itertools.accumulate(lengths[:-1])]
        """The index of each source's first shard among all shards."""
        self._numbers = range(self.n_shards)
        self._first_files = {g.name: k * self.n_shards for k, g in enumerate(groups) if g.name}
        limits = [
            s.storage.max_pinned(np.concatenate([g.shards.sizes for g in s.groups]))
            for s in sources
        ]
        self.open_files = OpenFiles(
            len(groups) * self.n_shards,
            self._open,
            max_pinned=min((most for most in limits if most is not None), default=None),
            n_maps=int(access == "mmap"),
            path=path,
        )
        self._marks: Marks | None = None
        self._mark_starts: Rows | None = None

    def first_file(self, name: str | None) -> int:
        """Return the index of the first shard's file with field `name`; the other files follow."""
        return self._first_files.get(name or "", 0)

    def reader(self, shard: int, name: str | None = None) -> ShardReader:
        """Return the reader of a shard or, with a `name`, of the file that stores this field."""
        return self.open_files.reader(self.first_file(name) + self._numbers[shard])

    def reader_if_open(self, shard: int, name: str | None = None) -> ShardReader | None:
        """Return the result of `reader` if the file is already open, otherwise None."""
        return self.open_files.reader_if_open(self.first_file(name) + self._numbers[shard])

    def sample(
        self, shard: int, row: int, names: Iterable[str], *, check_truncated: bool = True
    ) -> dict[str, Any]:
        """Return the fields `names` of the sample at `row` of a shard."""
        number, reader = self._numbers[shard], self.open_files.reader
        if not self._first_files:
            return reader(number).sample(row, names, check_truncated=check_truncated)
        sample = dict[str, Any]()
        for first_file, group in itertools.groupby(names, key=self.first_file):
            found = reader(first_file + number)
            sample |= found.sample(row, group, check_truncated=check_truncated)
        return sample

    def _locate(self, shard: int) -> tuple[SourceFiles, int]:
        """Return the source of a shard, and the index of the shard within this source."""
        shard = self._numbers[shard]
        source = bisect.bisect(self._source_starts, shard) - 1
        return self.sources[source], shard - self._source_starts[source]

    def open_metadata(self, shard: int, name: str) -> ShardReader:
        """Open the file that stores the field `name` for a shard, without downloading the file.

        The caller owns the reader, which has its own marks. Thread-safe.
        """
        source, local = self._locate(shard)
        return self._open_from(source, local, name, source.storage.pin_if_cached)

    @property
    def storages(self) -> list[ShardStorage]:
        """The storage of each source."""
        return [source.storage for source in self.sources]

    def files_with_storage(
        self, shard: int, names: Iterable[str]
    ) -> list[tuple[ShardStorage, ShardSummary]]:
        """Return the files that store the fields `names` for one shard, each with its storage."""
        source, local = self._locate(shard)
        return [(source.storage, group.shards[local]) for group in source.groups_with(names)]

    def sizes_by_storage(self, names: Sequence[str]) -> list[tuple[ShardStorage, Rows]]:
        """Return the storage and file sizes of each group that stores one of the fields `names`."""
        return [
            (s.storage, group.shards.sizes) for s in self.sources for group in s.groups_with(names)
        ]

    def file_numbers(self, name: str) -> Rows:
        """Return for each shard a number that identifies the file with the field `name`.

        The numbers start at 0. Shards with equal numbers have the same file, because sources of a
        mixture may share files.
        """
        if len(self.sources) == 1:
            return np.arange(self.n_shards)
        known, names = dict[str, int](), self.summaries(name).names()
        return np.array([known.setdefault(each, len(known)) for each in names])

    def path(self, shard: int, name: str | None = None) -> str:
        """Return the path of a shard, or of its file with field `name`; the file may be missing."""
        source, local = self._locate(shard)
        return source.storage.path_of(_find_group(source.groups, name).shards[local])

    def files_of_shard(self, shard: int, name: str | None = None) -> list[tuple[ShardSummary, str]]:
        """Return the files of a shard (or only the file of field `name`), each with its path."""
        groups = self._groups if name is None else [_find_group(self._groups, name)]
        return [(group.shards[shard], self.path(shard, group.name)) for group in groups]

    def summaries(self, name: str | None = None) -> ShardList:
        """Return the files that store the field `name`, one per shard; by default the shards."""
        return _find_group(self._groups, name).shards

    def _open(self, file: int) -> ShardReader:
        number, shard = divmod(file, self.n_shards)
        source, local = self._locate(shard)
        reader = self._open_from(source, local, self._groups[number].name, source.storage.pin)
        if self.is_partial:
            # Use the table even in a single process: readers are closed to make room for others,
            # and the marks that a closed reader owned would be lost.
            self._make_marks()
        self._assign_marks(file, reader)
        return reader

    def _open_from(
        self, source: SourceFiles, shard: int, name: str, pin: Callable[[ShardSummary], str]
    ) -> ShardReader:
        group = _find_group(source.groups, name)
        summary = group.shards[shard]
        path = pin(summary)
        content = source.storage.remote_file(summary, path)
        if content is not None:  # `path` is a URL, and the file is not pinned
            return self._open_expected(path, summary, group.schema, content)
        with undo_on_error(source.storage.unpin, summary):
            reader = self._open_expected(path, summary, group.schema)
        # Unpin the file when `reader.content` is deleted. While user code holds a view of the
        # content, the content is not deleted and the file stays pinned.
        held = weakref.finalize(reader.content, source.storage.unpin, summary)
        held.atexit = False
        return reader

    def _open_expected(
        self, path: str, summary: ShardSummary, schema: Schema, content: PreadFile | None = None
    ) -> ShardReader:
        """Open a file; raise DatasetCorrupt if it is not the file that the manifest describes."""
        reader = ShardReader(path, verify=self._verify, access=self.access, content=content)
        found = (reader.id, len(reader), reader.header.file_size)
        expected = (summary.id, summary.n_samples, summary.n_bytes)
        if found != expected:
            raise DatasetCorrupt(
                f"{reader.path}: not the shard that the generation names: expected (id, samples, "
                f"bytes) {expected}, found {found}"
            )
        if reader.schema != schema:
            raise DatasetCorrupt(f"{reader.path}: its schema differs from the dataset's")
        return reader

    def check_lengths(self, shards: Rows) -> None:
        """Raise ShardChanged if an open file of one of `shards` was truncated after opening."""
        for shard in distinct(shards).tolist():
            for file in range(shard, len(self._groups) * self.n_shards, self.n_shards):
                if (reader := self.open_files.reader_if_open(file)) is not None:
                    reader.check_length()

    @property
    def is_partial(self) -> bool:
        """True if not all files can be open at the same time; see OpenFiles."""
        return self.open_files.max_open is not None

    @property
    def n_marks(self) -> int:
        """The size of the table of marks. Unless `is_partial`, computing it opens all files."""
        return int(self._compute_mark_starts()[-1])

    def _compute_mark_starts(self) -> Rows:
        """Return the position of each file's first mark in the table, and the size of the table."""
        if self._mark_starts is None:
            n_files = len(self._groups) * self.n_shards
            if self.is_partial:
                bounds = [
                    max_units(group.schema, group.shards.samples, group.shards.sizes)
                    for each in self._groups
                    for source in self.sources
                    for group in [_find_group(source.groups, each.name)]
                ]
                counts = np.concatenate(bounds)
            else:
                prefetch_ends([self.path(k, g.name) for g in self._groups for k in self._numbers])
                readers = map(self.open_files.reader, range(n_files))
                counts = np.array([reader.units.n_marks for reader in readers])
            self._mark_starts = np.concatenate([[0], np.cumsum(counts, dtype=np.int64)])
        return self._mark_starts

    def share_marks(self, marks: Marks) -> None:
        """Use `marks`, an array of `n_marks` bytes, as the table of marks."""
        self._compute_mark_starts()
        self._marks = marks
        for file, reader in self.open_files.items():
            self._assign_marks(file, reader)

    def _make_marks(self) -> Marks:
        marks = self._marks
        if marks is None:
            marks = lazy_zeros(self.n_marks)
            self.share_marks(marks)
        return marks

    def marks_of(self, name: str) -> tuple[Marks, Rows]:
        """Return the table of marks, and the position of the first mark of each shard's file."""
        first_file = self.first_file(name)
        starts = self._compute_mark_starts()[first_file : first_file + self.n_shards]
        return self._make_marks(), starts

    def _assign_marks(self, file: int, reader: ShardReader) -> None:
        if self._marks is not None:
            start, end = self._compute_mark_starts()[file : file + 2].tolist()
            n_marks = reader.units.n_marks
            if n_marks > end - start:
                raise ShardCorrupt(
                    "the shard has more hashes than its size permits",
                    code="section",
                    path=reader.path,
                    expected=end - start,
                    found=n_marks,
                )
            reader.units.marks = self._marks[start : start + n_marks]

    def close(self) -> None:
        """Close all files and storages. Data that was returned stays valid. Idempotent."""
        self.open_files.close()
        self._marks = None
        for storage in self.storages:
            storage.close()
