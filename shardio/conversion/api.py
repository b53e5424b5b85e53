"""`convert`, the public entry point, which selects the functions for each kind of source."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Literal, Unpack, overload

from shardio._base.callers import expand_home, refuses
from shardio._base.progress import shows_progress
from shardio._workers.ray_cluster import Engine, EngineName
from shardio.conversion.append import PathName, load_base
from shardio.conversion.classes import (
    apply_labels,
    read_labels,
    split_listing,
    uses_split_folders,
    warn_of_equal_names,
    without_empty_classes,
    without_folder_classes,
)
from shardio.conversion.converter import Converter, kind_of
from shardio.conversion.data_frames import (
    FrameRows,
    class_names_of,
    hugging_face_splits,
    is_data_frame,
    is_hugging_face_table,
    table_rows_at,
)
from shardio.conversion.execution import ConvertOptions, convert_inputs
from shardio.conversion.inputs import Listing, list_inputs
from shardio.conversion.python_samples import (
    as_mapping,
    convert_items,
    index_runs,
    is_map_style,
    samples_at,
)
from shardio.conversion.report import (
    ConversionReport,
    Progress,
    progress_state,
    warn_of_broken,
)
from shardio.conversion.sample_writing import SamplePart, write_samples
from shardio.conversion.staging import Staging
from shardio.conversion.upload import Upload
from shardio.dataset.dataset import Dataset
from shardio.dataset.generation import Generation
from shardio.dataset.manifest import check_folder_name, holds_dataset, refuse_nested
from shardio.dataset.writer import check_shard_bytes
from shardio.errors import InvalidArgument, SchemaError
from shardio.format.schema import Schema
from shardio.samples.view import SampleView
from shardio.storage.remote.connection import is_url

if TYPE_CHECKING:
    from shardio.conversion.option_types import (
        ArrayOptions,
        ArrowOptions,
        CommonOptions,
        FieldOptions,
        GuessedOptions,
        ImageOptions,
        LeRobotOptions,
        RecordOptions,
        TableOptions,
        TokenOptions,
        VideoOptions,
    )


@overload
def convert(
    src: Any, out: PathName, *, kind: Literal["videos"], **options: Unpack[VideoOptions]
) -> ConversionReport: ...
@overload
def convert(
    src: Any, out: PathName, *, kind: Literal["images"], **options: Unpack[ImageOptions]
) -> ConversionReport: ...
@overload
def convert(
    src: Any,
    out: PathName,
    *,
    kind: Literal["arrays", "hdf5", "zarr"],
    **options: Unpack[ArrayOptions],
) -> ConversionReport: ...
@overload
def convert(
    src: Any, out: PathName, *, kind: Literal["arrow"], **options: Unpack[ArrowOptions]
) -> ConversionReport: ...
@overload
def convert(
    src: Any, out: PathName, *, kind: Literal["tables"], **options: Unpack[TableOptions]
) -> ConversionReport: ...
@overload
def convert(
    src: Any, out: PathName, *, kind: Literal["mds", "webdataset"], **options: Unpack[FieldOptions]
) -> ConversionReport: ...
@overload
def convert(
    src: Any,
    out: PathName,
    *,
    kind: Literal["tfrecord", "arrayrecord"],
    **options: Unpack[RecordOptions],
) -> ConversionReport: ...
@overload
def convert(
    src: Any, out: PathName, *, kind: Literal["tokens"], **options: Unpack[TokenOptions]
) -> ConversionReport: ...
@overload
def convert(
    src: Any, out: PathName, *, kind: Literal["lerobot"], **options: Unpack[LeRobotOptions]
) -> ConversionReport: ...
@overload
def convert(
    src: Any, out: PathName, *, kind: None = ..., **options: Unpack[GuessedOptions]
) -> ConversionReport: ...
@overload
def convert(
    src: Any, out: PathName, *, kind: str, **options: Unpack[CommonOptions]
) -> ConversionReport: ...
@overload
def convert(
    src: Any, out: PathName, *, kind: type[Converter], **options: Any
) -> ConversionReport: ...
@refuses({"out": 'such as shardio.convert("pictures/", "dataset/")'}, "shardio.convert")
@shows_progress(progress_state)
def convert(
    src: Any,
    out: PathName,
    *,
    kind: str | type[Converter] | None = None,
    samples: Callable[[Any], Any] | None = None,
    names: Sequence[str] | None = None,
    schema: Schema | None = None,
    workers: int | None = None,
    on_error: Literal["skip", "stop"] = "skip",
    keep_partial: bool = False,
    progress: Callable[[Progress], None] | bool | None = None,
    shard_bytes: int = 256 << 20,
    resume: bool = False,
    overwrite: bool = False,
    append: bool = False,
    labels: PathName | None = None,
    split: Mapping[str, float] | None = None,
    split_seed: int = 0,
    split_folders: bool | None = None,
    storage_options: Mapping[str, Any] | None = None,
    engine: EngineName = "local",
    address: str | None = None,
    **options: Any,
) -> ConversionReport:
    """Convert a folder of files, or Python samples or items, into a dataset at `out`.

    Every file below the folder `src`, or matching the pattern `src`, is read and reported. Hidden
    files and folders are ignored, and named in the report. A broken file gives no samples; with
    `keep_partial`, it gives the samples before the damage. With `on_error="stop"`, the conversion
    ends at the first broken file in name order, and the samples of all earlier files are published.

    The bytes of the dataset depend neither on the number of processes nor on the speed of the
    machine. If the conversion is interrupted, the shards of finished units (groups of consecutive
    files) stay in `out`, and the next conversion to `out` must be called with `resume` or
    `overwrite`. With `resume`, a finished unit is used again if its shards are intact and its files
    have not changed; if the dataset is complete, nothing is done, and the report has only
    duplicates. With `overwrite`, all files are converted again; a dataset in `out` is
    replaced once the new one is complete. If no file gives a sample, nothing is published.

    With `append`, new samples are published after those of the dataset at `out`, as its next
    generation. Files whose samples the dataset already has are not converted again: their outcome
    is `"duplicate"`, or `"modified"` if their content has changed. Options of the converter default
    to those recorded in the dataset.

    Instead of files, `src` may be one of the following Python objects:

    * an iterable of samples, or a data frame from pandas, polars or another library that exports
      Arrow streams. This process writes the samples.
    * a map-style data set, which has `__len__` and `__getitem__`, as in torch. Its indices are
      divided among the processes. A data set that also has `__iter__` is read by index only if
      `workers` is given; otherwise it is read as an iterable of samples.
    * an iterable of items, if `samples` is given. Items are converted and reported like files.

    Args:
        kind: the name of the converter, such as "videos", "images", "audio" or "arrays"; or the
            name or the class of an installed third-party converter. The default in an append is
            the converter of the dataset; otherwise the kind is guessed from the names of the files.
        samples: a function that takes an item, and returns one sample (a dict, or a tuple of
            values), a list or generator of several samples, or None. The function is sent to the
            processes; it may be a lambda or be defined in a notebook. If it raises an exception,
            the item is reported as broken.
        names: the names of the fields, if samples are tuples or single values. For dicts, names
            other than their keys are an error.
        schema: the schema of the samples of a Python object. The default is the schema of the
            dataset in an append; otherwise that of the data frame or of the first sample.
        workers: the number of processes, by default one per usable CPU. 0 means to convert in this
            process.
        progress: a function that is called in this process before the first file and after every
            file; or True to show the progress on standard error: on a terminal or in a notebook
            as a bar, elsewhere as a line after each tenth of the work. With None, the only message
            is a RuntimeWarning if inputs are broken; with False, there is none.
        labels: a CSV or JSON Lines file with the columns `path` (relative to `src`) and `label`
            (the name of the class). By default, the folder of a file is its class.
        split: maps the names of subsets to their shares of the samples, such as
            `{"train": 0.9, "val": 0.1}`. Samples are assigned at random, in the same way as
            `shardio.maintenance.split` assigns them. If the shares add up to less than 1, the other
            samples are in no subset.
        split_seed: the seed of `split`.
        split_folders: whether folders named like splits, such as `train`, `val` and `test`, become
            subsets. The folders in `train`, `val` and so on are then the classes, which all subsets
            share. If there are no such folders, the option applies to files of tables, records and
            tars that are named like splits (`train.csv`). By default, folders or files become
            subsets if two or more lie side by side; with True, one is enough; with False, such
            folders are ordinary classes. An append uses the setting of the dataset.
        storage_options: options of obstore for the object store, if `out` is a URL. A shard is
            uploaded as soon as it is finished. The cache folder on this machine holds the shards
            that are not uploaded yet, and the state that is needed to resume the conversion.
        engine: "local", or "ray" to convert on the machines of a Ray cluster. All machines must see
            `src` and `out` at these paths. `workers` is the number of processes on all machines
            together, by default one per CPU. A conversion that was started with one engine can be
            resumed with the other.
        address: the address of the Ray cluster, as for `ray.init`. The default is the value of the
            environment variable RAY_ADDRESS; if it is not set, Ray is started on this machine.
        options: the options of the converter. For Python objects, the only one is `classes`: the
            names of the integers in a field `label`, counted from 0.

    Raises:
        InvalidArgument: `src` does not exist, is empty, matches no file, or has no file of the
            converter's kind; `out` is not a valid folder name; an option is invalid; or, with
            `resume`, the options or versions differ from those of the interrupted conversion.
        DatasetExists: `out` already contains data or an interrupted conversion.
        DatasetNotFound: there is no dataset to append to.
        DatasetConflict: another process is writing to `out`.
        WorkerDied: the converter raised an unexpected exception in a worker, or workers crashed
            while they were not reading a file. After this or any other error, finished units stay
            in `out`. If no unit is finished, `out` is as it was before.
    """
    check_shard_bytes(shard_bytes)
    src, out, labels = expand_home(src), expand_home(out), expand_home(labels)
    options_given = ConvertOptions(
        kind=kind_of(kind),
        converter_options=options,
        workers=workers,
        on_error=on_error,
        keep_partial=keep_partial,
        progress=progress if callable(progress) else None,
        shard_bytes=shard_bytes,
        resume=resume,
        overwrite=overwrite,
        append=append,
        labels=labels,
        split=split,
        split_seed=split_seed,
        split_folders=split_folders,
        engine=Engine(engine, address),
    )
    options_given.check()

    def convert_into(folder: PathName, options: ConvertOptions) -> ConversionReport:
        check_folder_name(folder)
        if not holds_dataset(folder):
            refuse_nested(folder)
        options.undo_killed_overwrite(folder)
        if samples is not None or not isinstance(src, str | os.PathLike):
            return _convert_object(src, samples, names, schema, folder, options)
        if names is not None:
            raise InvalidArgument("names: only for samples that are tuples, not for files")
        if is_url(os.fspath(src)):
            raise InvalidArgument(
                f"{src}: convert reads files of this machine: copy them first, for example with "
                "`aws s3 sync` or `gcloud storage rsync`"
            )
        options.check_for_inputs(schema)
        return _convert_files(folder, replace(options, source=os.fspath(src)))

    if not (isinstance(out, str) and is_url(out)):
        report = convert_into(out, options_given)
    else:
        with Upload(out, storage_options, resume=resume, append=append, overwrite=overwrite) as up:
            made = convert_into(up.folder, replace(options_given, uploader=up.uploader))
            report = up.finish(made)
    if progress is None:
        warn_of_broken(report, stacklevel=5)
    return report


def _convert_files(out: PathName, options: ConvertOptions) -> ConversionReport:
    """Convert files into a local folder."""
    src = options.source
    base = load_base(out) if options.append else None
    staging = options.make_staging(out)
    listing = list_inputs(src, exclude=str(staging.out))
    if not options.resume:  # a complete dataset needs no staging to be resumed
        staging.check()  # before converters read inputs to choose a store or to infer fields
    # Validate the options before any file is created: an error then leaves no files in `out`.
    source, listing = options.fit_source(base, listing, out)
    wanted = uses_split_folders(base, wanted=options.split_folders)
    listing = split_listing(listing, source, wanted=wanted, appends=base is not None)
    if listing.subsets and options.split is not None:
        named = ", ".join(sorted({*listing.subsets.values()}))
        raise InvalidArgument(
            f"{src}: {named} are subsets already, because folders or files have these names; leave "
            "split (--split) out, or ignore the names with split_folders=False (--no-split-folders)"
        )
    listing = _labelled(without_empty_classes(listing), source, options.labels)
    warn_of_equal_names([*(base.classes if base else ()), *listing.classes], src)
    options = replace(options, split_folders=bool(wanted if base else listing.subsets))
    drops_label = _drops_label(listing, source, base, staging)
    job = options.make_job(source, base, staging, drops_label=drops_label)
    return convert_inputs(listing, staging, job, options)


def _convert_object(
    src: Any,
    samples: Callable[[Any], Any] | None,
    names: Sequence[str] | None,
    schema: Schema | None,
    out: PathName,
    options: ConvertOptions,
) -> ConversionReport:
    _check_object(src, samples, names)
    if samples is None:
        splits = hugging_face_splits(src)
        if splits or _is_table(src, options.workers) or not is_map_style(src, options.workers):
            reason = "not for samples from an iterable"
            options.refuse(_OPTIONS_OF_INPUTS, reason, accepted=("classes",))
            if splits and options.split is not None:
                raise InvalidArgument(
                    f"split: the source has the splits {', '.join(splits)} already; leave it out"
                )
            parts = [
                _sample_part(one, subset, names, options)
                for subset, one in (splits or {"": src}).items()
            ]
            return write_samples(parts, os.fspath(out), schema, options)
    options.refuse(("kind", "labels", "split_folders"), "only for files", accepted=("classes",))
    if samples is not None:
        return convert_items(src, samples, _function_name(samples), out, options, schema, names)
    items, name = index_runs(len(src)), type(src).__qualname__
    make: Callable[[Any], Any] = partial(samples_at, src)
    classes = class_names_of(src)
    if is_hugging_face_table(src):
        _refuse_names(names)
        make = partial(table_rows_at, src)
        if schema is None and not options.append:
            schema = FrameRows(src).schema
    return convert_items(items, make, name, out, options, schema, names, classes)


def _is_table(src: object, workers: int | None) -> bool:
    """Return True if a source is read column by column, in this process."""
    if isinstance(src, Mapping) or is_data_frame(src):
        return True
    return workers is None and is_hugging_face_table(src)


def _sample_part(
    src: Any, subset: str, names: Sequence[str] | None, options: ConvertOptions
) -> SamplePart:
    if not _is_table(src, options.workers):
        rows = _as_mappings(src, names)
        return SamplePart(rows, None, class_names_of(src), subset)
    _refuse_names(names)
    frame = FrameRows(src)
    return SamplePart(frame, frame.schema, tuple(frame.classes), subset, frame.units)


def _refuse_names(names: Sequence[str] | None) -> None:
    if names is not None:
        raise InvalidArgument("names: not for data frames; rename the columns instead")


def _as_mappings(src: Any, names: Sequence[str] | None) -> Iterator[Mapping[str, Any]]:
    for number, value in enumerate(src):
        try:
            sample = as_mapping(value, names)
        except SchemaError as error:
            raise SchemaError(f"sample {number}: {error}") from error
        yield sample


def _check_object(
    src: Any, samples: Callable[[Any], Any] | None, names: Sequence[str] | None
) -> None:
    if samples is not None and not callable(samples):
        raise InvalidArgument(
            f"samples must be a function of an item; found {type(samples).__name__}"
        )
    given: Any = () if names is None else names
    is_list = isinstance(given, Sequence) and not isinstance(given, str)
    if not is_list or not all(isinstance(name, str) for name in given):
        raise InvalidArgument(f"names must be a sequence of strings; found {names!r}")
    if names is not None and len({*names}) < len(names):
        raise InvalidArgument(f"names must be unique; found {', '.join(map(repr, names))}")
    if samples is not None and isinstance(src, str | bytes):
        raise InvalidArgument(
            f"{src!r}: with samples=, expected an iterable of items, such as "
            "sorted(folder.iterdir()); found one string"
        )
    _refuse_readers(src)
    readable = ("__iter__", "__getitem__", "__arrow_c_stream__")
    is_iterable = any(hasattr(type(src), name) for name in readable)
    if not is_iterable:
        raise InvalidArgument(
            f"found {type(src).__name__}; expected a path, an iterable of dicts, a map-style "
            "data set, a data frame, a dict of arrays, or items together with samples=, a function "
            f"that converts an item to samples{'; call the function' * callable(src)}"
        )


def _refuse_readers(src: Any) -> None:
    """Raise InvalidArgument for a dataset of shardio, and for a loader that returns batches."""
    if isinstance(src, Dataset | SampleView):
        raise InvalidArgument(
            f"found a {type(src).__name__}: its samples are converted already. "
            "shardio.maintenance.merge(out, path) copies a dataset with its types and classes, "
            "and reshard(path, out) also its subsets; for other samples, pass an iterable of "
            "dicts, and schema= with the types of the fields"
        )
    names = {kind.__name__ for kind in type(src).__mro__}
    is_loader = bool(names & {"DataLoader", "BatchLoader", "MultiLoader"})
    if is_loader and getattr(src, "batch_size", "") is not None:
        raise InvalidArgument(
            f"found a {type(src).__name__}, which yields batches; each of them would be stored as "
            "one sample: pass the dataset of the loader"
        )


_OPTIONS_OF_INPUTS: Final = (
    *("kind", "workers", "on_error", "keep_partial", "progress"),
    *("resume", "labels", "split_folders", "engine"),
)


def _labelled(listing: Listing, source: Converter, labels: PathName | None) -> Listing:
    """Return the listing with the classes of the label file or the converter, if there are any."""
    if labels is not None:
        if not isinstance(labels, str | os.PathLike):
            raise InvalidArgument(
                "labels must be the path of a CSV or JSON Lines file with the columns path and "
                f"label; found {labels!r:.80}"
            )
        if source.class_names() is not None:
            is_table = source.kind in ("tables", "arrow")
            hint = ", because each column of a table is a field already" * is_table
            raise InvalidArgument(
                f"labels: samples of the kind {source.kind!r} have labels of their own or none; "
                f"leave labels out{hint}"
            )
        path = os.fspath(labels)
        return apply_labels(listing, read_labels(path), path)
    classes = source.class_names()
    return listing if classes is None else without_folder_classes(listing, tuple(classes))


def _drops_label(
    listing: Listing, source: Converter, base: Generation | None, staging: Staging
) -> bool:
    """Return True if samples have no field `label`, because there are no classes.

    An append keeps the field if the dataset has it. If the dataset lacks the field, the append must
    not add classes.
    """
    if not source.label_is_class():
        return False
    if base is None:
        return not listing.classes
    if "label" in base.schema:
        return False
    if listing.classes:
        raise InvalidArgument(
            f"{staging.out}: its samples have no field 'label', while the source has the classes "
            f"{', '.join(map(repr, listing.classes[:3]))}; convert all files again (--overwrite), "
            "or into a separate folder"
        )
    return True


def _function_name(function: Callable[[Any], Any]) -> str:
    """Return the name under which the dataset records a function."""
    while hasattr(function, "func"):  # True for objects of functools.partial
        function = function.func
    return str(getattr(function, "__qualname__", type(function).__qualname__))
