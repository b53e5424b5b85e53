"""Estimated extents of clips: decoding reads nothing else, and not all videos are included."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from shardio import Array, Schema, ShardDataset, Video
from shardio._engine.filling import readahead
from shardio.format.layout import Kind
from shardio.format.types.streams import PACKET, STREAM_DTYPE, packet_sizes
from shardio.samples.clips import Clip
from shardio.samples.extents import ClipExtents, ShardFileNumbers
from tests.loading import make_loader, write_dataset
from tests.media_made import write_video

pytestmark = pytest.mark.usefixtures("quick_disk")

N_FRAMES, GROUP = 60, 4
CLIP = Clip(4, field="video")


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ShardDataset]:
    folder = tmp_path_factory.mktemp("clip_extents")
    noise = np.random.default_rng(0).integers(0, 256, (N_FRAMES, 96, 128, 3), np.uint8)
    path = write_video(folder / "a.mp4", list(noise), codec_options={"g": str(GROUP), "crf": "1"})
    schema = Schema({"video": Video(), "label": Array("int64")})
    samples = [{"video": path.read_bytes(), "label": i} for i in range(3)]
    with ShardDataset(write_dataset(folder / "set", 3, 2, schema, iter(samples))) as opened:
        yield opened


@pytest.mark.parametrize("start", [0, 7, 30, 52, 56])
@pytest.mark.parametrize("row", [0, 1, 2])
def test_ranges_cover_packets_and_their_table(dataset: ShardDataset, start: int, row: int) -> None:
    rows, files = np.array([row]), ShardFileNumbers(dataset, ["video", "label"])
    shards = dataset.locate(rows)
    found = ClipExtents(dataset, CLIP, files).ranges(rows, shards, np.array([start]))
    base = int(files.starts[shards[0]])

    def is_found(begin: int, end: int) -> bool:
        return bool(np.any((found.starts <= base + begin) & (found.ends >= base + end)))

    reader, local = (
        dataset.reader(int(shards[0]), "video"),
        row - int(dataset.shard_starts[shards[0]]),
    )
    stream = reader[local]["video"]
    content = Path(reader.path).read_bytes()
    places = {section.kind: section.offset for section in reader.sections}
    line = np.frombuffer(content, STREAM_DTYPE, local + 1, places[Kind.STREAMS])[local]
    table = places[Kind.PACKETS] + int(line["first_packet"]) * PACKET.size
    assert is_found(table, table + len(stream.packets) * PACKET.size)
    data = content.find(bytes(stream.data[:]), places[Kind.PAYLOAD])
    first, last = start - start % GROUP, start + CLIP.frames - 1
    ends = stream.packets["offset"] + packet_sizes(stream.packets).astype(np.uint64)
    if local:  # all videos are the same: the second lies behind the first
        data = content.find(bytes(stream.data[:]), data + 1)
    assert is_found(data + int(stream.packets["offset"][first]), data + int(ends[last]))
    assert found.n_bytes < 0.5 * len(stream.data)


def test_ranges_cover_long_extradata(dataset: ShardDataset, tmp_path: Path) -> None:
    stream, schema = dataset[0]["video"], Schema({"video": Video()})
    stream = replace(stream, extradata=bytes(300_000), data=bytes(stream.data[:]))
    path = write_dataset(tmp_path / "set", 1, 1, schema, [{"video": stream}])
    with ShardDataset(path) as opened:
        files = ShardFileNumbers(opened, ["video"])
        found = ClipExtents(opened, CLIP, files).ranges(*np.zeros((3, 1), np.int64))
        begin = Path(opened.reader(0, "video").path).read_bytes().find(stream.extradata)
    assert np.any((found.starts <= begin) & (found.ends >= begin + 300_000))


def test_what_cannot_be_is_left_out(dataset: ShardDataset) -> None:
    files = ShardFileNumbers(dataset, ["video"])
    extents = ClipExtents(dataset, CLIP, files)
    wild = extents.ranges(np.array([0, 2]), np.array([0, 1]), np.array([10**9, -(10**9)]))
    assert (wild.starts < wild.ends).all()
    assert wild.n_bytes < 200_000  # tables and the beginnings of records
    assert not len(extents.ranges(np.zeros(0, np.int64), *[np.zeros(0, np.int64)] * 2).starts)


@pytest.mark.parametrize("clip", [CLIP, None])
def test_a_cold_batch_of_clips_is_asked_for(
    dataset: ShardDataset, clip: Clip | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    monkeypatch.setattr(readahead, "is_cached", lambda fd, offset: False)
    monkeypatch.setattr(readahead, "available_bytes", lambda: 0)
    monkeypatch.setattr(
        readahead, "prefetch_range", lambda fd, offset, n_bytes: asked.append(n_bytes)
    )
    fields = ["label"] if clip is None else None
    with make_loader(
        dataset.path, 3, clip=clip, fields=fields, shuffle=True, num_workers=0, output="numpy"
    ) as loader:
        next(iter(loader))
    # A clip is a fifteenth of 1.5 MB, and chunks around it; a label is a page.
    assert (sum(asked) > 3 * 100_000) == (clip is not None)
