"""The command `shardio`: parses, dispatches, and turns errors into one line and an exit code.

Exit codes: 0 fine; 1 something in the data is bad, and listed; 2 the command or a path is wrong;
3 something about this machine is; 130 interrupted; 141 nobody reads the output any more.
"""

from __future__ import annotations

import argparse
import errno
import os
import sys
import warnings
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import shardio
from shardio.errors import (
    CacheFull,
    ClosedError,
    InsufficientMemory,
    StoreAccessDenied,
    StoreUnavailable,
    TooManySkipped,
    TransformError,
    UnsupportedEnvironment,
)
from shardio_tools import (
    add_column,
    bench,
    compact,
    convert,
    diff,
    export,
    merge,
    repair,
    reshard,
    serve,
    split,
    stats,
    verify,
)
from shardio_tools.arguments import refuse_urls
from shardio_tools.inspect import command as inspect
from shardio_tools.output import (
    begin_report,
    escape_unwritable,
    escaped,
    flush,
    is_report_lost,
    print_error,
    print_now,
    redirect_to_null,
)

OK, BAD_DATA, USAGE, ENVIRONMENT, INTERRUPTED, BROKEN_PIPE = 0, 1, 2, 3, 130, 141

DISK_FULL_ERRORS = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS}
"""Errors that only who writes can meet."""

COMMANDS: dict[str, ModuleType] = {
    "convert": convert,
    "inspect": inspect,
    "verify": verify,
    "repair": repair,
    "diff": diff,
    "merge": merge,
    "reshard": reshard,
    "compact": compact,
    "add-column": add_column,
    "split": split,
    "stats": stats,
    "bench": bench,
    "export": export,
    "serve": serve,
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line (by default this process's); returns the exit code.

    A report that could not be written makes it ENVIRONMENT: 0 and 1 would promise one.

    Raises:
        SystemExit: from argparse: 0 after --help, 2 for arguments that do not parse.
    """
    _ensure_std_fds()
    escape_unwritable()
    begin_report()
    try:
        try:
            code = _run(parser().parse_args(arguments))
        finally:
            flush()
    except SystemExit as end:
        if end.code or not is_report_lost():
            raise
        return ENVIRONMENT
    except BrokenPipeError:
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except OSError:
                redirect_to_null(stream)  # Python flushes once more at exit, and would complain
        return BROKEN_PIPE
    return ENVIRONMENT if is_report_lost() and code in (OK, BAD_DATA) else code


def _ensure_std_fds() -> None:
    """Open as /dev/null what this process was started without.

    Otherwise a shard that is being written may get the number of standard error, and with it what
    libraries and workers say there.
    """
    while (fd := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(fd, True)
    os.close(fd)
    if sys.stdout is None:
        sys.stdout = open(1, "w", closefd=False)
    if sys.stderr is None:
        sys.stderr = open(2, "w", closefd=False)


def _run(options: argparse.Namespace) -> int:
    """Run the command and put into words what ends it; returns the exit code."""
    try:
        refuse_urls(options)
        with warnings.catch_warnings():
            warnings.showwarning = lambda message, *_: print_error(
                f"warning: {escaped(str(message))}"
            )
            code: int = COMMANDS[options.command].run(options)
    except KeyboardInterrupt as error:
        _print_exception(error, f"{options.command}: interrupted")
        return INTERRUPTED
    except BrokenPipeError:
        raise
    except ClosedError:
        raise  # nothing that a user types leads there: a bug, which keeps its traceback
    except shardio.ShardioError as error:
        _print_exception(error, str(error))
        return exit_code(error)
    except OSError as error:
        _print_exception(error, _system_error(error, options))
        return ENVIRONMENT
    return code


def _print_exception(error: BaseException, what: str) -> None:
    """Print what went wrong, and what was noted about it: how to go on."""
    keeps_lines = isinstance(error, shardio.WorkerDied | TransformError)
    for text in (what, *getattr(error, "__notes__", ())):
        # A worker's traceback keeps its lines; in a name, a line's end would pass for one of ours.
        print_error("\n".join(map(escaped, text.splitlines())) if keeps_lines else escaped(text))


class _Parser(argparse.ArgumentParser):
    """A parser whose help and version are reports: argparse ignores errors of writing them."""

    def _print_message(self, message: str, file: Any = None) -> None:
        print_now(message.removesuffix("\n"), file or sys.stderr)


def parser() -> argparse.ArgumentParser:
    """Build the parser of the whole command line."""
    top = _Parser(
        prog="shardio", description="Folders of video become shards that feed training loops."
    )
    top.add_argument("--version", action="version", version=f"shardio {shardio.__version__}")
    commands = top.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, module in COMMANDS.items():
        summary, _, rest = (module.__doc__ or "").partition("\n")
        command = commands.add_parser(
            name,
            help=summary,
            description=f"{summary}\n{rest}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        module.add_arguments(command)
    return top


def exit_code(error: shardio.ShardioError) -> int:
    """Give the exit code that an error of shardio's leads to."""
    if isinstance(error, shardio.DataError | TransformError | TooManySkipped):
        return BAD_DATA
    of_stores = (CacheFull, StoreAccessDenied, StoreUnavailable)
    of_hosts = (shardio.WorkerDied, TimeoutError, ConnectionError, *of_stores)
    kinds = (UnsupportedEnvironment, InsufficientMemory, *of_hosts)
    return ENVIRONMENT if isinstance(error, kinds) else USAGE


def _system_error(error: OSError, options: argparse.Namespace) -> str:
    """Name the file, if only by where it must lie: a write that fails does not say it."""
    reason = error.strerror or str(error)
    if isinstance(error.filename, str | bytes):
        return f"{os.fsdecode(error.filename)}: {reason}"
    if hasattr(options, "out"):
        return f"{options.out if error.errno in DISK_FULL_ERRORS else options.command}: {reason}"
    return f"{options.path}: {reason}"
