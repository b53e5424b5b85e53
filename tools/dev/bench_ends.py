"""Measure how long the processes of a ShardLoader live on, in whatever way its loop ends.

    python tools/dev/bench_ends.py [--rounds N] [--start-method METHOD]

Runs a program with a loader of two workers over a small dataset in a temporary folder. In the body
of its loop, while the workers sleep in a transform, are busy in C with the GIL held, or wait for
blocks, it is ended in every way, and the time is taken until every process of it has gone: zygote,
workers, and main where the way ends it. When the zygote is killed main goes on with another: its
loop must deliver every sample, or raise WorkerDied when that one is killed too; then it closes the
loader, which is timed as well. Prints the worst time of each. Exits with 1 when one is above a
second, a loop ended otherwise, or a process uses a name in /dev/shm.
"""

from __future__ import annotations

import argparse
import os
import select
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # for tests/, which no wheel holds

from tests.faults.scene import PATIENCE_S, STUCK, Scene, line, scene
from tests.loading import TWO_FIELDS, two_fields, write_dataset

LIMIT_S = 1.0
N_SAMPLES = 64
ZYGOTE = "shardio-zygote"
_BEGUN_S = 1.5
"""By then workers have begun with what they are to do."""

WORKERS = {"asleep": "linger", "busy in C": "spin", "waiting": "None"}

PROGRAM = f"""{STUCK}
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


# Ends the program of a scene, given the zygote's pid too; gives the time its processes took to go.
End = Callable[[Scene, int], float]


def _go_on(stage: Scene) -> None:
    """Let the program leave `readline`."""
    (main,) = stage.mains
    if main.stdin is not None:
        main.stdin.write(b"\n")


def _seconds_to_go(stage: Scene, act: Callable[[], object], but: set[int]) -> float:
    """Time from `act` until no process is left, apart from `but`."""
    # A pidfd tells the end at once, where looking through /proc takes milliseconds.
    pidfds = [os.pidfd_open(pid) for pid in stage.processes().keys() - but]
    try:
        start_s = time.monotonic()
        act()
        for pidfd in pidfds:
            select.select([pidfd], [], [], max(0.0, start_s + PATIENCE_S - time.monotonic()))
        end_s = time.monotonic()
        while left := stage.processes().keys() - but:  # started since
            end_s = time.monotonic()
            if end_s > start_s + PATIENCE_S:
                raise Wrong(f"{len(left)} processes are left after {PATIENCE_S:.0f} s")
            time.sleep(0.002)
        return end_s - start_s
    finally:
        for pidfd in pidfds:
            os.close(pidfd)


def _by_itself(stage: Scene, _: int) -> float:
    (main,) = stage.mains
    taken_s = _seconds_to_go(stage, lambda: _go_on(stage), {main.pid})
    if line(main) != "left":
        raise Wrong("the program did not get past its loop")
    return taken_s


def _by_signal(number: signal.Signals, send: Callable[[int, int], None]) -> End:
    def end(stage: Scene, _: int) -> float:
        return _seconds_to_go(stage, lambda: send(stage.mains[0].pid, number), set())

    return end


def _by_zygote(stage: Scene, zygote: int) -> float:
    (main,) = stage.mains
    taken_s = _seconds_to_go(stage, lambda: os.kill(zygote, signal.SIGKILL), {main.pid})
    _go_on(stage)
    # Other workers do what was lost, which may take for ever: of a second death it is an error.
    while main.stdout is not None and not select.select([main.stdout], [], [], _BEGUN_S)[0]:
        for pid, name in stage.processes().items():
            if name == ZYGOTE:
                os.kill(pid, signal.SIGKILL)
    how = line(main)
    if how not in ("WorkerDied", "whole"):
        raise Wrong(f"without its zygote the loop ended with {how}")
    return max(taken_s, _seconds_to_go(stage, lambda: _go_on(stage), {main.pid}))


ENDS: dict[str, tuple[str, End]] = {
    **{name: (then, _by_itself) for name, then in LEAVING.items()},
    "SIGINT": (STAYING, _by_signal(signal.SIGINT, os.kill)),
    "SIGTERM": (STAYING, _by_signal(signal.SIGTERM, os.kill)),
    "SIGKILL": (STAYING, _by_signal(signal.SIGKILL, os.kill)),
    "SIGKILL of the group": (STAYING, _by_signal(signal.SIGKILL, os.killpg)),
    "SIGKILL of the zygote": (GOING_ON, _by_zygote),
}


def _end_once(folder: str, workers: str, way: str, start_method: str) -> float:
    """Run a program and end it; returns the time that its processes took to go."""
    then, end = ENDS[way]
    code = PROGRAM.format(
        folder=folder, transform=WORKERS[workers], then=then, start_method=start_method
    )
    with scene() as stage:
        said = line(stage.start(["-c", code], stdin=None))
        if said != "here":
            raise Wrong(f"the program did not reach its loop: {said}")
        stage.wait_for_processes(4)  # main, zygote, two workers
        time.sleep(0.1)  # by now the workers are where they are to be
        if files := stage.files_in_dev_shm():
            raise Wrong(f"its processes use names in /dev/shm: {', '.join(sorted(files))}")
        names = stage.processes()
        (zygote,) = [pid for pid, name in names.items() if name == ZYGOTE]
        return end(stage, zygote)


def main() -> int:
    """Print the worst time of every way; return 1 when one is above its limit."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=3, help="times each is measured (default: 3)")
    parser.add_argument(
        "--start-method",
        choices=("zygote", "spawn"),
        default="zygote",
        help="how workers start (default: zygote)",
    )
    asked = parser.parse_args()
    n_rounds, start_method = asked.rounds, asked.start_method
    worst_s, wrong = 0.0, []
    print(f"worst of {n_rounds}, in ms; bound {LIMIT_S * 1e3:.0f}")
    print(" " * 22 + "".join(f"{workers:>12}" for workers in WORKERS))
    with tempfile.TemporaryDirectory() as folder:
        write_dataset(Path(folder) / "set", N_SAMPLES, 1, TWO_FIELDS, two_fields(N_SAMPLES))
        for way in ENDS:
            row = ""
            for workers in WORKERS:
                try:
                    given = f"{folder}/set", workers, way, start_method
                    times = [_end_once(*given) for _ in range(n_rounds)]
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
