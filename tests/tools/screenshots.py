"""Render the screens of the command line at 80 and 120 columns, to look at or to compare.

    python -m tests.tools.screenshots OUT          # SVG files, on light and dark terminals
    python -m tests.tools.screenshots --text OUT   # the texts that tests/tools/test_screens.py pins

The commands run on small files that are made for them, on a terminal that is recorded.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import re
import shlex
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
from rich.console import Console
from rich.terminal_theme import DIMMED_MONOKAI, TerminalTheme
from rich.text import Text

import shardio
from shardio._base.progress import ProgressLine, ProgressState
from shardio_tools import cli, sample_clips
from tests.terminal import Terminal

WIDTHS: Final = (80, 120)
LIGHT: Final = TerminalTheme(
    (255, 255, 255),
    (30, 30, 30),
    [(0, 0, 0), (190, 30, 30), (0, 125, 40), (150, 100, 0), (0, 70, 180), (140, 0, 140)]
    + [(0, 120, 130), (90, 90, 90)],
)
THEMES: Final = {"light": LIGHT, "dark": DIMMED_MONOKAI}
WIDE_NAME: Final = "训练集/非常长的文件名的一个视频片段.mp4"
_PROGRESS: Final = re.compile("\x1b\\[\\?25l.*?\x1b\\[\\?25h\r\x1b\\[1A\x1b\\[2K", re.DOTALL)


@dataclass(frozen=True)
class Scene:
    """A command to record. `is_steady` is False if what it prints differs between machines."""

    name: str
    command: str
    is_steady: bool = True


SCENES: Final = (
    Scene("convert-lossy", "convert videos/ lossy/ --workers 0", is_steady=False),
    Scene(
        "convert-auto",
        "convert videos/ chosen/ --workers 0 --store auto --disk 200GB --rate 20",
        is_steady=False,
    ),
    Scene("convert", "convert videos/ out/ --workers 0 --store packets"),
    Scene("inspect", "inspect out/"),
    Scene("verify", "verify out/"),
    Scene("stats", "stats out/"),
    Scene("stats-pixels", "stats lossy/ --decode --frames 2", is_steady=False),
    Scene("convert-subsets", "convert split/ subsets/ --workers 0"),
    Scene("split", "split out/ --parts train=0.75,val=0.25"),
    Scene("inspect-again", "inspect out/ --sample -1"),
    Scene("convert-table", "convert table.csv table/ --workers 0"),
    Scene("stats-table", "stats table/"),
    Scene("inspect-verbose", "inspect table/ --verbose"),
    Scene("inspect-shard", "inspect table/000000-000.shard"),
    Scene("inspect-many", "inspect many/"),
    Scene("diff-same", "diff table/ table/"),
    Scene("diff", "diff table/ other/"),
    Scene("merge", "merge other/ third/ both/"),
    Scene("reshard", "reshard both/ small/ --shard-bytes 1"),
    Scene("compact", "compact small/"),
    Scene("add-column", "add-column small/ weight --from weights.npy"),
    Scene("export", "export table/ files/ --format files"),
    Scene("export-skipped", "export bad/ bad-files/ --format files --on-error skip"),
    Scene("verify-damaged", "verify bad/"),
    Scene("inspect-damaged", "inspect bad/"),
    Scene("repair", "repair bad/ good/"),
    Scene("serve-keys", "serve --make-keys keys/"),
    Scene("bench", "bench table/ --workers 0 1 --seconds 0.05", is_steady=False),
    Scene("doctor", "doctor", is_steady=False),
    Scene("demo", "demo --seconds 10", is_steady=False),
    Scene("no-such-path", "inspect nowhere/"),
    Scene("view-nothing", "view nowhere/ --no-open"),
    Scene("mistyped-command", "inspct out/"),
    Scene("mistyped-flag", "verify out/ --wrkers 2"),
    Scene("progress", "convert videos/ out/", is_steady=False),
)


def make_files(folder: Path) -> None:
    """Make the files and datasets that the commands use."""
    sample_clips.write_clips(folder / "videos", n_clips=2)
    (folder / "videos" / "notes.txt").write_text("filmed on Monday\n")
    (folder / "videos" / "across" / "broken.mp4").write_text("no video\n")
    rows = [f"{i},{i * 1.5 - 3},{'even' if i % 2 == 0 else 'odd'}" for i in range(8)]
    (folder / "table.csv").write_text("\n".join(["id,value,name", *rows, ""]))
    for i, name in enumerate(("train/cat", "train/dog", "val/cat", "val/dog", "other")):
        (folder / "split" / name).mkdir(parents=True)
        np.save(folder / "split" / name / "a.npy", np.full((2, 3), i))
    np.save(folder / "weights.npy", np.linspace(0, 1, 16, dtype=np.float32))
    schema = shardio.Schema(
        {"id": shardio.Array("int64"), "value": shardio.Array("float64"), "name": shardio.Text()}
    )
    for name, changed in (("other", 5), ("third", None), ("bad", None)):
        with shardio.DatasetWriter(folder / name, schema) as writer:
            for i in range(8):
                text = "changed" if i == changed else "even" if i % 2 == 0 else "odd"
                writer.append({"id": i, "value": i * 1.5 - 3, "name": text})
    (damaged,) = (folder / "bad").glob("*.shard")
    content = bytearray(damaged.read_bytes())
    at = content.index(b"evenodd")
    content[at] ^= 1
    damaged.write_bytes(content)
    names = ["grün", "名前の長い分類", *(f"class-{i:02d}" for i in range(28))]
    with shardio.DatasetWriter(
        folder / "many", shardio.Schema({"label": shardio.Array("int64")}), classes=names
    ) as writer:
        for i in range(90):
            writer.append({"label": np.int64(i * i % len(names))})


def record(scene: Scene) -> str:
    """Run a command in the current folder; return what the terminal shows, with its colours."""
    terminal = Terminal()
    with contextlib.redirect_stdout(terminal), contextlib.redirect_stderr(terminal):
        with contextlib.suppress(SystemExit):
            cli.main(shlex.split(scene.command))
    return _PROGRESS.sub("", terminal.getvalue()).rstrip("\n")


def progress_lines() -> str:
    """Return some lines of progress, with and without faults and long names."""
    terminal = Terminal()
    for done, faults, name in ((1, "", "a.mp4"), (4, "3 broken", "a.mp4"), (9, "", WIDE_NAME)):
        line = ProgressLine(terminal, stays=True)
        counts = f"{done * 1200:,} of 12,000 files"
        state = ProgressState("converting", 0, 10 << 30, counts, name=name, faults=faults)
        line.show(state)
        line.show(
            ProgressState(
                "converting", done << 30, 10 << 30, counts, "81.3 MiB/s", faults, name, "7 samples"
            ),
            is_last=True,
        )
        line.close()
    last = [line.rpartition("\x1b[2K")[2] for line in terminal.getvalue().split("\n")]
    return "\n".join(re.sub("\x1b\\[\\?25[lh]", "", line) for line in last).rstrip()


def screens(
    width: int, folder: Path, scenes: Sequence[Scene] = SCENES
) -> Iterator[tuple[Scene, str]]:
    """Yield scenes with what a terminal of `width` columns shows. `folder` must be empty."""
    make_files(folder)
    settings = {"COLUMNS": str(width), "LINES": "50", "TERM": "xterm-256color"}
    before, cwd = {key: os.environ.get(key) for key in settings}, os.getcwd()
    os.environ.update(settings)
    os.chdir(folder)
    try:
        for scene in scenes:
            yield scene, progress_lines() if scene.name == "progress" else record(scene)
    finally:
        os.chdir(cwd)
        for key, value in before.items():
            if value is None:
                del os.environ[key]
            else:
                os.environ[key] = value


_VARYING: Final = (
    (r"\d[\d,.]* (bytes|KiB|MiB)", r"\d"),
    (r"\bin \d+\.\d s\b", r"\d"),
    (r"ratio \d+\.\d+", r"\d"),
    (r"\d[\d,.]*(?= random)", r"\d[\d,.]*"),
    (r"(?<=lineage )[0-9a-f]{16}|(?<=id       )[0-9a-f]{32}", r"."),
    (r"\bshardio \d[\w.]*", r"\d[\w.]*"),
)
"""Patterns of text that differs between machines and versions, and what becomes # in it."""


def steady(text: str, folder: Path) -> str:
    """Return a screen as text without colours, and without what differs between machines."""
    plain = Text.from_ansi(text).plain.replace(str(folder), "/FOLDER".ljust(len(str(folder)), "-"))
    for pattern, varying in _VARYING:
        plain = re.sub(pattern, lambda found: re.sub(varying, "#", found[0]), plain)  # noqa: B023
    return "\n".join(line.rstrip() for line in plain.splitlines())


def golden(width: int, folder: Path) -> str:
    """Return all screens that are the same on every machine, as one text."""
    scenes = [scene for scene in SCENES if scene.is_steady]
    return "\n".join(
        f"$ shardio {scene.command}\n{steady(text, folder)}\n"
        for scene, text in screens(width, folder, scenes)
    )


def save_pictures(out: Path, width: int, folder: Path) -> None:
    """Write an SVG file for each screen and theme."""
    for scene, text in screens(width, folder):
        for theme, colours in THEMES.items():
            console = Console(record=True, width=width, file=io.StringIO(), force_terminal=True)
            console.print(Text(f"$ shardio {scene.command}", style="bold"))
            console.print(Text.from_ansi(text), soft_wrap=True)
            path = out / f"{scene.name}-{width}-{theme}.svg"
            console.save_svg(str(path), title=f"{width} columns", theme=colours)


def main() -> None:
    """Write pictures or texts of all screens."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path, metavar="OUT")
    parser.add_argument("--text", action="store_true", help="write texts instead of pictures")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    for width in WIDTHS:
        with tempfile.TemporaryDirectory(dir="/tmp") as folder:
            if options.text:
                (options.out / f"{width}.txt").write_text(golden(width, Path(folder)), "utf-8")
            else:
                save_pictures(options.out, width, Path(folder))


if __name__ == "__main__":
    main()
