"""`convert`: what users call; files and samples from an iterable go their ways from here."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

from shardio.cluster import Engine, EngineName
from shardio.conversion.appending import load_base
from shardio.conversion.files import append_files, convert_files
from shardio.conversion.given import Given
from shardio.conversion.labels import read_labels, relabel, with_own_classes
from shardio.conversion.plan import list_inputs
from shardio.conversion.report import ConversionReport, Progress
from shardio.conversion.request import Request
from shardio.conversion.source import classes_of
from shardio.conversion.staging import Staging
from shardio.conversion.uploading import Upload
from shardio.errors import InvalidArgument
from shardio.format.schema import Schema
from shardio.manifest import check_folder_name
from shardio.remote.places import is_url

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
    new one is done.

    The dataset is a new one, or with `append` the one at `out`, which gets a new generation: its
    samples keep their positions and classes their numbers, what is new comes behind them. Files
    whose samples it has are not converted again (`"present"`, or `"changed"` where the content is
    another). Options that are not given are those that it was made with.

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
            It is converted into the folder of the cache first, and uploaded from there.
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
    upload = None
    if isinstance(out, str) and is_url(out):
        upload = Upload(out, storage_options, resume=resume, append=append, overwrite=overwrite)
        if upload.is_converted:
            return upload.publish()
        out = upload.folder
    check_folder_name(out)
    request = Request(
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
    if samples is not None or not isinstance(src, str | os.PathLike):
        given = Given(src, samples, names, schema)
        report = given.convert(os.fspath(out), request, append=append, labels=labels is not None)
        return report if upload is None else upload.publish(report)
    if names is not None:
        raise InvalidArgument("names: only for samples that are tuples, not for files")
    request = replace(request, source=os.fspath(src))
    request.check(schema, append=append)
    base = load_base(out) if append else None
    staging = Staging(os.fspath(out), resume=resume, overwrite=overwrite, appends=append)
    listing = list_inputs(os.fspath(src), but=str(staging.out))
    # Now, so that options are refused before anything is made.
    job_in, listing = request.job(base, listing, out)
    job = job_in(str(staging.folder))
    if labels is not None:
        listing = relabel(listing, read_labels(os.fspath(labels)), os.fspath(labels))
    if (classes := classes_of(job.source)) is not None:
        if labels is not None:
            raise InvalidArgument(
                f"labels: the samples of {job.source.kind!r} have labels of their own here, or are "
                "of no class: leave it out"
            )
        listing = with_own_classes(listing, classes)
    convert_all = append_files if append else convert_files
    report = convert_all(listing, staging, job, request)
    return report if upload is None else upload.publish(report)
