"""Uploads: readers see the whole dataset or nothing."""

from __future__ import annotations

import platform
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest

import shardio
from shardio.conversion import execution
from shardio.conversion.report import Progress
from shardio.conversion.upload import ShardUploader, Upload, UploadLease, upload_shard
from shardio.errors import (
    DatasetConflict,
    DatasetExists,
    InvalidArgument,
    ShardChanged,
    ShardNotFound,
    StoreAccessDenied,
    StoreUnavailable,
)
from shardio.shard.writer import ShardSummary
from shardio.storage.remote.connection import replaced_error
from shardio.storage.remote.object_store import ObjectStore
from shardio_tools import cli
from tests.lines import install, write
from tests.storage.remote.scene import Fault, Scene

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
    yield from sorted(ObjectStore(url, store.options).list_names())


def _texts(store: Scene, url: str) -> list[str]:
    with shardio.open(url, storage_options=store.options) as dataset:
        return [sample["text"] for sample in dataset]


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def test_the_uploaded_dataset_equals_that_of_a_folder(
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
    store: Scene, lines: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shardio.dataset.external_lists.MAX_INLINE_ENTRIES", 1)
    url = store.url("resumed")
    store.proxy.faults = [Fault("error", "generations", times=99, method="PUT")]
    with pytest.raises(StoreUnavailable):
        _convert(store, lines, url, told={"deadline_s": 0.3}, **OPTIONS)
    names = list(_objects(store, url))
    *shards, lease = names
    assert shards and all(name.endswith(".shard") for name in shards)
    assert lease == "conversion.json"
    assert not list((tmp_path / "cache").rglob("*.shard"))  # they lie there, and no more here
    with pytest.raises(DatasetExists, match="complete but not published"):
        _convert(store, lines, url, **OPTIONS)
    store.proxy.forget()
    report = _convert(store, lines, url, resume=True, **OPTIONS)
    assert (report.n_samples, report.counts) == (4, {"converted": 2})
    assert _texts(store, url) == ["one", "two", "three", "four"]


def test_uploaded_shards_are_not_uploaded_again(store: Scene, lines: Path, tmp_path: Path) -> None:
    url = store.url("halfway")
    store.proxy.faults = [Fault("error", "000001-000", times=99, method="PUT")]
    with pytest.raises(StoreUnavailable):
        _convert(store, lines, url, told={"deadline_s": 0.3}, **OPTIONS)
    sent, *_ = _objects(store, url)
    assert sent == "000000-000.shard"
    notes = list((tmp_path / "cache").rglob("*.shard.sent"))
    assert len(notes) == sum(name.endswith(".shard") for name in _objects(store, url))
    store.proxy.forget()
    store.proxy.faults = [Fault("error", "000000-000", times=99, method="PUT")]
    assert _convert(store, lines, url, resume=True, **OPTIONS).n_samples == 4
    assert _texts(store, url) == ["one", "two", "three", "four"]


def test_shards_missing_from_a_new_plan_are_removed(store: Scene, lines: Path) -> None:
    url = store.url("replanned")
    options = {**OPTIONS, "on_error": "stop"}
    write(lines, {"c/3.txt": "five six seven eight nine ten"})
    with _interrupted_at_the_end(), pytest.raises(KeyboardInterrupt):
        _convert(store, lines, url, **options)
    before = {name for name in _objects(store, url) if name.endswith(".shard")}
    write(lines, {"a/0.txt": "zero"})
    (lines / "c/3.txt").unlink()
    _convert(store, lines, url, resume=True, **options)
    assert _texts(store, url) == ["zero", "one", "two", "three", "four"]
    with shardio.open(url, storage_options=store.options) as dataset:
        names = {shard.name for shard in dataset.shards}
    assert before - names
    assert {name for name in _objects(store, url) if name.endswith(".shard")} == names


@contextmanager
def _interrupted_at_the_end() -> Iterator[None]:
    """Interrupt conversions once all shards are uploaded."""
    with pytest.MonkeyPatch.context() as during:
        during.setattr("shardio.conversion.execution.publish", _interrupted)
        yield


def _interrupted(*_: Any, **__: Any) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("what", ["gone", "another's"])
def test_a_missing_or_replaced_shard_is_an_error(store: Scene, lines: Path, what: str) -> None:
    url = store.url(f"lost-{what[:4]}")
    with _interrupted_at_the_end(), pytest.raises(KeyboardInterrupt):
        _convert(store, lines, url, **OPTIONS)
    sent, other, *_ = _objects(store, url)
    if what == "gone":
        ObjectStore(url, store.options).remove(sent)
    else:
        with urlopen(f"{store.options['aws_endpoint']}/bucket/{url[12:]}/{other}") as answer:
            store.put(f"{url[12:]}/{sent}", answer.read())
    with pytest.raises(
        (ShardNotFound, ShardChanged),
        match=f"{sent}: (was uploaded|the uploaded shard was replaced)",
    ):
        _convert(store, lines, url, resume=True, **OPTIONS)


def test_a_second_conversion_to_the_same_url_is_refused(
    store: Scene, lines: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = store.url("leased")
    with _interrupted_at_the_end(), pytest.raises(KeyboardInterrupt):
        _convert(store, lines, url, **OPTIONS)
    there = list(_objects(store, url))
    monkeypatch.setenv("SHARDIO_CACHE", str(tmp_path / "of another machine"))
    for resume in (False, True):
        with pytest.raises(DatasetConflict, match=rf"converting there|{platform.node()}, since "):
            _convert(store, lines, url, resume=resume, **OPTIONS)
    assert list(_objects(store, url)) == there
    monkeypatch.setenv("SHARDIO_CACHE", str(tmp_path / "cache"))
    with pytest.raises(DatasetExists, match=rf"resume.*; to start again, .* {url}"):
        _convert(store, lines, url, **OPTIONS)
    _convert(store, lines, url, resume=True, **OPTIONS)
    assert "conversion.json" not in _objects(store, url)


def test_two_conversions_on_one_machine_do_not_share_a_url(
    store: Scene, lines: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = store.url("twice")
    monkeypatch.setattr("shardio.conversion.upload.LOCK_PATIENCE_S", 0)
    publish = Upload.publish

    def late(self: Upload, *given: Any) -> Any:
        for resume in (False, True):
            with pytest.raises(DatasetConflict, match="another conversion on this machine"):
                _convert(store, lines, url, resume=resume, **OPTIONS)
        return publish(self, *given)

    monkeypatch.setattr(Upload, "publish", late)
    assert _convert(store, lines, url, **OPTIONS).n_samples == 4
    assert _texts(store, url) == ["one", "two", "three", "four"]


def test_a_resumed_conversion_waits_for_interrupted_uploads(
    store: Scene, lines: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = store.url("under-way")
    has_begun, may_end = threading.Event(), threading.Event()

    def slow(*_: Any) -> None:
        has_begun.set()
        may_end.wait(60)

    def interrupted(progress: Progress) -> None:
        if progress.n_inputs_done == 2:
            has_begun.wait(60)
            raise KeyboardInterrupt

    with monkeypatch.context() as during:
        during.setattr("shardio.conversion.upload.upload_shard", slow)
        during.setattr("shardio.conversion.upload.LOCK_PATIENCE_S", 0)
        with pytest.raises(KeyboardInterrupt):
            _convert(store, lines, url, progress=interrupted, **OPTIONS)
        with pytest.raises(DatasetConflict, match="an interrupted upload"):
            _convert(store, lines, url, resume=True, **OPTIONS)
    may_end.set()
    assert _convert(store, lines, url, resume=True, **OPTIONS).n_samples == 4
    assert _texts(store, url) == ["one", "two", "three", "four"]


def test_an_empty_object_in_place_of_a_shard_is_overwritten(
    store: Scene, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: ObjectStore, name: str, n_bytes: int) -> None:
        raise replaced_error(self.url, name)  # as stores do of any range of it

    objects = ObjectStore(store.url("empty"), store.options)
    (tmp_path / "a").write_bytes(b"a shard")
    with monkeypatch.context() as during:
        during.setattr(ObjectStore, "read_tail", refuse)
        upload_shard(objects, str(tmp_path / "a"), ShardSummary("a.shard", 1, 7, "0"))
    assert objects.read("a.shard") == b"a shard"


def test_a_closed_uploader_removes_nothing(
    store: Scene, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    uploader = ShardUploader(ObjectStore(store.url("closed"), store.options), "")
    has_ended = threading.Event()
    monkeypatch.setattr("shardio.conversion.upload.uploaded_name", lambda _: "000000-000.shard")
    monkeypatch.setattr("shardio.conversion.upload.check_uploaded", lambda *_: uploader.close())
    (tmp_path / "000.shard").write_bytes(b"of the next conversion")
    uploader.set_done_callback(has_ended.set)
    uploader.submit(str(tmp_path / "000.shard"), ShardSummary("000000-000.shard", 1, 1, "0"))
    assert has_ended.wait(60)
    assert (tmp_path / "000.shard").exists()


def test_a_dataset_published_before_the_lease_is_taken_is_noticed(
    store: Scene, lines: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    take = UploadLease.acquire

    def late(self: UploadLease) -> None:
        store.put("just/dataset.json", b"another's")
        take(self)

    monkeypatch.setattr(UploadLease, "acquire", late)
    with pytest.raises(DatasetExists, match="already holds a dataset"):
        _convert(store, lines, store.url("just"), **OPTIONS)
    assert list(_objects(store, store.url("just"))) == ["dataset.json"]


def test_a_finished_conversion_is_not_published_for_modified_inputs(
    store: Scene, lines: Path
) -> None:
    url = store.url("others")
    store.proxy.faults = [Fault("denied", "generations", times=99, method="PUT")]
    with pytest.raises(StoreAccessDenied):
        _convert(store, lines, url, **OPTIONS)
    store.proxy.forget()
    with pytest.raises(InvalidArgument, match="repeat was 1, is 2; .* to start again"):
        _convert(store, lines, url, resume=True, repeat=2, **OPTIONS)
    write(lines, {"c/3.txt": "five"})
    with pytest.raises(DatasetExists, match="its inputs have changed since; to start again"):
        _convert(store, lines, url, resume=True, **OPTIONS)
    (lines / "c/3.txt").unlink()
    (lines / "c").rmdir()
    assert _convert(store, lines, url, resume=True, **OPTIONS).n_samples == 4


def test_a_conversion_of_nothing_leaves_nothing_in_the_store(store: Scene, lines: Path) -> None:
    url = store.url("nothing")
    with Upload(url, store.options, resume=False) as upload:
        Path(upload.folder).mkdir()
    Path(upload.folder).rmdir()  # as if it were killed with the lease alone
    assert list(_objects(store, url)) == ["conversion.json"]
    with pytest.raises(InvalidArgument):
        _convert(store, lines, url, **{**OPTIONS, "on_error": "never"})
    assert list(_objects(store, url)) == []
    with pytest.raises(InvalidArgument):
        _convert(store, lines, url, kind="videos", workers=0)
    with pytest.raises(InvalidArgument):
        _convert(store, lines, url, **{**OPTIONS, "on_error": "never"})
    assert list(_objects(store, url)) == []


@pytest.mark.parametrize("n_workers", [0, 1])
def test_without_samples_nothing_is_left_in_the_store(
    store: Scene, lines: Path, tmp_path: Path, n_workers: int
) -> None:
    url = store.url(f"broken{n_workers}")
    options = {**OPTIONS, "workers": n_workers}
    write(tmp_path / "none", {"1.txt": "!", "2.txt": ""})
    for resume in (False, True, False):
        report = _convert(store, tmp_path / "none", url, resume=resume, **options)
        assert (report.dataset, report.n_samples, report.generation) == (url, 0, 0)
        assert [one.outcome for one in report.inputs] == ["broken", "empty"]
        assert list(_objects(store, url)) == []
        assert list((tmp_path / "cache" / "converting").iterdir()) == []
    schema = shardio.Schema({"text": shardio.Text()})
    report = _convert(store, [], url, schema=schema)
    assert (report.dataset, report.generation) == (url, 0)
    assert list(_objects(store, url)) == []
    assert _convert(store, lines, url, **options).n_samples == 4
    assert _texts(store, url) == ["one", "two", "three", "four"]


def test_without_samples_after_resuming_uploaded_shards_are_removed(
    store: Scene, lines: Path, tmp_path: Path
) -> None:
    url = store.url("gone")

    def interrupt(state: Progress) -> None:
        if state.n_inputs_done == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        _convert(store, lines, url, progress=interrupt, **OPTIONS)
    write(lines, {"a/1.txt": "!", "b/2.txt": "!"})
    report = _convert(store, lines, url, resume=True, **OPTIONS)
    assert (report.n_samples, report.generation) == (0, 0)
    assert list(_objects(store, url)) == []
    write(lines, {"a/1.txt": "one"})
    assert _convert(store, lines, url, **OPTIONS).n_samples == 1


def test_small_shards_of_items_are_merged_before_upload(
    store: Scene, lines: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = store.url("items")
    monkeypatch.setattr(execution, "MIN_SHARD_BYTES", 200_000)

    def make(n: int) -> dict[str, Any]:
        return {"n": n, "x": bytes([n]) * (250_000 if n in (50, 51) else 10_000)}

    def interrupt(state: Progress) -> None:
        if state.n_inputs_done == 60:
            raise KeyboardInterrupt

    shardio.convert(range(100), tmp_path / "out", samples=make, workers=0)
    with pytest.raises(KeyboardInterrupt):
        _convert(store, range(100), url, samples=make, workers=0, progress=interrupt)
    with monkeypatch.context() as patch:
        patch.setattr(ShardUploader, "finish", _interrupt)
        with pytest.raises(KeyboardInterrupt):
            _convert(store, range(100), url, samples=make, workers=0, resume=True)
    _convert(store, range(100), url, samples=make, workers=0, resume=True)
    here = [p for p in sorted((tmp_path / "out").rglob("*")) if p.is_file()]
    assert list(_objects(store, url)) == [str(p.relative_to(tmp_path / "out")) for p in here]
    assert 3 < sum(p.suffix == ".shard" for p in here) < 15
    for path in here:
        name = str(path.relative_to(tmp_path / "out"))
        assert bytes(ObjectStore(url, store.options).read(name)) == path.read_bytes(), name
    assert list((tmp_path / "cache" / "converting").iterdir()) == []


def test_a_conversion_killed_during_its_clean_up_has_published(
    store: Scene, lines: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = store.url("tidied")
    with monkeypatch.context() as during, pytest.raises(KeyboardInterrupt):
        during.setattr("shardio.conversion.upload.Upload._clean_up", _tidy_up_later())
        _convert(store, lines, url, **OPTIONS)
    assert _texts(store, url) == ["one", "two", "three", "four"]
    with pytest.raises(DatasetExists, match="already holds a dataset"):
        _convert(store, lines, url, resume=True, **OPTIONS)
    assert "conversion.json" not in _objects(store, url)
    assert list((tmp_path / "cache" / "converting").iterdir()) == []


def _tidy_up_later() -> Any:
    calls = iter([lambda *_: None, _interrupted])
    return lambda self: next(calls)(self)


def test_python_samples_are_uploaded(store: Scene, lines: Path) -> None:
    url = store.url("samples")
    report = _convert(store, ({"number": n} for n in range(5)), url)
    assert report.n_samples == 5
    with shardio.open(url, storage_options=store.options) as dataset:
        assert [sample["number"] for sample in dataset] == list(range(5))


def test_leftovers_of_a_killed_process_are_no_obstacle(store: Scene, lines: Path) -> None:
    url = store.url("killed")
    with Upload(url, store.options, resume=False) as upload:
        Path(upload.folder).mkdir()
        Path(upload.folder, "000000-000.shard").write_bytes(b"half")
    assert list(_objects(store, url)) == ["conversion.json"]
    assert _convert(store, ({"number": n} for n in range(5)), url).n_samples == 5
    assert "conversion.json" not in _objects(store, url)


def test_the_second_to_publish_is_refused(
    store: Scene, lines: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = store.url("raced")
    publish = shardio.conversion.upload.Upload.publish

    def late(self: Any, *given: Any) -> Any:
        store.put("raced/generations/000001.json", b"another's")
        store.put("raced/000777-000.shard", b"another's")
        return publish(self, *given)

    monkeypatch.setattr("shardio.conversion.upload.Upload.publish", late)
    with pytest.raises(DatasetConflict, match="another writer published first"):
        _convert(store, lines, url, **OPTIONS)
    assert "000777-000.shard" in _objects(store, url)


def test_a_url_that_holds_data_is_refused(store: Scene, lines: Path) -> None:
    store.put("taken/notes.txt", b"mine")
    with pytest.raises(DatasetExists, match=r"already holds data \(notes\.txt\)"):
        _convert(store, lines, store.url("taken"), **OPTIONS)
    store.put("taken/dataset.json", b"{}")
    with pytest.raises(DatasetExists, match="already holds a dataset"):
        _convert(store, lines, store.url("taken"), **OPTIONS)
    with pytest.raises(InvalidArgument, match="append: only for datasets in a folder"):
        _convert(store, lines, store.url("taken"), append=True, **OPTIONS)


def test_a_web_server_is_refused_before_anything_is_converted(
    store: Scene, lines: Path, tmp_path: Path
) -> None:
    with pytest.raises(InvalidArgument, match="cannot write to a web server"):
        _convert(store, lines, "HTTP://host/set", **OPTIONS)
    assert not (tmp_path / "cache").exists()


def test_the_command_converts_into_a_store(
    told: Scene, lines: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    url = told.url("by-command")
    assert cli.main(["convert", str(lines), url, "--kind", "lines", "--workers", "0"]) == 0
    assert "4 samples" in capsys.readouterr().out
    assert _texts(told, url) == ["one", "two", "three", "four"]


def test_external_lists_are_uploaded_with_their_generation(
    store: Scene, lines: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shardio.dataset.external_lists.MAX_INLINE_ENTRIES", 1)
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
