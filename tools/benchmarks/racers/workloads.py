"""The workloads of the race, and their data.

The interpreters of all peers import this module, so it needs only NumPy.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from benchmarks.racers.store import Store

Batch = npt.NDArray[Any]
Epochs = Callable[[int], Iterator[Any]]
"""The batches of an epoch, by its number."""

SIDE: Final = 224
CROP: Final = 192
MARK: Final = 16
"""The side of a block that encodes one bit of a picture's number: JPEG keeps its brightness."""
N_BITS: Final = SIDE // MARK
CLIP_SIDE: Final = 112
CLIP_MARK: Final = CLIP_SIDE // N_BITS
CLIP_FRAMES: Final = 16
VIDEO_FRAMES: Final = 64
VIDEO_RATE: Final = 25
CHUNK_BYTES: Final = 16 << 20
"""The bytes of rows that are passed at a time to a peer's writer that takes several rows."""


@dataclass(frozen=True)
class Workload:
    """Samples that an epoch delivers in batches, each exactly once, in a random order.

    `data` names the rows that are read, `stored` is their shape, and `shape` that of samples.
    """

    name: str
    data: str
    stored: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: str
    n_samples: int
    batch_size: int
    parent: Path = Path()
    store: Store | None = None
    """The object store from which peers read, which serves `parent`; None if they read files."""

    @property
    def folder(self) -> Path:
        """The folder of the data, and of each peer's files."""
        return self.parent / f"{self.data}-{self.n_samples}"

    @property
    def is_encoded(self) -> bool:
        """True if samples are stored as JPEGs."""
        return self.data == "jpeg"

    @property
    def row_values(self) -> int:
        """The number of values of a stored row."""
        return int(np.prod(self.stored))

    @property
    def row_bytes(self) -> int:
        """The size of a stored row."""
        return self.row_values * np.dtype(self.dtype).itemsize

    def rows(self) -> Batch:
        """Map the rows."""
        found: Batch = np.load(self.folder / "rows.npy", mmap_mode="r")
        return found

    def chunks(self) -> Iterator[Batch]:
        """Yield copies of consecutive rows, about 16 MB at a time."""
        rows, step = self.rows(), max(1, CHUNK_BYTES // self.row_bytes)
        for i in range(0, len(rows), step):
            yield np.array(rows[i : i + step])

    def files(self) -> list[Path]:
        """Return the paths of the JPEGs or videos, in order."""
        suffix = "mp4" if self.data == "clips" else "jpg"
        return [self.folder / "files" / f"{i:06d}.{suffix}" for i in range(self.n_samples)]

    def order(self, epoch: int) -> npt.NDArray[np.int64]:
        """Return the samples in the order of an epoch."""
        return np.random.default_rng(epoch).permutation(self.n_samples)

    def batches(self, epoch: int) -> Iterator[npt.NDArray[np.int64]]:
        """Yield the samples of each batch of an epoch."""
        order = self.order(epoch)
        for i in range(0, len(order), self.batch_size):
            yield order[i : i + self.batch_size]

    def numbers(self, batch: Batch) -> npt.NDArray[np.int64]:
        """Return the number of each sample of a batch; `n_samples` for a clip with wrong frames."""
        if self.data == "clips":
            videos, frames = _marked(batch, CLIP_MARK, 0), _marked(batch, CLIP_MARK, 1)
            is_whole = (videos == videos[:, :1]).all(1) & (np.diff(frames) == 1).all(1)
            return np.where(is_whole, videos[:, 0], self.n_samples)
        if self.data == "tokens":
            return batch[:, 0].astype(np.int64) + (batch[:, 1].astype(np.int64) << 16)
        if self.is_encoded:
            return _marked(batch, MARK, 0)
        return batch[:, 0, 0, 0].astype(np.int64) + (batch[:, 0, 0, 1].astype(np.int64) << 8)

    def made(self, name: str, make: Callable[[Path], object]) -> Path:
        """Return the path of a peer's file or folder; `make` writes it if it is missing."""
        place = self.folder / name
        if not place.exists():
            beside = self.folder / f".{os.getpid()}-{name}"
            try:
                make(beside)
                beside.rename(place)
            finally:
                if beside.is_dir():
                    shutil.rmtree(beside)
                beside.unlink(missing_ok=True)
        return place


def _mark(frame: Batch, side: int, row: int, number: int) -> None:
    """Write a number into the `row`-th row of blocks of a frame, one bit per block."""
    bits = (number >> np.arange(N_BITS)) & 1
    frame[row * side : (row + 1) * side] = (bits * 255).astype(np.uint8).repeat(side)[None, :, None]


def _marked(frames: Batch, side: int, row: int) -> npt.NDArray[np.int64]:
    """Return the number that `_mark` has written into each frame."""
    bits = frames[..., row * side + side // 2, side // 2 :: side, 0] > 127
    return bits.astype(np.int64) @ (1 << np.arange(N_BITS))


_FRAME: Final = (SIDE, SIDE, 3)
_CLIP: Final = (CLIP_FRAMES, CLIP_SIDE, CLIP_SIDE, 3)
WORKLOADS: Final = {
    workload.name: workload
    for workload in (
        Workload("frames", "frames", _FRAME, _FRAME, "uint8", 2048, 64),
        Workload("tokens", "tokens", (1024,), (1024,), "uint16", 262_144, 256),
        Workload("tokens400", "tokens", (1024,), (1024,), "uint16", 262_144, 256),
        Workload("augment", "frames", _FRAME, (CROP, CROP, 3), "uint8", 2048, 64),
        Workload("jpeg", "jpeg", _FRAME, _FRAME, "uint8", 2048, 64),
        Workload("clips", "clips", _CLIP, _CLIP, "uint8", 256, 8),
        Workload("remote", "frames", _FRAME, _FRAME, "uint8", 2048, 64),
    )
}


def workload_of(name: str, parent: Path, n_samples: int = 0) -> Workload:
    """Return a workload with its data in a folder, and with another number of samples if given."""
    workload = WORKLOADS[name]
    return replace(workload, parent=parent, n_samples=n_samples or workload.n_samples)


def write_data(workload: Workload) -> None:
    """Write the data of a workload if it is missing."""
    workload.folder.mkdir(parents=True, exist_ok=True)
    if workload.data == "clips":
        workload.made("files", lambda folder: _write_videos(workload, folder))
    elif workload.is_encoded:
        workload.made("files", lambda folder: _write_files(workload, folder))
    else:
        make = _write_tokens if workload.data == "tokens" else _write_frames
        workload.made("rows.npy", lambda path: make(workload, path))


def picture(i: int) -> Batch:
    """Return a frame whose number is written in its first row of blocks."""
    frame = _frame(i)
    _mark(frame, MARK, 0, i)
    return frame


def augmented(frame: Batch, rng: np.random.Generator) -> Batch:
    """Return a random crop, flipped at random; the number in the first pixel is kept."""
    y, x, is_flipped = rng.integers(0, 33), rng.integers(0, 33), rng.integers(0, 2)
    crop = frame[y : y + CROP, x : x + CROP]
    out = np.ascontiguousarray(crop[:, ::-1] if is_flipped else crop)
    out[0, 0, :2] = frame[0, 0, :2]
    return out


def _frame(i: int) -> Batch:
    """Return a frame: coarse squares, with noise over them."""
    coarse = np.random.default_rng(i % 64).integers(0, 128, (28, 28, 3), dtype=np.uint8)
    noise = np.random.default_rng(64 + i).integers(0, 16, _FRAME, dtype=np.uint8)
    return coarse.repeat(8, 0).repeat(8, 1) + noise


def _write_frames(workload: Workload, path: Path) -> None:
    with path.open("wb") as file:
        frames = np.empty((workload.n_samples, *_FRAME), np.uint8)
        for i, frame in enumerate(frames):
            frame[:] = _frame(i)
            frame[0, 0, :2] = i & 255, i >> 8
        np.save(file, frames)


def _write_tokens(workload: Workload, path: Path) -> None:
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 50_000, (workload.n_samples, *workload.stored), dtype=np.uint16)
    ids = np.arange(len(tokens))
    tokens[:, 0], tokens[:, 1] = ids & 0xFFFF, ids >> 16
    with path.open("wb") as file:
        np.save(file, tokens)


def _write_files(workload: Workload, folder: Path) -> None:
    """Write JPEGs of quality 90 with 4:2:0 chroma, as FFCV writes its own."""
    import simplejpeg

    folder.mkdir()
    for i in range(workload.n_samples):
        data = simplejpeg.encode_jpeg(picture(i), quality=90, colorsubsampling="420")
        (folder / f"{i:06d}.jpg").write_bytes(data)


def _write_videos(workload: Workload, folder: Path) -> None:
    """Write H.264 videos with a keyframe every 16 frames; frames contain two numbers."""
    import av

    folder.mkdir()
    settings = {"crf": "19", "g": "16", "keyint_min": "16", "sc_threshold": "0", "bf": "0"}
    for i in range(workload.n_samples):
        scene = _frame(i)
        with av.open(str(folder / f"{i:06d}.mp4"), "w") as container:
            stream = container.add_stream("libx264", rate=VIDEO_RATE, options=settings)
            stream.width = stream.height = CLIP_SIDE
            stream.pix_fmt = "yuv420p"
            for n in range(VIDEO_FRAMES):  # the camera pans
                frame = np.ascontiguousarray(scene[n : n + CLIP_SIDE, n : n + CLIP_SIDE])
                _mark(frame, CLIP_MARK, 0, i)
                _mark(frame, CLIP_MARK, 1, n)
                container.mux(stream.encode(av.VideoFrame.from_ndarray(frame, "rgb24")))
            container.mux(stream.encode())
