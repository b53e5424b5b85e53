"""Shuffling by shards: a permutation that keeps to windows of whole shards."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardio import Array, Schema, ShardLoader, Video, mix
from shardio import open as open_dataset
from shardio.dataset.manifest import load, publish_next
from shardio.dataset.selection import RowRuns
from shardio.errors import InvalidArgument
from shardio.maintenance import compact
from shardio.order import shuffle
from shardio.order.permutation import Permutation, derive_key
from shardio.order.shuffle import ShardEpochOrder
from shardio.samples.clip_view import ClipView
from shardio.samples.clips import Clip
from tests.loading import append_shard, make_loader, write_dataset

pytestmark = pytest.mark.usefixtures("quick_disk")

SIZES = st.lists(st.integers(0, 40), max_size=40)
PER_WINDOW = st.integers(1, 9)


def order(sizes: list[int], n_shards: int, seed: int = 0, epoch: int = 0) -> ShardEpochOrder:
    ends = np.cumsum(sizes, dtype=np.int64)
    return ShardEpochOrder(ends, sum(sizes), n_shards, seed=seed, epoch=epoch)


def all_rows(sizes: list[int], n_shards: int, seed: int = 0) -> npt.NDArray[np.int64]:
    return order(sizes, n_shards, seed).at(np.arange(sum(sizes)))


ODD = [3, 0, 5, 1, 4, 0, 7, 2, 2, 6]


@pytest.mark.parametrize(
    ("sizes", "n_shards", "seed", "epoch", "start", "rows"),
    [
        # one shard
        ([10], 8, 0, 0, 0, [3, 1, 2, 7, 6, 4, 5, 8, 0, 9]),
        # shards of any size, also of none; windows of two, and a last one
        (ODD, 2, 7, 3, 0, [0, 16, 1, 17, 19, 18, 15, 14, 13, 2, 5, 3, 4, 7, 8, 6]),
        ([1000] * 50, 8, 2**40 + 5, 2, 24_000, [17266, 17235, 35662, 17990, 21229, 21273]),
        # too many shards, and too many samples in a window, to be sorted
        ([10_000] * 100_000, 8, 42, 90, 10**9 - 3, [388603207, 413213461, 413214284]),
    ],
)
def test_an_order_of_shards_has_the_rows_it_always_had(
    sizes: list[int], n_shards: int, seed: int, epoch: int, start: int, rows: list[int]
) -> None:
    made = order(sizes, n_shards, seed, epoch)
    assert made.at(np.arange(start, start + len(rows))).tolist() == rows


@given(SIZES, PER_WINDOW)
def test_a_window_has_all_of_its_shards_and_of_no_other(sizes: list[int], n_shards: int) -> None:
    rows, shown = all_rows(sizes, n_shards).tolist(), np.flatnonzero(sizes)
    permuted = shown[
        Permutation(len(shown), derive_key(64, 0, 0)).at(np.arange(len(shown)))
    ].tolist()
    ends = np.cumsum(sizes).tolist()
    for first in range(0, len(permuted), n_shards):
        window = permuted[first : first + n_shards]
        expected = [row for k in window for row in range(ends[k] - sizes[k], ends[k])]
        assert sorted(rows[: len(expected)]) == sorted(expected)
        del rows[: len(expected)]
    assert rows == []


def test_shards_that_show_nothing_have_no_part_in_the_order() -> None:
    full = [size for size in ODD if size]
    assert all_rows(ODD, 2).tolist() == all_rows(full, 2).tolist()


def test_an_order_of_a_hundred_thousand_shards_keeps_little() -> None:
    ends = np.arange(1, 100_001) * 10_000
    made = ShardEpochOrder(ends, 10**9, 8, seed=42, epoch=90)
    found = made.at(np.arange(10**9 - 80_000, 10**9))
    assert len(np.unique(found)) == 80_000 and len(np.unique(found // 10_000)) == 8
    arrays = [each for each in vars(made).values() if isinstance(each, np.ndarray)]
    assert sum(each.nbytes for each in arrays) < 2_000_000
    made.at(np.arange(0, 10**9, 40_000_000))
    assert made._permutation.cache_info().currsize <= 8, "permutations of windows"


# Datasets.

LABEL = Schema({"label": Array("int64")})


@pytest.fixture(autouse=True)
def windows_of_three(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shuffle, "SHARDS_PER_WINDOW", 3)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    samples = ({"label": i} for i in range(50))
    return Path(write_dataset(tmp_path / "d", 50, 10, LABEL, samples))


def loader(dataset: Any, batch_size: int = 4, **options: Any) -> ShardLoader:
    given: dict[str, Any] = {"output": "numpy", "num_workers": 0, "shuffle": "shards", **options}
    return make_loader(dataset, batch_size, **given)


def drawn(made: ShardLoader) -> list[int]:
    return [label for batch in made for label in batch["label"].tolist()]


def windows_of(labels: list[int], n_shards: int = 3, size: int = 5) -> Iterator[set[int]]:
    for start in range(0, len(labels), n_shards * size):
        yield {label // size for label in labels[start : start + n_shards * size]}


@pytest.mark.process
@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_loader_needs_the_shards_of_one_window_at_a_time(folder: Path, num_workers: int) -> None:
    with loader(folder, num_workers=num_workers) as made:
        first, second = drawn(made), drawn(made)
    assert sorted(first) == sorted(second) == list(range(50))
    assert first != second
    assert [len(window) for window in windows_of(first)] == [3, 3, 3, 1]


def test_a_subset_is_shuffled_by_what_it_shows_of_each_shard(folder: Path) -> None:
    rows = RowRuns([3, 12, 31], [5, 13, 15])
    publish_next(folder, load(folder), subsets={"some": rows})
    with open_dataset(folder, subset="some") as dataset:
        shown = [int(sample["label"]) for sample in dataset]
        expected = [sum(label < 5 * k for label in shown) for k in range(1, 11)]
        assert dataset.rows.shard_ends.tolist() == expected
    with loader(folder, subset="some") as made:
        found = drawn(made)
    assert sorted(found) == shown
    assert len({label // 5 for label in found[:6]}) <= 3


def test_an_ascending_selection_is_shuffled_by_its_shards(folder: Path) -> None:
    with open_dataset(folder) as dataset:
        mine = [row for k in range(1, 10, 2) for row in range(5 * k, 5 * k + 5)]
        with dataset.select(mine) as part, loader(part) as made:
            found = drawn(made)
    assert sorted(found) == mine
    assert [len(window) for window in windows_of(found)] == [3, 2]


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), max_size=9), st.data())
def test_rows_below_a_limit_are_counted(runs: list[tuple[int, int]], data: st.DataObject) -> None:
    starts = np.cumsum([gap + n for gap, n in [(0, 0), *runs][:-1]] if runs else []) + [
        gap for gap, _ in runs
    ]
    view = RowRuns(starts, [n for _, n in runs])
    limits = np.arange(data.draw(st.integers(1, 200)))
    assert view.n_below(limits).tolist() == [int((view.all_rows() < x).sum()) for x in limits]


def test_a_state_resumes_also_after_the_dataset_grew(folder: Path) -> None:
    with loader(folder) as made:
        expected = drawn(made)
    with loader(folder) as made:
        batches = iter(made)
        had = [label for _ in range(5) for label in next(batches)["label"].tolist()]
        state = json.loads(json.dumps(made.state_dict()))
    assert state["window"][:2] == [3, 15]
    append_shard(folder, LABEL, [{"label": 50 + i} for i in range(7)])
    with loader(folder, batch_size=7) as made:
        made.load_state_dict(state)
        assert had + drawn(made) == expected
        assert sorted(drawn(made)) == list(range(57))


def test_a_state_of_shards_that_were_put_together_since_is_refused(folder: Path) -> None:
    with loader(folder) as made:
        next(iter(made))
        state = made.state_dict()
    compact(folder)
    with loader(folder) as made:
        with pytest.raises(InvalidArgument, match="a shuffle of shards that .* no longer has"):
            made.load_state_dict(state)
    with open_dataset(folder, generation=1) as older, loader(older) as made:
        made.load_state_dict(state)
        assert len(drawn(made)) == 46


def test_a_state_with_another_window_is_refused(folder: Path) -> None:
    with loader(folder) as made:
        state = made.state_dict()
        n, whole, layout = state["window"]
        others = [[n + 1, whole, layout], [n, whole + 1, layout], [n, whole, "0" * 16]]
        shapes = [None, [], [n], "abc", [True], [0, 1, "x"]]
        shapes += [[each, whole, layout] for each in (0, -n, float(n), True, "3", None)]
        for windows, said in ((others, "expected window .*, found"), (shapes, "at least 1")):
            for window in windows:
                with pytest.raises(InvalidArgument, match=f"load_state_dict: the state's .*{said}"):
                    made.load_state_dict({**state, "window": window})


def test_samples_that_do_not_lie_in_shards_in_their_order_are_refused(folder: Path) -> None:
    with open_dataset(folder) as dataset:
        chosen = dataset.select([3, 1, 2])
        with chosen, pytest.raises(InvalidArgument, match=r"sort the indices.* pass .*'blocks'"):
            loader(chosen)
    with (
        mix([folder, folder], weights=[1, 1]) as mixed,
        pytest.raises(InvalidArgument, match="a mixture has"),
    ):
        loader(mixed)


def test_an_empty_dataset_has_an_epoch_without_samples(tmp_path: Path) -> None:
    with loader(write_dataset(tmp_path / "d", 0, 1, LABEL, [])) as made:
        assert drawn(made) == []


def test_clips_are_shuffled_by_the_shards_of_their_videos(tmp_path: Path) -> None:
    folder = write_dataset(tmp_path / "d", 12, 4, LABEL, ({"label": i} for i in range(12)))
    with open_dataset(folder) as dataset:
        n_frames = np.array([4, 8, 16, 0, 7, 9, 11, 6, 40, 8, 8, 8])
        clip = Clip(4, 2, step=3, field="video")
        dataset.schema = Schema({"video": Video()})
        view = ClipView(dataset, clip)
        view.restore({"size": np.array([2, 2]), "n_frames": n_frames})
        ends = [0, *np.cumsum([0, 1, 4, 0, 1, 1, 2, 0, 12, 1, 1, 1]).tolist()]
        assert view.shard_ends.tolist() == [ends[3], ends[6], ends[9], ends[12]]
