#!/usr/bin/env python
"""Compares every frame of every clip with two decoders that share nothing with ours but FFmpeg.

    python tools/dev/compare_decoders.py FOLDER

The `ffmpeg` command line (its own build of FFmpeg, in another version) writes the frames of the
first video stream as planes of the stored size; ours are compared as decoded, from bare packets,
untouched by any conversion: they have to be equal, bit by bit, as codecs demand. torchcodec, where
it can be imported, gives upright RGB of the stored size; ours at that size may differ from it by
rounding alone, which is stated: the largest difference, and the share of values that differ by
more than 2.

Exit code 1 where frames differ by more than that, or in number.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from shardio.errors import MediaError
from shardio.format.streams import EncodedStream, packet_sizes
from shardio.media.clips import ClipDecoder
from shardio.media.decoders import numbered_packet, open_video_decoder
from shardio.media.runs import FrameTable
from shardio.media.streams import demux

LEVELS, SHARE = 2, 0.001  # of RGB: up to so many levels, but for this share of the values


def decoded(stream: EncodedStream) -> tuple[list[bytes], str]:
    """Every frame's planes, tightly packed, in the order of presentation, and their format."""
    table = FrameTable(stream.packets, stream.n_frames)
    codec = open_video_decoder(stream.parameters, stream.extradata)
    data, sizes = memoryview(bytes(stream.data[:])), packet_sizes(stream.packets)
    found: dict[int, bytes] = {}
    pixel_format = ""
    parts = [
        numbered_packet(n, data[begin : begin + size])
        for n, (begin, size) in enumerate(zip(table.offsets.tolist(), sizes.tolist(), strict=True))
    ]
    for packet in [*parts, None]:
        for frame in codec.decode(packet):
            pixel_format = frame.format.name
            found[int(frame.pts or 0)] = b"".join(_tight(frame))
    return [found[int(n)] for n in table.packet_of], pixel_format


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


def compare_with_ffmpeg(path: Path, stream: EncodedStream) -> str:
    """Say how the command line's frames differ; empty if they are the same bits."""
    ours, pixel_format = decoded(stream)
    index = stream.parameters.get("stream", 0)
    command = ["ffmpeg", "-v", "error", "-noautorotate", "-i", str(path), "-map", f"0:v:{index}"]
    command += ["-fps_mode", "passthrough", "-f", "rawvideo", "-pix_fmt", pixel_format, "-"]
    theirs = subprocess.run(command, capture_output=True, check=True).stdout
    n_bytes = len(ours[0])
    if len(theirs) != n_bytes * len(ours):
        return f"ffmpeg gives {len(theirs) / n_bytes:g} frames, ours are {len(ours)}"
    differing = [
        n for n, each in enumerate(ours) if each != theirs[n * n_bytes : (n + 1) * n_bytes]
    ]
    return f"{len(differing)} frames differ: {differing[:9]}" if differing else ""


def compare_with_torchcodec(path: Path, stream: EncodedStream) -> str:
    """Say how torchcodec's frames differ; empty if by rounding alone."""
    index = stream.parameters.get("stream", 0)
    theirs = import_module("torchcodec.decoders").VideoDecoder(
        str(path), stream_index=index, num_ffmpeg_threads=1
    )
    if len(theirs) != stream.n_frames:
        return f"torchcodec counts {len(theirs)} frames, ours are {stream.n_frames}"
    worst, off = 0, []
    with ClipDecoder() as decoder:
        for first in range(0, stream.n_frames, 8):
            frames = np.arange(first, min(stream.n_frames, first + 8))
            wanted = theirs.get_frames_at(frames.tolist()).data.permute(0, 2, 3, 1).numpy()
            out = np.empty(wanted.shape, np.uint8)
            decoder.decode(stream, frames, out)
            apart = np.abs(out.astype(np.int16) - wanted)
            worst = max(worst, int(apart.max()))
            off.append(float((apart > LEVELS).mean()))
    share = float(np.mean(off))
    print(f"    torchcodec: at most {worst} levels, {share:.4%} of values by more than {LEVELS}")
    return f"{share:.2%} of values differ by more than {LEVELS}" if share > SHARE else ""


def main() -> int:
    """Compare, print, judge."""
    parser = argparse.ArgumentParser(description="Our frames beside those of other decoders.")
    parser.add_argument("folder", type=Path)
    options = parser.parse_args()
    others = []
    if shutil.which("ffmpeg"):
        others.append(compare_with_ffmpeg)
    else:
        print("without the ffmpeg command line: not installed")
    try:
        import_module("torchcodec.decoders")
        others.append(compare_with_torchcodec)
    except (ImportError, OSError, RuntimeError) as error:
        print(f"without torchcodec: {str(error).splitlines()[0]}")
    failed = not others
    for path in sorted(options.folder.rglob("*.*")):
        try:
            stream = demux(str(path))
        except MediaError as error:
            print(f"{path.name}: left out: {error}")
            continue
        print(f"{path.name}: {stream.n_frames} frames, {stream.parameters['pixel_format']}")
        for compare in others:
            if difference := compare(path, stream):
                print(f"    {compare.__name__}: {difference}")
                failed = True
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
