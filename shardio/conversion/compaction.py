"""Merge neighbouring small shards of a conversion of items before it is published.

How many bytes an item gives is not known before it is converted, so units of items are cut by
number, small enough for all workers to be busy. The shards that they become are cut by bytes here,
in the order of the plan: the number of workers, and which unit ends first, change nothing.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from shardio.conversion.worker import Job
from shardio.shard.reader import ShardReader
from shardio.shard.writer import ShardSummary, ShardWriter
from shardio.storage.fs import make_folder

MIN_SHARD_BYTES: Final = 8 << 20
"""Minimum bytes of a merged shard, whose tables and padding take some 50 kB."""
FOLDER: Final = "compacted"
"""The name of the folder that the new shards lie in."""

Placed = tuple[str, ShardSummary]
"""The path of a finished shard below the job's folder, and its summary by its final name."""


def is_small(shard: ShardSummary, shard_bytes: int) -> bool:
    """Return whether a shard is put together with small neighbours."""
    return shard.n_bytes < _least_bytes(shard_bytes)


def _least_bytes(shard_bytes: int) -> int:
    """Return the size that completes a group; two smaller shards fit into `shard_bytes`."""
    return min(MIN_SHARD_BYTES, shard_bytes // 2)


def compact(placed: Sequence[Placed], job: Job) -> list[Placed]:
    """Put neighbouring small shards together, in new files; others stay where they lie.

    The shards that are replaced stay as well: a conversion that is interrupted goes on from them.

    Raises:
        ShardCorrupt: a shard was changed since it was written.
        OSError: the disk refuses.
    """
    sizes = [
        _content_bytes(os.path.join(job.folder, place))
        if is_small(shard, job.shard_bytes)
        else shard.n_bytes
        for place, shard in placed
    ]
    groups = grouped(sizes, _least_bytes(job.shard_bytes))
    return [
        placed[group.start] if len(group) == 1 else _joined(placed[group.start : group.stop], job)
        for group in groups
    ]


def grouped(sizes: Sequence[int], least_bytes: int) -> list[range]:
    """Group neighbours below `least_bytes` until they reach it together; others are alone."""
    found: list[range] = []
    first = n_bytes = 0
    for position, size in enumerate(sizes):
        if size >= least_bytes and first < position:
            found.append(range(first, position))
            first, n_bytes = position, 0
        n_bytes += size
        if n_bytes >= least_bytes:
            found.append(range(first, position + 1))
            first, n_bytes = position + 1, 0
    if first < len(sizes):
        found.append(range(first, len(sizes)))
    return found


def _content_bytes(path: str) -> int:
    """Return the bytes of a shard without padding, which is most of a file with few samples."""
    with ShardReader(path, verify="off") as reader:
        return sum(section.size for section in reader.sections)


def _joined(members: Sequence[Placed], job: Job) -> Placed:
    """Write the samples of some shards into one, which has the name of the first."""
    name = members[0][1].name
    folder = os.path.join(job.folder, FOLDER)
    make_folder(folder)
    with ShardWriter(os.path.join(folder, name), job.source.schema()) as writer:
        for place, _ in members:
            with ShardReader(os.path.join(job.folder, place)) as reader:
                for sample in reader:
                    writer.append(sample)
        summary = writer.close()
    return f"{FOLDER}/{name}", replace(summary, name=name)
