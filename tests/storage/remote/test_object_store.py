"""Objects are read and written exactly, whatever the network does, or an error says why not."""

from __future__ import annotations

import contextlib
import http.server
import math
import os
import pickle
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import obstore
import pytest

from shardio.errors import (
    DatasetConflict,
    InvalidArgument,
    ShardChanged,
    ShardNotFound,
    StoreAccessDenied,
    StoreUnavailable,
    UnsupportedEnvironment,
)
from shardio.storage.remote import connection, object_store
from shardio.storage.remote.connection import NoConnection, RemoteOptions, TransientError
from shardio.storage.remote.object_store import ObjectPart, ObjectStore
from tests.loading import PATIENCE_S
from tests.storage.remote.scene import OPTIONS, Scene

DATA = bytes(range(256)) * 1000


REPLACED = "the object was replaced by another one"


def objects(store: Scene, **more: object) -> ObjectStore:
    return ObjectStore(store.url("objects"), {**store.options, **more})


@pytest.fixture(autouse=True)
def small_pieces(store: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardio.storage.remote.object_store.PIECE_BYTES", 100_000)
    monkeypatch.setattr("shardio.storage.remote.object_store._MIN_PIECE_BYTES", 50_000)
    store.put("objects/a.shard", DATA)


def _downloaded(some: ObjectStore, path: Path, n_bytes: int = len(DATA)) -> bytes:
    with open(path, "ab", buffering=0) as file:
        some.download("a.shard", file, n_bytes)
    return path.read_bytes()


def test_an_object_is_read_whole_in_part_and_from_its_end(store: Scene) -> None:
    some = objects(store)
    assert some.read("a.shard") == DATA
    assert bytes(some.read_range("a.shard", 300, 20)) == DATA[300:320]
    tail = some.read_tail("a.shard", 1000)
    assert (bytes(tail.data), tail.n_bytes) == (DATA[-1000:], len(DATA))
    assert bytes(some.read_tail("a.shard", 1 << 20).data) == DATA


@pytest.mark.parametrize("kind", ["error", "cut", "stall"])
def test_transient_error_resumes_at_byte_reached(store: Scene, tmp_path: Path, kind: str) -> None:
    fault = store.fail(kind, times=2)
    (tmp_path / "a").write_bytes(DATA[:1000])
    some = objects(store, client_options={"timeout": "300ms"})
    assert _downloaded(some, tmp_path / "a") == DATA
    fault.go_on.set()


def test_data_resets_backoff(store: Scene, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    get, failed, tries = ObjectStore._get_once, set[int](), list[int]()
    sizes = []

    def fail_once(self: ObjectStore, name: str, part: Any, tag: str | None) -> ObjectPart:
        if part[0] not in failed:
            failed.add(part[0])
            raise TransientError("not yet")
        sizes.append(part[1] - part[0])
        return get(self, name, part, tag)

    def count(back_off: Any, _: object) -> None:
        back_off._n_tries += 1
        tries.append(back_off._n_tries)

    monkeypatch.setattr("shardio.storage.remote.object_store._CONCURRENT_PIECES", 1)
    monkeypatch.setattr(ObjectStore, "_get_once", fail_once)
    monkeypatch.setattr("shardio.storage.remote.object_store._BackOff.__call__", count)
    assert _downloaded(objects(store), tmp_path / "a") == DATA
    assert sizes == [50_000] * 5 + [6_000]
    assert tries == [1] * 6


def test_cancelled_download(store: Scene, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardio.storage.remote.object_store._CONCURRENT_PIECES", 1)
    calls = [None]
    with open(tmp_path / "a", "ab", buffering=0) as file, pytest.raises(IndexError, match="pop"):
        objects(store).download("a.shard", file, len(DATA), check=calls.pop)
    assert (tmp_path / "a").read_bytes() == DATA[:100_000]
    assert store.proxy.n_bytes["a.shard"] == 100_000


def test_pieces_in_parallel(store: Scene, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    all_are_asked_for, get = threading.Barrier(3), ObjectStore._get_once

    def get_together(*given: Any, **named: Any) -> Any:
        all_are_asked_for.wait(PATIENCE_S)
        return get(*given, **named)

    monkeypatch.setattr(ObjectStore, "_get_once", get_together)
    assert _downloaded(objects(store), tmp_path / "a") == DATA


def test_pieces_never_mixed(store: Scene, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    get = ObjectStore._get_once

    def get_other(self: ObjectStore, name: str, part: Any, tag: str | None) -> ObjectPart:
        found = get(self, name, part, tag)
        return found._replace(tag='"another"') if part[0] == 200_000 else found

    monkeypatch.setattr(ObjectStore, "_get_once", get_other)
    with pytest.raises(ShardChanged, match=REPLACED):
        _downloaded(objects(store), tmp_path / "a")
    assert (tmp_path / "a").read_bytes() == DATA[:200_000]


def test_object_of_another_size_is_refused(store: Scene, tmp_path: Path) -> None:
    with pytest.raises(ShardChanged, match=f"expected {len(DATA) + 5}, found {len(DATA)}"):
        _downloaded(objects(store), tmp_path / "a", len(DATA) + 5)
    (tmp_path / "a").write_bytes(bytes(len(DATA) + 1))
    with pytest.raises(ShardChanged, match=r"a\.shard: the object ends before"):
        _downloaded(objects(store), tmp_path / "a", len(DATA) + 5)
    with pytest.raises(ShardChanged, match="ends before the requested range"):
        objects(store).read_range("a.shard", len(DATA) + 1, 5)


@pytest.mark.parametrize("is_weak", [False, True])
def test_replaced_object_is_refused(store: Scene, tmp_path: Path, is_weak: object) -> None:
    some = objects(store)
    if is_weak:  # the server says so of its tags, which then never match
        store.fail("weak", times=99)
    assert _downloaded(some, tmp_path / "a") == DATA
    tag = some.read_tail("a.shard", 10).tag
    assert some.read_range("a.shard", 5, 10, tag) == DATA[5:15]
    store.put("objects/a.shard", DATA[::-1])
    with pytest.raises(ShardChanged, match=REPLACED):
        some.read_range("a.shard", 0, 10, tag)


def test_large_range_is_read_in_parts(store: Scene) -> None:
    some, fault = objects(store), store.fail("cut")
    assert bytes(some.read_range("a.shard", 100, len(DATA) - 100)) == DATA[100:]
    assert fault.times == 0
    sizes = [store.proxy.requests["a.shard"], store.proxy.n_bytes["a.shard"]]
    assert sizes[0] > 3 and sizes[1] < 3 * len(DATA)
    with pytest.raises(ShardChanged, match=f"expected {len(DATA) + 5}, found {len(DATA)}"):
        some.read_range("a.shard", 0, len(DATA) + 5)
    tag = some.read_tail("a.shard", 10).tag
    store.put("objects/a.shard", DATA[::-1])
    with pytest.raises(ShardChanged, match=REPLACED):
        some.read_range("a.shard", 0, len(DATA), tag)


def test_azure_tail_asks_for_size_first(store: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    store.put("azure/it", b"0123456789")
    monkeypatch.setattr("shardio.storage.remote.object_store.AZURE", ("s3",))
    found = ObjectStore(store.url("azure"), store.options)
    for n_bytes, expected in ((4, b"6789"), (99, b"0123456789")):
        tail = found.read_tail("it", n_bytes)
        assert (bytes(tail.data), tail.n_bytes) == (expected, 10)
    assert store.proxy.requests["it"] == 4


def test_missing_object_or_bucket_is_not_waited_for(store: Scene) -> None:
    with pytest.raises(ShardNotFound, match=r"objects/none\.shard: there is no such object"):
        objects(store).read("none.shard")
    with pytest.raises(InvalidArgument, match="there is no such bucket: NoSuchBucket"):
        ObjectStore("s3://nobody/here", store.options).list_names()


def test_what_lasts_is_an_error_at_the_deadline(store: Scene) -> None:
    store.fail("error", times=1000)
    words = r"a\.shard: no data from the store for .* InternalError"
    with pytest.raises(StoreUnavailable, match=words):
        objects(store, deadline_s=0.3).read("a.shard")


@pytest.fixture
def refusing() -> Iterator[str]:
    """Return the URL of a port that refuses connections."""
    with socket.socket() as bound:  # it does not listen
        bound.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{bound.getsockname()[1]}"


@pytest.mark.parametrize("kind", ["http", "s3"])
def test_a_refused_connection_is_final_soon(
    refusing: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(object_store, "_CONNECT_DEADLINE_S", 0.2)
    options = {**OPTIONS, "aws_endpoint": refusing} if kind == "s3" else {}
    options.pop("deadline_s", None)
    url = "s3://bucket/set" if kind == "s3" else f"{refusing}/set"
    words = (
        r"/set/a: no connection \(Connection refused\), after \d attempts in 0 s; check the addr"
    )
    with pytest.raises(StoreUnavailable, match=words):
        ObjectStore(url, options).read("a")


@pytest.fixture
def silent() -> Iterator[str]:
    """Return the URL of a server that accepts connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"http://127.0.0.1:{server.getsockname()[1]}"


@pytest.fixture
def dropping() -> Iterator[str]:
    """Return the URL of a port where no attempt to connect ends: its queue of clients is full."""
    with contextlib.ExitStack() as sockets:
        server = sockets.enter_context(socket.socket())
        server.bind(("127.0.0.1", 0))
        server.listen(0)
        for _ in range(3):
            client = sockets.enter_context(socket.socket())
            client.setblocking(False)
            client.connect_ex(server.getsockname())
        yield f"http://127.0.0.1:{server.getsockname()[1]}"


@pytest.mark.parametrize("kind", ["http", "s3", "https", "silent https"])
def test_a_connection_that_is_never_made_is_like_a_refused_one(
    dropping: str, silent: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(object_store, "_CONNECT_DEADLINE_S", 0.1)
    # A request that waits for an answer would end with the error that follows a deadline of 120 s.
    options: dict[str, Any] = {"client_options": {"connect_timeout": "100ms", "timeout": "1h"}}
    server = silent if kind == "silent https" else dropping
    url = f"{server.replace('http:', 'https:') if 'https' in kind else server}/set"
    if kind == "s3":
        url, options = "s3://bucket/set", {**OPTIONS, **options, "aws_endpoint": server}
        options.pop("deadline_s")
    words = r"/set/a: no connection \(timed out\), after 1 attempt in \d+ s; check the address"
    with pytest.raises(StoreUnavailable, match=words):
        ObjectStore(url, options).read("a")


def _download_twice_the_size(some: ObjectStore, path: Path) -> None:
    with open(path, "ab", buffering=0) as file:
        some.download("a.shard", file, 2 * len(DATA))


CALLS: dict[str, Callable[[ObjectStore, Path], object]] = {
    "read": lambda some, path: some.read("a.shard"),
    "read in a thread": lambda some, path: object_store.start_thread(
        lambda: some.read("a.shard")
    ).result(),
    "read briefly": lambda some, path: some.read("a.shard", deadline_s=0.1),
    "download": _download_twice_the_size,
    "put": lambda some, path: some.put("a.shard", DATA, exclusive=True),
    "upload": lambda some, path: some.upload("a.shard", str(path)),
    "list": lambda some, path: some.list_names(),
    "remove": lambda some, path: some.remove("a.shard"),
}


@pytest.mark.parametrize("call", list(CALLS))
def test_the_deadline_ends_a_request_that_has_no_answer(
    silent: str, tmp_path: Path, call: str
) -> None:
    (tmp_path / "a").write_bytes(DATA)
    options = {**OPTIONS, "aws_endpoint": silent, "client_options": {"timeout": "1h"}}
    options["deadline_s"] = 3600 if call == "read briefly" else 0.1
    some = ObjectStore("s3://bucket/set", options)
    words = r"/set/.*: no data from the store for \d+ s, after 1 attempt; last failure: no response"
    with pytest.raises(StoreUnavailable, match=words):
        CALLS[call](some, tmp_path / "a")


class _Clock:
    """A clock that passes in pauses only."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def monotonic(self) -> float:
        return self.now_s

    def sleep(self, pause_s: float) -> None:
        self.now_s += pause_s


def test_progress_extends_the_deadline_of_an_attempt(
    store: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(object_store, "time", clock := _Clock())
    back_off = object_store._BackOff(objects(store, deadline_s=10), "a.shard")
    for position in (1, 2, 3):
        clock.sleep(9)
        back_off.note_progress(position)
        back_off.check_deadline()
    back_off(TransientError("lost"))  # it had come further than before
    for position in (1, 2):
        clock.sleep(4)
        back_off.note_progress(position)
        back_off.check_deadline()
    clock.sleep(4)
    with pytest.raises(StoreUnavailable, match="last failure: lost again"):
        back_off(TransientError("lost again"))  # for 12 s, none has come further


def test_reads_ahead_of_an_upload_are_no_progress(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(bytes(10))
    noted: list[int] = []
    with open(tmp_path / "a", "rb") as file:
        source = object_store._UploadSource(file, noted.append)
        assert [source.read(4), source.read(9)] == [bytes(4), bytes(6)]
    n_ahead = object_store._CONCURRENT_UPLOAD_PARTS * object_store._UPLOAD_PART_BYTES
    assert noted == [-n_ahead, 4 - n_ahead]


def test_without_credentials_the_error_says_so() -> None:
    details = 'kind: Connect, source: "tcp connect error", message: "No route to host"'
    words = "Error performing PUT http://169.254.169.254/latest/api/token"
    error = obstore.exceptions.GenericError(f"{words}\n\nDebug source: {details}")
    with pytest.raises(NoConnection, match="no credentials are set, and no connection .No route"):
        with connection.map_obstore_errors("s3://bucket", "a", {}):
            raise error


def test_a_server_without_tls_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(object_store, "_CONNECT_DEADLINE_S", 0.1)
    with _served(tmp_path, _Plain) as some:
        secure = ObjectStore(some.url.replace("http:", "https:"))
        with pytest.raises(StoreUnavailable, match="does not use TLS: write http://"):
            secure.read("a")


def _fail_to_connect(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the next request fail to connect, and allow no time for connecting."""
    get, left = ObjectStore._get_once, iter(range(1))

    def fail(self: ObjectStore, name: str, part: Any, tag: str | None) -> ObjectPart:
        if next(left, None) is not None:
            raise NoConnection("refused")
        return get(self, name, part, tag)

    monkeypatch.setattr(ObjectStore, "_get_once", fail)
    monkeypatch.setattr(object_store, "_CONNECT_DEADLINE_S", 0.0)


def test_a_server_that_has_answered_is_waited_for(
    store: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {name: value for name, value in store.options.items() if name != "deadline_s"}
    some = ObjectStore(store.url("objects"), options)
    assert some.read("a.shard") == DATA
    _fail_to_connect(monkeypatch)
    assert some.read("a.shard") == DATA
    _fail_to_connect(monkeypatch)
    with pytest.raises(StoreUnavailable, match="refused, after 1 attempt in"):
        ObjectStore(store.url("objects"), options).read("a.shard")
    for given in ({**options, "deadline_s": 60}, RemoteOptions(None, None, options).for_reopening):
        _fail_to_connect(monkeypatch)
        told = given.options if isinstance(given, RemoteOptions) else given
        assert ObjectStore(store.url("objects"), told).read("a.shard") == DATA


def test_the_environment_may_have_the_deadline(
    silent: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHARDIO_DEADLINE_S", "0.1")
    options = {**OPTIONS, "aws_endpoint": silent, "client_options": {"timeout": "1h"}}
    del options["deadline_s"]
    hint = r"set SHARDIO_DEADLINE_S=… or storage_options=\{'deadline_s': …\} to wait longer$"
    with pytest.raises(StoreUnavailable, match=hint):
        ObjectStore("s3://bucket/set", options).read("a.shard")
    assert RemoteOptions(None, None, options).for_reopening.options["deadline_s"] == 0.1
    assert ObjectStore("s3://bucket/set", {**options, "deadline_s": 7}).deadline_s == 7
    for text in ("long", "0", "-1", "nan"):
        monkeypatch.setenv("SHARDIO_DEADLINE_S", text)
        with pytest.raises(InvalidArgument, match="^SHARDIO_DEADLINE_S must be a number of sec"):
            ObjectStore("s3://bucket/set", options)
    monkeypatch.setenv("SHARDIO_DEADLINE_S", "inf")
    assert ObjectStore("s3://bucket/set", options).deadline_s == math.inf
    monkeypatch.setenv("SHARDIO_DEADLINE_S", "")
    assert ObjectStore("s3://bucket/set", options).deadline_s == 120


@pytest.mark.parametrize(("deadline_s", "limit"), [(10, " for up to 10 s"), (math.inf, "$")])
def test_repetition_is_noted_once_until_a_success(
    store: Scene, monkeypatch: pytest.MonkeyPatch, deadline_s: float, limit: str
) -> None:
    monkeypatch.setattr(object_store, "_NOTE_AFTER_S", -1)
    some = objects(store, deadline_s=deadline_s)
    for _ in range(2):
        store.fail("error", times=2)
        with pytest.warns(UserWarning, match=f"InternalError.*; trying again{limit}") as all_:
            assert some.read("a.shard") == DATA
        assert len(all_) == 1


def test_expired_credentials_fail_at_once_and_are_not_shown(store: Scene) -> None:
    fault, words = store.fail("denied", times=1000), "access denied: ExpiredToken: The token has"
    with pytest.raises(StoreAccessDenied, match=f"{words} expired") as caught:
        objects(store).read("a.shard")
    assert fault.times == 999
    text = str(caught.value)
    assert not any(secret in text for secret in ("AKIDEXAMPLE", "a secret of sixteen"))


def test_a_url_that_may_have_a_secret_is_refused_and_not_shown() -> None:
    with pytest.raises(InvalidArgument) as caught:
        ObjectStore("https://me:word@host/set?sig=12345")
    assert "word" not in str(caught.value) and "12345" not in str(caught.value)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"aws_colour": "a secret word"}, "aws_colour"),
        ({"aws_endpoint": "localhost:9000"}, "endpoint must begin with http://"),
        ({"deadline_s": 0}, "must be a number of seconds above 0; found 0"),
        ({"allow_http": "a secret word"}, "'client_options': {'allow_http': …}"),
        ({"timeout": "a secret word"}, "timeout is an option of the client"),
    ],
)
def test_invalid_option_is_named(store: Scene, options: dict[str, Any], text: str) -> None:
    with pytest.raises(InvalidArgument, match=text) as caught:
        objects(store, **options).read("a.shard")
    assert "a secret word" not in str(caught.value)


def test_a_web_server_without_ranges_or_sizes_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.shard").write_bytes(DATA)
    with _served(tmp_path, _Plain) as some:
        assert some.read("a.shard") == DATA
        with pytest.raises(InvalidArgument, match="Range request .* copy the dataset to a"):
            some.read_tail("a.shard", 10)
    words = "Content-Length .* copy the dataset to a folder"
    with _served(tmp_path, _Chunked) as some, pytest.raises(InvalidArgument, match=words):
        some.read("a.shard")


@contextmanager
def _served(folder: Path, handler: type[_Plain]) -> Iterator[ObjectStore]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        server.folder = str(folder)  # type: ignore[attr-defined]
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield ObjectStore(f"http://127.0.0.1:{server.server_port}/", {"deadline_s": 10})
        finally:
            server.shutdown()
            thread.join()


class _Plain(http.server.SimpleHTTPRequestHandler):
    """Gives whole files alone."""

    def __init__(self, request: Any, client_address: Any, server: Any) -> None:
        super().__init__(request, client_address, server, directory=server.folder)

    def log_message(self, format: str, *args: Any) -> None:
        pass


class _Chunked(_Plain):
    """Gives whole files, and does not say how long they are."""

    def send_header(self, keyword: str, value: str) -> None:
        if keyword.lower() != "content-length":
            super().send_header(keyword, value)


def test_a_password_in_an_endpoint_is_not_shown(store: Scene) -> None:
    port = store.proxy.server_port
    store.proxy.is_down = True
    some = objects(store, aws_endpoint=f"http://me:word@127.0.0.1:{port}", deadline_s=0.2)
    with pytest.raises(StoreUnavailable) as caught:
        some.read("a.shard")
    assert f"http://…@127.0.0.1:{port}/" in str(caught.value)


@pytest.mark.parametrize("name", ["AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT"])
def test_endpoint_variables(store: Scene, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    options = store.options
    monkeypatch.setenv(name, options.pop("aws_endpoint"))
    assert ObjectStore(store.url("objects"), options).read("a.shard") == DATA


def test_fork_may_not_use_the_store(store: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(connection._first_user, "first", os.getpid() + 1)
    with pytest.raises(UnsupportedEnvironment, match="this process was forked from one"):
        objects(store).read("a.shard")


def test_they_are_made_anew_where_they_arrive(store: Scene) -> None:
    assert pickle.loads(pickle.dumps(objects(store))).read("a.shard") == DATA


def test_of_two_who_write_first_the_second_is_refused(store: Scene) -> None:
    some, name = objects(store), "generations/000001.json"
    some.put(name, b"one", exclusive=True)
    some.put(name, b"one", exclusive=True)  # as if the answer had been lost
    with pytest.raises(DatasetConflict, match="another writer published first"):
        some.put(name, b"two", exclusive=True)
    assert some.read(name) == b"one"
    some.remove(name)
    some.remove(name)
    assert name not in some.list_names()


def test_upload_is_retried_after_a_server_error(store: Scene, tmp_path: Path) -> None:
    (tmp_path / "b.shard").write_bytes(DATA)
    store.fail("error", method="PUT")
    objects(store).upload("b.shard", str(tmp_path / "b.shard"))
    assert objects(store).read("b.shard") == DATA
