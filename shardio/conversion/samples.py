"""Samples from any iterable become a dataset, written by the calling process."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from shardio.conversion.report import ConversionReport
from shardio.dataset_writer import DatasetWriter
from shardio.errors import InvalidArgument
from shardio.format.schema import Schema
from shardio.inference import infer_schema


def convert_samples(
    samples: Iterable[Mapping[str, Any]], out: str, schema: Schema | None, shard_bytes: int
) -> ConversionReport:
    """Write samples to a new dataset at `out`; without `schema`, the first sample gives it."""
    start_s = time.monotonic()
    rest = iter(samples)
    first = next(rest, None)
    if schema is None:
        if first is None:
            raise InvalidArgument("there is no sample to take the schema from; give schema=")
        schema = infer_schema(first)
    with DatasetWriter(out, schema, shard_bytes=shard_bytes) as writer:
        if first is not None:
            writer.append(first)
        for sample in rest:
            writer.append(sample)
        generation = writer.close()
    return ConversionReport(
        dataset=Path(out),
        kind="samples",
        n_samples=generation.n_samples,
        n_bytes=sum(shard.n_bytes for shard in generation.shards),
        elapsed_s=time.monotonic() - start_s,
    )
