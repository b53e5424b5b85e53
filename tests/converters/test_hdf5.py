"""HDF5: what is stored is what h5py reads, and nothing outside of the file is opened."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shardio
from shardio import Array, Text
from shardio_converters.arrays.array_samples import block_array
from shardio_converters.arrays.hdf5 import Hdf5
from tests.converters.helpers import DTYPES, check_broken, convert, only_reason, reasons

h5py = pytest.importorskip("h5py", reason="h5py is not installed")
pytestmark = pytest.mark.usefixtures("quick_disk", "two_folders")


def test_rows_are_those_that_h5py_reads(tmp_path: Path) -> None:
    path = tmp_path / "all.h5"
    made = {dtype: np.arange(21).reshape(7, 3).astype(dtype) for dtype in DTYPES}
    with h5py.File(path, "w", libver="latest") as file:
        for dtype, array in made.items():
            file.create_dataset(f"numbers/{dtype}", data=array, chunks=(2, 2), compression="gzip")
        file["big endian"] = np.arange(7, dtype=">f4")
        file["texts/any"] = ["one", "", "ü\U0001f600"] + ["x" * 5_000] * 4
        file["texts/fixed"] = np.array([b"one", b""] + [b"four!"] * 5)
        file["state"] = np.arange(7).astype(h5py.enum_dtype({"A": 0, "B": 1}, "u1"))
        ragged = file.create_dataset("ragged", (7,), h5py.vlen_dtype("int16"))
        for row in range(7):
            ragged[row] = np.arange(row)
        file.create_dataset("never written", (7, 2), "int8", fillvalue=5)
        file.create_dataset("z", data=made["int8"], shuffle=True, fletcher32=True)
        file["empty group/below"] = h5py.SoftLink("/z")
        file["é"] = file["z"]  # another name of it, behind it
        file.attrs["note"] = "is not kept"
    report = convert(path, tmp_path / "out")
    assert (report.kind, report.n_samples, report.classes) == ("hdf5", 7, ())
    with shardio.open(tmp_path / "out") as dataset, h5py.File(path) as known:
        names = {name.replace(".", "/") for name in dataset.schema} - {"label", "source", "row"}
        assert names == {"big endian", "ragged", "never written", "state", "z"} | {
            *(f"numbers/{dtype}" for dtype in DTYPES),
            *("texts/any", "texts/fixed"),
        }
        assert dataset.schema["ragged"] == Array("int16", (None,))
        assert dataset.schema["texts.fixed"] == Text()
        for row, sample in enumerate(dataset):
            for name in names:
                read, found = known[name], sample[name.replace("/", ".")]
                if isinstance(found, str):
                    assert found == read.asstr()[row]
                else:
                    np.testing.assert_array_equal(found, read[row])
                    assert found.dtype == read[row].dtype.newbyteorder("<")


def test_rows_of_any_length_are_refused_where_a_file_is_a_sample(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file["one"] = 1
        file.create_dataset("r", (2,), h5py.vlen_dtype("int16"))[1] = np.arange(1)
    report = convert(tmp_path / "x.h5", tmp_path / "out", rows=False, fields={"one": "int64"})
    assert only_reason(report) == "array 'r': rows of varying length need rows=True"


def test_files_of_others_are_samples(root: Path, tmp_path: Path) -> None:
    for name, n in (("a/1.h5", 3), ("b/2.h5", 5)):
        with h5py.File(root / name, "w") as file:
            file["x"], file["speed"], file["id"] = np.full((n, 2), n), np.float32(n), f"id {n}"
            if n == 3:
                file["mask"] = np.ones(4, bool)
    convert(root, tmp_path / "out")
    with shardio.open(tmp_path / "out") as dataset:
        assert dataset.schema["x"] == Array("int64", (None, 2))
        assert [sample["id"] for sample in dataset] == ["id 3", "id 5"]
        assert [sample["mask"] is None for sample in dataset] == [False, True]
        np.testing.assert_array_equal(dataset[1]["x"], np.full((5, 2), 5))


def three_bytes(file: Any) -> None:
    whole = h5py.h5t.STD_I32LE.copy()
    whole.set_precision(24)
    whole.set_size(3)
    of_type(whole)(file)


def of_type(kind: Any) -> Callable[[Any], Any]:
    return lambda file: h5py.h5d.create(file.id, b"x", kind, h5py.h5s.create_simple((3,)))


def of(data: Any) -> Callable[[Any], Any]:
    return lambda file: file.create_dataset("x", data=data)


def references(file: Any) -> None:
    file["z"] = np.zeros(3)
    file.create_dataset("x", (3,), h5py.ref_dtype)[0] = file["z"].ref


def no_text_as_name(file: Any) -> None:
    h5py.h5d.create(file.create_group("g").id, b"\xff", h5py.h5t.STD_I8LE, h5py.h5s.create(0))


def big_endian_lists(file: Any) -> None:
    file.create_dataset("x", (3,), h5py.vlen_dtype(">i2"))[0] = [1, 258]


def virtual(file: Any) -> None:
    layout = h5py.VirtualLayout((3,), "int64")
    layout[:] = h5py.VirtualSource("other.h5", "x", (3,))
    file.create_virtual_dataset("x", layout)


def two_names(file: Any) -> None:
    file["a/b"], file["a.b"] = np.zeros(3), np.zeros(3)


def missing_filter(file: Any) -> None:
    plist = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    plist.set_chunk((3,))
    plist.set_filter(32_987, h5py.h5z.FLAG_OPTIONAL, ())
    h5py.h5d.create(file.id, b"x", h5py.h5t.STD_I8LE, h5py.h5s.create_simple((3,)), plist)


UNSTORABLE: dict[str, tuple[Callable[[Any], Any], str]] = {
    "compound": (of(np.zeros(3, [("a", "f4")])), "compound or opaque: store each of its fields"),
    "opaque": (of(np.zeros(3, "V5")), "compound or opaque"),
    "references": (references, "dataset 'x': found dtype object: a reference"),
    "lists of numbers": (
        lambda file: file.create_dataset("x", (3, 2), h5py.vlen_dtype("int8")),
        "lists in 2 dimensions, expected 1",
    ),
    "complex": (of(np.zeros(3, complex)), "complex: store real and imaginary part"),
    "null": (of(h5py.Empty("f4")), "has no value, not even a shape"),
    "bits": (of_type(h5py.h5t.STD_B8LE), "dataset 'x': found a bit field or time"),
    "three bytes": (three_bytes, "dataset 'x': found a type that NumPy lacks: "),
    "times": (of_type(h5py.h5t.UNIX_D32LE), "dataset 'x': found a type that NumPy lacks: "),
    "no text as name": (no_text_as_name, "b'\\xff' in group 'g': names must be text in UTF-8"),
    "big endian lists": (big_endian_lists, "found big-endian int16 of variable length"),
    "external link": (
        lambda file: file.create_group("g").update(x=h5py.ExternalLink("other.h5", "/x")),
        "g/x: links to another file, which is not supported",
    ),
    "external storage": (
        lambda file: file.create_dataset("x", (3,), "int64", external=[("raw.bin", 0, 24)]),
        "dataset 'x': stored in other files, which is not supported",
    ),
    "virtual": (virtual, "dataset 'x': stored in other files, which is not supported"),
    "two names": (two_names, "two arrays would become the field 'a.b'"),
    "no UTF-8": (of(np.array([b"\xff\xfe", b"", b""])), "damaged: 'ascii' codec can't decode"),
    "bomb": (
        lambda file: file.create_dataset("x", (1 << 40,), "int64", chunks=(1 << 10,)),
        "declares 8,796,093,022,208 bytes",
    ),
    "missing filter": (
        missing_filter,
        "filter 32987 () is not installed; for common filters: pip install hdf5plugin",
    ),
}


@pytest.mark.parametrize(("make", "reason"), UNSTORABLE.values(), ids=UNSTORABLE)
def test_what_no_dataset_can_hold(make: Any, reason: str, root: Path, tmp_path: Path) -> None:
    with h5py.File(root / "a" / "good.h5", "w") as file:
        file["x"] = np.arange(3)
    with h5py.File(root / "other.h5", "w") as file:
        file["x"] = np.arange(3)
    (root / "raw.bin").write_bytes(bytes(24))
    with h5py.File(root / "bad.h5", "w") as file:
        make(file)
    field = "text" if "ascii" in reason else "int64"
    report = convert(root, tmp_path / "out", fields={"x": field}, rows=True)
    assert reason in reasons(report)["bad.h5"]


def test_damage_is_listed(root: Path, tmp_path: Path) -> None:
    path = root / "a" / "1.h5"
    with h5py.File(path, "w") as file:
        file.create_dataset("x", data=np.arange(1000), chunks=(100,), fletcher32=True)
    whole = path.read_bytes()
    where = whole.index(np.int64(511).tobytes())
    content: dict[str, tuple[str | bytes, str]] = {
        "b/flipped.h5": (whole[:where] + b"\x01" + whole[where + 1 :], "dataset 'x': damaged"),
        "b/short.h5": (whole[: len(whole) // 2], "damaged: Unable"),
        "b/empty.h5": (b"", "not HDF5: signature not found"),
        "b/text.hdf5": (b"no HDF5" * 1000, "not HDF5: signature not found"),
    }
    os.mkfifo(root / "b" / "pipe.h5")
    report = check_broken(root, tmp_path / "out", content)
    assert report.counts == {"converted": 1, "broken": 4, "unsupported": 1}
    assert str(root) not in "".join(reasons(report).values())


def test_links_in_a_circle_and_files_without_datasets_end(root: Path, tmp_path: Path) -> None:
    with h5py.File(root / "a" / "1.h5", "w") as file:
        file["g/x"] = np.arange(3)
        file["g/up"] = file["/"]
        file["g/nowhere"] = h5py.SoftLink("/gone")
    with h5py.File(root / "b" / "2.h5", "w") as file:
        file.create_group("g")
    report = convert(root, tmp_path / "out")
    assert report.counts == {"converted": 1, "empty": 1} and report.n_samples == 3


def test_every_chunk_is_read_once() -> None:
    read: list[slice] = []

    def note(which: slice) -> list[int]:
        read.append(which)
        return list(range(which.start, which.stop))

    block = block_array("x", "int64", (1000, 1000), note, 80_000, 90)
    assert list(block.rows()) == list(range(1000))
    assert [each.start for each in read] == list(range(0, 1000, 90))
    read.clear()
    huge = block_array("x", "int64", (100,), note, 100 << 20, 50)
    assert list(huge.rows()) == list(range(100))
    assert read[0] == slice(0, 2)


def test_a_file_over_which_the_library_comes_to_no_end_is_broken(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, warm_zygote: None
) -> None:
    monkeypatch.setattr(Hdf5, "step_s", 0.2)
    for name in ("a/1.h5", "b/2.h5"):
        with h5py.File(root / name, "w") as file:
            file["t"] = [f"text {n}" for n in range(9)]
    content = bytearray((root / "b" / "2.h5").read_bytes())
    place = content.index(b"text 4")
    content[place - 16 : place] = bytes(16)  # how large it is, among others
    (root / "b" / "2.h5").write_bytes(content)
    report = shardio.convert(root, tmp_path / "out", workers=1)
    assert report.counts == {"converted": 1, "broken": 1}
    assert only_reason(report).startswith("timed out after 0 s of CPU time")
