"""A disk that is really full: of bytes, or of files. Needs the right to mount one in memory."""

from __future__ import annotations

import errno
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from shardio import DatasetWriter, Schema, Text
from shardio.maintenance import verify_dataset
from shardio_tools import cli
from tests.faults.failing import before_calls
from tests.lines import contents, convert, texts, write

Mount = Callable[[str], Path]


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[Mount]:
    """Mount a file system in memory with these options, or change those of a mounted one."""
    place = tmp_path / "disk"
    is_mounted = False

    def mount(options: str) -> Path:
        nonlocal is_mounted
        place.mkdir(exist_ok=True)
        options = f"remount,{options}" if is_mounted else options
        command = ["mount", "-t", "tmpfs", "-o", options, "none", str(place)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False)
        except FileNotFoundError:
            pytest.skip("there is no command mount")
        if done.returncode:
            pytest.skip(f"no file system can be mounted here: {done.stderr.strip()}")
        is_mounted = True
        return place

    yield mount
    if is_mounted:
        subprocess.run(["umount", str(place)], check=True)


@pytest.mark.parametrize(
    ("workers", "full"), [(0, "size=100k"), (2, "size=100k"), (0, "nr_inodes=12")]
)
def test_a_conversion_that_fills_the_disk_is_resumed_when_there_is_room(
    lines: Path,
    tmp_path: Path,
    mount: Mount,
    capsys: pytest.CaptureFixture[str],
    workers: int,
    full: str,
) -> None:
    convert(lines, tmp_path / "whole")
    out = mount(full) / "out"
    command = ["convert", str(lines), str(out), "--kind=lines", f"--workers={workers}"]
    assert cli.main(command) == cli.ENVIRONMENT
    said = capsys.readouterr().err
    assert f"shardio: {out}: No space left on device; nothing was published: free some sp" in said
    assert "/.conversion" not in said
    assert not out.exists() or [path.name for path in out.iterdir()] == [".conversion"]
    mount("size=2m,nr_inodes=1000")
    assert cli.main([*command, "--resume"]) == cli.OK
    assert contents(out) == contents(tmp_path / "whole")


def test_append_out_of_space(lines: Path, mount: Mount, capsys: pytest.CaptureFixture[str]) -> None:
    out = mount("size=400k") / "out"
    convert(lines, out)
    before = contents(out)
    write(lines, {f"new/{n}.txt": "eight nine ten" for n in range(5)})
    append = ["convert", str(lines), str(out), "--append", "--workers=2"]
    assert cli.main(append) == cli.ENVIRONMENT
    assert "(--append --resume) continues from them" in capsys.readouterr().err
    now = contents(out)
    assert {name: now[name] for name in before} == before
    assert verify_dataset(out, workers=0).findings == ()
    mount("size=4m")
    assert cli.main([*append, "--resume"]) == cli.OK
    assert texts(out) == "one two three four five six seven".split() + 5 * ["eight", "nine", "ten"]


def test_writer_on_a_full_disk_cleans_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    is_full = False

    def refuse(kind: str, path: str) -> None:
        nonlocal is_full
        is_full |= path.endswith("generations")
        if is_full and kind in ("mkdir", "create", "link"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)

    before_calls(monkeypatch, refuse)
    with (
        pytest.raises(OSError, match="No space left"),
        DatasetWriter(tmp_path / "out", Schema({"x": Text()})) as writer,
    ):
        writer.append({"x": "a"})
    assert not any(tmp_path.iterdir())
