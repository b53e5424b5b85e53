"""Measure decoding pictures into a block beside bare libraries and FFCV, on one core.

    python tools/dev/bench_images.py [--frames FILE.npy] [--ffcv LIBRARY.so]

The pictures are those of the race: 224x224, quality 90; `--frames` takes the race's own instead of
drawing ones of its kind. They are compressed twice: with full colour (4:4:4), as race.py writes the
files of every peer but FFCV, and with a quarter of it (4:2:0), as FFCV writes its own. `--ffcv`
is FFCV's compiled library (ffcv/_libffcv*.so, default: $FFCV_LIBRARY), which is loaded for its
function `imdecode`: what its loader calls for each picture.

All cases take turns, picture files in memory. Times are the best turn of each; ratios are the
median over the turns, since a turn's cases meet the same machine. Exits with 1 where `decode_image`
is below 0.92 of bare simplejpeg, or, on FFCV's own kind of file, below 0.9 of FFCV (accurate) or
0.95 (fast), which is what the whole loader is to reach.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import simplejpeg

from shardio.media.image import decode_crop, decode_image, encode_jpeg

N_PICTURES, SIDE = 64, 224
TURNS = 40
OF_SIMPLEJPEG = 0.92
OF_FFCV = {"accurate": 0.90, "fast": 0.95}

Pixels = npt.NDArray[np.uint8]
Case = Callable[[bytes, Pixels], object]


def _drawn() -> Pixels:
    """Coarse squares with noise over them, as the race has them."""
    rng = np.random.default_rng(0)
    coarse = rng.integers(0, 255, (N_PICTURES, 28, 28, 3), np.uint8)
    noise = rng.integers(0, 16, (N_PICTURES, SIDE, SIDE, 3), np.uint8)
    drawn: Pixels = coarse.repeat(8, 1).repeat(8, 2) // 2 + noise
    return drawn


def _ffcv(path: str) -> Case:
    """FFCV's decoder: (source, bytes, its size, destination, size, crop, scale, options)."""
    imdecode = ctypes.CDLL(path).imdecode
    numbers = [ctypes.c_uint32] * 2
    imdecode.argtypes = [ctypes.c_char_p, ctypes.c_uint64, *numbers, ctypes.c_void_p]
    imdecode.argtypes += [*numbers * 3, ctypes.c_bool, ctypes.c_bool]

    def decode(data: bytes, out: Pixels) -> None:
        to = out.ctypes.data
        imdecode(data, len(data), SIDE, SIDE, to, SIDE, SIDE, 0, 0, 1, 1, False, False)

    return decode


def _cases(ffcv: str | None) -> dict[str, Case]:
    def ours(dct: Literal["accurate", "fast"]) -> Case:
        return lambda data, out: decode_image(data, out=out, dct=dct)

    def bare(fast: int) -> Case:
        return lambda data, out: simplejpeg.decode_jpeg(data, fastdct=fast, buffer=out)

    def crop(data: bytes, out: Pixels) -> None:
        decode_crop(data, (20, 30, 180, 170), (SIDE, SIDE), out=out)

    found: dict[str, Case] = {
        "shardio accurate": ours("accurate"),
        "shardio fast": ours("fast"),
        "simplejpeg accurate": bare(0),
        "simplejpeg fast": bare(1),
        "shardio crop, resized": crop,
    }
    return found | ({"ffcv fast": _ffcv(ffcv)} if ffcv else {})


def _turns_us(cases: dict[str, Case], files: list[bytes]) -> dict[str, list[float]]:
    """Microseconds per picture, turn by turn."""
    block: Any = np.zeros((len(files), SIDE, SIDE, 3), np.uint8)
    taken_us: dict[str, list[float]] = {name: [] for name in cases}
    for _ in range(TURNS):
        for name, case in cases.items():
            start_s = time.perf_counter()
            for data, out in zip(files, block, strict=True):
                case(data, out)
            taken_us[name].append((time.perf_counter() - start_s) * 1e6 / len(files))
    return taken_us


def _shortfalls(turns: dict[str, list[float]], subsampling: str) -> list[str]:
    """Compare with the bars; FFCV's only on the kind of file that it writes."""
    bars = {f"simplejpeg {dct}": (dct, OF_SIMPLEJPEG) for dct in OF_FFCV}
    if "ffcv fast" in turns and subsampling == "420":
        bars |= {f"ffcv fast, ours {dct}": (dct, bar) for dct, bar in OF_FFCV.items()}
    short = []
    for name, (dct, bar) in bars.items():
        pairs = zip(turns[name.partition(",")[0]], turns[f"shardio {dct}"], strict=True)
        ratio = statistics.median(theirs / ours for theirs, ours in pairs)
        print(f"  {dct:8s} beside {name.partition(',')[0]:20s} {ratio:5.2f}x  (at least {bar})")
        if ratio < bar:
            short.append(f"{subsampling}: {dct} is {ratio:.2f} of {name.partition(',')[0]}")
    return short


def main() -> int:
    """Print the figures; return 1 where one is below its bar."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--frames", type=Path, help="the race's frames.npy")
    parser.add_argument("--ffcv", default=os.environ.get("FFCV_LIBRARY"))
    options = parser.parse_args()
    frames = _drawn()
    if options.frames:
        frames = np.load(options.frames, mmap_mode="r")[:N_PICTURES]
    cases = _cases(options.ffcv)
    short: list[str] = []
    for subsampling in ("444", "420"):
        files = [encode_jpeg(frame, quality=90, subsampling=subsampling) for frame in frames]
        print(
            f"4:{subsampling[1]}:{subsampling[2]}, {sum(map(len, files)) // len(files)} bytes each"
        )
        turns = _turns_us(cases, files)
        for name, taken_us in sorted((name, min(each)) for name, each in turns.items()):
            print(f"  {name:24s} {1e6 / taken_us:7,.0f} pictures/s  {taken_us:6.1f} us")
        short += _shortfalls(turns, subsampling)
    print("\n".join(["below the bar:", *short]) if short else "all above their bars")
    return int(bool(short))


if __name__ == "__main__":
    sys.exit(main())
