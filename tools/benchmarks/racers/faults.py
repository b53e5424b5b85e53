"""Run one peer with a fault, and print what arrived as a line of JSON.

    python -m benchmarks.racers.faults PEER FOLDER             write the peer's files
    python -m benchmarks.racers.faults PEER FOLDER kill        kill a worker in mid-epoch
    python -m benchmarks.racers.faults PEER FOLDER flip        flip a bit of a sample in its file
    python -m benchmarks.racers.faults PEER FOLDER truncate    cut off the last quarter of that file
    python -m benchmarks.racers.faults PEER FOLDER full        load batches of more than 1 MiB
    python -m benchmarks.racers.faults PEER FOLDER large       the same, where there is memory

FOLDER holds the files of this peer alone. A peer that raises an error ends the program with it.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Final

import numpy as np

from benchmarks import child
from benchmarks.racers.peers import PEERS, loader_of
from benchmarks.racers.workloads import Batch, Epochs, Workload

WORKLOAD: Final = Workload("faults", "faults", (64, 64, 3), (64, 64, 3), "uint8", 400, 8)
FLIPPED: Final = 250
KILLED_AFTER: Final = 2
LARGE_BATCH: Final = 100
"""The samples of a batch that does not fit in /dev/shm, which has 1 MiB for the fault "full"."""
STEP_S: Final = 0.01
"""The time of a training step."""


class NotPossible(Exception):
    """Raised if a fault does not apply to a peer, such as one without worker processes."""


def samples() -> Batch:
    """Return all samples: noise that carries their numbers."""
    rows = np.random.default_rng(0).integers(
        0, 256, (WORKLOAD.n_samples, *WORKLOAD.stored), np.uint8
    )
    numbers = np.arange(len(rows))
    rows[:, 0, 0, 0], rows[:, 0, 0, 1] = numbers & 255, numbers >> 8
    return rows


def write_rows(workload: Workload) -> None:
    """Write the samples where the peers' loaders expect them."""
    workload.folder.mkdir(parents=True)
    np.save(workload.folder / "rows.npy", samples())


def damaged_file(workload: Workload) -> Path:
    """Return the file from which the peer reads the sample: one of its own, or that of the rows."""
    wanted = samples()[FLIPPED].tobytes()
    rows = workload.folder / "rows.npy"
    own = [path for path in sorted(workload.folder.rglob("*")) if path.is_file() and path != rows]
    for path in own or [rows]:
        if wanted in path.read_bytes():
            return path
    raise NotPossible("its files do not contain the bytes of the sample")


def flip(path: Path) -> None:
    """Flip a bit in the middle of the sample."""
    data, wanted = bytearray(path.read_bytes()), samples()[FLIPPED].tobytes()
    data[data.index(wanted) + len(wanted) // 2] ^= 1
    path.write_bytes(data)


def kill_worker() -> None:
    """Kill the descendant that has used the most CPU time, of those without children."""
    below = list(child.descendants(os.getpid()))
    leaves = [pid for pid in below if not list(child.descendants(pid))]
    if not leaves:
        raise NotPossible("it has no worker processes")
    os.kill(max(leaves, key=child.cpu_s), signal.SIGKILL)


def delivered(epochs: Epochs, *, kills: bool) -> dict[str, int]:
    """Run an epoch; return the numbers of missing, damaged and repeated samples."""
    expected, counts, n_damaged = samples(), Counter[int](), 0
    for step, batch in enumerate(epochs(0)):
        rows = np.asarray(batch)
        for number, row in zip(WORKLOAD.numbers(rows).tolist(), rows, strict=True):
            counts[number] += 1
            n_damaged += number >= len(expected) or not np.array_equal(row, expected[number])
        time.sleep(STEP_S)
        if kills and step == KILLED_AFTER:
            kill_worker()
    n_repeated = sum(counts.values()) - len(counts)
    return {
        "missing": WORKLOAD.n_samples - len(counts),
        "damaged": n_damaged,
        "repeated": n_repeated,
    }


def main(arguments: list[str]) -> None:
    """Write the peer's files, or run the peer with a fault."""
    name, folder, *faults = arguments
    workload = Workload(**(WORKLOAD.__dict__ | {"parent": Path(folder)}))
    if not faults:
        write_rows(workload)
        loader_of(PEERS[name])(workload, 2)
        found: dict[str, object] = {}
    else:
        try:
            found = dict(_with_fault(name, workload, faults[0]))
        except NotPossible as error:
            found = {"not possible": str(error)}
    print(json.dumps(found), flush=True)
    os._exit(0)


def _with_fault(name: str, workload: Workload, fault: str) -> dict[str, int]:
    if fault in ("full", "large"):
        workload = replace(workload, batch_size=LARGE_BATCH)
    elif fault != "kill":
        path = damaged_file(workload)
        print(f"damaged: {path.name}", file=sys.stderr, flush=True)
        if fault == "flip":
            flip(path)
        else:
            os.truncate(path, path.stat().st_size * 3 // 4)
    return delivered(loader_of(PEERS[name])(workload, 2), kills=fault == "kill")


if __name__ == "__main__":
    main(sys.argv[1:])
