"""Decode a dataset for loaders on other machines.

Another machine connects with shardio.connect("tcp://host:port", …). The server has a loader for
each such client, with the client's options. Ctrl-C or SIGTERM ends the server. Without --keys, only
this machine is served. `--make-keys DIR` creates the keys of the server in DIR, and in it a folder
with the keys of a client: copy this folder to the client.

Examples:
    shardio serve out/                            # to programs on this machine
    shardio serve --make-keys keys/               # once, before serving others
    shardio serve out/ --bind 'tcp://*:5555' --keys keys/
"""

from __future__ import annotations

import argparse
import importlib
import os
import signal
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any, Final

from shardio import InvalidArgument
from shardio.serving import Server, make_keys, make_server
from shardio_tools.output import escaped, flush, print_out

_BIND: Final = "tcp://127.0.0.1:5555"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command to its parser."""
    add = parser.add_argument
    add("path", metavar="DATASET", nargs="?", help="the dataset to serve")
    add("--bind", metavar="ADDRESS", default=_BIND, help=f"address to listen at (default: {_BIND})")
    add(
        "--keys", metavar="DIR", help="the server's keys; without them, only this machine is served"
    )
    add(
        "--make-keys",
        metavar="DIR",
        help="create keys for the server and a client in DIR, and exit",
    )
    add("--client", metavar="NAME", help="name of the client for --make-keys (default: client)")
    add("--workers", type=int, metavar="N", help="processes per client (default: one per CPU)")
    add(
        "--transform",
        metavar="MODULE:FUNCTION",
        help="transform for every sample, run in the workers",
    )
    add(
        "--batch-transform",
        metavar="MODULE:FUNCTION",
        help="transform for every batch, run in the workers",
    )
    add(
        "--memory",
        type=int,
        metavar="N",
        help="bytes of buffer memory per client (default: half of the free memory)",
    )
    add(
        "--max-clients",
        type=int,
        metavar="N",
        default=16,
        help="maximum number of concurrent clients (default: 16)",
    )
    add("--quiet", action="store_true", help="print errors only")


def run(options: argparse.Namespace) -> int:
    """Serve until a signal arrives, and return the exit code."""
    if options.make_keys is not None:
        if options.path is not None:
            raise InvalidArgument("serve: --make-keys DIR only creates keys: omit DATASET")
        folder = make_keys(options.make_keys, options.client or "client")
        if not options.quiet:
            place = escaped(str(folder))
            print_out(f"created keys: copy {place} to the client, and pass it as keys=")
            print_out(f"and serve with --keys {escaped(options.make_keys)}")
        return 0
    if options.client is not None:
        raise InvalidArgument("serve: --client needs --make-keys DIR")
    if options.path is None:
        raise InvalidArgument("serve: DATASET is missing (or pass --make-keys DIR)")
    with make_server(
        options.path,
        options.bind,
        keys=options.keys,
        num_workers=options.workers,
        transform=_function("--transform", options.transform),
        batch_transform=_function("--batch-transform", options.batch_transform),
        memory_bytes=options.memory,
        max_clients=options.max_clients,
    ) as server:
        _serve(server, None if options.quiet else escaped(options.path))
    return 0


def _serve(server: Server, name: str | None) -> None:
    def stop(number: int, frame: FrameType | None) -> None:
        server.stop()

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        if name is not None:
            print_out(f"serving {name} at {server.address}")
            flush()
        server.run()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _function(option: str, name: str | None) -> Callable[..., Any] | None:
    """Import a function by name; its module may be in the current folder."""
    if name is None:
        return None
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        module, _, attribute = name.partition(":")
        found: Callable[..., Any] = getattr(importlib.import_module(module), attribute)
        if not callable(found):
            raise TypeError("not a function")
    except (ImportError, AttributeError, ValueError, TypeError) as error:
        raise InvalidArgument(
            f"{option} must be an importable module:function; found {name!r}: {error}"
        ) from error
    return found
