"""Uploads: readers see the whole dataset or nothing."""

from __future__ import annotations

import platform
import threading
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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
from tests.lines import install, interrupt_after, killed, write
from tests.media_made import scene, write_video
from tests.storage.remote.scene import Scene

OPTIONS: dict[str, Any] = {"kind": "lines", "workers": 0, "shard_bytes": 9000}
WORDS = ["one", "two", "three", "four"]


@dataclass
class Place:
    """A URL to convert to, and a folder of texts to convert."""

    store: Scene
    lines: Path
    cache: Path
    name: str

    @property
    def url(self) -> str:
        return self.store.url(self.name)

    @property
    def in_store(self) -> ObjectStore:
        return ObjectStore(self.url, self.store.options)

    def convert(self, src: Any = None, *, told: Any = None, **options: Any) -> Any:
        """Convert `src`, or the texts with `OPTIONS`."""
        given = {**OPTIONS, **options} if src is None else options
        where = {**self.store.options, **(told or {})}
        return shardio.convert(
            self.lines if src is None else src, self.url, storage_options=where, **given
        )

    def interrupted(self, **options: Any) -> None:
        """Convert, and be interrupted once all shards are uploaded."""
        with pytest.MonkeyPatch.context() as during, pytest.raises(KeyboardInterrupt):
            during.setattr("shardio.conversion.execution.publish", killed)
            self.convert(**options)

    def put(self, name: str, data: bytes) -> None:
        self.store.put(f"{self.name}/{name}", data)

    def objects(self) -> list[str]:
        return sorted(self.in_store.list_names())

    def open(self) -> shardio.ShardDataset:
        return shardio.open(self.url, storage_options=self.store.options)

    def texts(self) -> list[str]:
        with self.open() as dataset:
            return [sample["text"] for sample in dataset]

    def left_here(self) -> list[Path]:
        """Return the working folders of conversions."""
        return list((self.cache / "converting").iterdir())


@pytest.fixture
def place(
    store: Scene, request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Place:
    install(tmp_path, monkeypatch)
    monkeypatch.setenv("SHARDIO_CACHE", str(tmp_path / "cache"))
    write(tmp_path / "few", {"a/1.txt": "one two three", "b/2.txt": "four"})
    name = f"{zlib.crc32(request.node.name.encode()):08x}"
    return Place(store, tmp_path / "few", tmp_path / "cache", name)


def test_the_uploaded_dataset_equals_that_of_a_folder(place: Place, tmp_path: Path) -> None:
    report = place.convert()
    assert (report.dataset, report.n_samples) == (place.url, 4)
    shardio.convert(place.lines, tmp_path / "out", **OPTIONS)
    here = [p for p in sorted((tmp_path / "out").rglob("*")) if p.is_file()]
    names = [str(p.relative_to(tmp_path / "out")) for p in here]
    assert place.objects() == names
    assert place.texts() == WORDS
    assert place.left_here() == []


def test_failed_upload_publishes_on_resume(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardio.dataset.external_lists.MAX_INLINE_ENTRIES", 1)
    place.store.fail("error", "generations", times=99, method="PUT")
    with pytest.raises(StoreUnavailable):
        place.convert(told={"deadline_s": 0.3})
    names = place.objects()
    *shards, lease = names
    assert shards and all(name.endswith(".shard") for name in shards)
    assert lease == "conversion.json"
    assert not list(place.cache.rglob("*.shard"))  # they lie there, and no more here
    with pytest.raises(DatasetExists, match="complete but not published"):
        place.convert()
    place.store.proxy.forget()
    report = place.convert(resume=True)
    assert (report.n_samples, report.counts) == (4, {"converted": 2})
    endings = {name.rpartition(".")[2] for name in place.objects()}
    assert endings == {"inputs", "json", "shard", "shards"}  # with the external lists
    assert place.texts() == place.texts() == WORDS


@pytest.mark.parametrize(
    "src", [None, [{"word": word} for word in WORDS]], ids=["files", "samples"]
)
def test_a_conversion_that_cannot_be_published_says_how_to_publish_it(
    place: Place, src: Any
) -> None:
    place.store.fail("denied", r"dataset\.json", method="PUT")
    with pytest.raises(StoreAccessDenied, match="or ask for permission") as caught:
        place.convert(src)
    notes = [note for note in getattr(caught.value, "__notes__", []) if "resume (--resume)" in note]
    if src is None:
        assert "the conversion is complete; resume (--resume) publishes it; to start" in notes[0]
        place.convert(resume=True)
    else:
        assert not notes  # samples are converted again
        place.convert(src)
    assert len(place.open()) == len(WORDS)


def test_uploaded_shards_are_not_uploaded_again(place: Place) -> None:
    place.store.fail("error", "000001-000", times=99, method="PUT")
    with pytest.raises(StoreUnavailable):
        place.convert(told={"deadline_s": 0.3})
    sent, *_ = place.objects()
    assert sent == "000000-000.shard"
    notes = list(place.cache.rglob("*.shard.sent"))
    assert len(notes) == sum(name.endswith(".shard") for name in place.objects())
    place.store.proxy.forget()
    place.store.fail("error", "000000-000", times=99, method="PUT")
    assert place.convert(resume=True).n_samples == 4
    assert place.texts() == WORDS


def test_shards_missing_from_a_new_plan_are_removed(place: Place) -> None:
    options = {**OPTIONS, "on_error": "stop"}
    write(place.lines, {"c/3.txt": "five six seven eight nine ten"})
    place.interrupted(**options)
    before = {name for name in place.objects() if name.endswith(".shard")}
    write(place.lines, {"a/0.txt": "zero"})
    (place.lines / "c/3.txt").unlink()
    place.convert(resume=True, **options)
    assert place.texts() == ["zero", "one", "two", "three", "four"]
    with place.open() as dataset:
        names = {shard.name for shard in dataset.shards}
    assert before - names
    assert {name for name in place.objects() if name.endswith(".shard")} == names


@pytest.mark.parametrize("is_complete", [False, True])
@pytest.mark.parametrize("what", ["gone", "another's"])
def test_changed_upload_raises(place: Place, what: str, *, is_complete: bool) -> None:
    if is_complete:  # and only the generation is not yet uploaded
        place.store.fail("denied", "generations", times=99, method="PUT")
        with pytest.raises(StoreAccessDenied):
            place.convert()
        place.store.proxy.forget()
    else:
        place.interrupted()
    sent, other, *_ = place.objects()
    if what == "gone":
        place.in_store.remove(sent)
    else:
        place.put(sent, place.in_store.read(other))
    words = f"{sent}: (was uploaded|the uploaded shard was replaced)"
    with pytest.raises((ShardNotFound, ShardChanged), match=words):
        place.convert(resume=True)


def test_same_url_is_refused(place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place.interrupted()
    there = place.objects()
    monkeypatch.setenv("SHARDIO_CACHE", str(tmp_path / "of another machine"))
    for resume in (False, True):
        with pytest.raises(DatasetConflict, match=rf"converting there|{platform.node()}, since "):
            place.convert(resume=resume)
    assert place.objects() == there
    monkeypatch.setenv("SHARDIO_CACHE", str(place.cache))
    with pytest.raises(DatasetExists, match=rf"resume.*; to start again, .* {place.url}"):
        place.convert()
    place.convert(resume=True)
    assert "conversion.json" not in place.objects()


def test_one_conversion_at_a_time_per_url(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardio.conversion.upload.LOCK_TIMEOUT_S", 0)
    publish = Upload.publish

    def late(self: Upload, *given: Any) -> Any:
        for resume in (False, True):
            with pytest.raises(DatasetConflict, match="another conversion on this machine"):
                place.convert(resume=resume)
        return publish(self, *given)

    monkeypatch.setattr(Upload, "publish", late)
    assert place.convert().n_samples == 4
    assert place.texts() == WORDS


def test_a_resumed_upload_keeps_the_store_that_was_chosen(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_video(tmp_path / "videos" / "a.mp4", scene(4))
    options: dict[str, Any] = {"store": "auto", "rate": 1e-9, "frames": 4, "size": 16, "workers": 0}
    place.interrupted(src=path.parent, **options)
    monkeypatch.setattr("shardio_converters.media.videos.choose_by_trial", killed)
    report = place.convert(path.parent, resume=True, **options)
    assert (report.n_samples, report.choice) == (1, None)


def test_resume_waits_for_old_uploads(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
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
        during.setattr("shardio.conversion.upload.LOCK_TIMEOUT_S", 0)
        with pytest.raises(KeyboardInterrupt):
            place.convert(progress=interrupted)
        with pytest.raises(DatasetConflict, match="an interrupted upload"):
            place.convert(resume=True)
    may_end.set()
    assert place.convert(resume=True).n_samples == 4
    assert place.texts() == WORDS


def test_empty_object_resent(store: Scene, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: ObjectStore, name: str, n_bytes: int) -> None:
        raise replaced_error(self.url, name)  # as stores do of any range of it

    objects = ObjectStore(store.url("empty"), store.options)
    (tmp_path / "a").write_bytes(b"a shard")
    with monkeypatch.context() as during:
        during.setattr(ObjectStore, "read_tail", refuse)
        upload_shard(objects, str(tmp_path / "a"), ShardSummary("a.shard", 1, 7, "0"))
    assert objects.read("a.shard") == b"a shard"


def test_closed_keeps_shards(store: Scene, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    uploader = ShardUploader(ObjectStore(store.url("closed"), store.options), "")
    has_ended = threading.Event()
    monkeypatch.setattr("shardio.conversion.upload.uploaded_name", lambda _: "000000-000.shard")
    monkeypatch.setattr("shardio.conversion.upload.check_uploaded", lambda *_: uploader.close())
    (tmp_path / "000.shard").write_bytes(b"of the next conversion")
    uploader.submit(str(tmp_path / "000.shard"), ShardSummary("000000-000.shard", 1, 1, "0"))
    uploader.call_when_done(has_ended.set)
    assert has_ended.wait(60)
    assert (tmp_path / "000.shard").exists()


def test_publish_before_lease_is_noticed(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    take = UploadLease.acquire

    def late(self: UploadLease) -> None:
        place.put("dataset.json", b"another's")
        take(self)

    monkeypatch.setattr(UploadLease, "acquire", late)
    with pytest.raises(DatasetExists, match="already holds a dataset"):
        place.convert()
    assert place.objects() == ["dataset.json"]


def test_a_finished_conversion_is_not_published_for_modified_inputs(place: Place) -> None:
    place.store.fail("denied", "generations", times=99, method="PUT")
    with pytest.raises(StoreAccessDenied):
        place.convert()
    place.store.proxy.forget()
    with pytest.raises(InvalidArgument, match="repeat was 1, is 2; .* to start again"):
        place.convert(resume=True, repeat=2)
    write(place.lines, {"c/3.txt": "five"})
    with pytest.raises(DatasetExists, match="its inputs have changed since; to start again"):
        place.convert(resume=True)
    (place.lines / "c/3.txt").unlink()
    (place.lines / "c").rmdir()
    assert place.convert(resume=True).n_samples == 4


def test_a_conversion_of_nothing_leaves_nothing_in_the_store(place: Place) -> None:
    with Upload(place.url, place.store.options, resume=False) as upload:
        Path(upload.folder).mkdir()
    Path(upload.folder).rmdir()  # as if it were killed with the lease alone
    assert place.objects() == ["conversion.json"]
    with pytest.raises(InvalidArgument, match="on_error is 'never'"):
        place.convert(on_error="never")
    assert place.objects() == []
    with pytest.raises(InvalidArgument, match="no file of the kind 'videos'"):
        place.convert(kind="videos", workers=0)
    assert place.objects() == []
    with pytest.raises(InvalidArgument, match="on_error is 'never'"):
        place.convert(on_error="never")
    assert place.objects() == []


@pytest.mark.parametrize("n_workers", [0, 1])
def test_no_samples_leave_nothing_in_store(place: Place, tmp_path: Path, n_workers: int) -> None:
    options = {**OPTIONS, "workers": n_workers}
    write(tmp_path / "none", {"1.txt": "!", "2.txt": ""})
    for resume in (False, True, False):
        report = place.convert(tmp_path / "none", resume=resume, **options)
        assert (report.dataset, report.n_samples, report.generation) == (place.url, 0, 0)
        assert [one.outcome for one in report.inputs] == ["broken", "empty"]
        assert place.objects() == []
        assert place.left_here() == []
    schema = shardio.Schema({"text": shardio.Text()})
    report = place.convert([], schema=schema)
    assert (report.dataset, report.generation) == (place.url, 0)
    assert place.objects() == []
    assert place.convert(**options).n_samples == 4
    assert place.texts() == WORDS


def test_empty_resumed_conversion_removes_uploads(place: Place) -> None:
    with pytest.raises(KeyboardInterrupt):
        place.convert(progress=interrupt_after(2))
    write(place.lines, {"a/1.txt": "!", "b/2.txt": "!"})
    report = place.convert(resume=True)
    assert (report.n_samples, report.generation) == (0, 0)
    assert place.objects() == []
    write(place.lines, {"a/1.txt": "one"})
    assert place.convert().n_samples == 1


def test_small_shards_merged(place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(execution, "MIN_SHARD_BYTES", 200_000)

    def make(n: int) -> dict[str, Any]:
        return {"n": n, "x": bytes([n]) * (250_000 if n in (50, 51) else 10_000)}

    given: Any = {"samples": make, "workers": 0}
    shardio.convert(range(100), tmp_path / "out", **given)
    with pytest.raises(KeyboardInterrupt):
        place.convert(range(100), progress=interrupt_after(60), **given)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(ShardUploader, "finish", killed)
        place.convert(range(100), resume=True, **given)
    place.convert(range(100), resume=True, **given)
    here = [p for p in sorted((tmp_path / "out").rglob("*")) if p.is_file()]
    assert place.objects() == [str(p.relative_to(tmp_path / "out")) for p in here]
    assert 3 < sum(p.suffix == ".shard" for p in here) < 15
    for path in here:
        name = str(path.relative_to(tmp_path / "out"))
        assert bytes(place.in_store.read(name)) == path.read_bytes(), name
    assert place.left_here() == []


def test_killed_in_clean_up_has_published(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: Any = iter([lambda *_: None, killed])
    with monkeypatch.context() as during, pytest.raises(KeyboardInterrupt):
        during.setattr(Upload, "_clean_up", lambda self: next(calls)(self))
        place.convert()
    assert place.texts() == WORDS
    with pytest.raises(DatasetExists, match="already holds a dataset"):
        place.convert(resume=True)
    assert "conversion.json" not in place.objects()
    assert place.left_here() == []


def test_a_published_dataset_is_no_failure_if_its_remains_cannot_be_removed(place: Place) -> None:
    place.store.fail("denied", r"/bucket/?$", times=99, method="POST")  # removes objects
    with pytest.warns(
        UserWarning, match=r"the dataset is published, but temporary files .*conversion\.json: acc"
    ):
        assert place.convert().n_samples == len(WORDS)
    assert place.texts() == WORDS
    with pytest.raises(DatasetExists, match="already holds a dataset"):
        place.convert(resume=True)
    place.store.proxy.forget()
    with pytest.raises(DatasetExists, match="already holds a dataset"):
        place.convert()
    assert "conversion.json" not in place.objects()
    assert place.left_here() == []


def test_leftovers_of_a_killed_process_are_no_obstacle(place: Place) -> None:
    with Upload(place.url, place.store.options, resume=False) as upload:
        Path(upload.folder).mkdir()
        Path(upload.folder, "000000-000.shard").write_bytes(b"half")
    assert place.objects() == ["conversion.json"]
    assert place.convert({"number": n} for n in range(5)).n_samples == 5
    assert "conversion.json" not in place.objects()
    with place.open() as dataset:
        assert [sample["number"] for sample in dataset] == list(range(5))


def test_the_second_to_publish_is_refused(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    publish = Upload.publish

    def late(self: Upload, *given: Any) -> Any:
        place.put("generations/000001.json", b"another's")
        place.put("000777-000.shard", b"another's")
        return publish(self, *given)

    monkeypatch.setattr(Upload, "publish", late)
    with pytest.raises(DatasetConflict, match="another writer published first"):
        place.convert()
    assert "000777-000.shard" in place.objects()


def test_a_url_that_holds_data_is_refused(place: Place) -> None:
    place.put("notes.txt", b"mine")
    with pytest.raises(DatasetExists, match=r"already holds data \(notes\.txt\)"):
        place.convert()
    place.put("dataset.json", b"{}")
    with pytest.raises(DatasetExists, match="already holds a dataset"):
        place.convert()
    with pytest.raises(InvalidArgument, match="append: only for datasets in a folder"):
        place.convert(append=True)


def test_a_web_server_is_refused_before_anything_is_converted(place: Place) -> None:
    with pytest.raises(InvalidArgument, match="cannot write to a web server"):
        shardio.convert(place.lines, "HTTP://host/set", **OPTIONS)
    assert not place.cache.exists()


@pytest.mark.usefixtures("told")
def test_command_converts_into_a_store(place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["convert", str(place.lines), place.url, "--kind", "lines", "--workers", "0"]
    assert cli.main(command) == 0
    assert "4 samples" in capsys.readouterr().out
    assert place.texts() == WORDS


def test_interrupted_upload_of_samples_is_converted_again_after_any_failure(place: Place) -> None:
    def samples(n_good: int) -> Iterator[dict[str, int]]:
        yield from ({"number": n} for n in range(n_good))
        if n_good < 5:
            raise ValueError("a mistake")

    place.store.fail("denied", "generations", times=99, method="PUT")
    with pytest.raises(StoreAccessDenied):
        place.convert(samples(5))
    place.store.proxy.forget()
    with pytest.raises(ValueError, match="a mistake"):
        place.convert(samples(2))
    with pytest.raises(InvalidArgument, match="resume: not for samples"):
        place.convert(samples(5), resume=True)
    place.store.fail("denied", r"\.shard", times=99, method="PUT")
    assert place.convert(samples(5)).n_samples == 5  # without a shard that is there
    assert "conversion.json" not in place.objects()
    assert place.left_here() == []


def test_few_uploads_at_once(store: Scene, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, submitted, may_end = list[str](), list[str](), threading.Event()

    def slow(_: object, path: str, *__: object) -> None:
        begun.append(path)
        assert may_end.wait(60)

    monkeypatch.setattr("shardio.conversion.upload.upload_shard", slow)
    uploader = ShardUploader(ObjectStore(store.url("busy"), store.options), "")

    def submit() -> None:
        for n in range(13):
            path = tmp_path / str(n)
            path.touch()
            uploader.submit(str(path), ShardSummary("000000-000.shard", 1, 1, "0"))
            submitted.append(str(path))

    with ThreadPoolExecutor(1) as pool:
        submission = pool.submit(submit)
        with pytest.raises(TimeoutError):
            submission.result(0.5)
        assert (len(begun), len(submitted)) == (4, 12)
        may_end.set()
        submission.result(60)
    uploader.finish()
    assert len(begun) == 13 and not any(path.suffix != ".sent" for path in tmp_path.iterdir())
