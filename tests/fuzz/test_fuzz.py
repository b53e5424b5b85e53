"""A slice of `tools/stress fuzz`, all inputs that are kept, and that a defect would be found."""

from __future__ import annotations

import contextlib
import itertools
import mmap
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardio import Schema
from shardio.errors import InsufficientMemory
from stress_tests import fuzz as tool
from tests.faults.programs import run_stress
from tests.fuzz import seeds
from tests.fuzz.feeding import TARGETS, Feeder, corpus, read_current, save_finding
from tests.fuzz.inputs import Inputs
from tests.fuzz.judge import Judge, Target, justified_bytes
from tests.fuzz.mutate import ShardMutator
from tests.fuzz.parts import Parts, from_dense, to_dense
from tests.fuzz.targets import targets

N_SLICE = 600


@pytest.fixture
def judge() -> Iterator[Judge]:
    # More patient than tools/stress: beside other programs, and on slow machines, CPUs are slower.
    found = Judge(limit_s=5.0)
    yield found
    found.close()


@pytest.fixture(scope="module")
def fed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Target]:
    return targets(tmp_path_factory.mktemp("targets"))


# --- shardio ------------------------------------------------------------------------------------


def test_a_slice_of_inputs_shows_no_defect(fed: dict[str, Target], judge: Judge) -> None:
    inputs = list(itertools.islice(Inputs(fed, 0), N_SLICE))
    assert {name for name, _, _ in inputs} == set(TARGETS)
    families = {*"documents schemas values labels journal parts files".split()}
    families |= {*ShardMutator(seeds.shards()).families}
    assert {family for _, family, _ in inputs} == families
    verdicts = [judge.judge(fed[name], content) for name, _, content in inputs]
    assert [verdict.problem for verdict in verdicts if verdict.problem] == []
    outcomes = {verdict.outcome for verdict in verdicts}
    assert len(outcomes) > 20 and "sound" in outcomes


@pytest.mark.parametrize("target", TARGETS)
def test_no_kept_input_shows_a_defect(fed: dict[str, Target], judge: Judge, target: str) -> None:
    kept = [(name, content) for owner, name, content in corpus() if owner == target]
    assert len(kept) >= 2
    for name, content in kept:
        whole = from_dense(content).seal() if target == "shard" else content
        assert judge.judge(fed[target], whole).problem is None, name


# --- inputs ---------------------------------------------------------------------------------------


def test_the_seed_decides_the_inputs(fed: dict[str, Target]) -> None:
    first, again, other = (list(itertools.islice(Inputs(fed, seed), 50)) for seed in (3, 3, 4))
    assert first == again != other


@pytest.mark.parametrize("name", sorted(seeds.shards()))
def test_a_shard_taken_apart_is_put_together_again_also_from_its_dense_form(name: str) -> None:
    content = seeds.shards()[name]
    parts = Parts.of(content)
    assert parts.seal() == content
    assert from_dense(to_dense(parts)).seal() == content


@given(st.binary(max_size=400))
def test_any_bytes_are_the_dense_form_of_some_file(dense: bytes) -> None:
    assert len(from_dense(dense).seal()) % 4096 == 0


# --- that defects are found -----------------------------------------------------------------------


def foreign(content: bytes) -> str:
    raise KeyError(content)


def endless(content: bytes) -> str:
    while True:
        pass


def waiting(content: bytes) -> str:
    reading, writing = os.pipe()
    try:
        return str(os.read(reading, 1))
    finally:
        os.close(reading)
        os.close(writing)


def touched(n_bytes: int) -> str:
    """Take that much memory, fresh: what the C library holds back of earlier frees is no growth."""
    with mmap.mmap(-1, n_bytes) as fresh:
        np.frombuffer(fresh, np.uint8)[:] = 1
        return str(len(fresh))


def hungry(content: bytes) -> str:
    # Far more than is justified: the system may take pages away from this process meanwhile.
    return touched(justified_bytes(0) * 16)


def short(content: bytes) -> str:
    raise InsufficientMemory("a record needs too much") from None


@pytest.mark.parametrize(
    ("target", "outcome", "text"),
    [
        (foreign, "KeyError", "KeyError: b'?'"),
        (hungry, "large", "are justified"),
        (short, "InsufficientMemory", "needs too much"),
    ],
)
def test_what_is_no_promised_outcome(judge: Judge, target: Target, outcome: str, text: str) -> None:
    verdict = judge.judge(target, b"?")
    assert verdict.outcome == outcome
    assert verdict.problem is not None and text in verdict.problem


def test_what_takes_too_much_of_a_cpu_is_a_problem() -> None:
    with contextlib.closing(Judge(limit_s=0.1)) as impatient:
        verdict = impatient.judge(endless, b"?")
    assert verdict.outcome == "slow"
    assert verdict.problem is not None and "took over 0.1 s" in verdict.problem


def test_what_waits_too_long_is_a_problem(monkeypatch: pytest.MonkeyPatch, judge: Judge) -> None:
    monkeypatch.setattr("tests.fuzz.judge.LIMIT_WAITING_S", 0.2)
    verdict = judge.judge(waiting, b"?")
    assert verdict.outcome == "slow"
    assert verdict.problem is not None and "os.read" in verdict.problem


def test_memory_that_the_size_justifies_is_no_problem(judge: Judge) -> None:
    verdict = judge.judge(lambda content: touched(40 << 20), bytes(2 << 20))
    assert verdict.problem is None and verdict.n_bytes > 30 << 20


def none_invalid(rows: Any, *rest: object) -> Any:
    return np.zeros(len(rows), np.bool_)


@pytest.mark.parametrize(
    ("check", "instead"),
    [
        ("shardio.shard.opening.check_sections", lambda *arguments: None),
        ("shardio.format.layout._check_extent", lambda *arguments: None),
        ("shardio.shard.records.first_invalid", lambda *arguments: None),
        ("shardio.format.types.arrays.Array.shape_of", lambda field, dims, n: tuple(dims.tolist())),
        ("shardio.shard.records.invalid_streams", none_invalid),
        ("shardio.shard.verification.hash_bytes", lambda content: 0),
        ("shardio.maintenance.verify.payload.invalid_entries", none_invalid),
        ("shardio.maintenance.verify.window.hash_bytes", lambda content: 0),
    ],
)
def test_a_check_that_is_left_out_is_noticed(
    monkeypatch: pytest.MonkeyPatch,
    fed: dict[str, Target],
    judge: Judge,
    check: str,
    instead: Callable[..., object],
) -> None:
    inputs = Inputs(fed, 0, "shard")
    monkeypatch.setattr(check, instead)
    for target, _, content in itertools.islice(inputs, N_SLICE):
        if judge.judge(fed[target], content).problem:
            return
    pytest.fail(f"{N_SLICE} inputs do not show that a check is missing")


# --- feeding, and the command ---------------------------------------------------------------------


def test_each_defect_is_kept_once_with_what_is_wrong_and_how_to_see_it(tmp_path: Path) -> None:
    (tmp_path / "work").mkdir()
    feeder = Feeder(tmp_path / "work", tmp_path / "found")
    feeder.targets["schema"] = foreign
    for content in (b"one", b"two"):
        feeder.feed("schema", "some", content)
    feeder.close()
    (kept,) = feeder.tally.findings
    assert Path(kept).read_bytes() == b"one"
    text = Path(kept + ".txt").read_text()
    assert text.startswith(f"tools/stress fuzz --replay {kept}\n") and "KeyError: b'one'" in text
    assert (feeder.tally.n_inputs, feeder.tally.n_found) == (2, 2)
    assert feeder.tally.outcomes == {"schema: KeyError": 2}
    assert read_current(tmp_path / "work") == ("schema", b"two")


def run_tool(*arguments: object) -> int:
    code: int = tool.main([str(argument) for argument in arguments])
    return code


def test_a_kept_input_is_fed_again(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    place = save_finding(tmp_path, "schema", b"{", "what was wrong")
    assert run_tool("--replay", place) == 0
    assert capsys.readouterr().out == "SchemaError: as it should be\n"

    def broken(content: bytes) -> Schema:
        raise KeyError("a defect")

    monkeypatch.setattr(Schema, "from_json", broken)
    assert run_tool("--replay", place) == 1
    assert "KeyError: 'a defect'" in capsys.readouterr().out


def test_the_command_feeds_until_its_time_is_over_and_says_what_it_did(tmp_path: Path) -> None:
    found = str(tmp_path / "found")
    done = run_stress("fuzz", "--minutes", "0.02", "--target", "schema", "--out", found)
    assert done.returncode == 0, done.stderr
    assert "inputs in all: 0 findings" in done.stdout and "schema: SchemaError" in done.stdout
    assert "dataset:" not in done.stdout and not (tmp_path / "found").exists()


_DIES = """
import os, sys
from pathlib import Path
from tests.fuzz.feeding import Feeder
folder, findings = map(Path, sys.argv[1:3])
feeder = Feeder(folder, findings)
feeder.feed("schema", "some", b"{}")
feeder.close()
"""


def run_dying(tmp_path: Path, end: str) -> Any:
    """Run a process that feeds one input and then comes to this end, and one that ends well."""
    (tmp_path / "work").mkdir()
    script = tmp_path / "dies.py"
    script.write_text(f"{_DIES}if folder.name == '1':\n    {end}")
    arguments = ["--minutes", "1", "--processes", "1", "--out", str(tmp_path / "found")]
    run = tool.Run(tool.parse(arguments), tmp_path / "work", [sys.executable, str(script)])
    run.run(60)
    return run


@pytest.mark.parametrize("number", [11, 15])
def test_an_input_that_kills_is_kept(tmp_path: Path, number: int) -> None:
    run = run_dying(tmp_path, f"os.kill(os.getpid(), {number})")
    assert len(run.tallies) == 2
    if number == 15:  # somebody else ended the process
        assert run.findings == {}
        return
    (place,) = run.findings
    assert run.findings[place] == "the process was killed by SIGSEGV"
    assert Path(place).read_bytes() == b"{}"
