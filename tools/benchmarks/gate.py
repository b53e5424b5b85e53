"""The gate: CPU times of a batch, as ratios to those at an earlier commit.

Each tree has processes of its own. The processes of both trees run one epoch at a time, in turns,
so that the load of the machine affects both trees alike; the cheapest epochs are compared. Before
`tools/bench --gate` fails, it adds rounds in new processes.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, Final

from benchmarks import child, data
from benchmarks.child import NotMeasured
from benchmarks.data import BATCH, DatasetSpec, drain
from benchmarks.harness import Bench, Lane, Lanes, Limit, case
from shardio import ShardLoader

ROWS: Final = data.KINDS["raw, 2 KB"]
FRAMES: Final = DatasetSpec(data.FRAMES, data.frame, 512)
PATHS: Final = {
    "frames, in this process": 1.08,
    "rows, in this process": 1.08,
    "rows, in a worker": 1.16,
    "rows, in main": 1.16,
}
"""The maximum ratio of each CPU time to that of the base.

For equal trees on a busy machine, the ratios were at most 1.00 in this process, and 1.09 elsewhere.
If `Filler.fill` took 20 % longer, they were 1.12, 1.15, 1.26 and 1.01; if `ColumnGather.gather`
took 20 % longer, they were 1.11, 1.12, 1.24 and 1.02.
"""
UNIT: Final = "CPU µs/batch"
N_PROCESSES: Final = 3
"""The number of processes of each tree, one after another. The layout of memory, and so the speed,
differs between processes by chance."""


@case(
    *(
        Limit(f"{path}, now", UNIT, f"{path}, base", most, of_best=True)
        for path, most in PATHS.items()
    ),
    rounds=40,
    for_gate=True,
)
def batches(bench: Bench, *, commit: str = "") -> Lanes:
    """Compare the CPU time of batches with an earlier commit, by default where HEAD left main."""
    folders = bench.cache.dataset("rates", ROWS), bench.cache.dataset("frames", FRAMES)
    try:
        sha = base_commit(commit)
    except NotMeasured as reason:
        if commit:
            raise
        bench.note(f"nothing is compared, because there is no earlier commit: {reason}")
        return
    trees = {"base": bench.temporary(), "now": child.ROOT}
    _export(sha, trees["base"])
    bench.note(f"base: {sha}")
    for number in range(N_PROCESSES):
        names = sorted(trees, reverse=number % 2 == 1)
        with ExitStack() as stack:
            lanes: dict[str, Lane] = {}
            for name, tree in trees.items():
                try:
                    measure = stack.enter_context(_measuring(tree, *folders))
                except EOFError as error:
                    if name == "now":
                        raise
                    bench.note(f"nothing is compared, because the base cannot be measured: {error}")
                    return
                lanes |= {f"{path}, {name}": partial(measure, path) for path in PATHS}
            yield {f"{path}, {name}": lanes[f"{path}, {name}"] for path in PATHS for name in names}


@contextlib.contextmanager
def _measuring(
    tree: Path, rows: Path, frames: Path
) -> Iterator[Callable[[str], Mapping[str, float]]]:
    """Yield a function that runs an epoch of a path in a process, with the library of a tree.

    Raises:
        EOFError: the process has ended.
    """
    program = f"import sys; from {__name__} import serve; serve(*sys.argv[1:])"
    with subprocess.Popen(
        [sys.executable, "-c", program, str(rows), str(frames)],
        env=child.environment(tree),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:

        def read() -> Any:
            line = process.stdout.readline() if process.stdout else ""
            if not line:
                raise EOFError(f"the process that measures {tree} has ended; see its error above")
            return json.loads(line)

        def measure(path: str) -> Mapping[str, float]:
            print(path, file=process.stdin, flush=True)
            return {UNIT: read()}

        read()
        yield measure
        if process.stdin:
            process.stdin.close()


def serve(rows: str, frames: str) -> None:
    """Run an epoch of the path that each line names; print its CPU time in µs per batch."""
    options: dict[str, Any] = {"output": "numpy", "shuffle": True}
    with (
        ShardLoader(frames, BATCH, num_workers=0, reuse=True, **options) as of_frames,
        ShardLoader(rows, BATCH, num_workers=0, **options) as of_rows,
        ShardLoader(rows, BATCH, num_workers=1, **options) as by_worker,
    ):
        drain(by_worker)
        workers = list(child.descendants(os.getpid()))
        ways: list[tuple[ShardLoader, Callable[[], float]]] = [
            (of_frames, time.process_time),
            (of_rows, time.process_time),
            (by_worker, lambda: sum(map(child.cpu_s, workers))),
            (by_worker, time.process_time),
        ]
        for loader, _ in ways * 3:
            drain(loader)
        print(json.dumps(len(workers)), flush=True)
        for line in sys.stdin:
            loader, cpu_s = ways[[*PATHS].index(line.strip())]
            before_s = cpu_s()
            n = drain(loader)
            print(json.dumps((cpu_s() - before_s) / n * 1e6), flush=True)


def _git(*arguments: str) -> bytes:
    command = ["git", "-C", str(child.ROOT), *arguments]
    done = subprocess.run(command, capture_output=True, check=False)
    if done.returncode:
        raise NotMeasured(f"git {arguments[0]}: {done.stderr.decode().strip()}")
    return done.stdout


def base_commit(name: str) -> str:
    """Return the commit to compare with: the one where HEAD left main or, on main, its parent."""
    head = _git("rev-parse", "HEAD")
    for branch in [] if name else ["origin/main", "main"]:
        try:
            found = _git("merge-base", "HEAD", branch)
        except NotMeasured:  # there is no such branch
            continue
        if found != head:
            return found.decode().strip()
    return _git("rev-parse", name or "HEAD~1").decode().strip()


def _export(sha: str, folder: Path) -> None:
    """Write the library as it was at a commit."""
    with tarfile.open(fileobj=io.BytesIO(_git("archive", sha, "shardio", "converters"))) as tar:
        tar.extractall(folder, filter="data")
