"""A conversion leaves nothing half-made and can be resumed, whichever disk call fails."""

from __future__ import annotations

import errno
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from dev.kill_conversion import check_whole
from shardio.conversion.staging import Staging
from shardio_tools import cli
from tests.faults.failing import Call, FailingDisk
from tests.lines import contents, convert, install, write

OPTIONS = {"shard_bytes": 9000}


@pytest.fixture
def tmp_path(tmp_path: Path) -> Iterator[Path]:
    """Return a folder in memory if there is one: thousands of fsyncs need no disk."""
    memory = Path("/dev/shm")
    if not os.access(memory, os.W_OK):
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir=memory) as folder:
        yield Path(folder)


@pytest.fixture
def lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make inputs of two units, one of which gives two shards."""
    install(tmp_path, monkeypatch)
    write(tmp_path / "few", {"a/1.txt": "one two three", "b/2.txt": "four"})
    return tmp_path / "few"


@pytest.fixture
def whole(lines: Path, tmp_path: Path) -> dict[str, bytes]:
    """Return the files of an undisturbed conversion."""
    convert(lines, tmp_path / "whole", **OPTIONS)
    return contents(tmp_path / "whole")


def visible(out: Path) -> dict[str, bytes]:
    """Return all files but those of an interrupted conversion or of one that could not clean up."""
    return {name: c for name, c in contents(out).items() if not name.startswith(".conversion/")}


def calls_of(lines: Path, out: Path, patch: pytest.MonkeyPatch) -> list[Call]:
    """Return the disk calls of an undisturbed conversion."""
    undisturbed = FailingDisk()
    with patch.context() as during:
        undisturbed.install(during)
        convert(lines, out, **OPTIONS)
    return undisturbed.calls


def refuse(
    lines: Path, out: Path, failing: FailingDisk, patch: pytest.MonkeyPatch, **options: bool
) -> bool:
    """Convert on a disk that refuses calls; return True if that ended the conversion."""
    has_failed = False
    with patch.context() as during:
        failing.install(during)
        try:
            convert(lines, out, **OPTIONS, **options)
        except OSError as error:
            has_failed = True
            assert failing.refused is not None and error.errno == failing.code
            assert error.filename == failing.refused.path
    if out.exists():
        assert check_whole(out) == []
    return has_failed


def test_resuming_may_fail_at_any_call_as_well(
    lines: Path, whole: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cover the calls that only a second attempt makes: what was moved out is moved back."""
    calls = calls_of(lines, tmp_path / "undisturbed", monkeypatch)
    pointing = next(n for n, call in enumerate(calls) if ".dataset.json." in call.path)
    n_failed = 0
    for fail_at in range(len(calls)):
        out = tmp_path / f"{fail_at}"
        with monkeypatch.context() as during:
            during.setattr(Staging, "_clean_up", lambda *_: None)  # as after SIGKILL
            assert refuse(lines, out, FailingDisk(errno.EIO, pointing), during)
        failing = FailingDisk(errno.EIO, fail_at)
        if refuse(lines, out, failing, monkeypatch, resume=True):
            convert(lines, out, resume=True, **OPTIONS)
        assert visible(out) == whole
        if failing.refused is None:
            break
        n_failed += 1
    assert n_failed > 10


def test_the_command_names_the_file_and_ends_with_code_3(
    lines: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["convert", str(lines), str(tmp_path / "out"), "--kind=lines", "--workers=0"]
    failing = FailingDisk(errno.ENOSPC, 40, for_good=True)
    with monkeypatch.context() as during:
        failing.install(during)
        assert cli.main(arguments) == cli.ENVIRONMENT
    said = capsys.readouterr().err.splitlines()[-2:]
    assert failing.refused is not None
    assert said[0] == f"shardio: {failing.refused.path}: No space left on device"
    assert said[1].endswith(
        "; resume (--resume) continues from them; overwrite (--overwrite) starts again"
    )
    assert cli.main(arguments) == cli.USAGE
    assert "holds an interrupted conversion; resume (--resume)" in capsys.readouterr().err
    assert cli.main([*arguments, "--resume"]) == cli.OK


def test_calls_that_fail_in_a_worker_end_the_conversion_the_same_way() -> None:
    """Run a slice of tools/dev/fail_disk.py."""
    place = Path(__file__).resolve().parents[2] / "tools" / "dev" / "fail_disk.py"
    command = [sys.executable, str(place), "--workers-only", "--every", "9"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    *rows, last = done.stdout.splitlines()
    assert last == "0 wrong"
    assert [row.partition(":")[0] for row in rows] == [
        "in a worker, EIO",
        "in a worker, ENOSPC from then on",
    ]
    assert all(re.fullmatch(r".*: ([1-9])/\1 calls", row) for row in rows)
