"""What a conversion has made, in words and as JSON: how much, how near to its source, how fast."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from statistics import median
from typing import Any, Final

import shardio
from shardio.measuring import StoredReport, source_bytes
from shardio_tools.output import escaped, format_size

MEDIA: Final = {"audio": "sound", "images": "picture", "videos": "clip"}
"""What a sample of media is called; of all other kinds it has the fields that were found."""


def noun(report: shardio.ConversionReport) -> str:
    """What a sample of the dataset is called."""
    if report.view["kind"] == "clips":
        return "video"
    return MEDIA.get(report.kind, "sample")


def n_clips(report: shardio.ConversionReport) -> int:
    """Clips that were made: rows, or those of videos in the default view."""
    if report.view["kind"] != "clips":
        return report.n_samples
    return sum(int(source.detail.get("clips", 0)) for source in report.inputs if source.n_samples)


def stored_json(report: shardio.ConversionReport, stored: StoredReport | None) -> dict[str, Any]:
    """Give what was measured of the result as JSON can say it."""
    n_bytes = source_bytes(report)
    facts: dict[str, Any] = {"source_bytes": n_bytes}
    if n_bytes:
        facts["ratio"] = round(report.n_bytes / n_bytes, 4)
    if stored is not None:
        facts["random_samples_per_s"] = round(stored.samples_per_s, 1)
        if stored.psnr_db:
            facts["psnr_db"] = {name: round(db, 2) for name, db in stored.psnr_db.items()}
    return facts


def describe_stored(report: shardio.ConversionReport, stored: StoredReport | None) -> Iterator[str]:
    """Say how large the result is beside its source, how near to it, and how fast it is read."""
    n_bytes = source_bytes(report)
    if not report.n_samples or not n_bytes:
        return
    ratio = report.n_bytes / n_bytes
    line = f"{format_size(report.n_bytes)} from {format_size(n_bytes)}: {ratio:.2f} of it"
    if stored is not None:
        if stored.psnr_db:
            line += f"; lossy: {_nearness(stored.psnr_db)}, where --store raw is exact"
        what = "clip" if report.view["kind"] == "clips" else noun(report)
        rate = stored.samples_per_s
        line += f"; {rate:,.{0 if rate >= 10 else 1}f} random {what}s per second and core"
    yield line


def _nearness(psnr_db: Mapping[str, float]) -> str:
    """How near some files' pictures are to their sources."""
    said = f"PSNR {median(psnr_db.values()):.1f} dB at the stored size"
    if len(psnr_db) == 1:
        return f"{said}, of 1 file"
    worst = min(psnr_db, key=lambda name: psnr_db[name])
    return f"{said} (median of {len(psnr_db)} files; least {psnr_db[worst]:.1f}: {escaped(worst)})"
