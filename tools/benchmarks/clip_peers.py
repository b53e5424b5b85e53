"""Peers that decode clips from files or from the streams of the `h264` store: PyAV, torchcodec."""

from __future__ import annotations

from collections.abc import Iterable
from importlib import import_module
from pathlib import Path
from typing import Any

import av
import numpy as np

from shardio.format.types.streams import EncodedStream
from shardio.media.muxing import mux

FRAMES, SIZE = 16, 112
Frames = np.ndarray


def by_pyav(path: str, start: int, stride: int) -> None:
    """Open, seek, decode and convert with PyAV as in its documentation, on one thread."""
    pictures: list[np.ndarray] = []
    with av.open(path) as container:
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


class OpenFiles:
    """Files of streams, which stay open with a decoder of one thread each."""

    def __init__(self, folder: Path, streams: Iterable[EncodedStream]) -> None:
        self._paths: dict[int, str] = {}
        self._containers: dict[int, Any] = {}
        self._times: dict[int, list[int]] = {}
        self._decoders: dict[int, Any] = {}
        for n, stream in enumerate(streams):
            made = mux(stream)
            path = folder / f"{n}{made.suffix}"
            path.write_bytes(made.data)
            self._paths[id(stream)] = str(path)

    def by_pyav(self, stream: EncodedStream, frames: Frames) -> None:
        """Seek, decode and convert with PyAV."""
        container, times = self._opened(id(stream))
        wanted = [times[n] for n in frames]
        container.seek(wanted[0], stream=container.streams.video[0])
        left, out = iter(enumerate(wanted)), None
        n, time = next(left)
        for frame in container.decode(video=0):
            if frame.pts != time:
                continue
            pixels = frame.to_ndarray(format="rgb24")
            out = np.empty((len(wanted), *pixels.shape), np.uint8) if out is None else out
            out[n] = pixels
            if n + 1 == len(wanted):
                return
            n, time = next(left)
        raise ValueError(f"no frame of time {time}")

    def by_torchcodec(self, stream: EncodedStream, frames: Frames) -> None:
        """Decode with torchcodec."""
        key, stop = id(stream), int(frames[-1]) + 1
        if key not in self._decoders:
            import_module("torch").set_num_threads(1)
            self._decoders[key] = import_module("torchcodec.decoders").VideoDecoder(
                self._paths[key],
                num_ffmpeg_threads=1,
                seek_mode="approximate",
                dimension_order="NHWC",
            )
        step = int(frames[1] - frames[0])
        self._decoders[key].get_frames_in_range(int(frames[0]), stop, step)

    def _opened(self, key: int) -> tuple[Any, list[int]]:
        if key not in self._containers:
            with av.open(self._paths[key]) as container:
                shown = [frame.pts for frame in container.decode(video=0)]
            self._times[key] = sorted(time for time in shown if time is not None)
            self._containers[key] = container = av.open(self._paths[key])
            video = container.streams.video[0]
            video.thread_type, video.codec_context.thread_count = "NONE", 1
        return self._containers[key], self._times[key]
