"""The faults of tinyloader 0.1.5, one by one, and that the same interface here has none of them.

In the order of the list of measured faults; the name of a test is the fault's opposite.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from multiprocessing.managers import SharedMemoryManager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardio import SharedMemoryShim, load_with_workers
from shardio.errors import InsufficientMemory, TransformError, WorkerDied
from tests.faces.loaders import loader_of
from tests.faults.scene import Scene, line

pytestmark = pytest.mark.usefixtures("warm_zygote")


def picture(item: int) -> tuple[Any, Any]:
    return np.full((64, 1024), item % 251, np.uint8), np.array(item)


# --- what a fault in mid-epoch does ---------------------------------------------------------


def test_a_killed_worker_is_replaced_and_every_item_comes(tmp_path: Path) -> None:
    def load(item: int) -> Any:
        if item == 20 and not (tmp_path / "killed").exists():
            (tmp_path / "killed").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return np.full((64, 1024), item, np.uint8)

    with load_with_workers(loader_of(load), range(40), 2) as generator:
        assert [int(array[0, 0]) for array in generator] == list(range(40))


PROGRAM = """
import time, numpy as np
from itertools import count
from shardio import Loader, load_with_workers

class Numbers(Loader):
    def make_request(self, item):
        return item
    def load(self, request):
        return np.full(100_000, request)
    def post_process(self, response):
        return response[0]

for n in load_with_workers(Numbers(), count(), 2, True):
    if n == 9:
        print("under way", flush=True)
        time.sleep(1000)
"""


def test_of_a_program_that_is_killed_no_process_and_no_memory_is_left(stage: Scene) -> None:
    main = stage.start(["-"], stdin=PROGRAM.encode())
    assert line(main) == "under way"
    assert stage.files_in_dev_shm() == []  # all memory ends with the processes
    main.kill()
    assert main.wait(30) == -signal.SIGKILL
    assert stage.left_after() == {}


def test_an_exception_that_cannot_be_pickled_is_raised_with_its_text() -> None:
    def load(item: int) -> None:
        class Unlucky(Exception):
            def __init__(self, one: str, two: str) -> None:
                super().__init__(f"{one} {two}")

        raise Unlucky("no", "luck")

    with pytest.raises(TransformError, match="Unlucky: no luck") as caught:
        list(load_with_workers(loader_of(load), range(9), 2))
    assert "item 0 (0)" in caught.value.__notes__[0]


def test_a_worker_that_leaves_by_os_exit_is_noticed() -> None:
    said = r"item 0 \('bad.mp4'\) in Made.load; .* ended with exit code 0"
    with pytest.raises(WorkerDied, match=said):
        list(load_with_workers(loader_of(lambda item: os._exit(0)), ["bad.mp4"], 2))


def test_a_fork_within_load_that_comes_back_answers_nothing() -> None:
    def load(item: int) -> int:
        if item == 3 and (pid := os.fork()) != 0:
            os.waitpid(pid, 0)
        return item

    assert list(load_with_workers(loader_of(load), range(9), 1)) == list(range(9))


@pytest.mark.parametrize("skipping", [{}, {"on_error": "skip", "max_skips": 9}])
def test_what_memory_does_not_hold_is_an_error_and_no_torn_item(skipping: Any) -> None:
    options = {"memory_bytes": 10**6, **skipping}
    loading = load_with_workers(loader_of(np.zeros), [10, 10**6], 2, **options)
    assert next(loading).tolist() == [0] * 10
    with pytest.raises(InsufficientMemory, match="8000.* bytes; memory_bytes allows 1000000"):
        next(loading)


# --- faults of its own ----------------------------------------------------------------------


@pytest.mark.parametrize(("delay_s", "n"), [(0.002, 120), (0, 400)])
def test_a_block_is_not_used_again_while_post_process_reads_it(delay_s: float, n: int) -> None:
    def slowly(response: tuple[Any, Any]) -> Any:
        array, item = response
        time.sleep(delay_s)  # workers have long been able to write the next
        assert (array == item % 251).all()
        return int(item)

    with load_with_workers(loader_of(picture, slowly), range(n), 2, True, 2) as generator:
        assert list(generator) == list(range(n))


def test_sys_exit_in_a_worker_is_an_error_that_says_so() -> None:
    with pytest.raises(TransformError, match="Made.load raised SystemExit: 3"):
        list(load_with_workers(loader_of(lambda item: sys.exit(3)), range(9), 2))


def of_all_kinds(item: int) -> Any:
    kind = ["uint8", "float32", ">i2", "complex128"][item % 4]
    return tuple(np.full((item, n, 7), item, kind) for n in range(item % 3))


def four_of_a_size(item: int) -> Any:
    return tuple(np.full(50_000, item + n) for n in range(4))


@pytest.mark.parametrize(
    ("load", "items", "n_workers", "n_blocks"),
    [
        (lambda n: (np.ones(n),), [100_000, 10, 3_000_000, 0, 70_000, 5_000_000], 2, None),
        (of_all_kinds, range(60), 2, None),
        (four_of_a_size, range(20), 1, 1),
    ],
)
def test_arrays_of_any_size_and_dtype(load: Any, items: Any, n_workers: int, n_blocks: Any) -> None:
    with load_with_workers(loader_of(load), items, n_workers, True, n_blocks) as generator:
        for item, found in zip(items, generator, strict=True):
            expected = load(item)
            assert [(a.dtype, a.shape) for a in found] == [(a.dtype, a.shape) for a in expected]
            np.testing.assert_equal(found, expected)


def test_an_empty_source_gives_nothing() -> None:
    assert list(load_with_workers(loader_of(picture), [], 2)) == []
    assert list(load_with_workers(loader_of(picture), iter(()), 2)) == []


def test_a_view_that_is_kept_stays_what_it_was() -> None:
    kept = []
    with load_with_workers(loader_of(picture), range(60), 2) as generator:
        for array, _ in generator:
            kept.append(array[10:20, ::100])
    assert all((array == item % 251).all() for item, array in enumerate(kept))


# --- what its page shows and it does not do -------------------------------------------------


def test_the_shim_needs_no_memory_of_its_manager() -> None:
    with SharedMemoryManager() as smm:
        shim = SharedMemoryShim(loader_of(picture), smm=smm, memory_pool_block_count=2)
        with load_with_workers(shim, range(9), 2) as generator:
            assert [int(item) for _, item in generator] == list(range(9))
    shim = SharedMemoryShim(loader_of(picture), None, 2)
    assert [int(item) for _, item in load_with_workers(shim, range(9), 2)] == list(range(9))
