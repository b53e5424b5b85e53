"""The kind of a source is guessed from its file names if it is not given."""

from __future__ import annotations

import pytest

from shardio import Input
from shardio.conversion.converter import guess_kind


@pytest.mark.parametrize(
    ("names", "kind"),
    [
        (["a/1.jpg", "a/2.PNG", "notes.txt"], "images"),
        (["a/1.jpg", "b/2.gif"], "images"),
        (["a/1.jpg", "b/2.mp4"], "videos"),
        (["1.gif"], "videos"),
        (["unnamed", "notes.txt"], "videos"),
        (["song.wav", "cover.jpg"], "audio"),
        (["a/1.flac", "b/2.MP3", "notes.txt"], "audio"),
        (["1.wav", "1.mp4"], "videos"),
        (["1.wav", "2.gif"], "audio"),
        (["a/1.npy", "b/2.NPZ", "notes.txt"], "arrays"),
        (["model.safetensors"], "arrays"),
        (["train/data-00000-of-00001.arrow", "train/state.json"], "arrow"),
        (["1.PARQUET"], "arrow"),
        (["1.jpg", "mask.npy"], "images"),
        (["x/train.tfrecord"], "tfrecord"),
        (["train.TFRecords.gz", "notes.txt"], "tfrecord"),
        (["train.tfrecord-00000-of-00010.gz"], "tfrecord"),
        (["train.array_record-00000-of-00002", "features.json"], "arrayrecord"),
        (["a/1.csv", "b/2.TSV", "notes.txt"], "tables"),
        (["1.jsonl", "2.ndjson"], "tables"),
        (["1.jpg", "metadata.csv"], "images"),
        (["1.gif", "mask.npy"], "videos"),
        (["a/0.tar", "b/1.TAR.gz", "notes.txt"], "webdataset"),
        (["0.tgz"], "webdataset"),
        (["0.tar.zst", "1.gz"], "webdataset"),
        (["1.gz"], "videos"),
        (["a/shard.00000.mds", "a/index.json"], "mds"),
        (["shard.00000.mds.zstd"], "mds"),
        (["a/1.h5", "b/2.HDF5", "x.he5", "notes.txt"], "hdf5"),
        (["x.zarr/zarr.json", "x.zarr/c/0/0"], "zarr"),
        ([".zarray", "0.0"], "zarr"),
        (["a/1.zarr.zip"], "zarr"),
        (["a/1.zip"], "videos"),
        (["meta/info.json", "data/chunk-000/file-000.parquet", "videos/x/1.mp4"], "lerobot"),
        (["a/meta/info.json", "a/data/chunk-000/episode_000000.parquet"], "lerobot"),
        (["meta/info.json", "videos/x/1.mp4"], "videos"),
    ],
)
def test_kinds_are_guessed_from_file_names(names: list[str], kind: str) -> None:
    assert guess_kind([Input(name, "", 0, 0) for name in names]) == kind
