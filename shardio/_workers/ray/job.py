"""The job process on a machine of a Ray cluster, and the only module that imports Ray."""

from __future__ import annotations

import functools
import os
import pickle
import platform
import socket
import threading
import time
import traceback
import warnings
from collections.abc import Callable
from typing import Any, Final

from shardio._base.version import __version__
from shardio.errors import (
    ShardioError,
    TransformError,
    UnsupportedEnvironment,
    WorkerDied,
    install_hint,
)

_PATIENCE_S: Final = 10.0


def ray_module() -> Any:
    """Ray, which is imported when it is first needed.

    Raises:
        UnsupportedEnvironment: it is not installed.
    """
    try:
        import ray
    except ModuleNotFoundError as error:
        raise UnsupportedEnvironment(
            f"engine 'ray' needs the package 'ray', which is not installed: {install_hint('ray')}"
        ) from error
    return ray


def connect(ray: Any, address: str | None) -> None:
    """Connect to a cluster, or start Ray here; quiet, and without Ray's usage reports by default.

    Raises:
        UnsupportedEnvironment: nothing answers.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    place = address or os.environ.get("RAY_ADDRESS") or "local"
    options: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR"}
    if place == "local":
        options |= {"include_dashboard": False}
    try:
        _refuse_silence(place)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # of what Ray will do to GPUs one day
            ray.init(place, **options)
    except (OSError, ValueError, RuntimeError) as error:
        raise UnsupportedEnvironment(
            f"Ray at {place!r} cannot be reached: {_said(error)}"
        ) from error


def _refuse_silence(place: str) -> None:
    """Make sure that something listens at an address of a host and a port: Ray waits for minutes.

    Raises:
        OSError: nothing does.
    """
    host, _, port = place.removeprefix("ray://").rpartition(":")
    if host and port.isdecimal():
        socket.create_connection((host.strip("[]"), int(port)), _PATIENCE_S).close()


def _said(error: Exception) -> str:
    """Return the message of an error, whole if its first line only announces the others."""
    line = first_line(error)
    return " ".join(str(error).split()) if line.endswith(":") else line


def first_line(error: Exception) -> str:
    """Return the first line of an error's message: Ray's have many."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


_WATCH_S: Final = 0.5


def do_job(held: list[Any], sees: str, version: str, value: Any) -> Any:
    """Run a job and return its result or its exception.

    `held` has the reference to the function. `sees` exists on the machine that hands out jobs,
    which has this `version` of shardio, and has a name of its own.
    """
    try:
        _end_with(os.getppid())
        if version != __version__:
            raise UnsupportedEnvironment(
                f"machine {platform.node()} of the Ray cluster has shardio {__version__}, this one "
                f"{version}: install the same everywhere"
            )
        if not os.path.exists(sees):
            raise UnsupportedEnvironment(
                f"machine {platform.node()} of the Ray cluster does not see {sees}: source and "
                "dataset must lie on a file system that all machines have under the same path"
            )
        return _function(held[0])(value)
    except SystemExit:  # of which Ray would say no more than that a process has ended
        where = f"on machine {platform.node()}:\n{traceback.format_exc()}"
        return WorkerDied(f"a job asks its process to end, {where}")
    except Exception as error:  # noqa: BLE001  # it is raised where the jobs are given
        if not isinstance(error, ShardioError | OSError):  # these say themselves what is wrong
            error.add_note(f"on machine {platform.node()}:\n{traceback.format_exc()}")
        return _portable(error)


def _portable(error: Exception) -> Exception:
    """Return the error, or its text if it cannot be unpickled elsewhere."""
    import cloudpickle  # type: ignore[import-untyped]

    try:
        again = pickle.loads(cloudpickle.dumps(error))  # our own, never data
    except Exception:  # noqa: BLE001  # classes of users fail in any way they like
        again = None
    if isinstance(again, Exception):
        return error
    return TransformError("".join(traceback.format_exception_only(error)).strip())


@functools.lru_cache(1)
def _function(reference: Any) -> Callable[[Any], Any]:
    """Return the function with the state it has kept since the first job of this process."""
    found: Callable[[Any], Any] = ray_module().get(reference)
    return found


@functools.cache
def _end_with(parent: int) -> None:
    """End this process when its parent exits, which is the machine's part of Ray.

    Ray itself would wait for the end of the job, and the process that waits for the job, for Ray.
    """

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(_WATCH_S)
        os._exit(1)

    threading.Thread(target=watch, name="shardio-watch", daemon=True).start()
