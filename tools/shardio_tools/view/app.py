"""The application: routes of the viewer's server, each answered in a worker thread."""

from __future__ import annotations

import asyncio
import json
import sys
import traceback
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from functools import partial
from typing import Any, Final, Self

import anyio
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

import shardio
from shardio import InvalidArgument
from shardio.errors import DatasetConflict
from shardio_tools.view import rows
from shardio_tools.view.epochs import EpochBatches
from shardio_tools.view.jobs import Jobs, in_own_thread
from shardio_tools.view.marks import Marks
from shardio_tools.view.mp4 import open_media
from shardio_tools.view.originals import original
from shardio_tools.view.overview import Overview
from shardio_tools.view.queries import parse_filter
from shardio_tools.view.responses import (
    Download,
    NotFound,
    error_response,
    json_response,
    range_response,
    response_for,
    static_files,
    static_response,
)
from shardio_tools.view.samples import describe_sample
from shardio_tools.view.searches import Listing, Queries
from shardio_tools.view.series import MAX_POINTS, heatmap, series
from shardio_tools.view.source import Source, row_change, version_of
from shardio_tools.view.stored import parse_count
from shardio_tools.view.thumbnails import MAX_FRAME_SIDE, MAX_SIDE, MIN_SIDE, Thumbnails
from shardio_tools.view.verification import Verification

_WAIT_S: Final = 0.15
"""The time that an answer waits for rows that a scan may find soon."""
_MAX_ROWS: Final = 500
"""The maximum number of rows of one answer."""
_MAX_PAGE_NAME: Final = 40
"""The maximum length of the name by which a page identifies itself; the rest is cut off."""
_N_THREADS: Final = 8
"""The number of requests that are worked on at the same time; others wait."""
_TURN_S: Final = 5.0
"""The time that a request waits for the loader, which works on one batch at a time, or for another
download to end."""
_N_DOWNLOADS: Final = 4
"""The number of downloads that are in memory at the same time, each of at most 64 MiB."""


class ViewerState:
    """The state of a running viewer: the dataset, caches, background jobs and marks.

    `loader` is the object that `--loader` names, and `loader_name` its name. `tokenizer` turns
    tokens into text.
    """

    def __init__(
        self,
        path: str,
        *,
        is_writable: bool = False,
        loader: Any = None,
        loader_name: str | None = None,
        tokenizer: Any = None,
    ) -> None:
        self.source = Source(path)
        self.jobs = Jobs()
        self.overview = Overview(
            self.source, self.jobs, is_writable=is_writable, loader=loader_name
        )
        self.queries = Queries(self.source)
        self.verification = Verification(self.source, self.jobs)
        self.marks = Marks(self.source, is_writable=is_writable)
        self.thumbnails = Thumbnails()
        self.epochs = EpochBatches(path, loader)
        self.tokenizer = tokenizer
        self.static = static_files()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def generation(self) -> dict[str, Any]:
        """Return the number of the generation that is shown, and facts about a newer one."""
        shown = self.source.dataset
        number = None if shown is None else shown.generation
        return {"shown": number, "newer": self.source.newer()}

    def reload(self) -> dict[str, Any]:
        """Show the published generation; keep the marks if the rows have kept their numbers.

        Raises:
            DatasetCorrupt: no generation can be read.
        """
        before = self.source.dataset
        self.source.reload()
        if before is None or row_change(before, self.source.required()) == "changed":
            self.marks.clear()
        self.verification.clear()
        return self.generation()

    def close(self) -> None:
        """Stop background jobs and close the dataset."""
        self.queries.close()
        self.jobs.close()
        self.epochs.close()
        self.source.close()


Work = Callable[[ViewerState, Request], Any]
Posted = Callable[[ViewerState, Any], Any]
Caller = Callable[[Callable[[], Any]], Awaitable[Any]]
Handler = Callable[[Request], Coroutine[Any, Any, Response]]


async def _http_error(request: Request, error: Exception) -> Response:
    status = error.status_code if isinstance(error, HTTPException) else 500
    texts = {404: "page not found", 405: "method not allowed"}
    return error_response(status, texts.get(status, "the request cannot be answered"))


async def _guarded(answer: Callable[[], Awaitable[Response]]) -> Response:
    """Return an answer; an error about the data becomes an answer of its own."""
    try:
        found = await answer()
    except Exception as error:  # noqa: BLE001  # the server goes on
        if (known := response_for(error)) is not None:
            return known
        traceback.print_exception(error, file=sys.stderr)
        return error_response(500, "the viewer failed; its terminal shows the error")
    return found


def _answered(work: Callable[[ViewerState, Any], Any], viewer: ViewerState, given: Any) -> Response:
    """Return the answer of `work`; any other value that it returns becomes JSON."""
    found = work(viewer, given)
    return found if isinstance(found, Response) else json_response(found)


def _row(request: Request) -> int:
    text = request.path_params["row"]
    if not (text.isascii() and text.isdigit() and len(text) <= 18):
        raise NotFound(f"{text!r:.40} is not the number of a sample")
    return int(text)


def _checked_row(viewer: ViewerState, request: Request) -> int:
    row, n = _row(request), len(viewer.source.required())
    if row >= n:
        raise NotFound(f"there is no sample {row}; the dataset has {n}")
    return row


def _field(viewer: ViewerState, request: Request) -> str:
    name: str = request.path_params["field"]
    if name not in viewer.source.required().schema:
        raise NotFound(f"there is no field {name!r:.80}")
    return name


def _dataset(viewer: ViewerState, request: Request) -> Any:
    return viewer.overview.describe()


def _count(viewer: ViewerState, content: Any) -> Any:
    viewer.overview.start_statistics()
    return viewer.overview.statistics()


def _verify(viewer: ViewerState, content: Any) -> Any:
    viewer.verification.start()
    return viewer.verification.as_json()


def _listing(viewer: ViewerState, request: Request) -> Listing:
    wanted = parse_filter(request.query_params, viewer.source.required())
    return viewer.queries.get(wanted, request.query_params.get("page", "")[:_MAX_PAGE_NAME])


def _rows(viewer: ViewerState, request: Request) -> Any:
    start = parse_count(request.query_params.get("start"), "start", 0, 1 << 48, 0)
    count = parse_count(request.query_params.get("count"), "count", 1, _MAX_ROWS, 100)
    shown, found = viewer.source.required(), _listing(viewer, request)
    found.wait(start + count, _WAIT_S)
    is_complete, n = found.is_complete, found.n
    if is_complete and found.has_failed:
        raise InvalidArgument(found.text)
    chosen = found.rows(start, start + count)
    with viewer.source.borrow() as dataset:
        if row_change(shown, dataset) == "changed":
            raise DatasetConflict(f"{viewer.source.path}: another dataset was written here")
        described = _describe_rows(viewer, dataset, chosen, range(start, start + len(chosen)))
        n_total = len(dataset)
    return {
        "n": n,
        "n_total": n_total,
        "complete": is_complete,
        "progress": 1 if is_complete else found.progress,
        "text": found.text,
        "rows": described,
    }


def _describe_rows(
    viewer: ViewerState,
    dataset: shardio.ShardDataset,
    chosen: Sequence[int],
    positions: Sequence[int],
) -> list[dict[str, Any]]:
    """Return facts about rows, with the damage and the marks that are known."""
    found = rows.describe_rows(dataset, chosen, positions)
    subsets = viewer.source.subsets_of(chosen)
    for facts, subset in zip(found, subsets, strict=True):
        facts["subset"] = subset
        facts["damaged"] = facts["damaged"] or viewer.verification.damage(dataset, facts["row"])
        facts["marked"] = viewer.marks.note(facts["row"]) is not None
    return found


def _position(viewer: ViewerState, request: Request) -> Any:
    n = len(viewer.source.required())
    row = parse_count(request.query_params.get("row"), "row", 0, max(0, n - 1))
    found = _listing(viewer, request)
    found.wait(1 << 62, _WAIT_S)
    is_complete = found.is_complete
    return {"position": found.position(row), "complete": is_complete}


def _sample(viewer: ViewerState, request: Request) -> Any:
    row = _checked_row(viewer, request)
    with viewer.source.borrow() as dataset:
        (facts,) = _describe_rows(viewer, dataset, [row], [row])
        found = describe_sample(dataset, row, tokenizer=viewer.tokenizer)
        n = len(dataset)
    note = viewer.marks.note(row)
    found |= {"row": row, "n": n, "title": facts["title"], "subset": facts["subset"]}
    found["damaged"] = facts["damaged"] or found.get("damaged")
    found["mark"] = None if note is None else {"note": note}
    return {"clip": None, **found}


def _picture(
    viewer: ViewerState, request: Request, make: Callable[[shardio.ShardDataset], tuple[bytes, str]]
) -> Response:
    """Return a picture; 304 if the browser has it from this generation of this dataset."""
    shown = viewer.source.required()
    etag = f'"{version_of(shown)}-{shardio.__version__}"'
    headers = {"cache-control": "private, no-cache", "etag": etag}
    if request.headers.get("if-none-match") == etag:
        return Response(status_code=304, headers=headers)
    with viewer.source.borrow() as dataset:
        data, media_type = make(dataset)
    return Response(data, 200, headers, media_type)


def _thumbnail(viewer: ViewerState, request: Request) -> Response:
    row, field = _checked_row(viewer, request), _field(viewer, request)
    size = parse_count(request.query_params.get("size"), "size", MIN_SIDE, MAX_SIDE, 256)
    return _picture(
        viewer, request, lambda dataset: viewer.thumbnails.get(dataset, row, field, size)
    )


def _frame(viewer: ViewerState, request: Request) -> Response:
    row, field = _checked_row(viewer, request), _field(viewer, request)
    frame = parse_count(request.path_params["number"], "the number of the frame", 0, 1 << 48)
    size = parse_count(request.query_params.get("size"), "size", MIN_SIDE, MAX_FRAME_SIDE, 1024)
    return _picture(
        viewer, request, lambda dataset: viewer.thumbnails.frame(dataset, row, field, frame, size)
    )


def _media_facts(viewer: ViewerState, row: int, field: str) -> dict[str, Any]:
    if row >= len(viewer.source.required()) or field not in viewer.source.required().schema:
        raise NotFound(f"there is no sample {row} with a field {field!r:.80}")
    with viewer.source.borrow() as dataset:
        found = open_media(dataset, row, field)
        names = "size", "etag", "media_type", "data"
        return {name: getattr(found, name) for name in names}


def _read_media(viewer: ViewerState, row: int, field: str, start: int, stop: int) -> bytes:
    with viewer.source.borrow() as dataset:
        return bytes(open_media(dataset, row, field).read(start, stop))


def _original(viewer: ViewerState, request: Request) -> tuple[bytes, dict[str, str]]:
    row, field = _checked_row(viewer, request), _field(viewer, request)
    with viewer.source.borrow() as dataset:
        found = original(dataset, row, field)
    disposition = f'attachment; filename="{found.file_name}"'
    return found.data, {"content-disposition": disposition, "cache-control": "no-store"}


def _series(viewer: ViewerState, request: Request) -> Any:
    row, field = _checked_row(viewer, request), _field(viewer, request)
    points = parse_count(request.query_params.get("points"), "points", 1, MAX_POINTS, 1000)
    with viewer.source.borrow() as dataset:
        return series(dataset, row, field, points)


def _heatmap(viewer: ViewerState, request: Request) -> Response:
    row, field = _checked_row(viewer, request), _field(viewer, request)
    with viewer.source.borrow() as dataset:
        found = heatmap(dataset, row, field)
    headers = {"cache-control": "no-store", "x-range": f"{found.low:.6g}..{found.high:.6g}"}
    return Response(found.data, 200, headers, "image/png")


def _epoch(viewer: ViewerState, request: Request) -> Any:
    if viewer.epochs.is_fixed:  # loading a batch may take long: nothing is borrowed meanwhile
        return viewer.epochs.describe(viewer.source.required(), request.query_params)
    with viewer.source.borrow() as dataset:
        return viewer.epochs.describe(dataset, request.query_params)


def _epoch_picture(viewer: ViewerState, request: Request) -> Response:
    given = request.path_params
    names = ("epoch", "batch", "item")
    epoch, batch, item = (parse_count(given[name], name, 0, 1 << 48) for name in names)
    found = viewer.epochs.picture(epoch, batch, item, given["field"])
    return Response(found.data, 200, {"cache-control": "no-store"}, found.media_type)


_GETS: Final[Mapping[str, Work]] = {
    "/api/classes": lambda viewer, request: viewer.overview.classes_of(
        request.query_params.get("subset", "")
    ),
    "/api/dataset": _dataset,
    "/api/generation": lambda viewer, _: viewer.generation(),
    "/api/marks": lambda viewer, _: viewer.marks.as_json(),
    "/api/position": _position,
    "/api/rows": _rows,
    "/api/sample/{row}": _sample,
    "/api/statistics": lambda viewer, _: viewer.overview.statistics(),
    "/api/verification": lambda viewer, _: viewer.verification.as_json(),
    "/frame/{row}/{field:path}/{number}": _frame,
    "/heatmap/{row}/{field:path}": _heatmap,
    "/series/{row}/{field:path}": _series,
    "/thumbnail/{row}/{field:path}": _thumbnail,
}
_LOADER_GETS: Final[Mapping[str, Work]] = {
    "/api/epoch": _epoch,
    "/epoch/{epoch}/{batch}/{item}/{field:path}": _epoch_picture,
}
"""Answers that may execute code of the user, which may take for ever: one at a time."""
_POSTS: Final[Mapping[str, Posted]] = {
    "/api/marks": lambda viewer, content: viewer.marks.set(content),
    "/api/marks/save": lambda viewer, content: viewer.marks.save(content),
    "/api/reload": lambda viewer, _: viewer.reload(),
    "/api/statistics": _count,
    "/api/verification": _verify,
}


class Pages:
    """The handlers of a viewer's requests, and the limits on those that are worked on at a time."""

    def __init__(self, viewer: ViewerState) -> None:
        self._viewer = viewer
        self._threads = anyio.CapacityLimiter(_N_THREADS)
        self._turn, self._downloads = asyncio.Semaphore(1), asyncio.Semaphore(_N_DOWNLOADS)

    def routes(self) -> list[Route]:
        """Return the routes of all handlers."""
        pages: dict[str, Handler] = {
            "/": self._page,
            "/static/{name}": self._static,
            "/media/{row}/{field:path}": self._media,
            "/original/{row}/{field:path}": self._download,
        }
        pages |= {path: self._answered(work, self._in_thread) for path, work in _GETS.items()}
        pages |= {path: self._answered(work, self._in_turn) for path, work in _LOADER_GETS.items()}
        routes = [Route(path, handler) for path, handler in pages.items()]
        for path, work in _POSTS.items():
            routes.append(Route(path, self._posted(work), methods=["POST"]))
        return routes

    async def _in_thread(self, work: Callable[[], Any]) -> Any:
        return await anyio.to_thread.run_sync(work, limiter=self._threads)

    async def _in_turn(self, work: Callable[[], Any]) -> Any:
        try:
            async with asyncio.timeout(_TURN_S):
                await self._turn.acquire()
        except TimeoutError:
            error = "the loader still works on another batch"
            return error_response(503, error, "wait, or see whether its transform ever returns")
        try:
            return await in_own_thread(work)
        finally:
            self._turn.release()

    def _posted(self, work: Posted) -> Handler:
        """Return a handler of a POST, whose body is JSON."""

        async def handle(request: Request) -> Response:
            try:
                content = json.loads(await request.body() or b"{}")
            except (ValueError, RecursionError):
                return error_response(400, "the body must be JSON")
            call = partial(_answered, work, self._viewer, content)
            return await _guarded(lambda: self._in_thread(call))

        return handle

    def _answered(self, work: Work, call: Caller) -> Handler:
        """Return a handler that answers with the result of `work`, or with its error."""

        async def handle(request: Request) -> Response:
            return await _guarded(lambda: call(partial(_answered, work, self._viewer, request)))

        return handle

    async def _media(self, request: Request) -> Response:
        async def answer() -> Response:
            row, field = _row(request), request.path_params["field"]
            facts = await self._in_thread(partial(_media_facts, self._viewer, row, field))
            data = facts.pop("data")

            async def read(start: int, stop: int) -> bytes:
                if data is not None:
                    return bytes(data[start:stop])
                part = partial(_read_media, self._viewer, row, field, start, stop)
                found: bytes = await self._in_thread(part)
                return found

            return range_response(request, **facts, read=read)

        return await _guarded(answer)

    async def _download(self, request: Request) -> Response:
        try:
            async with asyncio.timeout(_TURN_S):
                await self._downloads.acquire()
        except TimeoutError:
            return error_response(503, "other downloads are not complete", "wait for one of them")
        answer: Response | None = None

        async def make() -> Response:
            nonlocal answer
            data, headers = await self._in_thread(partial(_original, self._viewer, request))
            answer = Download(data, headers, self._downloads.release)
            return answer

        try:
            return await _guarded(make)
        finally:
            if answer is None:
                self._downloads.release()

    async def _page(self, request: Request) -> Response:
        return static_response(self._viewer.static.get("index.html"), request)

    async def _static(self, request: Request) -> Response:
        return static_response(self._viewer.static.get(request.path_params["name"]), request)


def make_app(viewer: ViewerState) -> Starlette:
    """Return the ASGI application of a viewer, without the checks of `Security`."""
    errors = {HTTPException: _http_error}
    return Starlette(routes=Pages(viewer).routes(), exception_handlers=errors)
