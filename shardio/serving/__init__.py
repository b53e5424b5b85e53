"""Serve the batches of a dataset to loaders on other machines, over ZeroMQ.

`shardio serve` runs the server that `make_server` returns. `shardio.connect` is the client of such
a server. The public names are imported on first use, because a client does not need the modules of
the server.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shardio.serving.client.connection import make_keys
    from shardio.serving.server import Server, make_server

__all__ = ["Server", "make_keys", "make_server"]


def __getattr__(name: str) -> object:
    """Import a public name from its module on first use (PEP 562)."""
    if name not in __all__:
        raise AttributeError(f"module 'shardio.serving' has no attribute {name!r}")
    module = "client.connection" if name == "make_keys" else "server"
    value: object = getattr(import_module(f"shardio.serving.{module}"), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
