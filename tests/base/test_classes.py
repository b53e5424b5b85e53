"""Context managers, and a property that is computed once."""

from __future__ import annotations

import threading

import pytest

from shardio._base.classes import cached_property, undo_on_error


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


@pytest.mark.parametrize("kind", [ValueError, KeyboardInterrupt])
def test_undo_is_called_only_after_an_exception_which_is_raised_again(
    kind: type[BaseException],
) -> None:
    undone: list[str] = []
    with undo_on_error(undone.append, "first"):
        pass
    with pytest.raises(kind), undo_on_error(undone.append, "second"):
        raise kind
    assert undone == ["second"]
