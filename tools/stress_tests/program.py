"""Shared parts of the stress programs: their command lines, their folders, their processes."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[2]


def make_parser(name: str, docstring: str | None) -> argparse.ArgumentParser:
    """Return a parser with --minutes and --seed, and a program's docstring as its help."""
    parser = argparse.ArgumentParser(
        prog=f"tools/stress {name}",
        description=docstring,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--minutes", type=_minutes, help="continue until the time is over")
    parser.add_argument("--seed", type=int, default=0, help="random seed (default: 0)")
    return parser


def _minutes(text: str) -> float:
    if not (found := float(text)) > 0:
        raise argparse.ArgumentTypeError(f"{text}: expected a positive number")
    return found


class Deadline:
    """The end of a run; never over if `minutes` is None."""

    def __init__(self, minutes: float | None) -> None:
        self.is_set = minutes is not None
        self._end_s = time.monotonic() + 60 * (minutes or 0)

    def is_over(self) -> bool:
        """Return True if the time is over."""
        return self.is_set and time.monotonic() >= self._end_s

    def asks_for(self, is_missing: object) -> bool:
        """Return True while time is left; without a deadline, if work is missing."""
        return not self.is_over() if self.is_set else bool(is_missing)

    def share(self, n: int) -> Deadline:
        """Return a deadline after the n-th part of the time that is left."""
        left_s = max(0.0, self._end_s - time.monotonic())
        return Deadline(left_s / 60 / n if self.is_set else None)


@contextlib.contextmanager
def memory_folder() -> Iterator[Path]:
    """Yield a temporary folder; it is in /dev/shm if that exists, where fsync need not wait."""
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=memory) as folder:
        yield Path(folder)


def command(*arguments: str) -> list[str]:
    """Return the command line of a stress program, for `environment`."""
    return [sys.executable, "-m", "stress_tests", *arguments]


def environment() -> dict[str, str]:
    """Return the environment in which a child process finds the checkout."""
    trees = [str(ROOT), str(ROOT / "converters"), str(ROOT / "tools")]
    return os.environ | {"PYTHONPATH": os.pathsep.join(trees)}
