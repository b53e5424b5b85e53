"""`shardio view`: the overview and jumps of a large dataset, thumbnails, and seeking in a video."""

from __future__ import annotations

import contextlib
import dataclasses
import http.client
import io
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

import numpy as np
from PIL import Image as Pillow

import shardio
from benchmarks import child
from benchmarks.harness import Bench, Lanes, Limit, WrongResult, case
from shardio import Array, Image, Schema, Text, Video
from shardio.dataset.manifest import load, publish
from shardio.format.types.streams import pack_packets, packet_flags, packet_sizes
from shardio.media import demux
from shardio.shard.writer import ShardSummary
from shardio_tools.sample_clips import write_clips

_CLASSES: Final = [f"class {i}" for i in range(100)]
_LINKS_PER_FILE: Final = 25_000
"""The number of names of one file; ext4 allows 65,000."""


class Page:
    """A client of a viewer, as a browser is: one connection that is kept."""

    def __init__(self, link: str) -> None:
        parts = urlsplit(link)
        self._connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=60)
        self._headers: dict[str, str] = {}
        answer, _ = self._get(f"{parts.path}?{parts.query}")
        self._headers = {"Cookie": answer.headers["set-cookie"].partition(";")[0]}

    def _get(self, path: str, **headers: str) -> tuple[http.client.HTTPResponse, bytes]:
        self._connection.request("GET", path, headers={**self._headers, **headers})
        answer = self._connection.getresponse()
        return answer, answer.read()

    def timed(self, path: str, status: int = 200, **headers: str) -> tuple[float, bytes]:
        """Return the milliseconds that an answer took, and its content."""
        start_s = time.perf_counter()
        answer, content = self._get(path, **headers)
        elapsed_ms = (time.perf_counter() - start_s) * 1e3
        if answer.status != status:
            raise WrongResult(f"{path}: {answer.status}: {content[:200]!r}")
        return elapsed_ms, content


@contextlib.contextmanager
def viewing(folder: Path) -> Iterator[tuple[Page, int]]:
    """Run `shardio view` in a process; yield a client, and the id of the process."""
    with subprocess.Popen(
        [sys.executable, "-m", "shardio", "view", str(folder), "--no-open"],
        env=child.environment(),
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            yield Page(process.stdout.readline().strip() if process.stdout else ""), process.pid
        finally:
            process.send_signal(signal.SIGINT)


def p95(values: list[float]) -> float:
    """Return the 95th percentile."""
    return float(np.percentile(values, 95))


@case(
    Limit("page", "ms to the overview", at_most=1000),
    Limit("page", "ms to jump, p95", at_most=200),
    Limit("page", "ms to a thumbnail, p95", at_most=200),
    Limit("page", "MB of the server", at_most=300),
    rounds=3,
)
def large(bench: Bench, *, shards: int = 100_000, rows: int = 10_000) -> Lanes:
    """Measure the page of 10^9 samples in 100,000 shards, which are names of a few files."""
    folder = bench.cache.made("view-large", f"{shards}-{rows}", partial(_write_large, shards, rows))
    yield {"page": partial(_measure_large, folder, shards * rows)}


def _write_large(n_shards: int, n_rows: int, folder: Path) -> None:
    schema = Schema(
        {"image": Image(), "label": Array("int64"), "score": Array("float32"), "caption": Text()}
    )
    rng = np.random.default_rng(0)
    pictures = [_jpeg(rng) for _ in range(64)]
    with shardio.DatasetWriter(folder, schema, shard_bytes=1 << 40) as writer:
        for i in range(n_rows):
            score, label = np.float32(rng.normal()), int(rng.integers(len(_CLASSES)))
            text = f"picture {i} of {n_rows}"
            writer.append(
                {"image": pictures[i % 64], "label": label, "score": score, "caption": text}
            )
    (first,) = load(folder).shards
    made = _links(folder, first, n_shards)
    for path in (folder / "dataset.json", *(folder / "generations").iterdir()):
        path.unlink()
    publish(folder, schema=schema, shards=made, classes=_CLASSES)


def _jpeg(rng: np.random.Generator) -> bytes:
    small = Pillow.fromarray(rng.integers(0, 255, (6, 8, 3), np.uint8))
    out = io.BytesIO()
    small.resize((320, 240), Pillow.Resampling.BICUBIC).save(out, "JPEG")
    return out.getvalue()


def _links(folder: Path, first: ShardSummary, n: int) -> list[ShardSummary]:
    """Give a shard n names, which are links of a few copies of it."""
    made = []
    content, source = (folder / first.name).read_bytes(), folder / first.name
    for i in range(n):
        name = f"{i:06d}-link.shard"
        if i % _LINKS_PER_FILE == 0:
            source = folder / name
            source.write_bytes(content)
        else:
            os.link(source, folder / name)
        made.append(dataclasses.replace(first, name=name))
    (folder / first.name).unlink()
    return made


def _measure_large(folder: Path, n: int) -> Mapping[str, float]:
    start_s = time.perf_counter()
    with viewing(folder) as (page, pid):
        link_ms = (time.perf_counter() - start_s) * 1e3
        overview_ms, content = page.timed("/api/dataset")
        if json.loads(content)["n_samples"] != n:
            raise WrongResult("the overview has another number of samples")
        rng, jumps, thumbnails = random.Random(1), [], []
        for _ in range(60):
            start = rng.randrange(n - 60)
            elapsed_ms, content = page.timed(f"/api/rows?start={start}&count=60")
            jumps.append(elapsed_ms)
            found = json.loads(content)["rows"]
            if [row["row"] for row in found] != [*range(start, start + 60)]:
                raise WrongResult("a jump leads to other rows")
            for row in found[:4]:
                thumbnails.append(page.timed(f"/thumbnail/{row['row']}/image?size=256")[0])
        return {
            "ms to the link": link_ms,
            "ms to the overview": overview_ms,
            "ms to jump, p95": p95(jumps),
            "ms to a thumbnail, p95": p95(thumbnails),
            "MB of the server": child.status_bytes("VmHWM", pid) / 1e6,
        }


@case(
    Limit("player", "ms to seek, p95", at_most=100),
    Limit("player", "MB of the server", at_most=300),
    rounds=3,
)
def video(bench: Bench, *, minutes: int = 60) -> Lanes:
    """Measure seeking in a video of an hour: ranges of an MP4 that is made of stored packets."""
    folder = bench.cache.made("view-video", f"{minutes}", partial(_write_video, minutes))
    yield {"player": partial(_measure_video, folder)}


def _write_video(minutes: int, folder: Path) -> None:
    """Write a video that repeats a clip of some seconds."""
    with contextlib.ExitStack() as stack:
        clips = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        write_clips(clips, n_clips=1)
        clip = demux(str(min(clips.rglob("*.mp4"))))
        n = round(minutes * 60 / float(clip.duration * clip.time_base))
        shifts = np.repeat(np.arange(n) * int(clip.duration), len(clip.packets))
        packets = pack_packets(
            np.tile(packet_sizes(clip.packets), n),
            np.tile(packet_flags(clip.packets), n),
            np.tile(clip.packets["pts"], n) + shifts,
            np.tile(clip.packets["duration"], n),
        )
        long = dataclasses.replace(
            clip,
            packets=packets,
            data=bytes(clip.data[:]) * n,
            n_frames=clip.n_frames * n,
            duration=int(clip.duration) * n,
        )
        writer = stack.enter_context(shardio.DatasetWriter(folder, Schema({"video": Video()})))
        writer.append({"video": long})


def _measure_video(folder: Path) -> Mapping[str, float]:
    with viewing(folder) as (page, pid):
        sample_ms, content = page.timed("/api/sample/0")
        (field,) = json.loads(content)["fields"]
        first_ms, head = page.timed(field["src"], 206, Range="bytes=0-65535")
        if head[4:8] != b"ftyp":
            raise WrongResult("this is no MP4 file")
        size = _size_of(page, field["src"])
        rng, seeks = random.Random(1), []
        for _ in range(100):
            start = rng.randrange(size)
            seeks.append(page.timed(field["src"], 206, Range=f"bytes={start}-{start + 262_143}")[0])
        return {
            "ms to the sample": sample_ms,
            "ms to the first bytes": first_ms,
            "ms to seek, p95": p95(seeks),
            "MB of the server": child.status_bytes("VmHWM", pid) / 1e6,
        }


def _size_of(page: Page, path: str) -> int:
    answer, _ = page._get(path, Range="bytes=0-0")
    return int(answer.headers["content-range"].rpartition("/")[2])
