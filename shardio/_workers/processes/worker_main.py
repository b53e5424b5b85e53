"""The first steps of a new worker, either a fork of the zygote or a new interpreter.

This module imports nothing slow, because the main process reads its constants.
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
"""The start method of workers: fork the zygote, or also execute a new interpreter in the fork."""

FORK, EXECUTE = range(2)
"""The zygote's action to start a worker: fork, or fork and execute an interpreter."""

Target = Callable[[Channel], object]

_Fds = tuple[int, ...]

GIVEN_AT: Final = 2
"""The index of the pool's first descriptor in a request; channel and payload come first."""


def preload(names: tuple[str, ...]) -> None:
    """Import modules that workers will need, for all forks of this process.

    A missing module is reported by the worker that needs it.
    """
    for name in names:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    # Exclude all present objects from garbage collection, which would write to their pages in a
    # worker and thus copy the pages. Do not collect before: only 500 of 36,000 objects are garbage,
    # and finding them takes 12 ms.
    gc.freeze()


def execute(place: int, fds: _Fds, modules: tuple[str, ...]) -> NoReturn:
    """Replace this process, a fork of the zygote, by a new interpreter.

    Settings of the process survive, such as the signal that it receives if the zygote exits.
    """
    for fd in fds:
        os.set_inheritable(fd, True)
    code = (
        f"import sys; sys.path[:] = {sys.path!r}; "
        "from shardio._workers.processes.worker_main import begin; "
        f"begin({place}, {fds!r}, {modules!r})"
    )
    # Use the zygote's own command line, with other code as the last argument.
    os.execv(sys.executable, [*sys.orig_argv[:-1], code])


def begin(place: int, fds: _Fds, modules: tuple[str, ...]) -> NoReturn:
    """Run as a worker in a new interpreter."""
    for fd in fds:
        os.set_inheritable(fd, False)
    # Import before the main process's environment is applied, so that libraries use one thread.
    preload(modules)
    run(place, fds)


def run(place: int, fds: _Fds) -> NoReturn:
    """Run the pool's function in this new worker, report a failure to the main process, and exit.

    Args:
        place: the index of the worker in its pool.
        fds: the descriptors of the worker's channel and the payload, then those given to the pool.
    """
    name_process("shardio-worker")
    gc.enable()
    # Import this late, because the main process imports this module before it needs NumPy.
    from shardio._workers.processes.global_generators import seed_generators_of_worker

    seed_generators_of_worker()
    channel_fd, cargo_fd = fds[:GIVEN_AT]
    channel = Channel(place, socket.socket(fileno=channel_fd), fds[GIVEN_AT:])
    code = 0
    try:
        # Import this late, because the main process imports this module before cloudpickle.
        from shardio._workers.processes.serialization import unpack

        target: Target = unpack(cargo_fd)
        os.close(cargo_fd)
        target(channel)
    except BaseException as error:  # noqa: BLE001  # even sys.exit is reported as text
        code = 1
        _report(channel, error)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _report(channel: Channel, error: BaseException) -> None:
    # Leave out the frame of `run` itself.
    frames = error.__traceback__.tb_next if error.__traceback__ else None
    text = "".join(traceback.format_exception(type(error), error, frames))
    try:
        channel.report_failure(text)
    except (BrokenPipeError, ConnectionResetError):
        return  # the main process has closed the pool; usually, this also caused `error`
