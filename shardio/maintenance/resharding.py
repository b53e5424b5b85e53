"""Reshard and compact: the same samples in the same order, in shards of another size."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from pathlib import Path

from shardio.dataset.dataset import ShardDataset
from shardio.dataset.generation import Generation
from shardio.dataset.manifest import load, load_generation
from shardio.errors import DataError
from shardio.maintenance.conflicts import tell_overtaken
from shardio.maintenance.rewriting import (
    SHARD_BYTES,
    MaintenanceReport,
    Rewriting,
    check_shard_bytes,
)
from shardio.maintenance.verify.dataset import (
    Progress,
    ends_of,
    require_sound,
    require_sound_shards,
    tell_step,
)

PathName = str | os.PathLike[str]


def reshard(
    source: PathName,
    out: PathName,
    *,
    shard_bytes: int = SHARD_BYTES,
    workers: int | None = None,
    progress: Progress | None = None,
) -> MaintenanceReport:
    """Write all samples of a dataset, in their order, into a new one with shards of another size.

    Classes, inputs, subsets and statistics are those of the source. Every byte is verified first.

    Args:
        source: a dataset.
        out: a folder that is missing or empty.
        shard_bytes: how much data goes into one shard.
        workers: processes that verify; by default one per usable CPU.
        progress: called here, at the start and after every shard of each step.

    Raises:
        InvalidArgument: shard_bytes is no size.
        DatasetCorrupt: the source is damaged; repair it first.
        DatasetNotFound, DatasetExists, DatasetConflict: as in `merge`.
    """
    check_shard_bytes(shard_bytes)
    with tell_overtaken(source), ShardDataset(source) as dataset:
        generation = load_generation(source, dataset.generation)
        require_sound(source, workers, progress)
        with Rewriting(out, dataset.schema, shard_bytes=shard_bytes) as rewriting:
            _append_shards(dataset, range(len(dataset.shards)), rewriting, progress)
            return rewriting.report(
                classes=generation.classes,
                inputs=generation.inputs,
                converter=generation.converter,
                versions=generation.versions,
                view=generation.view,
                subsets=generation.subsets,
                stats=generation.stats,
                operation={
                    "name": "reshard",
                    "options": {"shard_bytes": shard_bytes},
                    "sources": [{"lineage": generation.lineage, "generation": generation.number}],
                },
            )


def _append_shards(
    dataset: ShardDataset,
    numbers: Iterable[int],
    rewriting: Rewriting,
    progress: Progress | None,
) -> None:
    """Write the samples of some shards anew."""
    chosen = list(numbers)
    ends = ends_of(dataset.shards[k].n_bytes for k in chosen)
    tell_step(progress, "writing", 0, ends)
    for n_done, k in enumerate(chosen, 1):
        for sample in dataset.samples(k):
            rewriting.append(sample)
        tell_step(progress, "writing", n_done, ends)


def compact(
    folder: PathName,
    *,
    shard_bytes: int = SHARD_BYTES,
    remove_old: bool = False,
    workers: int | None = None,
    progress: Progress | None = None,
) -> MaintenanceReport:
    """Put neighbouring small shards of a dataset together, as its next generation.

    Shards of less than half of `shard_bytes` are small. Samples keep their numbers, the dataset
    its lineage. Files of older generations stay for who has those open; `remove_old` removes the
    shards that the published generation does not name: who has an older one open keeps what is
    mapped already, and meets a ShardNotFound for the rest. Where columns were added later, all
    shards are rewritten, with those in them. What is rewritten is verified first.

    Args:
        folder: the dataset.
        shard_bytes: how much data goes into one shard that is written anew.
        remove_old: see above; also where nothing is to be put together.
        workers: processes that verify; by default one per usable CPU.
        progress: called here, at the start and after every shard of each step.

    Raises:
        InvalidArgument: shard_bytes is no size.
        DatasetNotFound: there is no dataset.
        DatasetCorrupt: a shard that is to be rewritten is damaged; repair it first.
        DatasetConflict: another writer published meanwhile; nothing is changed.
    """
    check_shard_bytes(shard_bytes)
    with tell_overtaken(folder), ShardDataset(folder) as dataset:
        previous = load_generation(folder, dataset.generation)
        groups = _groups(previous, shard_bytes)
        chosen = [k for group in groups if _is_rewritten(group, previous) for k in group]
        if chosen:
            names = [shard.name for k in chosen for shard, _ in dataset.files.files_of_shard(k)]
            require_sound_shards(folder, names, workers, progress)
            report = _compacted(dataset, previous, groups, shard_bytes, progress)
        else:
            report = MaintenanceReport.of(folder, previous, 0)
    if not remove_old:
        return report
    return MaintenanceReport.of(folder, load(folder), report.n_rewritten, _remove_old(Path(folder)))


def _groups(previous: Generation, shard_bytes: int) -> list[list[int]]:
    """Numbers of shards in order: each alone, but for neighbours that are small.

    All together where columns lie beside them.
    """
    shards = previous.shards
    if previous.column_groups:
        return [[*range(len(shards))]]
    found: list[list[int]] = []
    is_small = [shard.n_bytes < shard_bytes // 2 for shard in shards]
    for small, numbers in groupby(range(len(shards)), key=is_small.__getitem__):
        run = list(numbers)
        found += [run] if small else [[k] for k in run]
    return found


def _is_rewritten(group: Sequence[int], previous: Generation) -> bool:
    """Whether these shards do not stay as they are."""
    return len(group) > 1 or bool(previous.column_groups)


def _compacted(
    dataset: ShardDataset,
    previous: Generation,
    groups: Sequence[Sequence[int]],
    shard_bytes: int,
    progress: Progress | None,
) -> MaintenanceReport:
    with Rewriting(
        dataset.path, dataset.schema, shard_bytes=shard_bytes, previous=previous
    ) as rewriting:
        for group in groups:
            if _is_rewritten(group, previous):
                _append_shards(dataset, group, rewriting, progress)
            else:
                rewriting.keep(previous.shards[group[0]])
        return rewriting.report(
            schema=dataset.schema,
            column_groups=(),
            operation={"name": "compact", "options": {"shard_bytes": shard_bytes}},
        )


def _remove_old(root: Path) -> int:
    """Remove shards that only older generations name; returns how many there were."""
    published = load(root)
    named = {shard.name for shard, _ in published.files}
    n_removed = 0
    for name in sorted(set(_older_names(root, published.number)) - named):
        with contextlib.suppress(FileNotFoundError):  # removed before
            (root / name).unlink()
            n_removed += 1
    return n_removed


def _older_names(root: Path, number: int) -> Iterator[str]:
    for older in range(1, number):
        with contextlib.suppress(DataError):  # verify names it
            yield from (shard.name for shard, _ in load_generation(root, older).files)
