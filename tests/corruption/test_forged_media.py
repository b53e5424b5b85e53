"""Forged pictures and streams: one rule of their tables or values broken each, every hash right."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardio.errors import ChecksumMismatch, MediaError
from shardio.format.checksum import hash_bytes
from shardio.format.layout import Kind, Required
from shardio.format.types.streams import PACKET_DTYPE, STREAM_DTYPE
from shardio.maintenance.verify.shard import verify_bytes
from shardio.media import ClipDecoder
from tests.corruption import forge
from tests.corruption.damage import Victim, assert_refused, table
from tests.corruption.forge import PAYLOAD, Change, Forgery, codes_of, read_bytes
from tests.corruption.test_forged_structure import drop, move
from tests.shards import same_sample

PACKETS, STREAMS, CHUNKS = ((k, 0, 0) for k in (Kind.PACKETS, Kind.STREAMS, Kind.CHUNK_HASHES))
"""The tables of `video`, the first field."""
_BIG = (1 << 64) - 1


@pytest.fixture(scope="module")
def media(tmp_path_factory: pytest.TempPathFactory) -> bytearray:
    """Return a shard of MEDIA_RULES that breaks none; not to be changed."""
    place = tmp_path_factory.mktemp("media") / "m.shard"
    return forge.content_of(place, forge.MEDIA_RULES, forge.media_rules_samples())


def changed(forgery: Forgery, key: Any, dtype: np.dtype[Any], at: int, **changes: int) -> None:
    lines = np.frombuffer(forgery.contents[key], dtype).copy()
    for name, number in changes.items():
        lines[name][at] = number
    forgery.contents[key] = lines.tobytes()


def line(name: str = "video", row: int = 2, **changes: int) -> Change:
    def change(forgery: Forgery) -> None:
        changed(forgery, forgery.column(name, Kind.STREAMS), STREAM_DTYPE, row, **changes)

    return change


def packet(number: int, **changes: int) -> Change:
    return lambda forgery: changed(forgery, PACKETS, PACKET_DTYPE, number, **changes)


def packet_flag(forgery: Forgery) -> None:
    stored = int(np.frombuffer(forgery.contents[PACKETS], PACKET_DTYPE)["stored"][13])
    packet(13, stored=stored | 8 << 48)(forgery)


def picture(name: str, *shape: int) -> Change:
    def change(forgery: Forgery) -> None:
        dims = np.array(shape, "<u8").tobytes()
        forgery.change(forgery.column(name, Kind.SHAPES), 2 * len(dims), dims)

    return change


def entry(name: str, **changes: int) -> Change:
    return lambda forgery: forgery.change_entry(name, 2, **changes)


def no_bytes(name: str) -> Change:
    return entry(name, n_stored=0, n_bytes=0, hash_=hash_bytes(b""))


def missing(forgery: Forgery) -> None:
    """Clear the bit that says that row 2 has a picture; the picture stays."""
    key = forgery.column("maybe", Kind.VALIDITY)
    forgery.change(key, 0, bytes([forgery.contents[key][0] & ~0b100]))


def parameters(old: bytes, new: bytes) -> Change:
    """Other bytes in the parameters of row 2's video."""

    def change(forgery: Forgery) -> None:
        _, found = forgery.entry("video", 2)
        at = int(found["offset"])
        head = forgery.contents[PAYLOAD][at : at + 60].replace(old, new)
        forgery.change(PAYLOAD, at, head)
        assert len(old) == len(new) and head.count(new)

    return change


HEAD = '{"codec":"h264","ü":[1,null]}'.encode()

BROKEN_MEDIA: list[tuple[str, Change, str]] = [
    ("a picture of no height", picture("image", 0, 3, 3), "picture"),
    ("a picture of 5 channels", picture("image", 4, 3, 5), "picture"),
    ("a picture of 2^31 pixels in a row", picture("image", 4, 1 << 31, 3), "picture"),
    ("a picture of no bytes", no_bytes("image"), "index_entry"),
    ("a picture that is there and has no bytes", no_bytes("maybe"), "validity"),
    ("a picture that is not there and has bytes", missing, "validity"),
    ("a picture that is compressed", entry("image", codec=1), "index_entry"),
    ("a video of no bytes", no_bytes("video"), "index_entry"),
    ("a video that is compressed", entry("video", codec=1), "index_entry"),
    ("sound that is there and has no bytes", no_bytes("sound"), "validity"),
    ("no sound, and a number of samples", line("sound", 1, n_frames=1), "stream"),
    ("no sound, and a packet", line("sound", 1, n_packets=1), "stream"),
    ("packets beyond the table", line(first_packet=20), "stream"),
    ("packets that wrap", line(first_packet=_BIG), "stream"),
    ("more packets than the table has", line(n_packets=_BIG), "stream"),
    ("chunks beyond the table", line(first_chunk=9), "stream"),
    ("chunks that wrap", line(first_chunk=_BIG), "stream"),
    ("parameters longer than the record", line(parameter_bytes=1 << 19), "stream"),
    ("parameters longer than they may be", line(parameter_bytes=(1 << 20) + 1), "stream"),
    ("no parameters", line(parameter_bytes=0), "stream"),
    ("extradata longer than the record", line(extradata_bytes=(1 << 32) - 1), "stream"),
    ("a time base of nothing", line(numerator=0), "stream"),
    ("a time base divided by nothing", line(denominator=0), "stream"),
    ("a time base not in lowest terms", line(numerator=2), "stream"),
    ("a width of 0", line(width=0), "stream"),
    ("a packet too few", line(n_packets=5), "packet"),
    ("packets that overlap", packet(14, offset=1), "packet"),
    ("a packet that reaches beyond", packet(17, stored=1 << 40), "packet"),
    ("packets that wrap around to the start", packet(13, offset=_BIG), "packet"),
    ("a packet with an unknown flag", packet_flag, "packet"),
    ("a frame too many", line(n_frames=6), "frames"),
    ("parameters that are no JSON", parameters(b'{"codec', b'["codec'), "parameters"),
    ("parameters that are no UTF-8", parameters(b"\xc3\xbc", b"\xc3\xff"), "parameters"),
    ("parameters that are a list", parameters(HEAD, b"[%s]" % (b"1" * 28)), "parameters"),
    ("parameters without a codec", parameters(b"codec", b"kodec"), "parameters"),
    ("parameters with Infinity", parameters(HEAD, b'{"codec":"h264","ab":Infinity}'), "parameters"),
    ("a codec that is a number", parameters(b'"h264"', b"123456"), "parameters"),
]

STRUCTURE_MEDIA: list[tuple[str, Change, str]] = [
    ("packets of another stride", move(PACKETS, stride=16), "section"),
    ("more packets than the section has", move(PACKETS, count=99), "section"),
    ("packets whose size wraps", move(PACKETS, count=1 << 59), "section"),
    ("a line too many", move(STREAMS, count=5), "section"),
    ("no lines of streams", drop(STREAMS), "section"),
    ("no hashes of chunks", drop(CHUNKS), "section"),
    ("no feature bit for sound", lambda f: without(f, Required.AUDIO), "feature"),
    ("no feature bit for pictures", lambda f: without(f, Required.IMAGES), "feature"),
    ("no feature bit for videos", lambda f: without(f, Required.VIDEOS), "feature"),
]


def without(forgery: Forgery, feature: Required) -> None:
    forgery.header_changes["required"] = forgery.header.required & ~int(feature)


@pytest.mark.parametrize(("change", "code"), **table(BROKEN_MEDIA))
@pytest.mark.parametrize("verify", ["first", "off"])
def test_refusals(media: bytearray, tmp_path: Path, change: Change, code: str, verify: str) -> None:
    forgery = Forgery.of(media)
    change(forgery)
    content = forgery.seal()
    error = assert_refused(tmp_path / "m.shard", content, code, verify)
    assert error.field and error.sample is not None and error.offset
    found = {(f.code, f.field, f.sample) for f in verify_bytes(memoryview(content), "m").findings}
    assert (code, error.field, error.sample) in found


@pytest.mark.parametrize(("change", "code"), **table(STRUCTURE_MEDIA))
def test_tables_without_need(media: bytearray, tmp_path: Path, change: Change, code: str) -> None:
    forgery = Forgery.of(media)
    change(forgery)
    assert_refused(tmp_path / "m.shard", forgery.seal(), code)


# --- what only verification sees ------------------------------------------------------------------


def grow(forgery: Forgery, key: Any, more: bytes) -> None:
    forgery.contents[key] += more
    section = forgery.sections[key]
    forgery.table_changes[key] = {"count": len(forgery.contents[key]) // section.stride}


def moved_packets(forgery: Forgery) -> None:
    """Move the last video's packets behind all others, where no table points."""
    grow(forgery, PACKETS, forgery.contents[PACKETS][18 * PACKET_DTYPE.itemsize :])
    line(row=3, first_packet=24)(forgery)


def wrong_hash_of_hashes(forgery: Forgery) -> None:
    forgery.rehash_chunks = False
    forgery.change_entry("video", 2, hash_=1)


REORDERED = '{"ü":[1,null],"codec":"h264"}'.encode()

VERIFIED_MEDIA: list[tuple[str, Change, list[str]]] = [
    ("packets of no stream", lambda f: grow(f, PACKETS, bytes(32)), ["counting"]),
    ("chunks of no stream", lambda f: grow(f, CHUNKS, bytes(8)), ["counting"]),
    ("packets in another order than the streams", moved_packets, ["counting"]),
    ("a hash that is not that of chunks' hashes", wrong_hash_of_hashes, ["chunks"]),
    ("parameters with keys in another order", parameters(HEAD, REORDERED), ["parameters"]),
]


@pytest.mark.parametrize(("change", "codes"), **table(VERIFIED_MEDIA))
def test_a_verify_finds(media: bytearray, tmp_path: Path, change: Change, codes: list[str]) -> None:
    forgery = Forgery.of(media)
    change(forgery)
    content = forgery.seal()
    assert codes_of(content) == codes
    found = read_bytes(tmp_path, content)
    assert all(map(same_sample, found, forge.media_rules_samples()))


# --- planes: the rules of their packets, which decoding and verification check --------------------


@pytest.fixture(scope="module")
def planes(tmp_path_factory: pytest.TempPathFactory) -> bytearray:
    """Return a shard of two videos of planes that break no rule; not to be changed."""
    place = tmp_path_factory.mktemp("planes") / "p.shard"
    return forge.content_of(place, forge.SMALL_VIDEOS, forge.small_planes())


def flags(number: int, value: int) -> Change:
    def change(forgery: Forgery) -> None:
        stored = int(np.frombuffer(forgery.contents[PACKETS], PACKET_DTYPE)["stored"][number])
        packet(number, stored=stored & (1 << 48) - 1 | value << 48)(forgery)

    return change


def bytes_of(row: int, number: int, new: bytes) -> Change:
    """Return a change of the first bytes of a packet, which must not be shorter than `new`."""

    def change(forgery: Forgery) -> None:
        _, entry = forgery.entry("video", row)
        lines = np.frombuffer(forgery.contents[PACKETS], PACKET_DTYPE)[3 * row : 3 * row + 3]
        n_data = int(lines["offset"][2]) + (int(lines["stored"][2]) & (1 << 48) - 1)
        start = int(entry["offset"]) + int(entry["n_bytes"]) - n_data
        forgery.change(PAYLOAD, start + int(lines["offset"][number]), new)

    return change


def cut_packet(forgery: Forgery) -> None:
    """Move the border between the first two packets of the first video by one byte."""
    lines = np.frombuffer(forgery.contents[PACKETS], PACKET_DTYPE)
    first, second = (int(each) for each in lines["stored"][:2])
    packet(0, stored=first - 1)(forgery)
    packet(1, stored=second + 1, offset=int(lines["offset"][1]) - 1)(forgery)


FRAME_HEAD = b"\x28\xb5\x2f\xfd\x20"
"""The start of a zstd frame, before the size of its content."""

FORGED_PLANES: list[tuple[str, Change, str]] = [
    ("a first packet that is a difference", flags(0, 0), "packet 0 .* no keyframe"),
    ("a keyframe that is disposable", flags(2, 5), "packet 2 .* disposable"),
    ("a difference that is disposable", flags(4, 4), "packet 1 .* disposable"),
    ("times that fall", packet(1, pts=-1), "packet 1 .* not shown after"),
    ("two packets of one time", packet(5, pts=1), "packet 2 .* not shown after"),
    ("an odd width", line(row=0, width=7), "the height or width of planes is odd"),
    ("an odd height", line(row=1, height=9), "the height or width of planes is odd"),
    ("planes smaller than a packet", line(row=1, height=6), "packet 0 .* 72 bytes"),
    ("planes larger than a packet", line(row=1, height=10), "packet 0 of planes: .*not a zstd"),
    ("planes that no packet can hold", line(row=0, height=1 << 31), "packet 0 .* cannot hold"),
    ("a frame without its magic number", bytes_of(0, 1, b"none"), "packet 1 of planes: .*not a z"),
    (
        "a frame of another size",
        bytes_of(0, 2, b"\x28\xb5\x2f\xfd\x20\x47"),
        "packet 2 .* 72, found",
    ),
    ("a packet that is cut", cut_packet, "packet 0 of planes: .*zstd"),
]


@pytest.mark.parametrize(("change", "said"), **table(FORGED_PLANES))
def test_forged_planes(planes: bytearray, tmp_path: Path, change: Change, said: str) -> None:
    forgery = Forgery.of(planes)
    change(forgery)
    content = forgery.seal()
    assert set(codes_of(content)) == {"planes"}
    found = read_bytes(tmp_path, content)
    failures = []
    with ClipDecoder() as decoder:
        for stream in (sample["video"] for sample in found[:2]):
            out = np.empty((3, 16, 16, 3), np.uint8)
            try:
                decoder.decode(stream, range(3), out)
            except MediaError as error:
                failures.append(str(error))
    assert len(failures) == 1 and re.match(said, failures[0])


@pytest.mark.parametrize("name", ["planes", "media"])
def test_a_feature_bit_of_planes_that_is_wrong_is_found(
    planes: bytearray, media: bytearray, name: str
) -> None:
    forgery = Forgery.of(planes if name == "planes" else media)
    forgery.header_changes["required"] = forgery.header.required ^ int(Required.PLANES)
    assert codes_of(forgery.seal()) == ["feature"]


def test_a_forgery_of_media_that_changes_nothing_is_the_same_shard(media: bytearray) -> None:
    assert Forgery.of(media).seal() == media


def test_a_chunk_with_another_hash_is_refused_when_read(media: bytearray, tmp_path: Path) -> None:
    forgery = Forgery.of(media)
    forgery.rehash_chunks = False
    forgery.change(CHUNKS, 4 * 8, bytes(8))  # the second of the last video
    content = forgery.seal()
    error = read_bytes(tmp_path, content)
    assert isinstance(error, ChecksumMismatch)
    assert (error.field, error.sample) == ("video", 3)
    assert codes_of(content) == ["chunks", "checksum"]


# --- damage to the new sections -------------------------------------------------------------------


def test_every_bit_of_the_tables_of_streams_is_protected(tmp_path: Path) -> None:
    content = forge.content_of(tmp_path / "v.shard", forge.SMALL_VIDEOS, forge.small_videos())
    sections = Forgery.of(content).sections
    victim = Victim(tmp_path / "v.shard", content, forge.small_videos())
    tables = [s for s in sections.values() if s.kind in (Kind.PACKETS, *_OTHERS)]
    bits = [8 * s.offset + bit for s in tables for bit in range(8 * s.size)]
    complaints = {bit: victim.complaint_about_flip(bit) for bit in bits}
    victim.close()
    assert {bit: text for bit, text in complaints.items() if text} == {}
    assert victim.n_refused == len(bits) > 2_000


_OTHERS = (Kind.STREAMS, Kind.CHUNK_HASHES)
