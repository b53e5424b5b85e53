"""Open the files of a dataset on demand, and record which parts of the files are verified.

A *unit* is a range of bytes of a file. Each unit has one hash, and a *mark*: a byte that is 1 if
the unit has been verified. One table has the marks of all units of all files. The table outlives
the readers, so a unit does not have to be verified again when its file is closed and reopened.

The marks of the files follow each other in the table. The number of units of a file is known only
once the file has been opened. If the files cannot all be open at once, the positions of their marks
are computed from upper bounds of those numbers instead.
"""

from __future__ import annotations

import itertools
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

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
    """Files with the same schema, one file for each shard of the dataset.

    One group has the shards themselves; its `name` is empty. Each other group has the files of one
    added field, and `name` is the name of this field. `sizes` are the sizes of the files in bytes.
    """

    name: str
    schema: Schema
    shards: Sequence[ShardSummary]
    sizes: Rows


class DatasetFiles(ABC):
    """The files of a dataset. The object owns the open files until `close`. Not thread-safe.

    Files have indices: first all shards, then all files of the first added field, and so on.

    Args:
        groups: a group with the shards, then one group for each added field. All groups have the
            same number of files.
        max_pinned: the maximum number of files that the storage can keep available (*pin*) at the
            same time; None if there is no limit.
        access: the method by which files are accessed: "mmap" (mapped) or "pread" (read).
        path: the path of the dataset, for messages.
    """

    def __init__(
        self, groups: Sequence[FileGroup], *, max_pinned: int | None, access: Access, path: str
    ) -> None:
        self._groups, self.n_shards = groups, len(groups[0].shards)
        self.access: Access = access
        """The method by which files are accessed: "mmap" (mapped) or "pread" (read)."""
        n_files = len(groups) * self.n_shards
        self._numbers = range(self.n_shards)
        self._first_files = {g.name: k * self.n_shards for k, g in enumerate(groups) if g.name}
        n_maps = int(access == "mmap")
        self.open_files = OpenFiles(
            n_files, self._open, max_pinned=max_pinned, n_maps=n_maps, path=path
        )
        """The open files, by index."""
        self._marks: Marks | None = None
        self._first_marks: Rows | None = None

    def first_file(self, name: str) -> int:
        """Return the index of the file that stores the field `name` for shard 0.

        The files that store the field for the other shards have the next indices.
        """
        return self._first_files.get(name, 0)

    def reader(self, shard: int, name: str | None = None) -> ShardReader:
        """Return the reader of a shard or, with a `name`, of the file that stores this field.

        `Dataset.reader` describes the arguments.
        """
        first_file = 0 if name is None else self._first_files.get(name, 0)
        return self.open_files.reader(first_file + self._numbers[shard])

    def reader_if_open(self, shard: int, name: str | None = None) -> ShardReader | None:
        """Return what `reader` returns if the file is already open, else None."""
        first_file = 0 if name is None else self._first_files.get(name, 0)
        return self.open_files.reader_if_open(first_file + self._numbers[shard])

    def sample(
        self, shard: int, row: int, names: Iterable[str], *, check_truncated: bool = True
    ) -> dict[str, Any]:
        """Return the fields `names` of the sample at `row` of a shard."""
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
        """Open the file that stores the field `name` for a shard. The caller owns the reader."""

    @abstractmethod
    def open_metadata(self, shard: int, name: str) -> ShardReader:
        """Open the file that stores the field `name` for a shard, without downloading the file.

        The caller owns the reader and uses it for small reads. The reader has its own marks of
        verified units. Thread-safe.
        """

    @property
    @abstractmethod
    def storages(self) -> Sequence[ShardStorage]:
        """The storages of the files."""

    @abstractmethod
    def path_of(self, summary: ShardSummary) -> str:
        """Return the local path of a file. The file may not have been downloaded yet."""

    @abstractmethod
    def files_with_storage(
        self, shard: int, names: Iterable[str]
    ) -> list[tuple[ShardStorage, ShardSummary]]:
        """Return the files that store the fields `names` for one shard, each with its storage."""

    @abstractmethod
    def sizes_by_storage(self, names: Iterable[str]) -> list[tuple[ShardStorage, Rows]]:
        """Return each storage, with the sizes of the files in it that store the fields `names`."""

    @abstractmethod
    def file_numbers(self, name: str | None = None) -> Rows:
        """Return, for each shard, the number of its file that stores the field `name`.

        The files are numbered from 0 up. Within one call, equal numbers mean the same file; numbers
        for different `name`s are unrelated. In a mixture, several sources may share a file.
        """

    @abstractmethod
    def mark_bounds(self, name: str) -> Rows:
        """Return, for each file in the group `name`, an upper bound of the number of its units."""

    def files_of_shard(self, shard: int, name: str | None = None) -> list[tuple[ShardSummary, str]]:
        """Return the files that belong to a shard, each with its path.

        With a `name`, return only the file that stores the field with this name.
        """
        groups = self._groups if name is None else [self._group(name)]
        summaries = [group.shards[shard] for group in groups]
        return [(summary, self.path_of(summary)) for summary in summaries]

    def summaries(self, name: str | None = None) -> Sequence[ShardSummary]:
        """Return the files that store the field `name`, one per shard; by default the shards."""
        return self._group(name).shards

    def sizes(self, name: str | None = None) -> Rows:
        """Return the sizes in bytes of the files that `summaries` returns."""
        return self._group(name).sizes

    def _group(self, name: str | None) -> FileGroup:
        return next((group for group in self._groups if group.name == name), self._groups[0])

    def _groups_of(self, names: Iterable[str]) -> list[FileGroup]:
        """Return the groups that store the fields `names`, each group once."""
        return list({id(group.shards): group for group in map(self._group, names)}.values())

    def _open(self, file: int) -> ShardReader:
        number, shard = divmod(file, self.n_shards)
        reader = self.open_file(shard, self._groups[number].name)
        if self.is_partial:
            # Use the table even if nobody shares it: readers are closed to make room for others,
            # and the marks that a closed reader owned would be lost.
            self._all_marks()
        self._mark(file, reader)
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
        """The size of the table of marks, which has one mark for each unit of each file.

        If `is_partial` is False, every file is opened to count its units. If `is_partial` is True,
        the table has room for the upper bounds of the numbers of units.
        """
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
        """Use `marks`, an array of `n_marks` bytes, as the table of marks.

        If `is_partial` is False, every file is opened.
        """
        self._mark_starts()
        self._marks = marks
        for file, reader in self.open_files.items():
            self._mark(file, reader)

    def marks_of(self, name: str) -> tuple[Marks, Rows]:
        """Return the table of marks, and for each shard a position in this table.

        The position is that of the first mark of the file that stores the field `name` for the
        shard.
        """
        marks, firsts = self._all_marks()
        first_file = self.first_file(name)
        return marks, firsts[first_file : first_file + self.n_shards]

    def _all_marks(self) -> tuple[Marks, Rows]:
        """Return the table of marks, and the position of the first mark of each file."""
        first_file = self._mark_starts()
        if self._marks is None:
            self.share_marks(lazy_zeros(self.n_marks))
        return self._marks if self._marks is not None else lazy_zeros(0), first_file

    def _mark(self, file: int, reader: ShardReader) -> None:
        """Let the reader of a file use its part of the table of marks, if there is a table."""
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
        """Disable the kernel's read-ahead for mapped files."""
        self.open_files.disable_readahead()

    def close(self) -> None:
        """Close all files. Data that was returned from the files stays valid. Idempotent."""
        self.open_files.close()
        self._marks = None


class ShardFiles(DatasetFiles):
    """The files of one dataset. The object owns the open files and `storage` until `close`.

    Args:
        storage: the folder or object store that has the files.
        groups, access, path: as in DatasetFiles.
        n_samples: the number of samples of each shard.
        verify: when hashes are checked: "off", "first" or "always", as in ShardReader.
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
        """The maximum number of files that the storage can pin at the same time; None: no limit."""
        super().__init__(groups, max_pinned=self.max_pinned, access=access, path=path)
        self._storage, self._n_samples, self._verify = storage, n_samples, verify

    def set_access(self, access: Access) -> None:
        """Set the method by which files are accessed. Call this before the first file is opened."""
        self.access = access

    def open_file(self, shard: int, name: str) -> ShardReader:
        """Pin and open a file. Unpin the file when no view of its content exists any more."""
        return self._open_from(self._group(name), shard, self._storage.pin)

    def open_metadata(self, shard: int, name: str) -> ShardReader:
        """Open a file in the cache if it has been downloaded, otherwise in the object store."""
        return self._open_from(self._group(name), shard, self._storage.pin_if_cached)

    @property
    def storages(self) -> Sequence[ShardStorage]:
        """A list with the storage of all files as its only element."""
        return [self._storage]

    def path_of(self, summary: ShardSummary) -> str:
        """Return the path of a file in the storage."""
        return self._storage.path_of(summary)

    def files_with_storage(
        self, shard: int, names: Iterable[str]
    ) -> list[tuple[ShardStorage, ShardSummary]]:
        """Return the files that store the fields `names` for one shard, each with the storage."""
        return [(self._storage, group.shards[shard]) for group in self._groups_of(names)]

    def sizes_by_storage(self, names: Iterable[str]) -> list[tuple[ShardStorage, Rows]]:
        """Return the storage, with the sizes of the files that store the fields `names`."""
        sizes = [group.sizes for group in self._groups_of(names)]
        return [(self._storage, np.concatenate([np.zeros(0, np.int64), *sizes]))]

    def file_numbers(self, name: str | None = None) -> Rows:
        """Return the indices of the shards, because every shard has a different file."""
        return np.arange(self.n_shards)

    def mark_bounds(self, name: str) -> Rows:
        """Return, for each file in the group `name`, an upper bound of the number of its units."""
        group = self._group(name)
        return max_units(group.schema, self._n_samples, group.sizes)

    def _open_from(
        self, group: FileGroup, shard: int, pin: Callable[[ShardSummary], str]
    ) -> ShardReader:
        """Open the file of a shard in `group` at the path or URL that `pin` returns."""
        summary = group.shards[shard]
        path = pin(summary)
        content = self._storage.remote_file(summary, path)
        if content is not None:  # `path` is a URL, and the file is not pinned
            return self._open_expected(path, summary, group.schema, content)
        try:
            reader = self._open_expected(path, summary, group.schema)
        except BaseException:
            self._storage.unpin(summary)
            raise
        # Unpin the file when `reader.content` is deleted. While user code holds a view of the
        # content, the content is not deleted and the file stays pinned.
        held = weakref.finalize(reader.content, self._storage.unpin, summary)
        held.atexit = False
        return reader

    def _open_expected(
        self, path: str, summary: ShardSummary, schema: Schema, content: PreadFile | None = None
    ) -> ShardReader:
        """Open a file; raise DatasetCorrupt if it is not the file that the manifest describes.

        Its id, sample count, size and schema must be equal to those in the manifest.
        """
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
        """Close all files and the storage. Data that was returned stays valid. Idempotent."""
        super().close()
        self._storage.close()
