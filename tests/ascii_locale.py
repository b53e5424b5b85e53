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


def run_command(command: Sequence[str | bytes], folder: Path) -> Ran:
    code = "import sys, runpy\nassert sys.getfilesystemencoding() == 'ascii'\n"
    code += "runpy.run_module('shardio', run_name='__main__')"
    done = run_python(code, *command, folder=folder)
    return Ran(done.returncode, done.stdout.decode("ascii"), done.stderr.decode("ascii"))
