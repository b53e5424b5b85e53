"""Measure a loader over a distant store: each request waits, each connection is slow.

    python tools/dev/bench_distant.py [--mib N] [--shards N] [--latency-ms N] [--mb-per-s N]

A web server, in a process of its own, answers each request after a while, and gives each connection
no more than so many MB/s. Of it, with an empty cache:

* **rows**: the time to the first batch, and the rate of the first epoch, in shards of 64 MiB;
* **clips**: the time to make a loader of clips, which looks at the tables of every shard.

Exit code 1 if the rate is under that of 2.5 connections, or if the loader of clips takes more than
a quarter of what two requests for each shard take one after another.
"""

from __future__ import annotations

import argparse
import functools
import http.server
import itertools
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

import shardio
from shardio import Array, Schema, ShardLoader, Video
from tests.loading import write_dataset
from tests.shards import made_stream

CONNECTIONS_WANTED = 2.5
SHARE_WANTED = 0.25
ROWS = Schema({"row": Array("uint8", (1 << 20,))})
VIDEOS = Schema({"video": Video()})
MIB_PER_SHARD = 64
N_VIDEOS = 200
"""In a shard; its tables do not fit into the first request."""
_SENT_AT_ONCE = 512 << 10


class Slow(http.server.SimpleHTTPRequestHandler):
    """Gives parts of files, each after a while, and no faster than is said."""

    protocol_version = "HTTP/1.1"

    def __init__(self, latency_s: float, bytes_per_s: float, *given: Any, **named: Any) -> None:
        self._latency_s, self._bytes_per_s = latency_s, bytes_per_s
        super().__init__(*given, **named)

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing."""

    def do_GET(self) -> None:
        """Answer with what is asked for of a file."""
        time.sleep(self._latency_s)
        place = self.translate_path(self.path)
        if not os.path.isfile(place):
            self.send_error(404)
            return
        size = os.path.getsize(place)
        first, stop, is_part = self._asked(size)
        self.send_response(206 if is_part else 200)
        if is_part:
            self.send_header("Content-Range", f"bytes {first}-{stop - 1}/{size}")
        self.send_header("Content-Length", str(stop - first))
        self.send_header("Last-Modified", self.date_time_string(int(os.path.getmtime(place))))
        self.send_header("ETag", f'"{size:x}-{os.stat(place).st_mtime_ns:x}"')
        self.end_headers()
        self.wfile.flush()
        self._send(place, first, stop)

    def _asked(self, size: int) -> tuple[int, int, bool]:
        asked = self.headers.get("Range")
        if asked is None:
            return 0, size, False
        first, _, last = asked.removeprefix("bytes=").partition("-")
        if not first:
            return max(0, size - int(last)), size, True
        return int(first), min(size, int(last) + 1 if last else size), True

    def _send(self, place: str, first: int, stop: int) -> None:
        began_s, sent = time.monotonic(), 0
        with open(place, "rb") as file:
            while first + sent < stop:
                n = min(_SENT_AT_ONCE, stop - first - sent)
                sent += os.sendfile(self.connection.fileno(), file.fileno(), first + sent, n)
                early_s = sent / self._bytes_per_s - (time.monotonic() - began_s)
                time.sleep(max(0.0, early_s))


def serve(told: Connection, folder: str, latency_s: float, bytes_per_s: float) -> None:
    """Serve a folder until the process is ended; says on which port."""
    handler = functools.partial(Slow, latency_s, bytes_per_s, directory=folder)
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    told.send(server.server_address[1])
    server.serve_forever()


def rows(n: int) -> Iterator[dict[str, Any]]:
    """Rows that differ."""
    noise = np.random.default_rng(0).integers(0, 255, 1 << 20, np.uint8)
    return ({"row": np.roll(noise, i)} for i in range(n))


def main() -> int:
    """Measure, print, compare."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--mib", type=int, default=512)
    parser.add_argument("--shards", type=int, default=100)
    parser.add_argument("--latency-ms", type=float, default=30)
    parser.add_argument("--mb-per-s", type=float, default=80)
    given = parser.parse_args()
    latency_s, bytes_per_s = given.latency_ms / 1e3, given.mb_per_s * 1e6
    options: Any = {"output": "numpy", "num_workers": 2}
    with tempfile.TemporaryDirectory() as place:
        n_shards, n_videos = -(-given.mib // MIB_PER_SHARD), given.shards * N_VIDEOS
        write_dataset(Path(place) / "rows", given.mib, n_shards, ROWS, rows(given.mib))
        videos = itertools.repeat({"video": made_stream(0, 60)}, n_videos)
        write_dataset(Path(place) / "videos", n_videos, given.shards, VIDEOS, videos)
        ours, theirs = multiprocessing.Pipe()
        server = multiprocessing.Process(
            target=serve, args=(theirs, place, latency_s, bytes_per_s), daemon=True
        )
        server.start()
        url, began_s = f"http://127.0.0.1:{ours.recv()}", time.perf_counter()
        with ShardLoader(
            shardio.open(f"{url}/rows", cache=Path(place) / "cache"), 8, **options
        ) as loader:
            batches = iter(loader)
            n_bytes = next(batches)["row"].nbytes
            first_s = time.perf_counter() - began_s
            n_bytes += sum(batch["row"].nbytes for batch in batches)
            found = n_bytes / (time.perf_counter() - began_s)
        began_s = time.perf_counter()
        far = shardio.open(f"{url}/videos", cache=Path(place) / "2")
        with ShardLoader(far.clips(4), 8, **options):
            clips_s = time.perf_counter() - began_s
        server.kill()
    n_at_once, share = found / bytes_per_s, clips_s / (2 * given.shards * latency_s)
    print(f"{given.latency_ms:g} ms for each request, {given.mb_per_s:g} MB/s a connection")
    print(f"  rows   first batch {first_s:.2f} s, epoch {found / 1e6:,.0f} MB/s: {n_at_once:.1f} ×")
    print(f"  clips  {given.shards} shards in {clips_s:.2f} s: {share:.2f} of one after another")
    return 0 if n_at_once >= CONNECTIONS_WANTED and share <= SHARE_WANTED else 1


if __name__ == "__main__":
    sys.exit(main())
