"""Files as packets: what the table says of them is what decoding them shows."""

from __future__ import annotations

import random
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest

from shardio import EncodedStream
from shardio.errors import InvalidArgument, MediaError
from shardio.format.types.streams import PacketFlag, packet_flags, packet_sizes
from shardio.media.bitstream import disposable_packets
from shardio.media.checking import verify_by_decoding
from shardio.media.clip_decoder import ClipDecoder
from shardio.media.demuxing import demux, times_of
from shardio.media.media_files import VideoFile
from tests.media.images_made import decoded
from tests.media_made import Image, scene, write_cut, write_gif, write_video

B_FRAMES = {"bf": "3", "g": "12"}
OPEN = {"g": "10", "bf": "3", "x264-params": "open-gop=1:b-pyramid=normal:bframes=3:keyint=10"}
FAR = {"x264-params": "intra-refresh=1:keyint=8:bframes=2:b-adapt=0:ref=4"}

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "B-frames": ("a.mp4", {"codec_options": B_FRAMES}),
    "matroska": ("a.mkv", {"codec_options": B_FRAMES}),
    "open groups": ("a.mp4", {"codec_options": OPEN}),
    "recovery points that speak of earlier pictures": ("a.mp4", {"codec_options": FAR}),
    "PNG": ("a.mov", {"codec": "png", "pixel_format": "rgb24", "full_range": True}),
    "open groups in a transport stream": ("a.mts", {"container": "mpegts", "codec_options": OPEN}),
    "AVI": ("a.avi", {"codec": "mpeg4", "codec_options": {"bf": "2", "g": "9"}}),
    "AVI without times": ("a.avi", {"codec_options": B_FRAMES}),
    "no container": ("a.h264", {"codec_options": B_FRAMES}),
    "HEVC": ("a.mp4", {"codec": "libx265", "codec_options": {"x265-params": "log-level=none"}}),
    "VP8": ("a.webm", {"codec": "libvpx", "codec_options": {"auto-alt-ref": "1", "g": "9"}}),
    "VP9": ("a.webm", {"codec": "libvpx-vp9", "codec_options": {"lag-in-frames": "9", "g": "9"}}),
    "MPEG-2": ("a.mpg", {"codec": "mpeg2video", "codec_options": {"bf": "2", "g": "9"}}),
    "MJPEG": ("a.avi", {"codec": "mjpeg", "pixel_format": "yuvj420p", "full_range": True}),
    "uncompressed": ("a.avi", {"codec": "rawvideo"}),
    "4:4:4": ("a.mp4", {"pixel_format": "yuv444p", "codec_options": B_FRAMES}),
    "10 bit": ("a.mp4", {"pixel_format": "yuv420p10le"}),
    "full range": ("a.mp4", {"full_range": True}),
    "BT.709": ("a.mp4", {"matrix": 1}),
    "wide pixels": ("a.mp4", {"aspect": Fraction(4, 3)}),
    "rotated": ("a.mov", {"rotation": 90}),
    "upside down": ("a.mov", {"rotation": 180}),
    "sound alongside": ("a.mp4", {"with_sound": True}),
    "two streams": ("a.mkv", {"n_streams": 2}),
    "fragmented": ("a.mp4", {"container_options": {"movflags": "frag_keyframe+empty_moov"}}),
    "variable rate": (
        "a.mp4",
        {
            "times": [n * n + 3 for n in range(30)],
            "time_base": Fraction(1, 90),
            "codec_options": B_FRAMES,
        },
    ),
    "late start": (
        "a.mkv",
        {"times": range(500, 530), "time_base": Fraction(1, 25), "codec_options": B_FRAMES},
    ),
}


def made(variant: str, folder: Path) -> Path:
    name, options = VARIANTS[variant]
    return write_video(folder / name, scene(30), **options)


def by_file(path: Path | str, size: int = 48) -> tuple[Image, list[int]]:
    with VideoFile(str(path)) as video:
        found = list(video.pictures(size))
    pictures = [picture for _, picture in found if picture is not None]
    return np.stack(pictures), [time for time, _ in found]


def by_packets(stream: EncodedStream, frames: list[int], size: int = 48) -> Image:
    return decoded(stream, frames, (size, size, 3))


def assert_same_as_the_file(stream: EncodedStream, path: Path | str) -> None:
    """Every start, several strides, any order, against the file read from end to end."""
    pictures, times = by_file(path)
    assert stream.n_frames == len(pictures) and times_of(stream).tolist() == times
    n, rng = len(pictures), random.Random(7)
    asked = [list(range(start, min(n, start + 2))) for start in range(n)]
    asked += [list(range(start, n, 5)) for start in range(0, n, 7)]
    asked += [list(range(n)), rng.choices(range(n), k=9), list(range(n))[::-1]]
    with ClipDecoder() as decoder:
        for frames in asked:
            out = np.empty((len(frames), 48, 48, 3), np.uint8)
            decoder.decode(stream, frames, out)
            assert np.array_equal(out, pictures[frames]), frames


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_frame_by_packets_is_that_of_the_file(variant: str, tmp_path: Path) -> None:
    path = made(variant, tmp_path)
    assert_same_as_the_file(demux(str(path)), path)


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_first_packets_of_a_file_are_a_stream(variant: str, tmp_path: Path) -> None:
    path = made(variant, tmp_path)
    whole, part = demux(str(path)), demux(str(path), n_packets=20)
    assert len(part.packets) == 20
    assert part.data == whole.data[: len(part.data)]
    # A frame that is shown before the last ones may have a later packet.
    shown, known = times_of(part).tolist(), times_of(whole).tolist()
    assert 20 - 4 <= part.n_frames <= 20 and shown[:16] == known[:16]
    found = by_packets(part, list(range(16)))
    assert np.array_equal(found, by_packets(whole, list(range(16))))


def test_damage_after_the_first_packets_is_not_detected(tmp_path: Path) -> None:
    path = made("B-frames", tmp_path)
    path.write_bytes(path.read_bytes() + b"\0\0\1\0free")
    with pytest.raises(MediaError, match="ends 248 bytes before its container does"):
        demux(str(path))
    assert len(demux(str(path), n_packets=20).packets) == 20


@pytest.mark.parametrize("n_before", [1, 12, 29, 60])
@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"codec_options": B_FRAMES}, id="B-frames"),
        pytest.param({"codec_options": OPEN}, id="open groups"),
        pytest.param({"codec_options": {"bf": "0"}}, id="nothing reordered"),
        pytest.param(VARIANTS["HEVC"][1], id="HEVC"),
        pytest.param({"codec": "mpeg4", "codec_options": {"bf": "2", "g": "9"}}, id="MPEG-4"),
        pytest.param(VARIANTS["VP8"][1], id="VP8"),
        pytest.param(VARIANTS["VP9"][1], id="VP9"),
    ],
)
def test_frames_before_matroska_0(options: dict[str, Any], n_before: int, tmp_path: Path) -> None:
    """FFmpeg drops times below 0: frames that have one are counted back from the first at 0."""
    n_frames = n_before + 4
    path = write_cut(tmp_path / "a.mkv", scene(n_frames), n_before, rate=24, **options)
    stream = demux(str(path))
    ticks = Fraction(1000, 24)  # the container's are milliseconds
    wanted = [round(n * ticks) for n in range(-n_before, 4)]
    found = times_of(stream).tolist()
    assert found[n_before:] == wanted[n_before:]
    assert all(abs(a - b) <= 1 for a, b in zip(found, wanted, strict=True))
    assert stream.duration == pytest.approx(n_frames * ticks, abs=2)
    assert_same_as_the_file(stream, path)


def test_where_no_time_is_known_the_order_is_that_shown(tmp_path: Path) -> None:
    cut = write_cut(tmp_path / "b.mkv", scene(30), 12, codec_options=B_FRAMES)
    for path in (made("no container", tmp_path), cut):
        trusted, proven = demux(str(path), check=False), demux(str(path), check=True)
        assert np.array_equal(trusted.packets, proven.packets)
        assert_same_as_the_file(trusted, path)


@pytest.mark.parametrize("variant", ["B-frames", "open groups", "VP9", "HEVC", "rotated"])
def test_a_check_finds_right_what_a_container_says(variant: str, tmp_path: Path) -> None:
    path = str(made(variant, tmp_path))
    trusted, proven = demux(path, check=False), demux(path, check=True)
    assert np.array_equal(trusted.packets, proven.packets)
    assert trusted.parameters == proven.parameters and trusted.data == proven.data


def test_the_packets_are_those_of_the_file(tmp_path: Path) -> None:
    path = made("B-frames", tmp_path)
    stream = demux(path.read_bytes())
    with av.open(str(path)) as container:
        plain = [packet for packet in container.demux(video=0) if packet.size]
    assert stream.data == b"".join(map(bytes, plain))
    assert packet_sizes(stream.packets).tolist() == [packet.size for packet in plain]
    assert stream.packets["pts"].tolist() == [packet.pts for packet in plain]
    flags = packet_flags(stream.packets)
    assert ((flags & PacketFlag.KEY) != 0).tolist() == [packet.is_keyframe for packet in plain]
    assert 0 < (flags & PacketFlag.DISPOSABLE).astype(bool).sum() < len(plain)


def test_what_is_shown_and_how_long_is_said(tmp_path: Path) -> None:
    path = write_video(
        tmp_path / "a.mov", scene(9), rotation=90, aspect=Fraction(4, 3), full_range=True, matrix=1
    )
    stream = demux(str(path))
    assert (stream.n_frames, stream.width, stream.height) == (9, 64, 128)
    assert stream.duration * stream.time_base == Fraction(9, 25)
    assert {
        "codec": "h264",
        "range": "full",
        "matrix": "bt709",
        "sample_aspect": "4:3",
    }.items() <= (stream.parameters.items())


def test_frames_outside_of_an_edit_list_are_hidden_and_not_counted(tmp_path: Path) -> None:
    times = list(range(-6, 24))
    path = write_video(
        tmp_path / "a.mp4",
        scene(30),
        times=times,
        time_base=Fraction(1, 25),
        codec_options={"g": "30", "bf": "0"},
        container_options={"avoid_negative_ts": "disabled", "use_editlist": "1"},
    )
    stream = demux(str(path))
    hidden = (packet_flags(stream.packets) & PacketFlag.HIDDEN) != 0
    assert hidden.sum() == 6 and stream.n_frames == 24
    assert_same_as_the_file(stream, path)


def test_frames_of_vp8_that_are_not_shown_are_hidden(tmp_path: Path) -> None:
    path = write_video(tmp_path / "a.webm", scene(20), codec="libvpx", codec_options={"g": "60"})
    content, before = path.read_bytes(), demux(str(path))
    begin = int(before.packets["offset"][7])
    packet = bytes(before.data[begin : begin + int(packet_sizes(before.packets)[7])])
    assert content.count(packet) == 1 and packet[0] & 0x10
    # What an encoder does for an alternate reference: the bit that says "shown" is not set.
    path.write_bytes(content.replace(packet, bytes([packet[0] & ~0x10]) + packet[1:]))
    stream = demux(str(path), check=False)
    hidden = (packet_flags(stream.packets) & PacketFlag.HIDDEN) != 0
    assert np.flatnonzero(hidden).tolist() == [7] and stream.n_frames == 19
    assert np.array_equal(stream.packets, demux(str(path), check=True).packets)
    assert_same_as_the_file(stream, path)


IDR, TSA_N, TSA_R = 19, 2, 3  # HEVC's types of a keyframe, and of pictures that none or some need


@pytest.mark.parametrize(
    ("pictures", "expected"),
    [
        ([(IDR, 0), (TSA_N, 1), (TSA_N, 1)], [False, True, True]),
        ([(IDR, 0), (TSA_N, 1), (TSA_R, 2), (TSA_N, 2)], [False, False, False, True]),
        ([(IDR, 0), (TSA_N, 1), (TSA_R, 2)], [False, False, False]),  # the last may need the second
    ],
)
def test_disposable_pictures_of_hevc(pictures: list[tuple[int, int]], expected: list[bool]) -> None:
    parts = [b"\0\0\1" + bytes([kind << 1, layer + 1]) + b"..." for kind, layer in pictures]
    found = disposable_packets("hevc", b"", b"".join(parts), [len(part) for part in parts])
    assert found.tolist() == expected


def test_a_stream_that_changes_its_size_keeps_the_size_asked_for(tmp_path: Path) -> None:
    parts = [
        write_video(tmp_path / f"{n}.h264", scene(10, *size)).read_bytes()
        for n, size in enumerate([(96, 64), (64, 80)])
    ]
    path = tmp_path / "both.h264"
    path.write_bytes(b"".join(parts))
    assert_same_as_the_file(demux(str(path)), path)


def test_a_transparent_gif_is_decoded_from_its_beginning(tmp_path: Path) -> None:
    image = np.zeros((40, 60), np.uint8)
    image[:20, :30], image[20:, :30], image[:, 30:] = 1, 2, 3
    path = write_gif(tmp_path / "a.gif", [image, image[::-1]] * 3, [4, 7] * 3)
    assert_same_as_the_file(demux(str(path)), path)


def test_a_keyframe_that_is_none_is_found_out(tmp_path: Path) -> None:
    path = made("B-frames", tmp_path)
    stream = demux(str(path))
    keys = np.flatnonzero(packet_flags(stream.packets) & PacketFlag.KEY).tolist()
    packets = stream.packets.copy()
    lie = next(n for n in range(len(packets) - 1, 0, -1) if n not in keys)
    packets["stored"][lie] |= np.uint64(PacketFlag.KEY << 48)
    lying = replace(stream, packets=packets)
    proven = verify_by_decoding(lying, np.zeros(len(packets), bool), Fraction(1))
    assert np.flatnonzero(packet_flags(proven.packets) & PacketFlag.KEY).tolist() == keys
    assert_same_as_the_file(proven, path)


def damaged(folder: Path) -> Path:
    path = write_video(
        folder / "a.mp4", scene(60, 192, 128), codec_options={"crf": "10", "g": "12", "bf": "0"}
    )
    content = bytearray(path.read_bytes())
    start = content.index(b"mdat") + len(content) // 3
    content[start : start + 900] = random.Random(1).randbytes(900)
    path.write_bytes(content)
    return path


def test_damage_in_the_middle_is_found_by_check_and_clips(tmp_path: Path) -> None:
    path = damaged(tmp_path)
    with pytest.raises(MediaError, match=r"a\.mp4: (breaks at )?packet \d+"):
        demux(str(path), check=True)
    stream = demux(str(path), check=False)
    assert by_packets(stream, [0, 1, 11]).any() and by_packets(stream, [59]).any()
    with pytest.raises(MediaError, match=r"packet \d+ does not decode"):
        by_packets(stream, list(range(60)))


def test_the_first_packet_alone_decides_what_is_cut_without_a_check(tmp_path: Path) -> None:
    """Also where its decoder waits for the packets after it: they may be damaged, as any other."""
    path = made("B-frames", tmp_path)
    content, whole = path.read_bytes(), demux(str(path))
    begin, end = packet_sizes(whole.packets)[:2].cumsum().tolist()
    second = bytes(whole.data[begin:end])
    path.write_bytes(content.replace(second, second[:5] + bytes(len(second) - 5)))
    assert whole.parameters["reorder"]
    stream = demux(str(path))
    assert stream.parameters == whole.parameters
    assert np.array_equal(stream.packets, whole.packets)
    assert np.array_equal(by_packets(stream, [0]), by_packets(whole, [0]))
    with pytest.raises(MediaError, match=r"a\.mp4: breaks at packet 1"):
        demux(str(path), check=True)
    first = bytes(whole.data[:begin])
    path.write_bytes(content.replace(first, bytes(begin)))
    with pytest.raises(MediaError, match=r"a\.mp4: "):
        demux(str(path))


def test_the_kind_asked_for_has_to_be_there(tmp_path: Path) -> None:
    with pytest.raises(MediaError, match=r"no audio stream \(streams: video\)"):
        demux(str(write_video(tmp_path / "a.mp4", scene(3))), "audio")
    with pytest.raises(InvalidArgument, match="kind is 'text'"):
        demux(b"", "text")


def test_the_real_corrupted_file_takes_a_check(media_root: Path) -> None:
    path = str(media_root / "broken" / "corrupted.mp4")
    assert demux(path, check=False).n_frames == 50
    with pytest.raises(MediaError, match="breaks at packet 30"):
        demux(path, check=True)
