"""The same loaders with SPDL and with this: the same items, in order where order is promised."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from shardio import DataLoader, Pipeline

pytest.importorskip("spdl", reason="SPDL is not installed: pip install '.[peers]'")

pytestmark = pytest.mark.external


def _times_ten(item: int) -> int:
    return item * 10


def _odd_only(item: int) -> int | None:
    return item if item % 2 else None


def _twice(item: int) -> Iterator[int]:
    yield item
    yield item + 100


async def _times_ten_awaited(item: int) -> int:
    return item * 10


async def _twice_awaited(item: int) -> AsyncIterator[int]:
    yield item
    yield item + 100


def _total(items: Any) -> int:
    return sum(items) if isinstance(items, list) else items + 1000


async def _total_awaited(items: Any) -> int:
    return _total(items)


def _flat(found: list[Any]) -> list[Any]:
    return sorted(x for each in found for x in (each if isinstance(each, list) else [each]))


@pytest.mark.parametrize("batch_size", [None, 1, 4])
@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("aggregator", [None, _total, _total_awaited])
@pytest.mark.parametrize(
    "preprocessor", [None, _times_ten, _odd_only, _times_ten_awaited, dict(enumerate("abcdefghij"))]
)
def test_in_the_order_of_input_results_are_the_same(
    preprocessor: Any, aggregator: Any, drop_last: object, batch_size: Any
) -> None:
    if isinstance(preprocessor, dict) and aggregator is not None:
        preprocessor = {i: 2 * i for i in range(10)}
    options: dict[str, Any] = {
        "preprocessor": preprocessor,
        "batch_size": batch_size,
        "drop_last": drop_last,
        "aggregator": aggregator,
        "transfer_fn": repr,
        "output_order": "input",
        "num_threads": 3,
        "timeout": 60,
    }
    from spdl.dataloader import DataLoader as Theirs

    ours, theirs = DataLoader(range(10), **options), Theirs(range(10), **options)
    assert list(ours) == list(theirs)
    assert list(ours) == list(theirs)  # a pass is made anew


@pytest.mark.parametrize("preprocessor", [_twice, _twice_awaited, _times_ten])
def test_in_the_order_of_completion_results_are_the_same_in_some_order(preprocessor: Any) -> None:
    options: dict[str, Any] = {"preprocessor": preprocessor, "batch_size": 3, "timeout": 60}
    from spdl.dataloader import DataLoader as Theirs

    ours, theirs = list(DataLoader(range(10), **options)), list(Theirs(range(10), **options))
    assert _flat(ours) == _flat(theirs)
    assert [len(each) for each in ours] == [len(each) for each in theirs]


def test_what_can_be_iterated_once_is_empty_the_second_time() -> None:
    from spdl.dataloader import DataLoader as Theirs

    for kind in (DataLoader, Theirs):
        loader = kind(i for i in range(3))
        assert [list(loader), list(loader)] == [[0, 1, 2], []]


def test_a_pipeline_is_what_a_builder_builds() -> None:
    from spdl.pipeline import PipelineBuilder

    theirs = (
        PipelineBuilder()
        .add_source(range(20))
        .pipe(_times_ten, concurrency=2, output_order="input")
        .aggregate(3)
        .disaggregate()
        .pipe(_twice)
        .aggregate(7, drop_last=True)
        .add_sink(3)
        .build(num_threads=2)
    )
    ours = (
        Pipeline(range(20))
        .pipe(_times_ten, concurrency=2, order="input")
        .aggregate(3)
        .disaggregate()
        .pipe(_twice)
        .aggregate(7, drop_last=True)
        .sink(3)
    )
    with theirs.auto_stop():
        assert list(ours) == list(theirs.get_iterator(timeout=60))
