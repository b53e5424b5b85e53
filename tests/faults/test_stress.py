"""`tools/stress`, and slices of its programs that no other test runs."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest

from shardio import ShardLoader
from stress_tests.__main__ import PROGRAMS, main
from stress_tests.soak_trouble import Trouble
from tests.faults.programs import run_stress
from tests.loading import TWO_FIELDS, two_fields, write_dataset


def test_the_list_says_what_each_program_does(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == list(PROGRAMS)
    assert all(re.fullmatch(r"[a-z-]+ +[A-Z].*\.", line) for line in lines)


@pytest.mark.parametrize("name", PROGRAMS)
def test_every_program_takes_minutes(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main([name, "--help"])
    said = capsys.readouterr().out
    assert said.startswith(f"usage: tools/stress {name} ") and "--minutes MINUTES" in said
    assert f"\n    tools/stress {name} " in said


def test_an_unknown_program_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sock"]) == main([]) == 2
    assert "sock: expected one of workers, operations, " in capsys.readouterr().err


@pytest.mark.slow
def test_a_slice_of_the_soak_finds_nothing() -> None:
    done = run_stress("soak", "--minutes", "0.1")
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"\d  samples\n", done.stdout)


def test_random_clicks_in_the_viewer_find_no_error() -> None:
    pytest.importorskip("starlette", reason="Starlette is not installed")
    done = run_stress("view", "--clicks", "12")
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"^12 clicks: .* thumbnail; the server took at most \d+ MB$", done.stdout)


def test_the_soak_kills_workers_of_its_loader(tmp_path: Path) -> None:
    path = write_dataset(tmp_path / "set", 64, 1, TWO_FIELDS, two_fields(64))
    tally = Counter[str]()
    trouble = Trouble(0, tally)
    with ShardLoader(path, 4, num_workers=2, output="numpy") as loader:
        batches = iter(loader)
        rows = next(batches).indices.tolist()
        trouble.loader = loader
        while not tally["workers killed"] or not tally["workers stopped for a while"]:
            trouble.strike()
        rows += [row for batch in batches for row in batch.indices.tolist()]
    assert rows == list(range(64))


@pytest.mark.slow
def test_kills_of_workers_end_with_the_time() -> None:
    done = run_stress("workers", "--minutes", "0.02")
    assert done.returncode in (0, 1), done.stderr  # a busy machine may wait for long
    assert "epochs that differ from num_workers=0: 0\n" in done.stdout


def test_operations_share_the_time() -> None:
    done = run_stress("operations", "--minutes", "0.03", "stats", "split")
    assert done.returncode == 0, done.stdout + done.stderr
    assert [row.split()[0] for row in done.stdout.splitlines()[1:-1]] == ["stats", "split"]


@pytest.mark.slow
def test_disk_failures_are_drawn_until_the_time_is_over() -> None:
    done = run_stress("disk", "--minutes", "0.05")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == "0 wrong"
    assert len(re.findall(r": ([1-9]\d*)/\1 calls", done.stdout)) == 2
