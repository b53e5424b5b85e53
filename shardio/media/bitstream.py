"""Read properties of packets from their first bits, without decoding them.

Every packet of an unsupported codec counts as shown, and as needed to decode other packets. In
H.264 and HEVC, a packet consists of *units* (NAL units), such as slices of a picture and parameter
sets. Each unit is preceded by a start code or by a field with the length of the unit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import accumulate, repeat

import numpy as np
import numpy.typing as npt

_START_CODE = b"\0\0\1"
_START_CODES = (_START_CODE, b"\0" + _START_CODE)
_LENGTH_SIZE_OFFSETS = {"h264": 4, "hevc": 21}
"""The extradata offset of a byte: its lower two bits are the size of a length field minus 1."""
_H264_SLICES, _H264_SEI = range(1, 6), 6
_HEVC_SLICES = range(32)
_B_VOP, _B_PICTURE = 2, 3
_H264_IDR, _HEVC_IDR = 5, (19, 20)
_PACKED_PICTURES = ~64
_MAX_HEAD_BYTES = 4096


def hidden_packets(codec: str, data: bytes, sizes: Sequence[int]) -> npt.NDArray[np.bool_]:
    """Return a mask of the packets whose frame is never shown. Only VP8 and VP9 have such packets.

    `data` consists of the packets, one after another.
    """
    is_hidden = {"vp8": _is_hidden_vp8, "vp9": _is_hidden_vp9}.get(codec)
    if is_hidden is None:
        return np.zeros(len(sizes), bool)
    stops = list(accumulate(sizes))
    return np.array(list(map(is_hidden, repeat(data), [0, *stops[:-1]], stops)), bool)


def disposable_packets(
    codec: str, extradata: bytes, data: bytes, sizes: Sequence[int]
) -> npt.NDArray[np.bool_]:
    """Return a mask of packets to which no other packet refers; all False for unsupported codecs.

    `data` consists of the packets, one after another.
    """
    if codec == "h264":
        layer_of = partial(_layer_h264, length_size=_length_size(codec, extradata))
    elif codec == "hevc":
        layer_of = partial(_layer_hevc, length_size=_length_size(codec, extradata))
    elif codec == "mpeg4":
        layer_of = partial(_layer_mpeg, code=b"\xb6", skip=0, shift=6, kind=_B_VOP)
    elif codec in ("mpeg1video", "mpeg2video"):
        layer_of = partial(_layer_mpeg, code=b"\0", skip=1, shift=3, kind=_B_PICTURE)
    else:
        return np.zeros(len(sizes), bool)
    stops = list(accumulate(sizes))
    layers = np.array(list(map(layer_of, repeat(data), [0, *stops[:-1]], stops)), np.int64)
    # A packet may be referred to by packets of its own layer and of all higher layers.
    highest = np.maximum(layers, ~layers).max(initial=0)
    found: npt.NDArray[np.bool_] = layers == highest
    # Decoders output packed pictures one packet late, so no packet of such a stream is disposable.
    return found & (_PACKED_PICTURES not in layers)


def x264_version_unit(extradata: bytes, packet: bytes) -> bytes:
    """Return the unit in which x264 has written its version; empty if there is no such unit.

    Only the first packet has this unit. Decoders need the version, because old versions of x264
    coded 4:4:4 differently from the standard.
    """
    size = _length_size("h264", extradata)
    at = packet.find(b"x264 - core")
    if at < 0:
        return b""
    begin = 0
    if not size:
        begin, end = packet.rfind(_START_CODE, 0, at), packet.find(_START_CODE, at)
        is_unit = 0 <= begin < end and packet[begin + 3] & 31 == _H264_SEI
        return packet[begin:end] if is_unit else b""
    while begin + size < len(packet):
        end = begin + size + int.from_bytes(packet[begin : begin + size], "big")
        if begin < at < end:
            return packet[begin:end] if packet[begin + size] & 31 == _H264_SEI else b""
        begin = end
    return b""


def parameter_sets(codec: str, extradata: bytes) -> bytes:
    """Return the parameter sets in the extradata of an H.264 or HEVC stream, as units of a packet.

    The result is empty if the sets are missing or truncated, and for all other codecs.
    """
    if codec not in _LENGTH_SIZE_OFFSETS:
        return b""
    size = _length_size(codec, extradata)
    if not size:
        return extradata if extradata.startswith(_START_CODES) else b""
    try:
        units = list(_parameter_set_units(codec, extradata))
    except IndexError:
        return b""
    return b"".join(len(unit).to_bytes(size, "big") + unit for unit in units)


def parameter_change_test(codec: str, extradata: bytes) -> Callable[[memoryview], bool]:
    """Return a function that tests whether a packet changes the parameter sets of its stream."""
    if codec not in _LENGTH_SIZE_OFFSETS:
        return lambda _: False
    mask, slices_end, kinds = (31, 6, {7, 8}) if codec == "h264" else (126, 64, {64, 66, 68})
    size, known = _length_size(codec, extradata), parameter_sets(codec, extradata)

    def changes(packet: memoryview) -> bool:
        if len(packet) > 4:
            at = size or (3 if packet[2] else 4)
            if (size or packet[at - 1] == 1) and packet[at] & mask < slices_end:
                return False  # the packet begins with a picture, as most packets do
        head = bytes(packet[:_MAX_HEAD_BYTES])
        for first, _ in _unit_headers(head, 0, len(head), size):
            if first & mask in kinds:
                return not known or known not in head
            if first & mask < slices_end:
                return False
        return len(packet) > len(head)  # assume that the rest of a long packet has a change

    return changes


def _parameter_set_units(codec: str, extradata: bytes) -> Iterator[bytes]:
    """Yield the units listed in an `avcC` or `hvcC` record; raise IndexError if it is truncated."""
    at, n_lists = (5, 2) if codec == "h264" else (23, extradata[22])
    for number in range(n_lists):
        if codec == "h264":
            n_units = extradata[at] & (255 if number else 31)
            at += 1
        else:
            n_units = extradata[at + 1] << 8 | extradata[at + 2]
            at += 3
        for _ in range(n_units):
            stop = at + 2 + (extradata[at] << 8 | extradata[at + 1])
            if stop > len(extradata):
                raise IndexError(stop)
            yield extradata[at + 2 : stop]
            at = stop


def starts_closed_gop(codec: str, extradata: bytes, packet: bytes) -> bool:
    """Return True if no packet decoded after this keyframe needs a packet before the keyframe.

    In H.264 and HEVC, this is certain only for IDR pictures.
    """
    if codec not in _LENGTH_SIZE_OFFSETS:
        return True
    units = _unit_headers(packet, 0, len(packet), _length_size(codec, extradata))
    if codec == "h264":
        return any(first & 31 == _H264_IDR for first, _ in units)
    return any(first >> 1 & 63 in _HEVC_IDR for first, _ in units)


def _length_size(codec: str, extradata: bytes) -> int:
    """Return the number of bytes of the length field before each unit; 0 for start codes."""
    at = _LENGTH_SIZE_OFFSETS[codec]
    if len(extradata) <= at or extradata.startswith(_START_CODES):
        return 0
    return (extradata[at] & 3) + 1


def _unit_headers(data: bytes, at: int, stop: int, length_size: int) -> Iterator[tuple[int, int]]:
    """Yield the first two bytes of each unit of the H.264 or HEVC packet `data[at:stop]`."""
    if not length_size:
        at = data.find(_START_CODE, at, stop)
        while at >= 0 and at + 4 < stop:
            yield data[at + 3], data[at + 4]
            at = data.find(_START_CODE, at + 3, stop)
        return
    while at + length_size + 2 <= stop:
        size = int.from_bytes(data[at : at + length_size], "big")
        at += length_size
        yield data[at], data[at + 1]
        at += size


def has_start_codes(codec: str, extradata: bytes) -> bool:
    """Return True if a start code precedes each unit of an H.264 or HEVC packet, not a length."""
    return codec in _LENGTH_SIZE_OFFSETS and not _length_size(codec, extradata)


def packet_units(codec: str, extradata: bytes, packet: bytes) -> Iterator[bytes]:
    """Yield the units of an H.264 or HEVC packet, without start codes and length fields.

    Packets of other codecs are yielded as a whole, without AV1's temporal delimiter.
    """
    if codec not in _LENGTH_SIZE_OFFSETS:
        yield packet.removeprefix(b"\x12\0") if codec == "av1" else packet
        return
    if size := _length_size(codec, extradata):
        begin = 0
        while begin + size <= len(packet):
            end = begin + size + int.from_bytes(packet[begin : begin + size])
            yield packet[begin + size : end]
            begin = end
        return
    for unit in packet.split(_START_CODE)[1:]:
        yield unit.rstrip(b"\0")  # a start code of four bytes has one more zero at its beginning


# Each `_layer_…` function returns the temporal layer of a packet, from 0 up, if no packet of
# the same layer refers to the packet. Otherwise it returns ~layer, which is negative.


def _layer_h264(data: bytes, begin: int, stop: int, length_size: int) -> int:
    found = ~0
    for first, _ in _unit_headers(data, begin, stop, length_size):
        if first & 31 in _H264_SLICES:
            if first & 0x60:  # nal_ref_idc is not 0, so other pictures may refer to this picture
                return ~0
            found = 0
    return found


def _layer_hevc(data: bytes, begin: int, stop: int, length_size: int) -> int:
    found = ~0
    for first, second in _unit_headers(data, begin, stop, length_size):
        kind, layer = first >> 1 & 63, max(0, (second & 7) - 1)
        if kind in _HEVC_SLICES:
            # No picture of the same layer refers to a picture whose type is even and below 16.
            if kind >= 16 or kind & 1:
                return ~layer
            found = layer
    return found


def _layer_mpeg(
    data: bytes, begin: int, stop: int, code: bytes, skip: int, shift: int, kind: int
) -> int:
    """Return 0 if all pictures in a packet of MPEG video are B pictures (type `kind`), else ~0.

    Return `_PACKED_PICTURES` for an MPEG-4 packet with several pictures. `code` is the last byte of
    a picture's start code. `skip` bytes later comes the byte that contains the type of the picture,
    above its `shift` lowest bits.
    """
    starts, at = [], data.find(_START_CODE + code, begin, stop)
    while at >= 0 and at + 4 + skip < stop:
        starts.append(at + 4 + skip)
        at = data.find(_START_CODE + code, at + 4, stop)
    if len(starts) > 1 and not skip:
        return _PACKED_PICTURES
    mask = 7 if skip else 3
    return 0 if starts and all((data[at] >> shift) & mask == kind for at in starts) else ~0


def _is_hidden_vp8(data: bytes, begin: int, stop: int) -> bool:
    return not data[begin] & 0x10


def _is_hidden_vp9(data: bytes, begin: int, stop: int) -> bool:
    # A superframe is a packet of several frames. It ends with an index, whose last byte begins with
    # the bits 110. The last frame of a superframe is shown.
    if data[stop - 1] & 0xE0 == 0xC0:
        return False
    bits = int.from_bytes(data[begin : min(begin + 2, stop)].ljust(2, b"\0"), "big")
    # A frame begins with a marker of 2 bits, then the low bit and the high bit of the profile. If
    # the profile is 3, a reserved bit follows.
    profile = bits >> 13 & 1 | bits >> 11 & 2
    after = 16 - (5 if profile == 3 else 4)
    show_existing, show = bits >> (after - 1) & 1, bits >> (after - 3) & 1
    return not show_existing and not show
