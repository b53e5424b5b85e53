"""Context managers, and a property that is computed once."""

from __future__ import annotations

import threading

import pytest

from shardio._base.classes import Closing, Publishing, cached_property


class Counting:
    def __init__(self) -> None:
        self.n_computed = 0

    @cached_property
    def number(self) -> int:
        """The number of calls."""
        self.n_computed += 1
        return self.n_computed


def test_it_is_computed_once_per_object() -> None:
    one, other = Counting(), Counting()
    assert (one.number, one.number, other.number) == (1, 1, 1)
    assert (one.n_computed, other.n_computed) == (1, 1)
    assert isinstance(Counting.number, cached_property)
    assert Counting.number.__doc__ == "The number of calls."


def test_a_thread_that_is_inside_keeps_nobody_waiting() -> None:
    """A process that is forked meanwhile would wait for ever for a lock that it holds."""
    begun, go_on = threading.Event(), threading.Event()

    class Slow:
        @cached_property
        def value(self) -> str:
            if threading.current_thread() is slow:
                begun.set()
                go_on.wait()
            return "computed"

    shared = Slow()
    slow = threading.Thread(target=lambda: shared.value)
    slow.start()
    begun.wait()
    seen: list[str] = []
    quick = threading.Thread(target=lambda: seen.extend((shared.value, Slow().value)), daemon=True)
    quick.start()
    quick.join(20)
    go_on.set()
    slow.join()
    assert seen == ["computed"] * 2


class Held(Closing):
    def __init__(self) -> None:
        self.n_closed = 0

    def close(self) -> None:
        self.n_closed += 1


class Written(Publishing):
    def __init__(self) -> None:
        self.came_to = ""

    @property
    def _is_closed(self) -> bool:
        return bool(self.came_to)

    def close(self) -> None:
        self.came_to += "published"

    def abort(self) -> None:
        self.came_to += "removed"


def test_the_end_of_the_with_closes_once_also_after_an_exception() -> None:
    with Held() as held:
        assert held.n_closed == 0
    assert held.n_closed == 1
    with pytest.raises(KeyError), held:
        raise KeyError
    assert held.n_closed == 2


def test_the_end_of_the_with_publishes_unless_that_was_done_before() -> None:
    for act, came_to in ((None, "published"), ("close", "published"), ("abort", "removed")):
        with Written() as written:
            assert written.came_to == ""
            if act:
                getattr(written, act)()
        assert written.came_to == came_to


@pytest.mark.parametrize("kind", [KeyError, KeyboardInterrupt, GeneratorExit])
def test_an_exception_publishes_nothing_and_goes_on(kind: type[BaseException]) -> None:
    written = Written()
    with pytest.raises(kind), written:
        raise kind
    assert written.came_to == "removed"
