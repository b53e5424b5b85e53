"""The samples of a dataset or a shard by number, field by field."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

import shardio


class SampleReader:
    """The samples of a dataset, or of one shard, that is open."""

    def __init__(self, opened: shardio.ShardDataset | shardio.ShardReader) -> None:
        self._opened = opened

    def __len__(self) -> int:
        return len(self._opened)

    @property
    def schema(self) -> shardio.Schema:
        """Their fields."""
        return self._opened.schema

    @property
    def classes(self) -> tuple[str, ...]:
        """Class names; none of a shard."""
        return self._opened.classes if isinstance(self._opened, shardio.ShardDataset) else ()

    def place(self, number: int, name: str) -> tuple[str, int]:
        """The file that has a field of a sample, and the sample's row there."""
        if isinstance(self._opened, shardio.ShardReader):
            return self._opened.path, number
        shard, row = _located(self._opened, number)
        ((summary, _),) = self._opened.files.of_shard(shard, name)
        return os.path.join(self._opened.path, summary.name), row

    def value(self, number: int, name: str) -> Any:
        """A field of a sample, None where it lacks it; a stream's data is read when it is cut.

        Raises:
            DataError, ShardNotFound, OSError: it cannot be read.
        """
        if isinstance(self._opened, shardio.ShardReader):
            return self._opened.sample(number, [name])[name]
        shard, row = _located(self._opened, number)
        return self._opened.sample(shard, row, [name])[name]


def _located(dataset: shardio.ShardDataset, number: int) -> tuple[int, int]:
    """The shard that has a sample, and its row there."""
    shard = int(dataset.locate(np.array([number]))[0])
    return shard, number - int(dataset.starts[shard])


@contextmanager
def open_samples(path: str) -> Iterator[SampleReader]:
    """Open the dataset or the shard at `path` until the end of `with`.

    Raises:
        ShardioError, OSError: it cannot be opened.
    """
    if os.path.isdir(path):
        with shardio.open(path) as dataset:
            yield SampleReader(dataset)
    else:
        with shardio.ShardReader(path) as reader:
            yield SampleReader(reader)
