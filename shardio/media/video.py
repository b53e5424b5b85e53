"""Decodes video files to upright RGB pictures of one size, each with its exact integer time.

Strict on purpose: FFmpeg conceals damage where it can (grey blocks, repeated frames), which suits
a player and not a training set. Here every sign of damage is an error: what the decoder reports
(its `explode` mode), packets and frames that are marked corrupt, and files that are shorter than
their container declares. Damage that changes pixels within the rules of the codec shows no sign.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from fractions import Fraction
from typing import TYPE_CHECKING, Any, cast

from shardio.closing import Closing
from shardio.errors import MediaError
from shardio.media.container import missing_bytes
from shardio.media.picture import Picture, PictureMaker
from shardio.media.times import settled

if TYPE_CHECKING:
    from av import VideoFrame
    from av.container import InputContainer
    from av.video.stream import VideoStream
    from typing_extensions import Buffer

__all__ = ["Picture", "VideoFile", "library_versions"]

# Only these are tried: others would read a text file as ANSI art, a JPEG as a video of one frame,
# and a playlist as whatever files and addresses it names.
_DEMUXERS = (
    "mov,mp4,m4a,3gp,3g2,mj2,matroska,webm,avi,gif,mpegts,mpeg,mpegvideo,h264,hevc,m4v,obu,ivf"
    ",flv,asf,ogg,nut,mxf,rm,yuv4mpegpipe,dv,wtv"
    ",wav,w64,mp3,aac,ac3,eac3,flac,aiff,caf,amr,ape,au,wv,tta"
)
# FFmpeg's numbers; what is untagged is taken for limited range and BT.601.
_FULL_RANGE = 2
_MATRICES = {1: "bt709", 4: "fcc", 7: "smpte240m", 9: "bt2020"}
_STALE_TAG_US = 1_000_000  # a duration that a muxer wrote may be a little off; never by a second


def library_versions() -> dict[str, str]:
    """Give the versions of PyAV and of the parts of FFmpeg that decide over pixels."""
    import av

    parts = ("libavformat", "libavcodec", "libswscale")
    found = {part: ".".join(map(str, av.library_versions[part])) for part in parts}
    return {"av": av.__version__, **found}


class VideoFile(Closing):
    """An open video file and its decoder; `close()` or the end of `with` releases both.

    The first video stream that is not a cover picture is read, by one thread: parallelism is
    across files.

    Raises:
        MediaError: no container is recognised, it holds no video, or nothing decodes it.
        FileNotFoundError: there is no such file.
    """

    def __init__(self, path: str) -> None:
        import av

        self.path = path
        options = {"format_whitelist": _DEMUXERS, "protocol_whitelist": "file"}
        try:
            # `file:` keeps FFmpeg from reading a protocol into the name.
            self._container: InputContainer = av.open(
                f"file:{path}", options=options, metadata_errors="replace"
            )
        except FileNotFoundError:
            raise
        except av.FFmpegError as error:
            raise MediaError(f"{path}: not a readable video: {error.strerror}") from error
        try:
            self._stream, self._facts = self._choose()
            self.time_base = self._exact_time_base()
        except BaseException:
            self._container.close()
            raise

    def _exact_time_base(self) -> Fraction:
        if self._stream.time_base is None:
            raise MediaError(f"{self.path}: the video stream has no time base")
        return self._stream.time_base

    def facts(self) -> dict[str, Any]:
        """Say what was decoded, in JSON's terms, for records: the stream, and what was normalised.

        Complete once a frame has been decoded.
        """
        return dict(self._facts)

    def _choose(self) -> tuple[VideoStream, dict[str, Any]]:
        import av
        from av.stream import Disposition

        streams = [
            stream
            for stream in self._container.streams.video
            if not stream.disposition & Disposition.attached_pic
        ]
        if not streams:
            found = ", ".join(stream.type for stream in self._container.streams) or "none"
            raise MediaError(f"{self.path}: no video stream (streams: {found})")
        stream = streams[0]
        codec = stream.codec_context
        if codec is None:
            raise MediaError(f"{self.path}: no decoder for its video stream")
        codec.thread_type = "NONE"
        codec.thread_count = 1
        codec.options = {"err_detect": "crccheck+explode"}
        try:
            codec.open(strict=False)
        except av.FFmpegError as error:
            raise MediaError(f"{self.path}: the decoder does not open: {error.strerror}") from error
        facts = {"codec": codec.name, "stream": stream.index, "video_streams": len(streams)}
        return stream, facts

    def pictures(
        self, size: int, wanted: Callable[[int], bool] = lambda n: True
    ) -> Iterator[tuple[int, Picture | None]]:
        """Decode every frame once, in order of presentation, as (time, picture).

        The time counts in `time_base`. The picture is uint8, `size` x `size` x 3, RGB, and lives
        as long as it is referenced; it is None for the n-th frame where `wanted(n)` is false,
        which saves its conversion.

        Raises:
            MediaError: the file breaks; what came before is whole.
        """
        maker = PictureMaker(size, self._stream.sample_aspect_ratio or Fraction(1))
        return settled(self._timed(maker, wanted))

    def _timed(
        self, maker: PictureMaker, wanted: Callable[[int], bool]
    ) -> Iterator[tuple[int, Picture | None]]:
        """Decode and convert; where the container stores no times, count them up."""
        import av

        following = self._stream.start_time or 0
        step = self._frame_duration()
        n = 0
        rotation, display = 0, None
        try:
            for frame in self._frames():
                # Not of every frame: PyAV's `side_data` makes a cycle with its frame, and cycles
                # of 3 MB each pile up to a gigabyte before the collector looks at them.
                if not n or frame.rotation != rotation:
                    rotation, display = frame.rotation, _display(frame)
                time = frame.pts if frame.pts is not None else following
                following = time + (frame.duration or step)
                if not n:
                    self._note(frame)
                yield time, maker.picture(frame, display) if wanted(n) else None
                n += 1
            self._check_whole()
        except MediaError as error:
            raise MediaError(f"{self.path}: breaks after {n} frames: {error}") from error
        except av.FFmpegError as error:
            raise MediaError(f"{self.path}: breaks after {n} frames: {error.strerror}") from error
        except ValueError as error:
            raise MediaError(f"{self.path}: {error}") from error
        if not n:
            raise MediaError(f"{self.path}: its video stream holds no frame")

    def _note(self, frame: VideoFrame) -> None:
        """Record what the first frame is and what has to be normalised."""
        aspect = self._stream.sample_aspect_ratio
        self._facts |= {
            "width": frame.width,
            "height": frame.height,
            "pixel_format": frame.format.name,
        }
        if not frame.format.is_rgb:
            full = frame.color_range == _FULL_RANGE or frame.format.name.startswith("yuvj")
            self._facts["range"] = "full" if full else "limited"
            self._facts["matrix"] = _MATRICES.get(frame.colorspace, "bt601")
        if frame.rotation:
            self._facts["rotation"] = frame.rotation
        if aspect and aspect != 1:
            self._facts["pixel_aspect"] = f"{aspect.numerator}:{aspect.denominator}"

    def _frames(self) -> Iterator[VideoFrame]:
        self._end = 0
        for packet in self._container.demux(self._stream):
            if packet.is_corrupt:
                raise MediaError("a packet is marked corrupt")
            if packet.pts is not None:
                self._end = max(self._end, packet.pts + (packet.duration or 0))
            for frame in packet.decode():
                if frame.is_corrupt:
                    raise MediaError("a frame does not decode without concealment")
                yield frame

    def _frame_duration(self) -> int:
        """Ticks from one frame to the next, for containers that store no times."""
        rate = self._stream.average_rate or Fraction(25)
        return max(1, round(1 / (rate * self.time_base)))

    def _check_whole(self) -> None:
        """Compare what was read with what the container declares.

        Raises:
            MediaError: there is less than declared.
        """
        with open(self.path, "rb") as file:
            n_missing = missing_bytes(file)
        if n_missing:
            raise MediaError(f"the file ends {n_missing} bytes before its container does")
        # Matroska drops what it cannot parse and goes on; then only the duration tells.
        if "matroska" not in self._container.format.name:
            return
        tag = _microseconds(self._stream.metadata.get("DURATION", ""))
        declared = min(tag, self._container.duration or 0)
        found = int(self._end * self.time_base * 1_000_000)
        if declared - found > _STALE_TAG_US:
            raise MediaError(f"its frames end at {found} us of {declared} us")

    def close(self) -> None:
        """Release the file and the decoder; pictures handed out stay valid."""
        self._container.close()


def _display(frame: VideoFrame) -> bytes | None:
    """The display matrix of a frame: its rotation and mirroring."""
    data = cast("Buffer | None", frame.side_data.get("DISPLAYMATRIX"))
    return bytes(data) if data is not None else None


def _microseconds(tag: str) -> int:
    """Read Matroska's `HH:MM:SS.nnnnnnnnn`; anything else is 0."""
    match = re.fullmatch(r"(\d+):(\d\d):(\d\d)\.(\d{6})\d*", tag)
    if match is None:
        return 0
    hours, minutes, seconds, micros = map(int, match.groups())
    return ((hours * 60 + minutes) * 60 + seconds) * 1_000_000 + micros
