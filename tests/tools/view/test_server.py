"""The viewer's server: what it says about datasets, also damaged ones, and what it changes."""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from starlette.testclient import TestClient

import shardio
import shardio.media
from shardio.dataset.manifest import load, publish_next
from shardio.errors import ClosedError, StoreAccessDenied, StoreUnavailable
from shardio.maintenance import add_subset, compact, compute_stats, split
from shardio_tools.view import app, overview
from shardio_tools.view.epochs import EpochBatches
from shardio_tools.view.marks import Marks
from shardio_tools.view.source import Source
from tests.loading import write_dataset
from tests.shards import flip
from tests.tools.view.served import (
    CLASSES,
    FIELDS,
    N_SHARDS,
    POST,
    SCRIPT,
    N,
    ask_raw,
    finished,
    listed,
    make_dataset,
    rows_of,
    sample,
    viewing,
)

Json = dict[str, Any]
NEW_GENERATION = "show the new generation, or start shardio view again"


def dataset_facts(client: TestClient) -> Json:
    """Return the facts about the dataset, with the history, which is read in the background."""
    while True:
        found: Json = client.get("/api/dataset").json()
        if not found["pending"]:
            return found


# --- the overview -----------------------------------------------------------------------------


def test_the_overview_has_the_facts_of_the_manifest(client: TestClient, folder: Path) -> None:
    found = dataset_facts(client)
    assert (found["path"], found["name"]) == (str(folder), "set")
    assert (found["version"], found["generation"]) == (shardio.__version__, 2)
    assert (found["n_samples"], found["n_shards"]) == (N, N_SHARDS)
    assert found["n_bytes"] == sum(path.stat().st_size for path in folder.glob("*.shard"))
    assert (found["writable"], found["remote"], found["problems"]) == (False, False, [])
    assert [each["name"] for each in found["classes"]] == [*CLASSES]
    assert found["class_field"] == "label" and found["view"]["kind"] == "rows"
    fields = {each["name"]: each for each in found["fields"]}
    assert [*fields] == ["label", "score", "level", "caption", "note", "points", "frames"]
    assert [name for name in fields if fields[name]["sortable"]] == ["label", "score", "level"]
    assert [name for name in fields if fields[name]["searchable"]] == ["caption", "note"]
    assert [name for name in fields if fields[name]["optional"]] == ["score", "note"]
    assert (fields["points"]["dtype"], fields["points"]["shape"]) == ("int16", [None, 2])
    assert fields["frames"]["n_bytes"] == N * 4 * 16 * 16 * 3


def test_subsets_and_generations_are_listed_newest_first(tmp_path: Path) -> None:
    folder = make_dataset(tmp_path / "set")
    split(folder, {"train": 0.75, "val": 0.25}, seed=3)
    with viewing(folder) as client:
        found = dataset_facts(client)
    assert found["subsets"] == [{"name": "train", "n": 45}, {"name": "val", "n": 15}]
    assert [each["number"] for each in found["generations"]] == [3, 2, 1]
    assert found["generations"][0]["what"].startswith("split group=null parts={")
    assert found["generations"][2]["what"] == "written by a program"
    assert all(each["n_samples"] == N and each["when"] for each in found["generations"])


def test_the_conversion_is_told_with_inputs_that_failed_and_why(dataset: Path) -> None:
    with viewing(dataset) as client:
        found = dataset_facts(client)["conversion"]
    assert found["text"].startswith("6 inputs: 3 converted")
    failed = {each["input"]: each["reason"] for each in found["failed"]}
    assert found["n_failed"] == 3 and set(failed) == {
        *("cats/notes.txt", "fish/short.mp4", "fish/song.wav")
    }
    assert all(failed.values())


def test_the_history_is_read_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read, may_end = overview._read_history, threading.Event()
    n_read = 0

    def slow(*given: Any) -> Json:
        nonlocal n_read
        n_read += 1
        may_end.wait(60)
        return read(*given)

    monkeypatch.setattr(overview, "_WAIT_S", 0.01)
    monkeypatch.setattr(overview, "_read_history", slow)
    with viewing(folder) as client:
        assert client.get("/api/dataset").json()["pending"]
        may_end.set()
        for _ in range(3):
            assert [each["number"] for each in dataset_facts(client)["generations"]] == [2, 1]
    assert n_read == 1


def test_statistics_of_a_small_dataset_are_counted_in_the_background(client: TestClient) -> None:
    assert client.get("/api/statistics").json()["state"] in ("running", "done")
    found = finished(client, "/api/statistics")
    assert (found["state"], found["progress"], found["classes"]) == ("done", 1, [20, 20, 20])
    samples = [sample(i) for i in range(N)]
    scores = [float(s["score"]) for s in samples if s["score"] is not None]
    score = found["fields"]["score"]
    assert score["count"] == len(scores) and (score["min"], score["max"]) == (
        min(scores),
        max(scores),
    )
    assert score["mean"] == pytest.approx(np.mean(scores)) and score["std"] == pytest.approx(
        np.std(scores)
    )
    histogram = score["histogram"]
    expected, _ = np.histogram(scores, [*histogram["edges"][:-1], np.inf])
    assert histogram["counts"] == expected.tolist()
    assert found["fields"]["level"]["histogram"]["counts"] == [10] * 6
    points = found["fields"]["points"]["lengths"]
    assert (points["min"], points["max"], points["counts"]) == (0, 4, [12] * 5)
    notes = [s["note"] for s in samples if s["note"] is not None]
    assert found["fields"]["note"]["lengths"]["count"] == len(notes)
    assert found["fields"]["note"]["n_bytes"] == sum(map(len, notes))
    assert found["fields"]["label"]["histogram"] is None
    facts = dataset_facts(client)
    assert [each["count"] for each in facts["classes"]] == [20, 20, 20]
    assert {f["name"]: f["n_bytes"] for f in facts["fields"]}["note"] == sum(map(len, notes))


def test_kept_statistics_are_shown_without_reading_samples(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shardio_tools.view.overview._MAX_COUNTED", 0)
    folder = make_dataset(tmp_path / "set")
    with viewing(folder) as client:
        assert client.get("/api/statistics").json()["state"] == "none"
    compute_stats(folder)
    for path in folder.glob("*.shard"):
        path.unlink()
    with viewing(folder) as client:
        found = client.get("/api/statistics").json()
        assert (found["state"], found["classes"]) == ("kept", [20, 20, 20])
        assert found["fields"]["level"]["max"] == 5
        assert found["fields"]["level"]["histogram"] is None
        assert [each["count"] for each in dataset_facts(client)["classes"]] == [20, 20, 20]


def test_statistics_of_a_large_dataset_are_counted_when_asked_for(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shardio_tools.view.overview._MAX_COUNTED", N - 1)
    with viewing(folder) as client:
        assert client.get("/api/statistics").json()["state"] == "none"
        started = client.post("/api/statistics", headers=POST, json={})
        assert started.json()["state"] in ("running", "done")
        assert finished(client, "/api/statistics")["classes"] == [20, 20, 20]


def test_classes_of_a_subset_are_counted_in_the_background(tmp_path: Path) -> None:
    folder = make_dataset(tmp_path / "set")
    add_subset(folder, "few", [0, 3, 16, 17, 59])
    with viewing(folder) as client:
        found = finished(client, "/api/classes?subset=few")
        assert (found["state"], found["classes"]) == ("done", [2, 1, 2])
        answer = client.get("/api/classes?subset=other")
        assert answer.status_code == 400 and "other" in answer.json()["error"]
    sorted(folder.glob("*.shard"))[1].unlink()
    with viewing(folder) as client:  # rows 15 to 29 cannot be read
        assert finished(client, "/api/classes?subset=few")["classes"] == [2, 0, 1]


def test_kept_counts_of_a_subset_are_read_and_those_of_a_large_dataset_are_not_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shardio_tools.view.overview._MAX_COUNTED", N - 1)
    folder = make_dataset(tmp_path / "set")
    add_subset(folder, "few", [0, 3, 16])
    add_subset(folder, "more", [0, 3, 16])
    compute_stats(folder, subset="few")
    with viewing(folder) as client:
        found = client.get("/api/classes?subset=few").json()
        assert (found["state"], found["classes"]) == ("done", [2, 1, 0])
        found = client.get("/api/classes?subset=more").json()
        assert (found["state"], found["classes"]) == ("none", [])


# --- samples ----------------------------------------------------------------------------------


def test_a_sample_has_its_fields_and_its_place(client: TestClient) -> None:
    found = client.get("/api/sample/33").json()
    assert (found["row"], found["n"], found["title"], found["index"]) == (33, N, "33", 3)
    assert (found["damaged"], found["mark"], found["subset"]) == (None, None, None)
    values = {each["name"]: each for each in found["fields"]}
    assert values["caption"]["value"] == sample(33)["caption"]
    assert values["level"]["value"] == 3


def test_a_thumbnail_is_made_once_and_then_the_browser_keeps_it(client: TestClient) -> None:
    answer = client.get("/thumbnail/3/frames?size=64")
    assert answer.status_code == 200 and answer.headers["content-type"] == "image/jpeg"
    assert answer.content[:2] == b"\xff\xd8"
    known = {"If-None-Match": answer.headers["etag"]}
    assert client.get("/thumbnail/3/frames?size=64", headers=known).status_code == 304
    for size in ("63", "513", "x", "1e9"):
        assert client.get(f"/thumbnail/3/frames?size={size}").status_code == 400
    assert client.get("/thumbnail/3/caption").status_code == 400


def test_a_field_whose_name_has_a_slash_has_media_and_downloads(tmp_path: Path) -> None:
    from shardio import Array, Image, Schema
    from shardio.media import to_png

    fields = Schema({"a/b/image": Image(), "x/y": Array("int16", (4, 40))})
    picture, matrix = to_png(np.zeros((8, 8, 3), np.uint8)), np.zeros((4, 40), np.int16)
    with shardio.DatasetWriter(tmp_path / "set", fields) as writer:
        writer.append({"a/b/image": picture, "x/y": matrix})
    with viewing(tmp_path / "set") as client:
        image, array = client.get("/api/sample/0").json()["fields"]
        assert client.get(image["src"]).content == picture
        assert client.get(image["original"]).content == picture
        for path in (array["series"], array["heatmap"], array["original"]):
            assert client.get(path).status_code == 200, path
        assert client.get("/thumbnail/0/a%2Fb%2Fimage").status_code == 200
        assert client.get("/frame/0/a%2Fb%2Fimage/0").status_code == 200


@pytest.mark.parametrize("row", ["abc", "-1", "9" * 19, "1.0"])
def test_media_of_no_number_are_not_found(client: TestClient, row: str) -> None:
    answer = client.get(f"/media/{row}/frames")
    assert answer.status_code == 404 and "is not the number of a sample" in answer.json()["error"]


@pytest.mark.parametrize(
    ("error", "status", "said"),
    [
        (KeyError("x"), 500, "its terminal shows the error"),
        (IndexError("x"), 500, "its terminal shows the error"),
        (OSError(28, "No space left on device"), 500, "No space left on device"),
        (FileNotFoundError(2, "gone"), 404, "gone"),
        (StoreUnavailable("the store is down"), 503, "the store is down"),
        (StoreAccessDenied("no access"), 403, "no access"),
    ],
    ids=repr,
)
def test_errors_have_statuses_of_their_own_and_bugs_are_shown_on_the_terminal(
    folder: Path,
    error: Exception,
    status: int,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fail(*_: object) -> None:
        raise error

    with viewing(folder) as client:
        monkeypatch.setattr(Marks, "as_json", fail)
        answer = client.get("/api/marks")
    assert answer.status_code == status and said in answer.json()["error"]
    assert ("Traceback" in capsys.readouterr().err) is ("terminal" in said)


def test_a_curve_and_a_heat_map_are_bounded(client: TestClient) -> None:
    found = client.get("/series/4/points?points=2").json()
    assert found["n"] == 4 and len(found["columns"][0]["min"]) == 2
    assert client.get("/series/4/points?points=4001").status_code == 400
    answer = client.get("/heatmap/4/points")
    assert answer.headers["content-type"] == "image/png" and answer.headers["x-range"] == "4..4"


# --- batches ----------------------------------------------------------------------------------


def test_a_batch_of_an_epoch_is_that_of_a_loader(client: TestClient, folder: Path) -> None:
    found = client.get("/api/epoch?epoch=2&batch=3&batch_size=8&shuffle=full&seed=5").json()
    options: Json = {"shuffle": True, "seed": 5, "num_workers": 0, "output": "numpy"}
    with shardio.ShardLoader(folder, 8, fields=["level"], **options) as loader:
        assert [s["row"] for s in found["samples"]] == loader.indices_at(2, 3).tolist()
    assert (found["n_batches"], found["fixed"]) == (8, False)
    for query in ("batch=8", "batch_size=0", "epoch=-1", "shuffle=x", "seed=x", "weights=caption"):
        answer = client.get(f"/api/epoch?batch_size=8&{query}")
        assert answer.status_code == 400 and answer.json()["error"], query


def _broken(sample: Json) -> Json:
    raise ValueError("a transform of the user")


class SlowTransform:
    """A transform that waits for an event; `options` are those of a loader that uses it."""

    def __init__(self) -> None:
        self.started, self.may_end = threading.Event(), threading.Event()
        self.options: Json = {"batch_size": 4, "fields": ["frames"], "num_workers": 0}
        self.options["transform"] = self.transform

    def transform(self, sample: Json) -> Json:
        self.started.set()
        self.may_end.wait(60)
        return sample


def test_a_batch_that_is_loaded_slowly_blocks_nothing_else(folder: Path) -> None:
    slow = SlowTransform()
    with viewing(folder, loader=slow.options) as client:
        paths = [f"/epoch/0/0/{i % 4}/frames" for i in range(12)]
        with ThreadPoolExecutor(len(paths)) as pool:
            answers = [pool.submit(client.get, path) for path in paths]
            try:
                assert slow.started.wait(60)
                for path in ("/api/rows", "/api/sample/3", "/thumbnail/3/frames"):
                    assert client.get(path).status_code == 200
                assert client.get("/api/classes?subset=none").status_code == 400
            finally:
                slow.may_end.set()
        assert [each.result().status_code for each in answers] == [200] * len(paths)


def test_batches_close_though_one_is_being_loaded(folder: Path) -> None:
    slow = SlowTransform()
    epochs = EpochBatches(str(folder), slow.options)
    with ThreadPoolExecutor(1) as pool, shardio.open(folder) as dataset:
        found = pool.submit(epochs.describe, dataset, {})
        assert slow.started.wait(60)
        epochs.close()
        assert not found.done()
        slow.may_end.set()
        assert len(found.result()["samples"]) == 4
    epochs.close()


def test_pixels_of_a_batch_are_those_after_the_transforms_of_a_given_loader(folder: Path) -> None:
    def inverted(sample: Json) -> Json:
        sample["frames"] = 255 - sample["frames"]
        return sample

    options = {"batch_size": 4, "fields": ["frames"], "num_workers": 0, "transform": inverted}
    with viewing(folder, loader=options, loader_name="train.py:options") as client:
        assert dataset_facts(client)["loader"] == {"name": "train.py:options"}
        found = client.get("/api/epoch?batch=1").json()
        assert (found["fixed"], [s["row"] for s in found["samples"]]) == (True, [4, 5, 6, 7])
        picture = client.get("/epoch/0/1/2/frames")
        assert picture.headers["content-type"] == "image/jpeg"
        pixels = shardio.media.decode_image(picture.content)
        assert abs(int(pixels.mean()) - (255 - 6)) <= 2
        for path in ("/epoch/0/1/4/frames", "/epoch/0/1/0/label", "/epoch/0/99/0/frames"):
            assert client.get(path).status_code == 400
    with viewing(folder, loader={**options, "transform": _broken}) as client:
        found = client.get("/api/epoch").json()
        assert "ValueError: a transform of the user" in found["text"]
        assert [each["valid"] for each in found["samples"]] == [False] * 4


# --- ranges -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def media(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return a client of a dataset with a picture of known bytes."""
    from shardio import Image, Schema
    from shardio.media import to_png

    folder = tmp_path_factory.mktemp("media") / "set"
    pixels = np.random.default_rng(0).integers(0, 255, (40, 40, 3), np.uint8)
    with shardio.DatasetWriter(folder, Schema({"image": Image()})) as writer:
        writer.append({"image": to_png(pixels)})
    with viewing(folder) as client:
        yield client


@pytest.mark.parametrize(
    ("header", "part"),
    [
        ("bytes=0-9", (0, 10)),
        ("bytes=5-", (5, None)),
        ("bytes=-7", (-7, None)),
        ("bytes=10-999999999999999999", (10, None)),
        ("bytes=-999999999999999999", (0, None)),
        ("bytes = 0 - 0", (0, 1)),
    ],
)
def test_a_range_of_a_file_is_answered_with_this_part(
    media: TestClient, header: str, part: tuple[int, int | None]
) -> None:
    whole = media.get("/media/0/image")
    assert whole.status_code == 200 and whole.headers["accept-ranges"] == "bytes"
    assert whole.headers["content-length"] == str(len(whole.content))
    answer = media.get("/media/0/image", headers={"Range": header})
    expected = whole.content[slice(*part)]
    start = whole.content.index(expected)
    assert (answer.status_code, answer.content) == (206, expected)
    end, size = start + len(expected) - 1, len(whole.content)
    assert answer.headers["content-range"] == f"bytes {start}-{end}/{size}"
    head = media.head("/media/0/image", headers={"Range": header})
    assert (head.status_code, head.content) == (206, b"")
    assert head.headers["content-length"] == str(len(expected))


@pytest.mark.parametrize("header", ["bytes=999999-", "bytes=9-3", "bytes=-0"])
def test_a_range_outside_of_the_file_is_an_error(media: TestClient, header: str) -> None:
    answer = media.get("/media/0/image", headers={"Range": header})
    size = media.head("/media/0/image").headers["content-length"]
    assert (answer.status_code, answer.headers["content-range"]) == (416, f"bytes */{size}")


@pytest.mark.parametrize(
    "header", ["", "bytes=-", "bytes=a-b", "lines=0-1", "bytes=0-1,4-5", "bytes=0-" + "9" * 19]
)
def test_other_ranges_are_answered_with_the_whole_file(media: TestClient, header: str) -> None:
    assert media.get("/media/0/image", headers={"Range": header}).status_code == 200


def test_a_range_of_another_version_is_answered_with_the_whole_file(media: TestClient) -> None:
    etag = media.get("/media/0/image").headers["etag"]
    for known, status in ((etag, 206), ('"other"', 200)):
        headers = {"Range": "bytes=0-1", "If-Range": known}
        assert media.get("/media/0/image", headers=headers).status_code == status
    assert media.get("/media/0/image", headers={"If-None-Match": etag}).status_code == 304


# --- damage -----------------------------------------------------------------------------------


def test_verification_names_rows_that_are_then_crossed_out(tmp_path: Path) -> None:
    folder = make_dataset(tmp_path / "set")
    path = sorted(folder.glob("*.shard"))[1]
    text = sample(20)["caption"].encode()
    flip(path, path.read_bytes().index(text))
    with viewing(folder) as client:
        assert client.get("/api/verification").json()["state"] == "none"
        client.post("/api/verification", headers=POST, json={})
        found = finished(client, "/api/verification")
        assert (found["state"], found["n_checked"], found["n_findings"]) == ("done", N_SHARDS, 1)
        (finding,) = found["findings"]
        assert (finding["row"], finding["shard"], finding["field"]) == (20, path.name, "caption")
        (row,) = listed(client, start=20, count=1)["rows"]
        assert "does not match its hash" in row["damaged"]
        assert client.get("/api/sample/20").json()["damaged"]
        assert [r["row"] for r in listed(client)["rows"] if r["damaged"]] == [20]


def test_a_missing_shard_damages_its_rows_only(tmp_path: Path) -> None:
    folder = make_dataset(tmp_path / "set")
    path = sorted(folder.glob("*.shard"))[2]
    path.unlink()
    with viewing(folder) as client:
        rows = listed(client)["rows"]
        assert [row["row"] for row in rows if row["damaged"]] == [*range(30, 45)]
        assert path.name in rows[30]["damaged"]
        found = client.get("/api/sample/31")
        assert found.status_code == 200 and path.name in found.json()["damaged"]
        for route in ("/thumbnail/31/frames", "/original/31/caption", "/media/31/frames"):
            answer = client.get(route)
            assert answer.status_code == 404 and path.name in answer.json()["error"]
        text = finished(client, "/api/statistics")["text"]
        assert text.startswith("1 shard could not be counted in full: ") and path.name in text
        client.post("/api/verification", headers=POST, json={})
        assert finished(client, "/api/verification")["n_findings"] == 1
        assert listed(client, start=30, count=1)["rows"][0]["damaged"]


@pytest.mark.parametrize("name", ["dataset.json", "generations/000003.json"])
def test_behind_a_damaged_manifest_the_newest_generation_is_shown(
    tmp_path: Path, name: str
) -> None:
    folder = make_dataset(tmp_path / "set")
    add_subset(folder, "few", [1])
    flip(folder / name, 30)
    with viewing(folder) as client:
        found = dataset_facts(client)
        number = 3 if name == "dataset.json" else 2
        assert found["generation"] == number and found["n_samples"] == N
        assert name in found["problems"][0]
        assert found["problems"][1] == f"generation {number} is shown, the newest that can be read"
        assert len(listed(client)["rows"]) == N


def test_a_dataset_of_which_nothing_can_be_read_is_a_page_with_the_error(tmp_path: Path) -> None:
    folder = make_dataset(tmp_path / "set")
    for path in (folder / "generations").iterdir():
        path.write_bytes(b"{}")
    with viewing(folder) as client:
        found = dataset_facts(client)
        assert found["n_samples"] == 0 and "000002.json" in found["problems"][0]
        assert "shardio repair" in found["problems"][-1]
        for route in ("/api/rows", "/api/statistics", "/api/sample/0", "/thumbnail/0/frames"):
            answer = client.get(route)
            assert answer.status_code == 404 and "000002.json" in answer.json()["error"]
        client.post("/api/verification", headers=POST, json={})
        assert finished(client, "/api/verification")["n_findings"] > 0


# --- marks ------------------------------------------------------------------------------------


def test_marks_are_kept_with_notes_and_shown_with_their_rows(folder: Path) -> None:
    with viewing(folder) as client:

        def mark(**content: Any) -> Any:
            return client.post("/api/marks", headers=POST, json=content).json()

        assert mark(row=7, marked=True, note=SCRIPT) == {"n": 1}
        assert mark(row=3) == {"n": 2}
        assert client.get("/api/marks").json() == {
            "marks": [{"row": 3, "note": ""}, {"row": 7, "note": SCRIPT}],
            "n": 2,
        }
        assert client.get("/api/sample/7").json()["mark"] == {"note": SCRIPT}
        assert [row["row"] for row in listed(client)["rows"] if row["marked"]] == [3, 7]
        kind, half = (
            POST | {"Content-Type": "application/json"},
            rb'{"row": 3, "note": "half \ud83d"}',
        )
        assert client.post("/api/marks", headers=kind, content=half).json() == {"n": 2}
        assert client.get("/api/sample/3").json()["mark"] == {"note": "half ?"}
        assert mark(row=7, marked=False) == {"n": 1}
        assert client.get("/api/sample/7").json()["mark"] is None


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ({"row": N}, f"from 0 to {N - 1}"),
        ({"row": -1}, "row must be"),
        ({"row": True}, "row must be"),
        ({"row": "1"}, "row must be"),
        ({}, "row must be"),
        ({"row": 1, "marked": 1}, "marked must be"),
        ({"row": 1, "note": 3}, "note must be"),
        ({"row": 1, "note": "x" * 1001}, "at most 1000 characters"),
    ],
    ids=str,
)
def test_marks_that_cannot_be_are_refused(client: TestClient, content: Json, said: str) -> None:
    answer = client.post("/api/marks", headers=POST, json=content)
    assert answer.status_code == 400 and said in answer.json()["error"]


def test_notes_have_a_length_together_and_a_note_replaces_the_one_before(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shardio_tools.view.marks._MAX_NOTES", 10)
    with viewing(folder) as client:

        def mark(row: int, note: str) -> Any:
            return client.post("/api/marks", headers=POST, json={"row": row, "note": note})

        assert [mark(1, "x" * n).status_code for n in (8, 9, 10)] == [200] * 3
        answer = mark(2, "y")
        assert answer.status_code == 400
        assert answer.json()["error"] == (
            "all notes together have at most 10 characters: shorten or remove some"
        )
        assert mark(1, "").status_code == mark(2, "y").status_code == 200


def save(client: TestClient, **content: Any) -> Any:
    return client.post("/api/marks/save", headers=POST, json=content)


def test_a_viewer_writes_nothing_unless_it_may(folder: Path) -> None:
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    with viewing(folder) as client:
        client.post("/api/marks", headers=POST, json={"row": 1})
        answer = save(client, name="keep")
        assert answer.status_code == 403 and "--writable" in answer.json()["error"]
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before


def test_marks_become_a_named_subset_that_loaders_use(tmp_path: Path) -> None:
    folder = make_dataset(tmp_path / "set")
    with viewing(folder, is_writable=True) as client:
        assert dataset_facts(client)["writable"]
        assert save(client, name="keep").status_code == 400
        for row, note in ((41, ""), (2, SCRIPT), (17, "")):
            client.post("/api/marks", headers=POST, json={"row": row, "note": note})
        assert save(client, name="keep").json() == {"name": "keep", "n": 3, "generation": 3}
        found = dataset_facts(client)
        assert (found["generation"], found["subsets"]) == (3, [{"name": "keep", "n": 3}])
        assert f'notes={{"2": "{SCRIPT}"}}' in found["generations"][0]["what"]
        assert [row["row"] for row in listed(client, subset="keep")["rows"]] == [2, 17, 41]
        assert save(client, name="keep").status_code == 400
        client.post("/api/marks", headers=POST, json={"row": 2, "marked": False})
        assert save(client, name="keep", overwrite=True).json()["generation"] == 4
        assert [row["row"] for row in listed(client, subset="keep")["rows"]] == [17, 41]
        said = save(client, name="keep").json()["error"]
        assert said == "there is a subset 'keep': choose another name, or tick “replace”"
        said = save(client, name="keep", overwrite=1).json()["error"]
        assert said == "overwrite must be true or false; found 1"
        for name in ("", "a\n", "x" * 256, 3, None):
            assert save(client, name=name).status_code == 400
    with shardio.open(folder) as dataset:
        kept = dataset.subset("keep")
        with shardio.ShardLoader(
            kept, 2, num_workers=0, output="numpy", fields=["level"]
        ) as loader:
            assert [b["level"].tolist() for b in loader] == [[1, 4]]
        kept.close()


def test_requests_that_have_begun_may_ask_the_generation_before(tmp_path: Path) -> None:
    folder = make_dataset(tmp_path / "set")
    add_subset(folder, "few", [1])
    source = Source(str(folder))
    before = source.required()
    add_subset(folder, "more", [1, 2])
    source.reload()
    assert source.required().generation == before.generation + 1
    with before.subset("few") as few:
        assert [int(level) for level in few["level"]] == [sample(1)["level"]]
    assert source.subset_rows("more").rows(np.arange(2)).tolist() == [1, 2]
    source.close()
    assert before.is_closed
    with pytest.raises(ClosedError, match="the viewer is closed"), source.opened():
        pass


def test_marks_of_a_dataset_that_has_changed_are_not_saved(tmp_path: Path) -> None:
    folder = make_dataset(tmp_path / "set")
    with viewing(folder, is_writable=True) as client:
        client.post("/api/marks", headers=POST, json={"row": 1})
        publish_next(folder, load(folder), classes=[])
        answer = save(client, name="keep")
        assert answer.status_code == 409 and answer.json()["hint"] == NEW_GENERATION


def test_two_viewers_save_their_marks_one_after_the_other(tmp_path: Path) -> None:
    folder = make_dataset(tmp_path / "set")
    with viewing(folder, is_writable=True) as one, viewing(folder, is_writable=True) as two:
        for row, client in enumerate((one, two)):
            client.post("/api/marks", headers=POST, json={"row": row})
        assert save(one, name="first").json() == {"name": "first", "n": 1, "generation": 3}
        assert "there is a subset" in save(two, name="first").json()["error"]
        assert save(two, name="second").json() == {"name": "second", "n": 1, "generation": 4}
        assert rows_of(two, subset="first") == [0] and rows_of(two, subset="second") == [1]


# --- newer generations ------------------------------------------------------------------------


def newer(client: TestClient) -> Any:
    return client.get("/api/generation").json()["newer"]


def reload(client: TestClient) -> Json:
    found: Json = client.post("/api/reload", headers=POST, json={}).json()
    return found


def test_a_newer_generation_is_announced_and_shown_with_the_marks(tmp_path: Path) -> None:
    folder = tmp_path / "set"
    rows: list[Json] = [{"x": i} for i in range(6)]
    shardio.convert(rows, folder)
    with viewing(folder) as client:
        assert client.get("/api/generation").json() == {"shown": 1, "newer": None}
        client.post("/api/marks", headers=POST, json={"row": 5, "note": "good"})
        add_subset(folder, "few", [1])
        assert newer(client) == {"generation": 2, "rows": "same", "n_samples": 6}
        shardio.convert(rows[:2], folder, append=True)
        assert newer(client) == {"generation": 3, "rows": "appended", "n_samples": 8}
        assert dataset_facts(client)["n_samples"] == 6, "shown as soon as it is asked for"
        assert reload(client) == {"shown": 3, "newer": None}
        assert dataset_facts(client)["n_samples"] == len(listed(client)["rows"]) == 8
        compact(folder)
        assert newer(client) == {"generation": 4, "rows": "same", "n_samples": 8}
        assert reload(client)["shown"] == 4
        assert client.get("/api/marks").json()["marks"] == [{"row": 5, "note": "good"}]
        values = [client.get(f"/api/sample/{row}").json()["fields"][0]["value"] for row in range(8)]
        assert values == [0, 1, 2, 3, 4, 5, 0, 1]


def test_marks_are_removed_if_another_dataset_is_shown(tmp_path: Path) -> None:
    folder = make_dataset(tmp_path / "set")
    with viewing(folder) as client:
        client.post("/api/marks", headers=POST, json={"row": 1})
        shutil.rmtree(folder)
        assert newer(client) is None, "the requests of the page say what is wrong"
        make_dataset(folder, 8, 1)  # the generation has the same number
        assert newer(client) == {"generation": 2, "rows": "changed", "n_samples": 8}
        assert reload(client) == {"shown": 2, "newer": None}
        assert client.get("/api/marks").json()["n"] == 0
        assert len(listed(client)["rows"]) == 8


def test_a_generation_shown_meanwhile_is_not_announced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, compare = make_dataset(tmp_path / "set"), Source._read_newer

    def compare_late(source: Source, shown: Any) -> Any:
        found = compare(source, shown)
        if source.dataset is shown:
            source.reload()
        return found

    with contextlib.closing(Source(str(folder))) as source:
        add_subset(folder, "few", [1])
        monkeypatch.setattr(Source, "_read_newer", compare_late)
        assert source.newer() is source.newer() is None


def test_nothing_of_a_dataset_stays_if_another_has_the_same_generation(tmp_path: Path) -> None:
    def asked() -> list[Any]:
        counted = finished(client, "/api/statistics")
        picture = client.get("/thumbnail/0/frames", params={"size": 64})
        batch = client.get("/api/epoch", params={"batch_size": 4})
        assert picture.status_code == 200
        found = listed(client, sort="level")["rows"], listed(client, text="caption:blue")["rows"]
        return [counted, picture.content, batch.json(), dataset_facts(client)["classes"], *found]

    folder, other = make_dataset(tmp_path / "set"), tmp_path / "other"
    write_dataset(
        other, 8, 1, FIELDS, ({**sample(i), "frames": sample(9)["frames"]} for i in range(8))
    )
    publish_next(other, load(other), classes=("a", "b", "c"))
    with viewing(other) as client:
        expected = asked()
    with viewing(folder) as client:
        before = asked()
        shutil.rmtree(folder)
        other.rename(folder)
        assert reload(client) == {"shown": 2, "newer": None}
        after = asked()
    assert [one == two for one, two in zip(after, expected, strict=True)] == [True] * 6
    assert not any(one == two for one, two in zip(before, expected, strict=True))


def test_a_newer_generation_that_cannot_be_read_is_not_announced(tmp_path: Path) -> None:
    folder = make_dataset(tmp_path / "set")
    with viewing(folder) as client:
        add_subset(folder, "few", [1])
        flip(folder / "generations" / "000003.json", 30)
        assert client.get("/api/generation").json() == {"shown": 2, "newer": None}


def test_what_was_verified_is_forgotten_with_its_generation(tmp_path: Path) -> None:
    folder = make_dataset(tmp_path / "set")
    path = sorted(folder.glob("*.shard"))[1]
    flip(path, path.read_bytes().index(sample(20)["caption"].encode()))
    with viewing(folder) as client:
        client.post("/api/verification", headers=POST, json={})
        assert finished(client, "/api/verification")["n_findings"] == 1
        add_subset(folder, "few", [1])
        reload(client)
        found = client.get("/api/verification").json()
        assert (found["state"], found["n_findings"], found["findings"]) == ("none", 0, [])


def test_a_store_is_asked_for_a_newer_generation_once_a_minute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = SimpleNamespace(now=600.0)
    monkeypatch.setattr(
        "shardio_tools.view.source.time", SimpleNamespace(monotonic=lambda: clock.now)
    )
    folder = make_dataset(tmp_path / "set")
    source = Source(str(folder))
    source.is_remote = True
    assert source.newer() is None
    add_subset(folder, "few", [1])
    clock.now += 59
    assert source.newer() is None
    clock.now += 1
    for _ in range(2):
        assert source.newer() == {"generation": 3, "rows": "same", "n_samples": N}
    source.reload()
    assert source.newer() is None
    source.close()


# --- numbers, names ---------------------------------------------------------------------------


def test_numbers_that_json_lacks_and_names_that_are_not_utf8_do_no_harm(tmp_path: Path) -> None:
    from shardio import Array, Schema

    folder = tmp_path / "na\udcffme"
    with shardio.DatasetWriter(folder, Schema({"x": Array("float64")}), classes=["\u202e"]) as w:
        for value in (np.nan, np.inf, -np.inf, 1.5, 1e308, -1e308):
            w.append({"x": value})
    with viewing(folder) as client:
        found = finished(client, "/api/statistics")["fields"]["x"]
        assert (found["count"], found["not_finite"], found["max"]) == (3, 3, 1e308)
        assert sum(found["histogram"]["counts"]) == 3
        text = client.get("/api/dataset").text
        assert json.loads(text)["n_samples"] == 6 and "NaN" not in text
        assert [client.get(f"/api/sample/{i}").status_code for i in range(6)] == [200] * 6
        rows = [row["row"] for row in listed(client, sort="x")["rows"]]
        assert rows == [2, 5, 3, 4, 1, 0]


def test_a_dataset_that_is_removed_while_it_is_shown_is_an_error_and_no_crash(
    tmp_path: Path,
) -> None:
    folder = make_dataset(tmp_path / "set")
    with viewing(folder) as client:
        assert client.get("/api/dataset").status_code == 200
        shutil.rmtree(folder)
        assert client.get("/api/dataset").status_code == 200
        assert client.get("/api/rows").status_code == 404
        assert client.get("/api/sample/0").status_code == 404


def test_names_of_fields_may_be_anything_that_a_schema_allows(tmp_path: Path) -> None:
    names = ["a/b", "a%2Fb", "a?b#c", "0/1", "q\"'<b>", "{n}", "__proto__", "عربي 日本", "a:b"]
    frames = {"f/0": shardio.Array("uint8", (None, 8, 8, 3))}
    with shardio.DatasetWriter(
        tmp_path / "set", shardio.Schema({name: shardio.Text() for name in names} | frames)
    ) as writer:
        writer.append(
            {name: f"of {name}" for name in names} | {"f/0": np.zeros((2, 8, 8, 3), np.uint8)}
        )
    with viewing(tmp_path / "set") as client:
        fields = {each["name"]: each for each in client.get("/api/sample/0").json()["fields"]}
        for name in names:
            status, headers = ask_raw(client, fields[name]["original"])
            assert (status, headers["content-length"]) == (200, str(len(f"of {name}".encode())))
            found = client.get("/api/rows", params={"text": f"{name}:of"}).json()
            assert found["rows"] or not found["complete"]
        assert client.get(fields["f/0"]["frames"].replace("{n}", "1")).status_code == 200
        assert client.get("/thumbnail/0/f%2F0").status_code == 200


def test_another_dataset_at_the_path_is_not_mixed_with_the_one_that_is_shown(
    tmp_path: Path,
) -> None:
    folder = make_dataset(tmp_path / "set")
    with viewing(folder) as client:
        assert client.get("/api/dataset").json()["n_samples"] == 60
        shutil.rmtree(folder)
        make_dataset(folder, 8, 1)
        client.get("/api/statistics")
        answer = client.get("/api/sample/0")
        assert answer.status_code == 409 and "another dataset" in answer.json()["error"]
        assert answer.json()["hint"] == NEW_GENERATION


def test_few_downloads_are_in_memory_however_slowly_they_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(app, "_TURN_S", 0.05)
    schema = shardio.Schema({"blob": shardio.Bytes()})
    with shardio.DatasetWriter(tmp_path / "set", schema) as writer:
        writer.append({"blob": bytes(3 << 20)})
    statuses: list[int] = []
    sizes: list[int] = []

    async def download(viewer: Any, asgi: Any, reads: asyncio.Event) -> None:
        async def send(message: Any) -> None:
            if message["type"] == "http.response.start":
                statuses.append(message["status"])
            else:
                sizes.append(len(message.get("body", b"")))
                await reads.wait()

        async def receive() -> Any:
            await asyncio.Event().wait()

        scope = {"type": "http", "method": "GET", "path": "/original/0/blob", "headers": []}
        await asgi(scope | {"query_string": b""}, receive, send)

    async def run() -> None:
        reads, at_once = asyncio.Event(), asyncio.Event()
        at_once.set()
        with app.ViewerState(str(tmp_path / "set")) as viewer:
            asgi = app.make_app(viewer)
            slow = [asyncio.create_task(download(viewer, asgi, reads)) for _ in range(4)]
            while len(sizes) < 4:
                await asyncio.sleep(0.01)
            await download(viewer, asgi, at_once)
            assert statuses == [200] * 4 + [503] and sizes[:4] == [1 << 20] * 4
            reads.set()
            await asyncio.gather(*slow)
            await download(viewer, asgi, at_once)
            assert statuses[5:] == [200]
            assert sum(sizes) >= 5 * (3 << 20)

    asyncio.run(run())


def test_a_download_that_fails_leaves_room_for_others(client: TestClient) -> None:
    for _ in range(10):
        assert client.get("/original/999/label").status_code == 404
    assert client.get("/original/1/label").content == b"1\n"
