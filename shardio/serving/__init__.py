"""Serving the batches of a dataset to loaders on other machines, over ZeroMQ.

`make_server` is what `shardio serve` runs; the other side is `ShardLoader("tcp://host:port", …)`.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from shardio._base.signatures import takes_rng
from shardio._engine.dispatch.staff import StartMethod
from shardio._loading.option_checks import callable_or_none, count
from shardio.dataset.dataset import open_dataset
from shardio.loader import ShardLoader
from shardio.network.keys import make_keys, server_keys
from shardio.serving.server import Server
from shardio.storage.filesystems import Access

__all__ = ["Server", "make_keys", "make_server"]


def make_server(
    dataset: str | os.PathLike[str],
    bind: str,
    *,
    keys: str | os.PathLike[str] | None = None,
    num_workers: int | None = None,
    transform: Callable[..., Any] | None = None,
    batch_transform: Callable[..., Any] | None = None,
    memory_bytes: int | None = None,
    access: Access = "auto",
    start_method: StartMethod = "zygote",
    max_clients: int = 16,
) -> Server:
    """Make a server of a dataset, which the caller owns; `run` serves until `stop`.

    Every client gets a loader of its own, with the options that it asks for and these.

    Args:
        dataset: a folder.
        bind: the address to listen at, as "tcp://127.0.0.1:5555"; with the port `*` any free one.
        keys: the folder that `make_keys` has made; without it only this machine is served.
        num_workers, transform, batch_transform, memory_bytes, access, start_method: as for
            ShardLoader, of each client's loader.
        max_clients: how many clients there may be at a time.

    Raises:
        InvalidArgument: an option is not acceptable, or the address is open to others without keys.
        DatasetNotFound, DatasetCorrupt, …: from opening the dataset.
        UnsupportedEnvironment: pyzmq is missing: pip install '.[zmq]'.
    """
    # What would else be told to the first client only.
    for name, given, function in (
        ("transform", "sample", transform),
        ("batch_transform", "batch", batch_transform),
    ):
        if (found := callable_or_none(name, function)) is not None:
            takes_rng(name, given, found)
    for name, least, value in (("num_workers", 0, num_workers), ("memory_bytes", 1, memory_bytes)):
        if value is not None:
            count(name, value, least)
    path = os.fspath(dataset)
    with open_dataset(path):
        pass  # damage is told before anybody connects

    def make_loader(options: dict[str, Any]) -> ShardLoader:
        return ShardLoader(
            path,
            **options,
            output="numpy",
            num_workers=num_workers,
            transform=transform,
            batch_transform=batch_transform,
            memory_bytes=memory_bytes,
            access=access,
            start_method=start_method,
        )

    return Server(
        make_loader,
        {"transform": _named(transform), "batch_transform": _named(batch_transform)},
        bind,
        keys=None if keys is None else server_keys(keys),
        most_clients=count("max_clients", max_clients, 1),
    )


def _named(function: Callable[..., Any] | None) -> str | None:
    """A function by its name, by which a client can tell that it is another one than before."""
    if function is None:
        return None
    name = getattr(function, "__qualname__", type(function).__name__)
    return f"{getattr(function, '__module__', '')}:{name}"
