"""Encode frames for random access: the groups of pictures are short, closed, and easy to decode.

`PlanesEncoder` is lossless; the other encoders are lossy.

In H.264, up to three of every four frames are needed by no other frame, so that decoding a clip can
leave them out. Encoders use one thread, because the same frames then always give the same bytes.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator
from fractions import Fraction
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from shardio.errors import InvalidArgument, MediaError, UnsupportedEnvironment
from shardio.format.codecs import compress_planes
from shardio.format.types.streams import PLANES, EncodedStream, PacketFlag, pack_packets
from shardio.media.bitstream import disposable_packets
from shardio.media.checking import build_stream
from shardio.media.container import ffmpeg_errors
from shardio.media.frames import frame_from_planes, split_planes
from shardio.media.image import encode_jpeg
from shardio.media.pixels import MATRICES, RANGES, FrameConverter, Pixels
from shardio.media.timestamps import frame_durations

if TYPE_CHECKING:
    from av import VideoFrame
    from av.video.codeccontext import VideoCodecContext

_NOMINAL_FRAME_RATE = Fraction(25)


@contextlib.contextmanager
def keep_scheduling_policy() -> Iterator[None]:
    """Restore the scheduling policy of all threads that an encoder has given real-time priority.

    If the process runs as root, SVT-AV1 gives the highest priority to the calling thread and its
    own threads. On two cores, two such processes leave no time for any other process.
    """
    if not hasattr(os, "sched_setscheduler"):  # not Linux
        yield
        return
    policy, priority = os.sched_getscheduler(0), os.sched_getparam(0)
    real_time = (os.SCHED_FIFO, os.SCHED_RR)
    try:
        yield
    finally:
        for thread in map(int, os.listdir("/proc/self/task") if policy not in real_time else ()):
            with contextlib.suppress(ProcessLookupError):  # the thread has ended
                if os.sched_getscheduler(thread) in real_time:
                    os.sched_setscheduler(thread, policy, priority)


def _x264_options(gop: int, crf: int) -> dict[str, str]:
    # Disable partitions, because decoding is slower if many small blocks are predicted separately.
    settings = "b-adapt=0:b-pyramid=none:partitions=none:subme=4"
    if _has_avx512():
        # Limit x264 to AVX2. With AVX-512, x264's macroblock tree made 2 % of 900 encodings of the
        # same 36 frames differ in their bytes. With AVX2, none of 1,100 encodings differed. The
        # speed is the same.
        settings += ":asm=avx2"
    return {
        "preset": "veryfast",
        "tune": "fastdecode",
        "crf": str(crf),
        "bf": "3",
        "x264-params": settings,
        "g": str(gop),
        "keyint_min": str(gop),
        "sc_threshold": "0",
    }


@cache
def _has_avx512(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    try:
        return "avx512f" in cpuinfo.read_text().split()
    except OSError:  # not Linux
        return False


def _x265_options(gop: int, crf: int) -> dict[str, str]:
    keys = f"keyint={gop}:min-keyint={gop}:scenecut=0:open-gop=0:bframes=0"
    one_thread = "pools=none:frame-threads=1:wpp=0:log-level=none"
    return {
        "preset": "veryfast",
        "tune": "fastdecode",
        "crf": str(crf),
        "x265-params": f"{keys}:{one_thread}",
    }


# x265 4.2 reads and writes out of bounds in cutree if its lookahead has too few blocks per row, of
# 16 pixels each. Valgrind found this up to a width of 48 pixels, and not from 64 on.
_X265_CUTREE_MIN_WIDTH = 64


def _svtav1_options(gop: int, crf: int) -> dict[str, str]:
    # Do not use the low-delay mode (pred-struct=1), in which SVT-AV1 4.1 waits for the packet of
    # each picture. On a busy machine, 8 of 750 encodings of 50 pictures waited forever; in the
    # default mode, none of 1,466. Do not set the lookahead to 0: 2 % of repeated encodings then
    # differed in their bytes. With the default, none did.
    return {
        "preset": "8",
        "crf": str(crf),
        "g": str(gop),
        "svtav1-params": "lp=1:scd=0:fast-decode=1",
    }


_ENCODERS: dict[str, tuple[str, Callable[[int, int], dict[str, str]]]] = {
    "h264": ("libx264", _x264_options),
    "hevc": ("libx265", _x265_options),
    "av1": ("libsvtav1", _svtav1_options),
}


class StreamEncoder:
    """An encoder of frames to a video stream of 8-bit 4:2:0, in BT.601 and limited range.

    Every `gop`-th frame is a keyframe. `crf` is the quality on the scale of the codec ("h264",
    "hevc" or "av1"); a lower value is better.

    Raises:
        UnsupportedEnvironment: PyAV's FFmpeg has no encoder for the codec.
        InvalidArgument: an argument is invalid.
    """

    def __init__(
        self,
        width: int,
        height: int,
        time_base: Fraction,
        *,
        gop: int = 16,
        crf: int = 19,
        codec: str = "h264",
    ) -> None:
        if codec not in _ENCODERS:
            raise InvalidArgument(f"codec is one of {', '.join(_ENCODERS)}; found {codec!r}")
        if min(width, height) < 16 or (width | height) & 1 or gop < 1 or not 0 <= crf <= 63:
            raise InvalidArgument(
                f"{width}x{height} pixels, gop {gop}, crf {crf}; expected even sides of at least "
                f"16, a gop of at least 1, a crf from 0 to 63"
            )
        self._size, self._time_base, self._codec_name = (width, height), time_base, codec
        self._codec = self._open_codec(gop, crf)
        self._converter = FrameConverter()
        self._packets: list[bytes] = []
        self._flags: list[int] = []
        self._times: list[int] = []
        self._packet_frames: list[int] = []  # for each packet, the index of its picture

    def _open_codec(self, gop: int, crf: int) -> VideoCodecContext:
        import av
        from av.codec.context import Flags
        from av.video.codeccontext import VideoCodecContext

        encoder, settings = _ENCODERS[self._codec_name]
        # Keep SVT-AV1 from printing its settings for every stream.
        os.environ.setdefault("SVT_LOG", "0")
        try:
            codec = av.CodecContext.create(encoder, "w")
        except (ValueError, av.FFmpegError) as error:
            raise UnsupportedEnvironment(
                f"PyAV's FFmpeg has no encoder {encoder} here: choose another codec than "
                f"{self._codec_name!r}"
            ) from error
        if not isinstance(codec, VideoCodecContext):
            raise UnsupportedEnvironment(f"PyAV's {encoder} encodes no video")
        codec.width, codec.height = self._size
        codec.pix_fmt = "yuv420p"
        # Use the same time base for all streams. The encoder writes it into the extradata, and only
        # streams with equal extradata can share a decoder. The packet table has the real times.
        codec.time_base, codec.framerate = 1 / _NOMINAL_FRAME_RATE, _NOMINAL_FRAME_RATE
        codec.colorspace, codec.color_range = MATRICES["bt601"], RANGES["limited"]
        codec.thread_type, codec.thread_count = "NONE", 1
        codec.gop_size = gop
        codec.flags |= Flags.global_header | Flags.closed_gop
        options = settings(gop, crf)
        if encoder == "libx265" and self._size[0] < _X265_CUTREE_MIN_WIDTH:
            options["x265-params"] += ":cutree=0"
        codec.options = options
        return codec

    def add(self, time: int, picture: Pixels) -> None:
        """Encode the next picture, shown from the tick `time` on; `time` must rise in each call.

        `picture` is uint8: RGB of (height, width, 3), or YUV of (height * 3 / 2, width), with Y
        above, and U and V side by side below Y.
        """
        _check_rising(self._times, time)
        frame = self._to_frame(picture)
        frame.pts, frame.time_base = len(self._times), 1 / _NOMINAL_FRAME_RATE
        self._times.append(time)
        opens_codec = len(self._times) == 1
        scheduling = keep_scheduling_policy() if opens_codec else contextlib.nullcontext()
        with ffmpeg_errors(lambda: f"picture {len(self._times) - 1}"), scheduling:
            self._collect(self._codec.encode(frame))

    def _to_frame(self, picture: Pixels) -> VideoFrame:
        from av import VideoFrame

        width, height = self._size
        if picture.dtype == np.uint8 and picture.shape == (height, width, 3):
            rgb = VideoFrame.from_ndarray(np.ascontiguousarray(picture), format="rgb24")
            return self._converter.yuv(rgb, width, height)
        if picture.dtype != np.uint8 or picture.shape != (height * 3 // 2, width):
            raise InvalidArgument(
                f"a picture is {picture.dtype} of {picture.shape}; expected uint8 of "
                f"{(height, width, 3)} or {(height * 3 // 2, width)}"
            )
        return frame_from_planes(split_planes(picture), "yuv420p")

    def _collect(self, packets: Iterable[Any]) -> None:
        for packet in packets:
            self._packets.append(bytes(packet))
            self._flags.append(int(PacketFlag.KEY) if packet.is_keyframe else 0)
            self._packet_frames.append(packet.pts)

    def finish(self) -> EncodedStream:
        """Flush the encoder and return the stream. Call this once, after the last `add`."""
        if not self._times:
            raise MediaError("no picture to encode")
        with ffmpeg_errors(lambda: f"after {len(self._times)} pictures"):
            self._collect(self._codec.encode(None))
        if sorted(self._packet_frames) != list(range(len(self._times))):
            raise MediaError(f"{self._codec.name} dropped pictures")
        durations = frame_durations(self._times)
        parameters = _parameters(self._codec_name, "yuv420p", self._size, "limited")
        if self._codec.reorder_depth:
            parameters["reorder"] = self._codec.reorder_depth
        data, sizes = b"".join(self._packets), list(map(len, self._packets))
        extradata, flags = self._codec.extradata or b"", np.array(self._flags, np.int64)
        if self._codec_name == "h264":
            flags[disposable_packets("h264", b"", data, sizes)] |= int(PacketFlag.DISPOSABLE)
        packets = pack_packets(
            sizes,
            flags,
            [self._times[n] for n in self._packet_frames],
            [durations[n] for n in self._packet_frames],
        )
        return build_stream(parameters, extradata, packets, data, self._time_base)


def encode(
    pictures: Iterable[tuple[int, Pixels | None]],
    width: int,
    height: int,
    time_base: Fraction,
    **options: Any,
) -> EncodedStream:
    """Encode pairs of (time, picture) to a stream, as `StreamEncoder` does; skip None pictures."""
    encoder = StreamEncoder(width, height, time_base, **options)
    for time, picture in pictures:
        if picture is not None:
            encoder.add(time, picture)
    return encoder.finish()


def _check_rising(times: list[int], time: int) -> None:
    if times and time <= times[-1]:
        raise InvalidArgument(f"a picture at {time} follows one at {times[-1]}")


def _parameters(
    codec: str, pixel_format: str, size: tuple[int, int], color_range: str
) -> dict[str, Any]:
    return {
        "codec": codec,
        "pixel_format": pixel_format,
        "width": size[0],
        "height": size[1],
        "color_range": RANGES[color_range],
        "colorspace": MATRICES["bt601"],
        "range": color_range,
        "matrix": "bt601",
    }


class JpegEncoder:
    """An encoder of frames to JPEGs with 4:2:0 chroma and libjpeg's `quality`, 1 to 100."""

    def __init__(self, width: int, height: int, time_base: Fraction, *, quality: int = 90) -> None:
        if quality not in range(1, 101) or min(width, height) < 1:
            raise InvalidArgument(
                f"{width}x{height} pixels, quality {quality!r}; expected sides of at "
                "least 1, a quality from 1 to 100"
            )
        self._size, self._time_base, self._quality = (width, height), time_base, quality
        self._packets: list[bytes] = []
        self._times: list[int] = []

    def add(self, time: int, picture: Pixels) -> None:
        """Encode the next frame, uint8 of (height, width, 3), shown from the tick `time` on."""
        width, height = self._size
        if picture.shape != (height, width, 3):
            raise InvalidArgument(
                f"a picture is of {picture.shape}; expected uint8 of {(height, width, 3)}"
            )
        _check_rising(self._times, time)
        self._packets.append(encode_jpeg(picture, quality=self._quality))
        self._times.append(time)

    def finish(self) -> EncodedStream:
        """Return the stream. Call this once, after the last `add`."""
        if not self._times:
            raise MediaError("no picture to encode")
        parameters = _parameters("mjpeg", "yuvj420p", self._size, "full")
        packets = pack_packets(
            list(map(len, self._packets)),
            [int(PacketFlag.KEY)] * len(self._packets),
            self._times,
            frame_durations(self._times),
        )
        return build_stream(parameters, b"", packets, b"".join(self._packets), self._time_base)


PLANES_CODECS: Final = ("zstd", "raw")
"""The values of `codec` for `PlanesEncoder`: packets are compressed with zstd, or not at all."""


class PlanesEncoder:
    """A lossless encoder of frames to a stream of their 4:2:0 planes.

    Every `gop`-th frame is a keyframe; of the others, the difference from the frame before is
    stored. Packets are compressed with zstd unless `codec` is "raw".

    Raises:
        InvalidArgument: an argument is invalid.
    """

    def __init__(
        self, width: int, height: int, time_base: Fraction, *, gop: int = 4, codec: str = "zstd"
    ) -> None:
        if min(width, height) < 2 or (width | height) & 1 or gop < 1 or codec not in PLANES_CODECS:
            raise InvalidArgument(
                f"{width}x{height} pixels, gop {gop}, codec {codec!r}; expected even sides of at "
                f"least 2, a gop of at least 1, codec {' or '.join(map(repr, PLANES_CODECS))}"
            )
        self._size, self._time_base, self._gop = (width, height), time_base, gop
        self._is_compressed = codec == "zstd"
        self._packets: list[bytes] = []
        self._times: list[int] = []
        self._latest = np.empty(0, np.uint8)

    def add(self, time: int, picture: Pixels) -> None:
        """Encode the next frame, uint8 of (height * 3 / 2, width), shown from the tick `time` on.

        Y is above, and U and V are side by side below Y. `time` must rise in each call.
        """
        width, height = self._size
        if picture.dtype != np.uint8 or picture.shape != (height * 3 // 2, width):
            raise InvalidArgument(
                f"a picture is {picture.dtype} of {picture.shape}; expected uint8 of "
                f"{(height * 3 // 2, width)}"
            )
        _check_rising(self._times, time)
        is_key = len(self._times) % self._gop == 0
        stored = picture if is_key else picture - self._latest
        self._latest = picture.copy()  # the caller may change its memory
        packet = stored.tobytes()
        self._packets.append(compress_planes(packet) if self._is_compressed else packet)
        self._times.append(time)

    def finish(self) -> EncodedStream:
        """Return the stream. Call this once, after the last `add`."""
        if not self._times:
            raise MediaError("no picture to encode")
        flags = np.zeros(len(self._times), np.int64)
        flags[:: self._gop] = PacketFlag.KEY
        durations = frame_durations(self._times)
        packets = pack_packets(list(map(len, self._packets)), flags, self._times, durations)
        parameters = _parameters(PLANES, "yuv420p", self._size, "limited")
        return build_stream(parameters, b"", packets, b"".join(self._packets), self._time_base)
