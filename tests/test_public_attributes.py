"""`dir` lists what the documentation names, and attributes of other libraries get a hint."""

from __future__ import annotations

import copy
import dataclasses
import pickle
import re
import shutil
import typing
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shardio
from shardio import Array, DatasetWriter, InvalidArgument, Schema, ShardLoader
from shardio.map_view import MapView
from shardio.serving.client.remote_loader import RemoteLoader

ROOT = Path(__file__).resolve().parent.parent
PAGES = "".join(page.read_text("utf-8") for page in sorted(ROOT.glob("docs/reference/**/*.md")))
N = 6


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("habits") / "data"
    with DatasetWriter(path, Schema({"x": Array("float32", (2,)), "label": Array("int64")})) as new:
        for i in range(N):
            new.append({"x": np.full(2, i, np.float32), "label": i})
    return path


@pytest.fixture(scope="module")
def objects(folder: Path) -> Iterator[dict[str, Any]]:
    """Return an object for each name that a variable has in the documentation."""
    with (
        shardio.open(folder) as dataset,
        shardio.mix({folder: 1}) as mixture,
        ShardLoader(folder, 2, num_workers=0, output="numpy") as loader,
    ):
        batch = next(iter(loader))
        reader = dataset.reader(0)
        yield {
            "batch": batch,
            "dataset": dataset,
            "loader": loader,
            "mixture": mixture,
            "reader": reader,
            "stats": loader.stats(),
            "view": loader.view,
        }


# Methods of every mapping, which need no documentation of ours.
OF_MAPPINGS = {"get", "items", "keys", "values"}
# What the pages have after a dot besides attributes: names of files, attributes of other loaders.
NO_ATTRIBUTES = {"json", "kill", "md", "skipped"}


def documented(name: str) -> set[str]:
    return {*re.findall(rf"\b{name}\.([a-z]\w*)", PAGES)} - NO_ATTRIBUTES


def listed(thing: object) -> set[str]:
    return {name for name in dir(thing) if not re.fullmatch("__.*__", name)}


@pytest.mark.parametrize("name", ["dataset", "loader", "reader", "view"])
def test_dir_lists_the_documented_attributes(objects: dict[str, Any], name: str) -> None:
    assert listed(objects[name]) == documented(name)


def test_dir_of_a_batch_and_of_a_mixture(objects: dict[str, Any]) -> None:
    assert listed(objects["batch"]) == documented("batch") | OF_MAPPINGS | {"skipped"}
    sources = {"sources", "sources_of"}
    assert listed(objects["mixture"]) == documented("dataset") | sources
    assert sources <= documented("mixture")


def test_dir_lists_attributes_that_exist(objects: dict[str, Any]) -> None:
    for thing in objects.values():
        assert all(hasattr(thing, name) for name in dir(thing))


def test_dir_of_a_class_lists_no_more_than_that_of_an_object(objects: dict[str, Any]) -> None:
    """IPython completes an object's attributes with both."""
    for thing in objects.values():
        assert {"sample", "state_dict", "indices"} & listed(type(thing)) <= listed(thing)
        assert listed(type(thing)) <= listed(thing)


def test_no_property_has_the_type_of_a_literal(objects: dict[str, Any]) -> None:
    """Jedi, with which IPython completes, then fails for all attributes of the object."""
    for thing in objects.values():
        for name in dir(thing):
            found = getattr(type(thing), name, None)
            if isinstance(found, property):
                hint = typing.get_type_hints(found.fget).get("return")
                assert typing.get_origin(hint) is not typing.Literal, name


def test_dir_of_writers_and_other_loaders(objects: dict[str, Any], tmp_path: Path) -> None:
    with DatasetWriter(tmp_path / "new", objects["dataset"].schema) as writer:
        assert listed(writer) == {"abort", "append", "close", "path", "schema"}
        writer.abort()
    with shardio.ShardWriter(tmp_path / "a.shard", objects["dataset"].schema) as shard:
        assert listed(shard) == documented("writer")
        shard.abort()
    steps = {"aggregate", "close", "disaggregate", "pipe", "sink", "stats"}
    assert listed(shardio.Pipeline([1])) == steps
    state = {"load_state_dict", "state_dict"}
    assert listed(shardio.DataLoader([1])) == {"close", "stats"} | state
    remote = RemoteLoader.__new__(RemoteLoader)  # connected to no server
    served = {"address", "generation", "lineage", "served"}
    assert listed(remote) == served | listed(objects["loader"]) - {
        *("batch_size", "dataset", "indices_at", "num_workers", "schema", "state_at"),
        *("trace", "view"),
    }


def test_dir_of_schemas_statistics_and_reports(objects: dict[str, Any], tmp_path: Path) -> None:
    assert listed(objects["dataset"].schema) == OF_MAPPINGS
    loader = objects["loader"]
    assert listed(loader.trace()) == {"save"}
    stats = {name for name in dir(loader.stats()) if name[0] != "_"}
    assert stats == documented("stats") | {"n_workers"}
    report = shardio.convert([{"x": 1}], tmp_path / "out")
    assert {name for name in dir(report) if name[0] != "_"} <= documented("report")


def test_dir_of_the_package_is_what_it_documents() -> None:
    assert listed(shardio) == {*shardio.__all__, *shardio._MODULES} - {"__version__"}
    assert "__version__" in dir(shardio)


@pytest.mark.parametrize(
    ("name", "attribute", "hint"),
    [
        ("dataset", "map", "write shardio.ShardLoader(dataset, batch_size, transform=f)"),
        ("dataset", "filter", "write dataset.select(lambda columns: …, fields=[…])"),
        ("dataset", "shuffle", "write shardio.ShardLoader(dataset, batch_size, shuffle=True)"),
        ("dataset", "take", "write dataset.select(range(n))"),
        ("dataset", "batch", "write shardio.ShardLoader(dataset, batch_size)"),
        ("dataset", "to_pandas", 'write pandas.DataFrame({"label": dataset.column("label"), …})'),
        ("dataset", "train_test_split", "write shardio.maintenance.split(path, …)"),
        ("mixture", "map", "write shardio.ShardLoader(dataset, batch_size, transform=f)"),
        ("view", "shuffle", "write shardio.ShardLoader(view, batch_size, shuffle=True)"),
        ("view", "clips", "write view.dataset.clips(…)"),
        ("view", "classes", "write view.dataset.classes"),
        ("dataset", "transform", "write shardio.ShardLoader(dataset, batch_size, transform=f)"),
        ("dataset", "fields", "write dataset.schema"),
        ("dataset", "statistics", "write dataset.stats"),
        ("dataset", "labels", 'write dataset.column("label")'),
        ("dataset", "x", "write dataset.column('x')"),
        ("dataset", "iloc", "write dataset[i]"),
        ("view", "to", 'write shardio.ShardLoader(view, batch_size, device="cuda")'),
        ("dataset", "describe", "write dataset.stats"),
        ("dataset", "apply", "write shardio.ShardLoader(dataset, batch_size, transform=f)"),
        ("dataset", "class_names", "write dataset.classes"),
        ("dataset", "unique", 'write numpy.unique(dataset.column("label"))'),
        ("dataset", "append", "write shardio.convert(samples, path, append=True)"),
        ("dataset", "rename_column", "shardio.convert(({…} for sample in dataset), out, schema=…)"),
        ("dataset", "groupby", "write dataset.select(lambda columns: …, fields=[…]) for each"),
        ("dataset", "to_parquet", 'write shardio.export.export(dataset, out, "parquet")'),
        ("dataset", "save_to_disk", "shardio.export.export writes other formats"),
        ("view", "keys", "write view.schema"),
        ("dataset", "n_samples", "write len(dataset)"),
        ("dataset", "value_counts", 'numpy.unique(dataset.column("label"), return_counts=True)'),
        ("dataset", "export", 'write shardio.export.export(dataset, out, "parquet")'),
        ("view", "tail", "write view[-n:]"),
        ("batch", "shape", "write batch.n_rows, or batch[name].shape of a field"),
        ("batch", "copy", "a batch is read-only: write dict(batch), and change that"),
        ("batch", "idx", "write batch.indices"),
        ("batch", "mask", "write batch.valid"),
        ("loader", "next", "write next(iter(loader))"),
        ("loader", "steps_per_epoch", "write len(loader)"),
        ("loader", "fields", "write loader.schema"),
        ("batch", "label", "write batch['label']"),
        ("batch", "cuda", 'write batch.to("cuda")'),
        ("batch", "pin_memory", 'pass device="cuda" to the loader'),
        ("stats", "samples_per_second", "write stats.latest.n_samples / stats.latest.elapsed_s"),
        ("stats", "waiting_s", "write stats.latest.waiting_s"),
        ("loader", "set_epoch", "it is not needed: every iteration is the next epoch"),
        ("loader", "sampler", "set_epoch is not needed"),
    ],
)
def test_attributes_of_other_libraries_get_a_hint(
    objects: dict[str, Any], name: str, attribute: str, hint: str
) -> None:
    thing = objects[name]
    assert not hasattr(thing, attribute)
    text = f"{type(thing).__name__} has no attribute {attribute!r}: "
    with pytest.raises(AttributeError, match=re.escape(text) + ".*" + re.escape(hint)):
        getattr(thing, attribute)


def test_a_loader_is_no_iterator(objects: dict[str, Any]) -> None:
    assert not isinstance(objects["loader"], Iterator)


OPERATIONS: dict[str, tuple[str, Callable[[Any], Any], str]] = {
    "index": ("loader", lambda loader: loader[0], "write `for batch in loader`"),
    "slice": ("loader", lambda loader: loader[0:2], "MapView(dataset) gives samples by index"),
    "list": (
        "dataset",
        lambda dataset: dataset[[1, 2]],
        "found [1, 2]: for several samples, write ",
    ),
    "names": (
        "dataset",
        lambda dataset: dataset[["x", "label"]],
        "for several columns, write {n: dataset.column(n) for n in ['x', 'label']}",
    ),
    "columns": ("dataset", lambda dataset: dataset.column(["x"]), "a column is one field; found"),
    "in": ("dataset", lambda dataset: "x" in dataset, "write 'x' in dataset.schema"),
    "or": ("batch", lambda batch: batch | {"y": 1}, "write {**batch, name: value}"),
    "of a dict": ("batch", lambda batch: {"y": 1} | batch, "write {**batch, name: value}"),
    "del": ("batch", lambda batch: batch.__delitem__("x"), "write {**batch, name: value}"),
    "array": ("batch", np.asarray, "a batch is a mapping of names, not an array: write batch["),
    "float": ("dataset", lambda dataset: dataset[1.5], "found 1.5: round it"),
    "at random": (
        "dataset",
        lambda dataset: dataset.sample(3),
        "needs row: write dataset.sample(shard, row); for sample i, write dataset[i]; for n at ran",
    ),
    "n": ("mixture", lambda mixture: mixture.sample(n=3), "has no option 'n': for sample i, write"),
    "whole": ("dataset", lambda dataset: dataset[1.0], "found 1.0: write dataset[1]"),
    "field": (
        "dataset",
        lambda dataset: dataset["x", 3],
        "for a field of a sample, write dataset[3]['x']",
    ),
    "sample": ("view", lambda view: view[3, "x"], "for a field of a sample, write view[3]['x']"),
    "mixed": ("mixture", lambda mixture: mixture[[1, 2]], "write dataset.select(indices)"),
    "view": ("view", lambda view: view[[1, 2]], "write [view[i] for i in indices]"),
    "sum": ("dataset", lambda dataset: dataset + dataset, "shardio.mix([a, b], weights=[1, 1])"),
    "sum of all": ("mixture", lambda mixture: sum([mixture]), "shardio.maintenance.merge(out, a"),
    "sum of views": ("view", lambda view: view + [1], "convert(samples, path, append=True) adds"),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_operations_of_other_libraries_get_a_hint(objects: dict[str, Any], name: str) -> None:
    thing, operation, hint = OPERATIONS[name]
    with pytest.raises(TypeError, match=re.escape(hint)):
        operation(objects[thing])


def test_a_shard_that_is_missing_gets_a_hint(objects: dict[str, Any]) -> None:
    with pytest.raises(IndexError, match=r"shard 3 of 1; for sample i, write dataset\[i\]"):
        objects["dataset"].sample(3, 0)
    for read in (objects["dataset"].samples, objects["dataset"].reader):
        with pytest.raises(IndexError, match=r"data: shard 3 of 1$"):
            read(3)


def test_a_row_of_a_batch_gets_a_hint(objects: dict[str, Any]) -> None:
    batch = objects["batch"]
    for row in (0, slice(2), ["x", "label"], ("x", "label"), None):
        for read in (batch.__getitem__, batch.get, batch.__contains__, batch.present):
            with pytest.raises(TypeError, match=r"this batch has x, label; for row i, write batch"):
                read(row)
    assert "x" in batch and "y" not in batch and batch.get("y", 3) == 3
    with pytest.raises(KeyError, match=r"this batch has x, label; did you mean 'label'\?"):
        objects["batch"]["labels"]
    with pytest.raises(TypeError, match=r"a batch is read-only: write {\*\*batch, name: value}"):
        objects["batch"]["x"] = 1


def test_a_batch_differs_from_any_array(objects: dict[str, Any]) -> None:
    batch, array = objects["batch"], np.zeros(2)
    assert batch == batch
    assert (batch == array, array == batch, batch != array) == (False, False, True)


ARITHMETIC: dict[str, Callable[[Any], object]] = {
    "array + batch": lambda batch: np.ones(2) + batch,
    "batch * array": lambda batch: batch * np.ones(2),
    "scalar * batch": lambda batch: np.float32(2) * batch,
    "sin": np.sin,
    "sum": np.sum,
    "asarray": np.asarray,
}


@pytest.mark.parametrize("operation", ARITHMETIC)
def test_a_batch_is_no_array_to_compute_with(objects: dict[str, Any], operation: str) -> None:
    with pytest.raises(TypeError, match=r"a batch is a mapping of names, .* write batch\[name\]"):
        ARITHMETIC[operation](objects["batch"])


def test_arrays_of_a_batch_may_be_changed_in_place(folder: Path) -> None:
    """Python assigns the result of `batch["x"] += 1`, which is the array that was changed."""
    with ShardLoader(folder, 2, num_workers=0, output="numpy") as loader:
        batch: Any = next(iter(loader))
    batch["x"] += 1
    assert batch["x"].tolist() == [[1, 1], [2, 2]]
    with pytest.raises(TypeError, match="a batch is read-only: write"):
        batch["x"] = batch["x"] + 1
    with pytest.raises(TypeError, match="a batch is read-only: write"):
        batch["y"] = None


def test_an_attribute_without_effect_cannot_be_set(objects: dict[str, Any]) -> None:
    """Data sets of torchvision have a `transform`, which their users replace."""
    with pytest.raises(AttributeError, match=r"no attribute 'transform': write shardio\.Shard"):
        objects["dataset"].transform = str
    assert not hasattr(objects["dataset"], "transform")
    with pytest.raises(AttributeError, match=r"of a ShardLoader are fixed: pass transform= to a "):
        objects["loader"].transform = str


def test_a_loader_cannot_be_sent_to_a_process(objects: dict[str, Any]) -> None:
    for send in (pickle.dumps, copy.copy, copy.deepcopy):
        with pytest.raises(TypeError, match="send its arguments, and create the ShardLoader in th"):
            send(objects["loader"])


def test_a_loader_has_the_attributes_of_torch(objects: dict[str, Any]) -> None:
    assert (objects["loader"].batch_size, objects["loader"].num_workers) == (2, 0)
    with pytest.raises(AttributeError):
        objects["loader"].batch_size = 3
    with pytest.raises(AttributeError, match=r"no attribute 'batch_size': batch\.n_rows"):
        getattr(RemoteLoader.__new__(RemoteLoader), "batch_size")  # noqa: B009 - it has none


def test_an_empty_name_is_no_attribute(objects: dict[str, Any]) -> None:
    stats = objects["dataset"].schema, shardio.maintenance.compute_stats(objects["dataset"].path)
    for value in (*objects.values(), *stats, shardio, shardio.transforms):
        assert not hasattr(value, "")


@pytest.mark.parametrize("name", ["batch", "dataset", "loader", "view"])
def test_python_suggests_attributes_that_dir_lists(objects: dict[str, Any], name: str) -> None:
    with pytest.raises(AttributeError) as caught:
        getattr(objects[name], "schemas")  # noqa: B009 - a checker would refuse the plain spelling
    assert caught.value.name == "schemas" and caught.value.obj is objects[name]


def test_the_hints_work(folder: Path, objects: dict[str, Any]) -> None:
    dataset, view = objects["dataset"], objects["view"]
    with dataset.select(range(3)) as few:
        assert [sample["label"] for sample in few] == [0, 1, 2]
    with (
        dataset.select(range(4, len(dataset))) as rest,
        dataset.select(np.argsort(-dataset.column("label"))) as descending,
    ):
        assert len(rest) == 2 and descending[0]["label"] == N - 1
    assert [sample["label"] for sample in view[:2]] == [0, 1]
    assert len(objects["loader"]) == N // 2 and len(objects["loader"].dataset) == N
    with ShardLoader(dataset, 2, num_workers=0, output="numpy", transform=dict) as loader:
        assert sum(batch.n_rows for batch in loader) == N


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("Dataset", "write shardio.open(path)"),
        ("load_dataset", "write shardio.open(path)"),
        ("ImageFolder", "write shardio.convert(source, path), then shardio.open(path)"),
        ("interleave_datasets", "write shardio.mix("),
        ("random_split", "write shardio.maintenance.split(path, …)"),
        ("merge", "write shardio.maintenance.merge"),
        ("verify", "write shardio.maintenance.verify_dataset(path)"),
        ("Compose", "write shardio.transforms.Compose"),
        ("Writer", "write shardio.convert(samples, path), or shardio.DatasetWriter(path, schema)"),
        ("WebDataset", "write shardio.convert(tars, path), then shardio.ShardLoader("),
        ("stats", "write shardio.maintenance.compute_stats(path)"),
        ("inspect", "show shardio.open(path), or run `shardio inspect`"),
        ("split", "write shardio.maintenance.split(path, …)"),
        ("Tensor", 'write shardio.Array("float32", shape)'),
        ("view", "write shardio.open(path).show(), or run `shardio view`"),
        ("from_pandas", "write shardio.convert(source, path), then shardio.open(path)"),
        ("Scalar", 'write shardio.Array("int64")'),
        ("ClassLabel", 'write shardio.Array("int64"), and DatasetWriter(…, classes=[…])'),
    ],
)
def test_names_of_other_libraries_get_a_hint(name: str, hint: str) -> None:
    text = re.escape(f"shardio has no {name!r}: {hint}")
    assert not hasattr(shardio, name)
    with pytest.raises(AttributeError, match=text):
        getattr(shardio, name)
    with pytest.raises(ImportError, match=text):
        exec(f"from shardio import {name}")


API: Any = shardio  # without its types, which refuse these calls
MISTAKES: dict[str, tuple[Callable[[Any], Any], str]] = {
    "cache": (
        lambda path: API.open(path, cache=True),
        "cache must be the path of a folder; found True",
    ),
    "generation": (
        lambda path: API.open(path, generation="latest"),
        "generation must be an integer from 1 up; found 'latest'",
    ),
    "rows": (lambda path: API.ShardLoader([{"x": 1}], 2), "write its samples to a dataset first: "),
    "numbers": (lambda path: API.ShardLoader([1, 2], 2), "write its samples to a dataset first: "),
    "paths": (lambda path: API.open([path, path]), "to mix several datasets, write shardio.mix("),
    "opened": (lambda path: API.open(API.open(path)), "; this dataset is open already; dataset.r"),
    "tars": (
        lambda path: API.ShardLoader(["a.tar", Path("b.tar")], 2),
        "write their samples to a dataset first: shardio.convert(folder, path)",
    ),
    "view": (
        lambda path: API.ShardLoader(MapView(path), 2),
        "pass the dataset or view that the MapView was created from",
    ),
    "indices": (
        lambda path: API.open(path).subset([0, 1]),
        "no subset [0, 1]; there are: none; see shardio split; to select by index, write dataset.",
    ),
    "query": (
        lambda path: API.open(path).select("label == 0"),
        "such as select(lambda columns: columns['label'] == 0, fields=['label']); found 'label == ",
    ),
    "slice": (
        lambda path: API.open(path).select(slice(1, 3)),
        "found slice(1, 3, None): write range(1, 3)",
    ),
    "field": (
        lambda path: API.ShardLoader(path, 2, fields="x"),
        "fields must be a list of names; found the string 'x': write ['x']",
    ),
    "field of a row": (
        lambda path: API.open(path).sample(0, 1, "x"),
        "names must be a list of names; found the string 'x': write ['x']",
    ),
    "batches": (
        lambda path: API.ShardLoader(path, 2, sampler=[[0, 1], [2, 3]]),
        "found int64 (2, 2): join the inner sequences with np.concatenate",
    ),
    "device": (
        lambda path: API.ShardLoader(path, 2, output="torch", device=0),
        "device must be a name, such as 'cuda:0', with output='torch'; found 0",
    ),
    "merge": (
        lambda path: API.maintenance.merge([path, path], path),
        "merge takes paths: write merge(out, a, b); found [",
    ),
    "dataset": (
        lambda path: API.convert(API.open(path), "out"),
        "shardio.maintenance.merge(out, path) copies a dataset with its types and classes, and res",
    ),
    "function": (lambda path: API.convert(iter, "out"), "to samples; call the function"),
    "url": (lambda path: API.convert("s3://a/b", "out"), "s3://a/b: convert reads files of this m"),
    "labels": (
        lambda path: API.convert(path.parent, "out", kind="images", labels={"a.npy": "cat"}),
        "labels must be the path of a CSV or JSON Lines file with the columns path and label",
    ),
    "force": (
        lambda path: API.convert(path.parent, "out", kind="images", force=True),
        "force: not an option of the converter 'images'; write overwrite=True, or append=True",
    ),
}


def test_loaders_name_what_replaces_attributes_and_pickling(folder: Path) -> None:
    with ShardLoader(folder, 2, num_workers=0, output="numpy") as loader:
        made: Any = loader
        for name, hint in (
            ("classes", "write loader.dataset.classes"),
            ("seed", "options are passed to the loader"),
            ("shutdown", r"write loader\.close\(\)"),
        ):
            with pytest.raises(AttributeError, match=hint):
                getattr(made, name)
        with pytest.raises(
            AttributeError, match="cannot be set: every iteration is the next epoch"
        ):
            made.epoch = 3
        with pytest.raises(
            TypeError, match="send its arguments, and create the ShardLoader in the process"
        ):
            pickle.dumps(loader)
        with pytest.raises(InvalidArgument, match="found the keys 'model', 'optimizer'"):
            loader.load_state_dict({"model": 1, "optimizer": 2})
        with pytest.raises(InvalidArgument, match="found an empty dict"):
            loader.load_state_dict({})


def test_a_missing_folder_is_named_with_the_working_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    text = f"^missing: there is no such folder in {re.escape(str(tmp_path))}$"
    with pytest.raises(shardio.errors.DatasetNotFound, match=text):
        shardio.open("missing")


def test_subsets_are_no_attributes_nor_fields(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "data"
    shutil.copytree(folder, path)
    shardio.maintenance.split(path, {"train": 0.5, "val": 0.5})
    with shardio.open(path) as dataset:
        given: Any = dataset
        with pytest.raises(AttributeError, match=r"write dataset\.subset\('train'\)"):
            given.train  # noqa: B018
        with pytest.raises(KeyError, match=r"but a subset: write dataset\.subset\('train'\)"):
            given["train"]


@pytest.mark.parametrize("name", MISTAKES)
def test_mistaken_arguments_get_a_hint(folder: Path, name: str) -> None:
    mistake, text = MISTAKES[name]
    with pytest.raises(shardio.InvalidArgument, match=re.escape(text)):
        mistake(folder)


def test_a_conversion_without_an_output_gets_the_call(folder: Path) -> None:
    call = 'needs out: write shardio.convert(src, out); such as shardio.convert("pictures/", "data'
    with pytest.raises(TypeError, match=re.escape(call)):
        API.convert(folder)
    with pytest.raises(TypeError, match=r"only src, out by position; found 'images', too: write "):
        API.convert(folder, "out", "images")


@pytest.mark.parametrize(
    ("make", "hint"),
    [
        (lambda: API.Image("rgb"), "Image takes no value by position; found 'rgb': an Image is"),
        (lambda: API.Image(size=8), "Image has no option 'size': an Image is a file of any size"),
        (lambda: API.Audio(sampling_rate=16_000), "decode={name: shardio.Sound(rate=…)} to the l"),
        (lambda: API.Video(frames=8), "write dataset.clips(frames) for its clips"),
    ],
)
def test_fields_of_media_have_no_sizes_nor_rates(make: Callable[[], Any], hint: str) -> None:
    with pytest.raises(TypeError, match=re.escape(hint)):
        make()


def test_samples_that_are_none_are_answered_with_what_to_write(
    folder: Path, tmp_path: Path
) -> None:
    class_of_samples = dataclasses.make_dataclass("Sample", ["x"])
    with ShardLoader(folder, 2, output="numpy", num_workers=0) as loader:
        batch = next(iter(loader))
    for samples, hint in (
        ([class_of_samples(1)], r"the dataclass Sample; write dataclasses\.asdict\(sample\)"),
        ([{"x": tmp_path}], r"PosixPath cannot be put into a batch; return str\(path\)"),
        ([{"x": np.array(["a"])}], "dtype <U1 is not one of .*; return a list of str$"),
        ([{"x": {1}}], r"a set cannot be put into a batch; return list\(x\)"),
        ([batch], "a batch would be stored as one sample: pass samples one by one"),
        ([{"x": np.zeros(3)}, {"x": np.zeros(4)}], "with None for a dimension that varies"),
    ):
        with pytest.raises(shardio.errors.SchemaError, match=hint):
            API.convert(samples, tmp_path / "new")


LOADERS_OF_ITEMS: dict[str, Callable[[Any], object]] = {
    "DataLoader": shardio.DataLoader,
    "Loader": lambda path: shardio.Loader(path),  # type: ignore[abstract, call-arg]
    "load": lambda path: shardio.load(path, [2]),
    "MultiLoader": lambda path: shardio.MultiLoader(path, 2),
    "Pipeline": lambda path: shardio.Pipeline(path),
}


@pytest.mark.parametrize("name", LOADERS_OF_ITEMS)
def test_a_path_to_a_loader_of_items_says_to_use_shardloader(name: str, folder: Path) -> None:
    for path in (folder, str(folder)):
        with pytest.raises(shardio.InvalidArgument, match="not a path or text; .*ShardLoader"):
            LOADERS_OF_ITEMS[name](path)


@pytest.mark.parametrize("opens", [shardio.open, lambda path: ShardLoader(path, 2)])
def test_a_folder_of_other_files_is_to_be_converted_first(opens: Any, tmp_path: Path) -> None:
    hint = "convert them first: shardio convert "
    (tmp_path / "empty").mkdir()
    with pytest.raises(shardio.errors.DatasetNotFound, match=r"never finished$"):
        opens(tmp_path / "empty")
    picture = tmp_path / "pictures" / "cat.jpg"
    picture.parent.mkdir()
    picture.write_bytes(b"")
    (picture.parent / ".DS_Store").write_bytes(b"")
    for path in (picture, picture.parent):
        with pytest.raises(shardio.errors.DatasetNotFound, match=re.escape(f"{hint}{path} OUT")):
            opens(path)
    (tmp_path / "pictures" / "00000.shard").write_bytes(b"")
    with pytest.raises(shardio.errors.DatasetNotFound, match=r"never finished$"):
        opens(picture.parent)


def test_a_pattern_of_shards_leads_to_the_folder(folder: Path) -> None:
    hint = f"there is no such folder: a dataset is opened by its folder, {str(folder)!r}"
    for pattern in ("*.shard", "{000000..000001}.shard"):
        with pytest.raises(shardio.errors.DatasetNotFound, match=re.escape(hint)):
            shardio.open(folder / pattern)


def test_a_pattern_of_other_files_leads_to_converting_them(tmp_path: Path) -> None:
    hint = f"; to load files of other kinds, convert them first: shardio convert {tmp_path} OUT"
    with pytest.raises(shardio.errors.DatasetNotFound, match=re.escape(hint)):
        shardio.open(tmp_path / "train-{000..010}.tar")


def test_the_folder_above_a_dataset_leads_to_the_dataset(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "above" / "data")
    hint = f"; did you mean {str(tmp_path / 'above' / 'data')!r}?"
    with pytest.raises(shardio.errors.DatasetNotFound, match=re.escape(hint)):
        shardio.open(tmp_path / "above")


@pytest.mark.parametrize("opens", [shardio.open, lambda path: ShardLoader(path, 2)])
def test_a_subset_as_a_folder_is_to_be_named(opens: Any, folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "data"
    shutil.copytree(folder, path)
    shardio.maintenance.split(path, {"train": 0.5, "val": 0.5})
    hint = f": write shardio.open({str(path)!r}, subset='train')"
    with pytest.raises(shardio.errors.DatasetNotFound, match=re.escape(hint)):
        opens(path / "train")
    with pytest.raises(shardio.errors.DatasetNotFound, match=r"there is no such folder$"):
        opens(path / "test")


def test_ipython_completes_the_names_of_fields(objects: dict[str, Any]) -> None:
    for name in ("dataset", "mixture", "view", "batch"):
        assert sorted(objects[name]._ipython_key_completions_()) == ["label", "x"]


def test_habits_of_other_libraries_name_what_replaces_them(folder: Path, tmp_path: Path) -> None:
    anything: Any = shardio
    with pytest.raises(AttributeError, match=r"write shardio\.convert\(file, path\), then"):
        anything.read_csv("a.csv")
    with pytest.raises(TypeError, match=r"ShardWriter has no option 'maxcount': .*DatasetWriter"):
        anything.ShardWriter(tmp_path / "a.shard", Schema({"x": Array("int64")}), maxcount=3)
    with pytest.raises(InvalidArgument, match=r"batch_size is None; .*map_view\.MapView\(dataset"):
        anything.ShardLoader(folder, None)
