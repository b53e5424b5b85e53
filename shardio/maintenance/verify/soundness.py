"""Nothing is rewritten that is not sound: new hashes over damaged data would hide the damage."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import astuple, dataclass
from itertools import accumulate
from pathlib import Path

from shardio.errors import DatasetCorrupt
from shardio.maintenance.verify.dataset import audit_dataset
from shardio.maintenance.verify.findings import Finding
from shardio.maintenance.verify.runner import AuditProgress, examine_all

_NO_DAMAGE = {"unknown_shard"}
"""Findings about a folder that say nothing about the dataset's own samples."""


@dataclass(frozen=True, slots=True)
class MaintenanceProgress:
    """How far a rewriting is; `step` is "verifying", "writing" or "counting"."""

    step: str
    n_shards_done: int
    n_shards: int
    n_bytes_done: int
    n_bytes: int


Progress = Callable[[MaintenanceProgress], None]


def ends_of(sizes: Iterable[int]) -> list[int]:
    """How many bytes lie before each shard, and behind the last: for the progress of a step."""
    return list(accumulate(sizes, initial=0))


def tell_step(progress: Progress | None, step: str, n_done: int, ends: Sequence[int]) -> None:
    """Report that so many of the shards are through, of which `ends_of` was taken."""
    if progress is not None:
        progress(MaintenanceProgress(step, n_done, len(ends) - 1, ends[n_done], ends[-1]))


def require_sound(
    folder: str | os.PathLike[str], workers: int | None, progress: Progress | None
) -> None:
    """Check every byte of a dataset.

    Raises:
        DatasetNotFound: there is none.
        DatasetCorrupt: something is wrong with it; the first finding is named.
    """
    report = audit_dataset(folder, workers=workers, progress=_told(progress))
    _refuse(folder, [f for f in report.findings if f.code not in _NO_DAMAGE])


def require_sound_shards(
    folder: str | os.PathLike[str],
    names: Sequence[str],
    workers: int | None,
    progress: Progress | None,
) -> None:
    """Check every byte of some shards of a dataset.

    Raises:
        DatasetCorrupt: something is wrong with one; the first finding is named.
    """
    examined = examine_all(Path(folder), names, workers, _told(progress))
    _refuse(folder, [f for found in examined.values() for f in found.findings])


def _told(progress: Progress | None) -> Callable[[AuditProgress], None] | None:
    if progress is None:
        return None
    return lambda state: progress(MaintenanceProgress("verifying", *astuple(state)))


def _refuse(folder: str | os.PathLike[str], findings: Sequence[Finding]) -> None:
    if findings:
        raise DatasetCorrupt(
            f"{os.fspath(folder)}: is damaged, and was not touched: {findings[0]} (findings: "
            f"{len(findings)}; shardio verify lists them, shardio repair saves what is sound)"
        )
