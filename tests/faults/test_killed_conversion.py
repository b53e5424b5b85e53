"""An operation that a signal ends is resumed or undone, and leaves no process behind."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from shardio_tools import cli
from tests.faults.programs import run_stress
from tests.faults.scene import PATIENCE_S, scene
from tests.lines import contents, convert

ROOT = Path(__file__).resolve().parents[2]
PHASES = ("plan", "decode", "seal", "fsync", "rename", "generation", "any moment")
OPERATIONS = ["convert", "overwrite", "append", "append-samples", "merge", "compact", "add-column"]
OPERATIONS += ["repair", "split", "stats", "export", "re-export"]


PROGRAM = """
import sys
sys.path[:0] = sys.argv[1:3]
from shardio.conversion import journal
from shardio_tools import cli
journal.MIN_UNIT_BYTES, journal.MIN_INPUT_BYTES = 8, 0
sys.exit(cli.main(sys.argv[3:]))
"""


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_conversion_interrupted_by_a_signal_is_resumed(
    lines: Path, tmp_path: Path, workers: int, number: signal.Signals
) -> None:
    convert(lines, tmp_path / "whole")
    waits = lines / "top.txt"
    was, content = waits.stat(), waits.read_text()
    waits.write_text(f"wait:{tmp_path}/reached")
    out = tmp_path / "out"
    command = ["convert", str(lines), str(out), "--kind=lines", f"--workers={workers}"]
    with scene() as stage:
        paths = [str(ROOT / "tools"), str(tmp_path / "site")]
        main = stage.start(["-c", PROGRAM, *paths, *command])
        end_s = time.monotonic() + PATIENCE_S
        while not (tmp_path / "reached").exists() and time.monotonic() < end_s:
            time.sleep(0.01)
        os.killpg(main.pid, number)
        _, said = main.communicate(timeout=PATIENCE_S)
        assert stage.left_after() == {}
    if number == signal.SIGINT:
        assert main.returncode == cli.INTERRUPTED
        assert said.decode().splitlines()[-2] == "shardio: convert: interrupted"
        assert "resume (--resume) continues from them" in said.decode().splitlines()[-1]
    assert os.listdir(out) == [".conversion"]
    waits.write_text(content)
    os.utime(waits, ns=(was.st_atime_ns, was.st_mtime_ns))
    convert(lines, out, resume=True)
    assert contents(out) == contents(tmp_path / "whole")


@pytest.mark.slow
def test_a_conversion_killed_in_any_phase_is_resumed_to_the_same_bytes() -> None:
    """Run a slice of tools/stress conversion."""
    done = run_stress("conversion", "--times", "1")
    assert done.returncode == 0, done.stdout + done.stderr
    counts = dict(line.rsplit(maxsplit=3)[0:2] for line in done.stdout.splitlines()[1:-1])
    kinds = [f"{what}: {phase}" for what in ("new", "append") for phase in PHASES]
    assert [name.strip() for name in counts] == kinds
    assert done.stdout.splitlines()[-1] == "0 wrong"


@pytest.mark.slow
def test_operations_killed_at_any_moment_are_undone_or_done_again() -> None:
    """Run a slice of tools/stress operations."""
    done = run_stress("operations", "--times", "5")
    assert done.returncode == 0, done.stdout + done.stderr
    _, *rows, last = done.stdout.splitlines()
    assert [row.split()[0] for row in rows] == OPERATIONS
    assert all(sum(map(int, row.split()[1:4])) == 5 for row in rows)
    assert last == "0 wrong"
