"""What a function of the user raises: what the loop gets of it, whatever class it is of."""

from __future__ import annotations

import pickle
import traceback
from reprlib import Repr
from typing import Any, Final

import cloudpickle  # type: ignore[import-untyped]  # it has no annotations

from shardio._workers.processes.channel import MAX_MESSAGE_BYTES
from shardio.errors import TransformError

MAX_ERROR_BYTES: Final = MAX_MESSAGE_BYTES - 32
"""The longest packed error: it travels in one message, behind a descriptor of `wire`."""


def pack_error(error: BaseException) -> bytes:
    """Pickle an exception and its cause, in at most MAX_ERROR_BYTES.

    An exception that cannot be pickled, or is too large, becomes a TransformError with its text.
    """
    limit = MAX_ERROR_BYTES
    for cause in (error.__cause__, None):
        packed = _pack(error, cause)
        if packed is not None and len(packed) <= limit:
            return packed
    text = _described(error)
    if len(text) > limit // 8:
        text = f"{text[: limit // 16]}\n[…]\n{text[-limit // 16 :]}"
    return pickle.dumps((TransformError(text), None))


def _pack(error: BaseException, cause: BaseException | None) -> bytes | None:
    """Pickle an error and its cause; None if they cannot be unpickled as exceptions."""
    try:
        packed: bytes = cloudpickle.dumps((error, cause))
        found, found_cause = pickle.loads(packed)
    except BaseException:  # noqa: BLE001  # user classes fail in any way they like, or exit
        return None
    are_errors = isinstance(found, BaseException) and isinstance(found_cause, BaseException | None)
    return packed if are_errors else None


def _described(error: BaseException) -> str:
    """Return an exception's message, with its type unless it is a TransformError."""
    if isinstance(error, TransformError):
        return str(error)
    return "".join(traceback.format_exception_only(type(error), error)).strip()


def unpack_error(packed: bytes) -> BaseException:
    """The exception that a worker sent, with its cause."""
    try:
        found: BaseException
        found, found.__cause__ = pickle.loads(packed)  # from our own worker, never from data
    except Exception as failure:  # noqa: BLE001  # user classes fail in any way they like
        return TransformError(f"a worker failed, and its exception cannot be unpickled: {failure}")
    return found


def pack_failure(error: BaseException, is_called: str) -> bytes:
    """An exception and its traceback, for `unpack_failure`."""
    frames = error.__traceback__
    text = "".join(traceback.format_exception(type(error), error, frames and frames.tb_next))
    return pickle.dumps((pack_error(as_failure(error, is_called)), text))


def unpack_failure(failure: bytes | memoryview, where: str) -> BaseException:
    """What the function raised; with a note that says where."""
    # From our own worker, never from data.
    packed_error, text = pickle.loads(failure)
    error = unpack_error(packed_error)
    add_note(error, f"in {where}:\n\n{text}")
    return error


def as_failure(error: BaseException, is_called: str) -> Exception:
    """The exception itself, or a TransformError, caused by it, for one that would end more.

    That is `sys.exit`, and what ends loops and generators.
    """
    if isinstance(error, Exception) and not isinstance(error, StopIteration | StopAsyncIteration):
        return error
    text = text_of(error)
    said = f": {text}" if text else ""
    failure = TransformError(f"{is_called} raised {type(error).__name__}{said}")
    failure.__cause__ = error
    return failure


def add_note(error: BaseException, note: str) -> None:
    """Have an exception say more, also one that refuses, as a frozen dataclass does."""
    vars(error).setdefault("__notes__", []).append(note)


def text_of(error: BaseException) -> str:
    """What an exception says, also where that fails."""
    try:
        return str(error)
    except Exception as failure:  # noqa: BLE001  # user classes fail in any way they like
        return f"<its text cannot be had: {type(failure).__name__}>"


_repr = Repr()
_repr.maxstring = _repr.maxother = 120


def shortened(value: Any) -> str:
    """What a value is, in a message: its repr, cut in the middle where it is long."""
    return _repr.repr(value)
