"""Streams of JPEGs: every frame is a keyframe, and comes back near to what was given."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest

from shardio.errors import InvalidArgument, MediaError
from shardio.format.types.streams import PacketFlag, packet_flags
from shardio.media import ClipDecoder, JpegEncoder, decode_image
from tests.media_made import scene

BASE = Fraction(1, 25)


def test_every_packet_is_a_jpeg_and_a_keyframe_with_its_own_time() -> None:
    encoder = JpegEncoder(64, 48, BASE, quality=95)
    pictures, times = scene(6, 64, 48), [3, 5, 9, 10, 20, 21]
    for time, picture in zip(times, pictures, strict=True):
        encoder.add(time, picture)
    stream = encoder.finish()
    assert (packet_flags(stream.packets) == PacketFlag.KEY).all()
    assert stream.packets["pts"].tolist() == times
    assert stream.packets["duration"].tolist() == [2, 4, 1, 10, 1, 1]
    assert (stream.n_frames, stream.width, stream.height, stream.duration) == (6, 64, 48, 19)
    last = decode_image(bytes(stream.data[int(stream.packets["offset"][5]) :]))
    out = np.empty((2, 48, 64, 3), np.uint8)
    with ClipDecoder() as decoder:
        decoder.decode(stream, [5, 0], out)
    assert np.abs(out[0].astype(int) - last).mean() < 2  # another decoder of the same file
    assert np.abs(out[1].astype(int) - pictures[0]).mean() < 8


def test_what_cannot_be_encoded_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="quality 0; expected"):
        JpegEncoder(64, 48, BASE, quality=0)
    encoder = JpegEncoder(64, 48, BASE)
    with pytest.raises(MediaError, match="no picture to encode"):
        encoder.finish()
    with pytest.raises(InvalidArgument, match=r"expected uint8 of \(48, 64, 3\)"):
        encoder.add(0, np.zeros((64, 48, 3), np.uint8))
    encoder.add(5, np.zeros((48, 64, 3), np.uint8))
    with pytest.raises(InvalidArgument, match="a picture at 5 follows one at 5"):
        encoder.add(5, np.zeros((48, 64, 3), np.uint8))
