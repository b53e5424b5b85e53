"""The object that `--loader FILE.py:NAME` names, from a file that is executed."""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
import os
import sys
import traceback
from collections.abc import Iterator
from typing import Any

from shardio import InvalidArgument
from shardio_tools.arguments import suggestion
from shardio_tools.output import escaped


def load_named(text: str) -> Any:
    """Execute the file in FILE.py:NAME, and return the object NAME of it.

    Raises:
        InvalidArgument: there is no such file or name, or the file raised an exception.
    """
    path, _, name = text.rpartition(":")
    if not path.endswith(".py") or not name.isidentifier():
        raise InvalidArgument(f"--loader must be FILE.py:NAME; found {text!r}")
    if not os.path.isfile(path):
        raise InvalidArgument(f"--loader: {escaped(path)}: there is no such file")
    module = _executed(os.path.abspath(path), path)
    if not hasattr(module, name):
        hint = suggestion(name, vars(module))
        raise InvalidArgument(f"--loader: {escaped(path)} has no {name!r}{hint}")
    found = getattr(module, name)
    if found is None:
        raise InvalidArgument(f"--loader: {name} in {escaped(path)} is None")
    # A function is called later, and may parse the arguments, too.
    return _without_arguments(path)(found) if inspect.isfunction(found) else found


@contextlib.contextmanager
def _without_arguments(program: str) -> Iterator[None]:
    """Hide the arguments of this process in a block of user code, which may parse `sys.argv`."""
    arguments, sys.argv = sys.argv, [program]
    try:
        yield
    finally:
        sys.argv = arguments


def _executed(path: str, shown: str) -> Any:
    """Import the file under its own name, so that worker processes find its functions.

    A file whose name is no identifier, or that of a module in use, gets a name that only this
    process knows: its functions cannot be sent to worker processes.
    """
    folder, stem = os.path.split(path.removesuffix(".py"))
    if folder not in sys.path:
        sys.path.insert(0, folder)
    is_taken = stem in sys.modules or not stem.isidentifier()
    name = f"shardio_view_{abs(hash(path))}" if is_taken else stem
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise InvalidArgument(f"--loader: {escaped(shown)} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        with _without_arguments(shown):
            spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:  # a script may parse arguments
        sys.modules.pop(name, None)
        frames = [
            each for each in traceback.extract_tb(error.__traceback__) if each.filename == path
        ]
        line = f", line {frames[-1].lineno}" if frames else ""
        raise InvalidArgument(
            f"--loader: {escaped(shown)}{line} raised {type(error).__name__}: {error}"
        ) from error
    return module
