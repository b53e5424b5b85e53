"""How many units a shard has, told without opening it: where its marks lie among those of others.

Exact where no field is a stream: schema and number of samples decide everything that has a hash.
How many packets and chunks streams have only the file can tell; it has bytes for so many at most.

The files that a dataset is made of: opened when they are needed, and what is checked of them.
"""

from __future__ import annotations

import itertools
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from shardio.dataset.open_files import OpenFiles, open_limit
from shardio.dataset.shard_storage import ShardStorage
from shardio.errors import DatasetCorrupt, ShardCorrupt
from shardio.format.checksum import BLOCK_BYTES, CHUNK_BYTES, distinct
from shardio.format.fields import STREAMED
from shardio.format.index import DIMENSION
from shardio.format.layout import Kind
from shardio.format.schema import Schema
from shardio.format.streams import PACKET
from shardio.shard.opening import expected_sections
from shardio.shard.reader import ShardReader
from shardio.shard.verification import Rows, Verify
from shardio.shard.writer import ShardSummary
from shardio.storage.file_access import Access
from shardio.storage.mmap import lazy_zeros, prefetch_ends
from shardio.storage.pread import PreadFile


def max_marks(schema: Schema, n_samples: Rows, n_bytes: Rows) -> Rows:
    """How many units each of some shards has at most.

    Args:
        schema: of all of them.
        n_samples, n_bytes: of each.
    """
    found: Rows = np.zeros(len(n_samples), np.int64)
    for n in distinct(n_samples).tolist():
        found[n_samples == n] = _n_fixed(schema, n)
    n_streams = sum(isinstance(field, STREAMED) for field in schema.records.values())
    chunks = n_bytes // CHUNK_BYTES + n_samples
    packets = n_bytes // PACKET.size
    blocks = [_most_blocks(chunks * DIMENSION.size), _most_blocks(packets * PACKET.size)]
    return found + n_streams * (chunks + sum(blocks))


def _n_fixed(schema: Schema, n_samples: int) -> int:
    """How many units a shard has but those of packets and chunks."""
    sections = expected_sections(schema, n_samples).items()
    tables = sum(1 + count for (kind, _, _), (count, _) in sections if kind == Kind.BLOCK_HASHES)
    columns = sum(count for (kind, _, _), (count, _) in sections if kind == Kind.COLUMN_HASHES)
    return tables + columns + n_samples * len(schema.records)


def _most_blocks(n_bytes: Rows) -> Rows:
    return n_bytes // BLOCK_BYTES + 1


def check_mark_count(reader: ShardReader, max_open: int) -> None:
    """Make sure that a shard has no more units than there is room for.

    Raises:
        ShardCorrupt: it has more hashes of chunks than its bytes could need.
    """
    if reader.units.n_marks > max_open:
        raise ShardCorrupt(
            "it has more hashes than its bytes can need",
            code="section",
            path=reader.path,
            expected=max_open,
            found=reader.units.n_marks,
        )


Marks = npt.NDArray[np.uint8]


class FileGroup(NamedTuple):
    """Files of one schema, one of each shard: of whole samples, or of the field `name` alone.

    `sizes` are their bytes.
    """

    name: str
    schema: Schema
    shards: Sequence[ShardSummary]
    sizes: Rows


class DatasetFiles(ABC):
    """The files of a dataset, by number; owns those that are open until `close`.

    The shards come first, then the files beside them, group by group. For one thread.

    Args:
        groups: the shards, and then the files of each field that lies beside them, as many.
        most_held: how many files their place keeps at a time; None for any number.
        access: how they are read, "mmap" or "pread".
        path: of the dataset, for messages.
    """

    def __init__(
        self, groups: Sequence[FileGroup], *, max_pinned: int | None, access: Access, path: str
    ) -> None:
        self._groups, self.n_shards = groups, len(groups[0].shards)
        self.access: Access = access
        """The access method of its files: "mmap" or "pread"."""
        n_files = len(groups) * self.n_shards
        self._numbers = range(self.n_shards)
        self._first_files = {g.name: k * self.n_shards for k, g in enumerate(groups) if g.name}
        max_open, n_maps = open_limit(n_files, max_pinned), int(access == "mmap")
        self.open_files = OpenFiles(
            n_files, self._open, max_open=max_open, n_maps=n_maps, path=path
        )
        """The files that are open, by number."""
        self._marks: Marks | None = None
        self._first_marks: Rows | None = None

    def first_file(self, name: str) -> int:
        """Return the number of the first file that has a field; those of other shards follow."""
        return self._first_files.get(name, 0)

    def reader(self, shard: int, name: str | None = None) -> ShardReader:
        """Return the reader of a shard, opened if need be; it belongs to this object.

        With a `name`, return that of the file with this field: the shard, or the one beside it.

        Raises:
            DatasetCorrupt: the file is another one than the generation names.
            IndexError: there is no such shard.
        """
        first_file = 0 if name is None else self._first_files.get(name, 0)
        return self.open_files.reader(first_file + self._numbers[shard])

    def reader_if_open(self, shard: int, name: str | None = None) -> ShardReader | None:
        """Return the reader of a shard if it is open, else None."""
        first_file = 0 if name is None else self._first_files.get(name, 0)
        return self.open_files.reader_if_open(first_file + self._numbers[shard])

    def sample(
        self, shard: int, row: int, names: Iterable[str], *, check_truncated: bool = True
    ) -> dict[str, Any]:
        """Return some fields of one sample, by its row in its shard."""
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
        """Open the file of a shard that has a field, anew; the reader belongs to the caller."""

    @abstractmethod
    def open_metadata(self, shard: int, name: str) -> ShardReader:
        """Open the same file for a look at its index, without having it brought; in any thread.

        The reader belongs to the caller, and verifies for itself.
        """

    @property
    @abstractmethod
    def storages(self) -> Sequence[ShardStorage]:
        """The places that the files lie in."""

    @abstractmethod
    def path_of(self, summary: ShardSummary) -> str:
        """Return the path that a file has, or will have once it is opened."""

    @abstractmethod
    def files_with_storage(
        self, shard: int, names: Iterable[str]
    ) -> list[tuple[ShardStorage, ShardSummary]]:
        """Return the files that some fields of a shard's samples lie in, with their places."""

    @abstractmethod
    def sizes_by_storage(self, names: Iterable[str]) -> list[tuple[ShardStorage, Rows]]:
        """Return, for each place, the bytes of the files that some fields of all samples lie in."""

    @abstractmethod
    def file_numbers(self, name: str | None = None) -> Rows:
        """Number the different files of a group from 0; return the number of each shard's file."""

    @abstractmethod
    def most_marks(self, name: str) -> Rows:
        """Return how many units the files of a group have at most; "" is that of the shards."""

    def files_of_shard(self, shard: int, name: str | None = None) -> list[tuple[ShardSummary, str]]:
        """Return the files that a shard's samples, or one field of them, lie in, with paths."""
        names = [None, *self._first_files] if name is None else [name]
        summaries = [self.summaries(each)[shard] for each in names]
        return [(summary, self.path_of(summary)) for summary in summaries]

    def summaries(self, name: str | None = None) -> Sequence[ShardSummary]:
        """Return the file of every shard that has a field, by default the shards themselves."""
        return self._group(name).shards

    def sizes(self, name: str | None = None) -> Rows:
        """Return the bytes of each of these files."""
        return self._group(name).sizes

    def _group(self, name: str | None) -> FileGroup:
        return next((group for group in self._groups if group.name == name), self._groups[0])

    def _groups_of(self, names: Iterable[str]) -> list[FileGroup]:
        """Return the groups that have some fields, each once."""
        return list({id(group.shards): group for group in map(self._group, names)}.values())

    def _open(self, file: int) -> ShardReader:
        number, shard = divmod(file, self.n_shards)
        reader = self.open_file(shard, self._groups[number].name)
        if self.is_partial:
            self._all_marks()  # what is found out of a file is known when it is opened again
        self._mark(file, reader)
        return reader

    def check_lengths(self, shards: Rows) -> None:
        """Make sure that none of these shards' open files was cut short since it was mapped.

        Raises:
            ShardChanged: the first that was.
        """
        for shard in distinct(shards).tolist():
            for file in range(shard, len(self._groups) * self.n_shards, self.n_shards):
                if (reader := self.open_files.reader_if_open(file)) is not None:
                    reader.check_length()

    @property
    def is_partial(self) -> bool:
        """True if there are too many files for all to be open at a time: see OpenFiles."""
        return self.open_files.max_open is not None

    @property
    def n_marks(self) -> int:
        """Number of units of all files together; opens every one, unless it `is_partial`.

        Then it is how many they have at most.
        """
        return int(self._place_marks()[-1])

    def _place_marks(self) -> Rows:
        if self._first_marks is None:
            if self.is_partial:
                counts = np.concatenate([self.most_marks(group.name) for group in self._groups])
            else:
                summaries = [each for group in self._groups for each in group.shards]
                prefetch_ends([self.path_of(summary) for summary in summaries])
                files = range(len(summaries))
                counts = np.array([self.open_files.reader(file).units.n_marks for file in files])
            self._first_marks = np.concatenate([[0], np.cumsum(counts, dtype=np.int64)])
        return self._first_marks

    def share_marks(self, marks: Marks) -> None:
        """Remember what has been checked in `marks`, n_marks bytes; opens files as that does."""
        self._place_marks()
        self._marks = marks
        for file, reader in self.open_files.items():
            self._mark(file, reader)

    def marks_of(self, name: str) -> tuple[Marks, Rows]:
        """Return the marks of all files, and where those begin of each file that has a field.

        Opens files as `n_marks` does.
        """
        marks, firsts = self._all_marks()
        first_file = self.first_file(name)
        return marks, firsts[first_file : first_file + self.n_shards]

    def _all_marks(self) -> tuple[Marks, Rows]:
        """Return the marks of all files, and where those of each begin."""
        first_file = self._place_marks()
        if self._marks is None:
            self.share_marks(lazy_zeros(self.n_marks))
        return self._marks if self._marks is not None else lazy_zeros(0), first_file

    def _mark(self, file: int, reader: ShardReader) -> None:
        """Have a file's units remember what is checked in the table of all."""
        if self._marks is not None:
            first_file, end = self._place_marks()[file : file + 2].tolist()
            check_mark_count(reader, end - first_file)
            reader.units.marks = self._marks[first_file : first_file + reader.units.n_marks]

    def disable_readahead(self) -> None:
        """Have the kernel read no more of mapped files than the pages that are touched."""
        self.open_files.disable_readahead()

    def close(self) -> None:
        """Close all files; what was handed out of them stays valid. Idempotent."""
        self.open_files.close()
        self._marks = None


class ShardFiles(DatasetFiles):
    """The files of one dataset; owns those that are open, and their place, until `close`.

    Args:
        place: where they lie.
        groups: the shards, and then the files of each field that lies beside them, as many.
        n_samples: of each shard.
        verify: when hashes are checked, see ShardReader.
        access: how they are read, "mmap" or "pread".
        path: of the dataset, for messages.
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
        """The maximum number of files that the place keeps at a time; None if unlimited."""
        super().__init__(groups, max_pinned=self.max_pinned, access=access, path=path)
        self._storage, self._n_samples, self._verify = storage, n_samples, verify

    def set_access(self, access: Access) -> None:
        """Read files by `access`; to be called before the first is opened."""
        self.access = access

    def open_file(self, shard: int, name: str) -> ShardReader:
        """Open the file of a shard that has a field, anew; the reader belongs to the caller."""
        return self._open_from(self._group(name), shard, self._storage.pin)

    def open_metadata(self, shard: int, name: str) -> ShardReader:
        """Open the same file for a look at its index, without having it brought; in any thread.

        The reader belongs to the caller, and verifies for itself.
        """
        return self._open_from(self._group(name), shard, self._storage.pin_if_cached)

    @property
    def storages(self) -> Sequence[ShardStorage]:
        """The place that the files lie in."""
        return [self._storage]

    def path_of(self, summary: ShardSummary) -> str:
        """Return the path that a file has, or will have once it is opened."""
        return self._storage.path_of(summary)

    def files_with_storage(
        self, shard: int, names: Iterable[str]
    ) -> list[tuple[ShardStorage, ShardSummary]]:
        """Return the files that some fields of a shard's samples lie in, with their places."""
        return [(self._storage, group.shards[shard]) for group in self._groups_of(names)]

    def sizes_by_storage(self, names: Iterable[str]) -> list[tuple[ShardStorage, Rows]]:
        """Return the bytes of the files that some fields of all samples lie in."""
        sizes = [group.sizes for group in self._groups_of(names)]
        return [(self._storage, np.concatenate([np.zeros(0, np.int64), *sizes]))]

    def file_numbers(self, name: str | None = None) -> Rows:
        """Return the number of each shard's file: the shard's own, as no file comes again."""
        return np.arange(self.n_shards)

    def most_marks(self, name: str) -> Rows:
        """Return how many units the files of a group have at most; "" is that of the shards."""
        group = self._group(name)
        return max_marks(group.schema, self._n_samples, group.sizes)

    def _open_from(
        self, group: FileGroup, shard: int, pin: Callable[[ShardSummary], str]
    ) -> ShardReader:
        """Open a file of a group, once its place has it, or knows how to read it."""
        summary = group.shards[shard]
        path = pin(summary)
        content = self._storage.remote_file(summary, path)
        if content is not None:  # read without being held: nothing to release
            return self._open_expected(path, summary, group.schema, content)
        try:
            reader = self._open_expected(path, summary, group.schema)
        except BaseException:
            self._storage.unpin(summary)
            raise
        # Release the file when its last view is gone, the user's included.
        held = weakref.finalize(reader.content, self._storage.unpin, summary)
        held.atexit = False
        return reader

    def _open_expected(
        self, path: str, summary: ShardSummary, schema: Schema, content: PreadFile | None = None
    ) -> ShardReader:
        """Open a file, which must be the one that the generation names."""
        reader = ShardReader(path, verify=self._verify, access=self.access, content=content)
        found = (reader.id, len(reader), reader.header.file_size)
        expected = (summary.id, summary.n_samples, summary.n_bytes)
        if found != expected:
            raise DatasetCorrupt(
                f"{reader.path}: not the shard that the generation names: expected (id, samples, "
                f"bytes) {expected}, found {found}"
            )
        if reader.schema != schema:
            raise DatasetCorrupt(f"{reader.path}: its schema is not the dataset's")
        return reader

    def close(self) -> None:
        """Close all files and their place; what was handed out stays valid. Idempotent."""
        super().close()
        self._storage.close()
