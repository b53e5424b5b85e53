"""The trace of workers and batches over time, and what a loader records for it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import shardio
from shardio import InvalidArgument, ShardLoader

N = 40


def read(path: Path) -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = json.loads(path.read_text("utf-8"))["traceEvents"]
    return events


def traced(folder: str, tmp_path: Path, n_workers: int = 0) -> list[dict[str, Any]]:
    path = tmp_path / "trace.json"
    options: dict[str, Any] = {"num_workers": n_workers, "transform": dict, "output": "numpy"}
    dataset = shardio.open(folder, verify="always")
    with ShardLoader(dataset, 4, **options) as loader, loader.trace(path):
        for _ in loader:
            pass
    return read(path)


def spans(events: list[dict[str, Any]], name: str) -> list[dict[str, Any]]:
    found = [one for one in events if one["ph"] == "X" and one["name"] == name]
    return sorted(found, key=lambda one: one["ts"])


def end(span: dict[str, Any]) -> float:
    return float(span["ts"] + span["dur"])


def batches(events: list[dict[str, Any]]) -> dict[tuple[int, int], dict[str, Any]]:
    filled = [one for one in events if one["ph"] == "X" and one["name"].startswith("batch ")]
    return {
        (one["args"]["epoch"], one["args"]["step"]): one for one in filled if "epoch" in one["args"]
    }


@pytest.mark.parametrize("n_workers", [0, 2])
def test_every_batch_is_recorded(folder: str, tmp_path: Path, n_workers: int) -> None:
    path = tmp_path / "trace.json"
    with ShardLoader(folder, 4, output="numpy", num_workers=n_workers) as loader:
        for _ in loader:
            pass
        with loader.trace(path):
            for _ in range(2):
                for _ in loader:
                    pass
        for _ in loader:
            pass
    events = read(path)
    rows = {one["args"]["name"]: one["tid"] for one in events if one["name"] == "thread_name"}
    assert rows == {"main": 0, **{f"worker {k}": k + 1 for k in range(max(1, n_workers))}}
    # The first batches of epoch 1 may have been filled ahead, before the trace began.
    filled = batches(events)
    assert set(filled) <= {(epoch, step) for epoch in (1, 2) for step in range(10)}
    assert {(2, step) for step in range(10)} <= set(filled)
    got = {
        (one["args"]["epoch"], one["args"]["step"]): end(one)
        for one in spans(events, "handing over")
    }
    assert set(got) == {(epoch, step) for epoch in (1, 2) for step in range(10)}
    assert all(one["dur"] > 0 and end(one) < got[key] for key, one in filled.items())


def test_main_waits_hands_over_and_runs_the_body_in_turn(folder: str, tmp_path: Path) -> None:
    events = traced(folder, tmp_path)
    waiting, over = spans(events, "waiting"), spans(events, "handing over")
    bodies = spans(events, "the loop's body")
    assert (len(waiting), len(over), len(bodies)) == (10, 10, 9)
    for i in range(10):
        assert end(waiting[i]) == pytest.approx(over[i]["ts"])
        if i < 9:
            assert end(over[i]) == pytest.approx(bodies[i]["ts"])
            assert end(bodies[i]) == pytest.approx(waiting[i + 1]["ts"])


def test_the_phases_of_a_batch_fill_it_one_after_the_other(folder: str, tmp_path: Path) -> None:
    events = traced(folder, tmp_path, 1)
    phases = [
        one
        for name in ("reading", "checking hashes", "decompressing", "transforming")
        for one in spans(events, name)
    ]
    assert {one["name"] for one in phases} >= {"reading", "checking hashes", "transforming"}
    filled = [one for one in events if one["ph"] == "X" and one["name"].startswith("batch ")]
    for batch in filled:
        inside = [one for one in phases if batch["ts"] <= one["ts"] and end(one) <= end(batch) + 1]
        assert sum(one["dur"] for one in inside) == pytest.approx(batch["dur"])


def test_the_number_of_ready_batches_returns_to_zero(folder: str, tmp_path: Path) -> None:
    events = traced(folder, tmp_path)
    counts = [one["args"]["batches"] for one in events if one["ph"] == "C"]
    assert counts == [1, 0] * 10


def test_a_trace_without_a_path_is_saved_later(folder: str, tmp_path: Path) -> None:
    with ShardLoader(folder, 4, output="numpy", num_workers=2) as loader:
        with loader.trace() as trace:
            for _ in loader:
                pass
    trace.save(tmp_path / "trace.json")
    assert len(batches(read(tmp_path / "trace.json"))) == 10


def test_a_loop_that_fails_leaves_its_trace(folder: str, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    with ShardLoader(folder, 4, output="numpy", num_workers=0) as loader:
        with pytest.raises(ZeroDivisionError):
            with loader.trace(path):
                for batch in loader:
                    1 / (batch.step - 3)
    assert len(spans(read(path), "handing over")) == 4


def test_a_loader_that_is_closed_inside_its_trace_leaves_it(folder: str, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    loader = ShardLoader(folder, 4, output="numpy", num_workers=2)
    with loader.trace(path):
        for _ in loader:
            pass
        loader.close()
    assert len(batches(read(path))) == 10


def test_without_an_iteration_there_is_an_empty_trace(folder: str, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    with ShardLoader(folder, 4, output="numpy", num_workers=0) as loader, loader.trace(path):
        pass
    assert [one for one in read(path) if one["ph"] != "M"] == []


def test_a_file_that_cannot_be_written_is_refused_at_once(folder: str, tmp_path: Path) -> None:
    with ShardLoader(folder, 4, output="numpy", num_workers=0) as loader:
        with pytest.raises(FileNotFoundError), loader.trace(tmp_path / "nowhere" / "trace.json"):
            pytest.fail("nothing must run")
        with loader.trace(tmp_path / "trace.json"):
            assert len(list(loader)) == 10


def test_a_loader_has_one_trace_at_a_time(folder: str, tmp_path: Path) -> None:
    with ShardLoader(folder, 4, output="numpy", num_workers=0) as loader:
        with loader.trace() as trace:
            with pytest.raises(InvalidArgument, match="leave that `with` first"):
                loader.trace()
        with pytest.raises(InvalidArgument, match="used in one `with`"), trace:
            pass
        with loader.trace():
            pass
