"""Virtual environments for other libraries; each is created once, in the cache."""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from benchmarks.child import NotMeasured

INSTALL_TIMEOUT_S: Final = 3600
_FOREIGN: Final = ("PYTHONPATH", "PYTHONHOME", "PYTHONDONTWRITEBYTECODE", "PIP_USER")
"""Variables with which pip would find or install other packages, or bytecode is not cached."""


def interpreter(folder: Path, name: str, requirements: Sequence[str]) -> str:
    """Return the path of an interpreter that has the requirements; this one's if there are none.

    The environment variable RACE_PYTHON_NAME, with NAME in capitals, may name the interpreter.
    Otherwise, a virtual environment with cached bytecode is created in the folder, unless it
    exists. Raises NotMeasured if that fails, or if the named interpreter does not exist.
    """
    variable = f"RACE_PYTHON_{name.upper()}"
    if named := os.environ.get(variable):
        if not Path(named).exists():
            raise NotMeasured(f"environment {name}: {variable}={named}: no such file")
        return named
    if not requirements:
        return sys.executable
    key = hashlib.sha256(f"{platform.python_version()} {requirements}".encode()).hexdigest()[:12]
    place = folder / f"{name}-{key}"
    if not (place / "complete").exists():
        try:
            _make(place, requirements)
        except NotMeasured as error:
            raise NotMeasured(
                f"environment {name}: {error}; {variable} may name an interpreter that has"
                f" {', '.join(requirements)}"
            ) from None
    return str(place / "bin" / "python")


def _make(place: Path, requirements: Sequence[str]) -> None:
    print(f"== installing {', '.join(requirements)} in {place}", file=sys.stderr, flush=True)
    shutil.rmtree(place, ignore_errors=True)
    python = str(place / "bin" / "python")
    pip = [python, "-m", "pip", "install", "-q", "--disable-pip-version-check", "--no-compile"]
    try:
        _run([sys.executable, "-m", "venv", str(place)])
        _run([*pip, *requirements])
    except BaseException:
        shutil.rmtree(place, ignore_errors=True)
        raise
    # Ignore errors: some packages contain files for other versions of Python.
    compiling = [python, "-m", "compileall", "-q", "-j", "0", str(place / "lib")]
    subprocess.run(compiling, env=_environment(), capture_output=True, check=False)
    (place / "complete").touch()


def _run(command: Sequence[str]) -> None:
    done = subprocess.run(
        command,
        env=_environment(),
        capture_output=True,
        text=True,
        timeout=INSTALL_TIMEOUT_S,
        check=False,
    )
    if done.returncode:
        errors = [line for line in done.stderr.splitlines() if line.lower().startswith("error")]
        last = (errors or done.stderr.splitlines() or ["no message"])[-1]
        raise NotMeasured(f"cannot be installed: {last[:200]}")


def _environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name not in _FOREIGN}
