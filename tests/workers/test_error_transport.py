from __future__ import annotations

import errno
import pickle
import sys
import threading
from typing import Any, NoReturn

import pytest

from shardio._workers.processes.serialization import MAX_ERROR_BYTES as LIMIT
from shardio._workers.processes.serialization import pack_error, unpack_error
from shardio.errors import ChecksumMismatch, InsufficientMemory, ShardioError, TransformError


class ThreeArgumentsError(Exception):
    """Can be pickled, and not unpickled: its arguments are not those of its constructor."""

    def __init__(self, a: int, b: int, c: int) -> None:
        super().__init__(f"{a}-{b}-{c}")


class LockedError(Exception):
    def __init__(self) -> None:
        super().__init__("locked")
        self.lock = threading.Lock()


class UnspeakableError(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")

    def __reduce__(self) -> NoReturn:
        raise RuntimeError("no pickle")


class ExitingError(Exception):
    def __reduce__(self) -> Any:
        return sys.exit, (3,)


class DisguisedError(Exception):
    def __reduce__(self) -> Any:
        return str, ("no exception at all",)


def sent(error: BaseException) -> BaseException:
    packed = pack_error(error)
    assert len(packed) <= LIMIT
    return unpack_error(packed)


@pytest.mark.parametrize(
    "error",
    [
        ValueError("text", 3),
        KeyError("a"),
        OSError(errno.ENOSPC, "disk full", "/a/file"),
        UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid"),
        InsufficientMemory("short"),
        TransformError("größe\n名前"),
        SystemExit(3),
    ],
    ids=lambda error: type(error).__name__,
)
def test_an_exception_arrives_with_type_and_arguments(error: BaseException) -> None:
    found = sent(error)
    assert type(found) is type(error)
    assert found.args == error.args
    assert str(found) == str(error)
    assert found.__cause__ is None


def test_attributes_and_notes_arrive() -> None:
    error: Any = ValueError("text")
    error.code = 7
    error.add_note("a note")
    assert vars(sent(error)) == {"code": 7, "__notes__": ["a note"]}


def test_an_error_of_a_shard_arrives_with_its_place() -> None:
    error = ChecksumMismatch(
        "text", code="checksum", path="/a", field="x", sample=7, offset=4096, expected="0", found=1
    )
    found = sent(error)
    assert isinstance(found, ChecksumMismatch)
    assert vars(found) == vars(error)
    assert str(found) == str(error)


def with_cause(cause: BaseException) -> TransformError:
    error = TransformError("the transform raised")
    error.__cause__ = cause
    return error


def test_the_cause_arrives_too() -> None:
    class LocalError(Exception):
        pass

    found = sent(with_cause(LocalError("mine")))
    assert isinstance(found, TransformError)
    assert (type(found.__cause__).__name__, str(found.__cause__)) == ("LocalError", "mine")


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (ThreeArgumentsError(1, 2, 3), "ThreeArgumentsError: 1-2-3"),
        (LockedError(), "LockedError: locked"),
        (UnspeakableError(), "UnspeakableError: <exception str() failed>"),
        (ExitingError("exits"), "ExitingError: exits"),
        (DisguisedError("disguised"), "DisguisedError: disguised"),
        (AssertionError(threading.Lock()), "AssertionError: <unlocked"),
        (ValueError("x" * 3_000_000), "ValueError: xxx"),
        (ThreeArgumentsError(1, 2, 10**4000), "ThreeArgumentsError: 1-2-1000"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_an_exception_that_cannot_travel_arrives_as_text(error: BaseException, text: str) -> None:
    found = sent(error)
    assert type(found) is TransformError
    assert text in str(found)
    found = sent(with_cause(error))
    assert type(found) is TransformError
    assert str(found) == "the transform raised"
    assert found.__cause__ is None


@pytest.mark.parametrize("letter", ["x", "é", "名", "😀"])
@pytest.mark.parametrize("n", [LIMIT // 8 + 1, LIMIT, 3_000_000])
def test_a_huge_text_arrives_cut_in_its_middle(letter: str, n: int) -> None:
    found = sent(TransformError(f"begin {letter * n} end"))
    assert isinstance(found, TransformError)
    assert str(found).startswith(f"begin {letter}")
    assert str(found).endswith(f"{letter} end")


def test_a_text_that_just_fits_arrives_whole() -> None:
    assert len(str(sent(TransformError("x" * (LIMIT - 200))))) == LIMIT - 200


@pytest.mark.parametrize("packed", [b"", b"garbage", pickle.dumps(3), pickle.dumps((3, 4))])
def test_bytes_that_hold_no_exception_become_one_that_says_so(packed: bytes) -> None:
    found = unpack_error(packed)
    assert isinstance(found, ShardioError)
    assert "a worker failed" in str(found)
