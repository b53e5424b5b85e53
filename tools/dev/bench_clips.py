#!/usr/bin/env python
"""Random clips per second and core, from packets and from `h264`, beside who reopens the files.

    python tools/dev/bench_clips.py FOLDER [--seconds 60] [--stride 1 2]

16 frames of 112 x 112 from uniformly drawn starts, every method the same clips, in turns within one
process on one core. The peers open the file, seek, decode and convert, as users do: PyAV always,
torchcodec where it can be imported. Ours decode `EncodedStream`s that lie in memory: the files' own
packets, and the same frames encoded for random access (the settings of `StreamEncoder`). "packets,
epoch" decodes all clips of a file that do not overlap, each group of pictures once. "h264 bare" is
the decoder's own part in "h264": its packets decoded one by one, and no pixel looked at; "bare rgb"
is that and one call of swscale for each frame of the clip, whose planes nobody takes.

Exit code 1 where a figure is below its bar.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import av
import numpy as np

from shardio.errors import MediaError
from shardio.format.types.streams import EncodedStream
from shardio.media.clip_decoder import ClipDecoder, FrameTable
from shardio.media.decoders import numbered_packet, open_video_decoder
from shardio.media.demuxing import demux
from shardio.media.encoding import encode
from shardio.media.media_files import VideoFile
from shardio.media.pixels import FrameConverter

FRAMES, SIZE = 16, 112
BARS = {  # method: the least multiple of the peer's clips per second
    "packets": {"pyav": 1.4, "torchcodec": 1.4},
    "packets, epoch": {"pyav": 3.0},
    "h264 rgb": {"pyav": 55.0},
    "h264 yuv": {"pyav": 100.0},
}


@dataclass(frozen=True)
class Video:
    """One file: as it is, as its packets, as small groups of pictures."""

    path: str
    times: np.ndarray
    packets: EncodedStream
    small: EncodedStream


@dataclass(frozen=True)
class Clip:
    """A clip: a video and its frames."""

    video: Video
    frames: np.ndarray


def load(folder: Path) -> list[Video]:
    """Read every video that is long enough."""
    found = []
    for path in sorted(folder.rglob("*.*")):
        try:
            packets = demux(str(path))
        except MediaError as error:
            print(f"left out: {error}")
            continue
        if packets.n_frames < FRAMES:
            continue
        with VideoFile(str(path)) as video:
            pictures = list(video.pictures(SIZE, pixels="yuv420"))
            small = encode(pictures, SIZE, SIZE, video.time_base)
        found.append(Video(str(path), np.array([time for time, _ in pictures]), packets, small))
    return found


def draw(videos: list[Video], n: int, stride: int, seed: int) -> list[Clip]:
    """Draw clips, uniformly over all frames that can start one."""
    rng = random.Random(seed)
    span = (FRAMES - 1) * stride + 1
    starts = [max(0, video.packets.n_frames - span + 1) for video in videos]
    chosen = rng.choices(videos, starts, k=n)
    return [
        Clip(v, np.arange(FRAMES) * stride + rng.randrange(v.packets.n_frames - span + 1))
        for v in chosen
    ]


def by_pyav(clips: list[Clip]) -> None:
    """Open, seek, decode, convert: PyAV as its documentation shows it, on one thread."""
    for clip in clips:
        start, wanted = int(clip.video.times[clip.frames[0]]), set(clip.frames - clip.frames[0])
        pictures, n = [], 0
        with av.open(clip.video.path) as container:
            stream = container.streams.video[0]
            stream.thread_type, stream.codec_context.thread_count = "NONE", 1
            container.seek(start, stream=stream)
            for frame in container.decode(stream):
                if frame.pts is None or frame.pts < start:
                    continue
                if n in wanted:
                    small = frame.reformat(SIZE, SIZE, "rgb24", threads=1)
                    pictures.append(small.to_ndarray())
                    if len(pictures) == FRAMES:
                        break
                n += 1
        np.stack(pictures)


def by_torchcodec(clips: list[Clip]) -> None:
    """Return the same with torchcodec's decoder, resized by torch."""
    torch = import_module("torch")
    decoders = import_module("torchcodec.decoders")
    torch.set_num_threads(1)
    for clip in clips:
        decoder = decoders.VideoDecoder(
            clip.video.path, num_ffmpeg_threads=1, seek_mode="approximate"
        )
        last = (decoder.metadata.num_frames or 1) - 1
        data = decoder.get_frames_at([min(int(n), last) for n in clip.frames]).data
        torch.nn.functional.interpolate(data.float(), (SIZE, SIZE), mode="bilinear").byte()


class Ours:
    """Our decoder, kept as a worker keeps it."""

    def __init__(self) -> None:
        self._decoder = ClipDecoder(64)
        self._rgb = np.empty((FRAMES, SIZE, SIZE, 3), np.uint8)
        self._yuv = np.empty((FRAMES, SIZE * 3 // 2, SIZE), np.uint8)
        self._bare: dict[int, Any] = {}
        self._converter = FrameConverter()

    def packets(self, clips: list[Clip]) -> None:
        """Independent clips from the files' own packets."""
        for clip in clips:
            self._decoder.decode(clip.video.packets, clip.frames, self._rgb)

    def rgb(self, clips: list[Clip]) -> None:
        """Independent clips from small groups of pictures."""
        for clip in clips:
            self._decoder.decode(clip.video.small, clip.frames, self._rgb)

    def bare(self, clips: list[Clip]) -> None:
        """Decode only: the decoder's frames are discarded."""
        for _ in self._frames(clips):
            pass

    def bare_rgb(self, clips: list[Clip]) -> None:
        """Decode and convert with swscale only."""
        for frame in self._frames(clips):
            self._converter.rgb(frame, SIZE, SIZE)

    def _frames(self, clips: list[Clip]) -> Iterator[av.VideoFrame]:
        for clip in clips:
            stream = clip.video.small
            if id(stream) not in self._bare:
                codec = open_video_decoder(stream.parameters, stream.extradata)
                self._bare[id(stream)] = codec, FrameTable(stream.packets, stream.n_frames)
            codec, table = self._bare[id(stream)]
            data = memoryview(stream.data[:])
            for run in table.runs(clip.frames):
                codec.flush_buffers()
                for n in table.packets_to_decode(run):
                    begin = int(table.offsets[n])
                    packet = numbered_packet(n, data[begin : begin + int(table.sizes[n])])
                    yield from (frame for frame in codec.decode(packet) if frame.pts in run.wanted)
                yield from (frame for frame in codec.decode(None) if frame.pts in run.wanted)

    def yuv(self, clips: list[Clip]) -> None:
        """Return the same, as planes."""
        for clip in clips:
            self._decoder.decode(clip.video.small, clip.frames, self._yuv, pixels="yuv420")

    def epoch(self, clips: list[Clip]) -> None:
        """All given clips; those of one video together."""
        by_video: dict[str, list[Clip]] = {}
        for clip in clips:
            by_video.setdefault(clip.video.path, []).append(clip)
        for each in by_video.values():
            outs = [(clip.frames, np.empty_like(self._rgb)) for clip in each]
            self._decoder.decode_many(each[0].video.packets, outs)


def measure(
    methods: dict[str, Callable[[list[Clip]], None]],
    videos: list[Video],
    stride: int,
    seconds: float,
) -> dict[str, float]:
    """Clips per second of each method, in turns until the time is over."""
    spent, n_clips = dict.fromkeys(methods, 0.0), dict.fromkeys(methods, 0)
    whole = [
        Clip(video, np.arange(start, start + FRAMES * stride, stride))
        for video in videos
        for start in range(0, video.packets.n_frames - (FRAMES - 1) * stride, FRAMES * stride)
    ]
    end, turn = time.perf_counter() + seconds, 0
    while time.perf_counter() < end or turn < 2:
        clips = draw(videos, 12, stride, turn)
        for name, method in methods.items():
            given = whole if "epoch" in name else clips if "h264" not in name else clips * 8
            if "epoch" in name and turn % 4:
                continue
            if not turn:
                method(given)  # opens the decoders
            begin = time.process_time()
            method(given)
            spent[name] += time.process_time() - begin
            n_clips[name] += len(given)
        turn += 1
    return {name: n_clips[name] / spent[name] for name in methods}


def main() -> int:
    """Measure, print, judge."""
    parser = argparse.ArgumentParser(description="Clips per second and core.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--stride", type=int, nargs="+", default=[1, 2])
    options = parser.parse_args()
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    ours = Ours()
    methods: dict[str, Callable[[list[Clip]], None]] = {"pyav": by_pyav}
    try:
        import_module("torchcodec.decoders")
        methods["torchcodec"] = by_torchcodec
    except (ImportError, OSError, RuntimeError) as error:
        print(f"without torchcodec: {str(error).splitlines()[0]}")
    methods |= {
        "packets": ours.packets,
        "packets, epoch": ours.epoch,
        "h264 rgb": ours.rgb,
        "h264 yuv": ours.yuv,
        "h264 bare": ours.bare,
        "h264 bare rgb": ours.bare_rgb,
    }
    videos = load(options.folder)
    n_frames = sum(video.small.n_frames for video in videos)
    n_bytes = sum(len(video.small.data) for video in videos)
    print(f"{len(videos)} videos, {n_frames} frames; h264: {n_bytes / n_frames:.0f} bytes a frame")
    failed = False
    for stride in options.stride:
        rates = measure(methods, videos, stride, options.seconds / len(options.stride))
        print(f"stride {stride}")
        for name, rate in rates.items():
            line = f"  {name:16} {rate:8.1f} clips/s"
            for peer, bar in BARS.get(name, {}).items():
                if peer in rates:
                    line += f"  {rate / rates[peer]:6.1f} x {peer}"
                    if stride == 1:  # the bars are stated at stride 1
                        failed |= rate < bar * rates[peer]
                        line += f" (bar {bar}{'' if rate >= bar * rates[peer] else ': BELOW'})"
            print(line)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
