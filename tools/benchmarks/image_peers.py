"""One loader of JPEGs, which reads all of them whenever it is told to. See `peers`.

    python image_peers.py PEER FOLDER

PEER is `ffcv`, `shardio`, or `torchdl` with, behind a dash, `pillow`, as torchvision decodes, or
`simplejpeg`, which is ours. FOLDER has the files and `frames.npy`, the
pictures that they were made of. Prints a line when it is ready; for each line that it reads, it
goes through one shuffled epoch and prints its seconds. Each peer reads the very same files: FFCV's
writer, which encodes by itself, is handed them as what it has encoded.

It imports nothing but NumPy and its peer, whose interpreter may have neither shardio nor a NumPy
that shardio could use.
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
    """A map-style dataset as a user writes it."""

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
    """Ours."""
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
    """Torch's DataLoader, as its documentation shows it."""
    data: Any = import_module("torch.utils.data")
    options: dict[str, Any] = {"shuffle": True, "persistent_workers": True}
    found: Iterable[Any] = data.DataLoader(
        Files(folder, decoder), BATCH, num_workers=WORKERS, **options
    )
    return found


def ffcv(folder: Path) -> Iterable[Any]:
    """FFCV, likewise."""
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
    """Return what FFCV's loader calls for each picture; None if its library is not installed."""
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
    """Get ready, and run an epoch for each line."""
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
