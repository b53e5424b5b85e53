"""The samples that a crashed worker was reading, and the samples to skip.

Before a worker reads samples, it claims them: it sets their status to CLAIMED in the block's origin
table, which has an entry for each row. If samples may be skipped, a sample is skipped once
MAX_CRASHES workers have crashed while this sample was the only claimed one. Without a transform, a
worker claims all samples of a batch at once, so the batch is filled again row by row after the
first crash.
"""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from shardio._engine.filling.batch_spec import BatchSpec
from shardio._workers.processes.blocks import Block
from shardio._workers.processes.worker_pool import MAX_CRASHES
from shardio.batch.layout import CLAIMED, EMPTY, NO_FIELD, BlockLayout
from shardio.dataset.dataset import Dataset
from shardio.errors import ShardChanged, WorkerDied
from shardio.samples.view import SampleView

_NAMED_SAMPLES: Final = 3


@dataclass(frozen=True, slots=True)
class InFlightRows:
    """The samples that a worker was reading or transforming: its claims."""

    text: str
    rows: dict[int, list[int]] = field(default_factory=dict)
    """The rows of the samples in each shard, by the index of the shard."""
    field: str | None = None
    """The field that the worker was reading; None if it was not reading exactly one field."""
    batch_rows: tuple[tuple[int, int], ...] = ()
    """For each sample, its row in the batch and its index in the view."""


def describe_first_sample(batch_spec: BatchSpec, view: SampleView, number: int = 0) -> InFlightRows:
    """Describe the work on sample `number` of the view, from which the schema is inferred."""
    rows, dataset = view.at(np.array([number])), view.dataset
    shard = int(dataset.locate(rows)[0])
    row = int(rows[0] - dataset.shard_starts[shard])
    work = "ran the transform on the first sample:"
    if batch_spec.makes_batches:
        work = "built the first batch, which begins with"
    sample = f"sample {row} of shard {dataset.shards[shard].name} of {batch_spec.path}"
    return InFlightRows(f"while it {work} {sample}", {shard: [row]})


def read_claims(
    layout: BlockLayout, block: Block, dataset: Dataset, fields: tuple[str, ...]
) -> InFlightRows:
    origins = layout.origins(block.bytes)
    at = np.flatnonzero(origins["status"] == CLAIMED)
    claimed = origins[at]
    if not len(claimed):
        return InFlightRows("before it began with")
    numbers = set(claimed["field"].tolist()) - {NO_FIELD}
    name = fields[numbers.pop()] if len(numbers) == 1 else None
    rows = {
        shard: claimed["row"][claimed["shard"] == shard].tolist()
        for shard in np.unique(claimed["shard"]).tolist()
    }
    named = []
    for shard in list(rows)[:_NAMED_SAMPLES]:
        listed = ", ".join(map(str, rows[shard][:_NAMED_SAMPLES]))
        listed += ", …" if len(rows[shard]) > _NAMED_SAMPLES else ""
        plural = "samples" if len(rows[shard]) > 1 else "sample"
        named.append(f"{plural} {listed} of shard {dataset.shards[shard].name}")
    more = " and others" if len(rows) > _NAMED_SAMPLES else ""
    what = f"field {name!r} of " if name is not None else ""
    batch_rows = tuple(zip(at.tolist(), claimed["position"].tolist(), strict=True))
    return InFlightRows(
        f"while it worked on {what}{'; '.join(named)}{more} for", rows, name, batch_rows
    )


def clear_claims(layout: BlockLayout, block: Block) -> None:
    """Reset the claims of an unfinished batch, so that no later crash is attributed to it."""
    layout.origins(block.bytes)["status"] = EMPTY


def crash_error(
    how: str, by_signal: int | None, claims: InFlightRows, where: str, dataset: Dataset
) -> WorkerDied | ShardChanged:
    """Return the error of a batch whose worker has crashed; `where` is the end of the message.

    SIGBUS means that the storage could not provide a page of a mapped file. The error is then
    ShardChanged if a file that the worker was reading was truncated; all files are checked if no
    sample was claimed.
    """
    text = f"{how}, {claims.text}{where}"
    if by_signal != signal.SIGBUS:
        return WorkerDied(text)
    for shard in claims.rows or range(len(dataset.shards)):
        for summary, path in dataset.files.files_of_shard(shard, claims.field):
            try:
                n_bytes = os.stat(path).st_size
            except OSError:
                continue  # a deleted file is not the cause, because its maps remain readable
            if n_bytes < summary.n_bytes:
                found = ShardChanged(
                    f"the file was cut short while it was read: {text}",
                    code="file_size",
                    path=path,
                    field=claims.field,
                    sample=_first_truncated_row(dataset, shard, claims, n_bytes),
                    expected=summary.n_bytes,
                    found=n_bytes,
                )
                found.__cause__ = WorkerDied(text)
                return found
    return WorkerDied(
        f"{text}; SIGBUS means that the storage could not provide a page of a mapped file: the "
        "device fails (see the kernel's log), or a file was temporarily truncated"
    )


def is_final(error: WorkerDied | ShardChanged, n_crashes: int) -> bool:
    return isinstance(error, ShardChanged) or n_crashes >= MAX_CRASHES


def _first_truncated_row(
    dataset: Dataset, shard: int, claims: InFlightRows, n_bytes: int
) -> int | None:
    """Return the first claimed row that may be stored past the first `n_bytes` of its file."""
    rows = claims.rows.get(shard, [])
    # Use only a reader that is already open, because a truncated file cannot be opened.
    reader = dataset.files.reader_if_open(shard, claims.field)
    if claims.field in dataset.schema.columns and reader is not None:
        section = reader.column_section(claims.field)
        lost = [row for row in rows if section.offset + (row + 1) * section.stride > n_bytes]
        return min(lost, default=None)
    # The offset of a record is stored in the truncated file, and reading this file could kill the
    # main process by SIGBUS.
    return min(rows, default=None)


_MAX_UNEXPLAINED: Final = 2 * MAX_CRASHES + 2
"""A step fails after this number of successive crashes without a newly skipped sample.

The first crash does not identify a sample, and workers may be killed from outside.
"""


class SuspectSamples:
    """A record of the crashes at one step."""

    def __init__(self) -> None:
        self.to_skip: dict[int, dict[int, str]] = {}
        """Samples to skip: {row in the batch: {index in the view: reason}}."""
        self._n_crashes: dict[tuple[int, int], int] = {}
        self._n_unexplained = 0

    @property
    def has_too_many_crashes(self) -> bool:
        """True if workers keep crashing at the step, and no single sample is the known cause."""
        return self._n_unexplained >= _MAX_UNEXPLAINED

    def record_crash(self, claims: InFlightRows, end: str) -> bool:
        """Record a crash; return True if `to_skip` has a new sample."""
        self._n_unexplained += 1
        if len(claims.batch_rows) != 1:
            return False
        (claimed,) = claims.batch_rows
        self._n_crashes[claimed] = self._n_crashes.get(claimed, 0) + 1
        if self._n_crashes[claimed] < MAX_CRASHES:
            return False
        row, number = claimed
        why = f"{MAX_CRASHES} workers crashed on it alone; the last {end}"
        self.to_skip.setdefault(row, {})[number] = why
        self._n_unexplained = 0
        return True
