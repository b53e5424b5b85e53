"""Clips from packets: sizes, parts, planes, and what is decoded for them."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest

from shardio import EncodedStream
from shardio.errors import InvalidArgument, MediaError
from shardio.format.types.streams import PacketFlag, pack_packets, packet_flags, packet_sizes
from shardio.media.bitstream import parameter_change_test, parameter_sets
from shardio.media.clip_decoder import ClipDecoder, FrameTable, keyframes_of
from shardio.media.decoders import numbered_packet, open_video_decoder
from shardio.media.demuxing import demux
from shardio.media.encoding import encode
from shardio.media.frames import CropGeometry, CropPosition, crop_geometry
from tests.media.images_made import decoded as decode
from tests.media_made import scene, write_video

SQUARE = (Fraction(100), Fraction(60))


@pytest.fixture(scope="module")
def stream(tmp_path_factory: pytest.TempPathFactory) -> EncodedStream:
    folder = tmp_path_factory.mktemp("clips")
    path = write_video(folder / "a.mp4", scene(40), codec_options={"bf": "3", "g": "12"})
    return demux(str(path))


def table(kinds: str, pts: list[int]) -> FrameTable:
    """K: keyframe, d: disposable, h: hidden, p: any other packet."""
    flags = {"K": PacketFlag.KEY, "d": PacketFlag.DISPOSABLE, "h": PacketFlag.HIDDEN, "p": 0}
    packets = pack_packets([10] * len(kinds), [int(flags[k]) for k in kinds], pts, [1] * len(pts))
    return FrameTable(packets, len(kinds) - kinds.count("h"))


@pytest.mark.parametrize(
    ("kinds", "pts", "frames", "sent"),
    [
        ("Kppp", [0, 1, 2, 3], [2], [[0, 1, 2]]),
        ("KppKpp", [0, 1, 2, 3, 4, 5], [4], [[3, 4]]),
        ("KppKpp", [0, 1, 2, 3, 4, 5], [4, 1], [[0, 1], [3, 4]]),
        ("KppKpp", [0, 1, 2, 3, 4, 5], [2, 3], [[0, 1, 2, 3]]),  # groups side by side
        ("Kpddp", [0, 3, 1, 2, 4], [3], [[0, 1]]),  # B-frames that nobody wants are not sent
        ("Kpddp", [0, 3, 1, 2, 4], [2, 4], [[0, 1, 3, 4]]),
        ("KpKddp", [0, 1, 4, 2, 3, 5], [4, 5], [[2, 5]]),
        ("KpKpdp", [0, 1, 4, 2, 3, 5], [5], [[2, 5]]),  # nor the leading ones of the keyframe
        ("KpKddp", [0, 1, 4, 2, 3, 5], [3], [[0, 1, 2, 4]]),  # which begin a group earlier
        ("Kphp", [0, 1, 1, 2], [1], [[0, 1, 2]]),  # what is hidden may complete a frame
        ("Kp", [0, 1], [], []),
    ],
)
def test_packets_sent(kinds: str, pts: list[int], frames: list[int], sent: list[list[int]]) -> None:
    found = table(kinds, pts)
    runs = found.runs(np.array(frames, np.int64))
    assert [list(found.packets_to_decode(run)) for run in runs] == sent


def test_keyframes_are_counted_among_the_shown_frames() -> None:
    def keyframes(kinds: str, pts: list[int]) -> list[int]:
        flags = {"K": PacketFlag.KEY, "h": PacketFlag.HIDDEN, "p": 0}
        packets = pack_packets([10] * len(kinds), [int(flags[k]) for k in kinds], pts, [1] * 6)
        n_frames = len(kinds) - kinds.count("h")
        found = EncodedStream({}, b"", packets, bytes(60), Fraction(1), n_frames, 8, 8)
        return [int(each) for each in keyframes_of(found)]

    assert keyframes("KppKpp", [0, 1, 2, 3, 4, 5]) == [0, 3]
    assert keyframes("KhpKpp", [0, 1, 2, 3, 4, 5]) == [0, 2]
    assert keyframes("KppKpp", [0, 2, 1, 5, 3, 4]) == [0, 5]


def test_a_table_that_cannot_be_decoded_is_refused() -> None:
    with pytest.raises(MediaError, match="before its first keyframe"):
        table("pK", [0, 1])
    with pytest.raises(MediaError, match="before its first keyframe"):
        table("pp", [0, 1])
    with pytest.raises(MediaError, match="holds 2 frames; expected 3"):
        FrameTable(pack_packets([1, 1], [1, 1], [0, 1], [1, 1]), 3)
    with pytest.raises(InvalidArgument, match="frames 0 to 2 of a stream of 2 frames"):
        table("Kp", [0, 1]).runs(np.array([0, 2]))


@pytest.mark.parametrize(
    ("size", "crop", "framing"),
    [
        ((30, 30), None, CropGeometry(50, 30, 10, 0)),
        ((30, 50), None, CropGeometry(50, 30, 0, 0)),
        ((60, 20), None, CropGeometry(100, 60, 40, 0)),
        ((30, 30), CropPosition(0, 0), CropGeometry(50, 30, 0, 0)),
        ((30, 30), CropPosition(1, 1), CropGeometry(50, 30, 20, 0)),
        ((30, 30), CropPosition(0.999, 0.5), CropGeometry(50, 30, 20, 0)),
        ((30, 30), CropPosition(0.5, 0.5), CropGeometry(50, 30, 10, 0)),
    ],
)
def test_framings(size: tuple[int, int], crop: CropPosition | None, framing: CropGeometry) -> None:
    assert crop_geometry(SQUARE, size, crop) == framing


def test_every_part_is_cut_from_the_same_picture(stream: EncodedStream) -> None:
    whole = decode(stream, [17], (64, 96, 3))
    assert np.array_equal(decode(stream, [17], (64, 64, 3)), whole[:, :, 16:80])
    left, right = CropPosition(0, 0.5), CropPosition(1, 0.5)
    assert np.array_equal(decode(stream, [17], (64, 64, 3), crop=left), whole[:, :, :64])
    assert np.array_equal(decode(stream, [17], (64, 64, 3), crop=right), whole[:, :, 32:])


def test_clips_decoded_together_are_cropped_each_in_its_place(stream: EncodedStream) -> None:
    left, right = CropPosition(0, 0.5), CropPosition(1, 0.5)
    crops = [left, None, right, left]
    wanted = [[17, 18], [18, 30], [17, 18], [18, 19]]
    clips = [(frames, np.full((2, 64, 64, 3), 7, np.uint8)) for frames in wanted]
    with ClipDecoder() as decoder:
        decoder.decode_many(stream, clips, crop=crops)
        with pytest.raises(InvalidArgument, match="4 clips, and a list of 3 crops"):
            decoder.decode_many(stream, clips, crop=crops[1:])
    for (frames, made), crop in zip(clips, crops, strict=True):
        assert np.array_equal(made, decode(stream, frames, (64, 64, 3), crop=crop))


@pytest.mark.parametrize("crop", [None, CropPosition(0.3, 0.1)])
@pytest.mark.parametrize("shape", [(32, 32), (64, 96), (48, 32), (80, 120)])
def test_planes_show_the_same_part_as_rgb(
    stream: EncodedStream, shape: tuple[int, int], crop: CropPosition | None
) -> None:
    height, width = shape
    rgb = decode(stream, [3, 30], (height, width, 3), crop=crop)
    planes = decode(stream, [3, 30], (height * 3 // 2, width), crop=crop, pixels="yuv420")
    weights = np.array([65.481, 128.553, 24.966]) / 255
    luma = 16 + rgb @ weights
    # Colours that RGB has not are clipped there.
    assert np.quantile(np.abs(planes[:, :height] - luma), 0.98) <= 2
    blue = (
        rgb.reshape(2, height // 2, 2, width // 2, 2, 3).mean((2, 4))
        @ np.array([-37.797, -74.203, 112.0])
        / 255
    )
    assert np.abs(planes[:, height:, : width // 2].astype(int) - 128 - blue).mean() < 3


@pytest.mark.parametrize("rotation", [0, 90, 180, 270])
def test_planes_are_turned_as_rgb_is(tmp_path: Path, rotation: int) -> None:
    turned = demux(str(write_video(tmp_path / "a.mov", scene(3), rotation=rotation)))
    rgb = decode(turned, [1], (48, 48, 3))
    planes = decode(turned, [1], (72, 48), pixels="yuv420")
    luma = 16 + rgb @ (np.array([65.481, 128.553, 24.966]) / 255)
    assert np.quantile(np.abs(planes[:, :48] - luma), 0.98) <= 2


def test_planes_are_always_of_bt601_and_limited(stream: EncodedStream, tmp_path: Path) -> None:
    plain = decode(stream, [5], (96, 64), pixels="yuv420")
    path = write_video(tmp_path / "a.mp4", scene(9), matrix=1, full_range=True)
    same = decode(demux(str(path)), [5], (96, 64), pixels="yuv420")
    assert np.abs(plain.astype(int) - same).mean() < 3


def test_planes_that_fit_are_copied_as_they_were_decoded(tmp_path: Path) -> None:
    path = write_video(tmp_path / "a.mp4", scene(5))
    with av.open(str(path)) as container:
        wanted = [frame.to_ndarray() for frame in container.decode(video=0)]
    found = decode(demux(str(path)), [0, 4], (96, 96), pixels="yuv420")
    for planes, plain in zip(found, (wanted[0], wanted[4]), strict=True):
        assert np.array_equal(planes[:64], plain[:64])
        assert np.array_equal(planes[64:, :48].ravel(), plain[64:80].ravel())
        assert np.array_equal(planes[64:, 48:].ravel(), plain[80:].ravel())


def test_clips_share_their_groups(stream: EncodedStream, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[int] = []

    def counting(number: int, *rest: Any, **named: Any) -> Any:
        sent.append(number)
        return numbered_packet(number, *rest, **named)

    asked = [[20, 21, 22], [5, 13, 21], [39], [21]]
    alone = [decode(stream, frames, (32, 32, 3)) for frames in asked]
    with ClipDecoder() as decoder:
        monkeypatch.setattr("shardio.media.clip_decoder.numbered_packet", counting)
        outs = [np.zeros_like(each) for each in alone]
        decoder.decode_many(stream, list(zip(asked, outs, strict=True)))
    assert len(sent) == len(set(sent)) > 0
    for found, wanted in zip(outs, alone, strict=True):
        assert np.array_equal(found, wanted)
    sent.clear()
    decode(stream, [11], (16, 16, 3))  # disposable packets are not sent
    spare = np.flatnonzero(packet_flags(stream.packets) & PacketFlag.DISPOSABLE)
    assert sent[0] in (0, 1) and len(sent) < 11 and len(set(sent) & set(spare.tolist())) <= 1


def test_decoders_kept_are_bounded(stream: EncodedStream, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []

    def counting(parameters: Any, extradata: bytes, **options: Any) -> Any:
        opened.append(parameters["codec"])
        return open_video_decoder(parameters, extradata, **options)

    monkeypatch.setattr("shardio.media.clip_decoder.open_video_decoder", counting)
    pictures = list(enumerate(scene(8, 32, 32)))
    parts = (pictures[:4], pictures[4:])
    streams = [encode(part, 32, 32, Fraction(1, 25)) for part in parts]
    assert streams[0].extradata == streams[1].extradata
    other = encode(pictures[:4], 32, 32, Fraction(1, 25), codec="hevc")
    out = np.empty((4, 32, 32, 3), np.uint8)
    monkeypatch.setattr("shardio.media.clip_decoder._MAX_DECODERS", 1)
    with ClipDecoder() as decoder:
        for each in (*streams, *streams, other, other, streams[0]):
            decoder.decode(each, range(4), out)
    assert opened == ["h264", "hevc", "h264"]
    with pytest.raises(InvalidArgument, match="max_streams is 0; at least 1 is needed"):
        ClipDecoder(max_streams=0)


def test_a_decoder_goes_on_after_damage(stream: EncodedStream) -> None:
    data = bytearray(stream.data[:])
    data[40 : len(data) // 2] = bytes(len(data) // 2 - 40)
    broken = replace(stream, data=bytes(data))
    out, wanted = np.empty((2, 16, 16, 3), np.uint8), decode(stream, [0, 39], (16, 16, 3))
    with ClipDecoder() as decoder:
        for _ in range(2):
            with pytest.raises(MediaError, match="packet 0 does not decode"):
                decoder.decode(broken, [0, 1], out)
            decoder.decode(stream, [0, 39], out)
            assert np.array_equal(out, wanted)


def test_damage_read_as_parameters_stays_alone(stream: EncodedStream, tmp_path: Path) -> None:
    other = {"x264-params": "chroma-qp-offset=10:bframes=3:keyint=12"}
    extradata = demux(str(write_video(tmp_path / "a.mp4", scene(2), codec_options=other))).extradata
    at = 9 + int.from_bytes(extradata[6:8], "big")  # behind the sequence's parameters, and a count
    parameters = extradata[at + 2 : at + 2 + int.from_bytes(extradata[at : at + 2], "big")]
    rest = int(packet_sizes(stream.packets)[0]) - 8 - len(parameters)
    first = len(parameters).to_bytes(4, "big") + parameters
    first += rest.to_bytes(4, "big") + b"\x65" + bytes(rest - 1)
    broken = replace(stream, data=first + bytes(stream.data[len(first) :]))
    out, wanted = np.empty((3, 16, 16, 3), np.uint8), decode(stream, [12, 20, 39], (16, 16, 3))
    with ClipDecoder() as decoder:
        with pytest.raises(MediaError, match="packet 0 does not decode"):
            decoder.decode(broken, [0, 1, 2], out)
        decoder.decode(stream, [12, 20, 39], out)
    assert np.array_equal(out, wanted)


def with_parameters_within(one: EncodedStream, other: EncodedStream, units: bytes) -> EncodedStream:
    """One stream and another behind it, whose keyframes bring their parameter sets with them."""
    flags = [*packet_flags(one.packets).tolist(), *packet_flags(other.packets).tolist()]
    parts = []
    for stream in (one, other):
        ends = [*stream.packets["offset"][1:].tolist(), len(stream.data)]
        parts += [
            bytes(stream.data[begin:end])
            for begin, end in zip(stream.packets["offset"].tolist(), ends, strict=True)
        ]
    for i in range(len(one.packets), len(parts)):
        if flags[i] & PacketFlag.KEY:
            parts[i] = units + parts[i]
    later = int(one.packets["pts"].max()) + 1 + other.packets["pts"]
    packets = pack_packets(
        [len(part) for part in parts],
        flags,
        [*one.packets["pts"].tolist(), *later.tolist()],
        [*one.packets["duration"].tolist(), *other.packets["duration"].tolist()],
    )
    n_frames = one.n_frames + other.n_frames
    return replace(one, packets=packets, data=b"".join(parts), n_frames=n_frames)


@pytest.mark.parametrize("codec", ["libx264", "libx265"])
def test_parameters_that_change_change_no_other_frames(codec: str, tmp_path: Path) -> None:
    made = []
    for name, offset in (("a", 0), ("b", 0), ("c", 10)):
        settings = {
            "libx264": f"chroma-qp-offset={offset}:bframes=0:keyint=6:scenecut=0",
            "libx265": f"cbqpoffs={offset}:bframes=0:keyint=6:scenecut=0:info=0:log-level=none",
        }
        option = {f"{codec[3:]}-params": settings[codec]}
        images = scene(12)[:: -1 if name == "b" else 1]
        path = write_video(tmp_path / f"{name}.mp4", images, codec=codec, codec_options=option)
        made.append(demux(str(path)))
    one, alike, other = made
    assert one.extradata == alike.extradata != other.extradata
    units = parameter_sets(str(other.parameters["codec"]), other.extradata)
    mixed = with_parameters_within(one, other, units)
    shape = (32, 32, 3)
    wanted = [decode(each, list(range(12)), shape) for each in made]
    assert not np.array_equal(wanted[0], wanted[2])
    out = np.empty((6, *shape), np.uint8)
    with ClipDecoder() as decoder:
        for stream, first, expected in (
            (mixed, 12, wanted[2][:6]),
            (alike, 0, wanted[1][:6]),
            (mixed, 18, wanted[2][6:]),
            (mixed, 0, wanted[0][:6]),
            (mixed, 18, wanted[2][6:]),
            (mixed, 6, wanted[0][6:]),
            (alike, 6, wanted[1][6:]),
        ):
            decoder.decode(stream, range(first, first + 6), out)
            np.testing.assert_array_equal(out, expected)
        assert len(decoder._decoders) == 1


def test_a_packet_tells_whether_it_changes_parameters(tmp_path: Path) -> None:
    made = []
    for offset in (0, 10):
        option = {"x264-params": f"chroma-qp-offset={offset}:bframes=0:keyint=4:scenecut=0"}
        path = tmp_path / f"{offset}.mts"
        write_video(path, scene(8), container="mpegts", codec_options=option)
        made.append(demux(str(path)))
    one, other = made
    assert parameter_sets("h264", one.extradata) == one.extradata != other.extradata
    brings = parameter_change_test("h264", one.extradata)
    for stream, expected in ((one, [False] * 8), (other, [True, *[False] * 3] * 2)):
        ends = packet_sizes(stream.packets).cumsum().tolist()
        data, begins = memoryview(bytes(stream.data[:])), [0, *ends]
        found = [brings(data[i:k]) for i, k in zip(begins, ends, strict=False)]
        assert found == expected
    assert brings(memoryview(b"\0\0\1\x06" + b"\x05" * 5000))


@pytest.mark.parametrize(
    ("codec", "extradata", "expected"),
    [
        ("h264", b"", b""),
        ("h264", b"\1abc\xff\xe1\0\2AB\1\0\1C", b"\0\0\0\2AB\0\0\0\1C"),
        ("h264", b"\1abc\xff\xe1\0\2AB\1\0\2C", b""),
        ("hevc", b"\1" * 21 + b"\xff\1\x20\0\2\0\1A\0\1B", b"\0\0\0\1A\0\0\0\1B"),
        ("hevc", b"\1" * 21 + b"\xff\2\x20\0\1\0\1A", b""),
        ("av1", b"\x81", b""),
    ],
)
def test_parameter_sets_of_extradata(codec: str, extradata: bytes, expected: bytes) -> None:
    assert parameter_sets(codec, extradata) == expected


def test_a_refreshed_stream_is_decoded_from_an_earlier_keyframe(tmp_path: Path) -> None:
    options = {"g": "10", "bf": "0", "x264-params": "intra-refresh=1:keyint=10"}
    path = write_video(tmp_path / "a.mts", scene(60), container="mpegts", codec_options=options)
    whole = demux(str(path), check=True)
    flags = packet_flags(whole.packets)
    lie = np.where(np.arange(len(flags)) % 10 == 0, flags | PacketFlag.KEY, flags)
    packets = whole.packets.copy()
    packets["stored"] = packets["stored"] & np.uint64((1 << 48) - 1) | lie.astype(
        np.uint64
    ) << np.uint64(48)
    claimed = replace(whole, packets=packets)
    frames = list(range(30, 36))
    assert np.array_equal(decode(claimed, frames, (32, 32, 3)), decode(whole, frames, (32, 32, 3)))


@pytest.mark.parametrize(
    ("parameters", "reason"),
    [
        ({"codec": "no_such"}, "FFmpeg has no decoder 'no_such' here"),
        ({}, "FFmpeg has no decoder None here"),
        ({"codec": "aac"}, "the codec 'aac' is not a video codec"),
        ({"codec": "h264", "width": -4}, "a stream's width is -4"),
        ({"codec": "h264", "height": "9"}, "a stream's height is '9'"),
        ({"codec": "h264", "pixel_format": "no"}, "parameters are not acceptable"),
        ({"codec": "h264", "sample_aspect": "4/3"}, "sample_aspect is '4/3'"),
        ({"codec": "h264", "display": [1, 2]}, "display is "),
        ({"codec": "h264", "display": [1 << 40] * 9}, "display is "),
        ({"codec": "h264", "lead_in": "xyz"}, "lead_in is not hexadecimal text"),
    ],
)
def test_hostile_parameters(stream: EncodedStream, parameters: dict[str, Any], reason: str) -> None:
    with pytest.raises(MediaError, match=reason):
        decode(replace(stream, parameters=parameters), [0], (16, 16, 3))


@pytest.mark.parametrize(
    ("shape", "options", "reason"),
    [
        ((2, 16, 16), {}, r"rgb needs \(n, height, width, 3\)"),
        ((3, 16, 16, 3), {}, "2 frames need uint8"),
        ((2, 16, 16, 3), {"pixels": "yuv420"}, "yuv420 needs"),
        ((2, 33, 22), {"pixels": "yuv444"}, "pixels is 'yuv444'"),
        ((2, 33, 21), {"pixels": "yuv420"}, "expected even sides"),
    ],
)
def test_arrays_and_options_that_do_not_fit_are_refused(
    stream: EncodedStream, shape: tuple[int, ...], options: dict[str, Any], reason: str
) -> None:
    with ClipDecoder() as decoder, pytest.raises(InvalidArgument, match=reason):
        decoder.decode(stream, [0, 1], np.empty(shape, np.uint8), **options)


def test_fast_colours_of_real_clips(media_root: Path) -> None:
    """Real pictures have few edges of colour: their error is that of repeated chroma."""
    found = []
    for path in sorted((media_root / "clips").rglob("*.*")):
        video = demux(str(path))
        frames, shape = [int(keyframes_of(video)[-1])], (video.height, video.width, 3)
        exact = decode(video, frames, shape).astype(np.int16)
        found.append(np.abs(exact - decode(video, frames, shape, pixels="rgb-fast")).mean())
    assert 0 < np.mean(found) < 2 and max(found) < 5
