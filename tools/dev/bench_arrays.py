"""Measure how fast files of arrays are read for a conversion, beside their own libraries.

    python tools/dev/bench_arrays.py

Each line: a folder of one kind of file in memory, the best of five turns of the library's own
loop, of the converter's, and the first divided by the second. Needs `safetensors`.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np
from safetensors.numpy import load_file, save_file

from shardio import Input
from shardio_converters.arrays import Arrays

N_TURNS: Final = 5


def main() -> None:
    """Measure every kind of file."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        for name, make in KINDS.items():
            place = Path(folder, name)
            place.mkdir()
            make(place)
            files = [Input(one.name, str(one), 0, -1) for one in sorted(place.iterdir())]
            converter = Arrays().fitted(files)
            library, ours = [], []
            for _ in range(N_TURNS):
                library.append(_seconds(_load, files))
                ours.append(_seconds(converter.samples, files))
            best, own = min(library), min(ours)
            print(f"{name:12} library {best:.3f} s, converter {own:.3f} s: {best / own:.2f}")


def _seconds(read: Callable[[Input], Iterable[Any]], files: list[Input]) -> float:
    start_s = time.perf_counter()
    for one in files:
        for _ in read(one):
            pass
    return time.perf_counter() - start_s


def _load(one: Input) -> Iterator[Any]:
    """Read all of a file with the library that writes such files."""
    path = one.path
    if path.endswith(".npz"):
        with np.load(path) as archive:
            for name in archive.files:
                yield archive[name]
    elif path.endswith("rows.npy"):
        for row in np.load(path, mmap_mode="r"):
            yield np.array(row)
    elif path.endswith(".npy"):
        yield np.load(path)
    else:
        yield load_file(path)


def _make_rows(place: Path) -> None:
    np.save(place / "rows.npy", np.zeros((60_000, 28, 28), "uint8"))


def _make_small(place: Path) -> None:
    for number in range(2_000):
        np.save(place / f"{number:05d}.npy", np.zeros((16, 16), "float32"))


def _make_large(place: Path) -> None:
    for number in range(200):
        np.save(place / f"{number:05d}.npy", np.zeros((512, 512), "float32"))


def _make_npz(place: Path) -> None:
    for number in range(500):
        np.savez(place / f"{number:05d}.npz", x=np.zeros((64, 64), "float32"), y=np.int64(3))


def _make_tensors(place: Path) -> None:
    for number in range(500):
        made = {"x": np.zeros((64, 64), "float32"), "y": np.zeros(1)}
        save_file(made, place / f"{number:05d}.safetensors")


def _make_large_tensors(place: Path) -> None:
    for number in range(100):
        made = {"x": np.zeros((512, 512), "float32"), "y": np.zeros(1)}
        save_file(made, place / f"{number:05d}.safetensors")


KINDS: Final[dict[str, Callable[[Path], None]]] = {
    "rows": _make_rows,
    "small npy": _make_small,
    "large npy": _make_large,
    "npz": _make_npz,
    "safetensors": _make_tensors,
    "large st": _make_large_tensors,
}


if __name__ == "__main__":
    main()
