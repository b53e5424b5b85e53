"""The files that a dataset is made of: opened when they are needed, and what is checked of them."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from shardio.access.filesystems import Access
from shardio.access.page_cache import will_open
from shardio.access.pread import PreadFile
from shardio.errors import DatasetCorrupt
from shardio.format.checksum import distinct
from shardio.format.schema import Schema
from shardio.reader import ShardReader
from shardio.shards.marks import check_marks, most_marks
from shardio.shards.opened import OpenFiles, most_open
from shardio.shards.places import Place
from shardio.storage import zeros
from shardio.units import Rows, Verify
from shardio.writer import ShardSummary

Marks = npt.NDArray[np.uint8]


class Group(NamedTuple):
    """Files of one schema, one of each shard: of whole samples, or of the field `name` alone.

    `sizes` are their bytes.
    """

    name: str
    schema: Schema
    shards: Sequence[ShardSummary]
    sizes: Rows


class Filed:
    """The files of a dataset, by number: its shards, then those beside them, side by side.

    A subclass sets what is declared here, then calls `_begin`, and closes `_opened`.
    """

    path: str
    access: Access
    _files_in: Place
    starts: Rows
    _verify: Verify

    def _begin(self, groups: Sequence[Group]) -> None:
        """Be ready to open files; opens none.

        Args:
            groups: the shards, and then those of each field that lies beside them, as many.
        """
        self._groups, self._n_shards = groups, len(groups[0].shards)
        n_files = len(groups) * self._n_shards
        self._numbers = range(self._n_shards)
        self._first_files = {g.name: k * self._n_shards for k, g in enumerate(groups) if g.name}
        most = most_open(n_files, self._most_held)
        n_maps = int(self.access == "mmap")
        self._opened = OpenFiles(n_files, self._open, most=most, n_maps=n_maps, path=self.path)
        self._marks: Marks | None = None
        self._first_marks: Rows | None = None

    @property
    def _most_held(self) -> int | None:
        """How many files their place keeps at a time, if that is bounded."""
        return self._files_in.most_held(np.concatenate([group.sizes for group in self._groups]))

    def reader(self, shard: int, name: str | None = None) -> ShardReader:
        """The reader of one shard, opened if need be; it belongs to the dataset.

        With a `name`, of the file that has this field: the shard, or the one beside it.

        Raises:
            DatasetCorrupt: the file is another one than the generation names.
            IndexError: there is no such shard.
        """
        first = 0 if name is None else self._first_files.get(name, 0)
        return self._opened.reader(first + self._numbers[shard])

    def glance(self, shard: int, name: str) -> ShardReader:
        """A reader of the same file, for a look at its index: not kept, nor is the file brought.

        In any thread. It belongs to the caller, and verifies for itself.
        """
        group = self._group(name)
        return self._open_from(group, shard, self._files_in.glance)

    def known(self, shard: int, name: str | None = None) -> ShardReader | None:
        """The same, if it is open."""
        first = 0 if name is None else self._first_files.get(name, 0)
        return self._opened.known(first + self._numbers[shard])

    def files_of(self, shard: int, name: str | None = None) -> list[tuple[ShardSummary, str]]:
        """The files that the samples of a shard lie in, and where they are; or that of a field."""
        names = [None, *self._first_files] if name is None else [name]
        summaries = [self.summaries(each)[shard] for each in names]
        return [(summary, self.path_of(summary)) for summary in summaries]

    def summaries(self, name: str | None = None) -> Sequence[ShardSummary]:
        """The file of every shard that has a field, by default those of the shards themselves."""
        return self._group(name).shards

    def _group(self, name: str | None) -> Group:
        return next((group for group in self._groups if group.name == name), self._groups[0])

    def sizes(self, name: str | None = None) -> Rows:
        """The bytes of each of these files."""
        return self._group(name).sizes

    def sizes_for(self, names: Iterable[str]) -> Rows:
        """The bytes of the files that some fields of all samples lie in."""
        groups = {id(group.shards): group for group in map(self._group, names)}
        return np.concatenate([np.zeros(0, np.int64), *(each.sizes for each in groups.values())])

    def which_files(self, name: str | None = None) -> Rows:
        """Which of these files each is, counted from 0: its own number, unless it comes again."""
        return np.arange(self._n_shards)

    def path_of(self, summary: ShardSummary) -> str:
        """Where a file is, or will be once it is opened."""
        return self._files_in.path_of(summary)

    def files_for(self, shard: int, names: Iterable[str]) -> list[tuple[Place, ShardSummary]]:
        """The files that some fields of a shard's samples lie in, and where those come from."""
        groups = {id(group.shards): group for group in map(self._group, names)}
        return [(self._files_in, group.shards[shard]) for group in groups.values()]

    def _open(self, file: int) -> ShardReader:
        reader = self._open_file(file)
        if self.is_partial:
            self._all_marks()  # what is found out of a file is known when it is opened again
        self._mark(file, reader)
        return reader

    def _open_file(self, file: int) -> ShardReader:
        number, shard = divmod(file, self._n_shards)
        return self._open_from(self._groups[number], shard, self._files_in.hold)

    def _open_from(
        self, group: Group, shard: int, hold: Callable[[ShardSummary], str]
    ) -> ShardReader:
        """Open a file of a group, once its place has it, or knows how to read it."""
        summary = group.shards[shard]
        path = hold(summary)
        content = self._files_in.content(summary, path)
        if content is not None:  # which was not held
            return self._open_expected(path, summary, group.schema, content)
        try:
            reader = self._open_expected(path, summary, group.schema)
        except BaseException:
            self._files_in.release(summary)
            raise
        # When the last view that reads the file is gone: also the user's.
        held = weakref.finalize(reader.content, self._files_in.release, summary)
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

    def check_lengths(self, shards: Rows) -> None:
        """Make sure that none of these shards' open files was cut short since it was mapped.

        Raises:
            ShardChanged: the first that was.
        """
        for shard in distinct(shards).tolist():
            for file in range(shard, len(self._groups) * self._n_shards, self._n_shards):
                if (reader := self._opened.known(file)) is not None:
                    reader.check_length()

    @property
    def is_partial(self) -> bool:
        """Whether it has too many files for all to be open at a time: see `shards.opened`."""
        return self._opened.most is not None

    @property
    def n_marks(self) -> int:
        """How many units all files have together; opens every one, unless it `is_partial`.

        Then it is how many they have at most.
        """
        return int(self._place_marks()[-1])

    def _place_marks(self) -> Rows:
        if self._first_marks is None:
            if self.is_partial:
                counts = np.concatenate([self._most_marks(group.name) for group in self._groups])
            else:
                summaries = [each for group in self._groups for each in group.shards]
                will_open([self.path_of(summary) for summary in summaries])
                files = range(len(summaries))
                counts = np.array([self._opened.reader(file).units.n_marks for file in files])
            self._first_marks = np.concatenate([[0], np.cumsum(counts, dtype=np.int64)])
        return self._first_marks

    def _most_marks(self, name: str) -> Rows:
        """How many units the files at most have that a field, or with "" a sample, lies in."""
        group = self._group(name)
        return most_marks(group.schema, np.diff(self.starts), group.sizes)

    def share_marks(self, marks: npt.NDArray[np.uint8]) -> None:
        """Remember what has been checked in `marks`, n_marks bytes; opens files as that does."""
        self._place_marks()
        self._marks = marks
        for file, reader in self._opened.items():
            self._mark(file, reader)

    def _all_marks(self) -> tuple[Marks, Rows]:
        """The marks of all files, and where those of each begin; opens files as `n_marks` does."""
        first = self._place_marks()
        if self._marks is None:
            self.share_marks(zeros(self.n_marks))
        return self._marks if self._marks is not None else zeros(0), first

    def _mark(self, file: int, reader: ShardReader) -> None:
        """Have a file's units remember what is checked in the table of all."""
        if self._marks is not None:
            first, end = self._place_marks()[file : file + 2].tolist()
            check_marks(reader, end - first)
            reader.units.marks = self._marks[first : first + reader.units.n_marks]

    def expect_scattered(self) -> None:
        """Have the kernel read no more of mapped files than the pages that are touched."""
        self._opened.expect_scattered()
