"""How long a converter may take over a step, in a process that may be ended.

Libraries in C may run in circles over damage, where no exception and no Ctrl-C reaches them. What
they wait for, as a slow disk, does not count: only the processor's time does.
"""

from __future__ import annotations

import signal
from collections.abc import Generator, Mapping
from typing import Any, Final

from shardio.conversion.source import Input, Source

ENDS: Final = signal.SIGPROF
"""What ends the process."""
_BYTES_PER_S: Final = 1 << 20  # a step may be a whole file


def step_s_of(source: Source) -> float | None:
    """The seconds that a source gives a step; None: any."""
    found: float | None = getattr(source, "step_s", None)
    return found


def limit_s(step_s: float, source: Input) -> float:
    """The seconds that a step may take over an input of its size."""
    n_bytes = source.n_bytes + sum(part.n_bytes for part in source.parts)
    return step_s + n_bytes / _BYTES_PER_S


def limited(
    samples: Generator[Mapping[str, Any], None, Any], seconds: float
) -> Generator[Mapping[str, Any], None, Any]:
    """Yield the same samples; a step that takes more of the processor ends this process."""
    try:
        while True:
            signal.setitimer(signal.ITIMER_PROF, seconds)
            try:
                sample = next(samples)
            except StopIteration as end:
                return end.value
            yield sample
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
