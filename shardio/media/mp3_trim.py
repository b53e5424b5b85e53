"""What a file of MP3 says in its first frame of the samples that nobody is to hear."""

from __future__ import annotations

from typing import Final

from shardio.format.streams import EncodedStream

__all__ = ["trimmed_mp3"]

_DECODER_DELAY: Final = 529
"""Samples that every decoder is late; neither number in the file counts them as it should."""
_MOST: Final = (1 << 12) - 1
_NAME_AT: Final = 120  # bytes from the mark to the encoder's name
_NUMBERS_AT, _CRC_AT = 21, 34  # bytes from there


def trimmed_mp3(data: bytes, stream: EncodedStream) -> bytes:
    """A file as FFmpeg writes it, with how many samples are left out at its beginning and end.

    Unchanged where it has no first frame to say it in, or cannot.
    """
    n_tags = 10 + int.from_bytes(data[6:10]) if data.startswith(b"ID3") else 0  # one of 127 at most
    mark_at = max(data.find(mark, n_tags, n_tags + 64) for mark in (b"Xing", b"Info"))
    name_at = mark_at + _NAME_AT
    skip = int(stream.parameters.get("skip", 0))
    behind = int(stream.packets["duration"].sum()) - skip - stream.n_frames
    before, after = skip - _DECODER_DELAY, behind + _DECODER_DELAY
    if mark_at < 0 or not 0 <= before <= _MOST or not 0 <= after <= _MOST:
        return data
    found = bytearray(data)
    found[name_at + _NUMBERS_AT : name_at + _NUMBERS_AT + 3] = (before << 12 | after).to_bytes(3)
    crc_at = name_at + _CRC_AT
    found[crc_at : crc_at + 2] = _crc16(found[n_tags:crc_at]).to_bytes(2)
    return bytes(found)


def _crc16(data: bytes | bytearray) -> int:
    crc = 0
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0xA001 if crc & 1 else 0)
    return crc
