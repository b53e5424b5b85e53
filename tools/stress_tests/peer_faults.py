"""Show what loaders do with a killed worker, a flipped bit and a truncated file.

    tools/stress peers [--minutes N]

Prints a table of shardio, torch's DataLoader and webdataset, as far as they are installed: 400
arrays, shuffled, in batches of 8, with two workers. A worker is killed after the sixth batch; a bit
is flipped in the middle of a file, or the last quarter is cut off, before the loader opens it.
Exits with 1 unless shardio delivers all samples after a kill, and raises an error that names the
file after damage. With --minutes, everything is repeated until the time is over.
"""

from __future__ import annotations

import importlib.util
import io
import os
import signal
import subprocess
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

import shardio
from shardio import Array, DatasetWriter, Schema
from stress_tests.program import Deadline, command, environment, make_parser

N_SAMPLES: Final = 400
FLIPPED: Final = 250
KILLED_AFTER: Final = 6
TIMEOUT_S: Final = 60
MARKS: Final = {"file": "faults-data", "sample": "sample"}
FAULTS: Final = ("a worker is killed", "a bit is flipped", "a file is truncated")

Samples = npt.NDArray[np.uint8]


def main(arguments: list[str]) -> int:
    """Print the table; return the exit code."""
    parser = make_parser("peers", __doc__)
    parser.add_argument("--run", nargs=2, metavar=("LOADER", "FAULT"), help="one run, by number")
    options = parser.parse_args(arguments)
    if options.run is not None:
        run(options.run[0], int(options.run[1]))
        return 0
    deadline = Deadline(options.minutes)
    code = show_table()
    while deadline.is_set and not deadline.is_over():
        code |= show_table()
    return code


def show_table() -> int:
    """Print what each loader does with each fault; return 1 if shardio does not do as it should."""
    found: dict[str, list[str]] = {}
    for name, (_, _, package) in LOADERS.items():
        if importlib.util.find_spec(package) is not None:
            found[name] = [outcome(name, fault) for fault in range(len(FAULTS))]
            print(name)
            for fault, text in zip(FAULTS, found[name], strict=True):
                print(f"  {fault:<22}{text}", flush=True)
    killed, *damaged = found["shardio"]
    good = killed == "all samples" and all(text.startswith("error, with file") for text in damaged)
    return int(not good)


def outcome(name: str, fault: int) -> str:
    """Return a text about what a loader does with a fault."""
    try:
        done = subprocess.run(
            command("peers", "--run", name, str(fault)),
            env=environment(),
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return "hangs"
    if done.returncode == 0:
        return done.stdout.strip()
    error = done.stderr.strip().splitlines()[-1] if done.stderr.strip() else ""
    names = [word for word in ("file", "sample") if MARKS[word] in error]
    return "error" + (f", with {' and '.join(names)}" if names else "")


def run(name: str, fault: int) -> None:
    """Load an epoch with a fault, and print what arrived."""
    write, load, _ = LOADERS[name]
    rng = np.random.default_rng(0)
    rows = rng.integers(0, 256, (N_SAMPLES, 64, 64), dtype=np.uint8)
    rows[:, 0, 0], rows[:, 0, 1] = np.arange(N_SAMPLES) & 255, np.arange(N_SAMPLES) >> 8
    with tempfile.TemporaryDirectory(suffix="faults-data") as folder:
        path = write(Path(folder), rows)
        if fault == 1:
            flip(path, rows[FLIPPED])
        elif fault == 2:
            os.truncate(path, path.stat().st_size * 3 // 4)
        found: dict[int, Samples] = {}
        for step, batch in enumerate(load(Path(folder))):
            found |= {int(row[0, 0]) + 256 * int(row[0, 1]): row.copy() for row in batch}
            time.sleep(0.01)  # a training step
            if fault == 0 and step == KILLED_AFTER:
                os.kill(leaf_process(), signal.SIGKILL)
    wrong = sum(not np.array_equal(row, rows[i]) for i, row in found.items())
    counts = {"missing": N_SAMPLES - len(found), "damaged": wrong}
    texts = [f"{n} {what}" for what, n in counts.items() if n]
    print(f"delivered: {', '.join(texts)}" if texts else "all samples")


def flip(path: Path, row: Samples) -> None:
    """Flip a bit of a row in the file that contains it."""
    data = bytearray(path.read_bytes())
    data[data.index(row.tobytes()) + row.size // 2] ^= 1
    path.write_bytes(data)


def leaf_process() -> int:
    """Return the latest descendant of this process that has no child processes."""
    parents: dict[int, int] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
        except OSError:  # it has just exited
            continue
    below = {os.getpid()}
    while more := {pid for pid, parent in parents.items() if parent in below} - below:
        below |= more
    leaves = below - {os.getpid()} - {*parents.values()}
    return max(leaves)


# --- the loaders ---------------------------------------------------------------------------------


def write_shards(folder: Path, rows: Samples) -> Path:
    """Write a dataset; return the path of its shard."""
    with DatasetWriter(folder / "set", Schema({"x": Array("uint8", (64, 64))})) as writer:
        for row in rows:
            writer.append({"x": row})
    (shard,) = (folder / "set").glob("*.shard")
    return shard


def load_shards(folder: Path) -> Iterator[Samples]:
    """Yield the batches of shardio."""
    options: dict[str, Any] = {"shuffle": True, "num_workers": 2, "output": "numpy"}
    with shardio.ShardLoader(folder / "set", 8, **options) as loader:
        for batch in loader:
            yield batch["x"]


def write_array(folder: Path, rows: Samples) -> Path:
    """Write a .npy file; return its path."""
    np.save(folder / "x.npy", rows)
    return folder / "x.npy"


class Rows:
    """A torch dataset of the rows of a memory-mapped .npy file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.rows: Samples | None = None

    def __len__(self) -> int:
        return N_SAMPLES

    def __getitem__(self, i: int) -> Samples:
        if self.rows is None:
            self.rows = np.load(self.path, mmap_mode="r")
        return np.array(self.rows[i])


def load_array(folder: Path) -> Iterator[Samples]:
    """Yield the batches of torch's DataLoader."""
    from torch.utils.data import DataLoader

    for batch in DataLoader(Rows(folder / "x.npy"), 8, shuffle=True, num_workers=2):
        yield batch.numpy()


def write_tars(folder: Path, rows: Samples) -> Path:
    """Write four tars; return the path of the third."""
    for i in range(4):
        with tarfile.open(folder / f"{i}.tar", "w") as tar:
            for j in range(i * N_SAMPLES // 4, (i + 1) * N_SAMPLES // 4):
                data = io.BytesIO()
                np.save(data, rows[j])
                member = tarfile.TarInfo(f"{j:04d}.npy")
                member.size = data.tell()
                data.seek(0)
                tar.addfile(member, data)
    return folder / "2.tar"


def load_tars(folder: Path) -> Iterator[Samples]:
    """Yield the batches of webdataset."""
    import webdataset

    tars = [str(folder / f"{i}.tar") for i in range(4)]
    dataset = webdataset.WebDataset(tars, shardshuffle=4).shuffle(50).decode().to_tuple("npy")
    for (batch,) in webdataset.WebLoader(dataset, batch_size=8, num_workers=2):
        yield batch.numpy()


LOADERS: Final[
    dict[str, tuple[Callable[[Path, Samples], Path], Callable[[Path], Iterator[Samples]], str]]
] = {
    "shardio": (write_shards, load_shards, "shardio"),
    "torch": (write_array, load_array, "torch"),
    "webdataset": (write_tars, load_tars, "webdataset"),
}
"""For each loader: how its files are written, how they are loaded, and the package it needs."""
