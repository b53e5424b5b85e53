"""Peers that read the rows of a batch in their own threads: Lance, Vortex, TensorStore."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import numpy as np

from benchmarks.racers.samples import arrow_values
from benchmarks.racers.works import Batch, Epochs, Work

N_AHEAD: Final = 4
"""The number of batches in flight."""


def _ahead(work: Work, start: Callable[[Any], Callable[[], Batch]]) -> Epochs:
    """Return epochs that keep N_AHEAD batches in flight.

    `start` starts to read the given samples, and returns a function that waits for the batch.
    """

    def epoch(number: int) -> Iterator[Batch]:
        in_flight = deque[Callable[[], Batch]]()
        for samples in work.batches(number):
            in_flight.append(start(samples))
            if len(in_flight) == N_AHEAD:
                yield in_flight.popleft()()
        for result in in_flight:
            yield result()

    return epoch


def _in_threads(work: Work, take: Callable[[Any], Batch]) -> Epochs:
    """Return epochs that call `take` in two threads, which wait for those of the library."""
    pool = ThreadPoolExecutor(2)
    return _ahead(work, lambda samples: pool.submit(take, samples).result)


def lance(work: Work, workers: int) -> Epochs:
    """Take rows from a column of fixed-size binary values."""
    import lance as library
    import pyarrow

    kind = pyarrow.binary(work.row_bytes)
    schema = pyarrow.schema([pyarrow.field("x", kind)])

    def batches() -> Iterator[Any]:
        for rows in work.chunks():
            buffers = [None, pyarrow.py_buffer(rows)]
            column = pyarrow.FixedSizeBinaryArray.from_buffers(kind, len(rows), buffers)
            yield pyarrow.record_batch([column], schema=schema)

    def write(folder: Path) -> None:
        version = {"data_storage_version": "2.1"}
        library.write_dataset(batches(), str(folder), schema=schema, **version)

    dataset = library.dataset(str(work.made("rows.lance", write)))
    return _in_threads(work, lambda rows: arrow_values(dataset.take(rows.tolist())["x"], work))


def vortex(work: Work, workers: int) -> Epochs:
    """Scan the rows of a batch, sorted, from a memory-mapped file."""
    import pyarrow
    import vortex as library

    kind = pyarrow.list_(pyarrow.from_numpy_dtype(np.dtype(work.dtype)), work.row_values)
    schema = pyarrow.schema([pyarrow.field("x", kind, nullable=False)])

    def batches() -> Iterator[Any]:
        for rows in work.chunks():
            values = pyarrow.array(rows.reshape(-1))
            column = pyarrow.FixedSizeListArray.from_arrays(values, work.row_values)
            yield pyarrow.record_batch([column], schema=schema)

    def write(path: Path) -> None:
        reader = pyarrow.RecordBatchReader.from_batches(schema, batches())
        library.io.write(reader, str(path))

    file = library.open(str(work.made("rows.vortex", write)), memory_map=True)

    def take(samples: Any) -> Batch:
        indices = library.array(pyarrow.array(np.sort(samples).astype(np.uint64)))
        found = file.scan(indices=indices).read_all().to_arrow_array()
        if isinstance(found, pyarrow.ChunkedArray):
            found = found.combine_chunks()
        return arrow_values(found.field("x"), work)

    return _in_threads(work, take)


def tensorstore(work: Work, workers: int) -> Epochs:
    """Read the rows of a batch, sorted, from a Zarr array with sharding and small chunks."""
    import tensorstore as library

    n_inner, n_outer = (16, 8192) if work.data == "tokens" else (1, 64)

    def write(folder: Path) -> None:
        inner = _named("bytes", {"endian": "little"})
        shape = {"chunk_shape": [n_inner, *work.stored], "codecs": [inner]}
        metadata = {
            "shape": [work.n_samples, *work.stored],
            "data_type": work.dtype,
            "chunk_grid": _named("regular", {"chunk_shape": [n_outer, *work.stored]}),
            "codecs": [_named("sharding_indexed", shape)],
        }
        array = library.open(_store(folder) | {"metadata": metadata, "create": True}).result()
        rows = work.rows()
        for i in range(0, len(rows), n_outer):
            part = np.array(rows[i : i + n_outer])
            array[i : i + len(part)].write(part).result()

    folder = work.made("zarr", write)
    context = {
        "cache_pool": {"total_bytes_limit": 64 << 20},
        "data_copy_concurrency": {"limit": workers},
    }
    options = {"context": context, "recheck_cached_data": "open"}
    array = library.open(_store(folder) | options, read=True, open=True).result()
    return _ahead(work, lambda samples: array[np.sort(samples)].read().result)


def _named(name: str, configuration: Any) -> dict[str, Any]:
    return {"name": name, "configuration": configuration}


def _store(folder: Path) -> dict[str, Any]:
    return {"driver": "zarr3", "kvstore": {"driver": "file", "path": str(folder)}}
