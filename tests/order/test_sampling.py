"""The samples of an epoch and their order, through a loader: blocks, samplers and weights."""

from __future__ import annotations

import functools
import json
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from shardio import ShardDataset, ShardLoader, WeightedSampler
from shardio.errors import InvalidArgument
from shardio.order import shuffle
from shardio.order.sampling import ORDERS, WeightedEpochOrder, draw_without_replacement
from tests.loading import TWO_FIELDS, WORKERS, drawn, noisy, state_after, two_fields, write_dataset
from tests.order.strided import Strided

pytestmark = pytest.mark.usefixtures("warm_zygote", "quick_disk")

N = 53

WEIGHTS = np.arange(N) % 7 / 10


class Drawing:
    """A sampler that draws anew from the global generators whenever it is iterated."""

    def __len__(self) -> int:
        return 40

    def __iter__(self) -> Iterator[int]:
        drawn = random.sample(range(N), 20) + np.random.permutation(N)[:20].tolist()
        return iter(drawn)


CHOICES: dict[str, dict[str, Any]] = {
    "as it is": {},
    "full": {"shuffle": "full"},
    "blocks": {"shuffle": "blocks"},
    "shards": {"shuffle": "shards"},
    "an order added": {"shuffle": "strided"},
    "sampler": {"sampler": [5, 3, 3, 52, *range(40)]},
    "sampler by epoch": {"sampler": lambda epoch: [*range(epoch, N, 3), *range(30)]},
    "sampler that draws": {"sampler": Drawing()},
    "weights": {"sampler": WeightedSampler(WEIGHTS)},
    "many draws": {"sampler": WeightedSampler(WEIGHTS, n_draws=2 * N)},
    "drawn once": {"sampler": WeightedSampler(WEIGHTS, replacement=False)},
}
EVERY_CHOICE = pytest.mark.parametrize("choice", CHOICES.values(), ids=CHOICES.keys())
EVERY_NAME = pytest.mark.parametrize("name", CHOICES)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("choice") / "set"
    return write_dataset(path, N, 3, TWO_FIELDS, two_fields(N))


@pytest.fixture(autouse=True)
def _registered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Add the order of another module: the one entry."""
    monkeypatch.setitem(ORDERS, "strided", Strided)


@pytest.fixture(autouse=True)
def _short_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set runs of two samples, and windows of eight samples or two shards."""
    monkeypatch.setattr(shuffle, "RUN_BYTES", 3 * 6160)
    monkeypatch.setattr(shuffle, "RUNS_PER_WINDOW", 4)
    monkeypatch.setattr(shuffle, "SHARDS_PER_WINDOW", 2)


def loader(given: str | ShardDataset, batch_size: int = 4, **options: Any) -> ShardLoader:
    defaults: dict[str, Any] = {"seed": 3, "num_workers": 0, "output": "numpy"}
    return ShardLoader(given, batch_size, **(defaults | {"transform": noisy} | options))


def labels(made: ShardLoader, n_epochs: int = 1) -> list[int]:
    return [label for _, label, _ in drawn(made, n_epochs)]


@EVERY_CHOICE
def test_workers_change_neither_samples_nor_draws(folder: str, choice: dict[str, Any]) -> None:
    with loader(folder, **choice) as alone, loader(folder, num_workers=2, **choice) as made:
        assert drawn(alone, 3) == drawn(made, 3)


@functools.cache
def whole_and_state(folder: str, name: str) -> tuple[list[tuple[int, int, int]], dict[str, Any]]:
    """Return three epochs of a choice, and the state after 5 batches of the second."""
    with loader(folder, **CHOICES[name]) as made:
        whole = drawn(made, 3)
    return whole, state_after(loader(folder, **CHOICES[name]), 5, n_epochs=1)


@EVERY_NAME
@pytest.mark.parametrize(("batch_size", "world_size"), [(7, 1), (200, 1), (1, 2), (3, 3)])
def test_every_order_resumes_across_batch_sizes_and_world_sizes(
    folder: str, name: str, batch_size: int, world_size: int
) -> None:
    whole, state = whole_and_state(folder, name)
    assert (state["epoch"], state["position"]) == (1, 20)
    consumed = [each for each in whole if each[0] == 1][:20]
    rest = [each for each in whole if each[0] > 0][20:]
    assert len(consumed) == 20
    found = []
    for rank in range(world_size):
        ranks = {"rank": rank, "world_size": world_size}
        with loader(folder, batch_size, **ranks, **CHOICES[name]) as made:
            made.load_state_dict(state)
            found += drawn(made, 2)
    assert sorted(found) == sorted(rest)
    if world_size == 1:
        assert found == rest


@EVERY_CHOICE
def test_orders_resume_with_workers_and_at_epoch_ends(folder: str, choice: dict[str, Any]) -> None:
    with loader(folder, **choice) as made:
        first = drawn(made)
        state = made.state_dict()
        assert (state["epoch"], state["position"]) == (1, 0)
        second = drawn(made)
    with loader(folder, num_workers=2, **choice) as made:
        made.load_state_dict(json.loads(json.dumps(state)))
        assert made.epoch == 1
        assert made.state_dict() == state
        assert drawn(made) == second
    assert len(first) > 20


def test_no_state_fits_a_loader_with_another_choice(folder: str) -> None:
    others = CHOICES | {
        "other sampler": {"sampler": range(44)},
        "other weights": {"sampler": WeightedSampler(WEIGHTS + 1)},
    }
    states = {name: state_after(loader(folder, **choice), 2) for name, choice in others.items()}
    for name, choice in others.items():
        with loader(folder, **choice) as made:
            for other, state in states.items():
                if other == name:
                    made.load_state_dict(state)
                else:
                    with pytest.raises(InvalidArgument, match="load_state_dict: the state"):
                        made.load_state_dict(state)


# Blocks.


def test_epochs_of_blocks_keep_their_windows(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with loader(folder, shuffle="blocks") as made:
        whole = drawn(made, 2)
    state = state_after(loader(folder, shuffle="blocks"), 5)
    assert state["window"] == [2, 8]
    monkeypatch.setattr(shuffle, "RUNS_PER_WINDOW", 16)
    with loader(folder, shuffle="blocks") as made:
        made.load_state_dict(state)
        assert drawn(made) == whole[20:N]
        assert drawn(made) != whole[N:]
        assert made.state_dict()["window"] == [2, 32]


@pytest.mark.parametrize(
    "found", [None, 3, "2 8", [4], [4, 6], [3, 64], [8, 4], [True, 4], ["4", 8]]
)
def test_a_state_of_blocks_without_a_window_is_refused(folder: str, found: object) -> None:
    with loader(folder, shuffle="blocks") as made:
        state = made.state_dict() | {"window": found}
        with pytest.raises(InvalidArgument, match="the state's window must be two powers"):
            made.load_state_dict(state)


# Samplers.


class Sized:
    """A collection that is no sequence, as samplers of other libraries are."""

    def __len__(self) -> int:
        return 3

    def __iter__(self) -> Iterator[int]:
        return iter([7, 8, 7])

    def __contains__(self, value: object) -> bool:
        return value in (7, 8)


@WORKERS
@pytest.mark.parametrize(
    "sampler", [[7, 8, 7], (7, 8, 7), np.array([7, 8, 7], np.uint8), Sized(), lambda _: [7, 8, 7]]
)
def test_an_epoch_has_the_samples_of_a_sampler(folder: str, sampler: Any, num_workers: int) -> None:
    with loader(folder, num_workers=num_workers, sampler=sampler) as made:
        assert labels(made, 2) == [7, 8, 7] * 2


@WORKERS
def test_a_sampler_may_be_longer_than_the_dataset_or_empty(folder: str, num_workers: int) -> None:
    for sampler in (list(range(N)) * 3, []):
        with loader(folder, 100, num_workers=num_workers, sampler=sampler) as made:
            assert labels(made) == sampler


@WORKERS
def test_a_drawing_sampler_gives_every_epoch_other_samples(folder: str, num_workers: int) -> None:
    random.seed(1)
    np.random.seed(1)
    states = random.getstate(), repr(np.random.get_state())
    found = []
    for seed in (3, 3, 4):
        with loader(folder, num_workers=num_workers, sampler=Drawing(), seed=seed) as made:
            found.append([labels(made) for _ in range(3)])
    assert (random.getstate(), repr(np.random.get_state())) == states
    assert found[0] == found[1]
    epochs = [tuple(epoch) for each in found[1:] for epoch in each]
    assert len({*epochs}) == 6


def test_a_sampler_is_told_its_epoch(folder: str) -> None:
    class Counting(Sized):
        epoch = 100

        def set_epoch(self, epoch: int) -> None:
            self.epoch = epoch

        def __iter__(self) -> Iterator[int]:
            return iter([self.epoch] * 3)

    with loader(folder, sampler=Counting()) as made:
        assert [labels(made) for _ in range(2)] == [[0] * 3, [1] * 3]
        state = made.state_dict()
    with loader(folder, sampler=Counting()) as made:
        made.load_state_dict(state)
        assert labels(made) == [2] * 3


def test_a_sampler_with_a_generator_of_its_own_is_refused(folder: str) -> None:
    class Stateful(Sized):
        def __init__(self) -> None:
            self.generator = random.Random(0)

        def __iter__(self) -> Iterator[int]:
            return iter(self.generator.sample(range(N), 20))

    said = r"sampler .*Stateful.* iterated twice for epoch 0.*sampler=f\(epoch\)"
    with pytest.raises(InvalidArgument, match=said):
        loader(folder, sampler=Stateful())
    with loader(folder, sampler=lambda epoch: Stateful()) as made:  # draws what epoch 0 draws
        assert labels(made) == [*Stateful()]


def test_a_sampler_that_deals_out_to_ranks_is_refused_where_the_loader_does(folder: str) -> None:
    class Dealing(Sized):
        num_replicas = 2

    with pytest.raises(InvalidArgument, match=r"Dealing.*2 ranks.*shuffle=True.*world_size=1"):
        loader(folder, sampler=Dealing(), rank=0, world_size=2)
    with loader(folder, sampler=Dealing(), rank=0, world_size=1) as made:
        assert labels(made) == [7, 8, 7]


@pytest.mark.external
def test_samplers_of_torch_draw_anew_and_resume(folder: str) -> None:
    torch = pytest.importorskip("torch", reason="torch is too large for the extra dev")
    data = torch.utils.data
    torch.manual_seed(7)
    samplers = [
        data.RandomSampler(range(N)),
        data.RandomSampler(range(N), replacement=True, num_samples=70),
        data.WeightedRandomSampler(torch.ones(N), 50),
        data.SubsetRandomSampler(range(5, 45)),
        data.distributed.DistributedSampler(range(N), num_replicas=1, rank=0),
    ]
    for sampler in samplers:
        with loader(folder, sampler=sampler) as made:
            whole = [drawn(made) for _ in range(3)]
        assert [label for _, label, _ in whole[0]] != [label for _, label, _ in whole[1]]
        state = state_after(loader(folder, sampler=sampler), 5, n_epochs=1)
        torch.rand(3)  # a program that goes on has drawn something else
        with loader(folder, 7, num_workers=2, sampler=sampler) as made:
            made.load_state_dict(state)
            assert [drawn(made), drawn(made)] == [whole[1][20:], whole[2]]
    for fixed in (data.SequentialSampler(range(N)), torch.arange(N)):
        with loader(folder, sampler=fixed) as made:
            assert labels(made, 2) == [*range(N)] * 2
    with pytest.raises(InvalidArgument, match="RandomSampler.* iterated twice"):
        loader(folder, sampler=data.RandomSampler(range(N), generator=torch.Generator()))


def test_a_function_is_asked_once_for_each_epoch(folder: str) -> None:
    asked = []

    def sampler(epoch: int) -> range:
        asked.append(epoch)
        return range(epoch, epoch + 6)

    with loader(folder, sampler=sampler) as made:
        assert labels(made) == list(range(6))
        assert len(made) == 2
        assert asked == [0]
        assert made.state_dict()["epoch"] == 1
        assert labels(made) == list(range(1, 7))
        assert asked == [0, 1]


def test_iterators_of_different_epochs_have_each_its_own_sampler(folder: str) -> None:
    with loader(folder, num_workers=2, sampler=lambda epoch: [epoch] * 40) as made:
        pairs = list(zip(made, made, strict=True))
        assert {tuple(each["label"].tolist()) for each, _ in pairs} == {(0,) * 4}
        assert {tuple(each["label"].tolist()) for _, each in pairs} == {(1,) * 4}


@pytest.mark.parametrize(
    ("sampler", "said"),
    [
        ([0, N], f"sampler must be integers from 0 to {N - 1}; found {N} at 1"),
        ([-1], f"from 0 to {N - 1}; found -1 at 0"),
        ([0.5], "sampler must be a sequence of integers"),
        ([True], "sampler must be a sequence of integers"),
        ([[1], [2, 3]], "sampler must be a sequence of integers"),
        ("123", "sampler must be a sequence of positions, or a function"),
        (iter([1]), "sampler must be a sequence of positions, or a function"),
        (lambda _: [N], rf"sampler\(0\) must be integers from 0 to {N - 1}"),
        (lambda _: 3, r"sampler\(0\) must be a sequence of integers"),
        (lambda epoch, seed: [1], r"sampler must take \(epoch\); it takes \(epoch, seed\)"),
    ],
)
def test_what_is_no_sampler_is_refused(folder: str, sampler: Any, said: str) -> None:
    with pytest.raises(InvalidArgument, match=said), loader(folder, sampler=sampler) as made:
        iter(made)


# Weights.


def test_weights_are_drawn_as_often_as_asked(folder: str) -> None:
    with loader(folder, 500, sampler=WeightedSampler(WEIGHTS, n_draws=2000)) as made:
        found = labels(made)
    expected = WeightedEpochOrder(np.cumsum(WEIGHTS), seed=3, epoch=0).at(np.arange(2000))
    assert found == expected.tolist()


def test_without_replacement_every_weighted_sample_comes_once(folder: str) -> None:
    with loader(folder, sampler=WeightedSampler(WEIGHTS, replacement=False)) as made:
        found = labels(made)
    assert sorted(found) == np.flatnonzero(WEIGHTS).tolist()
    assert found == draw_without_replacement(WEIGHTS, len(found), seed=3, epoch=0).tolist()


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"sampler": WeightedSampler([1.0])}, rf"weights must be {N} numbers .* of shape \(1,\)"),
        ({"sampler": WeightedSampler(["1"] * N)}, rf"found an array of <U1, shape \({N},\)"),
        ({"sampler": WeightedSampler([10**400] * N)}, "weights must be .*: int too large"),
        ({"sampler": WeightedSampler([[1], [1, 2]])}, f"weights must be {N} numbers from 0 up"),
        ({"sampler": WeightedSampler([1] * 52 + [-1])}, "found -1.0 at 52"),
        ({"sampler": WeightedSampler([0] * N)}, "their sum is 0.0"),
        ({"sampler": WeightedSampler([1e308] * N)}, "their sum is inf"),
        ({"sampler": WeightedSampler(WEIGHTS), "shuffle": True}, "pass one of them"),
        ({"sampler": [1], "shuffle": "blocks"}, "pass one of them"),
        (
            {"sampler": WeightedSampler(WEIGHTS, replacement=False, n_draws=46)},
            "at most 45 without repl",
        ),
    ],
)
def test_invalid_weights_are_refused(folder: str, given: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidArgument, match=said):
        loader(folder, **given)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"replacement": 1}, "replacement must be one of True, False; found 1"),
        ({"n_draws": -1}, f"n_draws must be an integer from 0 to {1 << 48}"),
    ],
)
def test_draws_that_make_no_sense_are_refused(given: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidArgument, match=said):
        WeightedSampler(WEIGHTS, **given)
