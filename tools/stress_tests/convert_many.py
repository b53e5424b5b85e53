"""Convert a folder of very many tiny files; kill the conversion and resume it.

    tools/stress many-files [--files N] [--minutes N]

The files are arrays of 16 bytes in 100 folders. One file in 2,500 is empty, and therefore broken.
Every file must be converted or listed as broken, each sample must contain the numbers of its file,
and a conversion that was killed in the middle and resumed must give the same shards. The program
exits with 1 if one of these does not hold, or if all files are converted at less than half the rate
of a tenth of them. With --minutes, everything is repeated until the time is over.
"""

from __future__ import annotations

import hashlib
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

import shardio
from stress_tests.program import Deadline, environment, make_parser

N_FOLDERS = 100
EMPTY_EVERY = 2500
ENOUGH = 0.5


def main(arguments: list[str]) -> int:
    """Convert a tenth and all of them; return the exit code."""
    parser = make_parser("many-files", __doc__)
    parser.add_argument(
        "--files", type=int, default=100_000, help="number of files (default: 100000)"
    )
    options = parser.parse_args(arguments)
    deadline = Deadline(options.minutes)
    code = convert_once(options.files)
    while deadline.is_set and not deadline.is_over():
        code |= convert_once(options.files)
    return code


def convert_once(n_files: int) -> int:
    """Convert new folders of files, kill and resume; return 1 if anything is wrong."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        few, many = n_files // 10, n_files
        make(folder / "few", few)
        make(folder / "many", many)
        rates = {n: n / seconds_of(folder, what) for n, what in ((few, "few"), (many, "many"))}
        faults = [*lost(folder / "few-out", few), *lost(folder / "many-out", many)]
        n_left = kill_and_resume(folder)
        if shards(folder / "many-out") != shards(folder / "killed-out"):
            faults.append("killed and resumed: the shards differ from those of one conversion")
    for n, rate in rates.items():
        print(f"{n:>9,} files: {rate:,.0f} a second")
    print(f"killed with {n_left:,} units finished, and resumed")
    ratio = rates[many] / rates[few]
    print(f"{ratio:.2f} of the rate of a tenth (at least {ENOUGH}); {len(faults)} faults")
    print("".join(f"  {fault}\n" for fault in faults), end="")
    return int(bool(faults) or ratio < ENOUGH)


def make(folder: Path, n_files: int) -> None:
    """Write the files."""
    for n in range(N_FOLDERS):
        (folder / f"c{n:02d}").mkdir(parents=True)
    for n in range(n_files):
        path = folder / f"c{n % N_FOLDERS:02d}" / f"{n:07d}.npy"
        if n % EMPTY_EVERY == EMPTY_EVERY - 1:
            path.touch()
        else:
            np.save(path, numbers(n))


def numbers(n: int) -> np.ndarray:
    """Return the content of the n-th file."""
    return np.array([n, 3 * n, -n, 1], np.int32)


def command(folder: Path, *arguments: str) -> subprocess.Popen[bytes]:
    """Begin a conversion, as a user would."""
    line = [sys.executable, "-m", "shardio", "convert", *arguments, "--quiet"]
    return subprocess.Popen(line, cwd=folder, env=environment(), stderr=subprocess.DEVNULL)


def seconds_of(folder: Path, what: str) -> float:
    """Convert a folder; return the seconds that this took."""
    began = time.perf_counter()
    command(folder, what, f"{what}-out").wait()
    return time.perf_counter() - began


def lost(out: Path, n_files: int) -> list[str]:
    """Return missing and wrong samples of a dataset."""
    faults = []
    n_empty = n_files // EMPTY_EVERY
    with shardio.open(out) as dataset:
        names = set()
        outcomes = [entry["outcome"] for entry in dataset.inputs]
        for sample in dataset:
            names.add(sample["source"])
            n = int(Path(sample["source"]).stem)
            if not np.array_equal(sample["array"], numbers(n)):
                faults.append(f"{out.name}: {sample['source']} holds {sample['array']}")
    found = len(names), outcomes.count("converted"), outcomes.count("broken")
    expected = n_files - n_empty, n_files - n_empty, n_empty
    if found != expected:
        faults.append(f"{out.name}: samples, converted, broken: found {found}, expected {expected}")
    return faults


def kill_and_resume(folder: Path) -> int:
    """Kill a conversion once units are finished, and resume it; return the number of units."""
    out = folder / "killed-out"
    process = command(folder, "many", out.name)
    while process.poll() is None and n_finished(out) < 10:
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    n_left = n_finished(out)
    command(folder, "many", out.name, "--resume").wait()
    return n_left


def n_finished(out: Path) -> int:
    """Return the number of finished units."""
    return len(list(out.glob(".conversion/*/unit.json")))


def shards(out: Path) -> dict[str, str]:
    """Return the digest of each shard, by name."""
    return {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in out.glob("*.shard")
    }
