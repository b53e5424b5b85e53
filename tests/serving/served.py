"""Servers for the tests of serving: in a thread of this process, or in a process of their own."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from shardio import ShardLoader
from shardio.serving import Server, make_keys, make_server
from tests.loading import bits

ROOT = Path(__file__).resolve().parents[2]
FREE = "tcp://127.0.0.1:*"
HOW: dict[str, Any] = {"output": "numpy", "shuffle": True, "seed": 3}


@contextlib.contextmanager
def serving(path: str, bind: str = FREE, **options: Any) -> Iterator[Server]:
    """A server in a thread of its own; its loaders have no worker processes."""
    with make_server(path, bind, **{"num_workers": 0, **options}) as server:
        thread = threading.Thread(target=server.run)
        thread.start()
        yield server
    thread.join()


class Process:
    """`shardio serve` as a process; `address` is where it listens."""

    def __init__(self, path: str, bind: str, *options: str, cwd: Path | None = None) -> None:
        command = [sys.executable, "-m", "shardio", "serve", path, "--bind", bind, *options]
        places = [str(ROOT), str(ROOT / "converters"), str(ROOT / "tools")]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(places)}
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, text=True, env=environment, cwd=cwd
        )
        assert self.process.stdout is not None
        self.line = self.process.stdout.readline()
        self.address = self.line.split()[-1]

    def end(self, number: int) -> int:
        """Send it a signal, and give its exit code."""
        self.process.send_signal(number)
        with self.process:
            return self.process.wait()


def keys_between(folder: Path, client: Path, server: Path) -> Path:
    """A folder of a client's keys: its secret is from one, whom it trusts from another."""
    folder.mkdir()
    shutil.copy(client / "client.secret", folder)
    shutil.copy(server / "server.public", folder)
    return folder


def local_bits(path: str, batch_size: int, **options: Any) -> list[Any]:
    """The batches of an epoch as a ShardLoader here has them."""
    with ShardLoader(path, batch_size, num_workers=0, **{**HOW, **options}) as loader:
        return [bits(batch) for batch in loader]


__all__ = [
    "FREE",
    "HOW",
    "Process",
    "Server",
    "keys_between",
    "local_bits",
    "make_keys",
    "make_server",
    "serving",
]
