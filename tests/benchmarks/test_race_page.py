"""The pages that show the race are drawn from the JSON of a run, and show what it lacks."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from benchmarks import race_page
from benchmarks.__main__ import main
from benchmarks.race_faults import FAULTS
from benchmarks.racers.workloads import WORKLOADS

FOUND: dict[str, Any] = json.loads(race_page.FIGURES.read_text("utf-8"))
Capture = pytest.CaptureFixture[str]


def test_the_pages_are_what_is_drawn_from_the_figures() -> None:
    texts = race_page.render(FOUND)
    assert {race_page.PAGE, race_page.README} < {*texts}
    for path, text in texts.items():
        assert path.read_text("utf-8") == text, f"{path}: run `tools/bench --page`"
    assert {*race_page.PLOTS.iterdir()} == {path for path in texts if path.suffix == ".svg"}


def test_the_command_leaves_pages_that_are_as_drawn(capsys: Capture) -> None:
    assert main(["--page"]) == 0
    assert capsys.readouterr().out == ""


def test_plots_are_drawings() -> None:
    plots = sorted(race_page.PLOTS.glob("*.svg"))
    assert plots
    for plot in plots:
        ElementTree.parse(plot)


def lines(found: dict[str, Any]) -> list[str]:
    """Return the lines of the page that shows a run."""
    return race_page.render(found)[race_page.PAGE].splitlines()


def test_a_changed_figure_changes_the_page_and_is_a_loss_if_it_is_better() -> None:
    found = copy.deepcopy(FOUND)
    for figure in found["cases"]["race.frames"]["figures"]:
        if (figure["lane"], figure["unit"]) == ("grain", race_page.STREAM):
            figure |= dict.fromkeys(("min", "median", "max"), 1e6)
    new = [line for line in lines(found) if "| Grain | 1,000,000 |" in line]
    rate, loss = new
    assert rate.startswith("| Grain | ") and loss.startswith("| `frames` | stream, samples/s | ")


def test_a_case_from_another_run_is_shown_with_its_commit() -> None:
    found = copy.deepcopy(FOUND) | {"commit": "1" * 40}
    for case in found["cases"].values():
        case.pop("commit", None)
    found["cases"]["race.tokens"]["commit"] = "2" * 40
    assert f"| commit of shardio | `{'1' * 12}`; `tokens`: `{'2' * 12}` |" in lines(found)


@pytest.mark.parametrize(("gain", "is_listed"), [(1.004, False), (1.02, True)])
def test_a_better_figure_is_a_loss_from_one_percent_on(gain: float, *, is_listed: bool) -> None:
    found = copy.deepcopy(FOUND)
    figures = found["cases"]["race.frames"]["figures"]
    streams = {each["lane"]: each for each in figures if each["unit"] == race_page.STREAM}
    streams["grain"]["median"] = streams["shardio"]["median"] * gain
    loss = "| `frames` | stream, samples/s | Grain |"
    assert any(line.startswith(loss) for line in lines(found)) == is_listed


def test_what_is_not_measured_is_listed() -> None:
    found = copy.deepcopy(FOUND)
    del found["cases"]["race.tokens400"]
    case = found["cases"]["race.tokens"]
    case["figures"] = [each for each in case["figures"] if each["lane"] not in ("ffcv", "mds")]
    case["notes"] = ["without ffcv: environment ffcv: cannot be installed", "limit: stopped"]
    page = lines(found)
    assert "| `tokens400` | all | not in this run |" in page
    assert "| `tokens` | FFCV | environment ffcv: cannot be installed |" in page
    assert "| `tokens` | MosaicML streaming | not in this run |" in page
    assert "| `tokens` | *limit* | stopped |" in page


def test_times_from_the_start_and_faults_are_shown_where_a_run_has_them() -> None:
    found, unit = copy.deepcopy(FOUND), "s from start to first batch"
    case = found["cases"]["race.frames"]
    case["figures"] = [each for each in case["figures"] if each["unit"] not in race_page.COSTS]
    for lane, value in (("shardio", 0.5), ("grain", 1.25)):
        figure = {"lane": lane, "unit": unit, "min": value, "median": value, "max": value}
        case["figures"].append(figure)
    outcomes = {
        "ffcv": dict(zip(FAULTS, ("–", "delivered, 1 damaged", "error", "hangs"), strict=True))
    }
    found["cases"]["race.faults"] = {"group": "race", "figures": [], "outcomes": outcomes}
    page = lines(found)
    at = page.index("| loader | first batch after, s |")
    assert page[at + 2 : at + 4] == [
        "| **shardio** | 0.5 |",
        "| Grain | 1.25 |",
    ]
    assert "| FFCV | – | delivered, 1 damaged | error | hangs |" in page


def test_the_workload_with_a_store_is_ranked_by_its_first_epoch() -> None:
    found = copy.deepcopy(FOUND)
    case = found["cases"]["race.remote"] = copy.deepcopy(found["cases"]["race.frames"])
    units = [
        (race_page.FIRST, 2000.0, 1000.0),
        ("s from start to first batch", 1.0, 2.0),
        ("requests of the first epoch", 50.0, 16.0),
    ]
    case["figures"] = [
        {"lane": lane, "unit": unit, "min": value, "median": value, "max": value}
        for unit, *values in units
        for lane, value in zip(("shardio", "wds"), values, strict=True)
    ]
    texts = race_page.render(found)
    page = texts[race_page.PAGE].splitlines()
    at = page.index(f"### {race_page.TITLES['remote']}")
    assert page[at + 6 :][:4] == [
        "| loader | first epoch, samples/s | shardio ÷ loader | first batch after, s | requests |",
        "|---|---|---|---|---|",
        "| **shardio** | 2,000 | 1.00 | 1 | 50 |",
        "| webdataset | 1,000 | 2.00 | 2 | 16 |",
    ]
    loss = "| `remote` | requests | webdataset | 16 | 50 | 3.12 |"
    assert loss in page
    assert "in the first epoch" in texts[race_page.PLOTS / "remote.svg"]


def test_every_workload_has_a_title() -> None:
    assert {*race_page.TITLES} == {*WORKLOADS}


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (1234567.0, "1,230,000"),
        (999.6, "1,000"),
        (123.4, "123"),
        (12.34, "12.3"),
        (0.01234, "0.0123"),
    ],
)
def test_numbers_have_three_digits(value: float, shown: str) -> None:
    assert race_page.rounded(value) == shown


def test_pages_are_written_where_they_differ(tmp_path: Path) -> None:
    same, other = tmp_path / "same", tmp_path / "folder" / "other"
    same.write_text("a")
    assert race_page.write_stale({same: "a", other: "b"}) == [other]
    assert other.read_text() == "b"
