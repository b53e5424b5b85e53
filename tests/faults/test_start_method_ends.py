"""No start method, thread or notebook leaves anything behind when its loaders end.

`test_loader_ends.py` has every way to end for the default start method.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator

import pytest

from tests.faults.scene import PATIENCE_S, STUCK, Scene, line, scene
from tests.loading import TWO_FIELDS, two_fields, write_dataset

# How many processes there are; two workers, but one thread: it hangs in a transform, and as those
# run one at a time, another might never have its turn.
N_PROCESSES = {"spawn": 4, "thread": 1}
METHODS = pytest.mark.parametrize("method", N_PROCESSES)

PROGRAM = f"""{STUCK}
import gc, os, signal, sys, threading
from shardio import ShardLoader

def load(transform=linger):
    return ShardLoader({{folder!r}}, 4, output="numpy", start_method={{method!r}},
                       num_workers=1 if {{method!r}} == "thread" else 2, transform=transform)

{{then}}
"""

LEAVING = {
    "break": "for batch in load({given}): break",
    "close in the body": """
loader = load({given})
try:
    for batch in loader: loader.close()
except RuntimeError: pass
""",
}

STAY = """
print('left', threading.active_count(), flush=True)
time.sleep(1000)
"""

STAYING = """
for batch in load():
    print('ready', flush=True)
    time.sleep(1000)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_dataset(tmp_path_factory.mktemp("ends") / "set", 64, 2, TWO_FIELDS, two_fields(64))


@pytest.fixture
def stage() -> Iterator[Scene]:
    with scene() as made:
        yield made


def _program(folder: str, method: str, then: str) -> list[str]:
    return ["-c", PROGRAM.format(folder=folder, method=method, then=then)]


@METHODS
@pytest.mark.parametrize("how", LEAVING)
def test_nothing_is_left_once_a_loader_was_left(
    stage: Scene, folder: str, how: str, method: str
) -> None:
    # A thread that sleeps cannot be ended; one that waits for work can.
    given = "None" if method == "thread" else ""
    main = stage.start(_program(folder, method, LEAVING[how].format(given=given) + STAY))
    assert line(main) == "left 1"
    assert stage.left_after(but={main.pid}) == {}


@METHODS
@pytest.mark.parametrize(
    ("number", "send"),
    [
        pytest.param(signal.SIGINT, os.killpg, id="Ctrl-C"),
        pytest.param(signal.SIGTERM, os.kill, id="SIGTERM"),
        pytest.param(signal.SIGKILL, os.kill, id="SIGKILL"),
    ],
)
def test_nothing_is_left_after_a_signal_in_a_loop(
    stage: Scene,
    folder: str,
    number: signal.Signals,
    send: Callable[[int, int], None],
    method: str,
) -> None:
    main = stage.start(_program(folder, method, STAYING))
    assert line(main) == "ready"
    stage.wait_for_processes(N_PROCESSES[method])
    assert stage.files_in_dev_shm() == []
    send(main.pid, number)
    assert main.wait(PATIENCE_S) != 0
    assert stage.left_after() == {}


@METHODS
def test_nothing_is_left_when_the_program_ends_in_a_loop(
    stage: Scene, folder: str, method: str
) -> None:
    main = stage.start(_program(folder, method, "steps = iter(load())\nnext(steps)"))
    assert main.wait(PATIENCE_S) == 0
    assert stage.left_after() == {}


@pytest.mark.parametrize("method", ["zygote", "spawn"])
def test_a_fork_of_main_keeps_no_worker_alive(stage: Scene, folder: str, method: str) -> None:
    then = """
for batch in load():
    fork_pid = os.fork()
    if fork_pid: print(fork_pid, flush=True)
    time.sleep(1000)
"""
    main = stage.start(_program(folder, method, then))
    fork_pid = int(line(main))
    main.kill()
    assert stage.left_after(but={fork_pid}) == {}
    assert fork_pid in stage.processes()


def test_ctrl_c_ends_a_wait_for_threads(stage: Scene, folder: str) -> None:
    then = "for batch in load(): print(batch.step, flush=True)"
    main = stage.start(_program(folder, "thread", then))
    assert [line(main), line(main)] == ["0", "1"]  # and the next never comes
    main.send_signal(signal.SIGINT)
    assert main.wait(PATIENCE_S) != 0


@pytest.mark.parametrize("method", ["zygote", "thread"])
def test_ctrl_c_twice_in_quick_succession_leaves_nothing(
    stage: Scene, folder: str, method: str
) -> None:
    main = stage.start(_program(folder, method, STAYING))
    assert line(main) == "ready"
    os.killpg(main.pid, signal.SIGINT)
    time.sleep(0.01)
    os.killpg(main.pid, signal.SIGINT)
    assert main.wait(PATIENCE_S) != 0
    assert stage.left_after() == {}


@pytest.mark.parametrize("method", ["zygote", "thread"])
def test_loaders_that_threads_make_and_iterate_leave_nothing(
    stage: Scene, folder: str, method: str
) -> None:
    then = """
def loop():  # a print is two pieces, and the threads print at once
    with load(None) as loader:
        if sum(batch.n_rows for batch in loader) == 64: print('whole\\n', end='', flush=True)
    for batch in load(None): break

threads = [threading.Thread(target=loop) for _ in range(3)]
for thread in threads: thread.start()
for thread in threads: thread.join()
gc.collect()
"""
    main = stage.start(_program(folder, method, then + STAY))
    assert [line(main) for _ in range(4)] == ["whole"] * 3 + ["left 1"]
    assert stage.left_after(but={main.pid}) == {}


def test_a_cell_of_a_notebook_that_is_run_again_replaces_what_it_had(
    stage: Scene, folder: str
) -> None:
    then = """
cell = '''
shift = 100 * n
def prepare(sample): return {"label": sample["label"] + shift}
loader = load(prepare)
for batch in loader: break
print(int(batch["label"][0]), flush=True)
'''
space = {"load": load}
for n in range(3):
    space["n"] = n
    exec(cell, space)
time.sleep(1000)
"""
    main = stage.start(_program(folder, "zygote", then))
    assert [line(main) for _ in range(3)] == ["0", "100", "200"]
    stage.wait_for_processes(4)  # main, zygote, and the workers of the last
    main.kill()
    assert stage.left_after() == {}
