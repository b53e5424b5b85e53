"""MDS shards: samples are those that MosaicML's library reads, and damage is noticed."""

from __future__ import annotations

import hashlib
import json
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zstandard

import shardio
from shardio import Array, Bytes, Image, InvalidArgument, Json, Text
from shardio.media import decode_image
from tests.converters.helpers import convert as convert_folder
from tests.converters.helpers import reasons as reasons_of
from tests.converters.helpers import stored

pytestmark = pytest.mark.usefixtures("quick_disk")

convert = partial(convert_folder, kind="mds")
MADE = Path(__file__).parent / "made" / "mds"


def shard(samples: list[dict[str, bytes]], encodings: dict[str, str], **about: Any) -> bytes:
    """Return a shard of columns none of which has a fixed size."""
    config = {"version": 2, "format": "mds", "column_names": [*encodings]}
    config |= {"column_encodings": [*encodings.values()], "column_sizes": [None] * len(encodings)}
    text = json.dumps({**config, **about}).encode()
    rows = [
        b"".join(len(row[name]).to_bytes(4, "little") for name in encodings)
        + b"".join(row[name] for name in encodings)
        for row in samples
    ]
    start = 4 * (len(rows) + 2) + len(text)
    offsets = np.cumsum([start, *map(len, rows)]).astype("<u4").tobytes()
    return len(rows).to_bytes(4, "little") + offsets + text + b"".join(rows)


def index(**files: bytes) -> str:
    """Return an index of shards, with their sizes and hashes."""
    shards = []
    for name, content in files.items():
        hashes = {"sha1": hashlib.sha1(content).hexdigest(), "unknown": "?"}
        raw = {"basename": f"{name}.mds", "bytes": len(content), "hashes": hashes}
        shards.append({"version": 2, "format": "mds", "raw_data": raw, "zip_data": None})
    return json.dumps({"version": 2, "shards": shards})


def shown(sample: dict[str, Any]) -> dict[str, Any]:
    """Return a sample as made/mds/read.json has those that the library read."""
    found = {name: value for name, value in sample.items() if name not in ("label", "source")}
    for name, value in found.items():
        if name == "picture":
            found[name] = decode_image(value).tolist()
        elif name in ("fixed", "free", "typed"):
            found[name] = [value.dtype.name, value.tolist()]
        elif isinstance(value, bytes):
            found[name] = value.hex()
        elif isinstance(value, np.generic):
            found[name] = value.item()
    return found


@pytest.mark.parametrize("folder", ["plain", "packed"])
def test_samples_are_those_that_the_library_reads(folder: str, tmp_path: Path) -> None:
    report = convert(MADE / folder, tmp_path / "out")
    known = json.loads((MADE / "read.json").read_text())
    assert report.counts == {"converted": len(report.inputs) - 1, "part": 1}
    assert len(report.inputs) > 3
    with shardio.open(tmp_path / "out") as dataset:
        assert [shown(sample) for sample in dataset] == known
        fields = dict(dataset.schema)
        assert fields["picture"] == Image() and fields["facts"] == Json()
        assert fields["blob"] == Bytes() and fields["caption"] == fields["dec"] == Text()
        assert fields["fixed"] == Array("float32", (2, 3)) and fields["half"] == Array("float16")
        assert fields["free"] == Array("uint64", (None,))
        assert fields["typed"] == Array("int16", (None, 2))
        assert {sample["source"] for sample in dataset} == {
            one.name for one in report.inputs if one.outcome == "converted"
        }


def test_of_a_shard_there_twice_the_uncompressed_one_counts(root: Path, tmp_path: Path) -> None:
    content = shard([{"x": b"one"}], {"x": "str"})
    (root / "a.mds").write_bytes(content)
    (root / "a.mds.zstd").write_bytes(zstandard.ZstdCompressor().compress(content))
    report = convert(root, tmp_path / "out")
    assert report.n_samples == 1 and report.counts == {"converted": 1, "part": 1}


def test_shards_need_no_index_and_may_lack_columns(root: Path, tmp_path: Path) -> None:
    (root / "a.mds").write_bytes(shard([{"x": b"1", "label": b"7"}], {"x": "str", "label": "str"}))
    (root / "b.mds").write_bytes(shard([{"label": b"8"}], {"label": "str"}))
    (root / "c.mds").write_bytes(shard([], {"label": "str"}))
    (root / "index.json").write_text('{"mine": 1}')
    report = convert(root, tmp_path / "out")
    assert report.counts == {"converted": 2, "empty": 1, "unsupported": 1}
    assert [(s["x"], s["label"]) for s in stored(tmp_path / "out")] == [("1", "7"), (None, "8")]


def test_what_an_index_says_must_be_there(root: Path, tmp_path: Path) -> None:
    content = shard([{"x": b"one"}], {"x": "str"})
    other = content.replace(b"one", b"two")
    for name, data in {"a": content, "b": other, "c": content + b"x", "d": content}.items():
        (root / f"{name}.mds").write_bytes(data)
    (root / "index.json").write_text(index(a=content, b=content, c=content, gone=content))
    reasons = reasons_of(convert(root, tmp_path / "out"))
    assert reasons.keys() == {"b.mds", "c.mds", "d.mds", "index.json"}
    assert reasons["b.mds"].startswith("sha1: expected")
    assert f"expected {len(content)} bytes, found {len(content) + 1}" in reasons["c.mds"]
    assert reasons["d.mds"] == "index.json beside it names 4 shards, and not this one"
    assert reasons["index.json"].startswith("expected 'gone.mds' beside it, found neither")
    about = json.loads(index(a=content))
    about["shards"][0]["raw_data"]["hashes"] = "sha1"
    (root / "index.json").write_text(json.dumps(about))
    reasons = reasons_of(convert(root, tmp_path / "other", fields={"x": "text"}))
    assert reasons["a.mds"].endswith("expected hashes by algorithm, found 'sha1'")


def test_an_index_of_merged_ones_names_shards_below_it(root: Path, tmp_path: Path) -> None:
    content = shard([{"x": b"one"}], {"x": "str"})
    merged = {"version": 2, "shards": list[Any]()}
    for part in ("0", "1"):
        (root / part).mkdir()
        (root / part / "shard.mds").write_bytes(content)
        own = index(shard=content)
        (root / part / "index.json").write_text(own)
        merged["shards"] += json.loads(own.replace("shard.mds", f"{part}/shard.mds"))["shards"]
    (root / "index.json").write_text(json.dumps(merged))
    report = convert(root, tmp_path / "out")
    assert report.counts == {"converted": 2, "part": 3} and report.n_samples == 2
    (root / "0" / "index.json").write_text(index(**{"../1/shard": content}))
    (one,) = (one for one in convert(root, tmp_path / "other").broken if "index" in one.name)
    assert one.reason.startswith("expected '../1/shard.mds' beside it, found neither")


def test_json_is_read_as_the_library_reads_it(root: Path, tmp_path: Path) -> None:
    (root / "a.mds").write_bytes(shard([{"x": b'{"a": 1, "a": [null]}'}], {"x": "json"}))
    (root / "b.mds").write_bytes(shard([{"x": b"NaN"}], {"x": "json"}))
    (one,) = convert(root, tmp_path / "out").broken
    assert one.reason == "sample 0, column 'x': not JSON: NaN is not a JSON number"
    assert stored(tmp_path / "out")[0]["x"] == {"a": [None]}


@pytest.mark.parametrize("encoding", ["json", "str_float"])
@pytest.mark.parametrize("text", ["1e400", "-1e400", "1e-400"])
def test_numbers_no_float64_is(encoding: str, text: str, root: Path, tmp_path: Path) -> None:
    (root / "a.mds").write_bytes(shard([{"x": b"0.0e-400"}, {"x": b"5e-324"}], {"x": encoding}))
    (root / "b.mds").write_bytes(shard([{"x": text.encode()}], {"x": encoding}))
    (one,) = convert(root, tmp_path / "out").broken
    why = f"sample 0, column 'x': expected a number in the range of float64, found {text}"
    assert why in one.reason
    assert [sample["x"] for sample in stored(tmp_path / "out")] == [0, 5e-324]


GOOD = shard([{"x": b"one"}, {"x": b"two"}], {"x": "str"})
BAD = {
    "pickle": (shard([{"x": b"N."}], {"x": "pkl"}), "'pkl': a pickle, which can run any code"),
    "pil": (shard([{"x": b""}], {"x": "pil"}), "write it as png"),
    "list": (
        shard([{"x": b""}], {"x": "list[jpeg]"}),
        "one of bytes, str, int, json, jpeg, png, str_int, str_float, str_decimal, int8, int16",
    ),
    "dtype": (shard([{"x": b""}], {"x": "ndarray:object"}), "found encoding 'ndarray:object'"),
    "shape": (shard([{"x": b""}], {"x": "ndarray:int8:0"}), "found encoding 'ndarray:int8:0'"),
    "no number": (shard([{"x": b""}], {"x": "ndarray:int8:a"}), "is damaged"),
    "twice": (shard([{"x": b""}], {"x": "str"}, column_names=["x", "x"]), "is damaged"),
    "version": (shard([{"x": b""}], {"x": "str"}, version=3), "expected mds, version 2"),
    "not UTF-8": (shard([{"x": b"\xff"}], {"x": "str"}), "sample 0, column 'x': not UTF-8"),
    "other column": (shard([{"y": b""}], {"y": "str"}), "column 'y': expected one of x"),
    "empty": (b"", "a part of 4 bytes; the file has 0"),
    "huge": (b"\xff\xff\xff\xff" + GOOD[4:], "a part of 17,179,869,184 bytes"),
    "offsets": (GOOD[:4] + b"\xff" * 4 + GOOD[8:], "do not increase"),
    "cut off": (GOOD[:-1], f"expected {len(GOOD):,} bytes, found {len(GOOD) - 1:,}"),
    "goes on": (GOOD + b"x", f"expected {len(GOOD):,} bytes, found {len(GOOD) + 1:,}"),
    "sizes": (GOOD[:-7] + b"\x09" + GOOD[-6:], "sample 1: expected columns of 3 bytes, found 9"),
}


@pytest.mark.parametrize("content", BAD.values(), ids=BAD.keys())
def test_what_is_refused_is_named(content: tuple[bytes, str], root: Path, tmp_path: Path) -> None:
    (root / "a.mds").write_bytes(GOOD)
    (root / "b.mds").write_bytes(content[0])
    report = convert(root, tmp_path / "out", fields={"x": "text"})
    (one,) = report.broken
    assert one.name == "b.mds" and content[1] in one.reason


@pytest.mark.parametrize(
    "data",
    [b"", b"\x07", b"\x08\x04", b"\x08\x05\x01", b"\x08\x04\x09abc", b"\x08\xfc" + b"\1" * 64],
)
def test_arrays_that_are_damaged_are_refused(data: bytes, root: Path, tmp_path: Path) -> None:
    (root / "a.mds").write_bytes(shard([{"x": data}], {"x": "ndarray"}))
    (one,) = convert(root, tmp_path / "out", fields={"x": "uint8[*]"}).broken
    assert "sample 0, column 'x': damaged array" in one.reason
    convert(root, tmp_path / "bytes", fields={"x": "bytes"})
    assert stored(tmp_path / "bytes")[0]["x"] == data


def test_a_packed_shard_that_is_cut_off_or_goes_on_is_broken(root: Path, tmp_path: Path) -> None:
    packed = zstandard.ZstdCompressor().compress(GOOD)
    (root / "longer.mds.zstd").write_bytes(zstandard.ZstdCompressor().compress(GOOD + b"x"))
    for length in (0, 5, len(packed) - 1):
        (root / f"{length}.mds.zstd").write_bytes(packed[:length])
    assert convert(root, tmp_path / "out", fields={"x": "text"}).counts == {"broken": 4}


def test_a_schema_and_an_append_hold_shards_to_the_fields(root: Path, tmp_path: Path) -> None:
    (root / "a.mds").write_bytes(shard([{"x": b"N."}], {"x": "str"}))
    convert(root, tmp_path / "out", fields={"x": "bytes", "y": "int64?"})
    (root / "b.mds").write_bytes(shard([{"x": b"12345678", "y": b"12"}], {"x": "int", "y": "str"}))
    (one,) = shardio.convert(root, tmp_path / "out", workers=0, append=True).broken
    assert one.reason == "column 'y': expected Array int64, found encoding 'str'"
    with shardio.open(tmp_path / "out") as dataset:
        assert dataset[0]["x"] == b"N." and dataset[0]["y"] is None
    with pytest.raises(InvalidArgument, match="found video; expected an array"):
        convert(root, tmp_path / "other", fields={"x": "video"})
    shutil.rmtree(root)
    root.mkdir()
    (root / "bare.mds").write_bytes(shard([{}], {}))
    with pytest.raises(InvalidArgument, match="cannot be inferred; .*; samples have no fields"):
        convert(root, tmp_path / "other")
    (root / "bare.mds").unlink()
    (root / "notes.txt").write_text("")
    with pytest.raises(InvalidArgument, match="no MDS shard with samples"):
        convert(root, tmp_path / "other")
