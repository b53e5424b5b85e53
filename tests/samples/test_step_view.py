"""Windows over the time steps of recordings: values, frames, masks, and what is refused."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shardio
from shardio import Array, InvalidArgument, Schema, ShardLoader, Text, Video
from shardio.errors import MediaError
from shardio.media import demux
from shardio.samples import step_view
from shardio.samples.open_dataset import OpenDataset
from shardio.samples.step_view import ArrayCache, StepSource
from tests.loading import write_dataset
from tests.media_made import scene, write_video

pytestmark = pytest.mark.usefixtures("quick_disk")

SCHEMA = Schema(
    {
        "camera": Video(),
        "wrist": Video(),
        "action": Array("float32", (None, 2)),
        "state": Array("int64", (None,), codec="zstd"),
        "timestamp": Array("float32", (None,)),
        "ragged": Array("float32", (None, None)),
        "task": Text(),
        "weight": Array("float32"),
    }
)
LENGTHS = (6, 1, 9)
RATE = 10


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    made = tmp_path_factory.mktemp("steps")
    samples = []
    for i, n in enumerate(LENGTHS):
        videos = {
            "camera": write_video(made / f"c{i}.mp4", scene(n, 48, 32), rate=RATE),
            "wrist": write_video(made / f"w{i}.mp4", scene(2 * n, 32, 16), rate=2 * RATE),
        }
        sample: dict[str, Any] = {name: path.read_bytes() for name, path in videos.items()}
        sample["action"] = np.arange(2 * n, dtype=np.float32).reshape(n, 2) + 100 * i
        sample["state"] = np.arange(n) + 1000 * i
        sample["timestamp"] = (np.arange(n) / RATE).astype(np.float32)
        sample["ragged"] = np.zeros((n, i), np.float32)
        samples.append(sample | {"task": f"task {i}", "weight": i})
    return write_dataset(made / "set", len(LENGTHS), 2, SCHEMA, samples)


@pytest.fixture
def dataset(folder: str) -> Iterator[OpenDataset]:
    with shardio.open(folder) as opened:
        yield opened


def expected(values: Any, step: int, offsets: list[int]) -> tuple[Any, list[bool]]:
    wanted = [step + offset for offset in offsets]
    inside = [min(max(each, 0), len(values) - 1) for each in wanted]
    return np.asarray(values)[inside], [i == j for i, j in zip(wanted, inside, strict=True)]


@pytest.mark.parametrize("unit", [None, 1 / RATE], ids=["steps", "seconds"])
def test_values_of_arrays_at_offsets(dataset: OpenDataset, unit: float | None) -> None:
    offsets = [-3, 0, 2]
    given: Any = offsets if unit is None else [offset * unit for offset in offsets]
    view = dataset.windows({"action": given, "state": np.array(given)})
    assert len(view) == sum(LENGTHS)
    assert list(view[0]) == ["action", "action_mask", "state", "state_mask", "task", "weight"]
    number = 0
    for i, n in enumerate(LENGTHS):
        for step in range(n):
            sample, stored = view[number], dataset[i]
            for name in ("action", "state"):
                values, mask = expected(stored[name], step, offsets)
                assert sample[name].tolist() == values.tolist(), (i, step, name)
                assert sample[f"{name}_mask"].tolist() == mask, (i, step, name)
            assert (sample["task"], sample["weight"]) == (f"task {i}", i)
            number += 1


def test_frames_of_two_cameras_at_a_time(dataset: OpenDataset) -> None:
    view = dataset.windows({"camera": [-0.2, 0.0], "wrist": [0.0, 0.05], "action": range(2)})
    clips = {
        name: {i: dataset.select([i]).clips(field=name, frames=1, step=1) for i in range(3)}
        for name in ("camera", "wrist")
    }
    for number, (i, step) in enumerate(
        (i, step) for i, n in enumerate(LENGTHS) for step in range(n)
    ):
        sample = view[number]
        for name, frames in (("camera", [step - 2, step]), ("wrist", [2 * step, 2 * step + 1])):
            last = 2 * (LENGTHS[i] - 1) if name == "wrist" else LENGTHS[i] - 1
            for found, frame in zip(sample[name], frames, strict=True):
                shown = clips[name][i][min(max(frame, 0), last)][name][0]
                assert (found == shown).all(), (i, step, name, frame)
        assert sample["camera_mask"].tolist() == [step >= 2, True]
    assert view.schema["camera"] == Array("uint8", (2, 32, 48, 3))
    assert view.schema["wrist_mask"] == Array("bool", (2,))


@pytest.mark.process
@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_loader_delivers_the_samples_of_the_view(folder: str, num_workers: int) -> None:
    offsets = {"camera": [-1, 0], "action": [0, 1], "state": [0]}
    with shardio.open(folder) as dataset:
        view = dataset.windows(offsets, size=(16, 24))
        loader = ShardLoader(view, 4, shuffle=True, num_workers=num_workers, output="numpy")
        with loader:
            seen = []
            for batch in loader:
                seen += batch.indices.tolist()
                for k, index in enumerate(batch.indices.tolist()):
                    for name, value in view[index].items():
                        assert np.array_equal(batch[name][k], value), (index, name)
    assert sorted(seen) == list(range(sum(LENGTHS)))


def test_steps_without_times_are_frames(dataset: OpenDataset, tmp_path: Path) -> None:
    schema = Schema({name: SCHEMA[name] for name in ("camera", "action")})
    made = [{name: dataset[i][name] for name in schema} for i in range(3)]
    path = write_dataset(tmp_path / "set", 3, 3, schema, made)
    with shardio.open(path) as opened:
        view = opened.windows({"camera": [0], "action": [0]})
        frames = opened.clips(frames=1, step=1)
        assert len(view) == len(frames) == sum(LENGTHS)
        assert all((view[i]["camera"] == frames[i]["camera"]).all() for i in range(len(view)))
        timed = opened.windows({"camera": [0.1], "action": [0.1]}, fps=RATE)
        assert (timed[0]["action"] == view[1]["action"]).all()
        assert (timed[0]["camera"] == view[1]["camera"]).all()
        with pytest.raises(InvalidArgument, match="'action' are seconds, and no field 'timestamp'"):
            opened.windows({"action": [0.1]})


@pytest.mark.parametrize(
    ("offsets", "options", "message"),
    [
        ({}, {}, "takes a dict"),
        ([0], {}, "takes a dict"),
        ({"task": [0]}, {}, "'task' must be a video, or an array"),
        ({"weight": [0]}, {}, "'weight' must be"),
        ({"ragged": [0]}, {}, "'ragged' must be"),
        ({"nope": [0]}, {}, "'nope' must be .* found None; fields: camera, wrist"),
        ({"action": []}, {}, "must be a list of whole numbers"),
        ({"action": 0}, {}, "must be a list"),
        ({"action": "01"}, {}, "must be a list"),
        ({"action": [True]}, {}, "must be a list"),
        ({"action": [[0]]}, {}, "must be a list"),
        ({"action": [[0], [1, 2]]}, {}, "must be a list"),
        ({"action": range(10**12)}, {}, "must be a list"),
        ({"action": [2**63 - 1]}, {}, "must be a list"),
        ({"action": np.array([2**63], np.uint64)}, {}, "must be a list"),
        ({"action": [0.0, float("nan")]}, {}, "must be a list"),
        ({"action": [0.0]}, {"times": "state"}, "times must be a field of floats"),
        ({"action": [0.0]}, {"times": Path("timestamp")}, "times must be a field of floats"),
        ({"action": [0.0]}, {"times": ["timestamp"]}, "times must be a field of floats"),
        ({"action": [0.0]}, {"times": 3}, "times must be a field of floats"),
        ({"action": [0.0]}, {"times": "timestamp", "fps": 10}, "without fps="),
        ({"action": [0.0]}, {"fps": -1}, "fps must be"),
        ({"camera": [0]}, {"size": 16}, "size must be"),
    ],
)
def test_refused_options(dataset: OpenDataset, offsets: Any, options: Any, message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        dataset.windows(offsets, **options)


def rewritten(dataset: OpenDataset, path: Path, **changed: Any) -> str:
    sample = {name: dataset[0][name] for name in SCHEMA} | changed
    schema = Schema({name: SCHEMA.get(name, Array("bool", (None,))) for name in sample})
    return write_dataset(path, 1, 1, schema, [sample])


def test_refused_datasets(dataset: OpenDataset, tmp_path: Path) -> None:
    cases: list[tuple[dict[str, Any], dict[str, Any], str]] = [
        (
            {"state": np.arange(5)},
            {"action": [0], "state": [0]},
            "'action' has 6 steps, 'state' has 5",
        ),
        ({"action_mask": np.zeros(6, bool)}, {"action": [0]}, "add the field 'action_mask'"),
    ]
    for i, (changed, offsets, message) in enumerate(cases):
        with shardio.open(rewritten(dataset, tmp_path / str(i), **changed)) as opened:
            with pytest.raises(InvalidArgument, match=re.escape(message)):
                len(opened.windows(offsets))


@pytest.fixture
def damaged(dataset: OpenDataset, tmp_path: Path) -> Iterator[OpenDataset]:
    """Write 6 rows of 6 steps, with bad times: 1 not ascending, 3 damaged, 5 infinite."""
    schema = Schema({name: SCHEMA[name] for name in ("camera", "action", "timestamp")})
    times = np.array([np.arange(6) / RATE + row / 1000 for row in range(6)], np.float32)
    times[1, 5] = times[1, 4]
    times[5, 4:] = np.inf
    good = {name: dataset[0][name] for name in schema}
    made = [good | {"timestamp": each} for each in times]
    folder = Path(write_dataset(tmp_path / "damaged", 6, 1, schema, made))
    (shard,) = folder.glob("*.shard")
    content = shard.read_bytes()
    assert content.count(times[3].tobytes()) == 1
    wrong = (times[3] + 1000).tobytes()
    shard.write_bytes(content.replace(times[3].tobytes(), wrong))
    with shardio.open(folder) as opened:
        yield opened


@pytest.mark.parametrize("given", [{"action": [0.0]}, {"camera": [0], "action": [0]}])
def test_damaged_times_only_concern_their_row(damaged: OpenDataset, given: Any) -> None:
    view = damaged.windows(given)
    assert len(view) == 36
    for number in range(36):
        row = number // 6
        if row in (1, 3, 5):
            said = rf"sample {row}: the times of its steps in 'timestamp' are damaged or not asc"
            with pytest.raises(MediaError, match=said):
                view[number]
        else:
            assert view[number]["action"][0, 0] == 2 * (number % 6)
    with ShardLoader(
        view, 36, on_error="skip", max_skips=36, num_workers=0, output="numpy"
    ) as loader:
        (batch,) = loader
    assert {number // 6 for number in batch.indices.tolist()} <= {0, 2, 4}
    assert len(damaged.windows(given, fps=RATE)) == 36


def test_shuffled_steps_read_each_array_once(
    dataset: OpenDataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[tuple[Any, ...]] = []
    load = StepSource._load

    def counted(source: StepSource, shard: int, row: int) -> Any:
        read.append((source.name, shard, row))
        return load(source, shard, row)

    monkeypatch.setattr(StepSource, "_load", counted)
    offsets = {"action": [0], "state": [0, 1]}
    for limit, is_cached in ((1 << 20, True), (0, False)):
        monkeypatch.setattr(step_view, "_MAX_CACHED_BYTES", limit)
        read.clear()
        view = dataset.windows(offsets)
        for number in (0, 15, 1, 14, 2, 13):
            sample, n = view[number], number - (7 if number > 7 else 0)
            stored = dataset[2 if number > 7 else 0]
            assert sample["state"].tolist() == expected(stored["state"], n, [0, 1])[0].tolist()
        assert len(read) == (4 if is_cached else 12)


def test_the_cache_of_arrays_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_view, "_CACHE_BYTES", 100)
    cache, read = ArrayCache(), list[int]()

    def load(key: int) -> Any:
        read.append(key)
        return np.full(10, key, np.int32)

    for key in (0, 1, 2, 0, 0, 3, 2, 3, 0):  # 40 bytes each: two of them fit
        assert cache.get((key,), partial(load, key)).tolist() == [key] * 10
    assert read == [0, 1, 2, 0, 3, 2, 0]


def test_times_that_the_video_does_not_share(dataset: OpenDataset, tmp_path: Path) -> None:
    late = np.arange(6, dtype=np.float32) / RATE + 1000
    with shardio.open(rewritten(dataset, tmp_path / "set", timestamp=late)) as opened:
        view = opened.windows({"camera": [0]})
        with pytest.raises(
            MediaError, match=r"field 'camera', sample 0: no frame is near .* 1000 s"
        ):
            view[0]
        by_number = opened.windows({"camera": [0]}, fps=RATE)
        assert by_number[5]["camera_mask"].tolist() == [True]


def test_fields_of_a_loader(dataset: OpenDataset) -> None:
    view = dataset.windows({"action": [0, 1]})
    with ShardLoader(view, 4, fields=["action", "task"], num_workers=0, output="numpy") as loader:
        assert set(next(iter(loader))) == {"action", "action_mask", "task"}
    with ShardLoader(view, 4, fields=["action", "state"], collate="list", num_workers=0) as loader:
        assert next(iter(loader))["state"][0].tolist() == list(range(6))  # the whole row's
    with pytest.raises(InvalidArgument, match=r"fields leaves out \['action'\]"):
        ShardLoader(view, 4, fields=["task"])
    with pytest.raises(InvalidArgument, match=r"leave \['wrist'\] out of fields"):
        ShardLoader(view, 4, fields=["action", "wrist"])


def test_delta_timestamps_are_refused_with_a_hint(dataset: OpenDataset) -> None:
    given: Any = {"delta_timestamps": {"action": [0.1]}}
    with pytest.raises(TypeError, match="pass the dict as the first argument"):
        dataset.windows(**given)


def test_times_at_irregular_intervals(dataset: OpenDataset, tmp_path: Path) -> None:
    times = np.array([0, 0.1, 0.2, 0.3, 60, 80], np.float32)
    with shardio.open(rewritten(dataset, tmp_path / "set", timestamp=times)) as opened:
        first = opened.windows({"action": [-0.06, -0.04, 40.0, 89.0, 91.0]})[0]
        assert first["action_mask"].tolist() == [False, True, True, True, False]
        assert first["action"][:, 0].tolist() == [0, 0, 8, 10, 10]


def test_a_video_of_one_frame(dataset: OpenDataset, tmp_path: Path) -> None:
    still = write_video(tmp_path / "still.mp4", scene(1, 32, 16), rate=1).read_bytes()
    times = np.linspace(0, 1, 6).astype(np.float32)
    path = rewritten(dataset, tmp_path / "set", camera=still, timestamp=times)
    with shardio.open(path) as opened:
        view = opened.windows({"camera": [0.0, 0.5]})
        assert all((view[i]["camera"] == view[0]["camera"]).all() for i in range(6))
        with pytest.raises(InvalidArgument, match="'camera' need decode=True"):
            ShardLoader(view, 2, decode=False)


def test_a_video_that_is_missing(tmp_path: Path) -> None:
    schema = Schema({"camera": Video(optional=True), "timestamp": Array("float32", (None,))})
    video = demux(write_video(tmp_path / "a.mp4", scene(4, 32, 16), rate=RATE).read_bytes())
    times = np.arange(4, dtype=np.float32) / RATE
    made: list[dict[str, Any]] = [{"camera": each, "timestamp": times} for each in (video, None)]
    with shardio.open(write_dataset(tmp_path / "set", 2, 2, schema, made)) as opened:
        with pytest.raises(
            InvalidArgument, match="sample 1: 'timestamp' has 4 steps, 'camera' has 0"
        ):
            len(opened.windows({"camera": [0]}))
        assert len(opened.select([0]).windows({"camera": [0]})) == 4
