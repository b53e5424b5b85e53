"""Encoded pictures: the bytes of a file, with what is known of it without decoding."""

from __future__ import annotations

from typing import Self


class EncodedImage(bytes):
    """The bytes of a picture's file; they are `bytes` in every other respect.

    `height` and `width` are those of the picture as shown, in pixels; `channels` are those of the
    encoded one, 1 to 4.
    """

    height: int
    width: int
    channels: int

    def __new__(
        cls, data: bytes | bytearray | memoryview, height: int, width: int, channels: int
    ) -> Self:
        """The bytes, copied unless they are `bytes` already."""
        found = super().__new__(cls, data)
        found.height, found.width, found.channels = height, width, channels
        return found

    def __getnewargs__(self) -> tuple[bytes, int, int, int]:  # type: ignore[override]
        """For pickle and copy."""
        return bytes(self), self.height, self.width, self.channels

    @property
    def shape(self) -> tuple[int, int, int]:
        """Height, width and channels, as of the decoded array."""
        return self.height, self.width, self.channels
