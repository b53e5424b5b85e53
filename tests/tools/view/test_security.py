"""Attacks on the viewer's server: by other sites, by other users, and by crafted requests."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from shardio_tools.view import security
from shardio_tools.view.app import ViewerState, make_app
from tests.tools.view.served import PORT, POST, SCRIPT, TOKEN, ask_raw, viewing

ROUTES = (
    *("/api/dataset", "/api/statistics", "/api/rows", "/api/position?row=1", "/api/sample/1"),
    *("/api/verification", "/api/marks", "/thumbnail/1/frames", "/media/1/frames"),
    *("/frame/1/frames/0", "/series/1/points", "/heatmap/1/points", "/original/1/caption"),
    *("/api/epoch", "/nothing"),
)


@pytest.fixture(scope="module")
def stranger(client: TestClient) -> Iterator[TestClient]:
    """Return a client without the cookie."""
    base = f"http://127.0.0.1:{PORT}"
    with TestClient(client.app, base_url=base, follow_redirects=False) as made:
        yield made


def test_the_link_sets_a_cookie_that_scripts_and_other_sites_do_not_get(
    stranger: TestClient,
) -> None:
    answer = stranger.get(f"/?token={TOKEN}")
    assert (answer.status_code, answer.headers["location"], answer.content) == (303, "/", b"")
    assert answer.headers["set-cookie"] == (
        f"shardio-view-{PORT}={TOKEN}; Path=/; HttpOnly; SameSite=Strict"
    )
    assert answer.headers["cache-control"] == "no-store"
    assert stranger.get("/api/dataset").status_code == 200
    stranger.cookies.clear()


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("cookie", [None, f"shardio-view-{PORT}=wrong", f"other={TOKEN}", "=;=,"])
def test_nothing_is_answered_without_the_token(
    stranger: TestClient, route: str, cookie: str | None
) -> None:
    answer = stranger.get(route, headers={"Cookie": cookie} if cookie else {})
    assert answer.status_code == 403
    assert answer.json() == {
        "error": "the token is missing or wrong",
        "hint": "open the link that shardio view printed, with its token",
    }


@pytest.mark.parametrize(
    "other", ['{"a": "b c"}', "a=b c", "a[0]=1", "\u00e9", f"shardio-view-{PORT}=old"]
)
def test_cookies_of_other_servers_of_this_machine_do_not_matter(
    stranger: TestClient, other: str
) -> None:
    cookies = f"x={other}; {other}; shardio-view-{PORT}={TOKEN}; y={other}".encode("latin-1")
    assert stranger.get("/api/marks", headers={b"Cookie": cookies}).status_code == 200


@pytest.mark.parametrize("link", ["/?token=", "/?token=wrong", "/?token=%00", "/?token=%ff&token="])
def test_a_wrong_token_in_the_link_sets_no_cookie(stranger: TestClient, link: str) -> None:
    answer = stranger.get(link)
    assert answer.status_code == 403 and "set-cookie" not in answer.headers


def test_the_page_itself_needs_no_token_and_says_nothing_about_the_dataset(
    stranger: TestClient, folder: Path
) -> None:
    answer = stranger.get("/")
    assert answer.status_code == 200 and str(folder).encode() not in answer.content
    assert stranger.post("/", headers=POST, json={}).status_code == 403


@pytest.mark.parametrize(
    "host",
    [
        *("evil.example", "127.0.0.1.evil.example:8123", "localhost.evil.example", "evil", ""),
        *("192.168.0.4:8123", "[::2]", "0.0.0.0", "localhost:x", "localhost:999999", "[::1"),
        *("127.0.0.1@evil.example", "127.0.0.1:8123:8123", "evil.example:127", "2130706433"),
    ],
)
def test_a_foreign_host_is_refused_so_that_names_cannot_be_rebound(
    client: TestClient, host: str
) -> None:
    for path in ("/", "/static/main.js", "/api/dataset", f"/?token={TOKEN}"):
        answer = client.get(path, headers={"Host": host})
        assert answer.status_code == 403 and "another host" in answer.json()["error"]
        assert "set-cookie" not in answer.headers


@pytest.mark.parametrize(
    "host", ["127.0.0.1", "127.0.0.1:9", "LOCALHOST:8123", "[::1]:8123", "127.0.0.2", "localhost."]
)
def test_names_of_this_machine_are_its_own_through_any_port(client: TestClient, host: str) -> None:
    assert client.get("/api/dataset", headers={"Host": host}).status_code == 200


@pytest.mark.parametrize(
    ("bound", "host", "is_own"),
    [
        ("0.0.0.0", "192.168.0.4:80", True),
        ("0.0.0.0", "evil.example", False),
        ("box.lan", "box.lan:80", True),
        ("box.lan", "other.lan", False),
        ("::", "[fe80::1]:80", True),
        ("localhost", "192.168.0.4", False),
        ("::1", "192.168.0.4", False),
    ],
)
def test_a_server_for_other_machines_has_the_names_that_it_was_given(
    folder: Path, bound: str, host: str, is_own: object
) -> None:
    with ViewerState(str(folder)) as viewer:
        guarded = security.Security(make_app(viewer), TOKEN, bound, PORT, is_writable=False)
        assert guarded._is_own_host(host) is is_own


@pytest.mark.parametrize(
    "route", ["/", "/static/main.js", "/api/dataset", "/nothing", "/api/rows?x"]
)
def test_every_answer_forbids_foreign_scripts_frames_and_guessed_types(
    client: TestClient, route: str
) -> None:
    for answer in (client.get(route), client.get(route, headers={"Host": "evil"})):
        policy = dict(
            part.strip().partition(" ")[::2]
            for part in answer.headers["content-security-policy"].split(";")
        )
        assert policy.pop("frame-ancestors").startswith("'self' http://localhost:*")
        assert policy.pop("default-src") == policy.pop("base-uri") == "'none'"
        assert policy.pop("form-action") == "'none'"
        assert set(policy.values()) == {"'self'"}
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["referrer-policy"] == "no-referrer"
        assert answer.headers["cross-origin-resource-policy"] == "same-origin"
        assert "access-control-allow-origin" not in answer.headers


def test_a_viewer_that_writes_is_shown_in_no_frame(folder: Path) -> None:
    with viewing(folder, is_writable=True) as client:
        policy = client.get("/").headers["content-security-policy"]
        assert policy.endswith("frame-ancestors 'none'")


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 403),
        ({"X-Shardio": "0"}, 403),
        ({**POST, "Origin": "http://evil.example"}, 403),
        ({**POST, "Origin": "null"}, 403),
        ({**POST, "Origin": "http://127.0.0.1:8123"}, 200),
        ({**POST, "Content-Type": "text/plain"}, 415),
        ({**POST, "Content-Type": "application/x-www-form-urlencoded"}, 415),
        ({**POST, "Content-Type": "application/json; charset=utf-8"}, 200),
        (POST, 200),
    ],
)
def test_a_post_must_come_from_a_script_of_the_page(
    client: TestClient, headers: dict[str, str], status: int
) -> None:
    answer = client.post("/api/marks", json={"row": 1}, headers=headers)
    assert answer.status_code == status


@pytest.mark.parametrize("method", ["PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "BREW"])
def test_other_methods_are_refused(client: TestClient, method: str) -> None:
    assert client.request(method, "/api/marks").status_code == 405


@pytest.mark.parametrize(
    "path",
    [
        *("/static/../app.py", "/static/..%2fapp.py", "/static/%2e%2e/app.py", "/../../etc/passwd"),
        *("/static/..", "/static/", "/static//etc/passwd", "/static/%00", "/static/main.js%00"),
        *("/static/....//app.py", "/static/..\\app.py", "/static/%252e%252e%252fapp.py"),
        *("/%2e%2e/%2e%2e/etc/passwd", "//etc/passwd", "/static/__init__.py", "/static"),
    ],
)
def test_no_path_reaches_the_file_system(client: TestClient, path: str) -> None:
    status, headers = ask_raw(client, path)
    assert status == 404 and headers["content-type"] == "application/json"


@pytest.mark.parametrize(
    ("path", "field"),
    [
        *(("/thumbnail/1/", "..%2f..%2fetc"), ("/original/1/", "..%2f..%2fetc%2fpasswd")),
        *(("/media/1/", "%00"), ("/series/0/", "nothing"), ("/heatmap/0/", "%ff")),
        *(("/original/99999999/", "caption"), ("/original/-1/", "caption")),
        *(("/original/1e3/", "caption"), ("/original/%D9%A3/", "caption")),
        *(("/original/" + "9" * 400 + "/", "caption"), ("/media/9999/", "frames")),
    ],
)
def test_samples_and_fields_that_are_not_there_are_not_found(
    client: TestClient, path: str, field: str
) -> None:
    status, headers = ask_raw(client, path + field)
    assert status == 404 and headers["content-type"] == "application/json"


def test_long_paths_queries_and_bodies_are_refused(client: TestClient) -> None:
    assert client.get("/static/" + "x" * security.MAX_PATH_BYTES).status_code == 414
    assert client.get("/api/rows?text=" + "x" * security.MAX_QUERY_BYTES).status_code == 414
    body = json.dumps({"row": 1, "note": "x" * security.MAX_BODY_BYTES}).encode()
    kind = {**POST, "Content-Type": "application/json"}
    assert client.post("/api/marks", content=body, headers=kind).status_code == 413
    assert client.post("/api/marks", content=iter([body]), headers=kind).status_code == 413
    for length in ("-1", "1e9", "9" * 50, "x"):
        answer = client.get("/api/dataset", headers={"Content-Length": length})
        assert answer.status_code == 413


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[" * 60_000, b"[]", b"3", b"null", b"\xff\xfe", b'{"row": 1e999}']
)
def test_a_body_that_is_no_request_is_an_error_of_the_client(
    client: TestClient, body: bytes
) -> None:
    kind = {**POST, "Content-Type": "application/json"}
    answer = client.post("/api/marks", content=body, headers=kind)
    assert answer.status_code == 400 and answer.json()["error"]


def test_headers_that_are_repeated_are_refused(client: TestClient) -> None:
    base = [("Host", "127.0.0.1"), ("Host", "evil.example")]
    answer = client.get("/api/dataset", headers=base)
    assert answer.status_code in (400, 403)


def test_text_of_users_is_json_and_never_a_page(client: TestClient) -> None:
    for path in ("/api/dataset", "/api/rows", "/api/sample/1", f"/api/rows?sort={SCRIPT}"):
        answer = client.get(path)
        assert answer.headers["content-type"] == "application/json"
        assert SCRIPT in json.dumps(answer.json())
    answer = client.get("/original/1/caption")
    assert answer.headers["content-type"] == "application/octet-stream"
    assert answer.headers["content-disposition"].startswith("attachment; filename=")
    assert SCRIPT in answer.text


def test_a_websocket_is_refused(client: TestClient) -> None:
    from starlette.websockets import WebSocketDisconnect

    with pytest.raises(WebSocketDisconnect), client.websocket_connect("/api/dataset"):
        pass


def test_tokens_are_compared_in_constant_time(
    client: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    compared: list[Any] = []

    def compare(a: bytes, b: bytes) -> bool:
        compared.append((a, b))
        return True

    monkeypatch.setattr("hmac.compare_digest", compare)
    client.get("/api/dataset")
    assert compared == [(TOKEN.encode(), TOKEN.encode())]
