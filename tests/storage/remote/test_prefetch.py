"""Shards downloaded ahead stay in the cache until the loop comes to them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, cast

import pytest

from shardio.shard.writer import ShardSummary
from shardio.storage.remote.storage import Prefetcher, PrefetchRequest

N_BYTES = 100


class Bucket:
    """Counts who keeps which file. Each comes at once, but for those that `arrive` lets in."""

    def __init__(self, *late: str) -> None:
        self.kept = dict[str, int]()
        self.changed = threading.Condition()
        self.arrive = {name: threading.Event() for name in late}

    def pin_with_check(self, summary: ShardSummary, check: Callable[[], None]) -> None:
        while summary.name in self.arrive and not self.arrive[summary.name].wait(0.01):
            check()
        self._count(summary, 1)

    def unpin(self, summary: ShardSummary) -> None:
        self._count(summary, -1)

    def path_of(self, summary: ShardSummary) -> str:
        return summary.name

    def _count(self, summary: ShardSummary, n: int) -> None:
        with self.changed:
            self.kept[summary.name] = self.kept.get(summary.name, 0) + n
            self.changed.notify_all()

    def wait_for(self, **kept: int) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: self.kept == kept, 60), self.kept


class Loop:
    """Comes to the steps that a test says."""

    def __init__(self) -> None:
        self.step: int | None = 0

    def current_step(self) -> int | None:
        return self.step


def _ahead(bucket: Bucket, loop: Loop, **steps: int) -> Prefetcher:
    """Two files at a time, each needed from its step on."""
    files = [
        PrefetchRequest(step, cast("Any", bucket), ShardSummary(name, 1, N_BYTES, f"{0:032x}"))
        for name, step in steps.items()
    ]
    return Prefetcher(iter(files), loop.current_step, 2 * N_BYTES, set())


def test_a_file_is_kept_until_the_loop_comes_to_its_step() -> None:
    bucket, loop = Bucket(), Loop()
    ahead = _ahead(bucket, loop, a=3, b=5, c=7, d=9)
    bucket.wait_for(a=1, b=1)
    loop.step = 3
    bucket.wait_for(a=0, b=1, c=1)
    loop.step = 2  # nothing is kept anew
    bucket.wait_for(a=0, b=1, c=1)
    ahead.close()
    bucket.wait_for(a=0, b=0, c=0)


def test_a_file_that_comes_after_the_loop_asked_for_it_is_not_kept() -> None:
    bucket, loop = Bucket("a"), Loop()
    ahead = _ahead(bucket, loop, a=3, b=5, c=7, d=9)
    bucket.wait_for(b=1)
    loop.step = 3
    bucket.wait_for(b=1, c=1)
    bucket.arrive["a"].set()
    bucket.wait_for(a=0, b=1, c=1)
    ahead.close()


@pytest.mark.parametrize("end", ["all have come", "the pass is over", "it is closed"])
def test_at_the_end_nothing_is_kept(end: str) -> None:
    bucket, loop = Bucket("b"), Loop()
    more = {} if end == "all have come" else {"c": 7}
    ahead = _ahead(bucket, loop, a=3, b=5, **more)
    if end == "all have come":
        bucket.arrive["b"].set()
        bucket.wait_for(a=0, b=0)
    else:
        bucket.wait_for(a=1)
        if end == "the pass is over":
            loop.step = None
        else:
            ahead.cancel()
        bucket.wait_for(a=0)
    ahead.close()


def test_a_warning_made_an_error_costs_its_file_and_no_thread() -> None:
    class FullBucket(Bucket):
        def pin_with_check(self, summary: ShardSummary, check: Callable[[], None]) -> None:
            if summary.name == "a":
                raise UserWarning("more bytes are in use at once than the cache may hold")
            super().pin_with_check(summary, check)

    bucket, loop = FullBucket(), Loop()
    ahead = _ahead(bucket, loop, a=3, b=5, c=7)
    bucket.wait_for(b=1)
    ahead.close()
    bucket.wait_for(b=0)
