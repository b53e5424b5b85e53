"""Peers that do not need torch's DataLoader: FFCV, SPDL, Grain, tinyloader."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.racers.samples import Samples
from benchmarks.racers.works import Batch, Epochs, Work, picture


class Fields:
    """The dataset that FFCV's writer reads."""

    def __init__(self, work: Work, dtype: Any) -> None:
        self.work, self.dtype = work, dtype
        self.rows: Any = None

    def __len__(self) -> int:
        return self.work.n_samples

    def __getitem__(self, i: int) -> tuple[Batch]:
        if self.work.is_encoded:
            return (picture(i),)
        if self.rows is None:
            self.rows = self.work.rows()
        return (np.array(self.rows[i]).view(self.dtype),)


def ffcv(work: Work, workers: int) -> Epochs:
    """Load FFCV's file. FFCV has no uint16; such values are viewed as int16."""
    from ffcv.fields import NDArrayField, RGBImageField
    from ffcv.fields.decoders import NDArrayDecoder, SimpleRGBImageDecoder
    from ffcv.loader import Loader, OrderOption
    from ffcv.writer import DatasetWriter

    dtype = np.dtype(work.dtype.removeprefix("u") if work.dtype == "uint16" else work.dtype)
    field = NDArrayField(dtype, work.stored)
    if work.is_encoded:
        field = RGBImageField(write_mode="jpg", jpeg_quality=90)

    def write(path: Path) -> None:
        writer = DatasetWriter(str(path), {"x": field}, num_workers=2)
        writer.from_indexed_dataset(Fields(work, dtype))

    path = work.made("ffcv.beton", write)
    decoder = SimpleRGBImageDecoder() if work.is_encoded else NDArrayDecoder()
    options = {"order": OrderOption.RANDOM, "os_cache": True, "pipelines": {"x": [decoder]}}
    loader = Loader(str(path), batch_size=work.batch_size, num_workers=workers, **options)
    return lambda epoch: (np.asarray(x).view(work.dtype) for (x,) in loader)


def spdl(work: Work, workers: int) -> Epochs:
    """Load samples in SPDL's threads."""
    from spdl.dataloader import DataLoader

    options: dict[str, Any] = {"batch_size": work.batch_size, "num_threads": workers}
    options |= {"preprocessor": Samples(work).__getitem__, "aggregator": np.stack}
    return lambda epoch: iter(DataLoader(work.order(epoch).tolist(), **options))


def grain(work: Work, workers: int) -> Epochs:
    """Load records of an ArrayRecord file, or JPEG files."""
    import grain.python as pygrain
    from array_record.python.array_record_module import ArrayRecordWriter

    class Parse(pygrain.MapTransform):  # type: ignore[misc]
        """A transform that views a record as an array."""

        def map(self, record: bytes) -> Batch:
            return np.frombuffer(record, work.dtype).reshape(work.stored)

    def write(path: Path) -> None:
        writer = ArrayRecordWriter(str(path), "group_size:1,uncompressed")
        for row in work.rows():
            writer.write(row.tobytes())
        writer.close()

    data, operations = Samples(work), [pygrain.Batch(work.batch_size)]
    if not work.is_encoded:
        data = pygrain.ArrayRecordDataSource(str(work.made("grain.arrayrecord", write)))
        operations = [Parse(), *operations]
    options = {"data_source": data, "operations": operations, "worker_count": workers}

    def epoch(number: int) -> Iterator[Batch]:
        shards = pygrain.NoSharding()
        order = {"shuffle": True, "seed": number, "shard_options": shards, "num_epochs": 1}
        sampler = pygrain.IndexSampler(work.n_samples, **order)
        return iter(pygrain.DataLoader(sampler=sampler, **options))

    return epoch


class Items:
    """A loader of tinyloader, whose items are batches."""

    def __init__(self, work: Work) -> None:
        self.samples = Samples(work)

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


def tinyloader(work: Work, workers: int) -> Epochs:
    """Load batches as tinyloader's items, through shared memory if it works in this Python."""
    from tinyloader.loader import load_with_workers

    # Before Python 3.13, shared memory fails with an AttributeError.
    options: dict[str, Any] = {"shared_memory_enabled": sys.version_info >= (3, 13)}
    if options["shared_memory_enabled"]:
        options["memory_pool_block_count"] = 2 * workers

    def epoch(number: int) -> Iterator[Batch]:
        items = list(work.batches(number))
        with load_with_workers(Items(work), items, workers, **options) as loaded:
            for (batch,) in loaded:
                yield batch

    return epoch
