"""Facts about all samples: found by ranges, in several shards of a store at a time."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import shardio
from shardio import Array, Schema, ShardDataset, Video
from shardio.dataset.dataset import Dataset, ShardSamples, scan
from shardio.dataset.external_lists import external_list_names
from shardio.samples.clip_view import ClipView
from shardio.samples.clips import Clip
from shardio.storage.remote.cache_folder import lock_byte, try_exclusive
from shardio.storage.remote.connection import RemoteOptions
from shardio.storage.remote.storage import RemoteStorage
from tests.loading import PATIENCE_S, write_dataset
from tests.shards import made_stream
from tests.storage.remote.scene import RemoteSet, Scene

N, N_SHARDS = 40, 5
FIELDS = Schema({"video": Video(), "at": Array("int64", (2,))})
CLIP = Clip(frames=2, size=(48, 64), around="at")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    made = ({"video": made_stream(i, 5 + i % 7), "at": np.array([0, i % 4])} for i in range(N))
    return write_dataset(tmp_path_factory.mktemp("scan") / "set", N, N_SHARDS, FIELDS, made)


@pytest.fixture
def far(remote: RemoteSet) -> Iterator[ShardDataset]:
    with remote.open() as dataset:
        yield dataset


@pytest.mark.parametrize("chosen", ["all", "some", "mixed"])
def test_clips_in_a_store_match_a_folder(far: ShardDataset, folder: str, chosen: str) -> None:
    with shardio.open(folder) as local:
        pair: tuple[Dataset, Dataset] = (far, local)
        if chosen == "some":
            numbers = np.random.default_rng(3).integers(0, N, 3 * N)
            pair = far.select(numbers), local.select(numbers)
        elif chosen == "mixed":
            one, other = (shardio.mix([each, folder], weights=[1, 2]) for each in (far, local))
            pair = one, other
        found, expected = (ClipView(each, CLIP) for each in pair)
        assert found.clip_table.clip == expected.clip_table.clip
        assert len(found) == len(expected)
        assert found.clip_table.n_frames.tolist() == expected.clip_table.n_frames.tolist()
        assert 0 < len(found) < 3 * len(found.clip_table.n_frames)


def test_scanned_in_parts(far: ShardDataset, folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = np.random.default_rng(4).integers(0, N, 3 * N)
    with shardio.open(folder) as local, local.select(numbers) as expected:
        n_frames = ClipView(expected, CLIP).clip_table.n_frames.tolist()
        monkeypatch.setattr("shardio.dataset.dataset._SAMPLES_AT_ONCE", 7)
        with local.select(numbers) as here, far.select(numbers) as there:
            for found in (here, there):
                assert ClipView(found, CLIP).clip_table.n_frames.tolist() == n_frames


def test_shards_in_a_store_are_scanned_in_parallel(store: Scene, far: ShardDataset) -> None:
    all_are_at_it = threading.Barrier(N_SHARDS)

    def look(part: ShardSamples) -> int:
        all_are_at_it.wait(PATIENCE_S)
        assert part.reader("video") is part.reader("at")  # as they are in one file
        return len(part.reader("video"))

    found = [(part.shard, part.numbers.tolist(), n) for part, n in scan(far, look)]
    n = N // N_SHARDS
    assert found == [(i, list(range(i * n, (i + 1) * n)), n) for i in range(N_SHARDS)]
    assert {store.proxy.requests[shard.name] for shard in far.shards} == {1}


def test_closing_metadata_keeps_pins_of_others(remote: RemoteSet, far: ShardDataset) -> None:
    shard = remote.shards[0]
    metadata = far.files.open_metadata(0, "video")
    (bucket,) = far.remote_storages
    options = replace(RemoteOptions.of(remote.cache, None, remote.store.options), whole_shards=True)
    other = RemoteStorage(remote.url, options, external_list_names)
    other.download(shard)
    assert bucket.pin(shard) == other.path_of(shard)
    del metadata
    path = Path(other.path_of(shard))
    for is_held in (True, False):
        with try_exclusive(str(path.parent / "locks"), lock_byte(path.name)) as is_free:
            assert is_free is not is_held
        if is_held:
            bucket.unpin(shard)
    other.close()
