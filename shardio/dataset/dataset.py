"""Datasets as sequences of samples: ShardDataset opens a folder of shards, or a URL."""

from __future__ import annotations

import dataclasses
import functools
import operator
import os
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from shardio._base.classes import Closing
from shardio._base.file_names import check_encodable
from shardio.dataset.external_lists import external_list_names, shard_sizes
from shardio.dataset.files import DatasetFiles, FileGroup, ShardFiles
from shardio.dataset.gather import ColumnGather
from shardio.dataset.generation import Generation
from shardio.dataset.manifest import load, load_generation
from shardio.dataset.open_files import LocalStorage, ShardStorage
from shardio.dataset.selection import RowList, RowRuns, RowSelection, check_mask, check_positions
from shardio.errors import DatasetCorrupt, InsufficientMemory, InvalidArgument
from shardio.format.schema import Schema
from shardio.order.sampling import check_one_argument
from shardio.shard.reader import ShardReader
from shardio.shard.verification import VERIFY, Rows, Verify
from shardio.shard.writer import ShardSummary
from shardio.storage.file_access import Access
from shardio.storage.remote.options import RemoteOptions, is_url, local_path
from shardio.storage.remote.storage import RemoteStorage

_AT_ONCE: Final = 8192
"""Rows of a column that are gathered in one call."""


class Dataset(Sequence[dict[str, Any]], Closing):
    """A sequence of samples that are stored in shards; owns `files` until `close`. Not thread-safe.

    A ShardDataset or a Mixture.

    Args:
        path: as the user named it, for messages.
        root: the absolute path of the folder, or the URL; for a mixture, its `path`.
        generation: the generation that was opened.
        files: the files of the samples; owned from now on.
        rows: the selected samples.
        verify: when hashes are checked, see ShardReader.
        subset: the name of the subset that `rows` selects, if any.
    """

    def __init__(
        self,
        *,
        path: str,
        root: str,
        generation: Generation,
        files: DatasetFiles,
        rows: RowSelection,
        verify: Verify,
        subset: str | None = None,
    ) -> None:
        self.path, self.root, self.subset = path, root, subset
        self.schema: Schema = generation.whole_schema
        """The fields of its samples."""
        self.files = files
        """The files of its samples."""
        self.rows = rows
        """The selected samples and their rows."""
        self.starts: Rows = rows.shard_starts
        """The number of each shard's first row, and the number of all rows at the end."""
        self._generation = generation
        self.verify: Verify = verify
        """When hashes are checked, see ShardReader."""
        # Usual for datasets; a division finds the shard in a tenth of the time of a search.
        counts = generation.counts
        is_even = len(counts) and (counts[:-1] == counts[0]).all() and counts[-1] <= counts[0]
        self._rows_per_shard = max(1, int(counts[0])) if is_even else 0
        self._gathers: dict[str, ColumnGather] = {}

    @property
    def place(self) -> str:
        """The folder as it was named; absolute if a chdir has changed the meaning of that name."""
        return self.path if os.path.abspath(self.path) == self.root else self.root

    @property
    def access(self) -> Access:
        """The access method of its files: "mmap" or "pread"."""
        return self.files.access

    @property
    def classes(self) -> tuple[str, ...]:
        """Class names; a label is a position in them."""
        return self._generation.classes

    @property
    def lineage(self) -> str:
        """An id of the first generation, which stays the same when samples are appended."""
        return self._generation.lineage

    @property
    def generation(self) -> int:
        """The number of the generation that was opened."""
        return self._generation.number

    @property
    def shards(self) -> Sequence[ShardSummary]:
        """The shards in order: name, samples, bytes, id; without those of added columns."""
        return self._generation.shards

    @property
    def column_groups(self) -> Mapping[str, Sequence[ShardSummary]]:
        """The shards of each column that was added later, by its name, in the order of `shards`."""
        return {group.name: group.shards for group in self._generation.column_groups}

    @property
    def inputs(self) -> Sequence[Mapping[str, Any]]:
        """The inputs of a conversion, and their outcomes; a long list is read on first use."""
        return self._generation.inputs

    @property
    def converter(self) -> Mapping[str, Any]:
        """The converter that made it, and its options."""
        return self._generation.converter

    @property
    def versions(self) -> Mapping[str, str]:
        """The versions of the libraries that its bytes depend on."""
        return self._generation.versions

    @property
    def view(self) -> Mapping[str, Any]:
        """The default samples of a loader: rows, or clips of videos."""
        return self._generation.view

    @property
    def subsets(self) -> Mapping[str, int]:
        """The names of its subsets, and how many samples each has."""
        return {name: len(rows) for name, rows in self._generation.subsets.items()}

    @property
    def stats(self) -> Mapping[str, Any]:
        """The statistics of `shardio stats`: of the "whole", and of its "subsets"."""
        return self._generation.stats

    @property
    def operation(self) -> Mapping[str, Any]:
        """The command that made this state of others, and its options."""
        return self._generation.operation

    @property
    def remote_storages(self) -> list[RemoteStorage]:
        """The object stores that its files come from."""
        return [storage for storage in self.files.storages if isinstance(storage, RemoteStorage)]

    def __len__(self) -> int:
        return len(self.rows)

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self.rows.restore(state)

    def __getitem__(self, index: Any) -> Any:
        """Return a sample as a dict, or a list of them for a slice; raw arrays are read-only."""
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
        """Return the reader of a shard, opened if needed; it belongs to the dataset.

        With a `name`, return that of the file with this field: the shard, or the one beside it.

        Raises:
            DatasetCorrupt: it is not the file that the generation names.
            IndexError: there is no such shard.
        """
        return self.files.reader(shard, name)

    def sample(
        self,
        shard: int,
        row: int,
        names: Iterable[str] | None = None,
        *,
        check_truncated: bool = True,
    ) -> dict[str, Any]:
        """Return some fields (by default all) of one sample, by its row in its shard."""
        chosen = self.schema if names is None else names
        return self.files.sample(shard, row, chosen, check_truncated=check_truncated)

    def samples(self, shard: int) -> Iterator[dict[str, Any]]:
        """Iterate over all samples of one shard, in order."""
        return (self.sample(shard, row) for row in range(self.shards[shard].n_samples))

    @abstractmethod
    def select(
        self,
        indices: Sequence[int] | npt.NDArray[np.integer[Any]] | None = None,
        *,
        mask: Sequence[bool] | npt.NDArray[np.bool_] | None = None,
        where: Callable[[dict[str, npt.NDArray[Any]]], Any] | None = None,
        fields: Iterable[str] = (),
    ) -> Dataset:
        """Return some of the samples as a new dataset; see ShardDataset."""

    @abstractmethod
    def reopen(self, *, whole: bool = False, n_readers: int = 1) -> Dataset:
        """Open the same samples again, with files of their own; see ShardDataset."""

    def locate(self, rows: Rows) -> Rows:
        """Return the number of the shard that each of `rows` lies in."""
        if self._rows_per_shard:
            return rows // self._rows_per_shard
        return np.searchsorted(self.starts, rows, side="right") - 1

    def gather(self, name: str) -> ColumnGather:
        """Return the gather of a column, which copies rows of all shards; made on first use."""
        self.files.open_files.check_open()
        found = self._gathers.get(name)
        while found is None:
            try:
                found = self._gathers[name] = self._new_gather(name)
            except InsufficientMemory:  # too little address space for all files
                if not self.files.open_files.halve():
                    raise
        return found

    def _new_gather(self, name: str) -> ColumnGather:
        marks, first_marks = self.files.marks_of(name)
        return ColumnGather(
            name,
            self.schema.columns[name],
            self.files.open_files,
            self.files.first_file(name),
            is_mapped=self.access == "mmap",
            starts=self.starts[:-1],
            counts=np.diff(self.starts),
            marks=marks,
            first_marks=first_marks,
            verify=self.verify,
        )

    def close(self) -> None:
        """Close all files. Samples that were returned stay valid. Idempotent."""
        for gather in self._gathers.values():
            gather.close()
        self._gathers = {}
        self.files.close()


class ShardDataset(Dataset):
    """The samples of a dataset, by number; owns its shards' maps until `close()`. Not thread-safe.

    A pickle opens the same generation and samples again where it is loaded, by the path of the
    folder. A shard is opened when it is first needed. A column that was added later has shards of
    its own; *files* are all shards, those of added columns last. The file system of the folder
    decides `access` for all shards.

    Args:
        path: the folder, or its URL: s3://, gs://, az://, https://.
        verify: when hashes are checked, see ShardReader.
        access: the access method, see ShardReader.
        subset: the name of a subset: only its samples, numbered from 0.
        generation: the number of the generation to open; by default the published one.
        cache: for a URL, the folder that a loader downloads shards to; by default SHARDIO_CACHE
            from the environment, otherwise ~/.cache/shardio. Single samples of shards that are not
            there are read by ranges.
        cache_bytes: the size limit of that folder; by default nine tenths of the free space.
        storage_options: for a URL, options of obstore: credentials, endpoint, client_options.
        remote: these three in one object, for the use of shardio itself.

    Raises:
        DatasetNotFound, DatasetCorrupt, ShardUnsupported: from the folder itself.
        InvalidArgument: there is no such subset.
        ShardNotFound, ShardCorrupt, …: (also later) from a shard.
    """

    files: ShardFiles

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
        remote: RemoteOptions | None = None,
    ) -> None:
        if verify not in VERIFY:
            raise InvalidArgument(f"verify must be one of {', '.join(VERIFY)}; found {verify!r}")
        path = local_path(os.fspath(path))
        self.remote = remote or RemoteOptions.of(cache, cache_bytes, storage_options, access)
        """The options for reading it from an object store."""
        storage = _storage_of(path, self.remote)
        access = storage.resolve_access(access)
        state = _load(storage, generation)
        starts = starts_of(state)
        view = None if subset is None else _rows_of(state, subset, path)
        super().__init__(
            path=path,
            root=storage.root,
            generation=state,
            files=ShardFiles(
                storage,
                groups_of(state),
                np.diff(starts),
                verify=verify,
                access=access,
                path=path,
            ),
            rows=RowSelection(starts, view),
            verify=verify,
            subset=subset,
        )

    def __reduce__(self) -> tuple[Any, ...]:
        """Return a call that opens the same samples of the same generation."""
        reopen = functools.partial(
            ShardDataset,
            verify=self.verify,
            access=self.access,
            subset=self.subset,
            generation=self.generation,
            remote=self.remote,
        )
        return reopen, (self.root,), self.rows.state

    def __repr__(self) -> str:
        part = "" if self.subset is None else f"subset {self.subset!r}, "
        part = part if self.rows.row_list is None else "a selection, "
        n_shards = len(self.shards)
        return (
            f"ShardDataset({self.path!r}: {part}{len(self)} samples in {n_shards} "
            f"shard{'s' * (n_shards != 1)}, generation {self.generation})"
        )

    def select(
        self,
        indices: Sequence[int] | npt.NDArray[np.integer[Any]] | None = None,
        *,
        mask: Sequence[bool] | npt.NDArray[np.bool_] | None = None,
        where: Callable[[dict[str, npt.NDArray[Any]]], Any] | None = None,
        fields: Iterable[str] = (),
    ) -> ShardDataset:
        """Return some of the samples as a new dataset of the same files, numbered from 0.

        It opens the shards again, and is closed separately. Pass one of `indices`, `mask` and
        `where`:

        Args:
            indices: sample numbers in any order, with repetitions.
            mask: a bool for every sample.
            where: a function that returns such a mask for a dict of columns; called once.
            fields: names of the columns for `where`: raw arrays of fixed shape, (samples, …).

        Raises:
            InvalidArgument: not exactly one of the three, or it does not fit the dataset.
            ShardCorrupt, …: from reading the columns.
        """
        if sum(each is not None for each in (indices, mask, where)) != 1:
            raise InvalidArgument("select takes one of indices, mask and where")
        names = [fields] if isinstance(fields, str) else list(fields)
        if (where is None) is not (not names):
            raise InvalidArgument("select(where=…, fields=[…]): each needs the other")
        if where is not None:
            check_one_argument("where", "columns", where)
            mask = where({name: self._column(name) for name in names})
        if indices is not None:
            positions = check_positions(indices, len(self), "indices")
        else:
            positions = check_mask(mask, len(self), "the mask")
        found = ShardDataset(
            self.root,
            verify=self.verify,
            access=self.access,
            generation=self.generation,
            remote=self.remote,
        )
        found.rows.set_rows(RowList(self.rows.at(positions)))
        return found

    def reopen(self, *, whole: bool = False, n_readers: int = 1) -> ShardDataset:
        """Open the same samples again, in the same way, with files of their own.

        Args:
            whole: for a URL, True to download whole shards before reading from them.
            n_readers: for a URL, the number of processes or threads that read at once.
        """
        opened = ShardDataset(
            self.place,
            verify=self.verify,
            access=self.remote.access if self.remote_storages else self.access,
            subset=self.subset,
            generation=self.generation,
            remote=dataclasses.replace(self.remote, whole=whole, n_readers=n_readers),
        )
        if self.rows.row_list is not None:
            opened.rows.set_rows(self.rows.row_list)
        return opened

    def _column(self, name: str) -> npt.NDArray[Any]:
        """Copy a column of all selected samples."""
        field = self.schema.columns.get(name)
        if field is None:
            known = ", ".join(self.schema.columns) or "none"
            raise InvalidArgument(f"{self.path}: {name!r} is not a column; columns: {known}")
        found = np.empty((len(self), field.row_bytes or 0), np.uint8)
        for start in range(0, len(self), _AT_ONCE):
            part = found[start : start + _AT_ONCE]
            rows = self.rows.at(np.arange(start, start + len(part)))
            shards, gather = self.locate(rows), self.gather(name)
            gather.gather(gather.place(rows, shards), rows, shards, part)
        shape = tuple(each or 0 for each in field.shape)
        return found.view(field.numpy).reshape(len(self), *shape)


def starts_of(generation: Generation) -> Rows:
    """Return the number of each shard's first row, and the number of all rows at the end."""
    return np.concatenate([[0], np.cumsum(generation.counts, dtype=np.int64)])


def groups_of(generation: Generation) -> list[FileGroup]:
    """Return the files of a generation: the shards, then those of each field beside them."""
    whole = "", generation.schema, generation.shards
    groups = ((group.name, group.schema, group.shards) for group in generation.column_groups)
    return [FileGroup(*group, shard_sizes(group[2])) for group in (whole, *groups)]


def _load(storage: ShardStorage, number: int | None) -> Generation:
    """Read a generation, by default the published one; once more if a copy was damaged."""
    try:
        folder = storage.manifest_folder(number)
        return load(folder) if number is None else load_generation(folder, number)
    except DatasetCorrupt:
        if not storage.invalidate():
            raise
        folder = storage.manifest_folder(number)
        return load(folder) if number is None else load_generation(folder, number)


def _rows_of(generation: Generation, subset: Any, path: str) -> RowRuns:
    """Return the rows of a subset, by its name."""
    rows = generation.subsets.get(subset) if isinstance(subset, str) else None
    if rows is None:
        known = ", ".join(map(repr, generation.subsets)) or "none; see shardio split"
        raise InvalidArgument(f"{path}: no subset {subset!r}; there are: {known}")
    return rows


def _storage_of(path: str, remote: RemoteOptions) -> ShardStorage:
    """Return the storage of a dataset, by an absolute path: a later chdir has no effect."""
    if is_url(path):
        return RemoteStorage(path, remote, external_list_names)
    check_encodable(path, "path")
    return LocalStorage(os.path.abspath(path), path)


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
    return ShardDataset(
        path,
        verify=verify,
        access=access,
        subset=subset,
        generation=generation,
        cache=cache,
        cache_bytes=cache_bytes,
        storage_options=storage_options,
    )
