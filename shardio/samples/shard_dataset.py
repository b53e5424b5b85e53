"""ShardDataset: the samples of a dataset in a folder, or at a URL, as a sequence."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, NoReturn

import numpy as np
import numpy.typing as npt

from shardio._base.callers import check_encodable, expand_home, refuses, shown
from shardio.dataset.external_lists import external_list_names
from shardio.dataset.files import DatasetFiles, FileGroup, SourceFiles
from shardio.dataset.generation import Generation
from shardio.dataset.manifest import load, load_generation
from shardio.dataset.open_files import LocalStorage, ShardStorage
from shardio.dataset.selection import RowList, RowRuns, RowSelection, check_mask, check_rows
from shardio.errors import DatasetCorrupt, DatasetNotFound, InvalidArgument, ShardioError
from shardio.format.types.array_values import is_of
from shardio.order.sampling import check_count, check_one_argument
from shardio.samples.open_dataset import OpenDataset, Selection
from shardio.samples.view import SELECT_ADVICE
from shardio.shard.verification import VERIFY, Rows, Verify
from shardio.storage.file_access import Access
from shardio.storage.remote.connection import RemoteOptions, is_url
from shardio.storage.remote.storage import RemoteStorage

_ADVICE: Final = {
    "mode": "a dataset is opened to read; shardio.DatasetWriter writes one",
    "split": 'write subset="train", the name of a subset',
    "train": 'write subset="train" or another subset of dataset.subsets',
    "streaming": "samples are read when they are needed",
    **dict.fromkeys(
        ("batch_size", "device", "fields", "num_workers", "output", "shuffle", "transform"),
        "pass it to shardio.ShardLoader",
    ),
    "columns": "write fields=[…] for shardio.ShardLoader",
}


@dataclass(frozen=True, slots=True)
class DatasetSource:
    """A picklable description of an opened dataset, from which the same samples are opened again.

    `n_selected` counts the rows of a selection, which are passed on separately. `generation` is
    None for the published generation. Errors name `shown_path`, the path as the user gave it, by
    default `path`.
    """

    path: str
    verify: Verify = "first"
    access: Access = "auto"
    subset: str | None = None
    generation: int | None = None
    remote: RemoteOptions = RemoteOptions()
    n_selected: int | None = None
    shown_path: str | None = None

    def open(self) -> ShardDataset:
        """Open the dataset. The rows of a selection are zeros until the caller sets them."""
        found = ShardDataset.__new__(ShardDataset)
        found._open(self)
        if self.n_selected is not None:
            found.rows.set_rows(RowList(np.broadcast_to(np.int64(0), self.n_selected)))
        return found


class ShardDataset(OpenDataset):
    """The samples of a dataset, by index. It owns the memory maps of its shards until `close()`.

    Not thread-safe. A shard is opened when it is first needed. The values of a column that was
    added later are in separate files. With access="auto", the file system of the folder determines
    the method for all shards. Unpickling opens the same generation and samples at the same path.

    Args:
        path: the folder, or its URL: s3://, gs://, az://, https://.
        verify: when hashes are checked: "first" (on first read), "always" or "off".
        access: "mmap" maps shards, "pread" reads them by offset, "auto" chooses; see ShardReader.
        subset: the name of a subset; the dataset then has only the samples of the subset, with
            indices from 0.
        generation: the number of the generation to open; by default the published one.
        cache: for a URL, the folder that a loader downloads shards to; by default SHARDIO_CACHE
            from the environment, otherwise ~/.cache/shardio. For a single sample whose
            shard is not in the cache, only the bytes of the sample are requested.
        cache_bytes: the size limit of the cache; by default nine tenths of the space that is free
            or used by the cache.
        storage_options: for a URL, options of obstore: credentials, endpoint, client_options.

    Raises:
        DatasetNotFound, DatasetCorrupt, ShardUnsupported: the folder cannot be opened.
        InvalidArgument: there is no such subset.
        ShardNotFound, ShardCorrupt, …: a shard cannot be read; also raised later, when a shard is
            opened for the first time.
    """

    @refuses(_ADVICE, "shardio.open")
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
    ) -> None:
        if generation is not None:
            check_count("generation", generation, 1)
        remote = RemoteOptions.of(cache, cache_bytes, storage_options)
        self._open(DatasetSource(dataset_path(path), verify, access, subset, generation, remote))

    def _open(self, source: DatasetSource) -> None:
        path, verify, subset = source.shown_path or source.path, source.verify, source.subset
        if verify not in VERIFY:
            raise InvalidArgument(f"verify must be one of {', '.join(VERIFY)}; found {verify!r}")
        self._asked_access, self._remote = source.access, source.remote
        storage = _storage_of(source.path, path, source.remote)
        access = storage.resolve_access(source.access)
        try:
            state = _load(storage, source.generation)
        except DatasetNotFound:
            if is_url(path):
                _refuse_subset_of_url(path, source.remote)
            raise
        starts, groups = shard_starts_of(state), file_groups_of(state)
        selected = None if subset is None else _rows_of(state, subset, path)
        super().__init__(
            path=path,
            root=storage.root,
            generation=state,
            files=DatasetFiles(
                [SourceFiles(storage, groups)], groups, verify=verify, access=access, path=path
            ),
            rows=RowSelection(starts, selected),
            verify=verify,
            subset=subset,
        )

    @property
    def source(self) -> DatasetSource:
        """A description of the dataset."""
        rows = self.rows.row_list
        return DatasetSource(
            self.root,
            self.verify,
            self._asked_access,
            self.subset_name,
            self.generation,
            self._remote.for_reopening,
            None if rows is None else len(rows),
        )

    @property
    def worker_source(self) -> DatasetSource:
        """A description for workers. Workers download whole shards."""
        remote = self._remote.for_workers
        return replace(self.source, remote=remote, shown_path=self.current_path)

    def __reduce__(self) -> tuple[Any, ...]:
        return DatasetSource.open, (self.source,), self.rows.row_list

    def __setstate__(self, row_list: RowList) -> None:
        self.rows.set_rows(row_list)

    def __repr__(self) -> str:
        part = "" if self.subset_name is None else f"subset {self.subset_name!r}, "
        part = part if self.rows.row_list is None else "a selection, "
        n_shards = len(self.shards)
        return (
            f"ShardDataset({self.path!r}: {part}{len(self)} samples in {n_shards} "
            f"shard{'s' * (n_shards != 1)}, generation {self.generation}"
            f"{', closed' * self.is_closed})"
        )

    @refuses(SELECT_ADVICE)
    def select(self, rows: Selection, *, fields: Iterable[str] = ()) -> ShardDataset:
        """Return some of the samples as a new dataset of the same files, with indices from 0.

        The new dataset opens the shards again, and must be closed separately.

        Args:
            rows: a function, called once with a dict of columns, that returns a mask; or a mask
                with a bool for every sample; or indices of samples in any order, with or without
                repetitions.
            fields: the names of the columns for a function, which receives them as arrays
                (samples, …). They must be raw arrays of fixed shape.

        Raises:
            InvalidArgument: `rows` does not match the dataset, or `fields` does not match `rows`.
            ShardCorrupt, …: the columns cannot be read.
        """
        self.check_open()
        names = [fields] if isinstance(fields, str) else list(fields)
        _check_selection(rows, names)
        if callable(rows):
            rows = rows(_Columns({name: self._column(name) for name in names}))
            positions = check_mask(rows, len(self), "the mask")
        else:
            positions = check_rows(rows, len(self))
        return self._selected(self.rows.at(positions))

    def subset(self, name: str) -> ShardDataset:
        """Return the samples of a subset as a new dataset, with indices from 0.

        The new dataset opens the shards again, and must be closed separately.

        Raises:
            InvalidArgument: there is no such subset; or this dataset has another subset's samples,
                and the two have none in common.
        """
        self.check_open()
        known = _rows_of(self._generation, name, self.path)
        if not self.rows.selects_all:
            rows = self.rows.at(np.arange(len(self)))
            found = rows[known.n_below(rows + 1) > known.n_below(rows)]
            if not len(found) and self.subset_name is not None:
                raise InvalidArgument(
                    f"{self.path}: the subset {self.subset_name!r} has no sample of {name!r}: open "
                    "the dataset without subset="
                )
            return self._selected(found)
        return replace(self.source, path=self.current_path, subset=name).open()

    def _selected(self, rows: Rows) -> ShardDataset:
        found = replace(self.source, path=self.current_path, subset=None).open()
        found.rows.set_rows(RowList(rows))
        return found

    def reopen(self, *, n_workers: int = 1) -> ShardDataset:
        """Open the same samples again, in the same way, with separate files.

        For a URL, `n_workers` is the number of workers that read the samples at the same time. With
        0, whole shards are downloaded here before samples are read.
        """
        source = self.source
        remote = source.remote.for_main_process(n_workers)
        opened = replace(source, path=self.current_path, remote=remote).open()
        if self.rows.row_list is not None:
            opened.rows.set_rows(self.rows.row_list)
        return opened

    def _column(self, name: str) -> npt.NDArray[Any]:
        if name not in self.schema.columns:
            known = ", ".join(self.schema.columns) or "none"
            raise InvalidArgument(f"{self.path}: {name!r} is not a column; columns: {known}")
        found: npt.NDArray[Any] = self.column(name)
        return found


def dataset_path(given: Any, others: str = "") -> str:
    """Return the path or URL of a dataset; errors name `others`, the other valid values, too."""
    path = os.fspath(expand_home(given)) if isinstance(given, str | os.PathLike) else None
    if isinstance(path, str) and path:
        return path
    hint = ""
    sources = given if isinstance(given, list | tuple) else ()
    if isinstance(given, OpenDataset):
        hint = "; this dataset is open already; dataset.reopen() opens its files again"
    elif sources and all(str(each).endswith(".tar") for each in sources):
        hint = "; write their samples to a dataset first: shardio.convert(folder, path)"
    elif sources and all(isinstance(each, str | os.PathLike | OpenDataset) for each in sources):
        hint = "; to mix several datasets, write shardio.mix([…], weights=[…])"
    elif is_of(given, "shardio", "MapView"):
        hint = "; pass the dataset or view that the MapView was created from"
    elif is_of(given, "torch", "Subset"):
        hint = "; for a part of an open dataset, write dataset.select(indices)"
    elif not isinstance(given, str | bytes) and hasattr(given, "__getitem__"):
        hint = "; write its samples to a dataset first: shardio.convert(samples, path)"
    raise InvalidArgument(
        f"expected the folder or the URL of a dataset{others}; found {shown(given)}{hint}"
    )


def _check_selection(rows: Any, fields: Sequence[str]) -> None:
    if isinstance(rows, str):
        raise InvalidArgument(
            "select takes indices, a mask or a function of columns, such as select(lambda columns: "
            f"columns['label'] == 0, fields=['label']); found {rows!r:.80}"
        )
    if callable(rows) is not bool(fields):
        raise InvalidArgument(
            "select takes a function and the columns for it, select(lambda columns: …, "
            f"fields=[…]), or indices or a mask alone; found {rows!r} with fields={fields!r}"
        )
    if callable(rows):
        check_one_argument("select", "columns", rows)


def shard_starts_of(generation: Generation) -> Rows:
    """Return the index of each shard's first row, then the total count of rows."""
    return np.concatenate([[0], np.cumsum(generation.shards.samples, dtype=np.int64)])


def file_groups_of(generation: Generation) -> list[FileGroup]:
    """Return the files of a generation: the shards, then the files of each field added later."""
    shards = FileGroup("", generation.schema, generation.shards)
    added = (FileGroup(each.name, each.schema, each.shards) for each in generation.column_groups)
    return [shards, *added]


def _load(storage: ShardStorage, number: int | None) -> Generation:
    """Read a generation, by default the published one; retry once if a cached copy is damaged."""
    try:
        folder = storage.manifest_folder(number)
        return load(folder) if number is None else load_generation(folder, number)
    except DatasetCorrupt:
        if not storage.invalidate():
            raise
        folder = storage.manifest_folder(number)
        return load(folder) if number is None else load_generation(folder, number)


def _refuse_subset_of_url(url: str, remote: RemoteOptions) -> None:
    """Raise DatasetNotFound if a URL consists of a dataset's URL and a subset's name."""
    url = url.rstrip("/")
    parent, _, name = url.rpartition("/")
    subsets: Mapping[str, object] = {}
    with contextlib.suppress(ShardioError, OSError):
        subsets = _load(_storage_of(parent, parent, remote), None).subsets if is_url(parent) else {}
    if name in subsets:
        raise DatasetNotFound(
            f"{url}: holds no dataset.json: write shardio.open({parent!r}, subset={name!r})"
        )


def _rows_of(generation: Generation, subset: Any, path: str) -> RowRuns:
    rows = generation.subsets.get(subset) if isinstance(subset, str) else None
    if rows is None:
        known = ", ".join(map(repr, generation.subsets)) or "none; see shardio split"
        hint = "" if isinstance(subset, str) else "; to select by index, write dataset.select(…)"
        raise InvalidArgument(f"{path}: no subset {shown(subset)}; there are: {known}{hint}")
    return rows


def _storage_of(path: str, shown_path: str, remote: RemoteOptions) -> ShardStorage:
    """Return the storage of a dataset, by its absolute path, so that chdir has no effect."""
    if is_url(path):
        return RemoteStorage(path, remote, external_list_names)
    check_encodable(path, "path")
    return LocalStorage(os.path.abspath(path), shown_path)


class _Columns(dict[str, npt.NDArray[Any]]):
    def __missing__(self, name: str) -> NoReturn:
        raise InvalidArgument(
            f"the function for select uses the column {name!r}, which fields does not name: pass "
            f"fields={[*self, name]!r}; found fields={list(self)!r}"
        )
