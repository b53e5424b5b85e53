"""Arrays and sound are reduced to curves and heat maps, and read only as far as shown."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image as Pillow

import shardio
from shardio import Array, Audio, InvalidArgument, MediaError, Text, Video
from shardio.media import demux, sound_of
from shardio_tools.view import series as series_module
from shardio_tools.view import stored
from shardio_tools.view.mp4 import open_media
from shardio_tools.view.series import heatmap, series
from tests.media_made import scene, write_flash, write_sound, write_video


def _open(path: Path, fields: dict[str, Any], sample: dict[str, Any]) -> shardio.ShardDataset:
    with shardio.DatasetWriter(path, shardio.Schema(fields)) as writer:
        writer.append(sample)
    return shardio.open(path)


def _one(path: Path, field: Any, value: Any) -> shardio.ShardDataset:
    return _open(path, {"x": field}, {"x": value})


@pytest.mark.parametrize("dtype", ["float32", "float64", "int8", "uint64", "bool", "float16"])
@pytest.mark.parametrize("points", [1, 7, 100, 4000])
def test_each_point_has_the_least_and_the_greatest_of_its_values(
    tmp_path: Path, dtype: str, points: int
) -> None:
    values = (np.random.default_rng(0).random((100, 2, 3)) * 100).astype(dtype)
    with _one(tmp_path / "set", Array(dtype, (None, 2, 3)), values) as dataset:
        found = series(dataset, 0, "x", points)
    assert (found["n"], found["times"], found["note"]) == (100, None, None)
    assert [each["name"] for each in found["columns"]] == ["0,0", "0,1", "0,2", "1,0", "1,1", "1,2"]
    parts = np.array_split(values.reshape(100, 6).astype(float), min(points, 100))
    for i, column in enumerate(found["columns"]):
        assert len(column["min"]) == min(points, 100)
        if 100 % min(points, 100) == 0:
            assert column["min"] == [part[:, i].min() for part in parts]
            assert column["max"] == [part[:, i].max() for part in parts]
        assert min(column["min"]) == values.reshape(100, 6)[:, i].min()
        assert max(column["max"]) == values.reshape(100, 6)[:, i].max()


def test_numbers_that_are_not_finite_leave_gaps(tmp_path: Path) -> None:
    values = np.array([1, np.nan, np.nan, np.nan, np.inf, 3], np.float32)
    with _one(tmp_path / "set", Array("float32", (6,)), values) as dataset:
        (column,) = series(dataset, 0, "x", 3)["columns"]
        assert series(dataset, 0, "x", 6)["columns"][0]["min"] == [1, None, None, None, None, 3]
    assert (column["min"], column["max"]) == ([1, None, 3], [1, None, 3])


def test_bfloat16_is_shown_as_numbers(tmp_path: Path) -> None:
    bits = (np.array([1.0, -2.0, 0.5], np.float32).view(np.uint32) >> 16).astype(np.uint16)
    with _one(tmp_path / "set", Array("bfloat16", (3,)), bits) as dataset:
        assert series(dataset, 0, "x", 3)["columns"][0]["min"] == [1.0, -2.0, 0.5]


@pytest.mark.parametrize("shape", [(None,), (20_000,)])
def test_of_a_large_array_only_parts_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shape: tuple[int | None]
) -> None:
    values = np.arange(20_000, dtype=np.float32)
    monkeypatch.setattr(stored, "MAX_READ_BYTES", 4_000)
    monkeypatch.setattr(series_module, "_MAX_READ", 4_000)
    read = []
    part = shardio.ShardReader.array_part

    def counted(self: Any, name: str, row: int, start: int, stop: int) -> Any:
        read.append(stop - start)
        return part(self, name, row, start, stop)

    monkeypatch.setattr(shardio.ShardReader, "array_part", counted)
    with _one(tmp_path / "set", Array("float32", shape), values) as dataset:
        found = series(dataset, 0, "x", 100)
    assert read == [10] * 100
    (column,) = found["columns"]
    assert column["min"] == list(range(0, 20_000, 200))
    assert column["max"] == [each + 9 for each in range(0, 20_000, 200)]
    assert found["note"] == "of each 200 values, the first 10 are shown"


def test_times_are_those_of_a_field_of_times_or_of_a_video(tmp_path: Path) -> None:
    video = demux(str(write_video(tmp_path / "a.mp4", scene(10), rate=20)))
    fields = {
        "timestamp": Array("float64", (8,)),
        "arm.time": Array("float32", (8,)),
        "arm.pose": Array("float32", (8, 2)),
        "leg.time": Array("float64", (8,)),
        "leg.pose": Array("float32", (8,)),
        "action": Array("float32", (10, 2)),
        "other": Array("float32", (7,)),
        "video": Video(),
    }
    arrays = {name: field.array for name, field in fields.items() if field.array is not None}
    sample = {
        name: np.zeros([n or 0 for n in array.shape], array.dtype) for name, array in arrays.items()
    }
    sample["timestamp"] = 5 + np.arange(8) / 50
    sample["arm.time"] = np.arange(8, dtype=np.float32) / 4
    sample["leg.time"] = np.array([0.0, 1, 2, 3, 4, 5, 6, 99])
    with _open(tmp_path / "set", fields, {**sample, "video": video}) as dataset:
        found = {name: series(dataset, 0, name, 9)["times"] for name in arrays}
    assert found["arm.pose"] == [0.0, 0.25]
    assert found["leg.pose"] == pytest.approx([5.0, 0.02])
    assert found["action"] == [0.0, 0.05] and found["other"] is None


@pytest.mark.parametrize("seconds_at_once", [1, 20])
def test_a_waveform_shows_each_channel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seconds_at_once: int
) -> None:
    monkeypatch.setattr(series_module, "_SECONDS_AT_ONCE", seconds_at_once)
    source = write_flash(tmp_path / "a.mkv", codec="flac", layouts=("stereo",))
    sound = sound_of(str(source))
    with _one(tmp_path / "set", Audio(), sound) as dataset:
        found = series(dataset, 0, "x", 300)
    left, right = found["columns"]
    assert (left["name"], right["name"]) == ("left", "right")
    assert (found["n"], found["times"]) == (32_000, [0.0, 1 / 16_000])
    assert len(left["max"]) == 300 and np.argmax(left["max"]) == 150
    assert max(left["max"]) == pytest.approx(0.9, abs=0.001)
    assert max(right["max"]) == pytest.approx(0.45, abs=0.001)
    assert min(left["min"]) == pytest.approx(-0.05, abs=0.001)


def test_of_a_long_sound_the_beginning_is_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(series_module, "_MAX_SECONDS", 1)
    sound = sound_of(str(write_flash(tmp_path / "a.mkv", codec="flac")))
    with _one(tmp_path / "set", Audio(), sound) as dataset:
        found = series(dataset, 0, "x", 10)
    assert found["n"] == 16_000 and found["note"] == "the first 0 minutes"


def _levels(data: bytes) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
    with Pillow.open(io.BytesIO(data)) as picture:
        return np.asarray(picture.convert("L")).astype(np.float64)


def test_a_heat_map_is_light_where_numbers_are_large(tmp_path: Path) -> None:
    values = np.add.outer(np.arange(20.0), np.arange(30.0)).astype(np.float32)
    values[3, 4] = np.nan
    with _one(tmp_path / "set", Array("float32", (20, 30)), values) as dataset:
        found = heatmap(dataset, 0, "x")
    assert (found.low, found.high, found.note) == (0, 48, None)
    shown = _levels(found.data)
    assert shown.shape == (160, 240)
    assert (np.diff(shown[4::8, 4::8][10:], axis=1) > 0).all()


def test_a_pixel_of_a_large_matrix_is_the_mean_of_its_numbers(tmp_path: Path) -> None:
    values = np.zeros((1024, 2048), np.int32)
    values[:, 1024:] = 10
    values[::2, 1024:] = 30
    with _one(tmp_path / "set", Array("int32", (None, 2048)), values) as dataset:
        found = heatmap(dataset, 0, "x")
    assert (found.low, found.high) == (0, 20)
    assert _levels(found.data).shape == (512, 512)


def test_of_a_matrix_of_many_rows_the_first_are_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stored, "MAX_READ_BYTES", 4_000)
    monkeypatch.setattr(series_module, "_MAX_READ", 4_000)
    with _one(tmp_path / "set", Array("uint8", (None, 100)), np.ones((90, 100), np.uint8)) as data:
        assert heatmap(data, 0, "x").note == "the first 40 of 90 rows"
    wide = np.ones((2, 4_001), np.uint8)
    with _one(tmp_path / "wide", Array("uint8", (2, 4_001)), wide) as data:
        with pytest.raises(InvalidArgument, match="a row of the field 'x' has 4,001 bytes"):
            heatmap(data, 0, "x")


def test_a_matrix_without_a_number_is_dark(tmp_path: Path) -> None:
    values = np.full((4, 5), np.nan, np.float32)
    with _one(tmp_path / "set", Array("float32", (4, 5)), values) as dataset:
        found = heatmap(dataset, 0, "x")
    assert (found.low, found.high) == (0, 0) and np.ptp(_levels(found.data)) == 0


def test_values_without_a_curve_are_errors(tmp_path: Path) -> None:
    fields = {
        "one": Array("float32", (1,)),
        "wide": Array("float32", (5, 65)),
        "scalar": Array("float32"),
        "note": Text(),
        "sound": Audio(optional=True),
        "maybe": Array("float32", (9,), optional=True),
    }
    sample = {
        "one": np.zeros(1, np.float32),
        "wide": np.zeros((5, 65), np.float32),
        "scalar": 1.0,
        "note": "",
        "sound": None,
        "maybe": None,
    }
    expected = {
        "one": r"of shape \(1,\) has no curve",
        "wide": r"of shape \(5, 65\) has no curve",
        "scalar": "has no curve",
        "note": "the field 'note' has no array",
        "sound": "the field 'sound' is missing",
        "maybe": "the field 'maybe' is missing",
    }
    with _open(tmp_path / "set", fields, sample) as dataset:
        for name, text in expected.items():
            with pytest.raises(InvalidArgument, match=text):
                series(dataset, 0, name, 10)
        for name in ("one", "scalar", "maybe"):
            with pytest.raises(InvalidArgument, match="is no matrix|is missing"):
                heatmap(dataset, 0, name)
        for points in (0, 4001):
            with pytest.raises(InvalidArgument, match="points must be 1 to 4,000"):
                series(dataset, 0, "one", points)


def test_a_sound_whose_table_is_damaged_is_an_error(tmp_path: Path) -> None:
    sound = sound_of(str(write_sound(tmp_path / "a.wav")))
    assert sound is not None
    parameters = {**sound.parameters, "rate": 1 << 40}
    for i, (changed, expected) in enumerate(
        (
            (replace(sound, width=1 << 31), "2,147,483,648 channels; expected at most"),
            (replace(sound, width=2), "expected 2 channels, as in its table; found 1"),
            (replace(sound, parameters=parameters), "invalid audio format: 1099511627776 Hz"),
        )
    ):
        with _one(tmp_path / f"set{i}", Audio(), changed) as dataset:
            with pytest.raises(MediaError, match=expected):
                series(dataset, 0, "x", 10)
            with pytest.raises(MediaError, match=expected):
                media = open_media(dataset, 0, "x")
                media.read(0, media.size)


def test_a_sound_without_a_sample_is_an_error(tmp_path: Path) -> None:
    sound = sound_of(str(write_sound(tmp_path / "a.wav")))
    assert sound is not None
    empty = replace(sound, packets=sound.packets[:0], data=b"", n_frames=0, duration=0)
    with _one(tmp_path / "set", Audio(), empty) as dataset:
        with pytest.raises(InvalidArgument, match="the sound has no sample"):
            series(dataset, 0, "x", 10)
