"""How whole videos are stored: their own packets, or frames of one size that are encoded anew."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from fractions import Fraction
from importlib.metadata import version
from itertools import islice
from typing import Any, Final

import numpy as np

from shardio import EncodedStream, MediaError
from shardio.errors import UnsupportedEnvironment
from shardio.media import MAX_SIDE, ClipDecoder, JpegEncoder, Picture, Rising, StreamEncoder, demux

_COMPARED: Final = 32  # frames
_FACTS: Final = {
    "codec": "codec",
    "stream": "stream",
    "video_streams": "video_streams",
    "width": "width",
    "height": "height",
    "pixel_format": "pixel_format",
    "range": "range",
    "matrix": "matrix",
    "rotation": "rotation",
    "sample_aspect": "pixel_aspect",
}
"""What is recorded of a stream that stays as it is, by its name among the parameters."""


def libraries(store: str, codec: str | None) -> Mapping[str, str]:
    """Versions of what encodes, beside PyAV and FFmpeg.

    Raises:
        UnsupportedEnvironment: FFmpeg has no such encoder here; says what needs none.
        ModuleNotFoundError: a package is not installed.
    """
    if store == "h264":
        try:
            StreamEncoder(16, 16, Fraction(1), codec=codec or "h264")
        except UnsupportedEnvironment as error:
            raise UnsupportedEnvironment(
                f"{error}; --store raw needs none (bit-exact frames, many times the bytes), nor "
                "does --store packets"
            ) from error
    return {"simplejpeg": version("simplejpeg")} if store == "jpeg" else {}


def packets(path: str, size: int, *, check: bool | None) -> tuple[EncodedStream, dict[str, Any]]:
    """Cut a file into packets: they, and what is worth recording.

    Raises:
        MediaError: it is damaged, packets alone do not carry it, or no clip of `size` can be made
            of it, as with the other stores.
    """
    stream = demux(path, check=check)
    short, long = sorted((stream.width, stream.height))
    if 2 * long * size >= short * (2 * MAX_SIDE + 1):
        raise MediaError(
            f"{path}: frames of {stream.width}x{stream.height} pixels as shown would be too "
            f"wide or high after scaling for {size}x{size}; at most {MAX_SIDE} are supported"
        )
    found = {
        name: stream.parameters[key] for key, name in _FACTS.items() if key in stream.parameters
    }
    return stream, found


def pixels_of(store: str) -> str:
    """What pictures an encoder takes."""
    return "rgb" if store == "jpeg" else "yuv420"


def encoder_for(options: Any, time_base: Fraction) -> StreamEncoder | JpegEncoder:
    """Make what encodes the frames of one video."""
    size = options.size
    if options.store == "jpeg":
        return JpegEncoder(size, size, time_base, quality=options.quality)
    return StreamEncoder(
        size, size, time_base, gop=options.gop, crf=options.quality, codec=options.codec
    )


def encoded(
    encoder: StreamEncoder | JpegEncoder,
    pictures: Iterable[tuple[int, Picture | None]],
    name: str,
) -> tuple[EncodedStream, int, MediaError | None]:
    """Encode pictures until they end or break.

    The stream, how many had a time that did not rise and got another, and what they broke with.

    Raises:
        MediaError: there is no picture before the break.
    """
    rising, failure = Rising(), None
    try:
        for time, picture in pictures:
            if picture is not None:
                encoder.add(rising(time), picture)
    except MediaError as error:
        failure = error
    try:
        return encoder.finish(), rising.n_changed, failure
    except MediaError as error:
        raise failure or MediaError(f"{name}: {error}") from error


def error(
    stream: EncodedStream, pictures: Iterator[tuple[int, Picture | None]]
) -> tuple[float, int]:
    """Compare the first frames of a stream with what they were made of.

    The sum of squared differences, and of how many values.
    """
    n_frames = min(_COMPARED, stream.n_frames)
    wanted = np.stack([picture for _, picture in islice(pictures, n_frames) if picture is not None])
    found = np.empty(wanted.shape, np.uint8)
    with ClipDecoder() as decoder:
        decoder.decode(stream, list(range(len(found))), found)
    difference = found.astype(np.int64) - wanted
    return float((difference**2).sum()), found.size
