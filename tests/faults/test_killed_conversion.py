"""A slice of tools/dev/kill_conversion.py: a kill in every phase, and at any moment."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PHASES = ("plan", "decode", "seal", "fsync", "rename", "generation", "any moment")


def test_a_killed_conversion_is_resumed_to_the_same_bytes() -> None:
    command = [sys.executable, str(ROOT / "tools" / "dev" / "kill_conversion.py"), "--times", "1"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    counts = dict(line.rsplit(maxsplit=3)[0:2] for line in done.stdout.splitlines()[1:-1])
    assert tuple(name.strip() for name in counts) == PHASES
    assert done.stdout.splitlines()[-1] == "0 wrong"
