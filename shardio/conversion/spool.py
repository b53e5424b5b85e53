"""Where samples of one input wait until it is known whether they are kept."""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Mapping, Sequence
from sys import getsizeof
from typing import IO, Any, Final

import numpy as np

from shardio.format.streams import EncodedStream
from shardio.storage.fs import create_unnamed

SPOOL_BYTES: Final = 64 << 20
"""Samples of one input that wait in memory for its end; more go to an unlinked file."""
_PARTS: Final = 64
"""How many pickles become of what waits in memory: one of them is in memory when it is read."""
_PLAIN: Final = frozenset({*np.sctypeDict.values(), bool, bytes, float, int, str, type(None)})
"""Types of values that hold no others: most are one of these, and looked for first."""

Sample = Mapping[str, Any]


class Spool:
    """Holds the samples of one input until it is known whether they are kept.

    In memory up to SPOOL_BYTES, then in an unlinked file in `folder`, which the shards will fill
    anyway: an hour of video is gigabytes of samples. The file is private to this process.
    """

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._file: IO[bytes] | None = None
        self.clear()

    def clear(self) -> None:
        """Forget all samples."""
        self._waiting: list[Sample] = []
        self._waiting_bytes = 0
        self._n_pickles = 0
        self.n_samples = 0
        if self._file is not None:
            self._file.close()
            self._file = None

    def append(self, sample: Sample) -> None:
        """Add a sample; it must not change afterwards."""
        self._waiting.append(sample)
        self._waiting_bytes += getsizeof(sample) + sum(map(_size, sample.values()))
        self.n_samples += 1
        if self._waiting_bytes >= SPOOL_BYTES:
            self._put_away()

    def _put_away(self) -> None:
        if self._file is None:
            self._file = create_unnamed(self._folder)
        n_waiting = len(self._waiting)
        n_together = -(-n_waiting // _PARTS)
        for start in range(0, n_waiting, n_together):
            together = _transposed(self._waiting[start : start + n_together])
            pickle.dump(together, self._file, protocol=5)
            self._n_pickles += 1
        self._waiting, self._waiting_bytes = [], 0

    def __iter__(self) -> Iterator[Sample]:
        """All samples, in order."""
        if self._file is not None:
            self._file.seek(0)
            for _ in range(self._n_pickles):
                names, columns = pickle.load(self._file)
                for values in zip(*columns, strict=True):
                    yield dict(zip(names, values, strict=True)) if names else values[0]
        yield from self._waiting

    def __enter__(self) -> Spool:
        return self

    def __exit__(self, *_: object) -> None:
        self.clear()


def _transposed(samples: Sequence[Sample]) -> tuple[tuple[str, ...], list[Any]]:
    """The names of fields, and the values of each; no name, and the samples, where they differ.

    Numbers and arrays of a kind are one array then: NumPy's pickle takes 5 us for each.
    """
    names = tuple(samples[0])
    if not names or any(sample.keys() != samples[0].keys() for sample in samples):
        return (), [samples]
    return names, [_together([sample[name] for sample in samples]) for name in names]


def _together(values: list[Any]) -> Any:
    """What gives the same values one by one: an array, if they are of one dtype and shape."""
    kinds = set(map(type, values))
    kind = kinds.pop()
    if kinds or not issubclass(kind, np.number | np.bool_ | np.ndarray):
        return values
    first = values[0]
    if kind is np.ndarray:
        # Of an array without dimensions the row would be a scalar; of a dtype of objects, a copy.
        if not first.ndim or first.dtype.kind not in "biuf" or not first.dtype.isnative:
            return values
        if any(each.dtype != first.dtype or each.shape != first.shape for each in values):
            return values
        return np.stack(values)
    return np.array(values, first.dtype) if issubclass(kind, np.generic) else values


def _size(value: object) -> int:
    """About what a value takes in memory: a number of NumPy's 32 bytes, where 8 are the number."""
    if type(value) in _PLAIN:
        return getsizeof(value)
    if isinstance(value, np.ndarray) and value.base is not None:
        return getsizeof(value) + value.nbytes
    if isinstance(value, list | tuple):
        return getsizeof(value) + sum(map(_size, value))
    if isinstance(value, dict):
        return getsizeof(value) + sum(map(_size, value)) + sum(map(_size, value.values()))
    if isinstance(value, EncodedStream):
        return len(value.data) + value.packets.nbytes
    return getsizeof(value)
