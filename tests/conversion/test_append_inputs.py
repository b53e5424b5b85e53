"""Appending from sources whose files have changed, grown or become something else."""

from __future__ import annotations

import os
import re
import signal
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from shardio import InvalidArgument
from shardio.conversion import inputs
from shardio.dataset.manifest import load, publish_next
from shardio.maintenance import repair
from tests.lines import OLD, append, contents, convert, texts


@pytest.fixture
def out(lines: Path, tmp_path: Path) -> Path:
    convert(lines, tmp_path / "out")
    return tmp_path / "out"


def change_entries(out: Path, **changes: int | None) -> None:
    """Publish a generation with changed entries of inputs with samples; None removes a key."""
    base, inputs = load(out), []
    for entry in base.inputs:
        entry = {**entry, **changes} if entry.get("samples") else entry
        inputs.append({key: value for key, value in entry.items() if value is not None})
    publish_next(out, base, inputs=tuple(inputs))


def become_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def become_link_to_nowhere(path: Path) -> None:
    path.unlink()
    path.symlink_to("nowhere")


def become_link_to_what_it_was(path: Path) -> None:
    path.rename(path.with_name("its content"))
    path.symlink_to("its content")


def truncate(path: Path) -> None:
    os.truncate(path, 0)


def touch(path: Path) -> None:
    os.utime(path)


@pytest.mark.parametrize("recorded", [{}, {"bytes": None}], ids=["size", "content alone"])
@pytest.mark.parametrize(
    ("become", "reason"),
    [
        (become_pipe, "no longer a regular file"),
        (become_link_to_nowhere, "cannot be read: .* a broken link"),
        (truncate, "0 bytes, 7 when it was converted|hash .*"),
        (become_link_to_what_it_was, ""),
        (touch, ""),
    ],
)
def test_a_file_that_became_a_pipe_or_link_is_reported_without_blocking(
    lines: Path, out: Path, become: Callable[[Path], None], reason: str, recorded: dict[str, None]
) -> None:
    change_entries(out, **recorded)
    become(lines / "a" / "1.txt")
    (report,) = (one for one in append(lines, out).inputs if one.name == "a/1.txt")
    assert report.outcome == ("modified" if reason else "duplicate")
    assert re.fullmatch(reason, report.reason)
    assert texts(out) == OLD


def test_a_file_that_became_a_folder_is_listed_as_one(lines: Path, out: Path) -> None:
    (lines / "a" / "1.txt").unlink()
    (lines / "a" / "1.txt").mkdir()
    (lines / "a" / "1.txt" / "2.txt").write_text("eight")
    assert append(lines, out).counts["converted"] == 1
    assert texts(out) == [*OLD, "eight"]


def test_ctrl_c_ends_comparing(lines: Path, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    n_begun, is_begun, may_end = [], threading.Event(), threading.Event()

    def slow(path: str) -> str:
        n_begun.append(path)
        is_begun.set()
        may_end.wait()
        return ""

    def interrupt() -> None:
        is_begun.wait()
        os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(inputs, "file_hash", slow)
    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        append(lines, out, workers=2)
    may_end.set()
    thread.join()
    assert len(n_begun) <= 2 and texts(out) == OLD


def test_an_append_to_a_repaired_dataset_is_refused(lines: Path, out: Path, tmp_path: Path) -> None:
    repair(out, tmp_path / "repaired")
    before = contents(tmp_path / "repaired")
    message = "a repaired dataset: .* duplicated; .* and merge both"
    with pytest.raises(InvalidArgument, match=message):
        append(lines, tmp_path / "repaired", kind="lines")
    assert contents(tmp_path / "repaired") == before
