"""What a function of the user is: how it is called, and whether it gives several results."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from types import CoroutineType
from typing import Any, Literal

from shardio._workers.processes.serialization import shortened
from shardio.errors import InvalidArgument, TransformError

Kind = Literal["function", "generator", "coroutine", "async generator"]


@dataclass(frozen=True, slots=True)
class UserCall:
    """A function of one argument, and what it gives: a value, or several, at once or awaited."""

    function: Callable[[Any], Any]
    kind: Kind

    @property
    def is_async(self) -> bool:
        """Whether it runs in an event loop."""
        return self.kind in ("coroutine", "async generator")

    @property
    def yields_many(self) -> bool:
        """Whether it gives any number of values for one."""
        return self.kind in ("generator", "async generator")


def user_call(name: str, function: Any) -> UserCall:
    """Find out what a function is; what can be indexed is a function of the index.

    Raises:
        InvalidArgument: it is neither.
    """
    if not callable(function):
        look_up = getattr(function, "__getitem__", None)
        if look_up is None or isinstance(function, str | bytes):
            raise InvalidArgument(
                f"{name} must be a function, or something to look up in, as a mapping; "
                f"found {shortened(function)}"
            )
        return UserCall(look_up, "function")
    return UserCall(function, _kind(function))


def _kind(function: Callable[..., Any]) -> Kind:
    # An object that is called is what its method is, but a class is no coroutine of its instances.
    method = None if isinstance(function, type) else getattr(function, "__call__", None)  # noqa: B004
    for each in (function, method):
        if inspect.iscoroutinefunction(each):
            return "coroutine"
        if inspect.isasyncgenfunction(each):
            return "async generator"
        if inspect.isgeneratorfunction(each):
            return "generator"
    return "function"


def checked(value: Any) -> Any:
    """A result of a function; not a coroutine that nobody would await."""
    if type(value) is CoroutineType:
        value.close()
        raise TransformError(
            "it returned a coroutine: define it with `async def`, so that it is awaited"
        )
    return value
