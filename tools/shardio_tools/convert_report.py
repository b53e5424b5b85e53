"""The report of a conversion, as text and JSON: counts, size and quality of the result, speed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from statistics import median
from typing import Any, Final

import shardio
from shardio.conversion import BUILT_IN
from shardio.measuring import StoredReport, source_bytes
from shardio_tools.inspect.report import schema_facts, type_text
from shardio_tools.output import (
    OUTCOMES,
    escaped,
    format_count,
    format_duration,
    format_list,
    format_size,
    format_table,
)

MEDIA: Final = {"audio": "sound", "images": "picture", "videos": "clip"}
"""The word for a sample of each kind. For other kinds, reports list the fields of a sample."""
LISTED: Final = ("duplicate", "not_processed", "part", "unsupported", "empty", "modified", "broken")
"""Outcomes whose inputs are listed, the most important last."""


def report_as_json(report: shardio.ConversionReport, stored: StoredReport | None) -> dict[str, Any]:
    """Return the report, and the measurements of the result if there are any, as JSON values."""
    n_bytes = source_bytes(report)
    facts: dict[str, Any] = {
        "dataset": str(report.dataset),
        "kind": report.kind,
        "files": report.counts,
        "generation": report.generation,
        "clips": _n_clips(report),
        "samples": report.n_samples,
        "samples_before": report.n_samples_before,
        "bytes": report.n_bytes,
        "seconds": round(report.elapsed_s, 3),
        "dropped_frames": _n_dropped(report),
        "stopped": report.stopped,
        "classes": _samples_by_class(report),
        "subsets": dict(report.subsets),
        "inputs": [{**source.as_json(), "bytes": source.n_bytes} for source in report.inputs],
        "source_bytes": n_bytes,
    }
    if n_bytes:
        facts["ratio"] = round(report.n_bytes / n_bytes, 4)
    if stored is not None:
        facts["random_samples_per_s"] = round(stored.samples_per_s, 1)
        if stored.psnr_db:
            facts["psnr_db"] = {name: round(db, 2) for name, db in stored.psnr_db.items()}
    return facts


def no_samples_line(report: shardio.ConversionReport) -> str:
    """Return the line of a report for a conversion without a sample."""
    n_files = format_count(len(report.inputs), "file")
    place = escaped(str(report.dataset))
    counts = (f"{n:,} {_outcome_words(report, each)}" for each, n in sorted(report.counts.items()))
    why = ", ".join(counts)
    return f"{n_files} gave no sample ({why}): nothing was published, {place} is unchanged"


def describe_report(
    report: shardio.ConversionReport,
    stored: StoredReport | None,
    *,
    has_label_file: bool,
    has_split: bool,
    appends: bool,
) -> Iterator[str]:
    """Yield the lines of the report; `stored` has the measurements of the result, if any."""
    if report.n_samples or not appends:
        yield from _describe_samples(report, has_label_file=has_label_file, has_split=has_split)
    for outcome in LISTED:
        yield from _group(report, outcome)
    if report.modified:
        yield (
            "  their samples in the dataset are unchanged: --append replaces no samples; "
            "--overwrite converts everything again; rename a file to add it as a new one"
        )
    if report.stopped:
        published = "; what comes before it is published" if report.generation else ""
        yield f"stopped at the first broken file{published}"
    if report.stats_dropped:
        yield "the previous statistics were dropped; run shardio stats again"
    if not report.generation:
        yield no_samples_line(report)
        return
    if report.kind not in MEDIA:
        with shardio.open(report.dataset) as dataset:
            kinds = schema_facts(dataset.schema).items()
        fields = ", ".join(f"{name} {type_text(kind)}" for name, kind in kinds)
        yield f"a sample has {escaped(fields)}"
    yield from _describe_stored(report, stored)
    noun, total = _sample_noun(report), report.n_samples_before + report.n_samples
    clips = f" ({format_count(_n_clips(report), 'clip')})" * _is_view_of_clips(report)
    last = (
        f"{'appended' if appends else 'converted'} {report.counts.get('converted', 0):,} of "
        f"{format_count(len(report.inputs), 'file')} {'as' if appends else 'into'} "
        f"{format_count(report.n_samples, noun)}{clips}, {format_size(report.n_bytes)}, "
        f"in {format_duration(report.elapsed_s)}: {escaped(str(report.dataset))}"
    )
    if appends:
        last += f", generation {report.generation}, {format_count(total, noun)} in all"
    yield last


def _is_view_of_clips(report: shardio.ConversionReport) -> bool:
    return bool(report.view["kind"] == "clips")


def _sample_noun(report: shardio.ConversionReport) -> str:
    return "video" if _is_view_of_clips(report) else MEDIA.get(report.kind, "sample")


def _n_clips(report: shardio.ConversionReport) -> int:
    """Return the number of samples or, for videos that are viewed as clips, of clips."""
    if not _is_view_of_clips(report):
        return report.n_samples
    return sum(int(source.detail.get("clips", 0)) for source in report.inputs if source.n_samples)


def _n_dropped(report: shardio.ConversionReport) -> int:
    """Return the number of frames dropped at the ends of videos because they fill no clip."""
    return sum(int(source.detail.get("dropped", 0)) for source in report.inputs)


def _samples_by_class(report: shardio.ConversionReport) -> dict[str, int]:
    found: Counter[int] = Counter()
    for source in report.inputs:
        found[source.label] += source.n_samples
    return {name: found[label] for label, name in enumerate(report.classes)}


def _describe_stored(
    report: shardio.ConversionReport, stored: StoredReport | None
) -> Iterator[str]:
    n_bytes = source_bytes(report)
    if not report.n_samples or not n_bytes:
        return
    ratio = report.n_bytes / n_bytes
    line = f"{format_size(report.n_bytes)} from {format_size(n_bytes)}: ratio {ratio:.2f}"
    if stored is not None:
        if stored.psnr_db:
            line += f"; lossy: {_psnr_text(stored.psnr_db)}, where --store raw is exact"
        what = "clip" if _is_view_of_clips(report) else _sample_noun(report)
        rate = stored.samples_per_s
        line += f"; {rate:,.{0 if rate >= 10 else 1}f} random {what}s per second and core"
    yield line


def _psnr_text(psnr_db: Mapping[str, float]) -> str:
    text = f"PSNR {median(psnr_db.values()):.1f} dB at the stored size"
    if len(psnr_db) == 1:
        return f"{text}, of 1 file"
    worst = min(psnr_db, key=lambda name: psnr_db[name])
    return f"{text} (median of {len(psnr_db)} files; least {psnr_db[worst]:.1f}: {escaped(worst)})"


def _describe_subsets(report: shardio.ConversionReport, *, is_random: bool) -> str:
    sizes = ", ".join(f"{escaped(name)} {n:,}" for name, n in report.subsets.items())
    line = f"{format_count(len(report.subsets), 'subset')}, with {_sample_noun(report)}s: {sizes}"
    total = report.n_samples_before + report.n_samples
    if n_left := total - sum(report.subsets.values()):
        line += f"; in none: {n_left:,}"
    how = "at random" if is_random else "from folders; --no-split-folders makes them classes"
    return f"{line} ({how})"


def _describe_samples(
    report: shardio.ConversionReport, *, has_label_file: bool, has_split: bool
) -> Iterator[str]:
    by_class, noun = _samples_by_class(report), _sample_noun(report)
    n_unlabelled = report.n_samples - sum(by_class.values())
    if by_class:
        rows = [[escaped(name), f"{n:,}"] for name, n in by_class.items()]
        yield f"{format_count(len(by_class), 'class', 'classes')}, with {noun}s:"
        yield format_list(format_table(rows).splitlines(), "shardio inspect lists them")
    if by_class and n_unlabelled:
        why = "not in the file of labels" if has_label_file else "directly in SRC"
        yield f"{format_count(n_unlabelled, noun)} without a class (label -1): {why}"
    if report.subsets:
        yield _describe_subsets(report, is_random=has_split)
    if dropped := _n_dropped(report):
        n_files = sum(bool(source.detail.get("dropped")) for source in report.inputs)
        yield (
            f"{format_count(dropped, 'frame')} dropped: too few for another clip, "
            f"at the ends of {format_count(n_files, 'file')}"
        )
    tracks = [source.detail["sound"] for source in report.inputs if "sound" in source.detail]
    if report.kind == "videos" and tracks:
        kept = [each for each in tracks if each]
        line = f"audio: in {len(kept):,} of {format_count(len(tracks), 'file')}"
        if n_several := sum(each.get("streams", 1) > 1 for each in kept):
            several = format_count(n_several, "file")
            line += f"; {several} with several streams, only the first is kept"
        yield line


def _outcome_words(report: shardio.ConversionReport, outcome: str) -> str:
    if outcome == "unsupported":
        known = BUILT_IN.get(report.kind)
        return known.unsupported if known else "of another kind"
    if outcome == "empty" and report.kind not in MEDIA:
        return "no sample"
    return OUTCOMES[outcome]


def _group(report: shardio.ConversionReport, outcome: str) -> Iterator[str]:
    group = [source for source in report.inputs if source.outcome == outcome]
    if not group:
        return
    yield f"{_outcome_words(report, outcome)}: {format_count(len(group), 'file')}"
    if outcome == "part":
        return  # not listed: a Zarr store may have one such input per chunk
    lines = []
    for source in group:
        line = escaped(": ".join(filter(None, (source.name, source.reason))))
        if source.n_samples:
            line += f" ({format_count(source.n_samples, _sample_noun(report))} kept)"
        lines.append(line)
    if outcome in ("broken", "modified"):
        yield from (f"  {line}" for line in lines)
    else:
        yield format_list(lines, "shardio inspect --json OUT lists all")
