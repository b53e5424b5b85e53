"""Decode any frames of encoded streams into arrays, from the packets alone, without a container."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from shardio._base.classes import Closing
from shardio.errors import DataError, InvalidArgument, MediaError
from shardio.format.types.streams import (
    PLANES,
    EncodedStream,
    PacketFlag,
    Packets,
    broken_rule,
    packet_flags,
    packet_sizes,
    planes_error,
)
from shardio.media.bitstream import parameter_change_test, parameter_sets, starts_closed_gop
from shardio.media.decoders import (
    decode_planes,
    decoder_key,
    display_parameter,
    fraction_parameter,
    get_or_create,
    lead_in,
    numbered_packet,
    open_video_decoder,
)
from shardio.media.frames import CropPosition, FrameWriter
from shardio.media.pixels import FrameConverter, Pixels, display_matrix

if TYPE_CHECKING:
    from av import VideoFrame
    from av.video.codeccontext import VideoCodecContext

# The search for a frame's keyframe goes back by at most this number of keyframes, and then to the
# stream's first keyframe. Without the limit, a damaged table could make the search take long.
_MAX_STEPS = 32
_MAX_DECODERS = 8  # an open decoder holds the memory of a few frames


@dataclass(slots=True)
class DecodeRun:
    """Packets to decode in one go: from the keyframe `first` up to, but not including, `stop`.

    `wanted` maps the packet of each requested frame to its positions in the list of requests.
    """

    first: int
    stop: int
    wanted: dict[int, list[int]] = field(default_factory=dict)


class FrameTable:
    """A table of the packet and the keyframe of each frame of a stream, in presentation order."""

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
        self._needs_all_packets = rising and not (self._is_hidden | self._is_disposable).any()
        if not rising:
            shown = shown[np.argsort(times, kind="stable")]
        self.packet_of = shown
        """The index of each frame's packet, in presentation order."""
        if len(shown) != n_frames:
            raise MediaError(f"a table of packets holds {len(shown)} frames; expected {n_frames}")
        self.start_of = self._keyframes_needed()
        """For each frame, the packet index of the keyframe at which a decoder must start."""

    def _keyframes_needed(self) -> npt.NDArray[np.int64]:
        """Return, for each frame, the last keyframe that is neither decoded nor shown after it.

        A *leading picture* is decoded after a keyframe K but shown before K. Decoding the picture
        needs packets before K, so decoding starts at an earlier keyframe.
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
        """Return the runs of packets to decode for `frames`, indices in any order."""
        if len(frames) and not 0 <= frames.min() <= frames.max() < len(self.packet_of):
            raise InvalidArgument(
                f"frames {frames.min()} to {frames.max()} of a stream of "
                f"{len(self.packet_of)} frames"
            )
        packets, starts = self.packet_of[frames].tolist(), self.start_of[frames].tolist()
        # Sort by keyframe, not by packet. The packet of a leading picture may come after the packet
        # of another frame, although the leading picture needs an earlier keyframe.
        runs: list[DecodeRun] = []
        for start, packet, n in sorted(zip(starts, packets, range(len(packets)), strict=True)):
            # Adjacent groups of pictures become one run: a decoder continues from each group to the
            # next group.
            if not runs or start > runs[-1].stop:
                runs.append(DecodeRun(start, packet + 1))
            run = runs[-1]
            run.stop = max(run.stop, packet + 1)
            run.wanted.setdefault(packet, []).append(n)
        hidden = self._is_hidden
        # Add the hidden packets after each run: such a packet may contain the second field of the
        # run's last frame.
        for run in runs:
            while run.stop < len(hidden) and hidden[run.stop]:
                run.stop += 1
        return runs

    def packets_to_decode(self, run: DecodeRun) -> Sequence[int]:
        """Return the indices of the packets in a run that are needed for its wanted frames.

        Disposable packets, and packets whose frames are shown before the keyframe of the run, are
        needed only if their own frames are wanted.
        """
        if self._needs_all_packets:
            return range(run.first, run.stop)
        part = slice(run.first, run.stop)
        needed = ~self._is_disposable[part] & (self._pts[part] >= self._pts[run.first])
        needed[[packet - run.first for packet in run.wanted]] = True
        found: list[int] = (np.flatnonzero(needed) + run.first).tolist()
        return found

    def earlier_keyframe(self, first: int, steps: int) -> int | None:
        """Return the keyframe `steps` keyframes before packet `first`, or the first of all.

        Return None if no keyframe is before `first`.
        """
        at = int(np.searchsorted(self._keys, first))
        return int(self._keys[max(0, at - steps)]) if at else None

    def start_earlier(self, key: int, first: int) -> None:
        """Start at `key` for all frames that start at a later keyframe, `first` at the latest."""
        self.start_of[(self.start_of > key) & (self.start_of <= first)] = key


def keyframes_of(stream: EncodedStream) -> npt.NDArray[np.int64]:
    """Return the frames of a video at which decoding begins, as indices in presentation order.

    Raises MediaError if the table of packets is damaged.
    """
    table = FrameTable(stream.packets, stream.n_frames)
    return np.flatnonzero(table.packet_of == table.start_of)


def _check_outputs(
    clips: Sequence[tuple[npt.ArrayLike, Pixels]],
    numbers: Sequence[npt.NDArray[np.int64]],
    pixels: str,
) -> tuple[int, int]:
    if pixels not in ("rgb", "rgb-fast", "yuv420"):
        raise InvalidArgument(f"pixels is {pixels!r}; expected 'rgb', 'rgb-fast' or 'yuv420'")
    row = clips[0][1].shape[1:]
    is_rgb = pixels != "yuv420"
    if not (len(row) == 3 and row[2] == 3 if is_rgb else len(row) == 2 and row[0] % 3 == 0):
        expected = "(n, height, width, 3)" if is_rgb else "(n, height * 3 / 2, width)"
        raise InvalidArgument(f"out has the shape {clips[0][1].shape}; {pixels} needs {expected}")
    for (_, out), frames in zip(clips, numbers, strict=True):
        if out.dtype != np.uint8 or out.shape != (*frames.shape, *row) or frames.ndim != 1:
            raise InvalidArgument(
                f"out is {out.dtype} of {out.shape}; {frames.size} frames need uint8 of "
                f"{(frames.size, *row)}"
            )
    height, width = row[0] if is_rgb else row[0] * 2 // 3, row[1]
    if min(height, width) < 1 or (not is_rgb and (height | width) & 1):
        raise InvalidArgument(f"{width}x{height} pixels as {pixels}: expected even sides above 0")
    return height, width


def _check_planes(stream: EncodedStream) -> None:
    if wrong := planes_error(stream.packets, stream.width, stream.height):
        raise MediaError(broken_rule(*wrong))


class _OpenStream:
    def __init__(self, stream: EncodedStream) -> None:
        parameters, extradata = stream.parameters, stream.extradata
        self.codec = str(parameters.get("codec"))
        self.is_planes = self.codec == PLANES
        if self.is_planes:
            _check_planes(stream)
            parameters = {"codec": PLANES}  # the others have no effect on planes
        self.stream = stream  # kept alive, because the caches use its id() as their key
        self.table = FrameTable(stream.packets, stream.n_frames)
        self.decoder_key = decoder_key(parameters, extradata)
        self.aspect = fraction_parameter(parameters, "sample_aspect")
        self.display = display_parameter(parameters)
        self.lead_in = lead_in(parameters)
        self.changes_parameters = parameter_change_test(self.codec, extradata)


class _OpenDecoder:
    """A decoder of the stream `opened`, and of any other stream that has an equal `decoder_key`."""

    codec: VideoCodecContext  # not set for planes, which need no decoder

    def __init__(self, opened: _OpenStream, *, loop_filter: bool) -> None:
        if not opened.is_planes:
            given = opened.stream.parameters, opened.stream.extradata
            self.codec = open_video_decoder(*given, loop_filter=loop_filter)
        self.converter = FrameConverter()
        self.is_changed = False
        """True if a packet has replaced the parameter sets with which the decoder was opened."""
        self._writer_options: object = None

    def writer_for(
        self, size: tuple[int, int], aspect: Fraction, crop: CropPosition | None, pixels: str
    ) -> FrameWriter:
        """Return a writer with these options: the previous writer if it has the same options."""
        options = size, aspect, crop, pixels
        if self._writer_options != options:
            self._writer, self._writer_options = FrameWriter(*options, self.converter), options
        return self._writer


class ClipDecoder(Closing):
    """A decoder of clips. Not thread-safe; `close()` releases the decoders.

    It keeps recently used FFmpeg decoders open. Streams with equal `decoder_key` share a decoder.
    `max_streams` is the number of streams whose frame tables are cached, 35 bytes per packet. If
    `loop_filter` is False, decoders skip the loop filter; see `open_video_decoder`.
    """

    def __init__(self, max_streams: int = 32, *, loop_filter: bool = True) -> None:
        if max_streams < 1:
            raise InvalidArgument(f"max_streams is {max_streams}; at least 1 is needed")
        self._max_streams, self._loop_filter = max_streams, loop_filter
        self._decoders: OrderedDict[tuple[object, ...], _OpenDecoder] = OrderedDict()
        self._open_streams: OrderedDict[int, _OpenStream] = OrderedDict()

    def decode(
        self,
        stream: EncodedStream,
        frames: npt.ArrayLike,
        out: Pixels,
        *,
        crop: CropPosition | None = None,
        pixels: str = "rgb",
    ) -> None:
        """Decode frames into `out`. The shape of `out` sets the size of the pictures.

        Args:
            stream: a video stream.
            frames: for each row of `out`, the index of its frame in presentation order. The indices
                may be in any order, and may be repeated. Each group of pictures is decoded once.
            out: an array of uint8 to fill. Its shape is (n, height, width, 3) for RGB. For "yuv420"
                it is (n, height * 3 / 2, width): Y is above, U and V are side by side below Y, and
                height and width are even.
            crop: the position of the crop, which has the aspect ratio of the output; None for the
                centre.
            pixels: "rgb"; "rgb-fast" for less exact colours (see `FrameConverter.rgb`); or "yuv420"
                for BT.601 in limited range.

        Raises:
            MediaError: the stream is damaged; the contents of `out` are then undefined.
            InvalidArgument: there is no such frame, or `out` has the wrong shape.
        """
        self.decode_many(stream, [(frames, out)], crop=crop, pixels=pixels)

    def decode_many(
        self,
        stream: EncodedStream,
        clips: Sequence[tuple[npt.ArrayLike, Pixels]],
        *,
        crop: CropPosition | None | list[CropPosition | None] = None,
        pixels: str = "rgb",
    ) -> None:
        """Decode several clips of one stream, pairs of (frames, out), each as `decode` does.

        A frame that occurs in several clips is decoded once, and converted once per crop. If `crop`
        is a list, it contains one crop per clip.
        """
        if not clips:
            return
        numbers = [np.asarray(frames, np.int64) for frames, _ in clips]
        size = _check_outputs(clips, numbers, pixels)
        opened = get_or_create(
            self._open_streams, id(stream), self._max_streams, lambda: _OpenStream(stream)
        )
        create = partial(_OpenDecoder, opened, loop_filter=self._loop_filter)
        decoder = get_or_create(self._decoders, opened.decoder_key, _MAX_DECODERS, create)
        crops = crop if isinstance(crop, list) else [crop] * len(clips)
        if len(crops) != len(clips):
            raise InvalidArgument(f"{len(clips)} clips, and a list of {len(crops)} crops")
        by_crop = {each: decoder.writer_for(size, opened.aspect, each, pixels) for each in crops}
        rows = [row for _, out in clips for row in out]
        writers = [by_crop[crops[0]]] * len(rows)
        if len(by_crop) > 1:
            pairs = zip(clips, crops, strict=True)
            writers = [by_crop[each] for (_, out), each in pairs for _ in out]
        decode_run = _PlanesDecoder if opened.is_planes else _RunDecoder
        try:
            for run in opened.table.runs(np.concatenate(numbers)):
                decode_run(opened, decoder, writers, rows).decode(run)
        except MediaError:
            # Drop the decoder: it may have read wrong parameters from damaged data, and would use
            # them for the next packets.
            self._decoders.pop(opened.decoder_key, None)
            raise

    def forget(self, stream: EncodedStream) -> None:
        """Release the cached frame table of a stream."""
        self._open_streams.pop(id(stream), None)

    def close(self) -> None:
        """Release all decoders and streams."""
        self._decoders.clear()
        self._open_streams.clear()


@dataclass(slots=True)
class _RunDecoder:
    """A decoder of runs of one stream. There is a writer and a row for each requested frame."""

    _open_stream: _OpenStream
    _decoder: _OpenDecoder
    _writers: Sequence[FrameWriter]
    _rows: Sequence[Pixels]

    def decode(self, run: DecodeRun) -> None:
        """Decode the wanted frames of a run into their rows.

        If the keyframe is not a real random access point (intra refresh, references to much earlier
        pictures), the decoder fails or leaves frames out. Decoding is then repeated from earlier
        keyframes, and the frame table is changed for later calls.
        """
        table, first, steps = self._open_stream.table, run.first, 1
        while True:
            failure: MediaError | None = None
            try:
                missing = self._decode_once(run)
            except MediaError as error:
                if self._starts_closed_gop(run.first):
                    raise
                missing, failure = run.wanted, error
            if not missing:
                break
            earlier = table.earlier_keyframe(run.first, steps)
            if earlier is None:
                text = f"the frame of packet {min(missing)} was not decoded"
                raise failure or MediaError(text)
            run, steps = DecodeRun(earlier, run.stop, missing), steps * 4
        if run.first < first:
            table.start_earlier(run.first, first)

    def _starts_closed_gop(self, key: int) -> bool:
        table, stream = self._open_stream.table, self._open_stream.stream
        begin = int(table.offsets[key])
        packet = bytes(stream.data[begin : begin + int(table.sizes[key])])
        return starts_closed_gop(self._open_stream.codec, stream.extradata, packet)

    def _decode_once(self, run: DecodeRun) -> dict[int, list[int]]:
        """Decode a run once; return the entries of `wanted` whose frames were not output."""
        import av

        codec, wanted = self._decoder.codec, dict(run.wanted)
        codec.flush_buffers()
        codec.reorder_depth = int(self._open_stream.stream.parameters.get("reorder", 0))
        where: int | str = run.first
        try:
            for number, part, lead, is_key in self._packets(run):
                where = number
                for frame in codec.decode(numbered_packet(number, part, lead, is_key=is_key)):
                    self._write_frame(frame, wanted)
                if not wanted:
                    return wanted
            where = f"the end of {run.stop} packets"
            for frame in codec.decode(None):
                self._write_frame(frame, wanted)
        except av.FFmpegError as error:
            what = where if isinstance(where, str) else f"packet {where}"
            raise MediaError(f"{what} does not decode: {error.strerror}") from error
        except DataError:  # reading packets raises DataErrors, some of which are also ValueErrors
            raise
        except ValueError as error:
            raise MediaError(str(error)) from error
        return wanted

    def _packets(self, run: DecodeRun) -> Iterator[tuple[int, memoryview, bytes, bool]]:
        """Yield (index, bytes, bytes to prepend, keyframe flag) for each packet to decode."""
        table = self._open_stream.table
        numbers = table.packets_to_decode(run)
        begin, end = numbers[0], numbers[-1]
        offsets, sizes = table.offsets, table.sizes
        base = int(offsets[begin])
        # Slice the data only once for the run, because each slice may verify checksums.
        data = memoryview(self._open_stream.stream.data[base : int(offsets[end] + sizes[end])])
        starts = (offsets[numbers] - base).tolist()
        lead, changes_parameters = self._packet_prefix(), self._open_stream.changes_parameters
        facts = zip(
            numbers, starts, sizes[numbers].tolist(), table.is_key[numbers].tolist(), strict=True
        )
        for number, start, size, is_key in facts:
            part = data[start : start + size]
            if changes_parameters(part):
                self._decoder.is_changed = True
            yield number, part, lead, is_key
            lead = b""

    def _packet_prefix(self) -> bytes:
        opened = self._open_stream
        if not self._decoder.is_changed:
            return opened.lead_in
        self._decoder.is_changed = False
        return parameter_sets(opened.codec, opened.stream.extradata) + opened.lead_in

    def _write_frame(self, frame: VideoFrame, wanted: dict[int, list[int]]) -> None:
        """Write a frame into all rows for which it is wanted, and remove it from `wanted`."""
        number = frame.pts
        positions = wanted.pop(number, None) if number is not None else None
        if frame.is_corrupt:
            raise MediaError(f"packet {number} does not decode without concealment")
        if positions is None:
            return
        display = self._open_stream.display
        if display is None and frame.rotation:
            display = display_matrix(frame)
        self._write(positions, FrameWriter.write, frame, display)

    def _write(self, positions: Sequence[int], write: Callable[..., None], *frame: Any) -> None:
        """Write a frame into the rows at `positions` with a method of FrameWriter.

        The frame is written once per writer, and copied to its other rows.
        """
        if len(positions) == 1:
            (position,) = positions
            write(self._writers[position], *frame, self._rows[position])
            return
        written: dict[FrameWriter, Pixels] = {}
        for position in positions:
            writer, row = self._writers[position], self._rows[position]
            if writer in written:
                row[...] = written[writer]
                continue
            write(writer, *frame, row)
            written[writer] = row


class _PlanesDecoder(_RunDecoder):
    """A decoder of runs of a stream of planes, whose packets are pictures or differences."""

    __slots__ = ()

    def decode(self, run: DecodeRun) -> None:
        """Decode the wanted frames of a run into their rows."""
        import av

        number, wanted = run.first, run.wanted
        try:
            for number, picture in enumerate(self._pictures(run), run.first):
                if (positions := wanted.get(number)) is not None:
                    self._write(positions, FrameWriter.write_planes, picture)
        except DataError:
            raise
        except (ValueError, av.FFmpegError) as error:
            raise MediaError(f"packet {number} of planes: {error}") from error

    def _pictures(self, run: DecodeRun) -> Iterator[Pixels]:
        """Return an iterator over the pictures of a run, which may be read-only."""
        opened = self._open_stream
        table, shape = opened.table, (opened.stream.height * 3 // 2, opened.stream.width)
        part = slice(run.first, run.stop)
        starts, sizes = table.offsets[part], table.sizes[part]
        ends = starts + sizes
        # Slice the data only once for the run, because each slice may verify checksums.
        data = memoryview(opened.stream.data[int(starts[0]) : int(ends[-1])])
        is_key = table.is_key[part]
        if len(data) == math.prod(shape) * len(is_key) and is_key.all():
            return iter(np.frombuffer(data, np.uint8).reshape(-1, *shape))
        places = (starts - starts[0]).tolist(), (ends - starts[0]).tolist()
        packets = [data[start:end] for start, end in zip(*places, strict=True)]
        return decode_planes(packets, is_key.tolist(), shape, run.first)
