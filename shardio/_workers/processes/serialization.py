"""Serialization between the main process and its workers: functions, values and exceptions.

A function is sent in a memory file, together with the environment of the main process. Large arrays
are pickled out of band, so that their memory is copied only once. Everything that is unpickled here
comes from this program's own processes, never from stored data.
"""

from __future__ import annotations

import copyreg
import functools
import io
import mmap
import os
import pickle
import sys
import threading
import traceback
from collections.abc import Callable
from functools import partial
from reprlib import Repr
from types import CodeType, FunctionType, SimpleNamespace
from typing import Any, Final

import cloudpickle  # type: ignore[import-untyped]  # it has no annotations
import numpy as np

from shardio._workers.processes.linux import memory_file, read_umask
from shardio._workers.processes.worker_main import HEADER_BYTES, MAX_MESSAGE_BYTES
from shardio.errors import InvalidArgument, TransformError

MAX_ERROR_BYTES: Final = MAX_MESSAGE_BYTES - HEADER_BYTES
"""The maximum length of a packed error, which a message carries behind its header."""


def pack_error(error: BaseException) -> bytes:
    """Pickle an exception, and its cause if there is room, in at most MAX_ERROR_BYTES.

    An exception that cannot be packed is replaced by a TransformError with its shortened text.
    """
    limit = MAX_ERROR_BYTES
    for cause in (error.__cause__, None):
        packed = _pickle_error(error, cause)
        if packed is not None and len(packed) <= limit:
            return packed
    if isinstance(error, TransformError):
        text = str(error)
    else:
        text = "".join(traceback.format_exception_only(error)).strip()
    return pickle.dumps((TransformError(truncate_middle(text, limit // 8)), None))


def _pickle_error(error: BaseException, cause: BaseException | None) -> bytes | None:
    """Pickle an error and its cause; return None if unpickling would not restore both."""
    try:
        packed: bytes = cloudpickle.dumps((error, cause))
        found, found_cause = pickle.loads(packed)
    except BaseException:  # noqa: BLE001  # user classes may raise anything, or exit
        return None
    are_errors = isinstance(found, BaseException) and isinstance(found_cause, BaseException | None)
    return packed if are_errors else None


def unpack_error(packed: bytes) -> BaseException:
    try:
        found: BaseException
        found, found.__cause__ = pickle.loads(packed)
    except Exception as failure:  # noqa: BLE001  # user classes may raise anything
        return TransformError(f"a worker failed, and its exception cannot be unpickled: {failure}")
    return found


def pack_failure(error: BaseException, name: str) -> bytes:
    """Pack an exception that the function `name` has raised, and its traceback."""
    frames = error.__traceback__
    text = "".join(traceback.format_exception(type(error), error, frames and frames.tb_next))
    return pickle.dumps((pack_error(as_failure(error, name)), text))


def unpack_failure(failure: bytes | memoryview, where: str) -> BaseException:
    """Return the exception in `failure`, with a note that contains `where` and the traceback."""
    packed_error, text = pickle.loads(failure)
    error = unpack_error(packed_error)
    add_note(error, f"in {where}:\n\n{text}")
    return error


def as_failure(error: BaseException, name: str) -> Exception:
    """Return `error`; wrap a StopIteration, or a type outside of Exception, in a TransformError."""
    if isinstance(error, Exception) and not isinstance(error, StopIteration | StopAsyncIteration):
        return error
    text = text_of(error)
    message = f": {text}" if text else ""
    failure = TransformError(f"{name} raised {type(error).__name__}{message}")
    failure.__cause__ = error
    return failure


def add_note(error: BaseException, note: str) -> None:
    """Add a note to an exception, even if it is a frozen dataclass, where `add_note` would fail."""
    vars(error).setdefault("__notes__", []).append(note)


def text_of(error: BaseException) -> str:
    """Return an exception's message, even if its `__str__` fails."""
    try:
        return str(error)
    except Exception as failure:  # noqa: BLE001  # user classes may raise anything
        return f"<its text is not available: {type(failure).__name__}>"


_repr = Repr()
_repr.maxstring = _repr.maxother = 120


def truncate_middle(text: str, limit: int) -> str:
    """Return a text; replace its middle with an ellipsis if it exceeds `limit` characters."""
    half = limit // 2
    return text if len(text) <= limit else f"{text[:half]}\n[…]\n{text[-half:]}"


def short_repr(value: Any) -> str:
    return _repr.repr(value)


_PROTOCOL: Final = 5
# A pickler is reused (creating one takes 1.4 µs), but replaced after a longer pickle: its table of
# objects never shrinks, and takes 19 ms to clear after a value with a million objects.
_MAX_REUSED: Final = 64 << 10


class ValuePickler:
    """A reusable pickler that keeps arrays of `min_bytes` or more out of the pickle."""

    def __init__(self, min_bytes: int) -> None:
        reduce = functools.partial(_reduce_array, min_bytes)
        self._arrays = {np.ndarray: reduce, np.memmap: reduce}
        self._chunks: list[bytes] = []
        self._out_of_band: list[pickle.PickleBuffer] = []
        self._file = SimpleNamespace(write=self._chunks.append)
        self._reducers: dict[Any, Any] = {}
        self._pickler = self._new_pickler()

    def _new_pickler(self) -> pickle.Pickler:
        pickler = pickle.Pickler(self._file, _PROTOCOL, buffer_callback=self._out_of_band.append)
        # A table takes half the time of a `reducer_override` method, because pickle would call
        # that method for every object.
        pickler.dispatch_table = {**self._reducers, **self._arrays}
        return pickler

    def dumps(self, value: Any) -> tuple[bytes, list[pickle.PickleBuffer]]:
        """Return the pickle of a value, and the memory of its large arrays, not copied.

        Pickling a user's object may raise any exception.
        """
        if copyreg.dispatch_table != self._reducers:
            self._reducers = copyreg.dispatch_table.copy()
            self._pickler = self._new_pickler()
        try:
            try:
                self._pickler.dump(value)
            except Exception:  # noqa: BLE001  # cloudpickle supports the value, or raises as well
                self._chunks.clear()
                self._out_of_band.clear()
                _CloudPickler(self._file, self._arrays, self._out_of_band).dump(value)
            data = b"".join(self._chunks)
            if len(data) > _MAX_REUSED:
                self._pickler = self._new_pickler()
            return data, self._out_of_band.copy()
        finally:
            self._pickler.clear_memo()
            self._chunks.clear()
            self._out_of_band.clear()


def _reduce_code(code: CodeType) -> Any:
    """Reduce a function's code, but keep its file name, which cloudpickle 3.1.3 would replace."""
    make, parts = cloudpickle.Pickler.dispatch_table[CodeType](code)
    return make, tuple(code.co_filename if part == _DYNAMIC_CODE else part for part in parts)


_DYNAMIC_CODE: Final = "<dynamic-code>"
_DISPATCH_TABLE: Final = {**cloudpickle.Pickler.dispatch_table, CodeType: _reduce_code}


class _CloudPickler(cloudpickle.Pickler):  # type: ignore[misc]  # cloudpickle has no types
    def __init__(
        self, file: Any, arrays: dict[Any, Any], out_of_band: list[pickle.PickleBuffer]
    ) -> None:
        # Set the table first, because the __init__ of pickle.Pickler reads it.
        self.dispatch_table = {**_DISPATCH_TABLE, **arrays}
        super().__init__(file, _PROTOCOL, out_of_band.append)


def _reduce_array(min_bytes: int, array: Any) -> Any:
    """Reduce an array to shape, dtype and memory, in half the time that NumPy takes."""
    if type(array) is np.memmap:  # send an ordinary array with the values of the memory map
        array = array.view(np.ndarray)
    dtype, flags = array.dtype, array.flags
    if dtype.hasobject or not dtype.itemsize:
        return array.__reduce_ex__(_PROTOCOL)
    is_c = flags.c_contiguous
    if not flags.forc:
        array, is_c = np.ascontiguousarray(array), True
    try:
        if array.nbytes >= min_bytes:
            memory: Any = pickle.PickleBuffer(array)
        else:
            memory = (bytearray if flags.writeable else bytes)((array if is_c else array.T).data)
    except ValueError:  # an array of datetimes, for example, exports no buffer
        return array.__reduce_ex__(_PROTOCOL)
    args = (array.shape, dtype.str if dtype.isbuiltin == 1 else dtype, memory)
    return np.ndarray, args if is_c else (*args, 0, None, "F")


# `_Pickler` adds modules to cloudpickle's list of modules to pickle by value. The whole process
# shares this list, so only one thread at a time may pickle.
_registry_lock = threading.Lock()


def pack(target: Callable[..., object]) -> int:
    """Write this process's environment and `target` to a memory file; the caller owns it.

    Functions and classes of `__main__`, and of modules that are not found through `sys.path`, are
    pickled by value; all others by name. Raises InvalidArgument if something cannot be pickled.
    """
    # In messages, show the first argument of a partial instead of the partial: the partial calls a
    # function of shardio, and its first argument is usually the user's function or dataset.
    shown = target.args[0] if isinstance(target, partial) and target.args else target
    packed = pickled(target, "make those inside the function", shown)
    try:
        cwd = os.getcwd()
    except FileNotFoundError:  # the folder was deleted; workers keep their own folder
        cwd = None
    path = [os.fspath(entry) for entry in sys.path]
    environment = (path, cwd, dict(os.environ), list(sys.argv), read_umask())
    return memory_file(pickle.dumps(environment), packed)


def pickled(value: object, hint: str, shown: object = None) -> bytes:
    """Pickle a value as `pack` does; the error shows `shown` (default: the value) and `hint`."""
    buffer = io.BytesIO()
    with _registry_lock:
        pickler = _Pickler(buffer)
        try:
            pickler.dump(value)
        except (pickle.PicklingError, TypeError, AttributeError, ValueError) as error:
            raise InvalidArgument(
                f"{short_repr(value if shown is None else shown)} cannot be sent to worker "
                f"processes: {error}; it must not refer to locks, open files, generators or the "
                f"like: {hint}"
            ) from error
        finally:
            pickler.forget_modules()
    return buffer.getvalue()


def unpack(fd: int) -> Callable[..., Any]:
    """Read a file that `pack` has written: apply the environment, and return the function."""
    # Map the file, because all workers share the position of the descriptor.
    with mmap.mmap(fd, 0, access=mmap.ACCESS_READ) as stored:
        sys.path[:], cwd, environ, sys.argv[:], umask = pickle.load(stored)
        os.umask(umask)
        for name in os.environ.keys() - environ.keys():
            del os.environ[name]
        for name, value in environ.items():
            if os.environ.get(name) != value:
                os.environ[name] = value
        if cwd is not None:
            os.chdir(cwd)
        with memoryview(stored)[stored.tell() :] as packed:  # `pickle.load` would copy large parts
            target: Callable[..., Any] = pickle.loads(packed)
    return target


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]  # cloudpickle has no types
    """A pickler that pickles a function or class by value if a worker cannot import its module."""

    dispatch_table = _DISPATCH_TABLE

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self._checked_modules = set[str]()
        self._by_value_modules: list[Any] = []

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, FunctionType | type):
            name = getattr(obj, "__module__", None)
            if isinstance(name, str) and name not in self._checked_modules:
                self._checked_modules.add(name)
                by_value = cloudpickle.list_registry_pickle_by_value()
                if name not in by_value and not _is_importable(name):
                    cloudpickle.register_pickle_by_value(sys.modules[name])
                    self._by_value_modules.append(sys.modules[name])
        return super().reducer_override(obj)

    def forget_modules(self) -> None:
        for module in self._by_value_modules:
            cloudpickle.unregister_pickle_by_value(module)
        self._by_value_modules.clear()


def _is_importable(name: str) -> bool:
    """Return True if a new process with this `sys.path` would find the module `name`."""
    # `importlib.util.find_spec` would first look in `sys.modules`.
    if name == "__main__" or name not in sys.modules:
        return True  # cloudpickle itself handles both cases
    parent, _, _ = name.rpartition(".")
    path = None
    if parent:
        if not _is_importable(parent):
            return False
        path = getattr(sys.modules.get(parent), "__path__", None)
    finders = [finder for finder in sys.meta_path if hasattr(finder, "find_spec")]
    return any(finder.find_spec(name, path) is not None for finder in finders)
