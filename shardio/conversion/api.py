"""What is converted that is no file: samples, items, data sets and data frames of the program.

`convert`: what users call; files and samples from an iterable go their ways from here.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from shardio._workers.ray.cluster import Engine, EngineName
from shardio.conversion.append import load_base
from shardio.conversion.classes import (
    apply_labels,
    read_labels,
    warn_about_split,
    without_folder_classes,
)
from shardio.conversion.data_frames import FrameRows, is_data_frame
from shardio.conversion.execution import append_inputs, convert_inputs
from shardio.conversion.inputs import Listing, list_inputs
from shardio.conversion.options import ConvertOptions
from shardio.conversion.python_items import (
    MapStyleSamples,
    convert_items,
    is_map_style,
    position_runs,
)
from shardio.conversion.python_samples import append_samples, as_mapping, convert_samples
from shardio.conversion.report import ConversionReport, Progress
from shardio.conversion.source import Source, classes_of
from shardio.conversion.staging import Staging
from shardio.conversion.upload import Upload
from shardio.dataset.manifest import check_folder_name
from shardio.errors import InvalidArgument
from shardio.format.schema import Schema
from shardio.storage.remote.options import is_url


@dataclass(frozen=True, slots=True)
class PythonSource:
    """A source that lives in this program, and what is said of its samples."""

    src: Any
    samples: Callable[[Any], Any] | None
    names: Sequence[str] | None
    schema: Schema | None

    def convert(
        self, out: str, options: ConvertOptions, *, append: bool, labels: bool
    ) -> ConversionReport:
        """Convert it into a dataset at `out`, or into more of it.

        Raises:
            InvalidArgument: it is nothing that samples come from, or an option is not for it.
        """
        self._check()
        self._check_source()
        if self.samples is None and (
            is_data_frame(self.src) or not is_map_style(self.src, options.workers)
        ):
            options.check_for_samples(labels=labels)
            to_dataset = append_samples if append else convert_samples
            schema, rows = self._rows(append=append)
            return to_dataset(rows, out, schema, options.shard_bytes)
        options.check_for_items(labels=labels)
        items, make, function = self._items()
        return convert_items(
            items,
            make,
            function,
            out,
            options,
            schema=self.schema,
            names=self.names,
            append=append,
        )

    def _check(self) -> None:
        if self.samples is not None and not callable(self.samples):
            raise InvalidArgument(
                f"samples must be a function of an item; found {type(self.samples).__name__}"
            )
        names = self.names
        if isinstance(names, str) or not all(isinstance(name, str) for name in names or ()):
            raise InvalidArgument(f"names must be a sequence of strings; found {names!r}")
        if self.samples is not None and isinstance(self.src, str | bytes):
            raise InvalidArgument(
                f"{self.src!r}: with samples=, expected an iterable of items, as "
                "sorted(folder.iterdir()); found one string"
            )

    def _check_source(self) -> None:
        kind = type(self.src)
        is_iterable = hasattr(kind, "__iter__") or hasattr(kind, "__getitem__")
        if is_iterable and (self.samples is not None or not isinstance(self.src, Mapping)):
            return
        raise InvalidArgument(
            f"found a {kind.__name__}; expected a folder, an iterable of samples, each a dict, a "
            "data set, a data frame, or items with samples=, a function that makes samples of one"
        )

    def _items(self) -> tuple[Iterable[Any], Callable[[Any], Any], str]:
        """The items, what makes samples of one, and its name."""
        if self.samples is None:
            indexing = MapStyleSamples(self.src)
            return position_runs(len(self.src)), indexing, indexing.name
        return self.src, self.samples, function_name(self.samples)

    def _rows(self, *, append: bool) -> tuple[Schema | None, Iterable[Mapping[str, Any]]]:
        """The samples, and their schema where it is known before the first."""
        if not is_data_frame(self.src):
            return self.schema, self._named()
        if self.names is not None:
            raise InvalidArgument("names: a data frame has its own; rename its columns")
        rows = FrameRows(self.src)
        schema = rows.schema if self.schema is None and not append else self.schema
        return schema, rows

    def _named(self) -> Iterator[Mapping[str, Any]]:
        return (as_mapping(value, self.names) for value in self.src)


def function_name(function: Callable[[Any], Any]) -> str:
    """The name that a function is recorded by."""
    while hasattr(function, "func"):  # a partial
        function = function.func
    return str(getattr(function, "__qualname__", type(function).__qualname__))


PathName = str | os.PathLike[str]


def convert(
    src: Any,
    out: PathName,
    *,
    kind: str | None = None,
    samples: Callable[[Any], Any] | None = None,
    names: Sequence[str] | None = None,
    schema: Schema | None = None,
    workers: int | None = None,
    on_error: Literal["skip", "stop"] = "skip",
    keep_partial: bool = False,
    progress: Callable[[Progress], None] | None = None,
    shard_bytes: int = 256 << 20,
    resume: bool = False,
    overwrite: bool = False,
    append: bool = False,
    labels: PathName | None = None,
    storage_options: Mapping[str, Any] | None = None,
    engine: EngineName = "local",
    address: str | None = None,
    **options: Any,
) -> ConversionReport:
    """Convert a folder of files, or samples or items of this program, into a dataset at `out`.

    Every file below `src`, or that matches it if it is a pattern (`"shards/train-*.tar"`; what is
    before the pattern is the folder then), is looked at and accounted for in the report. A broken
    file gives no sample (`keep_partial`: those before the break); `on_error="stop"` ends at the
    first one in order of names, and publishes what comes before it. The bytes of the dataset depend
    on neither `workers` (0: in this process; default: one per usable CPU) nor the machine's speed.

    What a conversion has finished stays in `out` when it ends early, however it ends. The next one
    is refused there, unless it is to `resume`: finished units are kept if every byte of them is
    what it was and their inputs have not changed; the result is that of a conversion that was never
    interrupted. Or it may `overwrite`: it begins anew, and a dataset in `out` gives way when the
    new one is done. Where no input gives a sample, nothing is published: `out` stays as it was, and
    the report says what became of each.

    The dataset is a new one, or with `append` the one at `out`, which gets a new generation: its
    samples keep their positions and classes their numbers, what is new comes behind them. Files
    whose samples it has are not converted again (`"duplicate"`, or `"modified"` if the content is
    different). Options that are not given are those that it was made with.

    Instead of files, `src` may be an iterable of samples, or a data frame of pandas or polars,
    which this process writes; a data set with `__len__` and `__getitem__`, as torch's are; or with
    `samples` an iterable of items that this function makes samples of. The latter two are
    converted as files are, each item or position an input. `schema` is for these sources: it is
    taken from the first sample, or the dataset, where it is not given. `options` are the
    converter's own.

    Args:
        samples: gives for an item a sample, several, or None. It travels to the workers, as lambdas
            and functions of a notebook do. What it raises breaks the item.
        names: the fields, where samples are tuples.
        kind: the converter, such as "videos", "images", "audio" or "arrays", or another installed.
            Without it, that of the dataset that is appended to; else told from the names of files.
        labels: a CSV or JSON Lines file with the class of each path, instead of folders; see
            `read_labels`.
        storage_options: where `out` is the URL of a place in an object store: what obstore takes.
            Shards go there as they are finished; the folder of the cache has those under way, and
            what a conversion that goes on needs to know.
        engine: "local", or "ray": the machines of a Ray cluster convert, all of which must see
            `src` and `out` under these paths; `workers` are processes on all of them together. The
            bytes are the same, and each engine goes on with what the other has begun.
        address: of the Ray cluster, as `ray.init` takes it; by default what RAY_ADDRESS says, and
            without that Ray is started here.
        progress: called in this process, at the start and after every input.

    Raises:
        InvalidArgument: `src` does not exist, holds no file, or none of the kind, or matches none,
            `out` is no name of a folder, an option is not acceptable, or it is to resume with other
            options or versions than the interrupted conversion had.
        DatasetExists: `out` already holds data, or an interrupted conversion.
        DatasetNotFound: there is nothing to append to.
        DatasetConflict: another writer is at work in `out`.
        WorkerDied: a converter raised, or workers died without an input to blame. As after every
            other error, finished units stay in `out`; if there is none, nothing does.
    """
    if shard_bytes < 1:
        raise InvalidArgument(f"shard_bytes is {shard_bytes}; it must be at least 1")
    convert_options = ConvertOptions(
        kind,
        options,
        workers,
        on_error,
        keep_partial,
        progress,
        shard_bytes,
        resume,
        overwrite,
        Engine(engine, address),
    )
    conversion = _Conversion(src, samples, names, schema, labels, append, out)
    if not (isinstance(out, str) and is_url(out)):
        return conversion.convert(out, convert_options)
    folder_options = {"append": append, "overwrite": overwrite}
    with Upload(out, storage_options, resume=resume, **folder_options) as upload:
        if upload.is_converted and not upload.has_plan:  # of samples that came from a program
            return upload.publish()
        convert_options = replace(convert_options, uploader=upload.uploader)
        report = conversion.convert(upload.folder, convert_options)
        return upload.publish(report) if report.generation else upload.discard(report)


@dataclass(frozen=True, slots=True)
class _Conversion:
    """What is converted, of the arguments of `convert`."""

    src: Any
    samples: Callable[[Any], Any] | None
    names: Sequence[str] | None
    schema: Schema | None
    labels: PathName | None
    append: bool
    out: PathName

    def convert(self, out: PathName, options: ConvertOptions) -> ConversionReport:
        """Convert it into a folder."""
        check_folder_name(out)
        if self.samples is None and isinstance(self.src, str | os.PathLike):
            return self._convert_files(os.fspath(self.src), out, options)
        given = PythonSource(self.src, self.samples, self.names, self.schema)
        has_labels = self.labels is not None
        return given.convert(os.fspath(out), options, append=self.append, labels=has_labels)

    def _convert_files(self, src: str, out: PathName, options: ConvertOptions) -> ConversionReport:
        if self.names is not None:
            raise InvalidArgument("names: only for samples that are tuples, not for files")
        options = replace(options, source=src)
        options.check_for_inputs(self.schema, append=self.append)
        base = load_base(out) if self.append else None
        staging = Staging(
            os.fspath(out),
            resume=options.resume,
            overwrite=options.overwrite,
            appends=self.append,
            hint=options.hint,
        )
        listing = list_inputs(src, exclude=str(staging.out))
        # Now, so that options are refused before anything is made.
        job_for_folder, listing = options.make_job(base, listing, out)
        job = job_for_folder(str(staging.folder))
        if self.labels is None:
            names_own = classes_of(job.source) is not None
            out_named = os.fspath(self.out)  # the folder `out` may be a cache of a store's place
            warn_about_split(listing.classes, src, out_named, are_classes=not names_own)
        listing = self._labelled(listing, job.source)
        return (append_inputs if self.append else convert_inputs)(listing, staging, job, options)

    def _labelled(self, listing: Listing, source: Source) -> Listing:
        """The inputs with the classes that a file, or what reads them, says."""
        if self.labels is not None:
            place = os.fspath(self.labels)
            listing = apply_labels(listing, read_labels(place), place)
        if (classes := classes_of(source)) is None:
            return listing
        if self.labels is not None:
            raise InvalidArgument(
                f"labels: the samples of {source.kind!r} have labels of their own here, or are "
                "of no class: leave it out"
            )
        return without_folder_classes(listing, classes)
