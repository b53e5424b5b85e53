"""Run scripts in forks of one process that has imported what they need of other packages.

A new interpreter spends most of its time on these imports. Of shardio, each script imports what it
names: nothing of it is imported ahead.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

# What shardio imports of other packages, and what tinygrad imports once it computes.
AHEAD = """
av av.audio.codeccontext av.video.codeccontext cloudpickle numpy rich tinygrad xxhash zstandard
tinygrad.renderer.cstyle tinygrad.renderer.isa.x86 tinygrad.renderer.llvmir tinygrad.renderer.nir
tinygrad.runtime.autogen.libc tinygrad.runtime.support.compiler_cpu tinygrad.runtime.support.elf
tinygrad.runtime.support.hcq
""".split()
REQUEST_BYTES = 1 << 20


class Preloaded:
    """A process that runs scripts, one after the other, in forks of its own."""

    def __init__(self, control: socket.socket) -> None:
        self._control = control

    def run(self, code: str, cwd: Path) -> subprocess.CompletedProcess[str]:
        """Run a script as `python -` does, in a folder, with an empty standard input."""
        with ExitStack() as opened:
            ends = [os.pipe(), os.pipe()]
            readers = [opened.enter_context(os.fdopen(read, "rb")) for read, _ in ends]
            request = json.dumps({"code": code, "cwd": str(cwd)}).encode()
            try:
                socket.send_fds(self._control, [request], [write for _, write in ends])
            finally:
                for _, write in ends:
                    os.close(write)
            with ThreadPoolExecutor(len(readers)) as threads:
                out, error = threads.map(lambda reader: reader.read().decode(), readers)
        exit_code = int(self._control.recv(REQUEST_BYTES))
        return subprocess.CompletedProcess(["python", "-"], exit_code, out, error)


@contextmanager
def preloaded(environment: Mapping[str, str]) -> Iterator[Preloaded]:
    """Start such a process in an environment, and end it."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for each in (ours, theirs):
        each.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, REQUEST_BYTES)
    with ours:
        with theirs:
            process = subprocess.Popen(
                [sys.executable, __file__, str(theirs.fileno())],
                env={**environment, "OPENBLAS_NUM_THREADS": "1"},  # a fork has one thread
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
            )
        with process:
            yield Preloaded(ours)
            ours.shutdown(socket.SHUT_RDWR)


def _wait_for_script(control: socket.socket) -> dict[str, Any] | None:
    """Fork for each request; return the request in the fork, and None at the end."""
    while True:
        data, fds, _, _ = socket.recv_fds(control, REQUEST_BYTES, 2)
        if not data:
            return None
        pid = os.fork()
        if pid == 0:
            for fd, standard in zip(fds, (1, 2), strict=True):
                os.dup2(fd, standard)
                os.close(fd)
            return json.loads(data)  # type: ignore[no-any-return]
        for fd in fds:
            os.close(fd)
        control.send(b"%d" % os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))


def _main() -> None:
    for name in AHEAD:
        __import__(name)
    n_threads = len(os.listdir("/proc/self/task"))
    assert n_threads == 1, f"{n_threads} threads: a fork would lack some"
    with socket.socket(fileno=int(sys.argv[1])) as control:
        request = _wait_for_script(control)
    if request is not None:
        os.chdir(request["cwd"])
        sys.argv = ["-"]
        sys.path[0] = ""
        sys.modules["__main__"] = main = ModuleType("__main__")
        exec(compile(request["code"], "<stdin>", "exec"), main.__dict__)


if __name__ == "__main__":
    _main()
