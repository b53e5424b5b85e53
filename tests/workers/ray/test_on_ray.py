"""A Ray cluster makes and finds the same as one machine, also when machines are lost."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ray", reason="ray is too large for the extra dev; tools/test --ray runs this")

import shardio
from shardio import Array
from shardio._workers import ray_cluster
from shardio._workers.ray_cluster import Cluster, Engine
from shardio.errors import UnsupportedEnvironment, WorkerDied
from shardio.maintenance import add_column, verify_dataset
from shardio_tools import cli
from tests.lines import Lines, contents, convert, write
from tests.workers.ray.conftest import Nodes, written_to

pytestmark = [pytest.mark.external, pytest.mark.usefixtures("quick_disk")]

LENGTH = Array("int64")
ROOT = Path(__file__).resolve().parents[3]


def convert_there(nodes: Nodes, root: Path, out: Path, **options: Any) -> Any:
    given = {"workers": None, "engine": "ray", "address": nodes.address}
    return convert(root, out, **{**given, **options})


# Conversion.


def test_the_bytes_are_those_of_one_machine(nodes: Nodes, lines: Path, tmp_path: Path) -> None:
    write(lines, {"e/kills.txt": "eight kill nine", "e/breaks.txt": "ten !", "z.txt": "eleven"})
    here = convert(lines, tmp_path / "here", workers=1)
    seen: list[Any] = []
    there = convert_there(nodes, lines, tmp_path / "there", progress=seen.append)
    assert contents(tmp_path / "there") == contents(tmp_path / "here")
    assert there.inputs == here.inputs
    why = "2 processes crashed while reading it; the last was killed by signal 9"
    assert why in there.inputs[7].reason
    assert (seen[0].n_inputs_done, seen[-1].n_inputs_done) == (0, len(here.inputs))
    write(lines, {"new.txt": "twelve"})
    convert(lines, tmp_path / "here", workers=1, append=True)
    convert_there(nodes, lines, tmp_path / "there", append=True)
    assert contents(tmp_path / "there") == contents(tmp_path / "here")


@pytest.mark.parametrize("lose", [Nodes.kill_who_wrote, Nodes.silence_who_wrote])
def test_a_node_that_is_lost_costs_only_what_it_was_at(
    nodes: Nodes,
    lines: Path,
    tmp_path: Path,
    lose: Callable[[Nodes, Path], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ray_cluster, "_CHECK_INTERVAL_S", 0.2)
    reached = tmp_path / "reached"
    write(lines, {"b/3.txt": f"three stuck:{reached} again"})
    reached.touch()
    convert(lines, tmp_path / "here")
    reached.unlink()
    loser = threading.Thread(target=lose, args=[nodes, reached])
    loser.start()
    convert_there(nodes, lines, tmp_path / "there")
    loser.join()
    nodes.end_silent()
    assert contents(tmp_path / "there") == contents(tmp_path / "here")


def test_machines_that_would_make_other_bytes_are_refused(
    nodes: Nodes, lines: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Lines, "libraries", lambda self: {"alphabet": "25"})
    said = "would produce different bytes: alphabet is 26, the conversion started with 25"
    with pytest.raises(UnsupportedEnvironment, match=said):
        convert_there(nodes, lines, tmp_path / "out")
    assert not (tmp_path / "out").exists()


PROGRAM = """
import sys
sys.path[:0] = sys.argv[1:3]
from shardio.conversion import journal
from shardio_tools import cli
journal.MIN_UNIT_BYTES, journal.MIN_INPUT_BYTES = 8, 0
sys.exit(cli.main(sys.argv[3:]))
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_another_goes_on(nodes: Nodes, lines: Path, tmp_path: Path, number: signal.Signals) -> None:
    reached, out = tmp_path / "reached", tmp_path / "out"
    write(lines, {"z.txt": f"stuck:{reached}"})
    paths = [str(ROOT / "tools"), str(tmp_path / "site")]
    command = ["convert", str(lines), str(out), "--kind=lines", "--workers=1", "--engine=ray"]
    main = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, *paths, *command, f"--address={nodes.address}"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    _, pid = written_to(reached)
    main.send_signal(number)
    said, complained = main.communicate(timeout=60)
    assert said == ""
    if number == signal.SIGINT:
        assert main.returncode == cli.INTERRUPTED
        first, second = complained.splitlines()[-2:]
        assert first == "shardio: convert: interrupted"
        assert "resume (--resume) continues from them" in second
    while Path(f"/proc/{pid}").exists():
        time.sleep(0.02)
    reached.touch()
    convert(lines, tmp_path / "whole")
    if number == signal.SIGINT:
        convert(lines, out, resume=True)
    else:
        convert_there(nodes, lines, out, resume=True)
    assert contents(out) == contents(tmp_path / "whole")


# What is done to datasets.


def test_verify_finds_the_same(nodes: Nodes, lines: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    convert(lines, out)
    there = {"engine": "ray", "address": nodes.address}
    assert verify_dataset(out, **there) == verify_dataset(out, workers=0)  # type: ignore[arg-type]
    shard, gone = sorted(out.glob("*.shard"))[:2]
    content = bytearray(shard.read_bytes())
    content[-2000] ^= 1
    shard.write_bytes(content)
    gone.unlink()
    found = verify_dataset(os.path.relpath(out), **there)  # type: ignore[arg-type]
    assert found == verify_dataset(os.path.relpath(out), workers=0)
    assert len({finding.path for finding in found.findings}) == 2


def test_a_process_keeps_the_function_and_gpus(nodes: Nodes, lines: Path, tmp_path: Path) -> None:
    out, calls = tmp_path / "out", list[int]()
    convert(lines, out)

    def process(sample: dict[str, Any]) -> list[int]:
        calls.append(1)
        return [os.getpid(), len(calls), len(os.environ["CUDA_VISIBLE_DEVICES"].split(","))]

    there = {"engine": "ray", "address": nodes.address, "gpus": 1}
    add_column(out, "who", Array("int64", (3,)), process, **there)  # type: ignore[arg-type]
    with shardio.open(out) as dataset:
        found = [sample["who"].tolist() for sample in dataset]
    assert sum(n_calls == 1 for _, n_calls, _ in found) == len({pid for pid, *_ in found})
    assert {n_gpus for *_, n_gpus in found} == {1}


# The cluster itself.


def run(nodes: Nodes, function: Any, shared_path: Path, n_jobs: int = 1) -> list[Any]:
    jobs = iter(enumerate(range(n_jobs)))
    with Cluster(Engine("ray", nodes.address), shared_path=shared_path) as opened:
        found = opened.run(function, lambda: next(jobs, None), lambda number: f"job {number}")
        return sorted(found)


def test_a_job_that_ends_two_processes_is_named(nodes: Nodes, tmp_path: Path) -> None:
    with pytest.raises(WorkerDied, match="2 processes crashed on job 0"):
        run(nodes, lambda number: os.kill(os.getpid(), signal.SIGKILL), tmp_path)
