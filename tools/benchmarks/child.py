"""Run measurements in separate processes, and measure the CPU time and memory of a process.

Timed processes import this module, so it imports no package.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).resolve().parents[2]
_CALL: Final = """
import json, sys
from {module} import {name}
print(json.dumps({name}(*json.loads(sys.argv[1]))))
"""


class NotMeasured(Exception):
    """A case cannot run here; the message states what it needs."""


def environment(tree: Path = ROOT, **variables: str) -> dict[str, str]:
    """Return the environment in which a child imports the library of a tree, by default ours."""
    trees = [str(tree), str(tree / "converters"), str(ROOT), str(ROOT / "tools")]
    # Otherwise, a library in the current folder would be found first.
    ours = {"PYTHONPATH": os.pathsep.join(trees), "PYTHONSAFEPATH": "1"}
    return os.environ | ours | variables


def run_program(
    program: str,
    *arguments: object,
    python: str = sys.executable,
    tree: Path = ROOT,
    **options: Any,
) -> Any:
    """Run Python code in a fresh interpreter; return its last line of output, parsed as JSON.

    The arguments are passed as a JSON list in `sys.argv[1]`.
    """
    command = [python, "-c", program, json.dumps(arguments)]
    done = subprocess.run(
        command, env=environment(tree), capture_output=True, text=True, check=False, **options
    )
    if done.returncode:
        raise RuntimeError(f"{python}: exit code {done.returncode}: {done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def call(function: Callable[..., Any], *arguments: object, **options: Any) -> Any:
    """Call a function of a module in a fresh interpreter; return its result, passed as JSON."""
    program = _CALL.format(module=function.__module__, name=function.__name__)
    return run_program(program, *arguments, **options)


def call_timed(function: Callable[..., Any], *arguments: object) -> dict[str, float]:
    """Call a function in a fresh interpreter; return its figures, and the CPU time as "CPU s".

    The CPU time is that of the interpreter and all its descendants for which a parent has waited,
    including their start. It depends less on other load of the machine than the elapsed time.
    """
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    found: dict[str, float] = call(function, *arguments)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_s = after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime
    return {**found, "CPU s": cpu_s}


def peer_python(variable: str, *modules: str) -> str:
    """Return the interpreter that an environment variable names, by default this one.

    Raises NotMeasured if the interpreter lacks one of the modules.
    """
    python = os.environ.get(variable, sys.executable)
    program = f"import {', '.join(modules)}"
    done = subprocess.run([python, "-c", program], capture_output=True, text=True, check=False)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["?"])[-1]
        raise NotMeasured(f"{python}: {last}; set {variable} to an interpreter that has it")
    return python


def descendants(pid: int) -> Iterator[int]:
    """Yield the descendants of a process."""
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            children = [int(child) for child in task.read_text().split()]
        except OSError:  # the thread has ended
            continue
        for child in children:
            yield child
            yield from descendants(child)


def cpu_s(pid: int) -> float:
    """Return the CPU time of a process, to the nanosecond; 0 once it has exited."""
    clock = (~pid << 3) | 2  # clock_getcpuclockid of the C library
    try:
        return time.clock_gettime(clock)
    except OSError:
        return 0.0


def status_bytes(name: str, pid: int | str = "self") -> int:
    """Return a size from /proc/PID/status, such as VmHWM or RssAnon."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    line = next(line for line in lines if line.startswith(f"{name}:"))
    return int(line.split()[1]) * 1024


def convert(source: str, out: str, options: dict[str, Any]) -> dict[str, float]:
    """Convert a folder in this process; return the seconds that it takes."""
    import shardio

    start_s = time.perf_counter()
    shardio.convert(source, out, **options)
    return {"s": time.perf_counter() - start_s}


# Functions that the workers of a pool run. They use a channel only through its methods.


def echo(channel: Any) -> None:
    """Send every message back."""
    while (received := channel.recv()) is not None:
        channel.send(received[0])


def flood(channel: Any) -> None:
    """Send as many messages as each message asks for."""
    while (received := channel.recv()) is not None:
        for _ in range(int(received[0])):
            channel.send(b"x" * 32)


def swallow(channel: Any) -> None:
    """Receive messages."""
    while channel.recv() is not None:
        pass


def leave(channel: Any) -> None:
    """Exit after a message."""
    channel.recv()
