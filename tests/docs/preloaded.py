"""A Python whose programs run in forks of one process that has imported what they need.

A new interpreter spends most of its time on imports. `preloaded` starts a server, which imports
shardio, its commands and other packages, and writes a client, the program `python`. The client has
the server run `-c`, `-m`, `-` or a file in a fork, with the arguments, environment, working folder
and standard streams of the client. The first zygote of a program is a fork of the server, too.
"""

from __future__ import annotations

import argparse
import atexit
import fcntl
import gc
import json
import marshal
import os
import runpy
import select
import shlex
import socket
import subprocess
import sys
import threading
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import NamedTuple, NoReturn

# Modules that the server imports: those of shardio, those that shardio and its commands import, and
# those that tinygrad imports for its first computation.
PRELOAD = """
PIL.Image argparse asyncio av av.audio.codeccontext av.subtitles.stream av.video.codeccontext
cloudpickle concurrent.futures.thread csv hmac importlib.metadata multiprocessing.pool
multiprocessing.queues multiprocessing.spawn multiprocessing.synchronize numpy numpy.ma numpy.random
numpy.typing pandas pyarrow.parquet pydoc queue resource rich rich.cells secrets
shardio._workers.processes.zygote shardio.conversion.api shardio.loader shardio.measuring.stored
shardio.outputs.tinygrad shardio.transforms shardio_tools.cli shardio_tools.convert
shardio_tools.convert_report shardio_tools.inspect.command shardio_tools.inspect.pictures
shardio_tools.stats simplejpeg ssl tarfile tinygrad tinygrad.mixin.gradient tinygrad.renderer.cstyle
tinygrad.renderer.isa.x86 tinygrad.renderer.llvmir tinygrad.renderer.nir
tinygrad.runtime.autogen.libc tinygrad.runtime.ops_python tinygrad.runtime.support.compiler_cpu
tinygrad.runtime.support.elf tinygrad.runtime.support.hcq tinygrad.uop.upat typing_extensions
unicodedata xxhash zstandard
""".split()
REQUEST_BYTES = 1 << 17
ONE_THREAD = {
    "JE_ARROW_MALLOC_CONF": "background_thread:false",
    "OPENBLAS_NUM_THREADS": "1",
}
"""The variables that keep packages from starting threads, which forks would lack."""

# The client sends its standard streams, and exits as the fork does. It imports only built-in and
# compiled modules, because each program starts it.
CLIENT = """
import _socket, array, marshal, posix, sys
server = _socket.socket(_socket.AF_UNIX, _socket.SOCK_SEQPACKET)
server.connect(sys.argv[1])
request = marshal.dumps((sys.argv[2:], posix.getcwd(), posix.environ))
streams = (_socket.SOL_SOCKET, _socket.SCM_RIGHTS, array.array("i", [0, 1, 2]))
server.sendmsg([request], [streams])
code = int(server.recv(16))
sys.exit(code if code >= 0 else 128 - code)
"""


class _Request(NamedTuple):
    arguments: list[str]
    cwd: str
    environment: dict[bytes, bytes]


@contextmanager
def preloaded(environment: Mapping[str, str], programs: Path) -> Iterator[None]:
    """Start the server with an environment, write `python` into a folder, and stop the server."""
    address = programs / "preloaded.socket"
    client = programs / "client.py"
    client.write_text(CLIENT)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listening:
        listening.bind(str(address))
        listening.listen()
        process = subprocess.Popen(
            [sys.executable, __file__, str(listening.fileno())],
            env={**environment, **ONE_THREAD},
            stdin=subprocess.PIPE,
            pass_fds=[listening.fileno()],
        )
    with process:  # the server exits when its standard input is closed
        write_program(programs / "python", [sys.executable, "-IS", str(client), str(address)])
        yield


def write_program(path: Path, command: list[str]) -> None:
    path.write_text(f'#!/bin/sh\nexec {shlex.join(command)} "$@"\n')
    path.chmod(0o755)


def _wait_for_request(listening: socket.socket) -> _Request | None:
    """Fork for each request; return the request in the fork, and None in the server at its end."""
    poll = select.poll()
    poll.register(sys.stdin, 0)  # reports a hang-up when the server is to exit
    poll.register(listening, select.POLLIN)
    running: dict[int, tuple[int, socket.socket]] = {}  # pidfd: (pid, caller)
    while True:
        for fd, _ in poll.poll():
            if fd == listening.fileno():
                caller, _ = listening.accept()
                data, streams, _, _ = socket.recv_fds(caller, REQUEST_BYTES, 3)
                pid = os.fork()
                if pid == 0:
                    for number, stream in enumerate(streams):
                        os.dup2(stream, number)
                        os.close(stream)
                    for end in (listening, caller, *(each for _, each in running.values())):
                        end.close()
                    for other in running:
                        os.close(other)
                    return _Request(*marshal.loads(data))
                for stream in streams:
                    os.close(stream)
                pidfd = os.pidfd_open(pid)
                poll.register(pidfd, select.POLLIN)
                running[pidfd] = pid, caller
            elif fd in running:
                pid, caller = running.pop(fd)
                poll.unregister(fd)
                os.close(fd)
                with caller:
                    caller.send(b"%d" % os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
            else:
                return None


def _open_streams() -> None:
    """Reopen the standard streams, whose descriptors are now those of the client."""
    sys.stdin = open(0, closefd=False)
    sys.stdout = open(1, "w", closefd=False)
    sys.stderr = open(2, "w", 1, errors="backslashreplace", closefd=False)


def _run(request: _Request) -> None:
    """Run a program as `python` does."""
    _open_streams()
    os.chdir(request.cwd)
    os.environb.clear()
    os.environb.update(request.environment)
    _prepare_zygote()
    how, *rest = request.arguments
    if how == "-m":
        sys.argv, sys.path[0] = rest, request.cwd
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
        return
    if how == "-c":
        code, name, sys.path[0] = rest.pop(0), "<string>", ""
    elif how == "-":
        code, name, sys.path[0] = sys.stdin.read(), "<stdin>", ""
    else:
        code, name, sys.path[0] = Path(how).read_text("utf-8"), how, str(Path(how).parent)
    sys.argv = [how, *rest]
    sys.modules["__main__"] = main = ModuleType("__main__")
    if name == how:
        main.__file__ = name
    exec(compile(code, name, "exec"), main.__dict__)


def _prepare_zygote() -> None:
    """Fork the first zygote of this program now, while there is one thread; it waits for a use."""
    from shardio._workers.processes import zygote

    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    pid = os.fork()
    if pid == 0:
        ours.close()
        request, fds, _, _ = socket.recv_fds(theirs, REQUEST_BYTES, 2)
        if not request:  # the program has ended
            os._exit(0)
        sys.path[:], environment = json.loads(request)
        os.environ.clear()
        os.environ.update(environment)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        high = [fcntl.fcntl(fd, fcntl.F_DUPFD, 10) for fd in fds]
        zygote.serve(os.dup2(high[0], 3), os.dup2(high[1], 4), zygote.PRELOAD)
    theirs.close()
    own_fd, spawn = ours.detach(), zygote._spawn

    def use(control_fd: int, main_pidfd: int) -> int:
        zygote._spawn = spawn
        request = json.dumps([list(map(os.fspath, sys.path)), dict(os.environ)]).encode()
        with socket.socket(fileno=own_fd) as ours:
            socket.send_fds(ours, [request], [control_fd, main_pidfd])
        return pid

    # Patch a private function: no user needs an option for the program that a zygote runs.
    zygote._spawn = use


def _warm_device() -> None:
    """Compile tinygrad's rules for the CPU, on a device that no fork uses."""
    if os.environ.get("DEV") == "CPU":
        from tinygrad.runtime.ops_cpu import CPUDevice

        CPUDevice("CPU:9")


def _prepare_commands() -> None:
    """Import all converters, and read their options; limit the measurement after conversions."""
    from shardio.measuring import stored
    from shardio_tools import cli

    cli.COMMANDS["convert"].add_arguments(argparse.ArgumentParser())
    # The maximum number of random samples that are read to measure the speed; 200 take 0.5 s.
    stored._MAX_SAMPLES = 4  # type: ignore[misc]


def _exit_code(request: _Request) -> int:
    """Run a program; return its exit code."""
    try:
        _run(request)
    except SystemExit as end:
        if isinstance(end.code, int | None):
            return (end.code or 0) & 0xFF
        print(end.code, file=sys.stderr)
        return 1
    except Exception:  # noqa: BLE001  (as at the end of any program)
        traceback.print_exc()
        return 1
    return 0


def _end(code: int) -> NoReturn:
    """Exit as Python does, but free only the globals of the program.

    Freeing all modules would copy the memory that forks share, and take longer than a short
    program.
    """
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    if (names := vars(sys.modules["__main__"])) is not globals():
        names.clear()
    gc.collect()
    for stream in (sys.stdout, sys.stderr):
        if not stream.closed:
            stream.flush()
    os._exit(code)


def _main() -> None:
    for name in PRELOAD:
        __import__(name)
    _warm_device()
    _prepare_commands()
    n_threads = len(os.listdir("/proc/self/task"))
    assert n_threads == 1, f"{n_threads} threads: a fork would lack some"
    gc.collect()
    gc.freeze()  # otherwise, collections in forks would copy shared memory
    with socket.socket(fileno=int(sys.argv[1])) as listening:
        request = _wait_for_request(listening)
    if request is not None:
        _end(_exit_code(request))


if __name__ == "__main__":
    _main()
