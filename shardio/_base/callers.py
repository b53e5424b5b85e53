"""Inspection of calling code: signatures, unknown options, the stack level of warnings."""

from __future__ import annotations

import difflib
import functools
import inspect
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ParamSpec, TypeVar

from shardio.errors import InvalidArgument

_Parameters = ParamSpec("_Parameters")
_Result = TypeVar("_Result")


def takes_rng(name: str, given: str, function: Callable[..., Any]) -> bool:
    """Return True if a user's function is to be called as f(given, rng), False for f(given).

    Raises InvalidArgument, naming the option `name`, if the function takes other arguments.
    """
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # some builtins have no signature
        return False
    parameters = signature.parameters.values()
    places = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    required = [p for p in places if p.default is p.empty]
    takes_any = any(p.kind is p.VAR_POSITIONAL for p in parameters)
    by_name = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY and p.default is p.empty]
    if len(required) > 2 or by_name or not (places or takes_any):
        raise InvalidArgument(f"{name} must take ({given}) or ({given}, rng); it takes {signature}")
    return len(required) == 2 or (len(places) > 1 and places[1].name == "rng")


def one_of(name: str, value: Any, known: tuple[Any, ...]) -> Any:
    """Return the value; raise InvalidArgument unless it is one of `known`."""
    if not any(value is k or (isinstance(value, str) and value == k) for k in known):
        raise InvalidArgument(
            f"{name} must be one of {', '.join(map(repr, known))}; found {value!r}"
        )
    return value


def refuse_unknown_options(
    name: str, given: Iterable[str], known: Iterable[str], advice: Mapping[str, str]
) -> None:
    """Raise TypeError if an option in `given` is unknown to the function `name`.

    `advice` has hints for options that users know from other libraries.
    """
    known = list(known)
    for option in given:
        if option in known:
            continue
        if option in advice:
            raise TypeError(f"{name} has no option {option!r}: {advice[option]}")
        close = difflib.get_close_matches(option, known, 1)
        hint = f"did you mean {close[0]!r}?" if close else f"its options are {', '.join(known)}"
        raise TypeError(f"{name} has no option {option!r}: {hint}")


def refuses(
    advice: Mapping[str, str], name: str | None = None
) -> Callable[[Callable[_Parameters, _Result]], Callable[_Parameters, _Result]]:
    """Return a decorator that makes a method, called `name` in errors, refuse unknown options."""

    def decorate(method: Callable[_Parameters, _Result]) -> Callable[_Parameters, _Result]:
        known = list(inspect.signature(method).parameters)[1:]

        @functools.wraps(method)
        def checked(*args: _Parameters.args, **options: _Parameters.kwargs) -> _Result:
            refuse_unknown_options(name or method.__name__, options, known, advice)
            return method(*args, **options)

        return checked

    return decorate


def caller_stacklevel() -> int:
    """Return the `stacklevel` with which a warning by the calling function points to user code."""
    frame, level = sys._getframe(1), 1
    while frame.f_back and str(frame.f_globals.get("__name__", "")).startswith("shardio."):
        frame, level = frame.f_back, level + 1
    return level
