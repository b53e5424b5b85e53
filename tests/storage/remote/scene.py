"""A server that speaks S3, and before it a proxy that counts, and does what networks do."""

from __future__ import annotations

import http.client
import http.server
import json
import os
import re
import socket
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import shardio
from shardio.dataset.manifest import load
from shardio.shard.writer import ShardSummary
from shardio.storage.remote.cache import ShardCache
from shardio.storage.remote.object_store import ObjectStore
from tests.faults.scene import MARK
from tests.faults.stem import Stem, stem

BUCKET = "bucket"
OPTIONS = {
    "aws_access_key_id": "AKIDEXAMPLE",
    "aws_secret_access_key": "a secret of sixteen",
    "aws_region": "us-east-1",
    "deadline_s": 10,
}
_SIGNED = "AWS4-HMAC-SHA256 Credential=AKIDEXAMPLE/20260101/us-east-1/s3/aws4_request, Signature=0"
_SERVER = """
import sys
from moto.server import ThreadedMotoServer
server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
server.start()
print(server.get_host_and_port()[1], flush=True)
sys.stdin.read()
"""


_DECIDING = ("range", "if-match", "if-none-match", "if-modified-since", "if-unmodified-since")
"""The headers, in lower case, on which the answer to a read depends."""

Answer = tuple[int, list[tuple[str, str]], bytes]

FAULT_KINDS = ("error", "denied", "cut", "stall", "wrong", "hold", "weak")


@dataclass
class Fault:
    """A fault of the next `times` requests of some objects."""

    kind: str
    """One of `FAULT_KINDS`; weak: a tag that is for caches."""
    pattern: str = r"\.shard"
    times: int = 1
    method: str = "GET"
    met: threading.Event = field(default_factory=threading.Event)
    go_on: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        if self.kind not in FAULT_KINDS:
            raise ValueError(f"there is no fault {self.kind!r}: {', '.join(FAULT_KINDS)}")


class Proxy(http.server.ThreadingHTTPServer):
    """Forwards to the server, on loopback; counts requests and bytes of bodies by object.

    The server takes 8 ms of CPU time for a request: answers are kept until the next write.
    """

    daemon_threads = True

    def __init__(self, port: int) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.server_port_behind = port
        self.faults: list[Fault] = []
        self.requests: Counter[str] = Counter()
        self.n_bytes: Counter[str] = Counter()
        self.is_down = False
        self.mutex = threading.Lock()
        self._answers: dict[tuple[Any, ...], Answer] = {}
        self._n_writes = 0

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing: clients that go away are a part of tests."""

    def take_fault(self, method: str, path: str) -> Fault | None:
        with self.mutex:
            for fault in self.faults:
                if fault.times and fault.method == method and re.search(fault.pattern, path):
                    fault.times -= 1
                    return fault
        return None

    def forward(self, method: str, path: str, body: bytes, headers: dict[str, str]) -> Answer:
        """Return the server's answer to a request."""
        is_read = method in ("GET", "HEAD")
        with self.mutex:
            self._n_writes += not is_read
            key = (self._n_writes, method, path, *map(headers.get, _DECIDING))
            found = self._answers.get(key)
        if found is None:
            behind = http.client.HTTPConnection("127.0.0.1", self.server_port_behind)
            behind.request(method, path, body or None, headers)
            answer = behind.getresponse()
            found = answer.status, answer.headers.items(), answer.read()
            behind.close()
            with self.mutex:
                if is_read:
                    self._answers[key] = found
                else:
                    self._n_writes += 1  # what was read meanwhile may be old, too
                    self._answers.clear()
        return found

    def count(self, path: str, n_bytes: int) -> None:
        with self.mutex:
            self.requests[path.rpartition("/")[2]] += 1
            self.n_bytes[path.rpartition("/")[2]] += n_bytes

    def forget(self) -> None:
        self.faults, self.is_down = [], False
        self.requests.clear()
        self.n_bytes.clear()


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Proxy

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def _serve(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        path = self.path.partition("?")[0]
        fault = self.server.take_fault(self.command, path)
        kind = fault.kind if fault is not None else ""
        if self.server.is_down:
            self._cut()
        elif kind == "error":
            self._answer(500, b"<Error><Code>InternalError</Code><Message>no</Message></Error>")
        elif kind == "denied":
            text = b"<Error><Code>ExpiredToken</Code><Message>The token has expired.</Message>"
            self._answer(400, text + b"<AWSAccessKeyId>AKIDEXAMPLE</AWSAccessKeyId></Error>")
        else:
            self._forward(path, body, fault)

    do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = _serve

    def _forward(self, path: str, body: bytes, fault: Fault | None) -> None:
        headers = {k.lower(): v for k, v in self.headers.items() if k.lower() != "connection"}
        headers.setdefault("authorization", _SIGNED)  # what comes as from a browser may read
        status, given, data = self.server.forward(self.command, self.path, body, headers)
        n_bytes = int(dict(given).get("Content-Length") or len(data))
        self.send_response(status)
        for name, value in given:
            if name.lower() not in ("connection", "content-length", "transfer-encoding"):
                is_weak = fault is not None and fault.kind == "weak" and name.lower() == "etag"
                self.send_header(name, f"W/{value}" if is_weak else value)
        self.send_header("Content-Length", str(n_bytes))
        self.end_headers()
        self.server.count(path, len(data))
        if fault is not None:
            data = self._spoil(fault, data)
        self.wfile.write(data)
        self.wfile.flush()

    def _spoil(self, fault: Fault, data: bytes) -> bytes:
        """Return the spoiled body, after its delay."""
        half = len(data) // 2
        if fault.kind == "wrong":
            return data[:half] + bytes([data[half] ^ 1]) + data[half + 1 :]
        self.wfile.write(data[:half])
        self.wfile.flush()
        fault.met.set()
        if fault.kind in ("stall", "hold"):
            fault.go_on.wait(60)
        if fault.kind in ("cut", "stall"):
            self._cut()
            return b""
        return data[half:]

    def _answer(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _cut(self) -> None:
        self.close_connection = True
        self.connection.shutdown(socket.SHUT_RDWR)


@dataclass
class Scene:
    """A bucket: what is put into it, and what the proxy before it does."""

    proxy: Proxy
    ends: ExitStack
    """The contexts that are left when the server stops."""

    @cached_property
    def stem(self) -> Stem:
        """A process that has imported all that programs need, and forks for each."""
        return self.ends.enter_context(
            stem(MARK, "obstore.store", "shardio.storage.remote.storage")
        )

    @contextmanager
    def program(self, code: str, argument: Any) -> Iterator[subprocess.Popen[str]]:
        """Run a program, whose argument is the JSON of a value, until the end of the `with`."""
        env = {**os.environ, MARK: "0" * 32}
        setup = f"import sys; sys.argv.append({json.dumps(argument)!r})\n"
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": 2}
        command = [sys.executable, "-c", setup + code]
        started: Any = self.stem.popen(command, **pipes, text=True, env=env)
        with started as process:
            try:
                yield process
            finally:
                process.kill()

    @property
    def options(self) -> dict[str, Any]:
        """The storage options that lead through the proxy."""
        endpoint = f"http://127.0.0.1:{self.proxy.server_port}"
        client = {"timeout": "5s"}
        return {**OPTIONS, "aws_endpoint": endpoint, "client_options": client}

    def url(self, name: str) -> str:
        return f"s3://{BUCKET}/{name}"

    def fail(self, kind: str, pattern: str = r"\.shard", **more: Any) -> Fault:
        """Add a fault of the proxy, and return it."""
        self.proxy.faults.append(fault := Fault(kind, pattern, **more))
        return fault

    def put(self, name: str, data: bytes) -> None:
        """Write an object past the proxy."""
        place = f"/{BUCKET}/{name}" if name else f"/{BUCKET}"
        if self.proxy.forward("PUT", place, data, {"authorization": _SIGNED})[0] != 200:
            raise AssertionError(f"the server does not take {name}")

    def put_dataset(self, folder: str | Path, name: str) -> str:
        """Write all files of a dataset past the proxy; returns its URL."""
        for path in sorted(Path(folder).rglob("*")):
            if path.is_file():
                self.put(f"{name}/{path.relative_to(folder)}", path.read_bytes())
        return self.url(name)


@dataclass
class RemoteSet:
    """A dataset in a folder, the same in the store, and the folder of a cache."""

    store: Scene
    folder: Path
    url: str
    cache: Path

    @property
    def given(self) -> dict[str, Any]:
        """The options that open the dataset in the store."""
        return {"cache": self.cache, "storage_options": self.store.options}

    @cached_property
    def shards(self) -> tuple[ShardSummary, ...]:
        return tuple(load(self.folder).shards)

    @property
    def sizes(self) -> dict[str, int]:
        """The bytes of each shard, by name."""
        return {shard.name: shard.n_bytes for shard in self.shards}

    def downloaded(self) -> dict[str, int]:
        """Return the bytes that came of each shard, by name."""
        return {shard.name: self.store.proxy.n_bytes[shard.name] for shard in self.shards}

    def content(self, shard: ShardSummary) -> bytes:
        """Return the bytes of a shard in the folder."""
        return (self.folder / shard.name).read_bytes()

    def open(self, **options: Any) -> shardio.ShardDataset:
        return shardio.open(self.url, **{**self.given, **options})

    @contextmanager
    def open_cache(self, max_bytes: int | None = None) -> Iterator[ShardCache]:
        cache = ShardCache(str(self.cache), max_bytes, ObjectStore(self.url, self.store.options))
        try:
            yield cache
        finally:
            cache.close()

    def files(self) -> list[Path]:
        """Return the shards that lie in the cache."""
        return sorted(self.cache.rglob("*.shard"))

    def cached(self) -> list[int]:
        """Return the numbers of the shards that lie in the cache."""
        names = [shard.name.removesuffix(".shard") for shard in self.shards]
        return [names.index(path.name.split(".")[0]) for path in self.files()]


@contextmanager
def scene() -> Iterator[Scene]:
    """Start a server, in a process of its own, with an empty bucket."""
    command = [sys.executable, "-W", "ignore", "-c", _SERVER]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as server:
        if server.stdin is None or server.stdout is None:
            raise AssertionError("both are pipes")
        port = int(server.stdout.readline())
        proxy = Proxy(port)
        thread = threading.Thread(target=proxy.serve_forever, args=(0.05,))
        thread.start()
        ends = ExitStack()
        found = Scene(proxy, ends)
        found.put("", b"")
        try:
            yield found
        finally:
            ends.close()
            proxy.shutdown()
            thread.join()
            proxy.server_close()
            server.stdin.close()
            server.wait(20)


def line_of(process: subprocess.Popen[str]) -> str:
    """Return the next line that a program prints."""
    if process.stdout is None:
        raise AssertionError("it is a pipe")
    return process.stdout.readline().strip()
