"""A conversion on a failing disk: what the command says, and calls that fail in a worker."""

from __future__ import annotations

import errno
import re
from pathlib import Path

import pytest

from shardio_tools import cli
from tests.faults.failing import FailingDisk
from tests.faults.programs import run_stress
from tests.lines import install


def test_the_command_names_the_dataset_and_ends_with_code_3(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = install(tmp_path, monkeypatch)
    arguments = ["convert", str(lines), str(tmp_path / "out"), "--kind=lines", "--workers=0"]
    failing = FailingDisk(errno.ENOSPC, 40, for_good=True)
    with monkeypatch.context() as during:
        failing.install(during)
        assert cli.main(arguments) == cli.ENVIRONMENT
    said = capsys.readouterr().err.splitlines()[-2:]
    assert failing.refused is not None
    assert "/out/.conversion/" in failing.refused.path
    reason = "No space left on device; nothing was published: free some space and try again, or"
    assert said[0].startswith(f"shardio: {tmp_path}/out: {reason} choose a folder on")
    hint = "; resume (--resume) continues from them; overwrite (--overwrite) starts again"
    assert said[1].endswith(hint)
    assert cli.main(arguments) == cli.USAGE
    assert "holds an interrupted conversion; resume (--resume)" in capsys.readouterr().err
    assert cli.main([*arguments, "--resume"]) == cli.OK


@pytest.mark.slow
def test_calls_that_fail_in_a_worker_end_the_conversion_the_same_way() -> None:
    """Run a slice of tools/stress disk."""
    done = run_stress("disk", "--workers-only", "--every", "9")
    assert done.returncode == 0, done.stdout + done.stderr
    *rows, last = done.stdout.splitlines()
    assert last == "0 wrong"
    assert [row.partition(":")[0] for row in rows] == [
        "in a worker, EIO",
        "in a worker, ENOSPC from then on",
    ]
    assert all(re.fullmatch(r".*: ([1-9])/\1 calls", row) for row in rows)
