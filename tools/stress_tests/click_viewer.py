"""Click at random in `shardio view`; check each answer, and the memory of the server.

    tools/stress view --minutes N [--dataset PATH] [--clicks N] [--seed S]

Each click requests what the page requests then: rows of a filter at a random position and their
thumbnails, a sample with ranges of its videos and sound, its curves and heat maps, a batch of a
random epoch, marks. No answer may be an error, and the server may not take more than 300 MB. The
default dataset has 6 videos, arrays and texts.
"""

from __future__ import annotations

import collections
import contextlib
import http.client
import json
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote, urlencode, urlsplit

import numpy as np

import shardio
from benchmarks.child import status_bytes
from shardio_tools.sample_clips import write_clips
from stress_tests.program import Deadline, environment, make_parser, memory_folder

MAX_BYTES: Final = 300_000_000
_N_ROWS: Final = 60
_POST: Final = {"X-Shardio": "1", "Content-Type": "application/json"}


class Wrong(Exception):
    """Raised for an answer that is an error, or a server that takes too much memory."""


class Clicker:
    """A user who clicks at random; counts the requests of each kind."""

    def __init__(self, link: str, seed: int) -> None:
        parts = urlsplit(link)
        self._connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=60)
        self._headers: dict[str, str] = {}
        self.random, self.tally = random.Random(seed), collections.Counter[str]()
        self._request("page", f"/?{parts.query}", (303, 307))
        self._headers = {"Cookie": self._answer.headers["set-cookie"].partition(";")[0]}
        self.facts = self.read("/api/dataset")
        self.clicks = [self.rows, self.rows, self.sample, self.sample, self.epoch, self.marks]

    def _request(
        self, kind: str, path: str, statuses: tuple[int, ...] = (200,), **given: Any
    ) -> bytes:
        """Send a request; raise Wrong unless the status of the answer is one of `statuses`."""
        body = json.dumps(given["body"]) if "body" in given else None
        headers = self._headers | given.get("headers", {})
        self._connection.request("GET" if body is None else "POST", path, body, headers)
        self._answer = self._connection.getresponse()
        content = self._answer.read()
        self.tally[kind] += 1
        if self._answer.status not in statuses:
            raise Wrong(f"{path}: {self._answer.status}: {content[:500]!r}")
        return content

    def read(self, path: str, statuses: tuple[int, ...] = (200,)) -> Any:
        """Return the JSON of an answer."""
        return json.loads(self._request(path.split("/")[2].partition("?")[0], path, statuses))

    def rows(self) -> None:
        """Look at rows of a random filter, and at some of their thumbnails."""
        asked: dict[str, Any] = {"count": _N_ROWS}
        if self.facts["classes"] and self.random.random() < 0.3:
            asked["class"] = self.random.randrange(len(self.facts["classes"]))
        sortable = [field["name"] for field in self.facts["fields"] if field["sortable"]]
        if sortable and self.random.random() < 0.3 and self.facts["n_samples"] < 10**6:
            asked["sort"] = self.random.choice(sortable)
        n = self.read(f"/api/rows?{urlencode({**asked, 'start': 0})}")["n"]
        asked["start"] = self.random.randrange(max(1, n))
        found = self.read(f"/api/rows?{urlencode(asked)}")["rows"]
        for row in self.random.sample(found, min(8, len(found))):
            if row["image"] is not None:
                path = f"/thumbnail/{row['row']}/{quote(row['image'], safe='')}?size=256"
                self._request("thumbnail", path)

    def sample(self) -> None:
        """Open a random sample, and seek in its media."""
        found = self.read(f"/api/sample/{self.random.randrange(self.facts['n_samples'])}")
        for field in found["fields"]:
            if field["kind"] in ("video", "audio"):
                for _ in range(4):
                    start = self.random.randrange(1 << 16)
                    self._request(
                        "media",
                        field["src"],
                        (200, 206, 416),
                        headers={"Range": f"bytes={start}-{start + 262_143}"},
                    )
            for key in ("series", "heatmap", "waveform", "image"):
                if isinstance(link := field.get(key), str) and link.startswith("/"):
                    self._request(key, link)

    def epoch(self) -> None:
        """Look at a random batch of a random epoch."""
        asked: dict[str, Any] = {"epoch": self.random.randrange(100), "batch": 0, "batch_size": 8}
        asked |= {"seed": self.random.randrange(10), "shuffle": "full"}
        found = self.read(f"/api/epoch?{urlencode(asked)}")
        asked["batch"] = self.random.randrange(max(1, found["n_batches"]))
        self.read(f"/api/epoch?{urlencode(asked)}")

    def marks(self) -> None:
        """Mark a random sample, or remove its mark."""
        row = self.random.randrange(self.facts["n_samples"])
        mark = {"row": row, "marked": self.random.random() < 0.5, "note": "random"}
        self._request("marks", "/api/marks", headers=_POST, body=mark)


@contextlib.contextmanager
def viewing(path: Path) -> Iterator[tuple[str, int]]:
    """Run `shardio view`; yield its link, and the id of its process."""
    command = [sys.executable, "-m", "shardio", "view", "--no-open", "--", str(path)]
    with subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process.stdout.readline().strip() if process.stdout else "", process.pid
        finally:
            process.send_signal(signal.SIGINT)


def write(folder: Path) -> Path:
    """Write the default dataset."""
    write_clips(folder / "videos", n_clips=6)
    rng = np.random.default_rng(0)
    paths = sorted((folder / "videos").rglob("*.mp4"))
    samples = (
        {
            "video": path.read_bytes(),
            "state": rng.normal(size=(200, 6)).cumsum(0).astype(np.float32),
            "level": float(rng.random()),
            "task": f"task {i % 5}",
            "label": i % 4,
        }
        for i, path in enumerate(paths)
    )
    fields = {"video": shardio.Video(), "state": shardio.Array("float32", (None, 6))}
    fields |= {"level": shardio.Array("float64"), "task": shardio.Text()}
    fields |= {"label": shardio.Array("int64")}
    with shardio.DatasetWriter(folder / "set", shardio.Schema(fields), classes=list("abcd")) as out:
        for sample in samples:
            out.append(sample)
    return folder / "set"


def run(path: Path, minutes: float | None, n_clicks: int, seed: int) -> None:
    """Click until the time is over, or `n_clicks` times; print the counts and the memory."""
    deadline, most = Deadline(minutes), 0
    with viewing(path) as (link, pid):
        clicker = Clicker(link, seed)
        n = 0
        while deadline.asks_for(n < n_clicks):
            clicker.random.choice(clicker.clicks)()
            n += 1
            most = status_bytes("VmHWM", pid)
            if most > MAX_BYTES:
                raise Wrong(f"the server takes {most / 1e6:.0f} MB after {n} clicks")
    counts = ", ".join(f"{count:,} {kind}" for kind, count in sorted(clicker.tally.items()))
    print(f"{n:,} clicks: {counts}; the server took at most {most / 1e6:.0f} MB")


def main(arguments: list[str]) -> int:
    """Read the command line, and click."""
    parser = make_parser("view", __doc__)
    parser.add_argument("--dataset", type=Path, help="the dataset to look at")
    parser.add_argument(
        "--clicks", type=int, default=500, help="how often, without --minutes (default: 500)"
    )
    options = parser.parse_args(arguments)
    try:
        with memory_folder() as folder:
            path = options.dataset or write(folder)
            run(path, options.minutes, options.clicks, options.seed)
    except Wrong as error:
        print(f"tools/stress view: {error}", file=sys.stderr)
        return 1
    return 0
