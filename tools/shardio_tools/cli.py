"""The command `shardio`: argument parsing, messages of errors, exit codes.

Exit codes: 0 success; 1 bad data, which is listed; 2 bad arguments or paths; 3 a problem with
this machine; 130 interrupted; 141 broken pipe.
"""

from __future__ import annotations

import argparse
import errno
import importlib
import os
import re
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from types import ModuleType
from typing import Any, Final, NoReturn

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
from shardio_tools.arguments import expand_home, habit_hint, refuse_urls, subset_advice, suggestion
from shardio_tools.help import HelpFormatter, command_help, overview
from shardio_tools.output import (
    begin_report,
    check_progress_is_read,
    escape_unwritable,
    escaped,
    flush,
    is_report_lost,
    print_error,
    print_now,
    redirect_to_null,
    shown_path,
)
from shardio_tools.screen import fitted

OK, BAD_DATA, USAGE, ENVIRONMENT, INTERRUPTED, BROKEN_PIPE = 0, 1, 2, 3, 130, 141

DISK_FULL_ERRORS = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS}
"""Errors that only writing causes: messages about them name OUT, not an input."""


_PACKAGES: Final = ("inspect", "view")
"""Commands that are packages, with a module `command`."""


class Commands(Mapping[str, ModuleType]):
    """The modules of the commands, by name of command; a module is imported on access."""

    def __init__(self, *names: str) -> None:
        self._names = names

    def __getitem__(self, name: str) -> ModuleType:
        if name not in self._names:
            raise KeyError(name)
        module = f"{name}.command" if name in _PACKAGES else name.replace("-", "_")
        return importlib.import_module(f"shardio_tools.{module}")

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


GROUPS: dict[str, Commands] = {
    "make a dataset": Commands("demo", "convert", "add-column", "split", "merge"),
    "look at it": Commands("inspect", "view", "stats", "diff"),
    "take care of it": Commands("verify", "repair", "compact", "reshard", "doctor"),
    "use it": Commands("bench", "export", "serve"),
}
"""The commands in groups, in the order of the overview."""

COMMANDS = Commands(*chain(*GROUPS.values()))


def main(
    arguments: Sequence[str] | None = None, *, on_loaded: Callable[[], object] | None = None
) -> int:
    """Run a command line, by default this process's arguments; return the exit code.

    If the report could not be printed, the exit code is ENVIRONMENT instead of 0 or 1. `on_loaded`
    is called once the command's modules are imported, before the command runs.

    Raises:
        SystemExit: from argparse: 0 after --help, 2 for invalid arguments.
    """
    _ensure_std_fds()
    escape_unwritable()
    begin_report()
    try:
        try:
            options = _parsed(_without_help(arguments))
            if on_loaded is not None:
                on_loaded()
            code = _run(options)
            check_progress_is_read()
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
                # Python flushes again at exit, and would report an error.
                redirect_to_null(stream)
        return BROKEN_PIPE
    return ENVIRONMENT if is_report_lost() and code in (OK, BAD_DATA) else code


def _parsed(arguments: Sequence[str]) -> argparse.Namespace:
    """Parse arguments; exit with a message if the converter of a kind cannot be imported."""
    try:
        return parser().parse_args(arguments)
    except shardio.ShardioError as error:
        print_error(escaped(str(error)))
        raise SystemExit(exit_code(error)) from error


def _without_help(arguments: Sequence[str] | None) -> Sequence[str]:
    """Return the arguments with `help COMMAND` replaced by `COMMAND --help`."""
    given = sys.argv[1:] if arguments is None else [*arguments]
    return [*given[1:2], "--help"] if given[:1] == ["help"] else given


def _ensure_std_fds() -> None:
    """Open missing standard descriptors as /dev/null, so that no file gets descriptor 0 to 2."""
    while (fd := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(fd, True)
    os.close(fd)
    if sys.stdout is None:
        sys.stdout = open(1, "w", closefd=False)
    if sys.stderr is None:
        sys.stderr = open(2, "w", closefd=False)


def _run(options: argparse.Namespace) -> int:
    try:
        expand_home(options)
        refuse_urls(options)
        with warnings.catch_warnings():
            warnings.showwarning = lambda message, *_: print_error(
                f"warning: {escaped(str(message))}", "warning"
            )
            code: int = COMMANDS[options.command].run(options)
    except KeyboardInterrupt as error:
        _print_exception(error, f"{options.command}: interrupted")
        return INTERRUPTED
    except BrokenPipeError:
        raise
    except ClosedError:
        raise  # a bug, because no user input leads here: show the traceback
    except shardio.ShardioError as error:
        _print_exception(error, subset_advice(error, options) or str(error))
        return exit_code(error)
    except OSError as error:
        _print_exception(error, _system_error(error, options))
        return ENVIRONMENT
    return code


_NUMBER: Final = re.compile(r"-?\d+")
_OPTION: Final = re.compile(r"\b\w+=\S+ \((--[^()]+)\)")
"""An option as messages name it, in Python and on the command line: "append=True (--append)"."""


def _print_exception(error: BaseException, what: str) -> None:
    what = _OPTION.sub(r"\1", what)
    keeps_lines = isinstance(error, shardio.WorkerDied | TransformError)
    for text in (what, *getattr(error, "__notes__", ())):
        # A worker's traceback keeps its lines; newlines elsewhere may come from file names.
        print_error("\n".join(map(escaped, text.splitlines())) if keeps_lines else escaped(text))


_HABITS = {
    word: f"; did you mean {command}?"
    for command, words in {
        "diff": ("cmp", "compare"),
        "inspect": ("info", "show", "ls", "list", "describe", "head", "cat", "summary"),
        "view": ("browse", "gui", "explore", "ui"),
        "verify": ("check", "validate", "fsck", "test"),
        "convert": ("import", "create", "make", "write", "build", "pack"),
        "add-column": ("add", "column"),
        "stats": ("count",),
        "--version": ("version",),
    }.items()
    for word in words
} | dict.fromkeys(("delete", "remove", "rm"), "; a dataset is a folder, which rm -r removes")
"""Suggestions for words that other programs use for similar commands."""


_FORMATS = {
    **dict.fromkeys(("dir", "folder", "images", "imagefolder", "jpeg", "png", "raw"), "files"),
    **dict.fromkeys(("tar", "tars", "wds"), "webdataset"),
    **dict.fromkeys(("arrow", "hf", "pq", "table"), "parquet"),
}
"""Names by which other programs know the formats of `shardio export`."""


class _Parser(argparse.ArgumentParser):
    """A parser that adds its command's arguments when it parses, and suggests correct spellings."""

    command: str | None = None
    _arguments: Sequence[str] = ()

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._positionals.title = "arguments"

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Add the arguments of the command, and parse."""
        command, self.command = self.command, None
        self._arguments = [*map(str, args or ())]
        if command is not None:
            module = COMMANDS[command]
            self.description, self.epilog = command_help(module)
            module.add_arguments(self, *([args] if command == "convert" else []))
        options, unknown = super().parse_known_args(args, namespace)
        if unknown:
            flags = [each for each in unknown if each[:1] == "-" and not _NUMBER.fullmatch(each)]
            flag = (flags or unknown)[0].partition("=")[0]
            hint = self._hint_at(flag)
            if not flags:
                hint = self._option_for(unknown[0])
            if command == "convert":
                from shardio_tools.converter_options import hint_at_kinds

                hint = hint_at_kinds(flag) or hint
            self.error(f"unrecognized arguments: {' '.join(unknown)}{hint}")
        if command is None and options.command is None:
            self.exit(USAGE, overview(GROUPS))
        return options, unknown

    def _hint_at(self, flag: str) -> str:
        """Return the end of a message about an unknown option."""
        known = self._option_string_actions
        command = self.prog.rpartition(" ")[2]
        return habit_hint(flag, known, command) or suggestion(flag, known)

    def _option_for(self, word: str) -> str:
        """Return the end of a message about a surplus argument: the option that takes it."""
        if self.prog.endswith(" convert"):
            return (
                "; convert takes one SRC: a folder, or a pattern in quotes; or --append the "
                "sources in turn"
            )
        flag = "--sample" if _NUMBER.fullmatch(word) else "--subset"
        is_known = flag in self._option_string_actions
        return f"; did you mean {flag} {shown_path(word)}?" if is_known else ""

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        try:
            super()._check_value(action, value)
        except argparse.ArgumentError as error:
            hint = suggestion(str(value), action.choices or ())
            if action.dest == "format" and (other := _FORMATS.get(str(value).lower())):
                hint = f"; did you mean {other}?"
            if action.dest == "command":
                hint = hint or _HABITS.get(str(value).lower(), "")
                others = f"; the commands are {', '.join(COMMANDS)}"
                self.error(f"unknown command {escaped(str(value))!r}{hint or others}")
            error.message += hint
            raise

    def error(self, message: str) -> NoReturn:
        """Print the usage of the command and an error, and exit.

        If a required flag is missing because it was mistyped, the error names the mistyped flag.
        If --format is missing because a format was given without it, the error says so.
        """
        if message.endswith(": --format"):
            found = (_FORMATS.get(word.lower(), word) for word in self._arguments)
            named = [word for word in found if word in _FORMATS.values()]
            message += f"; write --format {named[0]}" if named else ""
        if message.endswith("is required") or message.startswith("the following arguments"):
            for argument in self._arguments:
                flag = argument.partition("=")[0]
                known = self._option_string_actions
                if flag.startswith("--") and not any(name.startswith(flag) for name in known):
                    message = f"unrecognized arguments: {argument}{self._hint_at(flag)}"
                    break
        super().error(message)

    def _print_message(self, message: str, file: Any = None) -> None:
        stream = file or sys.stderr
        print_now(fitted(message.removesuffix("\n"), stream), stream)


class _TopParser(_Parser):
    """The parser of the whole command line, whose help is the overview of all commands."""

    def format_help(self) -> str:
        """Return the overview."""
        return overview(GROUPS)


def parser() -> argparse.ArgumentParser:
    """Build the parser of the whole command line."""
    top = _TopParser(prog="shardio", formatter_class=HelpFormatter)
    top.add_argument("--version", action="version", version=f"shardio {shardio.__version__}")
    commands = top.add_subparsers(
        prog="shardio", dest="command", metavar="COMMAND", parser_class=_Parser
    )
    for name in COMMANDS:
        commands.add_parser(name, formatter_class=HelpFormatter).command = name
    return top


def exit_code(error: shardio.ShardioError) -> int:
    """Return the exit code for an error of shardio."""
    if isinstance(error, shardio.DataError | TransformError | TooManySkipped):
        return BAD_DATA
    of_stores = (CacheFull, StoreAccessDenied, StoreUnavailable)
    of_hosts = (shardio.WorkerDied, TimeoutError, ConnectionError, *of_stores)
    kinds = (UnsupportedEnvironment, InsufficientMemory, *of_hosts)
    return ENVIRONMENT if isinstance(error, kinds) else USAGE


def _system_error(error: OSError, options: argparse.Namespace) -> str:
    """Return a message that names the error's file; without a file, OUT, PATH or the command."""
    reason = error.strerror or str(error)
    if isinstance(error.filename, str | bytes):
        return f"{_as_given(os.fsdecode(error.filename), options)}: {reason}"
    if hasattr(options, "out"):
        return f"{options.out if error.errno in DISK_FULL_ERRORS else options.command}: {reason}"
    return f"{getattr(options, 'path', options.command)}: {reason}"


def _as_given(path: str, options: argparse.Namespace) -> str:
    """Return a path as the user has spelt it, if it is an argument, its folder or below them."""
    for name in ("out", "path", "src"):
        if given := getattr(options, name, None):
            whole = os.path.abspath(given)
            for known, shown in ((whole, given), (os.path.dirname(whole), os.path.dirname(given))):
                if path == known:
                    return shown or "."
                if path.startswith(f"{known}/"):
                    return os.path.join(shown, path[len(known) + 1 :])
    return path
