"""Files of pictures and animations: encoded in memory, written whole or not at all.

A name's ending says the format. GIF, WebP, PNG (as APNG) and MP4 hold animations; a JPEG does not.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import secrets
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast

import shardio
from shardio_tools._sheets import image_of, quantized
from shardio_tools.frames import Pixels

if TYPE_CHECKING:
    from av import VideoStream

STILLS: Final = {".png": "PNG", ".jpg": "JPEG", ".jpeg": "JPEG", ".webp": "WEBP", ".gif": "GIF"}
MOVING: Final = (".gif", ".webp", ".png", ".mp4")
_OPTIONS: Final[dict[str, dict[str, Any]]] = {
    "JPEG": {"quality": 92},
    "WEBP": {"quality": 92, "method": 4},
}
_SHORTEST_MS: Final = 10
"""What a GIF counts in; nothing is shown for less."""
_MANIFEST: Final = "dataset.json"


def check_target(path: str, source: str, *, may_replace: bool) -> None:
    """Make sure that a picture may be written to `path`, of what lies at `source`.

    Raises:
        InvalidArgument: the ending is unknown, it is within a dataset, or it is there already.
    """
    known = sorted({*STILLS, *MOVING})
    if suffix_of(path) not in known:
        raise shardio.InvalidArgument(
            f"{path}: the name of a picture must end in one of {', '.join(known)}"
        )
    folder = Path(os.path.realpath(path)).parent
    root = Path(os.path.realpath(source))
    for above in (folder, *folder.parents):
        if above == root or (above / _MANIFEST).is_file():
            raise shardio.InvalidArgument(
                f"{path}: {above} holds a dataset, where nothing else belongs: name another folder"
            )
    if not folder.is_dir():
        raise shardio.InvalidArgument(f"{path}: there is no folder {folder} to write it into")
    if os.path.isdir(path) or (os.path.lexists(path) and not may_replace):
        raise shardio.InvalidArgument(
            f"{path}: there is something of this name already: --overwrite replaces a file"
        )


def suffix_of(path: str) -> str:
    """The ending of a name, in small letters, with its dot."""
    return os.path.splitext(path)[1].lower()


def encoded_still(pixels: Pixels, suffix: str) -> bytes:
    """Encode RGB pixels as the format of `suffix`, one of `STILLS`."""
    out, kind = io.BytesIO(), STILLS[suffix]
    image_of(pixels).save(out, kind, **_OPTIONS.get(kind, {}))
    return out.getvalue()


def encoded_animation(frames: Sequence[Pixels], durations_s: Sequence[float], suffix: str) -> bytes:
    """Encode RGB frames of one size as the format of `suffix`, one of `MOVING`.

    Each is shown for its duration, to the millisecond (GIF: to the hundredth of a second). GIF,
    WebP and PNG begin anew at their end.
    """
    durations = [max(_SHORTEST_MS, round(duration * 1000)) for duration in durations_s]
    if suffix == ".mp4":
        return _encoded_film(frames, durations)
    out, kind = io.BytesIO(), STILLS[suffix]
    first, *others = map(quantized if kind == "GIF" else image_of, frames)
    first.save(
        out,
        kind,
        save_all=True,
        append_images=others,
        duration=durations,
        loop=0,
        **_OPTIONS.get(kind, {}),
    )
    return out.getvalue()


def _encoded_film(frames: Sequence[Pixels], durations: Sequence[int]) -> bytes:
    """Encode frames of even sides as H.264, or MPEG-4 where FFmpeg was built without x264."""
    import av

    out = io.BytesIO()
    with av.open(out, "w", format="mp4") as container:
        name = "libx264" if "libx264" in av.codecs_available else "mpeg4"
        stream = cast("VideoStream", container.add_stream(name, rate=25))
        stream.height, stream.width = frames[0].shape[:2]
        stream.pix_fmt = "yuv420p"
        stream.codec_context.time_base = Fraction(1, 1000)
        start = 0
        for pixels, duration in zip(frames, durations, strict=True):
            frame = av.VideoFrame.from_ndarray(pixels, format="rgb24")
            frame.pts, frame.time_base = start, Fraction(1, 1000)
            frame.duration = duration
            container.mux(stream.encode(frame))
            start += duration
        container.mux(stream.encode(None))
    return out.getvalue()


def write_whole(path: str, data: bytes, *, may_replace: bool) -> None:
    """Write a file that appears under its name when it is complete.

    Raises:
        InvalidArgument: there is something of this name, and it may not be replaced.
        OSError: the system refuses; nothing is left.
    """
    part = f"{path}.{secrets.token_hex(4)}.part"
    try:
        with open(part, "xb") as file:
            file.write(data)
        if may_replace:
            os.replace(part, path)
        else:
            _name(part, path)
    except FileExistsError as error:
        raise shardio.InvalidArgument(
            f"{path}: there is something of this name already: --overwrite replaces a file"
        ) from error
    except OSError as error:
        error.filename = path
        raise
    finally:
        with contextlib.suppress(OSError):
            os.unlink(part)


def _name(part: str, path: str) -> None:
    """Give a file its name, unless that is taken."""
    try:
        os.link(part, path)
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.ENOTSUP, errno.ENOSYS):
            raise
        # A file system without links: whoever takes the name in between loses it.
        if os.path.lexists(path):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path) from error
        os.rename(part, path)
