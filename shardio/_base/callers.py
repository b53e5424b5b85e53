"""Checks of the arguments that callers pass, and warnings that name the caller's line."""

from __future__ import annotations

import contextlib
import difflib
import functools
import importlib.util
import inspect
import operator
import os
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final, NoReturn, TypeVar, cast

from shardio._base.classes import listed
from shardio.errors import (
    DatasetNotFound,
    InvalidArgument,
    ShardioError,
    UnsupportedEnvironment,
)

_Callable = TypeVar("_Callable", bound=Callable[..., Any])

MIN_SIMILARITY: Final = 0.75
"""The similarity, from 0 to 1, from which a known name is suggested for an unknown one."""
ANY_OPTION: Final = "*"
"""The key of the advice for all options without a hint of their own."""


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

    `advice` maps options that users know from other libraries to hints. Its hint for ANY_OPTION is
    used for an option that has no hint and is not similar to a known option.
    """
    known = list(known)
    for option in given:
        if option in known:
            continue
        hint = advice.get(option) or did_you_mean(option, known) or advice.get(ANY_OPTION)
        hint = hint or f"its options are {', '.join(known)}"
        raise TypeError(f"{name} has no option {option!r}: {hint}")


def _check_positional(
    name: str,
    values: tuple[Any, ...],
    options: Mapping[str, Any],
    parameters: Mapping[str, inspect.Parameter],
    advice: Mapping[str, str],
) -> None:
    """Raise TypeError if there are too few or too many positional values.

    The message shows the correct call. `advice` is as in `refuse_unknown_options`; in addition, its
    hint for a required parameter is used if that parameter is missing. For a surplus value, its
    hint for "split" is used if the value is a string, and otherwise that for ANY_OPTION.
    """
    own = [p for p in parameters.values() if p.name != "self"]
    rest = [f"*{p.name}" for p in own if p.kind is p.VAR_POSITIONAL]
    places = [p for p in own if p.kind is p.POSITIONAL_OR_KEYWORD]
    required = [p.name for p in places if p.default is p.empty]
    by_name = [p.name for p in own if p.kind is p.KEYWORD_ONLY and p.default is p.empty]
    if missing := [each for each in required[len(values) :] + by_name if each not in options]:
        call = f"{name}({', '.join(required + rest + [f'{each}=…' for each in by_name])})"
        hint = f"; {advice[missing[0]]}" if missing[0] in advice else ""
        raise TypeError(f"{name} needs {' and '.join(missing)}: write {call}{hint}")
    if rest or len(values) <= len(places):
        return
    found = values[len(places)]
    named = [p.name for p in own if p.kind is p.KEYWORD_ONLY]
    if isinstance(found, str) and "split" in advice:
        hint = advice["split"]
    elif isinstance(found, bool) and "shuffle" in named:
        hint = f"write shuffle={found}"
    elif ANY_OPTION in advice:
        hint = advice[ANY_OPTION]
    else:
        hint = f"write the name of the option: {listed((f'{each}=' for each in named), 300)}"
    taken = (
        f"only {', '.join(p.name for p in places)} by position"
        if places
        else "no value by position"
    )
    raise TypeError(f"{name} takes {taken}; found {shown(found)}{', too' * bool(places)}: {hint}")


@contextlib.contextmanager
def checking(name: str) -> Iterator[None]:
    """Convert an unexpected exception of the caller's object `name` to InvalidArgument.

    Checks call `__repr__`, `__class__` and other methods of an object, which may raise anything.
    """
    try:
        yield
    except (ShardioError, TypeError):
        raise
    except Exception as error:
        raise InvalidArgument(
            f"{name}: the object that was passed raises {type(error).__name__}: {error}"
        ) from error


def shown(value: object) -> str:
    """Return the shortened repr of a caller's value; the name of its class if the repr raises."""
    try:
        return repr(value)[:200]
    except Exception as error:  # noqa: BLE001  # an object of the caller may raise anything
        return f"an object of {type(value).__qualname__}, whose repr raises {type(error).__name__}"


def did_you_mean(word: str, known: Iterable[str], folder: str = "") -> str:
    """Return a question that suggests the known word most similar to `word`; "" if none is similar.

    If the words are names of files, `folder` is the folder of the files.
    """
    close = difflib.get_close_matches(word, known, 1, MIN_SIMILARITY)
    return f"did you mean {os.path.join(folder, close[0])!r}?" if close else ""


def check_encodable(path: str | os.PathLike[str], what: str) -> None:
    """Raise InvalidArgument unless the file system encoding can encode a path.

    The message begins with `what`, the name of the option.
    """
    try:
        os.fsencode(path)
    except UnicodeEncodeError as error:
        if error.encoding == "utf-8":  # the path contains half of a surrogate pair
            reason = "which is not a valid file name"
        else:
            reason = (
                f"which the file system encoding of this process, {error.encoding}, cannot "
                "encode; set PYTHONUTF8=1, or use a UTF-8 locale"
            )
        raise InvalidArgument(f"{what} is {os.fspath(path)!r}, {reason}") from error


def expand_home(path: Any) -> Any:
    """Expand a leading `~` or `~user` of a path, as a shell does; return anything else as it is."""
    if isinstance(path, str | os.PathLike) and os.fspath(path)[:1] in ("~", b"~"):
        return os.path.expanduser(path)
    return path


def path_as_given(given: str, absolute: str) -> str:
    """Return a path as the user gave it, or `absolute` if a chdir has made it invalid since."""
    return given if os.path.abspath(given) == absolute else absolute


def similar_name(path: str | os.PathLike[str]) -> str:
    """Return the end of a message about a missing path: a similar name in its folder, or ""."""
    folder, name = os.path.split(os.path.normpath(path))
    with contextlib.suppress(OSError):
        if hint := did_you_mean(name, os.listdir(folder or "."), folder):
            return f"; {hint}"
    return ""


def unknown_field(place: str, name: str, known: Iterable[str]) -> KeyError:
    """Return a KeyError for a name that is not a field of `place`; its hint is one name, or all."""
    known = list(known)
    hint = did_you_mean(name, known) or f"its fields are {listed(known, 300)}"
    return KeyError(f"{place}: no field {name!r}; {hint}")


def row_index(name: str, index: Any, several: str) -> int:
    """Return the index of a sample as an int.

    Raises TypeError if `index` is not an integer. The message names the indexed object, `name`, and
    the call that takes several indices, `several`. If `index` contains names of fields, the message
    shows how to read their values instead.
    """
    try:
        return operator.index(index)
    except TypeError:
        hint = f"for several samples, write {several}"
        if isinstance(index, float):
            hint = f"write {name}[{int(index)}]" if index.is_integer() else "round it"
        elif isinstance(index, list | tuple) and index and all(isinstance(n, str) for n in index):
            hint = f"for several columns, write {{n: {name}.column(n) for n in {list(index)!r}}}"
        elif isinstance(index, tuple) and len(index) == 2 and str in map(type, index):
            field, row = index if isinstance(index[0], str) else index[::-1]
            hint = f"for a field of a sample, write {name}[{row!r:.40}][{field!r}]"
        raise TypeError(
            f"{name}[i] takes the integer index of a sample; found {index!r:.80}: {hint}"
        ) from None


def missing_attribute(thing: object, name: str, advice: Mapping[str, str]) -> Any:
    """Raise AttributeError for `thing.name`, called by `__getattr__`.

    `advice` has hints for attributes that users know from other libraries.
    """
    kind = type(thing)
    if hasattr(kind, name):
        return object.__getattribute__(thing, name)  # a property failed: raise its own error
    if name in advice:
        raise AttributeError(f"{kind.__name__} has no attribute {name!r}: {advice[name]}")
    text = f"{kind.__name__!r} object has no attribute {name!r}"
    raise AttributeError(text, name=name, obj=thing)


def refuse_name(module: str, name: str, text: str) -> NoReturn:
    """Raise AttributeError for a name that a module lacks; to be called by its `__getattr__`.

    In `from module import name`, raise ImportError, because Python would replace the text of an
    AttributeError; but not if `name` is a submodule, which Python imports after an AttributeError.
    """
    is_import = sys._getframe(2).f_code.co_name == "_handle_fromlist"
    if is_import and importlib.util.find_spec(f"{module}.{name}") is None:
        raise ImportError(text)
    raise AttributeError(text)


def refuses(advice: Mapping[str, str], name: str | None = None) -> Callable[[_Callable], _Callable]:
    """Return a decorator that makes a function or a class refuse unknown options with a hint.

    `advice` is as in `refuse_unknown_options`; `name` is the name of the function in errors.
    """

    def decorate(target: _Callable) -> _Callable:
        called: Any = target.__init__ if isinstance(target, type) else target  # type: ignore[misc]
        parameters = inspect.signature(called).parameters
        every = parameters.values()
        n_bound = sum(p.name == "self" for p in every)
        known = [p.name for p in every if p.name != "self" and p.kind is not p.VAR_POSITIONAL]
        called_name = name or target.__name__
        n_places = sum(p.kind is p.POSITIONAL_OR_KEYWORD for p in every)
        takes_any = any(p.kind is p.VAR_KEYWORD for p in every)
        needs_options = any(p.kind is p.KEYWORD_ONLY and p.default is p.empty for p in every)

        @functools.wraps(called)
        def checked(*args: Any, **options: Any) -> Any:
            # Make the traceback of a caller's mistake end at the caller's line.
            try:
                if options or needs_options or len(args) != n_places:  # else all is right
                    if not takes_any:
                        refuse_unknown_options(called_name, options, known, advice)
                    _check_positional(called_name, args[n_bound:], options, parameters, advice)
            except TypeError as error:
                error.__traceback__ = None
                raise
            try:
                return called(*args, **options)
            except (DatasetNotFound, InvalidArgument, UnsupportedEnvironment) as error:
                error.__traceback__ = None
                raise

        if not isinstance(target, type):
            return cast(_Callable, checked)
        target.__init__ = checked  # type: ignore[misc]
        return target

    return decorate


def warn(text: str, kind: type[Warning] = UserWarning) -> None:
    """Issue a warning that names the line of user code which has called shardio."""
    frame, level = sys._getframe(0), 1
    while frame.f_back and str(frame.f_globals.get("__name__", "")).startswith("shardio."):
        frame, level = frame.f_back, level + 1
    warnings.warn(text, kind, stacklevel=level)
