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

ENDS = {
    "Ctrl-C while the zygote starts reaches main alone": (
        """
try:
    pool = WorkerPool(1, work)
    os.killpg(0, signal.SIGINT)
except KeyboardInterrupt: ready(pool); print('up', flush=True)
""",
        ["up"],
    ),
    "a fork that ends takes no worker along": (
        """
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
""",
        ["ClosedError True", "still here"],
    ),
    "a fork of main can have a pool of its own": (
        START
        + """
if not os.fork():
    ready(WorkerPool(1, work)).close()
    print('closed', flush=True)
    os._exit(0)
os.wait()
ready(WorkerPool(1, work))
""",
        ["closed"],
    ),
    "a pool outlives the thread that made it": (
        """
pools = []
thread = threading.Thread(target=lambda: pools.append(ready(WorkerPool(2, work))))
thread.start()
thread.join()
print(pools[0].wait(0.5), flush=True)
""",
        ["[]"],
    ),
    "a daemon thread in wait does not hold up the end": (
        START + "threading.Thread(target=pool.wait, daemon=True).start()",
        [],
    ),
}
"""Programs, and the lines that they print."""


@pytest.mark.parametrize("what", ENDS)
def test_a_program_ends_in_order(stage: Scene, what: str) -> None:
    then, expected = ENDS[what]
    main = stage.start(["-c", PROGRAM.format(busy=BUSY["asleep"], then=then)])
    assert [line(main) for _ in expected] == expected
    assert main.wait(PATIENCE_S) == 0
    assert stage.left_after() == {}


@pytest.mark.parametrize("busy", BUSY)
def test_close_works_while_a_fork_of_main_holds_every_socket(stage: Scene, busy: str) -> None:
    then = """
fork_pid = os.fork()
if not fork_pid:
    time.sleep(1000)
pool.close()
print(fork_pid, flush=True)
time.sleep(1000)
"""
    main = stage.start(["-c", PROGRAM.format(busy=BUSY[busy], then=START + then)])
    fork_pid = int(line(main))
    assert stage.left_after(but={main.pid, fork_pid}) == {}


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
