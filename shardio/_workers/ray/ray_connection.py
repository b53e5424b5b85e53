"""Connects this process to a Ray cluster: the only module that imports Ray."""

from __future__ import annotations

import os
import socket
import warnings
from typing import Any, Final

from shardio.errors import UnsupportedEnvironment, install_hint

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
    """Connect, or start Ray here; quiet, and nothing is told to Ray's makers unless it was asked.

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
    """What an error says; all of it where the first line only announces the others, as versions."""
    line = first_line(error)
    return " ".join(str(error).split()) if line.endswith(":") else line


def first_line(error: Exception) -> str:
    """The first line of what an error says: Ray's have many."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
