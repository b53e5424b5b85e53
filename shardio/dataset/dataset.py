"""A dataset as a sequence of the samples that are stored in its shards."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from shardio._base.callers import path_as_given, refuses, row_index, unknown_field
from shardio._base.classes import Closing
from shardio._base.statistics import DatasetStats
from shardio.dataset.external_lists import ShardList
from shardio.dataset.files import DatasetFiles
from shardio.dataset.gather import ColumnGather
from shardio.dataset.generation import Generation
from shardio.dataset.selection import RowSelection, check_rows
from shardio.errors import InsufficientMemory, InvalidArgument
from shardio.format.checksum import distinct
from shardio.format.schema import Schema, group_parts
from shardio.shard.reader import ShardReader
from shardio.shard.verification import Rows, Verify
from shardio.storage.file_access import Access
from shardio.storage.remote.object_store import map_ordered
from shardio.storage.remote.storage import RemoteStorage

_ROWS_AT_ONCE: Final = 8192
"""The number of rows of a column that are gathered at a time."""
_AT_RANDOM: Final = (
    "for sample i, write dataset[i]; for n at random, "
    "dataset.select(random.sample(range(len(dataset)), n))"
)


class Dataset(Sequence[dict[str, Any]], Closing):
    """The base class of ShardDataset and Mixture: a sequence of stored samples. Not thread-safe.

    Args:
        path: the path as the user gave it, for messages.
        root: the absolute path of the folder, or the URL of the dataset; for a mixture, `path`.
        generation: the published state of the dataset that was opened.
        files: the files that store the samples; owned until `close`.
        rows: the selected samples, as indices of rows over all shards.
        subset: the name of the subset that `rows` selects; None if `rows` is not a subset.
    """

    _public = (
        "access classes close column column_groups converter generation inputs lineage operation "
        "reader reopen sample samples schema select shards stats subset subset_name subsets verify "
        "versions view"
    )

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
        self.path, self.root, self.subset_name = path, root, subset
        self.schema: Schema = generation.full_schema
        """The fields of the samples, including added columns."""
        self.files = files
        self.rows = rows
        self.shard_starts: Rows = rows.shard_starts
        """The index of each shard's first row, followed by the total number of rows."""
        self._generation = generation
        self.verify: Verify = verify
        # An attribute, because jedi, which completes names in IPython, fails on a property of a
        # Literal type.
        self.access: Access = files.access
        """The method by which files are accessed: "mmap" (mapped) or "pread" (read)."""
        # Usually all shards but the last have the same number of samples. The shard of a row is
        # then found by a division, which takes a tenth of the time of a binary search.
        counts = generation.shards.samples
        is_even = len(counts) and (counts[:-1] == counts[0]).all() and counts[-1] <= counts[0]
        self._rows_per_shard = max(1, int(counts[0])) if is_even else 0
        self._gathers: dict[str, ColumnGather] = {}

    @property
    def current_path(self) -> str:
        """The path as the user gave it, or `root` if a chdir has made that path invalid."""
        return path_as_given(self.path, self.root)

    @property
    def classes(self) -> tuple[str, ...]:
        """The names of the classes. A label is an index into this tuple."""
        return self._generation.classes

    @property
    def lineage(self) -> str:
        """The id of the dataset: a hash of its first generation, which later generations keep."""
        return self._generation.lineage

    @property
    def generation(self) -> int:
        """The number of the opened generation."""
        return self._generation.number

    @property
    def shards(self) -> ShardList:
        """The name, sample count, size and id of each shard, without shards of added columns."""
        return self._generation.shards

    @property
    def column_groups(self) -> Mapping[str, ShardList]:
        """A mapping from the name of each added column to its shards, in the order of `shards`."""
        return {group.name: group.shards for group in self._generation.column_groups}

    @property
    def inputs(self) -> Sequence[Mapping[str, Any]]:
        """The files that the conversion read, each with its outcome. A long list is read lazily."""
        return self._generation.inputs

    @property
    def converter(self) -> Mapping[str, Any]:
        """The converter that created the dataset, and the options of the converter."""
        return self._generation.converter

    @property
    def versions(self) -> Mapping[str, str]:
        """The versions of the libraries that affect the stored bytes."""
        return self._generation.versions

    @property
    def view(self) -> Mapping[str, Any]:
        """The kind of sample that a loader returns by default: rows, or clips of videos."""
        return self._generation.view

    @property
    def subsets(self) -> Mapping[str, int]:
        """A mapping from the name of each subset to the number of its samples."""
        return {name: len(rows) for name, rows in self._generation.subsets.items()}

    @property
    def stats(self) -> Mapping[str, Any]:
        """The statistics of `shardio stats`: "whole" for all samples, "subsets" for each subset."""
        return DatasetStats(self._generation.stats)

    @property
    def operation(self) -> Mapping[str, Any]:
        """The command that wrote this generation, its options, and its source datasets."""
        return self._generation.operation

    @property
    def remote_storages(self) -> list[RemoteStorage]:
        """The storages of the files that are in object stores; empty for local files."""
        return [storage for storage in self.files.storages if isinstance(storage, RemoteStorage)]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: Any) -> Any:
        """Return a sample as a dict; for a slice, a list of samples; for a name, the column."""
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        if isinstance(index, str):
            if index not in self.schema and index in self.subsets:
                raise KeyError(
                    f"{self.current_path}: no field {index!r}, but a subset: write "
                    f"dataset.subset({index!r})"
                )
            return self.column(index)
        row = row_index("dataset", index, "dataset.select(indices), or dataset[start:stop]")
        n = len(self.rows)
        if not -n <= row < n:
            self.check_open()
            raise IndexError(f"{self.path}: sample {row} of {n}")
        row += n if row < 0 else 0
        if not self.rows.selects_all:
            row = int(self.rows.at(np.array([row]))[0])
        shard = int(np.searchsorted(self.shard_starts, row, side="right")) - 1
        return self.files.sample(shard, row - int(self.shard_starts[shard]), self.schema)

    def __contains__(self, value: object) -> bool:
        if isinstance(value, str):
            raise TypeError(
                f"a dataset has samples; for a field, write {value!r} in dataset.schema"
            )
        return super().__contains__(value)

    def _ipython_key_completions_(self) -> list[str]:
        return list(self.schema)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        if not self.rows.selects_all:
            return (self[i] for i in range(len(self)))
        return (sample for shard in range(len(self.shards)) for sample in self.samples(shard))

    def reader(self, shard: int, name: str | None = None) -> ShardReader:
        """Return the reader of a shard, or of its file with the added column `name`.

        The dataset owns the reader, and opens the file if needed.

        Raises:
            DatasetCorrupt: the file at the path is not the file that the generation names.
            IndexError: there is no such shard.
        """
        self._check_shard(shard)
        return self.files.reader(shard, name)

    @refuses(dict.fromkeys(("frac", "n", "random_state", "row"), _AT_RANDOM), "dataset.sample")
    def sample(self, shard: int, row: int, names: Iterable[str] | None = None) -> dict[str, Any]:
        """Return the fields `names` (by default all) of the sample at `row` of a shard."""
        if isinstance(names, str):
            found = f"the string {names!r}: write [{names!r}]"
            raise InvalidArgument(f"names must be a list of names; found {found}")
        self._check_shard(shard, "; for sample i, write dataset[i]")
        return self.files.sample(shard, row, self.schema if names is None else names)

    def samples(self, shard: int) -> Iterator[dict[str, Any]]:
        """Iterate over all samples of one shard, in order."""
        self._check_shard(shard)
        n = self.shards[shard].n_samples
        return (self.files.sample(shard, row, self.schema) for row in range(n))

    def _check_shard(self, shard: int, hint: str = "") -> None:
        if not -(n := self.files.n_shards) <= shard < n:
            raise IndexError(f"{self.path}: shard {shard} of {n}{hint}")

    def column(self, name: str, rows: Any = None) -> Any:
        """Return the values of one field for all or some samples. Other fields are not read.

        For an array field of fixed shape, the result is one array of the shape (samples, …), in
        which missing values are zero. For any other field, the result is a list, in which missing
        values are None. For the name of a nested record, it is a dict of the record's fields.

        Args:
            name: the name of the field.
            rows: the indices of samples, which start at 0 and need not be sorted; or a mask with a
                bool for every sample. The default is all samples.

        Raises:
            KeyError: there is no such field.
            InvalidArgument: `rows` does not match the dataset.
            ShardCorrupt, …: the values cannot be read.
        """
        self.check_open()
        n = len(self)
        positions = np.arange(n) if rows is None else check_rows(rows, n, f"{self.path}: rows")
        return self.column_at(name, self.rows.at(positions))

    def column_at(self, name: str, rows: Rows) -> Any:
        """Return the values of a field at `rows`, indices over all shards; see `column`."""
        if not isinstance(name, str):
            raise TypeError(
                f"{self.path}: a column is one field; found {name!r:.80}: write {{n: "
                "dataset.column(n) for n in names}"
            )
        if name in self.schema.groups:
            parts = group_parts(self.schema, name)
            return {part: self.column_at(f"{name}.{part}", rows) for part in parts}
        if name not in self.schema:
            raise unknown_field(self.path, name, self.schema)
        shards = self.locate(rows)
        self.files.check_lengths(shards)
        if name in self.schema.columns:
            return self._gathered(name, rows, shards)
        values: list[Any] = [None] * len(rows)
        for shard, positions, local in self._by_shard(rows, shards):
            found = self.reader(shard, name).records.values(name, local)
            for position, value in zip(positions.tolist(), found, strict=True):
                values[position] = value
        array = self.schema[name].array
        if array is None or array.row_bytes is None:
            return values
        out = np.zeros((len(rows), *(n or 0 for n in array.shape)), array.numpy)
        for i, value in enumerate(values):
            if value is not None:
                out[i] = value
        return out

    def _gathered(self, name: str, rows: Rows, shards: Rows) -> npt.NDArray[Any]:
        field = self.schema.columns[name]
        found = np.empty((len(rows), field.row_bytes or 0), np.uint8)
        for i in range(0, len(rows), _ROWS_AT_ONCE):
            part = slice(i, i + _ROWS_AT_ONCE)
            self.gather(name).gather(rows[part], shards[part], found[part])
        if field.optional:
            for shard, positions, local in self._by_shard(rows, shards):
                found[positions[~self.reader(shard, name).present(name, local)]] = 0
        return found.view(field.numpy).reshape(len(rows), *(n or 0 for n in field.shape))

    def _by_shard(self, rows: Rows, shards: Rows) -> Iterator[tuple[int, Rows, Rows]]:
        """Yield each shard that contains some of `rows`.

        Each shard comes with the positions of its rows in `rows`, and with the indices of these
        rows within the shard.
        """
        for shard in distinct(shards).tolist():
            positions = np.flatnonzero(shards == shard)
            yield shard, positions, rows[positions] - self.shard_starts[shard]

    @property
    @abstractmethod
    def worker_source(self) -> Any:
        """A picklable object. In a worker process, its method `open` opens the same samples."""

    @property
    def is_closed(self) -> bool:
        """True after `close`."""
        return self.files.open_files.is_closed

    def check_open(self) -> None:
        """Raise ClosedError if the dataset is closed."""
        self.files.open_files.check_open()

    @abstractmethod
    def select(self, rows: Any, *, fields: Iterable[str] = ()) -> Dataset:
        """Return the chosen samples as a new dataset; see ShardDataset.select."""

    @abstractmethod
    def subset(self, name: str) -> Dataset:
        """Return the samples of a subset as a new dataset; see ShardDataset.subset."""

    @abstractmethod
    def reopen(self, *, n_workers: int = 1) -> Dataset:
        """Open the same samples again, with separate files; see ShardDataset.reopen."""

    def first_position(self, number: int, ends: Rows, *, seed: int, epoch: int) -> int:
        """Return the first position of sample `number` in an epoch without shuffling.

        The position differs from `number` only in a mixture; `ends` are then the cumulative sample
        counts of the sources.
        """
        return number

    def locate(self, rows: Rows) -> Rows:
        """Return, for each of `rows`, the index of the shard that contains the row."""
        if self._rows_per_shard:
            return rows // self._rows_per_shard
        return np.searchsorted(self.shard_starts, rows, side="right") - 1

    def gather(self, name: str) -> ColumnGather:
        """Return the object that copies rows of the column `name`. It is created on first use."""
        self.check_open()
        found = self._gathers.get(name)
        while found is None:
            try:
                field = self.schema.columns[name]
                found = ColumnGather(name, field, self.files, self.shard_starts, self.verify)
                self._gathers[name] = found
            except InsufficientMemory:  # there is too little address space for this many files
                if not self.files.open_files.halve():
                    raise
        return found

    def close(self) -> None:
        """Close all files. Samples that the dataset has returned stay valid. Idempotent."""
        for gather in self._gathers.values():
            gather.close()
        self._gathers = {}
        self.files.close()


T = TypeVar("T")

_SAMPLES_AT_ONCE: Final = 1 << 20
_N_THREADS: Final = 16
"""The number of threads of `scan`. Each sends one request at a time, for 64 KiB or for a table."""


class ShardSamples(NamedTuple):
    """Some samples that are stored in one shard.

    `numbers` are the indices of the samples among all samples of the scan; `rows` are the rows of
    the samples within the shard. `reader(name)` returns the reader of the file with the field
    `name`. Only the function `find` of `scan` may call `reader`.
    """

    shard: int
    numbers: Rows
    rows: Rows
    reader: Callable[[str], ShardReader]


def scan(
    dataset: Dataset,
    find: Callable[[ShardSamples], T],
    *,
    n: int | None = None,
    rows_of: Callable[[Rows], Rows] | None = None,
) -> Iterator[tuple[ShardSamples, T]]:
    """Call `find` for the samples of each shard; yield these samples and the result of the call.

    Samples are scanned in chunks of about a million; `find` is called once per shard of a chunk. If
    the shards are in an object store, several threads run at the same time. Each thread scans one
    shard with its own readers, which request only the bytes that are used.

    Args:
        dataset: the dataset, whose shards are opened.
        find: called with samples of one shard; for an object store, called in other threads.
        n: the number of samples; by default, the number of selected rows.
        rows_of: maps indices of samples to rows; by default, each selected row is a sample.
    """
    parts = _parts(dataset, len(dataset) if n is None else n, rows_of or dataset.rows.at)
    if dataset.remote_storages:
        yield from map_ordered(_N_THREADS, lambda part: (part, find(part)), parts)
    else:
        for part in parts:
            yield part, find(part)


def _parts(dataset: Dataset, n: int, rows_of: Callable[[Rows], Rows]) -> Iterator[ShardSamples]:
    for start in range(0, n, _SAMPLES_AT_ONCE):
        rows = rows_of(np.arange(start, min(start + _SAMPLES_AT_ONCE, n)))
        shards = dataset.locate(rows)
        order = np.argsort(shards, kind="stable")
        firsts = np.flatnonzero(np.diff(shards[order], prepend=-1))
        for at in np.split(order, firsts[1:]):
            shard = int(shards[at[0]])
            local = rows[at] - dataset.shard_starts[shard]
            yield ShardSamples(shard, start + at, local, _readers(dataset, shard))


def _readers(dataset: Dataset, shard: int) -> Callable[[str], ShardReader]:
    if not dataset.remote_storages:
        return lambda name: dataset.reader(shard, name)
    opened: dict[int, ShardReader] = {}

    def open_metadata(name: str) -> ShardReader:
        file = dataset.files.first_file(name)
        if file not in opened:
            opened[file] = dataset.files.open_metadata(shard, name)
        return opened[file]

    return open_metadata
