"""A slice of the soak test; the whole is tools/soak --minutes N."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_a_slice_of_the_soak_finds_nothing() -> None:
    soak = [sys.executable, str(ROOT / "tools" / "stress_tests" / "soak.py"), "--minutes", "0.1"]
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        soak, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "samples" in done.stdout
