"""A read-only S3 server on loopback, which counts requests and sends every answer after a delay.

The server supports GET with ranges, HEAD and ListObjectsV2, and ignores credentials. Each
connection has a thread, and objects are sent with sendfile.
"""

from __future__ import annotations

import json
import os
import socketserver
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from email.utils import formatdate
from http import HTTPStatus
from pathlib import Path
from typing import Any, Final, NamedTuple
from urllib.parse import parse_qsl, unquote, urlsplit
from xml.sax.saxutils import escape

from benchmarks.racers.store import COUNTS

N_LISTED: Final = 1000
"""The maximum number of keys in a page of ListObjectsV2, as in S3."""
_XML: Final = '<?xml version="1.0" encoding="UTF-8"?>\n'
_NAMESPACE: Final = "http://s3.amazonaws.com/doc/2006-03-01/"


class Request(NamedTuple):
    """A request, with the names of its headers in lower case."""

    method: str
    path: str
    query: Mapping[str, str]
    headers: Mapping[str, str]


class Part(NamedTuple):
    """A range of a file."""

    path: Path
    first: int
    n_bytes: int


class Answer(NamedTuple):
    """An answer, whose body is in memory or a part of a file."""

    status: HTTPStatus
    headers: Mapping[str, str]
    body: bytes | Part


class ObjectStore(socketserver.ThreadingTCPServer):
    """A server whose buckets are the folders of `root`; it answers after `latency_s`."""

    daemon_threads = True
    request_queue_size = 256

    def __init__(self, root: Path, latency_s: float) -> None:
        super().__init__(("127.0.0.1", 0), _Connection)
        self.root, self.latency_s = root, latency_s
        self._mutex = threading.Lock()
        self._n_requests = self._n_bytes = 0

    @property
    def endpoint(self) -> str:
        """The URL of the server."""
        return f"http://127.0.0.1:{self.server_address[1]}"

    @property
    def counts(self) -> dict[str, int]:
        """The number of requests, and the bytes of the bodies of their answers."""
        with self._mutex:
            return {"requests": self._n_requests, "bytes": self._n_bytes}

    def reset(self) -> None:
        """Set the counts to zero."""
        with self._mutex:
            self._n_requests = self._n_bytes = 0

    def answer(self, request: Request) -> Answer:
        """Return the answer to a request, and count it, after the latency."""
        if request.path == COUNTS:
            return _text(HTTPStatus.OK, json.dumps(self.counts), "application/json")
        time.sleep(self.latency_s)
        found = self._found(request)
        body = found.body
        with self._mutex:  # before anything is sent: a client never sees counts without its request
            self._n_requests += 1
            if request.method != "HEAD":
                self._n_bytes += body.n_bytes if isinstance(body, Part) else len(body)
        return found

    def _found(self, request: Request) -> Answer:
        if request.method not in ("GET", "HEAD"):
            return _error(HTTPStatus.METHOD_NOT_ALLOWED, "MethodNotAllowed")
        bucket, _, key = request.path.removeprefix("/").partition("/")
        prefix = request.query.get("prefix", "")
        if bucket in ("", ".", "..") or _leaves_bucket(key) or _leaves_bucket(prefix):
            return _error(HTTPStatus.BAD_REQUEST, "InvalidRequest")
        if not key:
            return _text(HTTPStatus.OK, _listing(self.root / bucket, request.query))
        path = self.root / bucket / key
        if not path.is_file():
            return _error(HTTPStatus.NOT_FOUND, "NoSuchKey")
        return _object(path, request.headers.get("range", ""))


@contextmanager
def serving(root: Path, latency_s: float) -> Iterator[ObjectStore]:
    """Serve the folders of `root` in threads of this process until the end of the `with`."""
    with ObjectStore(root, latency_s) as store:
        thread = threading.Thread(target=store.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield store
        finally:
            store.shutdown()
            thread.join()


class _Connection(socketserver.StreamRequestHandler):
    """A connection, which is kept open for many requests."""

    server: ObjectStore
    disable_nagle_algorithm = True

    def handle(self) -> None:
        """Answer requests until the client closes the connection."""
        with suppress(ConnectionError):
            while (request := self._received()) is not None:
                self._send(self.server.answer(request), is_head=request.method == "HEAD")
                if request.method not in ("GET", "HEAD"):
                    break  # its body is not read

    def _received(self) -> Request | None:
        line = self.rfile.readline()
        if not line.strip():
            return None
        method, target, _ = line.decode("latin-1").split(" ", 2)
        headers = dict[str, str]()
        while line := self.rfile.readline().strip():
            name, _, value = line.decode("latin-1").partition(":")
            headers[name.lower()] = value.strip()
        parts = urlsplit(target)
        query = dict(parse_qsl(parts.query, keep_blank_values=True))
        return Request(method, unquote(parts.path), query, headers)

    def _send(self, answer: Answer, *, is_head: bool) -> None:
        body = answer.body
        n_bytes = body.n_bytes if isinstance(body, Part) else len(body)
        headers = {**answer.headers, "Content-Length": str(n_bytes)}
        lines = [f"HTTP/1.1 {answer.status.value} {answer.status.phrase}"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        head = "\r\n".join([*lines, "\r\n"]).encode("latin-1")
        if is_head:
            self.wfile.write(head)
        elif isinstance(body, Part):
            self.wfile.write(head)
            self._send_file(body)
        else:
            self.wfile.write(head + body)

    def _send_file(self, part: Part) -> None:
        at, stop = part.first, part.first + part.n_bytes
        with part.path.open("rb") as file:
            while at < stop:
                sent = os.sendfile(self.connection.fileno(), file.fileno(), at, stop - at)
                if not sent:
                    raise ConnectionAbortedError(f"{part.path}: shorter than when it was opened")
                at += sent


def _leaves_bucket(key: str) -> bool:
    """Return True if a key or prefix, as a path, leads out of its bucket."""
    return key.startswith("/") or ".." in key.split("/")


def _text(status: HTTPStatus, text: str, kind: str = "application/xml") -> Answer:
    return Answer(status, {"Content-Type": kind}, text.encode())


def _error(status: HTTPStatus, code: str) -> Answer:
    return _text(status, f"{_XML}<Error><Code>{code}</Code><Message>{code}</Message></Error>")


def _object(path: Path, asked: str) -> Answer:
    """Return an object, or the range of it that the header `Range` asks for."""
    status = path.stat()
    headers = {
        "Accept-Ranges": "bytes",
        "Content-Type": "application/octet-stream",
        "ETag": _tag(status),
        "Last-Modified": formatdate(status.st_mtime, usegmt=True),
    }
    if not asked:
        return Answer(HTTPStatus.OK, headers, Part(path, 0, status.st_size))
    first, stop = _range(asked, status.st_size)
    if first >= stop:
        return _error(HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE, "InvalidRange")
    headers["Content-Range"] = f"bytes {first}-{stop - 1}/{status.st_size}"
    return Answer(HTTPStatus.PARTIAL_CONTENT, headers, Part(path, first, stop - first))


def _tag(status: os.stat_result) -> str:
    return f'"{status.st_size:x}-{status.st_mtime_ns:x}"'


def _range(asked: str, n_bytes: int) -> tuple[int, int]:
    """Return the start and the end of `bytes=FIRST-LAST`, `bytes=FIRST-` or `bytes=-LENGTH`."""
    first, _, last = asked.removeprefix("bytes=").partition("-")
    if not first:
        return max(0, n_bytes - int(last)), n_bytes
    return int(first), min(n_bytes, int(last) + 1) if last else n_bytes


def _listing(bucket: Path, query: Mapping[str, str]) -> str:
    """Return the answer to ListObjectsV2: keys in order, and prefixes that end at the delimiter."""
    prefix, delimiter = query.get("prefix", ""), query.get("delimiter", "")
    after = query.get("continuation-token") or query.get("start-after", "")
    most = min(N_LISTED, int(query.get("max-keys", N_LISTED)))
    entries = dict[str, str]()
    is_truncated = False
    for key in _keys(bucket, prefix):
        inner, found, _ = key[len(prefix) :].partition(delimiter) if delimiter else (key, "", "")
        name = f"{prefix}{inner}{delimiter}" if found else key
        if name <= after or name in entries:
            continue
        if len(entries) == most:
            is_truncated = bool(entries)  # with `max-keys=0` there is no token
            break
        entries[name] = _common(name) if found else _contents(bucket, name)
    last = escape(next(reversed(entries), ""))
    token = f"<NextContinuationToken>{last}</NextContinuationToken>"
    fields: dict[str, Any] = {
        "Name": bucket.name,
        "Prefix": prefix,
        "KeyCount": len(entries),
        "MaxKeys": most,
        "IsTruncated": str(is_truncated).lower(),
    }
    shown = "".join(f"<{name}>{escape(str(value))}</{name}>" for name, value in fields.items())
    body = shown + token * is_truncated + "".join(entries.values())
    return f'{_XML}<ListBucketResult xmlns="{_NAMESPACE}">{body}</ListBucketResult>'


def _keys(bucket: Path, prefix: str) -> list[str]:
    folder = bucket / prefix.rpartition("/")[0]
    paths = (path for path in folder.rglob("*") if path.is_file())
    keys = (path.relative_to(bucket).as_posix() for path in paths)
    return sorted(key for key in keys if key.startswith(prefix))


def _common(prefix: str) -> str:
    return f"<CommonPrefixes><Prefix>{escape(prefix)}</Prefix></CommonPrefixes>"


def _contents(bucket: Path, key: str) -> str:
    status = (bucket / key).stat()
    time_text = time.strftime("%Y-%m-%dT%H:%M:%S.000Z", time.gmtime(status.st_mtime))
    fields = {
        "Key": key,
        "LastModified": time_text,
        "ETag": _tag(status),
        "Size": str(status.st_size),
        "StorageClass": "STANDARD",
    }
    shown = "".join(f"<{name}>{escape(value)}</{name}>" for name, value in fields.items())
    return f"<Contents>{shown}</Contents>"
