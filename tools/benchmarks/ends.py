"""Ends of loaders: how long the processes of a loop outlive it, by the way in which it ends."""

from __future__ import annotations

import os
import select
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Final

from benchmarks.data import PLAIN
from benchmarks.harness import Bench, Lanes, Limit, WrongResult, case
from tests.faults.scene import PATIENCE_S, STUCK, Scene, line, scene

N_SAMPLES: Final = 64
ZYGOTE: Final = "shardio-zygote"
BEGUN_S: Final = 1.5
"""After this time, workers have begun their work."""
WORKERS: Final = {"asleep": "linger", "busy in C": "spin", "waiting": "None"}

PROGRAM: Final = f"""{STUCK}
import sys
from shardio import ShardLoader

def load():
    return ShardLoader({{folder!r}}, 4, output="numpy", num_workers=2, transform={{transform}},
                       start_method={{start_method!r}})

def here():
    print("here", flush=True)
    sys.stdin.readline()

{{then}}
print("left", flush=True)
sys.stdin.readline()
"""
LEAVING: Final = {
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
STAYING: Final = "for batch in load(): here()"
# The zygote dies while main is in the first batch.
GOING_ON: Final = f"""
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

End = Callable[[Scene, int], float]
"""A function of a scene and its zygote's pid that ends the program of the scene.

It returns the seconds until the processes have exited.
"""


def _go_on(stage: Scene) -> None:
    """Let the program return from `readline`."""
    (main,) = stage.mains
    if main.stdin is not None:
        main.stdin.write(b"\n")


def _seconds_to_go(stage: Scene, act: Callable[[], object], but: set[int]) -> float:
    """Return the seconds from `act` until all processes, except those in `but`, have exited."""
    # A pidfd reports an exit at once; a search of /proc takes milliseconds.
    pidfds = [os.pidfd_open(pid) for pid in stage.processes().keys() - but]
    try:
        start_s = time.monotonic()
        act()
        for pidfd in pidfds:
            select.select([pidfd], [], [], max(0.0, start_s + PATIENCE_S - time.monotonic()))
        end_s = time.monotonic()
        while left := stage.processes().keys() - but:  # started in the meantime
            end_s = time.monotonic()
            if end_s > start_s + PATIENCE_S:
                raise WrongResult(f"{len(left)} processes are left after {PATIENCE_S:.0f} s")
            time.sleep(0.002)
        return end_s - start_s
    finally:
        for pidfd in pidfds:
            os.close(pidfd)


def _by_itself(stage: Scene, _: int) -> float:
    (main,) = stage.mains
    taken_s = _seconds_to_go(stage, lambda: _go_on(stage), {main.pid})
    if line(main) != "left":
        raise WrongResult("the program did not get past its loop")
    return taken_s


def _by_signal(number: signal.Signals, send: Callable[[int, int], None]) -> End:
    def end(stage: Scene, _: int) -> float:
        return _seconds_to_go(stage, lambda: send(stage.mains[0].pid, number), set())

    return end


def _by_zygote(stage: Scene, zygote: int) -> float:
    """Kill the zygote; the loop must continue with another one, or raise if that is killed too."""
    (main,) = stage.mains
    taken_s = _seconds_to_go(stage, lambda: os.kill(zygote, signal.SIGKILL), {main.pid})
    _go_on(stage)
    # Other workers repeat the lost work. If that does not end, kill the new zygote too: the loop
    # then reports an error.
    while main.stdout is not None and not select.select([main.stdout], [], [], BEGUN_S)[0]:
        for pid, name in stage.processes().items():
            if name == ZYGOTE:
                os.kill(pid, signal.SIGKILL)
    if (how := line(main)) not in ("WorkerDied", "whole"):
        raise WrongResult(f"without its zygote the loop ended with {how}")
    return max(taken_s, _seconds_to_go(stage, lambda: _go_on(stage), {main.pid}))


ENDS: Final[dict[str, tuple[str, End]]] = {
    **{name: (then, _by_itself) for name, then in LEAVING.items()},
    "SIGINT": (STAYING, _by_signal(signal.SIGINT, os.kill)),
    "SIGTERM": (STAYING, _by_signal(signal.SIGTERM, os.kill)),
    "SIGKILL": (STAYING, _by_signal(signal.SIGKILL, os.kill)),
    "SIGKILL of the group": (STAYING, _by_signal(signal.SIGKILL, os.killpg)),
    "SIGKILL of the zygote": (GOING_ON, _by_zygote),
}


@case(
    *(Limit(f"{way}, {workers}", "ms", at_most=1000) for way in ENDS for workers in WORKERS),
    rounds=3,
)
def loops(bench: Bench, *, start_method: str = "zygote") -> Lanes:
    """Measure the time until all processes have exited, by the way a loop ends."""
    folder = bench.cache.dataset("plain", replace(PLAIN, n=N_SAMPLES))
    yield {
        f"{way}, {workers}": partial(_end_once, folder, workers, way, start_method)
        for way in ENDS
        for workers in WORKERS
    }


def _end_once(folder: Path, workers: str, way: str, start_method: str) -> Mapping[str, float]:
    then, end = ENDS[way]
    how = {"transform": WORKERS[workers], "start_method": start_method}
    code = PROGRAM.format(folder=str(folder), then=then, **how)
    with scene() as stage:
        said = line(stage.start(["-c", code], stdin=None))
        if said != "here":
            raise WrongResult(f"the program did not reach its loop: {said}")
        stage.wait_for_processes(4)  # main, zygote, two workers
        time.sleep(0.1)  # until the workers sleep, compute or wait, as their transform does
        if files := stage.files_in_dev_shm():
            raise WrongResult(f"its processes have files in /dev/shm: {', '.join(sorted(files))}")
        (zygote,) = [pid for pid, name in stage.processes().items() if name == ZYGOTE]
        return {"ms": end(stage, zygote) * 1e3}
