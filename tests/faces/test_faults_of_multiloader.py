"""The faults of webdataset's MultiLoader, in the order of the list: ours has none of them."""

from __future__ import annotations

import os
import resource
import select
import signal
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardio import MultiLoader, WorkerDied
from shardio._workers.processes.blocks import Block, Bytes
from shardio._workers.processes.worker_pool import Message
from shardio._workers.tasks.values import ValueBlocks, split_values
from shardio._workers.tasks.zeromq import HEAD, WANT, Receiver, zeromq
from shardio.errors import TransformError, UnsupportedEnvironment
from tests.faces.multi_datasets import (
    NEEDS_ZEROMQ,
    Anew,
    Count,
    Endless,
    Given,
    Half,
    Made,
    OneArray,
    Shared,
    die,
    fail,
    fail_frozen,
    fork_and_go_on,
    hang,
    leave,
    say_exit,
    say_stop,
)
from tests.faults.scene import PATIENCE_S, Scene, line

pytestmark = [NEEDS_ZEROMQ, pytest.mark.usefixtures("warm_zygote")]


# --- it hangs -------------------------------------------------------------------------------


@pytest.mark.parametrize("memory_bytes", [1, 10_000, 1 << 28])
def test_all_samples_of_a_dataset_that_is_over_at_once_arrive(memory_bytes: int) -> None:
    loader = MultiLoader(Count(5000), 2, memory_bytes=memory_bytes)
    assert sorted(loader) == sorted([*range(5000)] * 2)


def test_samples_arrive_while_the_dataset_is_busy(tmp_path: Path) -> None:
    go = tmp_path / "go"
    os.mkfifo(go)
    samples = iter(MultiLoader(Count(6, 5, go.read_bytes), 1, timeout_s=PATIENCE_S))
    assert [next(samples) for _ in range(5)] == [*range(5)]
    go.write_bytes(b"")  # the dataset goes on only now
    assert list(samples) == [5]


def test_an_exception_in_the_dataset_is_raised_with_the_worker_and_the_sample() -> None:
    with pytest.raises(KeyError, match="the file is gone") as caught:
        list(MultiLoader(Count(9, 3, fail, worker=1), 2))
    (note,) = caught.value.__notes__
    assert note.startswith("in worker 1, at its sample 3:")
    assert "in fail" in note  # the traceback


@pytest.mark.filterwarnings("ignore:.*is multi-threaded:DeprecationWarning")
def test_a_fork_within_the_dataset_that_comes_back_sends_nothing() -> None:
    assert list(MultiLoader(Count(9, 3, fork_and_go_on), 1)) == list(range(9))


def test_what_was_sent_before_an_exception_is_handed_over_first() -> None:
    loader = iter(MultiLoader(Count(9, 3, fail), 1))
    assert [next(loader) for _ in range(3)] == [0, 1, 2]
    with pytest.raises(KeyError):
        next(loader)
    assert list(loader) == []


def test_a_dataset_that_is_its_own_iterator_and_begins_anew_comes_to_its_end() -> None:
    samples = iter(MultiLoader(Anew(), 1))
    assert [next(samples, None) for _ in range(10)] == [*range(9), None]


def test_an_exception_that_takes_no_notes_says_where_all_the_same() -> None:
    with pytest.raises(TransformError, match=r"Frozen\nin worker 0, at its sample 2"):
        list(MultiLoader(Count(9, 2, fail_frozen), 1))


def test_an_exit_in_the_dataset_is_an_error() -> None:
    with pytest.raises(TransformError, match=r"worker 0, at its sample 2: .* raised SystemExit: 3"):
        list(MultiLoader(Count(9, 2, say_exit), 1))
    with pytest.raises(TransformError, match="raised StopAsyncIteration"):
        list(MultiLoader(Count(9, 2, say_stop), 1))


@pytest.mark.parametrize(
    ("end", "how"),
    [(die, r"was killed by signal 9 \(SIGKILL\)"), (leave, "ended with exit code 0")],
)
def test_an_early_exit_is_an_error_after_sent_samples(end: Callable[[], None], how: str) -> None:
    arrived: list[int] = []
    with pytest.raises(WorkerDied, match=rf"worker 1 \(process \d+\) {how}, after \d+ samples"):
        arrived.extend(MultiLoader(Count(500, 400, end, worker=1), 2))
    # The other one may not have come to its end; what it has sent, and this one, is there.
    assert max(Counter(arrived).values(), default=0) <= 2
    assert sorted(set(arrived)) == list(range(len(set(arrived))))


def test_samples_sent_before_a_death_are_delivered(monkeypatch: pytest.MonkeyPatch) -> None:
    loader: Any = iter(MultiLoader(Count(9, 8, hang), 1))
    assert next(loader) == 0
    n_unread = 7 - len(loader._unread)
    box = loader._receiver
    arrived: list[Any] = []
    take = box.take
    while sum(len([*split_values(memoryview(m)[HEAD.size :])]) for m in arrived) < n_unread:
        if (message := take()) is None:
            assert select.select([box], [], [], PATIENCE_S)[0]
        else:
            arrived.append(message)
    monkeypatch.setattr(box, "take", lambda: arrived.pop(0) if arrived else take())
    os.kill(loader._pool.pids()[0], signal.SIGKILL)
    while loader._crash is None:  # the death is seen before the rest is
        assert select.select([loader._pool], [], [], PATIENCE_S)[0]
        loader._handle_events()
    assert [next(loader) for _ in range(7)] == [*range(1, 8)]
    with pytest.raises(
        WorkerDied, match=r"signal 9 \(SIGKILL\), after 8 samples of this worker had"
    ):
        next(loader)


def test_an_ended_worker_is_sent_no_block(monkeypatch: pytest.MonkeyPatch) -> None:
    loader: Any = iter(MultiLoader(Endless(but=0), 2))
    while 0 in loader._going:
        next(loader)
    late = Message(0, WANT)
    monkeypatch.setattr(loader._pool, "wait", lambda timeout_s: [late])
    loader._handle_events()
    assert not loader._block_lender._n_each
    loader.close()


def test_too_few_files_are_an_error_but_not_fatal(tmp_path: Path) -> None:
    n_before = len(os.listdir("/proc/self/fd"))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (n_before + 40, hard))
    try:
        with pytest.raises(UnsupportedEnvironment, match="ulimit -n"):
            Receiver(str(tmp_path / "multi-"), 60)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert len(os.listdir("/proc/self/fd")) == n_before
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("dataset", "n_workers", "after"),
    [(Count(5, 2, hang), 1, "after 2 samples of this worker had"), (Endless(), 2, "")],
    ids=["while main waits", "while the others never stop"],
)
def test_a_worker_that_is_killed_is_noticed(dataset: Any, n_workers: int, after: str) -> None:
    loader: Any = iter(MultiLoader(dataset, n_workers, memory_bytes=100_000))
    assert [next(loader) for _ in range(3 - n_workers)] == [0, 1][: 3 - n_workers]
    pid = loader._pool.pids()[0]
    threading.Thread(target=os.kill, args=(pid, signal.SIGKILL)).start()
    with pytest.raises(WorkerDied, match=rf"worker 0 .* signal 9 \(SIGKILL\), .*{after}"):
        for _ in loader:
            pass


@pytest.mark.parametrize(
    ("sample", "how"), [(threading.Lock, "pickled.*lock"), (Half, "unpickled.*half")]
)
def test_a_sample_that_cannot_be_sent_is_an_error_that_names_it(sample: Any, how: str) -> None:
    with pytest.raises(TransformError, match=f"sample 1 of worker 0 cannot be {how}"):
        list(MultiLoader(Made([0, sample]), 1))


def test_an_empty_dataset_is_an_empty_iteration() -> None:
    assert list(MultiLoader(Given([]), 2)) == []
    assert list(MultiLoader(Shared(1), 3)) == [0]  # two of three have none


# --- it does not end ------------------------------------------------------------------------

ENDS = """
import itertools
from shardio import MultiLoader
{body}
print("over", flush=True)
"""


@pytest.mark.parametrize(
    "body",
    [
        # Left by a break, and held by a name until the interpreter ends.
        "samples = iter(MultiLoader(itertools.count(), 2))\nfor sample in samples: break",
        "loader = MultiLoader(itertools.count(), 2)\nfor sample in loader: break",
    ],
    ids=["iterator kept", "loader kept"],
)
def test_a_program_that_left_its_loop_ends(stage: Scene, body: str) -> None:
    main = stage.start(["-c", ENDS.format(body=body)])
    assert line(main) == "over"
    assert main.wait(PATIENCE_S) == 0
    assert stage.left_after() == {}
    assert main.stderr is not None
    assert main.stderr.read() == b""


# --- it leaves files behind, and others could write to its socket ----------------------------

KILLED = """
import itertools, os, sys
from shardio import MultiLoader
samples = iter(MultiLoader(itertools.count(), 2, prefix=sys.argv[1]))
print(os.listdir(os.path.dirname(sys.argv[1])), flush=True)
for sample in samples: pass
"""


def test_no_socket_stays_where_the_program_is_killed(stage: Scene, tmp_path: Path) -> None:
    main = stage.start(["-c", KILLED, str(tmp_path / "multi-")])
    assert line(main) == "[]"  # while workers connect, and ever after
    os.killpg(main.pid, signal.SIGKILL)  # the zygote too, which could remove what is there
    assert stage.left_after() == {}
    assert list(tmp_path.iterdir()) == []


def test_the_socket_folder_is_private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folders: list[Path] = []
    zmq = zeromq()
    bind = zmq.Socket.bind

    def note(socket: Any, address: str) -> None:
        bind(socket, address)
        folders.extend(tmp_path.iterdir())
        assert Path(address.removeprefix("ipc://")).is_socket()
        assert folders[-1].stat().st_mode & 0o777 == 0o700

    monkeypatch.setattr(zmq.Socket, "bind", note)
    with Receiver(str(tmp_path / "multi-"), 1):
        assert [folder.name[:6] for folder in folders] == ["multi-"]
        assert list(tmp_path.iterdir()) == []


# --- it pickles and copies everything --------------------------------------------------------


@pytest.mark.parametrize("n_bytes", [400, 24_000])
def test_large_arrays_stay_in_their_block(monkeypatch: pytest.MonkeyPatch, n_bytes: int) -> None:
    blocks = []
    hand_over = ValueBlocks.hand_over

    def note(self: ValueBlocks, block: Block, n_bytes: int, *, is_spare: bool) -> Bytes:
        blocks.append(hand_over(self, block, n_bytes, is_spare=is_spare))
        return blocks[-1]

    monkeypatch.setattr(ValueBlocks, "hand_over", note)
    wide = np.arange(10 * n_bytes // 4, dtype=np.int32).reshape(10, -1)
    parts = [wide, wide.T, wide[::2, ::2], np.asfortranarray(wide), wide[:1]]
    (sample,) = MultiLoader(Given([{"parts": parts}]), 1)
    is_large = n_bytes > 20_000
    assert len(blocks) == is_large
    for block in blocks:
        assert all(np.shares_memory(part, block) for part in sample["parts"][:4])
    for part, found in zip(parts, sample["parts"], strict=True):
        assert np.array_equal(part, found)
        assert found.flags.writeable


def test_large_samples_that_are_all_held_stay_as_they_are_whatever_memory_is_allowed() -> None:
    with pytest.warns(RuntimeWarning, match="values are copied"):
        held = list(MultiLoader(OneArray(30, 300_000), 2, memory_bytes=1_000_000))
    assert sorted(sample["number"] for sample in held) == sorted([*range(30)] * 2)
    assert all((sample["pixels"][0] == sample["number"]).all() for sample in held)


@pytest.mark.parametrize("n_bytes", [(300_000,), (100_000, 20_000), (20_000, 50), (90, 70_000)])
def test_arrays_that_the_dataset_uses_again_arrive_as_they_were(n_bytes: tuple[int, ...]) -> None:
    for sample in MultiLoader(OneArray(60, *n_bytes), 2):
        for pixels in sample["pixels"]:
            assert (pixels == sample["number"]).all()


def test_threads_that_share_an_iteration_have_every_sample_once_and_see_its_end() -> None:
    with MultiLoader(Shared(2000), 2) as loader:
        iteration = iter(loader)
        with ThreadPoolExecutor(4) as threads:
            shares = [threads.submit(list, iteration) for _ in range(4)]
            found = [number for share in shares for number in share.result()]
    assert sorted(found) == list(range(2000))
