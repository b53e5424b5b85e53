"""Convert a folder of videos, pictures, sound, arrays, tables or datasets of others into a dataset.

Every file below SRC is looked at and accounted for. The name of the folder that holds a file is its
class. Exit code 1 means that some files are broken, or have changed since they were converted; they
are listed, and all others are converted. The code is also 1 if no file gave a sample.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import shardio
from shardio.measuring import StoredReport, estimate, measure_stored
from shardio_tools._convert_options import CONVERTER_OPTIONS, add_arguments
from shardio_tools._stored import MEDIA, describe_stored, n_clips, noun, stored_json
from shardio_tools.arguments import engine_options, is_url
from shardio_tools.output import (
    OUTCOMES,
    ProgressLine,
    escaped,
    format_count,
    format_duration,
    format_list,
    format_size,
    format_table,
    print_error,
    print_json,
    print_out,
)

__all__ = ["CONVERTER_OPTIONS", "add_arguments", "as_json", "run"]

LISTED: Final = ("duplicate", "not_processed", "part", "unsupported", "empty", "modified", "broken")
"""Outcomes whose inputs are listed, in this order: what matters most comes last."""
NOT_OF_KIND: Final = {
    "arrayrecord": "no records",
    "arrays": "no arrays",
    "arrow": "no table",
    "audio": "no sound",
    "hdf5": "no HDF5",
    "images": "not a picture",
    "lerobot": "no part of a LeRobot data set",
    "mds": "no MDS shard",
    "tables": "no table",
    "tfrecord": "no records",
    "tokens": "no tokens",
    "videos": OUTCOMES["unsupported"],
    "webdataset": "not a tar",
    "zarr": "no part of a Zarr store",
}
"""What files are in words that a converter has no use for."""


def _read_fields(path: str) -> Any:
    """What a file of JSON says; a field that is there twice is refused."""

    def named_once(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
        counts = Counter(name for name, _ in pairs)
        if twice := [name for name, n in counts.items() if n > 1]:
            raise shardio.InvalidArgument(f"{path}: {twice[0]!r} is there {counts[twice[0]]} times")
        return dict(pairs)

    try:
        with open(path, encoding="utf-8-sig") as file:
            return json.load(file, object_pairs_hook=named_once)
    except shardio.InvalidArgument:  # which is a ValueError
        raise
    except (ValueError, RecursionError) as error:
        raise shardio.InvalidArgument(f"{path}: not JSON: {error}") from error


def run(options: argparse.Namespace) -> int:
    """Convert, report, and return the exit code."""
    given = {n: v for n in CONVERTER_OPTIONS if (v := getattr(options, n)) is not None}
    if options.schema is not None:
        given["fields"] = _read_fields(options.schema)
    if options.estimate:
        return _estimate(options, given)
    if options.out is None:
        raise shardio.InvalidArgument("OUT is missing: the folder of the dataset")
    with ProgressLine("converting", is_silent=options.quiet or options.json) as line:
        report = shardio.convert(
            options.src,
            options.out,
            kind=options.kind,
            workers=options.workers,
            on_error=options.on_error,
            keep_partial=options.keep_partial,
            resume=options.resume,
            overwrite=options.overwrite,
            append=options.append,
            labels=options.labels,
            **engine_options(options),
            progress=lambda state: line.show(state.n_bytes_done, state.n_bytes, _note(state)),
            **given,
        )
    code = 1 if report.broken or report.modified or not report.generation else 0
    if options.quiet and not options.json:
        for source in (*report.modified, *report.broken):
            print_error(f"{source.outcome}: {escaped(source.name)}: {escaped(source.reason)}")
        if not report.generation:
            print_error(_nothing(report))
        return code
    stored = _measured(report, options)
    if options.json:
        print_json({**as_json(report), **stored_json(report, stored)})
    else:
        lines = describe(report, has_file=options.labels is not None, appends=options.append)
        *before, last = lines
        print_out("\n".join([*before, *_fields(report), *describe_stored(report, stored), last]))
    return code


def _nothing(report: shardio.ConversionReport) -> str:
    """Return the line of a report for a conversion without a sample."""
    n_files = format_count(len(report.inputs), "file")
    place = escaped(str(report.dataset))
    return f"no sample came of {n_files}: nothing is published, {place} is as it was"


def _fields(report: shardio.ConversionReport) -> Iterator[str]:
    """Say what was told from the files: the fields of a sample."""
    if report.kind not in MEDIA and report.generation:
        with shardio.open(report.dataset) as dataset:
            fields = ", ".join(_field(*each) for each in dataset.schema.items())
        yield f"a sample has {escaped(fields)}"


def _field(name: str, field: object) -> str:
    """A field in a few words, as the file of --schema has it."""
    is_optional = "?" if getattr(field, "optional", False) else ""
    if isinstance(field, shardio.List):
        return f"{_field(f'{name} list of', field.element)}{is_optional}"
    if not isinstance(field, shardio.Array):
        return f"{name} {type(field).__name__.lower()}{is_optional}"
    dims = ",".join("*" if n is None else str(n) for n in field.shape)
    return f"{name} {field.dtype}{f'[{dims}]' if dims else ''}{is_optional}"


def _measured(report: shardio.ConversionReport, options: argparse.Namespace) -> StoredReport | None:
    """What a sample of the result is like; None where there is nothing, or it is gone already.

    In an object store, it is not read again.
    """
    if is_url(report.dataset):
        return None
    try:
        return measure_stored(report, options.src)
    except (shardio.ShardioError, OSError) as error:
        is_unchecked = options.store == "packets" and not options.check
        hint = "; --check finds such files, and leaves them out" if is_unchecked else ""
        print_error(f"the result is not measured: {escaped(str(error))}{hint}")
        return None


def _estimate(options: argparse.Namespace, given: Mapping[str, Any]) -> int:
    """Say what a conversion would come to."""
    if options.engine != "local":
        raise shardio.InvalidArgument("--estimate and --engine: a few files are converted here")
    for name in ("resume", "overwrite", "append"):
        if getattr(options, name):
            raise shardio.InvalidArgument(
                f"--estimate and --{name}: an estimate is of a new dataset; leave one of them out"
            )
    found = estimate(
        options.src,
        kind=options.kind,
        workers=options.workers,
        keep_partial=options.keep_partial,
        **given,
    )
    if options.json:
        facts = stored_json(found.sample, found.stored)
        print_json(
            {
                **facts,
                "files": found.n_inputs,
                "files_converted": len(found.sample.inputs),
                "estimated_bytes": found.n_bytes,
                "estimated_seconds": round(found.elapsed_s, 1),
            }
        )
        return 0
    n_tried = len(found.sample.inputs)
    outcomes = (f"{n:,} {OUTCOMES[kind]}" for kind, n in found.sample.counts.items())
    lines = [
        f"tried {n_tried:,} of {format_count(found.n_inputs, 'file')}: {', '.join(outcomes)}",
        *describe_stored(found.sample, found.stored),
        f"estimated: {format_size(found.n_bytes)} from {format_size(found.n_source_bytes)}, in "
        f"{format_duration(found.elapsed_s)}; nothing was written",
    ]
    print_out("\n".join(lines))
    return 0


def _note(state: Any) -> str:
    """How far a conversion is, in files and samples."""
    note = f"{state.n_inputs_done:,} of {format_count(state.n_inputs, 'file')}"
    note += f", {format_count(state.n_samples, 'sample')}"
    return f"{note}, {state.n_broken} broken" if state.n_broken else note


def n_dropped(report: shardio.ConversionReport) -> int:
    """Frames at the ends of videos that are too few for another clip."""
    return sum(int(source.detail.get("dropped", 0)) for source in report.inputs)


def as_json(report: shardio.ConversionReport) -> dict[str, Any]:
    """Give the report as JSON can say it."""
    return {
        "dataset": str(report.dataset),
        "kind": report.kind,
        "files": report.counts,
        "generation": report.generation,
        "clips": n_clips(report),
        "samples": report.n_samples,
        "samples_before": report.n_samples_before,
        "bytes": report.n_bytes,
        "seconds": round(report.elapsed_s, 3),
        "dropped_frames": n_dropped(report),
        "stopped": report.stopped,
        "classes": clips_by_class(report),
        "inputs": [{**source.as_json(), "bytes": source.n_bytes} for source in report.inputs],
    }


def clips_by_class(report: shardio.ConversionReport) -> dict[str, int]:
    """Count the samples of each class, also of those that have none."""
    found: Counter[int] = Counter()
    for source in report.inputs:
        found[source.label] += source.n_samples
    return {name: found[label] for label, name in enumerate(report.classes)}


def describe(
    report: shardio.ConversionReport, *, has_file: bool = False, appends: bool = False
) -> Iterator[str]:
    """Say in words what was done, what was not and why, and where it is; `has_file`: of labels."""
    if report.n_samples or not appends:
        yield from _describe_clips(report, has_file=has_file)
    for outcome in LISTED:
        yield from _group(report, outcome)
    if report.modified:
        yield (
            "  what the dataset has of them stays as it was: --append replaces no samples; "
            "--overwrite converts anew, a file under another name is a new one"
        )
    if report.stopped:
        published = "; what comes before it is published" if report.generation else ""
        yield f"stopped at the first broken file{published}"
    if report.stats_dropped:
        yield "statistics of the samples before are dropped; shardio stats counts again"
    if not report.generation:
        yield _nothing(report)
        return
    n_converted = report.counts.get("converted", 0)
    total = report.n_samples_before + report.n_samples
    yield (
        f"{'appended' if appends else 'converted'} {n_converted:,} of "
        f"{format_count(len(report.inputs), 'file')} {'as' if appends else 'into'} "
        f"{format_count(report.n_samples, noun(report))}{_in_clips(report)}, "
        f"{format_size(report.n_bytes)}, "
        f"in {format_duration(report.elapsed_s)}: {escaped(str(report.dataset))}"
        + (
            f", generation {report.generation}, {format_count(total, noun(report))} in all"
            if appends
            else ""
        )
    )


def _in_clips(report: shardio.ConversionReport) -> str:
    """How many clips the default view has of videos."""
    is_view = report.view["kind"] == "clips"
    return f" ({format_count(n_clips(report), 'clip')})" if is_view else ""


def _describe_clips(report: shardio.ConversionReport, *, has_file: bool) -> Iterator[str]:
    """Say how many clips each class has, which have none, and what was left over."""
    by_class = clips_by_class(report)
    n_unlabelled = report.n_samples - sum(by_class.values())
    if by_class:
        rows = [[escaped(name), f"{n:,}"] for name, n in by_class.items()]
        yield f"{format_count(len(by_class), 'class', 'classes')}, with {noun(report)}s:"
        yield format_list(format_table(rows).splitlines(), "shardio inspect lists them")
    if n_unlabelled:
        why = "not in the file of labels" if has_file else "directly in SRC"
        yield f"{format_count(n_unlabelled, noun(report))} without a class (label -1): {why}"
    if dropped := n_dropped(report):
        n_files = sum(bool(source.detail.get("dropped")) for source in report.inputs)
        yield (
            f"{format_count(dropped, 'frame')} dropped: too few for another clip, "
            f"at the ends of {format_count(n_files, 'file')}"
        )
    yield from _describe_sound(report)


def _describe_sound(report: shardio.ConversionReport) -> Iterator[str]:
    """Say how many videos have sound, where it was asked for."""
    told = [source.detail["sound"] for source in report.inputs if "sound" in source.detail]
    if report.kind != "videos" or not told:
        return
    kept = [each for each in told if each]
    line = f"sound: in {len(kept):,} of {format_count(len(told), 'file')}"
    if n_several := sum(each.get("streams", 1) > 1 for each in kept):
        line += (
            f"; {format_count(n_several, 'file')} with several streams, of which the first is kept"
        )
    yield line


def _group(report: shardio.ConversionReport, outcome: str) -> Iterator[str]:
    """List the inputs of one outcome; broken ones are all listed."""
    group = [source for source in report.inputs if source.outcome == outcome]
    if not group:
        return
    words = OUTCOMES[outcome]
    if outcome == "unsupported":
        words = NOT_OF_KIND.get(report.kind, "of another kind")
    if outcome == "empty" and report.kind not in MEDIA:
        words = "no sample"
    yield f"{words}: {format_count(len(group), 'file')}"
    if outcome == "part":
        return  # as many as a store has chunks
    lines = []
    for source in group:
        kept = f" ({format_count(source.n_samples, noun(report))} kept)" if source.n_samples else ""
        lines.append(escaped(": ".join(filter(None, (source.name, source.reason)))) + kept)
    if outcome in ("broken", "modified"):
        yield from (f"  {line}" for line in lines)
    else:
        yield format_list(lines, "shardio inspect --json OUT lists all")
