"""ShardReader: samples, columns and records of one shard, checked when they are met."""

from __future__ import annotations

import gc
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardio import Array, EncodedStream, Schema, Text
from shardio.errors import (
    ChecksumMismatch,
    ClosedError,
    InvalidArgument,
    ShardIncomplete,
    ShardNotFound,
)
from shardio.shard.reader import ShardReader
from tests.shards import (
    EVERY_FIELD,
    as_read,
    every_field_sample,
    flip,
    same_sample,
    write_media,
    write_samples,
    write_shard,
)

N = 40


@pytest.fixture(scope="module")
def shard(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_shard(tmp_path_factory.mktemp("shard") / "a.shard", N)


def mapped(path: Path) -> bool:
    return str(path) in Path("/proc/self/maps").read_text()


def damage(path: Path, name: str, row: int) -> None:
    """Change the first byte that a shard holds of a sample's field."""
    with ShardReader(path, verify="off") as reader:
        if name in reader.schema.columns:
            section = reader.column_section(name)
            at = section.offset + row * section.stride
        else:
            payload = next(s for s in reader.sections if s.name == "payload")
            at = payload.offset + int(reader.records.entries(name, np.array([row]))["offset"][0])
    flip(path, at, mask=8)


@pytest.mark.parametrize("verify", ["off", "first", "always"])
def test_every_sample_is_read_as_it_was_written(shard: Path, verify: Any) -> None:
    with ShardReader(shard, verify=verify) as reader:
        for _ in range(2):
            for row in range(N):
                assert same_sample(reader[row], as_read(every_field_sample(row)))


def test_a_reader_describes_its_shard(shard: Path) -> None:
    with ShardReader(shard) as reader:
        assert (
            repr(reader) == f"ShardReader({str(shard)!r}: {N} samples of {len(EVERY_FIELD)} fields)"
        )
        assert (reader.path, len(reader), reader.access) == (str(shard), N, "mmap")
        assert reader.schema == EVERY_FIELD
        assert (len(reader.id), reader.header.n_samples) == (32, N)
        assert reader.header.file_size == shard.stat().st_size
        ends = [section.end for section in reader.sections]
        assert [section.offset for section in reader.sections] == [4096, *ends[:-1]]
        assert ends[-1] == reader.header.table_offset
        assert reader.sections[-1].name == "schema"
    with ShardReader(shard, access="pread") as reader:
        assert reader.access == "pread"
        assert not mapped(shard)


def length_of(value: Any, field: Any) -> int:
    if value is None:
        return 0
    if isinstance(value, EncodedStream):
        return value.n_frames
    if isinstance(value, np.ndarray) and None not in field.array.shape:
        return int(value.nbytes)
    return len(value.encode() if isinstance(value, str) else value)


def check_lengths(path: Path) -> None:
    with ShardReader(path) as reader:
        for name in reader.schema.records:
            field = reader.schema[name]
            sizes, lengths = reader.stored_sizes(name), reader.lengths(name)
            assert lengths.dtype == sizes.dtype == np.int64
            if not (field.is_json or field.item):
                values = (reader.sample(row, [name])[name] for row in range(N))
                assert lengths.tolist() == [length_of(value, field) for value in values], name
            if field.codec == "raw" and (field.is_utf8 or field.is_opaque):
                assert sizes.tolist() == lengths.tolist(), name
            picked = [N - 1, 0, -1]
            assert reader.lengths(name, picked).tolist() == lengths[picked].tolist()
            assert reader.stored_sizes(name, picked).tolist() == sizes[picked].tolist()


def test_lengths_and_sizes_of_records_are_those_of_their_values(
    shard: Path, tmp_path: Path
) -> None:
    check_lengths(shard)
    write_media(tmp_path / "media.shard", N)
    check_lengths(tmp_path / "media.shard")


def test_lengths_of_columns_and_of_rows_that_are_not_there_are_refused(shard: Path) -> None:
    with ShardReader(shard) as reader:
        for use in (reader.lengths, reader.stored_sizes):
            with pytest.raises(InvalidArgument, match="'label' is not stored as records; fields"):
                use("label")
            with pytest.raises(IndexError, match="out of range"):
                use("blob", [N])


def test_a_field_that_a_shard_lacks_is_refused_by_name(shard: Path) -> None:
    with ShardReader(shard) as reader:
        for use in (
            lambda: reader.sample(0, ["label", "nothing"]),
            lambda: reader.present("nothing"),
        ):
            with pytest.raises(
                InvalidArgument, match=r"a\.shard: no field 'nothing'; fields: .*note"
            ):
                use()
        for row in (N, -N - 1):
            with pytest.raises(IndexError, match=r"a\.shard: a row is out of range of 40"):
                reader.present("hint", [row])
        assert list(reader.sample(0, ["note", "label"])) == ["note", "label"]


def test_rows_count_from_the_end_too_and_may_be_numpy_integers(shard: Path) -> None:
    with ShardReader(shard) as reader:
        for row in (-1, -N, np.int64(3), np.uint8(4)):
            assert same_sample(reader[row], reader[int(row) % N])  # type: ignore[index]


@pytest.mark.parametrize(
    ("row", "error", "message"),
    [
        *((row, IndexError, r"a\.shard: row .* of 40") for row in (N, -N - 1, 1 << 70)),
        *((row, TypeError, "integer") for row in (1.0, "1", None, slice(2))),
    ],
)
def test_a_bad_row_is_an_error(shard: Path, row: Any, error: type[Exception], message: str) -> None:
    with ShardReader(shard) as reader, pytest.raises(error, match=message) as caught:
        reader[row]
    assert error is TypeError or f"a.shard: row {row} of 40" in str(caught.value)


def test_arrays_that_lie_raw_in_the_file_are_views_and_cannot_be_written(shard: Path) -> None:
    with ShardReader(shard) as reader:
        sample = reader[7]
        for array in (*sample["boxes"], *sample["parts"]):
            assert not array.flags.writeable
    for name, field in EVERY_FIELD.items():
        if isinstance(field, Array) and field.shape:
            assert not sample[name].flags.writeable
            assert sample[name].flags.c_contiguous
            if field.codec == "raw":
                assert not sample[name].flags.owndata
                address = sample[name].__array_interface__["data"][0]
                is_large = not field.is_fixed or field.stride >= 64
                assert address % (64 if is_large else field.numpy.itemsize) == 0


COLUMNS = list(EVERY_FIELD.columns)


@pytest.mark.parametrize("name", COLUMNS)
@pytest.mark.parametrize("rows", [[], [0], [5, -1, 5, 0], list(range(N))])
def test_rows_of_a_column_come_as_one_array(shard: Path, name: str, rows: list[int]) -> None:
    field = EVERY_FIELD.columns[name]
    shape = (len(rows), *(d for d in field.shape if d is not None))
    values = [every_field_sample(r % N)[name] for r in rows]
    expected = np.zeros(shape, field.numpy)
    for i, value in enumerate(values):
        expected[i] = 0 if value is None else value
    with ShardReader(shard) as reader:
        for given in (rows, np.array(rows, np.int16)):
            found = reader.column(name, given)
            assert found.dtype == field.numpy
            assert np.array_equal(found, expected)
        assert np.array_equal(reader.column(name)[rows], expected)
        assert reader.present(name, rows).tolist() == [value is not None for value in values]


def test_a_whole_column_is_a_read_only_view_of_the_map(shard: Path) -> None:
    with ShardReader(shard) as reader:
        whole = reader.column("frames")
        assert whole.shape == (N, 4, 24, 24, 3)
        assert np.shares_memory(whole, reader[3]["frames"])
        assert not whole.flags.writeable


@pytest.mark.parametrize(
    ("rows", "error", "message"),
    [
        *(
            (rows, IndexError, "out of range of 40")
            for rows in ([N], [-N - 1], np.array([1 << 63], np.uint64))
        ),
        *(
            (rows, InvalidArgument, "rows must be integer")
            for rows in ([1.5], [True, False], [[1, 2]], 3, ["1"])
        ),
    ],
)
def test_bad_rows_of_a_column(shard: Path, rows: Any, error: type[Exception], message: str) -> None:
    with ShardReader(shard) as reader, pytest.raises(error, match=message):
        reader.column("label", rows)


@pytest.mark.parametrize(
    ("name", "text"), [("note", "'note' is not a column"), ("nothing", "columns are: frames, odd")]
)
def test_what_is_no_column_is_refused(shard: Path, name: str, text: str) -> None:
    with ShardReader(shard) as reader, pytest.raises(InvalidArgument, match=text):
        reader.column(name)


@pytest.mark.parametrize("name", list(EVERY_FIELD))
def test_changed_bytes_are_refused_with_file_field_and_offset(tmp_path: Path, name: str) -> None:
    path = write_shard(tmp_path / "a.shard", 9)
    damage(path, name, 7)
    with ShardReader(path) as reader:
        with pytest.raises(ChecksumMismatch) as caught:
            reader[7]
        error = caught.value
    by_run = name in EVERY_FIELD.columns and name not in ("frames", "odd")
    assert (error.path, error.field, error.sample) == (str(path), name, 0 if by_run else 7)
    assert error.offset is not None and error.expected != error.found
    for part in (str(path), name, str(error.offset), str(error.expected), str(error.found)):
        assert part in str(error)


def test_the_other_samples_of_a_damaged_shard_can_be_read(tmp_path: Path) -> None:
    path = write_shard(tmp_path / "a.shard", 9)
    damage(path, "frames", 4)
    with ShardReader(path) as reader:
        for row in (0, 3, 5, 8):
            assert same_sample(reader[row], as_read(every_field_sample(row)))
        assert np.array_equal(reader.column("frames", [3])[0], every_field_sample(3)["frames"])
        with pytest.raises(ChecksumMismatch, match="sample 4") as caught:
            reader.column("frames", [3, 4])
        assert (caught.value.field, caught.value.path) == ("frames", str(path))
        assert caught.value.code == "checksum"
        assert np.array_equal(reader.column("frames", [5])[0], every_field_sample(5)["frames"])


def test_units_are_checked_once_always_or_never(tmp_path: Path) -> None:
    path = write_shard(tmp_path / "a.shard", 9)
    with (
        ShardReader(path, verify="first") as first,
        ShardReader(path, verify="always") as always,
        ShardReader(path, verify="off") as off,
    ):
        for reader in (first, always, off):
            assert same_sample(reader[4], as_read(every_field_sample(4)))
        damage(path, "frames", 4)
        damage(path, "raw", 4)
        wrong = [reader[4]["frames"] for reader in (first, off)]
        assert all(not np.array_equal(w, every_field_sample(4)["frames"]) for w in wrong)
        with pytest.raises(ChecksumMismatch, match="field 'frames'"):
            always[4]
        with pytest.raises(ChecksumMismatch, match="field 'frames'") as caught:
            always.column("frames")
        assert caught.value.sample == 4
        with pytest.raises(ChecksumMismatch, match="field 'raw'") as caught:
            next(always.records.values("raw", np.array([4])))
        assert caught.value.sample == 4


def test_what_is_no_index_of_a_reader_gets_a_hint(shard: Path) -> None:
    with ShardReader(shard) as reader:
        for index in ("label", [0], slice(2)):
            with pytest.raises(TypeError, match=r"reader\[i\] takes the integer .*column\(name\)"):
                reader[index]  # type: ignore[index]


def test_an_unknown_verification_is_refused(shard: Path) -> None:
    with pytest.raises(InvalidArgument, match="one of off, first, always; found 'never'"):
        ShardReader(shard, verify="never")  # type: ignore[arg-type]


def test_views_outlive_close(shard: Path) -> None:
    reader = ShardReader(shard)
    sample, column = reader[7], reader.column("frames")
    reader.close()
    reader.close()
    assert same_sample(sample, as_read(every_field_sample(7)))
    assert np.array_equal(column[7], sample["frames"])


def test_the_map_goes_with_the_last_view_of_it(tmp_path: Path) -> None:
    path = write_shard(tmp_path / "a.shard", 3)
    reader = ShardReader(path)
    view = reader[1]["frames"]
    reader.close()
    gc.collect()
    assert mapped(path)
    del view
    gc.collect()
    assert not mapped(path)


@pytest.mark.parametrize(
    "use",
    [
        lambda r: r[0],
        lambda r: r.column("label"),
        lambda r: r.column("label", [0]),
        lambda r: next(r.records.values("note", np.array([0]))),
        lambda r: r.records.entries("note", np.array([0])),
        lambda r: r.records.shapes("points", np.array([0])),
        lambda r: next(iter(r)),
        lambda r: r.present("label"),
        lambda r: r.sample(0, []),
        lambda r: r.sample(1 << 20, ["label"]),
    ],
    ids="row column rows values entries shapes iteration present none outside".split(),
)
def test_a_closed_reader_says_so(shard: Path, use: Any) -> None:
    reader = ShardReader(shard)
    reader.close()
    with pytest.raises(ClosedError, match=r"a\.shard: the reader is closed: decode values befor"):
        use(reader)


def test_what_is_no_file_is_not_found_and_an_empty_file_is_incomplete(tmp_path: Path) -> None:
    with pytest.raises(ShardNotFound, match="there is no such shard"):
        ShardReader(tmp_path / "a.shard")
    (tmp_path / "b.shard").touch()
    with pytest.raises(ShardIncomplete, match=r"b\.shard: the file is empty"):
        ShardReader(tmp_path / "b.shard")
    with pytest.raises(ShardNotFound, match="a shard is a file, and shardio.open opens the"):
        ShardReader(tmp_path)
    os.mkfifo(tmp_path / "c.shard")
    with pytest.raises(ShardNotFound, match="is a folder or device"):
        ShardReader(tmp_path / "c.shard")


PARTS = Schema(
    {
        "column": Array("float32", (50, 3)),
        "varying": Array("int16", (None, 2), optional=True),
        "packed": Array("int16", (8,), codec="zstd"),
        "note": Text(),
    }
)


@pytest.mark.parametrize("access", ["mmap", "pread"])
def test_a_part_of_an_array_is_read_without_the_rest(tmp_path: Path, access: Any) -> None:
    rng = np.random.default_rng(0)
    samples: list[dict[str, Any]] = [
        {
            "column": rng.random((50, 3), np.float32),
            "varying": rng.integers(0, 99, (20 * i, 2), np.int16) if i != 1 else None,
            "packed": np.zeros(8, np.int16),
            "note": "x" * i,
        }
        for i in range(3)
    ]
    path = write_samples(tmp_path / "a.shard", PARTS, samples)
    with ShardReader(path, access=access) as reader:
        assert reader.array_shape("column", 2) == (50, 3)
        assert [reader.array_shape("varying", i) for i in range(3)] == [(0, 2), None, (40, 2)]
        for name in ("column", "varying"):
            found = reader.array_part(name, 2, 7, 11)
            assert np.array_equal(found, samples[2][name][7:11]) and not found.flags.writeable
            assert np.array_equal(reader.array_part(name, -1, 7, 11), found)
            assert reader.array_part(name, 2, 5, 5).shape == (0, found.shape[1])
        for name, row, stop in (("column", 0, 51), ("varying", 1, 0), ("packed", 0, 2)):
            with pytest.raises(InvalidArgument, match="expected a part of an uncompressed array"):
                reader.array_part(name, row, 0, stop)
        with pytest.raises(
            InvalidArgument, match="'note' has no arrays; fields with arrays: .'col"
        ):
            reader.array_shape("note", 0)


def test_a_part_of_a_damaged_array_is_not_verified(tmp_path: Path) -> None:
    values = np.arange(3000, dtype=np.int64)
    schema = Schema({"x": Array("int64", (None,))})
    path = write_samples(tmp_path / "a.shard", schema, [{"x": values}])
    flip(path, path.read_bytes().index(values.tobytes()) + 8 * 2000)
    with ShardReader(path) as reader:
        assert np.array_equal(reader.array_part("x", 0, 0, 1000), values[:1000])
        with pytest.raises(ChecksumMismatch):
            reader[0]
