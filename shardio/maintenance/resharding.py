"""Merge datasets, reshard one, or compact its small shards."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, Self

from shardio.dataset.generation import ROWS, Generation
from shardio.dataset.manifest import load, load_generation
from shardio.dataset.transaction import detect_conflict
from shardio.dataset.writer import SHARD_BYTES, GenerationWriter, check_shard_bytes
from shardio.errors import DataError, InvalidArgument
from shardio.format.schema import Schema
from shardio.maintenance.jobs import Progress, ends_of, report_step
from shardio.maintenance.verify.dataset import require_sound
from shardio.samples.shard_dataset import ShardDataset
from shardio.storage.fs import unlink

PathName = str | os.PathLike[str]


@dataclass(frozen=True, slots=True)
class MaintenanceReport:
    """The generation that an operation published, or the current one if nothing had to be done.

    `n_rewritten` counts the new shards, and `n_removed` the removed old shards. `n_bytes` includes
    the shards of column groups, `n_shards` does not.
    """

    dataset: Path
    generation: int
    n_samples: int
    n_shards: int
    n_bytes: int
    n_rewritten: int
    n_removed: int = 0

    @classmethod
    def of(
        cls,
        folder: str | os.PathLike[str],
        generation: Generation,
        n_rewritten: int,
        n_removed: int = 0,
    ) -> Self:
        """Return the report on a generation of the dataset in `folder`."""
        return cls(
            Path(folder),
            generation.number,
            generation.n_samples,
            len(generation.shards),
            sum(shard.n_bytes for shard, _ in generation.files),
            n_rewritten,
            n_removed,
        )

    def as_json(self) -> dict[str, Any]:
        """Return a JSON-serializable dict."""
        return {**dataclasses.asdict(self), "dataset": str(self.dataset)}


def reshard(
    source: PathName,
    out: PathName,
    *,
    shard_bytes: int = SHARD_BYTES,
    workers: int | None = None,
    progress: Progress | None = None,
) -> MaintenanceReport:
    """Write all samples of a dataset, in order, to a new dataset with shards of another size.

    Classes, inputs, subsets and statistics are copied. Every byte is verified first.

    Args:
        source: a dataset.
        out: a folder that is missing or empty.
        shard_bytes: the target size of the new shards.
        workers, progress: as in `merge`.

    Raises:
        InvalidArgument: shard_bytes is not a valid size.
        DatasetCorrupt: the source is damaged; repair it first.
        DatasetNotFound, DatasetExists, DatasetConflict: as in `merge`.
    """
    check_shard_bytes(shard_bytes)
    with detect_conflict(source), ShardDataset(source) as dataset:
        generation = load_generation(source, dataset.generation)
        require_sound(source, workers, progress)
        with GenerationWriter(out, dataset.schema, shard_bytes=shard_bytes) as output:
            _append_shards(dataset, range(len(dataset.shards)), output, progress)
            published = output.publish(
                **generation.description,
                subsets=generation.subsets,
                stats=generation.stats,
                operation=_operation("reshard", shard_bytes, dataset),
            )
            return MaintenanceReport.of(out, published, output.n_written)


def _operation(name: str, shard_bytes: int, *sources: ShardDataset) -> dict[str, Any]:
    """Return the entry of a generation that names the operation which wrote it."""
    found: dict[str, Any] = {"name": name, "options": {"shard_bytes": shard_bytes}}
    if sources:
        found["sources"] = [
            {"lineage": dataset.lineage, "generation": dataset.generation} for dataset in sources
        ]
    return found


def _append_shards(
    dataset: ShardDataset,
    numbers: Iterable[int],
    output: GenerationWriter,
    progress: Progress | None,
) -> None:
    """Write the samples of the given shards again."""
    chosen = list(numbers)
    ends = ends_of(dataset.shards[k].n_bytes for k in chosen)
    report_step(progress, "writing", 0, ends)
    for n_done, k in enumerate(chosen, 1):
        for sample in dataset.samples(k):
            output.append(sample)
        report_step(progress, "writing", n_done, ends)


def compact(
    folder: PathName,
    *,
    shard_bytes: int = SHARD_BYTES,
    remove_old: bool = False,
    workers: int | None = None,
    progress: Progress | None = None,
) -> MaintenanceReport:
    """Merge adjacent small shards of a dataset, as its next generation.

    A shard is small if it has less than half of `shard_bytes`. Sample indices and lineage stay the
    same. Files of older generations are kept for processes that read these generations. With
    `remove_old`, the shards that the published generation does not name are removed: readers of an
    older generation can still use the shards that they have mapped, and get ShardNotFound for the
    others. If the dataset has column groups, all shards are rewritten as whole shards. Shards are
    verified before they are rewritten.

    Args:
        folder: the dataset.
        shard_bytes: the target size of the new shards.
        remove_old: True removes unnamed shards, even if there is nothing to merge.
        workers, progress: as in `merge`.

    Raises:
        InvalidArgument: shard_bytes is not a valid size.
        DatasetNotFound: there is no dataset at `folder`.
        DatasetCorrupt: a shard to be rewritten is damaged; repair the dataset first.
        DatasetConflict: another writer has published in the meantime; nothing is changed.
    """
    check_shard_bytes(shard_bytes)
    with detect_conflict(folder), ShardDataset(folder) as dataset:
        previous = load_generation(folder, dataset.generation)
        groups = _groups(previous, shard_bytes)
        is_whole = bool(previous.column_groups)
        chosen = [k for group in groups if len(group) > 1 or is_whole for k in group]
        if chosen:
            names = [shard.name for k in chosen for shard, _ in dataset.files.files_of_shard(k)]
            require_sound(folder, workers, progress, names)
            report = _compact(dataset, previous, groups, {*chosen}, shard_bytes, progress)
        else:
            report = MaintenanceReport.of(folder, previous, 0)
    if not remove_old:
        return report
    return MaintenanceReport.of(folder, load(folder), report.n_rewritten, _remove_old(Path(folder)))


def _groups(previous: Generation, shard_bytes: int) -> list[list[int]]:
    """Group the indices of the shards: adjacent small shards together, each other shard alone.

    If the dataset has column groups, all shards are in one group.
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


def _compact(
    dataset: ShardDataset,
    previous: Generation,
    groups: Sequence[Sequence[int]],
    chosen: Container[int],
    shard_bytes: int,
    progress: Progress | None,
) -> MaintenanceReport:
    with GenerationWriter(
        dataset.path, dataset.schema, shard_bytes=shard_bytes, previous=previous
    ) as output:
        for group in groups:
            if group[0] in chosen:
                _append_shards(dataset, group, output, progress)
            else:
                output.keep(previous.shards[group[0]])
        operation = _operation("compact", shard_bytes)
        published = output.publish(schema=dataset.schema, column_groups=(), operation=operation)
        return MaintenanceReport.of(dataset.path, published, output.n_written)


def _remove_old(root: Path) -> int:
    """Remove shards that only older generations name; return the number of removed shards."""
    published = load(root)
    n_removed = 0
    for name in sorted({*_older_names(root, published.number)} - {*published.names}):
        if (root / name).exists():
            unlink(root / name)
            n_removed += 1
    return n_removed


def _older_names(root: Path, number: int) -> Iterator[str]:
    for older in range(1, number):
        with contextlib.suppress(DataError):  # verification reports damaged generations
            yield from load_generation(root, older).names


LABEL = "label"
"""The name of the field that holds class indices."""


def merge(
    out: PathName,
    *sources: PathName,
    shard_bytes: int = SHARD_BYTES,
    workers: int | None = None,
    progress: Progress | None = None,
) -> MaintenanceReport:
    """Write the samples of `sources`, in their order, to a new dataset at `out`.

    All sources must have the same fields. If their class names differ, the new dataset has all
    class names, in order of first occurrence, and the indices in the field `label` are adapted.
    Shards that need no change are copied byte for byte; shards with column groups are rewritten as
    whole shards. Every byte is verified first.

    Args:
        out: a folder that is missing or empty.
        sources: datasets.
        shard_bytes: the target size of rewritten shards.
        workers: the number of processes that verify; by default one per usable CPU.
        progress: called in this process, at the start and after every shard of each step.

    Raises:
        InvalidArgument: there is no source, or the sources' fields or classes do not match.
        DatasetNotFound: a source is not a dataset.
        DatasetCorrupt: a source is damaged; repair it first.
        DatasetExists: `out` is not empty.
        DatasetConflict: another writer used `out`, or removed shards of a source, in the meantime.
    """
    if not sources:
        raise InvalidArgument("merge needs at least one source")
    with ExitStack() as stack:
        for path in sources:
            stack.enter_context(detect_conflict(path))
        datasets = [stack.enter_context(ShardDataset(path)) for path in sources]
        for dataset in datasets[1:]:
            check_same_fields(datasets[0], dataset)
        classes = _all_classes(datasets)
        changes = [_renumbering(dataset, classes) for dataset in datasets]
        for path in sources:
            require_sound(path, workers, progress)
        with GenerationWriter(out, datasets[0].schema, shard_bytes=shard_bytes) as output:
            ends = ends_of(shard.n_bytes for dataset in datasets for shard in dataset.shards)
            for n_done, _ in enumerate(_write(datasets, changes, output)):
                report_step(progress, "writing", n_done, ends)
            published = output.publish(
                classes=classes,
                inputs=[entry for dataset in datasets for entry in dataset.inputs],
                converter=_common([dataset.converter for dataset in datasets]),
                view=_common([dataset.view for dataset in datasets]) or ROWS,
                versions=_common_entries([dataset.versions for dataset in datasets]),
                operation=_operation("merge", shard_bytes, *datasets),
            )
            return MaintenanceReport.of(out, published, output.n_written)


def _write(
    datasets: Sequence[ShardDataset],
    changes: Sequence[Mapping[int, int] | None],
    output: GenerationWriter,
) -> Iterator[None]:
    """Copy or rewrite the shards one after another; yield before each shard, and at the end."""
    for dataset, numbers in zip(datasets, changes, strict=True):
        for k, shard in enumerate(dataset.shards):
            yield
            is_same = numbers is None and dataset.schema == output.schema
            if is_same and not dataset.column_groups:
                if shard.n_samples:
                    output.adopt(os.path.join(dataset.path, shard.name), shard)
                continue
            for row, sample in enumerate(dataset.samples(k)):
                if numbers is not None:
                    sample[LABEL] = _renumbered(sample[LABEL], numbers, shard.name, row)
                output.append(sample)
    yield


def check_same_fields(a: ShardDataset, b: ShardDataset) -> None:
    """Raise InvalidArgument, naming the fields that differ, unless two datasets have the same."""
    if dict(a.schema) == dict(b.schema):
        return
    parts = []
    for one, other in ((a, b), (b, a)):
        if missing := [name for name in one.schema if name not in other.schema]:
            parts.append(f"only {one.path} has {', '.join(missing)}")
    for name in a.schema:
        if name in b.schema and a.schema[name] != b.schema[name]:
            parts.append(f"{name} is {a.schema[name]} in {a.path}, {b.schema[name]} in {b.path}")
    raise InvalidArgument(f"{a.path} and {b.path} do not have the same fields: {'; '.join(parts)}")


def _all_classes(datasets: Sequence[ShardDataset]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name for dataset in datasets for name in dataset.classes))


def _renumbering(dataset: ShardDataset, classes: tuple[str, ...]) -> dict[int, int] | None:
    """Map each class index of a dataset to its new index; return None if no index changes."""
    if dataset.classes == classes[: len(dataset.classes)] and (dataset.classes or not classes):
        return None
    if not dataset.classes:
        if not len(dataset) or not has_labels(dataset.schema):
            return None
        raise InvalidArgument(
            f"{dataset.path}: has no class names, while others have {', '.join(classes[:5])}: the "
            "meaning of its labels is unknown; convert it again with class names"
        )
    if not has_labels(dataset.schema):
        raise InvalidArgument(
            f"{dataset.path}: its classes differ from those of the others, and there is no field "
            f"{LABEL!r} of whole numbers in which they could be renumbered"
        )
    return {i: classes.index(name) for i, name in enumerate(dataset.classes)}


def has_labels(schema: Schema) -> bool:
    """Return True if samples have a label, an integer."""
    label = schema[LABEL].array if LABEL in schema else None
    return label is not None and label.shape == () and "int" in label.dtype


def _renumbered(value: Any, numbers: Mapping[int, int], shard: str, row: int) -> Any:
    """Return the new value of a label; a negative or missing label means no class and is kept."""
    if value is None or int(value) < 0:
        return value
    if int(value) not in numbers:
        raise InvalidArgument(
            f"sample {row} of shard {shard}: its label is {int(value)}, which names no class; "
            f"expected one from 0 to {len(numbers) - 1}, or a negative one for none"
        )
    return numbers[int(value)]


def _common(values: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """Return the value if all are equal, else an empty mapping."""
    return values[0] if all(value == values[0] for value in values) else {}


def _common_entries(values: Sequence[Mapping[str, str]]) -> dict[str, str]:
    """Return the entries that are the same in all mappings."""
    first, *others = values
    return {k: v for k, v in first.items() if all(other.get(k) == v for other in others)}
