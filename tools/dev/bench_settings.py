#!/usr/bin/env python
"""Compare settings of an encoder: time to decode clips, bytes, PSNR.

    python tools/dev/bench_settings.py FOLDER [--seconds 60] [--stride 1 2]

The frames of every video that is long enough, at 112 x 112, are encoded by x264 with each of
`SETTINGS`, and the same clips of 16 frames from uniformly drawn starts are decoded from each, in
turns within one process on one core: "bare", as `bench_clips.py` calls it, by the decoder alone.
"plain" is what all others are changed from: keyframes every 16 frames, nothing reordered.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np

from shardio.format.types.streams import EncodedStream
from shardio.media import encoding
from shardio.media.clip_decoder import ClipDecoder
from shardio.media.media_files import VideoFile
from shardio.media.pixels import Pixels

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from dev.bench_clips import SIZE, Clip, Ours, Video, draw, load

PLAIN = {
    "preset": "veryfast",
    "tune": "fastdecode",
    "crf": "20",
    "bf": "0",
    "sc_threshold": "0",
}
SETTINGS: dict[str, Mapping[str, str] | None] = {  # None: what `StreamEncoder` does
    "plain": {},
    "as stored": None,
    "a keyframe every 8": {"g": "8"},
    "crf 23": {"crf": "23"},
    "crf 26": {"crf": "26"},
    "CABAC": {"x264-params": "cabac=1"},
    "deblocking": {"x264-params": "no-deblock=0"},
    "no psychovisual tuning": {"x264-params": "aq-mode=0:psy=0", "crf": "22"},
    "no transform of 8 x 8": {"x264-params": "8x8dct=0"},
    "preset slow, crf 21": {"preset": "slow", "crf": "21"},
}


def encoded(
    pictures: list[tuple[int, Pixels | None]], like: EncodedStream, name: str
) -> EncodedStream:
    """Encode pictures with the settings of this name."""
    changes = SETTINGS[name]
    if changes is None:
        return encoding.encode(pictures, SIZE, SIZE, like.time_base)
    gop = int(changes.get("g", "16"))
    settings = {**PLAIN, "keyint_min": str(gop), **changes, "g": str(gop)}
    kept = encoding._ENCODERS["h264"]
    encoding._ENCODERS["h264"] = ("libx264", lambda gop, crf: settings)
    try:
        return encoding.encode(pictures, SIZE, SIZE, like.time_base, gop=gop)
    finally:
        encoding._ENCODERS["h264"] = kept


def squared_error(stream: EncodedStream, pictures: list[tuple[int, Pixels | None]]) -> float:
    """Return the mean over the luma of all frames."""
    found = np.empty((stream.n_frames, SIZE * 3 // 2, SIZE), np.uint8)
    with ClipDecoder() as decoder:
        decoder.decode(stream, range(stream.n_frames), found, pixels="yuv420")
    pairs = zip(found, pictures, strict=True)
    wanted = ((one[:SIZE], picture[:SIZE]) for one, (_, picture) in pairs if picture is not None)
    return float(np.mean([((one.astype(int) - other) ** 2).mean() for one, other in wanted]))


def main() -> int:
    """Encode, measure, print."""
    parser = argparse.ArgumentParser(description="What an encoder's settings take and give.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--stride", type=int, nargs="+", default=[1, 2])
    options = parser.parse_args()
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    videos = load(options.folder)
    ways: dict[str, list[Video]] = {name: [] for name in SETTINGS}
    errors: dict[str, list[float]] = {name: [] for name in SETTINGS}
    for video in videos:
        with VideoFile(video.path) as file:
            pictures = list(file.pictures(SIZE, pixels="yuv420"))
        for name, made in ways.items():
            stream = encoded(pictures, video.small, name)
            made.append(replace(video, small=stream))
            errors[name] += [squared_error(stream, pictures)] * stream.n_frames
    spent = {
        stride: measure(ways, videos, stride, options.seconds / len(options.stride))
        for stride in options.stride
    }
    n_frames = sum(video.small.n_frames for video in videos)
    heads = "".join(f" time at stride {stride} |" for stride in options.stride)
    print(f"| settings |{heads} bytes a frame | PSNR |")
    print(f"|---|{'---:|' * len(options.stride)}---:|---:|")
    for name, made in ways.items():
        times = "".join(f" {each[name] / each['plain']:.2f} |" for each in spent.values())
        n_bytes = sum(len(video.small.data) for video in made) / n_frames
        psnr = 10 * np.log10(255**2 / np.mean(errors[name]))
        print(f"| {name} |{times} {n_bytes:.0f} | {psnr:.1f} dB |")
    return 0


def measure(
    ways: Mapping[str, list[Video]], videos: list[Video], stride: int, seconds: float
) -> dict[str, float]:
    """CPU seconds of the same clips with each of the settings."""
    ours, spent = Ours(), dict.fromkeys(ways, 0.0)
    places = {video.path: n for n, video in enumerate(videos)}
    end, turn = time.perf_counter() + seconds, 0
    while time.perf_counter() < end or turn < 2:
        clips = draw(videos, 24, stride, turn)
        for name, made in ways.items():
            given = [Clip(made[places[clip.video.path]], clip.frames) for clip in clips]
            if not turn:
                ours.bare(given)  # opens the decoders
            begin = time.process_time()
            ours.bare(given)
            spent[name] += time.process_time() - begin
        turn += 1
    return spent


if __name__ == "__main__":
    sys.exit(main())
