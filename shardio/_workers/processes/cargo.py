"""What travels to a new worker: its function, and main's surroundings that the function counts on.

Both lie in one memory file, since a message is too small for them. Packed in main, unpacked in the
worker: pickle passes only between a program and its own workers.
"""

from __future__ import annotations

import importlib.machinery
import io
import os
import pickle
import struct
import sys
import threading
from collections.abc import Callable
from functools import partial
from types import FunctionType
from typing import Any

import cloudpickle  # type: ignore[import-untyped]

from shardio._workers.processes.failures import shortened
from shardio._workers.processes.linux import memory_file, read_umask
from shardio.errors import InvalidArgument

__all__ = ["pack", "pickled", "unpack"]

# Bytes of the pickled surroundings; the pickled function follows them.
_HEADER = struct.Struct("<Q")

# cloudpickle's list of modules to pickle by value belongs to the whole process.
_registering = threading.Lock()


def pack(target: Callable[..., object]) -> int:
    """Put `target` and this process's surroundings into a memory file; the caller owns it.

    Functions and classes of `__main__`, and of modules that a search of `sys.path` does not find,
    travel by value; those of other modules by name. Values they refer to are copied as they are
    now. Raises InvalidArgument when something cannot be pickled.
    """
    # Of an engine's function, what it was given to call is what the user knows.
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
    """Pickle what is for this process's own workers, by the rules of `pack`.

    Raises InvalidArgument when something cannot be pickled: `hint` is what to do about locks,
    open files, generators or the like; `known` is what the user knows of the value, if not all.
    """
    buffer = io.BytesIO()
    with _registering:
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
    """Put this process into the surroundings that `pack` saw and return the function.

    Reads by offset and leaves `fd` open: other workers read the same file.
    """
    stored = _read_all(fd)
    (n_bytes,) = _HEADER.unpack_from(stored)
    start = _HEADER.size
    _surround(**pickle.loads(stored[start : start + n_bytes]))
    target: Callable[..., Any] = pickle.loads(stored[start + n_bytes :])
    return target


def _surround(
    sys_path: list[str], cwd: str | None, environ: dict[str, str], argv: list[str], umask: int
) -> None:
    """Take over main's surroundings; the environment by difference, as most of it is equal."""
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
    except FileNotFoundError:  # main's folder was deleted; the worker stays where it is
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
    """Pickles by value what belongs to modules that a worker could not import."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self._importable: dict[str, bool] = {}
        self._registered: list[Any] = []

    def reducer_override(self, obj: Any) -> Any:
        """Register the object's module before cloudpickle decides between name and value."""
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
        """Take back what this pickler registered in cloudpickle."""
        for module in self._registered:
            cloudpickle.unregister_pickle_by_value(module)
        self._registered.clear()


def _is_importable(name: str) -> bool:
    """Tell whether a fresh process with this `sys.path` would find the module `name`.

    `importlib.util.find_spec` does not: it trusts `sys.modules`.
    """
    if name == "__main__" or name not in sys.modules:
        return True  # cloudpickle's own rules cover both
    parent, _, _ = name.rpartition(".")
    path = None
    if parent:
        if not _is_importable(parent):
            return False
        path = getattr(sys.modules.get(parent), "__path__", None)
    return any(_finds(finder, name, path) for finder in sys.meta_path)


def _finds(finder: Any, name: str, path: Any) -> bool:
    find_spec = getattr(finder, "find_spec", None)
    spec: importlib.machinery.ModuleSpec | None = find_spec(name, path) if find_spec else None
    return spec is not None
