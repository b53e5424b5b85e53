"""Base classes for context managers, and a cached property without a lock."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Generic, Self, TypeVar, overload


class Closing(ABC):
    """A context manager that calls `close` at the end of the block, also after an exception."""

    @abstractmethod
    def close(self) -> object:
        """Finish, and release all resources."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close()


class Publishing(Closing):
    """A context manager that publishes its output on success and aborts on an exception."""

    @property
    @abstractmethod
    def _is_closed(self) -> bool:
        """True if `close` or `abort` has been called."""

    @abstractmethod
    def abort(self) -> None:
        """Remove all output written so far and publish nothing. Idempotent."""

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self.abort()
        elif not self._is_closed:
            self.close()


_Value = TypeVar("_Value")


class cached_property(Generic[_Value]):  # lower case: a decorator, like `property`
    """A property, computed once and kept in `__dict__`. If two threads compute it, the last wins.

    Before Python 3.12, `functools.cached_property` has a lock for all objects of a class. If
    another thread holds this lock during a fork, the new process deadlocks.
    """

    def __init__(self, compute: Callable[[Any], _Value]) -> None:
        self._compute = compute
        self._name = compute.__name__
        self.__doc__ = compute.__doc__

    @overload
    def __get__(self, instance: None, owner: type) -> Self: ...
    @overload
    def __get__(self, instance: object, owner: type | None = None) -> _Value: ...
    def __get__(self, instance: object, owner: type | None = None) -> Self | _Value:
        if instance is None:
            return self
        value = instance.__dict__[self._name] = self._compute(instance)
        return value
