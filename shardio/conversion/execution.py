"""Execute a conversion: validate the options, convert the inputs in units, publish a generation.

Python items are divided into units of equal numbers of items, whatever the sizes of the samples
are; the shards may therefore be small. Adjacent small shards are merged before a generation is
published. Which shards are merged depends only on their sizes and on the order of the units.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from shardio._base.callers import did_you_mean
from shardio._workers.processes.limits import usable_cpus
from shardio._workers.ray_cluster import LOCAL, Engine
from shardio.conversion.append import (
    RUN_OPTIONS,
    PathName,
    check_not_repaired,
    check_same_samples,
    classify_inputs,
    generation_changes,
    inherit_options,
    load_base,
    rebase,
    recorded_options,
    reports_if_complete,
)
from shardio.conversion.classes import (
    SPLIT_FOLDERS,
    input_runs,
    random_split_details,
    subset_details,
    subset_sizes,
)
from shardio.conversion.converter import (
    OPTION_ADVICE,
    PARAMETERS,
    Converter,
    fit_converter,
    guess_kind,
    kind_from_names,
    make_converter,
    options_of,
)
from shardio.conversion.inputs import Listing, join_parts
from shardio.conversion.journal import (
    UnitEvent,
    conversion_settings,
    cut_units,
    has_items,
    lacks_units,
)
from shardio.conversion.report import ConversionReport, InputReport, Progress, check_any_of_kind
from shardio.conversion.scheduler import ConversionState, convert_here, run_in_workers, run_on_ray
from shardio.conversion.staging import REPLACE_HINT, Staging
from shardio.conversion.upload import ShardUploader
from shardio.conversion.worker import ConversionJob
from shardio.dataset.generation import Generation
from shardio.dataset.manifest import WORK_FOLDER, holds_dataset, load, publish, publish_next
from shardio.errors import InvalidArgument
from shardio.format.schema import Schema
from shardio.maintenance.splitting import check_split
from shardio.order.sampling import check_count
from shardio.shard.reader import ShardReader
from shardio.shard.writer import ShardSummary, ShardWriter
from shardio.storage.fs import make_folder


@dataclass(frozen=True, slots=True)
class ConvertOptions:
    """The options of `convert`; `source` is the name of the source for messages.

    `uploader` uploads finished shards to an object store; it is None for a dataset in a folder.
    """

    kind: str | None = None
    converter_options: Mapping[str, Any] = field(default_factory=dict)
    workers: int | None = None
    on_error: str = "skip"
    keep_partial: bool = False
    progress: Callable[[Progress], None] | None = None
    shard_bytes: int = 256 << 20
    resume: bool = False
    overwrite: bool = False
    append: bool = False
    labels: PathName | None = None
    split: Mapping[str, float] | None = None
    split_seed: int = 0
    split_folders: bool | None = None
    engine: Engine = LOCAL
    uploader: ShardUploader | None = None
    source: str = ""

    @property
    def n_workers(self) -> int:
        """The number of worker processes; 0 means to convert in this process."""
        return usable_cpus() if self.workers is None else self.workers

    def refuse(self, names: Iterable[str], reason: str, *, accepted: Iterable[str] = ()) -> None:
        """Raise InvalidArgument if an option in `names`, or another converter option, is given."""
        default = ConvertOptions()
        given = [name for name in names if getattr(self, name) != getattr(default, name)]
        others = [name for name in self.converter_options if name not in accepted]
        if given := [*given, *others]:
            hints = (OPTION_ADVICE.get(each) or did_you_mean(each, PARAMETERS) for each in others)
            reason = next(filter(None, hints), reason)
            raise InvalidArgument(f"{', '.join(given)}: {reason}")

    def check_for_inputs(self, schema: Schema | None) -> None:
        """Check the options for a conversion of files or items; `schema` must be None."""
        if schema is not None:
            raise InvalidArgument(
                "schema: only for samples from an iterable; a converter has its own schema, or "
                "an option for it, such as `fields` of the converter 'arrays'"
            )
        if self.on_error not in ("skip", "stop"):
            raise InvalidArgument(f"on_error is {self.on_error!r}; it must be 'skip' or 'stop'")
        if self.workers is not None:
            check_count("workers", self.workers, 0)
        if self.engine.is_ray and self.workers == 0:
            raise InvalidArgument("workers is 0; with engine='ray' it must be 1 or more")

    def check(self) -> None:
        """Check the options that apply to files, items and samples alike."""
        if self.overwrite and (self.resume or self.append):
            other = "resume" if self.resume else "append"
            raise InvalidArgument(f"{other} and overwrite are mutually exclusive")
        if self.split is None:
            if self.split_seed != 0:
                raise InvalidArgument("split_seed (--split-seed): only together with split")
            return
        check_split(self.split, self.split_seed, names=("split", "split_seed"))
        if self.append:
            raise InvalidArgument(
                "split and append are mutually exclusive: append first, and then assign all "
                "samples again with shardio.maintenance.split (shardio split)"
            )

    def make_staging(self, out: PathName) -> Staging:
        """Return the work folder in `out`, in which the conversion writes its shards."""
        return Staging(
            os.fspath(out),
            resume=self.resume,
            overwrite=self.overwrite,
            appends=self.append,
            hint="" if self.uploader is None else self.uploader.hint,
        )

    def undo_killed_overwrite(self, out: PathName) -> None:
        """Undo an overwrite with Python samples that was killed, because it cannot be resumed."""
        if not (self.uploader or self.overwrite) and lacks_units(Path(out) / WORK_FOLDER):
            with self.make_staging(out):
                pass

    def fit_source(
        self, base: Generation | None, listing: Listing, out: PathName
    ) -> tuple[Converter, Listing]:
        """Return the converter, and the listing with the parts of each input."""
        kind, options = self.kind, self.converter_options
        if base is not None:
            kind, options = inherit_options(base, kind, options)
        try:
            source = make_converter(kind or guess_kind(listing.inputs), options)
            source = source.inherited(recorded_options(base, source.kind, out, resume=self.resume))
            listing = join_parts(listing, source)
            return _fitted(source, listing), listing
        except InvalidArgument:
            if base is not None and kind == base.converter.get("name"):
                # If an option differs from the one in the dataset, report the difference instead.
                all_options = {**base.converter.get("options", {}), **self.converter_options}
                changed = {**base.converter, "options": all_options}
                check_same_samples(base, changed, base.schema, out)
            raise

    def make_job(
        self,
        source: Converter,
        base: Generation | None,
        staging: Staging,
        *,
        drops_label: bool = False,
    ) -> ConversionJob:
        """Return the settings for the workers; `base` is the generation to append to."""
        recorded = {} if base is None else base.converter.get("options", {})
        return ConversionJob(
            source,
            str(staging.folder),
            shard_bytes=self.shard_bytes,
            keep_partial=self.keep_partial or bool(recorded.get("keep_partial")),
            stop_at_broken=self.on_error == "stop",
            drops_label=drops_label,
        )


def _fitted(source: Converter, listing: Listing) -> Converter:
    """Return the converter for the inputs; add the kind that their names suggest to an error."""
    try:
        return fit_converter(source, listing.inputs)
    except InvalidArgument as error:
        kind = kind_from_names(one.name for one in listing.inputs)
        if kind not in (None, source.kind):
            error.add_note(f"the file names suggest {kind!r} (--kind {kind}, or kind={kind!r})")
        raise


def convert_inputs(
    listing: Listing, staging: Staging, job: ConversionJob, options: ConvertOptions
) -> ConversionReport:
    """Convert the inputs to a new dataset, or append them to the dataset in `out`.

    If no input gives a sample, `out` is not changed.
    """
    return (_append if options.append else _create)(_Run(listing, staging, job, options))


def _create(run: _Run) -> ConversionReport:
    staging = run.staging
    if run.is_complete():
        return run.report_complete()
    with staging:
        run.begin(run.listing)
        # If `is_published` is True, the earlier conversion was interrupted after it had published
        # the dataset. Only the work folder must be removed then.
        if staging.is_published:
            found = load(staging.out)
            known = {source.name: source for source in run.listing.inputs}
            reports = [InputReport.of_json(entry, known) for entry in found.inputs]
        else:
            reports = run.convert()
            if not run.state.shards():
                staging.discard_units()
                return run.report(reports)
            found = run.publish(reports)
        staging.finish()
    return run.report(reports, found, found.shards)


def _append(run: _Run) -> ConversionReport:
    listing, staging = run.listing, run.staging
    with staging:
        # The options were completed from a generation that was read before `out` was locked. Check
        # them now, because another writer may have published a later generation since then.
        base = load_base(staging.out)
        check_not_repaired(base, staging.out)
        check_same_samples(base, run.converter, run.job.schema, staging.out)
        additions, others = classify_inputs(listing, base, run.options.n_workers, staging.out)
        run.begin(additions)
        reports = run.convert(others)
        placed = run.final_shards()
        latest = rebase(base, staging.out)
        found = run.publish_next(latest, placed) if placed else latest
        staging.finish()
    order = {source.name: position for position, source in enumerate(listing.inputs)}
    reports.sort(key=lambda one: order[one.name])
    report = run.report(reports, found, [shard for _, shard in placed])
    return replace(report, stats_dropped=bool(base.stats) and found.stats != base.stats)


class _Run:
    """One run of a conversion. Its methods are the steps of creating and of extending a dataset."""

    state: ConversionState

    def __init__(
        self, listing: Listing, staging: Staging, job: ConversionJob, options: ConvertOptions
    ) -> None:
        self.listing, self.staging, self.job, self.options = listing, staging, job, options
        self.converter: dict[str, Any] = {
            "name": job.source.kind,
            "version": job.source.version,
            "options": {
                **options_of(job.source),
                "keep_partial": job.keep_partial,
                "on_error": "stop" if job.stop_at_broken else "skip",
                "shard_bytes": job.shard_bytes,
                **({SPLIT_FOLDERS: True} if options.split_folders else {}),
            },
        }
        """The name, version and options of the converter, as a generation records them."""
        self._settings = conversion_settings(self.converter, job.source.libraries())
        # Adjacent shards smaller than this size are merged; see `compact_shards`.
        min_bytes = min(MIN_SHARD_BYTES, job.shard_bytes // 2)
        self._min_bytes = min_bytes if has_items(listing.inputs) else 0
        self._start_s = time.monotonic()

    def is_complete(self) -> bool:
        """Return True if nothing is to resume: the dataset is published, no work folder is left."""
        is_over = holds_dataset(self.staging.out) and not self.staging.folder.exists()
        return self.options.resume and self.options.uploader is None and is_over

    def report_complete(self) -> ConversionReport:
        """Return the report on a complete dataset; raise DatasetExists if it is another one."""
        found, options, out = load(self.staging.out), self.options, self.staging.given
        split = random_split_details(options.split, options.split_seed, found.n_samples, out)
        reports = reports_if_complete(
            found,
            self.listing,
            self.converter,
            self.job.source.libraries(),
            split.get("subsets", {}),
            options.n_workers,
            out=out,
            hint=REPLACE_HINT,
        )
        return self.report(reports, found)

    def begin(self, listing: Listing) -> None:
        """Divide the inputs in `listing` into units, and record the units in the journal."""
        units = cut_units(listing.inputs)
        on_shard = None if self.options.uploader is None else self._upload
        choice = self.job.source.store_choice
        self.state = ConversionState(listing, units, self.options.progress, on_shard, choice)
        self.staging.begin(self._settings, [unit.key for unit in units])

    def convert(self, others: Sequence[InputReport] = ()) -> list[InputReport]:
        """Convert all units; return the reports on their inputs, followed by `others`."""
        self.state.report_progress()
        with contextlib.closing(self._events()) as events:
            for event in events:
                self.state.handle(event)
                if self.state.is_finished():
                    break
        reports = [*self.state.reports(), *others]
        kind, appends = self.job.source.kind, self.staging.appends
        kind_given = self.options.kind is not None
        try:
            check_any_of_kind(
                self.options.source, kind, reports, kind_given=kind_given, appends=appends
            )
        except InvalidArgument:
            self.staging.discard_units()
            raise
        return reports

    def _events(self) -> Generator[UnitEvent, None, None]:
        state, options = self.state, self.options
        limited = replace(self.job, step_s=self.job.source.step_s)
        if options.engine.is_ray and state.units:
            yield from run_on_ray(
                state.next_unit, limited, options.engine, options.workers, self._settings
            )
        elif n_workers := min(options.n_workers, len(state.units)):
            yield from run_in_workers(state.next_unit, limited, n_workers, [self.staging.lock_fd])
        else:
            while (unit := state.next_unit()) is not None:
                yield from convert_here(self.job, unit)

    def _upload(self, path: str, shard: ShardSummary) -> None:
        """Start to upload a finished shard, unless it may be merged with other shards later."""
        if self.options.uploader and shard.n_bytes >= self._min_bytes:
            self.options.uploader.submit(os.path.join(self.job.folder, path), shard)

    def final_shards(self) -> list[tuple[str, ShardSummary]]:
        """Return the shards to publish, merged and uploaded if necessary."""
        made, uploader = self.state.shards(), self.options.uploader
        placed = compact_shards(made, self.job, self._min_bytes)
        if uploader is not None:
            sent = {path for path, shard in made if shard.n_bytes >= self._min_bytes}
            for path, shard in placed:
                if path not in sent:
                    uploader.submit(os.path.join(self.job.folder, path), shard)
            uploader.finish()
        return placed

    def publish(self, reports: Sequence[InputReport]) -> Generation:
        placed, source = self.final_shards(), self.job.source
        is_local = self.options.uploader is None
        self.staging.link_shards([(path, shard.name) for path, shard in placed if is_local])
        return publish(
            self.staging.out,
            schema=self.job.schema,
            shards=[shard for _, shard in placed],
            classes=self.state.listing.classes,
            inputs=[report.as_json() for report in reports],
            converter=self.converter,
            versions=source.libraries(),
            view=source.view(),
            **self._subsets(reports, placed),
        )

    def _subsets(
        self, reports: Sequence[InputReport], placed: Sequence[tuple[str, ShardSummary]]
    ) -> dict[str, Any]:
        """Return the attributes of a new dataset that concern its subsets."""
        n_samples = sum(shard.n_samples for _, shard in placed)
        return subset_details(input_runs(self.listing, reports), None) or random_split_details(
            self.options.split, self.options.split_seed, n_samples, self.staging.out
        )

    def publish_next(
        self, latest: Generation, placed: Sequence[tuple[str, ShardSummary]]
    ) -> Generation:
        """Publish a generation with the shards of `latest`, followed by the shards `placed`."""
        staging, options = self.staging, self.converter["options"]
        names = staging.free_names(latest.number + 1, [shard.name for _, shard in placed])
        shards = [replace(shard, name=names[shard.name]) for _, shard in placed]
        reports = self.state.reports()
        changed = generation_changes(latest, shards, self.state.listing.classes, reports)
        changed |= subset_details(input_runs(self.state.listing, reports), latest)
        staging.link_shards([(path, names[shard.name]) for path, shard in placed])
        return publish_next(
            staging.out,
            latest,
            **changed,
            versions={**latest.versions, **self.job.source.libraries()},
            operation={"name": "append", "options": {name: options[name] for name in RUN_OPTIONS}},
        )

    def report(
        self,
        reports: Sequence[InputReport],
        found: Generation | None = None,
        shards: Sequence[ShardSummary] = (),
    ) -> ConversionReport:
        """Return the report on the conversion.

        `found` is the current generation of the dataset, or None if no dataset was created.
        `shards` are the shards that the conversion has added.
        """
        n_samples = sum(shard.n_samples for shard in shards)
        return ConversionReport(
            dataset=self.staging.given,
            kind=self.job.source.kind,
            n_samples=n_samples,
            n_bytes=sum(shard.n_bytes for shard in shards),
            elapsed_s=time.monotonic() - self._start_s,
            inputs=tuple(reports),
            classes=found.classes if found else self.state.listing.classes,
            stopped=any(report.outcome == "not_processed" for report in reports),
            generation=found.number if found else 0,
            n_samples_before=found.n_samples - n_samples if found else 0,
            view=found.view if found else self.job.source.view(),
            subsets=subset_sizes(found),
            ignored=self.listing.ignored,
            choice=self.job.source.store_choice,
        )


MIN_SHARD_BYTES: Final = 8 << 20
"""The minimum size of merged shards, if possible; each shard has 50 kB of tables and padding."""
COMPACTED: Final = "compacted"
"""The name of the folder inside the work folder that contains the merged shards."""


def compact_shards(
    placed: Sequence[tuple[str, ShardSummary]], job: ConversionJob, min_bytes: int
) -> list[tuple[str, ShardSummary]]:
    """Merge adjacent small shards; keep their files, so that an interrupted run can resume."""
    sizes = [
        _content_bytes(os.path.join(job.folder, path))
        if shard.n_bytes < min_bytes
        else shard.n_bytes
        for path, shard in placed
    ]
    groups = [placed[group.start : group.stop] for group in group_small(sizes, min_bytes)]
    return [group[0] if len(group) == 1 else _merge_shards(group, job) for group in groups]


def group_small(sizes: Sequence[int], min_bytes: int) -> list[range]:
    """Divide shards into groups to merge, each of at least `min_bytes` in total if possible."""
    found: list[range] = []
    first = n_bytes = 0
    for position, size in enumerate(sizes):
        if size >= min_bytes and first < position:
            found.append(range(first, position))
            first, n_bytes = position, 0
        n_bytes += size
        if n_bytes >= min_bytes:
            found.append(range(first, position + 1))
            first, n_bytes = position + 1, 0
    if first < len(sizes):
        found.append(range(first, len(sizes)))
    return found


def _content_bytes(path: str) -> int:
    """Return the size of a shard without its padding, which takes up most of a small shard."""
    with ShardReader(path, verify="off") as reader:
        return sum(section.size for section in reader.sections)


def _merge_shards(
    members: Sequence[tuple[str, ShardSummary]], job: ConversionJob
) -> tuple[str, ShardSummary]:
    name = members[0][1].name
    folder = os.path.join(job.folder, COMPACTED)
    make_folder(folder)
    with ShardWriter(os.path.join(folder, name), job.schema) as writer:
        for path, _ in members:
            with ShardReader(os.path.join(job.folder, path)) as reader:
                for sample in reader:
                    writer.append(sample)
        summary = writer.close()
    return f"{COMPACTED}/{name}", replace(summary, name=name)
