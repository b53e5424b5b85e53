"""Records and tokens, as TensorFlow, array_record and NumPy load them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np

from benchmarks.converter_kinds.kind import Kind


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


KINDS: Final = {
    "examples": Kind("tfrecord", _make_examples, _load_examples),
    "images": Kind("tfrecord", _make_images, _load_examples),
    "array_record": Kind("arrayrecord", _make_array_record, _load_array_record),
    "tokens": Kind("tokens", _make_tokens, _load_windows, {"dtype": "uint16"}),
    "documents": Kind("tokens", _make_tokens, _load_documents, {"dtype": "uint16", "eot": 0}),
}
