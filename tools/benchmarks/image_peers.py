"""Run one loader of JPEGs, an epoch for each line of input; see `peers`.

    python image_peers.py PEER FOLDER

PEER is `ffcv`, `shardio`, `torchdl-pillow`, which decodes as torchvision does, or
`torchdl-simplejpeg`, which decodes as shardio does. FOLDER contains the files, and `frames.npy`
with the pictures that they show. The program prints a line when it is ready. For each line that it
reads, it runs one shuffled epoch and prints the seconds that this took. All peers read the same
files: FFCV's writer, which usually encodes pictures itself, gets the files instead.

The program imports only NumPy and the peer, because the interpreter of a peer may have no shardio,
or a NumPy that shardio does not support.
"""

from __future__ import annotations

import ctypes
import os
import sys
import time
from collections.abc import Callable, Iterable
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

BATCH, WORKERS, SIDE = 64, 2, 224


def number_of(picture: Any) -> int:
    """Return the number of a picture, encoded in its first pixel."""
    return int(picture[0, 0, 0]) | int(picture[0, 0, 1]) << 8


def paths_in(folder: Path) -> list[Path]:
    """Return the files, in order."""
    return sorted(folder.glob("*.jpg"))


class Files:
    """A map-style dataset, as users write it."""

    def __init__(self, folder: Path, decoder: str) -> None:
        self._paths, self._decoder = paths_in(folder), decoder

    def __len__(self) -> int:
        return len(self._paths)

    def __getitem__(self, i: int) -> Any:
        if self._decoder == "pillow":
            with import_module("PIL.Image").open(self._paths[i]) as picture:
                return np.array(picture.convert("RGB"))
        return import_module("simplejpeg").decode_jpeg(self._paths[i].read_bytes())


class Frames:
    """The dataset given to FFCV's writer."""

    def __init__(self, folder: Path) -> None:
        self._frames = np.load(folder / "frames.npy", mmap_mode="r")

    def __len__(self) -> int:
        return len(self._frames)

    def __getitem__(self, i: int) -> Any:
        return (np.array(self._frames[i]),)


def shardio(folder: Path) -> Iterable[Any]:
    """Return the batches of a ShardLoader."""
    import shardio as s

    made = folder / "shardio"
    if not made.exists():
        with s.DatasetWriter(made, s.Schema({"x": s.Image()})) as writer:
            for path in paths_in(folder):
                writer.append({"x": path.read_bytes()})
    options: dict[str, Any] = {"shuffle": True, "num_workers": WORKERS}
    loader = s.ShardLoader(made, BATCH, output="numpy", **options)

    class Pixels:
        def __iter__(self) -> Any:
            return (batch["x"] for batch in loader)

    return Pixels()


def torchdl(folder: Path, decoder: str) -> Iterable[Any]:
    """Return torch's DataLoader, used as in its documentation."""
    data: Any = import_module("torch.utils.data")
    options: dict[str, Any] = {"shuffle": True, "persistent_workers": True}
    found: Iterable[Any] = data.DataLoader(
        Files(folder, decoder), BATCH, num_workers=WORKERS, **options
    )
    return found


def ffcv(folder: Path) -> Iterable[Any]:
    """Return the batches of FFCV's Loader, used as in its documentation."""
    pictures: Any = import_module("ffcv.fields.rgb_image")
    loading: Any = import_module("ffcv.loader")
    made, files = folder / "files.beton", paths_in(folder)
    if not made.exists():

        def given(picture: Any, _: int) -> Any:
            return np.frombuffer(files[number_of(picture)].read_bytes(), np.uint8)

        pictures.encode_jpeg = given
        field = pictures.RGBImageField(write_mode="jpg")
        writer = import_module("ffcv.writer").DatasetWriter(str(made), {"x": field}, num_workers=2)
        writer.from_indexed_dataset(Frames(folder))
    options = {"os_cache": True, "order": loading.OrderOption.RANDOM, "num_workers": WORKERS}
    pipelines = {"x": [pictures.SimpleRGBImageDecoder()]}
    loader = loading.Loader(str(made), batch_size=BATCH, pipelines=pipelines, **options)

    class Pixels:
        def __iter__(self) -> Any:
            return (x for (x,) in loader)

    return Pixels()


def ffcv_decoder() -> Callable[[bytes, Any], object] | None:
    """Return the function that FFCV's loader calls to decode a picture; None without FFCV."""
    python = Path(os.environ.get("RACE_PYTHON_FFCV", sys.executable))
    found = sorted(python.parents[1].glob("lib/python*/site-packages/ffcv/_libffcv*.so"))
    if not found:
        return None
    # Source, its bytes, its size, destination, its size, crop, scale, options.
    imdecode = ctypes.CDLL(str(found[0])).imdecode
    numbers = [ctypes.c_uint32] * 2
    imdecode.argtypes = [ctypes.c_char_p, ctypes.c_uint64, *numbers, ctypes.c_void_p]
    imdecode.argtypes += [*numbers * 3, ctypes.c_bool, ctypes.c_bool]

    def decode(content: bytes, out: Any) -> None:
        to = out.ctypes.data
        imdecode(content, len(content), SIDE, SIDE, to, SIDE, SIDE, 0, 0, 1, 1, False, False)

    return decode


def epoch_s(batches: Iterable[Any], n_files: int, out: Any) -> float:
    """Return the seconds of one epoch; each batch is copied, as an upload to a device does."""
    start_s, n, numbers = time.perf_counter(), 0, set()
    for batch in batches:
        pixels = np.asarray(batch)
        out[: len(pixels)] = pixels
        n += len(pixels)
        numbers.add(pixels[0].tobytes()[: SIDE * 3])
    taken_s = time.perf_counter() - start_s
    if n != n_files or len(numbers) < 2:
        raise SystemExit(f"an epoch of {n} pictures; expected {n_files}")
    return taken_s


def main() -> None:
    """Create the loader, and run an epoch for each line of input."""
    name, _, way = sys.argv[1].partition("-")
    folder = Path(sys.argv[2])
    peers: dict[str, Callable[[], Iterable[Any]]] = {
        "shardio": lambda: shardio(folder),
        "torchdl": lambda: torchdl(folder, way),
        "ffcv": lambda: ffcv(folder),
    }
    batches, n_files = peers[name](), len(paths_in(folder))
    out = np.empty((BATCH, SIDE, SIDE, 3), np.uint8)
    epoch_s(batches, n_files, out)
    print("ready", flush=True)
    for _ in sys.stdin:
        print(epoch_s(batches, n_files, out), flush=True)


if __name__ == "__main__":
    main()
