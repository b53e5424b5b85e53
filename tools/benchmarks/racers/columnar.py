"""Peers that read the rows of a batch in their own threads: Lance, Vortex, TensorStore."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import numpy as np

from benchmarks.racers.samples import arrow_columns, arrow_values
from benchmarks.racers.workloads import Batch, Epochs, Workload

N_AHEAD: Final = 4
"""The number of batches in flight."""


def ahead(workload: Workload, start: Callable[[Any], Callable[[], Batch]]) -> Epochs:
    """Return epochs that keep N_AHEAD batches in flight.

    `start` starts to read the given samples, and returns a function that waits for the batch.
    """

    def epoch(number: int) -> Iterator[Batch]:
        in_flight = deque[Callable[[], Batch]]()
        for samples in workload.batches(number):
            in_flight.append(start(samples))
            if len(in_flight) == N_AHEAD:
                yield in_flight.popleft()()
        for result in in_flight:
            yield result()

    return epoch


def _in_threads(workload: Workload, take: Callable[[Any], Batch]) -> Epochs:
    """Return epochs that call `take` in two threads, which wait for those of the library."""
    pool = ThreadPoolExecutor(2)
    return ahead(workload, lambda samples: pool.submit(take, samples).result)


def lance(workload: Workload, workers: int) -> Epochs:
    """Take rows from a column of fixed-size binary values, or of JPEGs."""
    import lance as library
    import pyarrow

    kind = pyarrow.binary() if workload.is_encoded else pyarrow.binary(workload.row_bytes)
    schema = pyarrow.schema([pyarrow.field("x", kind)])

    def columns() -> Iterator[Any]:
        if workload.is_encoded:
            yield from arrow_columns(workload)
            return
        for rows in workload.chunks():
            buffers = [None, pyarrow.py_buffer(rows)]
            yield pyarrow.FixedSizeBinaryArray.from_buffers(kind, len(rows), buffers)

    def batches() -> Iterator[Any]:
        for column in columns():
            yield pyarrow.record_batch([column], schema=schema)

    def write(folder: Path) -> None:
        version = {"data_storage_version": "2.1"}
        library.write_dataset(batches(), str(folder), schema=schema, **version)

    dataset = library.dataset(str(workload.made("rows.lance", write)))
    return _in_threads(
        workload, lambda rows: arrow_values(dataset.take(rows.tolist())["x"], workload)
    )


def vortex(workload: Workload, workers: int) -> Epochs:
    """Scan the rows of a batch, sorted, from a memory-mapped file."""
    import pyarrow
    import vortex as library

    kind = pyarrow.list_(pyarrow.from_numpy_dtype(np.dtype(workload.dtype)), workload.row_values)
    schema = pyarrow.schema([pyarrow.field("x", kind, nullable=False)])

    def batches() -> Iterator[Any]:
        for column in arrow_columns(workload):
            yield pyarrow.record_batch([column], schema=schema)

    def write(path: Path) -> None:
        reader = pyarrow.RecordBatchReader.from_batches(schema, batches())
        library.io.write(reader, str(path))

    file = library.open(str(workload.made("rows.vortex", write)), memory_map=True)

    def take(samples: Any) -> Batch:
        indices = library.array(pyarrow.array(np.sort(samples).astype(np.uint64)))
        found = file.scan(indices=indices).read_all().to_arrow_array()
        if isinstance(found, pyarrow.ChunkedArray):
            found = found.combine_chunks()
        return arrow_values(found.field("x"), workload)

    return _in_threads(workload, take)


def tensorstore(workload: Workload, workers: int) -> Epochs:
    """Read the rows of a batch, sorted, from a Zarr array with sharding and small chunks."""
    import tensorstore as library

    n_inner, n_outer = (16, 8192) if workload.data == "tokens" else (1, 64)

    def write(folder: Path) -> None:
        inner = named("bytes", {"endian": "little"})
        shape = {"chunk_shape": [n_inner, *workload.stored], "codecs": [inner]}
        metadata = {
            "shape": [workload.n_samples, *workload.stored],
            "data_type": workload.dtype,
            "chunk_grid": named("regular", {"chunk_shape": [n_outer, *workload.stored]}),
            "codecs": [named("sharding_indexed", shape)],
        }
        array = library.open(_store(folder) | {"metadata": metadata, "create": True}).result()
        rows = workload.rows()
        for i in range(0, len(rows), n_outer):
            part = np.array(rows[i : i + n_outer])
            array[i : i + len(part)].write(part).result()

    folder = workload.made("zarr", write)
    context = {
        "cache_pool": {"total_bytes_limit": 64 << 20},
        "data_copy_concurrency": {"limit": workers},
    }
    options = {"context": context, "recheck_cached_data": "open"}
    array = library.open(_store(folder) | options, read=True, open=True).result()
    return ahead(workload, lambda samples: array[np.sort(samples)].read().result)


def named(name: str, configuration: Any) -> dict[str, Any]:
    """Return an extension of Zarr, such as a codec, in its JSON form."""
    return {"name": name, "configuration": configuration}


def _store(folder: Path) -> dict[str, Any]:
    return {"driver": "zarr3", "kvstore": {"driver": "file", "path": str(folder)}}
