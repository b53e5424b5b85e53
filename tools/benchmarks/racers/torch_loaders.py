"""Peers that deliver batches through torch's DataLoader."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.racers.samples import Samples, fill, source
from benchmarks.racers.workloads import Batch, Epochs, Workload


def torchdl(workload: Workload, workers: int) -> Epochs:
    """Load a map-style dataset."""
    from torch.utils.data import DataLoader

    options: dict[str, Any] = {"shuffle": True, "persistent_workers": True}
    loader = DataLoader(Samples(workload), workload.batch_size, num_workers=workers, **options)
    return lambda epoch: (batch.numpy() for batch in loader)


class BatchedDataset:
    """A map-style dataset that is indexed by batches. Subclasses read other files."""

    def __init__(self, workload: Workload) -> None:
        self.workload = workload
        self.source: Any = None

    def __len__(self) -> int:
        return self.workload.n_samples

    def open(self) -> Any:
        """Open the samples; called once in each worker."""
        return source(self.workload)

    def gather(self, samples: Any) -> Batch:
        """Return a batch of samples."""
        out = np.empty((len(samples), *self.workload.shape), self.workload.dtype)
        fill(self.workload, self.source, samples, out)
        return out

    def __getitem__(self, samples: Any) -> Any:
        import torch

        if self.source is None:
            self.source = self.open()
        return torch.from_numpy(self.gather(samples))


class BatchSampler:
    """A sampler of batches, with a new order in each epoch."""

    def __init__(self, workload: Workload) -> None:
        self.workload = workload
        self.epoch = 0

    def __len__(self) -> int:
        return -(-self.workload.n_samples // self.workload.batch_size)

    def __iter__(self) -> Iterator[Any]:
        self.epoch += 1
        return self.workload.batches(self.epoch)


def by_batches(dataset: BatchedDataset, workers: int) -> Epochs:
    """Load a dataset that is indexed by batches."""
    from torch.utils.data import DataLoader

    options: dict[str, Any] = {
        "sampler": BatchSampler(dataset.workload),
        "persistent_workers": True,
    }
    loader = DataLoader(dataset, None, num_workers=workers, **options)
    return lambda epoch: (batch.numpy() for batch in loader)


def torchdl_batched(workload: Workload, workers: int) -> Epochs:
    """Load a dataset that is indexed by batches, so that workers send fewer and larger messages."""
    return by_batches(BatchedDataset(workload), workers)


def stacked(samples: Any) -> Batch:
    """Collate the samples of MosaicML's dataset into a batch."""
    return np.stack([sample["x"] for sample in samples])


def mds(workload: Workload, workers: int) -> Epochs:
    """Load MosaicML's shards."""
    import streaming
    from torch.utils.data import DataLoader

    def write(folder: Path) -> None:
        kind = f"ndarray:{workload.dtype}:{','.join(map(str, workload.stored))}"
        with streaming.MDSWriter(out=str(folder), columns={"x": kind}) as writer:
            for row in workload.rows():
                writer.write({"x": np.array(row)})

    folder = workload.made("mds", write)
    streaming.base.util.clean_stale_shared_memory()
    options: dict[str, Any] = {"shuffle": True, "batch_size": workload.batch_size}
    dataset = streaming.StreamingDataset(local=str(folder), **options)
    options = {"collate_fn": stacked, "persistent_workers": True}
    loader = DataLoader(dataset, workload.batch_size, num_workers=workers, **options)
    return lambda epoch: iter(loader)


def first_fields(samples: Any) -> Batch:
    """Collate the tuples of webdataset into a batch."""
    return np.stack([sample[0] for sample in samples])


def wds(workload: Workload, workers: int) -> Epochs:
    """Load tars."""
    import webdataset

    def write(folder: Path) -> None:
        folder.mkdir()
        n_bytes = min(64 << 20, workload.n_samples * workload.row_bytes // 4)
        with webdataset.ShardWriter(f"{folder}/%04d.tar", maxsize=n_bytes, verbose=0) as writer:
            for i, row in enumerate(workload.rows()):
                writer.write({"__key__": f"{i:06d}", "x.npy": np.array(row)})

    tars = sorted(map(str, workload.made("wds", write).glob("*.tar")))
    dataset = webdataset.WebDataset(tars, shardshuffle=100).shuffle(500).decode()
    batches = dataset.to_tuple("x.npy").batched(workload.batch_size, collation_fn=first_fields)
    loader = webdataset.WebLoader(
        batches, batch_size=None, num_workers=workers, persistent_workers=True
    )
    return lambda epoch: iter(loader)
