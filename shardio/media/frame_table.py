"""Plan the decoding of frames from the packet table of a stream."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from shardio.errors import InvalidArgument, MediaError
from shardio.format.types.streams import PacketFlag, Packets, packet_flags, packet_sizes

__all__ = ["FrameTable", "DecodeRun"]

# The limit of the search for a keyframe, in keyframes; at the limit, decoding starts at the first
# keyframe. Without a limit, the search in a damaged table could be long for every frame.
_MAX_STEPS = 32


@dataclass(slots=True)
class DecodeRun:
    """A run of packets, `first` to `stop` - 1, that are decoded together; the first is a keyframe.

    `wanted` maps the index of a packet to the indices of the packet's frame in the request.
    """

    first: int
    stop: int
    wanted: dict[int, list[int]] = field(default_factory=dict)


class FrameTable:
    """The frames of a stream in presentation order, and the keyframe from which each is decoded.

    Raises:
        MediaError: no packet is a keyframe, or the number of frames differs from the stream's.
    """

    def __init__(self, packets: Packets, n_frames: int) -> None:
        flags = packet_flags(packets)
        self.sizes = packet_sizes(packets)
        self.offsets = packets["offset"].astype(np.int64)
        self._pts = packets["pts"]
        self._is_hidden = (flags & PacketFlag.HIDDEN) != 0
        self._is_disposable = (flags & PacketFlag.DISPOSABLE) != 0
        self.is_key = (flags & PacketFlag.KEY) != 0
        self._keys = np.flatnonzero(self.is_key)
        shown = np.flatnonzero(~self._is_hidden)
        times = self._pts[shown]
        rising = bool((times[1:] >= times[:-1]).all())
        # If no packet is reordered, hidden or disposable, every packet of a run is needed.
        self._is_plain = rising and not (self._is_hidden | self._is_disposable).any()
        if not rising:
            shown = shown[np.argsort(times, kind="stable")]
        self.packet_of = shown
        """The packet of each frame, in presentation order."""
        if len(shown) != n_frames:
            raise MediaError(f"a table of packets holds {len(shown)} frames; expected {n_frames}")
        self.start_of = self._starts()
        """The packet of the keyframe from which each frame is decoded."""

    def _starts(self) -> npt.NDArray[np.int64]:
        """Return the packet of the keyframe from which each frame is decoded.

        This is the last keyframe that precedes the frame, or is the frame itself, in both decoding
        and presentation order.

        A frame that is decoded after a keyframe but shown before it (a leading picture of an open
        group of pictures) needs the packets before the keyframe.
        """
        at = np.searchsorted(self._keys, self.packet_of, "right") - 1
        if len(at) and at.min() < 0:
            raise MediaError("a table of packets shows frames before its first keyframe")
        key_times, times = self._pts[self._keys], self._pts[self.packet_of]
        for step in range(_MAX_STEPS):
            late = (at > 0) & (key_times[at] > times)
            if not late.any():
                break
            at[late] = at[late] - 1 if step + 1 < _MAX_STEPS else 0
        found: npt.NDArray[np.int64] = self._keys[at]
        return found

    def runs(self, frames: npt.NDArray[np.int64]) -> list[DecodeRun]:
        """Plan the decoding of `frames`, numbered in presentation order.

        Frames may be in any order and repeated. Each group of pictures is decoded at most once.

        Raises:
            InvalidArgument: a frame does not exist.
        """
        if len(frames) and not 0 <= frames.min() <= frames.max() < len(self.packet_of):
            raise InvalidArgument(
                f"frames {frames.min()} to {frames.max()} of a stream of "
                f"{len(self.packet_of)} frames"
            )
        packets, starts = self.packet_of[frames].tolist(), self.start_of[frames].tolist()
        # Sort by keyframe, not by packet: a leading picture may come after another frame's packet
        # and still need an earlier keyframe.
        runs: list[DecodeRun] = []
        for start, packet, n in sorted(zip(starts, packets, range(len(packets)), strict=True)):
            # Adjacent groups of pictures form one run: decoding continues across the boundary.
            if not runs or start > runs[-1].stop:
                runs.append(DecodeRun(start, packet + 1))
            run = runs[-1]
            run.stop = max(run.stop, packet + 1)
            run.wanted.setdefault(packet, []).append(n)
        for run in runs:
            run.stop = self._with_hidden(run.stop)
        return runs

    def _with_hidden(self, stop: int) -> int:
        """Return the end of a run that ends at `stop`, extended over the hidden packets after it.

        One of the hidden packets may be the second field of a frame.
        """
        hidden = self._is_hidden
        while stop < len(hidden) and hidden[stop]:
            stop += 1
        return stop

    def packets_to_decode(self, run: DecodeRun) -> Sequence[int]:
        """Return the packets of a run that may be needed for the wanted frames, in order.

        Disposable packets of unwanted frames, and leading pictures of the keyframe, are skipped.
        """
        if self._is_plain:
            return range(run.first, run.stop)
        part = slice(run.first, run.stop)
        needed = ~self._is_disposable[part] & (self._pts[part] >= self._pts[run.first])
        needed[[packet - run.first for packet in run.wanted]] = True
        found: list[int] = (np.flatnonzero(needed) + run.first).tolist()
        return found

    def earlier_keyframe(self, first: int, steps: int = 1) -> int | None:
        """Return the packet of the keyframe that is `steps` keyframes before packet `first`.

        Return the first keyframe if there are fewer, and None if there is no earlier keyframe.
        """
        at = int(np.searchsorted(self._keys, first))
        return int(self._keys[max(0, at - steps)]) if at else None

    def start_earlier(self, key: int, first: int) -> None:
        """Decode from packet `key` all frames that were decoded from a later packet up to `first`.

        Both packets are keyframes.
        """
        self.start_of[(self.start_of > key) & (self.start_of <= first)] = key
