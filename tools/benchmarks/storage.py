"""Storage: cold disks, object stores, distant servers, and batches from another process."""

from __future__ import annotations

import contextlib
import functools
import http.server
import itertools
import multiprocessing
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from fractions import Fraction
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final
from unittest import mock

import numpy as np

import shardio
from benchmarks import child, data
from benchmarks.child import NotMeasured
from benchmarks.data import MIB, DatasetSpec, Sample, drain
from benchmarks.harness import Bench, Lanes, Limit, WrongResult, case
from shardio import Array, Bytes, Schema, ShardLoader, Video
from shardio._engine.filling.readahead import ReadAhead
from shardio._workers.processes.limits import control_groups
from shardio.measuring.measure import cached_share
from shardio.media.encoding import encode
from shardio.serving import make_keys
from tests.loading import write_dataset
from tests.shards import made_stream
from tests.storage.remote.scene import scene

# Cold disks.

SLACK: Final = 0.7
"""The minimum ratio of a rate to the one that it is compared with: disks vary."""
N_FRAMES: Final = 300
FILMS: Final = {"h264": (112, 16), "packets": (320, N_FRAMES)}
"""The side of a film's pictures, and the frames in a group."""
ORDERS: Final[dict[str, Any]] = {"in order": False, "full": "full", "blocks": "blocks"}
LABEL: Final = {"label": Array("int64")}
COLD: Final[dict[str, tuple[dict[str, Any], int, int]]] = {
    "images": ({"x": Array("uint8", data.FRAME)} | LABEL, 150_528, 64),
    "rows": ({"x": Array("uint8", (2048,))} | LABEL, 2048, 256),
    "records": ({"x": Bytes()} | LABEL, 30_000, 64),
    "h264": ({"x": Video()} | LABEL, 0, 32),
    "packets": ({"x": Video()} | LABEL, 0, 32),
}
"""For each kind: the schema, the mean bytes of a sample if all are read, and the batch size."""


@case(
    *(
        Limit(
            f"{name}, {order}, advice", "samples/s", f"{name}, {order}, no advice", at_least=SLACK
        )
        for name in COLD
        for order in ORDERS
    ),
    rounds=1,
)
def cold(bench: Bench, *, kind: str = "", mib: int = 2048, seconds: float = 5.0) -> Lanes:
    """Compare loading from a cold disk with and without advice to the kernel, by order."""
    for name in [kind] if kind else COLD:
        yield _cold_lanes(bench, name, mib, seconds, None)


@case(
    *(
        Limit(f"{name}, blocks, advice", "samples/s", f"{name}, full, advice", at_least=SLACK)
        for name in COLD
    ),
    rounds=1,
)
def little_memory(
    bench: Bench, *, kind: str = "", mib: int = 2048, limit_mib: int = 512, seconds: float = 5.0
) -> Lanes:
    """Compare orders in a control group whose memory is a quarter of the dataset."""
    with _memory_group(limit_mib << 20) as group:
        for name in [kind] if kind else COLD:
            yield _cold_lanes(bench, name, mib, seconds, group)


def _cold_lanes(
    bench: Bench, name: str, mib: int, seconds: float, group: Path | None
) -> dict[str, Any]:
    schema = COLD[name][0]
    folder = bench.cache.made(f"cold-{name}", f"{schema} {mib}", partial(_write_cold, name, mib))
    runs = [(order, advised) for order in ORDERS for advised in (True, False)]
    lanes = {}
    for order, advised in [*runs, ("preload", True)]:
        what = f"{name}, {order}, {'advice' if advised else 'no advice'}"
        given = (str(folder), name, order, seconds, advised)
        lanes[what] = partial(_run_cold, folder, group, given)
    return lanes


def _write_cold(name: str, mib: int, folder: Path) -> None:
    schema, n_bytes, _ = COLD[name]
    with shardio.DatasetWriter(folder, Schema(schema), shard_bytes=64 * MIB) as writer:
        for sample in _films(name, mib) if name in FILMS else _samples(name, mib * MIB // n_bytes):
            writer.append(sample)


def _samples(name: str, n: int) -> Iterator[Sample]:
    """Yield values that no file system can compress."""
    schema, n_bytes, _ = COLD[name]
    content = np.random.default_rng(0).bytes(n_bytes * 4)
    for i in range(n):
        field, start = schema["x"], i * 64 % n_bytes
        if isinstance(field, Array):
            row = np.frombuffer(content, np.uint8, n_bytes, start)
            yield {"x": row.reshape([d or 1 for d in field.shape]), "label": i}
        else:
            yield {"x": content[start : start + n_bytes // 2 + i * 997 % n_bytes], "label": i}


def _films(name: str, mib: int) -> Iterator[Sample]:
    """Yield a few films again and again."""
    side, gop = FILMS[name]
    rng = np.random.default_rng(0)
    around = rng.integers(0, 255, (side + N_FRAMES, side + N_FRAMES, 3), np.uint8)
    few = []
    for k in range(4):
        frames = ((n, around[n:, n * k // 3 :][:side, :side] // 4 + 90) for n in range(N_FRAMES))
        few.append(encode(frames, side, side, Fraction(1, 25), gop=gop, crf=30))
    for i in range(-(-mib * MIB * len(few) // sum(len(film.data) for film in few))):
        yield {"x": few[i % len(few)], "label": i}


def _run_cold(folder: Path, group: Path | None, given: tuple[object, ...]) -> Mapping[str, float]:
    """Drop the dataset from the page cache; measure in a separate process, in a control group."""
    _drop(folder)

    def enter() -> None:
        if group is not None:
            (group / "cgroup.procs").write_text(str(os.getpid()))

    found: dict[str, float] = child.call(load_cold, *given, preexec_fn=enter)
    return found


def _drop(folder: Path) -> None:
    paths = [str(path) for path in folder.glob("*.shard")]
    share: float | None = None
    for _ in range(20):  # pages that are still being read cannot be dropped
        for path in paths:
            fd = os.open(path, os.O_RDONLY)
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)
        share = cached_share(paths)
        if share is not None and share <= 0.02:
            return
        time.sleep(0.5)
    raise NotMeasured(f"{folder}: {share} of it stays in the page cache")


def load_cold(
    folder: str,
    name: str,
    order: str,
    seconds: float,
    advised: bool,  # noqa: FBT001 - by JSON
) -> dict[str, float]:
    """Load for `seconds`, or one epoch if that is shorter, in this process."""
    patch = mock.patch.object(ReadAhead, "prefetch", lambda *_: None)
    dataset: Any = shardio.open(folder)
    is_film = name in FILMS
    view = dataset.clips(16, where="random", size=(112, 112)) if is_film else dataset
    begin_s = time.perf_counter()
    if order == "preload":
        dataset.preload()
    # Use threads as workers, so that the patch applies to them too.
    options: dict[str, Any] = {"shuffle": ORDERS.get(order, "full"), "start_method": "thread"}
    options |= {"num_workers": 2, "output": "numpy", "reuse": True}
    with (
        contextlib.nullcontext() if advised else patch,
        ShardLoader(view, COLD[name][2], **options) as loader,
    ):
        batches = iter(loader)
        next(batches)
        start_s, n = time.perf_counter(), 0
        for batch in batches:
            n += len(batch["label"])
            if time.perf_counter() - start_s > seconds:
                break
        taken_s = time.perf_counter() - start_s
    first_s = start_s - begin_s
    return {
        "samples/s": n / taken_s,
        "MB/s": n / taken_s * COLD[name][1] / 1e6,
        "s to the first batch": first_s,
    }


@contextlib.contextmanager
def _memory_group(limit_bytes: int) -> Iterator[Path]:
    """Yield a new memory control group below the group of this process."""
    for version, folder in reversed(control_groups("memory")):
        group = Path(folder) / f"shardio-bench-{os.getpid()}"
        name = "memory.max" if version == 2 else "memory.limit_in_bytes"
        try:
            group.mkdir()
            (group / name).write_text(str(limit_bytes))
        except OSError:
            with contextlib.suppress(OSError):
                group.rmdir()
            continue
        try:
            yield group
        finally:
            with contextlib.suppress(OSError):  # some kernels keep the name of an empty group
                group.rmdir()
        return
    raise NotMeasured("cannot create a memory control group here")


# Object stores.


def _frame(i: int) -> Sample:
    frames = data.noise(data.FRAME, 0).copy()
    frames[0, 0, 0] = i % 251
    return {"frames": frames, "label": i}


@case(Limit("warm", "samples/s", "local", at_least=0.9), rounds=7)
def object_store(bench: Bench, *, mib: int = 128, epochs: int = 5, workers: int = 2) -> Lanes:
    """Compare cached epochs of a dataset on a local S3 server with epochs of a folder."""
    n = (mib << 20) // int(np.prod(data.FRAME))
    folder = bench.cache.dataset("frames", DatasetSpec(data.FRAMES, _frame, n, 8 * MIB))
    options: dict[str, Any] = {"output": "numpy", "num_workers": workers, "shuffle": True}
    with scene() as store:
        url = store.put_dataset(folder, "set")
        far = shardio.open(url, cache=bench.temporary(), storage_options=store.options)
        with (
            ShardLoader(far, 32, **options) as remote,
            ShardLoader(folder, 32, **options) as local,
        ):
            sizes = {shard.name: shard.n_bytes for shard in remote.dataset.shards}
            cold = _epochs_rate(remote, 1, n)["samples/s"]
            bench.note(f"first epoch, from a server in Python: {cold:,.0f} samples/s")
            drain(local)
            yield {
                "local": partial(_epochs_rate, local, epochs, n),
                "warm": partial(_epochs_rate, remote, epochs, n),
            }
        came = {name: store.proxy.n_bytes[name] for name in sizes}
    if came != sizes:
        raise WrongResult(f"downloaded {sum(came.values())} bytes, expected {sum(sizes.values())}")


def _epochs_rate(loader: Any, n_epochs: int, n: int) -> Mapping[str, float]:
    start_s = time.perf_counter()
    for _ in range(n_epochs):
        drain(loader)
    return {"samples/s": n_epochs * n / (time.perf_counter() - start_s)}


class SlowServer(http.server.SimpleHTTPRequestHandler):
    """A server that sends ranges of files, each after `latency_s` and at most at `bytes_per_s`."""

    protocol_version = "HTTP/1.1"

    def __init__(self, latency_s: float, bytes_per_s: float, *given: Any, **named: Any) -> None:
        self._latency_s, self._bytes_per_s = latency_s, bytes_per_s
        super().__init__(*given, **named)

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing."""

    def do_GET(self) -> None:
        """Send a file, or a range of it."""
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
                n = min(512 << 10, stop - first - sent)
                sent += os.sendfile(self.connection.fileno(), file.fileno(), first + sent, n)
                early_s = sent / self._bytes_per_s - (time.monotonic() - began_s)
                time.sleep(max(0.0, early_s))


def _serve(port: Connection, folder: str, latency_s: float, bytes_per_s: float) -> None:
    """Serve a folder until the process is killed; send the port first."""
    handler = functools.partial(SlowServer, latency_s, bytes_per_s, directory=folder)
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    port.send(server.server_address[1])
    server.serve_forever()


N_VIDEOS: Final = 200
"""The number of videos in a shard. Its tables do not fit into the first request."""


def _write_distant(n_rows: int, n_shards: int, folder: Path) -> None:
    folder.mkdir()
    rows = ({"row": np.roll(data.noise((MIB,), 0), i)} for i in range(n_rows))
    schema = Schema({"row": Array("uint8", (MIB,))})
    write_dataset(folder / "rows", n_rows, -(-n_rows // 64), schema, rows)
    n = n_shards * N_VIDEOS
    videos = itertools.repeat({"video": made_stream(0, 60)}, n)
    write_dataset(folder / "videos", n, n_shards, Schema({"video": Video()}), videos)


@case(
    Limit("rows", "connections' rates", at_least=2.5),
    Limit("clips", "share of one request after another", at_most=0.25),
    rounds=1,
)
def distant(
    bench: Bench, *, mib: int = 512, shards: int = 100, latency_ms: float = 30, mb_per_s: float = 80
) -> Lanes:
    """Measure loading from a server that answers after 30 ms, at 80 MB/s per connection."""
    make = partial(_write_distant, mib, shards)
    folder = bench.cache.made("distant", f"{mib} {shards}", make)
    ours, theirs = multiprocessing.Pipe()
    arguments = theirs, str(folder), latency_ms / 1e3, mb_per_s * 1e6
    server = multiprocessing.Process(target=_serve, args=arguments, daemon=True)
    server.start()
    try:
        url = f"http://127.0.0.1:{ours.recv()}"
        yield {
            "rows": lambda: _rows(bench, url, mb_per_s * 1e6),
            "clips": lambda: _clips(bench, url, 2 * shards * latency_ms / 1e3),
        }
    finally:
        server.kill()


def _rows(bench: Bench, url: str, bytes_per_s: float) -> Mapping[str, float]:
    began_s = time.perf_counter()
    far: Any = shardio.open(f"{url}/rows", cache=bench.temporary())
    with ShardLoader(far, 8, output="numpy", num_workers=2) as loader:
        batches = iter(loader)
        n_bytes = next(batches)["row"].nbytes
        first_s = time.perf_counter() - began_s
        n_bytes += sum(batch["row"].nbytes for batch in batches)
        rate = n_bytes / (time.perf_counter() - began_s)
    return {
        "s to the first batch": first_s,
        "MB/s": rate / 1e6,
        "connections' rates": rate / bytes_per_s,
    }


def _clips(bench: Bench, url: str, one_after_another_s: float) -> Mapping[str, float]:
    began_s = time.perf_counter()
    far = shardio.open(f"{url}/videos", cache=bench.temporary())
    with ShardLoader(far.clips(4), 8, output="numpy", num_workers=2):
        taken_s = time.perf_counter() - began_s
    return {"s": taken_s, "share of one request after another": taken_s / one_after_another_s}


# Batches from a server.

SAMPLE_SHAPE: Final = (64, 64, 4, 8)


def _served(i: int) -> Sample:
    return {"x": data.noise(SAMPLE_SHAPE, 0), "n": i}


@case(rounds=3)
def serve(bench: Bench, *, seconds: float = 2.0) -> Lanes:
    """Compare a client of `shardio serve`, with and without keys, with a loader in this process."""
    schema = {"x": Array("uint8", SAMPLE_SHAPE), "n": Array("int64")}
    folder = bench.cache.dataset("served", DatasetSpec(schema, _served, 1024))
    keys = bench.temporary() / "keys"
    make_keys(keys)
    how: dict[str, Any] = {"output": "numpy", "shuffle": True}
    with contextlib.ExitStack() as stack:
        plain = stack.enter_context(_server(folder))
        locked = stack.enter_context(_server(folder, "--keys", str(keys)))
        for size, batch in (("1 MiB", 8), ("8 MiB", 64)):
            with (
                ShardLoader(folder, batch, num_workers=1, **how) as here,
                shardio.connect(plain, batch, **how) as served,
                shardio.connect(locked, batch, keys=keys / "client", **how) as with_keys,
            ):
                lanes = {"here": here, "plain": served, "keys": with_keys}
                for loader in lanes.values():
                    drain(loader)
                yield {
                    f"{size}, {way}": partial(_served_rate, loader, seconds)
                    for way, loader in lanes.items()
                }


@contextlib.contextmanager
def _server(folder: Path, *more: str) -> Iterator[str]:
    """Run `shardio serve` in a separate process; yield its address."""
    command = [sys.executable, "-m", "shardio", "serve", str(folder), "--workers", "1", *more]
    command += ["--bind", "tcp://127.0.0.1:*"]
    with subprocess.Popen(
        command, env=child.environment(), stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            said = process.stdout.readline() if process.stdout is not None else ""
            yield said.split()[-1]
        finally:
            process.terminate()


def _served_rate(loader: Any, seconds: float) -> Mapping[str, float]:
    """Run whole epochs, and touch every batch."""
    n, start_s, sizes = 0, time.perf_counter(), []
    while time.perf_counter() - start_s < seconds:
        for batch in loader:
            batch["x"][0, 0, 0, 0, 0].item()
            sizes.append(batch["x"].nbytes)
            n += 1
    taken_s = time.perf_counter() - start_s
    return {"batches/s": n / taken_s, "GB/s": n * statistics.mean(sizes) / taken_s / 1e9}
