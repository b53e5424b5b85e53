"""A conversion that is killed at a step: its converter, and the trap that kills it.

`kill_conversion` uses this module. The processes that are killed import it for the converter. It
then replaces `shardio.storage.fs.perform`, through which all changes of files pass, and so sees
their steps.
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
"""The environment variable with the maximum length of lists that are stored inline."""
OPTIONS: dict[str, Any] = {"kind": "victim", "shard_bytes": 30_000, "progress": False}


@dataclasses.dataclass(frozen=True)
class Victim(Converter):
    """A converter that makes one sample of each word."""

    kind: ClassVar[str] = "victim"
    version: ClassVar[str] = "1"

    def schema(self) -> Schema:
        """Return the fields of a word."""
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
    """The step of a phase at which to kill `who`; the file `fired` exists once `who` is killed."""

    phase: str
    at: int
    where: str  # before, after or half
    who: str  # driver or worker
    driver: int
    fired: str
    n_steps: int = 0


def step(phase: str, do: Callable[[], Any], half: Callable[[], Any] | None = None) -> Any:
    """Take a step of a phase; if the trap is set for this step, kill the driver or the worker."""
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
        return result  # a worker that has killed its driver continues until it exits
    os.kill(os.getpid() if is_suicide else trap.driver, signal.SIGKILL)
    return do()


def phase_of(kind: str, path: str) -> str:
    """Return the phase to which a call belongs."""
    name = os.path.basename(path)
    if "plan.json" in name or name == ".conversion":
        return "plan"
    if any(part in path for part in ("replaced", "generations", "dataset.json")):
        return "generation"
    return {"fsync": "fsync", "rename": "rename", "link": "rename"}.get(kind, "seal")


def perform(kind: str, path: str, function: Callable[..., Any], *given: Any, **named: Any) -> Any:
    """Call `function` as a step of its phase; this replaces `fs.perform`."""
    half = None
    if kind == "write":

        def half() -> object:
            return function(bytes(given[0])[: len(given[0]) // 2])

    return step(
        phase_of(kind, path), lambda: real_perform(kind, path, function, *given, **named), half
    )


def drive(source: str, out: str, what: str) -> None:
    """Convert with two workers: the program that is killed."""
    global trap
    if trap is not None:
        trap.driver = os.getpid()
        os.environ[TRAP] = json.dumps(dataclasses.asdict(trap))  # for the workers
    small_units()
    shardio.convert(source, out, workers=2, append=what == "append", **OPTIONS)


def small_units() -> None:
    """Make units of a few bytes each, and apply the limit LISTED for inline lists if it is set."""
    journal.MIN_UNIT_BYTES, journal.MIN_INPUT_BYTES = 30, 0  # type: ignore[misc]
    most = os.environ.get(LISTED, external_lists.MAX_INLINE_ENTRIES)
    external_lists.MAX_INLINE_ENTRIES = int(most)  # type: ignore[misc]


trap: Trap | None = None
real_perform = fs.perform
if os.environ.get(TRAP):
    trap = Trap(**json.loads(os.environ[TRAP]))
    fs.perform = perform  # type: ignore[assignment]  # less exactly typed
