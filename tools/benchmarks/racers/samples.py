"""Samples of a workload: one by one, or gathered into a buffer."""

from __future__ import annotations

from typing import Any

import numpy as np

from benchmarks.racers.workloads import Batch, Workload, augmented


class Samples:
    """A map-style dataset, as users write it."""

    def __init__(self, workload: Workload) -> None:
        self.workload = workload
        self.source: Any = None

    def __len__(self) -> int:
        return self.workload.n_samples

    def __getitem__(self, i: int) -> Batch:
        if self.source is None:
            self.source = source(self.workload)
        if self.workload.is_encoded:
            import simplejpeg

            decoded: Batch = simplejpeg.decode_jpeg(self.source[i].read_bytes())
            return decoded
        if self.workload.name == "augment":
            return augmented(self.source[i], np.random.default_rng(i))
        return np.array(self.source[i])


def source(workload: Workload) -> Any:
    """Return the mapped rows of a workload, or its files."""
    return workload.files() if workload.is_encoded else workload.rows()


def fill(workload: Workload, source: Any, samples: Any, out: Batch) -> None:
    """Gather or decode samples into a buffer."""
    if not workload.is_encoded:
        np.take(source, samples, axis=0, out=out[: len(samples)], mode="clip")
        return
    import simplejpeg

    for j, i in enumerate(samples):
        simplejpeg.decode_jpeg(source[i].read_bytes(), buffer=out[j])


def arrow_values(column: Any, workload: Workload) -> Batch:
    """Return an Arrow column of rows as a NumPy array, without a copy if it has one chunk."""
    import pyarrow

    if isinstance(column, pyarrow.ChunkedArray):
        column = column.combine_chunks()
    if pyarrow.types.is_fixed_size_list(column.type):
        found: Batch = column.flatten().to_numpy()
    else:
        n, at = len(column) * workload.row_bytes, column.offset * workload.row_bytes
        found = np.frombuffer(column.buffers()[1], np.uint8, n, at).view(workload.dtype)
    return found.reshape(len(column), *workload.stored)
