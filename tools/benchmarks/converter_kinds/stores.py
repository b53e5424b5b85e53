"""Stores of arrays, as h5py and zarr load them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np

from benchmarks.converter_kinds.kind import Kind


def _make_hdf5(place: Path) -> None:
    import h5py

    with h5py.File(place / "one.h5", "w") as file:
        file["image"] = np.random.default_rng(0).integers(0, 9, (20_000, 28, 28), "uint8")
        file["label"] = np.arange(20_000)


def _make_hdf5_chunks(place: Path) -> None:
    import h5py

    image = np.random.default_rng(0).integers(0, 9, (6_000, 64, 64), "uint8")
    with h5py.File(place / "one.h5", "w") as file:
        file.create_dataset("image", data=image, chunks=(16, 64, 64), compression="gzip")


def _make_hdf5_texts(place: Path) -> None:
    import h5py

    with h5py.File(place / "one.h5", "w") as file:
        file["text"] = [f"text {number}" for number in range(20_000)]


def _load_hdf5(path: str) -> Iterator[Any]:
    """Yield rows as a loop over h5py's datasets does, with one read per row."""
    import h5py

    with h5py.File(path) as file:
        arrays = [file[name] for name in file]
        arrays = [each.asstr() if each.dtype.kind == "O" else each for each in arrays]
        for row in range(len(arrays[0])):
            yield [each[row] for each in arrays]


def _make_zarr(place: Path) -> None:
    import zarr

    group = zarr.open_group(place / "one.zarr", mode="w")
    image = np.random.default_rng(0).integers(0, 9, (20_000, 28, 28), "uint8")
    group.create_array("image", data=image, chunks=(1_000, 28, 28))
    group.create_array("label", data=np.arange(20_000), chunks=(10_000,))


def _make_zarr_chunks(place: Path) -> None:
    import zarr

    group = zarr.open_group(place / "one.zarr", mode="w")
    group.create_array("image", data=np.ones((2_000, 64, 64), "uint8"), chunks=(1, 64, 64))


def _load_zarr(path: str) -> Iterator[Any]:
    """Yield rows, read in blocks of the smallest chunk: reading them one by one takes minutes."""
    import zarr

    arrays = [array for _, array in zarr.open_group(Path(path).parent, mode="r").arrays()]
    arrays.sort(key=lambda each: each.chunks[0])
    for first in range(0, arrays[0].shape[0], arrays[0].chunks[0]):
        blocks = [each[first : first + arrays[0].chunks[0]] for each in arrays]
        for row in zip(*blocks, strict=True):
            yield [np.array(each) for each in row]


KINDS: Final = {
    "hdf5": Kind("hdf5", _make_hdf5, _load_hdf5),
    "hdf5 gzip": Kind("hdf5", _make_hdf5_chunks, _load_hdf5),
    "hdf5 texts": Kind("hdf5", _make_hdf5_texts, _load_hdf5),
    "zarr": Kind("zarr", _make_zarr, _load_zarr),
    "zarr small": Kind("zarr", _make_zarr_chunks, _load_zarr),
}
