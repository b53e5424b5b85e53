"""FFmpeg's command line, a build of its own, beside our decoder: the planes of every frame.

Used by the tests, for the first frames of a file, and, for all, by `tests.media.compare_decoders`.
"""

from __future__ import annotations

import functools
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from shardio import EncodedStream
from shardio.format.types.streams import PacketFlag, packet_flags, packet_sizes
from shardio.media.clip_decoder import FrameTable
from shardio.media.decoders import numbered_packet, open_video_decoder


@functools.cache
def program() -> str | None:
    """Return the ffmpeg of a package, else the system's, else None."""
    try:
        import imageio_ffmpeg

        return str(imageio_ffmpeg.get_ffmpeg_exe())
    except (ImportError, RuntimeError):
        return shutil.which("ffmpeg")


def frames_of(stream: EncodedStream) -> Iterator[Any]:
    """Every frame that comes out of the decoder, with its packet's number as its time."""
    codec = open_video_decoder(stream.parameters, stream.extradata)
    data, sizes = memoryview(bytes(stream.data[:])), packet_sizes(stream.packets).tolist()
    is_key = ((packet_flags(stream.packets) & PacketFlag.KEY) != 0).tolist()
    for n, begin in enumerate(stream.packets["offset"].tolist()):
        part = data[begin : begin + sizes[n]]
        yield from codec.decode(numbered_packet(n, part, is_key=is_key[n]))
    yield from codec.decode(None)


def difference(command: str, path: Path, stream: EncodedStream, most: int | None = None) -> str:
    """Say how the command line's first frames differ from ours; empty if they are the same bits."""
    ours, pixel_format = _decoded(stream, most)
    index = stream.parameters.get("stream", 0)
    line = [command, "-v", "error", "-noautorotate", "-i", str(path), "-map", f"0:v:{index}"]
    line += ["-fps_mode", "passthrough", "-frames:v", str(len(ours) + (most is None))]
    line += ["-f", "rawvideo", "-pix_fmt", pixel_format, "-"]
    theirs = subprocess.run(line, capture_output=True, check=True).stdout
    n_bytes = len(ours[0])
    if len(theirs) != n_bytes * len(ours):
        return f"ffmpeg gives {len(theirs) / n_bytes:g} frames, ours are {len(ours)}"
    differing = [n for n, one in enumerate(ours) if one != theirs[n * n_bytes : (n + 1) * n_bytes]]
    return f"{len(differing)} frames differ: {differing[:9]}" if differing else ""


def _decoded(stream: EncodedStream, most: int | None) -> tuple[list[bytes], str]:
    """Return the frames' planes, tightly packed, in presentation order, and their format."""
    wanted = [int(n) for n in FrameTable(stream.packets, stream.n_frames).packet_of[:most]]
    found, pixel_format, left = dict[int, bytes](), "", set(wanted)
    for frame in frames_of(stream):
        number = int(frame.pts or 0)
        if number in left:
            pixel_format, found[number] = frame.format.name, b"".join(_tight(frame))
            left.remove(number)
        if not left:
            break
    return [found[n] for n in wanted], pixel_format


def _tight(frame: Any) -> list[bytes]:
    n_bytes = [0] * len(frame.planes)
    for part in frame.format.components:
        n_bytes[part.plane] += (part.bits + 7) // 8
    return [
        np.frombuffer(plane, np.uint8)
        .reshape(plane.height, plane.line_size)[:, : plane.width * each]
        .tobytes()
        for plane, each in zip(frame.planes, n_bytes, strict=True)
    ]
