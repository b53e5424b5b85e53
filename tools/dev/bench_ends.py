"""Measure how long the processes of a ShardLoader live on, in whatever way its loop ends.

    python tools/dev/bench_ends.py [--rounds N]

Runs a program with a loader of two workers over a small dataset in a temporary folder. In the body
of its loop, while the workers sleep in a transform, are busy in C with the GIL held, or wait for
blocks, it is ended in every way, and the time is taken until every process of it has gone: zygote,
workers, and main where the way ends it. Processes are found by a mark in their environment, which
is inherited whatever becomes of parents and groups. When the zygote is killed main goes on: its
loop must raise WorkerDied (or deliver every sample, if the workers had nothing to lose); then it
closes the loader, which is timed as well. Prints the worst time of each. Exits with 1 when one is
above a second, a loop ended otherwise, or /dev/shm lists a new name.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

import shardio
from shardio import Array, Schema

LIMIT_S = 1.0
PATIENCE_S = 10.0
N_SAMPLES = 64
SHM = "/dev/shm"
MARK = "SHARDIO_BENCH_ENDS"

WORKERS = {"asleep": "asleep", "busy in C": "busy", "waiting": "None"}

PROGRAM = """
import collections, itertools, sys, time
from shardio import ShardLoader
from shardio._engine import launch

def asleep(sample):
    if sample["label"] >= 8:
        time.sleep(1000)
    return sample

def busy(sample):
    if sample["label"] >= 8:
        collections.deque(itertools.repeat(0), maxlen=0)
    return sample

def load():
    return ShardLoader({folder!r}, 4, output="numpy", num_workers=2, transform={transform})

def here():
    print(launch._current.pid, flush=True)
    sys.stdin.readline()

{then}
print("left", flush=True)
sys.stdin.readline()
"""

LEAVING = {
    "break, close()": """
loader = load()
for batch in loader:
    here()
    break
loader.close()
""",
    "exception": """
def epoch():
    for batch in load():
        here()
        raise ValueError
try:
    epoch()
except ValueError:
    pass
""",
    "end of the with": """
with load() as loader:
    for batch in loader:
        here()
        break
""",
}

STAYING = "for batch in load(): here()"

# The zygote dies while main is in the first batch.
GOING_ON = f"""
loader, rows = load(), []
try:
    for batch in loader:
        rows += batch.indices.tolist()
        if batch.step == 0:
            here()
    print("whole" if rows == list(range({N_SAMPLES})) else rows, flush=True)
except RuntimeError as error:
    print(type(error).__name__, flush=True)
sys.stdin.readline()
loader.close()
"""


class Wrong(Exception):
    """A loop did not end as it should, or something did not go."""


class Program:
    """Runs one program in a group of its own; whatever is left of it is killed by `end`."""

    def __init__(self, code: str) -> None:
        self._mark = uuid.uuid4().hex
        self.main = subprocess.Popen(
            [sys.executable, "-c", code],
            bufsize=0,  # so that what `select` says of a pipe holds for `readline`
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, MARK: self._mark},
            start_new_session=True,
        )

    def line(self) -> str:
        """Read the next line of its output."""
        out = self.main.stdout
        if out is None or not select.select([out], [], [], PATIENCE_S)[0]:
            raise Wrong("the program says nothing")
        return out.readline().decode().strip()

    def go_on(self) -> None:
        """Let it leave `readline`."""
        if self.main.stdin is not None:
            self.main.stdin.write(b"\n")

    def processes(self) -> set[int]:
        """Find its living processes."""
        found = set()
        for folder in Path("/proc").iterdir():
            if folder.name.isdigit():
                with contextlib.suppress(OSError):  # it ended meanwhile, or is another user's
                    if self._mark.encode() in (folder / "environ").read_bytes():
                        found.add(int(folder.name))
        return found

    def end(self) -> None:
        """Kill what is left."""
        for pid in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        with self.main:  # closes its pipes and waits
            self.main.kill()


# Ends a program, given the zygote's pid too, and gives the time that its processes took to go.
End = Callable[[Program, int], float]


@contextlib.contextmanager
def _started(code: str) -> Iterator[Program]:
    program = Program(code)
    try:
        yield program
    finally:
        program.end()


def _seconds_to_go(program: Program, act: Callable[[], object], but: set[int]) -> float:
    """Time from `act` until no process is left, apart from `but`."""
    # A pidfd tells the end at once, where looking through /proc takes milliseconds.
    pidfds = [os.pidfd_open(pid) for pid in program.processes() - but]
    try:
        start_s = time.monotonic()
        act()
        for pidfd in pidfds:
            select.select([pidfd], [], [], max(0.0, start_s + PATIENCE_S - time.monotonic()))
        end_s = time.monotonic()
        while left := program.processes() - but:  # started since
            end_s = time.monotonic()
            if end_s > start_s + PATIENCE_S:
                raise Wrong(f"{len(left)} processes are left after {PATIENCE_S:.0f} s")
            time.sleep(0.002)
        return end_s - start_s
    finally:
        for pidfd in pidfds:
            os.close(pidfd)


def _by_itself(program: Program, _: int) -> float:
    taken_s = _seconds_to_go(program, program.go_on, {program.main.pid})
    if program.line() != "left":
        raise Wrong("the program did not get past its loop")
    return taken_s


def _by_signal(number: signal.Signals, send: Callable[[int, int], None]) -> End:
    def end(program: Program, _: int) -> float:
        return _seconds_to_go(program, lambda: send(program.main.pid, number), set())

    return end


def _by_zygote(program: Program, zygote: int) -> float:
    main = {program.main.pid}
    taken_s = _seconds_to_go(program, lambda: os.kill(zygote, signal.SIGKILL), main)
    program.go_on()
    how = program.line()
    if how not in ("WorkerDied", "whole"):
        raise Wrong(f"without its zygote the loop ended with {how}")
    return max(taken_s, _seconds_to_go(program, program.go_on, main))


ENDS: dict[str, tuple[str, End]] = {
    **{name: (then, _by_itself) for name, then in LEAVING.items()},
    "SIGINT": (STAYING, _by_signal(signal.SIGINT, os.kill)),
    "SIGTERM": (STAYING, _by_signal(signal.SIGTERM, os.kill)),
    "SIGKILL": (STAYING, _by_signal(signal.SIGKILL, os.kill)),
    "SIGKILL of the group": (STAYING, _by_signal(signal.SIGKILL, os.killpg)),
    "SIGKILL of the zygote": (GOING_ON, _by_zygote),
}


def _names_of_others() -> set[str]:
    """Names in /dev/shm that a living process has open or mapped."""
    found: set[str] = set()
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with contextlib.suppress(OSError):
                found.update(str(fd.readlink()) for fd in (folder / "fd").iterdir())
                found.update((folder / "maps").read_text().split())
    return {name.removeprefix(f"{SHM}/") for name in found if name.startswith(f"{SHM}/")}


def _end_once(folder: str, workers: str, way: str) -> float:
    """Run a program and end it; returns the time that its processes took to go."""
    then, end = ENDS[way]
    names = set(os.listdir(SHM))
    with _started(PROGRAM.format(folder=folder, transform=WORKERS[workers], then=then)) as program:
        zygote = program.line()
        if not zygote.isdigit():
            raise Wrong("the program did not reach its loop")
        give_up_s = time.monotonic() + PATIENCE_S
        while len(program.processes()) != 4:  # main, zygote, two workers
            if time.monotonic() > give_up_s:
                raise Wrong(f"expected 4 processes, found {len(program.processes())}")
            time.sleep(0.01)
        time.sleep(0.1)  # by now the workers are where they are to be
        taken_s = end(program, int(zygote))
    # All of this program has gone; on a shared machine others make names as well, and hold them.
    if new := set(os.listdir(SHM)) - names:
        new -= _names_of_others()
    if new:
        raise Wrong(f"{SHM} has new names: {', '.join(sorted(new))}")
    return taken_s


def _write(folder: str) -> None:
    schema = Schema({"image": Array("uint8", (64, 96)), "label": Array("int64")})
    with shardio.DatasetWriter(folder, schema) as writer:
        for i in range(N_SAMPLES):
            writer.append({"image": np.full((64, 96), i, np.uint8), "label": i})


def main() -> int:
    """Print the worst time of every way; return 1 when one is above its limit."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=3, help="times each is measured (default: 3)")
    n_rounds = parser.parse_args().rounds
    worst_s, wrong = 0.0, []
    print(f"worst of {n_rounds}, in ms; bound {LIMIT_S * 1e3:.0f}")
    print(" " * 22 + "".join(f"{workers:>12}" for workers in WORKERS))
    with tempfile.TemporaryDirectory() as folder:
        _write(f"{folder}/set")
        for way in ENDS:
            row = ""
            for workers in WORKERS:
                try:
                    times = [_end_once(f"{folder}/set", workers, way) for _ in range(n_rounds)]
                except Wrong as error:
                    wrong.append(f"{way}, workers {workers}: {error}")
                    row += f"{'wrong':>12}"
                    continue
                worst_s = max(worst_s, *times)
                row += f"{max(times) * 1e3:12.0f}"
            print(f"{way:<22}{row}", flush=True)
    for what in wrong:
        print(what)
    return 1 if wrong or worst_s > LIMIT_S else 0


if __name__ == "__main__":
    sys.exit(main())
