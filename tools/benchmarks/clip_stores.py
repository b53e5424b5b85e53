"""The lanes of `media.stores`: clips of a dataset in each store, and of the files themselves."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final

import av
import numpy as np

import shardio
from benchmarks.child import NotMeasured
from benchmarks.clip_peers import FRAMES, by_pyav
from benchmarks.harness import Lane
from shardio import ShardLoader
from shardio.maintenance import merge
from shardio.samples.clip_view import ClipView
from shardio.samples.clips import Clip as ClipOptions

STORES: Final[dict[str, dict[str, Any]]] = {
    "raw": {"store": "raw"},
    "planes": {"store": "planes"},
    "planes, raw": {"store": "planes", "codec": "raw", "gop": 1},
    "jpeg": {"store": "jpeg"},
    "h264": {"store": "h264"},
    "packets": {"store": "packets"},
}
"""The options of the converter for each store."""
_COPIES: Final = 8
"""A dataset that is measured has each video this many times, so that epochs are not too short."""


def store_lanes(place: Path, store: str, stride: int, seconds: float, size: int) -> dict[str, Lane]:
    """Return the lanes of a store: random clips in RGB and, if the store has planes, in YUV."""
    folder, facts = place / store, dict[str, float]()
    with shardio.open(folder) as dataset:
        n_bytes = sum(shard.n_bytes for shard in dataset.shards)
        n_frames = len(dataset) * FRAMES
        if store != "raw":
            n_frames = sum(int(dataset[i]["frames"].n_frames) for i in range(len(dataset)))
            if store != "packets":  # which loses nothing
                facts["dB"] = _psnr_of_clips(folder, place / "raw")
    facts["bytes/frame"] = n_bytes / n_frames
    clip = {"frames": FRAMES, "stride": stride, "size": (size, size)}
    clip |= {"where": "random", "per_video": 1}
    views: dict[str, dict[str, Any] | None] = {"drawn, RGB": clip}
    if store == "raw":
        views = {"stored clips": None}
    else:
        merge(place / f"{store}, copies", *[folder] * _COPIES, workers=0)
        folder = place / f"{store}, copies"
    if store.startswith(("h264", "planes")):
        views["drawn, YUV"] = clip | {"pixels": "yuv420"}
    lanes: dict[str, Lane] = {}
    options: dict[str, Any] = {"shuffle": True, "num_workers": 0, "reuse": True, "output": "numpy"}
    for what, clips in views.items():
        opened = shardio.open(folder)
        view = opened if clips is None else ClipView(opened, ClipOptions(**clips))
        sizes = _endless(ShardLoader(view, 8, **options))
        next(sizes)
        step: Callable[[], int] = sizes.__next__
        lanes[f"{store}, {what}"] = partial(_step_rate, step, seconds, facts)
    return lanes


def _psnr_of_clips(folder: Path, raw: Path) -> float:
    """Return the median PSNR of the clips of a dataset, in RGB, compared with the store `raw`."""
    options: dict[str, Any] = {"num_workers": 0, "output": "numpy"}
    found = []
    with ShardLoader(folder, 8, **options) as ours, ShardLoader(raw, 8, **options) as exact:
        for batch, wanted in zip(ours, exact, strict=True):
            difference = batch["frames"].astype(np.int16) - wanted["frames"]
            errors = (difference.astype(np.float64) ** 2).mean(axis=(1, 2, 3, 4))
            found += errors.tolist()
    return float(10 * np.log10(255**2 / np.median(found)))


def _endless(loader: ShardLoader) -> Iterator[int]:
    """Yield the sizes of batches, epoch after epoch."""
    while True:
        for batch in loader:
            yield len(batch.indices)


def _step_rate(
    step: Callable[[], int], seconds: float, facts: Mapping[str, float]
) -> Mapping[str, float]:
    end_s, start_s, n = time.perf_counter() + seconds, time.process_time(), 0
    while time.perf_counter() < end_s:
        n += step()
    return {"clips/s": n / (time.process_time() - start_s), **facts}


def file_lane(folder: Path, stride: int, seconds: float) -> dict[str, Lane]:
    """Return a lane that decodes clips without shardio: it opens a file for every clip."""
    span, rng = (FRAMES - 1) * stride + 1, random.Random(0)
    times = {path: _shown(path) for path in sorted(folder.rglob("*.*"))}
    paths = [path for path, found in times.items() if len(found) >= span]
    if not paths:
        raise NotMeasured(f"{folder}: no video of {span} frames")
    n_bytes = sum(path.stat().st_size for path in paths)
    order: list[Path] = []

    def step() -> int:
        if not order:
            order.extend(rng.sample(paths, len(paths)))
        path = order.pop()
        by_pyav(str(path), times[path][rng.randrange(len(times[path]) - span + 1)], stride)
        return 1

    facts = {"bytes/frame": n_bytes / sum(len(times[path]) for path in paths)}
    return {"the files, by PyAV": partial(_step_rate, step, seconds, facts)}


def _shown(path: Path) -> list[int]:
    """Return the times of a file's frames; none if the file is not an undamaged video."""
    try:
        with av.open(str(path)) as container:
            return sorted(f.pts for f in container.decode(video=0) if f.pts is not None)
    except (av.FFmpegError, IndexError, ValueError):
        return []
