"""Read properties of packets from their first bits, without decoding them.

If a codec is not supported here, its packets count as shown and needed. Decoding then takes more
time, but no picture is missing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import TypeVar

_Result = TypeVar("_Result")
PacketTest = Callable[[bytes, int, int], _Result]
"""A test of the packet in `data[begin:stop]`."""
PACKED = -2
"""The result for an MPEG-4 packet with several pictures. In such streams, decoders output a frame
one packet later."""

_START = b"\0\0\1"
_START_CODES = (_START, b"\0" + _START)
_LENGTH_SIZE_AT = {"h264": 4, "hevc": 21}
"""The offset of the size of length fields in the extradata."""
_H264_SLICES, _H264_SEI = range(1, 6), 6
_HEVC_SLICES = range(32)
_B_VOP, _B_PICTURE = 2, 3
_H264_CLOSED, _HEVC_CLOSED = 5, (19, 20)
_MAX_HEAD = 4096


def hidden_packet_test(codec: str) -> PacketTest[bool] | None:
    """Return a test for packets that are never shown, as VP8 and VP9 have; None for others."""
    return {"vp8": _is_hidden_vp8, "vp9": _is_hidden_vp9}.get(codec)


def disposable_layer_test(codec: str, extradata: bytes) -> PacketTest[int] | None:
    """Return a function that finds the temporal layer of a packet to which no other packet refers.

    The function returns the layer, or -1 if other packets of the same layer or below refer to the
    packet. An unreferenced packet in the highest layer of its stream is disposable; most codecs
    have only layer 0. If the function returns `PACKED` for a packet, all packets of the stream are
    needed. For codecs without such bits, return None: all packets are needed.
    """
    if codec == "h264":
        return partial(_disposable_layer_h264, length_size=_length_size(codec, extradata))
    if codec == "hevc":
        return partial(_disposable_layer_hevc, length_size=_length_size(codec, extradata))
    if codec == "mpeg4":
        return partial(_disposable_layer_mpeg, code=b"\xb6", skip=0, shift=6, kind=_B_VOP)
    if codec in ("mpeg1video", "mpeg2video"):
        return partial(_disposable_layer_mpeg, code=b"\0", skip=1, shift=3, kind=_B_PICTURE)
    return None


def x264_version_unit(extradata: bytes, packet: bytes) -> bytes:
    """Return the SEI unit that holds x264's version; empty if there is none.

    Decoders need this unit, because old versions of x264 coded 4:4:4 differently from the standard.
    Only the first packet of a stream has this unit.
    """
    size = _length_size("h264", extradata)
    at = packet.find(b"x264 - core")
    if at < 0:
        return b""
    begin = 0
    if not size:
        begin, end = packet.rfind(_START, 0, at), packet.find(_START, at)
        is_unit = 0 <= begin < end and packet[begin + 3] & 31 == _H264_SEI
        return packet[begin:end] if is_unit else b""
    while begin + size < len(packet):
        end = begin + size + int.from_bytes(packet[begin : begin + size], "big")
        if begin < at < end:
            return packet[begin:end] if packet[begin + size] & 31 == _H264_SEI else b""
        begin = end
    return b""


def parameter_sets(codec: str, extradata: bytes) -> bytes:
    """Return the parameter sets of H.264 or HEVC, in the form of units of a packet.

    The result is empty if the sets are missing or truncated, and for other codecs, whose keyframes
    contain the parameters.
    """
    if codec not in _LENGTH_SIZE_AT:
        return b""
    size = _length_size(codec, extradata)
    if not size:
        return extradata if extradata.startswith(_START_CODES) else b""
    read = _avcc_parameter_sets if codec == "h264" else _hvcc_parameter_sets
    try:
        units = list(read(extradata))
    except IndexError:
        return b""
    return b"".join(len(unit).to_bytes(size, "big") + unit for unit in units)


def parameter_change_test(codec: str, extradata: bytes) -> Callable[[memoryview], bool]:
    """Return a function that tests whether a packet changes the parameter sets of its stream.

    Parameter sets in a packet precede the picture; a decoder keeps them for later packets.
    """
    if codec not in _LENGTH_SIZE_AT:
        return lambda _: False
    mask, behind, kinds = (31, 6, {7, 8}) if codec == "h264" else (126, 64, {64, 66, 68})
    size, known = _length_size(codec, extradata), parameter_sets(codec, extradata)

    def changes(packet: memoryview) -> bool:
        if size and len(packet) > size and packet[size] & mask < behind:
            return False  # most packets begin with a picture
        head = bytes(packet[:_MAX_HEAD])
        for first, _ in _unit_headers(head, 0, len(head), size):
            if first & mask in kinds:
                return not known or known not in head
            if first & mask < behind:
                return False
        return len(packet) > len(head)  # assume a change in the rest of a long packet

    return changes


def _avcc_parameter_sets(extradata: bytes) -> Iterator[bytes]:
    """Yield the parameter sets of an "avcC": counted sequence sets, then counted picture sets."""
    at = 5
    for mask in (31, 255):
        n_units = extradata[at] & mask
        at += 1
        for _ in range(n_units):
            unit = _length_prefixed(extradata, at)
            at += 2 + len(unit)
            yield unit


def _hvcc_parameter_sets(extradata: bytes) -> Iterator[bytes]:
    """Yield the parameter sets of an "hvcC": one counted array per kind."""
    at = 23
    for _ in range(extradata[22]):
        n_units = extradata[at + 1] << 8 | extradata[at + 2]
        at += 3
        for _ in range(n_units):
            unit = _length_prefixed(extradata, at)
            at += 2 + len(unit)
            yield unit


def _length_prefixed(data: bytes, at: int) -> bytes:
    """Return the bytes after a 16-bit length; raise IndexError if they are truncated."""
    stop = at + 2 + (data[at] << 8 | data[at + 1])
    if stop > len(data):
        raise IndexError(stop)
    return data[at + 2 : stop]


def starts_closed_gop(codec: str, extradata: bytes, packet: bytes) -> bool:
    """Return True if no packet decoded after this keyframe needs a packet before the keyframe.

    This holds for most codecs; some keyframes of H.264 and HEVC are only recovery points.
    """
    if codec not in _LENGTH_SIZE_AT:
        return True
    units = _unit_headers(packet, 0, len(packet), _length_size(codec, extradata))
    if codec == "h264":
        return any(first & 31 == _H264_CLOSED for first, _ in units)
    return any(first >> 1 & 63 in _HEVC_CLOSED for first, _ in units)


def _length_size(codec: str, extradata: bytes) -> int:
    """Return the size of the length field before each unit; 0 if units begin with a start code."""
    at = _LENGTH_SIZE_AT[codec]
    if len(extradata) <= at or extradata.startswith(_START_CODES):
        return 0
    return (extradata[at] & 3) + 1


def _unit_headers(data: bytes, at: int, stop: int, length_size: int) -> Iterator[tuple[int, int]]:
    """Yield the first two bytes of each unit of H.264 or HEVC."""
    if not length_size:
        at = data.find(_START, at, stop)
        while at >= 0 and at + 4 < stop:
            yield data[at + 3], data[at + 4]
            at = data.find(_START, at + 3, stop)
        return
    while at + length_size + 2 <= stop:
        size = int.from_bytes(data[at : at + length_size], "big")
        at += length_size
        yield data[at], data[at + 1]
        at += size


def packet_units(codec: str, extradata: bytes, packet: bytes) -> Iterator[bytes]:
    """Yield the units of an H.264 or HEVC packet without prefixes; yield any other packet whole.

    The temporal delimiter of AV1 is removed, because files do not contain temporal delimiters.
    """
    if codec not in _LENGTH_SIZE_AT:
        yield packet.removeprefix(b"\x12\0") if codec == "av1" else packet
        return
    if size := _length_size(codec, extradata):
        begin = 0
        while begin + size <= len(packet):
            end = begin + size + int.from_bytes(packet[begin : begin + size])
            yield packet[begin + size : end]
            begin = end
        return
    for unit in packet.split(_START)[1:]:
        yield unit.rstrip(b"\0")  # the zeros belong to the next start code, of four bytes


def _disposable_layer_h264(data: bytes, begin: int, stop: int, length_size: int) -> int:
    found = -1
    for first, _ in _unit_headers(data, begin, stop, length_size):
        if first & 31 in _H264_SLICES:
            if first & 0x60:  # nal_ref_idc is not 0: other pictures may refer to this one
                return -1
            found = 0
    return found


def _disposable_layer_hevc(data: bytes, begin: int, stop: int, length_size: int) -> int:
    layer = -1
    for first, second in _unit_headers(data, begin, stop, length_size):
        kind = first >> 1 & 63
        if kind in _HEVC_SLICES:
            # Only pictures of even types below 16 are unreferenced within their layer.
            if kind >= 16 or kind & 1:
                return -1
            layer = (second & 7) - 1
    return layer


def _disposable_layer_mpeg(
    data: bytes, begin: int, stop: int, code: bytes, skip: int, shift: int, kind: int
) -> int:
    """Return 0 if all pictures in a packet of MPEG video are B pictures, else -1 or `PACKED`."""
    starts, at = [], data.find(_START + code, begin, stop)
    while at >= 0 and at + 4 + skip < stop:
        starts.append(at + 4 + skip)
        at = data.find(_START + code, at + 4, stop)
    if len(starts) > 1 and not skip:
        return PACKED
    mask = 7 if skip else 3
    return 0 if starts and all((data[at] >> shift) & mask == kind for at in starts) else -1


def _is_hidden_vp8(data: bytes, begin: int, stop: int) -> bool:
    return not data[begin] & 0x10


def _is_hidden_vp9(data: bytes, begin: int, stop: int) -> bool:
    if data[stop - 1] & 0xE0 == 0xC0:  # a superframe ends with an index; its last frame is shown
        return False
    bits = int.from_bytes(data[begin : min(begin + 2, stop)].ljust(2, b"\0"), "big")
    profile = bits >> 13 & 1 | bits >> 11 & 2  # marker (2 bits), low, high, reserved for 3
    after = 16 - (5 if profile == 3 else 4)
    show_existing, show = bits >> (after - 1) & 1, bits >> (after - 3) & 1
    return not show_existing and not show
