"""Zarr: what is stored is what the package zarr reads; a store is one input, the rest parts."""

from __future__ import annotations

import json
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shardio
from shardio import Array, Text
from shardio.conversion import Progress
from tests.converters.helpers import DTYPES, convert, only_reason, reasons, stored

zarr = pytest.importorskip("zarr", reason="zarr is not installed")
pytestmark = [
    pytest.mark.usefixtures("quick_disk"),
    # Of strings of fixed length in version 3, which the tests write as others do.
    pytest.mark.filterwarnings("ignore:The data type"),
]


def make(path: Path, version: int = 3, **arrays: Any) -> Any:
    group = zarr.open_group(path, mode="w", zarr_format=version)
    for name, data in arrays.items():
        group.create_array(name, data=np.asarray(data))
    return group


def pack(folder: Path, path: Path) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        for one in sorted(folder.rglob("*")):
            if one.is_file():
                archive.write(one, one.relative_to(folder))


@pytest.mark.parametrize("version", [2, 3])
@pytest.mark.parametrize("is_zip", [False, True])
def test_rows_are_those_that_zarr_reads(is_zip: bool, version: int, tmp_path: Path) -> None:  # noqa: FBT001
    group = make(tmp_path / "all.zarr", version)
    for dtype in DTYPES:
        data = np.arange(21).reshape(7, 3).astype(dtype)
        array = group.create_array(f"numbers/{dtype}", shape=(7, 3), chunks=(2, 2), dtype=dtype)
        array[:] = data
    group.create_array("big", data=np.arange(7, dtype=">f4"))
    group.create_array("fixed", data=np.array(["é", "", *"abcde"]))
    group.create_array("text", shape=(7,), dtype=str, chunks=(3,))[:] = ["ü\U0001f600", *"abcdef"]
    group.create_array("half", shape=(7, 2), dtype="int8", chunks=(2, 2), fill_value=5)[:2] = 1
    if version == 3:
        shards = group.create_array("s", shape=(7,), dtype="int8", chunks=(2,), shards=(4,))
        shards[:] = np.arange(7)
    src = tmp_path / "all.zarr"
    if is_zip:
        pack(src, tmp_path / "all.zarr.zip")
        src = tmp_path / "all.zarr.zip"
    report = convert(src, tmp_path / "out")
    assert (report.kind, report.n_samples, report.classes) == ("zarr", 7, ())
    known = {name: array[:] for name, array in group.members(None) if hasattr(array, "dtype")}
    with shardio.open(tmp_path / "out") as dataset:
        names = {name.replace(".", "/") for name in dataset.schema} - {"label", "source", "row"}
        assert names == known.keys() and dataset.schema["fixed"] == Text()
        for row, sample in enumerate(dataset):
            assert sample["source"] == src.name
            for name in names:
                np.testing.assert_array_equal(sample[name.replace("/", ".")], known[name][row])


def test_a_store_is_one_input_and_the_rest_of_it_parts(tmp_path: Path) -> None:
    make(tmp_path / "in" / "cats" / "1.zarr", 3, x=np.ones((2, 3)), y=np.arange(2))
    make(tmp_path / "in" / "dogs" / "deep" / "2.zarr", 2, x=np.ones((4, 3)), y=np.arange(4))
    zarr.save_array(tmp_path / "in" / "one.zarr", np.arange(3), zarr_format=2)
    (tmp_path / "in" / "notes.txt").write_text("notes")
    report = convert(tmp_path / "in", tmp_path / "out")
    assert report.classes == ("cats", "dogs/deep")
    found = {one.name: one for one in report.inputs}
    assert found["cats/1.zarr/zarr.json"].n_samples == 2
    assert found["cats/1.zarr/x/c/0/0"].reason == "of cats/1.zarr/zarr.json"
    assert found["dogs/deep/2.zarr/x/.zarray"].outcome == "part"
    assert found["notes.txt"].outcome == "unsupported"
    with shardio.open(tmp_path / "out") as dataset:
        assert dataset.schema["array"] == Array("int64", optional=True)
        about = [(sample["source"], sample["label"], sample["row"]) for sample in dataset]
    assert about[1:3] == [("cats/1.zarr", 0, 1), ("dogs/deep/2.zarr", 1, 0)]
    assert about[-1] == ("one.zarr", -1, 2)


def test_stores_whose_arrays_differ_in_length_are_samples(tmp_path: Path) -> None:
    for n in (2, 3):
        group = make(tmp_path / "in" / f"{n}.zarr", x=np.full((n, 2), n), y=np.arange(4))
        group.create_array("z", shape=(), dtype="float32")[...] = n
        group.create_array("t", shape=(), dtype=str)[...] = f"text {n}"
    convert(tmp_path / "in", tmp_path / "out")
    with shardio.open(tmp_path / "out") as dataset:
        assert dataset.schema["x"] == Array("int64", (None, 2)) and len(dataset) == 2
        assert [(float(s["z"]), s["t"]) for s in dataset] == [(2.0, "text 2"), (3.0, "text 3")]


def test_a_change_of_a_chunk_is_a_change_of_the_store(tmp_path: Path) -> None:
    group = make(tmp_path / "in" / "1.zarr", x=np.arange(4, dtype="uint8"))
    convert(tmp_path / "in", tmp_path / "out")
    assert convert(tmp_path / "in", tmp_path / "out", append=True).counts["duplicate"] == 1
    group["x"][0] = 3
    report = convert(tmp_path / "in", tmp_path / "out", append=True)
    assert [one.name for one in report.modified] == ["1.zarr/zarr.json"]


def test_a_store_that_is_rewritten_before_its_turn_has_its_new_values(tmp_path: Path) -> None:
    blosc: Any = zarr.codecs.BloscCodec()
    group = make(tmp_path / "x.zarr")
    group.create_array("x", shape=(999,), dtype="int64", compressors=blosc)[:] = np.arange(999)

    def rewrite(progress: Progress) -> None:
        if not progress.n_inputs_done:
            group["x"][:] = 7  # the chunk gets smaller

    convert(tmp_path / "x.zarr", tmp_path / "out", progress=rewrite)
    assert {int(sample["x"]) for sample in stored(tmp_path / "out")} == {7}


@pytest.mark.parametrize("version", [2, 3])
def test_damage_is_listed_and_a_missing_chunk_is_the_fill(version: int, tmp_path: Path) -> None:
    store = tmp_path / "in" / "bad.zarr"
    group = make(store, version)
    array = group.create_array("x", shape=(9,), dtype="int64", chunks=(3,), fill_value=7)
    array[:] = np.arange(9)
    chunk = store / "x" / ("c/1" if version == 3 else "1")
    chunk.write_bytes(chunk.read_bytes()[:-3])
    make(tmp_path / "in" / "good.zarr", version, x=np.arange(2))
    report = convert(tmp_path / "in", tmp_path / "out")
    assert "damaged" in only_reason(report) and report.n_samples == 2
    chunk.unlink()
    convert(tmp_path / "in", tmp_path / "again")
    with shardio.open(tmp_path / "again") as dataset:
        assert [sample["x"] for sample in dataset] == [0, 1, 2, 7, 7, 7, 6, 7, 8, 0, 1]


def test_an_unreadable_chunk_is_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make(tmp_path / "in" / "bad.zarr", x=np.arange(9))

    def refuse(array: object, rows: object) -> None:
        raise PermissionError(13, "Permission denied", "bad.zarr/x/c/1")

    monkeypatch.setattr(zarr.Array, "__getitem__", refuse)
    reason = only_reason(convert(tmp_path / "in", tmp_path / "out"))
    assert reason == "array 'x': damaged: [Errno 13] Permission denied: 'bad.zarr/x/c/1'"


def test_a_flipped_byte_under_a_checksum_is_noticed(tmp_path: Path) -> None:
    codecs = [zarr.codecs.Crc32cCodec()]
    group = make(tmp_path / "in" / "1.zarr")
    array = group.create_array("x", shape=(99,), dtype="int64", chunks=(99,), compressors=codecs)
    array[:] = np.arange(99)
    chunk = tmp_path / "in" / "1.zarr" / "x" / "c" / "0"
    data = bytearray(chunk.read_bytes())
    data[80] ^= 1
    chunk.write_bytes(data)
    assert "damaged" in only_reason(convert(tmp_path / "in", tmp_path / "out"))


def describe(path: Path, **changes: Any) -> None:
    """Change an array's metadata."""
    about = json.loads(path.read_text())
    path.write_text(json.dumps({**about, **changes}))


def described(**changes: Any) -> Callable[[Path], None]:
    return lambda store: describe(store / "x" / ".zarray", **changes)


def written(text: str, name: str = "x/.zarray") -> Callable[[Path], Any]:
    return lambda store: (store / name).write_text(text)


def made(array: Any) -> Callable[[Path], Any]:
    return lambda store: make(store, 2, x=array)


UNSTORABLE: dict[str, tuple[Callable[[Any], Any], str]] = {
    "pickle": (described(filters=[{"id": "pickle"}], dtype="|O"), "a pickle can run any code"),
    "unknown codec": (described(compressor={"id": "no such codec"}), "damaged"),
    "huge": (described(shape=[1 << 40]), "declares 8,796,093,022,208 bytes"),
    "huge chunk": (described(chunks=[1 << 40]), "declares 8,796,093,022,208 bytes"),
    "no JSON": (written("{"), "x/.zarray: not JSON"),
    "too deep": (written("[" * 100_000), "x/.zarray: not JSON"),
    "a list": (written("[]"), "x/.zarray: expected an object"),
    "no shape": (written('{"zarr_format": 2}'), "damaged"),
    "negative": (described(shape=[-1]), "damaged"),
    "no chunk": (described(chunks=0), "damaged"),
    "large fill": (described(dtype="<i2", fill_value=1 << 40), "damaged"),
    "two": (
        lambda store: zarr.save_array(store / "x", np.arange(3), zarr_format=3),
        "there is more than one metadata file for this array",
    ),
    "stray": (written("notes", "notes.txt"), "notes.txt: belongs to no array, so it would be lost"),
    "complex": (made(np.zeros(3, complex)), "complex: store real and imaginary part"),
    "dates": (made(np.zeros(3, "M8[s]")), "dates: store them as int64"),
    "structured": (made(np.zeros(3, [("a", "f4")])), "store each of its fields as an array"),
}


@pytest.mark.parametrize(("spoil", "reason"), UNSTORABLE.values(), ids=UNSTORABLE)
def test_what_no_dataset_can_hold(spoil: Any, reason: str, tmp_path: Path) -> None:
    make(tmp_path / "in" / "good.zarr", 2, x=np.arange(3))
    make(tmp_path / "in" / "bad.zarr", 2, x=np.arange(3))
    spoil(tmp_path / "in" / "bad.zarr")
    report = convert(tmp_path / "in", tmp_path / "out", fields={"x": "int64"}, rows=True)
    assert reason in only_reason(report) and report.n_samples == 3
    assert str(tmp_path) not in only_reason(report)


def test_strings_of_what_are_no_characters_are_refused(tmp_path: Path) -> None:
    store = tmp_path / "in" / "a.zarr"
    make(store, 2, x=np.array(["ab", "c"]))
    describe(store / "x" / ".zarray", compressor=None)
    (store / "x" / "0").write_bytes(b"\xff" * 16)
    reason = only_reason(convert(tmp_path / "in", tmp_path / "out"))
    assert reason == "array 'x': found character 0xffffffff; 0x10ffff at most"


def test_names_inside_a_store_lead_nowhere(tmp_path: Path) -> None:
    make(tmp_path / "secret", 3, x=np.arange(3))
    store = tmp_path / "in" / "1.zarr"
    make(store, 3, x=np.arange(2))
    about = json.loads((store / "zarr.json").read_text())
    x = {"../../secret/x": json.loads((tmp_path / "secret" / "x" / "zarr.json").read_text())}
    about["consolidated_metadata"] = {"kind": "inline", "must_understand": False, "metadata": x}
    (store / "zarr.json").write_text(json.dumps(about))
    report = convert(tmp_path / "in", tmp_path / "out")
    assert (report.n_samples, report.counts["converted"]) == (2, 1)


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_archives_that_are_damaged_are_listed(root: Path, tmp_path: Path) -> None:
    make(tmp_path / "x", 3, x=np.arange(3))
    pack(tmp_path / "x", root / "good.zarr.zip")
    shutil.copy(root / "good.zarr.zip", root / "twice.zarr.zip")
    with zipfile.ZipFile(root / "twice.zarr.zip", "a") as archive:
        archive.writestr("zarr.json", "{}")
    whole = (root / "good.zarr.zip").read_bytes()
    where = whole.index(b"x/c/0") + 8
    flipped = whole[:where] + bytes([whole[where] ^ 1]) + whole[where + 1 :]
    (root / "flipped.zarr.zip").write_bytes(flipped)
    (root / "short.zarr.zip").write_bytes(whole[:100])
    (root / "empty.zarr.zip").write_bytes(b"")
    with zipfile.ZipFile(root / "nothing.zarr.zip", "w"):
        pass
    where = whole.rindex(b"x/c/0") + 4  # in the directory: it would be another chunk
    (root / "moved.zarr.zip").write_bytes(whole[:where] + b"5" + whole[where + 1 :])
    report = convert(root, tmp_path / "out")
    assert report.counts == {"converted": 1, "broken": 5, "empty": 1}
    found = reasons(report)
    assert found["twice.zarr.zip"] == "damaged: two members of the archive have one name"
    assert "Bad CRC-32" in found["flipped.zarr.zip"]
    assert "differ" in found["moved.zarr.zip"]
