"""Every unusual input is converted or listed: none crashes, none is lost."""

from __future__ import annotations

import errno
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import shardio
from shardio import Input
from shardio.conversion.inputs import list_inputs
from shardio_tools import cli
from tests.lines import convert, during, outcomes, texts
from tests.media_made import scene, write_video

ROOT = Path(__file__).resolve().parents[2]


def create_unusual_inputs(root: Path) -> dict[str, str]:
    """Create a folder of unusual inputs; return the expected outcome of each."""
    video = write_video(root.parent / "video.mp4", scene(4)).read_bytes()
    readable = ["folder.mp4/inside.mp4", "twice.mp4", "twice.mkv", "no suffix", "\u202etxt.mp4"]
    readable += ["a\nb\x1b[2J.mp4", "caf\u00e9/1.mp4", "cafe\u0301/1.mp4"]
    wanted = {"empty.mp4": "broken", **dict.fromkeys(readable, "converted")}
    for name, outcome in wanted.items():
        place = root / name
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(video if outcome == "converted" else b"")
    Path(os.fsdecode(os.fsencode(root) + b"/latin-\xe9.mp4")).write_bytes(video)
    (root / "itself.mp4").symlink_to("itself.mp4")
    (root / "nowhere.mp4").symlink_to("nowhere")
    (root / "nowhere.txt").symlink_to("nowhere")
    (root / "link.mp4").symlink_to("twice.mp4")
    (root / "folder.mp4" / "up").symlink_to("..")
    os.mkfifo(root / "pipe.mp4")
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(os.path.relpath(root / "socket.mp4"))  # a socket's path must be short
    return {
        **wanted,
        **dict.fromkeys(["latin-\\xe9.mp4", "link.mp4"], "converted"),
        **dict.fromkeys(["itself.mp4", "nowhere.mp4"], "broken"),
        **dict.fromkeys(["nowhere.txt", "pipe.mp4", "socket.mp4"], "unsupported"),
    }


@pytest.mark.filterwarnings("default:.* classes look like")
@pytest.mark.parametrize("workers", [0, 2])
def test_lists_all_inputs(tmp_path: Path, workers: int, capsys: pytest.CaptureFixture[str]) -> None:
    wanted = create_unusual_inputs(tmp_path / "odd")
    source, out = str(tmp_path / "odd"), str(tmp_path / "out")
    options = ["--frames=2", "--size=16", f"--workers={workers}"]
    assert cli.main(["convert", source, out, *options]) == cli.BAD_DATA
    with shardio.open(out) as dataset:
        assert {entry["path"]: entry["outcome"] for entry in dataset.inputs} == wanted
        reasons = {entry["path"]: entry.get("reason") for entry in dataset.inputs}
        assert reasons["pipe.mp4"] == reasons["socket.mp4"] == "not a regular file"
        found = {sample["source"] for sample in dataset}
        assert dataset.classes == ("cafe\u0301", "caf\u00e9", "folder.mp4")
    assert found == {name for name, outcome in wanted.items() if outcome == "converted"}
    output = "".join(capsys.readouterr())
    assert "2 classes look like" in output
    assert all(char.isprintable() for line in output.splitlines() for char in line)


def test_unlisted_is_broken(lines: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulate the refusal of the system, since root may list every folder."""

    def refusing(real: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def refuse(path: Any) -> Any:
            if str(path).endswith("/b"):
                raise PermissionError(errno.EACCES, "Permission denied", path)
            return real(path)

        return refuse

    monkeypatch.setattr(os, "scandir", refusing(os.scandir))
    monkeypatch.setattr(os, "listdir", refusing(os.listdir))
    report = convert(lines, tmp_path / "out")
    (broken,) = report.broken
    assert (broken.name, broken.reason) == (
        "b",
        "a folder that cannot be listed: Permission denied",
    )
    assert report.classes == ("a", "b", "c", "d") and len(texts(tmp_path / "out")) == 6


@pytest.mark.parametrize("code", [errno.EACCES, errno.EIO, errno.ESTALE, errno.EMFILE])
@pytest.mark.parametrize("names_file", [True, False])
def test_an_unreadable_input_is_broken_unless_the_machine_is_to_blame(
    lines: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, *, names_file: bool
) -> None:
    read = Path.read_text

    def refuse(path: Path, **named: Any) -> str:
        if path.name == "3.txt":  # without a name as an error of a read, or of a seek
            raise OSError(code, os.strerror(code), *[str(path)] * names_file)
        return read(path, **named)

    monkeypatch.setattr(Path, "read_text", refuse)
    if code == errno.EMFILE:
        with pytest.raises(OSError, match="Too many open files"):
            convert(lines, tmp_path / "out")
    else:
        (broken,) = convert(lines, tmp_path / "out").broken
        assert (broken.name, broken.reason) == ("b/3.txt", f"cannot be read: {os.strerror(code)}")


@pytest.mark.parametrize("what", ["changed", "vanished"])
@pytest.mark.parametrize("keep_partial", [False, True])
def test_an_input_that_changes_while_it_is_read_gives_no_samples(
    lines: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str, *, keep_partial: bool
) -> None:
    def disturb(source: Input) -> None:
        if source.name == "b/3.txt":
            Path(source.path).unlink() if what == "vanished" else Path(source.path).write_text("x")

    during(monkeypatch, disturb)
    report = convert(lines, tmp_path / "out", keep_partial=keep_partial)
    (broken,) = report.broken
    assert (broken.name, broken.reason) == ("b/3.txt", f"{what} while it was read")
    assert texts(tmp_path / "out") == "one two four five six seven".split()


def test_vanished_is_broken(lines: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def removing(*_: object) -> None:
        (lines / "c" / "4.txt").unlink(missing_ok=True)

    (broken,) = convert(lines, tmp_path / "out", progress=removing).broken
    assert (broken.name, broken.reason) == ("c/4.txt", "cannot be read: No such file or directory")


def test_folders_may_be_nested_as_deep_as_a_path_can_be(lines: Path, tmp_path: Path) -> None:
    deepest = str(tmp_path / "deep")
    os.mkdir(deepest)
    for _ in range(1500):  # deeper than Python functions may call themselves
        deepest += "/d"
        os.mkdir(deepest)
    try:
        Path(deepest, "1.txt").write_text("deep")
        assert [*outcomes(convert(tmp_path / "deep", tmp_path / "out")).values()] == ["converted"]
    finally:  # pytest could not
        subprocess.run(["rm", "-rf", str(tmp_path / "deep")], check=True)


VERIFIED = """
import os, sys
seen = []
def note(path, folder_fd=-1):
    folder = os.readlink(f"/proc/self/fd/{folder_fd}") if folder_fd >= 0 else os.getcwd()
    seen.append(os.path.join(folder, os.fsdecode(path)))
def hook(event, given):
    if event == "open" and given[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC):
        if not isinstance(given[0], int):
            note(given[0])
    elif event in ("os.rename", "os.link"):
        note(given[0], given[2])
        note(given[1], given[3])
    elif event in ("os.remove", "os.rmdir", "os.mkdir", "os.chmod"):
        note(given[0], given[-1])
import shardio, shardio_converters.media.videos, av, numpy
source, out = sys.argv[1:]
sys.addaudithook(hook)
shardio.convert(source, out, workers=0, frames=2, size=16)
shardio.convert(source, out, workers=0, frames=2, size=16, overwrite=True)
print(len(seen), [path for path in seen if not path.startswith(out)])
"""


def test_nothing_outside_out_is_opened_for_writing(tmp_path: Path) -> None:
    create_unusual_inputs(tmp_path / "odd")
    command = [sys.executable, "-c", VERIFIED, str(tmp_path / "odd"), str(tmp_path / "out")]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT}/converters"}
    environment["PYTHONDONTWRITEBYTECODE"] = "1"
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr
    n_paths, _, outside = done.stdout.strip().partition(" ")
    assert int(n_paths) > 10 and outside == "[]"


def test_folders_of_an_earlier_output_are_no_classes(tmp_path: Path) -> None:
    for name in ("cat", "zebra"):
        (tmp_path / "src" / name).mkdir(parents=True)
        (tmp_path / "src" / name / "a.txt").write_text("a\n")
    shardio.convert([{"x": 1}], tmp_path / "src" / "out")
    listing = list_inputs(str(tmp_path / "src"))
    assert listing.classes == ("cat", "zebra")
    labels = {each.name: each.label for each in listing.inputs}
    assert labels == {
        "cat/a.txt": 0,
        "out/000000-000.shard": -1,
        "out/dataset.json": -1,
        "out/generations/000001.json": -1,
        "zebra/a.txt": 1,
    }
