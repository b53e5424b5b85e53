"""A typed program with mistakes; each is a type error, which its comment expects."""

from __future__ import annotations

import shardio
from shardio import ShardLoader


def loaders(path: str) -> None:
    ShardLoader(path, 8, shufle=True)  # type: ignore[call-overload]
    ShardLoader(path, 8, drop_last=True)  # type: ignore[call-overload]
    ShardLoader(path, "8")  # type: ignore[call-overload]
    ShardLoader(path, 8, tail="cut")  # type: ignore[call-overload]
    ShardLoader(path, 8, output="pytorch")  # type: ignore[call-overload]
    ShardLoader(path, 8, output="numpy", seed="1")  # type: ignore[call-overload]
    ShardLoader([path], 8)  # type: ignore[call-overload]
    loader = ShardLoader(path, 8, output="numpy")
    for batch in loader:
        batch["x"].cuda()  # type: ignore[attr-defined]
    loader.set_epoch(1)  # type: ignore[attr-defined]


def connections(address: str) -> None:
    shardio.connect(address, 8, num_workers=2)  # type: ignore[call-overload]
    shardio.connect(address, 8, key="keys/")  # type: ignore[call-overload]


def conversions() -> None:
    shardio.convert("videos/", "clips/", framez=8)  # type: ignore[call-overload]
    shardio.convert("videos/", "clips/", frames="8")  # type: ignore[call-overload]
    shardio.convert("videos/", "clips/", store="auto", disk="200GB")  # type: ignore[call-overload]
    shardio.convert("videos/", "clips/", kind="videos", framez=8)  # type: ignore[call-overload]
    shardio.convert("videos/", "clips/", kind="videos", frames="8")  # type: ignore[call-overload]
    shardio.convert("images/", "out/", kind="images", frames=8)  # type: ignore[call-overload]
    shardio.convert("images/", "out/", on_error="raise")  # type: ignore[call-overload]


def datasets(path: str) -> None:
    dataset = shardio.open(path, subset="train", split="val")  # type: ignore[call-arg]
    dataset.clips(num_frames=8)  # type: ignore[call-arg]
    dataset.clips(where="somewhere")  # type: ignore[arg-type]
    dataset.map(len)  # type: ignore[attr-defined]
    dataset.clips().map(len)  # type: ignore[attr-defined]
