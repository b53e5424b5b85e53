"""Context managers and their base classes, a cached property without a lock, one-line reprs."""

from __future__ import annotations

from abc import ABC, ABCMeta, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import fields
from reprlib import Repr
from typing import Any, ClassVar, Generic, Self, TypeVar, overload


class _ListedMeta(ABCMeta):
    # IPython completes `thing.` with the names of both the object and its class.
    def __dir__(cls) -> list[str]:
        return _listed_names(cls, super().__dir__())


class Listed(metaclass=_ListedMeta):
    """A base class whose `dir` lists only public names and special methods.

    The public names are those in `_public` of the class and its bases or, if all are empty, those
    that do not begin with an underscore.
    """

    __slots__ = ()
    _public: ClassVar[str] = ""

    def __dir__(self) -> list[str]:
        return _listed_names(type(self), object.__dir__(self))


def _listed_names(kind: type, names: Iterable[str]) -> list[str]:
    public = " ".join(vars(each).get("_public", "") for each in kind.__mro__).split()
    return [n for n in names if n[:2] == "__" or (n in public if public else n[0] != "_")]


class Closing(Listed, ABC):
    """A context manager that calls `close` at the end of the block, even after an exception."""

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


class undo_on_error:  # lower case: used like `contextlib.suppress`
    """A context manager that calls a function if the block raises any exception, even Ctrl-C."""

    def __init__(self, undo: Callable[..., object], *args: Any) -> None:
        self._undo, self._args = undo, args

    def __enter__(self) -> None:
        """Do nothing."""

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self._undo(*self._args)


_Value = TypeVar("_Value")


class cached_property(Generic[_Value]):  # lower case: a decorator, like `property`
    """A property whose value is computed once and kept in `__dict__`.

    If two threads compute the value at once, the later value is kept.

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


_paths = Repr()
_paths.maxstring = 60


def one_line(report: Any, paths: Iterable[object], *facts: str, **counts: int) -> str:
    """Return a repr of at most 200 characters: the class, paths, and the facts and counts that fit.

    Integer fields `n_…` of the dataclass are counts, too. Empty facts and counts of 0 are left out.
    """
    where = ", ".join(_paths.repr(str(path)) for path in paths)
    head = f"{type(report).__name__}({where}{': ' * bool(where)}"
    own = {f.name[2:]: getattr(report, f.name) for f in fields(report) if f.name[:2] == "n_"}
    shown = [fact for fact in facts if fact]
    for what, n in (own | counts).items():
        noun = what.removesuffix("s" * (n == 1)).replace("_", " ")
        shown += [f"{n:,} {noun}"] if n and isinstance(n, int) else []
    return f"{head}{listed(shown, 199 - len(head))})"


def listed(items: Iterable[str], max_length: int) -> str:
    """Return the items, separated by commas; "…" replaces those beyond `max_length` characters."""
    shown = list(items)[:max_length]
    while len(", ".join(shown)) > max_length:
        shown[-2:] = "…"
    return ", ".join(shown)
