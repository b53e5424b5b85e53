"""Records from TFRecord and ArrayRecord: what is stored is what their own libraries read."""

from __future__ import annotations

import gzip
import json
import struct
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np
import pytest

import shardio
from shardio import Array, Bytes, Image, InvalidArgument, Json, List, MediaError, Text
from shardio_converters.records.examples import is_example, read_example
from tests.converters.helpers import check_broken, check_refused, convert, reasons, stored, write

pytestmark = pytest.mark.usefixtures("quick_disk", "two_folders")

MADE = Path(__file__).parent / "made" / "tfrecord"
PLAIN = MADE / "examples.tfrecord-00000-of-00001"


def varint(value: int) -> bytes:
    value &= (1 << 64) - 1
    found = bytearray()
    while value > 0x7F:
        found.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*found, value])


def part(number: int, data: bytes) -> bytes:
    """Return a field that has a length."""
    return varint(number << 3 | 2) + varint(len(data)) + data


def ints(*values: int) -> bytes:
    return part(3, part(1, b"".join(map(varint, values))))


def floats(*values: float) -> bytes:
    return part(2, part(1, struct.pack(f"<{len(values)}f", *values)))


def strings(*values: bytes) -> bytes:
    return part(1, b"".join(part(1, value) for value in values))


def entry(name: str, feature: bytes) -> bytes:
    return part(1, part(1, name.encode()) + part(2, feature))


def example(**features: bytes) -> bytes:
    return part(1, b"".join(entry(name, feature) for name, feature in features.items()))


def masked(data: bytes) -> int:
    found: int = google_crc32c.value(data)
    return ((found >> 15 | found << 17) + 0xA282EAD8) & 0xFFFF_FFFF


def head(n_bytes: int) -> bytes:
    length = struct.pack("<Q", n_bytes)
    return length + struct.pack("<I", masked(length))


def framed(records: Iterable[bytes]) -> bytes:
    return b"".join(head(len(one)) + one + struct.pack("<I", masked(one)) for one in records)


@pytest.mark.parametrize("suffix", ["", ".gz", ".zlib"])
def test_features_are_those_that_tensorflow_reads(suffix: str, tmp_path: Path) -> None:
    path = MADE / f"examples.tfrecord-00000-of-00001{suffix}"
    report = convert(path, tmp_path / "out")
    assert report.kind == "tfrecord" and report.counts == {"converted": 1}
    known = json.loads((MADE / "known.json").read_text())
    kinds = {"int64_list": "int64", "float_list": "float32"}
    with shardio.open(tmp_path / "out") as dataset:
        assert dict(dataset.schema) == {
            "box": Array("float32", (4,)),
            "image/encoded": Bytes(),
            "label": Array("int64"),
            "names": List(Array("uint8", (None,))),
            "numbers": Array("int64", (None,)),
            "odd": Array("int64", optional=True),
            "weights": Array("float32", (None,)),
            "\u00fcber": Bytes(),
            "source": Text(),
        }
        assert len(dataset) == len(known) == 5
        for sample, features in zip(dataset, known, strict=True):
            assert sample["source"] == path.name
            assert (sample["odd"] is None) == ("odd" not in features)
            for name, (kind, values) in features.items():
                found = sample[name]
                if kind == "bytes_list":
                    texts = found if isinstance(found, list) else [found]
                    assert [bytes(one).hex() for one in texts] == values
                    continue
                assert found.dtype == kinds[kind]
                plain = np.atleast_1d(found).tolist()
                assert [n.hex() if kind == "float_list" else n for n in plain] == values


def test_what_protobuf_allows_beside_the_usual_form_is_read() -> None:
    unpacked = part(3, b"".join(varint(1 << 3) + varint(n) for n in (5, -6, 1 << 40)))
    fixed = part(2, b"".join(varint(1 << 3 | 5) + struct.pack("<f", n) for n in (0.5, -2)))
    turned = part(1, part(2, ints(9)) + part(1, b"turned"))
    unknown = part(9, b"x") + varint(7 << 3) + varint(300) + varint(8 << 3 | 1) + bytes(8)
    long_name = "n" * 300
    features = [
        entry("twice", ints(1)),
        entry("unpacked", unpacked),
        entry("fixed", fixed),
        turned,
        entry("twice", floats(2)),
        entry("joined", ints(1) + ints(2, 3)),
        entry("both", ints(1) + strings(b"last")),
        entry("in parts", part(3, part(1, varint(1)) + part(1, varint(2)))),
        entry("unknown", unknown + strings(b"x", b"")),
        entry("gone", ints(1)),
        entry("gone", b""),
        entry(long_name, ints(*range(1000))),
        unknown,
        part(1, part(2, strings(b"nameless"))),
    ]
    record = unknown + part(1, b"".join(features[:6])) + part(1, b"".join(features[6:]))
    found = read_example(record)
    plain = {k.decode(): v if isinstance(v, list) else v.tolist() for k, v in found.items()}
    assert plain == {
        "twice": [2.0],
        "unpacked": [5, -6, 1 << 40],
        "fixed": [0.5, -2.0],
        "turned": [9],
        "joined": [1, 2, 3],
        "both": [b"last"],
        "in parts": [1, 2],
        "unknown": [b"x", b""],
        long_name: [*range(1000)],
        "": [b"nameless"],
    }
    assert not is_example(record) and is_example(example(x=ints(1)))


@pytest.mark.parametrize("values", [[*range(-70, 70)], [2**63 - 1, -(2**63), 0] * 9, [1] * 40])
def test_many_ints_are_the_same_as_few(values: list[int]) -> None:
    np.testing.assert_array_equal(read_example(example(x=ints(*values)))[b"x"], values)


def test_a_record_that_is_cut_or_changed_is_refused_or_read_but_never_crashes() -> None:
    whole = example(a=ints(1, 300), b=strings(b"xyz"), c=floats(1, 2), d=ints(*range(100, 140)))
    for n_bytes in range(1, len(whole)):
        with pytest.raises(MediaError, match="not a tf.train.Example"):
            read_example(whole[:n_bytes])
    for at in range(len(whole)):
        for bit in range(8):
            changed = bytearray(whole)
            changed[at] ^= 1 << bit
            is_example(bytes(changed))


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        (b"\xff" * 30, "a number of more than 10 bytes"),
        (b"\x00\x01", "a field has number 0"),
        (b"\x0b", "found wire type 3, expected one of"),
        (part(1, varint(1 << 3) + b"\x01"), "field 1 has wire type 0"),
        (example(x=part(2, part(1, b"123"))), "3 bytes of floats, expected a multiple of 4"),
        (example(x=part(3, part(1, b"\x81" * 20))), "the message ends within a field"),
        (example(x=part(3, part(1, b"\x81" * 20 + b"\x01"))), "a number of 21 bytes"),
        (part(1, b"") + part(2, b""), "found a SequenceExample"),
    ],
)
def test_what_is_no_example_is_refused_with_the_reason(record: bytes, reason: str) -> None:
    with pytest.raises(MediaError, match=reason):
        read_example(record)


@pytest.fixture(autouse=True)
def good(root: Path, two_folders: None) -> None:
    content = framed(example(x=ints(n)) for n in range(3))
    (root / "a" / "good.tfrecord").write_bytes(content)


def test_damage_is_listed_with_its_place(root: Path, tmp_path: Path) -> None:
    good = (root / "a" / "good.tfrecord").read_bytes()
    size = len(good) // 3
    flipped = bytearray(good)
    flipped[size + 14] ^= 1
    in_length = bytearray(good)
    in_length[2 * size] ^= 0x80
    big = head(1 << 30)
    files: dict[str, tuple[str | bytes, str]] = {
        "b/flipped.tfrecord": (bytes(flipped), f"record 1 at byte {size}: expected checksum 0x"),
        "b/length.tfrecord": (bytes(in_length), f"record 2 at byte {2 * size}: expected checksum"),
        "b/cut.tfrecord": (good[:-3], f"record 2 at byte {2 * size}: the file ends 3 bytes too"),
        "b/head.tfrecord": (good + good[:5], f"at byte {3 * size}: the file ends 7 bytes too"),
        "b/huge.tfrecord": (head(1 << 40), "found 1,099,511,627,776 bytes"),
        "b/big.tfrecord": (big, "ends 1,073,741,828 bytes too"),
        "b/big.tfrecord.gz": (gzip.compress(big), "the file ends 1,073,741,828 bytes too early"),
        "b/text.tfrecord": (b"this is no TFRecord file", "record 0 at byte 0: expected checksum"),
        "b/cut.tfrecord.gz": (gzip.compress(good)[:-9], "the compressed bytes end too early"),
        "b/bad.tfrecord.gz": (gzip.compress(good)[:-6] + b"123456", "compressed bytes are damaged"),
        "b/behind.zlib": (zlib.compress(good) + b"behind", "the compressed bytes are damaged"),
    }
    others: dict[str, str | bytes] = {
        "none.tfrecord": b"",
        "none.tfrecord.gz": gzip.compress(b""),
        "notes.txt": "notes, and nothing else",
        "notes.gz": gzip.compress(b"notes, and nothing else"),
        "unnamed": gzip.compress(good[:size]) + gzip.compress(good[size:]),
    }
    write(root / "b", others)
    report = check_broken(root, tmp_path / "out", files)
    assert report.counts == {"converted": 2, "broken": 11, "empty": 2, "unsupported": 2}
    with shardio.open(tmp_path / "out") as dataset:
        assert [sample["x"] for sample in dataset] == [0, 1, 2] * 2
        assert dataset.classes == ("a", "b") and [s["label"] for s in dataset] == [0] * 3 + [1] * 3


def test_features_that_the_dataset_has_not_are_refused(root: Path, tmp_path: Path) -> None:
    made = {
        "kind": example(x=floats(1)),
        "more": example(x=ints(1), y=ints(1)),
        "none": part(1, b""),
        "many": example(x=ints(1, 2)),
        "sequence": example(x=ints(1)) + part(2, b""),
    }
    for name, record in made.items():
        (root / "b" / f"{name}.tfrecord").write_bytes(framed([example(x=ints(7)), record]))
    report = convert(root, tmp_path / "out", fields={"x": "int64"})
    assert report.n_samples == 3
    assert reasons(report) == {
        "b/kind.tfrecord": "record 1: feature 'x': expected int64, found float32",
        "b/more.tfrecord": "record 1: feature 'y' is not a field",
        "b/none.tfrecord": "record 1: feature 'x' is missing",
        "b/many.tfrecord": "record 1: feature 'x': expected int64, found 2 values",
        "b/sequence.tfrecord": "record 1: not a tf.train.Example: found a SequenceExample",
    }
    report = convert(root, tmp_path / "told")
    assert reasons(report).keys() == {"b/kind.tfrecord", "b/sequence.tfrecord"}
    with shardio.open(tmp_path / "told") as dataset:
        assert dataset.schema["x"] == Array("int64", (None,), optional=True)
        assert dataset.schema["y"] == Array("int64", optional=True)


def test_a_schema_says_what_features_become(root: Path, tmp_path: Path) -> None:
    from shardio.media import encode_jpeg

    jpeg = encode_jpeg(np.zeros((8, 9, 3), "uint8"))
    raw = np.arange(6, dtype="<i2")
    record = {
        "picture": strings(jpeg),
        "text": strings("caf\u00e9".encode()),
        "texts": strings(b"one", b"", b"two"),
        "pixels": strings(raw.tobytes()),
        "boxes": floats(*range(8)),
    }
    fields = {
        "picture": "image",
        "text": "text",
        "texts": "json",
        "pixels": "int16[2,3]",
        "boxes": "float32[*,4]",
        "missing": "int64[3]?",
    }
    (root / "a" / "good.tfrecord").write_bytes(framed([example(**record)]))
    bad = {
        "picture": (strings(b"none"), "feature 'picture': "),
        "text": (strings(b"\xff"), "feature 'text': not UTF-8: invalid start byte at byte 0"),
        "texts": (ints(1), "feature 'texts': expected bytes, found int64"),
        "pixels": (strings(b"123"), "feature 'pixels': 3 bytes are not a whole number of int16"),
        "boxes": (floats(1, 2), "feature 'boxes': expected float32[*,4], found 2 values"),
        "missing": (ints(), "feature 'missing': expected int64[3], found 0 values"),
    }
    files: dict[str, tuple[str | bytes, str]] = {
        f"b/{name}.tfrecord": (framed([example(**{**record, name: feature})]), why)
        for name, (feature, why) in bad.items()
    }
    report = check_broken(root, tmp_path / "out", files, fields=fields)
    assert report.n_samples == 1 and len(report.broken) == len(bad)
    with shardio.open(tmp_path / "out") as dataset:
        assert dataset.schema["picture"] == Image() and dataset.schema["texts"] == Json()
        sample = dataset[0]
        assert sample["picture"] == jpeg and sample["text"] == "caf\u00e9"
        assert sample["texts"] == ["one", "", "two"] and sample["missing"] is None
        np.testing.assert_array_equal(sample["pixels"], raw.reshape(2, 3))
        np.testing.assert_array_equal(sample["boxes"], np.arange(8.0).reshape(2, 4))


def test_records_of_another_kind_are_kept_as_they_are(root: Path, tmp_path: Path) -> None:
    records = [b"", b"anything", bytes(3_000_000)]
    for name in ("a/good", "b/other"):
        (root / f"{name}.tfrecord").write_bytes(framed(records))
    convert(root, tmp_path / "out")
    with shardio.open(tmp_path / "out") as dataset:
        assert dataset.schema["record"] == Bytes()
        assert [sample["record"] for sample in dataset] == records * 2
    sequence = MADE / "sequence.tfrecord"
    assert convert(sequence, tmp_path / "sequence").n_samples == 1
    assert convert(sequence, tmp_path / "refused", fields={"id": "int64"}).n_samples == 0
    report = convert(PLAIN, tmp_path / "asked", records="bytes")
    with shardio.open(tmp_path / "asked") as dataset:
        assert report.n_samples == 5 and read_example(dataset[3]["record"])[b"label"] == [1]


def test_records_without_features_are_bytes(root: Path, tmp_path: Path) -> None:
    empty = [part(1, b""), example(x=b"")]
    (root / "a" / "good.tfrecord").write_bytes(framed([*empty, example(x=ints(1))]))
    convert(root, tmp_path / "bytes")
    convert(root, tmp_path / "examples", records="example")
    assert [sample["record"] for sample in stored(tmp_path / "bytes")][:2] == empty
    assert [sample["x"] is None for sample in stored(tmp_path / "examples")] == [True, True, False]
    (root / "a" / "good.tfrecord").write_bytes(framed(empty))
    why = "features .*: the 2 records have no feature; records='b"
    with pytest.raises(InvalidArgument, match=why):
        convert(root, tmp_path / "none", records="example")


def test_options_that_cannot_be_are_refused(root: Path, tmp_path: Path) -> None:
    refused: list[tuple[dict[str, Any], str]] = [
        ({"records": "text"}, "records is 'text'; it must be one of example, bytes"),
        ({"fields": {"x": "int64[*,*]"}}, "field 'x': found 'int64[*,*]'; expected bytes, text"),
        ({"fields": {"x": "list[float32]"}}, "field 'x': found 'list[float32]'"),
        ({"fields": {"x": "list[text]"}}, "expected a list of arrays"),
        ({"records": "bytes", "fields": {"x": "bytes"}}, "records that are bytes have one field"),
    ]
    check_refused(root, tmp_path / "out", refused, kind="tfrecord")
    (root / "a" / "good.tfrecord").write_bytes(framed([example(**{"a.b": ints(1), "a": ints(1)})]))
    with pytest.raises(InvalidArgument, match="cannot map the features .*records='bytes' keeps"):
        convert(root, tmp_path / "out")
    (root / "a" / "good.tfrecord").write_bytes(b"")
    with pytest.raises(InvalidArgument, match="no TFRecord file that can be read and holds a"):
        convert(root, tmp_path / "out")


def write_array_record(path: Path, records: list[bytes], options: str = "group_size:1") -> None:
    library = pytest.importorskip(
        "array_record.python.array_record_module", reason="array_record is not installed"
    )
    writer = library.ArrayRecordWriter(str(path), options)
    for record in records:
        writer.write(record)
    writer.close()


@pytest.mark.parametrize("options", ["group_size:1", "group_size:7,uncompressed"])
def test_an_arrayrecord_is_what_its_library_reads(options: str, tmp_path: Path) -> None:
    records = [bytes([n]) * (n * 50) for n in range(60)]
    path = tmp_path / "\u00e9.array_record-00000-of-00001"
    write_array_record(path, records, options)
    report = convert(path, tmp_path / "out")
    assert report.kind == "arrayrecord"
    assert [sample["record"] for sample in stored(tmp_path / "out")] == records


def test_an_incomplete_arrayrecord_is_broken(root: Path, tmp_path: Path) -> None:
    write_array_record(root / "a" / "good.array_record", [b"x" * 100] * 500)
    whole = (root / "a" / "good.array_record").read_bytes()
    flipped = bytearray(whole)
    flipped[100] ^= 1
    files: dict[str, tuple[str | bytes, str]] = {
        "b/killed.array_record": (whole[:-65_536], "damaged or truncated: "),
        "b/cut.array_record": (whole[:1000], "damaged or truncated: "),
        "b/flipped.array_record": (bytes(flipped), "hash mismatch"),
        "b/empty.array_record": (b"", "a3f, found none"),
        "b/text.array_record": (b"no records", "expected to begin with 83af70d10d884a3f"),
    }
    write_array_record(root / "b" / "none.array_record", [])
    report = check_broken(root, tmp_path / "out", files, kind="arrayrecord")
    assert report.n_samples == 500
    assert report.counts == {"converted": 1, "broken": 5, "empty": 1, "unsupported": 1}
