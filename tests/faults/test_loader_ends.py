"""A loop over a loader leaves no process and no name behind, however it ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator

import pytest

from tests.faults.scene import MARK, PATIENCE_S, STUCK, Scene, line, scene
from tests.faults.stem import Stem, stem
from tests.loading import TWO_FIELDS, two_fields, write_dataset

pytestmark = pytest.mark.usefixtures("quick_disk")

# What the workers do when it ends: wait, since all blocks are full; sleep, or sit in a C call that
# holds the GIL, in a transform; and with no workers, nothing. They are forks of the zygote, other
# programs, or a thread: one, because transforms run one at a time, and it hangs in one.
BUSY = {
    "ahead": "",
    "asleep": "transform = linger",
    "in C": "transform = spin",
    "not there": "num_workers = 0",
    "spawned": "transform, start_method = linger, 'spawn'",
    "a thread": "num_workers, transform, start_method = 1, linger, 'thread'",
}
STUCK_WORKERS = ["asleep", "in C", "spawned", "a thread"]

PROGRAM = f"""{STUCK}
import gc, os, signal, sys, threading
from shardio import ShardLoader
from shardio._workers.processes import zygote as launch

num_workers, transform, start_method = 2, None, "zygote"
{{busy}}

def load(**options):
    return ShardLoader({{folder!r}}, 4, output={{output!r}}, num_workers=num_workers,
                       start_method=start_method, **dict(transform=transform) | options)

{{then}}
"""

STAY = """
print('left', threading.active_count(), flush=True)
time.sleep(1000)
"""

# `close` waits 0.1 s for threads; on a busy machine, they may end by themselves after it.
UNTIL_ALONE = """
while threading.active_count() > 1: time.sleep(0.01)
"""

LEAVING = {
    "break": "for batch in load(): break",
    "exception in a function": """
def epoch():
    loader = load()
    for batch in loader: raise ValueError('oops')
try: epoch()
except ValueError: pass
""",
    "return": """
def first():
    for batch in load(): return batch
batch = first()
""",
    "end of the with": """
with load() as loader:
    for batch in loader: break
""",
    "exception in the with": """
try:
    with load() as loader:
        for batch in loader: raise ValueError('oops')
except ValueError: pass
""",
    "close, twice": """
loader = load()
for batch in loader: break
loader.close(); loader.close()
""",
    "close in the body": """
loader = load()
try:
    for batch in loader: loader.close()
except RuntimeError: pass
""",
    "del": """
loader = load()
steps = iter(loader)
batch = next(steps)
del loader, steps
""",
    "no loop at all": "load()",
    "a generator that is dropped": """
def images():
    for batch in load(): yield batch['image']
image = next(images())
""",
    "two loaders, one loop in the other": """
one, other = load(), load()
for batch in one:
    for batch in other: break
    break
one.close(); del other
""",
}

# Runs what it is told, one line of JSON after the other, each in names that stay until the next.
ONE_AFTER_THE_OTHER = """
import gc, json
gc.disable()  # a loader goes by itself, not when the garbage collector happens to run
for told in sys.stdin:
    names = {'load': load}
    exec(json.loads(told), names)
    print('left', 1, flush=True)
"""

STAYING = """
loader = load()
for batch in loader:
    print('ready', flush=True)
    time.sleep(1000)
"""


Told = tuple[Scene, subprocess.Popen[bytes]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_dataset(tmp_path_factory.mktemp("ends") / "set", 64, 2, TWO_FIELDS, two_fields(64))


@pytest.fixture(scope="module")
def grown() -> Iterator[Stem]:
    with stem(MARK) as found:
        yield found


@pytest.fixture
def stage(grown: Stem) -> Iterator[Scene]:
    """Run programs as forks of a process that has imported shardio."""
    with scene(grown.popen) as made:
        yield made


def _program(folder: str, then: str, busy: str = "ahead", output: str = "numpy") -> list[str]:
    return ["-c", PROGRAM.format(folder=folder, busy=BUSY[busy], then=then, output=output)]


def _assert_gone(stage: Scene, but: set[int] | None = None) -> None:
    """Check that all processes exit; print how long it took, for runs with -s."""
    start_s = time.monotonic()
    assert stage.left_after(but=but) == {}
    print(f"gone after {time.monotonic() - start_s:.2f} s")


@pytest.fixture(scope="module", params=["ahead", "asleep", "in C", "not there"])
def told(request: pytest.FixtureRequest, folder: str, grown: Stem) -> Iterator[Told]:
    """Start a program that leaves its loaders as instructed; return it and its scene."""
    with scene(grown.popen) as stage:
        yield stage, stage.start(_program(folder, ONE_AFTER_THE_OTHER, request.param), stdin=None)


@pytest.mark.parametrize("how", LEAVING)
def test_nothing_is_left_once_a_loader_was_left(told: Told, how: str) -> None:
    stage, main = told
    assert main.stdin is not None
    main.stdin.write(json.dumps(LEAVING[how]).encode() + b"\n")
    assert line(main) == "left 1"
    _assert_gone(stage, but={main.pid})
    assert stage.files_in_dev_shm() == []


@pytest.mark.parametrize("busy", ["spawned", "a thread"])
@pytest.mark.parametrize("how", ["break", "close in the body"])
def test_nothing_is_left_of_other_workers(stage: Scene, folder: str, how: str, busy: str) -> None:
    then = LEAVING[how]
    if busy == "a thread":  # one that sleeps cannot be ended; one that waits for work can
        then = then.replace("load()", "load(transform=None)") + UNTIL_ALONE
    main = stage.start(_program(folder, then + STAY, busy))
    assert line(main) == "left 1"
    _assert_gone(stage, but={main.pid})


@pytest.mark.parametrize("first", [0, 13], ids=["first sample", "later sample"])
@pytest.mark.parametrize("failure", ["raise ValueError('oops')", "os._exit(3)", "return None"])
def test_nothing_is_left_after_errors(stage: Scene, folder: str, failure: str, first: int) -> None:
    then = f"""
gc.disable()  # the loader goes by itself, not when the garbage collector happens to run

def transform(sample):
    if sample["label"] == {first}:
        {failure}
    return sample

def epoch():
    loader = load()
    for batch in loader: pass

try: epoch()
except RuntimeError as error: print(type(error).__name__, flush=True)
try:
    for batch in load(): pass
except RuntimeError as error: print(type(error).__name__, flush=True)
"""
    main = stage.start(_program(folder, then + STAY))
    expected = "WorkerDied" if "_exit" in failure else "TransformError"
    assert [line(main), line(main), line(main)] == [expected, expected, "left 1"]
    _assert_gone(stage, but={main.pid})


@pytest.mark.cpu_device
@pytest.mark.parametrize("how", ["break", "exception in the with", "return"])
def test_nothing_is_left_of_a_loader_of_tensors(stage: Scene, folder: str, how: str) -> None:
    main = stage.start(_program(folder, LEAVING[how] + STAY, output="tinygrad"))
    assert line(main).startswith("left")
    _assert_gone(stage, but={main.pid})


@pytest.mark.parametrize("busy", ["ahead", *STUCK_WORKERS])
@pytest.mark.parametrize(
    ("end", "exit_code"),
    [
        pytest.param("pass", 0, id="end of the program"),
        pytest.param("raise ValueError('oops')", 1, id="exception"),
        pytest.param("sys.exit(3)", 3, id="sys.exit"),
        pytest.param("os._exit(4)", 4, id="os._exit"),
        pytest.param("os.abort()", -signal.SIGABRT, id="abort"),
        pytest.param("os.execv('/bin/true', ['true'])", 0, id="exec of another program"),
    ],
)
def test_nothing_is_left_at_exit(
    stage: Scene, folder: str, end: str, exit_code: int, busy: str
) -> None:
    then = f"loader = load()\nfor batch in loader: {end}; break"
    main = stage.start(_program(folder, then, busy))
    assert main.wait(PATIENCE_S) == exit_code
    _assert_gone(stage)


@pytest.mark.parametrize("busy", ["ahead", *STUCK_WORKERS])
@pytest.mark.parametrize("send", [os.kill, os.killpg], ids=["main", "group"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL, signal.SIGHUP])
def test_nothing_is_left_after_a_signal_in_a_loop(
    stage: Scene, folder: str, number: signal.Signals, send: Callable[[int, int], None], busy: str
) -> None:
    main = stage.start(_program(folder, STAYING, busy))
    assert line(main) == "ready"
    stage.wait_for_processes(1 if busy == "a thread" else 4)
    assert stage.files_in_dev_shm() == []
    send(main.pid, number)
    assert main.wait(PATIENCE_S) != 0
    _assert_gone(stage)


@pytest.mark.parametrize("busy", ["asleep", "in C", "a thread"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_nothing_is_left_after_a_signal_while_main_waits_for_a_batch(
    stage: Scene, folder: str, number: signal.Signals, busy: str
) -> None:
    then = "loader = load()\nfor batch in loader: print(batch.step, flush=True)"
    main = stage.start(_program(folder, then, busy))
    assert [line(main), line(main)] == ["0", "1"]
    os.killpg(main.pid, number)
    assert main.wait(PATIENCE_S) != 0
    _assert_gone(stage)


@pytest.mark.parametrize("busy", ["asleep", "a thread"])
def test_ctrl_c_twice_leaves_nothing(stage: Scene, folder: str, busy: str) -> None:
    main = stage.start(_program(folder, STAYING, busy))
    assert line(main) == "ready"
    os.killpg(main.pid, signal.SIGINT)
    time.sleep(0.01)
    os.killpg(main.pid, signal.SIGINT)
    assert main.wait(PATIENCE_S) != 0
    _assert_gone(stage)


@pytest.mark.parametrize("busy", ["ahead", "a thread"])
def test_loaders_in_threads_leave_nothing(stage: Scene, folder: str, busy: str) -> None:
    then = """
def loop():  # a print is two pieces, and the threads print at once
    with load(transform=None) as loader:
        if sum(batch.n_rows for batch in loader) == 64: print('whole\\n', end='', flush=True)
    for batch in load(transform=None): break

threads = [threading.Thread(target=loop) for _ in range(3)]
for thread in threads: thread.start()
for thread in threads: thread.join()
gc.collect()
"""
    then += UNTIL_ALONE if busy == "a thread" else ""
    main = stage.start(_program(folder, then + STAY, busy))
    assert [line(main) for _ in range(4)] == ["whole"] * 3 + ["left 1"]
    _assert_gone(stage, but={main.pid})


def test_a_cell_of_a_notebook_run_again_replaces_its_loader(stage: Scene, folder: str) -> None:
    then = """
cell = '''
shift = 100 * n
def prepare(sample): return {"label": sample["label"] + shift}
loader = load(transform=prepare)
for batch in loader: break
print(int(batch["label"][0]), flush=True)
'''
space = {"load": load}
for n in range(3):
    space["n"] = n
    exec(cell, space)
time.sleep(1000)
"""
    main = stage.start(_program(folder, then))
    assert [line(main) for _ in range(3)] == ["0", "100", "200"]
    stage.wait_for_processes(4)  # main, zygote, and the workers of the last
    main.kill()
    _assert_gone(stage)


def test_ctrl_c_ends_the_loop_and_the_loader_can_be_used_again(stage: Scene, folder: str) -> None:
    then = """
loader = load()
try:
    for batch in loader:
        print('ready', flush=True)
        time.sleep(1000)
except KeyboardInterrupt:
    pass
print(sum(batch.n_rows for batch in loader), flush=True)
"""
    main = stage.start(_program(folder, then))
    assert line(main) == "ready"
    os.killpg(main.pid, signal.SIGINT)
    assert line(main) == "64"
    assert main.wait(PATIENCE_S) == 0
    _assert_gone(stage)


@pytest.mark.parametrize("busy", ["ahead", "asleep", "in C"])
def test_after_the_end_of_the_zygote_work_is_repeated(stage: Scene, folder: str, busy: str) -> None:
    then = """
def is_running(pid):
    try:
        with open(f'/proc/{pid}/stat') as stat: state = stat.read().rpartition(')')[2].split()[0]
        return state not in 'ZX'
    except (FileNotFoundError, ProcessLookupError): return False
loader = load()
found = []

def end_when_replaced(lost):
    while True:
        pids = loader._engine._backend._pool.pids()
        if all(pid and pid not in lost and is_running(pid) for pid in pids): break
        time.sleep(0.001)
    print('replaced', flush=True)
    loader.close()

try:
    for batch in loader:
        found += batch.indices.tolist()
        if batch.step == 0:
            workers = [pid for pid in loader._engine._backend._pool.pids() if pid]
            os.kill(launch._current.pid, signal.SIGKILL)
            while any(is_running(pid) for pid in workers): time.sleep(0.001)
            print('killed', flush=True)
            if transform:  # what is lost takes for ever, again
                threading.Thread(target=end_when_replaced, args=(workers,), daemon=True).start()
    print('whole' if found == list(range(64)) else found, flush=True)
except RuntimeError as error:
    print(type(error).__name__, found == list(range(len(found))), flush=True)
loader.close()
time.sleep(1000)
"""
    main = stage.start(_program(folder, then, busy))
    expected = ["whole"] if busy == "ahead" else ["replaced", "ClosedError True"]
    assert [line(main) for _ in ["killed", *expected]] == ["killed", *expected]
    _assert_gone(stage, but={main.pid})


@pytest.mark.parametrize("busy", ["asleep", "in C", "spawned"])
def test_a_fork_of_main_keeps_no_worker_alive(stage: Scene, folder: str, busy: str) -> None:
    then = """
loader = load()
for batch in loader:
    fork_pid = os.fork()
    if fork_pid: print(fork_pid, flush=True)
    time.sleep(1000)
"""
    main = stage.start(_program(folder, then, busy))
    fork_pid = int(line(main))
    main.kill()
    _assert_gone(stage, but={fork_pid})
    assert fork_pid in stage.processes()
