"""Split: every sample in one subset, no group in two, and the same for the same seed."""

from __future__ import annotations

import multiprocessing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardio import open as open_dataset
from shardio.dataset import writer
from shardio.dataset.manifest import load, publish_next
from shardio.errors import DatasetConflict, InvalidArgument, ShardCorrupt
from shardio.format.layout import Kind
from shardio.maintenance import add_subset, compact, split, splitting, verify_dataset
from tests.maintenance.datasets import LABELS, is_sound, place, shard_of, tree, write
from tests.shards import flip

PARTS = {"train": 0.75, "val": 0.25}


def grouped(folder: Path, n: int, n_groups: int, n_shards: int = 3) -> Path:
    """Make samples of which every n_groups-th has the same source; the label is the number."""
    samples = [{"label": i, "source": f"video {i % n_groups}"} for i in range(n)]
    return write(folder, n, n_shards, schema=LABELS, samples=samples)


def content(folder: Path, subset: str | None = None) -> list[tuple[int, str]]:
    with open_dataset(folder, subset=subset) as dataset:
        return [(int(sample["label"]), sample["source"]) for sample in dataset]


def test_every_sample_is_in_one_subset_and_no_group_in_two(tmp_path: Path) -> None:
    folder = grouped(tmp_path / "d", 120, 12)
    before = tree(folder)
    report = split(folder, PARTS, group="source")
    changed = {name for name, found in tree(folder).items() if found != before.get(name)}
    assert changed == {"dataset.json", "generations/000002.json"}
    train, val = content(folder, "train"), content(folder, "val")
    assert sorted([n for n, _ in train] + [n for n, _ in val]) == list(range(120))
    assert not {source for _, source in train} & {source for _, source in val}
    assert report.n_samples == {"train": len(train), "val": len(val)} == {"train": 90, "val": 30}
    assert report.n_groups == {"train": 9, "val": 3}
    assert (report.generation, load(folder).number) == (2, 2)
    assert report.dataset == folder
    assert report.as_json() == {
        "dataset": str(folder),
        "generation": 2,
        "n_samples": {"train": 90, "val": 30},
        "n_groups": {"train": 9, "val": 3},
        "replaced": (),
    }
    assert repr(report).endswith("generation 2, 'train' 90, 'val' 30)")
    assert {name: len(rows) for name, rows in load(folder).subsets.items()} == report.n_samples
    assert verify_dataset(folder, workers=0).findings == ()


def test_without_a_group_every_sample_goes_its_own_way(tmp_path: Path) -> None:
    folder = grouped(tmp_path / "d", 120, 12)
    report = split(folder, PARTS)
    assert report.n_samples == {"train": 90, "val": 30} == report.n_groups
    sides = [{source for _, source in content(folder, name)} for name in PARTS]
    assert len(sides[0] & sides[1]) > 3


@pytest.mark.parametrize("group", [None, "source"])
def test_the_seed_and_nothing_else_decides(tmp_path: Path, group: str | None) -> None:
    found = []
    for name, n_shards, seed in (("a", 3, 0), ("b", 1, 0), ("c", 3, 1), ("d", 3, 1 << 70)):
        folder = grouped(tmp_path / name, 120, 12, n_shards)
        split(folder, PARTS, group=group, seed=seed)
        found.append(content(folder, "val"))
    assert found[0] == found[1]
    assert found[0] != found[2] != found[3] != found[0]


@settings(max_examples=50)
@given(
    counts=st.lists(st.integers(1, 9), min_size=1, max_size=40),
    shares=st.lists(st.integers(1, 9), min_size=1, max_size=4),
    seed=st.integers(0, 1 << 40),
)
def test_shares_are_met_up_to_one_group(counts: list[int], shares: list[int], seed: int) -> None:
    groups = np.repeat(np.arange(len(counts)), counts)
    wanted = [share / sum(shares) for share in shares]
    numbers = splitting._assign_groups(groups, np.array(counts, np.int64), wanted, seed)
    found = np.bincount(numbers[groups], minlength=len(shares))
    assert found.sum() == len(groups)
    for share, n in zip(wanted, found.tolist(), strict=True):
        assert n < share * len(groups) + max(counts)


def test_a_new_split_replaces_the_old_one_and_what_was_counted_of_it(tmp_path: Path) -> None:
    folder = grouped(tmp_path / "d", 20, 4)
    split(folder, PARTS)
    stats = {"whole": {"samples": 20}, "subsets": {"val": {"samples": 5}}}
    publish_next(folder, load(folder), stats=stats)
    assert split(folder, {"x": 1.0}).replaced == ("train", "val")
    found = load(folder)
    assert list(found.subsets) == ["x"]
    assert found.stats == {"whole": {"samples": 20}}
    options = {"parts": {"x": 1.0}, "group": None, "seed": 0}
    assert found.operation == {"name": "split", "options": options}


@pytest.mark.parametrize("group", [None, "source"])
def test_shares_below_1_leave_whole_groups_in_no_subset(tmp_path: Path, group: str | None) -> None:
    folder = grouped(tmp_path / "d", 120, 12)
    report = split(folder, {"a": 0.5, "b": 0.25}, group=group)
    assert report.n_samples == {"a": 60, "b": 30}
    assert not {*content(folder, "a")} & {*content(folder, "b")}


@pytest.mark.parametrize(
    ("parts", "said"),
    [
        ({}, "must map names to their shares"),
        ([("a", 1.0)], "must map names to their shares"),
        ({"a": 1.0, "b": 0.5}, "must add up to 1 or less; found 1.5"),
        ({"a": 1.0, "b": 0.0}, "'b': a share must be above 0"),
        ({"a": -1.0, "b": 2.0}, "'a': a share"),
        (
            {"a": 80, "b": 20},
            "'a': a share must be above 0 and at most 1; found 80; for 80 %, write ",
        ),
        ({"a": float("nan")}, "'a': a share must be above 0 and at most 1; found nan"),
        ({"a": True}, "'a': a share"),
        ({"": 1.0}, "printable"),
        ({"a\n": 1.0}, "printable"),
        ({3: 1.0}, "printable"),
        ({"a" * 256: 1.0}, "at most 255 bytes"),
    ],
    ids=str,
)
def test_parts_that_cannot_be_are_refused(tmp_path: Path, parts: Any, said: str) -> None:
    folder = grouped(tmp_path / "d", 4, 2, 1)
    before = tree(folder)
    with pytest.raises(InvalidArgument, match=said):
        split(folder, parts)
    assert tree(folder) == before


def test_what_else_cannot_be_is_refused(tmp_path: Path) -> None:
    folder = grouped(tmp_path / "d", 20, 2)
    seed: Any
    for seed in (-1, 1.5, True, None):
        with pytest.raises(InvalidArgument) as caught:
            split(folder, PARTS, seed=seed)
        assert str(caught.value) == f"seed must be an integer from 0 up; found {seed!r}"
    with pytest.raises(InvalidArgument, match="no field 'nose'; the fields are label, source"):
        split(folder, PARTS, group="nose")
    words = "'c' would have no sample: there are 20 samples in 2 groups"
    with pytest.raises(InvalidArgument, match=words) as empty:
        split(folder, {"a": 0.4, "b": 0.4, "c": 0.2}, group="source")
    assert str(empty.value).startswith(f"{folder}: ")
    assert str(empty.value).endswith("give larger shares")
    assert load(folder).number == 1


def test_a_subset_of_given_samples_is_added_to_those_there_are(tmp_path: Path) -> None:
    folder = grouped(tmp_path / "d", 20, 4)
    split(folder, PARTS)
    before = tree(folder)
    report = add_subset(folder, "keep", [7, 3, 3, 19], notes={19: "the last", 3: "<b>"})
    assert (report.generation, report.n_samples) == (3, {"keep": 3})
    assert [label for label, _ in content(folder, "keep")] == [3, 7, 19]
    with open_dataset(folder) as dataset:
        assert dict(dataset.subsets) == {"train": 15, "val": 5, "keep": 3}
        notes = {"3": "<b>", "19": "the last"}
        options = {"name": "keep", "samples": 3, "notes": notes}
        assert dataset.operation == {"name": "add-subset", "options": options}
    is_sound(folder)
    shards = {name: data for name, data in tree(folder).items() if name.endswith(".shard")}
    assert shards == {name: data for name, data in before.items() if name.endswith(".shard")}


def test_a_subset_is_replaced_only_if_asked_with_what_was_counted_of_it(tmp_path: Path) -> None:
    folder = grouped(tmp_path / "d", 20, 4)
    mask = np.arange(20) % 2 == 0
    add_subset(folder, "even", mask)
    stats = {"whole": {"samples": 20}, "subsets": {"even": {"samples": 10}}}
    publish_next(folder, load(folder), stats=stats)
    with pytest.raises(InvalidArgument, match="there is a subset 'even'; overwrite=True replaces"):
        add_subset(folder, "even", [0])
    add_subset(folder, "even", [0, 2], overwrite=True)
    found = load(folder)
    assert len(found.subsets["even"]) == 2
    assert found.stats == {"whole": {"samples": 20}}


@pytest.mark.parametrize(
    ("name", "rows", "said"),
    [
        ("", [1], "printable"),
        ("a\n", [1], "printable"),
        ("a", [], "would have no sample"),
        ("a", [False] * 20, "would have no sample"),
        ("a", [20], "from 0 to 19"),
        ("a", [-1], "from 0 to 19"),
        ("a", [0.5], "a sequence of integers"),
        ("a", [True], "must be 20 booleans"),
    ],
    ids=str,
)
def test_a_subset_that_cannot_be_is_refused(
    tmp_path: Path, name: str, rows: Any, said: str
) -> None:
    folder = grouped(tmp_path / "d", 20, 4)
    with pytest.raises(InvalidArgument, match=said):
        add_subset(folder, name, rows)
    assert load(folder).number == 1


def test_samples_of_another_generation_are_no_subset_of_this_one(tmp_path: Path) -> None:
    folder = grouped(tmp_path / "d", 20, 4)
    split(folder, PARTS)
    with pytest.raises(DatasetConflict, match="generation 2 exists"):
        add_subset(folder, "keep", [1], generation=1)
    add_subset(folder, "keep", [1], generation=2)


def test_a_damaged_group_is_no_basis_for_a_split(tmp_path: Path) -> None:
    folder = grouped(tmp_path / "d", 20, 2)
    flip(shard_of(folder, 1), place(shard_of(folder, 1), Kind.PAYLOAD)[0])
    before = tree(folder)
    with pytest.raises(ShardCorrupt) as caught:
        split(folder, PARTS, group="source")
    assert (caught.value.path, caught.value.field) == (str(shard_of(folder, 1)), "source")
    assert caught.value.sample == 0
    assert tree(folder) == before


def _compete(name: str, folder: Path, barrier: Any, queue: Any) -> None:
    """Split or compact, and publish only when the other one is about to publish, too."""

    def late(*given: Any, **details: Any) -> Any:
        barrier.wait()
        return publish_next(*given, **details)

    for module in (splitting, writer):
        vars(module)["publish_next"] = late
    try:
        queue.put((name, split(folder, PARTS) if name == "split" else compact(folder, workers=0)))
    except DatasetConflict as error:
        queue.put((name, str(error)))


@pytest.mark.parametrize("names", [("split", "split"), ("split", "compact"), ("compact",) * 2])
def test_one_of_two_concurrent_operations_wins(tmp_path: Path, names: tuple[str, str]) -> None:
    folder = grouped(tmp_path / "d", 20, 4)
    before = content(folder)
    context = multiprocessing.get_context("fork")
    barrier, queue = context.Barrier(2), context.Queue()
    processes = [
        context.Process(target=_compete, args=(name, folder, barrier, queue), daemon=True)
        for name in names
    ]
    for process in processes:
        process.start()
    outcomes = [queue.get(timeout=60) for _ in processes]
    for process in processes:
        process.join()
    (loser,) = [outcome for _, outcome in outcomes if isinstance(outcome, str)]
    (winner,) = [name for name, outcome in outcomes if not isinstance(outcome, str)]
    assert "another writer published" in loser
    assert (load(folder).number, load(folder).operation["name"]) == (2, winner)
    assert content(folder) == before
    assert is_sound(folder) and not list(folder.glob(".shardio-staging-*"))
