"""Datasets and clients for the tests of the viewer's server."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final
from urllib.parse import unquote

import anyio
import numpy as np
from starlette.testclient import TestClient

import shardio
from shardio import Array, Schema, Text
from shardio_tools.view.app import ViewerState, make_app
from shardio_tools.view.security import Security
from tests.loading import write_dataset

TOKEN: Final = "the-token"
PORT: Final = 8123
POST: Final = {"X-Shardio": "1"}
SCRIPT: Final = "<script>alert(1)</script>"
FIELDS = Schema(
    {
        "label": Array("int64"),
        "score": Array("float32", optional=True),
        "level": Array("int16"),
        "caption": Text(),
        "note": Text(optional=True),
        "points": Array("int16", (None, 2)),
        "frames": Array("uint8", (4, 16, 16, 3)),
    }
)
CLASSES: Final = ("cats", SCRIPT, "dogs")
N: Final = 60
N_SHARDS: Final = 4


def sample(i: int) -> dict[str, Any]:
    """Return sample i: its class is i % 3, and every seventh has no score."""
    return {
        "label": i % 3,
        "score": None if i % 7 == 0 else np.float32((i * 37 % 60) / 10),
        "level": i // 10,
        "caption": f"A {'red' if i % 2 else 'Blue'} thing {SCRIPT} {i}",
        "note": f"note {i}" if i % 4 == 0 else None,
        "points": np.full((i % 5, 2), i, np.int16),
        "frames": np.full((4, 16, 16, 3), i, np.uint8),
    }


def make_dataset(folder: Path, n: int = N, n_shards: int = N_SHARDS) -> Path:
    """Write samples in some shards, with names of classes."""
    write_dataset(folder, n, n_shards, FIELDS, map(sample, range(n)))
    from shardio.dataset.manifest import load, publish_next

    publish_next(folder, load(folder), classes=CLASSES)
    return folder


@contextlib.contextmanager
def unstarted(path: str | Path, **options: Any) -> Iterator[TestClient]:
    """Return a client of a viewer, with its cookie, that runs no event loop; use `ask` with it."""
    with ViewerState(str(path), **options) as viewer:
        guarded = Security(
            make_app(viewer),
            TOKEN,
            "127.0.0.1",
            PORT,
            is_writable=options.get("is_writable", False),
        )
        yield TestClient(
            guarded,
            base_url=f"http://127.0.0.1:{PORT}",
            headers={"Cookie": f"{guarded.cookie}={TOKEN}"},
            follow_redirects=False,
        )


@contextlib.contextmanager
def viewing(path: str | Path, **options: Any) -> Iterator[TestClient]:
    """Return a client of a viewer, with its cookie; the attribute `viewer` is the viewer."""
    with unstarted(path, **options) as made, made as client:
        yield client


def rows_of(client: TestClient, **params: Any) -> list[int]:
    """Return the rows that a filter lists, once it is complete."""
    return [row["row"] for row in listed(client, **params)["rows"]]


def listed(client: TestClient, **params: Any) -> dict[str, Any]:
    """Return a complete list of rows."""
    while True:
        answer = client.get("/api/rows", params={"count": 500, **params})
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        if found["complete"]:
            return found


def finished(client: TestClient, path: str) -> dict[str, Any]:
    """Return the answer of a background job once it has ended."""
    while True:
        found: dict[str, Any] = client.get(path).json()
        if found["state"] != "running":
            return found


def labels_of(folder: Path) -> list[int]:
    with shardio.open(folder) as dataset:
        return [int(label) for label in dataset["label"]]


def ask_raw(client: TestClient, target: str) -> tuple[int, dict[str, str]]:
    """Send a path as it is, as uvicorn passes it on; return the status and the headers.

    The client of Starlette resolves `..` itself, as browsers do.
    """
    return ask_each(client, [target])[0]


def ask_each(client: TestClient, targets: Sequence[str]) -> list[tuple[int, dict[str, str]]]:
    """Request paths in order as `ask_raw` does, 10 times as fast as Starlette's client."""
    return anyio.run(_ask_each, client, targets)


async def _ask_each(client: TestClient, targets: Sequence[str]) -> list[tuple[int, dict[str, str]]]:
    return [(await ask(client, target))[:2] for target in targets]


async def ask(
    client: TestClient, target: str, *, post: object = None
) -> tuple[int, dict[str, str], bytes]:
    """Request a path as `ask_raw` does, or post a value; return status, headers and body."""
    path, _, query = target.partition("?")
    headers = {"host": f"127.0.0.1:{PORT}", "cookie": client.headers["cookie"]}
    if post is not None:
        headers |= {"content-type": "application/json"} | POST
    scope = {
        "type": "http",
        "method": "GET" if post is None else "POST",
        "path": unquote(path),
        "raw_path": path.encode(),
        "query_string": query.encode(),
        "headers": [(name.lower().encode(), text.encode()) for name, text in headers.items()],
    }
    sent: list[Any] = []

    async def receive() -> dict[str, Any]:
        body = b"" if post is None else json.dumps(post).encode()
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message: Any) -> None:
        sent.append(message)

    await client.app(scope, receive, send)
    found = {name.decode(): value.decode() for name, value in sent[0]["headers"]}
    return sent[0]["status"], found, b"".join(each.get("body", b"") for each in sent[1:])
