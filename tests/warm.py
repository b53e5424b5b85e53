"""Python programs that start with modules loaded: each is a fork of a process that has them.

A test that runs many programs spends most of its time on the same imports. `serving` starts such a
process; `command_line` is executed in place of `python`: a client that passes its arguments,
folder, environment and streams, waits, and exits as the program did. A program comes from standard
input (`-`), the command line (`-c`), a module (`-m`) or a file, and is `__main__` in a namespace of
its own.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import types
from collections.abc import Iterator
from pathlib import Path

_ROOT = Path(__file__).resolve().parent.parent
# Threads do not come along into a fork, and newer Pythons warn of them.
_ONE_THREAD = {"OPENBLAS_NUM_THREADS": "1"}

# Started hundreds of times, so that it imports next to nothing.
_CLIENT = """
import json, os, signal, socket, sys
with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as server:
    server.connect(sys.argv[1])
    request = [sys.argv[2:], os.getcwd(), dict(os.environ)]
    socket.send_fds(server, [json.dumps(request).encode()], [0, 1, 2])
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    code = int(server.recv(16))
if code < 0:
    signal.signal(-code, signal.SIG_DFL)
    os.kill(os.getpid(), -code)
os._exit(code)
"""


@contextlib.contextmanager
def serving(path: Path, modules: list[str], environment: dict[str, str]) -> Iterator[None]:
    """Start a process that imports `modules` in `environment` and serves at the socket `path`."""
    server = subprocess.Popen(
        [sys.executable, "-c", "from tests.warm import serve; serve()", str(path), *modules],
        cwd=_ROOT,
        env={**environment, **_ONE_THREAD},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    with server:
        assert server.stdout is not None and server.stdout.readline() == b"ready\n"
        yield
        server.communicate()  # its standard input ends, and so does it


def command_line(path: Path) -> list[str]:
    """Return the command of the client of the server at `path`; a program's arguments follow it."""
    return [sys.executable, "-I", "-S", "-c", _CLIENT, str(path)]


def serve() -> None:
    """Serve until standard input ends; in a fork this returns when the program is over."""
    path, *modules = sys.argv[1:]
    for name in modules:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(path)
        listener.listen(16)
        print("ready", flush=True)
        while True:
            ready, _, _ = select.select([0, listener.fileno()], [], [])
            if 0 in ready:
                return
            client, _ = listener.accept()
            if os.fork() == 0:
                break
            client.close()
            with contextlib.suppress(ChildProcessError):
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass
    request, fds, _, _ = socket.recv_fds(client, 1 << 20, 3)
    program = os.fork()
    if program:
        _, status = os.waitpid(program, 0)
        client.send(b"%d" % os.waitstatus_to_exitcode(status))
        os._exit(0)
    client.close()
    for number, fd in enumerate(fds):
        os.dup2(fd, number)
        os.close(fd)
    _run(*json.loads(request))


def _run(arguments: list[str], folder: str, environment: dict[str, str]) -> None:
    """Run the program to its end: an exception ends this process."""
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # Ours were opened on other files, of which they remember whether one seeks in them.
    sys.stdin = sys.__stdin__ = open(0, closefd=False)  # type: ignore[misc]
    sys.stdout = sys.__stdout__ = open(1, "w", closefd=False)  # type: ignore[misc]
    sys.stderr = sys.__stderr__ = open(  # type: ignore[misc]
        2, "w", closefd=False, errors="backslashreplace", buffering=1
    )
    kind, *rest = arguments
    sys.argv = rest if kind == "-m" else arguments
    if kind == "-m":
        sys.path[0] = folder
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
        return
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    if kind == "-":
        sys.path[0], name, code = "", "<stdin>", sys.stdin.read()
    elif kind == "-c":
        sys.path[0], name, code, sys.argv = "", "<string>", rest[0], ["-c", *rest[1:]]
    else:
        sys.path[0], name, code = str(Path(kind).resolve().parent), kind, Path(kind).read_text()
        main.__file__ = kind
    exec(compile(code, name, "exec", dont_inherit=True), vars(main))
