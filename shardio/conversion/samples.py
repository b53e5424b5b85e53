"""Samples from any iterable become a dataset, written by the calling process."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import Any

from shardio.conversion.appending import follow, load_base, refuse_other_schema
from shardio.conversion.report import ConversionReport
from shardio.conversion.values import infer_fields, ready
from shardio.dataset.writer import DatasetWriter
from shardio.errors import InvalidArgument, SchemaError
from shardio.format.schema import Schema
from shardio.maintenance.rewriting import Rewriting


def convert_samples(
    samples: Iterable[Mapping[str, Any]], out: str, schema: Schema | None, shard_bytes: int
) -> ConversionReport:
    """Write samples to a new dataset at `out`; without `schema`, the first sample gives it.

    Without a sample, nothing is published.
    """
    start_s = time.monotonic()
    rest = iter(samples)
    first = next(rest, None)
    if schema is None:
        if first is None:
            raise InvalidArgument("there is no sample to take the schema from; give schema=")
        try:
            schema = infer_fields(first)
        except SchemaError as error:
            raise SchemaError(f"sample 0: {error}") from error
    with DatasetWriter(out, schema, shard_bytes=shard_bytes) as writer:
        if first is None:
            writer.abort()
            return ConversionReport(
                Path(out), "samples", 0, 0, time.monotonic() - start_s, generation=0
            )
        for sample in _all_ready(chain((first,), rest), schema):
            writer.append(sample)
        generation = writer.close()
    return ConversionReport(
        dataset=Path(out),
        kind="samples",
        n_samples=generation.n_samples,
        n_bytes=sum(shard.n_bytes for shard in generation.shards),
        elapsed_s=time.monotonic() - start_s,
    )


def append_samples(
    samples: Iterable[Mapping[str, Any]], out: str, schema: Schema | None, shard_bytes: int
) -> ConversionReport:
    """Write samples behind those of the dataset at `out`, as its next generation.

    Raises:
        InvalidArgument: `schema` is not that of the dataset.
        SchemaError: a sample does not fit; nothing is appended.
    """
    start_s = time.monotonic()
    base = load_base(out)
    if schema is not None:
        refuse_other_schema(base.schema, schema, out)
    n_samples = 0
    with Rewriting(out, base.schema, shard_bytes=shard_bytes, previous=base) as rewriting:
        for sample in _all_ready(samples, base.schema):
            rewriting.append(sample)
            n_samples += 1
        found = latest = follow(base, Path(out))
        if n_samples:
            rewriting.come_behind(latest)
            stats = {key: value for key, value in latest.stats.items() if key != "whole"}
            found = rewriting.publish(
                stats=stats,
                operation={"name": "append", "options": {"shard_bytes": shard_bytes}},
            )
    new = found.shards[len(latest.shards) :]
    return ConversionReport(
        dataset=Path(out),
        kind="samples",
        n_samples=n_samples,
        n_bytes=sum(shard.n_bytes for shard in new),
        elapsed_s=time.monotonic() - start_s,
        classes=found.classes,
        generation=found.number,
        n_samples_before=latest.n_samples,
        stats_dropped=found.stats != latest.stats,
    )


def _all_ready(samples: Iterable[Mapping[str, Any]], schema: Schema) -> Iterator[Mapping[str, Any]]:
    """Yield samples as a writer takes them.

    Raises:
        SchemaError: a value cannot be stored; it names the sample and the field.
    """
    for number, sample in enumerate(samples):
        try:
            found = ready(sample, schema)
        except SchemaError as error:
            raise SchemaError(f"sample {number}: {error}") from error
        yield found
