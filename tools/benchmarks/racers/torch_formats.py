"""Peers whose readers run in torch's DataLoader: HDF5, Hugging Face datasets, LitData."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import numpy as np

from benchmarks.racers.samples import arrow_columns, arrow_values, decoded
from benchmarks.racers.torch_loaders import BatchedDataset, by_batches
from benchmarks.racers.workloads import Batch, Epochs, Workload

TOKEN_ROWS: Final = 4096
"""The number of rows of tokens in each input of LitData's writer."""


class Rows(BatchedDataset):
    """Rows of an HDF5 dataset, each read into its place in the batch."""

    def __init__(self, workload: Workload, path: Path) -> None:
        super().__init__(workload)
        self.path = path

    def open(self) -> Any:
        """Open the dataset."""
        import h5py

        return h5py.File(self.path, "r")["x"]

    def gather(self, samples: Any) -> Batch:
        """Return a batch of rows."""
        out = np.empty((len(samples), *self.workload.stored), self.workload.dtype)
        for j, i in enumerate(samples):
            self.source.read_direct(out, np.s_[int(i)], np.s_[j])
        return out


def hdf5(workload: Workload, workers: int) -> Epochs:
    """Load rows of a contiguous HDF5 dataset."""
    import h5py

    def write(path: Path) -> None:
        with h5py.File(path, "w") as file:
            file.create_dataset("x", data=workload.rows())

    return by_batches(Rows(workload, workload.made("rows.h5", write)), workers)


class Table(BatchedDataset):
    """A dataset of Hugging Face, whose batches are Arrow tables."""

    def __init__(self, workload: Workload, folder: Path) -> None:
        super().__init__(workload)
        self.folder = folder

    def open(self) -> Any:
        """Open the dataset."""
        import datasets

        return datasets.load_from_disk(str(self.folder)).with_format("arrow")

    def gather(self, samples: Any) -> Batch:
        """Return a batch as an array."""
        return arrow_values(self.source[samples.tolist()]["x"], self.workload)


def hf(workload: Workload, workers: int) -> Epochs:
    """Load a dataset of Hugging Face from disk."""
    import datasets
    import pyarrow

    def write(folder: Path) -> None:
        columns = pyarrow.chunked_array(list(arrow_columns(workload)))
        table = datasets.table.InMemoryTable(pyarrow.table({"x": columns}))
        datasets.Dataset(table).save_to_disk(str(folder), max_shard_size="500MB")

    return by_batches(Table(workload, workload.made("hf", write)), workers)


class Inputs:
    """A function for LitData's `optimize` that returns a row, a JPEG, or a part of the tokens."""

    def __init__(self, workload: Workload) -> None:
        self.workload = workload

    def __call__(self, i: int) -> Any:
        """Return input `i` as a tensor, or as the bytes of a JPEG."""
        import torch

        if self.workload.is_encoded:
            return self.workload.files()[i].read_bytes()
        rows = self.workload.rows()
        if self.workload.data != "tokens":
            return torch.from_numpy(np.array(rows[i]))
        part = np.array(rows[i * TOKEN_ROWS : (i + 1) * TOKEN_ROWS])
        return torch.from_numpy(part.reshape(-1).view(np.int16))


def litdata(workload: Workload, workers: int) -> Epochs:
    """Load LitData's chunks."""
    import litdata as library
    import torch
    from litdata.streaming.item_loader import TokensLoader

    options: dict[str, Any] = {}
    n_inputs = workload.n_samples
    if workload.data == "tokens":
        options["item_loader"] = TokensLoader(block_size=workload.row_values)
        n_inputs = -(-workload.n_samples // TOKEN_ROWS)

    def write(folder: Path) -> None:
        writing: dict[str, Any] = {"chunk_bytes": "64MB", "num_workers": 1, **options}
        library.optimize(Inputs(workload), list(range(n_inputs)), str(folder), **writing)

    folder = workload.made("litdata", write)
    dataset = library.StreamingDataset(str(folder), shuffle=True, drop_last=False, **options)
    loading: dict[str, Any] = {"batch_size": workload.batch_size, "persistent_workers": True}
    if workload.is_encoded:
        loading["collate_fn"] = lambda contents: torch.from_numpy(decoded(contents, workload))
    loader = library.StreamingDataLoader(dataset, num_workers=workers, **loading)
    return lambda epoch: (batch.numpy().view(workload.dtype) for batch in loader)
