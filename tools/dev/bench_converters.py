"""Measure how fast files are read for a conversion, beside the libraries that write such files.

    python tools/dev/bench_converters.py [NAME ...]

Each line: a folder of one kind of file in memory, the best of three turns of the library's own
loop, of the converter's, and the first divided by the second. A kind whose library is not installed
is passed over, and named. Ends with 1 if a quotient is below 0.7.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np

from shardio import Input
from shardio.conversion.parts import join
from shardio.conversion.plan import list_inputs
from shardio.conversion.source import fit, make_source

N_TURNS: Final = 3
LEAST: Final = 0.7


@dataclass(frozen=True)
class Kind:
    """A kind of file: its converter, what writes some into a folder, what reads all of one."""

    converter: str
    make: Callable[[Path], None]
    load: Callable[[str], Iterable[Any]]
    options: Mapping[str, Any] = field(default_factory=dict)


def main() -> int:
    """Measure every kind of file, or those named."""
    is_slow = False
    for name in sys.argv[1:] or KINDS:
        with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
            try:
                rate = _measure(name, KINDS[name], Path(folder))
            except ModuleNotFoundError as error:
                print(f"{name:16} not measured: {error}")
                continue
            is_slow |= rate < LEAST
    return int(is_slow)


def _measure(name: str, kind: Kind, place: Path) -> float:
    kind.make(place)
    source = make_source(kind.converter, kind.options)
    files = [one for one in join(list_inputs(str(place)), source).inputs if not one.part_of]
    converter = fit(source, files)
    library, ours = [], []
    for _ in range(N_TURNS):
        library.append(_seconds(lambda one: kind.load(one.path), files))
        ours.append(_seconds(converter.samples, files))
    best, own = min(library), min(ours)
    print(f"{name:16} library {best:.3f} s, converter {own:.3f} s: {best / own:.2f}")
    return best / own


def _seconds(read: Callable[[Input], Iterable[Any]], files: list[Input]) -> float:
    start_s = time.perf_counter()
    for one in files:
        for _ in read(one):
            pass
    return time.perf_counter() - start_s


# --- arrays ----------------------------------------------------------------------------------


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


# --- records ---------------------------------------------------------------------------------


def _example(values: dict[str, Any]) -> bytes:
    from tensorflow import train

    features = {}
    for name, value in values.items():
        if isinstance(value, bytes):
            features[name] = train.Feature(bytes_list=train.BytesList(value=[value]))
        elif value.dtype == np.float32:
            features[name] = train.Feature(float_list=train.FloatList(value=value))
        else:
            features[name] = train.Feature(int64_list=train.Int64List(value=value))
    made: bytes = train.Example(features=train.Features(feature=features)).SerializeToString()
    return made


def _make_examples(place: Path) -> None:
    from tensorflow import io

    rng = np.random.default_rng(0)
    with io.TFRecordWriter(str(place / "one.tfrecord")) as writer:
        for number in range(5_000):
            values = {"id": np.array([number]), "name": b"item", "x": np.ones(8, np.float32)}
            values["tokens"] = rng.integers(0, 50_000, rng.integers(1, 64))
            writer.write(_example(values))


def _make_images(place: Path) -> None:
    from tensorflow import io

    data = np.random.default_rng(0).bytes(40_000)
    with io.TFRecordWriter(str(place / "one.tfrecord")) as writer:
        for number in range(2_000):
            writer.write(_example({"image": data, "label": np.array([number])}))


def _load_examples(path: str) -> Iterator[Any]:
    from tensorflow import data, train

    for record in data.TFRecordDataset(path).as_numpy_iterator():
        found: dict[str, Any] = {}
        for name, feature in train.Example.FromString(record).features.feature.items():
            kind = feature.WhichOneof("kind")
            values = getattr(feature, kind).value
            dtype = np.float32 if kind == "float_list" else np.int64
            found[name] = list(values) if kind == "bytes_list" else np.array(values, dtype)
        yield found


def _make_array_record(place: Path) -> None:
    from array_record.python.array_record_module import ArrayRecordWriter

    writer = ArrayRecordWriter(str(place / "one.array_record"), "group_size:100")
    rng = np.random.default_rng(0)
    for _ in range(100_000):
        writer.write(rng.bytes(1_000))
    writer.close()


def _load_array_record(path: str) -> Iterator[Any]:
    from array_record.python.array_record_module import ArrayRecordReader

    reader = ArrayRecordReader(path)
    for _ in range(reader.num_records()):
        yield reader.read()
    reader.close()


def _make_tokens(place: Path) -> None:
    np.random.default_rng(0).integers(0, 500, 30_000_000, "uint16").tofile(place / "train.bin")


def _load_windows(path: str) -> Iterator[Any]:
    tokens = np.memmap(path, "uint16", "r")
    for start in range(0, len(tokens), 1024):
        yield np.array(tokens[start : start + 1024])


def _load_documents(path: str) -> Iterator[Any]:
    tokens = np.memmap(path, "uint16", "r")
    start = 0
    for place in np.flatnonzero(tokens == 0).tolist():
        yield np.array(tokens[start : place + 1])
        start = place + 1


# --- stores of arrays ------------------------------------------------------------------------


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
    """Rows as its own loop has them, one read each."""
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
    """Rows, of which the first array's chunks are read at once: one read each takes minutes."""
    import zarr

    arrays = [array for _, array in zarr.open_group(Path(path).parent, mode="r").arrays()]
    arrays.sort(key=lambda each: each.chunks[0])
    for first in range(0, arrays[0].shape[0], arrays[0].chunks[0]):
        blocks = [each[first : first + arrays[0].chunks[0]] for each in arrays]
        for row in zip(*blocks, strict=True):
            yield [np.array(each) for each in row]


# --- episodes --------------------------------------------------------------------------------


def _make_episodes(place: Path) -> None:
    from lerobot.datasets.lerobot_dataset import LeRobotDataset

    features = {
        name: {"dtype": "float32", "shape": (14,), "names": None}
        for name in ("observation.state", "action")
    }
    made = LeRobotDataset.create("made/episodes", 30, features, root=place / "set")
    for _ in range(20):
        for _ in range(300):
            made.add_frame({name: np.zeros(14, "float32") for name in features} | {"task": "x"})
        made.save_episode()
    made.finalize()


def _load_episodes(path: str) -> Iterator[Any]:
    if not path.endswith("info.json"):
        return
    from lerobot.datasets.lerobot_dataset import LeRobotDataset

    yield from LeRobotDataset("made/episodes", root=Path(path).parents[1]).hf_dataset


KINDS: Final = {
    "lerobot": Kind("lerobot", _make_episodes, _load_episodes),
    "hdf5": Kind("hdf5", _make_hdf5, _load_hdf5),
    "hdf5 gzip": Kind("hdf5", _make_hdf5_chunks, _load_hdf5),
    "hdf5 texts": Kind("hdf5", _make_hdf5_texts, _load_hdf5),
    "zarr": Kind("zarr", _make_zarr, _load_zarr),
    "zarr small": Kind("zarr", _make_zarr_chunks, _load_zarr),
    "rows": Kind("arrays", _make_rows, _load_rows),
    "small npy": Kind("arrays", _make_small, _load_npy),
    "large npy": Kind("arrays", _make_large, _load_npy),
    "npz": Kind("arrays", _make_npz, _load_npz),
    "safetensors": Kind("arrays", _make_tensors, _load_tensors),
    "large st": Kind("arrays", _make_large_tensors, _load_tensors),
    "examples": Kind("tfrecord", _make_examples, _load_examples),
    "images": Kind("tfrecord", _make_images, _load_examples),
    "array_record": Kind("arrayrecord", _make_array_record, _load_array_record),
    "tokens": Kind("tokens", _make_tokens, _load_windows, {"dtype": "uint16"}),
    "documents": Kind("tokens", _make_tokens, _load_documents, {"dtype": "uint16", "eot": 0}),
}


if __name__ == "__main__":
    sys.exit(main())
