"""Commands in an ASCII locale, in which Python represents `ß` in a name as two surrogates."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
LATIN: Final = b"lat\xe9"
"""A name that is not UTF-8."""


class Ran(NamedTuple):
    code: int
    out: str
    err: str


def run_python(
    code: str, *arguments: str | bytes, folder: Path
) -> subprocess.CompletedProcess[bytes]:
    """Run a Python program in `folder`, in an ASCII locale."""
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("LC_", "LANG", "PYTHON"))}
    locale = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    path = os.pathsep.join(str(ROOT / each) for each in (".", "converters", "tools"))
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        cwd=folder,
        env={**inherited, **locale, "PYTHONPATH": path},
        capture_output=True,
        timeout=240,
        check=False,
    )


# A program that runs commands, separated by NEXT, one after the other in forks, with their output
# in files, and writes the exit codes. A fork exits without freeing shared modules, which would copy
# them. Conversions measure their speed with few samples.
IN_FORKS = """
import argparse, gc, os, runpy, sys, traceback
import shardio.conversion.api, shardio.loader, shardio.measuring.stored, shardio_tools.cli
assert sys.getfilesystemencoding() == "ascii"
shardio.measuring.stored._MAX_SAMPLES = 4
shardio_tools.cli.COMMANDS["convert"].add_arguments(argparse.ArgumentParser())
gc.collect()
gc.freeze()

def exit_code(arguments):
    sys.argv[1:] = arguments
    try:
        runpy.run_module("shardio", run_name="__main__")
    except SystemExit as end:
        return end.code
    except Exception:
        traceback.print_exc()
    return 1

folder, *arguments = sys.argv[1:]
while arguments:
    end = arguments.index("NEXT")
    pid = os.fork()
    if pid == 0:
        for fd in (1, 2):
            os.dup2(os.open(f"{folder}/{len(arguments)}-{fd}", os.O_WRONLY | os.O_CREAT), fd)
        code = exit_code(arguments[:end])
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    print(len(arguments), code, flush=True)
    del arguments[: end + 1]
"""


def run_commands(
    commands: Sequence[Sequence[str | bytes]], folder: Path, outputs: Path
) -> list[Ran]:
    """Run commands in forks of one process; `outputs` is an empty folder for their output."""
    arguments = [each for command in commands for each in (*command, "NEXT")]
    done = run_python(IN_FORKS, str(outputs), *arguments, folder=folder)
    return [
        Ran(int(code), *((outputs / f"{name}-{fd}").read_text("ascii") for fd in (1, 2)))
        for name, code in map(str.split, done.stdout.decode().splitlines())
    ]
