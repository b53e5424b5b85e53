"""The first steps of a new worker: in memory that the zygote has forked, or a fresh interpreter.

Imports nothing slow: main reads the constants.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import socket
import sys
import traceback
from collections.abc import Callable
from typing import Final, Literal, NoReturn

from shardio._workers.processes.channel import Channel
from shardio._workers.processes.linux import name_process

__all__ = ["EXECUTE", "FORK", "Start", "Target", "execute", "preload", "run"]

Start = Literal["zygote", "spawn"]
"""The start method of worker processes: forked by the zygote, or executing an interpreter too."""

FORK, EXECUTE = range(2)
"""The zygote's action for a worker: fork; fork and execute an interpreter."""

Target = Callable[[Channel], object]

_Fds = tuple[int, ...]

GIVEN_AT: Final = 2
"""The index of the pool's first descriptor in a request, after channel and bootstrap payload."""


def preload(names: tuple[str, ...]) -> None:
    """Import what workers will need, for all forks of this process.

    A module that is missing is reported by the worker that needs it.
    """
    for name in names:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    # A collection in a worker would write to, and so copy, every page of these objects. None is run
    # before: of 36,000 objects 500 are garbage, and finding them takes 12 ms.
    gc.freeze()


def execute(place: int, fds: _Fds, modules: tuple[str, ...]) -> NoReturn:
    """Replace this process, a fork of the zygote, by a fresh interpreter.

    Kernel settings of the process stay, such as the signal at the zygote's exit.
    """
    for fd in fds:
        os.set_inheritable(fd, True)
    code = (
        f"import sys; sys.path[:] = {sys.path!r}; "
        "from shardio._workers.processes.worker_main import begin; "
        f"begin({place}, {fds!r}, {modules!r})"
    )
    # The zygote's own command line: the same interpreter and flags; the code comes last.
    os.execv(sys.executable, [*sys.orig_argv[:-1], code])


def begin(place: int, fds: _Fds, modules: tuple[str, ...]) -> NoReturn:
    """Run as a worker in a new interpreter."""
    for fd in fds:
        os.set_inheritable(fd, False)
    # Before main's environment is applied: it includes one thread per library, as set here.
    preload(modules)
    run(place, fds)


def run(place: int, fds: _Fds) -> NoReturn:
    """Run the pool's function in this new worker, report its failure to main, and exit.

    Args:
        place: the worker's index in its pool.
        fds: its channel, the bootstrap payload, and the pool's descriptors.
    """
    name_process("shardio-worker")
    gc.enable()
    # Imported late, for main: it reads this module's constants before it needs NumPy.
    from shardio._workers.processes.global_generators import seed_generators_of_worker

    seed_generators_of_worker()
    channel_fd, cargo_fd = fds[:GIVEN_AT]
    channel = Channel(place, socket.socket(fileno=channel_fd), fds[GIVEN_AT:])
    code = 0
    try:
        # Imported late, for main: it reads this module's constants before it needs cloudpickle.
        from shardio._workers.processes.serialization import unpack

        target: Target = unpack(cargo_fd)
        os.close(cargo_fd)
        target(channel)
    except BaseException as error:  # noqa: BLE001  # sys.exit and all: main gets it as text
        code = 1
        _report(channel, error)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _report(channel: Channel, error: BaseException) -> None:
    # Without the frame of `run` itself
    frames = error.__traceback__.tb_next if error.__traceback__ else None
    text = "".join(traceback.format_exception(type(error), error, frames))
    try:
        channel.report_failure(text)
    except (BrokenPipeError, ConnectionResetError):
        return  # main has closed the pool, the most frequent reason for `error`
