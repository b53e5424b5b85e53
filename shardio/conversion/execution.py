"""Execute a conversion: validate its options, cut units, run them, publish the generation.

The size of the samples of items (Python objects converted in place of files) cannot be predicted.
Items are therefore divided into units by count, small enough to keep all workers busy. The small
shards of these units are merged at the end, by size and in plan order, so the result depends
neither on the number of workers nor on the order in which units finish.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

from shardio._workers.processes.limits import usable_cpus
from shardio._workers.ray_cluster import LOCAL, Engine
from shardio.conversion.append import (
    RUN_OPTIONS,
    PathName,
    check_not_repaired,
    check_same_options,
    check_same_samples,
    classify_inputs,
    generation_changes,
    inherit_options,
    load_base,
    rebase,
)
from shardio.conversion.converter import (
    fit_converter,
    guess_kind,
    make_converter,
    options_of,
)
from shardio.conversion.inputs import Listing, join_parts
from shardio.conversion.journal import Unit, conversion_settings, cut_units, has_items
from shardio.conversion.report import (
    ConversionReport,
    InputReport,
    NoMatchingInputs,
    Progress,
    check_any_of_kind,
)
from shardio.conversion.scheduler import ConversionState, run_on_ray, run_units
from shardio.conversion.staging import Staging
from shardio.conversion.upload import ShardUploader
from shardio.conversion.worker import ConversionJob, convert_unit
from shardio.dataset.generation import Generation
from shardio.dataset.manifest import load, publish, publish_next
from shardio.errors import InvalidArgument
from shardio.format.schema import Schema
from shardio.shard.reader import ShardReader
from shardio.shard.writer import ShardSummary, ShardWriter
from shardio.storage.fs import make_folder

ON_ERROR: Final = ("skip", "stop")


@dataclass(frozen=True, slots=True)
class ConvertOptions:
    """The options of a conversion, as the caller gave them.

    `source` is the name of the source for messages. `uploader` uploads finished shards if the
    dataset goes to an object store.
    """

    kind: str | None
    converter_options: Mapping[str, Any]
    workers: int | None
    on_error: str
    keep_partial: bool
    progress: Callable[[Progress], None] | None
    shard_bytes: int
    resume: bool
    overwrite: bool
    engine: Engine = LOCAL
    uploader: ShardUploader | None = None
    source: str = ""

    @property
    def n_workers(self) -> int:
        """The number of worker processes."""
        return usable_cpus() if self.workers is None else self.workers

    @property
    def hint(self) -> str:
        """The hint for restarting an upload; "" for a folder, where Staging has its own hints."""
        return "" if self.uploader is None else self.uploader.hint

    def check_for_samples(self, *, labels: bool) -> None:
        """Raise InvalidArgument for options that iterables of samples do not support."""
        for_files = {
            "kind": self.kind is not None,
            "workers": self.workers is not None,
            "on_error": self.on_error != "skip",
            "keep_partial": self.keep_partial,
            "progress": self.progress is not None,
            "resume": self.resume,
            "overwrite": self.overwrite,
            "labels": labels,
            "engine": self.engine.is_ray,
            **dict.fromkeys(self.converter_options, True),
        }
        if given := [name for name, is_given in for_files.items() if is_given]:
            raise InvalidArgument(f"{', '.join(given)}: not for samples from an iterable")

    def check_for_items(self, *, labels: bool) -> None:
        """Raise InvalidArgument for options that apply only to files."""
        for_files = {"kind": self.kind is not None, "labels": labels, **self.converter_options}
        if given := [name for name, is_given in for_files.items() if is_given is not False]:
            raise InvalidArgument(f"{', '.join(given)}: only for files")

    def check_for_inputs(self, schema: Schema | None, *, append: bool) -> None:
        """Check the options of a conversion of files or items."""
        if schema is not None:
            raise InvalidArgument(
                "schema: only for samples from an iterable; a converter has its own schema, or "
                "an option for it, such as `fields` of arrays"
            )
        if self.on_error not in ON_ERROR:
            raise InvalidArgument(f"on_error is {self.on_error!r}; it must be one of {ON_ERROR}")
        if self.overwrite and (self.resume or append):
            other = "resume" if self.resume else "append"
            raise InvalidArgument(f"{other} and overwrite are mutually exclusive")
        if self.workers is not None and self.workers < 0:
            raise InvalidArgument(f"workers is {self.workers}; it must be 0 or more")
        if self.engine.is_ray and self.workers == 0:
            raise InvalidArgument("workers is 0; with engine='ray' it must be 1 or more")

    def make_job(
        self, base: Generation | None, listing: Listing, out: PathName
    ) -> tuple[Callable[[str], ConversionJob], Listing]:
        """Return a function that maps a work folder to its job, and the listing with joined parts.

        The kind of the converter is `kind`, else the kind of `base`, else a guess from the inputs.

        Raises:
            InvalidArgument: the converter rejects the options, or `base` has other options.
        """
        kind, options, keep_partial = self.kind, self.converter_options, self.keep_partial
        if base is not None:
            kind, options, keep_partial = inherit_options(
                base, kind, options, keep_partial=keep_partial
            )
        try:
            source = make_converter(kind or guess_kind(listing.inputs), options)
            listing = join_parts(listing, source)
            source = fit_converter(source, listing.inputs)
        except InvalidArgument:
            if base is not None and kind == base.converter.get("name"):
                check_same_options(base, self.converter_options, out)
            raise
        job_for_folder = partial(
            ConversionJob,
            source,
            shard_bytes=self.shard_bytes,
            keep_partial=keep_partial,
            stop_at_broken=self.on_error == "stop",
        )
        return job_for_folder, listing


PlacedShard = tuple[str, ShardSummary]
"""The path of a finished shard below the job's folder, and its summary with the final name."""


def convert_inputs(
    listing: Listing, staging: Staging, job: ConversionJob, options: ConvertOptions
) -> ConversionReport:
    """Convert the inputs to a new dataset; if they give no sample, leave `out` unchanged."""
    start_s = time.monotonic()
    units = cut_units(listing.inputs)
    compacts, uploader = has_items(listing.inputs), options.uploader
    send = None if uploader is None else partial(_upload, uploader, job, compacts=compacts)
    state = ConversionState(listing, units, options.progress, send)
    converter = _converter_record(job)
    settings = conversion_settings(converter, job.source.libraries())
    with staging:
        staging.begin(settings, [unit.key for unit in units])
        if staging.is_published:  # interrupted while cleaning up
            found = load(staging.out)
            known = {source.name: source for source in listing.inputs}
            reports = [InputReport.of_json(entry, known) for entry in found.inputs]
        else:
            _run(units, job, options, state, staging, settings)
            reports = state.reports()
            _check_any_input(reports, job, options, staging)
            if not state.shards():
                staging.discard_units()
                return _unpublished_report(job, state, reports, staging, start_s)
            placed = _final_shards(state, job, uploader, compacts=compacts)
            found = _publish(job, state, placed, reports, staging, converter, uploader)
        staging.finish()
    return replace(
        _unpublished_report(job, state, reports, staging, start_s),
        n_samples=found.n_samples,
        n_bytes=sum(shard.n_bytes for shard in found.shards),
        classes=found.classes,
        generation=found.number,
        view=found.view,
    )


def _unpublished_report(
    job: ConversionJob,
    state: ConversionState,
    reports: Sequence[InputReport],
    staging: Staging,
    start_s: float,
) -> ConversionReport:
    """Return the report of a conversion that has published nothing."""
    return ConversionReport(
        dataset=staging.out,
        kind=job.source.kind,
        n_samples=0,
        n_bytes=0,
        elapsed_s=time.monotonic() - start_s,
        inputs=tuple(reports),
        classes=state.classes,
        stopped=any(report.outcome == "not_processed" for report in reports),
        generation=0,
        view=job.source.view(),
    )


def append_inputs(
    listing: Listing, staging: Staging, job: ConversionJob, options: ConvertOptions
) -> ConversionReport:
    """Convert the inputs that the dataset lacks; publish a generation with the new samples."""
    start_s = time.monotonic()
    converter = _converter_record(job)
    settings = conversion_settings(converter, job.source.libraries())
    with staging:
        base = load_base(staging.out)  # read again: `out` could change before it was locked
        check_not_repaired(base, staging.out)
        check_same_samples(base, converter, job.source.schema(), staging.out)
        additions = classify_inputs(listing, base, options.n_workers, staging.out)
        units = cut_units(additions.listing.inputs)
        state = ConversionState(additions.listing, units, options.progress)
        staging.begin(settings, [unit.key for unit in units])
        _run(units, job, options, state, staging, settings)
        _check_any_input([*state.reports(), *additions.others], job, options, staging)
        placed = _final_shards(state, job, None, compacts=has_items(listing.inputs))
        found = _publish_next(base, job, state, placed, staging)
        staging.finish()
    order = {source.name: position for position, source in enumerate(listing.inputs)}
    reports = sorted([*state.reports(), *additions.others], key=lambda one: order[one.name])
    n_samples = sum(shard.n_samples for _, shard in placed)
    return ConversionReport(
        dataset=staging.out,
        kind=job.source.kind,
        n_samples=n_samples,
        n_bytes=sum(shard.n_bytes for _, shard in placed),
        elapsed_s=time.monotonic() - start_s,
        inputs=tuple(reports),
        classes=found.classes,
        stopped=any(report.outcome == "not_processed" for report in reports),
        view=found.view,
        generation=found.number,
        n_samples_before=found.n_samples - n_samples,
        stats_dropped=bool(base.stats) and found.stats != base.stats,
    )


def _run(
    units: Sequence[Unit],
    job: ConversionJob,
    options: ConvertOptions,
    state: ConversionState,
    staging: Staging,
    settings: Mapping[str, Any],
) -> None:
    state.report_start()
    limited, n_workers = replace(job, step_s=job.source.step_s), options.n_workers
    if options.engine.is_ray and units:
        run_on_ray(units, limited, options.engine, options.workers, state, settings)
        return
    if n_workers and units:
        run_units(units, limited, min(n_workers, len(units)), state, [staging.lock_fd])
        return
    while (number := state.next_unit()) is not None:
        for event in convert_unit(units[number], job):
            state.handle(event)


def _check_any_input(
    reports: Sequence[InputReport], job: ConversionJob, options: ConvertOptions, staging: Staging
) -> None:
    """Check that at least one input is of the converter's kind; if not, discard all units."""
    try:
        check_any_of_kind(
            options.source,
            job.source.kind,
            reports,
            kind_given=options.kind is not None,
            appends=staging.appends,
        )
    except NoMatchingInputs:
        staging.discard_units()
        raise


def _final_shards(
    state: ConversionState, job: ConversionJob, uploader: ShardUploader | None, *, compacts: bool
) -> list[PlacedShard]:
    """Return the shards to publish; if there is an uploader, wait until all are uploaded."""
    made = state.shards()
    placed = compact_shards(made, job) if compacts else made
    if uploader is not None:
        if compacts:
            sent = {path for path, shard in made if not is_small(shard, job.shard_bytes)}
            for path, shard in placed:
                if path not in sent:
                    uploader.submit(os.path.join(job.folder, path), shard)
        uploader.finish()
    return placed


def _upload(
    uploader: ShardUploader, job: ConversionJob, path: str, shard: ShardSummary, *, compacts: bool
) -> None:
    """Upload a shard, unless it will be merged with others."""
    if not (compacts and is_small(shard, job.shard_bytes)):
        uploader.submit(os.path.join(job.folder, path), shard)


def _publish(
    job: ConversionJob,
    state: ConversionState,
    placed: Sequence[PlacedShard],
    reports: Sequence[InputReport],
    staging: Staging,
    converter: Mapping[str, Any],
    uploader: ShardUploader | None,
) -> Generation:
    """Publish the finished shards as a dataset, whether they are local or uploaded."""
    shards = [shard for _, shard in placed]
    schema = job.source.schema()
    links = [(path, shard.name) for path, shard in placed] if uploader is None else []
    staging.link_shards(links)
    return publish(
        staging.out,
        schema=schema,
        shards=shards,
        classes=state.classes,
        inputs=[report.as_json() for report in reports],
        converter=converter,
        versions=job.source.libraries(),
        view=job.source.view(),
    )


def _publish_next(
    base: Generation,
    job: ConversionJob,
    state: ConversionState,
    placed: Sequence[PlacedShard],
    staging: Staging,
) -> Generation:
    """Publish the finished shards as the next generation; if there are none, return the latest."""
    latest = rebase(base, staging.out)
    if not placed:
        return latest
    names = staging.free_names(latest.number + 1, [shard.name for _, shard in placed])
    shards = [replace(shard, name=names[shard.name]) for _, shard in placed]
    changed = generation_changes(latest, shards, state.classes, state.reports())
    staging.link_shards([(path, names[shard.name]) for path, shard in placed])
    return publish_next(
        staging.out,
        latest,
        **changed,
        versions={**latest.versions, **job.source.libraries()},
        operation={
            "name": "append",
            "options": {name: _converter_record(job)["options"][name] for name in RUN_OPTIONS},
        },
    )


def _converter_record(job: ConversionJob) -> dict[str, Any]:
    """Return the converter's name, its version, and all options that affect the data."""
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


MIN_SHARD_BYTES: Final = 8 << 20
"""The minimum size of a merged shard. Tables and padding take about 50 kB of each shard."""
COMPACTED: Final = "compacted"
"""The folder of merged shards."""


def is_small(shard: ShardSummary, shard_bytes: int) -> bool:
    """Return True if a shard is to be merged with adjacent small shards."""
    return shard.n_bytes < _min_group_bytes(shard_bytes)


def _min_group_bytes(shard_bytes: int) -> int:
    """Return the size at which a group to be merged is complete; at most half of `shard_bytes`."""
    return min(MIN_SHARD_BYTES, shard_bytes // 2)


def compact_shards(placed: Sequence[PlacedShard], job: ConversionJob) -> list[PlacedShard]:
    """Merge adjacent small shards into new files; other shards do not change.

    The original shards are kept too, so that an interrupted conversion can resume from them.

    Raises:
        ShardCorrupt: a shard was changed after it was written.
        OSError: reading or writing failed.
    """
    sizes = [
        _content_bytes(os.path.join(job.folder, path))
        if is_small(shard, job.shard_bytes)
        else shard.n_bytes
        for path, shard in placed
    ]
    groups = group_small(sizes, _min_group_bytes(job.shard_bytes))
    return [
        placed[group.start]
        if len(group) == 1
        else _merge_shards(placed[group.start : group.stop], job)
        for group in groups
    ]


def group_small(sizes: Sequence[int], least_bytes: int) -> list[range]:
    """Group adjacent small shards; a group ends at `least_bytes`. Larger shards stay alone."""
    found: list[range] = []
    first = n_bytes = 0
    for position, size in enumerate(sizes):
        if size >= least_bytes and first < position:
            found.append(range(first, position))
            first, n_bytes = position, 0
        n_bytes += size
        if n_bytes >= least_bytes:
            found.append(range(first, position + 1))
            first, n_bytes = position + 1, 0
    if first < len(sizes):
        found.append(range(first, len(sizes)))
    return found


def _content_bytes(path: str) -> int:
    """Return the size of a shard without padding; a shard with few samples is mostly padding."""
    with ShardReader(path, verify="off") as reader:
        return sum(section.size for section in reader.sections)


def _merge_shards(members: Sequence[PlacedShard], job: ConversionJob) -> PlacedShard:
    """Write the samples of several shards into one shard with the name of the first."""
    name = members[0][1].name
    folder = os.path.join(job.folder, COMPACTED)
    make_folder(folder)
    with ShardWriter(os.path.join(folder, name), job.source.schema()) as writer:
        for path, _ in members:
            with ShardReader(os.path.join(job.folder, path)) as reader:
                for sample in reader:
                    writer.append(sample)
        summary = writer.close()
    return f"{COMPACTED}/{name}", replace(summary, name=name)
