"""The commands that do at length what the tests here do in part: that they count, and tell."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from stress_tests import flip_every_bit
from tests.corruption import list_crafted
from tests.corruption.damage import Victim

ROOT = Path(__file__).resolve().parents[2]
TRUST = ROOT / "docs" / "explanation" / "trust.md"


def run_tool(monkeypatch: pytest.MonkeyPatch, *arguments: str, misses: str | None = None) -> int:
    if misses is not None:
        monkeypatch.setattr(Victim, misses, lambda victim, *rest: "it was missed")
    return flip_every_bit.main([*arguments])


def test_every_kind(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_tool(monkeypatch, "--shard", "small", "--step", "6007", "--offset", "5") == 0
    text = capsys.readouterr().out
    assert text.count("a shard of") == 1
    assert "lengths: 11/11" in text and "tails: 1/1" in text and "flipped bits: 82/82" in text
    assert text.endswith("nothing was missed\n")


@pytest.mark.parametrize("what", ["flip", "length", "tail"])
def test_one_kind_of_damage_can_be_chosen_and_what_is_missed_is_an_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], what: str
) -> None:
    arguments = ("--shard", "small", "--what", f"{what}s", "--step", "60007")
    assert run_tool(monkeypatch, *arguments, misses=f"complaint_about_{what}") == 1
    text = capsys.readouterr().out
    assert re.search(r": 0/\d", text) and "cases were missed" in text
    assert text.count(" in ") == 1


def test_random_shards(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_tool(monkeypatch, "--minutes", "0.005", "--seed", "3") == 0
    found = re.search(r"random shards: (\d+)/(\d+) in", capsys.readouterr().out)
    assert found is not None and found[1] == found[2] != "0"


def test_every_crafted_shard_is_listed_as_documented(capsys: pytest.CaptureFixture[str]) -> None:
    assert list_crafted.main() == 0
    counted = capsys.readouterr().out.splitlines()[-1].partition(" ")[0]
    assert f"{counted} as" in TRUST.read_text("utf-8").replace("\n", " ")
    rows = re.findall(r"^\|.*\| (\d+) \|$", TRUST.read_text("utf-8"), re.MULTILINE)
    assert sum(map(int, rows)) == int(counted.partition("/")[0])


def test_another_rule(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    cases = [("nothing", b"no shard at all", "hole", "hole")]
    monkeypatch.setattr(list_crafted, "crafted", lambda folder: iter(cases))
    assert list_crafted.main() == 1
    assert "EXPECTED hole hole" in capsys.readouterr().out
