"""Servers for the tests of serving: in a thread of this process, or in a process of their own."""

from __future__ import annotations

import contextlib
import os
import resource
import select
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from shardio.serving import Server, make_server
from shardio.serving.client.protocol import parse
from tests.loading import PATIENCE_S, bits, make_loader

ROOT = Path(__file__).resolve().parents[2]
FREE = "tcp://127.0.0.1:*"
HOW: dict[str, Any] = {"output": "numpy", "shuffle": True, "seed": 3}


@contextlib.contextmanager
def serving(path: str, bind: str = FREE, **options: Any) -> Iterator[Server]:
    """Run a server in a thread; its loaders have no worker processes."""
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


class Relay:
    """A way to a server that is cut, again and again, after so many bytes of what it says."""

    def __init__(self, address: str, *n_bytes: int) -> None:
        there = parse(address)
        self._there, self.cuts = (there.host, int(there.port)), list(n_bytes)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                here, _ = self._listener.accept()
                with here, socket.create_connection(self._there) as there:
                    self._pass_on(here, there)

    def _pass_on(self, here: socket.socket, there: socket.socket) -> None:
        left = self.cuts.pop(0) if self.cuts else None
        while True:
            for ready in select.select([here, there], [], [])[0]:
                content = ready.recv(4096)
                if ready is there and left is not None:
                    content, left = content[:left], left - len(content)
                if not content:
                    return
                (there if ready is here else here).sendall(content)
                if left is not None and left <= 0:
                    return

    def close(self) -> None:
        """Let nobody in any more; whoever is connected must have gone."""
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join()


def keys_between(folder: Path, client: Path, server: Path) -> Path:
    """Make a folder of a client's keys that mixes two: the secret of one, the trust of another."""
    folder.mkdir()
    shutil.copy(client / "client.secret", folder)
    shutil.copy(server / "server.public", folder)
    return folder


@contextlib.contextmanager
def few_files(n_more: int) -> Iterator[None]:
    """Let this process open so many files more, about."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(map(int, os.listdir("/proc/self/fd")))
    with contextlib.ExitStack() as opened:
        while (fd := os.open(os.devnull, os.O_RDONLY)) <= highest:
            opened.callback(os.close, fd)
        os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 1 + n_more, hard))
        opened.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        yield


def wait_until(is_so: Callable[[], object]) -> None:
    """Wait for what another thread does."""
    end_s = time.monotonic() + PATIENCE_S
    while not is_so():
        assert time.monotonic() < end_s
        time.sleep(0.01)


def local_bits(path: str, batch_size: int, **options: Any) -> list[Any]:
    """Return the batches of an epoch of a local ShardLoader."""
    with make_loader(path, batch_size, num_workers=0, **{**HOW, **options}) as loader:
        return [bits(batch) for batch in loader]


class Gate:
    """A transform that keeps the labels, and waits while the gate is closed."""

    def __init__(self) -> None:
        self.opened = threading.Event()
        self.opened.set()

    def __call__(self, sample: dict[str, Any]) -> dict[str, Any]:
        self.opened.wait()
        return {"label": sample["label"]}


def refuse_sample_7(sample: dict[str, Any]) -> dict[str, Any]:
    """Keep the labels, but of one sample."""
    if sample["label"] == 7:
        raise KeyError("seven")
    return {"label": sample["label"]}
