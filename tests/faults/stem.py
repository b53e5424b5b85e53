"""Programs that are forks of one process, the stem, which has imported shardio.

A new interpreter spends most of its time on imports. A program is a child of this process all the
same, the leader of a session, with an environment and standard streams of its own.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

REQUEST_BYTES = 1 << 17
PR_SET_CHILD_SUBREAPER = 36
_ROOT = Path(__file__).parents[2]


class Stem:
    """The process; `popen` takes the place of `subprocess.Popen`."""

    def __init__(self, control: socket.socket) -> None:
        self._control = control

    def popen(self, command: Sequence[str], **options: Any) -> subprocess.Popen[bytes]:
        """Start a program given as [python, "-c", code]; options are those of Popen."""
        return _Fork(self, command, **options)

    def fork(self, code: str, cwd: Path | None, env: Mapping[str, str], streams: list[int]) -> int:
        """Run a program in a fork; return its pid."""
        with _adopting_orphans():
            request = [code, str(cwd or Path.cwd()), dict(env)]
            socket.send_fds(self._control, [json.dumps(request).encode()], streams)
            return int(self._control.recv(16))


class _Fork(subprocess.Popen[bytes]):
    def __init__(self, stem: Stem, command: Sequence[str], **options: Any) -> None:
        self._stem = stem
        super().__init__(command, **options)

    def _execute_child(self, *given: Any) -> None:
        """Fork, where Popen forks and executes."""
        (_, how, code), cwd, env, pipes = given[0], given[5], given[6], given[10:16]
        assert how == "-c"
        self.pid = self._stem.fork(code, cwd, env, [pipes[0], pipes[3], pipes[5]])
        self._child_created = True
        self._close_pipe_fds(*pipes)  # type: ignore[attr-defined]


@contextmanager
def _adopting_orphans() -> Iterator[None]:
    """Become the parent of descendants whose parents exit."""
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    if prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")
    try:
        yield
    finally:
        prctl(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


@contextmanager
def stem(mark: str, *modules: str) -> Iterator[Stem]:
    """Start a stem, and end it.

    `mark` names the variable that differs in each environment; `modules` are imported as well.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours:
        with theirs:
            command = [sys.executable, __file__, str(theirs.fileno()), mark, *modules]
            variables = {"PYTHONPATH": str(_ROOT), "PYTHONFAULTHANDLER": "1", mark: "0" * 32}
            process = subprocess.Popen(
                command,
                env={**os.environ, **variables, "OPENBLAS_NUM_THREADS": "1"},  # forks have one
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
            )
        with process:
            try:
                yield Stem(ours)
            finally:
                ours.shutdown(socket.SHUT_RDWR)  # which ends it


def _wait_for_program(control: socket.socket) -> tuple[str, str, dict[str, str]] | None:
    """Fork for each program; return the program in the fork, and None at the end."""
    while True:
        data, streams, _, _ = socket.recv_fds(control, REQUEST_BYTES, 3)
        if not data:
            return None
        pid = os.fork()
        if pid == 0:
            parent = os.getpid()
            if os.fork():
                os._exit(0)
            os.setsid()
            for number, stream in enumerate(streams):
                os.dup2(stream, number)
                os.close(stream)
            while os.getppid() == parent:
                time.sleep(0.0002)
            control.send(b"%d" % os.getpid())
            return tuple(json.loads(data))
        for stream in streams:
            os.close(stream)
        os.waitpid(pid, 0)


def _set_environment(variables: dict[str, str], mark: str) -> None:
    """Set the environment, and the mark in what /proc shows of it."""
    shown = Path("/proc/self/environ").read_bytes()
    start = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[47])
    with open("/proc/self/mem", "r+b", buffering=0) as memory:
        memory.seek(start + shown.index(f"{mark}=".encode()) + len(mark) + 1)
        memory.write(variables[mark].encode())
    os.environ.clear()
    os.environ.update(variables)


def _main(control_fd: int, mark: str, modules: Sequence[str]) -> None:
    for name in ("shardio.loader", "shardio._workers.processes.zygote", *modules):
        importlib.import_module(name)
    n_threads = len(os.listdir("/proc/self/task"))
    assert n_threads == 1, f"{n_threads} threads: a fork would lack some"
    gc.collect()
    gc.freeze()  # collections in forks would copy what all share
    with socket.socket(fileno=control_fd) as control:
        program = _wait_for_program(control)
    if program is None:
        return
    code, cwd, variables = program
    _set_environment(variables, mark)
    os.chdir(cwd)
    sys.stdin, sys.stdout = open(0, closefd=False), open(1, "w", closefd=False)
    sys.stderr = open(2, "w", 1, errors="backslashreplace", closefd=False)
    sys.argv, sys.path[0] = ["-c"], ""
    sys.modules["__main__"] = main = ModuleType("__main__")
    exec(compile(code, "<string>", "exec"), main.__dict__)


if __name__ == "__main__":
    _main(int(sys.argv[1]), sys.argv[2], sys.argv[3:])
