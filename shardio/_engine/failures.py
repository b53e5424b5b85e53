"""What a function of the user raises: what the loop gets of it, whatever class it is of."""

from __future__ import annotations

import pickle
import traceback

from shardio._engine.wire import pack_error, unpack_error
from shardio.errors import TransformError


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
