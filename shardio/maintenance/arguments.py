"""Check the arguments of operations, which take paths of local folders or files."""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable, Mapping
from typing import Any, Final, TypeVar, cast

from shardio._base.callers import checking, expand_home, refuses, shown
from shardio.errors import InvalidArgument
from shardio.storage.remote.connection import is_url

_Callable = TypeVar("_Callable", bound=Callable[..., Any])

_HABITS: Final = {
    **dict.fromkeys(("n_jobs", "num_proc", "num_workers"), "write workers="),
    **dict.fromkeys(
        ("max_shard_size", "n_shards", "num_shards", "shard_size"),
        "write shard_bytes=, the target size of a shard",
    ),
}
_COPY: Final = "for example with `aws s3 sync` or `gcloud storage rsync`"


def takes_paths(
    call: str, *names: str, outputs: tuple[str, ...] = (), advice: Mapping[str, str] | None = None
) -> Callable[[_Callable], _Callable]:
    """Return a decorator for an operation whose parameters `names` and `outputs` are local paths.

    Other values, unknown options and missing arguments raise an error that shows the correct call,
    `call`. `advice` has hints for further options that users know from other libraries.
    """

    def decorate(function: _Callable) -> _Callable:
        signature = inspect.signature(function)

        @functools.wraps(function)
        def checked(*args: Any, **options: Any) -> Any:
            bound = signature.bind(*args, **options)
            for name in (*names, *outputs):
                found = bound.arguments.get(name, ())
                paths = []
                for value in found if type(found) is tuple else (found,):
                    with checking(f"{function.__name__}, {name}"):
                        paths.append(expand_home(value))
                        _check_path(function.__name__, call, value, is_output=name in outputs)
                bound.arguments[name] = tuple(paths) if type(found) is tuple else paths[0]
            return function(*bound.args, **bound.kwargs)

        return cast(_Callable, refuses(_HABITS | dict(advice or {}), function.__name__)(checked))

    return decorate


def _check_path(operation: str, call: str, value: Any, *, is_output: bool) -> None:
    if not isinstance(value, str | os.PathLike):
        hint = ""
        if isinstance(path := getattr(value, "path", None), str):
            hint = f": pass {path!r}, its path"
        raise InvalidArgument(f"{operation} takes paths: write {call}; found {shown(value)}{hint}")
    if is_url(text := os.fsdecode(value)):
        how = "write to one, and copy that to the URL" if is_output else "copy the dataset first"
        raise InvalidArgument(f"{text}: {operation} needs a local path: {how}, {_COPY}")
