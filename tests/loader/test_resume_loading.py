"""state_dict and load_state_dict: the very next sample, whatever else has changed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from shardio import DatasetWriter, ShardDataset, ShardLoader, WeightedSampler
from shardio import open as open_dataset
from shardio.errors import InvalidArgument, TransformError
from shardio.maintenance import split
from shardio.order import shuffle as block_shuffle
from tests.loading import (
    TWO_FIELDS,
    WORKERS,
    append_shard,
    drawn,
    make_loader,
    noisy,
    state_after,
    two_fields,
    write_dataset,
)

N = 53
MORE = list(two_fields(N + 10))[N:]
State = dict[str, Any]


def loader(folder: str | ShardDataset, batch_size: int = 4, **options: Any) -> ShardLoader:
    given: dict[str, Any] = {"shuffle": True, "seed": 3, "num_workers": 0, "output": "numpy"}
    return make_loader(folder, batch_size, **(given | {"transform": noisy} | options))


def resumed(folder: str, state: State, n_epochs: int = 1, **options: Any) -> list[Any]:
    with loader(folder, **options) as made:
        made.load_state_dict(state)
        return drawn(made, n_epochs)


@WORKERS
def test_the_batch_in_the_loop_body_counts_as_consumed(folder: str, num_workers: int) -> None:
    with loader(folder) as made:
        whole = drawn(made, 3)
    for n_batches in (1, 7, 13, 14):
        state = state_after(loader(folder, num_workers=num_workers), n_batches, n_epochs=1)
        rest = whole[N + min(N, 4 * n_batches) :]
        assert resumed(folder, state, 2, num_workers=num_workers) == rest


def test_the_state_of_all_ranks_is_the_same_after_the_same_step(folder: str) -> None:
    states = [state_after(loader(folder, rank=rank, world_size=3), 3) for rank in range(3)]
    assert states[0] == states[1] == states[2]
    assert states[0]["position"] == 3 * 4 * 3


@pytest.mark.parametrize("tail", ["short", "drop", "pad"])
def test_an_epoch_that_is_over_is_followed_by_the_next(folder: str, tail: str) -> None:
    with loader(folder, tail=tail) as made:
        first = drawn(made)
        state = made.state_dict()
        assert (state["epoch"], state["position"]) == (1, 0)
        second = drawn(made)
    assert resumed(folder, state, tail=tail) == second != first


def test_before_the_first_batch_the_state_is_the_beginning(folder: str) -> None:
    with loader(folder) as made:
        state = made.state_dict()
        whole = drawn(made)
    assert (state["epoch"], state["position"]) == (0, 0)
    assert resumed(folder, state) == whole


def test_a_state_that_was_loaded_is_the_state(folder: str) -> None:
    state = state_after(loader(folder), 5, n_epochs=2)
    with loader(folder, batch_size=9) as made:
        made.load_state_dict(state)
        assert made.epoch == 2
        assert made.state_dict() == state
        steps = iter(made)
        assert made.state_dict() == state  # before the first batch
        del steps


def test_the_state_does_not_grow_with_what_was_consumed(folder: str, tmp_path: Path) -> None:
    few, many = state_after(loader(folder), 1), state_after(loader(folder), 13, n_epochs=3)
    assert few.keys() == many.keys()
    assert len(json.dumps(many)) - len(json.dumps(few)) < 4


@pytest.mark.parametrize(
    ("error", "raised"),
    [(KeyboardInterrupt(), KeyboardInterrupt), (ValueError("no"), TransformError)],
)
def test_an_interrupted_or_failed_batch_is_not_counted_as_consumed(
    folder: str, error: BaseException, raised: type[BaseException]
) -> None:
    def fail(sample: dict[str, Any]) -> dict[str, Any]:
        if sample["label"] == 21:
            raise error
        return sample

    with loader(folder, shuffle=False, transform=fail) as made:
        with pytest.raises(raised):
            list(made)
        state = made.state_dict()
        assert next(iter(made))["label"].tolist() == [0, 1, 2, 3]  # the loader goes on
    with loader(folder, shuffle=False, transform=None) as made:
        made.load_state_dict(state)
        assert next(iter(made))["label"].tolist() == [20, 21, 22, 23]


def test_a_state_says_where_its_loader_is_and_of_what(folder: str) -> None:
    with loader(folder, seed=7) as made:
        assert made.state_dict() == {
            "version": 1,
            "epoch": 0,
            "position": 0,
            "rows": N,
            "lineage": made.dataset.lineage,
            "view": made.state_dict()["view"],
            "seed": 7,
            "shuffle": "full",
        }
        steps = iter(made)
        next(steps)
        assert (made.state_dict()["epoch"], made.state_dict()["position"]) == (0, 4)
        list(steps)
        assert (made.state_dict()["epoch"], made.state_dict()["position"]) == (1, 0)
        first = made.state_dict()
    with loader(folder, seed=7, shuffle=False) as other:
        state = other.state_dict()
        assert state["shuffle"] is False
        assert (state["view"], state["rows"]) == (first["view"], N)
        with pytest.raises(InvalidArgument, match=r"the state's shuffle is 'full'") as caught:
            other.load_state_dict(first)
        assert "load the state into a loader with the same options" in str(caught.value)
        assert other.state_dict() == state


# A dataset that grew, or is another.


@WORKERS
@pytest.mark.parametrize("shuffle", ["full", "blocks", "shards"])
def test_a_dataset_that_grew_finishes_the_epoch_on_the_stored_row_count(
    tmp_path: Path, num_workers: int, shuffle: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(block_shuffle, "RUNS_PER_WINDOW", 4)
    monkeypatch.setattr(block_shuffle, "RUN_BYTES", 20_000)  # two samples
    folder = tmp_path / "set"
    write_dataset(folder, N, 2, TWO_FIELDS, two_fields(N))
    with loader(str(folder), shuffle=shuffle) as made:
        before = drawn(made, 2)
    state = state_after(loader(str(folder), shuffle=shuffle), 5, n_epochs=1)
    append_shard(folder, TWO_FIELDS, MORE)
    monkeypatch.setattr(block_shuffle, "RUN_BYTES", 60_000)  # as if samples had become smaller
    found = resumed(str(folder), state, 2, num_workers=num_workers, shuffle=shuffle)
    assert [each for each in found if each[0] == 1] == before[N + 20 :]
    assert sorted(label for epoch, label, _ in found if epoch == 2) == list(range(N + 10))


def test_a_loader_goes_on_with_what_it_has_opened_while_the_dataset_grows(tmp_path: Path) -> None:
    folder = tmp_path / "set"
    write_dataset(folder, N, 2, TWO_FIELDS, two_fields(N))
    with loader(str(folder)) as made:
        append_shard(folder, TWO_FIELDS, MORE)
        assert sorted(label for _, label, _ in drawn(made)) == list(range(N))


def test_a_state_of_a_larger_dataset_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "set"
    write_dataset(folder, N, 2, TWO_FIELDS, two_fields(N))
    append_shard(folder, TWO_FIELDS, MORE)
    state = state_after(loader(str(folder)), 5)
    with (
        open_dataset(folder, generation=1) as old,
        loader(old) as made,
        pytest.raises(InvalidArgument, match="position 20 of 63 samples"),
    ):
        made.load_state_dict(state)


def test_another_lineage_is_refused(folder: str, tmp_path: Path) -> None:
    with DatasetWriter(tmp_path / "other", TWO_FIELDS) as writer:
        for sample in two_fields(N):
            writer.append(sample)
    another = "the state belongs to another dataset: the state's lineage is"
    with loader(folder) as made, pytest.raises(InvalidArgument, match=another) as raised:
        made.load_state_dict(state_after(loader(str(tmp_path / "other")), 2))
    assert folder in str(raised.value)


def test_another_seed_order_or_subset_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "set"
    write_dataset(folder, N, 2, TWO_FIELDS, two_fields(N))
    state = state_after(loader(str(folder)), 2)
    split(folder, {"train": 0.5, "val": 0.5})
    for name, options in (
        ("the state's seed is 3,", {"seed": 4}),
        ("the state's shuffle is 'full',", {"shuffle": False}),
        (
            "another subset, selection or view of the dataset: the state's view is",
            {"subset": "train"},
        ),
    ):
        with loader(str(folder), **options) as made:
            with pytest.raises(InvalidArgument, match=name):
                made.load_state_dict(state)
            list(made)  # it is as it was


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"version": 2}, "version 1; found 2"),
        ({"epoch": -1}, "the state's epoch must be an integer from 0 to [0-9]+; found -1"),
        ({"epoch": 1 << 64}, "the state's epoch must be an integer from 0 to [0-9]+; found 18446"),
        ({"position": "3"}, "position must be"),
        ({"rows": True}, "rows must be"),
        ({"position": 54}, "position 54 of 53 samples"),
        ({"rows": 54}, "of 54 samples"),
        ({"seed": True}, "the state's seed is True"),
        ({"lineage": None}, "the state's lineage is None"),
    ],
)
def test_an_impossible_state_is_refused(folder: str, change: dict[str, Any], said: str) -> None:
    with loader(folder, seed=1) as made:
        before = made.state_dict()
        state = before | change
        with pytest.raises(InvalidArgument, match=said) as caught:
            made.load_state_dict(state)
        assert str(caught.value).startswith("load_state_dict: ")
        assert made.state_dict() == before
        with pytest.raises(InvalidArgument, match="found 'state'"):
            made.load_state_dict("state")  # type: ignore[arg-type]
        assert len(drawn(made)) == N


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"shuffle": "blocks"},
        {"shuffle": False, "tail": "pad"},
        {"tail": "drop"},
        {"shuffle": False, "sampler": [5, 3, 3, 9, 1, 0, 2]},
        {"shuffle": False, "sampler": lambda epoch: list(range(N))[epoch :: epoch + 1]},
        {"shuffle": False, "sampler": WeightedSampler(range(N), replacement=False)},
        {"shuffle": False, "sampler": WeightedSampler(range(N), n_draws=30)},
        {"rank": 1, "world_size": 2, "tail": "short"},
    ],
)
def test_any_batch_is_the_next_from_its_own_state(folder: str, options: dict[str, Any]) -> None:
    with loader(folder, **options) as made:
        whole = [list(made) for _ in range(3)]
        for epoch, batch in ((2, 0), (0, 1), (1, len(whole[1]) - 1), (0, 0)):
            expected = whole[epoch][batch]
            made.load_state_dict(made.state_at(epoch, batch))
            found = next(iter(made))
            assert (found.epoch, found.step) == (epoch, batch)
            assert found["label"].tolist() == expected["label"].tolist()
            assert found["noise"].tolist() == expected["noise"].tolist()
            indices = made.indices_at(epoch, batch)
            assert indices.tolist() == expected.indices[expected.valid].tolist()


def test_the_state_of_a_batch_that_does_not_exist_is_an_error(folder: str) -> None:
    with loader(folder) as made:
        for call in (made.state_at, made.indices_at):
            with pytest.raises(InvalidArgument, match="no batch 14 in epoch 3, which has 14"):
                call(3, 14)
            with pytest.raises(InvalidArgument, match="epoch must be an integer from 0"):
                call(-1, 0)
        assert made.epoch == 0
