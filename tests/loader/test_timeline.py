"""The drawing of workers and batches over time, and what a loader records for it."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import pytest

from shardio import InvalidArgument, ShardLoader
from shardio._engine.dispatch.counters import FillRecord, IterationTimer, Timestamps
from shardio._loading.timeline import (
    CHECKING,
    READING,
    TRANSFORMING,
    DeliveryEvent,
    FillEvent,
    Timeline,
    timeline_of,
)
from tests.loading import TWO_FIELDS, two_fields, write_dataset

pytestmark = pytest.mark.usefixtures("warm_zygote", "quick_disk")

SVG = "{http://www.w3.org/2000/svg}"
TWO_BATCHES = Timeline(
    "epoch <7> & more",
    [
        [FillEvent(0, 0.000, 0.004, {READING: 0.003, CHECKING: 0.001, TRANSFORMING: 0.0})],
        [FillEvent(1, 0.001, 0.005, {READING: 0.004, CHECKING: 0.0, TRANSFORMING: 0.0})],
    ],
    [DeliveryEvent(0, 0.0, 0.0041, 0.0045), DeliveryEvent(1, 0.0085, 0.0, 0.0087)],
)


def said(svg: str) -> list[str]:
    """Every text of a drawing, tooltips included."""
    root = ElementTree.fromstring(svg)
    return [element.text or "" for tag in ("text", "title") for element in root.iter(SVG + tag)]


def bars(svg: str, colour: str) -> list[tuple[float, float]]:
    """Return where bars of a colour begin, and their widths."""
    found = ElementTree.fromstring(svg).iter(SVG + "rect")
    return [
        (float(bar.get("x", 0)), float(bar.get("width", 0)))
        for bar in found
        if bar.get("fill") == colour and bar.get("height") == "22"
    ]


def test_a_drawing_says_who_did_what_for_how_long() -> None:
    texts = said(TWO_BATCHES.svg())
    assert "epoch <7> & more: batches 0 to 1" in texts
    assert {"worker 0", "worker 1", "main", "ready", "milliseconds since the epoch began"} <= {
        *texts
    }
    assert "batch 0: filled in 4 ms (reading 3 ms, checking hashes 1 ms)" in texts
    assert "batch 0: waited 4.1 ms" in texts
    assert "batch 0: handed over in 400 µs" in texts
    assert "batch 0: the loop's body took 4 ms" in texts


def test_the_lengths_of_bars_are_those_of_time() -> None:
    svg = TWO_BATCHES.svg()
    (reading, checking) = bars(svg, "#0072b2"), bars(svg, "#e69f00")
    assert len(reading) == 2
    assert len(checking) == 1
    assert reading[0][1] == pytest.approx(3 * checking[0][1], abs=0.05)
    assert checking[0][0] == pytest.approx(reading[0][0] + reading[0][1], abs=0.05)
    assert bars(svg, "#cc79a7") == []  # no transform


def test_only_the_latest_batches_are_drawn() -> None:
    texts = said(TWO_BATCHES.svg(n_batches=1))
    assert "epoch <7> & more: batches 1 to 1" in texts
    assert not [text for text in texts if text.startswith("batch 0: waited")]


@pytest.mark.parametrize("n_batches", [0, -1])
def test_a_drawing_of_no_batches_is_refused(n_batches: int) -> None:
    with pytest.raises(InvalidArgument, match=f"n_batches must be .* found {n_batches}"):
        TWO_BATCHES.svg(n_batches)


def test_the_number_of_ready_batches_is_drawn_in_steps() -> None:
    shape = ElementTree.fromstring(TWO_BATCHES.svg()).find(SVG + "polygon")
    assert shape is not None
    heights = [float(point.split(",")[1]) for point in shape.get("points", "").split()]
    floor, top = max(heights), min(heights)
    # Batch 0 is ready at 4.0 ms and got at 4.5, batch 1 at 5.0 and 8.7: at most one at a time.
    assert heights == [floor, floor, floor, floor, top, top, floor, floor, top, top, floor] + [
        floor, floor
    ]  # fmt: skip


def test_without_a_batch_there_is_a_drawing_that_says_so() -> None:
    assert "epoch 0: no batch was delivered" in said(Timeline("epoch 0", [[]], []).svg())


def test_what_is_timed_one_in_seven_never_exceeds_the_batch() -> None:
    timer = IterationTimer(began_ns=1_000)
    timer.moments.append(Timestamps(3, 1_500, 200, 2_500))
    found = timeline_of("epoch 0", [[FillRecord(1_000, 3, 1_100, 2_100, 900, 300, 0)]], timer)
    (filled,) = found.workers[0]
    assert filled.phases_s[CHECKING] == pytest.approx(900e-9)
    assert sum(filled.phases_s.values()) == pytest.approx(1e-6)
    assert (filled.start_s, filled.end_s) == pytest.approx((100e-9, 1_100e-9))
    assert found.main[0] == pytest.approx((3, 500e-9, 200e-9, 1_500e-9))


@pytest.mark.parametrize("n_workers", [0, 2])
def test_a_loader_records_every_batch_if_it_is_asked_to(tmp_path: Path, n_workers: int) -> None:
    folder = write_dataset(tmp_path / "set", 40, 2, TWO_FIELDS, two_fields(40))
    with ShardLoader(folder, 4, output="numpy", num_workers=n_workers, record=True) as loader:
        for _ in range(2):
            for _ in loader:
                pass
        timeline = loader.timeline()
        timeline.save(tmp_path / "timeline.svg")
    assert timeline.title == "epoch 1"
    assert [one.step for one in timeline.main] == list(range(10))
    filled = [one for each in timeline.workers for one in each]
    assert sorted(one.step for one in filled) == list(range(10))
    got_s = {one.step: one.got_s for one in timeline.main}
    assert all(one.start_s < one.end_s < got_s[one.step] for one in filled)
    assert all(one.asked_s + one.waited_s <= one.got_s for one in timeline.main)
    assert "epoch 1: batches 0 to 9" in said((tmp_path / "timeline.svg").read_text("utf-8"))


def test_without_being_asked_a_loader_records_nothing(tmp_path: Path) -> None:
    folder = write_dataset(tmp_path / "set", 8, 1, TWO_FIELDS, two_fields(8))
    with ShardLoader(folder, 4, output="numpy", num_workers=0) as loader:
        for _ in loader:
            pass
        with pytest.raises(InvalidArgument, match="made with record=True"):
            loader.timeline()


def test_a_timeline_is_of_an_iteration(tmp_path: Path) -> None:
    folder = write_dataset(tmp_path / "set", 8, 1, TWO_FIELDS, two_fields(8))
    with ShardLoader(folder, 4, output="numpy", num_workers=0, record=True) as loader:
        with pytest.raises(InvalidArgument, match="epoch 0"):
            loader.timeline()
