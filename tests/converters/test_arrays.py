"""Arrays from .npy, .npz and .safetensors: what is stored is what their own libraries read."""

from __future__ import annotations

import json
import os
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shardio
from shardio import Array, InvalidArgument, Text
from tests.converters.helpers import DTYPES, check_broken, check_refused, convert, npy, reasons

pytestmark = pytest.mark.usefixtures("quick_disk", "two_folders")


def test_every_file_of_a_folder_is_a_sample(root: Path, tmp_path: Path) -> None:
    made = {
        "a/c order.npy": np.arange(6, dtype="float32").reshape(2, 3),
        "a/Fortran.npy": np.asfortranarray(np.arange(15, dtype="float32").reshape(5, 3)),
        "b/big endian \u00e9.npy": np.arange(3, dtype=">f4").reshape(1, 3),
        "b/none.npy": np.ones((0, 3), "float32"),
    }
    for name, array in made.items():
        np.save(root / name, array)
    (root / "notes.txt").write_text("notes")
    report = convert(root, tmp_path / "out")
    assert report.kind == "arrays" and report.counts == {"converted": 4, "unsupported": 1}
    with shardio.open(tmp_path / "out") as dataset:
        assert dataset.schema["array"] == Array("float32", (None, 3))
        for sample in dataset:
            np.testing.assert_array_equal(sample["array"], made[sample["source"]])
            assert dataset.classes[sample["label"]] == sample["source"][0]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", ["<", ">"])
def test_rows_of_a_single_file_are_samples(form: str, dtype: str, tmp_path: Path) -> None:
    made = np.arange(24).reshape(4, 3, 2).astype(dtype)
    path = tmp_path / "one.npy"
    np.save(path, made.astype(np.dtype(form + np.dtype(dtype).str[1:])))
    report = convert(path, tmp_path / "out")
    assert report.n_samples == 4
    with shardio.open(tmp_path / "out") as dataset:
        assert dataset.schema["array"] == Array(dtype, (3, 2))
        np.testing.assert_array_equal([sample["array"] for sample in dataset], made)
        assert [sample["row"] for sample in dataset] == [0, 1, 2, 3]


@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("shape", [(3, 300_000), (1_000, 1_000)])
def test_rows_read_in_blocks_are_all(shape: tuple[int, int], order: Any, tmp_path: Path) -> None:
    made = np.arange(shape[0] * shape[1], dtype="int32").reshape(shape, order=order)
    np.save(tmp_path / "one.npy", made)
    assert convert(tmp_path / "one.npy", tmp_path / "out").n_samples == shape[0]
    with shardio.open(tmp_path / "out") as dataset:
        np.testing.assert_array_equal([sample["array"] for sample in dataset], made)


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_arrays_of_a_npz_keep_their_names(save: Any, tmp_path: Path) -> None:
    made = {
        "x": np.arange(12.0).reshape(4, 3),
        "text": np.array(["one", "", "\u00fc\U0001f600", "four"]),
        "camera.id": np.asfortranarray(np.arange(8, dtype="uint8").reshape(4, 2)),
        "\u00e4": np.array([True, False, True, True]),
        "label": np.array([7, 8, 9, 10], "int16"),
    }
    save(tmp_path / "all.npz", **made)
    convert(tmp_path / "all.npz", tmp_path / "out")
    with shardio.open(tmp_path / "out") as dataset, np.load(tmp_path / "all.npz") as known:
        assert dataset.schema["text"] == Text() and dataset.schema["label"] == Array("int16")
        for row, sample in enumerate(dataset):
            for name in made:
                np.testing.assert_array_equal(sample[name], known[name][row])


def test_tensors_are_those_that_safetensors_reads(root: Path, tmp_path: Path) -> None:
    library = pytest.importorskip("safetensors.numpy", reason="safetensors is not installed")
    for number, folder in enumerate("ab"):
        made: dict[str, Any] = {dtype: np.arange(6 + number).astype(dtype) for dtype in DTYPES}
        made |= {"none": np.zeros((0, 2)), "one": np.array(number, "float32")}
        made["\u00e9.weight"] = np.arange(4.0).reshape(2, 2)
        library.save_file(made, root / folder / "x.safetensors", {"made": "here"})
    report = convert(root, tmp_path / "out")
    assert report.counts == {"converted": 2}
    with shardio.open(tmp_path / "out") as dataset:
        assert dataset.schema["int8"] == Array("int8", (None,))
        for sample in dataset:
            known = library.load_file(root / sample["source"])
            for name, value in known.items():
                np.testing.assert_array_equal(sample[name], value)
                assert sample[name].shape == value.shape


def tensors(header: object, data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def entry(begins: int, ends: int, dtype: str = "U8", shape: Any = None) -> dict[str, Any]:
    shape = [ends - begins] if shape is None else shape
    return {"dtype": dtype, "shape": shape, "data_offsets": [begins, ends]}


def test_bfloat16_is_its_bits(tmp_path: Path) -> None:
    bits = np.array([[0x3F80, 0x4000]], "<u2")
    path = tmp_path / "b.safetensors"
    path.write_bytes(tensors({"w": entry(0, 4, "BF16", [1, 2])}, bits.tobytes()))
    convert(path, tmp_path / "out")
    with shardio.open(tmp_path / "out") as dataset:
        assert dataset.schema["w"] == Array("bfloat16", (2,))
        np.testing.assert_array_equal(dataset[0]["w"], bits[0])


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"1234567", "7 bytes; expected at least 8"),
        (b"\xff" * 8 + b"{}", "the header has 18,446,744,073,709,551,615 bytes, the file 10"),
        (tensors(b"nonsense"), "the header is damaged"),
        (tensors(b"[" * 100_000), "the header is damaged"),
        (tensors([]), "the header is damaged"),
        (tensors(b'{"a": 1, "a": 2}'), "an object repeats a name"),
        (tensors({"a": entry(0, 4)}, b"123"), "bytes, found"),
        (tensors({"a": entry(0, 2)}, b"123"), "bytes, found"),
        (tensors({"a": entry(1, 3)}, b"123"), "tensor 'a': expected at byte 0, found 1"),
        (tensors({"a": entry(0, 2), "b": entry(1, 3)}, b"123"), "tensor 'b': expected at byte 2"),
        (tensors({"a": entry(0, 2, "I64", [1])}, b"12"), "2 bytes for shape (1,) of int64"),
        (tensors({"a": entry(0, 1, "U8", [-1])}, b"1"), "the header is damaged"),
        (tensors({"a": entry(0, 1, "F8_E4M3")}, b"1"), "dtype F8_E4M3, expected one of BOOL"),
        (tensors({"a": {"dtype": "U8"}}, b"1"), "the header is damaged"),
    ],
)
def test_damaged_tensors_listed(content: bytes, reason: str, root: Path, tmp_path: Path) -> None:
    (root / "a" / "bad.safetensors").write_bytes(content)
    (root / "b" / "good.safetensors").write_bytes(tensors({"a": entry(0, 4)}, b"1234"))
    report = convert(root, tmp_path / "out")
    assert report.n_samples == 1 and reason in reasons(report)["a/bad.safetensors"]


@pytest.mark.filterwarnings("ignore:Stored array in format 3.0")
def test_what_no_dataset_can_hold(root: Path, tmp_path: Path) -> None:
    whole = npy(np.arange(8))
    files: dict[str, tuple[str | bytes, str]] = {
        "b/object.npy": (npy(np.array([{}, None], object)), "pickle, which can run any code"),
        "b/record.npy": (npy(np.zeros(2, [("x", "f4")])), "a structured dtype, or plain bytes"),
        "b/record3.npy": (npy(np.zeros(2, [("Ж", "f4")])), "a structured dtype, or plain bytes"),
        "b/complex.npy": (npy(np.zeros(2, complex)), "found dtype complex128: complex: store real"),
        "b/date.npy": (npy(np.zeros(2, "M8[s]")), "dates: store them as int64"),
        "b/span.npy": (npy(np.zeros(2, "m8[s]")), "spans of time: store them as int64"),
        "b/bytes.npy": (npy(np.array([b"a"])), "store uint8, or strings"),
        "b/strings.npy": (npy(np.array(["a", "b"])), "expected one string, found text"),
        "b/empty.npy": (b"", "the header is damaged"),
        "b/short.npy": (whole[:-3], "expected 64 bytes, found 61"),
        "b/long.npy": (whole + b"x", "expected 64 bytes, found 65"),
        "b/two.npy": (whole + whole, "expected 64 bytes, found 256"),
        "b/other.npy": (npy(np.zeros(8, bool)), "expected int64[8], found bool[8]"),
        "b/more dims.npy": (npy(np.arange(8).reshape(2, 4)), "expected int64[8], found int64[2,4]"),
        "b/huge.npy": (whole.replace(b"(8,), }      ", b"(8000000000,),}"), "64,000,000,000"),
        "b/dims.npy": (npy(np.zeros((1,) * 17)), "found 17 dimensions; 16 at most"),
        "b/no.npz": (b"PK\x03\x04 no archive", "damaged"),
        "b/names.npz": (b"", "damaged"),
    }
    (root / "a" / "a.npy").write_bytes(whole)
    os.mkfifo(root / "b" / "pipe.npy")
    report = check_broken(root, tmp_path / "out", files)
    assert report.n_samples == 1 and report.counts["unsupported"] == 1


def archive(path: Path, members: list[tuple[str, bytes]]) -> None:
    with zipfile.ZipFile(path, "w") as file:
        for name, content in members:
            file.writestr(name, content)


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_what_is_wrong_in_a_npz_is_named(root: Path, tmp_path: Path) -> None:
    one = npy(np.arange(3))
    np.savez(root / "a" / "a.npz", x=np.arange(3))
    archive(root / "a" / "twice.npz", [("x.npy", one), ("x.npy", one)])
    archive(root / "a" / "text.npz", [("x.npy", one), ("readme", b"hello")])
    archive(root / "a" / "group.npz", [("x.npy", one), ("x.y.npy", one)])
    archive(root / "a" / "empty name.npz", [(".npy", one)])
    archive(root / "a" / "nothing.npz", [])
    damaged = bytearray((root / "a" / "a.npz").read_bytes())
    damaged[damaged.index(b"\x02\0\0\0\0\0\0\0")] = 3  # a number, of which there is a checksum
    (root / "b" / "damaged.npz").write_bytes(damaged)
    np.savez(root / "b" / "other.npz", x=np.arange(3), y=np.arange(2))
    report = convert(root, tmp_path / "out", fields={"x": "int64[3]"})
    assert report.counts == {"converted": 1, "broken": 6, "empty": 1}
    found = reasons(report)
    assert found["a/twice.npz"] == "two members are named 'x.npy'"
    assert "member 'readme' is not an array" in found["a/text.npz"]
    assert "names of arrays must be valid field names" in found["a/group.npz"]
    assert "names of arrays must be valid field names" in found["a/empty name.npz"]
    assert "Bad CRC-32" in found["b/damaged.npz"]
    assert found["b/other.npz"] == "array 'y': found int64[2], expected no such array"


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        (b"a\0\0\0", b"a\0\xfc\xbd", "array 'array': found character 0xbdfc0061; 0x10ffff at most"),
        (b"'<U2'", b"((), )", "array 'array': the header is damaged: tuple index out of range"),
        (
            b"'<U2'",
            b"f(1) ",
            "array 'array': the header is damaged: malformed node or string on line 1: <ast.Call>",
        ),
    ],
)
def test_a_npy_with_impossible_header(tmp_path: Path, old: bytes, new: bytes, reason: str) -> None:
    content = npy(np.array(["a", "bc"]))
    n_more = len(new) - len(old)
    changed = content.replace(b" " * n_more + b"\n", b"\n", 1).replace(old, new, 1)
    (tmp_path / "a.npy").write_bytes(changed)
    report = convert(tmp_path / "a.npy", tmp_path / "out", rows=True, fields={"array": "text"})
    assert reasons(report) == {"a.npy": reason}


def test_a_flipped_bit_in_the_directory_of_a_npz_costs_that_file_alone(tmp_path: Path) -> None:
    np.savez(tmp_path / "whole.npz", x=np.arange(3))
    whole = (tmp_path / "whole.npz").read_bytes()
    start = whole.index(b"PK\1\2")
    for bit in range(8 * start, 8 * len(whole)):
        flipped = bytearray(whole)
        flipped[bit // 8] ^= 1 << bit % 8
        (tmp_path / f"{bit}.npz").write_bytes(flipped)
    report = convert(tmp_path, tmp_path / "out", fields={"x": "int64[3]"})
    assert report.counts["broken"] > 250
    assert "cannot be read: Invalid argument" in reasons(report).values()
    with shardio.open(tmp_path / "out") as dataset:
        assert all(sample["x"].tolist() == [0, 1, 2] for sample in dataset)


def test_rows_can_be_asked_for(root: Path, tmp_path: Path) -> None:
    np.save(root / "a" / "1.npy", np.arange(6).reshape(3, 2))
    np.save(root / "b" / "2.npy", np.zeros((0, 2), "int64"))
    np.savez(root / "b" / "3.npz", array=np.ones((2, 2), int), more=np.ones(3))
    report = convert(root, tmp_path / "out", rows=True)
    assert report.counts == {"converted": 1, "empty": 1, "broken": 1}
    assert "expected arrays with the same number of rows, found 'array' (2, 2), 'more' (3,)" in (
        report.broken[0].reason
    )
    np.save(tmp_path / "one.npy", np.arange(3))
    assert convert(tmp_path / "one.npy", tmp_path / "whole", rows=False).n_samples == 1
    np.save(tmp_path / "scalar.npy", np.float32(3))
    assert convert(tmp_path / "scalar.npy", tmp_path / "scalar").n_samples == 1


def test_options_that_cannot_be_are_refused(root: Path, tmp_path: Path) -> None:
    np.save(root / "a" / "1.npy", np.arange(3))
    refused: list[tuple[dict[str, Any], str]] = [
        ({"rows": 1}, "rows is 1"),
        ({"fields": {}}, "expected a mapping of names to types"),
        ({"fields": {"x": "json"}}, "field 'x': found 'json'; expected an array, or text"),
        ({"fields": {"x": "float31"}}, "field 'x': found 'float31'; unknown dtype"),
        ({"fields": {"x": "int8[0]"}}, "field 'x'"),
        ({"fields": {"x": 3}}, "field 'x': found 3"),
        ({"fields": {"x": "text[3]"}}, "text has no dimensions"),
        ({"fields": {"x": "int8", "x.y": "int8"}}, "the fields are not a schema"),
    ]
    check_refused(root, tmp_path / "out", refused, kind="arrays")
    with pytest.raises(InvalidArgument, match=r"at: 1; 1.npy: array 'array': the header"):
        (tmp_path / "bad").mkdir()
        (tmp_path / "bad" / "1.npy").write_bytes(b"")
        convert(tmp_path / "bad", tmp_path / "out")
    assert not (tmp_path / "out").exists()
