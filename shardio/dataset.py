"""A dataset: a folder of shards as one sequence of samples. `dataset_writer` makes one."""

from __future__ import annotations

import functools
import operator
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from shardio.access.filesystems import Access
from shardio.choice import check_takes_one
from shardio.closing import Closing
from shardio.errors import DatasetCorrupt, InvalidArgument, MemoryShort
from shardio.file_names import check_encodable
from shardio.format.schema import Schema
from shardio.gather import ColumnGather
from shardio.manifest import Generation, load, load_generation
from shardio.manifest.described import Described
from shardio.manifest.shard_list import sizes_of
from shardio.reader import ShardReader
from shardio.remote.bucket import Bucket
from shardio.remote.places import Remote, is_url, local_path
from shardio.shards.filed import DatasetFiles, Group, ShardFiles
from shardio.shards.places import Folder, Place
from shardio.shown import RowSelection
from shardio.units import VERIFY, Rows, Verify
from shardio.views import RowList, check_mask, check_positions

_AT_ONCE: Final = 8192
"""Rows of a column that are gathered in one call."""


class ShardDataset(Described, Sequence[dict[str, Any]], Closing):
    """All samples of a dataset, by number; owns its shards' maps until `close()`.

    Pickled, it is opened anew where it arrives: the same state and samples, of files by their path.
    A shard is opened when it is first needed. A column that was added later lies in shards of its
    own beside the others; *files* are all of them, those beside come behind. The object is for one
    thread at a time. `verify` and `access` are as in ShardReader; the file system of the folder
    decides for all shards.

    Args:
        path: the folder, or its URL: s3://, gs://, az://, https://.
        verify: when hashes are checked, see ShardReader.
        subset: the name of a subset: its samples alone, numbered from 0.
        generation: the number of the state to open; by default the published one.
        cache, cache_bytes, storage_options: of a URL, see ShardLoader. Here shards that are not in
            the cache are read by ranges.
        remote: what these three come to, in their place.

    Raises:
        DatasetNotFound, DatasetCorrupt, ShardUnsupported: from the folder itself.
        InvalidArgument: there is no such subset.
        ShardNotFound, ShardCorrupt, …: (also later) from a shard.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        verify: Verify = "first",
        access: Access = "auto",
        subset: str | None = None,
        generation: int | None = None,
        cache: str | os.PathLike[str] | None = None,
        cache_bytes: int | None = None,
        storage_options: Mapping[str, Any] | None = None,
        remote: Remote | None = None,
    ) -> None:
        if verify not in VERIFY:
            raise InvalidArgument(f"verify must be one of {', '.join(VERIFY)}; found {verify!r}")
        self.path = local_path(os.fspath(path))
        self.remote = remote or Remote.of(cache, cache_bytes, storage_options)
        """How it is read if it is in an object store."""
        place = _place_of(self.path, self.remote)
        self._root = place.root
        access = place.access(access)
        self._generation: Generation = self._load(place, generation)
        self._schema = self._generation.whole_schema
        self.subset = subset
        self._verify = verify
        counts = self._generation.counts
        self.starts: Rows = np.concatenate([[0], np.cumsum(counts, dtype=np.int64)])
        """The number of each shard's first row, and the number of all rows at the end."""
        view = None if subset is None else self._subset_rows(subset)
        self.rows = RowSelection(self.starts, view)
        """The samples that it shows, and the rows that they are."""
        # As most datasets are written; a division finds the shard in a tenth of a search's time.
        is_even = len(counts) and (counts[:-1] == counts[0]).all() and counts[-1] <= counts[0]
        self._rows_per_shard = max(1, int(counts[0])) if is_even else 0
        whole = "", self._generation.schema, self._generation.shards
        sides = ((side.name, side.schema, side.shards) for side in self._generation.sides)
        groups = [Group(*group, sizes_of(group[2])) for group in (whole, *sides)]
        self.files: DatasetFiles = self._new_files(place, groups, access)
        """The files that its samples lie in."""
        self._gathers: dict[str, ColumnGather] = {}

    def _new_files(self, place: Place, groups: Sequence[Group], access: Access) -> DatasetFiles:
        """Make its files, none of them open."""
        n_samples, verify = np.diff(self.starts), self._verify
        return ShardFiles(place, groups, n_samples, verify=verify, access=access, path=self.path)

    def _load(self, place: Place, number: int | None) -> Generation:
        try:
            folder = place.described(number)
            return load(folder) if number is None else load_generation(folder, number)
        except DatasetCorrupt:
            if not place.distrust():
                raise
            folder = place.described(number)
            return load(folder) if number is None else load_generation(folder, number)

    @property
    def access(self) -> Access:
        """How its files are read: "mmap" or "pread"."""
        return self.files.access

    @property
    def schema(self) -> Schema:
        """The fields of its samples."""
        return self._schema

    def __reduce__(self) -> tuple[Any, ...]:
        """For pickle and copy: opened anew by its place, in this state, with these samples."""
        reopen = functools.partial(
            ShardDataset,
            verify=self._verify,
            access=self.access,
            subset=self.subset,
            generation=self.generation,
            remote=self.remote,
        )
        return reopen, (self._root,), self.rows.state

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self.rows.restore(state)

    def __len__(self) -> int:
        return len(self.rows)

    def __repr__(self) -> str:
        part = "" if self.subset is None else f"subset {self.subset!r}, "
        part = part if self.rows.row_list is None else "a selection, "
        return (
            f"ShardDataset({self.path!r}: {part}{len(self)} samples in {len(self.shards)} shards, "
            f"generation {self.generation})"
        )

    def __getitem__(self, index: Any) -> Any:
        """One sample as a dict, or a list of them for a slice; raw arrays are read-only views."""
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        row, n = operator.index(index), len(self.rows)
        if not -n <= row < n:
            raise IndexError(f"{self.path}: sample {row} of {n}")
        row += n if row < 0 else 0
        if not self.rows.is_plain:
            row = int(self.rows.at(np.array([row]))[0])
        shard = int(np.searchsorted(self.starts, row, side="right")) - 1
        return self.sample(shard, row - int(self.starts[shard]))

    def __iter__(self) -> Iterator[dict[str, Any]]:
        if not self.rows.is_plain:
            return (self[i] for i in range(len(self)))
        return (sample for shard in range(len(self.shards)) for sample in self.samples(shard))

    def reader(self, shard: int, name: str | None = None) -> ShardReader:
        """Return the reader of a shard, opened if need be; it belongs to the dataset.

        With a `name`, return that of the file with this field: the shard, or the one beside it.

        Raises:
            DatasetCorrupt: the file is another one than the generation names.
            IndexError: there is no such shard.
        """
        return self.files.reader(shard, name)

    def sample(
        self, shard: int, row: int, names: Iterable[str] | None = None, *, beware: bool = True
    ) -> dict[str, Any]:
        """Some fields (by default all) of one sample, by its row in its shard."""
        chosen = self._schema if names is None else names
        return self.files.sample(shard, row, chosen, beware=beware)

    def samples(self, shard: int) -> Iterator[dict[str, Any]]:
        """All samples of one shard, in order."""
        return (self.sample(shard, row) for row in range(self.shards[shard].n_samples))

    def select(
        self,
        indices: Sequence[int] | npt.NDArray[np.integer[Any]] | None = None,
        *,
        mask: Sequence[bool] | npt.NDArray[np.bool_] | None = None,
        where: Callable[[dict[str, npt.NDArray[Any]]], Any] | None = None,
        fields: Iterable[str] = (),
    ) -> ShardDataset:
        """Some of its samples as a dataset of their own, numbered from 0, over the same files.

        It opens the shards anew, and is closed by itself. One of three says which samples:

        Args:
            indices: their numbers here, in any order, also repeatedly.
            mask: for every sample, whether it is one of them.
            where: gives such a mask for a dict of columns; called once.
            fields: names of the columns for `where`: raw arrays of fixed shape, (samples, …).

        Raises:
            InvalidArgument: not one of the three, or one that does not fit.
            ShardCorrupt, …: from reading the columns.
        """
        if sum(each is not None for each in (indices, mask, where)) != 1:
            raise InvalidArgument("select takes one of indices, mask and where")
        names = [fields] if isinstance(fields, str) else list(fields)
        if (where is None) is not (not names):
            raise InvalidArgument("select(where=…, fields=[…]): each needs the other")
        if where is not None:
            check_takes_one("where", "columns", where)
            mask = where({name: self._column(name) for name in names})
        if indices is not None:
            positions = check_positions(indices, len(self), "indices")
        else:
            positions = check_mask(mask, len(self), "the mask")
        found = ShardDataset(
            self._root,
            verify=self._verify,
            access=self.access,
            generation=self.generation,
            remote=self.remote,
        )
        found.rows.show(RowList(self.rows.at(positions)))
        return found

    def _column(self, name: str) -> npt.NDArray[Any]:
        """A whole column of its view; a copy."""
        field = self.schema.columns.get(name)
        if field is None:
            known = ", ".join(self.schema.columns) or "none"
            raise InvalidArgument(f"{self.path}: {name!r} is no column; there are: {known}")
        found = np.empty((len(self), field.row_bytes or 0), np.uint8)
        for start in range(0, len(self), _AT_ONCE):
            part = found[start : start + _AT_ONCE]
            rows = self.rows.at(np.arange(start, start + len(part)))
            shards, gather = self.locate(rows), self.gather(name)
            gather.gather(gather.place(rows, shards), rows, shards, part)
        shape = tuple(each or 0 for each in field.shape)
        return found.view(field.numpy).reshape(len(self), *shape)

    def locate(self, rows: Rows) -> Rows:
        """The number of the shard that each of `rows` lies in."""
        if self._rows_per_shard:
            return rows // self._rows_per_shard
        return np.searchsorted(self.starts, rows, side="right") - 1

    @property
    def buckets(self) -> list[Bucket]:
        """The object stores that its files come from."""
        return [place for place in self.files.places if isinstance(place, Bucket)]

    def gather(self, name: str) -> ColumnGather:
        """What copies rows of a column of all shards at once; made on first use."""
        self.files.opened.check_open()
        found = self._gathers.get(name)
        while found is None:
            try:
                found = self._gathers[name] = self._new_gather(name)
            except MemoryShort:  # not so many addresses
                if not self.files.opened.halve():
                    raise
        return found

    def _new_gather(self, name: str) -> ColumnGather:
        marks, first_marks = self.files.marks_of(name)
        return ColumnGather(
            name,
            self.schema.columns[name],
            self.files.opened,
            self.files.first(name),
            is_mapped=self.access == "mmap",
            starts=self.starts[:-1],
            counts=np.diff(self.starts),
            marks=marks,
            first_marks=first_marks,
            verify=self._verify,
        )

    def close(self) -> None:
        """Let go of all shards. Samples that were handed out stay valid. Idempotent."""
        for gather in self._gathers.values():
            gather.close()
        self._gathers = {}
        self.files.close()


def _place_of(path: str, remote: Remote) -> Place:
    """Return where a dataset's files lie, by an absolute path: a later chdir changes nothing."""
    if is_url(path):
        return Bucket(path, remote)
    check_encodable(path, "path")
    return Folder(os.path.abspath(path), path)


def open_dataset(
    path: str | os.PathLike[str],
    *,
    verify: Verify = "first",
    access: Access = "auto",
    subset: str | None = None,
    generation: int | None = None,
    cache: str | os.PathLike[str] | None = None,
    cache_bytes: int | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> ShardDataset:
    """Open the dataset in a folder, or at a URL; see ShardDataset."""
    remote = Remote.of(cache, cache_bytes, storage_options)
    return ShardDataset(
        path, verify=verify, access=access, subset=subset, generation=generation, remote=remote
    )
