"""Measure what each start method costs: the first batch, the batches after it, and memory.

    python tools/dev/bench_starts.py [--rounds N]

In a fresh process for each, over a small dataset in a temporary folder, with two workers: the time
from the call of the constructor to the first batch, of the first loader and of another one while
that is open; batches per second of 64 samples of 6 KB, without a transform and with one of about
30 us that only Python runs; and the memory that the other processes add (their shares of
shared pages included). Prints the best of all rounds. Exits with 1 when the default misses its
bounds.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # for tests/, which no wheel holds

from tests.loading import TWO_FIELDS, two_fields, write_dataset

N_SAMPLES = 3_200
METHODS = ("zygote", "spawn", "thread")
COLUMNS = {
    "first_ms": ("first batch, ms", min),
    "another_ms": ("another loader, ms", min),
    "plain_per_s": ("batches/s", max),
    "transformed_per_s": ("with transform", max),
    "added_mb": ("MB added", min),
}
# Of the default, in ms: see the costs in the reference.
BOUNDS_MS = {"first_ms": 400.0, "another_ms": 100.0}

_TIMED = """
import json, os, sys, time
import numpy
from shardio import ShardLoader

folder, start_method = sys.argv[1:]

def busy(sample, rng):
    n = 0
    for i in range(500): n += i
    return sample

def load(**given):
    given |= {"output": "numpy", "num_workers": 2, "start_method": start_method}
    return ShardLoader(folder, 64, **given)

def first_ms(loaders):
    start = time.perf_counter()
    loaders.append(load())
    next(iter(loaders[-1]))
    return (time.perf_counter() - start) * 1e3

def per_s(loader):
    for _ in loader: pass
    start, n = time.perf_counter(), 0
    for _ in range(2):
        for _ in loader: n += 1
    return n / (time.perf_counter() - start)

def share_kb(pid):
    with open(f"/proc/{pid}/smaps_rollup") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("Pss:"))

def below(pid):
    with open(f"/proc/{pid}/task/{pid}/children") as file:
        for child in map(int, file.read().split()):
            yield child
            yield from below(child)

loaders = []
found = {"first_ms": first_ms(loaders), "another_ms": first_ms(loaders)}
loaders.pop().close()
found["plain_per_s"] = per_s(loaders[0])
found["added_mb"] = sum(map(share_kb, below(os.getpid()))) / 1e3
loaders.pop().close()
with load(transform=busy) as loader:
    found["transformed_per_s"] = per_s(loader)
print(json.dumps(found))
"""


def _measured(folder: str, start_method: str) -> dict[str, float]:
    command = [sys.executable, "-c", _TIMED, folder, start_method]
    done = subprocess.run(command, capture_output=True, check=True, text=True)
    found: dict[str, float] = json.loads(done.stdout)
    return found


def main() -> int:
    """Print a row for every start method; return 1 when the default misses a bound."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=5, help="times each is measured (default: 5)")
    n_rounds = parser.parse_args().rounds
    is_slow = False
    print(" " * 12 + "".join(f"{title:>20}" for title, _ in COLUMNS.values()))
    with tempfile.TemporaryDirectory() as folder:
        path = write_dataset(Path(folder) / "set", N_SAMPLES, 4, TWO_FIELDS, two_fields(N_SAMPLES))
        for start_method in METHODS:
            rounds = [_measured(path, start_method) for _ in range(n_rounds)]
            row = {name: best(each[name] for each in rounds) for name, (_, best) in COLUMNS.items()}
            print(f"{start_method:<12}" + "".join(f"{row[name]:20.0f}" for name in COLUMNS))
            if start_method == "zygote":
                is_slow = any(row[name] > bound for name, bound in BOUNDS_MS.items())
    return int(is_slow)


if __name__ == "__main__":
    sys.exit(main())
