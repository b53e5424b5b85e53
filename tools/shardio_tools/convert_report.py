"""The report of a conversion, as text and JSON: counts, size and quality of the result, speed."""

from __future__ import annotations

import argparse
import os
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from statistics import median
from typing import Any, Final

import shardio
from shardio._base.progress import format_size
from shardio.conversion import BUILT_IN, StoreChoice
from shardio.measuring import StoredReport, source_bytes
from shardio_tools.arguments import is_url
from shardio_tools.inspect.report import schema_facts, type_text
from shardio_tools.output import OUTCOMES, escaped, format_count, format_duration, inspect_step
from shardio_tools.screen import Cell, Done, Element, Heading, Next, Role, Table, facts

MEDIA: Final = {"audio": "sound", "images": "picture", "videos": "clip"}
"""The word for a sample, by kind. For all other kinds, reports list the fields of a sample."""
_ROLES: Final[dict[str, Role]] = {
    "broken": "bad",
    "modified": "bad",
    "empty": "warning",
    "not_processed": "warning",
}
LISTED: Final = ("duplicate", "not_processed", "part", "unsupported", "empty", "modified", "broken")
"""Outcomes whose inputs are listed, the most important last."""

_MAX_IGNORED: Final = 4
"""The maximum number of hidden or empty files and folders that the report names."""


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
        "ignored": [*report.ignored],
        "inputs": [{**source.as_json(), "bytes": source.n_bytes} for source in report.inputs],
        "source_bytes": n_bytes,
    }
    if n_bytes:
        facts["ratio"] = round(report.n_bytes / n_bytes, 4)
    if report.choice is not None:
        facts["choice"] = _choice_as_json(report.choice)
    if stored is not None:
        facts["random_samples_per_s"] = round(stored.samples_per_s, 1)
        if stored.psnr_db:
            facts["psnr_db"] = {name: round(db, 2) for name, db in stored.psnr_db.items()}
    return facts


def _choice_as_json(choice: StoreChoice) -> dict[str, Any]:
    stores = [
        {
            "store": one.store,
            "bytes": one.n_bytes,
            "clips_per_s": round(one.clips_per_s, 1),
            "problem": one.problem,
        }
        for one in choice.estimates
    ]
    return {"store": choice.store, "reason": choice.reason, "basis": choice.basis, "stores": stores}


def no_samples_line(report: shardio.ConversionReport) -> str:
    """Return the closing line for a conversion that found no sample."""
    n_files = format_count(len(report.inputs), "file")
    place = escaped(str(report.dataset))
    counts = (
        f"{n:,} {outcome_text(report.kind, each)}" for each, n in sorted(report.counts.items())
    )
    why = ", ".join(counts)
    return f"{n_files} gave no sample ({why}): nothing was published, {place} is unchanged"


def describe_report(
    report: shardio.ConversionReport, stored: StoredReport | None, options: argparse.Namespace
) -> Iterator[Element]:
    """Yield the elements of the report; `stored` is None if the result was not measured."""
    appends = options.append
    if report.choice is not None:
        yield from _describe_choice(report.choice)
    if report.n_samples or not report.n_samples_before:
        yield from _describe_classes(report, options)
    if not is_url(options.out) and _lies_in(options.out, options.src):
        text = "OUT lies in SRC, where other programs, and later conversions, find its files"
        yield Cell(text, "warning")
    if n_ignored := len(report.ignored):
        names = ", ".join(map(escaped, report.ignored[:_MAX_IGNORED]))
        rest = f" and {n_ignored - _MAX_IGNORED:,} more" * (n_ignored > _MAX_IGNORED)
        yield Cell(f"ignored {n_ignored:,} hidden or empty: {names}{rest}", "dim")
    for outcome in LISTED:
        yield from _group(report, outcome)
    if report.modified:
        yield (
            "  their samples in the dataset are unchanged: --append replaces no samples; "
            "--overwrite converts everything again; rename a file to add it as a new one"
        )
    if rows := [*_notes(report, stored)]:
        yield Heading("Result")
        yield facts(rows)
    if report.stopped:
        published = "; the files before it are published" if report.generation else ""
        yield Cell(f"stopped at the first broken file{published}", "bad")
    if report.stats_dropped:
        yield Cell("the previous statistics were dropped; run shardio stats again", "warning")
    if not report.generation:
        yield Done(no_samples_line(report), "bad")
        return
    noun, total = _sample_noun(report), report.n_samples_before + report.n_samples
    clips = f" ({format_count(_n_clips(report), 'clip')})" * _is_view_of_clips(report)
    if options.resume and not appends and not report.n_samples:
        yield Done(f"already complete: {format_count(total, noun)} in {escaped(options.out)}")
        return
    last = (
        f"{'appended' if appends else 'converted'} {report.counts.get('converted', 0):,} of "
        f"{format_count(len(report.inputs), 'file')} {'as' if appends else 'into'} "
        f"{format_count(report.n_samples, noun)}{clips}, {format_size(report.n_bytes)}, "
        f"in {format_duration(report.elapsed_s)}: {escaped(options.out)}"
    )
    if appends:
        last += f", generation {report.generation}, {format_count(total, noun)} in all"
    yield Done(last, "warning" if report.broken or report.modified else "good")
    loader = f"loader = shardio.ShardLoader({escaped(options.out)!r}, batch_size=8, shuffle=True)"
    code = [(loader, ""), ("for batch in loader.progress(): ...", "")]
    yield Next([inspect_step(options.out)], code)


def _describe_choice(choice: StoreChoice) -> Iterator[Element]:
    yield Heading("Stores")
    rows = []
    for one in choice.estimates:
        chosen = Cell("chosen", "good") if one.store == choice.store else escaped(one.problem)
        figures = [format_size(one.n_bytes), f"{one.clips_per_s:,.0f}"] if one.n_bytes else ["", ""]
        rows.append([one.store, *figures, chosen])
    yield Table(rows, ("store", "size", "clips/s per core", ""), "<>>")
    yield Cell(f"  {choice.basis}", "dim")
    yield f"  {choice.reason}"


def _lies_in(out: str, folder: str) -> bool:
    return Path(os.path.realpath(folder)) in Path(os.path.realpath(out)).parents


def _is_view_of_clips(report: shardio.ConversionReport) -> bool:
    return bool(report.view["kind"] == "clips")


def _sample_noun(report: shardio.ConversionReport) -> str:
    return "video" if _is_view_of_clips(report) else MEDIA.get(report.kind, "sample")


def _n_clips(report: shardio.ConversionReport) -> int:
    """Return the number of clips if videos are viewed as clips, else the number of samples."""
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


def _notes(report: shardio.ConversionReport, stored: StoredReport | None) -> Iterator[list[str]]:
    """Yield rows about the samples: fields, dropped frames, audio, size, quality, speed."""
    if report.generation and report.kind not in MEDIA:
        with shardio.open(report.dataset) as dataset:
            kinds = schema_facts(dataset.schema).items()
        fields = ", ".join(f"{name} {type_text(kind)}" for name, kind in kinds)
        yield ["fields", escaped(fields)]
    if dropped := _n_dropped(report):
        n_files = sum(bool(source.detail.get("dropped")) for source in report.inputs)
        ends = f"at the ends of {format_count(n_files, 'file')}"
        yield ["dropped", f"{format_count(dropped, 'frame')}, too few for another clip, {ends}"]
    tracks = [source.detail["sound"] for source in report.inputs if "sound" in source.detail]
    if report.kind == "videos" and tracks:
        kept = [each for each in tracks if each]
        text = f"in {len(kept):,} of {format_count(len(tracks), 'file')}"
        if n_several := sum(each.get("streams", 1) > 1 for each in kept):
            several = format_count(n_several, "file")
            text += f"; {several} with several streams, only the first is kept"
        yield ["audio", text]
    n_bytes = source_bytes(report)
    if not report.generation or not report.n_samples or not n_bytes:
        return
    size = f"{format_size(report.n_bytes)} from {format_size(n_bytes)}"
    yield ["size", f"{size}: ratio {report.n_bytes / n_bytes:.2f}"]
    if stored is not None:
        if stored.psnr_db:
            yield ["quality", f"lossy: {_psnr_text(stored.psnr_db)}; --store raw is exact"]
        what = "clip" if _is_view_of_clips(report) else _sample_noun(report)
        rate = stored.samples_per_s
        yield ["speed", f"{rate:,.{0 if rate >= 10 else 1}f} random {what}s per second and core"]


def _psnr_text(psnr_db: Mapping[str, float]) -> str:
    text = f"PSNR {median(psnr_db.values()):.1f} dB at the stored size"
    if len(psnr_db) == 1:
        return f"{text}, of 1 file"
    worst = min(psnr_db, key=lambda name: psnr_db[name])
    return f"{text} (median of {len(psnr_db)} files; least {psnr_db[worst]:.1f}: {escaped(worst)})"


def _describe_subsets(report: shardio.ConversionReport, *, is_random: bool) -> Iterator[Element]:
    folders = {part for one in report.inputs for part in one.name.split("/")[:-1]}
    is_by_folder = not folders.isdisjoint(report.subsets)
    how = "at random" if is_random else f"from {'folders' if is_by_folder else 'names of files'}"
    if not is_random and not report.n_samples_before:
        verb = "makes them classes" if is_by_folder else "ignores the names"
        how += f"; --no-split-folders {verb}"
    yield Heading(f"{format_count(len(report.subsets), 'subset')}, {how}")
    rows = [[escaped(name), f"{n:,}"] for name, n in report.subsets.items()]
    total = report.n_samples_before + report.n_samples
    if n_left := total - sum(report.subsets.values()):
        rows.append([Cell("in none", "dim"), f"{n_left:,}"])
    yield Table(rows, ("subset", f"{_sample_noun(report)}s"), "<>")


def _describe_classes(
    report: shardio.ConversionReport, options: argparse.Namespace
) -> Iterator[Element]:
    by_class, noun = _samples_by_class(report), _sample_noun(report)
    n_unlabelled = report.n_samples - sum(by_class.values())
    if by_class:
        yield Heading(format_count(len(by_class), "class", "classes"))
        rows = [[escaped(name), f"{n:,}"] for name, n in by_class.items()]
        yield Table(rows, ("class", f"{noun}s"), "<>", "shardio inspect --all lists them")
    if by_class and n_unlabelled:
        why = "directly in SRC" if options.labels is None else "not in the file of labels"
        text = f"{format_count(n_unlabelled, noun)} without a class (label -1): {why}"
        yield Cell(text, "warning")
    if nested := next((name for name in by_class if "/" in name), None):
        outer = nested.rpartition("/")[0]
        yield f"  classes are whole paths: {escaped(nested)} is no part of {escaped(outer)}"
    if report.subsets:
        yield from _describe_subsets(report, is_random=options.split is not None)


def outcome_text(kind: str | None, outcome: str) -> str:
    """Return a text for the outcome of an input that was read by a converter of this kind."""
    if outcome == "unsupported":
        known = BUILT_IN.get(kind or "")
        return known.unsupported if known else "of another kind"
    if outcome == "empty" and kind not in MEDIA:
        return "no sample"
    return OUTCOMES.get(outcome, outcome)


def _group(report: shardio.ConversionReport, outcome: str) -> Iterator[Element]:
    group = [source for source in report.inputs if source.outcome == outcome]
    if not group:
        return
    words = outcome_text(report.kind, outcome)
    title = f"{words[0].upper()}{words[1:]}: {format_count(len(group), 'file')}"
    yield Heading(title, _ROLES.get(outcome, ""))
    if outcome == "part":
        return  # not listed: a Zarr store may have one such input per chunk
    rows = []
    for source in group:
        kept = format_count(source.n_samples, _sample_noun(report))
        reason = f"{source.reason} ({kept} kept)" if source.n_samples else source.reason
        rows.append([escaped(source.name), escaped(reason)])
    is_bad = outcome in ("broken", "modified")
    yield Table(rows, rest="" if is_bad else "shardio inspect --verbose --all lists them")
