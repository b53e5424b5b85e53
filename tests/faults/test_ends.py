"""A program with workers leaves no process behind, however it ends."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults.scene import PATIENCE_S, Scene, line

# What workers are in the middle of: waiting for work, asleep, in a C call that holds the GIL.
BUSY = {
    "idle": "channel.recv()",
    "asleep": "time.sleep(1000)",
    "in C": "collections.deque(itertools.repeat(0), maxlen=0)",
}

PROGRAM = """
import collections, itertools, os, signal, sys, threading, time
from shardio._workers.processes import zygote as launch
from shardio._workers.processes.worker_pool import Message, WorkerExit, WorkerPool

def work(channel):
    channel.send(b"up")
    {busy}

def ready(pool):
    n_up = 0
    while n_up < len(pool):
        n_up += sum(isinstance(event, Message) for event in pool.wait())
    return pool

{then}
"""

START = "pool = ready(WorkerPool(2, work))\n"


def _program(then: str, busy: str = "asleep") -> list[str]:
    return ["-c", PROGRAM.format(busy=BUSY[busy], then=then)]


def test_ctrl_c_while_the_zygote_starts_reaches_main_alone(stage: Scene) -> None:
    then = """
pool = WorkerPool(1, work)
os.killpg(0, signal.SIGINT)
"""
    main = stage.start(
        _program(
            f"try:{then.replace(chr(10), chr(10) + '    ')}\n"
            "except KeyboardInterrupt: ready(pool); print('up', flush=True)"
        )
    )
    assert line(main) == "up"
    assert main.wait(PATIENCE_S) == 0
    assert stage.left_after() == {}


@pytest.mark.parametrize("busy", BUSY)
def test_close_works_while_a_fork_of_main_holds_every_socket(stage: Scene, busy: str) -> None:
    then = (
        START
        + """
fork_pid = os.fork()
if not fork_pid:
    time.sleep(1000)
pool.close()
print(fork_pid, flush=True)
time.sleep(1000)
"""
    )
    main = stage.start(_program(then, busy))
    fork_pid = int(line(main))
    assert stage.left_after(but={main.pid, fork_pid}) == {}


def test_a_fork_that_ends_takes_no_worker_along(stage: Scene) -> None:
    then = """
def echo(channel):
    while (received := channel.recv()) is not None:
        channel.send(received[0])

pool = WorkerPool(2, echo)
fork_pid = os.fork()
if not fork_pid:
    try:
        pool.wait()
    except RuntimeError as error:
        print(type(error).__name__, str(error).startswith("these workers belong to"), flush=True)
    pool.close()
    del pool
    sys.exit(0)  # runs the finalizers that the fork has inherited
os.waitpid(fork_pid, 0)
pool.send(1, b"still here")
print(pool.wait()[0].data.decode(), flush=True)
"""
    main = stage.start(_program(then))
    assert line(main) == "ClosedError True"
    assert line(main) == "still here"
    assert main.wait(PATIENCE_S) == 0
    assert stage.left_after() == {}


def test_a_fork_of_main_can_have_a_crew_of_its_own(stage: Scene) -> None:
    then = (
        START
        + """
if not os.fork():
    ready(WorkerPool(1, work)).close()
    print('closed', flush=True)
    os._exit(0)
os.wait()
ready(WorkerPool(1, work))
"""
    )
    main = stage.start(_program(then, "idle"))
    assert line(main) == "closed"
    assert main.wait(PATIENCE_S) == 0
    assert stage.left_after() == {}


def test_a_crew_outlives_the_thread_that_made_it(stage: Scene) -> None:
    then = """
crews = []
thread = threading.Thread(target=lambda: crews.append(ready(WorkerPool(2, work))))
thread.start()
thread.join()
print(crews[0].wait(0.5), flush=True)
"""
    main = stage.start(_program(then))
    assert line(main) == "[]"
    assert main.wait(PATIENCE_S) == 0
    assert stage.left_after() == {}


def test_a_daemon_thread_in_wait_does_not_hold_up_the_end(stage: Scene) -> None:
    then = (
        START
        + """
threading.Thread(target=pool.wait, daemon=True).start()
"""
    )
    main = stage.start(_program(then))
    main.wait(PATIENCE_S)
    assert stage.left_after() == {}


SHIPPED = """
import os, sys
from shardio._workers.processes.worker_pool import WorkerPool
def work(channel): channel.send(repr(sys.flags).encode())
with WorkerPool(1, work) as pool:
    print(pool.wait()[0].data.decode() == repr(sys.flags), flush=True)
"""


@pytest.mark.parametrize("flag", ["-I", "-Werror", "-X dev", "-O"])
def test_interpreter_flags_are_followed(stage: Scene, flag: str) -> None:
    root = Path(__file__).parents[2]
    text = f"import sys; sys.path.insert(0, {str(root)!r})\n{SHIPPED}"
    main = stage.start([*flag.split(), "-c", text])
    assert line(main) == "True"
