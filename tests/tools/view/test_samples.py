"""A sample is described as JSON values, each field by its kind."""

from __future__ import annotations

import io
import json
import sys
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import shardio
from shardio import Array, Audio, Bytes, Image, InvalidArgument, Json, Text, Video
from shardio.errors import UnsupportedEnvironment
from shardio.media import demux, sound_of, to_png
from shardio_tools.view import originals, stored
from shardio_tools.view.originals import original
from shardio_tools.view.rows import describe_rows
from shardio_tools.view.samples import describe_sample, load_tokenizer
from shardio_tools.view.stored import kind_of, thumbnail_fields
from tests.media_made import quadrants, scene, write_flash, write_video
from tests.shards import EVERY_FIELD, MEDIA_FIELDS, every_field_sample, flip, media_sample


def _write(path: Path, schema: shardio.Schema, samples: list[dict[str, Any]]) -> Path:
    with shardio.DatasetWriter(path, schema, classes=["cat", "dog"]) as writer:
        for sample in samples:
            writer.append(sample)
    return path


def _fields(found: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {each["name"]: each for each in found["fields"]}


def test_every_kind_of_field_is_described(tmp_path: Path) -> None:
    path = _write(tmp_path / "set", EVERY_FIELD, [every_field_sample(i) for i in range(9)])
    with shardio.open(path) as dataset:
        for row in range(9):
            found = describe_sample(dataset, row)
            assert json.loads(json.dumps(found, allow_nan=False)) == found
            assert (found["row"], found["n"], found["index"]) == (row, 9, row)
            assert list(_fields(found)) == list(EVERY_FIELD)
            assert found["damaged"] is None
        fields, sample = _fields(describe_sample(dataset, 7)), every_field_sample(7)
    kinds = {name: each["kind"] for name, each in fields.items()}
    assert kinds["frames"] == "video" and kinds["points"] == "array" and kinds["boxes"] == "list"
    assert fields["label"]["value"] == 7 and fields["meta"]["value"] == sample["meta"]
    assert fields["note"]["value"] == sample["note"] and not fields["note"]["truncated"]
    assert fields["raw"]["hex"] == sample["raw"].hex()
    assert fields["points"]["shape"] == [2, 2]
    assert fields["points"]["preview"] == sample["points"].ravel().tolist()
    bits = sample["bits"].astype(np.uint32) << 16
    assert fields["bits"]["preview"] == [float(each) for each in bits.view(np.float32)]
    assert [each["shape"] for each in fields["boxes"]["items"]] == [[0, 4], [1, 4], [2, 4]]
    assert fields["camera.lens.focus"]["value"] == 7 / 8


def test_a_missing_value_has_no_links(tmp_path: Path) -> None:
    path = _write(tmp_path / "set", EVERY_FIELD, [every_field_sample(0)])
    with shardio.open(path) as dataset:
        found = _fields(describe_sample(dataset, 0))["maybe"]
    assert found["missing"] and found["original"] is None and found["kind"] == "array"


def test_numbers_that_json_lacks_are_texts(tmp_path: Path) -> None:
    schema = shardio.Schema(
        {"x": Array("float64"), "n": Array("uint64"), "v": Array("float32", (3,))}
    )
    samples = [{"x": np.inf, "n": 2**63, "v": np.array([np.nan, 1, 2], np.float32)}]
    with shardio.open(_write(tmp_path / "set", schema, samples)) as dataset:
        found = _fields(describe_sample(dataset, 0))
    assert (found["x"]["value"], found["n"]["value"]) == ("inf", str(2**63))
    assert found["v"]["preview"] == ["nan", 1.0, 2.0]
    assert (found["v"]["min"], found["v"]["max"]) == (1.0, 2.0)


def test_a_label_has_the_name_of_its_class(tmp_path: Path) -> None:
    schema = shardio.Schema({"label": Array("int64"), "other": Array("int64")})
    path = _write(tmp_path / "set", schema, [{"label": 1, "other": 1}, {"label": 9, "other": 0}])
    with shardio.open(path) as dataset:
        first, second = (_fields(describe_sample(dataset, row)) for row in (0, 1))
    assert first["label"]["label"] == "dog" and "label" not in first["other"]
    assert "label" not in second["label"]


def test_links_quote_names(tmp_path: Path) -> None:
    schema = shardio.Schema({"a/b ü?": Array("float32", (9, 2))})
    path = _write(tmp_path / "set", schema, [{"a/b ü?": np.zeros((9, 2), np.float32)}])
    with shardio.open(path) as dataset:
        (found,) = describe_sample(dataset, 0)["fields"]
    assert found["series"] == "/series/0/a%2Fb%20%C3%BC%3F"
    assert found["original"] == "/original/0/a%2Fb%20%C3%BC%3F"


def test_a_damaged_field_is_reported_and_the_others_are_shown(tmp_path: Path) -> None:
    schema = shardio.Schema({name: EVERY_FIELD[name] for name in ("note", "blob", "label")})
    samples = [{name: every_field_sample(2)[name] for name in schema}]
    path = _write(tmp_path / "set", schema, samples)
    (shard,) = path.rglob("*.shard")
    data = shard.read_bytes()
    flip(shard, data.index(samples[0]["note"].encode()))
    with shardio.open(path) as dataset:
        found = describe_sample(dataset, 0)
    fields = _fields(found)
    assert (
        "field 'note'" in fields["note"]["damaged"]
        and found["damaged"] == fields["note"]["damaged"]
    )
    assert fields["label"]["value"] == 2 and fields["blob"]["hex"] == (b"abc" * 2).hex()


def test_media_is_described_without_decoding(tmp_path: Path) -> None:
    path = _write(tmp_path / "set", MEDIA_FIELDS, [media_sample(i) for i in range(3)])
    with shardio.open(path) as dataset:
        found = _fields(describe_sample(dataset, 2))
    assert found["video"]["kind"] == "video" and found["video"]["n_frames"] == 6
    assert (found["image"]["height"], found["image"]["width"]) == (32, 40)
    assert found["video"]["src"] is None and found["video"]["frames"] == "/frame/2/video/{n}"
    assert found["sound"]["kind"] == "audio" and found["sound"]["mime"] is None


def _videos(folder: Path, **options: Any) -> Path:
    source = write_flash(folder / "videos" / "a" / "a.mkv", codec="flac")
    out = folder / "set"
    shardio.convert(source.parent.parent, out, workers=0, size=32, frames=8, audio=True, **options)
    return out


@pytest.mark.parametrize(
    ("options", "mime"),
    [
        ({"store": "packets"}, 'video/mp4; codecs="avc1.64000a, flac"'),
        ({"store": "h264"}, 'video/mp4; codecs="avc1.64000a, flac"'),
        ({"store": "h264", "codec": "hevc"}, 'video/mp4; codecs="hvc1.1.6.L30.90, flac"'),
        ({"store": "h264", "codec": "av1"}, 'video/mp4; codecs="av01.0.00M.08, flac"'),
        ({"store": "jpeg"}, None),
        ({"store": "planes"}, None),
    ],
)
def test_a_video_of_any_store_is_described(
    tmp_path: Path, options: dict[str, Any], mime: str | None
) -> None:
    with shardio.open(_videos(tmp_path, **options)) as dataset:
        sample, (row,) = describe_sample(dataset, 0), describe_rows(dataset, [0], [0])
    found = _fields(sample)["frames"]
    assert found["mime"] == mime and found["audio"] == (mime is not None)
    assert found["src"] == (None if mime is None else "/media/0/frames")
    assert (found["n_frames"], found["fps"], found["seconds"]) == (50, 25.0, 2.0)
    assert (found["width"], found["height"], found["times"]) == (32, 32, None)
    assert found["keyframes"][0] == 0 and found["frames"] == "/frame/0/frames/{n}"
    assert row["title"] == "a/a.mkv"
    assert sample["clip"] == {
        "field": "frames",
        "start": 0.0,
        "stop": 0.32,
        "n_frames": 8,
        "text": "6 clips of 8 frames",
    }
    sound = _fields(sample)["audio"]
    assert (sound["mime"], sound["seconds"]) == ('audio/mp4; codecs="flac"', 2.0)


def test_decoded_clips_are_shown_as_frames_at_their_rate(tmp_path: Path) -> None:
    with shardio.open(_videos(tmp_path, store="raw")) as dataset:
        found = _fields(describe_sample(dataset, 1))["frames"]
    assert found["kind"] == "video" and found["src"] is None and found["codec"] == "raw"
    assert (found["n_frames"], found["fps"]) == (8, pytest.approx(25))


def test_frames_at_uneven_times_are_listed_with_their_times(tmp_path: Path) -> None:
    times = [0, 3, 4, 10, 30]
    source = write_video(tmp_path / "a.mp4", scene(5), times=times, time_base=Fraction(1, 30))
    schema = shardio.Schema({"video": Video()})
    path = _write(tmp_path / "set", schema, [{"video": demux(str(source))}])
    with shardio.open(path) as dataset:
        found = _fields(describe_sample(dataset, 0))["video"]
    assert found["times"] == pytest.approx([each / 30 for each in times], abs=1e-6)


def test_tokens_have_their_text_if_there_is_a_tokenizer(tmp_path: Path) -> None:
    class Tokenizer:
        def decode(self, tokens: list[int]) -> str:
            return " ".join(f"w{each}" for each in tokens)

    schema = shardio.Schema({"tokens": Array("uint16", (None,))})
    path = _write(tmp_path / "set", schema, [{"tokens": np.arange(3000, dtype=np.uint16)}])
    with shardio.open(path) as dataset:
        plain = _fields(describe_sample(dataset, 0))["tokens"]
        known = _fields(describe_sample(dataset, 0, tokenizer=Tokenizer()))["tokens"]
    assert (plain["n"], plain["truncated"], plain["text"]) == (3000, True, None)
    assert plain["value"] == list(range(2000)) and known["text"].startswith("w0 w1 w2 ")


def test_tokens_that_a_tokenizer_refuses_are_shown_all_the_same(tmp_path: Path) -> None:
    class Tokenizer:
        def decode(self, tokens: list[int]) -> str:
            raise OverflowError("out of range")

    schema = shardio.Schema({"tokens": Array("int64", (None,))})
    path = _write(tmp_path / "set", schema, [{"tokens": np.array([1, -1])}])
    with shardio.open(path) as dataset:
        found = _fields(describe_sample(dataset, 0, tokenizer=Tokenizer()))["tokens"]
    assert found["value"] == [1, -1]
    assert found["text"] == "the tokenizer cannot decode these tokens: out of range"


def test_numbers_in_json_are_those_that_are_stored(tmp_path: Path) -> None:
    deep: Any = 1
    for _ in range(stored_depth := 150):
        deep = [deep]
    samples = [
        {"meta": {"id": 2**53 + 1, "ids": [1, -(2**60), True, None, 0.5, "x"]}},
        {"meta": deep},
    ]
    with shardio.open(
        _write(tmp_path / "set", shardio.Schema({"meta": Json()}), samples)
    ) as dataset:
        exact, nested = (_fields(describe_sample(dataset, i))["meta"] for i in range(2))
    assert exact["value"] == {
        "id": str(2**53 + 1),
        "ids": [1, str(-(2**60)), True, None, 0.5, "x"],
    }
    assert nested["value"] == "[" * stored_depth + "1" + "]" * stored_depth


def test_a_large_image_is_not_read_to_be_downloaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = to_png(quadrants(40, 30))
    path = _write(tmp_path / "set", shardio.Schema({"x": Image()}), [{"x": data}])
    monkeypatch.setattr(originals, "MAX_ORIGINAL", len(data) - 1)
    monkeypatch.setattr(originals, "present_value", lambda *_: pytest.fail("read"))
    with (
        shardio.open(path) as dataset,
        pytest.raises(InvalidArgument, match="can be downloaded"),
    ):
        original(dataset, 0, "x")


def test_a_tokenizer_is_loaded_from_its_file(monkeypatch: pytest.MonkeyPatch) -> None:
    def from_file(path: str) -> str:
        if path != "tokenizer.json":
            raise Exception("expected value at line 1")
        return "a tokenizer"

    module = SimpleNamespace(Tokenizer=SimpleNamespace(from_file=from_file))
    monkeypatch.setitem(sys.modules, "tokenizers", module)
    assert load_tokenizer("tokenizer.json") == "a tokenizer"
    with pytest.raises(InvalidArgument, match=r"x\.json: cannot read a tokenizer: expected value"):
        load_tokenizer("x.json")
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(UnsupportedEnvironment, match="pip install tokenizers"):
        load_tokenizer("tokenizer.json")


def test_long_values_are_shortened(tmp_path: Path) -> None:
    schema = shardio.Schema({"t": Text(), "j": Json(), "b": Bytes(), "l": EVERY_FIELD["boxes"]})
    sample = {
        "t": "ü" * 100_001,
        "j": ["x" * 1000] * 1100,
        "b": bytes(1000),
        "l": [np.zeros((1, 4), np.float32)] * 60,
    }
    with shardio.open(_write(tmp_path / "set", schema, [sample])) as dataset:
        found = _fields(describe_sample(dataset, 0))
    assert all(each["truncated"] for each in found.values())
    assert len(found["t"]["value"]) == 100_000 and found["t"]["n_bytes"] == 200_002
    assert len(found["j"]["value"]) == 100_000 and len(found["b"]["hex"]) == 1024
    assert (len(found["l"]["items"]), found["l"]["n"]) == (50, 60)


def test_a_large_array_is_described_from_its_first_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    schema = shardio.Schema(
        {"a": Array("int32", (None, 3)), "z": Array("int32", (600,), codec="zstd")}
    )
    values = np.arange(1500, dtype=np.int32).reshape(500, 3)
    sample = {"a": values, "z": np.zeros(600, np.int32)}
    path = _write(tmp_path / "set", schema, [sample])
    (shard,) = path.rglob("*.shard")
    flip(shard, shard.read_bytes().index(values.tobytes()) + 4000)
    monkeypatch.setattr(stored, "MAX_READ_BYTES", 1000)
    with shardio.open(path) as dataset:
        found = _fields(describe_sample(dataset, 0))
    assert found["a"]["preview"] == list(range(64)) and found["a"]["shape"] == [500, 3]
    assert "2,400 bytes, compressed: at most 1,000 are read" in found["z"]["damaged"]


def test_a_value_that_is_too_large_is_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stored, "MAX_READ_BYTES", 1000)
    monkeypatch.setattr(stored, "_MAX_JSON_BYTES", 100)
    schema = shardio.Schema(
        {"t": Text(codec="zstd"), "j": Json(), "b": Bytes(), "label": Array("int64")}
    )
    samples = [
        {"t": "a" * 1001, "j": "b" * 99, "b": bytes(1001), "label": 1},
        {"t": "a" * 1000, "j": "b" * 98, "b": bytes(1000), "label": 1},
    ]
    with shardio.open(_write(tmp_path / "set", schema, samples)) as dataset:
        large, small = (_fields(describe_sample(dataset, row)) for row in (0, 1))
    assert "'t' has 1,001 bytes: at most 1,000 are read" in large["t"]["damaged"]
    assert "'j' has 101 bytes: at most 100 are read" in large["j"]["damaged"]
    assert "at most 1,000 are read" in large["b"]["damaged"] and large["label"]["value"] == 1
    assert not any(each.get("damaged") for each in small.values())


@pytest.mark.parametrize("name", list(EVERY_FIELD))
def test_an_original_is_the_stored_value(tmp_path: Path, name: str) -> None:
    schema = shardio.Schema({name: EVERY_FIELD[name]})
    value = every_field_sample(7)[name]
    with shardio.open(_write(tmp_path / "set", schema, [{name: value}])) as dataset:
        found = original(dataset, 0, name)
    suffix = found.file_name.rpartition(".")[2]
    assert found.file_name.startswith(f"{name}-0.")
    if suffix == "npy":
        expected = value if name != "bits" else (value.astype("u4") << 16).view("f4")
        assert np.array_equal(np.load(io.BytesIO(found.data)), expected)
    elif suffix == "npz":
        with np.load(io.BytesIO(found.data)) as arrays:
            assert all(map(np.array_equal, arrays.values(), value))
            assert len(arrays) == len(value)
    elif suffix == "json":
        assert json.loads(found.data) == value
    elif suffix == "bin":
        assert found.data == value
    else:
        assert suffix == "txt" and found.data.decode().rstrip("\n") == str(value).rstrip("\n")


def test_originals_of_media_are_files(tmp_path: Path) -> None:
    schema = shardio.Schema({"a/b": Image(), "video": Video(), "sound": Audio()})
    source = str(write_flash(tmp_path / "a.mkv", codec="flac"))
    video, picture = demux(source), to_png(quadrants(8, 8))
    sample = {"a/b": picture, "video": video, "sound": sound_of(source)}
    with shardio.open(_write(tmp_path / "set", schema, [sample])) as dataset:
        image, movie, sound = (original(dataset, 0, name) for name in schema)
        with pytest.raises(InvalidArgument, match="no field 'x'"):
            original(dataset, 0, "x")
    assert image == (picture, "a_b-0.png")
    assert movie.file_name == "video-0.mp4" and bytes(demux(movie.data).data[:]) == video.data
    assert sound.file_name == "sound-0.flac" and sound.data.startswith(b"fLaC")


def test_a_value_that_is_too_large_to_download_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(originals, "MAX_ORIGINAL", 100)
    schema = shardio.Schema({"a": Array("uint8", (200,)), "m": Array("uint8", (3,), optional=True)})
    path = _write(tmp_path / "set", schema, [{"a": np.zeros(200, np.uint8), "m": None}])
    with shardio.open(path) as dataset:
        with pytest.raises(InvalidArgument, match=r"200 bytes; up to 100 can be downloaded: shard"):
            original(dataset, 0, "a")
        with pytest.raises(InvalidArgument, match="sample 0: the field 'm' is missing"):
            original(dataset, 0, "m")


def test_a_long_video_is_downloaded_as_it_is_played(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(originals, "_MAX_MUXED", 100)
    with shardio.open(_videos(tmp_path, store="packets")) as dataset:
        found = _fields(describe_sample(dataset, 0))
        with pytest.raises(InvalidArgument, match="up to 100 can be downloaded: shardio export"):
            original(dataset, 0, "frames")
    assert found["frames"]["original"] == "/media/0/frames"
    assert found["audio"]["original"] == "/media/0/audio"


def test_kinds_are_known_from_the_schema_alone() -> None:
    arrays = {
        "tokens": (Array("uint16", (None,)), "tokens"),
        "text.input_ids": (Array("int32", (512,)), "tokens"),
        "tokens_mask": (Array("bool", (None,)), "array"),
        "clip": (Array("uint8", (16, 112, 112, 3)), "video"),
        "picture": (Array("uint8", (3, 64, 64)), "image"),
        "depth": (Array("float32", (64, 64)), "array"),
        "state": (Array("float32", (7,)), "array"),
        "x": (Array("float32"), "scalar"),
    }
    assert {name: kind_of(name, field) for name, (field, _) in arrays.items()} == {
        name: kind for name, (_, kind) in arrays.items()
    }
    assert thumbnail_fields(MEDIA_FIELDS) == ["video", "image", "sound"]


def test_a_row_that_does_not_exist_is_an_error(tmp_path: Path) -> None:
    path = _write(tmp_path / "set", EVERY_FIELD, [every_field_sample(0)])
    with shardio.open(path) as dataset, pytest.raises(InvalidArgument, match="no sample 1; the"):
        describe_sample(dataset, 1)
