"""What a packet's own first bits say, without decoding it: whether it is shown, or needed.

Only what its codec's standard states in plain bits. Where nothing is known of a codec, its packets
count as shown and as needed, which costs time and never a picture.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

__all__ = ["PACKED", "encoder_note", "is_hidden", "spare_layers"]

PACKED = -2
"""Several pictures in one packet of MPEG-4 ("packed"): frames come out one packet later."""

_START = b"\0\0\1"
_H264_SLICES, _H264_SEI = range(1, 6), 6
_HEVC_SLICES = range(32)
_B_VOP, _B_PICTURE = 2, 3


def is_hidden(codec: str, packet: bytes) -> bool:
    """Whether a packet is only there for other packets (an alternate reference)."""
    if codec == "vp8":
        return not packet[0] & 0x10
    if codec == "vp9":
        return _is_hidden_vp9(packet)
    return False


def spare_layers(codec: str, extradata: bytes) -> Callable[[bytes], int]:
    """Make a function that says of a packet whether no packet of its layer or below needs it.

    It gives the packet's temporal layer, or -1 for one that others need: a packet in the highest
    layer of its stream is needed by no other. Most codecs have one layer, 0. Where one is `PACKED`,
    all are needed.
    """
    if codec == "h264":
        size = _length_size(extradata, 4)
        return lambda packet: _spare_h264(packet, size)
    if codec == "hevc":
        size = _length_size(extradata, 21)
        return lambda packet: _spare_hevc(packet, size)
    if codec == "mpeg4":
        return lambda packet: _spare_pictures(packet, b"\xb6", 0, 6, _B_VOP)
    if codec in ("mpeg1video", "mpeg2video"):
        return lambda packet: _spare_pictures(packet, b"\0", 1, 3, _B_PICTURE)
    return lambda packet: -1


def encoder_note(extradata: bytes, packet: bytes) -> bytes:
    """Find the unit in which x264 says its version; empty if there is none.

    Older ones coded 4:4:4 otherwise than the standard, which decoders know by this note alone. It
    stands in the first packet of a stream only.
    """
    size = _length_size(extradata, 4)
    at = packet.find(b"x264 - core")
    if at < 0:
        return b""
    if not size:
        begin, end = packet.rfind(_START, 0, at), packet.find(_START, at)
        return (
            packet[begin:end] if 0 <= begin < end and packet[begin + 3] & 31 == _H264_SEI else b""
        )
    begin = 0
    while begin + size < len(packet):
        end = begin + size + int.from_bytes(packet[begin : begin + size], "big")
        if begin < at < end:
            return packet[begin:end] if packet[begin + size] & 31 == _H264_SEI else b""
        begin = end
    return b""


def _length_size(extradata: bytes, at: int) -> int:
    """Bytes of the length before each unit; 0: units begin with a start code."""
    if len(extradata) <= at or extradata.startswith((_START, b"\0" + _START)):
        return 0
    return (extradata[at] & 3) + 1


def _units(packet: bytes, length_size: int) -> Iterator[tuple[int, int]]:
    """The first two bytes of each unit of H.264 or HEVC."""
    n_bytes = len(packet)
    if not length_size:
        at = packet.find(_START)
        while at >= 0 and at + 4 < n_bytes:
            yield packet[at + 3], packet[at + 4]
            at = packet.find(_START, at + 3)
        return
    at = 0
    while at + length_size + 2 <= n_bytes:
        size = int.from_bytes(packet[at : at + length_size], "big")
        at += length_size
        yield packet[at], packet[at + 1]
        at += size


def _spare_h264(packet: bytes, length_size: int) -> int:
    found = -1
    for first, _ in _units(packet, length_size):
        if first & 31 in _H264_SLICES:
            if first & 0x60:  # nal_ref_idc: a reference
                return -1
            found = 0
    return found


def _spare_hevc(packet: bytes, length_size: int) -> int:
    layer = -1
    for first, second in _units(packet, length_size):
        kind = first >> 1 & 63
        if kind in _HEVC_SLICES:
            if kind >= 16 or kind & 1:  # the even ones below are no references in their layer
                return -1
            layer = (second & 7) - 1
    return layer


def _spare_pictures(packet: bytes, code: bytes, skip: int, shift: int, kind: int) -> int:
    """Whether all pictures in a packet of MPEG video are of the kind that is never referred to."""
    starts, at = [], packet.find(_START + code)
    while at >= 0 and at + 4 + skip < len(packet):
        starts.append(at + 4 + skip)
        at = packet.find(_START + code, at + 4)
    if len(starts) > 1 and not skip:
        return PACKED
    mask = 7 if skip else 3
    return 0 if starts and all((packet[at] >> shift) & mask == kind for at in starts) else -1


def _is_hidden_vp9(packet: bytes) -> bool:
    if packet[-1] & 0xE0 == 0xC0:  # a superframe ends with an index; its last frame is shown
        return False
    bits = int.from_bytes(packet[:2].ljust(2, b"\0"), "big")
    profile = bits >> 13 & 1 | bits >> 11 & 2  # marker (2 bits), low, high, reserved for 3
    after = 16 - (5 if profile == 3 else 4)
    show_existing, show = bits >> (after - 1) & 1, bits >> (after - 3) & 1
    return not show_existing and not show
