"""The application: routes of the viewer's server, each answered in a worker thread."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, Final, Self

import anyio
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from shardio import InvalidArgument
from shardio_tools.view import overview, rows
from shardio_tools.view.answers import (
    answer_of,
    error_answer,
    json_answer,
    ranged_answer,
    static_answer,
    static_files,
)
from shardio_tools.view.source import Source

_N_THREADS: Final = 8
"""The number of requests that are worked on at the same time; others wait."""


class Viewer:
    """What the viewer keeps while it runs: the dataset, caches, background jobs and marks."""

    def __init__(self, path: str, *, is_writable: bool = False) -> None:
        self.source = Source(path)
        self.is_writable = is_writable
        self.static = static_files()
        self._thumbnails: Any = None

    @property
    def thumbnails(self) -> Any:
        """The cache of thumbnails."""
        if self._thumbnails is None:
            from shardio_tools.view.thumbnails import Thumbnails

            self._thumbnails = Thumbnails()
        return self._thumbnails

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop background jobs and close the dataset."""
        if self._thumbnails is not None:
            self._thumbnails.close()
        self.source.close()


Work = Callable[[Viewer, Request], Any]
Handler = Callable[[Request], Awaitable[Response]]


def make_app(viewer: Viewer) -> Starlette:
    """Return the ASGI application of a viewer, without the checks of `Security`."""
    limiter = anyio.CapacityLimiter(_N_THREADS)

    async def in_thread(work: Callable[[], Any]) -> Any:
        return await anyio.to_thread.run_sync(work, limiter=limiter)

    def answered(work: Work) -> Handler:
        """Return a handler that answers with the result of `work`, or with its error."""

        async def handle(request: Request) -> Response:
            return await _guarded(lambda: in_thread(partial(work, viewer, request)))

        return handle

    async def media(request: Request) -> Response:
        row, field = _row(request), request.path_params["field"]

        async def read(start: int, stop: int) -> bytes:
            found: bytes = await in_thread(partial(_read_media, viewer, row, field, start, stop))
            return found

        async def answer() -> Response:
            facts = await in_thread(partial(_media_facts, viewer, row, field))
            return ranged_answer(request, **facts, read=read)

        return await _guarded(answer)

    async def page(request: Request) -> Response:
        return static_answer(viewer.static.get("index.html"), request)

    async def static(request: Request) -> Response:
        return static_answer(viewer.static.get(request.path_params["name"]), request)

    routes = [
        Route("/", page),
        Route("/static/{name}", static),
        Route("/api/dataset", answered(_dataset)),
        Route("/api/rows", answered(_rows)),
        Route("/api/sample/{row}", answered(_sample)),
        Route("/thumbnail/{row}/{field}", answered(_thumbnail)),
        Route("/frame/{row}/{field}/{number}", answered(_frame)),
        Route("/media/{row}/{field}", media),
        Route("/original/{row}/{field}", answered(_original)),
        Route("/series/{row}/{field}", answered(_series)),
        Route("/heatmap/{row}/{field}", answered(_heatmap)),
    ]
    return Starlette(routes=routes, exception_handlers={HTTPException: _http_error})


async def _http_error(request: Request, error: Exception) -> Response:
    status = error.status_code if isinstance(error, HTTPException) else 500
    texts = {404: "there is no such page", 405: "this page has another method"}
    return error_answer(status, texts.get(status, "the request cannot be answered"))


async def _guarded(answer: Callable[[], Awaitable[Any]]) -> Response:
    """Return an answer; an error about the data becomes an answer of its own."""
    try:
        found = await answer()
    except Exception as error:  # noqa: BLE001  # the server goes on
        if (known := answer_of(error)) is not None:
            return known
        traceback.print_exception(error, file=sys.stderr)
        return error_answer(500, "the viewer failed; its terminal shows the error")
    return found if isinstance(found, Response) else json_answer(found)


def number(text: str | None, what: str, low: int, high: int, default: int | None = None) -> int:
    """Return a decimal integer of a request; raise InvalidArgument if it is none, or too large."""
    if text is None and default is not None:
        return default
    is_number = text is not None and text.isascii() and text.isdigit() and len(text) <= 18
    if not is_number or not low <= (found := int(text or "")) <= high:
        raise InvalidArgument(f"{what} must be an integer from {low} to {high}; found {text!r:.40}")
    return found


def _row(request: Request) -> int:
    text = request.path_params["row"]
    if not (text.isascii() and text.isdigit() and len(text) <= 18):
        raise HTTPException(404)
    return int(text)


def _checked_row(viewer: Viewer, request: Request) -> int:
    row, n = _row(request), len(viewer.source.required())
    if row >= n:
        raise LookupError(f"there is no sample {row}; the dataset has {n}")
    return row


def _field(viewer: Viewer, request: Request) -> str:
    name: str = request.path_params["field"]
    if name not in viewer.source.required().schema:
        raise LookupError(f"there is no field {name!r:.80}")
    return name


def _dataset(viewer: Viewer, request: Request) -> Any:
    return overview.describe_dataset(viewer.source, is_writable=viewer.is_writable)


def _rows(viewer: Viewer, request: Request) -> Any:
    n = len(viewer.source.required())
    start = number(request.query_params.get("start"), "start", 0, 1 << 48, 0)
    count = number(request.query_params.get("count"), "count", 1, 500, 100)
    chosen = range(start, min(n, start + count))
    with viewer.source.borrow() as dataset:
        found = rows.describe_rows(dataset, chosen, positions=chosen)
    return {"n": n, "n_total": n, "complete": True, "progress": 1, "rows": found}


def _sample(viewer: Viewer, request: Request) -> Any:
    from shardio_tools.view.samples import describe_sample

    row = _checked_row(viewer, request)
    with viewer.source.borrow() as dataset:
        (facts,) = rows.describe_rows(dataset, [row], positions=[row])
        found = describe_sample(dataset, row)
    found |= {"row": row, "n": len(viewer.source.required()), "title": facts["title"]}
    return {"clip": None, "mark": None, **found, "damaged": facts["damaged"]}


def _picture(found: Any) -> Response:
    headers = {"cache-control": "private, max-age=3600"}
    return Response(found.data, 200, headers, found.media_type)


def _thumbnail(viewer: Viewer, request: Request) -> Response:
    row, field = _checked_row(viewer, request), _field(viewer, request)
    size = number(request.query_params.get("size"), "size", 64, 512, 256)
    with viewer.source.borrow() as dataset:
        return _picture(viewer.thumbnails.thumbnail(dataset, row, field, size))


def _frame(viewer: Viewer, request: Request) -> Response:
    row, field = _checked_row(viewer, request), _field(viewer, request)
    frame = number(request.path_params["number"], "the number of the frame", 0, 1 << 48)
    size = number(request.query_params.get("size"), "size", 64, 4096, 1024)
    with viewer.source.borrow() as dataset:
        return _picture(viewer.thumbnails.frame(dataset, row, field, frame, size))


def _media_facts(viewer: Viewer, row: int, field: str) -> dict[str, Any]:
    from shardio_tools.view.mp4 import open_media

    if row >= len(viewer.source.required()) or field not in viewer.source.required().schema:
        raise LookupError(f"there is no sample {row} with a field {field!r:.80}")
    with viewer.source.borrow() as dataset:
        found = open_media(dataset, row, field)
        return {"size": found.size, "etag": found.etag, "media_type": found.media_type}


def _read_media(viewer: Viewer, row: int, field: str, start: int, stop: int) -> bytes:
    from shardio_tools.view.mp4 import open_media

    with viewer.source.borrow() as dataset:
        return bytes(open_media(dataset, row, field).read(start, stop))


def _original(viewer: Viewer, request: Request) -> Response:
    from shardio_tools.view.samples import original

    row, field = _checked_row(viewer, request), _field(viewer, request)
    with viewer.source.borrow() as dataset:
        found = original(dataset, row, field)
    name = "".join(
        c if c.isascii() and (c.isalnum() or c in "._-") else "_" for c in found.file_name
    )
    headers = {"content-disposition": f'attachment; filename="{name}"', "cache-control": "no-store"}
    return Response(found.data, 200, headers, "application/octet-stream")


def _series(viewer: Viewer, request: Request) -> Any:
    from shardio_tools.view.series import series

    row, field = _checked_row(viewer, request), _field(viewer, request)
    points = number(request.query_params.get("points"), "points", 1, 4000, 1000)
    with viewer.source.borrow() as dataset:
        return series(dataset, row, field, points)


def _heatmap(viewer: Viewer, request: Request) -> Response:
    from shardio_tools.view.series import heatmap

    row, field = _checked_row(viewer, request), _field(viewer, request)
    with viewer.source.borrow() as dataset:
        found = heatmap(dataset, row, field)
    headers = {"cache-control": "no-store", "x-range": f"{found.low:.6g}..{found.high:.6g}"}
    return Response(found.data, 200, headers, "image/png")
