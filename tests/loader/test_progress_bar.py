"""The progress bar over a loader: the same batches, and how far it is."""

from __future__ import annotations

import gc
import io
import weakref
from collections.abc import Iterator

import pytest

from shardio import ShardLoader
from shardio._base import progress
from shardio._loading import iterator
from tests.terminal import Terminal

N = 40


@pytest.fixture(scope="module")
def loader(folder: str) -> Iterator[ShardLoader]:
    with ShardLoader(folder, 4, output="numpy", num_workers=0) as loader:
        yield loader


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every batch is shown, with all parts of the line."""
    monkeypatch.setattr(progress, "_EVERY_S", 0.0)
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setattr(iterator, "_LINE_EVERY_S", 0.0)


def test_a_loop_with_a_bar_gets_the_same_batches(loader: ShardLoader) -> None:
    expected = [batch.indices.tolist() for batch in loader]
    found = [batch.indices.tolist() for batch in loader.progress(file=io.StringIO())]
    assert found == expected


def test_a_file_gets_one_line_at_the_end_of_a_short_epoch(loader: ShardLoader) -> None:
    file = io.StringIO()
    bar = loader.progress(file=file)
    assert len(list(bar)) == 10
    assert list(bar) == []  # it is over, and says nothing more
    (line,) = file.getvalue().splitlines()
    assert line.startswith(f"epoch {loader.epoch}: 10 of 10 batches, ")
    assert "samples/s, waiting " in line


@pytest.mark.usefixtures("at_once")
def test_lines_count_batches(loader: ShardLoader) -> None:
    file = io.StringIO()
    for _ in loader.progress("[train]", file=file):
        pass
    lines = file.getvalue().splitlines()
    counts = [line.partition(": ")[2].partition(" of ")[0] for line in lines]
    assert counts == [*map(str, range(1, 11)), "10"]
    assert lines[0].startswith("[train]: ")


def test_a_resumed_epoch_begins_where_it_was(loader: ShardLoader) -> None:
    batches = iter(loader)
    for _ in range(4):
        next(batches)
    loader.load_state_dict(loader.state_dict())
    file = io.StringIO()
    assert len(list(loader.progress(file=file))) == 6
    assert "10 of 10 batches" in file.getvalue()


@pytest.mark.usefixtures("at_once")
def test_a_terminal_gets_a_bar(loader: ShardLoader) -> None:
    terminal = Terminal()
    for _ in loader.progress("[train]", file=terminal):
        pass
    shown = terminal.getvalue()
    assert "[train]" in shown
    assert "100%" in shown and "10 of 10 batches" in shown
    assert "samples/s, waiting " in shown


def test_a_loop_that_is_left_shows_the_cursor_again(loader: ShardLoader) -> None:
    terminal = Terminal()
    for _ in loader.progress(file=terminal):
        break
    gc.collect()
    assert terminal.getvalue().count("\x1b[?25l") == terminal.getvalue().count("\x1b[?25h")


def test_a_bar_keeps_no_batch(loader: ShardLoader) -> None:
    bar = loader.progress(file=io.StringIO())
    batch = next(bar)
    kept = weakref.ref(batch["image"])
    del batch
    gc.collect()
    assert kept() is None


@pytest.mark.usefixtures("at_once")
def test_a_closed_file_does_not_end_the_loop(loader: ShardLoader) -> None:
    file = io.StringIO()
    bar = loader.progress(file=file)
    file.close()
    assert len(list(bar)) == 10


@pytest.mark.parametrize("is_terminal", [False, True])
def test_a_title_beyond_the_encoding_is_escaped(loader: ShardLoader, *, is_terminal: bool) -> None:
    raw = io.BytesIO()
    with io.TextIOWrapper(raw, "ascii") as file:
        file.isatty = lambda: is_terminal  # type: ignore[method-assign]
        assert len(list(loader.progress("größe", file=file))) == 10
        file.flush()
        assert rb"gr\xf6\xdfe" in raw.getvalue()
