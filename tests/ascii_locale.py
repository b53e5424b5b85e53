"""Commands in an ASCII locale, in which Python represents `ß` in a name as two surrogates."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

ROOT = Path(__file__).resolve().parents[1]
LATIN: Final = b"lat\xe9"
"""A name that is not UTF-8."""

# Runs each command in a fork of what has the command line loaded. Its output goes to files, as
# pipes that nobody reads would hold it up.
_ONE_AFTER_THE_OTHER = """
import json, os, runpy, sys
import shardio_tools.cli
assert sys.getfilesystemencoding() == "ascii"
for number, arguments in enumerate(json.load(open(sys.argv[1], "rb"))):
    pid = os.fork()
    if pid == 0:
        for fd, name in (1, "out"), (2, "err"):
            os.dup2(os.open(f"{sys.argv[1]}.{number}.{name}", os.O_CREAT | os.O_WRONLY), fd)
        sys.argv[1:] = [os.fsdecode(each.encode("latin-1")) for each in arguments]
        runpy.run_module("shardio", run_name="__main__")
    with open(f"{sys.argv[1]}.{number}.code", "w") as file:
        file.write(str(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])))
"""


@dataclass(frozen=True)
class Ran:
    """A command's exit code and output."""

    code: int
    out: str
    err: str


def run_python(code: str, *arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a Python program in `folder`, in an ASCII locale."""
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("LC_", "LANG", "PYTHON"))}
    locale = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    path = os.pathsep.join(str(ROOT / each) for each in (".", "converters", "tools"))
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        cwd=folder,
        env={**inherited, **locale, "PYTHONPATH": path},
        capture_output=True,
        encoding="utf-8",
        timeout=240,
        check=False,
    )


def run_commands(commands: Sequence[Sequence[str | bytes]], folder: Path, notes: Path) -> list[Ran]:
    """Run commands one after the other in `folder`; `notes` names a file for their output."""
    place = notes / "commands"
    raw = [[os.fsencode(each) for each in command] for command in commands]
    place.write_text(json.dumps([[each.decode("latin-1") for each in one] for one in raw]))
    done = run_python(_ONE_AFTER_THE_OTHER, str(place), folder=folder)
    assert done.returncode == 0, done.stderr
    return [
        Ran(
            int(Path(f"{place}.{number}.code").read_text()),
            *(Path(f"{place}.{number}.{name}").read_text("ascii") for name in ("out", "err")),
        )
        for number in range(len(commands))
    ]
