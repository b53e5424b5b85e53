"""Arrays in files, as NumPy and safetensors load them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np

from benchmarks.converter_kinds.kind import Kind


def _load_npz(path: str) -> Iterator[Any]:
    with np.load(path) as archive:
        for name in archive.files:
            yield archive[name]


def _load_rows(path: str) -> Iterator[Any]:
    for row in np.load(path, mmap_mode="r"):
        yield np.array(row)


def _load_npy(path: str) -> Iterator[Any]:
    yield np.load(path)


def _load_tensors(path: str) -> Iterator[Any]:
    from safetensors.numpy import load_file

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
    _save_tensors(place, 500, 64)


def _make_large_tensors(place: Path) -> None:
    _save_tensors(place, 100, 512)


def _save_tensors(place: Path, n_files: int, side: int) -> None:
    from safetensors.numpy import save_file

    for number in range(n_files):
        made = {"x": np.zeros((side, side), "float32"), "y": np.zeros(1)}
        save_file(made, place / f"{number:05d}.safetensors")


KINDS: Final = {
    "rows": Kind("arrays", _make_rows, _load_rows),
    "small npy": Kind("arrays", _make_small, _load_npy),
    "large npy": Kind("arrays", _make_large, _load_npy),
    "npz": Kind("arrays", _make_npz, _load_npz),
    "safetensors": Kind(
        "arrays", _make_tensors, _load_tensors, least=0.3, why="headers are checked, in Python"
    ),
    "large st": Kind("arrays", _make_large_tensors, _load_tensors),
}
