"""What the end of a `with` does to things that hold files, maps or processes.

`cached`: a property that is computed once, without a lock that a fork could inherit as held.
"""

from __future__ import annotations

import types
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Generic, Self, TypeVar, overload

__all__ = ["cached_property"]


class Closing(ABC):
    """Closes itself at the end of its `with`, however that is left."""

    @abstractmethod
    def close(self) -> object:
        """Finish, and let go of what is held."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: types.TracebackType | None,
    ) -> None:
        self.close()


class Publishing(Closing):
    """Publishes at the end of its `with` what was written; nothing, if an exception leaves that."""

    @property
    @abstractmethod
    def _is_closed(self) -> bool:
        """Whether `close` or `abort` has been called."""

    @abstractmethod
    def abort(self) -> None:
        """Remove what was written; nothing is published. Idempotent."""

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: types.TracebackType | None,
    ) -> None:
        if kind is not None:
            self.abort()
        elif not self._is_closed:
            self.close()


_Value = TypeVar("_Value")


class cached_property(Generic[_Value]):  # a decorator, as `property` is
    """Replaces a method by its value, which stays in the object's `__dict__` from the first use on.

    Two threads that are first at once may both compute it; the last one's value stays. That of
    functools holds a lock until Python 3.12, one for all objects of a class: a process that is
    forked while another thread is inside waits for it for ever.
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
