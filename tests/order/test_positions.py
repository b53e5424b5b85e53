"""Every order: each row once, any position by itself, another order for another seed or epoch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardio.format.checksum import hash_bytes
from shardio.order import EpochOrder, FullShuffle, Sequential
from shardio.order import clip_groups as groups
from shardio.order.clip_groups import ClipGroupEpochOrder, ClipGroups
from shardio.order.mixture_order import MixtureEpochOrder, MixtureShares, MixtureSizes
from shardio.order.permutation import SORTED_MAX, epoch_permutation
from shardio.order.sampling import WeightedEpochOrder
from shardio.order.shuffle import (
    BlockShuffle,
    GroupedEpochOrder,
    ShardEpochOrder,
    WindowedEpochOrder,
)
from tests.loading import samples

Make = Callable[..., EpochOrder]
"""From the keys `seed` and `epoch` to an order."""


def full(n: int) -> tuple[int, Make]:
    return n, lambda **key: epoch_permutation(n, **key)


def blocks(n: int, run: int, runs: int, k: int = 1) -> tuple[int, Make]:
    window = BlockShuffle(1 << run, 1 << run + runs, k)
    return n, lambda **key: (WindowedEpochOrder if k == 1 else GroupedEpochOrder)(n, window, **key)


def shards(sizes: list[int], n_shards: int) -> tuple[int, Make]:
    ends = np.cumsum(sizes, dtype=np.int64)
    return sum(sizes), lambda **key: ShardEpochOrder(ends, sum(sizes), n_shards, **key)


def clips(counts: list[int], k: int) -> tuple[int, Make]:
    found = ClipGroups(np.cumsum(counts), k, sum(counts))
    return sum(counts), lambda **key: ClipGroupEpochOrder(found, **key)


def weights(n: int) -> tuple[int, Make]:
    sums = np.cumsum(np.sqrt(np.arange(1, 1 + n)))
    return n, lambda **key: WeightedEpochOrder(sums, **key)


def mixture(parts: list[tuple[int, int]], exhausted: Any, order: Any) -> tuple[int, Make]:
    shares, sizes = (tuple(each) for each in zip(*parts, strict=True))
    firsts = tuple(np.cumsum([0, *sizes])[:-1].tolist())
    mixed = MixtureSizes(MixtureShares(shares, exhausted), sizes, firsts)
    both = samples(sum(sizes))
    return mixed.n_positions, lambda **key: MixtureEpochOrder(order, mixed, both, **key)


class Kind(NamedTuple):
    """An order: how it is made, of which drawn arguments, and of one example."""

    make: Callable[..., tuple[int, Make]]
    drawn: st.SearchStrategy[tuple[Any, ...]]
    example: tuple[Any, ...]
    is_permutation: bool = True


POWERS = st.integers(0, 6)
SOURCES = [FullShuffle(), Sequential(), BlockShuffle(2, 64)]
KINDS = {
    "full": Kind(full, st.tuples(st.integers(0, SORTED_MAX + 1)), (70_000,)),
    "blocks": Kind(blocks, st.tuples(st.integers(0, 5000), POWERS, POWERS), (1000, 1, 6)),
    "blocks of clips": Kind(
        blocks, st.tuples(st.integers(0, 5000), POWERS, POWERS, st.integers(2, 9)), (1000, 1, 6, 3)
    ),
    "shards": Kind(
        shards,
        st.tuples(st.lists(st.integers(0, 40), max_size=40), st.integers(1, 9)),
        ([20] * 10, 3),
    ),
    "clips": Kind(
        clips,
        st.tuples(
            st.lists(st.integers(0, 40), min_size=1, max_size=30).filter(any), st.integers(1, 50)
        ),
        ([18] * 50, 8),
    ),
    "weights": Kind(weights, st.tuples(st.integers(1, 5000)), (1000,), is_permutation=False),
    "mixture": Kind(
        mixture,
        st.tuples(
            st.lists(st.tuples(st.integers(1, 100), st.integers(1, 900)), min_size=1, max_size=5),
            st.sampled_from(["stop", "repeat"]),
            st.sampled_from(SOURCES),
        ),
        ([(5, 700), (2, 500), (1, 60)], "repeat", FullShuffle()),
        is_permutation=False,
    ),
}


@pytest.mark.parametrize("name", KINDS)
@given(data=st.data(), seed=st.integers(0, 1 << 70), epoch=st.integers(0, 999))
@settings(deadline=None, max_examples=60)
def test_every_row_once_in_any_order(name: str, data: st.DataObject, seed: int, epoch: int) -> None:
    kind = KINDS[name]
    n, make = kind.make(*data.draw(kind.drawn))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(groups, "WINDOW", 4)
        rows = make(seed=seed, epoch=epoch).at(np.arange(n))
        assert not kind.is_permutation or np.array_equal(np.sort(rows), np.arange(n))
        places = st.lists(st.integers(0, n - 1), max_size=50) if n else st.just([])
        asked, again = np.array(data.draw(places), np.int64), make(seed=seed, epoch=epoch)
        assert again.at(asked).tolist() == rows[asked].tolist()
        assert [again.at(asked[i : i + 1])[0] for i in range(len(asked))] == rows[asked].tolist()


@pytest.mark.parametrize("name", KINDS)
def test_another_seed_or_epoch_gives_another_order(name: str) -> None:
    kind = KINDS[name]
    n, make = kind.make(*kind.example)
    keys = [(seed, epoch) for seed in (*range(5), 1 << 64) for epoch in range(5)]
    found = [make(seed=seed, epoch=epoch).at(np.arange(n)) for seed, epoch in keys]
    assert len({rows.tobytes() for rows in found}) == len(keys)
    assert all(np.mean(a == b) < 0.06 for a, b in zip(found, found[1:], strict=False))


DIGESTS = {
    "full": 0x4339B7E0731EFBD0,
    "blocks": 0x0A10039EC3F4870C,
    "blocks of clips": 0x99E519C4E9E1B524,
    "shards": 0x4793EB68A3C88C0A,
    "clips": 0x35E6F82277B805FF,
    "weights": 0xABABC4F6D6081A4B,
    "mixture": 0xD4E9A26773380486,
}


@pytest.mark.parametrize(("name", "digest"), DIGESTS.items())
def test_a_whole_order_is_what_it_always_was(name: str, digest: int) -> None:
    kind = KINDS[name]
    n, make = kind.make(*kind.example)
    positions = np.arange(n)[::-1].copy()
    rows = make(seed=2**40 + 5, epoch=3).at(positions)
    assert hash_bytes(rows.astype("<i8").data) == digest
    assert np.array_equal(positions, np.arange(n)[::-1])  # they are the caller's
