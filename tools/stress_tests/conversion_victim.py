"""A conversion that is killed at a step: its converter, and what lies in wait for it.

Used by `kill_conversion`. The processes that are killed import this file for the converter; it
sees their steps at the door through which shardio changes files (`shardio.storage.fs.perform`).
"""

from __future__ import annotations

import dataclasses
import json
import os
import signal
from collections.abc import Callable, Generator, Mapping
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

import shardio
from shardio import Array, Converter, Input, MediaError, Outcome, Schema, Text
from shardio.conversion import journal
from shardio.dataset import external_lists
from shardio.storage import fs

TRAP = "KILL_CONVERSION_TRAP"
LISTED = "KILL_CONVERSION_LISTED"
"""Entries of a list beyond which it is stored in a part, if fewer than by default."""
OPTIONS: dict[str, Any] = {"kind": "victim", "shard_bytes": 30_000}


@dataclasses.dataclass(frozen=True)
class Victim(Converter):
    """The converter: a word is a sample."""

    kind: ClassVar[str] = "victim"
    version: ClassVar[str] = "1"

    def schema(self) -> Schema:
        """Give the fields of a word."""
        return Schema({"text": Text(), "label": Array("int64"), "pad": Array("uint8", (5000,))})

    def samples(self, source: Input) -> Generator[Mapping[str, Any], None, Outcome]:
        """Yield the words of one file."""
        for n, word in enumerate(Path(source.path).read_text().split()):
            step("decode", lambda: None)
            if word == "!":
                raise MediaError(f"{source.path}: breaks")
            yield {"text": word, "label": source.label, "pad": np.full(5000, n, np.uint8)}
        return Outcome("converted")


@dataclasses.dataclass
class Trap:
    """At which step of which phase to kill whom; `fired` is a file that is there once it has."""

    phase: str
    at: int
    where: str  # before, after or half
    who: str  # driver or worker
    driver: int
    fired: str
    n_steps: int = 0


def step(phase: str, do: Callable[[], Any], half: Callable[[], Any] | None = None) -> Any:
    """Take a step of a phase, unless it is the one to be killed at."""
    if trap is None or trap.phase != phase:
        return do()
    is_driver = os.getpid() == trap.driver
    if trap.who == "worker" and is_driver:
        return do()
    trap.n_steps += 1
    if trap.n_steps != trap.at:
        return do()
    try:
        os.close(os.open(trap.fired, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return do()
    is_suicide = trap.who == "worker" or is_driver
    if is_suicide and trap.where == "half" and half is not None:
        half()
    elif trap.where == "after":
        result = do()
        os.kill(os.getpid() if is_suicide else trap.driver, signal.SIGKILL)
        return result  # a worker that has killed its driver goes on for as long as it lives
    os.kill(os.getpid() if is_suicide else trap.driver, signal.SIGKILL)
    return do()


def phase_of(kind: str, path: str) -> str:
    """To which phase a call belongs."""
    name = os.path.basename(path)
    if "plan.json" in name or name == ".conversion":
        return "plan"
    if any(part in path for part in ("replaced", "generations", "dataset.json")):
        return "generation"
    return {"fsync": "fsync", "rename": "rename", "link": "rename"}.get(kind, "seal")


def perform(kind: str, path: str, function: Callable[..., Any], *given: Any, **named: Any) -> Any:
    """Stand before the door."""
    half = None
    if kind == "write":

        def half() -> object:
            return function(bytes(given[0])[: len(given[0]) // 2])

    return step(
        phase_of(kind, path), lambda: real_perform(kind, path, function, *given, **named), half
    )


def drive(source: str, out: str, what: str) -> None:
    """Convert in two workers. The program of the processes that are killed."""
    global trap
    if trap is not None:
        trap.driver = os.getpid()
        os.environ[TRAP] = json.dumps(dataclasses.asdict(trap))  # for the workers
    small_units()
    shardio.convert(source, out, workers=2, append=what == "append", **OPTIONS)


def small_units() -> None:
    """Cut a few bytes into several units, and short lists into parts if that is wanted."""
    journal.MIN_UNIT_BYTES, journal.MIN_INPUT_BYTES = 30, 0  # type: ignore[misc]
    most = os.environ.get(LISTED, external_lists.MAX_INLINE_ENTRIES)
    external_lists.MAX_INLINE_ENTRIES = int(most)  # type: ignore[misc]


trap: Trap | None = None
real_perform = fs.perform
if os.environ.get(TRAP):
    trap = Trap(**json.loads(os.environ[TRAP]))
    fs.perform = perform  # type: ignore[assignment]  # less exactly typed
