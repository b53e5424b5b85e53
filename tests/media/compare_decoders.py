#!/usr/bin/env python
"""Compare every frame of every clip with two decoders that share nothing with ours but FFmpeg.

    python -m tests.media.compare_decoders FOLDER

The `ffmpeg` command line (its own build of FFmpeg, in another version) writes the frames of the
first video stream as planes of the stored size; ours are compared as decoded, from bare packets,
untouched by any conversion: they have to be equal, bit by bit, as codecs demand. torchcodec, where
it can be imported, gives upright RGB of the stored size, made with swscale's plain settings, which
repeat the halved chroma of 4:2:0 instead of interpolating it and round coarsely. Our frames,
converted with those settings, have to equal its own within 2 levels. How far it is from what we
deliver is stated; much, where pixels are not square: we make them so. Two differences are known and
are printed alone: AVI stores no times, so that torchcodec numbers frames with B-frames among them
in another order; and swscale's plain way from 10 bits to 8 differs between versions of FFmpeg.
Files that torchcodec itself cannot read to the end are named.

Exit code 1 where frames differ by more than that, or in number.
"""

from __future__ import annotations

import argparse
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from shardio.errors import MediaError
from shardio.format.types.streams import EncodedStream
from shardio.media.clip_decoder import ClipDecoder, FrameTable
from shardio.media.demuxing import demux
from tests.media import command_line

LEVELS = 2  # of 255


def compare_with_ffmpeg(path: Path, stream: EncodedStream) -> str:
    """Say how the command line's frames differ; empty if they are the same bits."""
    return command_line.difference(command_line.program() or "", path, stream)


def compare_with_torchcodec(path: Path, stream: EncodedStream) -> str:
    """Say how torchcodec's frames differ; empty if they do not beyond rounding."""
    decoders = import_module("torchcodec.decoders")
    index = stream.parameters.get("stream", 0)
    try:
        theirs = decoders.VideoDecoder(str(path), stream_index=index, num_ffmpeg_threads=1)
        n_theirs, every = len(theirs), range(0, stream.n_frames, 5)
        wanted = [theirs[n].permute(1, 2, 0).numpy() for n in every]
    except (RuntimeError, IndexError) as error:
        print(f"    torchcodec itself fails: {str(error).splitlines()[0]}")
        return ""
    if n_theirs != stream.n_frames:
        return f"torchcodec counts {n_theirs} frames, ours are {stream.n_frames}"
    plain = plainly(stream)
    worst = far = 0.0
    with ClipDecoder() as decoder:
        for n, each in zip(every, wanted, strict=True):
            out = np.empty((1, *each.shape), np.uint8)
            decoder.decode(stream, [n], out)
            worst = max(worst, float(np.abs(plain[n].astype(np.int16) - each).max()))
            far = max(far, float(np.abs(out[0].astype(np.int16) - each).mean()))
    print(f"    torchcodec: {worst:g} levels from plain swscale; ours differ by {far:.2f} at most")
    is_known = path.suffix == ".avi" or "10" in stream.parameters["pixel_format"]
    if worst <= LEVELS or is_known:
        return ""
    return f"{worst:g} levels apart; {LEVELS} are rounding"


def plainly(stream: EncodedStream) -> dict[int, Any]:
    """Every frame, upright, as swscale's plain settings convert it."""
    table = FrameTable(stream.packets, stream.n_frames)
    number_of = {int(packet): n for n, packet in enumerate(table.packet_of)}
    turns = round(int(stream.parameters.get("rotation", 0)) / 90)
    return {
        number_of[int(frame.pts or 0)]: np.rot90(frame.to_ndarray(format="rgb24"), turns)
        for frame in command_line.frames_of(stream)
        if int(frame.pts or 0) in number_of and number_of[int(frame.pts or 0)] % 5 == 0
    }


def main() -> int:
    """Compare, print, judge."""
    parser = argparse.ArgumentParser(description="Our frames beside those of other decoders.")
    parser.add_argument("folder", type=Path)
    options = parser.parse_args()
    others = []
    if command_line.program():
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
