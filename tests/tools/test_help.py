"""The help texts: golden screens of 80 columns, examples that parse, defaults that are named.

A golden text that is to change is written anew by

    COLUMNS=80 shardio verify --help > tests/tools/help/verify.txt
    COLUMNS=80 shardio --help > tests/tools/help/shardio.txt
"""

from __future__ import annotations

import argparse
import re
import shlex
from pathlib import Path

import pytest

from shardio_tools import cli
from shardio_tools.help import HelpFormatter, help_text

Capture = pytest.CaptureFixture[str]

GOLDEN = Path(__file__).parent / "help"
COMMANDS = sorted(cli.COMMANDS)
EXAMPLES = [
    pytest.param(line, id=line.partition("#")[0].strip())
    for command in COMMANDS
    for line in help_text(cli.COMMANDS[command]).examples.splitlines()
]


def shown(capture: Capture, *arguments: str) -> str:
    with pytest.raises(SystemExit, match="0"):
        cli.main(arguments)
    return capture.readouterr().out


@pytest.mark.parametrize("name", ["shardio", *COMMANDS])
def test_the_help_of_80_columns_is_the_golden_text(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    command = [] if name == "shardio" else [name]
    assert shown(capsys, *command, "--help") == (GOLDEN / f"{name}.txt").read_text("utf-8")


def test_there_is_a_golden_text_for_each_command() -> None:
    assert {path.stem for path in GOLDEN.iterdir()} == {"shardio", *COMMANDS}


@pytest.mark.parametrize(("n_columns", "n_most"), [(80, 80), (120, 120), (300, 120)])
def test_help_is_as_wide_as_the_terminal(
    n_columns: int, n_most: int, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.setenv("COLUMNS", str(n_columns))
    texts = [shown(capsys, *command, "--help") for command in ([], *([c] for c in COMMANDS))]
    widths = [len(line) for text in texts for line in text.splitlines()]
    assert n_most - 12 < max(widths) <= n_most


def test_shardio_alone_shows_the_overview(capsys: Capture) -> None:
    overview = shown(capsys, "--help")
    with pytest.raises(SystemExit, match="2"):
        cli.main([])
    assert capsys.readouterr() == ("", overview)
    for title, commands in cli.GROUPS.items():
        assert f"\n\n{title}:\n" in overview
        for name, module in commands.items():
            assert f"\n  {name:<12}{help_text(module).summary}\n" in overview


def test_help_is_a_command(capsys: Capture) -> None:
    for arguments in ([], ["convert"]):
        assert shown(capsys, "help", *arguments) == shown(capsys, *arguments, "--help")


@pytest.mark.parametrize("command", COMMANDS)
def test_help_begins_with_one_sentence_and_two_examples(command: str) -> None:
    summary, _, examples = help_text(cli.COMMANDS[command])
    assert summary.endswith(".") and summary.count(". ") == 0
    assert len(examples.splitlines()) >= 2
    assert all(line.split()[:2] == ["shardio", command] for line in examples.splitlines())


@pytest.mark.parametrize("line", EXAMPLES)
def test_an_example_parses(line: str) -> None:
    words = shlex.split(re.split(" && | > ", line)[0], comments=True)
    assert words[0] == "shardio"
    assert cli.parser().parse_args(words[1:]).command == words[1]


@pytest.mark.parametrize("command", COMMANDS)
def test_help_names_every_default(command: str) -> None:
    parser = argparse.ArgumentParser()
    cli.COMMANDS[command].add_arguments(parser)
    actions = [a for a in parser._actions if a.default not in (None, False, argparse.SUPPRESS)]
    assert [a.dest for a in actions if "(default" not in (a.help or "")] == []


def test_convert_shows_five_options_first_and_then_those_of_each_kind(capsys: Capture) -> None:
    text = shown(capsys, "convert", "--help")
    first = text.partition("\noptions:\n")[2].partition("\n\n")[0]
    flags = [line.split()[0] for line in first.splitlines() if line[2:3] == "-"]
    assert flags == ["-h,", "--kind", "--labels", "--overwrite", "--size", "--store"]
    of_videos = text.partition("\noptions of videos:\n")[2].partition("\n\n")[0]
    assert "\n  --stride N" in of_videos and "--quality" not in of_videos
    of_both = text.partition("\noptions of videos and images:\n")[2].partition("\n\n")[0]
    assert of_both.startswith("  --quality N")
    of_many = text.partition("\noptions of several kinds:\n")[2]
    assert of_many.startswith("  --schema FILE") and "[lerobot, zarr, hdf5, arrays," in of_many


def test_a_usage_line_names_what_is_required() -> None:
    parser = argparse.ArgumentParser("shardio x", formatter_class=HelpFormatter)
    parser.add_argument("source", metavar="SRC", nargs="+")
    parser.add_argument("place", metavar="PLACE", nargs="?")
    parser.add_argument("--size", metavar="N", required=True)
    either = parser.add_mutually_exclusive_group(required=True)
    either.add_argument("--file", metavar="FILE")
    either.add_argument("--kind", choices=("a", "b"))
    parser.add_argument("--other")
    assert " ".join(parser.format_usage().split()) == (
        "usage: shardio x SRC [SRC ...] [PLACE] (--file FILE | --kind a|b) --size N [options]"
    )
