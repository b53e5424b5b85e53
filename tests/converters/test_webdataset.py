"""WebDataset tars: samples are those that tarfile and webdataset read, and damage is noticed."""

from __future__ import annotations

import gc
import gzip
import io
import tarfile
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zstandard

import shardio
from shardio import Array, Bytes, Image, InvalidArgument, Json, Text
from tests.converters.helpers import convert as convert_folder
from tests.converters.helpers import npy, only_reason, stored

pytestmark = pytest.mark.usefixtures("quick_disk")

convert = partial(convert_folder, kind="webdataset")
PNG = bytes.fromhex(
    "89504e470d0a1a0a0000000d4948445200000002000000010800000000d14920560000000b49444154789c6364"
    "67000000140009eef237d00000000049454e44ae426082"
)
PGM = b"P5 2 3 255 abcdef"


def tar(members: Any, form: int = tarfile.PAX_FORMAT) -> bytes:
    """Return a tar of names and contents, or of other members as tarfile has them."""
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w", format=form) as archive:
        for name, content in members.items() if isinstance(members, Mapping) else members:
            one = content if isinstance(content, tarfile.TarInfo) else tarfile.TarInfo(name)
            if isinstance(content, bytes):
                one.size = len(content)
            archive.addfile(one, io.BytesIO(content) if isinstance(content, bytes) else None)
    return file.getvalue()


def broken(root: Path, content: bytes, name: str = "bad.tar", **options: Any) -> str:
    """Why a tar is broken, beside one that is fine and says what fields are."""
    (root / "a.tar").write_bytes(tar({"1.txt": b"one"}))
    (root / name).write_bytes(content)
    report = convert(root, root.parent / "out", **options)
    assert report.counts == {"converted": 1, "broken": 1}
    assert [one.name for one in report.broken] == [name]
    return only_reason(report)


MEMBERS: dict[str, bytes] = {
    "train.v1/one.CLS": b" 7\n",
    "train.v1/one.left.npy": npy(np.arange(6, dtype=">i4").reshape(2, 3)),
    "train.v1/one.json": b'{"b": [1, null, 2.5], "a": "\\u00e9"}',
    "train.v1/one.pgm": PGM,
    "train.v1/one.txt": "Zeile\r\n\u00fc\U0001f600".encode(),
    "train.v1/one.bin": bytes(range(256)),
    "train.v1/one.name.npy": npy(np.array("d\u00e9")),
    "../../etc/tw\u00f6.cls": b"-1",
    "../../etc/tw\u00f6.left.npy": npy(np.zeros((0, 3), "int32")),
    "../../etc/tw\u00f6.json": b"null",
    "../../etc/tw\u00f6.pgm": PGM,
    "../../etc/tw\u00f6.bin": b"",
    "../../etc/tw\u00f6.name.npy": npy(np.array("")),
    "x" * 300 + ".cls": b"0",
    "x" * 300 + ".left.npy": npy(np.ones((4, 3), "int32")),
    "x" * 300 + ".json": b"[]",
    "x" * 300 + ".pgm": PGM,
    "x" * 300 + ".bin": b"x" * 1024,
    "x" * 300 + ".name.npy": npy(np.array("x")),
}


@pytest.mark.parametrize("form", [tarfile.GNU_FORMAT, tarfile.PAX_FORMAT], ids=["gnu", "pax"])
@pytest.mark.parametrize("suffix", [".tar", ".tar.gz", ".TGZ", ".tar.zst"])
def test_members_of_a_key_are_a_sample(suffix: str, form: int, root: Path, tmp_path: Path) -> None:
    whole = tar(MEMBERS, form)
    if suffix == ".tar.zst":
        whole = zstandard.ZstdCompressor().compress(whole)
    elif suffix != ".tar":
        whole = gzip.compress(whole)
    (root / f"a{suffix}").write_bytes(whole)
    (root / "notes.md").write_text("notes")
    report = convert(root, tmp_path / "out")
    assert report.counts == {"converted": 1, "unsupported": 1}
    with shardio.open(tmp_path / "out") as dataset:
        assert dict(dataset.schema) == {
            "key": Text(),
            "source": Text(),
            "bin": Bytes(),
            "cls": Array("int64"),
            "json": Json(),
            "left.npy": Array("int32", (None, 3)),
            "name.npy": Text(),
            "pgm": Image(),
            "txt": Text(optional=True),
        }
        assert [s["key"] for s in dataset] == ["train.v1/one", "../../etc/tw\u00f6", "x" * 300]
        assert [int(s["cls"]) for s in dataset] == [7, -1, 0]
        assert [s["txt"] for s in dataset] == ["Zeile\r\n\u00fc\U0001f600", None, None]
        assert [s["json"] for s in dataset] == [{"a": "\u00e9", "b": [1, None, 2.5]}, None, []]
        assert [s["name.npy"] for s in dataset] == ["d\u00e9", "", "x"]
        assert [bytes(s["bin"]) for s in dataset] == [bytes(range(256)), b"", b"x" * 1024]
        np.testing.assert_array_equal(dataset[0]["left.npy"], [[0, 1, 2], [3, 4, 5]])
        assert dataset[1]["left.npy"].shape == (0, 3) and dataset[1]["pgm"] == PGM


@pytest.mark.external
@pytest.mark.filterwarnings("ignore::ResourceWarning")  # it leaves its files to the collector
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_samples_are_those_of_webdataset(root: Path, tmp_path: Path) -> None:
    library = pytest.importorskip("webdataset", reason="webdataset is not installed")
    with library.TarWriter(str(root / "a.tar")) as writer:
        for n in range(5):
            sample = {"__key__": f"a/{n:03d}", "cls": n, "json": {"n": n}, "txt": f"text {n}"}
            writer.write({**sample, "x.npy": np.full((n, 2), n, "float32")})
    # Its pictures need Pillow; null it gives as the bytes.
    known_to_it = {k: v for k, v in MEMBERS.items() if ".pgm" not in k and v != b"null"}
    (root / "b.tar").write_bytes(tar(known_to_it))
    convert(root, tmp_path / "out")
    places = [str(root / name) for name in ("a.tar", "b.tar")]
    known = list(library.WebDataset(places, shardshuffle=False).decode())
    gc.collect()
    with shardio.open(tmp_path / "out") as dataset:
        for sample, expected in zip(dataset, known, strict=True):
            assert sample["key"] == expected["__key__"]
            fields = expected.keys() - {"__key__", "__url__", "__local_path__"}
            filled = {n for n in sample if sample[n] is not None}
            assert filled == fields | {"key", "label", "source"}
            for name in fields:
                np.testing.assert_array_equal(sample[name], expected[name])


def test_streams_are_stored_as_their_packets(root: Path, media_root: Path, tmp_path: Path) -> None:
    clip = sorted((media_root / "clips").rglob("*.mp4"))[0].read_bytes()
    (root / "a.tar").write_bytes(tar({"1.mp4": clip, "2.mp4": clip}))
    assert convert(root, tmp_path / "out").n_samples == 2
    with shardio.open(tmp_path / "out") as dataset:
        stream = dataset[1]["mp4"]
        assert dataset.schema["mp4"] == shardio.Video() and stream.n_frames > 1


def test_a_schema_says_what_members_are(root: Path, tmp_path: Path) -> None:
    (root / "a.tar").write_bytes(tar({"1.id": b"007", "1.pkl": b"\x80\x04N.", "1.jpg": b"none"}))
    fields = {"id": "text", "pkl": "bytes", "jpg": "bytes", "cls": "int64?"}
    assert convert(root, tmp_path / "out", fields=fields).counts == {"converted": 1}
    with shardio.open(tmp_path / "out") as dataset:
        assert dataset[0]["id"] == "007" and dataset[0]["pkl"] == b"\x80\x04N."
        assert dataset[0]["cls"] is None
    (root / "b.tar").write_bytes(tar({"1.id": b"", "1.jpg": b""}))
    assert only_reason(convert(root, tmp_path / "lacks", fields=fields)) == "sample '1' lacks pkl"
    with pytest.raises(InvalidArgument, match=r"'x': found float32.*arrays are members in \.npy"):
        convert(root, tmp_path / "other", fields={"x": "float32"})


def test_fields_named_as_ours_take_their_places(root: Path, tmp_path: Path) -> None:
    (root / "a.tar").write_bytes(tar({"1.key": b"mine", "1.label": b"\0", "1.source": b"here"}))
    convert(root, tmp_path / "out")
    assert stored(tmp_path / "out")[0] == {"key": b"mine", "label": b"\0", "source": b"here"}


def test_what_is_no_member_of_a_sample_is_counted(root: Path, tmp_path: Path) -> None:
    folder = tarfile.TarInfo("f")
    folder.type = tarfile.DIRTYPE
    names = ["f/README", "f/._1.txt", ".x.txt", "__meta__/1.txt", "__info__"]
    members = [("f", folder), *((name, b"") for name in names), ("f/1.txt", b"one")]
    (root / "a.tar").write_bytes(tar(members))
    (root / "none.tar").write_bytes(tar({}))
    report = convert(root, tmp_path / "out")
    assert report.counts == {"converted": 1, "empty": 1} and report.n_samples == 1
    assert report.inputs[0].detail == {"members_aside": 5}


def with_type(kind: bytes, name: str = "1.txt") -> bytes:
    one = tarfile.TarInfo(name)
    one.type, one.linkname = kind, "/etc/passwd" * 20  # has a header of its own in GNU tar
    return tar([(name, one)], tarfile.GNU_FORMAT)


def header(**changes: bytes) -> bytes:
    """Return a tar of one member whose header says something else, with the right checksum."""
    places = {"size": slice(124, 136), "kind": slice(156, 157), "name": slice(0, 100)}
    content = bytearray(tar({"1.txt": b"one"}, tarfile.USTAR_FORMAT))
    for what, value in changes.items():
        length = places[what].stop - places[what].start
        content[places[what]] = value.ljust(length, b"\0")
    content[148:156] = b" " * 8
    content[148:156] = b"%06o\0 " % sum(content[:512])
    return bytes(content)


BAD = {
    "empty": (b"", "ends at byte 0"),
    "other": (b"no tar" * 200, "a header's checksum"),
    "hard link": (with_type(tarfile.LNKTYPE), "'1.txt': found a link, a device or a sparse file"),
    "link": (with_type(tarfile.SYMTYPE), "(type b'2'), expected a whole file"),
    "device": (with_type(tarfile.CHRTYPE), "(type b'3'), expected a whole file"),
    "pipe": (with_type(tarfile.FIFOTYPE), "(type b'6'), expected a whole file"),
    "sparse": (header(kind=b"S"), "(type b'S'), expected a whole file"),
    "again": (tar([("1.txt", b"1"), ("1.txt", b"2")]), "'1.txt' appears twice in a sample"),
    "apart": (tar({"1.txt": b"1", "2.txt": b"2", "1.cls": b"3"}), "directly after the other"),
    "pickle": (tar({"1.pkl": b"", "1.txt": b""}), "pickle, which can run any code"),
    "npz": (tar({"1.npz": b"", "1.txt": b""}), "several arrays: save each as .npy"),
    "not UTF-8": (tar({"1.txt": b"\xff"}), "member '1.txt': not UTF-8"),
    "name": (header(name=b"\xff.txt"), "the name of a member is not UTF-8"),
    "number": (tar({"1.txt": b"1", "1.cls": b"1.5"}), "'1.cls': expected a whole number of 64"),
    "picture": (tar({"1.txt": b"1", "1.jpg": b"no JPEG"}), "'1.jpg': not a picture in a known"),
    "field": (tar({"1..txt": b"", "1.txt": b""}), "member '1..txt': expected one of txt"),
    "huge": (header(size=b"77777777777\0"), "member '1.txt': 8,589,934,591 bytes; 4,294,967,296"),
    "huge in binary": (header(size=b"\x80" + b"\xff" * 11), "bytes; 4,294,967,296 at most"),
    "negative": (header(size=b"\xff" * 12), "a header's size: expected a number"),
    "long name": (header(kind=b"L", size=b"00010000000\0"), "a name of 2,097,152 bytes"),
    "pax": (header(kind=b"x", size=b"00000000003\0"), "a pax header: expected 'length"),
    "goes on": (tar({"1.txt": b"1"}) + tar({"2.txt": b"2"}), "bytes follow the end"),
    "one block": (tar({"1.txt": b"1"})[:1536], "ends at byte 1,536; expected 512 more"),
}


@pytest.mark.parametrize("content", BAD.values(), ids=BAD.keys())
def test_what_is_refused_is_named(content: tuple[bytes, str], root: Path) -> None:
    assert content[1] in broken(root, content[0])


def test_a_tar_that_is_cut_off_anywhere_is_broken(root: Path, tmp_path: Path) -> None:
    whole = tar({"1.txt": b"one", "2.txt": b"two" * 200}, tarfile.GNU_FORMAT)
    (root / "a.tar").write_bytes(whole)
    end = 512 + 512 + 512 + 1024 + 1024
    for length in {0, 100, 512, 515, 1024, 1536, 1600, 2560, 2560 + 512, end - 1}:
        (root / f"{length:05d}.tar").write_bytes(whole[:length])
    (root / "whole.tar").write_bytes(whole[:end])
    report = convert(root, tmp_path / "out")
    assert report.counts == {"converted": 2, "broken": 10}
    assert all("ends at byte" in one.reason for one in report.broken)


@pytest.mark.parametrize("suffix", [".tar.gz", ".tar.zst"])
def test_damaged_compressed_tars_are_broken(suffix: str, root: Path, tmp_path: Path) -> None:
    whole = tar({f"{n}.bin": np.random.default_rng(n).bytes(3_000) for n in range(5)})
    pack = zstandard.ZstdCompressor(write_checksum=True).compress
    packed = gzip.compress(whole) if suffix == ".tar.gz" else pack(whole)
    (root / f"whole{suffix}").write_bytes(packed)
    flipped = bytearray(packed)
    flipped[len(packed) // 2] ^= 1
    (root / f"flipped{suffix}").write_bytes(flipped)
    for length in (0, 10, len(packed) // 2, len(packed) - 1):
        (root / f"{length:05d}{suffix}").write_bytes(packed[:length])
    report = convert(root, tmp_path / "out")
    assert report.counts == {"converted": 1, "broken": 5}


def test_a_zstd_tar_may_have_several_frames(root: Path, tmp_path: Path) -> None:
    whole, pack = tar({"1.txt": b"one"}), zstandard.ZstdCompressor().compress
    (root / "a.tar.zst").write_bytes(pack(whole[:700]) + pack(whole[700:]))
    assert convert(root, tmp_path / "out").n_samples == 1


def test_other_compressions_are_named(root: Path) -> None:
    assert "found xz; expected one of .tar, .tar.gz" in broken(root, b"", "bad.tar.xz")


def test_a_bool_that_is_neither_0_nor_1_is_refused(root: Path, tmp_path: Path) -> None:
    (root / "a.tar").write_bytes(tar({"1.npy": npy(np.array([True]))[:-1] + b"\x02"}))
    reason = only_reason(convert(root, tmp_path / "out"))
    assert reason == "member '1.npy': array 'npy': a bool is neither 0 nor 1"


@pytest.mark.parametrize(
    "text", [b"NaN", b'"\\ud800"', b"1e999", b"[1e-999]", b"[" * 300 + b"]" * 300, b"{"]
)
def test_json_that_would_not_come_back_is_refused(text: bytes, root: Path, tmp_path: Path) -> None:
    (root / "a.tar").write_bytes(tar({"1.json": b"1"}))
    (root / "b.tar").write_bytes(tar({"1.json": text}))
    (one,) = convert(root, tmp_path / "out").broken
    assert "member '1.json': " in one.reason


def test_the_first_tar_that_has_an_array_decides_what_it_is(root: Path, tmp_path: Path) -> None:
    for name, array in {"a": np.zeros((2, 3)), "b": np.zeros((2, 3), "f4")}.items():
        (root / f"{name}.tar").write_bytes(tar({"1.npy": npy(array)}))
    reason = only_reason(convert(root, tmp_path / "out"))
    assert reason == "member '1.npy': expected float64[2,3], found float32[2,3]"


def test_what_can_be_told_of_no_tar_is_said(root: Path, tmp_path: Path) -> None:
    (root / "a.tar").write_bytes(tar({"1.pkl": b""}))
    with pytest.raises(InvalidArgument, match=r"files looked at: 1; a.tar: .*\"pkl\": \"bytes\""):
        convert(root, tmp_path / "out")
