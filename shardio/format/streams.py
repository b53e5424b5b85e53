"""Encoded streams: the packets of a video or of sound, untouched, with a table that finds each.

`media` cuts files into these and decodes them; a shard keeps one per sample of a `Video` or `Audio`
field.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntFlag
from fractions import Fraction
from typing import Any, Final, Protocol

import numpy as np
import numpy.typing as npt

PACKET: Final = struct.Struct("<QQqQ")
"""offset in the data, bytes | flags << 48, time of presentation, duration."""
PACKET_DTYPE: Final = np.dtype(
    [("offset", "<u8"), ("stored", "<u8"), ("pts", "<i8"), ("duration", "<u8")]
)
Packets = npt.NDArray[np.void]

_SIZE_BITS: Final = 48
_SIZE_MASK: Final = np.uint64((1 << _SIZE_BITS) - 1)


class PacketFlag(IntFlag):
    """What is known of a packet without decoding it."""

    KEY = 1
    """Decoding can begin here."""
    HIDDEN = 2
    """Decoded, but never shown: outside of an edit list, or only there for other frames."""
    DISPOSABLE = 4
    """No other frame needs it."""


class Data(Protocol):
    """Bytes that can be cut: a bytes-like object, or one that checks what it hands out."""

    def __len__(self) -> int: ...

    def __getitem__(self, part: slice, /) -> bytes | memoryview: ...


@dataclass(frozen=True, slots=True)
class EncodedStream:
    """One stream of encoded media, in the order in which it is decoded.

    Args:
        parameters: what a decoder needs to know, in JSON's terms; `codec` is FFmpeg's name.
        extradata: the decoder's own configuration.
        packets: the table, of `PACKET_DTYPE`; offsets count from the start of `data`.
        data: the packets back to back.
        time_base: seconds per tick of `pts`, `duration` and of this stream's `duration`.
        n_frames: frames that are shown; of sound, samples per channel.
        width, height: of a video's frames as shown, in pixels; of sound, channels and samples per
            second.
        duration: in ticks, from the first frame to the end of the last; 0 if unknown.
    """

    parameters: Mapping[str, Any]
    extradata: bytes
    packets: Packets
    data: Data
    time_base: Fraction
    n_frames: int
    width: int
    height: int
    duration: int = 0


def packet_sizes(packets: Packets) -> npt.NDArray[np.int64]:
    """The bytes of each packet."""
    found: npt.NDArray[np.int64] = np.bitwise_and(packets["stored"], _SIZE_MASK).astype(np.int64)
    return found


def packet_flags(packets: Packets) -> npt.NDArray[np.int64]:
    """The `PacketFlag`s of each packet."""
    flags = np.right_shift(packets["stored"], np.uint64(_SIZE_BITS))
    found: npt.NDArray[np.int64] = flags.astype(np.int64)
    return found


def pack_packets(
    sizes: npt.ArrayLike, flags: npt.ArrayLike, pts: npt.ArrayLike, durations: npt.ArrayLike
) -> Packets:
    """The table of packets that lie back to back.

    Args:
        sizes: bytes of each packet, in the order in which they are decoded.
        flags: the `PacketFlag`s of each.
        pts: when each is shown, in ticks.
        durations: for how many ticks; 0 if unknown.
    """
    n_bytes = np.asarray(sizes, np.uint64)
    found = np.zeros(len(n_bytes), PACKET_DTYPE)
    found["offset"] = np.cumsum(n_bytes) - n_bytes
    found["stored"] = n_bytes | np.asarray(flags, np.uint64) << np.uint64(_SIZE_BITS)
    found["pts"] = pts
    found["duration"] = durations
    return found
