"""Feeds a target one input, and judges: only shardio's own errors, in time, within memory.

Linux only: memory is the peak of resident memory, which /proc tells and resets.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import time
import traceback
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

Target = Callable[[bytes], str]
"""Takes an input, and returns the name of what became of it."""

LIMIT_S: Final = 1.0
"""No input of the size that a fuzzer makes may take more time of a CPU."""
LIMIT_WAITING_S = 20.0
"""Nor wait for anything: that long by the clock, whatever else runs on the machine."""
_FIXED_BYTES: Final = 4 << 20
_BYTES_PER_BYTE: Final = 32
"""The file once; each of its bytes as a value of Python, of which the smallest in JSON have 24."""
_ADDRESS_BYTES: Final = 512 << 20
"""The address space a process gets beyond its own: even untouched memory has an end."""

_M_MMAP_THRESHOLD: Final = -3
_M_ARENA_MAX: Final = -8
_MMAP_BYTES: Final = 256 << 10


def justified_bytes(n_bytes: int) -> int:
    return _FIXED_BYTES + _BYTES_PER_BYTE * n_bytes


@dataclass(frozen=True, slots=True)
class Verdict:
    """The outcome of an input; `problem` is None unless it is a finding."""

    outcome: str
    problem: str | None
    seconds: float
    n_bytes: int


class TooSlow(BaseException):
    """Ends an input that takes too long; no `except Exception` stops it."""


def _interrupt(number: int, frame: types.FrameType | None) -> None:
    raise TooSlow


def prepare_process() -> None:
    """Let this process fail at an absurd allocation, and give back what it frees.

    It may have little more address space than now. The C library, if it is glibc, would keep large
    pieces of memory that are freed: the next input that takes them would seem to take nothing. And
    it would set 64 MiB of addresses apart for every thread that a library starts.
    """
    if hasattr(libc := ctypes.CDLL(None), "mallopt"):
        libc.mallopt(_M_MMAP_THRESHOLD, _MMAP_BYTES)
        libc.mallopt(_M_ARENA_MAX, 1)
    with open("/proc/self/statm") as file:
        now = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (now + _ADDRESS_BYTES, resource.RLIM_INFINITY))


class Judge:
    """Judges inputs, one after the other, in this process.

    Owns SIGALRM and SIGPROF from `__init__` to `close`. What is too slow or too large counts only
    if it is so twice: the first input of a kind loads modules.
    """

    def __init__(self, limit_s: float = LIMIT_S) -> None:
        self._limit_s = limit_s
        self._before = {n: signal.signal(n, _interrupt) for n in (signal.SIGALRM, signal.SIGPROF)}
        self._clear = os.open("/proc/self/clear_refs", os.O_WRONLY | os.O_CLOEXEC)
        self._status = os.open("/proc/self/status", os.O_RDONLY | os.O_CLOEXEC)

    def judge(self, target: Target, content: bytes) -> Verdict:
        """Feed the target, again if it took too long or too much."""
        verdict = self._once(target, content)
        is_limit = verdict.problem is not None and verdict.outcome in ("slow", "large")
        return self._once(target, content) if is_limit else verdict

    def _once(self, target: Target, content: bytes) -> Verdict:
        os.pwrite(self._clear, b"5", 0)  # the peak is now what is resident
        before, start = self._peak(), time.process_time()
        outcome, problem = "", None
        try:
            signal.setitimer(signal.ITIMER_PROF, self._limit_s)
            signal.setitimer(signal.ITIMER_REAL, LIMIT_WAITING_S)
            try:
                outcome = target(content)
            finally:
                signal.setitimer(signal.ITIMER_PROF, 0)
                signal.setitimer(signal.ITIMER_REAL, 0)
        except TooSlow:
            outcome, problem = "slow", f"took over {self._limit_s} s:\n{traceback.format_exc()}"
        except Exception as error:  # noqa: BLE001 - whatever it is, it is what is looked for
            outcome, problem = type(error).__name__, traceback.format_exc()
        seconds, grown = time.process_time() - start, self._peak() - before
        if problem is None and grown > 2 * justified_bytes(len(content)):
            justified = justified_bytes(len(content))
            outcome, problem = "large", f"took {grown} bytes where {justified} are justified"
        return Verdict(outcome, problem, seconds, grown)

    def _peak(self) -> int:
        status = os.pread(self._status, 4096, 0)
        at = status.index(b"VmHWM:") + 6
        return int(status[at : status.index(b"kB", at)]) << 10

    def close(self) -> None:
        for timer in (signal.ITIMER_PROF, signal.ITIMER_REAL):
            signal.setitimer(timer, 0)  # one that is left would kill this process later
        for number, handler in self._before.items():
            signal.signal(number, handler)
        os.close(self._clear)
        os.close(self._status)
