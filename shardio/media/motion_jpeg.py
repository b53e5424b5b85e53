"""Encodes pictures to a stream of JPEGs: every frame stands alone, and is decoded alone."""

from __future__ import annotations

from fractions import Fraction

from shardio.errors import InvalidArgument, MediaError
from shardio.format.streams import EncodedStream, PacketFlag, pack_packets
from shardio.media.checking import finished
from shardio.media.colorspace import MATRICES, RANGES
from shardio.media.frames import Picture
from shardio.media.image import encode_jpeg
from shardio.media.times import durations_of

__all__ = ["JpegEncoder"]


class JpegEncoder:
    """Encodes pictures, one after another, to JPEGs of 4:2:0, each a packet.

    Args:
        width, height: of the pictures, in pixels.
        time_base: seconds per tick of the times.
        quality: libjpeg's, 1 to 100; higher is better.

    Raises:
        InvalidArgument: an option is not acceptable.
    """

    def __init__(self, width: int, height: int, time_base: Fraction, *, quality: int = 90) -> None:
        if quality not in range(1, 101) or min(width, height) < 1:
            raise InvalidArgument(
                f"{width}x{height} pixels, quality {quality!r}; expected sides from 1 on, a "
                "quality from 1 to 100"
            )
        self._size, self._time_base, self._quality = (width, height), time_base, quality
        self._parts: list[bytes] = []
        self._times: list[int] = []

    def add(self, time: int, picture: Picture) -> None:
        """Encode the next picture, shown from `time` on, in ticks; times rise.

        Raises:
            InvalidArgument: it is not uint8 (height, width, 3), or the time does not rise.
            UnsupportedEnvironment: simplejpeg is not installed.
        """
        width, height = self._size
        if picture.shape != (height, width, 3):
            raise InvalidArgument(
                f"a picture is of {picture.shape}; expected uint8 of {(height, width, 3)}"
            )
        if self._times and time <= self._times[-1]:
            raise InvalidArgument(f"a picture at {time} follows one at {self._times[-1]}")
        self._parts.append(encode_jpeg(picture, quality=self._quality))
        self._times.append(time)

    def finish(self, *, last_duration: int = 0) -> EncodedStream:
        """Return the stream; only once. `last_duration` is as in `StreamEncoder`.

        Raises:
            MediaError: no picture was given.
        """
        if not self._times:
            raise MediaError("no picture to encode")
        width, height = self._size
        parameters = {
            "codec": "mjpeg",
            "pixel_format": "yuvj420p",
            "width": width,
            "height": height,
            "color_range": RANGES["full"],
            "colorspace": MATRICES["bt601"],
            "range": "full",
            "matrix": "bt601",
        }
        packets = pack_packets(
            list(map(len, self._parts)),
            [int(PacketFlag.KEY)] * len(self._parts),
            self._times,
            durations_of(self._times, last_duration),
        )
        return finished(parameters, b"", packets, b"".join(self._parts), self._time_base)
