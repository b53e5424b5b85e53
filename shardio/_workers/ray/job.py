"""What a machine of a Ray cluster does: one job after another, in a process of Ray's there."""

from __future__ import annotations

import functools
import os
import pickle
import platform
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any, Final

from shardio._workers.ray.ray_connection import ray_module
from shardio.errors import ShardioError, TransformError, UnsupportedEnvironment, WorkerDied
from shardio.version import __version__

_WATCH_S: Final = 0.5


def do_job(held: list[Any], sees: str, version: str, value: Any) -> Any:
    """Do a job; what it raises is given back.

    `held` has the reference to what is done. `sees` exists where the jobs are given, which has this
    `version` of shardio, and has a name of its own.
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
    """The error, or its text where nobody could make it of its pickle again."""
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
    """What is done, with all that it has kept since the first job of this process."""
    found: Callable[[Any], Any] = ray_module().get(reference)
    return found


@functools.cache
def _end_with(parent: int) -> None:
    """From now on this process ends when its parent does, the part of Ray that is its machine.

    Ray itself would wait for the end of the job, and whoever waits for the job, for Ray.
    """

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(_WATCH_S)
        os._exit(1)

    threading.Thread(target=watch, name="shardio-watch", daemon=True).start()
