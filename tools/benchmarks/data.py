"""Datasets that benchmarks read: each is written once, and kept in a cache by its specification."""

from __future__ import annotations

import hashlib
import inspect
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

import shardio
from benchmarks.child import NotMeasured
from shardio import Array, Bytes, Schema, Text
from shardio.format.layout import MAJOR, MINOR

CLIP, FRAME = (16, 112, 112, 3), (224, 224, 3)
BATCH: Final = 32
MIB: Final = 1 << 20
_WORDS: Final = [f"word{i} " for i in range(997)]
_NOISE: Final = np.random.default_rng(0).integers(0, 256, 1 << 21, np.uint8)

Sample = dict[str, Any]


def default_folder() -> Path:
    """Return the folder of the cache: `shardio-bench` among the user's caches."""
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(home) / "shardio-bench"


@dataclass(frozen=True)
class DatasetSpec:
    """A dataset of `n` samples; `sample` returns one by its number."""

    schema: Mapping[str, Any]
    sample: Callable[[int], Sample]
    n: int
    shard_bytes: int | None = None
    variant: str = ""
    """Anything that `sample` depends on besides its source."""

    def key(self) -> str:
        """Return a text that is equal for equal datasets."""
        schema = Schema(dict(self.schema))
        source = inspect.getsource(self.sample)
        return f"{schema!r} {self.n} {self.shard_bytes} {self.variant} {source}"

    def write(self, folder: Path) -> None:
        """Write the dataset."""
        how: dict[str, Any] = {"shard_bytes": self.shard_bytes} if self.shard_bytes else {}
        with shardio.DatasetWriter(folder, Schema(dict(self.schema)), **how) as writer:
            for i in range(self.n):
                writer.append(self.sample(i))


def drain(loader: Any) -> int:
    """Run an epoch; return the number of batches."""
    return sum(1 for _ in loader)


class Cache:
    """A folder of data that is made when it is first needed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def dataset(self, name: str, spec: DatasetSpec) -> Path:
        """Return the folder of a dataset."""
        return self.made(name, spec.key(), spec.write)

    def made(self, name: str, key: str, make: Callable[[Path], object]) -> Path:
        """Return the cached file or folder of a key; if there is none, `make` writes it.

        The versions of shardio and of the format are part of the key.
        """
        text = f"{shardio.__version__} {MAJOR}.{MINOR} {key}"
        place = self.folder / f"{name}-{hashlib.sha256(text.encode()).hexdigest()[:12]}"
        if not place.exists():
            self.folder.mkdir(parents=True, exist_ok=True)
            beside = self.folder / f".{place.name}-{os.getpid()}"
            shutil.rmtree(beside, ignore_errors=True)
            try:
                make(beside)
                beside.rename(place)
            finally:
                shutil.rmtree(beside, ignore_errors=True)
        return place


# Samples by their number.


def noise(shape: tuple[int, ...], i: int) -> np.ndarray:
    """Return noise that differs between samples; a view of one buffer."""
    n = int(np.prod(shape))
    start = i * 64 % ((len(_NOISE) - n) // 64 * 64)
    return _NOISE[start : start + n].reshape(shape)


def frame(i: int) -> Sample:
    """Return a frame with a label."""
    return {"frames": noise(FRAME, i), "label": i}


def clip(i: int) -> Sample:
    """Return a clip as the converter of videos stores it with `raw`."""
    return {
        "frames": noise(CLIP, i),
        "label": i % 5,
        "source": f"class{i % 5}/{i // 18:05d}.mp4",
        "pts": np.arange(16, dtype=np.int64) + i,
        "time_base": np.array([1, 30], np.int64),
    }


def row(i: int) -> Sample:
    """Return a small row with a label."""
    return {"image": np.full(2048, i % 251, np.uint8), "label": i}


def plain(i: int) -> Sample:
    """Return a row of 6 KB with a label."""
    return {"image": np.full((64, 96), i % 251, np.uint8), "label": i}


def image(i: int) -> Sample:
    """Return an image of 150,528 bytes."""
    return {"image": np.full(FRAME, i % 251, np.uint8)}


def words(i: int) -> str:
    """Return a text of about 2 KB."""
    return "".join(_WORDS[(i * 31 + 7 * k * k) % 997] for k in range(300))


def record(i: int) -> Sample:
    """Return a record of about 2 KB."""
    return {"blob": words(i).encode()}


def note(i: int) -> Sample:
    """Return a text of about 2 KB."""
    return {"note": words(i)}


def five_fields(i: int) -> Sample:
    """Return a row with three more fields."""
    return row(i) | {"weight": i / 7, "box": np.zeros(4, np.float32), "note": words(i)}


ROW: Final = {"image": Array("uint8", (2048,)), "label": Array("int64")}
FIVE: Final = {"weight": Array("float64"), "box": Array("float32", (4,)), "note": Text()}
FRAMES: Final = {"frames": Array("uint8", FRAME), "label": Array("int64")}
CLIPS: Final = {
    "frames": Array("uint8", CLIP),
    "label": Array("int64"),
    "source": Text(),
    "pts": Array("int64", (16,)),
    "time_base": Array("int64", (2,)),
}
PLAIN: Final = DatasetSpec(
    {"image": Array("uint8", (64, 96)), "label": Array("int64")}, plain, 3200, 4 << 20
)
KINDS: Final = {
    "raw, 2 KB": DatasetSpec(ROW, row, 4096),
    "raw, 150 KB": DatasetSpec({"image": Array("uint8", FRAME)}, image, 512),
    "records of about 2 KB": DatasetSpec({"blob": Bytes()}, record, 4096),
    "the same, zstd": DatasetSpec({"note": Text(codec="zstd")}, note, 4096),
    "the same, zstd with a dictionary": DatasetSpec(
        {"note": Text(codec="zstd_dictionary")}, note, 4096
    ),
    "five fields": DatasetSpec(ROW | FIVE, five_fields, 4096),
}
"""Kinds of samples that several benchmarks read."""


def filmed_videos(videos: str) -> Path:
    """Return a folder of videos from cameras: the folder `videos` or, by default, the tests'."""
    tests = os.environ.get("SHARDIO_TEST_MEDIA")
    if not (videos or tests):
        raise NotMeasured("needs filmed videos: --set videos=FOLDER")
    return Path(videos) if videos else Path(str(tests)) / "clips"


def sample_videos(cache: Cache, videos: str) -> Path:
    """Return a folder of videos: the folder `videos` or, by default, one of drawn clips."""
    from shardio_tools.sample_clips import write_clips

    return (
        Path(videos) if videos else cache.made("clips", inspect.getsource(write_clips), write_clips)
    )
