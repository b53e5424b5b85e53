"""Conversions into object stores: all of the dataset is there, or nothing that one would read."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import shardio
from shardio.errors import DatasetConflict, DatasetExists, InvalidArgument, StoreUnavailable
from shardio_tools import cli
from tests.lines import install, write
from tests.remote.scene import Fault, Scene

OPTIONS: dict[str, Any] = {"kind": "lines", "workers": 0, "shard_bytes": 9000}


@pytest.fixture
def lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    install(tmp_path, monkeypatch)
    monkeypatch.setenv("SHARDIO_CACHE", str(tmp_path / "cache"))
    write(tmp_path / "few", {"a/1.txt": "one two three", "b/2.txt": "four"})
    return tmp_path / "few"


def _convert(store: Scene, src: Any, url: str, **options: Any) -> Any:
    told = {**store.options, **options.pop("told", {})}
    return shardio.convert(src, url, storage_options=told, **options)


def _objects(store: Scene, url: str) -> Iterator[str]:
    from shardio.remote.objects import Objects

    yield from sorted(Objects(url, store.options).names())


def _texts(store: Scene, url: str) -> list[str]:
    with shardio.open(url, storage_options=store.options) as dataset:
        return [sample["text"] for sample in dataset]


def test_what_is_there_is_what_a_folder_would_have(
    store: Scene, lines: Path, tmp_path: Path
) -> None:
    url = store.url("converted")
    report = _convert(store, lines, url, **OPTIONS)
    assert (report.dataset, report.n_samples) == (url, 4)
    shardio.convert(lines, tmp_path / "out", **OPTIONS)
    here = [p for p in sorted((tmp_path / "out").rglob("*")) if p.is_file()]
    names = [str(p.relative_to(tmp_path / "out")) for p in here]
    assert list(_objects(store, url)) == names
    assert _texts(store, url) == ["one", "two", "three", "four"]
    assert list((tmp_path / "cache" / "converting").iterdir()) == []


def test_an_upload_that_fails_publishes_nothing_and_resuming_ends_it(
    store: Scene, lines: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shardio.manifest.parts.LISTED_MAX", 1)
    url = store.url("resumed")
    store.proxy.faults = [Fault("error", "generations", times=99, method="PUT")]
    with pytest.raises(StoreUnavailable):
        _convert(store, lines, url, told={"deadline_s": 0.3}, **OPTIONS)
    names = list(_objects(store, url))
    assert names and all(name.endswith(".shard") for name in names)
    with pytest.raises(DatasetExists, match="not uploaded to the end"):
        _convert(store, lines, url, **OPTIONS)
    store.proxy.forget()
    report = _convert(store, lines, url, resume=True, **OPTIONS)
    assert (report.n_samples, report.counts) == (4, {"converted": 2})
    assert _texts(store, url) == ["one", "two", "three", "four"]


def test_resuming_uploads_anew_what_is_there_with_other_bytes(store: Scene, lines: Path) -> None:
    url = store.url("mended")
    store.proxy.faults = [Fault("error", "generations", times=99, method="PUT")]
    with pytest.raises(StoreUnavailable):
        _convert(store, lines, url, told={"deadline_s": 0.3}, **OPTIONS)
    store.put(f"mended/{next(_objects(store, url))}", b"another's")
    store.proxy.forget()
    _convert(store, lines, url, resume=True, **OPTIONS)
    assert _texts(store, url) == ["one", "two", "three", "four"]


def test_who_publishes_second_is_refused(
    store: Scene, lines: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = store.url("raced")
    publish = shardio.conversion.uploading.Upload.publish

    def late(self: Any, *given: Any) -> Any:
        store.put("raced/generations/000001.json", b"another's")
        return publish(self, *given)

    monkeypatch.setattr("shardio.conversion.uploading.Upload.publish", late)
    with pytest.raises(DatasetConflict, match="another writer published first"):
        _convert(store, lines, url, **OPTIONS)


def test_a_place_that_holds_something_is_refused(store: Scene, lines: Path) -> None:
    store.put("taken/notes.txt", b"mine")
    with pytest.raises(DatasetExists, match=r"already holds data \(notes\.txt\)"):
        _convert(store, lines, store.url("taken"), **OPTIONS)
    store.put("taken/dataset.json", b"{}")
    with pytest.raises(DatasetExists, match="already holds a dataset"):
        _convert(store, lines, store.url("taken"), **OPTIONS)
    with pytest.raises(InvalidArgument, match="append: only for a dataset in a folder"):
        _convert(store, lines, store.url("taken"), append=True, **OPTIONS)


def test_a_web_server_is_refused_before_anything_is_converted(
    store: Scene, lines: Path, tmp_path: Path
) -> None:
    with pytest.raises(InvalidArgument, match="web servers are only read"):
        _convert(store, lines, "HTTP://host/set", **OPTIONS)
    assert not (tmp_path / "cache").exists()


def test_the_command_converts_into_a_store(
    told: Scene, lines: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    url = told.url("by-command")
    assert cli.main(["convert", str(lines), url, "--kind", "lines", "--workers", "0"]) == 0
    assert "4 samples" in capsys.readouterr().out
    assert _texts(told, url) == ["one", "two", "three", "four"]


def test_long_lists_go_with_the_state_that_names_them(
    store: Scene, lines: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shardio.manifest.parts.LISTED_MAX", 1)
    url = store.url("long-lists")
    _convert(store, lines, url, **OPTIONS)
    assert {name.rpartition(".")[2] for name in _objects(store, url)} == {
        "inputs",
        "json",
        "shard",
        "shards",
    }
    assert _texts(store, url) == ["one", "two", "three", "four"]
    assert _texts(store, url) == ["one", "two", "three", "four"]
