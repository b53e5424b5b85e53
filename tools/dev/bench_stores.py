"""Compares stores with the plainest way to the same: tools/dev/bench_stores.py VIDEOS.

`h264` beside the ffmpeg command line with the same settings, as many files at a time and one thread
each. `packets` beside a copy of every file that is hashed on the way, in as many processes; and
beside the least that cutting takes: PyAV's packets, hashed and written one after another. The
conversion is made without its `check`, two passes of decoding that AVI, GIF and transport streams
need, and that no copy has.

Each gets VIDEOS so many times over (--copies) that start-up does not decide, in turns; the best
round of each counts. Durable all three: every file that is written is synced.

Exit code 1 where `h264` does less than 0.85 of ffmpeg; or `packets` less than 0.5 of the copy and,
where files are so short or their packets so small that PyAV alone takes twice as long as a copy,
less than 0.5 of PyAV.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "converters"), str(ROOT / "tools")]

import av  # noqa: E402 - the checkout comes first
import xxhash  # noqa: E402

import shardio  # noqa: E402

SIZE = 112
BARS = {"h264": 0.85, "packets": 0.5}
COPIES = {"h264": 3, "packets": 20}
FILTER = (
    f"scale=w='if(gt(iw,ih),-2,{SIZE})':h='if(gt(iw,ih),{SIZE},-2)'"
    f":flags=bilinear+accurate_rnd+full_chroma_int+full_chroma_inp+bitexact,crop={SIZE}:{SIZE}"
)
SETTINGS = (
    "-an -c:v libx264 -preset veryfast -tune fastdecode -crf 19 -bf 3 -g 16 -keyint_min 16 "
    "-x264-params b-adapt=0:b-pyramid=none:partitions=none:subme=4 -sc_threshold 0 "
    "-pix_fmt yuv420p -fps_mode passthrough -threads 1"
).split()


def by_ffmpeg(path: Path, out: Path) -> None:
    """Encode one file as `h264` does."""
    command = ["ffmpeg", "-v", "error", "-threads", "1", "-filter_threads", "1", "-i", str(path)]
    command += ["-vf", FILTER, *SETTINGS, str(out.with_suffix(".mp4"))]
    subprocess.run(command, check=True, stdin=subprocess.DEVNULL)


def by_copy(path: Path, out: Path) -> None:
    """Copy one file durably, and hash it on the way."""
    hasher = xxhash.xxh3_64()
    with path.open("rb") as source, out.open("wb") as copy:
        while chunk := source.read(1 << 20):
            hasher.update(chunk)
            copy.write(chunk)
        copy.flush()
        os.fsync(copy.fileno())
    hasher.hexdigest()


def by_pyav(path: Path, out: Path) -> None:
    """Write a file's packets durably, one after another, and hash them: no table, no schema."""
    hasher = xxhash.xxh3_64()
    with av.open(str(path)) as container, out.open("wb") as copy:
        for packet in container.demux(container.streams.video[0]):
            data = bytes(packet)
            hasher.update(data)
            copy.write(data)
        copy.flush()
        os.fsync(copy.fileno())
    hasher.hexdigest()


def timed(work: Callable[[Path], None], folder: Path) -> float:
    """Seconds that `work` takes, given a folder that does not exist yet and goes again."""
    out = folder / "out"
    start_s = time.perf_counter()
    work(out)
    elapsed_s = time.perf_counter() - start_s
    shutil.rmtree(out)
    return elapsed_s


def by_us(source: Path, store: str, n: int, out: Path) -> None:
    """Convert the folder."""
    options: dict[str, Any] = {"check": False} if store == "packets" else {}
    shardio.convert(source, out, store=store, frames=1, workers=n, **options)


def plainly(each: Callable[[Path, Path], None], files: list[Path], n: int, out: Path) -> None:
    """Read the files in `n` processes."""
    out.mkdir()
    with ProcessPoolExecutor(n, get_context("spawn")) as pool:
        for done in [pool.submit(each, f, out / f"{i}{f.suffix}") for i, f in enumerate(files)]:
            done.result()


def multiplied(videos: Path, n_copies: int, folder: Path) -> list[Path]:
    """Return the files of `videos` so many times over: copied once, then linked."""
    shutil.copytree(videos, folder / "0")
    for copy in range(1, n_copies):
        shutil.copytree(folder / "0", folder / str(copy), copy_function=os.link)
    return sorted(path for path in folder.rglob("*") if path.is_file())


Ways = dict[str, Callable[[Path], None]]


def best_of(ways: Ways, n_rounds: int, folder: Path) -> dict[str, float]:
    """Return the shortest time of each way, in turns."""
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(n_rounds):
        for name, work in ways.items():
            times[name].append(timed(work, folder))
    return {name: min(each) for name, each in times.items()}


def judged(store: str, best: dict[str, float]) -> bool:
    """Print the times and their ratios; whether the bar is missed."""
    ours = best.pop("shardio")
    shares = {name: time_s / ours for name, time_s in best.items()}
    told = [f"{name} {best[name]:.2f} s: {share:.2f} of it" for name, share in shares.items()]
    print(f"{store}: {ours:.2f} s; {'; '.join(told)} (bar {BARS[store]})")
    if "PyAV" in best:
        print(f"  PyAV's packets alone: {best['copy'] / best['PyAV']:.2f} of the copy")
        is_reachable = best["copy"] >= BARS[store] * best["PyAV"]
        return shares["copy" if is_reachable else "PyAV"] < BARS[store]
    return min(shares.values()) < BARS[store]


def main(arguments: list[str]) -> int:
    """Measure, print, and judge."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("videos", type=Path)
    parser.add_argument("--copies", type=int, help=f"by default {COPIES}")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--stores", nargs="+", default=list(BARS))
    options = parser.parse_args(arguments)
    if "h264" in options.stores and shutil.which("ffmpeg") is None:
        print("ffmpeg is not installed: packets alone")
        options.stores.remove("h264")
    missed = False
    for store in options.stores:
        with tempfile.TemporaryDirectory() as place:
            folder = Path(place)
            files = multiplied(options.videos, options.copies or COPIES[store], folder / "in")
            peers = {"ffmpeg": by_ffmpeg} if store == "h264" else {"copy": by_copy, "PyAV": by_pyav}
            ways: Ways = {
                name: partial(plainly, each, files, options.workers) for name, each in peers.items()
            }
            ways["shardio"] = partial(by_us, folder / "in", store, options.workers)
            missed |= judged(store, best_of(ways, options.rounds, folder))
    return int(missed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
