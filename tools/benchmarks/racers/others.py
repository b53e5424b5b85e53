"""Peers that do not need torch's DataLoader: FFCV, SPDL, Grain, tinyloader."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.racers.samples import Samples
from benchmarks.racers.workloads import Batch, Epochs, Workload, picture


class Fields:
    """The dataset that FFCV's writer reads."""

    def __init__(self, workload: Workload, dtype: Any) -> None:
        self.workload, self.dtype = workload, dtype
        self.rows: Any = None

    def __len__(self) -> int:
        return self.workload.n_samples

    def __getitem__(self, i: int) -> tuple[Batch]:
        if self.workload.is_encoded:
            return (picture(i),)
        if self.rows is None:
            self.rows = self.workload.rows()
        return (np.array(self.rows[i]).view(self.dtype),)


def ffcv(workload: Workload, workers: int) -> Epochs:
    """Load FFCV's file. FFCV has no uint16; such values are viewed as int16."""
    from ffcv.fields import NDArrayField, RGBImageField
    from ffcv.fields.decoders import NDArrayDecoder, SimpleRGBImageDecoder
    from ffcv.loader import Loader, OrderOption
    from ffcv.writer import DatasetWriter

    dtype = np.dtype("int16" if workload.dtype == "uint16" else workload.dtype)
    field = NDArrayField(dtype, workload.stored)
    if workload.is_encoded:
        field = RGBImageField(write_mode="jpg", jpeg_quality=90)

    def write(path: Path) -> None:
        writer = DatasetWriter(str(path), {"x": field}, num_workers=2)
        writer.from_indexed_dataset(Fields(workload, dtype))

    path = workload.made("ffcv.beton", write)
    decoder = SimpleRGBImageDecoder() if workload.is_encoded else NDArrayDecoder()
    options = {"order": OrderOption.RANDOM, "os_cache": True, "pipelines": {"x": [decoder]}}
    loader = Loader(str(path), batch_size=workload.batch_size, num_workers=workers, **options)
    return lambda epoch: (np.asarray(x).view(workload.dtype) for (x,) in loader)


def spdl(workload: Workload, workers: int) -> Epochs:
    """Load samples in SPDL's threads."""
    from spdl.dataloader import DataLoader

    options: dict[str, Any] = {"batch_size": workload.batch_size, "num_threads": workers}
    options |= {"preprocessor": Samples(workload).__getitem__, "aggregator": np.stack}
    return lambda epoch: iter(DataLoader(workload.order(epoch).tolist(), **options))


def grain(workload: Workload, workers: int) -> Epochs:
    """Load records of an ArrayRecord file, or JPEG files."""
    import grain.python as pygrain
    from array_record.python.array_record_module import ArrayRecordWriter

    class Parse(pygrain.MapTransform):  # type: ignore[misc]
        """A transform that views a record as an array."""

        def map(self, record: bytes) -> Batch:
            return np.frombuffer(record, workload.dtype).reshape(workload.stored)

    def write(path: Path) -> None:
        writer = ArrayRecordWriter(str(path), "group_size:1,uncompressed")
        for row in workload.rows():
            writer.write(row.tobytes())
        writer.close()

    data, operations = Samples(workload), [pygrain.Batch(workload.batch_size)]
    if not workload.is_encoded:
        data = pygrain.ArrayRecordDataSource(str(workload.made("grain.arrayrecord", write)))
        operations = [Parse(), *operations]
    options = {"data_source": data, "operations": operations, "worker_count": workers}

    def epoch(number: int) -> Iterator[Batch]:
        shards = pygrain.NoSharding()
        order = {"shuffle": True, "seed": number, "shard_options": shards, "num_epochs": 1}
        sampler = pygrain.IndexSampler(workload.n_samples, **order)
        return iter(pygrain.DataLoader(sampler=sampler, **options))

    return epoch


class Items:
    """A loader of tinyloader, whose items are batches."""

    def __init__(self, workload: Workload) -> None:
        self.samples = Samples(workload)

    def make_request(self, item: Any) -> Any:
        """Return the item."""
        return item

    def load(self, request: Any) -> tuple[Batch]:
        """Return a batch."""
        return (np.stack([self.samples[int(i)] for i in request]),)

    def post_process(self, response: Any) -> Any:
        """Copy the loaded batch, as the creation of a tensor would."""
        return tuple(map(np.array, response))

    def shutdown(self) -> None:
        """Release nothing."""


def tinyloader(workload: Workload, workers: int) -> Epochs:
    """Load batches as tinyloader's items, through shared memory if it works in this Python."""
    from tinyloader.loader import load_with_workers

    # Before Python 3.13, shared memory fails with an AttributeError.
    options: dict[str, Any] = {"shared_memory_enabled": sys.version_info >= (3, 13)}
    if options["shared_memory_enabled"]:
        options["memory_pool_block_count"] = 2 * workers

    def epoch(number: int) -> Iterator[Batch]:
        items = list(workload.batches(number))
        with load_with_workers(Items(workload), items, workers, **options) as loaded:
            for (batch,) in loaded:
                yield batch

    return epoch
