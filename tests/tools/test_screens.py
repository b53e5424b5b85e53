"""Screens at 80 and 120 columns, as a person has looked at them, and the style they share.

After a wanted change: `python -m tests.tools.screenshots --text tests/tools/screens`, and
`python -m tests.tools.screenshots OUT` for pictures to look at.
"""

from __future__ import annotations

import io
import json
import re
import tempfile
from pathlib import Path

import pytest
from rich.cells import cell_len

from shardio_tools import cli
from shardio_tools.output import print_error
from shardio_tools.screen import (
    Cell,
    Done,
    Element,
    Heading,
    Next,
    Table,
    fitted,
    painted,
    rendered,
)
from tests.terminal import Terminal
from tests.tools import screenshots

Capture = pytest.CaptureFixture[str]

GOLDEN = Path(__file__).parent / "screens"


@pytest.mark.parametrize("width", [80, 120])
def test_screens_are_those_that_were_looked_at(width: int) -> None:
    # The folder is in some texts: the length of its name decides where lines end.
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        found = screenshots.golden(width, Path(folder))
    expected = (GOLDEN / f"{width}.txt").read_text("utf-8")
    assert found == expected


@pytest.mark.parametrize("width", [80, 120])
def test_lines_of_screens_fit_the_terminal(width: int) -> None:
    text = (GOLDEN / f"{width}.txt").read_text("utf-8")
    lines = [line for part in text.split("\n$ shardio ") for line in part.splitlines()[1:]]
    assert len(lines) > 100
    assert [line for line in lines if cell_len(line) > width] == []


def test_every_command_has_a_screen() -> None:
    shown = {scene.command.split()[0] for scene in screenshots.SCENES}
    assert cli.COMMANDS.keys() <= shown


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    for name, value in (("TERM", "xterm-256color"), ("COLUMNS", "40")):
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("NO_COLOR", raising=False)
    return Terminal()


ELEMENTS: list[Element] = [
    Heading("Numbers"),
    Table([["a", "1.5"], ["名前", "1,000"], ["c", Cell("–", "bad")]], ("name", "n"), "<."),
    Heading("Broken", "bad"),
    "a line",
    Done("did it: /a/path/that/is/longer/than/the/terminal/is/wide"),
    Next(
        [("shardio inspect out/", "look"), ("x" * 38, "no room for this remark")],
        [("loader = 1", "")],
    ),
]


def shown(stream: io.StringIO, elements: list[Element] = ELEMENTS) -> list[str]:
    return "\n".join(rendered(elements, stream)).splitlines()


def test_a_pipe_gets_plain_text_without_next_steps() -> None:
    assert shown(io.StringIO()) == [
        "Numbers",
        "  name        n",
        "  a         1.5",
        "  名前  1,000",
        "  c         –",
        "",
        "Broken",
        "a line",
        "",
        "did it: /a/path/that/is/longer/than/the/terminal/is/wide",
    ]


def test_a_screen_without_headings_has_no_empty_lines_in_a_pipe() -> None:
    assert shown(io.StringIO(), ["a", Done("b")]) == ["a", "b"]


def test_a_terminal_gets_colours_by_meaning(terminal: Terminal) -> None:
    text = "\n".join(shown(terminal))
    assert "\x1b[1mNumbers\x1b[0m" in text
    assert "\x1b[1;31mBroken\x1b[0m" in text
    assert re.search("\x1b\\[31m *– *\x1b\\[0m", text)
    assert "\x1b[32m✓ did it:" in text
    assert "\x1b[2m  # look\x1b[0m" in text and "no room" not in text


def test_a_terminal_aligns_numbers_at_the_point(terminal: Terminal) -> None:
    rows = [["a", "1.25"], ["b", "-1000.5"], ["c", Cell("7", "bad")], ["d", "–"]]
    lines = shown(terminal, [Table(rows, ("name", "n"), "<.")])
    assert [re.sub("\x1b\\[[0-9;]*m", "", line).rstrip() for line in lines] == [
        "  name         n",
        "  a         1.25",
        "  b     -1000.5",
        "  c         7",
        "  d         –",
    ]


def test_code_comes_under_a_title_of_its_own_with_its_import(terminal: Terminal) -> None:
    code = Next(code=[("loader = 1", "")])
    assert re.sub("\x1b\\[[0-9;]*m", "", "\n".join(shown(terminal))).endswith(
        f"\n  {'x' * 38}\n\nIn Python\n  import shardio\n  loader = 1"
    )
    assert "Next" not in "".join(shown(terminal, [code]))
    assert shown(terminal, [Next()]) == []


def test_a_path_is_never_broken_into_lines(terminal: Terminal) -> None:
    plain = re.sub("\x1b\\[[0-9;]*m", "", "\n".join(shown(terminal)))
    assert "\n  /a/path/that/is/longer/than/the/terminal/is/wide\n" in plain


@pytest.mark.parametrize(("name", "value"), [("NO_COLOR", "1"), ("TERM", "dumb")])
def test_no_color_and_dumb_terminals(
    name: str, value: str, terminal: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, value)
    text = "\n".join(shown(terminal))
    assert not re.search("\x1b\\[[0-9;]*3[0-9]m", text)
    if value == "dumb":
        assert text == "\n".join(shown(io.StringIO())) and "\x1b" not in text


def test_a_terminal_of_another_encoding_has_marks_of_ascii(terminal: Terminal) -> None:
    terminal.encoding = "ascii"
    assert any("+ did it" in line for line in shown(terminal))


def test_a_list_stops_and_says_how_many_more_there_are() -> None:
    rows = [[str(i)] for i in range(25)]
    lines = shown(io.StringIO(), [Table(rows, rest="see elsewhere")])
    assert len(lines) == 21 and lines[-1] == "  … and 5 more (see elsewhere)"
    assert len(shown(io.StringIO(), [Table(rows)])) == 25


def test_errors_are_red_on_a_terminal_only(terminal: Terminal) -> None:
    assert painted("shardio:", "bad", terminal) == "\x1b[31mshardio:\x1b[0m"
    assert painted("shardio:", "bad", io.StringIO()) == "shardio:"


def test_errors_are_wrapped_between_words_on_a_terminal_only(
    terminal: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = f"shardio: {' '.join(['word'] * 12)}"
    assert fitted(text, io.StringIO()) == text
    lines = fitted(text, terminal).splitlines()
    assert len(lines) == 2 and all(set(line.split()[1:]) == {"word"} for line in lines)
    assert max(map(cell_len, lines)) <= 40
    assert fitted(f"{text}\n{text}", terminal) == f"{text}\n{text}"
    monkeypatch.setattr("sys.stderr", terminal)
    print_error(text.removeprefix("shardio: "))
    assert terminal.getvalue() == "\x1b[31mshardio:\x1b[0m" + "\n".join(lines)[8:] + "\n"


def test_json_is_the_same_on_a_terminal(
    dataset: Path, terminal: Terminal, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    for arguments in (["inspect", str(dataset)], ["diff", str(dataset), str(dataset)]):
        assert cli.main([*arguments, "--json"]) == 0
        piped = capsys.readouterr().out
        with monkeypatch.context() as patch:
            patch.setattr("sys.stdout", terminal)
            assert cli.main([*arguments, "--json"]) == 0
        assert terminal.getvalue() == piped and json.loads(piped)
        terminal.seek(0)
        terminal.truncate()


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        (["info", "out"], "unknown command 'info'; did you mean inspect?"),
        (["help", "convrt"], "unknown command 'convrt'; did you mean convert?"),
        (["fly"], "unknown command 'fly'; the commands are demo, convert, "),
        (["export", "a", "b", "--fromat", "files"], "arguments: --fromat; did you mean --format?"),
        (["split", "a", "--prats=a=1"], "arguments: --prats=a=1; did you mean --parts?"),
        (["inspect", "out", "3"], "arguments: 3; did you mean --sample 3?"),
        (["inspect", "out", "-1"], "arguments: -1; did you mean --sample -1?"),
        (["inspect", "out", "train"], "arguments: train; did you mean --subset train?"),
        (["verify", "out", "3"], "arguments: 3\n"),
        (["convert", "a", "b", "out"], "arguments: out; convert takes one SRC: a folder, or a p"),
        (["convert", "--kidn", "videos"], "arguments: --kidn; did you mean --kind?"),
    ],
)
def test_mistyped_words_are_named(arguments: list[str], hint: str, capsys: Capture) -> None:
    with pytest.raises(SystemExit, match="2"):
        cli.main(arguments)
    err = capsys.readouterr().err
    assert hint in err
    own = "usage: shardio " + (arguments[0] if arguments[0] in cli.COMMANDS else "COMMAND")
    assert err.startswith(own)


@pytest.mark.parametrize("command", sorted(cli.COMMANDS))
def test_every_command_answers_a_mistyped_flag(command: str, capsys: Capture) -> None:
    known = {"inspect": "--samlpe", "serve": "--wrokers", "view": "--laoder"}
    flag = known.get(command, "--qiuet")
    with pytest.raises(SystemExit, match="2"):
        cli.main([command, "a", "b", "c", flag])
    err = capsys.readouterr().err
    assert err.startswith(f"usage: shardio {command} ") and "; did you mean --" in err
