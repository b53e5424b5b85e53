"""Compares stores with the plainest way to the same: tools/dev/bench_stores.py VIDEOS.

`h264` beside the ffmpeg command line with the same settings, as many files at a time and one thread
each; `packets` beside a copy of every file that is hashed on the way. Each gets VIDEOS so many
times over (--copies) that start-up does not decide, in turns; the best round of each counts.

Exit code 1 where `h264` does less than 0.85 of ffmpeg, or `packets` less than 0.5 of the copy.
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
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "converters"), str(ROOT / "tools")]

import xxhash  # noqa: E402 - the checkout comes first

import shardio  # noqa: E402

SIZE = 112
BARS = {"h264": 0.85, "packets": 0.5}
FILTER = (
    f"scale=w='if(gt(iw,ih),-2,{SIZE})':h='if(gt(iw,ih),{SIZE},-2)'"
    f":flags=bilinear+accurate_rnd+full_chroma_int+full_chroma_inp+bitexact,crop={SIZE}:{SIZE}"
)
SETTINGS = (
    "-an -c:v libx264 -preset veryfast -tune fastdecode -crf 20 -bf 0 -g 16 -keyint_min 16 "
    "-sc_threshold 0 -pix_fmt yuv420p -fps_mode passthrough -threads 1"
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
    shardio.convert(source, out, store=store, frames=1, workers=n)


def plainly(each: Callable[[Path, Path], None], files: list[Path], n: int, out: Path) -> None:
    """Have `n` threads go through the files."""
    out.mkdir()
    with ThreadPoolExecutor(n) as pool:
        for done in [pool.submit(each, f, out / f"{i}{f.suffix}") for i, f in enumerate(files)]:
            done.result()


def main(arguments: list[str]) -> int:
    """Measure, print, and judge."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("videos", type=Path)
    parser.add_argument("--copies", type=int, default=3)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--stores", nargs="+", default=list(BARS))
    options = parser.parse_args(arguments)
    if "h264" in options.stores and shutil.which("ffmpeg") is None:
        print("ffmpeg is not installed: packets alone")
        options.stores.remove("h264")
    found = 0
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        for copy in range(options.copies):
            shutil.copytree(options.videos, folder / "in" / str(copy))
        files = sorted(path for path in (folder / "in").rglob("*") if path.is_file())
        for store in options.stores:
            each = by_ffmpeg if store == "h264" else by_copy
            convert = partial(by_us, folder / "in", store, options.workers)
            copy_all = partial(plainly, each, files, options.workers)
            times: dict[str, list[float]] = {"ours": [], "plain": []}
            for _ in range(options.rounds):
                times["ours"].append(timed(convert, folder))
                times["plain"].append(timed(copy_all, folder))
            ours, plain = min(times["ours"]), min(times["plain"])
            print(
                f"{store}: {ours:.2f} s, plainly {plain:.2f} s: {plain / ours:.2f} of it "
                f"(bar {BARS[store]})"
            )
            found |= plain / ours < BARS[store]
    return int(found)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
