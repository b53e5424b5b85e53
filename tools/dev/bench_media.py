"""The table of docs/explanation/video.md: what each store takes and how fast it gives clips.

    python tools/dev/bench_media.py VIDEOS [--seconds 8] [--rounds 2] [--stores raw h264 ...]

VIDEOS is converted with every store at 112 x 112, and a loader without workers, so on one core,
delivers clips of 16 frames from each, as NumPy arrays: all clips of `raw` and `jpeg` in an order
that is new each epoch; of `jpeg`, `h264` and `packets` one from each video, its start drawn from
every frame that can start one, as RGB and, of `h264`, as planes of YUV as well. Beside it the same
clips as people decode them from the files today: opened, sought, decoded and converted by PyAV. In
turns; the time is that of the CPU. `--stride` is that of the drawn clips.

Prints a table in Markdown. Exit code 1 where a store gives fewer clips than who reopens the files.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "converters"), str(ROOT / "tools")]

import av  # noqa: E402 - the checkout comes first
import numpy as np  # noqa: E402

import shardio  # noqa: E402
from shardio import ShardLoader  # noqa: E402
from shardio.samples.clip_view import ClipView  # noqa: E402
from shardio.samples.clips import Clip  # noqa: E402

FRAMES, SIZE, BATCH = 16, 112, 8
STORES = ("raw", "jpeg", "h264", "packets")
FROM_FILES = "the files, by PyAV"


@dataclass
class Way:
    """One way to clips, and what it took so far."""

    store: str
    what: str
    step: Callable[[], int]
    bytes_per_frame: float
    n_clips: int = 0
    spent_s: float = 0.0
    rates: list[float] = field(default_factory=list)

    def run(self, seconds: float) -> None:
        """Take clips for so long."""
        end_s, begin_s, before = time.perf_counter() + seconds, time.process_time(), self.n_clips
        while time.perf_counter() < end_s:
            self.n_clips += self.step()
        spent_s = time.process_time() - begin_s
        self.spent_s += spent_s
        self.rates.append((self.n_clips - before) / spent_s)


def endless(loader: ShardLoader) -> Iterator[int]:
    """Yield the sizes of batches, epoch after epoch."""
    while True:
        for batch in loader:
            yield len(batch.indices)


def opened(path: Path, clip: Clip | None) -> ShardLoader:
    """Return a loader in this process."""
    options: dict[str, Any] = {"shuffle": True, "num_workers": 0, "reuse": True}
    dataset = shardio.open(path)
    view = dataset if clip is None else ClipView(dataset, clip)
    return ShardLoader(view, BATCH, output="numpy", **options)


def from_store(folder: Path, store: str, stride: int) -> Iterator[Way]:
    """Yield the ways to clips of one store."""
    out = folder / store
    with shardio.open(out) as dataset:
        n_bytes = sum(shard.n_bytes for shard in dataset.shards)
        is_rows = store == "raw"
        n_frames = len(dataset) * FRAMES if is_rows else stored_frames(dataset)
    wishes: list[tuple[str, Clip | None]] = [("stored clips", None)]
    if not is_rows:
        drawn = Clip(frames=FRAMES, stride=stride, size=(SIZE, SIZE), where="random", per_video=1)
        wishes = [("drawn, RGB", drawn)]
        if store == "h264":
            wishes.append(
                ("drawn, YUV", Clip(**{**vars_of(drawn), "pixels": "yuv420"})),
            )
    for what, clip in wishes:
        sizes = endless(opened(out, clip))
        next(sizes)
        yield Way(store, what, sizes.__next__, n_bytes / n_frames)


def vars_of(clip: Clip) -> dict[str, Any]:
    """Return the options of a clip."""
    return {
        name: getattr(clip, name) for name in ("frames", "stride", "size", "where", "per_video")
    }


def stored_frames(dataset: shardio.ShardDataset) -> int:
    """Return the number of frames of all videos of a dataset."""
    return sum(int(dataset[i]["frames"].n_frames) for i in range(len(dataset)))


def from_files(folder: Path, stride: int) -> Way:
    """PyAV as its documentation shows it: one clip per call, from a file that is opened anew."""
    span, rng = (FRAMES - 1) * stride + 1, random.Random(0)
    times = {path: found for path in sorted(folder.rglob("*.*")) if (found := shown(path))}
    paths = [path for path, found in times.items() if len(found) >= span]
    n_bytes = sum(path.stat().st_size for path in paths)
    order: list[Path] = []

    def step() -> int:
        if not order:
            order.extend(rng.sample(paths, len(paths)))
        path = order.pop()
        first = rng.randrange(len(times[path]) - span + 1)
        decode(path, times[path][first], stride)
        return 1

    return Way(FROM_FILES, "drawn, RGB", step, n_bytes / sum(len(times[path]) for path in paths))


def shown(path: Path) -> list[int]:
    """Return the times of a file's frames; none where it is no sound video."""
    try:
        with av.open(str(path)) as container:
            return sorted(f.pts for f in container.decode(video=0) if f.pts is not None)
    except (av.FFmpegError, IndexError, ValueError):
        return []


def decode(path: Path, start: int, stride: int) -> None:
    """Open, seek, decode, convert."""
    pictures: list[np.ndarray[Any, Any]] = []
    with av.open(str(path)) as container:
        stream = container.streams.video[0]
        stream.thread_type, stream.codec_context.thread_count = "NONE", 1
        container.seek(start, stream=stream)
        n = 0
        for frame in container.decode(stream):
            if frame.pts is None or frame.pts < start:
                continue
            if n % stride == 0:
                pictures.append(frame.reformat(SIZE, SIZE, "rgb24", threads=1).to_ndarray())
            n += 1
            if len(pictures) == FRAMES:
                break
    np.stack(pictures)


def main(arguments: list[str]) -> int:
    """Convert, measure, print, judge."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("videos", type=Path)
    parser.add_argument("--seconds", type=float, default=8, help="of each way and round")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--stride", type=int, default=1)
    parser.add_argument("--stores", nargs="+", default=list(STORES), choices=STORES)
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        for store in options.stores:
            shardio.convert(options.videos, folder / store, kind="videos", store=store, size=SIZE)
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
        ways = [from_files(options.videos, options.stride)]
        for store in options.stores:
            ways += from_store(folder, store, options.stride)
        for _ in range(options.rounds):
            for way in ways:
                way.run(options.seconds)
    source = ways[0].n_clips / ways[0].spent_s
    print(
        "| store | bytes a frame | clips | clips/s and core | of PyAV |\n|---|---:|---|---:|---:|"
    )
    for way in ways:
        rate = way.n_clips / way.spent_s
        print(
            f"| {way.store} | {way.bytes_per_frame:,.0f} | {way.what} | {rate:,.0f} "
            f"({min(way.rates):,.0f}-{max(way.rates):,.0f}) | {rate / source:,.1f} |"
        )
    return int(any(way.n_clips / way.spent_s < source for way in ways))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
