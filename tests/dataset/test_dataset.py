from __future__ import annotations

import errno
import os
import pickle
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardio import Array, Image, Schema, Text
from shardio import open as open_dataset
from shardio.dataset.manifest import load, publish
from shardio.dataset.writer import DatasetWriter, GenerationWriter
from shardio.errors import (
    ClosedError,
    DatasetCorrupt,
    DatasetNotFound,
    InvalidArgument,
    MediaError,
    SchemaError,
    ShardCorrupt,
    ShardNotFound,
)
from shardio.media import encode_jpeg
from shardio.samples.shard_dataset import ShardDataset
from tests.faults.failing import FailingDisk
from tests.loading import write_dataset
from tests.maintenance.datasets import tree
from tests.media.images_made import smooth
from tests.shards import as_read, every_field_sample, same_sample, write_shard

pytestmark = pytest.mark.usefixtures("quick_disk")

N_SAMPLES = 40
LABELS = Schema({"label": Array("int64"), "note": Text()})


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[int, str]:
    root = tmp_path_factory.mktemp("datasets")
    return {
        1: write_dataset(root / "1", N_SAMPLES, 1),
        3: write_dataset(root / "3", N_SAMPLES, 3),
        400: write_dataset(root / "400", 500, 400, LABELS),
    }


@pytest.fixture
def three(folders: dict[int, str], tmp_path: Path) -> Path:
    """Copy a dataset to be damaged: 40 samples in 3 shards, the second from 13 on."""
    return Path(shutil.copytree(folders[3], tmp_path / "three"))


def labels(n: int) -> Iterator[dict[str, Any]]:
    return ({"label": i, "note": f"note {i}"} for i in range(n))


# Samples by number.


@pytest.mark.parametrize("n_shards", [1, 3])
def test_every_sample_is_read_as_it_was_written(folders: dict[int, str], n_shards: int) -> None:
    with ShardDataset(folders[n_shards]) as dataset:
        assert len(dataset) == N_SAMPLES
        for i in range(N_SAMPLES):
            assert same_sample(dataset[i], as_read(every_field_sample(i)))


def test_400_shards_are_one_sequence(folders: dict[int, str]) -> None:
    with ShardDataset(folders[400]) as dataset:
        assert len(dataset.shards) == 400
        assert [int(sample["label"]) for sample in dataset] == list(range(500))
        assert [int(dataset[i]["label"]) for i in range(-500, 500)] == [*range(500)] * 2


@pytest.mark.parametrize(
    "part", [slice(None), slice(10, 30), slice(30, 10, -7), slice(-5, None), slice(50, 60)], ids=str
)
def test_a_slice_is_a_list_of_samples(folders: dict[int, str], part: slice) -> None:
    with ShardDataset(folders[3]) as dataset:
        found = [int(sample["label"]) for sample in dataset[part]]
    assert found == list(range(N_SAMPLES))[part]


@pytest.mark.parametrize(
    ("index", "error"),
    [
        *((index, IndexError) for index in (N_SAMPLES, -N_SAMPLES - 1, 1 << 70)),
        *((index, TypeError) for index in (1.5, 1.0, None, (1, 2))),
        ("3", KeyError),
    ],
)
def test_invalid_index_raises(folders: dict[int, str], index: Any, error: type[Exception]) -> None:
    with ShardDataset(folders[3]) as dataset:
        message = folders[3] if error is IndexError else None
        with pytest.raises(error, match=message):
            dataset[index]
        for integer in (np.int64(7), np.uint8(7), np.array(7)):
            assert int(dataset[integer]["label"]) == 7


def test_a_dataset_tells_what_its_generation_says(tmp_path: Path) -> None:
    with DatasetWriter(tmp_path, LABELS, classes=["cat", "dog"]) as writer:
        writer.append({"label": 1, "note": ""})
    with open_dataset(tmp_path) as dataset:
        assert dataset.schema == LABELS
        assert dataset.classes == ("cat", "dog")
        assert (dataset.generation, len(dataset.lineage)) == (1, 16)
        assert [shard.n_samples for shard in dataset.shards] == [1]
        assert dataset.shards[0].n_bytes == (tmp_path / dataset.shards[0].name).stat().st_size
        assert "shardio" in dataset.versions
        said = f"ShardDataset({str(tmp_path)!r}: 1 samples in 1 shard, generation 1)"
        assert repr(dataset) == said


# Shards that are not what the generation says. A shard is opened when it is needed.


def other_samples_survive(dataset: ShardDataset) -> bool:
    return int(dataset[0]["label"]) == 0 and int(dataset[39]["label"]) == 39


def truncated(n_bytes: int) -> Callable[[Path], None]:
    return lambda path: os.truncate(path, path.stat().st_size - n_bytes)


def replaced(path: Path) -> None:
    path.unlink()
    write_shard(path, 13)  # the first samples, once more


@pytest.mark.parametrize(
    ("damage", "error", "message"),
    [
        (Path.unlink, ShardNotFound, ""),
        (truncated(1), ShardCorrupt, ""),
        (truncated(4096), ShardCorrupt, ""),
        (truncated(100_000), ShardCorrupt, ""),
        (replaced, DatasetCorrupt, ": not the shard that"),
    ],
    ids=range(5),
)
def test_bad_shard_named_others_read(three: Path, damage: Any, error: Any, message: str) -> None:
    damage(three / "000001-000.shard")
    with ShardDataset(three) as dataset:
        with pytest.raises(error, match=rf"000001-000\.shard{message}"):
            dataset[20]
        with pytest.raises(error, match=rf"000001-000\.shard{message}") as caught:
            dataset[20]
        assert str(three / "000001-000.shard") in str(caught.value)
        if error is DatasetCorrupt:
            summary = dataset.shards[1]
            expected = (summary.id, summary.n_samples, summary.n_bytes)
            assert f"expected (id, samples, bytes) {expected}, found (" in str(caught.value)
        assert other_samples_survive(dataset)


def test_a_shard_of_another_schema_is_no_part_of_the_dataset(tmp_path: Path) -> None:
    folder = Path(write_dataset(tmp_path / "d", 2, 1, LABELS))
    shards = load(folder).shards
    shutil.rmtree(folder / "generations")
    publish(folder, schema=Schema({"label": Array("int64"), "other": Text()}), shards=shards)
    with ShardDataset(folder) as dataset:
        with pytest.raises(DatasetCorrupt, match="its schema differs from the dataset's") as caught:
            dataset[0]
        assert str(caught.value).startswith(f"{folder / '000000-000.shard'}: ")


# The end of a dataset.


def test_a_closed_dataset_says_so_whatever_is_asked_of_it(folders: dict[int, str]) -> None:
    dataset = ShardDataset(folders[3])
    dataset.gather("frames")
    dataset[0]
    dataset.close()
    dataset.close()
    for use in (
        lambda: dataset[0],
        lambda: dataset[0:2],
        lambda: next(iter(dataset)),
        lambda: dataset.reader(0),
        lambda: dataset.gather("frames"),
        lambda: dataset.gather("label"),
        lambda: dataset[N_SAMPLES],
        lambda: dataset.select([0]),
        lambda: dataset.select(lambda columns: columns["label"] > 3, fields=["label"]),
        lambda: dataset.subset("train"),
        lambda: dataset.clips(4),
        lambda: dataset.pack(length=4),
        lambda: dataset.preload(),
    ):
        with pytest.raises(ClosedError, match="closed"):
            use()
    assert len(dataset) == N_SAMPLES


# The writer.


def test_a_writer_cuts_shards_where_they_have_reached_their_size(tmp_path: Path) -> None:
    schema = Schema({"x": Array("uint8", (100,))})  # 128 bytes with its padding
    with DatasetWriter(tmp_path, schema, shard_bytes=1000) as writer:
        for i in range(20):
            writer.append({"x": np.full(100, i, np.uint8)})
    with ShardDataset(tmp_path) as dataset:
        assert [shard.n_samples for shard in dataset.shards] == [8, 8, 4]
        assert [shard.name for shard in dataset.shards] == [f"000000-00{k}.shard" for k in range(3)]
        assert [int(sample["x"][0]) for sample in dataset] == list(range(20))


def test_a_dataset_without_samples_has_its_schema(tmp_path: Path) -> None:
    DatasetWriter(tmp_path / "d", LABELS).close()
    with ShardDataset(tmp_path / "d") as dataset:
        assert len(dataset) == 0
        assert list(dataset) == []
        assert dataset.schema == dataset.reader(0).schema == LABELS
        none = np.arange(0)
        dataset.gather("label").gather(none, none, np.empty((0, 8), np.uint8))


def test_nothing_is_published_before_close(tmp_path: Path) -> None:
    writer = DatasetWriter(tmp_path / "d", LABELS, shard_bytes=1)
    writer.append({"label": 1, "note": "x"})
    with pytest.raises(DatasetNotFound, match="never finished"):
        ShardDataset(tmp_path / "d")
    generation = writer.close()
    assert (generation.number, generation.n_samples) == (1, 1)
    assert (generation.schema, len(generation.shards)) == (LABELS, 1)
    assert load(tmp_path / "d") == generation
    assert len(ShardDataset(tmp_path / "d")) == 1


def test_leaving_a_writer_by_an_exception_removes_what_it_wrote(tmp_path: Path) -> None:
    with (
        pytest.raises(KeyError, match="mine"),
        DatasetWriter(tmp_path, LABELS, shard_bytes=20) as writer,
    ):
        for sample in labels(10):
            writer.append(sample)
        assert list(tmp_path.iterdir()) != []
        raise KeyError("mine")
    assert list(tmp_path.iterdir()) == []
    writer.abort()


def test_a_sample_that_does_not_fit_is_refused_and_the_writer_goes_on(tmp_path: Path) -> None:
    with DatasetWriter(tmp_path, LABELS) as writer:
        writer.append({"label": 0, "note": ""})
        with pytest.raises(SchemaError, match="label"):
            writer.append({"label": "zero", "note": ""})
        writer.append({"label": 1, "note": ""})
    with ShardDataset(tmp_path) as dataset:
        assert [int(sample["label"]) for sample in dataset] == [0, 1]


@pytest.mark.parametrize("shown", [None, "given/by/the/user"])
@pytest.mark.parametrize(
    ("sample", "said"),
    [
        ({"picture": 1}, "field 'picture': expected .*, found int"),
        ({"picture": b"none"}, "field 'picture': not a picture"),
        ({"pictures": b""}, r"fields missing: \['picture'\], not in the schema: \['pictures'\]"),
        (3, "expected a mapping of fields, found int"),
    ],
)
def test_an_error_names_the_dataset_and_the_sample_in_it(
    tmp_path: Path, shown: str | None, sample: Any, said: str
) -> None:
    picture, folder = encode_jpeg(smooth()), tmp_path / "d"
    schema = Schema({"picture": Image()})
    with GenerationWriter(folder, schema, shard_bytes=1, shown_path=shown) as output:
        for _ in range(3):  # a shard each
            output.append({"picture": picture})
        with pytest.raises(
            (SchemaError, MediaError), match=f"^{shown or folder}, sample 3: {said}"
        ):
            output.append(sample)


@pytest.mark.parametrize("then", ["append", "close"])
def test_full_disk_cleans_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, then: str) -> None:
    with pytest.raises(OSError, match="No space left.*free some space") as caught:
        with monkeypatch.context() as patch, DatasetWriter(tmp_path / "d", LABELS) as writer:
            if then == "close":
                writer.append({"label": 0, "note": ""})
            FailingDisk(errno.ENOSPC, 0).install(patch)
            if then == "append":
                writer.append({"label": 0, "note": ""})
    assert (caught.value.errno, caught.value.filename) == (errno.ENOSPC, str(tmp_path / "d"))
    assert ".staging" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_a_closed_writer_says_so(tmp_path: Path) -> None:
    writer = DatasetWriter(tmp_path, LABELS)
    writer.close()
    writer.abort()
    for use in (writer.close, lambda: writer.append({"label": 0, "note": ""})):
        with pytest.raises(ClosedError, match="closed") as caught:
            use()
        assert str(tmp_path) in str(caught.value)
    assert len(ShardDataset(tmp_path)) == 0
    assert sorted(tree(tmp_path)) == ["000000-000.shard", "dataset.json", "generations/000001.json"]


def test_an_error_about_a_descriptor_is_raised_and_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(OSError) as caught, GenerationWriter(tmp_path / "d", LABELS) as output:
        output.append({"label": 0, "note": ""})
        raise OSError(errno.EIO, "Input/output error", 5)
    assert caught.value.filename == 5
    assert list(tmp_path.iterdir()) == []


def test_shard_bytes_of_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="shard_bytes .*0"):
        DatasetWriter(tmp_path / "d", LABELS, shard_bytes=0)
    assert not (tmp_path / "d").exists()


# --- in other processes ---------------------------------------------------------------------


def test_pickled_dataset_reopens_with_its_samples(folders: dict[int, str]) -> None:
    with open_dataset(folders[3], verify="always", access="pread") as whole:
        assert whole[20]["label"] == 20, "files are open"
        with whole.select([30, 2, 30]) as chosen:
            for dataset in (whole, chosen):
                with pickle.loads(pickle.dumps(dataset)) as found:
                    assert (len(found), found.generation) == (len(dataset), dataset.generation)
                    assert (found.access, found.rows.identity) == ("pread", dataset.rows.identity)
                    assert same_sample(found[-1], dataset[-1])


def test_a_closed_dataset_and_its_shards_have_the_path_as_given(
    three: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(three.parent)
    with open_dataset(three.name) as dataset:
        reader = dataset.reader(0)
        (tmp_path / "elsewhere").mkdir()
        monkeypatch.chdir(tmp_path / "elsewhere")  # the others are opened, and mapped, after this
        assert dataset.column("label").tolist() == [*range(len(dataset))]
        assert dataset.reader(1).path == str(three / dataset.shards[1].name)
    assert reader.path == f"{three.name}/{dataset.shards[0].name}"
    with pytest.raises(ClosedError, match=f"^{reader.path}: the reader is closed: "):
        reader[0]
    with pytest.raises(ClosedError, match=f"^{three.name}: the dataset is closed: use it inside"):
        dataset[0]


def test_pickles_full_path(three: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(three.parent)
    with open_dataset(three.name) as dataset:
        stored = pickle.dumps(dataset)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    with pickle.loads(stored) as found:
        assert found[7]["label"] == 7
