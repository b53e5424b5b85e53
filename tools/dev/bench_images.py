"""Measure pictures: decoding them into a block on one core, and whole loaders of them.

    python tools/dev/bench_images.py [--frames FILE.npy] [--turns 12]

The pictures are those of the race: 224x224, quality 90; `--frames` takes the race's own instead of
drawing ones of its kind. They are compressed twice: with full colour (4:4:4), as race.py writes the
files of every peer but FFCV, and with a quarter of it (4:2:0), as FFCV writes its own.

First, `decode_image` beside bare libraries, picture files in memory; of FFCV it is the function
`imdecode` of its compiled library: what its loader calls for each picture. Then whole loaders on
equal files of 4:2:0, two workers each, shuffled, by `race_images`: FFCV by the interpreter in
$RACE_PYTHON_FFCV (see race.py), torch's DataLoader by that in $RACE_PYTHON_TORCH, this one by
default. Who is not there is left out.

All cases take turns. Times are the best turn of each; ratios are the median over the turns, since a
turn's cases meet the same machine. Exits with 1 where `decode_image` is below 0.92 of bare
simplejpeg, or it or the loader are below 0.9 of FFCV (accurate) or 0.95 (fast) on files of 4:2:0,
or the loader is below twice torch's DataLoader that decodes with Pillow, as torchvision does, or
1.5 times one that decodes with simplejpeg (where decoding alone is more than half of the work).
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import simplejpeg

from shardio.media.image import decode_crop, decode_image, encode_jpeg

N_PICTURES, SIDE = 64, 224
TURNS = 40
OF_SIMPLEJPEG = 0.92
OF_FFCV = 0.90
OF_TORCH = {"pillow": 2.0, "simplejpeg": 1.5}
N_FILES = 2048

Pixels = npt.NDArray[np.uint8]
Case = Callable[[bytes, Pixels], object]


def _drawn() -> Pixels:
    """Coarse squares with noise over them, as the race has them."""
    rng = np.random.default_rng(0)
    coarse = rng.integers(0, 255, (N_PICTURES, 28, 28, 3), np.uint8)
    noise = rng.integers(0, 16, (N_PICTURES, SIDE, SIDE, 3), np.uint8)
    drawn: Pixels = coarse.repeat(8, 1).repeat(8, 2) // 2 + noise
    return drawn


def _ffcv_library() -> Path | None:
    """FFCV's compiled library, among the packages of its interpreter."""
    python = Path(os.environ.get("RACE_PYTHON_FFCV", sys.executable))
    found = sorted(python.parents[1].glob("lib/python*/site-packages/ffcv/_libffcv*.so"))
    return found[0] if found else None


def _ffcv(path: Path) -> Case:
    """FFCV's decoder: (source, bytes, its size, destination, size, crop, scale, options)."""
    imdecode = ctypes.CDLL(str(path)).imdecode
    numbers = [ctypes.c_uint32] * 2
    imdecode.argtypes = [ctypes.c_char_p, ctypes.c_uint64, *numbers, ctypes.c_void_p]
    imdecode.argtypes += [*numbers * 3, ctypes.c_bool, ctypes.c_bool]

    def decode(data: bytes, out: Pixels) -> None:
        to = out.ctypes.data
        imdecode(data, len(data), SIDE, SIDE, to, SIDE, SIDE, 0, 0, 1, 1, False, False)

    return decode


def _cases(ffcv: Path | None) -> dict[str, Case]:
    def ours(data: bytes, out: Pixels) -> None:
        decode_image(data, out=out)

    def bare(data: bytes, out: Pixels) -> None:
        simplejpeg.decode_jpeg(data, buffer=out)

    def crop(data: bytes, out: Pixels) -> None:
        decode_crop(data, (20, 30, 180, 170), (SIDE, SIDE), out=out)

    found: dict[str, Case] = {
        "shardio": ours,
        "simplejpeg": bare,
        "shardio crop, resized": crop,
    }
    return found | ({"ffcv": _ffcv(ffcv)} if ffcv else {})


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
    bars = {"simplejpeg": OF_SIMPLEJPEG}
    if subsampling == "420":
        bars["ffcv"] = OF_FFCV
    short = []
    for name in bars.keys() & turns.keys():
        pairs = zip(turns[name], turns["shardio"], strict=True)
        ratio = statistics.median(theirs / ours for theirs, ours in pairs)
        print(f"  beside {name:20s} {ratio:5.2f}x  (at least {bars[name]})")
        if ratio < bars[name]:
            short.append(f"{subsampling}: shardio is {ratio:.2f} of {name}")
    return short


class Epoch(NamedTuple):
    """Wall time of an epoch, and CPU time of all processes of the loader."""

    seconds: float
    cpu_s: float


def _cpu_s(pid: int) -> float:
    """Return the CPU seconds of a process and its descendants."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        children = " ".join(
            path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/children")
        )
    except OSError:  # it is gone
        return 0.0
    own = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return own + sum(_cpu_s(int(child)) for child in children.split())


class Racer:
    """A loader in a process of its own, which runs an epoch whenever it is told to."""

    def __init__(self, peer: str, python: str, folder: Path) -> None:
        script = Path(__file__).with_name("race_images.py")
        command = [python, str(script), peer, str(folder)]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.is_ready = self._line() == "ready\n"

    def _line(self) -> str:
        return self._process.stdout.readline() if self._process.stdout else ""

    def epoch(self) -> Epoch:
        """Run one epoch."""
        before_s = _cpu_s(self._process.pid)
        if self._process.stdin:
            print(file=self._process.stdin, flush=True)
        taken_s = float(self._line())
        return Epoch(taken_s, _cpu_s(self._process.pid) - before_s)

    def close(self) -> str:
        """End it; returns the last line that it has to say."""
        said = self._process.communicate()[1].strip().splitlines()
        return said[-1] if said else "it died"


def _write_files(frames: Pixels, folder: Path) -> None:
    """Write the pictures, numbered by their first pixel, and what they are when compressed."""
    many = np.resize(frames, (N_FILES, SIDE, SIDE, 3))
    many[:, 0, 0, 0], many[:, 0, 0, 1] = np.arange(N_FILES) % 256, np.arange(N_FILES) // 256
    np.save(folder / "frames.npy", many)
    for i, frame in enumerate(many):
        data = encode_jpeg(frame, quality=90, subsampling="420")
        (folder / f"{i:06d}.jpg").write_bytes(data)


@contextlib.contextmanager
def _racers(frames: Pixels) -> Iterator[dict[str, Racer]]:
    """Ours and whoever else is there."""
    pythons = {"shardio": sys.executable}
    pythons["ffcv"] = os.environ.get("RACE_PYTHON_FFCV", sys.executable)
    torch = os.environ.get("RACE_PYTHON_TORCH", sys.executable)
    pythons |= {f"torchdl-{decoder}": torch for decoder in OF_TORCH}
    found: dict[str, Racer] = {}
    with tempfile.TemporaryDirectory() as name:
        _write_files(frames, Path(name))
        try:
            for peer, python in pythons.items():
                racer = Racer(peer, python, Path(name))
                if racer.is_ready:
                    found[peer] = racer
                else:
                    print(f"  without {peer}: {racer.close()}")
            yield found
        finally:
            for racer in found.values():
                racer.close()


def _race(frames: Pixels, n_turns: int) -> list[str]:
    """Whole loaders, in turns; returns what is below its bar."""
    with _racers(frames) as racers:
        turns = [{peer: racer.epoch() for peer, racer in racers.items()} for _ in range(n_turns)]
    for peer in racers:
        best = min(turn[peer] for turn in turns)
        cpu_us = min(turn[peer].cpu_s for turn in turns) * 1e6 / N_FILES
        print(
            f"  {peer:24s} {N_FILES / best.seconds:7,.0f} pictures/s  {cpu_us:6.1f} us of CPU time"
        )
    bars = {"ffcv": OF_FFCV} | {f"torchdl-{each}": bar for each, bar in OF_TORCH.items()}
    short = []
    ours = "shardio"
    for peer, bar in bars.items():
        if peer not in racers or ours not in racers:
            continue
        ratio = statistics.median(turn[peer].seconds / turn[ours].seconds for turn in turns)
        of_cpu = statistics.median(turn[peer].cpu_s / turn[ours].cpu_s for turn in turns)
        told = f"(at least {bar}; of CPU time {of_cpu:.2f}x)"
        print(f"  {ours:16s} beside {peer:18s} {ratio:5.2f}x  {told}")
        if ratio < bar:
            short.append(f"loaders: {ours} is {ratio:.2f} of {peer}")
    return short


def main() -> int:
    """Print the figures; return 1 where one is below its bar."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--frames", type=Path, help="the race's frames.npy")
    parser.add_argument("--turns", type=int, default=12, help="of the loaders")
    options = parser.parse_args()
    frames = _drawn()
    if options.frames:
        frames = np.load(options.frames, mmap_mode="r")[:N_PICTURES]
    cases = _cases(_ffcv_library())
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
    print(f"loaders, {N_FILES} files of 4:2:0, two workers")
    short += _race(frames, options.turns)
    print("\n".join(["below the bar:", *short]) if short else "all above their bars")
    return int(bool(short))


if __name__ == "__main__":
    sys.exit(main())
