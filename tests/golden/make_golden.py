"""Write the golden files of the format: shards and datasets that every later version has to read.

    python -m tests.golden.make_golden tests/golden/v1.0
    python -m tests.golden.make_golden tests/golden/datasets-v1.0 --datasets
    python -m tests.golden.make_golden tests/golden/lists-v1.0 --lists
    python -m tests.golden.make_golden tests/golden/media-v1.0 --media
    python -m tests.golden.make_golden tests/golden/planes-v1.0 --planes

Run once for a version of the format, by hand, never by the tests: a golden file that is made anew
proves nothing. Refuses to write into a folder that holds anything. Beside each shard or dataset
goes what is in it, and beside them all what they were made with.
"""

from __future__ import annotations

import json
import platform
import sys
from collections.abc import Iterator, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from shardio import (
    Array,
    Bytes,
    DatasetWriter,
    EncodedStream,
    Json,
    List,
    Schema,
    ShardWriter,
    Text,
)
from shardio import open as open_dataset
from shardio.dataset import external_lists
from shardio.dataset.manifest import load, publish_next
from shardio.format.layout import MAJOR, MINOR
from shardio.format.types import DTYPES, EncodedImage
from shardio.format.types.streams import packet_flags, packet_sizes
from shardio.maintenance import add_column
from tests.golden.golden_media import media, planes

LIBRARIES = ("shardio-loader", "numpy", "zstandard", "xxhash")
Samples = list[dict[str, Any]]


def _array(dtype: str, shape: tuple[int, ...], i: int) -> np.ndarray[Any, Any]:
    held = np.dtype("uint16" if dtype == "bfloat16" else dtype)
    numbers = np.arange(int(np.prod(shape))).reshape(shape) * 7 + i
    return (numbers % 2 if dtype == "bool" else numbers % 120).astype(held)


def _caption(i: int) -> str:
    return f'camera {i % 7} of the north hall saw "größe" number {i}; license CC-BY-4.0'


def _dtypes(codec: str) -> tuple[Schema, Samples]:
    schema = Schema({name: Array(name, (3,), codec) for name in DTYPES})
    return schema, [{name: _array(name, (3,), i) for name in DTYPES} for i in range(5)]


def _wide() -> tuple[Schema, Samples]:
    shapes = {"run": (25,), "padded": (2100,), "scalar": (), "even": (2048,)}
    schema = Schema({name: Array("uint8", shape) for name, shape in shapes.items()})
    samples = [{n: _array("uint8", shape, i) for n, shape in shapes.items()} for i in range(3)]
    return schema, samples


def _many_units() -> tuple[Schema, Samples]:
    schema = Schema({"vector": Array("float32", (256,)), "note": Text()})
    samples = [{"vector": _array("float32", (256,), i), "note": "n" * (i % 3)} for i in range(150)]
    return schema, samples


def _records(codec: str) -> tuple[Schema, Samples]:
    schema = Schema({"blob": Bytes(codec), "text": Text(codec), "json": Json(codec)})
    values: list[Any] = [
        None,
        0,
        -1.5e300,
        1e16,
        "",
        [],
        {},
        {"ü": [True, {"b": None}], "a": "\x07"},
    ]
    return schema, [
        {"blob": bytes(range(i)) * i * 9, "text": "größe 名前 " * i, "json": value}
        for i, value in enumerate(values)
    ]


def _varying(codec: str) -> tuple[Schema, Samples]:
    schema = Schema(
        {
            "line": Array("int32", (None,), codec),
            "image": Array("uint8", (None, None, 3), codec),
            "bits": Array("bfloat16", (2, None), codec),
        }
    )
    return schema, [
        {
            "line": _array("int32", (i * 30,), i),
            "image": _array("uint8", (i, 2 * i, 3), i),
            "bits": _array("bfloat16", (2, i % 3), i),
        }
        for i in range(6)
    ]


def _optional() -> tuple[Schema, Samples]:
    schema = Schema(
        {
            "column": Array("int16", (3,), optional=True),
            "packed": Array("int16", (40,), "zstd", optional=True),
            "line": Array("uint8", (None,), optional=True),
            "parts": List(Array("uint8", (2,)), optional=True),
            "text": Text(optional=True),
            "json": Json(optional=True),
        }
    )
    full = {
        "column": _array("int16", (3,), 1),
        "packed": _array("int16", (40,), 0) // 100,
        "line": _array("uint8", (5,), 2),
        "parts": [_array("uint8", (2,), 3)],
        "text": "there",
        "json": [None],
    }
    empty = {"line": np.zeros(0, np.uint8), "parts": [], "text": ""}
    return schema, [
        {n: None if i % 3 == 0 else (full | empty if i % 3 == 1 else full)[n] for n in schema}
        for i in range(19)
    ]


def _lists() -> tuple[Schema, Samples]:
    schema = Schema(
        {
            "polygons": List(Array("float32", (None, 2))),
            "scalars": List(Array("int64")),
            "packed": List(Array("uint8", (None, None)), "zstd"),
        }
    )
    return schema, [
        {
            "polygons": [_array("float32", (k, 2), i) for k in range(i)],
            "scalars": [_array("int64", (), k) for k in range(i * 9)],
            "packed": [np.zeros((k, 30), np.uint8) for k in range(i)],
        }
        for i in range(5)
    ]


def _nested() -> tuple[Schema, Samples]:
    schema = Schema(
        {"label": Array("int64"), "camera": {"id": Text(), "lens": {"f": Array("float32")}}}
    )
    return schema, [
        {"label": np.int64(i), "camera.id": f"c{i}", "camera.lens.f": np.float32(i / 8)}
        for i in range(4)
    ]


def _dictionary() -> tuple[Schema, Samples]:
    schema = Schema(
        {"text": Text("zstd_dictionary"), "few": Bytes("zstd_dictionary", optional=True)}
    )
    return schema, [{"text": _caption(i), "few": b"x" * 90 if i < 3 else None} for i in range(400)]


def _no_dictionary() -> tuple[Schema, Samples]:
    return Schema({"text": Text("zstd_dictionary")}), [{"text": "a" * 200}, {"text": "b"}]


def goldens() -> Iterator[tuple[str, Schema, Samples]]:
    """Every golden file: its name, its schema, its samples."""
    cases = {
        "dtypes": _dtypes("raw"),
        "dtypes_zstd": _dtypes("zstd"),
        "wide": _wide(),
        "many_units": _many_units(),
        "records": _records("raw"),
        "records_zstd": _records("zstd"),
        "varying": _varying("raw"),
        "varying_zstd": _varying("zstd"),
        "optional": _optional(),
        "lists": _lists(),
        "nested": _nested(),
        "dictionary": _dictionary(),
        "no_dictionary": _no_dictionary(),
    }
    for name, (schema, samples) in cases.items():
        yield name, schema, samples
    for name in ("optional", "dtypes", "dictionary"):
        yield f"{name}_no_sample", cases[name][0], []
        yield f"{name}_one_sample", cases[name][0], cases[name][1][1:2]


def plain(value: Any) -> Any:
    """Return a value as JSON can say it, unmistakably."""
    if isinstance(value, np.ndarray | np.generic):
        array = np.asarray(value)
        content = array.astype(array.dtype.newbyteorder("<")).tobytes().hex()
        return {"array": array.dtype.name, "shape": list(array.shape), "hex": content}
    if isinstance(value, EncodedImage):
        return {"picture": value.hex(), "shape": list(value.shape)}
    if isinstance(value, EncodedStream):
        return plain_stream(value)
    if isinstance(value, bytes):
        return {"bytes": value.hex()}
    if isinstance(value, list) and value and isinstance(value[0], np.ndarray | np.generic):
        return {"list": [plain(each) for each in value]}
    return {"value": value}


def plain_stream(stream: EncodedStream) -> dict[str, Any]:
    """Return a stream as JSON can say it: the bytes, flags, time and duration of each packet."""
    packets = stream.packets
    ends = np.cumsum(packet_sizes(packets)).tolist()
    data = [bytes(stream.data[a:b]).hex() for a, b in zip([0, *ends], ends, strict=False)]
    facts = (packet_flags(packets).tolist(), packets["pts"].tolist(), packets["duration"].tolist())
    base = stream.time_base
    return {
        "stream": dict(stream.parameters),
        "extradata": stream.extradata.hex(),
        "packets": [list(line) for line in zip(data, *facts, strict=True)],
        "numbers": [stream.n_frames, base.numerator, base.denominator]
        + [stream.width, stream.height, stream.duration],
    }


def write_shards(
    folder: Path, cases: Iterator[tuple[str, Schema, Samples]]
) -> dict[str, Mapping[str, Any]]:
    """Write golden shards, and what is in them; returns what the provenance says of them."""
    written: dict[str, Mapping[str, Any]] = {}
    for name, schema, samples in cases:
        with ShardWriter(folder / f"{name}.shard", schema) as writer:
            for sample in samples:
                writer.append(sample)
            summary = writer.close()
        _write_content(folder / f"{name}.json", samples, list(schema))
        written[name] = {"id": summary.id, "bytes": summary.n_bytes, "samples": summary.n_samples}
    return written


def write_datasets(folder: Path) -> dict[str, Mapping[str, Any]]:
    """Write the golden dataset, with columns beside its shards, and what is in it."""
    place = folder / "column_groups"
    schema = Schema({"label": Array("int64"), "note": Text()})
    added: dict[str, Any] = {
        "vector": Array("float32", (3,)),
        "camera.id": Text(),
        "boxes": Array("float32", (None, 4), optional=True),
    }
    samples = [
        {
            "label": np.int64(i),
            "note": _caption(i),
            "vector": _array("float32", (3,), i),
            "camera.id": f"camera {i % 3}",
            "boxes": _array("float32", (i, 4), i) if i % 3 else None,
        }
        for i in range(7)
    ]
    with DatasetWriter(place, schema, shard_bytes=200) as writer:
        for sample in samples:
            writer.append({name: sample[name] for name in schema})
    for name, kind in added.items():
        add_column(place, name, kind, [sample[name] for sample in samples])
    _write_content(folder / "column_groups.json", samples, [*schema, *added])
    with open_dataset(place) as dataset:
        return {"column_groups": {"lineage": dataset.lineage, "generation": dataset.generation}}


def write_parts(folder: Path) -> dict[str, Mapping[str, Any]]:
    """Write the golden dataset whose lists lie in parts, and what is in it."""
    external_lists.MAX_INLINE_ENTRIES = 1  # type: ignore[misc]  # a reader takes lists of any length in parts
    place = folder / "external_lists"
    samples = [{"label": np.int64(i), "note": _caption(i)} for i in range(5)]
    with DatasetWriter(place, Schema({"label": Array("int64")}), shard_bytes=16) as writer:
        for sample in samples:
            writer.append({"label": sample["label"]})
    inputs = [{"path": f"größe/{i}.txt", "outcome": "converted", "samples": i} for i in range(5)]
    publish_next(place, load(place), inputs=inputs)
    add_column(place, "note", Text(), [sample["note"] for sample in samples])
    _write_content(folder / "external_lists.json", samples, ["label", "note"])
    with open_dataset(place) as dataset:
        return {"external_lists": {"lineage": dataset.lineage, "generation": dataset.generation}}


def _write_content(place: Path, samples: Samples, fields: list[str]) -> None:
    content = [{field: plain(sample[field]) for field in fields} for sample in samples]
    place.write_text(json.dumps(content, ensure_ascii=False, indent=0, sort_keys=True) + "\n")


def main() -> int:
    """Write all files into the folder that is named."""
    folder = Path(sys.argv[1])
    if folder.exists() and any(folder.iterdir()):
        print(
            f"{folder} holds files already: golden files are never written twice", file=sys.stderr
        )
        return 2
    folder.mkdir(parents=True, exist_ok=True)
    if "--datasets" in sys.argv[2:]:
        written = write_datasets(folder)
    elif "--lists" in sys.argv[2:]:
        written = write_parts(folder)
    elif "--planes" in sys.argv[2:]:
        written = write_shards(folder, planes())
    else:
        written = write_shards(folder, media() if "--media" in sys.argv[2:] else goldens())
    provenance = {
        "format": f"{MAJOR}.{MINOR}",
        "generator": "tests/golden/make_golden.py",
        "python": platform.python_version(),
        "machine": platform.machine(),
        "libraries": {library: version(library) for library in LIBRARIES},
        "files": written,
    }
    (folder / "provenance.json").write_text(json.dumps(provenance, indent=1, sort_keys=True) + "\n")
    print(f"wrote {', '.join(written)} into {folder}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
