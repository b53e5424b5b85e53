from __future__ import annotations

import pytest

from shardio._base.classes import Closing, Publishing


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


def test_the_end_of_the_with_closes_once() -> None:
    with Held() as held:
        assert held.n_closed == 0
    assert held.n_closed == 1


def test_an_exception_closes_and_goes_on() -> None:
    held = Held()
    with pytest.raises(KeyError), held:
        raise KeyError
    assert held.n_closed == 1


def test_the_end_of_the_with_publishes() -> None:
    with Written() as written:
        assert written.came_to == ""
    assert written.came_to == "published"


@pytest.mark.parametrize("kind", [KeyError, KeyboardInterrupt, GeneratorExit])
def test_an_exception_publishes_nothing_and_goes_on(kind: type[BaseException]) -> None:
    written = Written()
    with pytest.raises(kind), written:
        raise kind
    assert written.came_to == "removed"


def test_what_is_published_within_the_with_is_not_published_again() -> None:
    with Written() as written:
        written.close()
    assert written.came_to == "published"


def test_what_is_removed_within_the_with_is_not_published() -> None:
    with Written() as written:
        written.abort()
    assert written.came_to == "removed"
