"""Measure loading from storage: nothing in the page cache, and in less memory than the data takes.

    python tools/dev/bench_cold.py [--mib N] [--limit-mib N] [--seconds S] [--folder DIR] [NAME …]

Datasets of one kind of sample each are written, N MiB of each, which takes that much disk. Before
every run their own files are dropped from the page cache, which is checked; the run is a process
of its own with two workers, and takes S seconds, or an epoch if that is shorter. The orders are
those of `shuffle`; each with the advice that workers give the kernel, and without. With
`dataset.preload()` the time before the first batch is shown beside the rate. Of `h264`, `packets`,
films of 300 frames in short groups of small pictures and in one group of larger ones, a sample is a
random clip of 16 frames, and an epoch has one of each film.

Then the same in a memory control group (v1 or v2) whose limit is that of --limit-mib, where this
process may make one; otherwise it is said that this was not measured. Exits with 1 when advice is
slower than none with everything cold, or blocks slower than a full shuffle in the group.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any, Final
from unittest import mock

import numpy as np

import shardio
from shardio import Array, Bytes, DatasetWriter, Schema, ShardLoader, Video
from shardio._engine.filling.readahead import ReadAhead
from shardio._workers.processes.limits import control_groups
from shardio.measuring.measure import cached_share
from shardio.media.encoding import encode

N_WORKERS: Final = 2
N_TRIES: Final = 20
MAX_CACHED: Final = 0.02
SLACK: Final = 0.7
"""A run may be as much slower than the one that it is held against: disks vary."""

OF_FILMS: Final = Schema({"x": Video(), "label": Array("int64")})
N_FRAMES: Final = 300
FILMS: Final[dict[str, tuple[int, int]]] = {"h264": (112, 16), "packets": (320, N_FRAMES)}
"""The side of a film's pictures, and how many are in a group."""

SETS: Final[dict[str, tuple[Schema, int, int]]] = {
    "images": (Schema({"x": Array("uint8", (224, 224, 3)), "label": Array("int64")}), 150_528, 64),
    "rows": (Schema({"x": Array("uint8", (2048,)), "label": Array("int64")}), 2048, 256),
    "records": (Schema({"x": Bytes(), "label": Array("int64")}), 30_000, 64),
    "h264": (OF_FILMS, 0, 32),
    "packets": (OF_FILMS, 0, 32),
}
"""Schema, mean bytes of a sample if all are read, samples per batch."""

ORDERS: Final[dict[str, Any]] = {"in order": False, "full": "full", "blocks": "blocks"}


def samples(schema: Schema, n_bytes: int, n: int) -> Iterator[dict[str, Any]]:
    """Values that no file system stores in less than their size."""
    content = np.random.default_rng(0).bytes(n_bytes * 4)
    for i in range(n):
        field, start = schema["x"], i * 64 % n_bytes
        if isinstance(field, Array):
            row = np.frombuffer(content, np.uint8, n_bytes, start)
            yield {"x": row.reshape([d or 1 for d in field.shape]), "label": i}
        else:
            yield {"x": content[start : start + n_bytes // 2 + i * 997 % n_bytes], "label": i}


def films(name: str, n_bytes: int) -> Iterator[dict[str, Any]]:
    """Films of so many bytes together: a few of them, again and again."""
    side, gop = FILMS[name]
    rng = np.random.default_rng(0)
    around = rng.integers(0, 255, (side + N_FRAMES, side + N_FRAMES, 3), np.uint8)
    few = []
    for k in range(4):
        frames = ((n, around[n:, n * k // 3 :][:side, :side] // 4 + 90) for n in range(N_FRAMES))
        few.append(encode(frames, side, side, Fraction(1, 25), gop=gop, crf=30))
    n_films = -(-n_bytes * len(few) // sum(len(film.data) for film in few))
    for i in range(n_films):
        yield {"x": few[i % len(few)], "label": i}


def write(folder: Path, name: str, mib: int) -> str:
    """Write a dataset, unless it is there."""
    if not folder.exists():
        schema, n_bytes, _ = SETS[name]
        with DatasetWriter(folder, schema, shard_bytes=64 << 20) as writer:
            made = films(name, mib << 20)
            if name not in FILMS:
                made = samples(schema, n_bytes, (mib << 20) // n_bytes)
            for sample in made:
                writer.append(sample)
    return str(folder)


def drop(folder: str) -> None:
    """Drop the files of a dataset from the page cache, and make sure that they are gone."""
    paths = [str(path) for path in Path(folder).glob("*.shard")]
    share: float | None = None
    for _ in range(N_TRIES):  # what is still being read stays
        for path in paths:
            fd = os.open(path, os.O_RDONLY)
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)
        share = cached_share(paths)
        if share is not None and share <= MAX_CACHED:
            return
        time.sleep(0.5)
    raise SystemExit(f"{folder}: {share} of it is still in the page cache; not measured")


def load(folder: Any, batch: int, order: Any, seconds: float, options: dict[str, Any]) -> None:
    """Be a run: print its figures."""
    begin_s = time.perf_counter()
    # Threads, so that they have what is patched here.
    with ShardLoader(
        folder, batch, shuffle=order, num_workers=N_WORKERS, output="numpy", reuse=True,
        start_method="thread", **options,
    ) as loader:  # fmt: skip
        batches = iter(loader)
        n = len(next(batches)["label"])
        start_s, n = time.perf_counter(), 0
        for each in batches:
            n += len(each["label"])
            if time.perf_counter() - start_s > seconds:
                break
        end_s = time.perf_counter()
    print(json.dumps({"rate": n / (end_s - start_s), "first_s": start_s - begin_s}))


def run_alone(arguments: list[str], group: Path | None) -> dict[str, float] | None:
    """Start a run in a process of its own, and in a control group; None if it fails."""

    def enter() -> None:
        if group is not None:
            (group / "cgroup.procs").write_text(str(os.getpid()))

    command = [sys.executable, __file__, "--run", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, preexec_fn=enter, check=False)
    if done.returncode:
        print(f"{arguments[3]}: {(done.stderr.strip().splitlines() or [''])[-1]}", flush=True)
        return None
    found: dict[str, float] = json.loads(done.stdout)
    return found


def make_group(limit_bytes: int) -> Path | None:
    """Return a memory control group of our own below ours; None where none may be made."""
    for version, folder in reversed(control_groups("memory")):
        group = Path(folder) / f"shardio-bench-{os.getpid()}"
        name = "memory.max" if version == 2 else "memory.limit_in_bytes"
        try:
            group.mkdir()
        except OSError:
            continue
        try:
            (group / name).write_text(str(limit_bytes))
            return group
        except OSError:
            group.rmdir()
    return None


def measure(
    folder: str, name: str, seconds: float, group: Path | None
) -> dict[tuple[str, bool], float]:
    """All runs over one dataset, printed; samples per second by order, and whether with advice."""
    found: dict[tuple[str, bool], float] = {}
    batch, n_bytes = SETS[name][2], SETS[name][1]
    for order in (*ORDERS, "preload"):
        for advised in (False, True) if order != "preload" else (True,):
            drop(folder)
            arguments = [folder, name, str(batch), order, str(seconds), str(int(advised))]
            run = run_alone(arguments, group)
            if run is None:
                continue
            found[order, advised] = run["rate"]
            what = f"{order}, {'advice' if advised else 'no advice'}"
            mb_per_s = f"{run['rate'] * n_bytes / 1e6:>8,.0f} MB/s" if n_bytes else ""
            print(
                f"{name:<8} {what:<20} {run['rate']:>10,.0f} samples/s {mb_per_s}, first batch "
                f"after {run['first_s']:.2f} s",
                flush=True,
            )
    return found


def run(folder: str, name: str, batch: str, order: str, seconds: str, advised: str) -> None:
    """Be one run, as `run_alone` asks for it."""
    if not int(advised):
        mock.patch.object(ReadAhead, "before", lambda *_: None).start()
    options: dict[str, Any] = {}
    view: Any = folder
    if name in FILMS:
        view = shardio.open(folder).clips(16, where="random", size=(112, 112))
    if order == "preload":
        view = shardio.open(folder)
        view.preload()
    load(view, int(batch), ORDERS.get(order, "full"), float(seconds), options)


def compare(folder: str, name: str, options: argparse.Namespace) -> list[str]:
    """Both halves over one dataset; what is below its bar."""
    slow = []
    if options.only != "group":
        print(f"-- {name}, {options.mib} MiB, cold", flush=True)
        found = measure(folder, name, options.seconds, None)
        slow += [
            f"{name}, {order}, cold: with advice {found[order, True]:,.0f} samples/s, without "
            f"{found[order, False]:,.0f}"
            for order in ORDERS
            if found[order, True] < SLACK * found[order, False]
        ]
    if options.only == "cold":
        return slow
    limit_mib = options.limit_mib or options.mib // 4
    group = make_group(limit_mib << 20)
    if group is None:
        print("in a control group: not measured, as none may be made here")
        return slow
    print(f"-- {name}, {options.mib} MiB, in a group of {limit_mib} MiB", flush=True)
    try:
        found = measure(folder, name, options.seconds, group)
    finally:
        group.rmdir()
    blocks, full = found["blocks", True], found["full", True]
    if blocks < SLACK * full:
        slow.append(f"{name}, in the group: blocks {blocks:,.0f} samples/s, full {full:,.0f}")
    return slow


def main() -> int:
    """Measure, print, and return the exit code."""
    if sys.argv[1:2] == ["--run"]:
        run(*sys.argv[2:])
        return 0
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("names", metavar="NAME", nargs="*", help=f"of {', '.join(SETS)}")
    parser.add_argument("--mib", type=int, default=2048, help="of each dataset (default: 2048)")
    parser.add_argument("--limit-mib", type=int, help="of the group (default: a quarter of --mib)")
    parser.add_argument("--seconds", type=float, default=5.0, help="of each run (default: 5)")
    parser.add_argument("--only", choices=["cold", "group"], help="one of the two halves")
    parser.add_argument("--folder", help="keeps the datasets; by default they are removed")
    options = parser.parse_args()
    place = Path(options.folder or tempfile.mkdtemp())
    slow: list[str] = []
    try:
        for name in options.names or SETS:
            folder = write(place / f"{name}-{options.mib}", name, options.mib)
            slow += compare(folder, name, options)
    finally:
        if not options.folder:
            shutil.rmtree(place)
    for line in slow:
        print(f"below its bar: {line}")
    return int(bool(slow))


if __name__ == "__main__":
    sys.exit(main())
