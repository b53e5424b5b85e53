"""Serialization between the main process and its workers: functions, values and exceptions.

An exception that can be unpickled keeps its class; any other becomes a TransformError with the same
text. A function is sent together with the main process's environment, in one memory file. Large
arrays are pickled out of band, so that their memory is copied only once. Everything that is
unpickled here comes from this program's own processes, never from stored data.
"""

from __future__ import annotations

import copyreg
import functools
import importlib.machinery
import io
import os
import pickle
import struct
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
from shardio._workers.processes.worker_main import MAX_MESSAGE_BYTES
from shardio.errors import InvalidArgument, TransformError

MAX_ERROR_BYTES: Final = MAX_MESSAGE_BYTES - 32
"""The maximum length of a packed error, which is sent in one message after a header."""


def pack_error(error: BaseException) -> bytes:
    """Pickle an exception and, if possible, its cause, in at most MAX_ERROR_BYTES."""
    limit = MAX_ERROR_BYTES
    for cause in (error.__cause__, None):
        packed = _pickle_error(error, cause)
        if packed is not None and len(packed) <= limit:
            return packed
    text = _described(error)
    if len(text) > limit // 8:
        text = f"{text[: limit // 16]}\n[…]\n{text[-limit // 16 :]}"
    return pickle.dumps((TransformError(text), None))


def _pickle_error(error: BaseException, cause: BaseException | None) -> bytes | None:
    """Pickle an error and its cause; None if they cannot be unpickled as exceptions."""
    try:
        packed: bytes = cloudpickle.dumps((error, cause))
        found, found_cause = pickle.loads(packed)
    except BaseException:  # noqa: BLE001  # user classes may raise anything, or exit
        return None
    are_errors = isinstance(found, BaseException) and isinstance(found_cause, BaseException | None)
    return packed if are_errors else None


def _described(error: BaseException) -> str:
    """Return an exception's type and message; for a TransformError, only the message."""
    if isinstance(error, TransformError):
        return str(error)
    return "".join(traceback.format_exception_only(type(error), error)).strip()


def unpack_error(packed: bytes) -> BaseException:
    """Return the exception that a worker sent, with its cause."""
    try:
        found: BaseException
        found, found.__cause__ = pickle.loads(packed)
    except Exception as failure:  # noqa: BLE001  # user classes may raise anything
        return TransformError(f"a worker failed, and its exception cannot be unpickled: {failure}")
    return found


def pack_failure(error: BaseException, is_called: str) -> bytes:
    """Pack an exception and its traceback for `unpack_failure`."""
    frames = error.__traceback__
    text = "".join(traceback.format_exception(type(error), error, frames and frames.tb_next))
    return pickle.dumps((pack_error(as_failure(error, is_called)), text))


def unpack_failure(failure: bytes | memoryview, where: str) -> BaseException:
    """Return the exception that a function raised, with a note; `where` names the function."""
    packed_error, text = pickle.loads(failure)
    error = unpack_error(packed_error)
    add_note(error, f"in {where}:\n\n{text}")
    return error


def as_failure(error: BaseException, is_called: str) -> Exception:
    """Return the exception, or a TransformError instead of one that would end a worker or loop."""
    if isinstance(error, Exception) and not isinstance(error, StopIteration | StopAsyncIteration):
        return error
    text = text_of(error)
    message = f": {text}" if text else ""
    failure = TransformError(f"{is_called} raised {type(error).__name__}{message}")
    failure.__cause__ = error
    return failure


def add_note(error: BaseException, note: str) -> None:
    """Add a note to an exception, even if it refuses attributes, as a frozen dataclass does."""
    vars(error).setdefault("__notes__", []).append(note)


def text_of(error: BaseException) -> str:
    """Return an exception's message, even if its `__str__` fails."""
    try:
        return str(error)
    except Exception as failure:  # noqa: BLE001  # user classes may raise anything
        return f"<its text is not available: {type(failure).__name__}>"


_repr = Repr()
_repr.maxstring = _repr.maxother = 120


def shortened(value: Any) -> str:
    """Return the repr of a value for a message, shortened in the middle if it is long."""
    return _repr.repr(value)


_PROTOCOL: Final = 5


class ValuePickler:
    """A pickler of values that leaves the memory of large arrays out of the pickle.

    `least_bytes` is the size from which an array is large. Creating a pickler takes 1.4 us, so one
    is kept for all values of a thread.
    """

    def __init__(self, least_bytes: int) -> None:
        reduce = functools.partial(_reduce_array, least_bytes)
        self._arrays = {np.ndarray: reduce, np.memmap: reduce}
        self._chunks: list[bytes] = []
        self._apart: list[pickle.PickleBuffer] = []
        self._file = SimpleNamespace(write=self._chunks.append)
        self._pickler = pickle.Pickler(self._file, _PROTOCOL, buffer_callback=self._apart.append)
        self._n_reducers = 0

    def dumps(self, value: Any) -> tuple[bytes, list[pickle.PickleBuffer]]:
        """Return a value's pickle, and the uncopied memory of its large arrays.

        The memory is the `buffers` for `pickle.loads`; each buffer is contiguous. If pickle does
        not support the value, cloudpickle is used. Raises any exception that parts of the value
        raise when they are pickled.
        """
        if len(copyreg.dispatch_table) != self._n_reducers:
            self._n_reducers = len(copyreg.dispatch_table)
            # This takes half the time of a `reducer_override` method, called for every object.
            self._pickler.dispatch_table = {**copyreg.dispatch_table, **self._arrays}
        try:
            try:
                self._pickler.dump(value)
            except Exception:  # noqa: BLE001  # cloudpickle may support the value; if not, it raises
                self._chunks.clear()
                self._apart.clear()
                _CloudPickler(self._file, self._arrays, self._apart).dump(value)
            return b"".join(self._chunks), self._apart.copy()
        finally:
            self._pickler.clear_memo()
            self._chunks.clear()
            self._apart.clear()


def _reduce_code(code: CodeType) -> Any:
    """Reduce a function's code with its file name, which cloudpickle 3.1.3 replaces."""
    make, parts = cloudpickle.Pickler.dispatch_table[CodeType](code)
    return make, tuple(code.co_filename if part == _DYNAMIC_CODE else part for part in parts)


_DYNAMIC_CODE: Final = "<dynamic-code>"
_DISPATCH_TABLE: Final = {**cloudpickle.Pickler.dispatch_table, CodeType: _reduce_code}


class _CloudPickler(cloudpickle.Pickler):  # type: ignore[misc]  # cloudpickle has no types
    """A cloudpickle pickler that pickles large arrays out of band."""

    def __init__(self, file: Any, arrays: dict[Any, Any], apart: list[pickle.PickleBuffer]) -> None:
        # Set the table first, because the __init__ of pickle.Pickler reads it.
        self.dispatch_table = {**_DISPATCH_TABLE, **arrays}
        super().__init__(file, _PROTOCOL, apart.append)


def _reduce_array(least_bytes: int, array: Any) -> Any:
    """Reduce an array to shape, dtype and memory if these determine it: half of NumPy's time."""
    if type(array) is np.memmap:  # send the values of a memory map
        array = array.view(np.ndarray)
    dtype, flags = array.dtype, array.flags
    if dtype.hasobject or not dtype.itemsize:
        return array.__reduce_ex__(_PROTOCOL)
    is_c = flags.c_contiguous
    if not flags.forc:
        array, is_c = np.ascontiguousarray(array), True
    try:
        if array.nbytes >= least_bytes:
            memory: Any = pickle.PickleBuffer(array)
        else:
            memory = (bytearray if flags.writeable else bytes)((array if is_c else array.T).data)
    except ValueError:  # an array of datetimes, for example, exports no buffer
        return array.__reduce_ex__(_PROTOCOL)
    args = (array.shape, dtype.str if dtype.isbuiltin == 1 else dtype, memory)
    return np.ndarray, args if is_c else (*args, 0, None, "F")


# The size of the pickled environment; the pickled function follows it.
_HEADER = struct.Struct("<Q")

# cloudpickle's list of modules to pickle by value is global to the process.
_registry_lock = threading.Lock()


def pack(target: Callable[..., object]) -> int:
    """Write `target` and this process's environment to a memory file; the caller owns it.

    Functions and classes of `__main__`, and of modules that are not found through `sys.path`, are
    pickled by value, others by name. Raises InvalidArgument if something cannot be pickled.
    """
    # In messages, show the user's function instead of the engine's function that wraps it.
    known = target.args[0] if isinstance(target, partial) and target.args else target
    packed = pickled(target, "make those inside the function", known)
    surroundings = pickle.dumps(
        {
            "sys_path": [os.fspath(entry) for entry in sys.path],
            "cwd": _cwd(),
            "environ": dict(os.environ),
            "argv": list(sys.argv),
            "umask": read_umask(),
        }
    )
    return memory_file(_HEADER.pack(len(surroundings)), surroundings, packed)


def pickled(value: object, hint: str, known: object = None) -> bytes:
    """Pickle a value by the rules of `pack`.

    Raises InvalidArgument if something cannot be pickled. The message ends with `hint`, and shows
    `known` in place of `value`, if given.
    """
    buffer = io.BytesIO()
    with _registry_lock:
        pickler = _Pickler(buffer)
        try:
            pickler.dump(value)
        except (pickle.PicklingError, TypeError, AttributeError, ValueError) as error:
            raise InvalidArgument(
                f"{shortened(value if known is None else known)} cannot be sent to worker "
                f"processes: {error}; it must not refer to locks, open files, generators or the "
                f"like: {hint}"
            ) from error
        finally:
            pickler.forget_modules()
    return buffer.getvalue()


def unpack(fd: int) -> Callable[..., Any]:
    """Apply the environment that `pack` recorded to this process, and return the function.

    The file is read by offset, because other workers read the same file.
    """
    stored = _read_all(fd)
    (n_bytes,) = _HEADER.unpack_from(stored)
    start = _HEADER.size
    _apply_environment(**pickle.loads(stored[start : start + n_bytes]))
    target: Callable[..., Any] = pickle.loads(stored[start + n_bytes :])
    return target


def _apply_environment(
    sys_path: list[str], cwd: str | None, environ: dict[str, str], argv: list[str], umask: int
) -> None:
    """Apply the main process's environment; only variables that differ are set."""
    sys.path[:] = sys_path
    sys.argv[:] = argv
    os.umask(umask)
    for name in os.environ.keys() - environ.keys():
        del os.environ[name]
    for name, value in environ.items():
        if os.environ.get(name) != value:
            os.environ[name] = value
    if cwd is not None:
        os.chdir(cwd)


def _cwd() -> str | None:
    try:
        return os.getcwd()
    except FileNotFoundError:  # the folder was deleted; workers keep their own folder
        return None


def _read_all(fd: int) -> memoryview:
    n_bytes = os.fstat(fd).st_size
    stored = bytearray(n_bytes)
    view = memoryview(stored)
    done = 0
    while done < n_bytes:
        done += os.preadv(fd, [view[done:]], done)
    return view


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]  # cloudpickle has no types
    """Pickles functions and classes by value if a worker could not import their modules."""

    dispatch_table = _DISPATCH_TABLE

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self._importable: dict[str, bool] = {}
        self._registered: list[Any] = []

    def reducer_override(self, obj: Any) -> Any:
        """Register an object's module before cloudpickle decides between name and value."""
        if isinstance(obj, FunctionType | type):
            name = getattr(obj, "__module__", None)
            if isinstance(name, str) and name not in self._importable:
                self._importable[name] = _is_importable(name)
                if not self._importable[name]:
                    self._register(name)
        return super().reducer_override(obj)

    def _register(self, name: str) -> None:
        module = sys.modules[name]
        if name not in cloudpickle.list_registry_pickle_by_value():
            cloudpickle.register_pickle_by_value(module)
            self._registered.append(module)

    def forget_modules(self) -> None:
        """Undo this pickler's registrations in cloudpickle."""
        for module in self._registered:
            cloudpickle.unregister_pickle_by_value(module)
        self._registered.clear()


def _is_importable(name: str) -> bool:
    """Return True if a new process with this `sys.path` would find the module `name`.

    `importlib.util.find_spec` first looks in `sys.modules`.
    """
    if name == "__main__" or name not in sys.modules:
        return True  # cloudpickle itself handles both cases
    parent, _, _ = name.rpartition(".")
    path = None
    if parent:
        if not _is_importable(parent):
            return False
        path = getattr(sys.modules.get(parent), "__path__", None)
    return any(_can_find(finder, name, path) for finder in sys.meta_path)


def _can_find(finder: Any, name: str, path: Any) -> bool:
    find_spec = getattr(finder, "find_spec", None)
    spec: importlib.machinery.ModuleSpec | None = find_spec(name, path) if find_spec else None
    return spec is not None
