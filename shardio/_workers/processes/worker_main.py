"""What a new worker does first: in memory that the zygote has forked, or in a fresh interpreter.

Imports nothing that takes time: main reads the constants.
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

__all__ = ["EXECUTE", "FORK", "LOAD", "Start", "Target", "execute", "import_all", "preload", "run"]

Start = Literal["zygote", "spawn", "forkserver", "fork"]
"""How worker processes start: forked by the zygote that all crews share; by it, but executing an
interpreter of their own; by a zygote of the crew's own, which has loaded the crew's function; or by
a fork of main."""

FORK, EXECUTE, LOAD = range(3)
"""What the zygote is to do for a worker: fork; fork and execute an interpreter; load the crew's
function, unless it has, and fork."""

Target = Callable[[Channel], object]

_Fds = tuple[int, ...]

GIVEN_AT: Final = 2
"""Where, in what comes with a request, the crew's descriptors begin: behind channel and cargo."""


def import_all(names: tuple[str, ...]) -> None:
    """Import what workers will need; of what is missing, the worker that needs it tells."""
    for name in names:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)


def preload(names: tuple[str, ...]) -> None:
    """Import what workers will need, for all forks of this process."""
    import_all(names)
    # Collections in workers would write to, and so copy, every page of these objects. None before:
    # of 36,000 objects 500 are garbage, and to find them takes 12 ms.
    gc.freeze()


def execute(place: int, fds: _Fds, modules: tuple[str, ...]) -> NoReturn:
    """Replace this process, a fork of the zygote, by an interpreter that begins from nothing.

    What the kernel was told about the process stays: that it ends with the zygote.
    """
    for fd in fds:
        os.set_inheritable(fd, True)
    code = (
        f"import sys; sys.path[:] = {sys.path!r}; "
        "from shardio._workers.processes.worker_main import begin; "
        f"begin({place}, {fds!r}, {modules!r})"
    )
    # The zygote's own command line: the same interpreter and flags, and last the code.
    os.execv(sys.executable, [*sys.orig_argv[:-1], code])


def begin(place: int, fds: _Fds, modules: tuple[str, ...]) -> NoReturn:
    """Be a worker in an interpreter of its own."""
    for fd in fds:
        os.set_inheritable(fd, False)
    # Before the surroundings of main are taken over: these have one thread because of ours.
    preload(modules)
    run(place, fds, None)


def run(place: int, fds: _Fds, target: Target | None) -> NoReturn:
    """Run the crew's function in this new worker, tell main if it raises, and end the process.

    Args:
        place: of the worker in its crew.
        fds: its channel, the cargo, and what the crew was given.
        target: the function, where it need not be unpacked.
    """
    name_process("shardio-worker")
    gc.enable()
    # Late, for main: it reads this module's constants before it needs NumPy.
    from shardio._workers.processes.global_generators import seed_generators_of_worker

    seed_generators_of_worker()
    channel_fd, cargo_fd = fds[:GIVEN_AT]
    channel = Channel(place, socket.socket(fileno=channel_fd), fds[GIVEN_AT:])
    code = 0
    try:
        if target is None:
            # Late, for main: it reads this module's constants before it needs cloudpickle.
            from shardio._workers.processes.serialization import unpack

            target = unpack(cargo_fd)
        os.close(cargo_fd)
        target(channel)
    except BaseException as error:  # noqa: BLE001  # sys.exit and all: main gets it as text
        code = 1
        _report(channel, error)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _report(channel: Channel, error: BaseException) -> None:
    frames = error.__traceback__.tb_next if error.__traceback__ else None  # without `run` itself
    text = "".join(traceback.format_exception(type(error), error, frames))
    try:
        channel.report_failure(text)
    except (BrokenPipeError, ConnectionResetError):
        return  # main has closed the crew, which is most often why `error` was raised
