"""Surgery upon datasets with pictures, videos and sound: every packet is kept as it is."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardio import ShardReader, Video
from shardio import open as open_dataset
from shardio.format.layout import Kind
from shardio.format.types.streams import PacketFlag, packet_flags
from shardio.maintenance import add_column, compact, diff, merge, repair, reshard, verify_dataset
from tests.maintenance.datasets import place, shard_of, write
from tests.shards import (
    MEDIA_FIELDS,
    as_read,
    flip,
    made_stream,
    media_sample,
    same_sample,
    same_value,
)

N, N_SHARDS = 12, 3


def write_media(folder: Path, changes: dict[int, dict[str, Any]] | None = None) -> Path:
    values = [media_sample(i) | (changes or {}).get(i, {}) for i in range(N)]
    return write(folder, N, N_SHARDS, schema=MEDIA_FIELDS, samples=values)


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_media(tmp_path_factory.mktemp("sound") / "data")


def wanted(i: int) -> dict[str, Any]:
    return as_read(media_sample(i), MEDIA_FIELDS)


def assert_holds(folder: Path, rows: list[int]) -> None:
    """Check that the dataset is sound and has just these samples."""
    assert verify_dataset(folder, workers=0).findings == ()
    with open_dataset(folder) as dataset:
        assert len(dataset) == len(rows)
        assert all(same_sample(dataset[i], wanted(row)) for i, row in enumerate(rows))


def test_merging_and_resharding_keep_every_packet(sound: Path, tmp_path: Path) -> None:
    merge(tmp_path / "merged", sound, sound, workers=0)
    assert_holds(tmp_path / "merged", [*range(N), *range(N)])
    reshard(sound, tmp_path / "fine", shard_bytes=500, workers=0)
    assert_holds(tmp_path / "fine", list(range(N)))
    compact(tmp_path / "fine", workers=0)
    assert_holds(tmp_path / "fine", list(range(N)))
    assert diff(sound, tmp_path / "fine").is_same


def test_merge_moves_an_added_video_into_the_shards(sound: Path, tmp_path: Path) -> None:
    reshard(sound, tmp_path / "data", workers=0)
    views = [made_stream(50 + i) if i % 2 else None for i in range(N)]
    add_column(tmp_path / "data", "view", Video(optional=True), views)
    merge(tmp_path / "whole", tmp_path / "data", workers=0)
    for folder in (tmp_path / "data", tmp_path / "whole"):
        assert verify_dataset(folder, workers=0).findings == ()
        with open_dataset(folder) as dataset:
            for i in range(N):
                assert same_value(dataset[i].pop("view"), views[i])


def test_a_sample_with_a_damaged_packet_is_lost_and_no_other(sound: Path, tmp_path: Path) -> None:
    data = tmp_path / "data"
    write_media(data)
    with ShardReader(shard_of(data, 1)) as reader:
        entry = reader.records.entries("video", np.array([2]))
        end = reader.records.offset + int(entry["offset"][0]) + int(entry["n_bytes"][0])
    flip(shard_of(data, 1), end - 1)
    (finding,) = verify_dataset(data, workers=0).findings
    assert (finding.code, finding.field, finding.sample) == ("checksum", "video", 2)
    report = repair(data, tmp_path / "out")
    assert [loss.reason for shard in report.shards for loss in shard.losses] == [
        "field 'video': the data of a sample does not match its hash"
    ]
    assert_holds(tmp_path / "out", [i for i in range(N) if i != 6])


@pytest.mark.parametrize("kind", [Kind.PACKETS, Kind.STREAMS, Kind.CHUNK_HASHES])
def test_damaged_block_hashes_of_tables_are_recomputed(kind: Kind, tmp_path: Path) -> None:
    data = write_media(tmp_path / "data")
    offset, _ = place(shard_of(data, 0), Kind.BLOCK_HASHES, "sound", kind)
    flip(shard_of(data, 0), offset)
    assert verify_dataset(data, workers=0).findings != ()
    assert repair(data, tmp_path / "out").is_whole
    assert_holds(tmp_path / "out", list(range(N)))


def test_damaged_hashes_of_chunks_lose_the_samples_whose_hashes_they_are(tmp_path: Path) -> None:
    data = write_media(tmp_path / "data")
    offset, size = place(shard_of(data, 0), Kind.CHUNK_HASHES, "video")
    flip(shard_of(data, 0), offset + size - 1)
    (finding, *_) = verify_dataset(data, workers=0).findings
    assert (finding.section, finding.field) == ("chunk_hashes", "video")
    report = repair(data, tmp_path / "out")
    assert report.shards[0].losses[0].reason.startswith("field 'video': ")
    assert_holds(tmp_path / "out", list(range(4, N)))  # one block has all hashes of a shard


def hidden(stream: Any) -> Any:
    """Return the same bytes, with one frame hidden."""
    packets = stream.packets.copy()
    packets["stored"][-1] |= np.uint64(PacketFlag.HIDDEN << 48)
    assert (packet_flags(packets) != packet_flags(stream.packets)).sum() == 1
    return dataclasses.replace(stream, packets=packets, n_frames=stream.n_frames - 1)


@pytest.mark.parametrize("n_more", [0, 1])
def test_same_bytes_with_other_tables_differ(sound: Path, tmp_path: Path, n_more: int) -> None:
    other = media_sample(5)
    changes = {
        3: {"video": dataclasses.replace(media_sample(3)["video"], duration=1)},
        5: {"video": hidden(other["video"])},
        7: {"image": type(media_sample(7)["image"])(media_sample(7)["image"], 1, 1, 1)},
    }
    values = [media_sample(i) | changes.get(i, {}) for i in range(N)] + [media_sample(0)] * n_more
    write(tmp_path / "b", len(values), 1, schema=MEDIA_FIELDS, samples=values)
    report = diff(sound, tmp_path / "b")
    if n_more:
        assert (report.only_a, report.only_b) == ([3, 5, 7], [3, 5, 7, 12])
    else:
        assert report.changed == [(3, ("video",)), (5, ("video",)), (7, ("image",))]
