"""A program with workers leaves no process behind, however it ends."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.faults.scene import PATIENCE_S, Scene, line, scene

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
STAY = START + "print('ready', flush=True)\ntime.sleep(1000)"


@pytest.fixture
def stage() -> Iterator[Scene]:
    with scene() as made:
        yield made


def _program(then: str, busy: str = "asleep") -> list[str]:
    return ["-c", PROGRAM.format(busy=BUSY[busy], then=then)]


@pytest.mark.parametrize("busy", BUSY)
@pytest.mark.parametrize(
    ("then", "exit_code"),
    [
        pytest.param("pool.close(); pool.close()", 0, id="close, twice"),
        pytest.param("pass", 0, id="end of the program"),
        pytest.param("del pool; print('gone', len(launch._released))", 0, id="garbage collection"),
        pytest.param("raise ValueError('oops')", 1, id="exception"),
        pytest.param("sys.exit(3)", 3, id="sys.exit"),
        pytest.param("os._exit(4)", 4, id="os._exit"),
        pytest.param("os.abort()", -signal.SIGABRT, id="abort"),
        pytest.param("os.execv('/bin/true', ['true'])", 0, id="exec of another program"),
    ],
)
def test_no_process_is_left_when_main_ends_by_itself(
    stage: Scene, then: str, exit_code: int, busy: str
) -> None:
    main = stage.start(_program(START + then, busy))
    assert main.wait(PATIENCE_S) == exit_code
    assert stage.left_after() == {}


@pytest.mark.parametrize("busy", BUSY)
@pytest.mark.parametrize("send", [os.kill, os.killpg], ids=["main", "group"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL, signal.SIGHUP])
def test_no_process_is_left_after_a_signal(
    stage: Scene, number: signal.Signals, send: Callable[[int, int], None], busy: str
) -> None:
    main = stage.start(_program(STAY, busy))
    assert line(main) == "ready"
    stage.wait_for_processes(4)
    send(main.pid, number)
    assert main.wait(PATIENCE_S) != 0
    assert stage.left_after() == {}


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
def test_workers_die_with_the_zygote_and_main_hears_of_each(stage: Scene, busy: str) -> None:
    then = """
pool = ready(WorkerPool(3, work))
os.kill(launch._current.pid, signal.SIGKILL)
deaths = []
while len(deaths) < 3:
    deaths += [event for event in pool.wait() if isinstance(event, WorkerExit)]
print(sorted((death.worker, death.signal) for death in deaths), flush=True)
time.sleep(1000)
"""
    main = stage.start(_program(then, busy))
    assert line(main) == "[(0, 9), (1, 9), (2, 9)]"
    assert stage.left_after(but={main.pid}) == {}


@pytest.mark.parametrize("busy", BUSY)
def test_a_fork_of_main_keeps_no_worker_alive(stage: Scene, busy: str) -> None:
    then = (
        START
        + """
fork_pid = os.fork()
if fork_pid:
    print(fork_pid, flush=True)
time.sleep(1000)
"""
    )
    main = stage.start(_program(then, busy))
    fork_pid = int(line(main))
    main.kill()
    assert stage.left_after(but={fork_pid}) == {}
    assert fork_pid in stage.processes()


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
    while (message := channel.recv()) is not None:
        channel.send(message)

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


def test_no_name_in_dev_shm_is_used(stage: Scene) -> None:
    main = stage.start(_program(STAY))
    assert line(main) == "ready"
    stage.wait_for_processes(4)
    assert stage.files_in_dev_shm() == []


SHIPPED = """
from shardio._workers.processes.worker_pool import WorkerPool, Message
offset = 40
{define}
pool = WorkerPool(2, {name})
answers = set()
while len(answers) < 2:
    answers.update(e.data.decode() for e in pool.wait() if isinstance(e, Message))
print(sorted(answers), flush=True)
"""

TARGETS = {
    "lambda": ("", "lambda channel: channel.send(b'%d' % (offset + channel.index))"),
    "function": (
        "def work(channel): channel.send(b'%d' % (offset + channel.index))",
        "work",
    ),
    "closure": (
        "def make(n):\n    def work(channel): channel.send(b'%d' % (n + channel.index))\n"
        "    return work",
        "make(40)",
    ),
    "callable object": (
        "class Work:\n    def __call__(self, channel):\n"
        "        channel.send(b'%d' % (offset + channel.index))",
        "Work()",
    ),
    "module beside the script": ("import beside", "beside.work"),
}


@pytest.mark.parametrize("how", ["file", "standard input"])
@pytest.mark.parametrize("target", TARGETS)
def test_the_function_arrives_from_a_script_without_import_guard(
    stage: Scene, tmp_path: Path, target: str, how: str
) -> None:
    define, name = TARGETS[target]
    text = SHIPPED.format(define=define, name=name)
    (tmp_path / "beside.py").write_text(
        "def work(channel): channel.send(b'%d' % (40 + channel.index))\n"
    )
    (tmp_path / "script.py").write_text(text)
    if how == "file":
        main = stage.start(["script.py"], cwd=tmp_path)
    else:
        main = stage.start(["-"], stdin=text.encode(), cwd=tmp_path)
    assert line(main) == "['40', '41']"
    assert main.wait(PATIENCE_S) == 0
    assert stage.left_after() == {}


def test_the_scripts_own_code_runs_once_whatever_the_number_of_workers(
    stage: Scene, tmp_path: Path
) -> None:
    text = "print('once', flush=True)\n" + SHIPPED.format(define="", name=TARGETS["lambda"][1])
    (tmp_path / "script.py").write_text(text)
    main = stage.start(["script.py"], cwd=tmp_path)
    output, _ = main.communicate(timeout=PATIENCE_S)
    assert output.decode().split("\n") == ["once", "['40', '41']", ""]


@pytest.mark.parametrize("flag", ["-I", "-Werror", "-X dev", "-O"])
def test_interpreter_flags_are_followed(stage: Scene, flag: str) -> None:
    root = Path(__file__).parents[2]
    text = f"import sys; sys.path.insert(0, {str(root)!r})\n"
    text += "import os, sys\n" + SHIPPED.format(
        define="def work(channel): channel.send(repr(sys.flags).encode())", name="work"
    ).replace("print(sorted(answers)", "print(answers == {repr(sys.flags)}").replace(
        "len(answers) < 2", "len(answers) < 1"
    )
    main = stage.start([*flag.split(), "-c", text])
    assert line(main) == "True"
