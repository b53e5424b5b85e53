"""Planes: pictures that come back bit by bit, whatever is asked of them, or clear errors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zstandard

from shardio import Audio, Schema, ShardReader, ShardWriter, Video
from shardio.errors import InvalidArgument, MediaError, SchemaError
from shardio.format.layout import Required
from shardio.format.types.streams import (
    EncodedStream,
    PacketFlag,
    pack_packets,
    packet_flags,
    packet_sizes,
)
from shardio.maintenance import verify_shard
from shardio.media import ClipDecoder, CropPosition, PlanesEncoder, StoredVideo, demux, mux
from tests.media_made import Image, scene

BASE = Fraction(1001, 30_000)
N_BYTES = 64 * 48 * 3 // 2


def planes(n: int = 20, width: int = 64, height: int = 48) -> Image:
    """Return pictures as planes that are all different, with detail in luma and chroma."""
    rgb = np.stack(scene(n, width, height))
    luma = rgb[..., 1]
    chroma = np.concatenate([rgb[:, ::2, ::2, 0], rgb[:, ::2, ::2, 2]], axis=2)
    return np.concatenate([luma, chroma], axis=1)


def stored(pictures: Image, **options: Any) -> EncodedStream:
    height, width = pictures.shape[1] * 2 // 3, pictures.shape[2]
    encoder = PlanesEncoder(width, height, BASE, **options)
    for time, picture in enumerate(pictures):
        encoder.add(3 * time - 4, picture)
    return encoder.finish()


def decoded(
    stream: EncodedStream, frames: Any, size: tuple[int, int] | None = None, **options: Any
) -> Image:
    height, width = size or (stream.height, stream.width)
    is_yuv = options.get("pixels", "yuv420") == "yuv420"
    shape = (height * 3 // 2, width) if is_yuv else (height, width, 3)
    out = np.empty((len(frames), *shape), np.uint8)
    with ClipDecoder() as decoder:
        decoder.decode(stream, frames, out, **{"pixels": "yuv420", **options})
    return out


WAYS: list[dict[str, Any]] = [
    {},
    {"gop": 1},
    {"gop": 7},
    {"gop": 100},
    {"codec": "raw", "gop": 1},
    {"codec": "raw"},
]
ways = pytest.mark.parametrize("options", WAYS, ids=repr)


@ways
def test_pictures_come_back_bit_by_bit(options: dict[str, Any]) -> None:
    pictures = planes()
    stream = stored(pictures, **options)
    assert np.array_equal(decoded(stream, range(20)), pictures)
    keys = np.flatnonzero(packet_flags(stream.packets) & PacketFlag.KEY)
    assert keys.tolist() == list(range(0, 20, options.get("gop", 4)))
    assert stream.packets["pts"].tolist() == [3 * n - 4 for n in range(20)]
    assert (stream.n_frames, stream.width, stream.height, stream.duration) == (20, 64, 48, 60)
    is_raw = options.get("codec") == "raw"
    assert (packet_sizes(stream.packets) == N_BYTES).all() == is_raw


@ways
def test_frames_are_found_in_any_order(options: dict[str, Any]) -> None:
    pictures, frames = planes(), [13, 2, 2, 19, 0, 11, 12]
    stream = stored(pictures, **options)
    assert np.array_equal(decoded(stream, frames), pictures[frames])
    outs = [np.empty((3, 72, 64), np.uint8) for _ in range(2)]
    crops: list[CropPosition | None] = [None, CropPosition(0, 1)]
    with ClipDecoder() as decoder:
        clips = [([5, 6, 7], outs[0]), ([6, 9, 5], outs[1])]
        decoder.decode_many(stream, clips, crop=crops, pixels="yuv420")
    assert np.array_equal(outs[0], pictures[[5, 6, 7]])
    assert np.array_equal(outs[1], pictures[[6, 9, 5]])


def test_noise_is_stored_as_it_is_and_comes_back() -> None:
    noise = np.random.default_rng(0).integers(0, 256, (5, 72, 64), np.uint8)
    stream = stored(noise)
    assert packet_sizes(stream.packets).tolist() == [N_BYTES] * 5
    assert np.array_equal(decoded(stream, range(5)), noise)


def test_a_zstd_frame_as_long_as_its_picture_is_not_stored() -> None:
    rng, lengths = np.random.default_rng(0), set()
    for n_same in range(80):
        picture = rng.integers(0, 256, 84, np.uint8)
        picture[:n_same] = 100
        lengths.add(len(zstandard.compress(picture.tobytes())))
        found = decoded(stored(picture.reshape(1, 6, 14)), [0])
        assert found.tobytes() == picture.tobytes()
    assert 84 in lengths


@pytest.mark.parametrize("crop", [None, CropPosition(0.3, 0.9)])
@pytest.mark.parametrize("size", [(48, 64), (32, 32), (24, 32), (48, 48), (96, 128), (20, 64)])
@pytest.mark.parametrize("pixels", ["rgb", "yuv420"])
def test_pixels_are_those_of_a_decoded_video_of_the_same_planes(
    pixels: str, size: tuple[int, int], crop: CropPosition | None
) -> None:
    stream = stored(planes(4))
    muxed = mux(stream)
    video = demux(muxed.data, "video")
    assert video.parameters["codec"] == "ffv1" and muxed.suffix == ".mp4"
    options: dict[str, Any] = {"size": size, "crop": crop, "pixels": pixels}
    found = decoded(stream, range(4), **options)
    assert np.array_equal(found, decoded(video, range(4), **options))
    assert len({each.tobytes() for each in found}) == 4


def test_a_file_of_planes_has_the_times_of_the_stream() -> None:
    stream = stored(planes(5))
    video = demux(mux(stream).data, "video")
    scale = BASE / video.time_base
    shifted = (stream.packets["pts"] + 4) * scale.numerator
    assert scale.denominator == 1 and video.packets["pts"].tolist() == shifted.tolist()
    assert (video.width, video.height) == (64, 48)
    assert (video.parameters["matrix"], video.parameters["range"]) == ("bt601", "limited")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"width": 63}, "63x48 pixels"),
        ({"height": 0}, "64x0 pixels"),
        ({"gop": 0}, "gop 0"),
        ({"codec": "h264"}, "codec 'h264'; expected .* 'zstd' or 'raw'"),
    ],
)
def test_options_that_no_planes_have_are_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidArgument, match=said):
        PlanesEncoder(**{"width": 64, "height": 48, "time_base": BASE, **options})


def test_pictures_that_are_no_planes_are_refused() -> None:
    encoder = PlanesEncoder(64, 48, BASE)
    with pytest.raises(MediaError, match="no picture to encode"):
        encoder.finish()
    with pytest.raises(InvalidArgument, match=r"expected uint8 of \(72, 64\)"):
        encoder.add(0, np.zeros((48, 64, 3), np.uint8))
    encoder.add(5, np.zeros((72, 64), np.uint8))
    with pytest.raises(InvalidArgument, match="a picture at 5 follows one at 5"):
        encoder.add(5, np.zeros((72, 64), np.uint8))


# Damage. Each case says by which rule a packet, or the table, is refused.
# tests/corruption/test_forged_media.py puts such damage into shards, where verification finds it.


def with_packet(stream: EncodedStream, number: int, packet: bytes) -> EncodedStream:
    """Return the stream with another packet in the place of packet `number`."""
    ends = np.cumsum(packet_sizes(stream.packets)).tolist()
    packets = [bytes(stream.data[a:b]) for a, b in zip([0, *ends], ends, strict=False)]
    packets[number] = packet
    return replace(
        stream,
        data=b"".join(packets),
        packets=pack_packets(
            list(map(len, packets)),
            packet_flags(stream.packets),
            stream.packets["pts"],
            stream.packets["duration"],
        ),
    )


def with_column(stream: EncodedStream, name: str, number: int, value: int) -> EncodedStream:
    packets = stream.packets.copy()
    packets[name][number] = value
    return replace(stream, packets=packets)


def with_flags(stream: EncodedStream, number: int, flags: int) -> EncodedStream:
    size = int(packet_sizes(stream.packets)[number])
    return with_column(stream, "stored", number, size | flags << 48)


def frame_of(content: bytes, **options: Any) -> bytes:
    return zstandard.ZstdCompressor(**options).compress(content)


def first_packet(stream: EncodedStream) -> bytes:
    return bytes(stream.data[: int(packet_sizes(stream.packets)[0])])


Damage = Callable[[EncodedStream], EncodedStream]
DAMAGED: list[tuple[Damage, str]] = [
    (lambda s: with_packet(s, 0, bytes(N_BYTES + 1)), "packet 0 .* expected 4608, found 4609"),
    (lambda s: with_packet(s, 2, b""), "packet 2 .* expected 4608, found 0"),
    (lambda s: with_packet(s, 0, bytes(N_BYTES - 1)), r"packet 0 .* not a zstd frame \([^)]*\)$"),
    (lambda s: with_packet(s, 0, first_packet(s)[:-9]), "packet 0 .* zstd frame is damaged"),
    (
        lambda s: with_packet(s, 0, first_packet(s) + b"\0"),
        "packet 0 of planes: the zstd frame is dam",
    ),
    (lambda s: with_packet(s, 0, 2 * first_packet(s)), "packet 0 of planes"),
    (
        lambda s: with_packet(s, 1, frame_of(bytes(N_BYTES + 1))),
        "packet 1 .* expected 4608, found 4609",
    ),
    (
        lambda s: with_packet(s, 1, frame_of(bytes(1 << 26))),
        "packet 1 .* expected 4608, found 67108864",
    ),
    (
        lambda s: with_packet(s, 1, frame_of(bytes(N_BYTES), write_content_size=False)),
        "packet 1 .* expected 4608, found -1",
    ),
    (lambda s: with_flags(s, 0, 0), "packet 0 .* no keyframe: expected 1, found 0"),
    (lambda s: with_flags(s, 4, 5), "packet 4 .* disposable.*: expected 1, found 5"),
    (lambda s: with_flags(s, 5, 4), "packet 5 .* disposable.*: expected 1, found 4"),
    (lambda s: with_flags(replace(s, n_frames=19), 5, 2), "packet 5 .* hidden"),
    (
        lambda s: with_column(s, "pts", 7, -4),
        "packet 7 .* not shown after .* expected 15, found -4",
    ),
    (lambda s: replace(s, width=62), "packet 0 .* expected 4464, found 4608"),
    (lambda s: replace(s, width=63), "width of planes is odd: expected 64, found 63"),
    (lambda s: replace(s, height=49), "height or width of planes is odd: expected 50, found 49"),
    (lambda s: replace(s, width=1 << 31, height=1 << 31), "packet 0 .* cannot hold"),
]


@pytest.mark.parametrize(("damage", "said"), DAMAGED, ids=[said for _, said in DAMAGED])
def test_damage_is_neither_decoded_nor_written(tmp_path: Path, damage: Damage, said: str) -> None:
    stream = damage(stored(planes()))
    with pytest.raises(MediaError, match=said):
        decoded(stream, range(8), (16, 16))
    with ShardWriter(tmp_path / "a.shard", Schema({"video": Video()})) as writer:
        writer.append({"video": stored(planes())})
        with pytest.raises(SchemaError, match=f"sample 1: field 'video': .*{said}"):
            writer.append({"video": stream})
    assert verify_shard(tmp_path / "a.shard") == []


def test_an_unpacked_bomb_takes_no_memory() -> None:
    """A picture of 3 GiB needs a packet of at least 96 KiB, which justifies its memory."""
    bomb = replace(stored(planes(1)), width=1 << 16, height=1 << 15)
    with pytest.raises(MediaError, match="cannot hold a picture of 3221225472 bytes"):
        decoded(bomb, [0], (16, 16))


def test_parameters_and_extradata_of_planes_are_not_used() -> None:
    pictures = planes(3)
    hostile = {"codec": "planes", "width": -1, "display": 7, "sample_aspect": "4:3", "reorder": "x"}
    stream = replace(stored(pictures), parameters=hostile, extradata=b"extra")
    assert np.array_equal(decoded(stream, [2, 0]), pictures[[2, 0]])


def test_a_decoder_goes_on_after_damage() -> None:
    stream, pictures = stored(planes()), planes()
    broken = with_packet(stream, 5, bytes(9))
    out = np.empty((3, 72, 64), np.uint8)
    with ClipDecoder() as decoder:
        with pytest.raises(MediaError, match="packet 5"):
            decoder.decode(broken, [4, 5, 6], out, pixels="yuv420")
        decoder.decode(broken, [8, 9, 1], out, pixels="yuv420")
    assert np.array_equal(out, pictures[[8, 9, 1]])


# In a shard.


def test_shards_of_planes_name_the_feature_and_no_others_do(tmp_path: Path) -> None:
    of_planes, other = stored(planes(2)), demux(mux(stored(planes(2))).data, "video")
    sound = replace(other, parameters={"codec": "planes"})
    cases: list[tuple[Schema, list[dict[str, Any]], bool]] = [
        (Schema({"video": Video()}), [{"video": other}, {"video": of_planes}], True),
        (Schema({"video": Video()}), [{"video": other}], False),
        (Schema({"video": Video(optional=True)}), [{"video": None}], False),
        (Schema({"sound": Audio()}), [{"sound": sound}], True),
    ]
    for n, (schema, samples, is_set) in enumerate(cases):
        path = tmp_path / f"{n}.shard"
        with ShardWriter(path, schema) as writer:
            for sample in samples:
                writer.append(sample)
        with ShardReader(path) as reader:
            assert bool(Required(reader.header.required) & Required.PLANES) == is_set
        assert verify_shard(path) == []


def test_a_stored_video_of_planes_decodes_and_shows_itself(tmp_path: Path) -> None:
    with ShardWriter(tmp_path / "a.shard", Schema({"video": Video()})) as writer:
        writer.append({"video": stored(planes())})
    with ShardReader(tmp_path / "a.shard", verify="always") as reader:
        video = reader[0]["video"]
        assert isinstance(video, StoredVideo)
        assert video.decode(frames=[3, 19]).shape == (2, 48, 64, 3)
        assert repr(video) == "StoredVideo(planes, 48 high × 64 wide, 20 frames, 2.00 s)"
        assert "data:image/jpeg" in video._repr_html_()
