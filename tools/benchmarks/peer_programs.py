"""Programs of peers, which run in interpreters of their own and print a line of JSON."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

from benchmarks import child
from benchmarks.racers.peers import PEERS

_ERROR: Final = re.compile(r"[\w.]+(Error|Exception|Samples|Mismatch|Damaged|Changed): ")
"""The line of a traceback that names the error; some libraries print more after it."""


@dataclass(frozen=True)
class Ended:
    """The end of a program: its answer, or the reason why there is none."""

    answer: Any
    reason: str
    timed_out: bool = False


def run_peer(peer: str, program: Sequence[str], timeout_s: float) -> Ended:
    """Run a program of a peer; at its end, or after `timeout_s`, kill it and its workers."""
    timed_out = False
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        # Files, since a worker that outlives its program would keep a pipe open.
        process = subprocess.Popen(
            program, env=_environment(peer), stdout=out, stderr=err, start_new_session=True
        )
        try:
            process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            timed_out = True
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        out.seek(0)
        answers = [line for line in out.read().splitlines() if line.startswith("{")]
        err.seek(0)
        lines = err.read().strip().splitlines()
    if timed_out:
        return Ended(None, f"stopped after {timeout_s:g} s", timed_out=True)
    answer = json.loads(answers[-1]) if answers and not process.returncode else None
    return Ended(answer, _reason(process.returncode, lines))


def _reason(returncode: int, lines: Sequence[str]) -> str:
    if returncode < 0:
        return f"killed by {signal.Signals(-returncode).name}"
    errors = [line for line in lines if _ERROR.match(line)]
    last = (errors or lines or ["no message"])[-1]
    return f"exit code {returncode}: {last[:300]}"


def _environment(peer: str) -> dict[str, str]:
    """Return the environment variables of a peer.

    Bytecode is cached, and only the environment "shardio" can import shardio.
    """
    found = child.environment()
    if PEERS[peer].environment != "shardio":
        found["PYTHONPATH"] = str(child.ROOT / "tools")
    found.pop("PYTHONDONTWRITEBYTECODE", None)
    return found
