"""Samples of a workload: one by one, or gathered into a buffer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any, Final

import numpy as np

from benchmarks.racers.workloads import Batch, Workload, augmented

FILES_PER_COLUMN: Final = 512


class Samples:
    """A map-style dataset, as users write it."""

    def __init__(self, workload: Workload) -> None:
        self.workload = workload
        self.source: Any = None

    def __reduce__(self) -> Any:
        """Pickle without the rows: a memory map would be pickled with all its bytes."""
        return Samples, (self.workload,)

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


@cache
def source(workload: Workload) -> Any:
    """Return the mapped rows of a workload, or its files; each process opens them once."""
    return workload.files() if workload.is_encoded else workload.rows()


def fill(workload: Workload, source: Any, samples: Any, out: Batch) -> None:
    """Gather or decode samples into a buffer."""
    if not workload.is_encoded:
        np.take(source, samples, axis=0, out=out[: len(samples)], mode="clip")
        return
    import simplejpeg

    for j, i in enumerate(samples):
        simplejpeg.decode_jpeg(source[i].read_bytes(), buffer=out[j])


def decoded(contents: Sequence[Any], workload: Workload) -> Batch:
    """Return JPEGs, decoded into one array."""
    import simplejpeg

    out = np.empty((len(contents), *workload.shape), workload.dtype)
    for content, frame in zip(contents, out, strict=True):
        simplejpeg.decode_jpeg(content, buffer=frame)
    return out


def arrow_columns(workload: Workload) -> Iterator[Any]:
    """Yield all samples as Arrow columns: about 16 MB of rows, or FILES_PER_COLUMN JPEGs."""
    import pyarrow

    if workload.is_encoded:
        files = workload.files()
        for i in range(0, len(files), FILES_PER_COLUMN):
            contents = [path.read_bytes() for path in files[i : i + FILES_PER_COLUMN]]
            yield pyarrow.array(contents, pyarrow.binary())
        return
    for rows in workload.chunks():
        values = pyarrow.array(rows.reshape(-1))
        yield pyarrow.FixedSizeListArray.from_arrays(values, workload.row_values)


def arrow_values(column: Any, workload: Workload) -> Batch:
    """Return an Arrow column as a NumPy array; JPEGs are decoded, rows in one chunk not copied."""
    import pyarrow

    if isinstance(column, pyarrow.ChunkedArray):
        column = column.combine_chunks()
    if workload.is_encoded:
        buffers = [np.frombuffer(content.as_buffer(), np.uint8) for content in column]
        return decoded(buffers, workload)
    if pyarrow.types.is_fixed_size_list(column.type):
        found: Batch = column.flatten().to_numpy()
    else:
        n, at = len(column) * workload.row_bytes, column.offset * workload.row_bytes
        found = np.frombuffer(column.buffers()[1], np.uint8, n, at).view(workload.dtype)
    return found.reshape(len(column), *workload.stored)
