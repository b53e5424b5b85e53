"""Promises of load and load_with_workers beyond those of tinyloader."""

from __future__ import annotations

import gc
import os
import threading
import time
from collections.abc import Generator
from functools import partial
from itertools import count, product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardio import InvalidArgument, Loader, SharedMemoryShim, load, load_with_workers
from shardio.errors import BatchTimeout, ClosedError, TooManySkipped, TransformError
from tests.faces.loaders import loader_of

pytestmark = pytest.mark.usefixtures("warm_zygote")

SAME: Any = loader_of(lambda item: item)


# --- where what runs ------------------------------------------------------------------------


@pytest.mark.parametrize("n_workers", [0, 2])
def test_requests_and_responses_are_of_the_thread_that_iterates(n_workers: int) -> None:
    seen = []

    def here(value: Any) -> Any:
        seen.append((os.getpid(), threading.get_ident()))
        return value

    loader = loader_of(lambda request: os.getpid(), here, here)
    pids = set(load_with_workers(loader, range(9), n_workers))
    assert set(seen) == {(os.getpid(), threading.get_ident())}
    assert (os.getpid() in pids) == (n_workers == 0)


def test_load_takes_an_item_when_it_is_asked_for_one() -> None:
    source = count()
    found = load(loader_of(lambda item: item * 2), source)
    assert isinstance(found, Generator)
    assert [next(found), next(found)] == [0, 2]
    assert next(source) == 2


def test_a_loader_that_lacks_a_method_is_refused() -> None:
    class Half:
        def load(self, request: Any) -> Any:
            return request

    with pytest.raises(InvalidArgument, match="Half lacks make_request, post_process"):
        load_with_workers(Half(), [])  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match="loader is the class Half"):
        load_with_workers(Half, [])  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="abstract"):
        Loader()  # type: ignore[abstract]
    for make in (Loader, partial(load, items=[]), partial(load_with_workers, items=[])):
        with pytest.raises(InvalidArgument, match=r"derived from .*Loader.*ShardLoader\('out/', "):
            make("out/")  # type: ignore[call-arg, arg-type, abstract]


def test_what_is_not_acceptable_is_refused_before_anything_starts() -> None:
    bad: list[tuple[str, Any]] = [("num_worker", -1), ("num_worker", 1.5), ("memory_bytes", 0)]
    bad += [("memory_pool_block_count", "8"), ("order", "random"), ("on_error", "drop")]
    bad += [("max_skips", 3), ("timeout_s", 0), ("start_method", "thread")]
    for name, value in bad:
        with pytest.raises(InvalidArgument, match=name):
            load_with_workers(SAME, [], **{name: value})
    with pytest.raises(InvalidArgument, match="items must be iterable; found 7"):
        load_with_workers(SAME, 7)  # type: ignore[arg-type]
    path_refused = r"items must be an iterable.*ShardLoader\('out/', "
    for make in (load, load_with_workers):
        with pytest.raises(InvalidArgument, match=path_refused):
            make(SAME, "out/")
    with pytest.raises(InvalidArgument, match="Made.load"):
        list(load_with_workers(loader_of(threading.Lock().acquire), [1], 1))


# --- options --------------------------------------------------------------------------------


@pytest.mark.parametrize(("order", "slow_one"), [("input", [0]), ("completion", [])])
def test_order_of_items_or_of_completion(tmp_path: Path, order: Any, slow_one: list[int]) -> None:
    def load(item: int) -> int:
        while item == 0 and order == "completion" and not (tmp_path / "go").exists():
            time.sleep(0.001)
        return item

    found = []
    for item in load_with_workers(loader_of(load), range(8), 2, order=order):
        found.append(item)
        (tmp_path / "go").touch()
    assert sorted(found) == list(range(8))
    assert found[:1] == slow_one or not slow_one and found[0] != 0


@pytest.mark.parametrize("n_blocks", [None, 30])
@pytest.mark.parametrize("shim", [False, True])
def test_so_many_items_are_under_way(n_blocks: int | None, *, shim: bool) -> None:
    source, given = count(), n_blocks
    loader: Any = SAME
    if shim:
        loader, given = SharedMemoryShim(SAME, None, n_blocks), None
    with load_with_workers(loader, source, 2, True, given) as generator:
        assert next(generator) == 0
        assert next(source) == (n_blocks or 6)


@pytest.mark.parametrize("n_workers", [0, 2])
def test_items_that_fail_are_skipped_where_that_is_asked_for_and_told(n_workers: int) -> None:
    def load(item: int) -> int:
        return 12 // (item % 4)

    loader = loader_of(load)
    with pytest.raises(ZeroDivisionError):
        list(load_with_workers(loader, range(9), n_workers))
    loading = load_with_workers(loader, range(9), n_workers, on_error="skip", max_skips=3)
    assert list(loading) == [12, 6, 4, 12, 6, 4]
    assert [(s.index, s.item, s.error) for s in loading.skipped] == [
        (i, str(i), "ZeroDivisionError") for i in (0, 4, 8)
    ]
    assert (loading.stats().n_taken, loading.stats().n_skipped) == (6, 3)
    with pytest.raises(TooManySkipped, match="max_skips allows 2"):
        list(load_with_workers(loader, range(9), n_workers, on_error="skip", max_skips=2))


def test_an_item_that_does_not_come_in_time_is_an_error_that_says_what_workers_do() -> None:
    def load(item: str) -> None:
        threading.Event().wait()

    with pytest.raises(BatchTimeout, match=r"item 0 of Made.load did not(.|\n)*'film.mp4'"):
        list(load_with_workers(loader_of(load), ["film.mp4"], 1, timeout_s=0.3))


# --- failures in this process ---------------------------------------------------------------


@pytest.mark.parametrize("method", ["make_request", "post_process"])
@pytest.mark.parametrize("n_workers", [0, 1])
def test_a_failure_in_this_process_says_where(method: str, n_workers: int) -> None:
    def fail(value: int) -> int:
        return value // (value - 2)

    arguments: dict[str, Any] = {method: fail}
    with pytest.raises(ZeroDivisionError) as caught:
        list(load_with_workers(loader_of(lambda item: item, **arguments), range(9), n_workers))
    assert caught.value.__notes__ == [f"in Made.{method}, item 2 (2)"]


@pytest.mark.parametrize("method", ["make_request", "load", "post_process"])
def test_a_stop_iteration_does_not_end_the_loop_as_if_all_had_come(method: str) -> None:
    def stop(value: int) -> int:
        return next(iter(range(value)))

    functions: dict[str, Any] = {"load": lambda item: item, method: stop}
    with pytest.raises(TransformError, match=f"Made.{method} raised StopIteration"):
        list(load(loader_of(**functions), range(3)))


HERE = product(["make_request", "post_process"], [KeyboardInterrupt, SystemExit, ValueError])


@pytest.mark.parametrize(("method", "kind"), [("load", KeyboardInterrupt), *HERE])
def test_other_failures_are_raised_despite_skipping(method: str, kind: type[BaseException]) -> None:
    def fail(value: int) -> None:
        raise kind

    functions: dict[str, Any] = {"load": lambda item: item, method: fail}
    loading = load_with_workers(loader_of(**functions), [1, 2], 0, on_error="skip", max_skips=9)
    with pytest.raises(kind):
        next(loading)
    assert (list(loading), loading.skipped) == ([], ())


@pytest.mark.parametrize("failing", ["the source", "make_request", "the request"])
def test_what_ends_the_items_is_raised_behind_those_before_it(failing: str) -> None:
    def source() -> Generator[Any, None, None]:
        yield from range(3)
        if failing == "the source":
            raise OSError("no more")
        yield threading.Lock()  # which cannot be pickled

    def make_request(item: Any) -> Any:
        return item // 1 if failing == "make_request" else item

    loading = load_with_workers(loader_of(lambda item: item, make_request=make_request), source())
    assert [next(loading) for _ in range(3)] == [0, 1, 2]
    with pytest.raises((OSError, TypeError, InvalidArgument)) as caught:
        next(loading)
    assert "item 3" in caught.value.__notes__[0]


# --- the end --------------------------------------------------------------------------------


def living(n_workers: int, loading: Any) -> set[int]:
    """Return the workers that have loaded something."""
    return {next(loading) for _ in range(4 * n_workers)}


@pytest.mark.parametrize("ending", ["end of the with", "close", "throw", "drop", "failure"])
def test_whatever_the_end_workers_are_gone_and_shutdown_is_called_once(ending: str) -> None:
    ends: list[str] = []
    loader = loader_of(
        lambda item: os.getpid() if item < 20 else 1 // 0, shutdown=lambda: ends.append("end")
    )
    loading = load_with_workers(loader, count(), 2)
    pids = living(2, loading)
    assert ends == []
    if ending == "end of the with":
        with loading:
            next(loading)
    elif ending == "close":
        loading.close()
        loading.close()
    elif ending == "throw":
        with pytest.raises(KeyError):
            loading.throw(KeyError("x"))
    elif ending == "failure":
        with pytest.raises(ZeroDivisionError):
            list(loading)
    del loading
    gc.collect()
    assert ends == ["end"]
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


def test_shutdown_is_called_at_the_end_of_the_with_also_where_items_end_before() -> None:
    ends: list[str] = []
    loader = loader_of(lambda item: os.getpid(), shutdown=lambda: ends.append("end"))
    with load_with_workers(loader, range(9), 2) as generator:
        pids = set(generator)
        assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
        assert ends == []
    assert ends == ["end"]


def test_another_thread_may_close_it_in_the_middle_of_a_wait() -> None:
    loader = loader_of(lambda item: threading.Event().wait())
    with load_with_workers(loader, range(9), 1) as generator:
        closer = threading.Timer(0.05, generator.close)
        closer.start()
        with pytest.raises(ClosedError):
            next(generator)
        closer.join()


def test_a_fork_of_the_program_ends_nothing_of_it() -> None:
    ends: list[str] = []
    loader = loader_of(lambda item: item, shutdown=lambda: ends.append("end"))
    with load_with_workers(loader, range(9), 1) as generator:
        assert next(generator) == 0
        pid = os.fork()
        if pid == 0:
            generator.close()
            os._exit(len(ends))
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        assert list(generator) == list(range(1, 9))
    assert ends == ["end"]


def test_a_source_that_asks_its_own_iteration_is_refused_and_it_goes_on() -> None:
    def source() -> Generator[int, None, None]:
        for item in range(2):
            with pytest.raises(InvalidArgument, match="another thread is waiting"):
                next(loadings[0])
            yield item

    loadings = [load_with_workers(SAME, source(), 0)]
    assert list(loadings[0]) == [0, 1]


def test_one_that_its_own_source_closes_keeps_no_memory() -> None:
    def source() -> Generator[int, None, None]:
        yield 0
        loadings[0].close()
        yield 1

    before = len(os.listdir("/proc/self/fd"))
    loadings = [load_with_workers(SAME, source(), 1)]
    with pytest.raises(ClosedError):
        next(loadings[0])
    loadings.clear()
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) <= before


def test_one_that_was_never_begun_starts_and_ends_nothing() -> None:
    ends: list[str] = []
    loading = load_with_workers(loader_of(lambda i: i, shutdown=lambda: ends.append("end")), [1])
    assert loading.stats().n_put == 0
    loading.close()
    assert ends == []


def test_it_is_one_pass_as_of_any_generator() -> None:
    loading = load_with_workers(SAME, range(5), 1)
    assert iter(loading) is loading
    for item in loading:
        if item == 2:
            break
    assert (list(loading), list(loading)) == ([3, 4], [])


def test_one_that_is_over_is_not_begun_again_by_a_with() -> None:
    with load_with_workers(SAME, [1], 1) as generator:
        assert list(generator) == [1]
        with pytest.raises(ClosedError, match="has ended"), generator:
            pass


def test_one_that_was_closed_before_its_end_does_not_look_like_an_empty_one() -> None:
    with load_with_workers(SAME, count(), 1) as generator:
        next(generator)
    with pytest.raises(ClosedError, match="call load_with_workers again"):
        next(generator)


def test_after_an_error_it_is_over() -> None:
    loading = load_with_workers(loader_of(lambda item: 1 // item), [0, 1], 1)
    with pytest.raises(ZeroDivisionError):
        next(loading)
    assert list(loading) == []


def test_memory_that_is_let_go_within_the_body_is_used_for_the_next_items() -> None:
    places = set()
    for array in load_with_workers(loader_of(lambda i: np.full(50_000, i)), range(60), 1):
        places.add(array.ctypes.data)
        del array
    assert len(places) <= 6
