"""ShardWriter: what is written is read again, nothing else is ever published."""

from __future__ import annotations

import os
import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings

import shardio
from shardio import Array, Audio, Bytes, DatasetWriter, EncodedStream, Schema, Text, Video
from shardio.errors import ClosedError, InvalidArgument, SchemaError
from shardio.format.checksum import BLOCK_BYTES, CHUNK_BYTES
from shardio.format.types import EncodedImage
from shardio.format.types.streams import PIECE_BYTES
from shardio.maintenance import verify_shard
from shardio.shard import writer
from shardio.shard.reader import ShardReader
from shardio.shard.section_writers import _COPY_BYTES
from shardio.shard.writer import ShardWriter
from tests.format.strategies import shards
from tests.shards import (
    EVERY_FIELD,
    as_read,
    every_field_sample,
    made_stream,
    same_sample,
    samples,
    write_media,
    write_shard,
)

pytestmark = pytest.mark.usefixtures("quick_disk")

SIMPLE = Schema({"label": Array("int64"), "text": Text()})
Content = tuple[Schema, list[dict[str, Any]]]


@pytest.fixture
def tiny_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a few kilobytes count as much, so that sections stream and move to temporary files."""
    monkeypatch.setattr(writer, "STREAMING_BYTES", 5_000)
    monkeypatch.setattr(writer, "MEMORY_BYTES", 20_000)


def write(path: Path, schema: Schema, rows: list[dict[str, Any]]) -> Path:
    path.unlink(missing_ok=True)
    with ShardWriter(path, schema) as writer:
        for row in rows:
            writer.append(row)
    return path


def raw_bytes(sample: dict[str, Any]) -> dict[str, Any]:
    """Arrays as bytes: NaN differs from itself, its bytes do not."""

    def plain(value: Any) -> Any:
        if isinstance(value, list):
            return [plain(each) for each in value]
        if isinstance(value, EncodedStream):
            record = Audio().encode_stream("", value)
            return bytes(record), record.tables
        if isinstance(value, EncodedImage):
            return value, value.shape
        is_array = isinstance(value, np.ndarray | np.generic)
        return (value.dtype, value.shape, value.tobytes()) if is_array else value

    return {name: plain(value) for name, value in sample.items()}


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(content=shards())
def test_any_samples_round_trip_and_verify(tmp_path: Path, content: Content) -> None:
    schema, rows = content
    path = write(tmp_path / "a.shard", schema, rows)
    with ShardReader(path) as reader:
        assert reader.schema == schema
        assert list(map(raw_bytes, reader)) == list(map(raw_bytes, rows))
    assert verify_shard(path) == []


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=30)
@given(content=shards())
def test_bytes_do_not_depend_on_key_order(tmp_path: Path, content: Content) -> None:
    schema, rows = content
    first = write(tmp_path / "a.shard", schema, rows).read_bytes()
    turned = [{name: row[name] for name in reversed(row)} for row in rows]
    assert write(tmp_path / "b.shard", schema, turned).read_bytes() == first


@pytest.mark.usefixtures("tiny_buffers")
def test_tables_of_streams_that_wait_in_files_are_read_whole(tmp_path: Path) -> None:
    written = write_media(tmp_path / "a.shard", 60, mean_bytes=9)
    with ShardReader(tmp_path / "a.shard") as reader:
        assert all(map(same_sample, reader, written))
    assert verify_shard(tmp_path / "a.shard") == []


@pytest.mark.usefixtures("tiny_buffers")
@pytest.mark.parametrize("n", [0, 1, 3, 60])
def test_sections_that_stream_or_wait_in_files_are_read_whole(tmp_path: Path, n: int) -> None:
    path = write_shard(tmp_path / "a.shard", n)
    with ShardReader(path) as reader:
        assert all(map(same_sample, reader, map(as_read, samples(n))))
        assert len(reader) == n
    assert verify_shard(path) == []


@pytest.mark.usefixtures("tiny_buffers")
def test_waiting_sections_leave_memory_for_unlinked_files(tmp_path: Path) -> None:
    writer = ShardWriter(tmp_path / "a.shard", EVERY_FIELD)
    most = 0
    for sample in samples(80):
        writer.append(sample)
        most = max(most, sum(buffer.n_in_memory for buffer in writer._all_buffers()))
    assert 5_000 < most < 20_000 + 15_000
    assert len(os.listdir(tmp_path)) == 1  # the hidden file; the others have no name
    writer.close()


@pytest.mark.usefixtures("tiny_buffers")
@pytest.mark.parametrize("largest", ["frames", "raw"])
def test_the_largest_section_streams_to_the_front(tmp_path: Path, largest: str) -> None:
    schema = Schema({"small": Array("int64"), "frames": Array("uint8", (3000,)), "raw": Bytes()})
    with ShardWriter(tmp_path / "a.shard", schema) as writer:
        for i in range(30):
            raw = bytes(9000 if largest == "raw" else 10)
            writer.append({"small": i, "frames": np.full(3000, i, np.uint8), "raw": raw})
    with ShardReader(tmp_path / "a.shard") as reader:
        first = min(reader.sections, key=lambda section: section.offset)
    assert first.name == ("payload" if largest == "raw" else "column")
    assert first.field in (1, 0xFFFF)


def test_pieces_are_whole_chunks_and_blocks() -> None:
    assert PIECE_BYTES % CHUNK_BYTES == _COPY_BYTES % BLOCK_BYTES == 0


def test_a_long_stream_is_read_whole_and_takes_no_memory_of_its_own(tmp_path: Path) -> None:
    stream = made_stream(1, 12, mean_bytes=1 << 20)  # more than STREAMING_BYTES
    schema = Schema({"video": Video()})
    with ShardWriter(tmp_path / "a.shard", schema) as writer:
        tracemalloc.start()
        try:
            writer.append({"video": stream})
            peak_bytes = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
    assert peak_bytes < 2 * PIECE_BYTES < len(stream.data)
    with ShardReader(tmp_path / "a.shard") as reader:
        assert bytes(reader[0]["video"].data[:]) == stream.data
    assert verify_shard(tmp_path / "a.shard") == []


@pytest.mark.usefixtures("tiny_buffers")
@pytest.mark.parametrize(("n_bytes", "largest"), [(100, "payload"), (50_000, "column")])
def test_the_longest_stream_or_column_is_first(tmp_path: Path, n_bytes: int, largest: str) -> None:
    schema = Schema({"video": Video(), "x": Array("uint8", (n_bytes,))})
    stream, x = made_stream(1, 12, mean_bytes=1_000), np.zeros(n_bytes, np.uint8)
    with ShardWriter(tmp_path / "a.shard", schema) as writer:
        writer.append({"video": stream, "x": x})
    with ShardReader(tmp_path / "a.shard") as reader:
        first = min(reader.sections, key=lambda section: section.offset)
        assert bytes(reader[0]["video"].data[:]) == stream.data
    assert first.name == largest


def test_a_stream_that_waits_for_a_dictionary_is_copied(tmp_path: Path) -> None:
    schema = Schema({"video": Video(), "text": Text(codec="zstd_dictionary")})
    stream = made_stream(1)
    given = bytearray(stream.data[:])
    with ShardWriter(tmp_path / "a.shard", schema) as writer:
        writer.append({"video": replace(stream, data=memoryview(given)), "text": "a"})
        given[:] = bytes(len(given))
    with ShardReader(tmp_path / "a.shard") as reader:
        assert bytes(reader[0]["video"].data[:]) == stream.data


def test_a_writer_counts_and_summarizes(tmp_path: Path) -> None:
    writer = ShardWriter(tmp_path / "a.shard", SIMPLE)
    assert (writer.n_samples, writer.n_bytes) == (0, 0)
    writer.append({"label": 1, "text": "four"})
    assert (writer.n_samples, writer.n_bytes) == (1, 12)
    assert repr(writer) == f"ShardWriter({str(tmp_path / 'a.shard')!r}: 1 samples so far)"
    summary = writer.close()
    assert repr(summary).startswith("ShardSummary(name='a.shard', n_samples=1, n_bytes=")
    assert (writer.n_samples, writer.n_bytes) == (1, 12)
    with ShardReader(tmp_path / "a.shard") as reader:
        assert summary.id == reader.id
    assert (summary.name, summary.n_samples) == ("a.shard", 1)
    assert summary.n_bytes == (tmp_path / "a.shard").stat().st_size


BAD_SAMPLES: list[tuple[Any, str]] = [
    ({}, r"fields missing: \['label', 'text'\]"),
    ({"label": 1}, r"fields missing: \['text'\]; a field that some samples lack is declared with"),
    ({"label": 1, "texts": "a"}, r"not in the schema: \['texts'\]; did you mean 'text'\?"),
    ({"label": 1, "text": "a", "x": 0, 3: 4}, r"'3'\]; leave them out, or add them to the schema"),
    ({"label": "1", "text": "a"}, "field 'label': expected int64"),
    ({"label": 1.5, "text": "a"}, "field 'label': expected int64"),
    ({"label": [1], "text": "a"}, "field 'label': expected shape"),
    ({"label": 1, "text": 5}, "field 'text': expected str, found int"),
    ({"label": 1, "text": "\ud800"}, "field 'text': the text is not valid"),
    ([1, "a"], "expected a mapping of fields, found list"),
    (None, "expected a mapping of fields, found NoneType"),
]


@pytest.mark.parametrize(("bad", "text"), BAD_SAMPLES)
def test_a_bad_sample_is_refused_without_a_trace(tmp_path: Path, bad: Any, text: str) -> None:
    good = [{"label": i, "text": str(i)} for i in range(3)]
    clean = write(tmp_path / "clean.shard", SIMPLE, good).read_bytes()
    with ShardWriter(tmp_path / "a.shard", SIMPLE) as writer:
        for sample in good:
            with pytest.raises(SchemaError, match=text) as caught:
                writer.append(bad)
            assert f"a.shard, sample {writer.n_samples}" in str(caught.value)
            writer.append(sample)
    assert (tmp_path / "a.shard").read_bytes() == clean


CALLS: list[tuple[Callable[[Any], Any], type[Exception], str]] = [
    (lambda writer: writer.append(label=1, text="a"), TypeError, "has no option 'label': write "),
    (lambda writer: writer.append("text", "a"), TypeError, "only sample by position; found 'a'"),
    (lambda writer: writer.append(), TypeError, r"needs sample: .* with a dict of all fields"),
    (lambda writer: writer.append([{}]), SchemaError, r"found list: write writer\.append\({"),
    (lambda writer: writer.write({}), AttributeError, r"no attribute 'write': write writer\.appe"),
    (lambda writer: writer.flush(), AttributeError, r"write writer\.close\(\)"),
]


@pytest.mark.parametrize("kind", [ShardWriter, DatasetWriter])
@pytest.mark.parametrize(("call", "error", "text"), CALLS)
def test_calls_of_other_writers_get_a_hint(
    tmp_path: Path, kind: Any, call: Callable[[Any], Any], error: type[Exception], text: str
) -> None:
    with kind(tmp_path / "a.shard", SIMPLE) as writer:
        with pytest.raises(error, match=text):
            call(writer)
        writer.append({"label": 1, "text": "a"})


def test_a_sample_is_copied_and_may_be_changed_after_it_was_appended(tmp_path: Path) -> None:
    schema = Schema({"x": Array("uint8", (100,)), "y": Array("uint8", (None,))})
    reused = np.zeros(100, np.uint8)
    with ShardWriter(tmp_path / "a.shard", schema) as writer:
        for i in range(5):
            reused[:] = i
            writer.append({"x": reused, "y": reused})
    with ShardReader(tmp_path / "a.shard") as reader:
        assert [int(s["x"][7]) for s in reader] == [int(s["y"][7]) for s in reader] == [*range(5)]


def test_a_value_whose_class_raises_is_refused_and_the_writer_goes_on(tmp_path: Path) -> None:
    class Lost:
        def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
            raise KeyError("lost")

    for name, shape in (("column", (2,)), ("varying", (None,)), ("large", (2000,))):
        schema = Schema({"x": Array("float64", shape)})
        with shardio.DatasetWriter(tmp_path / name, schema) as writer:
            with pytest.raises(SchemaError, match=r"sample 0: field 'x': .*Lost.*KeyError: 'lost'"):
                writer.append({"x": Lost()})
            writer.append({"x": np.zeros(shape[0] or 3)})
        with shardio.open(tmp_path / name) as dataset:
            assert len(dataset) == 1


def test_nothing_has_the_final_name_before_the_end(tmp_path: Path) -> None:
    with ShardWriter(tmp_path / "a.shard", SIMPLE) as writer:
        writer.append({"label": 1, "text": "a"})
        assert [name for name in os.listdir(tmp_path) if not name.startswith(".")] == []
        writer.close()
    assert os.listdir(tmp_path) == ["a.shard"]


@pytest.mark.usefixtures("tiny_buffers")
def test_an_exception_in_the_with_publishes_nothing_and_leaves_nothing(tmp_path: Path) -> None:
    with (
        pytest.raises(RuntimeError, match="mine"),
        ShardWriter(tmp_path / "a.shard", EVERY_FIELD) as writer,
    ):
        for sample in samples(20):
            writer.append(sample)
        raise RuntimeError("mine")
    assert os.listdir(tmp_path) == []


def test_abort_leaves_nothing_and_may_be_repeated(tmp_path: Path) -> None:
    with ShardWriter(tmp_path / "a.shard", SIMPLE) as writer:
        writer.append({"label": 1, "text": "a"})
        writer.abort()
        writer.abort()
    assert os.listdir(tmp_path) == []
    with pytest.raises(ClosedError, match=r"a\.shard: the writer is closed"):
        writer.close()
    with pytest.raises(ClosedError, match=r"a\.shard: the writer is closed; .*: write another"):
        writer.append({"label": 1, "text": "a"})


def test_a_shard_is_never_overwritten(tmp_path: Path) -> None:
    path = write_shard(tmp_path / "a.shard", 1)
    before = path.read_bytes()
    with pytest.raises(FileExistsError, match=r"a\.shard: already exists"):
        ShardWriter(path, SIMPLE)
    second = ShardWriter(tmp_path / "b.shard", SIMPLE)
    write_shard(tmp_path / "b.shard", 1)
    with pytest.raises(FileExistsError, match=r"b\.shard: already exists"):
        second.close()
    assert path.read_bytes() == (tmp_path / "b.shard").read_bytes() == before
    assert sorted(os.listdir(tmp_path)) == ["a.shard", "b.shard"]


def test_a_shard_has_the_suffix_of_shards(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match=r"a\.bin: .*must end in \.shard"):
        ShardWriter(tmp_path / "a.bin", SIMPLE)
    assert os.listdir(tmp_path) == []


def test_a_writer_takes_only_a_schema(tmp_path: Path) -> None:
    for wrong, text in (
        ({"label": Array("int64")}, r"found dict: write shardio\.Schema\(\{…\}\)$"),
        ([Text()], "^expected a shardio.Schema, found list$"),
    ):
        with pytest.raises(SchemaError, match=text):
            ShardWriter(tmp_path / "a.shard", wrong)  # type: ignore[arg-type]
    assert os.listdir(tmp_path) == []


def test_a_failed_append_ends_the_writer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = ShardWriter(tmp_path / "a.shard", SIMPLE)
    writer.append({"label": 1, "text": "a"})

    def fail(data: object) -> None:
        raise OSError("no")

    monkeypatch.setattr(writer._payload.index, "write", fail)
    with pytest.raises(OSError, match="no"):
        writer.append({"label": 2, "text": "b"})
    for use in (writer.close, lambda: writer.append({"label": 2, "text": "b"})):
        with pytest.raises(ClosedError, match=r"a\.shard: the writer is closed"):
            use()
    assert os.listdir(tmp_path) == []
    assert writer.n_samples == 1


_FILL_THE_DISK = """
import os, resource, sys
sys.path.insert(0, {root!r})
from shardio.shard import writer as w
from shardio.format.types import Array, Bytes
from shardio.format.schema import Schema
w.STREAMING_BYTES, w.MEMORY_BYTES = 50_000, 50_000
limit = int(sys.argv[2])
resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
schema = Schema({{"x": Array("uint8", (3000,)), "y": Array("uint8", (2500,)), "z": Bytes()}})
try:
    with w.ShardWriter(sys.argv[1], schema) as writer:
        for i in range(100):
            writer.append({{"x": [i] * 3000, "y": [i] * 2500, "z": os.urandom(2000)}})
except OSError as error:
    print(type(error).__name__, error.errno, os.listdir(os.path.dirname(sys.argv[1])))
"""


@pytest.mark.parametrize("limit", [4096, 100_000, 270_000, 400_000, 900_000])
def test_a_full_disk_is_reported_and_leaves_nothing(tmp_path: Path, limit: int) -> None:
    root = str(Path(__file__).resolve().parents[2])
    code = _FILL_THE_DISK.format(root=root)
    command = [sys.executable, "-c", code, str(tmp_path / "a.shard"), str(limit)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    if limit < 900_000:
        assert done.stdout == "OSError 27 []\n"  # EFBIG: the limit stands in for a full disk
    else:
        assert done.stdout == ""
        assert verify_shard(tmp_path / "a.shard") == []
    assert done.stderr == ""


def test_a_missing_folder_is_an_error_of_the_system(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError) as caught:
        ShardWriter(tmp_path / "nowhere" / "a.shard", SIMPLE)
    assert str(tmp_path / "nowhere") in str(caught.value.filename)
    assert os.listdir(tmp_path) == []


def test_writing_to_a_relative_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with ShardWriter("a.shard", EVERY_FIELD) as writer:
        writer.append(every_field_sample(1))
    assert os.listdir(tmp_path) == ["a.shard"]
