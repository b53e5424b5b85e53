"""What a line is doing when a result does not come in time."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Sequence
from textwrap import indent
from types import FrameType
from typing import Final

from shardio._base.phase_timers import now_ns
from shardio._workers.processes.serialization import shortened
from shardio._workers.processes.stack_dumps import shortened as without_ours
from shardio._workers.tasks.stage import Job
from shardio.errors import BatchTimeout

_NAMED: Final = 4
"""Jobs of which the stacks are shown: those that have taken longest."""


def late(
    number: int, timeout_s: float | None, jobs: Sequence[Job], elsewhere: Sequence[str] = ()
) -> BatchTimeout:
    """The error for a result that did not come, with what is under way: of threads, their stacks.

    Args:
        number: of the result, from 0.
        timeout_s: how long it was waited for.
        jobs: that have begun.
        elsewhere: lines about those that others than threads of this process do.
    """
    lines = [f"result {number} did not come within {timeout_s:g} s"]
    at_work = [job for job in jobs if not job.is_suspended]
    frames = sys._current_frames()
    for job in sorted(at_work, key=lambda job: job.began_ns)[:_NAMED]:
        lines.append(f"{said(job)}, for {(now_ns() - job.began_ns) * 1e-9:.1f} s")
        frame = frames.get(job.thread_id)
        if frame is not None:
            lines.append(indent(_stack(frame), "    "))
    if len(at_work) > _NAMED:
        lines.append(f"and {len(at_work) - _NAMED} calls more")
    lines += elsewhere
    if not at_work and not elsewhere:
        lines.append("nothing is under way")
    return BatchTimeout("\n".join(lines))


def said(job: Job) -> str:
    """Which call it is, in words."""
    if job.origin.first < 0:
        return f"{job.stage.name}, item {job.n_given}"
    return f"{job} ({shortened(job.item)})"


def _stack(frame: FrameType) -> str:
    # The innermost call first, as faulthandler has it, which `shortened` reads.
    calls = reversed(traceback.extract_stack(frame))
    lines = [f'  File "{call.filename}", line {call.lineno} in {call.name}' for call in calls]
    return without_ours("\n".join(["thread:", *lines])).partition("\n")[2]
