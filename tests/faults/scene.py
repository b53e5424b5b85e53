"""Run programs that end in every way, and find what they leave behind."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

_ROOT = Path(__file__).parents[2]
MARK = "SHARDIO_TEST_SCENE"

# Transforms that let the first two batches of 4 pass and then get stuck: asleep, or in a call of C
# that holds the GIL.
STUCK = """
import collections, itertools, time

def linger(sample):
    if sample["label"] >= 8:
        time.sleep(1000)
    return sample

def spin(sample):
    if sample["label"] >= 8:
        collections.deque(itertools.repeat(0), maxlen=0)
    return sample
"""

# Generous: a test waits this long only when it is about to fail.
PATIENCE_S = 20.0

PAUSE_S = 0.05
"""The time between two looks at all processes, each of which takes 1 ms of a CPU or more."""


class Scene:
    """A process group in which programs run, and every process that descends from them.

    Descendants are found by a mark in the environment, which forks and executed programs inherit:
    parent and group are lost when a parent dies. `popen` starts programs, as
    `subprocess.Popen` does.
    """

    def __init__(self, popen: Callable[..., subprocess.Popen[bytes]] = subprocess.Popen) -> None:
        self.mark = uuid.uuid4().hex
        self._popen = popen
        self.mains: list[subprocess.Popen[bytes]] = []

    def start(
        self, arguments: list[str], *, stdin: bytes | None = b"", cwd: Path | None = None
    ) -> subprocess.Popen[bytes]:
        """Start Python with `arguments`; read its output with `line`.

        Its standard input holds `stdin` and ends; None keeps it open.
        """
        marks = {MARK: self.mark, "PYTHONPATH": str(_ROOT), "PYTHONFAULTHANDLER": "1"}
        main = self._popen(
            [sys.executable, *arguments],
            bufsize=0,  # so that what `select` says of a pipe holds for `readline`
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, **marks},
            cwd=cwd,
            start_new_session=True,
        )
        self.mains.append(main)
        if stdin is not None and main.stdin is not None:
            main.stdin.write(stdin)
            main.stdin.close()
            main.stdin = None  # or `communicate` would use it again
        return main

    def processes(self) -> dict[int, str]:
        """Return the pid and name of every living process of this scene."""
        found, mark = {}, self.mark.encode()
        for pid in filter(str.isdigit, os.listdir("/proc")):
            with contextlib.suppress(OSError):  # it ended while we looked
                with open(f"/proc/{pid}/environ", "rb", buffering=0) as environ:
                    if mark in environ.read():
                        found[int(pid)] = Path(f"/proc/{pid}/comm").read_text().strip()
        return found

    def wait_for_processes(self, n: int) -> None:
        """Wait until there are n processes.

        The last worker may still be starting when the first works.
        """
        end_s = time.monotonic() + PATIENCE_S
        while len(found := self.processes()) != n:
            if time.monotonic() > end_s:
                raise AssertionError(f"expected {n} processes, found {found}")
            time.sleep(PAUSE_S)

    def left_after(self, *, but: set[int] | None = None) -> dict[int, str]:
        """Wait until all processes but `but` are gone; return those that stay."""
        end_s = time.monotonic() + PATIENCE_S
        left = {}
        while time.monotonic() < end_s:
            left = {pid: name for pid, name in self.processes().items() if pid not in (but or ())}
            if not left:
                break
            time.sleep(PAUSE_S)
        return left

    def files_in_dev_shm(self) -> list[str]:
        """List what the living processes have open or mapped under /dev/shm, but files of tests."""
        found: list[str] = []
        for pid in self.processes():
            with contextlib.suppress(OSError):
                found += [str(fd.readlink()) for fd in Path(f"/proc/{pid}/fd").iterdir()]
                found += Path(f"/proc/{pid}/maps").read_text().split()
        ours = os.environ.get("PYTEST_DEBUG_TEMPROOT", "/tmp")  # the tests' own files
        return [name for name in found if name.startswith("/dev/shm") and ours not in name]

    def end(self) -> None:
        """Kill the remaining processes, so that a failing test leaves none to the next one."""
        for pid in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for main in self.mains:
            with main:  # closes its pipes and waits
                main.kill()


@contextlib.contextmanager
def scene(popen: Callable[..., subprocess.Popen[bytes]] = subprocess.Popen) -> Iterator[Scene]:
    """Yield a scene and end it."""
    stage = Scene(popen)
    try:
        yield stage
    finally:
        stage.end()


def line(main: subprocess.Popen[bytes]) -> str:
    """Return the next line of output; without one, return what standard error has.

    A program that is silent for long is aborted, which makes it print where it was.
    """
    if main.stdout is None or main.stderr is None:
        raise ValueError("the program has no pipes")
    if select.select([main.stdout], [], [], 3 * PATIENCE_S)[0]:
        if text := main.stdout.readline().decode().strip():
            return text
    else:
        main.send_signal(signal.SIGABRT)
    with contextlib.suppress(subprocess.TimeoutExpired):
        main.wait(PATIENCE_S)
    return f"no output; standard error: {_said_so_far(main.stderr)}"


def _said_so_far(pipe: IO[bytes]) -> str:
    """Read what a pipe holds now.

    Its end may never come, since forks of the program hold it too.
    """
    said = b""
    while select.select([pipe], [], [], 0)[0] and (more := pipe.read(1 << 16)):
        said += more
    return said.decode(errors="replace")
