"""Encoding for random access: positions of keyframes, and the decoded pictures."""

from __future__ import annotations

import os
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from shardio.errors import InvalidArgument, MediaError
from shardio.format.types.streams import PacketFlag, packet_flags
from shardio.media.clip_decoder import ClipDecoder, FrameTable
from shardio.media.encoding import JpegEncoder, StreamEncoder, encode
from shardio.media.image import decode_image
from shardio.media.muxing import mux
from tests.media.images_made import decoded
from tests.media_made import Image, scene

BASE = Fraction(1, 25)
SHAPE = (48, 64, 3)


def pictures(n: int = 20) -> list[tuple[int, Image | None]]:
    return list(enumerate(scene(n, 64, 48)))


def policies() -> set[int]:
    return {os.sched_getscheduler(int(thread)) for thread in os.listdir("/proc/self/task")}


def test_av1_leaves_the_scheduling_of_the_process_as_it_was() -> None:
    # For root, who may have real-time priority, which SVT-AV1 then takes.
    before = os.sched_getscheduler(0)
    encoder = StreamEncoder(64, 48, BASE, codec="av1")
    for time, picture in pictures(3):
        assert picture is not None
        encoder.add(time, picture)
        assert policies() == {before}
    stream = encoder.finish()
    assert policies() == {before}
    mux(stream)
    assert policies() == {before}


def test_av1_does_not_wait_for_the_packet_of_a_picture() -> None:
    # In low-delay mode, SVT-AV1 blocks until each packet is ready, sometimes forever.
    encoder = StreamEncoder(64, 48, BASE, codec="av1")
    for time, picture in pictures(3):
        assert picture is not None
        encoder.add(time, picture)
        assert encoder._packets == []
    assert encoder.finish().n_frames == 3


@pytest.mark.parametrize(("width", "has_cutree"), [(16, False), (62, False), (64, True)])
def test_narrow_hevc_is_encoded_without_cutree(width: int, *, has_cutree: bool) -> None:
    encoder = StreamEncoder(width, 16, BASE, codec="hevc")
    assert ("cutree=0" not in encoder._codec.options["x265-params"]) == has_cutree
    for n in range(20):
        encoder.add(n, np.full((16, width, 3), 12 * n, np.uint8))
    means = decoded(encoder.finish(), range(20), (16, width, 3)).mean(axis=(1, 2, 3))
    np.testing.assert_allclose(means, 12 * np.arange(20), atol=4)


@pytest.mark.parametrize("codec", ["h264", "hevc"])
@pytest.mark.parametrize("gop", [4, 16])
def test_every_gop_frames_a_closed_group_begins(codec: str, gop: int) -> None:
    stream = encode(pictures(), 64, 48, BASE, gop=gop, codec=codec)
    keys = np.flatnonzero(packet_flags(stream.packets) & PacketFlag.KEY)
    assert keys.tolist() == list(range(0, 20, gop))
    times = stream.packets["pts"].tolist()
    for key in keys.tolist():
        assert sorted(times[key : key + gop]) == list(range(key, min(key + gop, 20)))
    assert (stream.n_frames, stream.width, stream.height, stream.duration) == (20, 64, 48, 20)


def test_a_clip_of_h264_decodes_few_frames_but_its_own() -> None:
    stream = encode(pictures(), 64, 48, BASE)
    table = FrameTable(stream.packets, stream.n_frames)
    alone = np.empty((1, 48, 64, 3), np.uint8)
    with ClipDecoder() as decoder:
        for n, wanted in enumerate(decoded(stream, range(20), SHAPE)):
            (run,) = table.runs(np.array([n]))
            n_packets = len(table.packets_to_decode(run))
            assert n_packets <= 1 + n % 16 // 4 + 2  # a key, references, itself
            decoder.decode(stream, [n], alone)
            assert (alone[0] == wanted).all()


def test_colours_come_back() -> None:
    colours = (200, 30, 40), (20, 180, 90)
    flat = [(n, np.full((48, 64, 3), colour, np.uint8)) for n, colour in enumerate(colours)]
    stream = encode(flat, 64, 48, BASE, crf=5)
    assert (stream.parameters["matrix"], stream.parameters["range"]) == ("bt601", "limited")
    for found, (_, wanted) in zip(decoded(stream, range(2), SHAPE), flat, strict=True):
        assert np.abs(found.astype(int) - wanted).max() <= 4


def test_a_lower_crf_is_nearer_and_larger() -> None:
    fine, coarse = (encode(pictures(), 64, 48, BASE, crf=crf) for crf in (10, 40))
    assert len(fine.data) > 2 * len(coarse.data)
    wanted = np.stack([picture for _, picture in pictures() if picture is not None]).astype(int)
    assert (
        np.abs(decoded(fine, range(20), SHAPE) - wanted).mean()
        < np.abs(decoded(coarse, range(20), SHAPE) - wanted).mean()
    )


def test_planes_and_rgb_of_one_picture_give_the_same_stream() -> None:
    first = encode(pictures(), 64, 48, BASE, crf=1)
    planes = np.empty((20, 72, 64), np.uint8)
    with ClipDecoder() as decoder:
        decoder.decode(first, range(20), planes, pixels="yuv420")
        again = encode(list(enumerate(planes)), 64, 48, BASE, crf=1)
        back = np.empty_like(planes)
        decoder.decode(again, range(20), back, pixels="yuv420")
    assert np.abs(back.astype(int) - planes).mean() < 0.5


def test_the_same_pictures_give_the_same_bytes() -> None:
    assert encode(pictures(), 64, 48, BASE).data == encode(pictures(), 64, 48, BASE).data


def test_times_are_kept_and_pictures_that_are_none_are_left_out() -> None:
    times = [3, 10, 11, 40]
    given: list[tuple[int, Image | None]] = [
        (time, image) for time, image in zip(times, scene(4, 64, 48), strict=True)
    ]
    stream = encode([*given[:2], (10, None), *given[2:]], 64, 48, Fraction(1, 1000))
    shown = np.sort(stream.packets, order="pts")
    assert shown["pts"].tolist() == times
    assert shown["duration"].tolist() == [7, 1, 29, 29] and stream.duration == 66


@pytest.mark.parametrize(
    "options", [{"width": 63}, {"height": 8}, {"gop": 0}, {"crf": 64}, {"codec": "vp9"}]
)
def test_options_that_no_encoder_takes_are_refused(options: dict[str, Any]) -> None:
    given: dict[str, Any] = {"width": 64, "height": 48, "time_base": BASE} | options
    with pytest.raises(InvalidArgument) as caught:
        StreamEncoder(**given)
    ((name, value),) = options.items()
    expected = {"codec": f"found {value!r}", "width": "63x48 pixels", "height": "64x8 pixels"}
    assert expected.get(name, f"{name} {value}") in str(caught.value)


# JPEGs.


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
    out = decoded(stream, [5, 0], SHAPE)
    assert np.abs(out[0].astype(int) - last).mean() < 2  # another decoder of the same file
    assert np.abs(out[1].astype(int) - pictures[0]).mean() < 8


def test_a_quality_that_no_jpeg_has_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="quality 0; expected"):
        JpegEncoder(64, 48, BASE, quality=0)


@pytest.mark.parametrize("kind", [StreamEncoder, JpegEncoder])
def test_bad_pictures_are_refused(kind: Any) -> None:
    encoder = kind(64, 48, BASE)
    with pytest.raises(MediaError, match="no picture to encode"):
        encoder.finish()
    with pytest.raises(InvalidArgument, match=r"expected uint8 of \(48, 64, 3\)"):
        encoder.add(0, np.zeros((64, 48, 3), np.uint8))
    encoder.add(5, np.zeros((48, 64, 3), np.uint8))
    with pytest.raises(InvalidArgument, match="a picture at 5 follows one at 5"):
        encoder.add(5, np.zeros((48, 64, 3), np.uint8))
