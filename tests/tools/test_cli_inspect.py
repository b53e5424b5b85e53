from __future__ import annotations

import errno
import json
import os
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shardio
from shardio import Array, Bytes, Json, List, Schema, Text
from shardio.dataset.manifest import load, publish_next
from shardio.media import encode_jpeg
from shardio_tools import cli
from shardio_tools.inspect.report import value_facts
from tests.shards import EVERY_FIELD, flip, media_sample, write_media, write_shard

Capture = pytest.CaptureFixture[str]

pytestmark = pytest.mark.usefixtures("quick_disk")


@pytest.fixture
def copy(dataset: Path, tmp_path: Path) -> Path:
    """Return a copy of the dataset, to be damaged."""
    shutil.copytree(dataset, tmp_path / "copy")
    return tmp_path / "copy"


def as_json(capsys: Capture, *arguments: object, code: int = 0) -> Any:
    assert cli.main(["inspect", *map(str, arguments), "--json"]) == code
    return json.loads(capsys.readouterr().out)


def test_a_dataset_is_described(dataset: Path, capsys: Capture) -> None:
    assert cli.main(["inspect", str(dataset)]) == 0
    out, err = capsys.readouterr()
    lines = out.splitlines()
    assert err == ""
    assert lines[:2] == [str(dataset), "  samples  5 in 3 classes"]
    assert "  view     rows, as they are stored" in lines
    inputs = "6 files: 3 converted, 1 not a video, 1 too short for one clip, 1 broken"
    assert f"  inputs   {inputs}" in lines
    assert "  frames     uint8[4,16,16,3]" in lines
    assert "  source     text" in lines
    assert "      0  cats         3" in lines and "      2  fish         0" in lines
    assert "Sample 0 (000000-000.shard, row 0)" in lines
    assert '  source     "cats/a.mp4"' in lines
    assert "with a label outside the classes" not in out
    assert lines[-1] == f"inspected {dataset}: no damage found (shardio verify checks every byte)"


def test_history_options_versions_and_shards_are_verbose(dataset: Path, capsys: Capture) -> None:
    assert cli.main(["inspect", str(dataset)]) == 0
    short = capsys.readouterr().out.splitlines()
    assert cli.main(["inspect", str(dataset), "--verbose"]) == 0
    lines = capsys.readouterr().out.splitlines()
    more = [line for line in lines if line not in short]
    assert any(line.startswith("  options ") and "frames=4" in line for line in more)
    for start in ("  generation  1 of lineage ", "  converter   videos ", "  versions    av "):
        assert any(line.startswith(start) for line in more)
    n_shards = sum(line.startswith("  00000") for line in lines)
    assert n_shards == len(list(dataset.glob("*.shard"))) and "Shards" not in short
    without = lines[lines.index("Inputs without samples") + 1 :][:3]
    assert "  too short for one clip  fish/short.mp4  3 frames; one clip spans 4" in without
    assert "  not a video             cats/notes.txt" in without


@pytest.mark.process
def test_files_of_other_kinds_are_named_as_by_the_conversion(
    tmp_path: Path, capsys: Capture
) -> None:
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "1.jpg").write_bytes(encode_jpeg(np.zeros((16, 16, 3), np.uint8)))
    (tmp_path / "src" / "notes.txt").write_text("not a picture")
    assert cli.main(["convert", str(tmp_path / "src"), str(tmp_path / "set")]) == 0
    assert "Not a picture: 1 file" in capsys.readouterr().out
    assert cli.main(["inspect", str(tmp_path / "set")]) == 0
    assert "  inputs   2 files: 1 converted, 1 not a picture\n" in capsys.readouterr().out


def test_the_json_of_a_dataset_agrees_with_the_dataset(dataset: Path, capsys: Capture) -> None:
    facts = as_json(capsys, dataset, "--sample", -1)
    with shardio.open(dataset) as opened:
        assert facts["samples"] == len(opened) == 5
        assert facts["classes"] == {"cats": 3, "dogs": 2, "fish": 0}
        assert facts["without_class"] == 0
        assert (facts["generation"], facts["lineage"]) == (1, opened.lineage)
        assert [s["id"] for s in facts["shards"]] == [s.id for s in opened.shards]
        assert facts["outcomes"]["converted"] == 3
        without = {entry["path"] for entry in facts["without_samples"]}
        assert without == {"cats/notes.txt", "fish/short.mp4", "fish/song.wav"}
        frames = opened[4]["frames"]
    assert facts["damage"] == []
    assert (facts["sample"]["sample"], facts["sample"]["fields"]["label"]["min"]) == (4, 1)
    seen = facts["sample"]["fields"]["frames"]
    assert (seen["dtype"], seen["shape"]) == ("uint8", list(frames.shape))
    assert (seen["min"], seen["max"]) == (frames.min(), frames.max())
    assert seen["mean"] == pytest.approx(frames.mean())
    assert seen["first"] == frames.reshape(-1)[:8].tolist()


@pytest.mark.parametrize(
    ("sample", "source", "label"),
    [(0, "cats/a.mp4", "0 (cats)"), (2, "cats/b.mp4", "0 (cats)"), (4, "dogs/c.mp4", "1 (dogs)")],
)
def test_shows_sample(sample: int, source: str, label: str, dataset: Path, capsys: Capture) -> None:
    assert cli.main(["inspect", str(dataset), "--sample", str(sample)]) == 0
    out = capsys.readouterr().out
    assert f"Sample {sample} (" in out and f'"{source}"' in out and f"int64 {label}" in out


def test_a_subset_has_its_own_samples_and_classes(copy: Path, capsys: Capture) -> None:
    shardio.maintenance.split(copy, {"train": 0.5, "val": 0.5}, seed=1)
    for name in ("train", "val"):
        sheet = copy.parent / f"{name}.png"
        facts = as_json(capsys, copy, "--subset", name, "--sample", -1, "--sheet", sheet)
        with shardio.open(copy, subset=name) as subset:
            labels, n = np.bincount(subset["label"], minlength=3).tolist(), len(subset)
            last = subset[-1]
        assert (facts["subset"], facts["samples"], [*facts["classes"].values()]) == (
            name,
            n,
            labels,
        )
        shown = facts["sample"]["fields"]
        assert facts["sample"]["sample"] == n - 1
        assert facts["sheet"]["samples"] == [*range(n)]
        assert shown["source"]["value"] == last["source"]
        assert shown["frames"]["mean"] == pytest.approx(last["frames"].mean())
        assert cli.main(["inspect", str(copy), "--subset", name]) == 0
        assert f"  samples  {n} of subset {name} in 3 classes" in capsys.readouterr().out
    shard = next(copy.glob("*.shard"))
    for path, asked, said in (
        (copy, "test", "no subset 'test'; there are: 'train', 'val'"),
        (shard, "train", "--subset is for datasets"),
    ):
        assert cli.main(["inspect", str(path), "--subset", asked]) == 2
        assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "more"),
    [
        ("inspect", ()),
        ("stats", ()),
        ("bench", ()),
        ("export", ("out", "--format", "files")),
        ("verify", None),
        ("compact", None),
        ("diff", None),
        ("repair", None),
        ("serve", None),
    ],
)
def test_a_path_that_ends_in_the_name_of_a_subset(
    command: str, more: tuple[str, ...] | None, copy: Path, capsys: Capture
) -> None:
    shardio.maintenance.split(copy, {"train": 0.5, "val": 0.5}, seed=1)
    others = {"diff": [str(copy)], "repair": [str(copy.parent / "new")]}.get(command, [])
    assert cli.main([command, str(copy / "train"), *others, *(more or ())]) == 2
    said = capsys.readouterr().err
    assert f"{copy / 'train'}: 'train' is a subset of a dataset" in said
    if more is None:
        assert said.endswith(f"; shardio {command} works on whole datasets: write {copy}\n")
    else:
        assert said.endswith(f": write {copy} --subset train\n")
    assert cli.main([command, str(copy / "nothing"), *others, *(more or ())]) == 2
    assert "is a subset" not in capsys.readouterr().err


@pytest.mark.parametrize("command", ["inspect", "verify"])
def test_a_file_of_another_kind_is_not_damaged(
    command: str, dataset: Path, tmp_path: Path, capsys: Capture
) -> None:
    path = tmp_path / "table.csv"
    path.write_text("a\n1\n")
    assert cli.main([command, str(path)]) == 2
    advice = "to load files of other kinds, convert them first: shardio convert"
    assert capsys.readouterr().err == f"shardio: {path}: not a shard; {advice} {path} OUT\n"
    shutil.copy(next(dataset.glob("*.shard")), path)  # a shard by another name
    assert cli.main([command, str(path)]) == 0
    short = tmp_path / "short.shard"
    short.write_text("a\n1\n")
    assert cli.main([command, str(short)]) == 1


@pytest.mark.parametrize("command", ["inspect", "verify"])
def test_the_pointer_of_a_dataset_is_not_damaged(
    command: str, dataset: Path, capsys: Capture
) -> None:
    path = dataset / "dataset.json"
    assert cli.main([command, str(path)]) == 2
    assert (
        capsys.readouterr().err == f"shardio: {path}: not a shard; write {dataset}, its dataset\n"
    )


def test_how_many_samples_media_were_described_from(tmp_path: Path, capsys: Capture) -> None:
    write_media(tmp_path / "a.shard", 33)
    assert cli.main(["inspect", str(tmp_path / "a.shard")]) == 0
    assert "\n  sizes and lengths are of 32 of 33 samples\n" in capsys.readouterr().out


def test_a_shard_is_described_with_its_sections(tmp_path: Path, capsys: Capture) -> None:
    shard = write_shard(tmp_path / "a.shard", 4)
    assert cli.main(["inspect", str(shard), "--sample", "3"]) == 0
    assert "Sections" not in capsys.readouterr().out
    assert cli.main(["inspect", str(shard), "--sample", "3", "--verbose"]) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"{shard}\n  samples  4\n")
    for name in EVERY_FIELD:
        assert f"\n  {name} " in out
    with shardio.ShardReader(shard) as reader:
        for section in reader.sections:
            assert f"{section.offset:,}" in out
    assert re.search(r"\n  points +int16\[any,2\]\n", out) and "Sample 3 (a.shard, row 3)" in out
    assert re.search(r"\n  boxes +list of float32\[any,4\]\n", out)
    assert re.search(r"\n  parts +list of uint8\[3\],zstd,optional\n", out)
    assert re.search(r"\n  camera.id +text,zstd_dictionary\n", out)


def test_an_empty_shard_has_no_sample_to_show(tmp_path: Path, capsys: Capture) -> None:
    shard = write_shard(tmp_path / "a.shard", 0)
    assert "sample" not in as_json(capsys, shard)
    assert cli.main(["inspect", str(shard), "--sample", "0"]) == 2


@pytest.mark.parametrize(
    ("kind", "value", "expected"),
    [
        (Array("bool", (3,)), np.array([True, False, True]), {"min": False, "max": True}),
        (Array("int8"), np.int8(-5), {"shape": [], "min": -5, "first": [-5]}),
        (Array("uint64"), np.uint64(2**64 - 1), {"max": 2**64 - 1}),
        # 1.5 as bfloat16: the upper half of the bits of a float32.
        (Array("bfloat16", (1,)), np.array([0x3FC0], np.uint16), {"min": 1.5, "first": [1.5]}),
        (Array("float32", (None,)), np.zeros(0, np.float32), {"shape": [0]}),
        (Text(), "größer", {"characters": 6, "value": "größer"}),
        (Bytes(), b"\x00\xff", {"bytes": 2, "first": "00 ff"}),
        (Json(), {"a": [1, None]}, {"value": {"a": [1, None]}}),
        (Text(optional=True), None, {"type": "Text", "absent": True}),
        (List(Array("int8", (None,))), [np.zeros(2, np.int8)] * 2, {"type": "List", "arrays": 2}),
    ],
)
def test_a_value_becomes_a_few_facts(kind: Any, value: Any, expected: dict[str, Any]) -> None:
    facts = value_facts(value, kind)
    assert {name: facts.get(name) for name in expected} == expected


def test_long_text_and_control_characters_are_shortened_and_escaped(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # a line has the whole path
    note = "a\x1b[2Jb\n" * 200
    with shardio.ShardWriter("a.shard", Schema({"note": Text()})) as writer:
        writer.append({"note": note})
    assert cli.main(["inspect", "a.shard"]) == 0
    out = capsys.readouterr().out
    assert "\x1b" not in out and max(map(len, out.splitlines())) < 140
    assert as_json(capsys, Path("a.shard"))["sample"]["fields"]["note"]["value"] == note


def test_the_last_page_describes_a_damaged_shard(tmp_path: Path, capsys: Capture) -> None:
    shard = write_shard(tmp_path / "a.shard", 4)
    sound = as_json(capsys, shard)
    flip(shard, 20)
    damaged = as_json(capsys, shard, code=1)
    assert damaged["damage"][0]["section"] == "header"
    for name in ("samples", "id", "schema", "sections"):
        assert damaged[name] == sound[name]
    assert "sample" not in damaged


def test_a_truncated_shard_still_says_what_it_was(tmp_path: Path, capsys: Capture) -> None:
    shard = write_shard(tmp_path / "a.shard", 4)
    n_bytes = shard.stat().st_size
    os.truncate(shard, n_bytes // 2)
    assert cli.main(["inspect", str(shard)]) == 1
    out = capsys.readouterr().out
    assert "samples  4" in out and "the file is truncated" in out
    assert f"expected {n_bytes}, found {n_bytes // 2}" in out


def test_a_field_that_is_damaged_hides_no_other(tmp_path: Path, capsys: Capture) -> None:
    shard = write_shard(tmp_path / "a.shard", 4)
    with shardio.ShardReader(shard) as reader:
        change_at = reader.column_section("frames").offset
    flip(shard, change_at)
    facts = as_json(capsys, shard, code=1)
    (finding,) = facts["damage"]
    assert (finding["field"], finding["sample"], finding["offset"]) == ("frames", 0, change_at)
    fields = facts["sample"]["fields"]
    assert fields.pop("frames") is None
    assert None not in fields.values()


@pytest.mark.parametrize("content", [b"", b"\0" * 9000, b"not a shard", b"x" * 20_000])
def test_a_file_of_other_bytes_is_damaged(content: bytes, tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "a.shard").write_bytes(content)
    facts = as_json(capsys, tmp_path / "a.shard", code=1)
    assert len(facts["damage"]) == 1
    assert (facts["bytes"], facts["samples"], facts["schema"]) == (len(content), None, {})
    assert cli.main(["inspect", str(tmp_path / "a.shard")]) == 1


def test_damaged_and_missing_shards_of_a_dataset_hide_no_other(copy: Path, capsys: Capture) -> None:
    shards = sorted(copy.glob("*.shard"))
    assert len(shards) >= 3
    flip(shards[0], 30)
    shards[1].unlink()
    facts = as_json(capsys, copy, "--sample", -1, code=1)
    damaged = [Path(finding["path"]).name for finding in facts["damage"]]
    assert damaged == [shards[0].name, shards[1].name]
    assert facts["samples"] == 5 and facts["sample"]["fields"]["source"]["value"] == "dogs/c.mp4"
    first = as_json(capsys, copy, code=1)["sample"]
    assert first["fields"] == {}
    assert cli.main(["inspect", str(copy)]) == 1
    assert "  cannot be read" in capsys.readouterr().out.splitlines()


def test_a_shard_in_the_place_of_another_is_noticed(copy: Path, capsys: Capture) -> None:
    first, second = sorted(copy.glob("*.shard"))[:2]
    shutil.copyfile(second, first)
    damage = as_json(capsys, copy, code=1)["damage"]
    assert "not the shard that the generation names" in damage[0]["message"]


@pytest.mark.parametrize("lost", ["dataset.json", "generations/000001.json"])
@pytest.mark.parametrize("how", ["missing", "damaged", "folder", "closed"])
def test_without_its_manifest_the_shards_in_the_folder_are_described(
    lost: str, how: str, copy: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    sound = as_json(capsys, copy)
    if how == "damaged":
        flip(copy / lost, 25)
    elif how == "closed":
        _refuse(monkeypatch, copy / lost)
    else:
        (copy / lost).unlink()
        if how == "folder":
            (copy / lost).mkdir()
    facts = as_json(capsys, copy, code=1)
    assert len(facts["damage"]) == 1 and Path(lost).name in str(facts["damage"][0])
    assert facts["shards"] == sound["shards"] and facts["schema"] == sound["schema"]
    assert cli.main(["inspect", str(copy)]) == 1


def test_shard_named_once(copy: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(copy.parent)
    shard = min(copy.glob("*.shard"))
    shard.unlink()
    (finding,) = as_json(capsys, copy.name, code=1)["damage"]
    assert finding["path"] == f"copy/{shard.name}"
    assert finding["message"] == "there is no such shard"


def test_missing_paths_and_samples_exit_2(dataset: Path, tmp_path: Path, capsys: Capture) -> None:
    for path, sample in ((tmp_path / "no", 0), (tmp_path, 0), (dataset, 5), (dataset, -6)):
        assert cli.main(["inspect", str(path), "--sample", str(sample)]) == 2
        out, err = capsys.readouterr()
        assert out == "" and err.startswith(f"shardio: {path}: ") and err.count("\n") == 1


def write_labels(folder: Path, labels: Sequence[Any], dtype: str) -> Path:
    """Return a dataset of three classes that holds only labels."""
    schema = Schema({"label": Array(dtype)})
    with shardio.DatasetWriter(folder, schema, classes=["a", "b", "c"]) as writer:
        for label in labels:
            writer.append({"label": label})
    return folder


@pytest.mark.parametrize(
    ("dtype", "labels"),
    [
        ("int64", [0, 1, 2, -1, 3, 10**12, 2**62, -(2**63)]),
        ("uint64", [0, 1, 2, 3, 10**12, 2**63, 2**64 - 1, 2**64 - 2]),
        ("uint8", [0, 1, 2, 3, 4, 5, 254, 255]),
    ],
)
def test_unclassed_labels(dtype: str, labels: list[int], tmp_path: Path, capsys: Capture) -> None:
    folder = write_labels(tmp_path / "out", labels, dtype)
    facts = as_json(capsys, folder)
    assert (facts["classes"], facts["without_class"]) == ({"a": 1, "b": 1, "c": 1}, 5)
    assert cli.main(["inspect", str(folder)]) == 0
    assert "5 samples with a label outside the classes" in capsys.readouterr().out.splitlines()


def test_labels_that_are_no_whole_numbers_name_no_class(tmp_path: Path, capsys: Capture) -> None:
    folder = write_labels(tmp_path / "out", [1.0, np.nan], "float32")
    assert as_json(capsys, folder)["classes"] == {"a": None, "b": None, "c": None}
    assert as_json(capsys, folder, "--sample", 1)["sample"]["fields"]["label"]["min"] == "nan"
    assert cli.main(["inspect", str(folder)]) == 0
    assert "  label  float32 1\n" in capsys.readouterr().out


@pytest.mark.parametrize("how", ["loop", "folder", "closed"])
def test_a_shard_that_cannot_be_opened_hides_no_other(
    how: str, copy: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = min(copy.glob("*.shard"))
    if how == "closed":
        _refuse(monkeypatch, first)
    else:
        first.unlink()
        first.mkdir() if how == "folder" else first.symlink_to(first.name)
    facts = as_json(capsys, copy, "--sample", -1, code=1)
    assert [finding["path"] for finding in facts["damage"]] == [str(first)]
    assert facts["sample"]["fields"]["source"]["value"] == "dogs/c.mp4"
    assert as_json(capsys, copy, code=1)["sample"]["fields"] == {}


def _refuse(monkeypatch: pytest.MonkeyPatch, path: Path) -> None:
    """Let the system refuse to open a file, as it refuses everyone but root."""
    open_ = os.open

    def refusing(name: Any, *arguments: Any, **options: Any) -> int:
        if os.fspath(name) == str(path):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return open_(name, *arguments, **options)

    monkeypatch.setattr(os, "open", refusing)


def test_damaged_input_list(copy: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardio.dataset.external_lists.MAX_INLINE_ENTRIES", 1)
    publish_next(copy, load(copy))
    (place,) = (copy / "generations").glob("*.inputs")
    place.write_bytes(b"")
    facts = as_json(capsys, copy, code=1)
    assert [finding["path"] for finding in facts["damage"]] == [str(place)]
    assert (facts["samples"], facts["without_samples"]) == (5, [])
    assert facts["sample"]["fields"]["source"]


def test_media_are_described_without_being_decoded(tmp_path: Path, capsys: Capture) -> None:
    path = tmp_path / "media.shard"
    write_media(path, 5)
    assert cli.main(["inspect", str(path), "--sample", "1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    ranges = "h264, 48 high × 64–68 wide, 20–22.22 fps, 4–8 frames, 0.2–0.36 s"
    assert f"  video  video           {ranges}" in lines
    assert "  sound  audio,optional  h264, 48 Hz, 165–167 channels, 0.12–0.16 s" in lines
    line = f"  loaders deliver {shardio.Sound().rate:,} Hz mono; "
    assert line + "decode={…: shardio.Sound(…)} changes it" in lines
    assert "  image  image,optional  31–34 high × 40 wide, 1–3 channels" in lines
    video, sound = media_sample(1)["video"], media_sample(1)["sound"]
    assert (
        f"  video  h264 48 high × 65 wide, 5 frames in 0.24 s: {len(video.data)} bytes in 6 packets"
        in lines
    )
    assert "  image  31 high × 40 wide, 2 channels: 18 bytes" in lines
    assert (
        f"  sound  h264 {64 + 101} channels at 48 Hz, {sound.n_frames} samples in 0.16 s: "
        f"{len(sound.data)} bytes in 4 packets"
    ) in lines
    facts = as_json(capsys, path, "--sample", "4")["sample"]["fields"]
    assert facts["sound"] == {"type": "Audio", "absent": True}
    sides = {"height": 34, "width": 40, "channels": 1}
    assert facts["image"] == {"type": "Image", "bytes": 45, **sides}
