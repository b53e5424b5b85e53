"""Views: their samples are those that a loader delivers, they compose, and change no dataset."""

from __future__ import annotations

import os
import pickle
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shardio
from shardio import Array, Audio, Image, InvalidArgument, Schema, ShardLoader, Sound, Video
from shardio.conversion import convert
from shardio.errors import ShardChanged
from shardio.maintenance import split
from shardio.map_view import MapView
from shardio.media import demux, encode_jpeg
from shardio.samples.open_dataset import OpenDataset
from shardio.samples.view import RowView, SampleView
from tests.loading import values_of, write_dataset
from tests.media_made import scene, write_flash, write_video
from tests.shards import same_in_batch

pytestmark = pytest.mark.usefixtures("quick_disk")

SCHEMA = Schema(
    {
        "video": Video(optional=True),
        "image": Image(),
        "audio": Audio(optional=True),
        "label": Array("int64"),
        "tokens": Array("uint16", (None,)),
        "state": Array("float32", (None, 2)),
    }
)
LENGTHS = (12, None, 9, 3, 20, 7)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    made = tmp_path_factory.mktemp("views")
    sound = demux(write_flash(made / "flash.mkv").read_bytes(), kind="audio")
    samples = []
    for i, n in enumerate(LENGTHS):
        video = None
        if n is not None:
            video = write_video(made / f"{i}.mp4", scene(n, 48, 32)).read_bytes()
        image = encode_jpeg(np.full((8 + i, 6, 3), 40 * i, np.uint8))
        tokens = np.arange(5 * i, dtype=np.uint16)
        state = np.arange(2 * (n or 0), dtype=np.float32).reshape(-1, 2) + i
        sample: dict[str, Any] = {"video": video, "image": image, "audio": sound, "label": i}
        sample |= {"tokens": tokens, "state": state}
        samples.append(sample if i != 2 else {**sample, "audio": None})
    return write_dataset(made / "set", len(LENGTHS), 2, SCHEMA, samples)


@pytest.fixture
def dataset(folder: str) -> Iterator[shardio.ShardDataset]:
    with shardio.open(folder) as opened:
        yield opened


VIEWS: dict[str, Any] = {
    "rows": RowView,
    "clips": lambda d: d.clips(4, stride=2, times=True),
    "random clips": lambda d: d.clips(
        3, where="random", per_video=2, size=(16, 16), crop="random", fps=10, loop_filter=False
    ),
    "windows": lambda d: d.pack("tokens", length=8, targets=True, apart=True, eot=9),
    "steps": lambda d: d.windows({"video": [-0.08, 0.0], "state": range(-1, 3)}, fps=25),
}


def fields_of(view: SampleView) -> list[str] | None:
    return ["image", "audio", "label"] if isinstance(view, RowView) else None


def delivered(view: Any, **options: Any) -> list[dict[str, Any]]:
    """Return the samples of the second epoch, as lists of values."""
    found = []
    options = {"num_workers": 0, "output": "numpy", "collate": "list", **options}
    with ShardLoader(view, 4, **options) as loader:
        for _ in loader:
            pass
        for batch in loader:
            columns = values_of(batch)
            rows = zip(*columns.values(), strict=True)
            found += [dict(zip(columns, row, strict=True)) for row in rows]
    return found


@pytest.mark.parametrize("name", VIEWS)
def test_a_sample_of_a_view_is_what_a_loader_delivers(dataset: OpenDataset, name: str) -> None:
    view = VIEWS[name](dataset)
    found = delivered(view, fields=fields_of(view), seed=3)
    assert len(found) == len(view) > 3
    for i, values in enumerate(found):
        sample = view.sample(i, seed=3, epoch=1)
        assert set(values) <= set(sample)
        for field, value in values.items():
            assert same_in_batch(value, sample[field]), (i, field)


@pytest.mark.parametrize("name", list(VIEWS)[1:])
def test_a_view_matches_its_schema_and_repr(dataset: OpenDataset, name: str) -> None:
    view = VIEWS[name](dataset)
    assert list(view[0]) == list(view.schema)
    for field, value in view[-1].items():
        kind = view.schema[field]
        if value is not None and isinstance(kind, Array):
            assert value.dtype == kind.numpy, field
            shape = zip(value.shape, kind.shape, strict=True)
            assert all(n == expected or expected is None for n, expected in shape)
    assert [sample["label" if "label" in sample else "tokens"] is not None for sample in view[:2]]
    with pytest.raises(IndexError, match="no sample"):
        view[len(view)]
    assert "\n" not in repr(view)
    assert f"{len(view)} " in repr(view)
    assert dataset.path in repr(view)


def test_showing_a_view_reads_nothing(folder: str) -> None:
    with shardio.open(folder) as dataset:
        views = [dataset.clips(4), dataset.clips(4000), dataset.pack("tokens", length=10**6)]
        counted = dataset.pack("tokens", length=8)
        with MapView(counted) as indexed:
            assert repr(counted) in repr(indexed)
        n = len(counted)
    for view in views:
        assert re.match(r"\w+View\((clips of 4|windows of 1000000)", repr(view)), repr(view)
    assert repr(counted).startswith(f"TokenView({n} windows of 8 tokens")


def test_views_compose_in_either_order(dataset: OpenDataset) -> None:
    split(dataset.path, {"train": 0.5, "val": 0.5}, seed=1)
    chosen = ((lambda columns: columns["label"] < 4), ["label"])
    with shardio.open(dataset.path) as again:
        for made in (VIEWS["clips"], VIEWS["windows"], VIEWS["steps"]):
            one = made(again.select(chosen[0], fields=chosen[1]))
            other = made(again).select(chosen[0], fields=chosen[1])
            assert 0 < len(one) < len(made(again))
            assert one.identity == other.identity != made(again).identity
            assert delivered(one).__len__() == len(other)
        subset = again.subset("train").select(chosen[0], fields=chosen[1])
        other = again.select(chosen[0], fields=chosen[1]).subset("train")
        labels = [sample["label"] for sample in subset]
        assert labels == [sample["label"] for sample in other]
        assert 0 < len(labels) < len(again.subset("train")) + 1
        clips = again.clips(2).subset("val")
        assert {clip["label"] for clip in clips} <= {row["label"] for row in again.subset("val")}


def test_a_mixture_has_views_as_well(folder: str) -> None:
    with shardio.mix([folder, folder], weights=[1, 1]) as mixed:
        clips = mixed.clips(4, size=(16, 16))
        with shardio.open(folder) as alone:
            n = len(alone.clips(4))
            assert len(clips) == 2 * n
            assert clips.sources_of([0, n - 1, n]).tolist() == [0, 0, 1]
            some = mixed.select(lambda columns: columns["label"] < 3, fields=["label"])
            assert (len(some), len(some.clips(4))) == (6, 2 * (12 // 4 + 9 // 4))
        with pytest.raises(InvalidArgument, match="select with a function"):
            mixed.select([0])
        with pytest.raises(InvalidArgument, match="has no samples"):
            mixed.select(lambda columns: columns["label"] < 0, fields=["label"])


def test_loading_a_view_leaves_its_dataset_as_it_was(dataset: OpenDataset) -> None:
    view = dataset.clips(4)
    with ShardLoader(view, 2, num_workers=0, output="numpy") as loader:
        assert (len(loader.view), len(dataset)) == (len(view), len(LENGTHS))
        assert repr(loader.view).startswith("ClipView(")
    assert dataset[2]["label"] == 2
    for made in VIEWS.values():
        view = made(dataset)
        again = pickle.loads(pickle.dumps(view))
        with again.dataset:
            assert type(again) is type(view)
            assert (again.identity, len(again)) == (view.identity, len(view))


def test_a_path_stands_for_the_view_that_it_was_converted_for(tmp_path: Path) -> None:
    write_video(tmp_path / "in" / "a.mp4", scene(24, 48, 32))
    convert(tmp_path / "in", tmp_path / "out", workers=0, store="h264", frames=5, size=16)
    with ShardLoader(tmp_path / "out", 4, num_workers=0, output="numpy") as loader:
        assert repr(loader.view).startswith("ClipView(4 clips of 5 frames, stride 1, of 'frames'")
    with ShardLoader(tmp_path / "out", 4, fields=["source"], num_workers=0) as loader:
        assert isinstance(loader.view, RowView)


def test_fields_are_decoded_one_by_one(dataset: OpenDataset, folder: str) -> None:
    decode = {"image": False, "audio": Sound(rate=8_000, seconds="0.5", dtype="int16")}
    fields = ["image", "audio", "label"]
    found = delivered(folder, fields=fields, decode=decode)
    assert [sample["audio"].shape for sample in found] == [(4000, 1)] * len(LENGTHS)
    assert found[0]["audio"].dtype == np.int16
    for i, sample in enumerate(found):
        assert bytes(sample["image"]) == bytes(dataset[i]["image"])
    with pytest.raises(InvalidArgument, match="found 'label': True"):
        ShardLoader(folder, 2, decode={"label": True})


@pytest.mark.parametrize(
    ("option", "instead"),
    [
        ("where", r"write select\(lambda columns: …, fields="),
        ("mask", r"write select\(mask\)"),
        ("indices", r"write select\(indices\)"),
        ("field", "did you mean 'fields'"),
    ],
)
def test_select_option_hints(dataset: OpenDataset, folder: str, option: str, instead: str) -> None:
    options: dict[str, Any] = {option: [1]}
    with shardio.mix([folder], weights=[1]) as mixture:
        for given in (dataset, mixture, dataset.clips(4)):
            with pytest.raises(TypeError, match=instead):
                given.select(**options)


@pytest.mark.parametrize("name", VIEWS)
def test_methods_of_datasets_are_refused_with_a_hint(dataset: OpenDataset, name: str) -> None:
    view = VIEWS[name](dataset)
    for method in ("clips", "pack", "preload", "windows"):
        assert not hasattr(view, method)
        with pytest.raises(AttributeError, match=rf"View has no .* view\.dataset\.{method}\("):
            getattr(view, method)(3)


def test_an_error_within_a_property_keeps_its_text(dataset: OpenDataset) -> None:
    view = RowView(dataset)
    view.dataset = None  # type: ignore[assignment]
    with pytest.raises(AttributeError, match="'NoneType' object has no attribute 'schema'"):
        _ = view.fields


@pytest.mark.parametrize("given", [None, 5, {"a": 1}, b"rows", "", ["a", "b"], Sound(), iter("a")])
def test_what_is_no_dataset_is_refused_with_what_is_one(given: Any) -> None:
    made: dict[Any, str] = {
        shardio.open: "expected the folder or the URL of a dataset; found ",
        lambda it: ShardLoader(it, 2): "expected the folder .* or a view of one; found ",
        MapView: "expected the folder or the URL of a dataset.*; found ",
    }
    for function, words in made.items():
        hints: dict[type, str] = {
            list: r".*write shardio\.mix\(",
            dict: r".*shardio\.convert\(samples, path\)$",
        }
        end = hints.get(type(given), "")
        with pytest.raises(InvalidArgument, match=words + re.escape(repr(given)) + end):
            function(given)


def test_a_field_that_is_not_decoded_is_left_out_as_the_message_says(folder: str) -> None:
    fields = ["audio", "video", "label"]
    options: dict[str, Any] = {"num_workers": 0, "output": "numpy", "decode": {"video": False}}
    with pytest.raises(InvalidArgument, match=r"a Video.*\(fields=\['audio', 'label'\]\)"):
        ShardLoader(folder, 2, fields=fields, **options)
    with pytest.raises(InvalidArgument, match="into a batch: have a transform decode it"):
        ShardLoader(folder, 2, fields=["video"], **options)


@pytest.mark.parametrize(
    ("option", "instead"),
    [
        ("clip", r"write {}\(shardio\.open\(path\)\.clips\(frames=…\)"),
        ("pack", r"write {}\(shardio\.open\(path\)\.pack\(length=…\)"),
        ("fps", r"write {}\(shardio\.open\(path\)\.clips\(fps=…\)"),
        ("where", r"write {}\(shardio\.open\(path\)\.clips\(where=…\)"),
        ("eot", r"write {}\(shardio\.open\(path\)\.pack\(eot=…\)"),
        ("subset", r"write {}\(shardio\.open\(path, subset=…\)"),
        ("indices", r"write {}\(shardio\.open\(path\)\.select\(…\)"),
        ("field", "did you mean 'fields'"),
        ("sound", r"decode=\{\"audio\": shardio\.Sound\("),
    ],
)
def test_an_option_of_a_view_is_refused_with_a_hint(folder: str, option: str, instead: str) -> None:
    options: dict[str, Any] = {option: None}
    with pytest.raises(TypeError, match=instead.replace("{}", "ShardLoader")):
        ShardLoader(folder, 2, **options)
    with pytest.raises(TypeError, match=instead.replace("{}", "MapView")):
        MapView(folder, **options)


@pytest.mark.parametrize("name", VIEWS)
def test_a_truncated_file_is_an_error_not_a_crash(folder: str, tmp_path: Path, name: str) -> None:
    copy = tmp_path / "set"
    shutil.copytree(folder, copy)
    with shardio.open(copy, access="mmap") as dataset:
        view = VIEWS[name](dataset)
        expected = view[0]
        for shard in copy.glob("*.shard"):
            os.truncate(shard, 4096)
        with pytest.raises(ShardChanged, match=r"\.shard"):
            view[0]
        assert expected.keys() == view.schema.keys()
