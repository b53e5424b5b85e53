"""The S3 server of the race: ranges, errors, listings, counts, and its latency."""

from __future__ import annotations

import http.client
import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple
from urllib.parse import urlencode, urlsplit
from xml.etree import ElementTree

import pytest

from benchmarks import object_store
from benchmarks.object_store import ObjectStore, serving
from benchmarks.racers.store import COUNTS, Store

CONTENT = bytes(range(256)) * 4
KEYS = ["a/1", "a/2", "a/b/3", "a/b/4", "a+ä &.bin", "z"]
_NAMES = {"s3": "http://s3.amazonaws.com/doc/2006-03-01/"}


class Answer(NamedTuple):
    status: int
    headers: dict[str, str]
    body: bytes


@pytest.fixture
def store(tmp_path: Path) -> Iterator[ObjectStore]:
    for key in KEYS:
        path = tmp_path / "bucket" / key
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(CONTENT)
    with serving(tmp_path, 0.0) as found:
        yield found


def ask(store: ObjectStore, path: str, method: str = "GET", **headers: str) -> Answer:
    """Send a request; header names have "_" for "-"."""
    connection = http.client.HTTPConnection(urlsplit(store.endpoint).netloc)
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    connection.request(method, path, headers=named)
    answer = connection.getresponse()
    found = Answer(answer.status, dict(answer.headers.items()), answer.read())
    connection.close()
    return found


@pytest.mark.parametrize(
    ("asked", "part", "said"),
    [
        ("bytes=0-0", CONTENT[:1], "bytes 0-0/1024"),
        ("bytes=100-299", CONTENT[100:300], "bytes 100-299/1024"),
        ("bytes=1000-", CONTENT[1000:], "bytes 1000-1023/1024"),
        ("bytes=1000-5000", CONTENT[1000:], "bytes 1000-1023/1024"),
        ("bytes=-24", CONTENT[-24:], "bytes 1000-1023/1024"),
        ("bytes=-5000", CONTENT, "bytes 0-1023/1024"),
    ],
)
def test_ranges(store: ObjectStore, asked: str, part: bytes, said: str) -> None:
    answer = ask(store, "/bucket/a/1", Range=asked)
    assert (answer.status, answer.body) == (206, part)
    assert answer.headers["Content-Range"] == said


def test_a_whole_object_has_the_headers_that_clients_need(store: ObjectStore) -> None:
    answer = ask(store, "/bucket/a/1")
    assert (answer.status, answer.body) == (200, CONTENT)
    assert answer.headers["Content-Length"] == "1024"
    assert answer.headers["ETag"].startswith('"')
    assert answer.headers["Last-Modified"].endswith(" GMT")
    head = ask(store, "/bucket/a/1", "HEAD")
    assert head == (200, answer.headers, b"")


@pytest.mark.parametrize(
    ("method", "path", "asked", "status", "code"),
    [
        ("GET", "/bucket/nothing", "", 404, "NoSuchKey"),
        ("GET", "/bucket/a", "", 404, "NoSuchKey"),
        ("GET", "/bucket/a/1", "bytes=1024-", 416, "InvalidRange"),
        ("GET", "/bucket/../secret", "", 400, "InvalidRequest"),
        ("GET", "/bucket//etc/passwd", "", 400, "InvalidRequest"),
        ("GET", "/bucket?list-type=2&prefix=../secret", "", 400, "InvalidRequest"),
        ("GET", "/bucket?list-type=2&prefix=/etc/", "", 400, "InvalidRequest"),
        ("GET", "/", "", 400, "InvalidRequest"),
        ("PUT", "/bucket/a/1", "", 405, "MethodNotAllowed"),
    ],
)
def test_errors(
    store: ObjectStore, method: str, path: str, asked: str, status: int, code: str
) -> None:
    answer = ask(store, path, method, **({"Range": asked} if asked else {}))
    assert answer.status == status
    assert ElementTree.fromstring(answer.body).findtext("Code") == code


def test_a_connection_serves_many_requests(store: ObjectStore) -> None:
    connection = http.client.HTTPConnection(urlsplit(store.endpoint).netloc)
    for method, n_bytes in (("GET", 1024), ("HEAD", 0), ("GET", 1024)):
        connection.request(method, "/bucket/z")
        assert len(connection.getresponse().read()) == n_bytes
        assert connection.sock is not None
    connection.close()


# --- listings ------------------------------------------------------------------------------------


def listed(store: ObjectStore, **query: str) -> tuple[list[str], list[str], str]:
    """Return the keys, the common prefixes, and the token of the next page."""
    asked = {name.replace("_", "-"): value for name, value in query.items()}
    answer = ask(store, f"/bucket?{urlencode({'list-type': '2', **asked})}")
    found = ElementTree.fromstring(answer.body)
    keys = [each.text or "" for each in found.findall("s3:Contents/s3:Key", _NAMES)]
    prefixes = [each.text or "" for each in found.findall("s3:CommonPrefixes/s3:Prefix", _NAMES)]
    token = found.findtext("s3:NextContinuationToken", "", _NAMES)
    assert found.findtext("s3:IsTruncated", "", _NAMES) == ("true" if token else "false")
    assert found.findtext("s3:KeyCount", "", _NAMES) == str(len(keys) + len(prefixes))
    return keys, prefixes, token


def test_listings(store: ObjectStore) -> None:
    assert listed(store) == (sorted(KEYS), [], "")
    assert listed(store, prefix="a/") == (["a/1", "a/2", "a/b/3", "a/b/4"], [], "")
    assert listed(store, prefix="a/b/4") == (["a/b/4"], [], "")
    assert listed(store, prefix="a/", delimiter="/") == (["a/1", "a/2"], ["a/b/"], "")
    assert listed(store, delimiter="/") == (["a+ä &.bin", "z"], ["a/"], "")
    assert listed(store, prefix="a/", start_after="a/2") == (["a/b/3", "a/b/4"], [], "")
    assert listed(store, prefix="nothing/") == ([], [], "")


def test_listings_have_pages(store: ObjectStore) -> None:
    pages, token = list[list[str]](), ""
    while not pages or token:
        more = {"continuation_token": token} if token else {}
        keys, prefixes, token = listed(store, delimiter="/", max_keys="1", **more)
        pages.append(keys + prefixes)
    assert pages == [["a+ä &.bin"], ["a/"], ["z"]]


# --- counts and latency --------------------------------------------------------------------------


def test_requests_and_bytes_are_counted(store: ObjectStore, tmp_path: Path) -> None:
    ask(store, "/bucket/z")
    ask(store, "/bucket/z", "HEAD")
    ask(store, "/bucket/z", Range="bytes=0-9")
    assert store.counts == {"requests": 3, "bytes": 1034}
    assert json.loads(ask(store, COUNTS).body) == store.counts
    assert Store(store.endpoint, tmp_path).fetched() == {
        "requests of the first epoch": 3,
        "MB of the first epoch": 0.001034,
    }
    store.reset()
    assert store.counts == {"requests": 0, "bytes": 0}


def test_every_answer_waits_and_requests_wait_at_the_same_time(
    store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits, together = list[float](), threading.Barrier(3)

    def sleep(s: float) -> None:
        waits.append(s)
        assert store.counts["requests"] == 0
        together.wait(20)

    monkeypatch.setattr(object_store, "time", SimpleNamespace(sleep=sleep))
    store.latency_s = 0.25
    with ThreadPoolExecutor(3) as pool:
        requests = [("/bucket/z", "GET"), ("/bucket/z", "HEAD"), ("/bucket/nothing", "GET")]
        answers = list(pool.map(lambda each: ask(store, *each), requests))
        assert [answer.status for answer in answers] == [200, 200, 404]
    assert waits == [0.25] * 3


def test_the_counts_do_not_wait(store: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(s: float) -> None:
        raise AssertionError(f"waits {s} s")

    monkeypatch.setattr(object_store, "time", SimpleNamespace(sleep=fail))
    assert ask(store, COUNTS).status == 200
