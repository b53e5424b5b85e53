"""Race load_with_workers against tinyloader's own, with arrays of 1 MB and two workers.

    python tools/dev/bench_items.py [ROUNDS]

Each lane is a process of its own that loads the same items with the same loader, whose arrays
cost next to nothing to make; `post_process` looks at every page of them. The lanes take turns; the
median of the ratios of a round counts. tinyloader runs in the Python that SHARDIO_PEERS_PYTHON
names, by default this one (`pip install '.[peers]'`); without shared memory, as with it what
it gives is wrong. Exits with 1 when ours is less than 3 times as fast, or not exact, with 3 when
there is no tinyloader.

With `--lane NAME` it is one such process, and prints items per second, and how many were wrong.
"""

from __future__ import annotations

import importlib
import json
import os
import statistics
import subprocess
import sys
import time
from typing import Any

import numpy as np

N_ITEMS, N_WARM, N_WORKERS = 600, 20, 2
N_BYTES, PAGE = 1_000_000, 4096
MIN = 3.0
LANES = ("shardio", "tinyloader")


def _lane(name: str) -> tuple[float, int]:
    """Items per second, once workers are warm, and how many were not what they should be."""
    home = {"shardio": "shardio.items", "tinyloader": "tinyloader.loader"}[name]
    module: Any = importlib.import_module(home)

    class Arrays(module.Loader):  # type: ignore[misc]  # of either
        def make_request(self, item: int) -> int:
            return item

        def load(self, request: int) -> tuple[Any, ...]:
            return np.full(N_BYTES, request % 251, np.uint8), np.array(request)

        def post_process(self, response: tuple[Any, ...]) -> tuple[bool, int]:
            array, number = response
            is_right = len(array) == N_BYTES and (array[::PAGE] == number % 251).all()
            return bool(is_right), int(number)

    globals()["Arrays"] = Arrays  # tinyloader's workers look for it by its name
    Arrays.__qualname__ = "Arrays"
    n_wrong, start_s = 0, 0.0
    with module.load_with_workers(Arrays(), range(N_ITEMS), N_WORKERS) as generator:
        for i, (is_right, number) in enumerate(generator):
            n_wrong += not is_right or number != i
            if i == N_WARM:
                start_s = time.perf_counter()
    n_wrong += abs(N_ITEMS - 1 - i)
    return (N_ITEMS - 1 - N_WARM) / (time.perf_counter() - start_s), n_wrong


def _run(name: str) -> tuple[float, int]:
    python = os.environ.get("SHARDIO_PEERS_PYTHON", sys.executable)
    python = python if name == "tinyloader" else sys.executable
    command = [python, __file__, "--lane", name]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True)
    rate, n_wrong = json.loads(done.stdout)
    return rate, n_wrong


def _has_tinyloader() -> bool:
    python = os.environ.get("SHARDIO_PEERS_PYTHON", sys.executable)
    command = [python, "-c", "import tinyloader.loader"]
    return subprocess.run(command, stderr=subprocess.DEVNULL, check=False).returncode == 0


def main() -> int:
    """Take turns; returns the exit code."""
    if sys.argv[1:2] == ["--lane"]:
        print(json.dumps(_lane(sys.argv[2])))
        return 0
    if not _has_tinyloader():
        print("tinyloader is not there: pip install '.[peers]'", file=sys.stderr)
        return 3
    ratios, n_wrong = [], dict.fromkeys(LANES, 0)
    for _ in range(int(sys.argv[1]) if len(sys.argv) > 1 else 5):
        rates = {}
        for lane in LANES:
            rates[lane], wrong = _run(lane)
            n_wrong[lane] += wrong
        ratios.append(rates["shardio"] / rates["tinyloader"])
        said = "  ".join(f"{lane} {rate:8,.0f} items/s" for lane, rate in rates.items())
        print(f"{said}  ratio {ratios[-1]:5.2f}")
    ratio = statistics.median(ratios)
    is_fine = ratio >= MIN and not n_wrong["shardio"]
    print(f"median ratio {ratio:.2f}, at least {MIN}; wrong items: {n_wrong}")
    return 0 if is_fine else 1


if __name__ == "__main__":
    sys.exit(main())
