"""Pictures, videos and sound in shards: stored untouched, found and checked part by part."""

from __future__ import annotations

import dataclasses
import pickle
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardio import (
    Audio,
    EncodedStream,
    Image,
    Schema,
    ShardLoader,
    ShardReader,
    ShardWriter,
    Video,
)
from shardio.errors import (
    ChecksumMismatch,
    ClosedError,
    InvalidArgument,
    MediaError,
    SchemaError,
    ShardChanged,
)
from shardio.format.checksum import CHUNK_BYTES
from shardio.format.layout import Kind, Required
from shardio.format.types import EncodedImage
from shardio.format.types.streams import packet_sizes
from shardio.shard import writer as shard_writer
from shardio.shard.verification import Verify
from shardio.storage.file_access import Access
from tests.loading import write_dataset
from tests.media.images_made import saved, smooth
from tests.shards import (
    MEDIA_FIELDS,
    as_read,
    flip,
    made_stream,
    media_sample,
    same_sample,
    same_value,
    write_media,
    write_samples,
)

pytestmark = pytest.mark.usefixtures("quick_disk")

N = 9
ACCESSES: tuple[Access, ...] = ("mmap", "pread")
VERIFYING: tuple[Verify, ...] = ("first", "always", "off")
VIDEO = Schema({"video": Video()})


@pytest.fixture(scope="module")
def shard(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("media") / "a.shard"
    write_media(path, N)
    return path


@pytest.fixture
def long(tmp_path: Path) -> Path:
    """Write a shard of two videos of some chunks each."""
    made = ({"video": made_stream(i, 40, 20_000)} for i in range(2))
    return write_samples(tmp_path / "long.shard", VIDEO, made)


@pytest.mark.parametrize("access", ACCESSES)
@pytest.mark.parametrize("verify", VERIFYING)
def test_media_come_back_as_they_were_given(shard: Path, access: Access, verify: Verify) -> None:
    with ShardReader(shard, access=access, verify=verify) as reader:
        for _ in range(2):
            for i in range(N):
                assert same_sample(reader[i], as_read(media_sample(i), MEDIA_FIELDS))


def test_a_shard_says_by_its_features_what_it_has(shard: Path, tmp_path: Path) -> None:
    every = Required.VIDEOS | Required.IMAGES | Required.AUDIO
    with ShardReader(shard) as reader:
        assert reader.header.required & every == every
    for kind, feature in ((Video(), Required.VIDEOS), (Audio(), Required.AUDIO)):
        path = tmp_path / f"{feature.name}.shard"
        with ShardWriter(path, Schema({"m": kind})) as writer:
            writer.append({"m": made_stream(0)})
        with ShardReader(path) as reader:
            assert reader.header.required == feature


def test_a_stream_that_was_read_is_written_as_it_was(shard: Path, tmp_path: Path) -> None:
    with ShardReader(shard) as reader, ShardWriter(tmp_path / "b.shard", reader.schema) as writer:
        for sample in reader:
            writer.append(sample)
        assert writer.close().id == reader.id


def test_many_streams_are_found_beyond_one_block_of_each_table(tmp_path: Path) -> None:
    some = write_media(tmp_path / "a.shard", 300)
    with ShardReader(tmp_path / "a.shard") as reader:
        for row in (299, 0, 150):
            assert same_sample(reader[row], some[row])
        found = list(reader.records.values("video", np.arange(300)))
    assert all(
        len(one.packets) == len(s["video"].packets) for one, s in zip(found, some, strict=True)
    )


def chunks_checked(reader: ShardReader, row: int) -> list[int]:
    """Return the chunks of a row's video that the shard has marked as verified."""
    entry = reader.records.entries("video", np.array([row]))
    first = int(reader.records.stream_table("video", np.array([row]), entry)["first_chunk"][0])
    n = -(-int(entry["n_bytes"][0]) // CHUNK_BYTES)
    marks = reader.units.marks[reader.units.first_mark(Kind.PAYLOAD, "video") :]
    return np.flatnonzero(marks[first : first + n]).tolist()


@pytest.mark.parametrize("access", ACCESSES)
def test_a_clip_checks_the_chunks_that_it_touches_and_no_other(long: Path, access: Access) -> None:
    with ShardReader(long, access=access) as reader:
        stream = reader[1]["video"]
        assert chunks_checked(reader, 1) == [0]  # parameters and extradata lie there
        starts = stream.packets["offset"].astype(np.int64)
        ends = starts + packet_sizes(stream.packets)
        clip = stream.data[int(starts[15]) : int(ends[20])]
        assert bytes(clip) == made_stream(1, 40, 20_000).data[int(starts[15]) : int(ends[20])]
        head = len(b"extra") + len(b'{"codec":"h264","\xc3\xbc":[1,null]}')
        first = (int(starts[15]) + head) // CHUNK_BYTES
        last = (int(ends[20]) + head - 1) // CHUNK_BYTES
        assert 0 < first < last < 12
        assert chunks_checked(reader, 1) == [0, *range(first, last + 1)]
        assert chunks_checked(reader, 0) == []


def damaged_chunk(path: Path, row: int, chunk: int) -> int:
    """Flip a bit in a chunk of a row's video; returns where the chunk lies in the file."""
    with ShardReader(path) as reader:
        entry = reader.records.entries("video", np.array([row]))
        place = reader.records.offset + int(entry["offset"][0]) + chunk * CHUNK_BYTES
    flip(path, place + 99)
    return place


@pytest.mark.parametrize("access", ACCESSES)
def test_damage_is_met_by_who_touches_it_and_by_nobody_else(long: Path, access: Access) -> None:
    place = damaged_chunk(long, 1, 7)
    with ShardReader(long, access=access) as reader:
        stream = reader[1]["video"]
        whole = made_stream(1, 40, 20_000).data
        assert bytes(stream.data[: 5 * CHUNK_BYTES]) == whole[: 5 * CHUNK_BYTES]
        with pytest.raises(ChecksumMismatch) as caught:
            stream.data[5 * CHUNK_BYTES : 8 * CHUNK_BYTES]
        assert bytes(stream.data[9 * CHUNK_BYTES :]) == whole[9 * CHUNK_BYTES :]
        error = caught.value
        assert (error.field, error.sample, error.offset) == ("video", 1, place)
        assert error.path == str(long)


def test_what_is_checked_once_always_and_never(long: Path) -> None:
    whole = made_stream(1, 40, 20_000).data
    readers = {verify: ShardReader(long, verify=verify) for verify in VERIFYING}
    streams = {verify: reader[1]["video"] for verify, reader in readers.items()}
    for verify in VERIFYING[:2]:
        assert bytes(streams[verify].data[:]) == whole
    damaged_chunk(long, 1, 7)
    part = slice(7 * CHUNK_BYTES, 8 * CHUNK_BYTES)
    for verify in VERIFYING[::2]:
        assert bytes(streams[verify].data[part]) != whole[part]
    with pytest.raises(ChecksumMismatch):
        streams["always"].data[part]
    for reader in readers.values():
        reader.close()


def test_a_slice_of_a_map_is_a_view_and_outlives_the_reader(long: Path) -> None:
    with ShardReader(long, access="mmap") as reader:
        stream = reader[0]["video"]
        part = stream.data[100:200]
    assert part.readonly and bytes(part) == made_stream(0, 40, 20_000).data[100:200]
    with pytest.raises(ClosedError, match="the reader is closed"):
        stream.data[100:200]


def test_data_is_cut_as_bytes_are_but_without_a_step(long: Path) -> None:
    whole = made_stream(0, 40, 20_000).data
    with ShardReader(long) as reader:
        data = reader[0]["video"].data
        assert len(data) == len(whole)
        for part in (slice(-9, None), slice(5, 2), slice(len(whole), None), slice(3, 9 << 40)):
            assert bytes(data[part]) == whole[part]
        with pytest.raises(InvalidArgument, match="cannot have a step; found 2"):
            data[::2]
        elsewhere = pickle.loads(pickle.dumps(reader[0]["video"]))
    assert same_value(elsewhere, made_stream(0, 40, 20_000))


def test_a_file_that_is_cut_short_is_told_by_who_reads_it_by_offset(long: Path) -> None:
    with ShardReader(long, access="pread", verify="off") as reader:
        stream = reader[1]["video"]
        with open(long, "r+b") as file:
            file.truncate(long.stat().st_size // 2)
        with pytest.raises(ShardChanged) as caught:
            stream.data[len(stream.data) - 10 :]
        assert (caught.value.field, caught.value.sample) == ("video", 1)


def fake_media(monkeypatch: pytest.MonkeyPatch) -> list[tuple[bytes, str]]:
    """Let files be looked into by something that needs none."""
    seen: list[tuple[bytes, str]] = []

    def probe(data: bytes) -> Any:
        seen.append((data, "image"))
        return types.SimpleNamespace(height=7, width=8, channels=3)

    def demux(data: bytes, kind: str) -> EncodedStream:
        seen.append((data, kind))
        return made_stream(5)

    module = types.SimpleNamespace(probe=probe, demux=demux)
    monkeypatch.setattr(shard_writer, "import_module", lambda name: module)
    return seen


def test_bytes_are_probed_once_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = fake_media(monkeypatch)
    sample = {**media_sample(1), "video": b"an mp4", "sound": b"a wav", "image": b"a jpeg"}
    with ShardWriter(tmp_path / "a.shard", MEDIA_FIELDS) as writer:
        writer.append(sample)
    assert sorted(seen) == [(b"a jpeg", "image"), (b"a wav", "audio"), (b"an mp4", "video")]
    with ShardReader(tmp_path / "a.shard") as reader:
        found = reader[0]
        assert same_value(found["image"], EncodedImage(b"a jpeg", 7, 8, 3))
        assert same_value(found["video"], made_stream(5))
        with ShardWriter(tmp_path / "b.shard", MEDIA_FIELDS) as writer:
            writer.append(found)
    assert len(seen) == 3


def test_a_real_picture_is_kept_with_its_height_width_and_channels(tmp_path: Path) -> None:
    content = saved(smooth(5, 7), "PNG")
    with ShardWriter(tmp_path / "a.shard", Schema({"image": Image()})) as writer:
        writer.append({"image": content})
        with pytest.raises(MediaError, match="sample 1: field 'image': not a picture"):
            writer.append({"image": b"no picture"})
    with ShardReader(tmp_path / "a.shard") as reader:
        assert same_value(reader[0]["image"], EncodedImage(content, 5, 7, 3))


def test_a_sample_that_is_refused_leaves_the_writer_usable(tmp_path: Path) -> None:
    good = media_sample(1)
    wrong = dataclasses.replace(good["video"], n_frames=0)
    with ShardWriter(tmp_path / "a.shard", MEDIA_FIELDS) as writer:
        with pytest.raises(SchemaError, match="sample 0: field 'video': n_frames is 0"):
            writer.append({**good, "video": wrong})
        with pytest.raises(SchemaError, match="sample 0: field 'video': expected an EncodedStream"):
            writer.append({**good, "video": None})
        writer.append(good)
    with ShardReader(tmp_path / "a.shard") as reader:
        assert same_sample(reader[0], as_read(good, MEDIA_FIELDS))


@pytest.fixture
def dataset(tmp_path: Path) -> Path:
    return Path(write_dataset(tmp_path / "out", N, 4, MEDIA_FIELDS, map(media_sample, range(N))))


def test_a_loader_refuses_streams_at_once_and_says_what_to_do(dataset: Path) -> None:
    with pytest.raises(InvalidArgument) as caught:
        ShardLoader(dataset, batch_size=2, num_workers=0, output="numpy", decode=False)
    assert str(caught.value) == (
        "field 'video' is a Video, whose packets cannot be put into a batch: leave it out "
        "(fields=['image', 'label', 'note']), or have a transform decode it"
    )


def first_packets(sample: dict[str, Any]) -> dict[str, Any]:
    video = sample["video"]
    size = int(packet_sizes(video.packets)[0])
    return {
        "label": sample["label"],
        "n_frames": video.n_frames,
        "first": np.frombuffer(video.data[:size], np.uint8).sum(dtype=np.int64),
        "side": 0 if sample["image"] is None else sample["image"].height,
    }


@pytest.mark.process
@pytest.mark.parametrize("num_workers", [0, 1])
def test_transform_gets_encoded_media(dataset: Path, num_workers: int) -> None:
    options: Any = {"output": "numpy", "decode": False, "transform": first_packets}
    with ShardLoader(dataset, batch_size=N, num_workers=num_workers, **options) as loader:
        (batch,) = [{name: batch[name].copy() for name in batch} for batch in loader]
    for i in range(N):
        wanted = first_packets(as_read(media_sample(i), MEDIA_FIELDS))
        assert {name: int(batch[name][i]) for name in batch} == wanted
