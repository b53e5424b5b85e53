"""Responses of the viewer's server: JSON, errors with hints, static files, ranges of media."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from importlib.resources import files
from typing import Any, Final, NamedTuple

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

import shardio
from shardio.errors import (
    ClosedError,
    DatasetConflict,
    InsufficientMemory,
    StoreAccessDenied,
    StoreUnavailable,
    TransformError,
)
from shardio_tools.output import decode_names


class NotFound(Exception):
    """A request names something that does not exist."""


CHUNK_BYTES: Final = 1 << 20
"""The number of bytes of media that are read at a time."""
_TYPES: Final = {
    "css": "text/css; charset=utf-8",
    "html": "text/html; charset=utf-8",
    "ico": "image/x-icon",
    "js": "text/javascript; charset=utf-8",
    "png": "image/png",
    "svg": "image/svg+xml",
}
_MISSING: Final = (
    *(shardio.ShardioError, NotFound),
    *(FileNotFoundError, NotADirectoryError, IsADirectoryError),
)
"""Errors about data that do not exist, or cannot be read."""
_RANGE: Final = re.compile(r"bytes=(\d{0,18})-(\d{0,18})")


def to_json(content: Any) -> bytes:
    """Return a value as JSON in ASCII. Numbers that are not finite become null."""
    return json.dumps(_plain(content), allow_nan=False, separators=(",", ":")).encode()


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(entry) for entry in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if hasattr(value, "item") and getattr(value, "ndim", None) == 0:
        return _plain(value.item())
    return value


def json_response(content: Any, status: int = 200) -> Response:
    """Return a response of JSON, which is not cached."""
    headers = {"cache-control": "no-store"}
    return Response(to_json(content), status, headers, "application/json")


def error_response(status: int, error: str, hint: str = "") -> Response:
    """Return an error as JSON."""
    return json_response({"error": decode_names(error), "hint": hint}, status)


def response_for(error: Exception) -> Response | None:
    """Return the response for an error about data, arguments or storage; None for a bug."""
    if isinstance(error, ClosedError):
        return error_response(503, str(error), "start shardio view again")
    if isinstance(error, StoreAccessDenied | StoreUnavailable):
        status = 403 if isinstance(error, StoreAccessDenied) else 503
        hint = "check the credentials and the network, then reload"
        return error_response(status, str(error), hint)
    if isinstance(error, PermissionError):
        return error_response(403, str(error))
    if isinstance(error, DatasetConflict):
        hint = "show the new generation, or start shardio view again"
        return error_response(409, str(error), hint)
    if isinstance(error, shardio.DataError):
        hint = "shardio verify lists all damage; shardio repair saves the undamaged samples"
        return error_response(404, str(error), hint)
    if isinstance(error, InsufficientMemory | MemoryError):
        return error_response(413, str(error) or "there is too little memory for this value")
    if isinstance(error, shardio.InvalidArgument | TransformError):
        return error_response(400, str(error))
    if isinstance(error, _MISSING):
        return error_response(404, str(error))
    if isinstance(error, OSError):
        return error_response(500, str(error))
    return None


class StaticFile(NamedTuple):
    """A file of the page, with the hash of its content."""

    data: bytes
    media_type: str
    etag: str


def static_files() -> dict[str, StaticFile]:
    """Read the files of the page, which are data of the package, once."""
    found = {}
    folder = files("shardio_tools.view") / "static"
    for each in folder.iterdir() if folder.is_dir() else ():
        media_type = _TYPES.get(each.name.rpartition(".")[2])
        if media_type is not None and each.is_file():
            data = each.read_bytes()
            etag = f'"{hashlib.sha256(data).hexdigest()[:32]}"'
            found[each.name] = StaticFile(data, media_type, etag)
    return found


def static_response(file: StaticFile | None, request: Request) -> Response:
    """Return a file of the page; 304 if the browser has it, 404 if there is none."""
    if file is None:
        return error_response(404, "the page has no such file")
    headers = {"cache-control": "no-cache", "etag": file.etag}
    if request.headers.get("if-none-match") == file.etag:
        return Response(status_code=304, headers=headers)
    return Response(file.data, 200, headers, file.media_type)


def requested_range(given: str | None, size: int) -> tuple[int, int] | None:
    """Return the start and the end of the one range that a header Range asks for.

    None stands for the whole file, which also answers several ranges.

    Raises:
        NotFound: the range is not in the file.
    """
    found = _RANGE.fullmatch((given or "").replace(" ", ""))
    if found is None or found.group(1) == found.group(2) == "":
        return None
    if found.group(1) == "":
        start, end = max(0, size - int(found.group(2))), size
    else:
        start = int(found.group(1))
        end = min(size, int(found.group(2) or size) + 1)
    if start >= end:
        raise NotFound(f"the range is not in the file, which has {size} bytes")
    return start, end


def range_response(
    request: Request,
    *,
    size: int,
    etag: str,
    media_type: str,
    read: Callable[[int, int], Awaitable[bytes]],
) -> Response:
    """Return a file, or the part that the request asks for, in chunks that are read on demand."""
    headers = {"accept-ranges": "bytes", "etag": etag, "cache-control": "private, no-cache"}
    if request.headers.get("if-none-match") == etag:
        return Response(status_code=304, headers=headers)
    is_current = request.headers.get("if-range", etag) == etag
    try:
        part = requested_range(request.headers.get("range") if is_current else None, size)
    except NotFound as error:
        found = error_response(416, str(error))
        found.headers["content-range"] = f"bytes */{size}"
        return found
    start, end = part or (0, size)
    if part is not None:
        headers["content-range"] = f"bytes {start}-{end - 1}/{size}"
    headers["content-length"] = str(end - start)
    status = 200 if part is None else 206
    if request.method == "HEAD":
        return Response(None, status, headers, media_type)
    return StreamingResponse(_chunks(read, start, end), status, headers, media_type)


class Download(Response):
    """A file that is sent in chunks as the client reads them; `done` is called at the end."""

    def __init__(self, data: bytes, headers: Mapping[str, str], done: Callable[[], None]) -> None:
        super().__init__(data, 200, headers, "application/octet-stream")
        self._done = done

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the response; before each chunk, wait until the client has read enough."""
        kind, body = "http.response.body", memoryview(self.body)
        try:
            start = {"status": self.status_code, "headers": self.raw_headers}
            await send({"type": "http.response.start", **start})
            for at in range(0, len(body), CHUNK_BYTES):
                chunk = bytes(body[at : at + CHUNK_BYTES])
                await send({"type": kind, "body": chunk, "more_body": True})
            await send({"type": kind, "body": b""})
        finally:
            self._done()


async def _chunks(
    read: Callable[[int, int], Awaitable[bytes]], start: int, end: int
) -> AsyncIterator[bytes]:
    for at in range(start, end, CHUNK_BYTES):
        yield await read(at, min(end, at + CHUNK_BYTES))
