"""A typed program: the values of a batch have the type of the loader's output."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, assert_type

import jax
import numpy as np
import numpy.typing as npt
import torch
from tinygrad.tensor import Tensor

import shardio
from shardio import Batch, ShardLoader
from shardio.outputs import Output


def outputs(path: str, output: Output) -> None:
    assert_type(ShardLoader(path, 8), ShardLoader[Tensor])
    assert_type(ShardLoader(path, 8, output="tinygrad"), ShardLoader[Tensor])
    assert_type(ShardLoader(path, 8, output="numpy"), ShardLoader[npt.NDArray[Any]])
    assert_type(ShardLoader(path, 8, output="torch"), ShardLoader[torch.Tensor])
    assert_type(ShardLoader(path, 8, output="jax"), ShardLoader[jax.Array])
    assert_type(ShardLoader(path, 8, output=output), ShardLoader[Any])


def train(path: str) -> float:
    total = 0.0
    with ShardLoader(
        path, batch_size=8, shuffle=True, seed=1, num_workers=2, tail="drop", output="numpy"
    ) as loader:
        assert_type(iter(loader), Iterator[Batch[npt.NDArray[Any]]])
        for batch in loader:
            assert_type(batch["x"], npt.NDArray[Any])
            assert_type(batch.get("x"), npt.NDArray[Any] | None)
            assert_type(batch.indices, npt.NDArray[np.int64])
            total += float(batch["x"].sum())
        for batch in loader.progress("epoch"):
            assert_type(batch, Batch[npt.NDArray[Any]])
        assert_type(loader.state_dict(), dict[str, Any])
    return total


class EveryOther:
    """A sampler as torch has them."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(0, 100, 2))

    def __len__(self) -> int:
        return 50


def sampled(path: str) -> None:
    ShardLoader(path, 8, sampler=EveryOther())
    ShardLoader(path, 8, sampler=lambda epoch: range(epoch, 100, 2))
    ShardLoader(path, 8, sampler=np.arange(100))


def captions(path: str) -> list[str]:
    """Annotate the loader if some fields are lists."""
    loader: ShardLoader[Any] = ShardLoader(path, 8, output="torch")
    return [caption.strip() for batch in loader for caption in batch["caption"]]


def rows_of(batch: Batch) -> int:
    """Leave out the parameter where the output does not matter."""
    return batch.n_rows


def count(loader: ShardLoader) -> int:
    return sum(rows_of(batch) for batch in loader)


def counts(path: str) -> int:
    return count(ShardLoader(path, 8, output="numpy")) + count(ShardLoader(path, 8))


def connected(address: str) -> None:
    loader = shardio.connect(address, 8, output="torch", shuffle=True, clips={"frames": 8})
    for batch in loader:
        assert_type(batch["x"], torch.Tensor)
    for rows in shardio.connect([address], 8, keys="keys/", rank=0, world_size=2):
        assert_type(rows["x"], Tensor)
