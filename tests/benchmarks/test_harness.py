"""The harness of `tools/bench`: turns, figures, limits, reports, the cache, and the gate."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

import shardio
from benchmarks import gate, harness, report
from benchmarks.__main__ import GROUPS, load_groups, main
from benchmarks.child import NotMeasured
from benchmarks.data import Cache, DatasetSpec
from benchmarks.gate import PATHS, UNIT
from benchmarks.harness import CASES, Bench, Case, Lanes, Limit, measure
from shardio import Array

pytestmark = pytest.mark.process

Capture = pytest.CaptureFixture[str]
N_ROUNDS = 3
FAST = Limit("ours", "s", "theirs", at_most=0.5)


@pytest.fixture
def turns() -> list[str]:
    return []


@pytest.fixture
def made(turns: list[str], monkeypatch: pytest.MonkeyPatch) -> Iterator[Case]:
    """Register a case of two lanes: theirs takes 10 s, ours 1, 2 and 9 s."""
    ours = itertools.cycle([1.0, 2.0, 9.0])

    def run(bench: Bench, *, mib: int = 3) -> Lanes:
        """Compare two lanes."""

        def lane(name: str, value: float) -> dict[str, float]:
            turns.append(name)
            return {"s": value, "MB/s": mib / value}

        turns.append("begin")
        bench.note("a peer is missing")
        yield {"ours": lambda: lane("ours", next(ours)), "theirs": lambda: lane("theirs", 10.0)}
        turns.append("end")

    case = Case("some.case", "some", run, (FAST,), N_ROUNDS)
    monkeypatch.setitem(harness.CASES, case.name, case)
    yield case


def test_an_interrupt_keeps_the_figures_of_earlier_cases(
    made: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(bench: Bench) -> Lanes:
        """Interrupt the run."""
        raise KeyboardInterrupt
        yield {}

    last = Case("some.last", "some", interrupt, (), N_ROUNDS)
    monkeypatch.setitem(harness.CASES, last.name, last)
    file = tmp_path / "found.json"
    with pytest.raises(KeyboardInterrupt):
        main(["some.case", "some.last", "--json", str(file), "--folder", str(tmp_path)])
    assert [*json.loads(file.read_text())["cases"]] == ["some.case"]


def test_lanes_take_turns_between_setting_up_and_cleaning_up(
    made: Case, turns: list[str], tmp_path: Path
) -> None:
    measure(made, Cache(tmp_path))
    assert turns == ["begin", *["ours", "theirs"] * N_ROUNDS, "end"]


def test_a_rate_is_best_where_it_is_largest(made: Case, tmp_path: Path) -> None:
    result = measure(made, Cache(tmp_path))
    seconds, rate = result.figures["ours", "s"], result.figures["ours", "MB/s"]
    assert (seconds.best, seconds.median) == (1.0, 2.0)
    assert (rate.best, rate.median) == (3.0, 1.5)


@pytest.mark.parametrize(
    ("limit", "value"),
    [
        (Limit("ours", "s"), 2.0),
        (Limit("ours", "s", "theirs"), 0.2),
        (Limit("ours", "s", "theirs", of_best=True), 0.1),
        (Limit("nobody", "s", "theirs", at_most=0), None),
        (Limit("ours", "s", "nobody", at_most=0), None),
    ],
)
def test_limits_are_of_medians_of_ratios_of_a_round_or_of_the_best(
    made: Case, tmp_path: Path, limit: Limit, value: float | None
) -> None:
    result = measure(made, Cache(tmp_path))
    assert result.value_of(limit) == value
    assert result.is_met(limit)


def test_the_command_prints_and_writes_every_figure(
    made: Case, tmp_path: Path, capsys: Capture
) -> None:
    file = tmp_path / "found.json"
    arguments = ["some.case", "--json", str(file), "--folder", str(tmp_path), "--set", "mib=6"]
    assert main(arguments) == 0
    said = capsys.readouterr().out
    assert said.startswith("some.case: Compare two lanes.\n")
    assert "ok     ours ÷ theirs, s: at most 0.5; found 0.2\n" in said
    assert "note: a peer is missing" in said
    found = json.loads(file.read_text())
    assert set(found) == {"machine", "versions", "commit", "load_average", "cases"}
    (case,) = found["cases"].values()
    assert case["rounds"] == N_ROUNDS and case["notes"] == ["a peer is missing"]
    figure = {"lane": "ours", "unit": "MB/s", "min": 6 / 9, "median": 3.0, "max": 6.0}
    assert figure | {"values": [6.0, 3.0, 6 / 9]} in case["figures"]
    assert case["limits"] == [{"limit": str(FAST), "found": 0.2, "is_met": True}]


def test_runs_are_compared_with_earlier_ones(made: Case, tmp_path: Path, capsys: Capture) -> None:
    file = tmp_path / "found.json"
    common = ["some.case", "--folder", str(tmp_path)]
    assert main([*common, "--json", str(file)]) == 0
    changed = json.loads(file.read_text())
    for figure in changed["cases"]["some.case"]["figures"]:
        if figure["lane"] == "theirs":
            figure["median"] *= 2
    changed["machine"]["cpu"] = "an abacus"
    file.write_text(json.dumps(changed))
    capsys.readouterr()
    assert main([*common, "--compare", str(file)]) == 0
    said = capsys.readouterr().out
    assert "some.case, theirs: 20 -> 10 s (0.50 x)  <\n" in said
    assert "some.case, ours: 2 -> 2 s (1.00 x)\n" in said
    assert "another machine: {'cpu': 'an abacus'" in said


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "expected --list, --gate, --page, a case, or a group: loading, "),
        (["nothing"], "nothing: no case, and no group: loading, "),
        (["some.case", "--set", "mib"], "--set mib: expected NAME=VALUE, with a name of ['mib']"),
        (["some.case", "--set", "x=1"], "--set x=1: expected NAME=VALUE"),
        (["some.case", "--set", "mib=many"], "invalid literal for int()"),
        (["some.case", "--compare", "/nowhere/found.json"], "/nowhere/found.json"),
    ],
)
def test_mistakes_on_the_command_line_are_answered(
    made: Case, capsys: Capture, arguments: list[str], said: str
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(arguments)
    assert said in capsys.readouterr().err


def test_a_missed_limit_a_fault_and_a_missing_peer_have_exit_codes_of_their_own(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Capture
) -> None:
    def slow(bench: Bench) -> Lanes:
        yield {"ours": lambda: {"s": 9.0}, "theirs": lambda: {"s": 10.0}}

    def faulty(bench: Bench) -> Lanes:
        yield {"ours": lambda: {"s": 1 / 0}}

    def missing(bench: Bench) -> Lanes:
        raise NotMeasured("no peer here")
        yield {}

    codes = {}
    for run in (slow, faulty, missing):
        case = Case(f"some.{run.__name__}", "some", run, (FAST,), 1)
        monkeypatch.setitem(harness.CASES, case.name, case)
        codes[run.__name__] = main([case.name, "--folder", str(tmp_path)])
    assert codes == {"slow": 1, "faulty": 1, "missing": 3}
    said = capsys.readouterr().out
    assert "MISSED ours ÷ theirs" in said and "not measured: no peer here" in said
    assert "ZeroDivisionError" in said and "\nat ours" in said


def test_the_gate_adds_rounds_before_it_fails(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Capture
) -> None:
    values = iter([1.0, 1.2] + [1.0, 1.01] + [1.0, 1.2] * 4)

    def run(bench: Bench) -> Lanes:
        yield {"base": lambda: {"s": next(values)}, "now": lambda: {"s": next(values)}}

    limit = Limit("now", "s", "base", at_most=1.1, of_best=True)
    gate = Case("some.gate", "some", run, (limit,), 1, for_gate=True)
    monkeypatch.setattr("benchmarks.__main__.CASES", {"some.gate": gate})
    assert main(["--gate", "--folder", str(tmp_path)]) == 0
    assert "found 1.01" in capsys.readouterr().out
    assert main(["--gate", "--folder", str(tmp_path)]) == 1
    assert "MISSED now ÷ base, s: at most 1.1; found 1.2\n" in capsys.readouterr().out
    assert next(values, None) is None


# --- the cache -----------------------------------------------------------------------------------


def number(i: int) -> dict[str, int]:
    return {"x": i}


def other_number(i: int) -> dict[str, int]:
    return {"x": 2 * i}


SPEC = DatasetSpec({"x": Array("int64")}, number, 5)


def test_a_dataset_is_written_once_for_each_specification(tmp_path: Path) -> None:
    cache = Cache(tmp_path)
    folder = cache.dataset("numbers", SPEC)
    with shardio.open(folder) as dataset:
        assert [int(sample["x"]) for sample in dataset] == list(range(5))
    written = folder.stat().st_mtime_ns
    assert cache.dataset("numbers", SPEC) == folder and folder.stat().st_mtime_ns == written
    others = [
        DatasetSpec({"x": Array("int64")}, number, 6),
        DatasetSpec({"x": Array("int32")}, number, 5),
        DatasetSpec({"x": Array("int64")}, other_number, 5),
        DatasetSpec({"x": Array("int64")}, number, 5, shard_bytes=64),
        DatasetSpec({"x": Array("int64")}, number, 5, variant="other"),
    ]
    assert len({folder, *(cache.dataset("numbers", spec) for spec in others)}) == 6


def test_what_was_interrupted_is_not_kept(tmp_path: Path) -> None:
    def fail(folder: Path) -> None:
        folder.mkdir()
        raise OSError("the disk is full")

    cache = Cache(tmp_path)
    with pytest.raises(OSError, match="the disk is full"):
        cache.made("data", "key", fail)
    assert list(tmp_path.iterdir()) == []
    assert cache.made("data", "key", Path.mkdir).is_dir()


# --- the cases -----------------------------------------------------------------------------------


def test_every_group_has_cases_that_say_what_they_measure(capsys: Capture) -> None:
    load_groups()
    assert {each.group for each in CASES.values()} == set(GROUPS)
    assert all(each.description.endswith(".") for each in CASES.values())
    assert main(["--list"]) == 0
    said = capsys.readouterr().out
    assert all(f"\n{name} " in f"\n{said}" for name in CASES)


@pytest.mark.parametrize(
    "arguments",
    [
        ["order.crowding", "--set", "epochs=1"],
        ["opening.write-samples", "--set", "samples=20"],
        ["messages.pool", "--set", "messages=100"],
        ["loading.rates", "--set", "kind=raw, 2 KB", "--set", "seconds=0.01"],
        ["conversion.converters", "--set", "kind=npz"],
    ],
    ids=lambda arguments: arguments[0],
)
def test_cases_run(arguments: list[str], tmp_path: Path, capsys: Capture) -> None:
    code = main([*arguments, "--rounds", "1", "--folder", str(tmp_path)])
    said = capsys.readouterr().out
    assert code in (0, 1) and "ERROR" not in said, said  # a busy machine may miss a limit
    assert "best        median" in said


@pytest.mark.slow
def test_the_gate_measures_both_trees(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gate, "N_PROCESSES", 2)
    case = CASES["gate.batches"]
    result = measure(case, Cache(tmp_path), rounds=1, options={"commit": "HEAD"})
    if result.is_unavailable:
        assert "git" in result.error  # the tests of a source archive
        return
    assert not result.error
    lanes = {lane for lane, unit in result.figures if unit == UNIT}
    assert lanes == {f"{path}, {tree}" for path in PATHS for tree in ("base", "now")}
    assert all(figure.best > 0 for figure in result.figures.values())
    assert report.commit()
