"""Whichever call a disk refuses a conversion, nothing half-made is left, and resuming mends it."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from shardio.conversion.staging import Staging
from shardio.manifest import load_generation
from shardio.sealed import read_sealed
from shardio.surgery import audit_dataset, audit_shard
from shardio_tools import cli
from tests.faults.failing import Call, FailingDisk
from tests.lines import contents, convert, install, write

OPTIONS = {"shard_bytes": 9000}


@pytest.fixture
def tmp_path(tmp_path: Path) -> Iterator[Path]:
    """A folder in memory where there is one: thousands of fsyncs need not wait for a disk."""
    memory = Path("/dev/shm")
    if not os.access(memory, os.W_OK):
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir=memory) as folder:
        yield Path(folder)


@pytest.fixture
def lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two units, one of them with two shards."""
    install(tmp_path, monkeypatch)
    write(tmp_path / "few", {"a/1.txt": "one two three", "b/2.txt": "four"})
    return tmp_path / "few"


@pytest.fixture
def whole(lines: Path, tmp_path: Path) -> dict[str, bytes]:
    """What an undisturbed conversion gives."""
    convert(lines, tmp_path / "whole", **OPTIONS)
    return contents(tmp_path / "whole")


def check_whole(out: Path) -> None:
    """Check that whatever has a final name, anywhere, is whole."""
    for place in out.rglob("*.shard"):
        if not place.name.startswith("."):
            assert audit_shard(place) == []
    for place in out.rglob("*.json"):
        if not place.name.startswith("."):
            read_sealed(place)
    if (out / "dataset.json").exists():
        assert audit_dataset(out, workers=0).findings == ()
    elif (out / "generations").exists():
        load_generation(out, 1)


def calls_of(lines: Path, out: Path, patch: pytest.MonkeyPatch, **options: bool) -> list[Call]:
    """What an undisturbed conversion asks of the disk."""
    undisturbed = FailingDisk()
    with patch.context() as during:
        undisturbed.install(during)
        convert(lines, out, **OPTIONS, **options)
    return undisturbed.calls


def refuse(
    lines: Path, out: Path, failing: FailingDisk, patch: pytest.MonkeyPatch, **options: bool
) -> str:
    """Convert on a disk that refuses; the name of the file that the error names."""
    with patch.context() as during:
        failing.install(during)
        with pytest.raises(OSError, match=os.strerror(failing.code)) as caught:
            convert(lines, out, **OPTIONS, **options)
    assert failing.refused is not None and caught.value.errno == failing.code
    assert caught.value.filename == failing.refused.path
    if out.exists():
        check_whole(out)
    return str(caught.value.filename)


def test_a_conversion_asks_for_every_kind_of_call(
    lines: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kinds = Counter(call.kind for call in calls_of(lines, tmp_path / "out", monkeypatch))
    assert kinds.keys() == {"mkdir", "create", "write", "fsync", "rename", "link"}
    # Three shards, with two records, the plan, the moves, the generation and the pointer.
    assert kinds["create"] == 9 and kinds["rename"] == 3 + 3 + 2 + 3 and kinds["link"] == 1


@pytest.mark.parametrize(
    ("code", "for_good"), [(errno.EIO, False), (errno.ENOSPC, True)], ids=["EIO", "ENOSPC for good"]
)
def test_after_any_call_that_fails_a_conversion_is_resumed(
    lines: Path,
    whole: dict[str, bytes],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    code: int,
    *,
    for_good: bool,
) -> None:
    n_calls = len(calls_of(lines, tmp_path / "undisturbed", monkeypatch))
    for fail_at in range(n_calls):
        out = tmp_path / f"{fail_at}"
        refuse(lines, out, FailingDisk(code, fail_at, for_good=for_good), monkeypatch)
        convert(lines, out, resume=True, **OPTIONS)
        assert contents(out) == whole


def test_after_any_call_that_fails_a_replaced_dataset_is_the_old_or_the_new_one(
    lines: Path, whole: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    convert(lines, tmp_path / "old", repeat=2)
    old = contents(tmp_path / "old")
    shutil.copytree(tmp_path / "old", tmp_path / "undisturbed")
    calls = calls_of(lines, tmp_path / "undisturbed", monkeypatch, overwrite=True)
    moving = next(n for n, call in enumerate(calls) if call.path.endswith("replaced"))
    for fail_at in range(moving, len(calls)):
        out = tmp_path / f"{fail_at}"
        shutil.copytree(tmp_path / "old", out)
        refuse(lines, out, FailingDisk(errno.ENOSPC, fail_at), monkeypatch, overwrite=True)
        visible = {name: c for name, c in contents(out).items() if not name.startswith(".")}
        assert visible in (old, whole)
        convert(lines, out, resume=True, **OPTIONS)
        assert contents(out) == whole


def test_after_any_call_that_fails_the_taking_up_again_may_fail_as_well(
    lines: Path, whole: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The calls that only a second attempt makes: what was moved out is moved back."""
    n_calls = len(calls_of(lines, tmp_path / "undisturbed", monkeypatch))
    n_failed = 0
    for fail_at in range(n_calls):
        out = tmp_path / f"{fail_at}"
        with monkeypatch.context() as during:
            during.setattr(Staging, "_tidy_up", lambda *_: None)  # as after SIGKILL
            refuse(lines, out, FailingDisk(errno.EIO, n_calls - 10), during)
        failing = FailingDisk(errno.EIO, fail_at)
        with monkeypatch.context() as during:
            failing.install(during)
            with contextlib.suppress(OSError):
                convert(lines, out, resume=True, **OPTIONS)
        check_whole(out)
        if failing.refused is None:
            break
        n_failed += 1
        convert(lines, out, resume=True, **OPTIONS)
        assert contents(out) == whole
    assert n_failed > 10


def test_the_command_names_the_file_and_ends_with_code_3(
    lines: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
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
        "; resume (--resume) goes on with it, overwrite (--overwrite) starts again"
    )
    assert cli.main(arguments) == cli.USAGE
    assert "an interrupted conversion lies here; resume (--resume)" in capsys.readouterr().err
    assert cli.main([*arguments, "--resume"]) == cli.OK
