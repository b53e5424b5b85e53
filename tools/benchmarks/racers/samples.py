"""Samples of a work: one by one, or gathered into a buffer."""

from __future__ import annotations

from typing import Any

import numpy as np

from benchmarks.racers.works import Batch, Work, augmented


class Samples:
    """A map-style dataset, as users write it."""

    def __init__(self, work: Work) -> None:
        self.work = work
        self.source: Any = None

    def __len__(self) -> int:
        return self.work.n_samples

    def __getitem__(self, i: int) -> Batch:
        if self.source is None:
            self.source = source(self.work)
        if self.work.is_encoded:
            import simplejpeg

            decoded: Batch = simplejpeg.decode_jpeg(self.source[i].read_bytes())
            return decoded
        if self.work.name == "augment":
            return augmented(self.source[i], np.random.default_rng(i))
        return np.array(self.source[i])


def source(work: Work) -> Any:
    """Return the mapped rows of a work, or its files."""
    return work.files() if work.is_encoded else work.rows()


def fill(work: Work, source: Any, samples: Any, out: Batch) -> None:
    """Gather or decode samples into a buffer."""
    if not work.is_encoded:
        np.take(source, samples, axis=0, out=out[: len(samples)], mode="clip")
        return
    import simplejpeg

    for j, i in enumerate(samples):
        simplejpeg.decode_jpeg(source[i].read_bytes(), buffer=out[j])


def arrow_values(column: Any, work: Work) -> Batch:
    """Return an Arrow column of rows as a NumPy array, without a copy if it has one chunk."""
    import pyarrow

    if isinstance(column, pyarrow.ChunkedArray):
        column = column.combine_chunks()
    if pyarrow.types.is_fixed_size_list(column.type):
        found: Batch = column.flatten().to_numpy()
    else:
        n, at = len(column) * work.row_bytes, column.offset * work.row_bytes
        found = np.frombuffer(column.buffers()[1], np.uint8, n, at).view(work.dtype)
    return found.reshape(len(column), *work.stored)
