"""`convert`: runs a plan, in worker processes or here, and publishes the dataset."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final, Literal

from shardio._engine.cpus import usable_cpus
from shardio.conversion.crew import run_crew
from shardio.conversion.journal import settings_of
from shardio.conversion.labels import read_labels, relabel
from shardio.conversion.ledger import Ledger
from shardio.conversion.plan import Listing, Unit, cut, list_inputs
from shardio.conversion.report import ConversionReport, InputReport, Progress
from shardio.conversion.samples import convert_samples
from shardio.conversion.source import make_source, options_of
from shardio.conversion.staging import Staging
from shardio.conversion.unit import Job, convert_unit
from shardio.disk import make_folder
from shardio.errors import InvalidArgument
from shardio.format.schema import Schema
from shardio.manifest import Generation, lineage_of, load, publish
from shardio.writer import ShardSummary, ShardWriter

DEFAULT_KIND: Final = "videos"
ON_ERROR: Final = ("skip", "stop")

PathName = str | os.PathLike[str]


def convert(
    src: PathName | Iterable[Mapping[str, Any]],
    out: PathName,
    *,
    kind: str | None = None,
    schema: Schema | None = None,
    workers: int | None = None,
    on_error: Literal["skip", "stop"] = "skip",
    keep_partial: bool = False,
    progress: Callable[[Progress], None] | None = None,
    shard_bytes: int = 256 << 20,
    resume: bool = False,
    overwrite: bool = False,
    labels: PathName | None = None,
    **options: Any,
) -> ConversionReport:
    """Convert a folder of files, or any iterable of samples, into a new dataset at `out`.

    Every file below `src` is looked at and accounted for in the report. A broken file gives no
    sample (`keep_partial`: those before the break); `on_error="stop"` ends at the first one in
    order of names, and publishes what comes before it. The bytes of the dataset depend on neither
    `workers` (0: in this process; default: one per usable CPU) nor the machine's speed.

    What a conversion has finished stays in `out` when it ends early, however it ends. The next one
    is refused there, unless it is to `resume`: finished units are kept if every byte of them is
    what it was and their inputs have not changed; the result is that of a conversion that was never
    interrupted. Or it may `overwrite`: it begins anew, and a dataset in `out` gives way when the
    new one is done.

    Samples from an iterable are written by this process; `schema` is for them, and is taken from
    the first sample where it is not given. `options` are the converter's own.

    Args:
        labels: a CSV or JSON Lines file with the class of each path, instead of folders; see
            `read_labels`.
        progress: called in this process, at the start and after every input.

    Raises:
        InvalidArgument: `src` does not exist or holds no file, an option is not acceptable, or it
            is to resume with other options or versions than the interrupted conversion had.
        DatasetExists: `out` already holds data, or an interrupted conversion.
        WorkerDied: a converter raised, or workers died without an input to blame. As after every
            other error, finished units stay in `out`; if there is none, nothing does.
    """
    if shard_bytes < 1:
        raise InvalidArgument(f"shard_bytes is {shard_bytes}; it must be at least 1")
    if not isinstance(src, str | os.PathLike):
        for_files = {
            "kind": kind is not None,
            "workers": workers is not None,
            "on_error": on_error != "skip",
            "keep_partial": keep_partial,
            "progress": progress is not None,
            "resume": resume,
            "overwrite": overwrite,
            "labels": labels is not None,
            **dict.fromkeys(options, True),
        }
        if given := [name for name, is_given in for_files.items() if is_given]:
            raise InvalidArgument(f"{', '.join(given)}: not for samples from an iterable")
        return convert_samples(src, os.fspath(out), schema, shard_bytes)
    _check(schema, on_error, workers, resume=resume, overwrite=overwrite)
    source = make_source(kind or DEFAULT_KIND, options)
    staging = Staging(os.fspath(out), resume=resume, overwrite=overwrite)
    listing = list_inputs(os.fspath(src), but=str(staging.out))
    if labels is not None:
        listing = relabel(listing, read_labels(os.fspath(labels)), os.fspath(labels))
    job_in = partial(
        Job,
        source,
        shard_bytes=shard_bytes,
        keep_partial=keep_partial,
        stop_at_broken=on_error == "stop",
    )
    n_workers = usable_cpus() if workers is None else workers
    return _convert_files(listing, staging, job_in, n_workers, progress)


def _check(
    schema: Schema | None, on_error: str, workers: int | None, *, resume: bool, overwrite: bool
) -> None:
    """Check the options of a conversion of files."""
    if schema is not None:
        raise InvalidArgument("schema: only for samples from an iterable; a converter has its own")
    if on_error not in ON_ERROR:
        raise InvalidArgument(f"on_error is {on_error!r}; it must be one of {ON_ERROR}")
    if resume and overwrite:
        raise InvalidArgument("resume and overwrite: only one of the two can be had")
    if workers is not None and workers < 0:
        raise InvalidArgument(f"workers is {workers}; it must be 0 or more")


def _convert_files(
    listing: Listing,
    staging: Staging,
    job_in: Callable[[str], Job],
    n_workers: int,
    progress: Callable[[Progress], None] | None,
) -> ConversionReport:
    """Cut, run, publish; `job_in` makes the job once the folder for its shards is known."""
    start_s = time.monotonic()
    units = cut(listing.inputs)
    ledger = Ledger(listing, units, progress)
    job = job_in(str(staging.folder))
    converter = _described(job)
    with staging:
        staging.begin(settings_of(converter, job.source.libraries()), [unit.key for unit in units])
        if staging.is_published:  # the earlier conversion was interrupted while it tidied up
            found = load(staging.out)
            known = {source.name: source for source in listing.inputs}
            reports = [InputReport.of_json(entry, known) for entry in found.inputs]
        else:
            _run(units, job, n_workers, ledger, staging)
            reports = ledger.reports()
            found = _publish(job, ledger, reports, staging, converter)
        staging.finish()
    return ConversionReport(
        dataset=staging.out,
        kind=job.source.kind,
        n_samples=found.n_samples,
        n_bytes=sum(shard.n_bytes for shard in found.shards),
        elapsed_s=time.monotonic() - start_s,
        inputs=tuple(reports),
        classes=found.classes,
        stopped=ledger.stopped_at is not None or reports[-1].outcome == "not_reached",
    )


def _run(units: Sequence[Unit], job: Job, n_workers: int, ledger: Ledger, staging: Staging) -> None:
    ledger.tell_start()
    if n_workers:
        run_crew(units, job, min(n_workers, len(units)), ledger, staging.lock_fd)
        return
    while (number := ledger.next_unit()) is not None:
        convert_unit(units[number], job, ledger.take)


def _publish(
    job: Job,
    ledger: Ledger,
    reports: Sequence[InputReport],
    staging: Staging,
    converter: Mapping[str, Any],
) -> Generation:
    """Make the finished shards a dataset."""
    # Readers take the schema from a shard: a dataset without samples has an empty one.
    placed = ledger.shards() or [_empty_shard(job)]
    shards = [shard for _, shard in placed]
    schema = job.source.schema()
    staging.move_out([(place, shard.name) for place, shard in placed], lineage_of(schema, shards))
    return publish(
        staging.out,
        schema=schema,
        shards=shards,
        classes=ledger.classes,
        inputs=[report.as_json() for report in reports],
        converter=converter,
        versions=job.source.libraries(),
    )


def _described(job: Job) -> dict[str, Any]:
    """Name the converter and every option that has a part in the data."""
    return {
        "name": job.source.kind,
        "version": job.source.version,
        "options": {
            **options_of(job.source),
            "keep_partial": job.keep_partial,
            "on_error": "stop" if job.stop_at_broken else "skip",
            "shard_bytes": job.shard_bytes,
        },
    }


def _empty_shard(job: Job) -> tuple[str, ShardSummary]:
    """Write a shard without samples; where it lies, and as it is published."""
    folder = os.path.join(job.folder, "empty")
    make_folder(folder)
    with ShardWriter(os.path.join(folder, "000.shard"), job.source.schema()) as writer:
        return "empty/000.shard", replace(writer.close(), name="000000-000.shard")
