"""Count what a batch costs that no clock shows alone: page faults, system calls, Python frames.

    python tools/dev/bench_faces.py

Makes a dataset for each kind of samples in a temporary folder. A worker's side fills batches of 32
in a process of its own, as a worker does; main's side iterates over a loader with one worker.
Page faults are those of `getrusage`, per batch of the first epoch and of the third. Frames and
calls into C are counted by `sys.setprofile` in a later epoch, which is not timed. System calls are
counted by strace, if it is there: over 16 and over 8 epochs, of which the difference counts.
"""

from __future__ import annotations

import argparse
import json
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Final

import numpy as np

import shardio
from shardio import Array, Bytes, Schema, ShardLoader, Text
from shardio._engine.filling.batch_spec import BatchSpec, EpochPlan
from shardio._engine.filling.filler import Filler
from shardio._workers.processes.blocks import Block
from shardio.batch.layout import layout_for_samples
from shardio.order.ranks import RankPartition
from shardio.samples.shard_dataset import ShardDataset
from shardio.samples.view import RowView

BATCH: Final = 32
FEW, MANY = 8, 16
"""Epochs of a count of system calls."""
_WORDS: Final = [f"word{i} " for i in range(997)]


def _text(i: int) -> str:
    return "".join(_WORDS[(i * 31 + 7 * k * k) % 997] for k in range(300))


def _small(i: int) -> dict[str, Any]:
    return {"image": np.full(2048, i % 251, np.uint8), "label": i}


def _five(i: int) -> dict[str, Any]:
    return _small(i) | {"weight": i / 7, "box": np.zeros(4, np.float32), "note": _text(i)}


SMALL: Final = {"image": Array("uint8", (2048,)), "label": Array("int64")}
FIVE: Final = {"weight": Array("float64"), "box": Array("float32", (4,)), "note": Text()}

Case = tuple[dict[str, Any], Callable[[int], dict[str, Any]], int]
CASES: Final[dict[str, Case]] = {
    "raw, 2 KB": (SMALL, _small, 4096),
    "raw, 150 KB": (
        {"image": Array("uint8", (224, 224, 3))},
        lambda i: {"image": np.full((224, 224, 3), i % 251, np.uint8)},
        512,
    ),
    "records of about 2 KB": ({"blob": Bytes()}, lambda i: {"blob": _text(i).encode()}, 4096),
    "the same, zstd": ({"note": Text(codec="zstd")}, lambda i: {"note": _text(i)}, 4096),
    "the same, zstd with a dictionary": (
        {"note": Text(codec="zstd_dictionary")},
        lambda i: {"note": _text(i)},
        4096,
    ),
    "five fields": (SMALL | FIVE, _five, 4096),
    "raw, 2 KB, a transform of 10 µs": (SMALL, _small, 4096),
}


def ten_microseconds(sample: dict[str, Any]) -> dict[str, Any]:
    """Be busy for about as long."""
    end_ns = time.perf_counter_ns() + 10_000
    while time.perf_counter_ns() < end_ns:
        pass
    return sample


def _transform_of(case: str) -> Callable[..., Any] | None:
    return ten_microseconds if "transform" in case else None


def _epochs_of_worker(case: str, folder: str) -> Iterable[Callable[[], int]]:
    """Whole epochs, as a worker fills them; each returns how many batches it had."""
    with ShardDataset(folder) as dataset:
        transform, n = _transform_of(case), len(dataset)
        batch_spec = BatchSpec(
            source=dataset.worker_source,
            fields=tuple(dataset.schema),
            block_rows=BATCH,
            n_samples=n,
            is_full_shuffle=True,
            seed=0,
            transform=transform,
        )
        filler = Filler(batch_spec, RowView(dataset))
        layout = layout_for_samples(filler.schemas().samples, BATCH)
        blocks = [Block(number, 2 * layout.heap) for number in range(4)]
        epoch = 0

        def fill() -> int:
            plan = EpochPlan(epoch, RankPartition(n, 0, BATCH))
            for step in range(plan.partition.stop_step):
                filler.fill(layout, blocks[step % len(blocks)], plan, step)
            return plan.partition.stop_step

        while True:
            yield fill
            epoch += 1


def _epochs_of_main(case: str, folder: str) -> Iterable[Callable[[], int]]:
    """Whole epochs of a loop over a loader with one worker."""
    with ShardLoader(
        folder, BATCH, shuffle=True, num_workers=1, output="numpy", transform=_transform_of(case)
    ) as loader:

        def iterate() -> int:
            return sum(1 for _ in loader)

        while True:
            yield iterate


SIDES: Final = {"worker": _epochs_of_worker, "main": _epochs_of_main}


def _faults() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def count(case: str, side: str, folder: str) -> dict[str, float]:
    """Count faults of the first epoch and of the third, and frames and calls of the fourth."""
    faults, epochs = [], iter(SIDES[side](case, folder))
    for _ in range(3):
        epoch = next(epochs)
        before = _faults()
        n_batches = epoch()
        faults.append((_faults() - before) / n_batches)
    events: Counter[str] = Counter()
    epoch = next(epochs)
    sys.setprofile(lambda frame, event, argument: events.update((event,)))
    n_batches = epoch()
    sys.setprofile(None)
    return {
        "first faults": faults[0],
        "faults": faults[2],
        "frames": events["call"] / n_batches,
        "calls into C": events["c_call"] / n_batches,
    }


def run_epochs(case: str, side: str, folder: str, n_epochs: int) -> None:
    """Run so many epochs, and say how many batches one has."""
    n_batches = 0
    for _, epoch in zip(range(n_epochs), SIDES[side](case, folder), strict=False):
        n_batches = epoch()
    print(json.dumps(n_batches))


def _itself(*arguments: str) -> Any:
    return json.loads(
        subprocess.run(arguments, check=True, capture_output=True, text=True).stdout.splitlines()[
            -1
        ]
    )


def system_calls(case: str, side: str, folder: str) -> float | None:
    """Return the system calls per batch, from runs of more epochs; None without strace."""
    strace = shutil.which("strace")
    if strace is None:
        return None
    totals, n_batches = {}, 1
    with tempfile.NamedTemporaryFile("r") as table:
        for n_epochs in (FEW, MANY):
            command = [sys.executable, __file__, "--case", case, "--side", side]
            command += ["--folder", folder, "--epochs", str(n_epochs)]
            n_batches = _itself(strace, "-c", "-o", table.name, *command)
            totals[n_epochs] = _total_of(Path(table.name).read_text())
    return (totals[MANY] - totals[FEW]) / ((MANY - FEW) * n_batches)


def _total_of(table: str) -> int:
    """Return the number of calls in the last line of strace's table."""
    return int(next(line for line in reversed(table.splitlines()) if "total" in line).split()[3])


def main() -> int:
    """Print the table, or do what one of its processes does."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--case", choices=[*CASES], help="count this one only")
    parser.add_argument("--side", choices=[*SIDES], help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    parser.add_argument("--epochs", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.folder is not None:
        if arguments.epochs is not None:
            run_epochs(arguments.case, arguments.side, arguments.folder, arguments.epochs)
        else:
            print(json.dumps(count(arguments.case, arguments.side, arguments.folder)))
        return 0
    print("| samples | side | faults, first | faults | system calls | frames | calls into C |")
    print("|---|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as parent:
        for number, case in enumerate(CASES if arguments.case is None else [arguments.case]):
            folder = str(Path(parent) / str(number))
            schema, sample, n_samples = CASES[case]
            with shardio.DatasetWriter(folder, Schema(schema)) as writer:
                for i in range(n_samples):
                    writer.append(sample(i))
            for side in SIDES:
                place = ["--case", case, "--side", side, "--folder", folder]
                found = _itself(sys.executable, __file__, *place)
                calls = system_calls(case, side, folder)
                said = "–" if calls is None else f"{calls:.1f}"
                print(
                    f"| {case} | {side} | {found['first faults']:.1f} | {found['faults']:.2f} "
                    f"| {said} | {found['frames']:.0f} | {found['calls into C']:.0f} |",
                    flush=True,
                )
            shutil.rmtree(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
