"""Add a column, which is a new field of every sample, to a finished dataset.

The values are stored in additional shards, one for each shard of the dataset.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Final

from shardio._workers.ray_cluster import LOCAL, Engine, EngineName
from shardio.dataset.external_lists import ShardList
from shardio.dataset.generation import ColumnGroup, Generation, full_schema
from shardio.dataset.manifest import load_generation
from shardio.dataset.transaction import detect_conflict
from shardio.dataset.writer import GenerationWriter
from shardio.errors import InvalidArgument, MediaError, SchemaError
from shardio.format.schema import Schema
from shardio.format.types import Field
from shardio.maintenance.jobs import (
    Progress,
    ShardProgress,
    displays_progress,
    run_for_shards,
    takes_paths,
)
from shardio.maintenance.resharding import MaintenanceReport
from shardio.samples.shard_dataset import ShardDataset
from shardio.shard.writer import ShardSummary, ShardWriter
from shardio.storage.fs import make_folder

Values = Iterable[Any] | Callable[[Any], Any]

_END: Final = object()
_ADVICE: Final = {"values": 'such as add_column(folder, "score", shardio.Array("float32"), values)'}


@dataclass(frozen=True)
class _ColumnJob:
    path: str
    schema: Schema
    function: Callable[[Any], Any]
    batch_size: int | None
    staging: Path

    def __call__(self, dataset: ShardDataset, k: int) -> tuple[str, ShardSummary]:
        """Write the new shard for shard k of the dataset; return its path and its summary."""
        first = int(dataset.shard_starts[k])
        values = self._values(first, dataset.samples(k))
        return _write(self.staging, self.schema, self.path, first, values)

    def _values(self, first: int, samples: Iterator[dict[str, Any]]) -> Iterator[Any]:
        if self.batch_size is None:
            for row, sample in enumerate(samples, first):
                yield self._call_function(sample, f"the value of sample {row} of {self.path} was")
            return
        while batch := list(islice(samples, self.batch_size)):
            last = first + len(batch) - 1
            what = f"the values of samples {first} to {last} of {self.path}"
            values = self._call_function(batch, f"{what} were")
            if not _is_sequence(values) or len(values) != len(batch):
                found = len(values) if _is_sequence(values) else f"a {type(values).__name__}"
                raise InvalidArgument(
                    f"{what}: expected a sequence of {len(batch)} values, found {found}"
                )
            yield from values
            first = last + 1

    def _call_function(self, argument: Any, what: str) -> Any:
        try:
            return self.function(argument)
        except BaseException as error:
            error.add_note(f"while {what} made")
            raise


def _is_sequence(values: Any) -> bool:
    if isinstance(values, Sequence):
        return not isinstance(values, str | bytes)
    return isinstance(values, Sized) and getattr(values, "ndim", 0) > 0


def _write(
    staging: Path, schema: Schema, path: str, first: int, values: Iterable[Any]
) -> tuple[str, ShardSummary]:
    """Write values to a new shard in a new folder; `first` is the index of the first sample."""
    folder = staging / secrets.token_hex(8)
    make_folder(folder)
    new_path, (name,) = str(folder / "values.shard"), schema
    with ShardWriter(new_path, schema) as writer:
        for row, value in enumerate(values, first):
            try:
                writer.append({name: value})
            except (SchemaError, MediaError) as error:  # it names the new shard, not the dataset
                raise type(error)(f"{path}, sample {row}: {error.__cause__}") from error
        return new_path, writer.close()


@displays_progress
@takes_paths("add_column(folder, name, field, values)", "folder", advice=_ADVICE)
def add_column(
    folder: str | os.PathLike[str],
    name: str,
    field: Field,
    values: Values,
    *,
    batch_size: int | None = None,
    workers: int | None = None,
    engine: EngineName = "local",
    address: str | None = None,
    gpus: float = 0,
    progress: Progress | None = None,
) -> MaintenanceReport:
    """Add a field to every sample of a dataset, and publish the result as its next generation.

    The new field is stored in additional shards, which form a column group. Existing files, the
    indices of samples, the dataset's lineage (its id), subsets and statistics stay the same.

    Args:
        folder: the dataset.
        name: the name of the new field. A name with dots is the name of a field in a nested record.
        field: the type of the new field.
        values: an iterable with one value per sample, in the order of the samples, or a function
            that receives a sample (a dict) and returns the value. Samples are verified before the
            function receives them.
        batch_size: if given, the function receives a list of up to `batch_size` samples of one
            shard instead, and returns a sequence with one value per sample.
        workers: the number of processes that call the function, each for whole shards. The function
            is serialized with cloudpickle, and sent to each process once. By default, and with 0,
            it is called in the calling process. On a cluster, the default is the number of CPUs of
            the cluster.
        engine: "local", or "ray" to call the function on the machines of a Ray cluster. All these
            machines must be able to access the dataset at the path `folder`.
        address: the address of the Ray cluster, as for `shardio.convert`.
        gpus: the number of GPUs of the cluster that each process gets; may be a fraction.
        progress: called in the calling process, at the start and after every shard; or
            True to show a bar on standard error, as `shardio.convert` does.

    Raises:
        InvalidArgument: the number of values differs from the number of samples, or an option that
            is only for functions is given together with an iterable.
        SchemaError: the dataset already has the field, or a value does not match the field type.
        DatasetNotFound: there is no dataset at `folder`.
        ShardCorrupt, …: a sample that the function needs cannot be read.
        DatasetConflict: another writer has published in the meantime. Nothing is changed.
        WorkerDied: worker processes crashed twice on the same shard.
    """
    where = Engine(engine, address, gpus)
    _check_options(values, batch_size, workers, where)
    with detect_conflict(folder), ShardDataset(folder) as dataset:
        previous = load_generation(folder, dataset.generation)
        schema = _schema_of(dataset, previous, name, field)
        given = None if callable(values) else _values(dataset, values)
        with GenerationWriter(folder, schema, previous=previous) as output:
            if given is not None:
                _write_values(output, dataset, given, progress)
            elif callable(values):
                column = _ColumnJob(dataset.path, schema, values, batch_size, output.staging)
                for place, shard in run_for_shards(
                    column,
                    dataset,
                    "writing",
                    progress,
                    engine=where,
                    preload=__name__,
                    workers=workers,
                    shared_path=output.staging,
                ):
                    output.add_moved(place, shard)
            operation = {"name": "add_column", "options": {"name": name}}
            published = output.publish_columns(operation=operation)
            return MaintenanceReport.of(folder, published, output.n_written)


def _schema_of(dataset: ShardDataset, previous: Generation, name: str, field: Field) -> Schema:
    try:
        schema = Schema({name: field})
        if isinstance(field, Mapping):
            raise SchemaError(f"{name!r} is a nested record; add its fields one by one")
        added = ColumnGroup(schema, ShardList.of(()))
        full_schema(previous.schema, (*previous.column_groups, added))
    except SchemaError as error:
        raise SchemaError(f"{dataset.path}: {error}") from error
    return schema


def _check_options(
    values: Values, batch_size: int | None, workers: int | None, engine: Engine
) -> None:
    if not callable(values) and (batch_size, workers, engine) != (None, None, LOCAL):
        raise InvalidArgument(
            "batch_size, workers, engine: only for a function; `values` is an iterable"
        )
    if batch_size is not None and batch_size < 1:
        raise InvalidArgument(f"batch_size is {batch_size}; it must be 1 or more")
    if workers is not None and workers < 0:
        raise InvalidArgument(f"workers is {workers}; it must be 0 or more")


def _values(dataset: ShardDataset, values: Iterable[Any]) -> Iterator[Any]:
    """Return an iterator over `values`; raise InvalidArgument for a wrong type or known length."""
    try:
        if isinstance(values, str | bytes | Mapping | set | frozenset):  # sets have no order
            raise TypeError
        found = iter(values)
        n_values = len(values) if isinstance(values, Sized) else len(dataset)
    except TypeError as error:  # also raised by len() of a NumPy array without dimensions
        raise InvalidArgument(
            "values must be an iterable with one value for each sample, or a function; found a "
            f"{type(values).__name__}"
        ) from error
    if n_values != len(dataset):
        raise _count_error(dataset, str(n_values))
    return found


def _write_values(
    output: GenerationWriter,
    dataset: ShardDataset,
    values: Iterator[Any],
    progress: Progress | None,
) -> None:
    state = ShardProgress(progress, "writing", (shard.n_bytes for shard in dataset.shards))
    for k, shard in enumerate(dataset.shards):
        first, n = int(dataset.shard_starts[k]), shard.n_samples
        shard_values = islice(values, n)
        new_path, summary = _write(output.staging, output.schema, dataset.path, first, shard_values)
        if summary.n_samples < n:
            raise _count_error(dataset, f"only {first + summary.n_samples}")
        output.add_moved(new_path, summary)
        state.report_done()
    if next(values, _END) is not _END:
        raise _count_error(dataset, "more")


def _count_error(dataset: ShardDataset, n_values: str) -> InvalidArgument:
    return InvalidArgument(
        f"{dataset.path}: has {len(dataset)} samples, but there are {n_values} values; nothing was "
        "added"
    )
