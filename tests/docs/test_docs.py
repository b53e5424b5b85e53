"""Run every code block of the pages, or report why it cannot be run.

The blocks of a page run in order in one folder, which holds `videos/` and `out/`, the dataset made
of them, unless the page makes it itself. Python is run like a script on standard input. All that
Python runs, commands too, is run in forks of a process that has imported what it needs (see
`preloaded`). A block of text right below a block shows what that block prints.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import shardio
from shardio import errors
from shardio_tools import cli, sample_clips
from tests.docs.preloaded import preloaded, write_program

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
LANGUAGES = {"python": ["python", "-"], "sh": ["bash", "-euo", "pipefail", "-s"]}
MAKES_DATASET = "shardio convert videos/ out/\n"
IMAGES = {path.name: path for path in (ROOT / "docs" / "images").iterdir()}
VIEWER_PAGES = ("grid", "loader", "overview", "sample")

# Blocks that are not run, because they set up an environment and run this very suite: their page,
# and how they begin.
NOT_RUN = {
    *(("README.md", beginning) for beginning in ("tools/demo", "python3 -m venv")),
    ("docs/contributing/README.md", "tools/test"),
}

# A text of a page, and what is run in its place: the same for a shorter time, with the videos that
# are there. Its output is not compared. tests/tools/test_demo.py draws videos by the demo.
SHORTER = {"--seconds 3\n": "--seconds 0.3 --videos videos/\n"}

# Figures in outputs that depend on the machine, on the encoder or on how a training went.
VARYING = re.compile(
    r"[\d.,]+(?= (random clips per second|s:|KiB|bytes|dB|of 8 right)|% right)"
    r"|(?<=ratio )[\d.]+|(?<=loss )[\d.]+"
)
# Pages that show the `out/` of the tutorial, with more and longer videos than that of the tests.
SHOWS_TUTORIAL = {"docs/how-to/inspect.md"}
NUMBERS = re.compile(r"[\d.,]*\d")

# Packages that the extra `dev` does without: blocks that import them run where they are installed.
NOT_EVERYWHERE = tuple("torchvision lightning accelerate torch jax ray webdataset datasets".split())

# What warns of itself, and of nothing of ours: webdataset leaves tar files to be collected.
WARNS = {"webdataset": "error,ignore::ResourceWarning", "lightning": "ignore"}

# Packages that write on standard error what they do.
TALKS = {"lightning"}


@dataclass(frozen=True)
class Block:
    """A fenced block of a page."""

    language: str
    code: str
    line: int
    output: str | None
    """The text right below the block, or None."""


def blocks(page: Path) -> Iterator[Block]:
    text = page.read_text("utf-8")
    fenced = r"^```(\w*)\n(.*?)^```$(?:(?=\n\n```text\n(.*?)^```$)|)"
    for found in re.finditer(fenced, text, re.MULTILINE | re.DOTALL):
        yield Block(found[1], found[2], text.count("\n", 0, found.start()) + 2, found[3])


def imported(block: Block) -> list[str]:
    """Return the packages of NOT_EVERYWHERE that a block, or a command in it, imports."""
    ways = ("import {}\n", "from {}.", "from {} ", "-m {}.", "--engine {}")
    return [
        package
        for package in NOT_EVERYWHERE
        if any(way.format(package) in block.code for way in ways)
    ]


def uses(page: Path, name: str) -> bool:
    """Return True if a block of a page has the path of a file or folder in the current folder."""
    path = re.escape(name) + (r"(?![\w-])" if "." in name else "/")
    found = re.compile(rf"(?<![\w./-]){path}|Path\(\"{re.escape(name)}\"")
    return any(found.search(block.code) for block in blocks(page) if block.language in LANGUAGES)


def lacking(block: Block) -> str | None:
    """Return the package that a block imports and that is not installed; None if all are."""
    return next((package for package in imported(block) if find_spec(package) is None), None)


def runnable(page: Path) -> list[Block]:
    name = page.relative_to(ROOT).as_posix()
    beginnings = tuple(beginning for owner, beginning in NOT_RUN if owner == name)
    return [
        block
        for block in blocks(page)
        if block.language in LANGUAGES and not lacking(block)
        if not beginnings or not block.code.startswith(beginnings)
    ]


def code_to_run(block: Block) -> str:
    code = block.code
    for text, shorter in SHORTER.items():
        code = code.replace(text, shorter)
    return code


def prints(shown: str, printed: str, varying: re.Pattern[str] = VARYING) -> bool:
    """Return True if a text was printed as shown; "…" is any text, and varying figures differ."""
    shown, printed = varying.sub("#", shown), varying.sub("#", printed)
    return re.fullmatch(re.escape(shown).replace("…", ".*"), printed, re.DOTALL) is not None


def drawn(page: Path) -> set[str]:
    """Return the names of the images of the documentation that blocks of a page draw."""
    code = " ".join(block.code for block in runnable(page))
    return {name for name in IMAGES if name in code.split()}


def cases() -> Iterator[object]:
    for page in PAGES:
        if found := runnable(page):
            needs_device = any("ShardLoader" in block.code for block in found)
            marks = [pytest.mark.cpu_device] if needs_device else []
            marks += [pytest.mark.external] if any(map(imported, found)) else []
            yield pytest.param(page, id=page.relative_to(ROOT).as_posix(), marks=marks)
        for block in blocks(page):
            if block.language in LANGUAGES and (package := lacking(block)):
                name = f"{page.relative_to(ROOT).as_posix()}:{block.line}"
                skip = pytest.mark.skip(reason=f"{name}: needs {package}")
                yield pytest.param(page, id=name, marks=[skip, pytest.mark.external])


@pytest.fixture(scope="module")
def videos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("source") / "videos"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sample_clips, "N_FRAMES", 64)  # four clips of a dataset's 16 frames
        sample_clips.write_clips(folder, n_clips=1)
    return folder


@pytest.fixture(scope="module")
def dataset(videos: Path) -> Path:
    out = videos.parent / "out"
    shardio.convert(videos, out, workers=0)
    return out


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Return an environment in which `shardio` and `python` are on PATH, as after an installation.

    tinygrad runs without its self-checks, its metadata and its search for faster kernels.
    """
    programs = tmp_path_factory.mktemp("bin")
    places = [str(ROOT), str(ROOT / "converters"), str(ROOT / "tools")]
    write_program(programs / "python", [sys.executable])
    write_program(programs / "shardio", [sys.executable, "-m", "shardio"])
    return {
        **os.environ,
        "PATH": os.pathsep.join([str(programs), os.environ["PATH"]]),
        "PYTHONPATH": os.pathsep.join(places),
        "BROWSER": "true",  # a program that does nothing with a link
        "NOOPT": "1",
        "SHARDIO_CACHE": str(programs / "cache"),
        "SPEC": "0",
        "TRACEMETA": "0",
    }


@pytest.fixture(scope="module")
def quick(
    environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, str]]:
    """Return the same environment, in which warnings are errors, but with a preloaded Python."""
    programs = tmp_path_factory.mktemp("quick")
    path = os.pathsep.join([str(programs), environment["PATH"]])
    strict = {**environment, "PATH": path, "PYTHONWARNINGS": "error"}
    write_program(programs / "shardio", [str(programs / "python"), "-m", "shardio"])
    with preloaded(strict, programs):
        yield strict


@pytest.mark.slow
@pytest.mark.parametrize("page", list(cases()))
def test_every_block_of_a_page_runs(
    page: Path,
    videos: Path,
    dataset: Path,
    environment: dict[str, str],
    quick: dict[str, str],
    tmp_path: Path,
) -> None:
    shutil.copytree(videos, tmp_path / "videos")
    found = runnable(page)
    if not any(MAKES_DATASET in block.code for block in found):
        shutil.copytree(dataset, tmp_path / "out")
    for block in found:
        warnings = next((WARNS[name] for name in imported(block) if name in WARNS), "error")
        own = {**environment, "PYTHONWARNINGS": warnings}
        done = subprocess.run(
            LANGUAGES[block.language],
            input=code_to_run(block),
            cwd=tmp_path,
            env=quick if warnings == "error" else own,
            capture_output=True,
            text=True,
            check=False,
        )
        said = f"{page.relative_to(ROOT)}:{block.line}\n{done.stdout}\n{done.stderr}"
        assert done.returncode == 0, said
        is_quiet = block.language == "python" and TALKS.isdisjoint(imported(block))
        assert not is_quiet or done.stderr == "", said
        if block.output is not None and code_to_run(block) == block.code:
            name = page.relative_to(ROOT).as_posix()
            varying = NUMBERS if name in SHOWS_TUTORIAL else VARYING
            assert prints(block.output, done.stdout, varying), f"{said}\nshown:\n{block.output}"
    for name in drawn(page):
        assert is_drawn_alike(tmp_path / name, IMAGES[name])
    made = {path.name for path in tmp_path.iterdir()} - {"videos", "out"}
    others = [other for other in PAGES if other != page]
    used_twice = [(name, str(other)) for name in made for other in others if uses(other, name)]
    assert used_twice == []  # readers follow several pages in one folder


ENDS = {
    "file = open('a', 'w')": (0, "ResourceWarning: unclosed file"),
    "class A:\n    def __del__(self): 1 / 0\na = A()": (0, "ZeroDivisionError"),
    "import atexit; atexit.register(print, 'at exit', file=sys.stderr)": (0, "at exit"),
    "import threading; threading.Thread(target=lambda: 1 / 0).start()": (0, "ZeroDivisionError"),
    "1 / 0": (1, "ZeroDivisionError"),
    "sys.exit('a reason')": (1, "a reason\n"),
    "sys.exit(259)": (3, ""),
    "sys.exit()": (0, ""),
}
"""Programs, each with its exit code and a part of what it writes on standard error."""


@pytest.mark.parametrize("code", ENDS)
def test_a_preloaded_program_ends_as_in_a_python_of_its_own(
    code: str, environment: dict[str, str], quick: dict[str, str], tmp_path: Path
) -> None:
    for variables in (quick, {**environment, "PYTHONWARNINGS": "error"}):
        done = subprocess.run(
            ["python", "-"],
            input=f"import sys\nprint('said')\n{code}",
            cwd=tmp_path,
            env=variables,
            capture_output=True,
            text=True,
            check=False,
        )
        exit_code, words = ENDS[code]
        assert (done.returncode, done.stdout) == (exit_code, "said\n")
        assert words in done.stderr and bool(words) == bool(done.stderr)


OUTPUTS = [
    ("3 rows\n", "3 rows\n", True),
    ("3 rows\n", "4 rows\n", False),
    ("3 rows\n", "3 rows\nand more\n", False),
    ("3 rows\n…\n", "3 rows\nand\nmore\n", True),
    ("…\nof 5 files (…): done\n", "4\nof 5 files (median): done\n", True),
    ("…\nof 5 files (…): done\n", "4\nof 6 files (median): done\n", False),
    ("3 files, 8.0 KiB, in 1.2 s: out/\n", "3 files, 9.5 KiB, in 0.1 s: out/\n", True),
    ("3 files, 8.0 KiB, in 1.2 s: out/\n", "4 files, 8.0 KiB, in 1.2 s: out/\n", False),
    ("epoch 0 loss 0.5\n", "epoch 0 loss 0.41\n", True),
    ("epoch 0 loss 0.5\n", "epoch 1 loss 0.5\n", False),
]
"""The text of a page, what was printed, and whether that is accepted."""


@pytest.mark.parametrize(("shown", "printed", "is_accepted"), OUTPUTS)
def test_a_wrong_output_is_noticed(shown: str, printed: str, *, is_accepted: bool) -> None:
    assert prints(shown, printed) == is_accepted
    assert prints("2 of 4\n", "3 of 5\n", NUMBERS) and not prints("2 of 4\n", "3 in 5\n", NUMBERS)


def test_only_the_text_right_below_a_block_is_its_output(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("```sh\na\n```\n\n```text\nA\n```\n\n```sh\nb\n```\n\nB:\n\n```text\nB\n```\n")
    outputs = [(block.language, block.output) for block in blocks(page)]
    assert outputs == [("sh", "A\n"), ("text", None), ("sh", None), ("text", None)]
    assert all(block.output for block in runnable(ROOT / "docs" / "tutorial.md"))


def is_drawn_alike(path: Path, other: Path) -> bool:
    """Return True if two images are the same.

    Other versions of the encoder and of the font may differ in details.
    """
    a, b = (np.asarray(Image.open(each), np.int16) for each in (path, other))
    return a.shape == b.shape and bool(np.abs(a - b).mean() < 1)


def test_blocks_draw_all_images() -> None:
    """`test_every_block_of_a_page_runs` compares them; others show the viewer."""
    assert drawn(ROOT / "README.md") == {"quickstart.png"}
    assert IMAGES.keys() == {"quickstart.png", *(f"view-{name}.png" for name in VIEWER_PAGES)}


def test_another_image_is_not_drawn_alike(tmp_path: Path) -> None:
    pixels = np.asarray(Image.open(IMAGES["quickstart.png"]))
    for name, other in ("brighter", pixels // 2 + 127), ("smaller", pixels[1:]):
        Image.fromarray(other).save(tmp_path / f"{name}.png")
        assert not is_drawn_alike(tmp_path / f"{name}.png", IMAGES["quickstart.png"])


def test_what_is_run_for_a_shorter_time_is_still_there() -> None:
    code = "".join(block.code for page in PAGES for block in runnable(page))
    assert [text for text in SHORTER if text not in code] == []


def test_blocks_use_public_names_of_shardio() -> None:
    """They would find any other module in the Python that has imported it."""
    found = [block for page in PAGES for block in blocks(page) if block.language == "python"]
    names = {name for b in found for name in re.findall(r"(?<!\w)shardio\.([a-z]\w*)", b.code)}
    assert names - {*shardio.__all__, *shardio._MODULES} == set()


@pytest.mark.parametrize(("name", "beginning"), sorted(NOT_RUN))
def test_what_is_not_run_is_still_there(name: str, beginning: str) -> None:
    page = ROOT / name
    assert any(block.code.startswith(beginning) for block in blocks(page))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_a_block_says_in_which_language_it_is(page: Path) -> None:
    known = {*LANGUAGES, "text", "json", "toml", "diff", ""}  # the last ones are only shown
    assert {block.language for block in blocks(page)} <= known


def test_the_drawn_tree_of_errors_is_the_tree_of_classes() -> None:
    page = ROOT / "docs" / "reference" / "errors.md"
    (block,) = [block for block in blocks(page) if block.language == "text"]
    above: list[str] = []
    drawn = set()
    for line in block.code.splitlines():
        name, *rest = line.strip(" │├└─").split()
        depth = line.index(name) // 4
        above[depth:] = [name]
        drawn.add(name)
        if depth:
            bases = [base.__name__ for base in getattr(errors, name).__bases__]
            assert bases == [above[depth - 1], *rest[: len(bases) - 1]]
    assert drawn == set(errors.__all__)


def test_the_page_of_errors_gives_each_its_exit_code() -> None:
    text = (ROOT / "docs" / "reference" / "errors.md").read_text("utf-8")
    codes: dict[str, int] = {}
    for row in re.findall(r"^\| (\d+) \|[^|]*\|(.*)\|$", text, re.MULTILINE):
        codes |= dict.fromkeys(re.findall(r"`(\w+)`", row[1]), int(row[0]))
    assert codes.pop("OSError") == cli.ENVIRONMENT
    for name in set(errors.__all__) - {"ShardioError", "ClosedError"}:
        kind = getattr(errors, name)
        error = kind("x", code="x") if issubclass(kind, errors.ShardCorrupt) else kind("x")
        given = next(codes[c.__name__] for c in kind.__mro__ if c.__name__ in codes)
        assert cli.exit_code(error) == given, name


def _documented(command: str) -> dict[str, str]:
    """Read the table of a command's arguments."""
    text = (ROOT / "docs" / "reference" / "cli.md").read_text("utf-8")
    section = text.split(f"## shardio {command}\n")[1].split("\n## ")[0]
    rows = re.findall(r"^\| `(.*)` \| (.*) \|$", section, re.MULTILINE)
    return {name.replace("\\|", "|"): explanation for name, explanation in rows}


def _spelled(action: argparse.Action) -> str:
    if not action.option_strings:
        return str(action.metavar)
    value = action.metavar or "|".join(action.choices or [action.dest.upper()])
    return " ".join(action.option_strings) + (f" {value}" if action.nargs != 0 else "")


@pytest.mark.parametrize("command", sorted(cli.COMMANDS))
def test_the_page_of_the_command_line_names_every_argument(command: str) -> None:
    parser = argparse.ArgumentParser()
    cli.COMMANDS[command].add_arguments(parser)
    expected = {_spelled(a): a.help for a in parser._actions if a.dest != "help"}
    assert _documented(command) == expected
