"""Compares `shardio.convert` to raw frames with a bare decode loop: bench_convert.py [VIDEOS].

The bare loop is PyAV at its best: decode, resize with one reformatter kept alive and the same
swscale flags, crop, in as many processes, with the files dealt out as they come; nothing is
written. Both get VIDEOS (or sample clips made here) 20 times over, in turns; the best round of
each counts. Exits with 1 where conversion does less than 0.85 of the bare loop.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
import time
from fractions import Fraction
from multiprocessing import get_context
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "converters"), str(ROOT / "tools")]

import numpy as np  # noqa: E402 - the checkout comes first

import shardio  # noqa: E402

ENOUGH = 0.85
SIZE = 112


def decode_bare(path: str) -> int:
    """Decode, resize and crop one file; returns its number of frames."""
    import av
    from av.video.reformatter import Interpolation as Flags
    from av.video.reformatter import VideoReformatter

    flags = (
        Flags.BILINEAR
        | Flags.ACCURATE_RND
        | Flags.BITEXACT
        | Flags.FULL_CHR_H_INT
        | Flags.FULL_CHR_H_INP
    )
    n_frames = 0
    with av.open(path) as container:
        stream = container.streams.video[0]
        stream.codec_context.thread_type = "NONE"
        stream.codec_context.thread_count = 1
        maker = VideoReformatter()
        aspect = stream.sample_aspect_ratio or 1
        for frame in container.decode(stream):
            scale = Fraction(SIZE) / min(frame.width * aspect, Fraction(frame.height))
            width, height = int(frame.width * aspect * scale), int(frame.height * scale)
            rgb = maker.reformat(frame, width, height, "rgb24", interpolation=flags, threads=1)
            plane = rgb.planes[0]
            rows = np.frombuffer(memoryview(plane), np.uint8).reshape(height, plane.line_size)
            image = rows[:, : width * 3].reshape(height, width, 3)
            top, left = (height - SIZE) // 2, (width - SIZE) // 2
            np.ascontiguousarray(image[top : top + SIZE, left : left + SIZE])
            n_frames += 1
    return n_frames


def run_bare(paths: list[str], n_workers: int) -> float:
    """Decode all files in `n_workers` fresh processes; returns seconds."""
    start_s = time.perf_counter()
    with get_context("spawn").Pool(n_workers) as pool:
        sum(pool.imap_unordered(decode_bare, paths))
    return time.perf_counter() - start_s


def run_convert(source: Path, out: Path, n_workers: int) -> float:
    """Convert the folder; returns seconds."""
    start_s = time.perf_counter()
    shardio.convert(source, out, store="raw", size=SIZE, workers=n_workers)
    elapsed_s = time.perf_counter() - start_s
    shutil.rmtree(out)
    return elapsed_s


def repeat_videos(videos: Path, n_times: int, folder: Path) -> list[str]:
    """Copy a folder of videos `n_times` over."""
    for n in range(n_times):
        shutil.copytree(videos, folder / f"{n:02d}")
    return [str(path) for path in sorted(folder.rglob("*")) if path.is_file()]


def main() -> int:
    """Measure both in turns and compare."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("videos", nargs="?", type=Path, help="a folder of good videos")
    parser.add_argument("--repeat", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--folder", help="where to write, by default the temporary folder")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=given.folder) as name:
        folder = Path(name)
        videos = given.videos
        if videos is None:
            from shardio_tools.sample_clips import write_clips

            videos = folder / "sample"
            write_clips(videos)
        paths = repeat_videos(videos, given.repeat, folder / "src")
        bare_s, convert_s = [], []
        for n in range(given.rounds):
            bare_s.append(run_bare(paths, given.workers))
            convert_s.append(run_convert(folder / "src", folder / "out", given.workers))
            print(f"round {n + 1}: bare {bare_s[-1]:.2f} s, convert {convert_s[-1]:.2f} s")
    ratio = min(bare_s) / min(convert_s)
    verdict = "enough" if ratio >= ENOUGH else "too slow"
    print(f"convert does {ratio:.2f} of the bare loop ({ENOUGH} wanted): {verdict}")
    return 0 if ratio >= ENOUGH else 1


if __name__ == "__main__":
    raise SystemExit(main())
