"""`convert`, the public entry point: dispatch files, Python objects and uploads."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from shardio._workers.ray_cluster import Engine, EngineName
from shardio.conversion.append import PathName, load_base
from shardio.conversion.classes import (
    apply_labels,
    read_labels,
    warn_about_split,
    without_folder_classes,
)
from shardio.conversion.converter import Converter
from shardio.conversion.data_frames import FrameRows, is_data_frame
from shardio.conversion.execution import ConvertOptions, convert_inputs
from shardio.conversion.inputs import Listing, list_inputs
from shardio.conversion.python_samples import (
    MapStyleSamples,
    append_samples,
    as_mapping,
    convert_items,
    convert_samples,
    index_runs,
    is_map_style,
)
from shardio.conversion.report import ConversionReport, Progress
from shardio.conversion.upload import Upload
from shardio.dataset.manifest import check_folder_name
from shardio.errors import InvalidArgument
from shardio.format.schema import Schema
from shardio.storage.remote.connection import is_url


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
    """Convert a folder of files, or Python samples or items, into a dataset at `out`.

    Every file below `src` is read and listed in the report. `src` may be a pattern
    (`"shards/train-*.tar"`); paths are then relative to the folder above the first wildcard. A
    broken file gives no samples; with `keep_partial` the samples before the damage are kept.
    `on_error="stop"` ends the conversion at the first broken file in name order, and publishes
    everything before it. The bytes of the dataset depend neither on `workers` (0: convert in this
    process; default: one per usable CPU) nor on the speed of the machine.

    An interrupted conversion keeps its finished units in `out`. The next conversion to `out` must
    then be called with `resume` or `overwrite`. `resume` keeps each finished unit whose shards are
    intact and whose inputs have not changed; the dataset is the same as without an interruption.
    `overwrite` starts again, and replaces a dataset in `out` once the new one is complete. If no
    input gives a sample, nothing is published: `out` is not changed, and the report has the outcome
    of each input.

    With `append`, the dataset at `out` gets a new generation: existing samples keep their
    positions, classes keep their indices, and new samples are added at the end. Files that the
    dataset already has are not converted again: the outcome of such a file is `"duplicate"`, or
    `"modified"` if its content changed. Options that are not given are taken from the dataset.

    Instead of files, `src` may be an iterable of samples or a pandas or polars data frame, both
    written by this process; or a map-style data set with `__len__` and `__getitem__`, as in torch;
    or, with `samples`, an iterable of items that this function converts to samples. Map-style data
    sets and items are converted like files, with each item or index as an input. `schema`
    applies only to sources other than files; it defaults to the schema of the dataset or of the
    first sample. `options` are passed to the converter.

    Args:
        samples: a function that returns one sample, several samples, or None for an item. Any
            function can be sent to the workers, including lambdas and functions of a notebook. If
            the function raises, the item is broken.
        names: field names for samples that are tuples.
        kind: the converter, such as "videos", "images", "audio" or "arrays", or an installed
            third-party converter. By default the converter of the dataset in an append, else a
            guess from file names.
        labels: a CSV or JSON Lines file with the class of each path, used instead of folder names;
            see `read_labels`.
        storage_options: options of obstore for the object store, if `out` is a URL. Shards are
            uploaded as they are finished; the cache folder holds shards in progress and the state
            needed to resume.
        engine: "local", or "ray" to convert on the machines of a Ray cluster, all of which must see
            `src` and `out` under these paths; `workers` is then the total number of processes. The
            bytes are the same, and each engine can resume a conversion that the other has started.
        address: the address of the Ray cluster, as for `ray.init`; by default the environment
            variable RAY_ADDRESS, or if that is not set, a Ray started on this machine.
        progress: called in this process, at the start and after every input.

    Raises:
        InvalidArgument: `src` does not exist, is empty, matches nothing or has no file of the kind;
            `out` is not a valid folder name; an option is invalid; or options or versions differ
            from those of the conversion to resume.
        DatasetExists: `out` already contains data, or an interrupted conversion.
        DatasetNotFound: there is no dataset to append to.
        DatasetConflict: another process is writing to `out`.
        WorkerDied: a converter raised, or workers crashed outside of any input. As after every
            other error, finished units stay in `out`; without finished units, nothing stays.
    """
    if shard_bytes < 1:
        raise InvalidArgument(f"shard_bytes is {shard_bytes}; it must be at least 1")
    options_given = ConvertOptions(
        kind=kind,
        converter_options=options,
        workers=workers,
        on_error=on_error,
        keep_partial=keep_partial,
        progress=progress,
        shard_bytes=shard_bytes,
        resume=resume,
        overwrite=overwrite,
        append=append,
        labels=labels,
        engine=Engine(engine, address),
    )
    source = _Source(src, samples, names, schema, out)
    if not (isinstance(out, str) and is_url(out)):
        return source.convert(out, options_given)
    with Upload(out, storage_options, resume=resume, append=append, overwrite=overwrite) as upload:
        if (
            upload.is_converted and not upload.has_plan
        ):  # Python samples; the process that converted them was killed before publishing
            return upload.publish()
        report = source.convert(upload.folder, replace(options_given, uploader=upload.uploader))
        return upload.publish(report) if report.generation else upload.discard(report)


@dataclass(frozen=True, slots=True)
class _Source:
    """The arguments of `convert` that describe the source, and the given `out` for messages.

    The source is a path or a Python object: samples, items, a map-style data set or a data frame.
    """

    src: Any
    samples: Callable[[Any], Any] | None
    names: Sequence[str] | None
    schema: Schema | None
    out_name: PathName

    def convert(self, out: PathName, options: ConvertOptions) -> ConversionReport:
        """Convert into a local folder, which is a cache if `out_name` is a URL."""
        check_folder_name(out)
        if self.samples is None and isinstance(self.src, str | os.PathLike):
            return self._convert_files(os.fspath(self.src), out, options)
        self._check_names()
        self._check_object()
        if self.samples is None and (
            is_data_frame(self.src) or not is_map_style(self.src, options.workers)
        ):
            options.check_for_samples()
            to_dataset = append_samples if options.append else convert_samples
            schema, rows = self._rows(append=options.append)
            return to_dataset(rows, os.fspath(out), schema, options.shard_bytes)
        options.check_for_items()
        if self.samples is not None:
            return convert_items(
                self.src,
                self.samples,
                _function_name(self.samples),
                out,
                options,
                self.schema,
                self.names,
            )
        runs, name = index_runs(len(self.src)), type(self.src).__qualname__
        indexing = MapStyleSamples(self.src)
        return convert_items(runs, indexing, name, out, options, self.schema, self.names)

    def _convert_files(self, src: str, out: PathName, options: ConvertOptions) -> ConversionReport:
        if self.names is not None:
            raise InvalidArgument("names: only for samples that are tuples, not for files")
        options = replace(options, source=src)
        options.check_for_inputs(self.schema)
        base = load_base(out) if options.append else None
        staging = options.make_staging(out)
        listing = list_inputs(src, exclude=str(staging.out))
        # Validate the options before anything is created, so that an error leaves no files behind.
        source, listing = options.fit_source(base, listing, out)
        if options.labels is None:
            has_own_classes = source.class_names() is not None
            warn_about_split(
                listing.classes, src, os.fspath(self.out_name), are_classes=not has_own_classes
            )
        listing = _labelled(listing, source, options.labels)
        return convert_inputs(listing, staging, options.make_job(source, base, staging), options)

    def _check_names(self) -> None:
        if self.samples is not None and not callable(self.samples):
            raise InvalidArgument(
                f"samples must be a function of an item; found {type(self.samples).__name__}"
            )
        names = self.names
        if isinstance(names, str) or not all(isinstance(name, str) for name in names or ()):
            raise InvalidArgument(f"names must be a sequence of strings; found {names!r}")
        if self.samples is not None and isinstance(self.src, str | bytes):
            raise InvalidArgument(
                f"{self.src!r}: with samples=, expected an iterable of items, such as "
                "sorted(folder.iterdir()); found one string"
            )

    def _check_object(self) -> None:
        kind = type(self.src)
        readable = ("__iter__", "__getitem__", "__arrow_c_stream__")
        is_iterable = any(hasattr(kind, name) for name in readable)
        if is_iterable and (self.samples is not None or not isinstance(self.src, Mapping)):
            return
        raise InvalidArgument(
            f"found a {kind.__name__}; expected a path, an iterable of dicts, a map-style data "
            "set, a data frame, or items together with samples=, a function that converts an item "
            "to samples"
        )

    def _rows(self, *, append: bool) -> tuple[Schema | None, Iterable[Mapping[str, Any]]]:
        """Return the schema (None if inferred from the first sample) and the samples."""
        if not is_data_frame(self.src):
            return self.schema, (as_mapping(value, self.names) for value in self.src)
        if self.names is not None:
            raise InvalidArgument("names: not for data frames; rename the columns instead")
        rows = FrameRows(self.src)
        return rows.schema if self.schema is None and not append else self.schema, rows


def _labelled(listing: Listing, source: Converter, labels: PathName | None) -> Listing:
    """Return the inputs with the classes of the label file or the converter, if any."""
    if labels is not None:
        path = os.fspath(labels)
        listing = apply_labels(listing, read_labels(path), path)
    if (classes := source.class_names()) is None:
        return listing
    if labels is not None:
        raise InvalidArgument(
            f"labels: the samples of {source.kind!r} have labels of their own or no classes "
            "here; leave labels out"
        )
    return without_folder_classes(listing, tuple(classes))


def _function_name(function: Callable[[Any], Any]) -> str:
    """Return the name under which a function is recorded in the dataset."""
    while hasattr(function, "func"):  # functools.partial
        function = function.func
    return str(getattr(function, "__qualname__", type(function).__qualname__))
