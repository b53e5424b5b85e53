"""The baselines of the race, and shardio: loaders that need no other library."""

from __future__ import annotations

import mmap
import os
import signal
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.racers.samples import fill, source
from benchmarks.racers.workloads import CLIP_FRAMES, Batch, Epochs, Workload, augmented

_MESSAGE = struct.Struct("<III")
"""Epoch, batch, block."""


def memmap(workload: Workload, workers: int) -> Epochs:
    """Gather each batch into one buffer, in this process."""
    out = np.empty((workload.batch_size, *workload.shape), workload.dtype)

    def epoch(number: int) -> Iterator[Batch]:
        rows = source(workload)
        for samples in workload.batches(number):
            fill(workload, rows, samples, out)
            yield out[: len(samples)]

    return epoch


def limit(workload: Workload, workers: int) -> Epochs:
    """Gather batches into shared blocks, in forked workers that receive 12 bytes per batch."""
    n_blocks = 2 * workers
    shape = n_blocks, workload.batch_size, *workload.shape
    n_bytes = int(np.prod(shape)) * np.dtype(workload.dtype).itemsize
    descriptor = os.memfd_create("race")
    os.ftruncate(descriptor, n_bytes)
    blocks = np.frombuffer(mmap.mmap(descriptor, n_bytes), workload.dtype).reshape(shape)
    blocks[:] = 0
    requests, answers = [os.pipe() for _ in range(workers)], os.pipe()
    for reading, _ in requests:
        if os.fork() == 0:
            _serve(workload, reading, answers[1], blocks)

    def epoch(number: int) -> Iterator[Batch]:
        free, sent, filled = list(range(n_blocks)), 0, dict[int, int]()
        n_batches = workload.n_samples // workload.batch_size
        for step in range(n_batches):
            while free and sent < n_batches:
                message = _MESSAGE.pack(number, sent, free.pop())
                os.write(requests[sent % workers][1], message)
                sent += 1
            while step not in filled:
                _, done, block = _MESSAGE.unpack(os.read(answers[0], _MESSAGE.size))
                filled[done] = block
            block = filled.pop(step)
            yield blocks[block]
            free.append(block)

    return epoch


def _serve(workload: Workload, reading: int, writing: int, blocks: Batch) -> None:
    """Fill the block that a message names, and send the message back, until the pipe is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    rows, current, batches = source(workload), -1, list[Any]()
    while len(message := os.read(reading, _MESSAGE.size)) == _MESSAGE.size:
        epoch, step, block = _MESSAGE.unpack(message)
        if epoch != current:
            current, batches = epoch, list(workload.batches(epoch))
        fill(workload, rows, batches[step], blocks[block])
        os.write(writing, message)
    os._exit(0)


def augment_sample(sample: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    """Augment a sample; a transform of shardio."""
    return {"x": augmented(sample["x"], rng)}


def shardio(workload: Workload, workers: int) -> Epochs:
    """Load with shardio's public interface; options that are not needed keep their defaults."""
    import shardio as s

    n_shards = 400 if workload.name == "tokens400" else 0
    name = f"shardio-{s.__version__}-{n_shards}"
    options: dict[str, Any] = {"shuffle": True, "num_workers": workers, "output": "numpy"}
    if workload.name == "augment":
        options["transform"] = augment_sample
    folder = workload.made(name, lambda folder: _write_shards(workload, folder, n_shards))
    data: Any = folder
    if workload.data == "clips":
        data = s.open(folder).clips(CLIP_FRAMES, where="random")
    loader = s.ShardLoader(data, workload.batch_size, **options)

    def epoch(number: int) -> Iterator[Batch]:
        for batch in loader:
            yield batch["x"]

    return epoch


def _write_shards(workload: Workload, folder: Path, n_shards: int) -> None:
    """Write about `n_shards` shards; if it is 0, shards of 256 MiB."""
    import shardio as s

    n_bytes = workload.n_samples * workload.row_bytes // n_shards if n_shards else 256 << 20
    fields: dict[str, Any] = {"jpeg": s.Image(), "clips": s.Video()}
    field = fields.get(workload.data, s.Array(workload.dtype, workload.stored))
    rows = (
        (path.read_bytes() for path in workload.files())
        if workload.data in fields
        else workload.rows()
    )
    with s.DatasetWriter(folder, s.Schema({"x": field}), shard_bytes=n_bytes) as writer:
        for row in rows:
            writer.append({"x": row})
