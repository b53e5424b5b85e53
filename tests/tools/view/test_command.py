"""The command itself: its link, its end, its limits, and loaders from files."""

from __future__ import annotations

import contextlib
import http.client
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import webbrowser
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

import pytest

import shardio
from shardio_tools import cli
from shardio_tools.view.loader_file import load_named
from shardio_tools.view.marks import Marks
from shardio_tools.view.server import ViewServer

ROOT = Path(__file__).resolve().parents[3]
PATIENCE_S = 60.0
Capture = pytest.CaptureFixture[str]


@contextlib.contextmanager
def command(*arguments: str, n_files: int | None = None) -> Iterator[tuple[Any, str]]:
    """Run `shardio view` in a process, which may open `n_files`; return it and its link."""
    words = [sys.executable, "-m", "shardio", "view", *arguments, "--no-open"]
    if n_files is not None:
        words = ["/bin/sh", "-c", f'ulimit -n {n_files} && exec "$@"', "sh", *words]
    process = subprocess.Popen(
        words, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    try:
        yield process, process.stdout.readline().strip()
    finally:
        process.kill()
        process.communicate()


class Browser:
    """A client of a link, with the cookie that the link has set."""

    def __init__(self, link: str) -> None:
        parts = urlsplit(link)
        assert parts.hostname is not None and parts.port is not None
        self.address = parts.hostname, parts.port
        answer, _ = self.get(f"{parts.path}?{parts.query}")
        self.cookie = answer.headers["set-cookie"].partition(";")[0]

    cookie = ""

    def get(self, path: str) -> tuple[http.client.HTTPResponse, bytes]:
        connection = http.client.HTTPConnection(*self.address, timeout=PATIENCE_S)
        connection.request("GET", path, headers={"Cookie": self.cookie})
        answer = connection.getresponse()
        content = answer.read()
        connection.close()
        return answer, content


def children_of(pid: int) -> set[int]:
    """Return the processes that a process has started, and those that they have started."""
    parents = {int(each.name): parent_of(int(each.name)) for each in Path("/proc").glob("[0-9]*")}
    found = {pid}
    while more := {child for child, parent in parents.items() if parent in found} - found:
        found |= more
    return found - {pid}


def parent_of(pid: int) -> int | None:
    """Return the parent of a process; None if the process has ended."""
    try:
        state, parent = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[:2]
    except OSError:
        return None
    return None if state == "Z" else int(parent)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_it_prints_its_link_serves_and_ends_well_on_a_signal(folder: Path, number: int) -> None:
    with command(str(folder)) as (process, link):
        assert link.startswith("http://127.0.0.1:") and len(link.partition("token=")[2]) >= 40
        browser = Browser(link)
        answer, content = browser.get("/api/dataset")
        assert answer.status == 200 and str(folder).encode() in content
        held = socket.create_connection(browser.address)  # an idle connection does not delay it
        process.send_signal(number)
        out, err = process.communicate(timeout=PATIENCE_S)
        held.close()
        assert (process.returncode, out, err) == (0, "", "")


_HANGING = """
import pathlib, threading
from shardio_tools.view.thumbnails import Thumbnails
def hang(*_):
    pathlib.Path({began!r}).touch()
    threading.Event().wait()
if {path!r}.startswith("/thumbnail"):
    Thumbnails.get = hang
loader = {{"transform": hang, "num_workers": {n_workers}}}
"""


@contextlib.contextmanager
def hanging(
    folder: Path, tmp_path: Path, path: str, n_workers: int = 0
) -> Iterator[tuple[Any, Browser]]:
    """Run the command with 8 requests that never end, and yield it once one has begun."""
    began = tmp_path / "began"
    text = _HANGING.format(began=str(began), path=path, n_workers=n_workers)
    loader = f"{written(tmp_path, text)}:loader"
    with contextlib.ExitStack() as stack:
        process, link = stack.enter_context(command(str(folder), "--loader", loader))
        browser = Browser(link)
        for _ in range(8):
            held = stack.enter_context(socket.create_connection(browser.address))
            request = f"GET {path} HTTP/1.1\r\nHost: localhost\r\nCookie: {browser.cookie}\r\n\r\n"
            held.sendall(request.encode())
        while not began.exists():
            time.sleep(0.01)
        yield process, browser


@pytest.mark.slow
def test_a_transform_that_never_returns_does_not_hold_up_the_page(
    folder: Path, tmp_path: Path
) -> None:
    with hanging(folder, tmp_path, "/api/epoch") as (_, browser):
        for path in ("/api/sample/0", "/api/rows", "/thumbnail/0/frames"):
            assert browser.get(path)[0].status == 200
        answer, content = browser.get("/api/epoch")
        assert answer.status == 503 and b"still works on another batch" in content


@pytest.mark.parametrize(
    ("path", "n_workers"), [("/api/epoch", 0), ("/api/epoch", 2), ("/thumbnail/0/frames", 0)]
)
def test_signals_end_it_with_all_its_processes_though_a_request_never_ends(
    folder: Path, tmp_path: Path, path: str, n_workers: int
) -> None:
    with hanging(folder, tmp_path, path, n_workers) as (process, _):
        children = children_of(process.pid)
        assert bool(children) is bool(n_workers)
        number = signal.SIGINT
        while process.poll() is None:  # also an impatient user sees no traceback
            process.send_signal(number)
            number = signal.SIGTERM
            time.sleep(0.05)
        out, err = process.communicate(timeout=PATIENCE_S)
        assert (process.returncode, out, err) == (0, "", "")
        while any(parent_of(child) is not None for child in children):
            time.sleep(0.01)


def test_a_thousand_idle_connections_do_no_harm(folder: Path) -> None:
    with command(str(folder), n_files=256) as (process, link):
        browser, idle = Browser(link), []
        try:
            for i in range(1000):
                each = socket.create_connection(browser.address, timeout=PATIENCE_S)
                if i % 2:
                    each.sendall(b"GET /api/dataset HTTP/1.1\r\nHost: ")
                idle.append(each)
            for _ in range(3):
                assert browser.get("/api/rows")[0].status == 200
        finally:
            for each in idle:
                each.close()
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=PATIENCE_S)
        assert (process.returncode, err) == (0, "")


def test_the_browser_gets_a_file_that_only_this_user_reads(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    opened: list[str] = []
    seen: list[tuple[str, int]] = []

    def serve(server: ViewServer, app: Any) -> None:
        server.socket.close()
        (page,) = tmp_path.iterdir()
        seen.append((page.read_text(), page.stat().st_mode & 0o777))

    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(webbrowser, "open", opened.append)
    monkeypatch.setattr(ViewServer, "run", serve)
    assert cli.main(["view", str(folder)]) == 0
    link = capsys.readouterr().out.strip()
    assert f"url={link}" in seen[0][0] and seen[0][1] == 0o600
    assert not [*tmp_path.iterdir()] and all("token" not in each for each in opened)


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
def test_a_link_to_all_addresses_names_the_machine(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture, host: str
) -> None:
    monkeypatch.setattr(ViewServer, "run", lambda server, app: server.socket.close())
    assert cli.main(["view", str(folder), "--host", host, "--no-open"]) == 0
    assert capsys.readouterr().out.startswith(f"http://{socket.gethostname()}:")


@pytest.mark.parametrize("begin", [b"GET / HTTP/1.1\r\nHost: ", b"G"])
def test_a_second_request_that_does_not_arrive_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch, begin: bytes
) -> None:
    monkeypatch.setattr("shardio_tools.view.server._IDLE_S", 0.2)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        headers = [(b"content-length", b"2")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": b"ok"})

    server = ViewServer("127.0.0.1", 0)
    thread = threading.Thread(target=server.run, args=(app,))
    thread.start()
    try:
        with socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE_S) as held:
            held.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" + begin)
            received = b""
            while part := held.recv(4096):
                received += part
        assert received.endswith(b"ok")
    finally:
        server.stop()
        thread.join()


def test_links_of_two_viewers_differ(folder: Path) -> None:
    with command(str(folder)) as (_, one), command(str(folder)) as (_, other):
        assert one.partition("token=")[2] != other.partition("token=")[2]
        browser = Browser(one)
        browser.address = Browser(other).address
        assert browser.get("/api/dataset")[0].status == 403


def test_a_port_that_is_taken_is_refused(folder: Path, capsys: Capture) -> None:
    with contextlib.closing(ViewServer("127.0.0.1", 0).socket) as taken:
        port = taken.getsockname()[1]
        assert cli.main(["view", str(folder), "--port", str(port)]) == cli.USAGE
    said = f"shardio: cannot listen at 127.0.0.1:{port}: Address already in use; --port 0 takes"
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nowhere"], "nowhere: there is no such folder"),
        (
            ["nowhere", "--export", "s3://b/x"],
            "--export s3://b/x: a site is written to a local fol",
        ),
        (["SET", "--port", "65536"], "--port must be from 0 to 65535; found 65536"),
        (["SET", "--host", "no such host"], "--host: 'no such host' is not an address"),
        (["SET", "--samples", "0"], "--samples must be 1 or more"),
        (["SET", "--loader", "train.py"], "--loader must be FILE.py:NAME; found 'train.py'"),
        (["SET", "--loader", "nowhere.py:x"], "nowhere.py: there is no such file"),
    ],
)
def test_what_cannot_be_shown_is_one_line_that_says_why(
    folder: Path, capsys: Capture, arguments: list[str], said: str
) -> None:
    given = [str(folder) if each == "SET" else each for each in arguments]
    assert cli.main(["view", *given, "--no-open"]) == cli.USAGE
    (line,) = capsys.readouterr().err.splitlines()
    assert said in line


@pytest.mark.parametrize(
    ("flag", "may_write", "said"),
    [
        (os.ST_RDONLY, True, "its file system is read-only"),
        (0, False, "this user has no permission to write to its folder"),
    ],
)
def test_writable_says_at_once_why_a_folder_cannot_be_written(
    folder: Path,
    capsys: Capture,
    monkeypatch: pytest.MonkeyPatch,
    flag: int,
    may_write: object,
    said: str,
) -> None:
    system = SimpleNamespace(
        statvfs=lambda path: SimpleNamespace(f_flag=flag),
        access=lambda path, mode: may_write or not path.endswith("generations"),
        **{name: getattr(os, name) for name in ("ST_RDONLY", "W_OK", "X_OK")},
    )
    monkeypatch.setattr("shardio_tools.view.marks.os", system)
    monkeypatch.setattr(ViewServer, "run", lambda server, app: server.socket.close())
    assert cli.main(["view", str(folder), "--writable", "--no-open"]) == cli.USAGE
    said = f"shardio: --writable: cannot save subsets in {folder}: {said}\n"
    assert capsys.readouterr() == ("", said)
    assert cli.main(["view", str(folder), "--no-open"]) == 0


def test_writable_is_refused_for_an_object_store() -> None:
    source: Any = SimpleNamespace(path="s3://bucket/set", is_remote=True)
    with pytest.raises(shardio.InvalidArgument, match="object store: add the subset to a local"):
        Marks(source, is_writable=True).check_writable()


def test_the_extra_is_named_if_it_is_missing(
    folder: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    assert cli.main(["view", str(folder)]) == cli.ENVIRONMENT
    assert "pip install '.[view]'" in capsys.readouterr().err


def test_other_machines_are_served_only_on_demand_and_with_a_warning(folder: Path) -> None:
    with command(str(folder), "--host", "0.0.0.0") as (process, link):
        assert link.startswith(f"http://{socket.gethostname()}:")
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=PATIENCE_S)
        assert err.startswith("shardio: warning: other machines can reach 0.0.0.0, and the conn")


def written(folder: Path, text: str, name: str = "my_loader.py") -> str:
    (folder / name).write_text(text)
    return str(folder / name)


@pytest.fixture(autouse=True)
def clean_imports(monkeypatch: pytest.MonkeyPatch) -> None:
    """Undo what executing a file changes in this process."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "my_loader", raising=False)
    monkeypatch.setattr(sys, "modules", sys.modules)


def test_a_loader_file_is_executed_with_its_neighbours(tmp_path: Path) -> None:
    written(tmp_path, "SIZE = 3", "beside_it.py")
    path = written(tmp_path, "from beside_it import SIZE\noptions = {'batch_size': SIZE}")
    assert load_named(f"{path}:options") == {"batch_size": 3}
    del sys.modules["beside_it"], sys.modules["my_loader"]


def test_a_loader_file_that_parses_arguments_finds_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", given := ["shardio", "view", "out", "--port", "80"])
    path = written(tmp_path, "import sys\nfound = sys.argv")
    assert load_named(f"{path}:found") == [path]
    path = written(tmp_path, "import sys\ndef make(): return sys.argv", "beside_it.py")
    make = load_named(f"{path}:make")
    assert (make(), make()) == ([path], [path])
    with pytest.raises(shardio.InvalidArgument, match="line 1 raised ZeroDivisionError"):
        load_named(f"{written(tmp_path, '1 / 0', 'broken.py')}:found")
    assert sys.argv is given


def test_a_file_with_the_name_of_a_module_does_not_replace_it(tmp_path: Path) -> None:
    path = written(tmp_path, "x = 5", "json.py")
    assert load_named(f"{path}:x") == 5
    import json

    assert json.loads("1") == 1 and json.__file__ != path


@pytest.mark.parametrize(
    ("text", "name", "said"),
    [
        ("x = 1", "y", "has no 'y'"),
        ("loader = 1", "loadr", "has no 'loadr'; did you mean loader?"),
        ("a = 1\nraise KeyError('b')", "a", "line 2 raised KeyError: 'b'"),
        ("a = = 1", "a", "raised SyntaxError"),
        ("a = 1\nraise SystemExit(3)", "a", "line 2 raised SystemExit: 3"),
        ("a = None", "a", "my_loader.py is None"),
    ],
)
def test_a_loader_file_that_fails_is_named_with_its_line(
    tmp_path: Path, text: str, name: str, said: str
) -> None:
    with pytest.raises(shardio.InvalidArgument, match=r"^--loader: ") as caught:
        load_named(f"{written(tmp_path, text)}:{name}")
    assert said in str(caught.value)
    assert "my_loader" not in sys.modules or "raised" not in said


def test_no_file_is_executed_unless_it_is_named(folder: Path, tmp_path: Path) -> None:
    written(folder.parent, f"open({str(tmp_path / 'ran')!r}, 'w')", "sitecustomize_not.py")
    with command(str(folder)) as (_, link):
        browser = Browser(link)
        for path in ("/api/epoch?loader=sitecustomize_not.py:x", "/api/dataset?loader=x.py:y"):
            browser.get(path)
    assert not os.path.exists(tmp_path / "ran")
