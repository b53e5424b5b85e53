"""A typed program: datasets, views and mixtures, and loaders of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any, assert_type

import numpy as np
import numpy.typing as npt

import shardio
from shardio import Schema, ShardDataset, ShardLoader


def datasets(path: Path) -> None:
    with shardio.open(path, subset="train", verify="off") as dataset:
        assert_type(dataset, ShardDataset)
        assert_type(dataset.schema, Schema)
        assert_type(dataset.classes, tuple[str, ...])
        assert_type(len(dataset), int)
        cats = dataset.select(lambda columns: columns["label"] == 3, fields=["label"])
        assert_type(cats, ShardDataset)
        assert_type(cats.subset("val"), ShardDataset)
        assert_type(dataset.select([1, 2, 3]), ShardDataset)
        assert_type(dataset.select(np.arange(3)), ShardDataset)


def views(path: Path) -> None:
    with shardio.open(path) as dataset:
        clips = dataset.clips(frames=8, where="random", per_video=2, size=(64, 64))
        assert_type(clips.sample(0, seed=1), dict[str, Any])
        steps = dataset.windows({"camera": [-0.2, 0.0], "action": range(50)})
        tokens = dataset.pack("tokens", length=128, rest="drop")
        for view in (clips, steps, tokens, clips.subset("train"), clips.select([0])):
            assert_type(view.schema, Schema)
            loader = ShardLoader(view, 8, output="numpy")
            assert_type(next(iter(loader))["x"], npt.NDArray[Any])


def mixtures(path: Path) -> None:
    with shardio.mix({"robots/": 3, "web/": 1}) as mixture, shardio.open(path) as dataset:
        assert_type(len(mixture), int)
        for source in (mixture, dataset, mixture.clips(frames=4), str(path), path):
            loader = ShardLoader(source, 8, output="numpy", sampler=[0, 1])
            assert_type(next(iter(loader))["x"], npt.NDArray[Any])
        weights = shardio.WeightedSampler(np.ones(4), n_draws=100)
        ShardLoader(dataset, 8, sampler=weights, collate={"x": "pad"}, decode={"image": False})
