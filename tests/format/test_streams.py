"""Tables of streams: what is packed is found again, numbers that cannot be right are refused."""

from __future__ import annotations

import dataclasses
import math
import pickle
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardio.errors import SchemaError
from shardio.format.schema import Schema
from shardio.format.types import Audio, EncodedImage, Image, Video
from shardio.format.types import streams as streams_module
from shardio.format.types.streams import (
    STREAM,
    STREAM_DTYPE,
    EncodedStream,
    StreamRecord,
    StreamTables,
    invalid_streams,
    pack_packets,
    packet_flags,
    packet_sizes,
    packets_error,
    with_first_indices,
)
from tests.shards import made_stream

SIZES = st.lists(st.integers(0, (1 << 48) - 1), max_size=6)


@given(sizes=SIZES, flag=st.integers(0, 7), pts=st.integers(-(1 << 63), (1 << 63) - 1))
def test_packets_are_contiguous_with_size_and_flags(sizes: list[int], flag: int, pts: int) -> None:
    packets = pack_packets(sizes, flag, pts, 1)
    assert packet_sizes(packets).tolist() == sizes
    assert packet_flags(packets).tolist() == [flag] * len(sizes)
    assert packets["pts"].tolist() == [pts] * len(sizes)
    assert packets_error(packets, sum(sizes)) is None
    assert packets_error(packets, sum(sizes) + 1) is not None
    packets["offset"] += np.uint64(1)
    assert packets_error(packets, sum(sizes) + 1 if sizes else 1) is not None


def test_no_packets_tile_no_bytes() -> None:
    none = pack_packets([], 0, 0, 0)
    assert packets_error(none, 0) is None
    assert packets_error(none, 1) == "1 bytes of packets, but no packet"


def line(**changes: int) -> Any:
    # First packet, packets, first chunk, frames, time base, size, parameters, extradata, duration.
    found = np.array([(3, 2, 1, 2, 1, 25, 4, 5, 16, 3, 0)], STREAM_DTYPE)
    for name, number in changes.items():
        found[name] = number
    return found


def is_broken(found: Any, n_bytes: int = 70_000) -> bool:
    return bool(invalid_streams(found, np.array([n_bytes], np.uint64), 5, 3)[0])


def test_a_line_that_reaches_just_to_the_end_of_its_tables_is_right() -> None:
    assert not is_broken(line())


@pytest.mark.parametrize("name", ["numerator", "denominator", "width", "height", "parameter_bytes"])
def test_a_line_of_a_stream_has_each_of_its_numbers(name: str) -> None:
    assert is_broken(line(**{name: 0}))


@pytest.mark.parametrize("name", [n for n in STREAM_DTYPE.names or () if "first" not in n])
def test_the_line_of_no_stream_has_only_its_place(name: str) -> None:
    empty = np.zeros(1, STREAM_DTYPE)
    empty["first_packet"], empty["first_chunk"] = 5, 3
    assert not is_broken(empty, 0)
    empty[name] = 1
    assert is_broken(empty, 0)


def test_a_line_gets_its_place_when_it_is_written() -> None:
    tables = Video().encode_stream("v", made_stream(0)).tables
    placed = STREAM.unpack(with_first_indices(tables.row, 7, 9))
    unplaced = STREAM.unpack(tables.row)
    assert placed[0] == 7 and placed[2] == 9
    assert [placed[i] for i in (1, *range(3, 11))] == [unplaced[i] for i in (1, *range(3, 11))]


REFUSED: dict[str, tuple[Callable[[EncodedStream], dict[str, Any]], str]] = {
    "no codec": (lambda s: {"parameters": {"width": 3}}, "not an object that names a codec"),
    "a codec that is no name": (lambda s: {"parameters": {"codec": 27}}, "names a codec"),
    "parameters that are no JSON": (
        lambda s: {"parameters": {"codec": "h264", "x": math.nan}},
        "cannot be written as JSON",
    ),
    "keys that are no texts": (lambda s: {"parameters": {"codec": "a", "b": {1: 2}}}, "must be st"),
    "too many parameters": (
        lambda s: {"parameters": {"codec": "h" * (1 << 20)}},
        "bytes of parameters must be 1 to 1048576",
    ),
    "packets of another dtype": (lambda s: {"packets": np.zeros(3)}, "expected packets of dtype"),
    "data that is too short": (lambda s: {"data": s.data[:-1]}, "back to back"),
    "frames that are not there": (lambda s: {"n_frames": 99}, "n_frames is 99, but 11 packets"),
    "a number of frames that is none": (
        lambda s: {"n_frames": 1.5},
        "n_frames must be an integer; found 1.5",
    ),
    "no width": (lambda s: {"width": 0}, "width must be 1 to"),
    "a time base of 0": (lambda s: {"time_base": Fraction(0)}, "numerator must be 1 to"),
    "a time base too fine": (lambda s: {"time_base": Fraction(1, 1 << 32)}, "denominator must be"),
    "a negative duration": (lambda s: {"duration": -1}, "duration must be 0 to"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_a_stream_that_is_not_right_is_refused_with_the_reason(what: str) -> None:
    changes, text = REFUSED[what]
    stream = made_stream(1)
    wrong = dataclasses.replace(stream, **changes(stream))
    with pytest.raises(SchemaError, match=r"field 'v': ") as caught:
        Video().encode_stream("v", wrong)
    assert text in str(caught.value)


def test_what_is_no_stream_or_picture_is_refused() -> None:
    with pytest.raises(SchemaError, match="field 'v': expected an EncodedStream, found bytes"):
        Audio().encode_stream("v", b"bytes")
    with pytest.raises(SchemaError, match="field 'v': expected an EncodedStream, found None, "):
        Video().encode_stream("v", None)
    with pytest.raises(SchemaError) as caught:
        Image().encode_record("i", 7)
    assert str(caught.value) == (
        "field 'i': expected a picture's bytes, such as path.read_bytes() or "
        "shardio.media.encode_jpeg(pixels), found int"
    )


def test_a_record_comes_in_pieces_of_one_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams_module, "PIECE_BYTES", 4)
    whole = bytes(range(22))
    for n_bytes, n_head in ((n, k) for n in range(len(whole)) for k in range(n + 1)):
        record = StreamRecord(whole[:n_head], whole[n_head:n_bytes], StreamTables())
        pieces = [bytes(piece) for piece in record.pieces()]
        assert b"".join(pieces) == bytes(record) == whole[:n_bytes]
        assert all(len(piece) == 4 for piece in pieces[:-1])
        assert record.nbytes == n_bytes


@pytest.mark.parametrize("shape", [(0, 1, 1), (1, 0, 1), (1, 1, 0), (1, 1, 5), (1 << 31, 1, 1)])
def test_an_empty_or_impossible_picture_is_refused(shape: tuple[int, int, int]) -> None:
    for picture in (EncodedImage(b"x", *shape), EncodedImage(b"", 1, 1, 1)):
        with pytest.raises(SchemaError, match=f"field 'i': invalid picture: {len(picture)} bytes"):
            Image().encode_record("i", picture)


def test_a_picture_is_its_bytes_and_knows_its_dimensions_also_elsewhere() -> None:
    picture = pickle.loads(pickle.dumps(EncodedImage(b"bytes", 2, 3, 1)))
    assert picture == b"bytes" and isinstance(picture, EncodedImage)
    assert picture.shape == (2, 3, 1)


@pytest.mark.parametrize("kind", [Image, Video, Audio])
def test_media_come_back_from_a_schema_and_have_no_codec_to_choose(kind: Any) -> None:
    for schema in (Schema({"m": kind()}), Schema({"m": kind(optional=True)})):
        assert Schema.from_json(schema.to_json()) == schema
    packed = Schema({"m": kind()}).to_json().replace(b'"codec":0', b'"codec":1')
    said = f"field 'm': {kind.__name__} is never compressed; found zstd$"
    with pytest.raises(SchemaError, match=said):
        Schema.from_json(packed)
    with pytest.raises(TypeError):
        kind("zstd")
