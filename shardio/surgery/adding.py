"""Add a column: a value for each sample of a finished dataset, as its next generation.

The values lie in shards of their own beside the others, which stay as they are.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from typing import Any, Final

from shardio.dataset import ShardDataset
from shardio.errors import InvalidArgument, SchemaError
from shardio.format.fields import Field
from shardio.format.schema import Schema
from shardio.manifest import Generation, Side, load_generation, whole_schema
from shardio.surgery.overtaking import tell_overtaken
from shardio.surgery.rewriting import Rewriting, SurgeryReport
from shardio.surgery.soundness import Progress, tell_writing

Values = Iterable[Any] | Callable[[dict[str, Any]], Any]

_END: Final = object()


def add_column(
    folder: str | os.PathLike[str],
    name: str,
    field: Field,
    values: Values,
    *,
    progress: Progress | None = None,
) -> SurgeryReport:
    """Give every sample of a dataset one more field, in its next generation.

    Nothing that is there is changed: the new field lies in shards beside the others. Samples keep
    their numbers, the dataset its lineage, subsets and statistics.

    Args:
        folder: the dataset.
        name: of the new field; with dots, of one in a nested record.
        field: its type; any will do.
        values: one for each sample, in their order, taken one at a time; or a function that is
            called with each sample (a dict) and returns its value. What it reads is verified.
        progress: called here, at the start and after every shard.

    Raises:
        InvalidArgument: there are more values than samples, or fewer.
        SchemaError: there is such a field already, or a value does not fit.
        DatasetNotFound: there is no dataset.
        ShardCorrupt, …: a sample that the function is to have cannot be read.
        DatasetConflict: another writer published meanwhile; nothing is changed.
    """
    with tell_overtaken(folder), ShardDataset(folder) as dataset:
        previous = load_generation(folder, dataset.generation)
        schema = _schema_of(dataset, previous, name, field)
        found = _values(dataset, values)
        sizes = [shard.n_bytes for shard in dataset.shards]
        with Rewriting(folder, schema, previous=previous) as rewriting:
            tell_writing(progress, 0, sizes)
            for k in range(len(sizes)):
                _add_shard(rewriting, dataset, k, name, found)
                tell_writing(progress, k + 1, sizes)
            if next(found, _END) is not _END:
                raise _wrong_number(dataset, "more")
            return rewriting.report_beside(
                surgery={"name": "add_column", "options": {"name": name}}
            )


def _schema_of(dataset: ShardDataset, previous: Generation, name: str, field: Field) -> Schema:
    """The schema of the new shards, once it is sure that the dataset can have such a field."""
    try:
        schema = Schema({name: field})
        if isinstance(field, Mapping):
            raise SchemaError(f"{name!r} is a nested record; add its fields one by one")
        whole_schema(previous.schema, (*previous.sides, Side(schema, ())))
    except SchemaError as error:
        raise SchemaError(f"{dataset.path}: {error}") from error
    return schema


def _values(dataset: ShardDataset, values: Values) -> Iterator[Any]:
    """The values in the order of the samples, one at a time."""
    if callable(values):
        return _computed(dataset, values)
    try:
        if isinstance(values, str | bytes | Mapping | set | frozenset):  # a set has no order
            raise TypeError
        found = iter(values)
        n_values = len(values) if isinstance(values, Sized) else len(dataset)
    except TypeError as error:  # also of a NumPy array without dimensions
        raise InvalidArgument(
            "values must be an iterable with one value for each sample, or a function; found a "
            f"{type(values).__name__}"
        ) from error
    if n_values != len(dataset):
        raise _wrong_number(dataset, str(n_values))
    return found


def _computed(dataset: ShardDataset, function: Callable[[dict[str, Any]], Any]) -> Iterator[Any]:
    for row, sample in enumerate(dataset):
        try:
            value = function(sample)
        except BaseException as error:
            error.add_note(f"while the value of sample {row} of {dataset.path} was made")
            raise
        yield value


def _add_shard(
    rewriting: Rewriting, dataset: ShardDataset, k: int, name: str, values: Iterator[Any]
) -> None:
    """Write the new field of one shard's samples."""
    first, n_samples = int(dataset.starts[k]), dataset.shards[k].n_samples
    n_taken = 0

    def samples() -> Iterator[dict[str, Any]]:
        nonlocal n_taken
        for row in range(first, first + n_samples):
            value = next(values, _END)
            if value is _END:
                raise _wrong_number(dataset, f"only {row}")
            n_taken += 1
            yield {name: value}

    try:
        rewriting.add_shard(samples())
    except SchemaError as error:
        # Without the place in the new shard, which nobody gets to see.
        reason = error.__cause__ or error
        raise SchemaError(f"{dataset.path}, sample {first + n_taken - 1}: {reason}") from error


def _wrong_number(dataset: ShardDataset, n_values: str) -> InvalidArgument:
    return InvalidArgument(
        f"{dataset.path}: has {len(dataset)} samples, and there are {n_values} values; nothing was "
        "added"
    )
