"""The static site of some samples works from a server of files."""

from __future__ import annotations

import contextlib
import functools
import http.server
import json
import re
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shardio
from shardio import Array, InvalidArgument, Json, Text
from shardio.maintenance import split
from shardio.media import demux
from shardio_tools import cli
from shardio_tools.view.exporting import export_site
from tests.media.images_made import saved
from tests.media_made import quadrants
from tests.shards import EVERY_FIELD, every_field_sample, flip
from tests.tools.view import made_sets
from tests.tools.view.browsing import Visits, visiting
from tests.tools.view.served import FIELDS, rows_of, sample, viewing

LINKS = ("src", "image", "series", "waveform", "heatmap", "original", "frames", "thumb")


def _read(path: Path) -> Any:
    return json.loads(path.read_text())


def _fields(site: Path, row: int) -> dict[str, dict[str, Any]]:
    return {each["name"]: each for each in _read(site / f"api/sample/{row}.json")["fields"]}


def _linked(value: Any) -> Iterator[str]:
    """Yield the addresses in a JSON value; a template stands for its first frame."""
    if isinstance(value, list):
        for each in value:
            yield from _linked(each)
    elif isinstance(value, dict):
        links = ("thumb",) if "position" in value else LINKS  # the `image` of a row is a field
        for key, each in value.items():
            if key in links and isinstance(each, str):
                yield each.replace("{n}", "0")
            else:
                yield from _linked(each)


def _check_links(site: Path) -> None:
    files = {str(path.relative_to(site)) for path in site.rglob("*") if path.is_file()}
    linked = set()
    for path in site.glob("api/**/*.json"):
        linked |= set(_linked(_read(path)))
    assert linked and linked <= files
    assert all(re.fullmatch(r"[a-z]+(/[\w-]+)*(/[\w-]+\.\w+)?|index\.html", each) for each in files)
    frames = {each for each in files if re.search(r"/\d+-\d+\.jpg$", each)}
    assert {each for each in files if each.startswith("data/")} - frames <= linked


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("exporting")
    hevc = made_sets.write_hevc(folder / "hevc.mp4", n_frames=12)
    tone = made_sets.write_tone(folder / "tone.mp4")
    return made_sets.make_mixture(folder / "set", hevc, tone)


def test_a_site_has_a_file_for_each_of_its_links(mixture: Path, tmp_path: Path) -> None:
    assert export_site(str(mixture), tmp_path / "site") == 3
    _check_links(tmp_path / "site")
    fields = _fields(tmp_path / "site", 1)
    assert fields["video"]["src"].endswith(".mp4") and fields["video"]["frames"] is not None
    with shardio.open(mixture) as dataset:
        stored = dataset[1]["video"]
        again = demux(str(tmp_path / "site" / fields["video"]["src"]))
        assert bytes(again.data[:]) == bytes(stored.data[:])
    assert fields["frames"]["src"] is None
    assert len(list((tmp_path / "site/data/1").glob("2-*.jpg"))) >= fields["frames"]["n_frames"]
    assert fields["sound"]["waveform"].endswith("-series.json")


def test_every_kind_of_value_is_exported(tmp_path: Path) -> None:
    with shardio.DatasetWriter(tmp_path / "set", EVERY_FIELD) as writer:
        for i in range(9):
            writer.append(every_field_sample(i))
    assert export_site(str(tmp_path / "set"), tmp_path / "site", n_samples=4) == 4
    site = tmp_path / "site"
    _check_links(site)
    rows = _read(site / "api/rows.json")["rows"]
    assert [(each["position"], each["row"]) for each in rows] == [(0, 0), (1, 3), (2, 5), (3, 8)]
    assert rows[1]["values"]["label"] == 3 and rows[1]["values"]["camera.lens.focus"] == 3 / 8
    assert "größer" in rows[3]["values"]["note"]
    sample = _read(site / "api/sample/5.json")
    assert (sample["row"], sample["n"]) == (5, 4)
    points = _fields(site, 3)["points"]
    assert _read(site / points["series"])["n"] == 3
    assert np.array_equal(np.load(site / points["original"]), every_field_sample(3)["points"])
    dataset = _read(site / "api/dataset.json")
    assert dataset["n_samples"] == 9 and not dataset["writable"]
    assert str(tmp_path) not in (site / "api/dataset.json").read_text()
    assert _read(site / "api/statistics.json")["state"] == "done"


def test_the_page_says_that_it_has_no_server(mixture: Path, tmp_path: Path) -> None:
    export_site(str(mixture), tmp_path / "site", n_samples=1)
    page = (tmp_path / "site/index.html").read_text()
    assert 'name="shardio-mode" content="static"' in page and "default-src 'none'" in page
    names = re.findall(r'(?:src|href)="(static/[^"]+)"', page)
    assert len(names) >= 3 and all((tmp_path / "site" / name).is_file() for name in names)


def test_text_of_the_dataset_is_in_no_name_of_a_file(tmp_path: Path) -> None:
    name = "/evil<script>"
    schema = shardio.Schema({name: Array("float32", (9,)), "title": Text(), "meta": Json()})
    with shardio.DatasetWriter(tmp_path / "set", schema) as writer:
        writer.append(
            {name: np.zeros(9, np.float32), "title": "../x", "meta": {"../y": "</script>"}}
        )
    export_site(str(tmp_path / "set"), tmp_path / "a/b/site")
    _check_links(tmp_path / "a/b/site")
    assert [path.name for path in (tmp_path / "a").rglob("*evil*")] == []


def test_the_original_of_a_converted_image_is_the_stored_file(tmp_path: Path) -> None:
    stored = {form: saved(quadrants(40, 30), form) for form in ("TIFF", "PNG")}
    schema = shardio.Schema(dict.fromkeys(stored, shardio.Image()))
    with shardio.DatasetWriter(tmp_path / "set", schema) as writer:
        writer.append(stored)
    export_site(str(tmp_path / "set"), tmp_path / "site")
    fields = _fields(tmp_path / "site", 0)
    assert fields["TIFF"]["src"].endswith(".jpg") and fields["PNG"]["src"].endswith(".png")
    for form, data in stored.items():
        assert (tmp_path / "site" / fields[form]["original"]).read_bytes() == data
    assert fields["PNG"]["original"] == fields["PNG"]["src"]


def test_a_site_names_no_path_of_the_machine(dataset: Path, tmp_path: Path) -> None:
    folder = tmp_path / "set"
    shutil.copytree(dataset, folder)
    split(folder, {"train": 0.5, "val": 0.5}, seed=3)
    next(folder.glob("*.shard")).unlink()
    assert export_site(str(folder), tmp_path / "site") == 5
    facts = _read(tmp_path / "site/api/dataset.json")
    assert facts["conversion"]["failed"] == [] and facts["conversion"]["n_failed"] == 3
    assert [each["what"] for each in facts["generations"]][0] == "split"
    texts = [path.read_text() for path in (tmp_path / "site/api").rglob("*.json")]
    assert any("there is no such" in each for each in texts)
    for text in texts:
        assert str(tmp_path) not in text and "notes.txt" not in text


def test_a_damaged_value_is_left_out_and_said(tmp_path: Path) -> None:
    schema = shardio.Schema({name: EVERY_FIELD[name] for name in ("note", "points", "label")})
    samples = [{name: every_field_sample(i)[name] for name in schema} for i in (4, 7)]
    with shardio.DatasetWriter(tmp_path / "set", schema) as writer:
        for sample in samples:
            writer.append(sample)
    (shard,) = (tmp_path / "set").rglob("*.shard")
    flip(shard, shard.read_bytes().index(samples[0]["note"].encode()))
    assert export_site(str(tmp_path / "set"), tmp_path / "site") == 2
    _check_links(tmp_path / "site")
    damaged = _fields(tmp_path / "site", 0)["note"]
    assert "field 'note', sample 0" in damaged["damaged"] and damaged["original"] is None


def test_the_frames_of_a_long_video_that_browsers_do_not_play_are_its_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shardio_tools.view.exporting._MAX_FRAMES", 5)
    schema = shardio.Schema({"frames": Array("uint8", (8, 16, 16, 3))})
    with shardio.DatasetWriter(tmp_path / "set", schema) as writer:
        writer.append({"frames": np.zeros((8, 16, 16, 3), np.uint8)})
    export_site(str(tmp_path / "set"), tmp_path / "site")
    found = _fields(tmp_path / "site", 0)["frames"]
    assert (found["n_frames"], found["seconds"], found["frames"]) == (5, 0.2, "data/0/0-{n}.jpg")
    assert len(list((tmp_path / "site/data/0").glob("0-[0-9].jpg"))) == 5


def test_a_folder_that_exists_is_not_touched(mixture: Path, tmp_path: Path) -> None:
    (tmp_path / "site").mkdir()
    with pytest.raises(InvalidArgument, match="site: already exists: choose another folder"):
        export_site(str(mixture), tmp_path / "site")
    assert list((tmp_path / "site").iterdir()) == []


def test_a_site_is_replaced_only_on_request(mixture: Path, tmp_path: Path) -> None:
    site = tmp_path / "site"
    export_site(str(mixture), site, n_samples=3)
    kept = (site / "index.html").stat().st_ino
    with pytest.raises(InvalidArgument, match=r"choose another folder, or replace it \(--overwr"):
        export_site(str(mixture), site)
    assert (site / "index.html").stat().st_ino == kept
    assert cli.main(["view", str(mixture), "--export", str(site), "--samples", "1"]) == 2
    options = ["--export", str(site), "--samples", "1", "--overwrite"]
    assert cli.main(["view", str(mixture), *options]) == 0
    assert len(json.loads((site / "api/rows.json").read_text())["rows"]) == 1
    assert [path.name for path in tmp_path.glob("*site*")] == ["site"]


def test_a_folder_that_is_no_site_is_never_replaced(mixture: Path, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/index.html").write_text("my own page")
    with pytest.raises(InvalidArgument, match="already exists: choose another folder, or remove"):
        export_site(str(mixture), tmp_path / "mine", overwrite=True)
    assert (tmp_path / "mine/index.html").read_text() == "my own page"


@pytest.mark.parametrize("place", ["notes.txt", ".git/config", "api/mine.json", "data/mine/0.jpg"])
def test_a_site_with_other_files_is_never_replaced(
    place: str, mixture: Path, tmp_path: Path
) -> None:
    site, (target, linked) = tmp_path / "site", (tmp_path / "out" / each for each in "ab")
    export_site(str(mixture), site, n_samples=1)
    (site / place).parent.mkdir(parents=True, exist_ok=True)
    (site / place).write_text("mine")
    with pytest.raises(InvalidArgument, match=f"move {re.escape(place)} out of it"):
        export_site(str(mixture), site, overwrite=True)
    assert (site / place).read_text() == "mine"
    (site / place).unlink()
    target.mkdir(parents=True)
    linked.symlink_to(target)
    linked.rename(site / place)
    with pytest.raises(InvalidArgument, match=f"move {re.escape(place)} out of it"):
        export_site(str(mixture), site, overwrite=True)
    assert (site / place).is_symlink() and target.is_dir()


def test_a_site_is_replaced_where_it_is(
    mixture: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site, link = tmp_path / "site", tmp_path / "link"
    export_site(str(mixture), site, n_samples=2)
    link.symlink_to(site)
    export_site(str(mixture), link, n_samples=1, overwrite=True)
    assert link.is_symlink() and len(_read(site / "api/rows.json")["rows"]) == 1
    monkeypatch.chdir(site)
    export_site(str(mixture), ".", n_samples=3, overwrite=True)
    assert len(_read(site / "api/rows.json")["rows"]) == 3
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "site"]


def test_a_site_stays_if_it_cannot_be_replaced(
    mixture: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site, rename = tmp_path / "site", Path.rename

    def fail(path: Path, target: Path) -> Path:
        if target == site and not (path / "api/sample/1.json").exists():
            raise OSError("no")
        return rename(path, target)

    export_site(str(mixture), site, n_samples=60)
    monkeypatch.setattr(Path, "rename", fail)
    with pytest.raises(OSError, match="no"):
        export_site(str(mixture), site, n_samples=1, overwrite=True)
    assert len(_read(site / "api/rows.json")["rows"]) > 1
    assert [path.name for path in tmp_path.iterdir()] == ["site"]


def test_an_export_that_fails_leaves_nothing(
    mixture: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("shardio_tools.view.exporting.describe_sample", fail)
    with pytest.raises(KeyboardInterrupt):
        export_site(str(mixture), tmp_path / "new/site")
    assert list((tmp_path / "new").iterdir()) == []


class _Handler(http.server.SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture(scope="module")
def visits() -> Iterator[Visits]:
    with visiting() as made:
        yield made


@pytest.mark.external
@pytest.mark.process
@pytest.mark.slow
def test_a_browser_shows_the_site_from_a_server_of_files(
    mixture: Path, tmp_path: Path, visits: Visits
) -> None:
    export_site(str(mixture), tmp_path / "site")
    with _file_server(tmp_path / "site") as link:
        with visits.page(link, "#/grid") as page:
            page.wait_for_function("document.querySelectorAll('main img').length >= 3")
        with visits.page(link, "#/sample/1") as page:
            page.wait_for_selector("canvas")
            page.wait_for_function("document.querySelector('main').innerText.includes('tokens')")
        visits.errors = [each for each in visits.errors if "favicon" not in each]
        visits.check()


FILTERS = (
    *({"sort": "score"}, {"sort": "score", "desc": "1"}, {"desc": "1"}, {"sort": "level"}),
    *({"sort": "level", "desc": "1"}, {"text": "caption:thing RED"}, {"text": "caption:red thing"}),
    *({"text": "caption:thing red blue"}, {"range": "score:1:4.5"}, {"range": "score::2"}),
    *({"range": "level:3:", "sort": "score", "desc": "1"}, {"class": "2"}, {"text": "a:b:z"}),
    *({"text": "a:b:"}, {"text": "note:NOTE 8"}),
)


@pytest.mark.external
@pytest.mark.process
@pytest.mark.slow
def test_a_site_filters_and_sorts_as_the_server_does(tmp_path: Path, visits: Visits) -> None:
    fields = {**FIELDS, "a": Text(), "a:b": Text()}
    with shardio.DatasetWriter(tmp_path / "set", shardio.Schema(fields)) as writer:
        for i in range(30):
            writer.append({**sample(i), "a": "b:z" if i % 3 else "", "a:b": "xyz"[i % 3]})
    assert export_site(str(tmp_path / "set"), tmp_path / "site") == 30
    with viewing(tmp_path / "set") as client:
        expected = [rows_of(client, **each) for each in FILTERS]
    with _file_server(tmp_path / "site") as link, visits.page(link) as page:
        for filters, rows in zip(FILTERS, expected, strict=True):
            program = """async (filters) => {
                const { api } = await import(new URL("static/api.js", location.href));
                return (await api.rows(0, 500, filters)).rows.map((each) => each.row);
            }"""
            assert page.evaluate(program, filters) == rows, filters


@contextlib.contextmanager
def _file_server(folder: Path) -> Iterator[str]:
    handler = functools.partial(_Handler, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/index.html"
        finally:
            server.shutdown()
            thread.join()
