"""The kind of a source: guessed from file names, and refused where no file is of the kind."""

from __future__ import annotations

from pathlib import Path

import pytest

import shardio
from shardio import Input, InvalidArgument
from shardio.conversion.converter import guess_kind
from shardio_tools import cli
from tests.lines import contents, convert, write


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


NOTES = {"a.txt": "a", "b/c.txt": "c", "b/d.MD": "d", "b/e": "e"}


@pytest.fixture
def notes(tmp_path: Path) -> Path:
    write(tmp_path / "notes", NOTES)
    return tmp_path / "notes"


@pytest.mark.process
@pytest.mark.parametrize("options", [[], ["--frames=8"], ["--workers=2"]])
def test_if_names_suggest_no_kind_the_error_lists_the_files_and_all_kinds(
    notes: Path, tmp_path: Path, options: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["convert", str(notes), str(tmp_path / "out"), "--quiet", *options]) == 2
    error, kinds = capsys.readouterr().err.splitlines()
    assert error == (
        f"shardio: {notes}: holds no file of a kind recognized by name, and no video: "
        "4 files, .txt (2), .md (1), no suffix (1); pass its kind (--kind KIND, or kind=)"
    )
    assert kinds.startswith("shardio: kinds: arrayrecord, arrays, ")
    assert not (tmp_path / "out").exists()


@pytest.mark.process
def test_a_dataset_is_not_converted_again(tmp_path: Path) -> None:
    samples = [{"x": 1}]
    shardio.convert(samples, tmp_path / "out")
    with pytest.raises(InvalidArgument, match="this is a dataset already: shardio inspect .*/out"):
        shardio.convert(tmp_path / "out", tmp_path / "again")


def test_if_fields_cannot_be_inferred_the_error_suggests_another_kind(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.jpg").write_bytes(b"no picture")
    with pytest.raises(InvalidArgument, match="fields cannot be inferred") as caught:
        shardio.convert(tmp_path / "in", tmp_path / "out", kind="tables", workers=0)
    notes = "the file names suggest 'images' (--kind images, or kind='images')"
    assert caught.value.__notes__ == [notes]


def test_a_shard_as_a_source_is_answered(tmp_path: Path) -> None:
    (tmp_path / "a.shard").write_bytes(b"x" * 5000)
    with pytest.raises(
        InvalidArgument, match="shards are converted already: shardio inspect shows"
    ):
        shardio.convert(tmp_path / "a.shard", tmp_path / "out", workers=0)


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("a.zip", r"1 file, \.zip \(1\); unpack the archive first$"),
        ("a.pt", r"in Python, and pass its samples to shardio\.convert\(samples, out\)$"),
    ],
)
def test_files_that_no_converter_reads_get_a_hint(tmp_path: Path, name: str, hint: str) -> None:
    (tmp_path / name).write_bytes(b"x" * 5000)
    with pytest.raises(InvalidArgument, match=hint):
        shardio.convert(tmp_path / name, tmp_path / "out", workers=0)


def test_if_no_file_is_of_the_kind_the_error_suggests_another(notes: Path, tmp_path: Path) -> None:
    (notes / "table.csv").write_text("x\n1\n")
    message = (
        "holds no file of the kind 'images': 5 files, .txt (2), .csv (1), .md (1), no suffix (1); "
        "a.txt: not a picture; the file names suggest 'tables' (--kind tables, or kind='tables')"
    )
    with pytest.raises(InvalidArgument) as caught:
        shardio.convert(notes, tmp_path / "out", kind="images", workers=0)
    assert str(caught.value) == f"{notes}: {message}"
    assert not (tmp_path / "out").exists()


def test_a_file_of_no_kind_is_refused_and_a_broken_one_is_not(notes: Path, tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match=r"a\.txt: holds no file .* 1 file, \.txt \(1\);"):
        shardio.convert(notes / "a.txt", tmp_path / "out", workers=0)
    (notes / "a.jpg").symlink_to("nowhere")  # broken: of the kind
    assert shardio.convert(notes, tmp_path / "out", workers=0).counts["broken"] == 1


def test_suffixes_are_counted_and_third_party_kinds_are_listed(lines: Path, tmp_path: Path) -> None:
    write(tmp_path / "none", {f"{n}.{n % 6}": "" for n in range(13)})
    with pytest.raises(InvalidArgument) as caught:
        convert(tmp_path / "none", tmp_path / "out")
    found = "13 files, .0 (3), .1 (2), .2 (2), .3 (2), others (4); pass its kind"
    assert f"no file of the kind 'lines': {found}" in str(caught.value)
    (kinds,) = caught.value.__notes__
    assert "lines" in kinds.removeprefix("kinds: ").split(", ")


@pytest.mark.parametrize("option", ["append", "overwrite"])
def test_a_dataset_without_new_inputs_is_kept(lines: Path, tmp_path: Path, option: str) -> None:
    write(tmp_path / "none", {"readme": "hello"})
    convert(lines, tmp_path / "out")
    before = contents(tmp_path / "out")
    message = "no file of the kind 'lines'.*" + "of the same kind as" * (option == "append")
    with pytest.raises(InvalidArgument, match=message):
        convert(tmp_path / "none", tmp_path / "out", **{option: True})
    assert contents(tmp_path / "out") == before
