"""A file that is read by offset: the same bytes as a map gives, and errors where a map kills."""

from __future__ import annotations

import errno
import os
import resource
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardio.errors import ShardChanged, ShardIncomplete, ShardNotFound
from shardio.storage import content
from shardio.storage.content import PreadFile
from shardio.storage.file_access import open_shard as open_shard_for_real
from tests.limits import n_open

N_BYTES = 600_000
CONTENT = np.random.default_rng(0).integers(0, 256, N_BYTES, np.uint8)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    place = tmp_path / "a.shard"
    place.write_bytes(CONTENT.tobytes())
    return place


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> PreadFile:
    place = tmp_path_factory.mktemp("pread") / "a.shard"
    place.write_bytes(CONTENT.tobytes())
    return PreadFile(str(place))


@pytest.fixture(autouse=True)
def _nobody_elses() -> Iterator[None]:
    """Exclude the files that other tests keep open."""
    content._files_with_descriptor.clear()
    yield


# The bytes.


@given(st.integers(0, N_BYTES + 10), st.integers(0, N_BYTES + 10))
def test_a_slice_is_that_part_of_the_file(shared: PreadFile, start: int, stop: int) -> None:
    part = shared[start:stop]
    assert bytes(part) == CONTENT[start:stop].tobytes()
    assert part.readonly


@given(
    row_bytes=st.sampled_from([1, 8, 100, 2047, 2048, 2100, 9000]),
    padding=st.sampled_from([0, 28]),
    offset=st.sampled_from([0, 4096]),
    numbers=st.lists(st.integers(0, 10_000), max_size=80),
    in_sequence=st.booleans(),
)
@settings(max_examples=150)
def test_rows_in_any_order_are_those_that_a_map_gives(
    shared: PreadFile,
    row_bytes: int,
    padding: int,
    offset: int,
    numbers: list[int],
    in_sequence: bool,  # noqa: FBT001  # hypothesis gives it by keyword
) -> None:
    stride = row_bytes + padding
    n_rows = (N_BYTES - offset) // stride
    rows = np.array([number % n_rows for number in numbers], np.int64)
    if in_sequence and len(rows):
        rows = np.arange(rows[0], min(n_rows, rows[0] + len(rows)))
    out = np.full((len(rows), row_bytes), 0xEE, np.uint8)
    shared.read_rows(offset, stride, rows, out)
    whole = CONTENT[offset : offset + n_rows * stride].reshape(n_rows, stride)
    assert np.array_equal(out, whole[rows, :row_bytes])


def count_calls(monkeypatch: pytest.MonkeyPatch, name: str) -> list[int]:
    """Record the offsets at which a function of `os` reads."""
    real, seen = getattr(os, name), list[int]()

    def counted(fd: int, what: Any, offset: int) -> Any:
        seen.append(offset)
        return real(fd, what, offset)

    monkeypatch.setattr(os, name, counted)
    return seen


@pytest.mark.parametrize(
    ("row_bytes", "stride", "rows", "n_calls"),
    [
        pytest.param(4096, 4096, [3, 4, 5, 6], 1, id="large, in sequence"),
        pytest.param(4096, 4096, [6, 4, 3, 5], 1, id="large, a sequence shuffled"),
        pytest.param(4096, 4096, [3, 5, 7], 3, id="large, apart"),
        pytest.param(4000, 4096, [3, 4], 2, id="large, padded"),
        pytest.param(8, 8, [9, 900, 13], 1, id="small, near"),
        pytest.param(8, 8, [0, 20_000], 2, id="small, far"),
        pytest.param(8, 8, [0, 20_000, 20_001, 1, 2, 3], 3, id="small, some near"),
    ],
)
def test_what_lies_together_is_read_by_one_call(
    shared: PreadFile,
    monkeypatch: pytest.MonkeyPatch,
    row_bytes: int,
    stride: int,
    rows: list[int],
    n_calls: int,
) -> None:
    seen = count_calls(monkeypatch, "preadv")
    shared.read_rows(0, stride, np.array(rows), np.empty((len(rows), row_bytes), np.uint8))
    assert len(seen) == n_calls


def test_many_buffers_are_filled(shared: PreadFile, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(content, "_MAX_BUFFERS", 3)
    rows = np.arange(8)[::-1].copy()
    out = np.empty((8, 4096), np.uint8)
    shared.read_rows(0, 4096, rows, out)
    assert np.array_equal(out, CONTENT[: 8 * 4096].reshape(8, 4096)[::-1])


@pytest.mark.parametrize("most", [1, 7, 5000])
def test_short_reads_repeat(shared: PreadFile, monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    one, many = os.pread, os.preadv
    monkeypatch.setattr(os, "pread", lambda fd, n, at: one(fd, min(n, most), at))
    monkeypatch.setattr(os, "preadv", lambda fd, views, at: many(fd, [views[0][:most]], at))
    assert bytes(shared[10:20_000]) == CONTENT[10:20_000].tobytes()
    rows = np.array([2, 1, 0, 7])
    out = np.empty((4, 4096), np.uint8)
    shared.read_rows(0, 4096, rows, out)
    assert np.array_equal(out, CONTENT[: 8 * 4096].reshape(8, 4096)[rows])


# Files that change.


def test_truncation_is_located_and_the_rest_is_read(path: Path) -> None:
    file = PreadFile(str(path))
    os.truncate(path, 100_000)
    with pytest.raises(ShardChanged, match="cut short while it was in use") as caught:
        file[99_000:101_000]
    error = caught.value
    assert (error.code, error.path, error.offset) == ("file_size", str(path), 100_000)
    assert (error.expected, error.found) == (N_BYTES, 100_000)
    assert bytes(file[99_000:100_000]) == CONTENT[99_000:100_000].tobytes()


@pytest.mark.parametrize(
    ("row_bytes", "rows", "first_lost"),
    [
        pytest.param(4096, [3, 24, 25, 30], 24, id="large"),  # row 24 is cut through
        pytest.param(4096, [22, 23, 24, 25], 24, id="large, in sequence"),
        pytest.param(1000, [98, 101, 99, 100], 100, id="small"),
    ],
)
def test_first_lost_row_named(path: Path, row_bytes: int, rows: list[int], first_lost: int) -> None:
    file = PreadFile(str(path))
    os.truncate(path, 100_000)
    out = np.empty((len(rows), row_bytes), np.uint8)
    with pytest.raises(ShardChanged) as caught:
        file.read_rows(0, row_bytes, np.array(rows), out)
    assert caught.value.sample == first_lost


def test_file_short_for_a_moment_is_refused(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = PreadFile(str(path))
    monkeypatch.setattr(os, "pread", lambda *_: b"")
    monkeypatch.setattr(os, "preadv", lambda *_: 0)
    with pytest.raises(ShardChanged, match="and restored") as caught:
        file[5000:6000]
    assert (caught.value.code, caught.value.offset) == ("changed", 5000)


def reopened(path: Path, change: Callable[[], object]) -> PreadFile:
    """Return a file that has to be opened again for its next read, after a change."""
    file = PreadFile(str(path))
    assert content._evict_descriptor()
    change()
    return file


def test_reopening_refuses_another_shard(path: Path) -> None:
    other = CONTENT.copy()
    other[60] ^= 1  # in the header, whose id follows from all content
    with pytest.raises(ShardChanged, match="replaced by another shard") as caught:
        reopened(path, lambda: path.write_bytes(other.tobytes()))[:10]
    assert (caught.value.code, caught.value.path) == ("replaced", str(path))


def test_a_copy_of_the_same_shard_is_accepted_when_the_file_is_opened_again(path: Path) -> None:
    def restore() -> None:
        copy = shutil.copy(path, path.with_name("copy"))
        os.rename(copy, path)  # another inode, another time

    assert bytes(reopened(path, restore)[5:10]) == CONTENT[5:10].tobytes()


def test_a_file_that_was_cut_short_is_refused_when_it_is_opened_again(path: Path) -> None:
    with pytest.raises(ShardChanged, match="cut short") as caught:
        reopened(path, lambda: os.truncate(path, 5000))[:10]
    assert (caught.value.code, caught.value.found) == ("file_size", 5000)


def test_a_file_that_was_deleted_cannot_be_opened_again(path: Path) -> None:
    with pytest.raises(ShardNotFound, match=r"a\.shard: there is no such shard"):
        reopened(path, path.unlink)[:10]


# Calls that fail.


def failing(monkeypatch: pytest.MonkeyPatch, name: str, code: int, n_times: int) -> None:
    """Make the next calls of a function of `os` fail."""
    real, left = getattr(os, name), [n_times]

    def fail(*arguments: Any) -> Any:
        if left[0]:
            left[0] -= 1
            raise OSError(code, os.strerror(code))
        return real(*arguments)

    monkeypatch.setattr(os, name, fail)


def read_slice(file: PreadFile) -> bytes:
    return bytes(file[:4096])


def read_row(file: PreadFile) -> bytes:
    out = np.empty((1, 4096), np.uint8)
    file.read_rows(0, 4096, np.array([0]), out)
    return out.tobytes()


Read = Callable[[PreadFile], bytes]
READS = pytest.mark.parametrize(
    ("read", "name"), [(read_slice, "pread"), (read_row, "preadv")], ids=["slice", "row"]
)


@READS
def test_estale_reopens(path: Path, monkeypatch: pytest.MonkeyPatch, read: Read, name: str) -> None:
    file = PreadFile(str(path))
    failing(monkeypatch, name, errno.ESTALE, 1)
    assert read(file) == CONTENT[:4096].tobytes()
    failing(monkeypatch, "preadv", errno.ESTALE, 3)
    if name == "pread":
        failing(monkeypatch, name, errno.ESTALE, 1)
    with pytest.raises(OSError, match="a.shard") as caught:
        read(file)
    assert caught.value.errno == errno.ESTALE


@READS
def test_eio_names_file(path: Path, monkeypatch: pytest.MonkeyPatch, read: Read, name: str) -> None:
    file = PreadFile(str(path))
    failing(monkeypatch, name, errno.EIO, 1)
    with pytest.raises(OSError, match="Input/output error") as caught:
        read(file)
    assert caught.value.filename == str(path)


@pytest.mark.parametrize(
    ("make", "error"),
    [(lambda p: p.touch(), ShardIncomplete), (lambda p: p.mkdir(), ShardNotFound)],
)
def test_non_file_leaves_no_descriptor(tmp_path: Path, make: Any, error: type[Exception]) -> None:
    place = tmp_path / "b.shard"
    make(place)
    with pytest.raises(error) as caught:
        PreadFile(str(place))
    assert str(caught.value).startswith(f"{place}: ")
    assert n_open(tmp_path) == 0


# Descriptors.


@pytest.fixture
def many(tmp_path: Path) -> list[Path]:
    places = [tmp_path / f"{i}.shard" for i in range(12)]
    for i, place in enumerate(places):
        place.write_bytes(bytes([i]) * 500)
    return places


def test_open_files_are_bounded(many: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (20, 20))
    files = [PreadFile(str(place)) for place in many]
    for _ in range(2):
        for i, file in enumerate(files):
            assert bytes(file[100:103]) == bytes([i]) * 3
            assert n_open(many[0].parent) <= 5


@pytest.mark.parametrize(
    ("soft", "most"), [(1024, 256), (8, 4), (1 << 20, 4096), (resource.RLIM_INFINITY, 4096)]
)
def test_share_follows_process_limit(monkeypatch: pytest.MonkeyPatch, soft: int, most: int) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (soft, soft))
    assert content._max_open() == most


def test_emfile_evicts_a_descriptor(many: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    files = [PreadFile(str(place)) for place in many[:3]]
    real, failures = open_shard_for_real, [2]

    def open_shard(path: str, name: str = "") -> int:
        if failures[0]:
            failures[0] -= 1
            raise OSError(errno.EMFILE, "Too many open files", path)
        return real(path, name)

    monkeypatch.setattr(content, "open_shard", open_shard)
    last = PreadFile(str(many[5]))
    assert n_open(many[0].parent) == 2
    assert [bytes(file[:1]) for file in (*files, last)] == [b"\0", b"\1", b"\2", b"\5"]
    failures[0] = 99
    with pytest.raises(OSError, match="Too many open files"):
        PreadFile(str(many[6]))


def test_a_descriptor_goes_with_its_file_and_not_during_a_read(path: Path) -> None:
    file = PreadFile(str(path))
    reading = file._descriptor
    assert reading is not None
    assert content._evict_descriptor()
    assert os.pread(reading.fd, 3, 0) == CONTENT[:3].tobytes()
    del reading
    assert n_open(path) == 0
    assert bytes(file[:3]) == CONTENT[:3].tobytes()
    assert n_open(path) == 1
    del file
    assert n_open(path) == 0


def test_relative_path_survives_chdir(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(path.parent)
    file = PreadFile(path.name)
    assert content._evict_descriptor()
    monkeypatch.chdir("/")
    assert bytes(file[:3]) == CONTENT[:3].tobytes()
    assert file.path == path.name
