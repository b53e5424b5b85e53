"""Frames from bare packets, bit by bit those of FFmpeg's command line: another build and version.

As decoded, before any conversion. `tests.media.compare_decoders` compares every frame of a folder,
and with torchcodec as well, which is too large for a test.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from shardio.media.demuxing import demux
from tests.media import command_line
from tests.media.test_demuxing import VARIANTS, made

pytestmark = pytest.mark.process

N_FRAMES = 40  # of each real clip


@pytest.fixture
def ffmpeg() -> str:
    found = command_line.program()
    if found is None:
        pytest.skip("no ffmpeg: pip install imageio-ffmpeg has no program for this machine")
    return found


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_frame_is_that_of_the_command_line(variant: str, ffmpeg: str, tmp_path: Path) -> None:
    path = made(variant, tmp_path)
    assert command_line.difference(ffmpeg, path, demux(str(path))) == ""


def test_a_frame_that_differs_is_told(ffmpeg: str, tmp_path: Path) -> None:
    """The comparison itself: two files of which one frame is another."""
    path, other = made("uncompressed", tmp_path), tmp_path / "other.avi"
    stream = demux(str(path))
    content = bytearray(path.read_bytes())
    place = content.index(bytes(stream.data[: 2 * len(stream.data) // stream.n_frames])[-64:])
    content[place] ^= 1
    other.write_bytes(content)
    assert command_line.difference(ffmpeg, other, stream) == "1 frames differ: [1]"
    assert command_line.difference(ffmpeg, path, demux(str(path))) == ""


def test_real_frames_are_those_of_the_command_line(media_root: Path, ffmpeg: str) -> None:
    for path in sorted((media_root / "clips").rglob("*.*")):
        stream = demux(str(path))
        if stream.width * stream.height * stream.n_frames <= 100_000_000:  # others take seconds
            assert command_line.difference(ffmpeg, path, stream, N_FRAMES) == "", path
