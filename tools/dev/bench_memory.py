"""See whether memory stays what it is over a million batches, in main and in the workers.

    DEV=CPU python tools/dev/bench_memory.py [--batches N]

Makes a small dataset in a temporary folder and iterates over it again and again, in each lane, and
once more with records of varying size and a transform, for a hundredth of the batches. Resident
memory is read from /proc after a fifth of the batches and at the end; open descriptors are
counted in main. Exits with 1 when a process has grown by more than LIMIT_MIB, or has more
descriptors.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np

import shardio
from shardio import Array, Schema, ShardLoader, Text

N_SAMPLES: Final = 16_384
BATCH: Final = 16
LIMIT_MIB: Final = 4.0
SCHEMA: Final = Schema({"image": Array("uint8", (256,)), "label": Array("int64"), "note": Text()})


def doubled(sample: dict[str, Any]) -> dict[str, Any]:
    """Run as a transform: a fixed field and one that varies come out."""
    return {"image": sample["image"], "note": sample["note"] * 2}


LANES: Final[dict[str, tuple[float, dict[str, Any]]]] = {
    "arrays": (1.0, {"output": "numpy", "fields": ["image", "label"]}),
    "tensors": (0.1, {"fields": ["image", "label"]}),
    "tensors, reuse": (1.0, {"reuse": True, "fields": ["image", "label"]}),
    "records": (0.1, {"output": "numpy"}),
    "a transform": (0.01, {"output": "numpy", "transform": doubled}),
}
"""Share of the batches and options of each lane."""


def _samples() -> Iterator[dict[str, Any]]:
    image = np.zeros(256, np.uint8)
    return ({"image": image, "label": i, "note": "x" * (i % 99)} for i in range(N_SAMPLES))


def resident_mib(pid: int) -> float:
    """Return the memory of a process, with blocks and mapped files separate."""
    status = Path(f"/proc/{pid}/status").read_text()
    line = next(line for line in status.splitlines() if line.startswith("RssAnon:"))
    return int(line.split()[1]) / 1024


def figures(loader: ShardLoader) -> dict[str, float]:
    """Resident memory by process, and main's open descriptors but those of blocks."""
    backend: Any = loader._engine._backend
    pids: list[int] = backend._crew.pids()
    found = {"main": resident_mib(os.getpid())}
    found |= {f"worker {i}": resident_mib(pid) for i, pid in enumerate(pids)}
    # Blocks are made when they are first wanted, and have two each.
    n_of_blocks = 2 * len(loader._engine.pool)
    return found | {"descriptors": float(len(os.listdir("/proc/self/fd")) - n_of_blocks)}


def grown(folder: str, n_batches: int, options: dict[str, Any]) -> dict[str, float]:
    """Return the growth of each figure from a fifth of the batches to the end."""
    n_done = 0
    before: dict[str, float] = {}
    with ShardLoader(folder, BATCH, shuffle=True, num_workers=2, **options) as loader:
        while n_done < n_batches:
            for batch in loader:
                n_done += 1
                del batch
            if not before and n_done * 5 >= n_batches:
                before = figures(loader)
        after = figures(loader)
    return {name: after[name] - before[name] for name in after}


def main() -> int:
    """Print what has grown; return 1 when it is too much."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--batches", type=int, default=1_000_000)
    arguments = parser.parse_args()
    is_flat = True
    with tempfile.TemporaryDirectory() as parent:
        folder = os.path.join(parent, "set")
        with shardio.DatasetWriter(folder, SCHEMA) as writer:
            for sample in _samples():
                writer.append(sample)
        for lane, (part, options) in LANES.items():
            n_batches = max(2 * N_SAMPLES // BATCH, int(arguments.batches * part))
            start_s = time.perf_counter()
            found = grown(folder, n_batches, options)
            taken_s = time.perf_counter() - start_s
            descriptors = found.pop("descriptors")
            said = ", ".join(f"{name} {mib:+.1f} MiB" for name, mib in found.items())
            print(
                f"{lane:15} {n_batches:>9,} batches in {taken_s:4.0f} s: {said}, "
                f"descriptors {descriptors:+.0f}",
                flush=True,
            )
            is_flat &= max(found.values()) <= LIMIT_MIB and descriptors <= 0
    return 0 if is_flat else 1


if __name__ == "__main__":
    sys.exit(main())
