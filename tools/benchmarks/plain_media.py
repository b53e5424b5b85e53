"""The simplest work on media files, with which conversions are compared.

Worker processes import this module, so it does not import shardio.
"""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from fractions import Fraction
from itertools import repeat
from multiprocessing import get_context
from pathlib import Path
from typing import Final

import av
import numpy as np
import xxhash
from av.video.reformatter import Interpolation, VideoReformatter

SIZE: Final = 112
FILTER: Final = (
    f"scale=w='if(gt(iw,ih),-2,{SIZE})':h='if(gt(iw,ih),{SIZE},-2)'"
    ":flags=bilinear+accurate_rnd+full_chroma_int+full_chroma_inp+bitexact"
    f":out_color_matrix=bt601:out_range=limited,crop={SIZE}:{SIZE}"
)
SETTINGS: Final = (
    "-an -c:v libx264 -preset veryfast -tune fastdecode -crf 19 -bf 3 -g 16 -keyint_min 16 "
    "-x264-params b-adapt=0:b-pyramid=none:partitions=none:subme=4 -sc_threshold 0 "
    "-pix_fmt yuv420p -fps_mode passthrough"
).split()


def decode(path: Path, out: Path) -> None:
    """Decode, resize and crop one file, and write nothing."""
    flags = Interpolation.BILINEAR | Interpolation.ACCURATE_RND | Interpolation.BITEXACT
    flags |= Interpolation.FULL_CHR_H_INT | Interpolation.FULL_CHR_H_INP
    maker = VideoReformatter()
    with av.open(str(path)) as container:
        stream = container.streams.video[0]
        stream.codec_context.thread_type, stream.codec_context.thread_count = "NONE", 1
        aspect = stream.sample_aspect_ratio or 1
        for frame in container.decode(stream):
            scale = Fraction(SIZE) / min(frame.width * aspect, Fraction(frame.height))
            width, height = int(frame.width * aspect * scale), int(frame.height * scale)
            rgb = maker.reformat(frame, width, height, "rgb24", interpolation=flags, threads=1)
            plane = rgb.planes[0]
            rows = np.frombuffer(memoryview(plane), np.uint8).reshape(height, plane.line_size)
            image = rows[:, : width * 3].reshape(height, width, 3)
            top, left = (height - SIZE) // 2, (width - SIZE) // 2
            np.ascontiguousarray(image[top : top + SIZE, left : left + SIZE])


def encode(path: Path, out: Path, program: str, n_threads: int) -> None:
    """Encode one file as the store `h264` does, with the command line of FFmpeg."""
    threads, filters = ["-threads", str(n_threads)], ["-filter_threads", str(n_threads)]
    command = [program, "-v", "error", *filters, *threads, "-i", str(path), "-vf", FILTER]
    command += [*SETTINGS, *threads, str(out.with_suffix(".mp4"))]
    subprocess.run(command, check=True, stdin=subprocess.DEVNULL)


def copy(path: Path, out: Path) -> None:
    """Copy one file durably, and hash it while copying."""
    with path.open("rb") as source:
        _write_durably(iter(lambda: source.read(1 << 20), b""), out)


def copy_decoded(path: Path, out: Path) -> None:
    """Copy and hash one JPEG, and decode it to find damage."""
    import simplejpeg

    data = path.read_bytes()
    simplejpeg.decode_jpeg(data, strict=True)
    _write_durably([data], out)


def demux(path: Path, out: Path) -> None:
    """Write a file's packets durably, one after another, and hash them: no table, no schema."""
    with av.open(str(path)) as container:
        _write_durably(map(bytes, container.demux(container.streams.video[0])), out)


def _write_durably(chunks: Iterable[bytes], out: Path) -> None:
    hasher = xxhash.xxh3_64()
    with out.open("wb") as copy:
        for chunk in chunks:
            hasher.update(chunk)
            copy.write(chunk)
        copy.flush()
        os.fsync(copy.fileno())
    hasher.hexdigest()


WORKS: Final[dict[str, Callable[..., None]]] = {
    "decode": decode,
    "encode": encode,
    "copy": copy,
    "copy decoded": copy_decoded,
    "demux": demux,
}


def on_files(
    work: str, files: list[str], n_processes: int, out: str, *more: object
) -> dict[str, float]:
    """Do one of WORKS on every file, in `n_processes` processes; return the seconds it takes.

    `more` are the arguments of the work after the paths of its input and output.
    """
    start_s = time.perf_counter()
    Path(out).mkdir()
    with ProcessPoolExecutor(n_processes, get_context("spawn")) as pool:
        targets = (Path(out, f"{i}{Path(file).suffix}") for i, file in enumerate(files))
        others = map(repeat, more)
        for _ in pool.map(WORKS[work], map(Path, files), targets, *others):
            pass
    return {"s": time.perf_counter() - start_s}
