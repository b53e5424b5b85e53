"""The files of a dataset: opened on demand, and each checksummed unit verified only once.

A unit is a range of bytes with one hash. One table for all files has a mark for each unit: a byte
that records whether the unit was verified. If not all files can be open at a time, the table is
laid out before any file is opened, from upper bounds of the numbers of units.
"""

from __future__ import annotations

import itertools
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from shardio.dataset.open_files import OpenFiles, ShardStorage, open_limit
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
    """Files with one schema, one per shard: the shards, or the files of the added field `name`.

    `sizes` are the sizes of the files in bytes.
    """

    name: str
    schema: Schema
    shards: Sequence[ShardSummary]
    sizes: Rows


class DatasetFiles(ABC):
    """The files of a dataset, by index. Owns the open files until `close`. Not thread-safe.

    The shards come first, then the files of added fields, group by group.

    Args:
        groups: the shards, then the files of each added field; all groups have equal length.
        max_pinned: the number of files that the storage can pin at a time; None if unlimited.
        access: the access method, "mmap" or "pread".
        path: the dataset, for messages.
    """

    def __init__(
        self, groups: Sequence[FileGroup], *, max_pinned: int | None, access: Access, path: str
    ) -> None:
        self._groups, self.n_shards = groups, len(groups[0].shards)
        self.access: Access = access
        """The access method of the files: "mmap" or "pread"."""
        n_files = len(groups) * self.n_shards
        self._numbers = range(self.n_shards)
        self._first_files = {g.name: k * self.n_shards for k, g in enumerate(groups) if g.name}
        max_open, n_maps = open_limit(n_files, max_pinned), int(access == "mmap")
        self.open_files = OpenFiles(
            n_files, self._open, max_open=max_open, n_maps=n_maps, path=path
        )
        """The open files, by index."""
        self._marks: Marks | None = None
        self._first_marks: Rows | None = None

    def first_file(self, name: str) -> int:
        """Return the index of shard 0's file with a field; the files of other shards follow."""
        return self._first_files.get(name, 0)

    def reader(self, shard: int, name: str | None = None) -> ShardReader:
        """Return the reader of a shard, or of its file with a field; see `Dataset.reader`."""
        first_file = 0 if name is None else self._first_files.get(name, 0)
        return self.open_files.reader(first_file + self._numbers[shard])

    def reader_if_open(self, shard: int, name: str | None = None) -> ShardReader | None:
        """Return the reader of a shard if it is open, else None."""
        first_file = 0 if name is None else self._first_files.get(name, 0)
        return self.open_files.reader_if_open(first_file + self._numbers[shard])

    def sample(
        self, shard: int, row: int, names: Iterable[str], *, check_truncated: bool = True
    ) -> dict[str, Any]:
        """Return some fields of one sample, given by shard and row in the shard."""
        if not self._first_files:
            return self.open_files.reader(self._numbers[shard]).sample(
                row, names, check_truncated=check_truncated
            )
        sample, number = dict[str, Any](), self._numbers[shard]
        for first_file, group in itertools.groupby(names, key=self.first_file):
            sample |= self.open_files.reader(first_file + number).sample(
                row, group, check_truncated=check_truncated
            )
        return sample

    @abstractmethod
    def open_file(self, shard: int, name: str) -> ShardReader:
        """Open the file of a shard that has this field; the caller owns the reader."""

    @abstractmethod
    def open_metadata(self, shard: int, name: str) -> ShardReader:
        """Open a file where it is stored, to read its index; the caller owns the reader.

        Thread-safe. The reader does not share marks with other readers.
        """

    @property
    @abstractmethod
    def storages(self) -> Sequence[ShardStorage]:
        """The storages of the files."""

    @abstractmethod
    def path_of(self, summary: ShardSummary) -> str:
        """Return the local path of a file; the file may not be downloaded yet."""

    @abstractmethod
    def files_with_storage(
        self, shard: int, names: Iterable[str]
    ) -> list[tuple[ShardStorage, ShardSummary]]:
        """Return the files with some fields of one shard, each with its storage."""

    @abstractmethod
    def sizes_by_storage(self, names: Iterable[str]) -> list[tuple[ShardStorage, Rows]]:
        """Return, for each storage, the sizes of the files with some fields."""

    @abstractmethod
    def file_numbers(self, name: str | None = None) -> Rows:
        """Return the index of each shard's file among the distinct files of a field's group."""

    @abstractmethod
    def mark_bounds(self, name: str) -> Rows:
        """Return an upper bound of the number of units of each file in the group `name`."""

    def files_of_shard(self, shard: int, name: str | None = None) -> list[tuple[ShardSummary, str]]:
        """Return the files of a shard, or the file with one of its fields, each with its path."""
        groups = self._groups if name is None else [self._group(name)]
        summaries = [group.shards[shard] for group in groups]
        return [(summary, self.path_of(summary)) for summary in summaries]

    def summaries(self, name: str | None = None) -> Sequence[ShardSummary]:
        """Return each shard's file with a given field; by default the shards themselves."""
        return self._group(name).shards

    def sizes(self, name: str | None = None) -> Rows:
        """Return the sizes in bytes of the files that `summaries` returns."""
        return self._group(name).sizes

    def _group(self, name: str | None) -> FileGroup:
        return next((group for group in self._groups if group.name == name), self._groups[0])

    def _groups_of(self, names: Iterable[str]) -> list[FileGroup]:
        """Return the distinct groups that have some of the fields."""
        return list({id(group.shards): group for group in map(self._group, names)}.values())

    def _open(self, file: int) -> ShardReader:
        number, shard = divmod(file, self.n_shards)
        reader = self.open_file(shard, self._groups[number].name)
        if self.is_partial:
            self._all_marks()  # use the common table: marks in it outlive an evicted reader
        self._mark(file, reader)
        return reader

    def check_lengths(self, shards: Rows) -> None:
        """Raise ShardChanged if an open file of these shards was truncated since it was mapped."""
        for shard in distinct(shards).tolist():
            for file in range(shard, len(self._groups) * self.n_shards, self.n_shards):
                if (reader := self.open_files.reader_if_open(file)) is not None:
                    reader.check_length()

    @property
    def is_partial(self) -> bool:
        """True if there are too many files to keep all of them open; see OpenFiles."""
        return self.open_files.max_open is not None

    @property
    def n_marks(self) -> int:
        """The number of units, which opens every file; an upper bound of it if `is_partial`."""
        return int(self._mark_starts()[-1])

    def _mark_starts(self) -> Rows:
        if self._first_marks is None:
            if self.is_partial:
                counts = np.concatenate([self.mark_bounds(group.name) for group in self._groups])
            else:
                summaries = [each for group in self._groups for each in group.shards]
                prefetch_ends([self.path_of(summary) for summary in summaries])
                files = range(len(summaries))
                counts = np.array([self.open_files.reader(file).units.n_marks for file in files])
            self._first_marks = np.concatenate([[0], np.cumsum(counts, dtype=np.int64)])
        return self._first_marks

    def share_marks(self, marks: Marks) -> None:
        """Store the marks of verified units in `marks`; opens files as `n_marks` does."""
        self._mark_starts()
        self._marks = marks
        for file, reader in self.open_files.items():
            self._mark(file, reader)

    def marks_of(self, name: str) -> tuple[Marks, Rows]:
        """Return the marks of all files, and the start of each shard's marks for one field."""
        marks, firsts = self._all_marks()
        first_file = self.first_file(name)
        return marks, firsts[first_file : first_file + self.n_shards]

    def _all_marks(self) -> tuple[Marks, Rows]:
        """Return the marks of all files, and the start of each file's marks."""
        first_file = self._mark_starts()
        if self._marks is None:
            self.share_marks(lazy_zeros(self.n_marks))
        return self._marks if self._marks is not None else lazy_zeros(0), first_file

    def _mark(self, file: int, reader: ShardReader) -> None:
        """Make a reader store its marks in the common table."""
        if self._marks is not None:
            first, end = self._mark_starts()[file : file + 2].tolist()
            n_marks = reader.units.n_marks
            if n_marks > end - first:
                raise ShardCorrupt(
                    "the shard has more hashes than its size permits",
                    code="section",
                    path=reader.path,
                    expected=end - first,
                    found=n_marks,
                )
            reader.units.marks = self._marks[first : first + n_marks]

    def disable_readahead(self) -> None:
        """Disable read-ahead for mapped files."""
        self.open_files.disable_readahead()

    def close(self) -> None:
        """Close all files; data returned from them stays valid. Idempotent."""
        self.open_files.close()
        self._marks = None


class ShardFiles(DatasetFiles):
    """The files of one dataset. Owns the open files and `storage` until `close`.

    Args:
        storage: the storage of the files.
        groups, access, path: as in DatasetFiles.
        n_samples: the number of samples of each shard.
        verify: when hashes are checked, as in ShardReader.
    """

    def __init__(
        self,
        storage: ShardStorage,
        groups: Sequence[FileGroup],
        n_samples: Rows,
        *,
        verify: Verify,
        access: Access,
        path: str,
    ) -> None:
        self.max_pinned = storage.max_pinned(np.concatenate([group.sizes for group in groups]))
        """The number of files that the storage can pin at a time; None if unlimited."""
        super().__init__(groups, max_pinned=self.max_pinned, access=access, path=path)
        self._storage, self._n_samples, self._verify = storage, n_samples, verify

    def set_access(self, access: Access) -> None:
        """Set the access method; allowed only before the first file is opened."""
        self.access = access

    def open_file(self, shard: int, name: str) -> ShardReader:
        """Pin and open a file; the file is unpinned when no view of it exists any more."""
        return self._open_from(self._group(name), shard, self._storage.pin)

    def open_metadata(self, shard: int, name: str) -> ShardReader:
        """Open a file where it is stored: in the cache, or in the object store."""
        return self._open_from(self._group(name), shard, self._storage.pin_if_cached)

    @property
    def storages(self) -> Sequence[ShardStorage]:
        """The storage of all files, in a list."""
        return [self._storage]

    def path_of(self, summary: ShardSummary) -> str:
        """Return the path of a file in the storage."""
        return self._storage.path_of(summary)

    def files_with_storage(
        self, shard: int, names: Iterable[str]
    ) -> list[tuple[ShardStorage, ShardSummary]]:
        """Return the files with some fields of one shard, each with the storage."""
        return [(self._storage, group.shards[shard]) for group in self._groups_of(names)]

    def sizes_by_storage(self, names: Iterable[str]) -> list[tuple[ShardStorage, Rows]]:
        """Return the sizes of the files with some fields, for the storage."""
        sizes = [group.sizes for group in self._groups_of(names)]
        return [(self._storage, np.concatenate([np.zeros(0, np.int64), *sizes]))]

    def file_numbers(self, name: str | None = None) -> Rows:
        """Return 0 to the number of shards - 1: every shard has its own file."""
        return np.arange(self.n_shards)

    def mark_bounds(self, name: str) -> Rows:
        """Return upper bounds of the units of a group's files, as `max_units` does."""
        group = self._group(name)
        return max_units(group.schema, self._n_samples, group.sizes)

    def _open_from(
        self, group: FileGroup, shard: int, pin: Callable[[ShardSummary], str]
    ) -> ShardReader:
        """Open a file of a group by the path or URL that `pin` returns for it."""
        summary = group.shards[shard]
        path = pin(summary)
        content = self._storage.remote_file(summary, path)
        if content is not None:  # a URL: not pinned
            return self._open_expected(path, summary, group.schema, content)
        try:
            reader = self._open_expected(path, summary, group.schema)
        except BaseException:
            self._storage.unpin(summary)
            raise
        # Also the user's views of the file keep it pinned.
        held = weakref.finalize(reader.content, self._storage.unpin, summary)
        held.atexit = False
        return reader

    def _open_expected(
        self, path: str, summary: ShardSummary, schema: Schema, content: PreadFile | None = None
    ) -> ShardReader:
        """Open a file and check that it is the one that the generation names."""
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

    def close(self) -> None:
        """Close all files and the storage; returned data stays valid. Idempotent."""
        super().close()
        self._storage.close()
