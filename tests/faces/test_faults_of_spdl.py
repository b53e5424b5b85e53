"""The faults found in SPDL's DataLoader, one by one: ours has none of them.

Costs per item are measured by tools/bench peers.spdl.
"""

from __future__ import annotations

import itertools
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from shardio import DataLoader, InvalidArgument
from shardio.errors import BatchTimeout, TooManySkipped, TransformError
from tests.loading import PATIENCE_S


def _odd_ones_out(item: int) -> int:
    if item % 2:
        raise ValueError(f"{item} is odd")
    return item


# --- an error is logged, and the item or the whole batch dropped ------------------------------


@pytest.mark.parametrize(
    ("argument", "options", "note"),
    [
        ("preprocessor", {}, "item 1 (1)"),
        ("aggregator", {"batch_size": 2}, "items 0 to 1 ([0, 1])"),
        ("transfer_fn", {}, "item 1 (1)"),
    ],
)
def test_function_errors_name_the_items(argument: str, options: dict[str, Any], note: str) -> None:
    def fail(items: Any) -> int:
        return _odd_ones_out(sum(items) if isinstance(items, list) else items)

    options = {**options, argument: fail, "output_order": "input"}
    loader = DataLoader(range(8), **options)
    with pytest.raises(ValueError, match="1 is odd") as caught:
        list(loader)
    assert caught.value.__notes__ == [f"in {argument}, {note}"]


# --- no limit can be set ----------------------------------------------------------------------


def test_items_that_fail_are_dropped_and_counted_where_that_is_asked_for() -> None:
    options: dict[str, Any] = {"output_order": "input", "on_error": "skip", "max_skips": 4}
    loader = DataLoader(range(8), preprocessor=_odd_ones_out, **options)
    assert list(loader) == [0, 2, 4, 6]
    assert (loader.stats().n_skipped, loader.stats().stages[1].n_failed) == (4, 4)


def test_more_failures_than_allowed_are_an_error_that_names_the_last() -> None:
    options: dict[str, Any] = {"num_threads": 1, "on_error": "skip", "max_skips": 1}
    loader = DataLoader(range(8), preprocessor=_odd_ones_out, **options)
    with pytest.raises(TooManySkipped, match=r"item 3 \(3\): ValueError: 3 is odd"):
        list(loader)


# --- transfer_fn runs on many threads ---------------------------------------------------------


@pytest.mark.parametrize("order", ["completion", "input"])
def test_the_transfer_function_runs_on_one_thread_which_is_always_the_same(order: str) -> None:
    loader = DataLoader(
        range(100),
        preprocessor=lambda item: item,
        aggregator=lambda item: item,
        transfer_fn=lambda item: threading.get_ident(),
        output_order=order,
    )
    found = set(loader)
    assert len(found) == 1
    assert threading.get_ident() not in found


# --- break, a timeout and Ctrl-C wait for what is running -------------------------------------


class Stuck:
    """A preprocessor that does not return from any item but the first until it is let go."""

    def __init__(self) -> None:
        self.is_stuck, self.let_go = threading.Event(), threading.Event()
        self.was_let_go: list[bool] = []

    def __call__(self, item: int) -> int:
        if item:
            self.is_stuck.set()
            self.was_let_go.append(self.let_go.wait(PATIENCE_S))
        return item


@pytest.fixture
def stuck() -> Iterator[Stuck]:
    found = Stuck()
    yield found
    assert found.was_let_go == []  # nobody has waited for it
    found.let_go.set()


def test_break_does_not_wait_for_what_is_running(stuck: Stuck) -> None:
    for item in DataLoader(range(9), preprocessor=stuck, num_threads=2):
        assert item == 0
        assert stuck.is_stuck.wait(PATIENCE_S)
        break


def test_a_timeout_does_not_wait_for_what_is_running_and_says_what_that_is(stuck: Stuck) -> None:
    options: dict[str, Any] = {"num_threads": 1, "timeout": PATIENCE_S}
    items: Any = iter(DataLoader(range(9), preprocessor=stuck, **options))
    assert next(items) == 0
    assert stuck.is_stuck.wait(PATIENCE_S)
    items._timeout_s = 0.05
    with pytest.raises(BatchTimeout, match="within 0.05 s") as caught:
        next(items)
    assert "preprocessor, item 1 (1), for" in str(caught.value)
    assert "in __call__" in str(caught.value)
    assert "source, item" not in str(caught.value)  # which is suspended


def test_ctrl_c_does_not_wait_for_what_is_running(stuck: Stuck) -> None:
    def interrupt(item: int) -> int:
        os.kill(os.getpid(), signal.SIGINT)
        return stuck(item)

    with pytest.raises(KeyboardInterrupt):
        list(DataLoader([1], preprocessor=interrupt))


# --- SystemExit, KeyboardInterrupt or StopIteration never resolve -----------------------------


ENDS = [SystemExit, KeyboardInterrupt, GeneratorExit]
SYNC = itertools.product(["preprocessor", "aggregator", "transfer_fn"], [*ENDS, StopIteration])


@pytest.mark.parametrize(("argument", "kind"), [*SYNC, *(("async", kind) for kind in ENDS)])
def test_non_exceptions_are_named_failures(argument: str, kind: type[BaseException]) -> None:
    def function(item: Any) -> Any:
        raise kind

    async def awaited(item: Any) -> Any:
        raise kind

    given: Any = function
    if argument == "async":
        argument, given = "preprocessor", awaited
    with pytest.raises(TransformError, match=f"{argument} raised {kind.__name__}") as caught:
        list(DataLoader(["x"], **{argument: given}))
    assert caught.value.__notes__ == [f"in {argument}, item 0 ('x')"]


# --- an empty dict as preprocessor is taken for none ------------------------------------------


def test_an_empty_mapping_is_a_mapping_without_keys() -> None:
    with pytest.raises(KeyError):
        list(DataLoader([1], preprocessor={}))


# --- bad arguments fail at iteration or never -------------------------------------------------


@pytest.mark.parametrize(
    ("options", "found"),
    [
        ({"src": 5}, "src must be iterable"),
        ({"src": list}, "src must be iterable"),
        (
            {"src": "out/"},
            r"src must be an iterable.* 'out/'.*shardio\.ShardLoader\('out/', batch_size\)",
        ),
        (
            {"src": Path("out")},
            r"src must be an iterable.*shardio\.ShardLoader\('out', batch_size\)",
        ),
        ({"src": b"out/"}, r"src must be an iterable.*list\(.*\)"),
        ({"preprocessor": 5}, "preprocessor must be a function"),
        ({"preprocessor": "decode"}, "preprocessor must be a function"),
        ({"aggregator": 5}, "aggregator must be a function"),
        ({"transfer_fn": 5}, "transfer_fn must be a function"),
        ({"aggregator": lambda items: (yield items)}, "aggregator must return one result"),
        ({"batch_size": 0}, "batch_size must be an integer from 1 up"),
        ({"batch_size": 2.5}, "batch_size must be an integer"),
        ({"drop_last": "no"}, "drop_last must be one of True, False"),
        ({"buffer_size": 0}, "buffer_size must be an integer from 1 up"),
        ({"num_threads": 0}, "num_threads must be an integer from 1 up"),
        ({"timeout": -1}, "timeout must be a number of seconds above 0"),
        ({"output_order": "random"}, "output_order must be one of 'completion', 'input'"),
        ({"executor": "process"}, "executor needs a preprocessor"),
        ({"executor": "cluster", "preprocessor": str}, "executor must be None, 'process' or"),
        ({"on_error": "ignore"}, "on_error must be one of 'raise', 'skip'"),
        ({"on_error": "skip"}, "on_error='skip' needs max_skips"),
    ],
)
def test_a_bad_argument_is_refused_by_the_constructor(options: dict[str, Any], found: str) -> None:
    with pytest.raises(InvalidArgument, match=found):
        DataLoader(**{"src": [1], **options})


# --- no length --------------------------------------------------------------------------------


@pytest.mark.parametrize(("drop_last", "n"), [(False, 4), (True, 3)])
def test_there_is_a_length_where_the_source_has_one(drop_last: object, n: int) -> None:
    loader = DataLoader(range(10), preprocessor=str, batch_size=3, drop_last=bool(drop_last))
    assert len(loader) == len(list(loader)) == n
