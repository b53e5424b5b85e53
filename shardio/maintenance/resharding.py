"""Write the samples of datasets to other shards: `merge`, `reshard` and `compact`."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Container, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, Final, Self

from shardio._base.classes import one_line
from shardio.dataset.generation import ROWS, Generation
from shardio.dataset.manifest import holds_dataset, load, load_generation, refuse_nested
from shardio.dataset.transaction import detect_conflict
from shardio.dataset.writer import SHARD_BYTES, GenerationWriter, check_shard_bytes
from shardio.errors import DataError, InvalidArgument
from shardio.format.schema import Schema
from shardio.maintenance.jobs import Progress, ShardProgress, displays_progress, takes_paths
from shardio.maintenance.verify.dataset import require_sound
from shardio.samples.shard_dataset import ShardDataset
from shardio.storage.fs import unlink

PathName = str | os.PathLike[str]


@dataclass(frozen=True, slots=True)
class MaintenanceReport:
    """The result of an operation on the dataset in the folder `dataset`.

    `generation` is the number of the current generation, a new one if anything was changed.
    `n_shards` leaves out the shards of added columns; `n_bytes` includes them. `n_rewritten` is the
    number of new shards, `n_removed` the number of old shards that were removed.
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
        """Return the report for `generation` of the dataset in `folder`."""
        return cls(
            Path(folder),
            generation.number,
            generation.n_samples,
            len(generation.shards),
            sum(shard.n_bytes for shard, _ in generation.files),
            n_rewritten,
            n_removed,
        )

    def __repr__(self) -> str:
        return one_line(self, [self.dataset], f"generation {self.generation}")

    def as_json(self) -> dict[str, Any]:
        """Return a JSON-serializable dict."""
        return {**dataclasses.asdict(self), "dataset": str(self.dataset)}


def _check_out(out: PathName, schema: Schema, *sources: PathName) -> None:
    """Raise an error, before sources are verified, if `out` holds a dataset or is nested.

    As each operation does, first remove what interrupted operations have left in `out`.
    """
    refuse_nested(out, *sources)
    if holds_dataset(out):
        with GenerationWriter(out, schema):
            pass


@displays_progress
@takes_paths("reshard(source, out)", "source", outputs=("out",))
def reshard(
    source: PathName,
    out: PathName,
    *,
    shard_bytes: int = SHARD_BYTES,
    workers: int | None = None,
    progress: Progress | None = None,
) -> MaintenanceReport:
    """Write all samples of a dataset, in order, to a new dataset with shards of another size.

    The new dataset gets the metadata of the source, such as classes, subsets and statistics.
    Arguments and errors are those of `merge`.
    """
    check_shard_bytes(shard_bytes)
    with detect_conflict(source), ShardDataset(source) as dataset:
        generation = load_generation(source, dataset.generation)
        _check_out(out, dataset.schema, source)
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
    found: dict[str, Any] = {"name": name, "options": {"shard_bytes": shard_bytes}}
    if sources:
        found["sources"] = [
            {"lineage": dataset.lineage, "generation": dataset.generation} for dataset in sources
        ]
    return found


def _append_shards(
    dataset: ShardDataset,
    numbers: Sequence[int],
    output: GenerationWriter,
    progress: Progress | None,
) -> None:
    state = ShardProgress(progress, "writing", (dataset.shards[k].n_bytes for k in numbers))
    for k in numbers:
        for sample in dataset.samples(k):
            output.append(sample)
        state.report_done()


@displays_progress
@takes_paths("compact(folder)", "folder")
def compact(
    folder: PathName,
    *,
    shard_bytes: int = SHARD_BYTES,
    remove_old: bool = False,
    workers: int | None = None,
    progress: Progress | None = None,
) -> MaintenanceReport:
    """Merge adjacent small shards of a dataset, and publish the result as its next generation.

    A shard is small if its size is less than half of `shard_bytes`. If the dataset has added
    columns, all samples are written to new shards with all fields. Shards are verified before their
    samples are written again. Samples keep their indices, and the dataset keeps its lineage (id).

    With `remove_old`, the shards that only older generations use are removed, even if no shards are
    merged. A process that reads an older generation then gets ShardNotFound for a removed shard
    that it has not mapped.

    Other arguments and errors are those of `merge`.
    """
    check_shard_bytes(shard_bytes)
    with detect_conflict(folder), ShardDataset(folder) as dataset:
        previous = load_generation(folder, dataset.generation)
        groups = _merge_groups(previous, shard_bytes)
        is_whole = bool(previous.column_groups)
        chosen = [k for group in groups if len(group) > 1 or is_whole for k in group]
        if chosen:
            names = [shard.name for k in chosen for shard, _ in dataset.files.files_of_shard(k)]
            require_sound(folder, workers, progress, names)
            report = _write_groups(dataset, previous, groups, {*chosen}, shard_bytes, progress)
        else:
            report = MaintenanceReport.of(folder, previous, 0)
    if not remove_old:
        return report
    return MaintenanceReport.of(folder, load(folder), report.n_rewritten, _remove_old(Path(folder)))


def _merge_groups(previous: Generation, shard_bytes: int) -> list[list[int]]:
    """Return the indices of all shards in groups; the shards of a group are merged."""
    shards = previous.shards
    if previous.column_groups:
        return [[*range(len(shards))]]
    found: list[list[int]] = []
    is_small = [shard.n_bytes < shard_bytes // 2 for shard in shards]
    for small, numbers in groupby(range(len(shards)), key=is_small.__getitem__):
        run = list(numbers)
        found += [run] if small else [[k] for k in run]
    return found


def _write_groups(
    dataset: ShardDataset,
    previous: Generation,
    groups: Sequence[Sequence[int]],
    rewritten: Container[int],
    shard_bytes: int,
    progress: Progress | None,
) -> MaintenanceReport:
    with GenerationWriter(
        dataset.path, dataset.schema, shard_bytes=shard_bytes, previous=previous
    ) as output:
        for group in groups:
            if group[0] in rewritten:
                _append_shards(dataset, group, output, progress)
            else:
                output.add_unchanged(previous.shards[group[0]])
        operation = _operation("compact", shard_bytes)
        published = output.publish(schema=dataset.schema, column_groups=(), operation=operation)
        return MaintenanceReport.of(dataset.path, published, output.n_written)


def _remove_old(root: Path) -> int:
    published, older = load(root), set[str]()
    for number in range(1, published.number):
        with contextlib.suppress(DataError):  # ignore a damaged generation: verification reports it
            older |= {*load_generation(root, number).names}
    left = [name for name in older.difference(published.names) if (root / name).exists()]
    for name in left:
        unlink(root / name)
    return len(left)


LABEL = "label"
"""The name of the field that holds class indices."""
_SOURCES: Final = dict.fromkeys(("datasets", "source", "sources", "srcs"), "write merge(out, a, b)")


@displays_progress
@takes_paths("merge(out, a, b)", "sources", outputs=("out",), advice=_SOURCES)
def merge(
    out: PathName,
    *sources: PathName,
    shard_bytes: int = SHARD_BYTES,
    workers: int | None = None,
    progress: Progress | None = None,
) -> MaintenanceReport:
    """Write the samples of all `sources`, one source after another, to a new dataset at `out`.

    All sources must have the same fields. The new dataset has the class names of all sources, in
    the order in which they first occur; the class indices in the field `label` are changed
    accordingly. A shard is copied byte for byte if its samples do not change and its dataset has no
    added columns. Every byte of the sources is verified before samples are written.

    Args:
        out: a folder that is missing or empty.
        sources: the folders of datasets.
        shard_bytes: the target size in bytes of new shards. Copied shards keep their sizes.
        workers: the number of processes that verify. The default is 0 for a source of less than
            half a GiB; for a larger source, it is one per usable CPU.
        progress: called in the calling process, at the start and after every shard of each step; or
            True to show a bar on standard error, as `shardio.convert` does.

    Raises:
        InvalidArgument: there is no source, the fields, classes or units of times of the sources do
            not match, or `out` lies in a dataset or contains a source.
        DatasetNotFound: a source is not a dataset.
        DatasetCorrupt: a source is damaged. Repair the source first.
        DatasetExists: `out` is not empty.
        DatasetConflict: another writer has used `out`, or removed shards of a source.
    """
    if not sources:
        raise InvalidArgument("merge needs at least one source: write merge(out, a, b)")
    with ExitStack() as stack:
        for path in sources:
            stack.enter_context(detect_conflict(path))
        datasets = [stack.enter_context(ShardDataset(path)) for path in sources]
        for dataset in datasets[1:]:
            check_same_fields(datasets[0], dataset)
        units = _merge_units(datasets)
        classes = tuple(dict.fromkeys(name for dataset in datasets for name in dataset.classes))
        changes = [_class_index_map(dataset, classes) for dataset in datasets]
        _check_out(out, datasets[0].schema, *sources)
        for path in sources:
            require_sound(path, workers, progress)
        with GenerationWriter(out, datasets[0].schema, shard_bytes=shard_bytes) as output:
            sizes = (shard.n_bytes for dataset in datasets for shard in dataset.shards)
            state = ShardProgress(progress, "writing", sizes)
            for dataset, numbers in zip(datasets, changes, strict=True):
                for k in range(len(dataset.shards)):
                    _write_shard(dataset, k, numbers, output)
                    state.report_done()
            published = output.publish(
                classes=classes,
                inputs=[entry for dataset in datasets for entry in dataset.inputs],
                converter=_common_value([dataset.converter for dataset in datasets])
                or ({"options": {"units": units}} if units else {}),
                view=_common_value([dataset.view for dataset in datasets]) or ROWS,
                versions={
                    name: version
                    for name, version in datasets[0].versions.items()
                    if all(dataset.versions.get(name) == version for dataset in datasets)
                },
                operation=_operation("merge", shard_bytes, *datasets),
            )
            return MaintenanceReport.of(out, published, output.n_written)


def _write_shard(
    dataset: ShardDataset, k: int, numbers: Mapping[int, int] | None, output: GenerationWriter
) -> None:
    shard = dataset.shards[k]
    if numbers is None and dataset.schema == output.schema and not dataset.column_groups:
        if shard.n_samples:
            output.add_copy(os.path.join(dataset.path, shard.name), shard)
        return
    for row, sample in enumerate(dataset.samples(k)):
        if numbers is not None:
            sample[LABEL] = _map_label(sample[LABEL], numbers, shard.name, row)
        output.append(sample)


def check_same_fields(a: ShardDataset, b: ShardDataset) -> None:
    """Raise InvalidArgument with a list of the differences if `a` and `b` have different fields."""
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


def _merge_units(datasets: Sequence[ShardDataset]) -> dict[str, str]:
    """Return the recorded units of times; raise InvalidArgument if datasets differ in one."""
    units: dict[str, str] = {}
    for dataset in datasets:
        for name, unit in (dataset.converter.get("options", {}).get("units") or {}).items():
            if units.setdefault(name, unit) != unit:
                raise InvalidArgument(
                    f"{dataset.path}: the times of field {name!r} are {unit}, those of datasets "
                    f"before it {units[name]}; convert one of them again in the unit of the other"
                )
    return units


def _class_index_map(dataset: ShardDataset, classes: tuple[str, ...]) -> dict[int, int] | None:
    """Map each class index of a dataset to its index in `classes`; return None if none changes."""
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
    """Return True if the schema has the field `label`, and its values are single integers."""
    label = schema[LABEL].array if LABEL in schema else None
    return label is not None and label.shape == () and "int" in label.dtype


def _map_label(value: Any, numbers: Mapping[int, int], shard: str, row: int) -> Any:
    if value is None or int(value) < 0:  # the sample has no class
        return value
    if int(value) not in numbers:
        raise InvalidArgument(
            f"sample {row} of shard {shard}: its label is {int(value)}, which names no class; "
            f"expected 0 to {len(numbers) - 1}, or a negative number for no class"
        )
    return numbers[int(value)]


def _common_value(values: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """Return the first of `values` if all values are equal, else an empty mapping."""
    return values[0] if all(value == values[0] for value in values) else {}
