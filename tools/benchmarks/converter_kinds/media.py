"""Pictures, sound and videos, as Pillow and PyAV load them."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np

from benchmarks.converter_kinds.kind import Kind

_SIDE: Final = 112  # of the pictures in clips


def _make_pictures(suffix: str, place: Path) -> None:
    from PIL import Image

    small = Image.fromarray(np.random.default_rng(0).integers(0, 255, (24, 32, 3), "uint8"))
    for number in range(100):
        small.resize((640, 480)).save(place / f"{number:03d}.{suffix}")


def _load_picture(path: str) -> Iterator[Any]:
    from PIL import Image

    with Image.open(path) as picture:
        yield np.asarray(picture.convert("RGB"))


def _make_sound(place: Path) -> None:
    import av

    rng = np.random.default_rng(0)
    for number in range(20):
        with av.open(str(place / f"{number:02d}.flac"), "w") as container:
            stream = container.add_stream("flac", rate=16_000, layout="mono")
            for _ in range(20):
                noise = rng.integers(-999, 999, (1, 16_000), "int16")
                frame = av.AudioFrame.from_ndarray(noise, "s16", "mono")
                frame.sample_rate = 16_000
                container.mux(stream.encode(frame))
            container.mux(stream.encode(None))


def _load_sound(path: str) -> Iterator[Any]:
    import av

    with av.open(path) as container:
        for frame in container.decode(audio=0):
            yield frame.to_ndarray()


def _make_videos(place: Path) -> None:
    import av

    pictures = np.random.default_rng(0).integers(0, 255, (25, 24, 32, 3), "uint8")
    for number in range(5):
        with av.open(str(place / f"{number}.mp4"), "w") as container:
            stream = container.add_stream("libx264", rate=25)
            stream.width, stream.height, stream.pix_fmt = 320, 240, "yuv420p"
            for picture in [*pictures] * 8:
                frame = av.VideoFrame.from_ndarray(picture, "rgb24")
                container.mux(stream.encode(frame.reformat(320, 240, "yuv420p")))
            container.mux(stream.encode(None))


def _load_frames(path: str) -> Iterator[Any]:
    """Yield frames as small as those of clips, but without a crop."""
    import av

    with av.open(path) as container:
        for frame in container.decode(video=0):
            yield frame.reformat(_SIDE, _SIDE, "rgb24").to_ndarray()


def _load_packets(path: str) -> Iterator[Any]:
    import av

    with av.open(path) as container:
        yield [bytes(packet) for packet in container.demux(video=0)]


KINDS: Final = {
    "jpeg": Kind("images", partial(_make_pictures, "jpg"), _load_picture),
    "png": Kind("images", partial(_make_pictures, "png"), _load_picture),
    "flac": Kind("audio", _make_sound, _load_sound),
    "clips": Kind("videos", _make_videos, _load_frames, {"store": "raw", "size": _SIDE}),
    "packets": Kind(
        "videos",
        _make_videos,
        _load_packets,
        {"store": "packets"},
        least=0.45,
        why="keyframes and times are checked",
    ),
}
