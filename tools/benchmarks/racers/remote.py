"""Peers that read the frames from an S3 server: the workload "remote".

Every peer's files have 128 samples each. A function has the name of the one that reads from a disk.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import numpy as np

from benchmarks.racers.columnar import N_AHEAD, ahead, named
from benchmarks.racers.samples import arrow_values
from benchmarks.racers.store import KEY_ID, REGION, SECRET, Store
from benchmarks.racers.torch_formats import Inputs
from benchmarks.racers.torch_loaders import first_fields, stacked
from benchmarks.racers.workloads import Batch, Epochs, Workload

FILE_SAMPLES: Final = 128
N_CONNECTIONS: Final = 64
"""The maximum number of concurrent requests of TensorStore; Lance has the same default."""


def _store(workload: Workload) -> Store:
    if workload.store is None:
        raise ValueError(f"workload {workload.name}: no object store")
    return workload.store


def _key(workload: Workload, name: str, write: Callable[[Path], object]) -> str:
    """Return `BUCKET/NAME` of a peer's files; `write` writes them if they are missing."""
    place = workload.made(f"remote-{name}", write)
    return f"{workload.folder.name}/{place.name}"


def _set_environment(store: Store) -> None:
    """Set the variables with which libraries that use boto3 find the store."""
    os.environ |= {
        "AWS_ACCESS_KEY_ID": KEY_ID,
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_DEFAULT_REGION": REGION,
        "S3_ENDPOINT_URL": store.endpoint,
    }


def shardio(workload: Workload, workers: int) -> Epochs:
    """Load with shardio's public interface; options that are not needed keep their defaults."""
    import shardio as s

    def write(folder: Path) -> None:
        schema = s.Schema({"x": s.Array(workload.dtype, workload.stored)})
        # Half a row less: a shard ends with the row that exceeds `shard_bytes`.
        n_bytes = FILE_SAMPLES * workload.row_bytes - workload.row_bytes // 2
        with s.DatasetWriter(folder, schema, shard_bytes=n_bytes) as writer:
            for row in workload.rows():
                writer.append({"x": row})

    store = _store(workload)
    options = {
        "aws_endpoint": store.endpoint,
        "aws_region": REGION,
        "aws_access_key_id": KEY_ID,
        "aws_secret_access_key": SECRET,
    }
    key = _key(workload, f"shardio-{s.__version__}", write)
    dataset = s.open(f"s3://{key}", cache=store.cache, storage_options=options)
    shuffling: dict[str, Any] = {"shuffle": True, "num_workers": workers, "output": "numpy"}
    loader = s.ShardLoader(dataset, workload.batch_size, **shuffling)

    def epoch(number: int) -> Iterator[Batch]:
        for batch in loader:
            yield batch["x"]

    return epoch


def mds(workload: Workload, workers: int) -> Epochs:
    """Load MosaicML's shards.

    The client that has downloaded the index is dropped. Otherwise, forked workers share its
    connection, and read each other's answers: epochs then take a minute, or fail.
    """
    import streaming
    from torch.utils.data import DataLoader

    def write(folder: Path) -> None:
        kind = f"ndarray:{workload.dtype}:{','.join(map(str, workload.stored))}"
        n_bytes = FILE_SAMPLES * (workload.row_bytes + 64)
        with streaming.MDSWriter(
            out=str(folder), columns={"x": kind}, size_limit=n_bytes
        ) as writer:
            for row in workload.rows():
                writer.write({"x": np.array(row)})

    store, key = _store(workload), _key(workload, "mds", write)
    _set_environment(store)
    streaming.base.util.clean_stale_shared_memory()
    options: dict[str, Any] = {"shuffle": True, "batch_size": workload.batch_size}
    dataset = streaming.StreamingDataset(remote=f"s3://{key}", local=str(store.cache), **options)
    for stream in dataset.streams:
        stream._downloader.clean_up()
    options = {"collate_fn": stacked, "persistent_workers": True}
    loader = DataLoader(dataset, workload.batch_size, num_workers=workers, **options)
    return lambda epoch: iter(loader)


def wds(workload: Workload, workers: int) -> Epochs:
    """Load tars over HTTP."""
    import webdataset

    def write(folder: Path) -> None:
        folder.mkdir()
        options = {"maxcount": FILE_SAMPLES, "verbose": 0}
        with webdataset.ShardWriter(f"{folder}/%04d.tar", **options) as writer:
            for i, row in enumerate(workload.rows()):
                writer.write({"__key__": f"{i:06d}", "x.npy": np.array(row)})

    store, key = _store(workload), _key(workload, "wds", write)
    n_tars = -(-workload.n_samples // FILE_SAMPLES)
    urls = [f"{store.endpoint}/{key}/{i:04d}.tar" for i in range(n_tars)]
    dataset = webdataset.WebDataset(urls, shardshuffle=100, cache_dir=str(store.cache))
    dataset = dataset.shuffle(500).decode().to_tuple("x.npy")
    batches = dataset.batched(workload.batch_size, collation_fn=first_fields)
    loader = webdataset.WebLoader(
        batches, batch_size=None, num_workers=workers, persistent_workers=True
    )
    return lambda epoch: iter(loader)


def litdata(workload: Workload, workers: int) -> Epochs:
    """Load LitData's chunks. No option of LitData allows its downloads to use HTTP without TLS."""
    import litdata as library
    from litdata.streaming import downloader

    def write(folder: Path) -> None:
        writing: dict[str, Any] = {"chunk_size": FILE_SAMPLES, "num_workers": 1}
        library.optimize(Inputs(workload), list(range(workload.n_samples)), str(folder), **writing)

    store, key = _store(workload), _key(workload, "litdata", write)
    _set_environment(store)
    downloader._OBSTORE_CLIENT_OPTIONS["allow_http"] = True
    dataset = library.StreamingDataset(
        f"s3://{key}",
        cache_dir=str(store.cache),
        shuffle=True,
        drop_last=False,
        storage_options={"endpoint_url": store.endpoint},
    )
    loader = library.StreamingDataLoader(
        dataset, batch_size=workload.batch_size, num_workers=workers, persistent_workers=True
    )
    return lambda epoch: (batch.numpy() for batch in loader)


def lance(workload: Workload, workers: int) -> Epochs:
    """Take rows from a column of fixed-size binary values."""
    import lance as library
    import pyarrow

    kind = pyarrow.binary(workload.row_bytes)
    schema = pyarrow.schema([pyarrow.field("x", kind)])

    def batches() -> Iterator[Any]:
        for rows in workload.chunks():
            buffers = [None, pyarrow.py_buffer(rows)]
            column = pyarrow.FixedSizeBinaryArray.from_buffers(kind, len(rows), buffers)
            yield pyarrow.record_batch([column], schema=schema)

    def write(folder: Path) -> None:
        options = {"data_storage_version": "2.1", "max_rows_per_file": FILE_SAMPLES}
        library.write_dataset(batches(), str(folder), schema=schema, **options)

    store, key = _store(workload), _key(workload, "lance", write)
    options = {
        "aws_endpoint": store.endpoint,
        "allow_http": "true",
        "aws_region": REGION,
        "aws_access_key_id": KEY_ID,
        "aws_secret_access_key": SECRET,
    }
    dataset = library.dataset(f"s3://{key}", storage_options=options)

    def take(samples: Any) -> Batch:
        return arrow_values(dataset.take(samples.tolist())["x"], workload)

    pool = ThreadPoolExecutor(N_AHEAD)
    return ahead(workload, lambda samples: pool.submit(take, samples).result)


def tensorstore(workload: Workload, workers: int) -> Epochs:
    """Read the rows of a batch, sorted, from a Zarr array with sharding and chunks of a frame."""
    import tensorstore as library

    def write(folder: Path) -> None:
        inner = named("bytes", {"endian": "little"})
        shape = {"chunk_shape": [1, *workload.stored], "codecs": [inner]}
        metadata = {
            "shape": [workload.n_samples, *workload.stored],
            "data_type": workload.dtype,
            "chunk_grid": named("regular", {"chunk_shape": [FILE_SAMPLES, *workload.stored]}),
            "codecs": [named("sharding_indexed", shape)],
        }
        kvstore = {"driver": "file", "path": str(folder)}
        spec = {"driver": "zarr3", "kvstore": kvstore, "metadata": metadata, "create": True}
        array = library.open(spec).result()
        rows = workload.rows()
        for i in range(0, len(rows), FILE_SAMPLES):
            part = np.array(rows[i : i + FILE_SAMPLES])
            array[i : i + len(part)].write(part).result()

    store, key = _store(workload), _key(workload, "zarr", write)
    bucket, _, name = key.partition("/")
    kvstore = {
        "driver": "s3",
        "endpoint": store.endpoint,
        "bucket": bucket,
        "path": f"{name}/",
        "aws_region": REGION,
        "aws_credentials": {"type": "anonymous"},
    }
    context = {
        "cache_pool": {"total_bytes_limit": 64 << 20},
        "data_copy_concurrency": {"limit": workers},
        "s3_request_concurrency": {"limit": N_CONNECTIONS},
    }
    options = {"context": context, "recheck_cached_data": "open"}
    spec = {"driver": "zarr3", "kvstore": kvstore, **options}
    array = library.open(spec, read=True, open=True).result()
    return ahead(workload, lambda samples: array[np.sort(samples)].read().result)
