"""Results that may be longer than a message of a crew: they travel in pieces.

Used by the crews of conversion and audit; batches need no such thing.
"""

from __future__ import annotations

from typing import Final

from shardio._workers.processes.channel import MAX_MESSAGE_BYTES, Channel

_PIECE_BYTES: Final = MAX_MESSAGE_BYTES - 1
_GOES_ON: Final = b"+"
_ENDS: Final = b"."


def send_whole(channel: Channel, whole: bytes) -> None:
    """Send any number of bytes, waiting while main is behind. Runs in a worker."""
    for start in range(0, max(1, len(whole)), _PIECE_BYTES):
        piece = whole[start : start + _PIECE_BYTES]
        channel.send((_ENDS if start + len(piece) == len(whole) else _GOES_ON) + piece)


class Pieces:
    """Puts together what each worker of a crew has sent."""

    def __init__(self) -> None:
        self._waiting: dict[int, list[bytes]] = {}

    def take(self, worker: int, message: bytes) -> bytes | None:
        """Take in a message; what it was the last piece of, or None while there is more to come."""
        self._waiting.setdefault(worker, []).append(message[1:])
        return b"".join(self._waiting.pop(worker)) if message[:1] == _ENDS else None

    def forget(self, worker: int) -> None:
        """Drop what a worker had begun: it has died."""
        self._waiting.pop(worker, None)
