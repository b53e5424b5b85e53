"""Stress programs, as `tools/stress` runs them."""

from __future__ import annotations

import subprocess

from stress_tests.program import command, environment


def run_stress(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a stress program in a process of its own."""
    return subprocess.run(
        command(*arguments),
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
