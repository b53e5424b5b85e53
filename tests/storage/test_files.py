"""A file is known again by device, inode and size, and looked at before its map is touched."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from shardio.errors import ShardChanged
from shardio.storage.file_access import FileState, check_length


@pytest.fixture
def path(tmp_path: Path) -> Path:
    place = tmp_path / "a.shard"
    place.write_bytes(bytes(5000))
    return place


def state(path: Path) -> FileState:
    return FileState.of(os.stat(path))


def replace(path: Path) -> None:
    other = path.with_name("other")
    other.write_bytes(bytes(100))
    os.rename(other, path)


@pytest.mark.parametrize(
    ("change", "code", "words"),
    [
        pytest.param(replace, "replaced", "replaced by another one", id="replaced"),
        pytest.param(lambda p: os.truncate(p, 10), "file_size", "cut short", id="shorter"),
        pytest.param(lambda p: os.truncate(p, 9999), "file_size", "made longer", id="longer"),
    ],
)
def test_another_file_or_size_is_refused(path: Path, change: Any, code: str, words: str) -> None:
    opened = state(path)
    change(path)
    with pytest.raises(ShardChanged, match=words) as caught:
        opened.check(state(path), str(path))
    assert (caught.value.code, caught.value.path) == (code, str(path))
    assert caught.value.expected != caught.value.found


def test_the_same_file_is_accepted_whenever_it_was_written_to(path: Path) -> None:
    opened = state(path)
    os.utime(path, (1, 1))
    assert state(path) != opened
    opened.check(state(path), str(path))


def test_a_mapped_file_may_be_deleted_or_replaced_or_grow_but_not_shrink(path: Path) -> None:
    opened = state(path)
    os.truncate(path, 9999)
    check_length(str(path), opened)
    os.truncate(path, 4999)
    with pytest.raises(ShardChanged, match="cut short") as caught:
        check_length(str(path), opened)
    assert (caught.value.expected, caught.value.found) == (5000, 4999)
    replace(path)
    check_length(str(path), opened)
    path.unlink()
    check_length(str(path), opened)


def test_an_error_takes_only_the_places_that_it_does_not_have() -> None:
    error = ShardChanged("cut", code="file_size", path="a", sample=3)
    assert error.at(field="x", sample=9, offset=7, section="column") is error
    assert (error.field, error.sample, error.offset, error.section) == ("x", 3, 7, "column")
    assert str(error) == "a: cut, section 'column', field 'x', sample 3, offset 7"
