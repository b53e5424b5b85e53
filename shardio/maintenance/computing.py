"""The values of a column that a function computes, shard by shard, where it is wanted."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Iterator, Sequence, Sized
from itertools import islice
from pathlib import Path
from typing import Any

from shardio._workers.ray.cluster import Engine
from shardio.dataset.dataset import ShardDataset
from shardio.errors import InvalidArgument, SchemaError
from shardio.format.schema import Schema
from shardio.maintenance.jobs import ShardJob, done_for_each
from shardio.maintenance.rewriting import Rewriting
from shardio.maintenance.verify.dataset import Progress, ends_of, tell_step
from shardio.shard.writer import ShardSummary, ShardWriter

Function = Callable[[Any], Any]


def add_computed(
    rewriting: Rewriting,
    dataset: ShardDataset,
    function: Function,
    batch_size: int | None,
    *,
    workers: int | None,
    engine: Engine,
    progress: Progress | None,
) -> None:
    """Write a shard of values for each shard of a dataset, in their order.

    Raises:
        InvalidArgument: a batch gives another number of values than it has samples.
        SchemaError: a value does not fit.
    """
    ends = ends_of(shard.n_bytes for shard in dataset.shards)
    column = _Column(dataset, rewriting.schema, function, batch_size, rewriting.staging)
    done: dict[int, tuple[str, ShardSummary]] = {}
    tell_step(progress, "writing", 0, ends)
    for k, made in done_for_each(
        column, len(dataset.shards), workers=workers, engine=engine, sees=rewriting.staging
    ):
        done[k] = made
        tell_step(progress, "writing", len(done), ends)
    for k in range(len(dataset.shards)):
        rewriting.take(*done[k])


class _Column(ShardJob):
    """Computes the values of one shard's samples into a shard in a folder of its own."""

    def __init__(
        self,
        dataset: ShardDataset,
        schema: Schema,
        function: Function,
        batch_size: int | None,
        staging: Path,
    ) -> None:
        super().__init__(dataset)
        self._path, self._schema, self._staging = dataset.path, schema, str(staging)
        self._function, self._batch_size = function, batch_size

    def __call__(self, k: int) -> tuple[str, ShardSummary]:
        """Compute, and give where the shard lies, and what it is."""
        folder = os.path.join(self._staging, secrets.token_hex(8))
        os.mkdir(folder)
        place = os.path.join(folder, "values.shard")
        (name,) = self._schema
        first = int(self.dataset.starts[k])
        with ShardWriter(place, self._schema) as writer:
            for row, value in enumerate(self._values(k), first):
                try:
                    writer.append({name: value})
                except SchemaError as error:
                    raise misfit(self._path, row, error) from error
            return place, writer.close()

    def _values(self, k: int) -> Iterator[Any]:
        first, samples = int(self.dataset.starts[k]), self.dataset.samples(k)
        if self._batch_size is None:
            for row, sample in enumerate(samples, first):
                yield self._called(sample, f"the value of sample {row} of {self._path} was")
            return
        while batch := list(islice(samples, self._batch_size)):
            last = first + len(batch) - 1
            what = f"the values of samples {first} to {last} of {self._path}"
            values = self._called(batch, f"{what} were")
            if not _is_sequence(values) or len(values) != len(batch):
                found = len(values) if _is_sequence(values) else f"a {type(values).__name__}"
                raise InvalidArgument(
                    f"{what}: expected a sequence of {len(batch)} values, found {found}"
                )
            yield from values
            first = last + 1

    def _called(self, given: Any, what: str) -> Any:
        try:
            return self._function(given)
        except BaseException as error:
            error.add_note(f"while {what} made")
            raise


def _is_sequence(values: Any) -> bool:
    """Whether it has a length and an order: a list, a tuple, or an array with dimensions."""
    if isinstance(values, Sequence):
        return not isinstance(values, str | bytes)
    return isinstance(values, Sized) and getattr(values, "ndim", 0) > 0


def misfit(path: str, row: int, error: SchemaError) -> SchemaError:
    """The error of a value, without its place in the new shard, which nobody gets to see."""
    return SchemaError(f"{path}, sample {row}: {error.__cause__ or error}")
