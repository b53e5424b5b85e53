"""Views of a dataset define what a sample is: a row, a clip, a time step, or a window of tokens."""

from __future__ import annotations

import functools
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple, NoReturn, Self

import numpy as np
import numpy.typing as npt

from shardio._base.callers import missing_attribute, refuses, row_index, unknown_field
from shardio._base.classes import Listed, cached_property
from shardio.dataset.dataset import Dataset
from shardio.dataset.selection import check_positions, check_rows
from shardio.errors import InvalidArgument
from shardio.format.schema import Schema
from shardio.media.audio import Sound
from shardio.order.clip_groups import ClipGrouping
from shardio.order.sampling import check_count
from shardio.samples.clips import Clip, ClipDraws
from shardio.samples.decoding import AudioSource, ImageSource
from shardio.samples.field_sources import (
    ColumnSource,
    FieldSource,
    IndexChunk,
    Keys,
    RecordSource,
    SampleReader,
)
from shardio.samples.media import AudioField, audio_field, audio_schema, image_schema, media_fields
from shardio.samples.preview import view_html
from shardio.shard.verification import Rows

SELECT_ADVICE: Final = {
    "indices": "write select(indices)",
    "mask": "write select(mask)",
    "where": "write select(lambda columns: …, fields=[…])",
}
"""Corrections for parameters of `select` that other libraries have."""

_ATTRIBUTE_ADVICE: Final = {
    **dict.fromkeys(("add_column",), "write shardio.maintenance.add_column(path, …)"),
    **dict.fromkeys(
        ("append", "extend", "write"), "write shardio.convert(samples, path, append=True)"
    ),
    **dict.fromkeys(
        ("batch", "batched", "dataloader", "iter", "loader", "to_iterable_dataset")
        + ("to_loader", "to_tf_dataset"),
        "write shardio.ShardLoader({0}, batch_size)",
    ),
    "cache": "write dataset.preload(), which reads the files into the page cache",
    "class_to_idx": "write dataset.classes.index(name)",
    **dict.fromkeys(("class_names", "names"), "write dataset.classes"),
    **dict.fromkeys(
        ("column_names", "columns", "dtype", "dtypes", "features", "fields", "info", "keys"),
        "write {0}.schema",
    ),
    **dict.fromkeys(("cuda", "to"), 'write shardio.ShardLoader({0}, batch_size, device="cuda")'),
    **dict.fromkeys(
        ("describe", "mean", "statistics", "std"),
        "write {0}.stats, which shardio.maintenance.compute_stats computes",
    ),
    **dict.fromkeys(("concatenate", "interleave"), "write shardio.mix([…], weights=[…])"),
    "filter": "write {0}.select(lambda columns: …, fields=[…])",
    **dict.fromkeys(
        ("groupby", "query"), "write {0}.select(lambda columns: …, fields=[…]) for each group"
    ),
    **dict.fromkeys(
        ("export", "to_csv", "to_json", "to_parquet"),
        'write shardio.export.export(dataset, out, "parquet"), or "files" for JSON Lines',
    ),
    **dict.fromkeys(("get_item", "iloc", "loc"), "write {0}[i]"),
    "head": "write {0}[:n]",
    "tail": "write {0}[-n:]",
    **dict.fromkeys(
        ("items", "labels", "numpy", "targets", "to_numpy", "values"), 'write {0}.column("label")'
    ),
    **dict.fromkeys(("n_bytes", "nbytes"), "write dataset.shards.n_bytes"),
    **dict.fromkeys(("n_shards", "num_shards"), "write len(dataset.shards)"),
    "prefetch": "write shardio.ShardLoader({0}, batch_size, prefetch=…)",
    **dict.fromkeys(
        ("apply", "map", "set_transform", "target_transform", "transform", "with_transform"),
        "write shardio.ShardLoader({0}, batch_size, transform=f), which calls f(sample)",
    ),
    **dict.fromkeys(("n_classes", "num_classes"), "write len(dataset.classes)"),
    "num_columns": "write len({0}.schema)",
    **dict.fromkeys(
        ("n_rows", "n_samples", "num_rows", "num_samples", "shape", "size"),
        "write len({0})",
    ),
    "version": "write dataset.generation",
    **dict.fromkeys(
        ("push_to_hub", "save", "save_to_disk"),
        "the folder dataset.path is all of it; shardio.export.export writes other formats",
    ),
    **dict.fromkeys(
        ("random_split", "split", "train_test_split"),
        'write shardio.maintenance.split(path, …), then shardio.open(path, subset="train")',
    ),
    **dict.fromkeys(
        ("remove_columns", "select_columns"),
        "write shardio.ShardLoader({0}, batch_size, fields=[…])",
    ),
    "repeat": "every iteration of a shardio.ShardLoader is one epoch",
    **dict.fromkeys(
        ("cast", "cast_column", "rename_column"),
        "write changed samples: shardio.convert(({{…}} for sample in {0}), out, schema=…)",
    ),
    **dict.fromkeys(
        ("set_format", "to_torch", "with_format"),
        'write shardio.ShardLoader({0}, batch_size, output="torch")',
    ),
    "shuffle": "write shardio.ShardLoader({0}, batch_size, shuffle=True)",
    "skip": "write {0}.select(range(n, len({0})))",
    "sort": 'write {0}.select(numpy.argsort({0}.column("label")))',
    "take": "write {0}.select(range(n)), or {0}[:n] for a list",
    **dict.fromkeys(
        ("to_pandas", "to_polars"), 'write pandas.DataFrame({{"label": {0}.column("label"), …}})'
    ),
    "splits": "write dataset.subsets",
    **dict.fromkeys(("to_dict", "to_list"), "write list({0})"),
    "unique": 'write numpy.unique({0}.column("label"))',
    "value_counts": 'write numpy.unique({0}.column("label"), return_counts=True)',
    "shard": "write shardio.ShardLoader({0}, batch_size, rank=…, world_size=…)",
}
"""Corrections for attributes that datasets of other libraries have; {0} stands for a variable with
the dataset or view.
"""


def refuse_sum(*_: object) -> NoReturn:
    """Raise TypeError for a sum of datasets or views, because torch and NumPy define such sums."""
    raise TypeError(
        "datasets have no sum: shardio.mix([a, b], weights=[1, 1]) draws from several, and "
        "shardio.maintenance.merge(out, a, b) writes one of their samples; "
        "shardio.convert(samples, path, append=True) adds samples to a dataset"
    )


DATASET_ADVICE: Final = {k: text.format("dataset") for k, text in _ATTRIBUTE_ADVICE.items()}
_VIEW_ADVICE: Final = {
    **{name: text.format("view") for name, text in _ATTRIBUTE_ADVICE.items()},
    **{name: f"write view.dataset.{name}" for name in ("classes", "path", "stats", "subsets")},
    **{
        name: f"write view.dataset.{name}(…), which its dataset has"
        for name in ("clips", "pack", "preload", "windows")
    },
}


class Table(NamedTuple):
    """An array that a view needs in every process of a loader; `what` names it in messages."""

    array: npt.NDArray[Any]
    what: str


Tables = Mapping[str, npt.NDArray[Any]]
ViewFactory = Callable[[Dataset, Tables], "SampleView"]


class SampleView(Sequence[dict[str, Any]], Listed):
    """A sequence of samples derived from the rows of a borrowed dataset.

    Not thread-safe. `view[i]` is the sample that a ShardLoader of the view delivers, with images,
    clips and audio decoded. On first use, a view reads its tables from the indices of the shards;
    `repr` does not.
    """

    _public = "column dataset sample schema select sources_of subset"

    spans_rows = False
    """True if a sample may contain data of several rows."""
    videos: tuple[str, ...] = ()
    """The fields of videos whose frames are decoded."""
    clip: Clip | None = None
    """The options of clips; None if samples are not clips."""

    def __init__(self, dataset: Dataset) -> None:
        self.dataset = dataset

    @property
    def options(self) -> tuple[Any, ...]:
        """The options of the view: the arguments of its class after the dataset."""
        return ()

    if not TYPE_CHECKING:  # type checkers would accept any attribute

        def __getattr__(self, name: str) -> Any:
            return missing_attribute(self, name, _VIEW_ADVICE)

        __add__ = __radd__ = refuse_sum

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.dataset, *self.options)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.summary} in {self.dataset!r})"

    def _ipython_key_completions_(self) -> list[str]:
        return list(self._reader.names)

    def _repr_html_(self) -> str:
        return view_html(self)

    @property
    @abstractmethod
    def summary(self) -> str:
        """A text on the samples, with their number if the view has read its tables."""

    @property
    def is_read(self) -> bool:
        """True if the view has read its tables, or needs no tables."""
        return True

    @property
    def fields(self) -> tuple[str, ...]:
        """The fields of the dataset that a sample contains or is derived from."""
        return tuple(self.dataset.schema)

    def stored_fields(self, names: tuple[str, ...], *, is_explicit: bool) -> tuple[str, ...]:
        """Return the stored fields that the view reads for a loader with `fields=names`.

        Unsuitable fields are left out if the user did not pass `names` (`is_explicit` is False).

        Raises:
            InvalidArgument: the view cannot have these fields.
        """
        return names

    @property
    def schema(self) -> Schema:
        """The schema of a sample, in which the height and width of images are not fixed."""
        stored = Schema({name: self.dataset.schema[name] for name in self.fields})
        return image_schema(audio_schema(self.sample_schema(stored), self._audio), self.fields)

    @cached_property
    def _audio(self) -> Mapping[str, AudioField]:
        names = media_fields(self.dataset.schema, self.fields, "audio")
        return self.audio(dict.fromkeys(names, Sound()))

    @cached_property
    def _reader(self) -> SampleReader:
        pictures = media_fields(self.dataset.schema, self.fields, "image")
        return self.reader(self.fields, pictures, self._audio)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self.sample(i) for i in range(*index.indices(len(self)))]
        return self.column(index) if isinstance(index, str) else self.sample(index)

    def column(self, name: str, rows: Any = None) -> Any:
        """Return the values of a stored field, of all samples or of some, as a dataset does.

        Args:
            name: the name of a field whose values are not decoded, nor made of several rows.
            rows: the indices of samples, or a mask; by default all samples.

        Raises:
            KeyError: there is no such field.
            InvalidArgument: the field is decoded for each sample, or `rows` does not match.
            ShardCorrupt, …: the values cannot be read.
        """
        reader = self._reader
        if name not in reader.names:
            raise unknown_field(repr(self), name, reader.names)
        if not reader.has_stored_values(name):
            stored = f", or view.dataset[{name!r}] for the stored values"
            raise InvalidArgument(
                f"{self!r}: the values of {name!r} are computed for each sample, so there is no "
                f"column: write [sample[{name!r}] for sample in view]"
                f"{stored * (name in self.fields)}"
            )
        n = len(self)
        numbers = np.arange(n) if rows is None else check_rows(rows, n, "rows")
        return self.dataset.column_at(name, self.at(numbers))

    def sample(self, index: int, *, seed: int = 0, epoch: int = 0) -> dict[str, Any]:
        """Return a sample with the random draws of a loader with shuffle=False.

        In a mixture, the draws are those at the sample's first position in the epoch. If the epoch
        leaves the sample out, the draws are those at a position after the epoch's end.

        Args:
            index: the index of the sample; a negative one counts from the end.
            seed, epoch: the loader's seed, and the epoch, from 0 up.

        Raises:
            IndexError: there is no such sample.
            InvalidArgument: the seed or the epoch is invalid.
            ShardChanged: a mapped file was truncated.
            ShardCorrupt, MediaError: the message names the sample.
        """
        seed, epoch = check_count("seed", seed, 0), check_count("epoch", epoch, 0)
        number, n = row_index("view", index, "[view[i] for i in indices]"), len(self)
        if not -n <= number < n:
            raise IndexError(f"{self!r}: there is no sample {number}")
        numbers = np.array([number % n])
        keys = Keys(seed, epoch, self.positions(numbers, seed, epoch))
        chunk = IndexChunk(self, numbers, keys)
        self.dataset.files.check_lengths(chunk.covered(slice(None))[1])
        return self._reader.read(chunk, 0)

    @refuses(SELECT_ADVICE)
    def select(
        self,
        rows: Callable[[dict[str, npt.NDArray[Any]]], Any] | Sequence[Any] | npt.NDArray[Any],
        *,
        fields: Sequence[str] = (),
    ) -> Self:
        """Return a view of some rows with the same options; see `ShardDataset.select`."""
        return self.with_dataset(self.dataset.select(rows, fields=fields))

    def subset(self, name: str) -> Self:
        """Return a view of a subset with the same options."""
        return self.with_dataset(self.dataset.subset(name))

    def sources_of(self, indices: Any) -> Rows:
        """Return, for each index of a sample, the index of the mixture's source that contains it.

        Raises:
            InvalidArgument: an index is invalid.
        """
        numbers = np.asarray(indices)
        check_positions(numbers.reshape(-1), len(self), "indices")
        return np.searchsorted(self.source_ends, numbers, side="right")

    def reader(
        self, fields: tuple[str, ...], pictures: tuple[str, ...], audio: Mapping[str, AudioField]
    ) -> SampleReader:
        """Return a reader of `fields` that decodes the images `pictures` and the sound `audio`."""
        dataset, made = self.dataset, self.sources(audio)
        made |= {name: ImageSource(dataset, name) for name in pictures}
        columns = dataset.schema.columns
        for name in fields:
            if name not in made:
                made[name] = (ColumnSource if name in columns else RecordSource)(dataset, name)
        return SampleReader(dataset, [made[name] for name in fields])

    def sources(self, audio: Mapping[str, AudioField]) -> dict[str, FieldSource]:
        """Return the sources of clips, windows and decoded audio, by the name of the field."""
        return {name: AudioSource(self.dataset, each) for name, each in audio.items()}

    def with_dataset(self, dataset: Dataset) -> Self:
        """Return a view of another dataset with the same options."""
        return type(self)(dataset, *self.options)

    def reopened(self, dataset: Dataset) -> SampleView:
        """Return an equal view of `dataset`, which is this view's dataset opened again."""
        if not self.is_read:
            return self.with_dataset(dataset)
        return self.factory(dataset, {name: table.array for name, table in self.tables().items()})

    @property
    def factory(self) -> ViewFactory:
        """A picklable function that creates an equal view of the same dataset from `tables`."""
        return functools.partial(restored_view, type(self), self.options)

    def restore(self, tables: Tables) -> None:
        """Take the `tables` of an equal view."""

    def sample_schema(self, schema: Schema) -> Schema:
        """Return the schema of the view's samples, given the schema of the stored fields."""
        return schema

    @property
    def identity(self) -> str:
        """Text that distinguishes the view from other views; empty for a RowView of all rows."""
        options = (each.identity for each in self.options)
        return " ".join(filter(None, (self.dataset.rows.identity, *options)))

    @property
    def source_ends(self) -> Rows:
        """The cumulative sample counts of a mixture's sources."""
        return np.cumsum(self.dataset.rows.source_counts)

    def at(self, numbers: Rows) -> Rows:
        """Return the row of each sample: the row of a clip's video, or a window's first row."""
        return self.dataset.rows.at(numbers)

    def covered_rows(self, numbers: Rows) -> Rows:
        """Return every row from which any of these samples takes data."""
        return self.at(numbers)

    def positions(self, numbers: Rows, seed: int, epoch: int) -> Rows:
        """Return the positions of samples in an unshuffled epoch; `numbers` if nothing is drawn."""
        return numbers

    def draws(self, numbers: Rows, keys: Keys) -> ClipDraws | None:
        """Return the random draws of some samples; None if the samples are not clips."""
        return None

    def audio(self, sounds: Mapping[str, Sound]) -> dict[str, AudioField]:
        """Return the format of decoded audio, given the requested format of each field."""
        return {name: audio_field(self.dataset, name, s, self.clip) for name, s in sounds.items()}

    @property
    def clip_grouping(self) -> ClipGrouping | None:
        """The groups of clips that stay together in a shuffle; None if there are no groups."""
        return None

    @property
    def stream_tokens(self) -> tuple[int, ...] | None:
        """The number of tokens of each source if the last window is padded; else None."""
        return None

    def no_shards_reason(self) -> str | None:
        """Return the reason why the samples are not in shard order; None if they are."""
        rows = self.dataset.rows.row_list
        if rows is None or rows.is_ascending:
            return None
        return "this selection is in another order: sort the indices for select()"

    @property
    def shard_ends(self) -> Rows:
        """The cumulative sample counts of the shards; requires samples in the order of shards."""
        return self.dataset.rows.shard_ends

    def tables(self) -> Mapping[str, Table]:
        """Return the tables from which another process creates the view again."""
        return {}


class RowView(SampleView):
    """A view whose samples are the rows of a dataset, decoded."""

    def __len__(self) -> int:
        return len(self.dataset)

    def __repr__(self) -> str:
        return f"RowView({self.summary} of {self.dataset!r})"

    @property
    def summary(self) -> str:
        """The number of rows."""
        return f"{len(self)} rows"


class DividedView(SampleView):
    """A view that has any number of samples for each row."""

    @property
    @abstractmethod
    def sample_ends(self) -> Rows:
        """The cumulative sample counts of the rows."""

    def __len__(self) -> int:
        return int(self.sample_ends[-1]) if len(self.sample_ends) else 0

    def at(self, numbers: Rows) -> Rows:
        """Return the row of each sample."""
        return self.dataset.rows.at(np.searchsorted(self.sample_ends, numbers, "right"))

    @property
    def source_ends(self) -> Rows:
        """The cumulative sample counts of a mixture's sources."""
        return sums_at(self.sample_ends, super().source_ends)

    @property
    def shard_ends(self) -> Rows:
        """The cumulative sample counts of the shards."""
        return sums_at(self.sample_ends, super().shard_ends)


def sums_at(ends: Rows, n_rows: Rows) -> Rows:
    """Return the number of samples in the first n rows, for each n; `ends` accumulate counts."""
    found: Rows = np.concatenate([[0], ends])[n_rows]
    return found


def restored_view(
    kind: type[SampleView], options: tuple[Any, ...], dataset: Dataset, tables: Tables
) -> SampleView:
    """Return a view of `dataset` from the options and the tables of an equal view."""
    found = kind(dataset, *options)
    found.restore(tables)
    return found
