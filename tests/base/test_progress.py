"""The display of progress: never wider than the terminal; plain lines in files."""

from __future__ import annotations

import io
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from rich.cells import cell_len

import shardio
from shardio._base import progress
from shardio._base.progress import ProgressLine, ProgressState, keep_end, line_parts
from shardio.conversion import Progress
from shardio.conversion.report import progress_state
from shardio.maintenance import MaintenanceProgress, verify_dataset
from tests.loading import TWO_FIELDS, two_fields, write_dataset
from tests.terminal import Terminal

Capture = pytest.CaptureFixture[str]

BUSY = ProgressState(
    title="converting",
    done=12_300_000,
    total=1_000_000_000,
    counts="12,345 of 1,000,000 files",
    faults="1,234 broken",
    name="训练集/视频文件名非常非常非常长的一个视频.mp4",
    more="123,456 samples",
)


class NotebookStream(io.StringIO):
    """A file like the one that a notebook's kernel has as standard error."""


NotebookStream.__module__ = "ipykernel.iostream"


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """Return a terminal of 80 columns whose every state is displayed."""
    monkeypatch.setattr(progress, "_EVERY_S", 0.0)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "80")
    return Terminal()


def text_of(state: ProgressState, width: int, encoding: str = "utf-8") -> str:
    speeds = state.done / 33.0, (state.n_files or 0) / 33.0
    return "  ".join(text for text, _ in line_parts(state, speeds, width, encoding))


@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_no_line_is_wider_than_the_terminal(encoding: str) -> None:
    for width in range(len("converting") + 2 + 6, 200):
        text = text_of(BUSY, width, encoding)
        assert cell_len(text) <= width, width
        assert text.encode(encoding)


def test_80_columns_have_counts_rate_time_left_and_faults() -> None:
    state = ProgressState("converting", 1 << 20, 3 << 20, "10 of 30 files", faults="2 broken")
    assert text_of(state, 79) == (
        "converting  ━━━╸───────   33%  10 of 30 files  31.0 KiB/s  1:06 left  2 broken"
    )


def test_80_columns_have_files_and_bytes_per_second_of_a_conversion() -> None:
    state = progress_state(Progress(1_234, 20_000, 1 << 30, 17 << 30, 4_321, 0, name="a.mp4"))
    assert text_of(state, 79) == (
        "converting  ╸─────  1,234 of 20,000 files  37.4 files/s  31.0 MiB/s  8:48 left"
    )
    state = progress_state(Progress(12_345, 20_000, 10 << 30, 17 << 30, 12_345, 67))
    for part in ("12,345 of 20,000 files", "374 files/s", "310.3 MiB/s", "67 broken"):
        assert part in text_of(state, 79)


def test_plain_lines_of_a_conversion_have_both_rates(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 4.0, 8.0])
    monkeypatch.setattr(time, "monotonic", lambda: next(clock))
    file = io.StringIO()
    line = ProgressLine(file)
    for done in range(3):
        line.show(progress_state(Progress(done, 2, done << 20, 2 << 20, done, 0)))
    assert file.getvalue().splitlines() == [
        "converting: 50% of 2.0 MiB, 1 of 2 files, 1 sample, 0.2 files/s, 256.0 KiB/s",
        "converting: 100% of 2.0 MiB, 2 of 2 files, 2 samples, 0.2 files/s, 256.0 KiB/s",
    ]


def test_the_bar_keeps_its_length_as_the_texts_change() -> None:
    for width in (40, 79, 119, 200):
        bars = {
            len(
                line_parts(ProgressState("t", 1, 9, "n" * n, name="x" * n), (1.0, 0.0), width)[1][0]
            )
            for n in range(1, 30)
        }
        assert len(bars) == 1, width


def test_less_room_drops_the_less_important_parts() -> None:
    assert "left" not in text_of(BUSY, 79)
    for part in ("12,345 of 1,000,000 files", "1,234 broken"):
        assert part in text_of(BUSY, 79)
    assert "1,234 broken" in text_of(BUSY, 40)
    assert text_of(BUSY, 160).endswith("长的一个视频.mp4")


@pytest.mark.parametrize(
    ("text", "width", "expected"),
    [
        ("clip.mp4", 8, "clip.mp4"),
        ("long-clip.mp4", 8, "…lip.mp4"),
        ("视频视频", 8, "视频视频"),
        ("视频视频", 7, "…频视频"),
        ("视频视频", 6, "…视频"),
    ],
)
def test_names_keep_their_end(text: str, width: int, expected: str) -> None:
    assert keep_end(text, width) == expected
    assert cell_len(keep_end(text, width)) <= width


def test_control_characters_of_names_are_escaped() -> None:
    state = ProgressState("t", 1, 2, "1 of 2", name="a\x1b[2J\n.mp4")
    assert r"a\x1b[2J\n.mp4" in text_of(state, 120)


def test_a_file_gets_a_few_plain_lines() -> None:
    file = io.StringIO()
    line = ProgressLine(file)
    for done in range(1001):
        line.show(ProgressState("working", done, 1000, f"{done} things"))
    lines = file.getvalue().splitlines()
    assert lines[0] == "working: 10% of 1,000 bytes, 100 things"
    assert lines[-1] == "working: 100% of 1,000 bytes, 1000 things"
    assert len(lines) == 10
    line.show(ProgressState("writing", 1000, 1000, "all"))
    line.close()
    assert file.getvalue().splitlines()[10:] == ["writing: 100% of 1,000 bytes, all"]


def test_nothing_to_do_prints_nothing() -> None:
    file = io.StringIO()
    line = ProgressLine(file)
    line.show(ProgressState("working", 0, 0, "0 of 0 files"))
    line.close()
    assert file.getvalue() == ""


def test_a_terminal_shows_one_line_and_removes_it(terminal: Terminal) -> None:
    line = ProgressLine(terminal)
    for done in range(5):
        line.show(ProgressState("working", done, 4, f"{done} of 4 things", name="视" * 60))
    shown = terminal.getvalue()
    assert "4 of 4 things" in shown and "\n" not in shown
    line.close()
    last = terminal.getvalue().removeprefix(shown)
    assert last.count("\n") == 1 and last.endswith("\x1b[?25h\r\x1b[1A\x1b[2K")


@pytest.mark.parametrize("name", ["dumb", "unknown"])
def test_a_dumb_terminal_gets_plain_lines(
    name: str, terminal: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", name)
    ProgressLine(terminal).show(ProgressState("working", 4, 4, "all"))
    assert terminal.getvalue() == "working: 100% of 4 bytes, all\n"


def test_no_color_is_respected(terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    ProgressLine(terminal).show(ProgressState("working", 1, 4, "1 of 4", faults="1 broken"))
    assert "\x1b[36m" not in terminal.getvalue() and "33m" not in terminal.getvalue()


def test_a_notebook_gets_an_output_that_is_rewritten(monkeypatch: pytest.MonkeyPatch) -> None:
    outputs: list[list[str]] = []

    class Handle:
        """A display handle of IPython, which rewrites the output number `i`."""

        def __init__(self, i: int) -> None:
            self.i = i

        def update(self, content: dict[str, str], *, raw: bool) -> None:
            assert raw
            outputs[self.i].append(content["text/plain"])

    def display(content: dict[str, str], *, raw: bool, display_id: bool) -> Handle:
        assert raw and display_id
        outputs.append([content["text/plain"]])
        return Handle(len(outputs) - 1)

    notebook = ModuleType("IPython.display")
    notebook.display = display  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "IPython.display", notebook)
    monkeypatch.setattr(progress, "_EVERY_S", 0.0)
    stream = NotebookStream()
    line = ProgressLine(stream)
    for _ in range(2):
        for done in range(3):
            line.show(ProgressState("working", done, 2, f"{done} of 2 things"))
        line.close()
    assert [len(texts) for texts in outputs] == [3, 3]
    for texts in outputs:
        assert all(f"{done} of 2 things" in text for done, text in enumerate(texts))
    assert stream.getvalue() == ""


def test_without_ipython_a_notebook_gets_a_line_that_is_rewritten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(progress, "_EVERY_S", 0.0)
    stream = NotebookStream()
    line = ProgressLine(stream)
    for done in range(3):
        line.show(ProgressState("working", done, 2, f"{done} of 2 things"))
    line.close()
    text = stream.getvalue()
    assert text.startswith("\rworking") and text.endswith("\n")
    assert text.count("\n") == 1 and text.count("\r") == 3 and "\x1b" not in text
    assert "2 of 2 things" in text.rpartition("\r")[2]
    assert len({len(each) for each in text.strip("\n").split("\r")[1:]}) == 1


def test_output_of_the_program_is_not_moved_from_a_pipe_to_the_terminal(
    terminal: Terminal, capsys: Capture
) -> None:
    line = ProgressLine(terminal)
    line.show(ProgressState("working", 1, 4, "1 of 4"))
    print("result")
    line.close()
    assert capsys.readouterr().out == "result\n"
    assert "result" not in terminal.getvalue()


@pytest.mark.parametrize("error", [BrokenPipeError, OSError, ValueError])
def test_errors_of_the_file_are_ignored(error: type[Exception]) -> None:
    class Failing(io.StringIO):
        def write(self, _: str) -> int:
            raise error

    line = ProgressLine(Failing())
    line.show(ProgressState("working", 4, 4, "all"))
    line.close()


def test_items_of_python_are_counted_and_files_have_bytes() -> None:
    items = progress_state(Progress(1, 3, 0, 0, 1, 0))
    assert (items.done, items.total, items.counts) == (1, 3, "1 of 3 items")
    assert items.as_text() == "converting: 1 of 3 items, 1 sample"
    files = progress_state(Progress(1, 2, 30, 40, 7, 1, name="a.mp4"))
    assert files.as_text() == "converting: 75% of 40 bytes, 1 of 2 files, 7 samples, 1 broken"
    assert "items/s" in text_of(items, 100)


def test_true_shows_the_progress_of_a_conversion(tmp_path: Path, capsys: Capture) -> None:
    src, out = tmp_path / "in", tmp_path / "out"
    src.mkdir()
    for i in range(3):
        np.save(src / f"{i}.npy", np.arange(4) + i)
    shardio.convert(src, out, workers=0, progress=True)
    assert "converting: 100% of " in capsys.readouterr().err
    seen: list[MaintenanceProgress] = []
    verify_dataset(out, progress=seen.append)
    assert capsys.readouterr().err == "" and seen
    for wanted, text in ((True, "verifying: 100% of "), (False, ""), (None, "")):
        verify_dataset(out, progress=wanted)
        assert capsys.readouterr().err.startswith(text)
        assert bool(text) is (wanted is True)


def test_progress_must_be_a_function_or_a_bool(tmp_path: Path) -> None:
    wrong: Any = 5
    with pytest.raises(shardio.InvalidArgument, match="must be True, False, None or a function"):
        verify_dataset(tmp_path, progress=wrong)


def test_verification_counts_damaged_shards(tmp_path: Path) -> None:
    folder = Path(write_dataset(tmp_path / "set", 9, 3, TWO_FIELDS, two_fields(9)))
    bad = sorted(folder.glob("*.shard"))[1]
    bad.write_bytes(bad.read_bytes()[:-100])
    seen: list[MaintenanceProgress] = []
    verify_dataset(folder, workers=0, progress=seen.append)
    assert [state.n_damaged for state in seen] == [0, 0, 1, 1]


def test_standard_error_is_found_when_the_work_begins(
    monkeypatch: pytest.MonkeyPatch, terminal: Terminal
) -> None:
    monkeypatch.setattr(sys, "stderr", terminal)
    assert ProgressLine().kind == "terminal"
