"""Decoding without the loop filter: which codecs change, how much, and what stays as it is."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import numpy.typing as npt
import pytest

from shardio import EncodedStream
from shardio.errors import MediaError
from shardio.media.clip_decoder import ClipDecoder
from shardio.media.demuxing import demux
from shardio.media.encoding import encode
from tests.media_made import scene, write_video

WIDTH, HEIGHT = 96, 64
Planes = npt.NDArray[np.uint8]


def noisy(n_frames: int) -> list[Planes]:
    """Make frames with noise, so that blocks have visible edges."""
    rng = np.random.default_rng(3)
    noise = rng.integers(-20, 20, (n_frames, HEIGHT, WIDTH, 3))
    return [*(np.stack(scene(n_frames)) + noise).clip(0, 255).astype(np.uint8)]


def encoded(folder: Path, codec: str, **options: str) -> Path:
    name = "a.mkv" if codec.startswith("libvpx") else "a.mp4"
    settings = {"g": "12", **options}
    return write_video(folder / name, noisy(30), codec=codec, codec_options=settings)


def decoded(stream: EncodedStream, frames: list[int], *, loop_filter: bool = True) -> Planes:
    out = np.empty((len(frames), HEIGHT * 3 // 2, WIDTH), np.uint8)
    with ClipDecoder(loop_filter=loop_filter) as decoder:
        decoder.decode(stream, frames, out, pixels="yuv420")
    return out


def luma_by_ffmpeg(path: Path) -> Planes:
    """Decode the luma of all frames from the file, without the filter."""
    with av.open(str(path)) as container:
        stream = container.streams.video[0]
        stream.codec_context.options = {"skip_loop_filter": "all"}
        return np.stack([frame.to_ndarray()[:HEIGHT] for frame in container.decode(stream)])


@pytest.mark.parametrize("codec", ["libx264", "libx265", "libvpx"])
def test_pixels_differ_a_little_and_are_those_of_ffmpeg(tmp_path: Path, codec: str) -> None:
    path = encoded(tmp_path, codec, crf="32")
    stream = demux(str(path))
    every = list(range(30))
    exact, quick = decoded(stream, every), decoded(stream, every, loop_filter=False)
    assert np.array_equal(quick[:, :HEIGHT], luma_by_ffmpeg(path))
    difference = np.abs(exact.astype(int) - quick).mean()
    assert 0 < difference < 5
    # A clip is the same whichever frames are decoded with it.
    for frames in ([25], [3, 4, 5], [17, 11]):
        assert np.array_equal(decoded(stream, frames, loop_filter=False), quick[frames])


@pytest.mark.parametrize(
    ("codec", "options"),
    [
        ("libvpx-vp9", {"crf": "45", "b:v": "0"}),
        ("libsvtav1", {"crf": "50"}),
        ("mpeg4", {}),
    ],
)
def test_other_codecs_do_not_change(tmp_path: Path, codec: str, options: dict[str, str]) -> None:
    stream = demux(str(encoded(tmp_path, codec, **options)))
    every = list(range(30))
    assert np.array_equal(decoded(stream, every), decoded(stream, every, loop_filter=False))


@pytest.mark.parametrize("codec", ["h264", "hevc", "av1"])
def test_what_shardio_encodes_does_not_change(codec: str) -> None:
    pictures = list(enumerate(noisy(20)))
    stream = encode(pictures, WIDTH, HEIGHT, Fraction(1, 25), codec=codec)
    every = list(range(20))
    assert np.array_equal(decoded(stream, every), decoded(stream, every, loop_filter=False))


def refuses(stream: EncodedStream, *, loop_filter: bool) -> bool:
    try:
        decoded(stream, list(range(30)), loop_filter=loop_filter)
    except MediaError:
        return True
    return False


def test_the_same_damage_is_found(tmp_path: Path) -> None:
    stream = demux(str(encoded(tmp_path, "libx264")))
    content = bytearray(stream.data[:])
    n_refused = 0
    for at in range(0, len(content), len(content) // 40):
        content[at] ^= 1 << at % 8
        damaged = replace(stream, data=bytes(content))
        content[at] ^= 1 << at % 8
        found = {refuses(damaged, loop_filter=each) for each in (True, False)}
        assert len(found) == 1, at
        n_refused += found.pop()
    assert n_refused > 10
