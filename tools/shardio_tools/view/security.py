"""The checks that every request passes: host, token, method, sizes; and the headers of answers.

A page of another site must not read the dataset through the user's browser, nor may another user of
the machine. The link holds a random token, which becomes a cookie; the names of the server in the
header Host are checked, so that a foreign name that resolves to this machine is refused; and a POST
needs a header that only a script of this server's own page can send.
"""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import json
import socket
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, Final
from urllib.parse import parse_qs

MAX_BODY_BYTES: Final = 64 << 10
MAX_QUERY_BYTES: Final = 8 << 10
MAX_PATH_BYTES: Final = 2 << 10
_BODY_TIMEOUT_S: Final = 10.0

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

_POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "media-src 'self'; connect-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors "
)
_LOCAL_PAGES: Final = "'self' http://localhost:* http://127.0.0.1:* https://localhost:*"
"""The origins whose pages may embed a read-only viewer: notebooks on this machine."""


class Refusal(Exception):
    """A request that is answered with an error before it reaches the application."""

    def __init__(self, status: int, error: str, hint: str = "") -> None:
        super().__init__(error)
        self.status, self.error, self.hint = status, error, hint


class Security:
    """ASGI middleware: rejects requests that the viewer's own page would not send.

    Args:
        app: the application.
        token: the secret in the link.
        host: the address at which the server listens.
        port: the port, which is part of the cookie's name: cookies are shared by all ports.
        is_writable: True if the dataset can be changed; no other page may then show the viewer.
    """

    def __init__(self, app: App, token: str, host: str, port: int, *, is_writable: bool) -> None:
        self._app, self._token, self._host = app, token, host
        self.cookie = f"shardio-view-{port}"
        """The name of the cookie."""
        policy = _POLICY + ("'none'" if is_writable else _LOCAL_PAGES)
        self._headers = [
            (b"content-security-policy", policy.encode()),
            (b"cross-origin-opener-policy", b"same-origin"),
            (b"cross-origin-resource-policy", b"same-origin"),
            (b"referrer-policy", b"no-referrer"),
            (b"x-content-type-options", b"nosniff"),
        ]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Check a request, and pass it to the application with its whole body."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":  # a WebSocket: closing it before it is accepted answers 403
            await send({"type": "websocket.close", "code": 1008})
            return

        async def send_secured(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), *self._headers]
            await send(message)

        try:
            headers = _headers_of(scope)
            self._check(scope, headers)
            if (redirect := self._token_in_link(scope)) is not None:
                await _respond(send_secured, 303, redirect, b"")
                return
            self._authorize(scope, headers)
            receive = await _whole_body(headers, receive)
        except Refusal as refusal:
            body = json.dumps({"error": refusal.error, "hint": refusal.hint}).encode()
            content = [(b"content-type", b"application/json"), (b"connection", b"close")]
            await _respond(send_secured, refusal.status, content, body)
            return
        await self._app(scope, receive, send_secured)

    def _check(self, scope: Scope, headers: dict[bytes, bytes]) -> None:
        """Refuse a foreign host, an unknown method, and a path or query that is too long."""
        if not self._is_own_host(headers.get(b"host", b"").decode("latin-1")):
            raise Refusal(
                403,
                "the request names another host",
                "open the link that shardio view printed; to serve under another name, pass --host",
            )
        if scope["method"] not in ("GET", "HEAD", "POST"):
            raise Refusal(405, "only GET, HEAD and POST are answered")
        if len(scope.get("raw_path") or b"") > MAX_PATH_BYTES:
            raise Refusal(414, f"the path is longer than {MAX_PATH_BYTES} bytes")
        if len(scope["query_string"]) > MAX_QUERY_BYTES:
            raise Refusal(414, f"the query is longer than {MAX_QUERY_BYTES} bytes")

    def _is_own_host(self, given: str) -> bool:
        """Return True for the loopback names, and for the names of the address that is served.

        An address in digits needs no name server, so it cannot be rebound.
        """
        name = _host_name(given)
        if name is None:
            return False
        if name == "localhost" or _is_loopback(name):
            return True
        if _is_loopback(self._host) or self._host == "localhost":
            return False
        return name in (self._host.lower(), socket.gethostname().lower()) or _is_address(name)

    def _token_in_link(self, scope: Scope) -> list[tuple[bytes, bytes]] | None:
        """Return the headers that set the cookie and lead to the page, if the link has a token."""
        if scope["path"] != "/" or scope["method"] == "POST":
            return None
        query = scope["query_string"].decode("latin-1")
        given = parse_qs(query, keep_blank_values=True).get("token")
        if given is None:
            return None
        if not _is_equal(given[-1], self._token):
            raise Refusal(403, "the token in the link is not that of this viewer", _OPEN_LINK)
        cookie = f"{self.cookie}={self._token}; Path=/; HttpOnly; SameSite=Strict"
        return [
            (b"location", b"/"),
            (b"set-cookie", cookie.encode()),
            (b"cache-control", b"no-store"),
        ]

    def _authorize(self, scope: Scope, headers: dict[bytes, bytes]) -> None:
        """Refuse a request for data without the cookie, and a POST that a form could send.

        The page itself and its scripts are the same for all datasets, and need no token: a browser
        does not send the cookie with the first request after a link in another site's page.
        """
        is_page = scope["path"] == "/" or scope["path"].startswith("/static/")
        if not (is_page and scope["method"] in ("GET", "HEAD")):
            if not self._has_cookie(headers):
                raise Refusal(403, "the token is missing or wrong", _OPEN_LINK)
        if scope["method"] != "POST":
            return
        if headers.get(b"x-shardio") != b"1":
            raise Refusal(403, "a POST needs the header X-Shardio: 1")
        origin = headers.get(b"origin", b"").decode("latin-1")
        if origin and not self._is_own_host(origin.partition("://")[2]):
            raise Refusal(403, "the request comes from a page of another host")
        if headers.get(b"content-type", b"").split(b";")[0].strip() != b"application/json":
            raise Refusal(415, "a POST needs a body of JSON", "send Content-Type: application/json")

    def _has_cookie(self, headers: dict[bytes, bytes]) -> bool:
        """Return True if a cookie of the request is the token.

        Other servers of this machine set cookies that the browser sends here, too, in any form.
        """
        pairs = headers.get(b"cookie", b"").decode("latin-1").split(";")
        cookies = (each.strip().partition("=") for each in pairs)
        given = [value for name, _, value in cookies if name == self.cookie]
        return any(_is_equal(value, self._token) for value in given)


_OPEN_LINK: Final = "open the link that shardio view printed, with its token"


def _headers_of(scope: Scope) -> dict[bytes, bytes]:
    """Return the headers of a request; refuse a request with two hosts or two lengths."""
    found: dict[bytes, bytes] = {}
    for name, value in scope["headers"]:
        if name in found and name in (b"host", b"content-length", b"origin"):
            raise Refusal(400, f"the header {name.decode()} is repeated")
        is_continued = name == b"cookie" and name in found
        found[name] = b"; ".join((found[name], value)) if is_continued else value
    return found


def _host_name(given: str) -> str | None:
    """Return the name in a header Host, without its port; None if the header is invalid."""
    name, port = given.lower(), ""
    if name.startswith("["):
        name, bracket, rest = name[1:].partition("]")
        if not bracket or rest[:1] not in ("", ":"):
            return None
        port = rest[1:]
    elif ":" in name:
        name, _, port = name.partition(":")
    is_number = port.isascii() and port.isdigit() and len(port) <= 5
    return name.rstrip(".") if name and (is_number or not port) else None


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _is_loopback(name: str) -> bool:
    return _is_address(name) and ipaddress.ip_address(name).is_loopback


def is_local(host: str) -> bool:
    """Return True if only this machine can reach a server at `host`."""
    return host == "localhost" or _is_loopback(host)


def _is_equal(given: str, secret: str) -> bool:
    """Compare in constant time."""
    return hmac.compare_digest(given.encode("utf-8", "replace"), secret.encode())


async def _whole_body(headers: dict[bytes, bytes], receive: Receive) -> Receive:
    """Read the body of a request, at most MAX_BODY_BYTES; return a `receive` that repeats it."""
    too_long = Refusal(413, f"the body is longer than {MAX_BODY_BYTES} bytes")
    length = headers.get(b"content-length", b"0")
    if len(length) > 18 or not length.isdigit() or int(length) > MAX_BODY_BYTES:
        raise too_long
    if length == b"0" and b"transfer-encoding" not in headers:
        return receive
    body, is_more = b"", True
    try:
        async with asyncio.timeout(_BODY_TIMEOUT_S):
            while is_more:
                message = await receive()
                body += message.get("body", b"")
                is_more = message["type"] == "http.request" and message.get("more_body", False)
                if len(body) > MAX_BODY_BYTES:
                    raise too_long
    except TimeoutError:
        raise Refusal(408, "the body did not arrive in time") from None
    parts: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def repeat() -> Message:
        return parts.pop() if parts else await receive()

    return repeat


async def _respond(
    send: Send, status: int, headers: list[tuple[bytes, bytes]], body: bytes
) -> None:
    length = (b"content-length", str(len(body)).encode())
    await send({"type": "http.response.start", "status": status, "headers": [*headers, length]})
    await send({"type": "http.response.body", "body": body})
