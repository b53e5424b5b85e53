"""HTML that notebooks show of public objects: bounded, escaped, and self-contained.

`SHARDIO_WRITE_SNAPSHOTS=1 pytest tests/test_notebooks.py` writes the snapshots anew. Look at them
in a browser then, in a light and in a dark theme.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shardio
from shardio import (
    Array,
    ConversionReport,
    DatasetWriter,
    Image,
    List,
    Schema,
    ShardLoader,
    Text,
    Video,
    maintenance,
)
from shardio._base.html import MAX_BYTES, format_number, table
from shardio._base.progress import format_size
from shardio._base.statistics import DatasetStats, LoaderStats, LoadingStats
from shardio.conversion import InputReport
from shardio.conversion.converter import OutcomeKind
from shardio.map_view import MapView
from shardio.media import demux, encode_jpeg
from shardio.multi import MultiLoader
from shardio.samples import preview
from shardio.samples.view import RowView
from tests.media.images_made import smooth
from tests.media_made import scene, write_video
from tests.shards import flip

pytestmark = pytest.mark.usefixtures("quick_disk")

SNAPSHOTS = Path(__file__).parent / "snapshots"
TAGS = set("div span b code small table tr th td img".split())
HOSTILE = "<script>alert('x')</script>\"&\u202e"


class Checker(HTMLParser):
    """A parser that collects the text of a fragment, and fails unless it is balanced and safe."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.text: list[str] = []
        self.n_pictures = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        assert tag in TAGS and given.keys() <= {"style", "src", "alt", "colspan"}
        assert "url(" not in (given.get("style") or "")
        if tag == "img":
            assert (given["src"] or "").startswith("data:image/jpeg;base64,/9j/")
            self.n_pictures += 1
        else:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def shown(value: Any) -> Checker:
    """Check the fragment of an object; return its text, and how many pictures it has."""
    found = value._repr_html_()
    assert len(found.encode()) <= MAX_BYTES
    checker = Checker()
    checker.feed(found)
    checker.close()
    assert checker.open == [] and found.startswith("<div") and found.endswith("</div>")
    return checker


def text_of(value: Any) -> str:
    return " ".join(shown(value).text)


SMALL = Schema(
    {
        "pixels": Array("uint8", (12, 16, 3)),
        "label": Array("int64"),
        "caption": Text(optional=True),
        "boxes": List(Array("float32", (None, 4))),
        "pose.angle": Array("float64"),
    }
)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Iterator[shardio.ShardDataset]:
    folder = tmp_path_factory.mktemp("small") / "set"
    with DatasetWriter(folder, SMALL, classes=["cat", "dog"]) as writer:
        for i in range(8):
            boxes = [np.ones((i, 4), np.float32)] * (i % 3)
            caption = f"number {i}" if i % 4 else None
            values = {"label": i % 2, "caption": caption, "boxes": boxes, "pose.angle": i / 4}
            writer.append({"pixels": smooth() + np.uint8(i), **values})
    maintenance.compute_stats(folder)
    maintenance.split(folder, {"train": 0.75, "val": 0.25})
    with shardio.open(folder) as dataset:
        yield dataset


FINDING = maintenance.Finding("000000-000.shard", "hash", "wrong hash", field="label", sample=3)
REPORT = ConversionReport(
    "set",
    "video",
    6,
    12_345_678,
    1.5,
    (
        InputReport("a.mp4", "converted", "", 6, 999),
        InputReport("b.mp4", "broken", "no packets", 0, 9),
    ),
    classes=("cat", "dog"),
    subsets={"train": 4, "val": 2},
)
LOADING = LoadingStats(2.5, 1.0, 0.1, 3.0, 0.2, 1.5, 0.5, 4.0, 10, 320, 1 << 20)


class Shown:
    """A fragment that was made while its object was open."""

    def __init__(self, fragment: str) -> None:
        self._repr_html_ = lambda: fragment


def of_loader(dataset: shardio.ShardDataset, take: Callable[[ShardLoader], Any]) -> Any:
    with ShardLoader(dataset, 4, output="numpy", num_workers=0, fields=list(SMALL)) as loader:
        return take(loader)


OBJECTS: dict[str, Callable[[shardio.ShardDataset], Any]] = {
    "dataset": lambda dataset: dataset,
    "subset": lambda dataset: dataset.subset("val"),
    "schema": lambda dataset: dataset.schema,
    "view": RowView,
    "loader": lambda dataset: of_loader(dataset, lambda loader: Shown(loader._repr_html_())),
    "batch": lambda dataset: of_loader(dataset, lambda loader: next(iter(loader))),
    "loader-stats": lambda dataset: LoaderStats(3, 2, LOADING, LOADING + LOADING),
    "statistics": lambda dataset: maintenance.compute_stats(dataset.path),
    "dataset-stats": lambda dataset: DatasetStats(
        {**dataset.stats, "subsets": {"val": maintenance.compute_stats(dataset.path).stats}}
    ),
    "conversion": lambda dataset: REPORT,
    "verification": lambda dataset: maintenance.VerificationReport(
        "set", 1, "id", 2, 100, 12_345, (FINDING,), ("notes.txt",)
    ),
    "diff": lambda dataset: maintenance.DiffReport(
        "set",
        "other",
        *(8, 8, ["pose.angle"], ["pose.roll"], ["label"]),
        n_changed=20_000,
        changed=[(3, ("label",)), (5, ("caption", "label"))],
    ),
    "map-view": lambda dataset: MapView(dataset, fields=list(SMALL), transform=dict),
    "multi-loader": lambda dataset: MultiLoader([1, 2], 1, on_error="skip", max_skips=9),
    "repair": lambda dataset: maintenance.RepairReport(
        "set",
        Path("new"),
        7,
        (
            maintenance.ShardRepair("000000-000.shard", 4),
            maintenance.ShardRepair("000001-000.shard", 3, losses=[maintenance.Loss(3, 4, "hash")]),
        ),
    ),
}


@pytest.mark.parametrize("name", OBJECTS)
def test_a_fragment_is_as_in_its_snapshot(small: shardio.ShardDataset, name: str) -> None:
    value = OBJECTS[name](small)
    shown(value)
    found = re.sub('base64,[^"]*', "base64,PICTURE", value._repr_html_())
    found = found.replace(small.path, "set").replace("><", ">\n<") + "\n"
    path = SNAPSHOTS / f"{name}.html"
    if os.environ.get("SHARDIO_WRITE_SNAPSHOTS"):
        path.write_text(found)
    assert found == path.read_text()


def test_a_dataset_shows_fields_counts_classes_and_thumbnails(small: shardio.ShardDataset) -> None:
    found = shown(small)
    text = " ".join(found.text)
    for part in ("8 samples", "cat 4 · dog 4", "train 6 · val 2", "12 × 16 × 3", "float32"):
        assert part in text
    assert found.n_pictures == 5 and "7 dog" in text


def test_pictures_clips_and_videos_have_thumbnails(tmp_path: Path) -> None:
    stream = demux(str(write_video(tmp_path / "a.mp4", scene(20))))
    schema = Schema({"video": Video(), "image": Image(optional=True)})
    with DatasetWriter(tmp_path / "set", schema) as writer:
        writer.append({"video": stream, "image": None})
        writer.append({"video": stream, "image": encode_jpeg(smooth(40, 60))})
    with shardio.open(tmp_path / "set") as dataset:
        found = shown(dataset)
        assert found.n_pictures == 2 and "h264, 64 high × 96 wide, 20 frames, 0.80 s" in " ".join(
            found.text
        )
        clips = dataset.clips(4)
        assert shown(clips).n_pictures == 5 and "4 × 64 × 96 × 3" in text_of(clips)
        with ShardLoader(clips, 3, output="numpy", num_workers=0) as loader:
            assert shown(next(iter(loader))).n_pictures == 3
        sample = dataset[1]
        assert shown(sample["video"]).n_pictures == shown(sample["image"]).n_pictures == 1
        assert "40 high × 60 wide, 3 channels" in text_of(sample["image"])
    assert shown(dataset).n_pictures == 0  # it is closed


@pytest.mark.parametrize("layout", ["HWC", "CHW"])
def test_a_batch_of_pictures_of_floats_has_thumbnails(tmp_path: Path, layout: Any) -> None:
    pixels = np.arange(32 * 40 * 3, dtype=np.uint8).reshape(32, 40, 3)
    shardio.convert([{"points": np.zeros((30, 17, 3)), "x": pixels}] * 4, tmp_path / "set")

    def scaled(sample: dict[str, Any]) -> dict[str, Any]:
        made = ((sample["x"] / 255 - 0.5) / 0.2).astype(np.float32)
        return {**sample, "x": made.transpose(2, 0, 1) if layout == "CHW" else made}

    options: dict[str, Any] = {"output": "numpy", "num_workers": 0, "transform": scaled}
    with ShardLoader(tmp_path / "set", 3, **options) as loader:
        batch = next(iter(loader))
    assert shown(batch).n_pictures == 3


def test_pictures_of_a_batch_have_the_names_of_their_classes(tmp_path: Path) -> None:
    schema = Schema({"x": Array("uint8", (8, 8, 3)), "label": Array("int64", optional=True)})
    with DatasetWriter(tmp_path / "set", schema, classes=["cat", "dog"]) as writer:
        for label in (0, 1, -1, 2, None):
            writer.append({"x": np.zeros((8, 8, 3), np.uint8), "label": label})
    options: dict[str, Any] = {"output": "numpy", "num_workers": 0}

    def captions(**more: Any) -> list[str]:
        with ShardLoader(tmp_path / "set", 5, **options, **more) as loader:
            return re.findall(r"<small[^>]*>([^<]*)<", next(iter(loader))._repr_html_())

    numbers = ["0", "1", "2", "3", "4"]
    assert captions() == ["0 cat", "1 dog", *numbers[2:]]
    assert captions(fields=["x"]) == numbers

    def to_shares(sample: dict[str, Any]) -> dict[str, Any]:
        return {"x": sample["x"], "label": np.ones(2, np.float32)}

    assert captions(transform=to_shares) == numbers


def test_hostile_names_and_texts_are_escaped(tmp_path: Path) -> None:
    name = HOSTILE[:-1]  # names of fields are printable
    schema = Schema({name: Text(), "pixels": Array("uint8", (8, 8, 3)), "label": Array("int8")})
    with DatasetWriter(tmp_path / "<b>", schema, classes=[HOSTILE]) as writer:
        writer.append({name: HOSTILE, "pixels": np.zeros((8, 8, 3), np.uint8), "label": 0})
    source = InputReport("bad\udcff\n" + HOSTILE, "broken", HOSTILE, 0, 0)
    finding = maintenance.Finding(HOSTILE, HOSTILE, HOSTILE, field=HOSTILE)
    with shardio.open(tmp_path / "<b>") as dataset:
        with ShardLoader(dataset, 1, output="numpy", num_workers=0) as loader:
            for value in (
                dataset,
                dataset.schema,
                loader,
                next(iter(loader)),
                ConversionReport(HOSTILE, HOSTILE, 1, 1, 1, (source,), classes=(HOSTILE,)),
                maintenance.VerificationReport(HOSTILE, 1, "", 1, 1, 1, (finding,), (HOSTILE,)),
                maintenance.DiffReport(HOSTILE, HOSTILE, fields_only_a=[HOSTILE]),
                MapView(dataset),
            ):
                text = text_of(value)
                assert "<script>alert" in text and "\u202e" not in text and "\udcff" not in text


@pytest.mark.parametrize("letter", ["x", "&", "名", "😀"])
def test_reports_are_bounded_whatever_their_size(letter: str) -> None:
    long = letter * 500
    sources = tuple(
        InputReport(f"{i}{long}", "converted" if i % 2 else "broken", long, 1, 1)
        for i in range(20_000)
    )
    classes = tuple(f"{i}{long}" for i in range(10_000))
    report = ConversionReport(long, long, 9, 9, 2, sources, classes)
    assert "20,000 inputs" in (text := text_of(report)) and "10,000 classes" in text
    assert len(re.findall(r"… and 9,9\d\d more", text)) == 2  # classes, and broken inputs
    fields = {f"{i}{letter * 60}": Array("float32", (None, 4)) for i in range(500)}
    assert re.search(r"… and 4\d\d more", text_of(Schema(fields)))
    finding = maintenance.Finding(long, long, long, field=long, sample=1)
    verified = maintenance.VerificationReport(long, 1, long, 1, 1, 1, (finding,) * 20_000, classes)
    assert re.search(r"… and 19,9\d\d more", text_of(verified))
    half = maintenance.ShardRepair(long, 7, losses=[maintenance.Loss(7, 9, long)])
    repaired = maintenance.RepairReport(long, Path(long), 7, (half,) * 20_000)
    assert re.search(r"… and 19,9\d\d more", text_of(repaired))
    differ = maintenance.DiffReport(long, long, 1, 2, [*fields], [*fields], [*fields])
    differ.changed, differ.n_changed = [(i, (long, long)) for i in range(20_000)], 30_000
    differ.only_a, differ.n_only_a = [*range(10_000)], 30_000
    assert re.search(r"… and 29,8\d\d more .*… and 29,98\d more", text_of(differ))
    numbers = {"count": 1, "mean": [0.1] * 1000, "std": 1e300, "min": -(10**18), "max": None}
    stats = {
        "samples": 9,
        "fields": dict.fromkeys(fields, numbers),
        "classes": dict.fromkeys(classes, 9),
    }
    assert "… and" in text_of(maintenance.StatsReport(Path(long), 1, long, stats))
    many = DatasetStats(whole=stats, subsets=dict.fromkeys(classes[:20], stats))
    assert "… and 10,4" in text_of(many)


def test_datasets_and_batches_are_bounded_whatever_their_samples(tmp_path: Path) -> None:
    noise = np.random.default_rng(0).integers(0, 255, (2160, 3840, 3), np.uint8)
    more = {f"field {i}{'&' * 200}": Array("float32", (4,)) for i in range(498)}
    schema = Schema({"picture": Array("uint8", (2160, 3840, 3)), "text": Text(), **more})
    classes = [f"class {i} {'名' * 99}" for i in range(10_000)]
    with DatasetWriter(tmp_path / "set", schema, classes=classes) as writer:
        for _ in range(3):
            values = dict.fromkeys(more, np.ones(4, np.float32))
            writer.append({"picture": noise, "text": "&" * 10**6, **values})
    with shardio.open(tmp_path / "set") as dataset:
        found = shown(dataset)
        assert found.n_pictures == 3 and "… and 4" in " ".join(found.text)
        with ShardLoader(dataset, 2, output="numpy", num_workers=0) as loader:
            assert shown(loader) and shown(next(iter(loader))).n_pictures == 2


def test_damage_leaves_the_table_without_its_picture(tmp_path: Path) -> None:
    jpegs = [encode_jpeg(smooth(40, 60)) for _ in range(3)]
    jpegs[1] = jpegs[1][:-99]
    with DatasetWriter(tmp_path / "set", Schema({"image": Image(), "n": Array("int8")})) as writer:
        for i, jpeg in enumerate(jpegs):
            writer.append({"image": jpeg, "n": i})
    with shardio.open(tmp_path / "set") as dataset:
        assert shown(dataset).n_pictures == shown(RowView(dataset)).n_pictures == 2
    with shardio.ShardReader(tmp_path / "set" / "000000-000.shard") as reader:
        offset = reader.records.offset
    flip(tmp_path / "set" / "000000-000.shard", offset + 200)
    with shardio.open(tmp_path / "set") as dataset:
        assert shown(dataset).n_pictures == 1 and "cannot be read" in text_of(dataset)


def test_a_missing_decoder_leaves_the_table(
    small: shardio.ShardDataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "av", None)
    found = shown(small)
    assert found.n_pictures == 0 and "8 samples" in " ".join(found.text)


def test_nothing_is_read_of_a_remote_dataset_nor_of_a_large_index(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = demux(str(write_video(tmp_path / "a.mp4", scene(20))))
    with DatasetWriter(tmp_path / "set", Schema({"video": Video()})) as writer:
        writer.append({"video": stream})
    with shardio.open(tmp_path / "set") as dataset:
        monkeypatch.setattr(preview, "_MAX_ROWS", 0)
        clips = dataset.clips(4)
        assert "clips of 4 frames" in text_of(clips) and not clips.is_read
        monkeypatch.undo()
        monkeypatch.setattr(type(dataset), "remote_storages", [object()])
        monkeypatch.setattr(type(dataset), "sample", None)
        assert "1 sample" in text_of(dataset)
        assert shown(clips).n_pictures == 0 and not clips.is_read


def test_a_view_decodes_each_sample_once(
    small: shardio.ShardDataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoded: list[int] = []

    def sample(self: RowView, index: int, **options: Any) -> dict[str, Any]:
        decoded.append(index)
        return {**small[index]}

    monkeypatch.setattr(RowView, "sample", sample)
    assert shown(RowView(small)).n_pictures == 5
    assert decoded == [0, 1, 3, 5, 7]


def test_a_view_without_samples_says_why(tmp_path: Path) -> None:
    stream = demux(str(write_video(tmp_path / "a.mp4", scene(20))))
    with DatasetWriter(tmp_path / "set", Schema({"video": Video()})) as writer:
        writer.append({"video": stream})
    with shardio.open(tmp_path / "set") as dataset:
        assert "no video" in text_of(dataset.clips(99))


def test_a_default_view_is_shown_in_words_and_sizes_as_on_the_command_line(tmp_path: Path) -> None:
    write_video(tmp_path / "videos" / "a.mp4", scene(20))
    options: dict[str, Any] = {"frames": 8, "size": 16, "workers": 0}
    report = shardio.convert(tmp_path / "videos", tmp_path / "set", kind="videos", **options)
    assert "1 sample (2 clips)" in text_of(report) and ": ratio " in text_of(report)
    assert f" {format_size(report.n_bytes)} from " in text_of(report)
    with shardio.open(tmp_path / "set") as dataset:
        text = text_of(dataset)
        assert "clips  8 frames · stride 1 · a step of 8 · 16 high × 16 wide" in text
        assert "KiB" in text and "kB" not in text


def test_a_report_on_a_conversion_begins_with_failures() -> None:
    names: tuple[OutcomeKind, ...]
    names = ("converted", "duplicate", "empty", "unsupported", "broken")
    sources = tuple(InputReport(f"{name}.x", name, "", 0, 1) for name in names)
    text = text_of(ConversionReport("set", "videos", 1, 1, 1.0, sources))
    places = [text.index(f"{name}.x") for name in ("broken", "empty", "duplicate")]
    assert places == sorted(places) and "converted.x" not in text
    assert "1 broken · 1 empty · 1 duplicate · 1 unsupported · 1 converted" in text


@pytest.mark.parametrize("part", [None, 7, [], "x", {}, {"fields": {"x": 7}}, {"samples": "9"}])
def test_stored_statistics_of_any_form_are_shown(part: Any) -> None:
    for stats in (DatasetStats(whole=part), DatasetStats(subsets={"val": part})):
        assert repr(stats).startswith("DatasetStats(") and "DatasetStats" in text_of(stats)


def test_figures_have_few_digits() -> None:
    values = [1234, 0.123456, None, [1, 2.5], "text"]
    assert [format_number(n) for n in values] == ["1,234", "0.1235", "–", "1, 2.5", "text"]


def test_numbers_line_up_at_the_point() -> None:
    rows = [("a", 129.5, 7), ("b", 0.875, 8), ("c", 1, 9), ("d", None, 10)]
    cells = re.findall("<td[^>]*>([^<]*)</td>", table(("", "mean", "n"), rows, len(rows)))
    as_wide = [cell.replace("\u2008", ".").replace("\u2007", "0") for cell in cells[1::3]]
    assert as_wide == ["129.500", "0.875", "1.000", "–.000"]
    assert cells[2::3] == ["7", "8", "9", "10"]


def test_statistics_of_pixels_have_a_transform_to_copy() -> None:
    channels = {"mean": [51.0, 102.0, 255.0], "std": [25.5, 51.0, 51.0]}
    field = {"count": 9, "pictures": 3, "channels": channels, "frames_per_video": 8}
    stats = {"samples": 3, "fields": {"frames": field}}
    text = " ".join(shown(maintenance.StatsReport(Path("set"), 2, None, stats)).text)
    code = "Normalize(mean=(0.2000, 0.4000, 1.0000), std=(0.1000, 0.2000, 0.2000))"
    assert f"frames: {code} (of 8 frames of each video)" in text
    assert "Reopen the dataset to see them in dataset.stats" in text


def test_a_loader_names_its_subset_and_statistics_count_one_worker(
    small: shardio.ShardDataset,
) -> None:
    with small.subset("val") as subset:
        shown = of_loader(subset, lambda loader: loader._repr_html_())
    assert " · subset &#x27;val&#x27; · " in shown
    assert " · 1 worker · " in LoaderStats(3, 1, LOADING, LOADING)._repr_html_()
