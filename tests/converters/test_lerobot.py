"""LeRobot: a sample is an episode, with what LeRobot reads of it and each camera's own frames."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shardio
from shardio import Array, EncodedStream, InvalidArgument, Json, Text, Video
from shardio.media import ClipDecoder, demux, times_of
from tests.converters.helpers import convert as convert_folder
from tests.converters.helpers import stored

pa = pytest.importorskip("pyarrow", reason="pyarrow is not installed")
pq = pytest.importorskip("pyarrow.parquet", reason="pyarrow is not installed")
pytestmark = pytest.mark.usefixtures("quick_disk")

MADE = Path(__file__).parent / "made" / "lerobot"
convert = partial(convert_folder, kind="lerobot")
LENGTHS = (7, 12, 9)
FPS = 10
DATA = "data/chunk-000/file-000.parquet"
EPISODES = "meta/episodes/chunk-000/file-000.parquet"
CAMERAS = ("observation.images.front", "observation.images.wrist")
VIDEO = "videos/observation.images.front/chunk-000/file-000.mp4"


@pytest.fixture
def arm(tmp_path: Path) -> Path:
    """Return the data set that LeRobot made."""
    shutil.copytree(MADE / "arm", tmp_path / "arm")
    return tmp_path / "arm"


def change_table(path: Path, change: Callable[[Any], Any]) -> None:
    pq.write_table(change(pq.read_table(path)), path)


def with_column(table: Any, name: str, values: Any) -> Any:
    position = table.schema.get_field_index(name)
    return table.set_column(position, table.schema.field(position), pa.array(values))


def change_info(arm: Path, **said: Any) -> None:
    path = arm / "meta" / "info.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | said))


def pictures(stream: EncodedStream) -> np.ndarray:
    out = np.empty((stream.n_frames, 64, 64, 3), np.uint8)
    with ClipDecoder() as decoder:
        decoder.decode(stream, range(stream.n_frames), out)
    return out


def seen(episode: int, length: int) -> list[np.ndarray]:
    """Return a camera frame: a grey that rises by 15 a frame."""
    return [np.full((64, 64, 3), 20 + 15 * n + 5 * episode, np.uint8) for n in range(length)]


def check_samples(out: Path) -> None:
    known = json.loads((MADE / "values.json").read_text())
    tasks = {"0": "pick up the cube", "1": "put it down \u2014 l\u00e4ngs"}
    with shardio.open(out) as dataset:
        first = 0
        for episode, (sample, length) in enumerate(zip(dataset, LENGTHS, strict=True)):
            for name, values in known.items():
                expected = values[first : first + length]
                expected = episode if name == "episode_index" else expected
                assert np.array(expected, sample[name].dtype).tolist() == sample[name].tolist()
            said = {str(n): tasks[str(n)] for n in known["task_index"][first : first + length]}
            assert (sample["task"], sample["tasks"]) == (tasks["0"], said)
            assert "label" not in sample
            for camera in CAMERAS:
                video = sample[camera]
                assert video.n_frames == len(video.packets) == length
                seconds = times_of(video) * float(video.time_base)
                np.testing.assert_allclose(seconds, sample["timestamp"], atol=1e-6)
                grey = pictures(video)[:, 48:].mean((1, 2, 3))
                expected = [one.mean() for one in seen(episode, length)]
                np.testing.assert_allclose(grey, expected, atol=4)
            first += length


def test_episodes_are_what_lerobot_reads(tmp_path: Path) -> None:
    report = convert(MADE / "arm", tmp_path / "out")
    assert (report.n_samples, report.classes) == (3, ())
    assert report.counts == {"converted": 1, "part": 6}
    found = {one.name: one for one in report.inputs}
    assert found[VIDEO].reason == found[EPISODES].reason == f"of {DATA}"
    assert found["meta/info.json"].reason == "describes the episodes of its data set"
    with shardio.open(tmp_path / "out") as dataset:
        schema = dataset.schema
    assert schema["observation.state"] == Array("float32", (None, 3))
    assert schema["observation.force"] == Array("float64", (None, 2, 3))
    assert schema["next.done"] == Array("bool", (None,))
    assert (schema["episode_index"], schema["task"]) == (Array("int64"), Text())
    assert (schema["tasks"], schema[CAMERAS[0]]) == (Json(), Video())
    check_samples(tmp_path / "out")


def test_the_frames_of_an_episode_are_those_of_the_file(tmp_path: Path) -> None:
    convert(MADE / "arm", tmp_path / "out")
    whole = pictures(demux(str(MADE / "arm" / VIDEO)))
    with shardio.open(tmp_path / "out") as dataset:
        episodes = [pictures(sample[CAMERAS[0]]) for sample in dataset]
    np.testing.assert_array_equal(np.concatenate(episodes), whole)


def test_data_sets_are_guessed_and_several_go_together(arm: Path, tmp_path: Path) -> None:
    shutil.copytree(arm, tmp_path / "in" / "one")
    shutil.copytree(arm, tmp_path / "in" / "deep" / "two")
    (tmp_path / "in" / "README.md").write_text("two arms")
    report = convert(tmp_path / "in", tmp_path / "out", kind=None)
    assert (report.kind, report.n_samples, report.classes) == ("lerobot", 6, ())
    assert report.counts == {"converted": 2, "part": 12, "unsupported": 1}
    with shardio.open(tmp_path / "out") as dataset:
        assert [one["source"] for one in dataset] == [f"deep/two/{DATA}"] * 3 + [f"one/{DATA}"] * 3


def test_some_features_are_enough(arm: Path, tmp_path: Path) -> None:
    shutil.rmtree(arm / "videos" / CAMERAS[1])
    report = convert(arm, tmp_path / "out", columns=["action", CAMERAS[0]])
    assert report.n_samples == 3
    with shardio.open(tmp_path / "out") as dataset:
        names = {*dataset.schema}
    assert names == {"action", CAMERAS[0], "source", "task", "tasks", "timestamp"} | {
        f"{what}_index" for what in ("frame", "episode", "task")
    } | {"index"}
    with pytest.raises(InvalidArgument, match="feature 'arms' is missing"):
        convert(arm, tmp_path / "no", columns=["arms"])


def test_a_feature_named_as_ours_takes_its_place(arm: Path, tmp_path: Path) -> None:
    features = json.loads((arm / "meta" / "info.json").read_text())["features"]
    change_info(arm, features={**features, "label": {"dtype": "int64", "shape": [1]}})
    numbers = pa.array(range(28))
    change_table(arm / DATA, lambda table: table.append_column("label", numbers))
    convert(arm, tmp_path / "out", columns=["label"])
    with shardio.open(tmp_path / "out") as dataset:
        assert [n for sample in dataset for n in sample["label"].tolist()] == [*range(28)]


def test_an_append_takes_new_files_and_refuses_other_features(arm: Path, tmp_path: Path) -> None:
    convert(arm, tmp_path / "out")
    change_info(arm, total_tasks=3)
    shutil.copytree(MADE / "arm", arm / "more")
    report = convert(arm, tmp_path / "out", append=True)
    assert {one.name: one.outcome for one in report.inputs}[DATA] == "duplicate"
    assert (report.n_samples_before, report.n_samples) == (3, 3)
    shutil.copytree(MADE / "arm", arm / "other")
    features = json.loads((arm / "meta" / "info.json").read_text())["features"]
    features["action"]["shape"] = [3]
    change_info(arm / "other", features=features)
    (broken,) = convert(arm, tmp_path / "out", append=True).broken
    assert broken.name == f"other/{DATA}"
    assert "'action': expected float32[*,2], found float32[*,3]" in broken.reason


Harm = Callable[[Path], None]


def rows(change: Callable[[Any], Any], name: str = DATA) -> Harm:
    return lambda arm: change_table(arm / name, change)


def column(name: str, values: Any, table: str = DATA) -> Harm:
    return rows(lambda known: with_column(known, name, values), table)


def show_too_many_frames(arm: Path) -> None:
    key = f"videos/{CAMERAS[0]}"
    column(f"{key}/to_timestamp", [0.7, 1.9, 3.1], EPISODES)(arm)
    column(f"{key}/from_timestamp", [0.0, 0.7, 2.0], EPISODES)(arm)


BETWEEN_FRAMES = np.concatenate([np.arange(n) / 10 for n in LENGTHS])
BETWEEN_FRAMES[20] += 0.07


@pytest.mark.parametrize(
    ("harm", "reason"),
    [
        (rows(lambda table: table.slice(0, 24)), "episode 2: expected 9 frames, found 5"),
        (
            column("frame_index", [*range(7), *range(12), 0, 1, 3, 2, *range(4, 9)]),
            "episode 2: row 21: expected frame 2, found 3",
        ),
        (column("task_index", [0] * 19 + [7] * 9), "episode 2: task 7 is not one of the 2 tasks"),
        (rows(lambda table: table.slice(0, 19)), "episode 2: expected 9 frames, found none"),
        (
            column(f"videos/{CAMERAS[0]}/file_index", [0, 0, 1], EPISODES),
            f"episode 2: {VIDEO.replace('-000.mp4', '-001.mp4')} is missing",
        ),
        (show_too_many_frames, f"episode 2: {VIDEO}: expected 9 frames from second 2 on, found 8"),
        (
            column("timestamp", BETWEEN_FRAMES.astype("float32")),
            f"episode 2: {VIDEO}: expected frame 1 at second 0.17 of the episode, found it at 0.1",
        ),
    ],
)
def test_a_broken_episode_is_named(harm: Harm, reason: str, arm: Path, tmp_path: Path) -> None:
    harm(arm)
    report = convert(arm, tmp_path / "out", keep_partial=True)
    (broken,) = report.broken
    assert (broken.name, broken.reason) == (DATA, reason)
    assert [int(sample["episode_index"]) for sample in stored(tmp_path / "out")] == [0, 1]


def test_an_episode_that_comes_again_is_refused(arm: Path, tmp_path: Path) -> None:
    change_table(arm / DATA, lambda table: pa.concat_tables([table, table.slice(0, 7)]))
    (broken,) = convert(arm, tmp_path / "out").broken
    assert broken.reason.startswith("episode 0: unexpected at row 28: the episode has earlier rows")


def cut(name: str) -> Harm:
    def harm(arm: Path) -> None:
        (arm / name).write_bytes((arm / name).read_bytes()[:-100])

    return harm


def new_column(name: str, values: Any) -> Harm:
    return rows(lambda table: table.set_column(table.column_names.index(name), name, values))


@pytest.mark.parametrize(
    ("harm", "reason"),
    [
        (
            new_column("next.reward", pa.array([None, *range(27)], pa.float32())),
            "column 'next.reward', row 0: found null, expected a value",
        ),
        (
            new_column("action", pa.array([[1, 2]] * 27 + [[1]], pa.list_(pa.float32()))),
            "column 'action', rows 19 to 27: expected shape [2], found [1]",
        ),
        (cut(VIDEO), f"{VIDEO}: "),
        (cut(DATA), "damaged"),
        (
            rows(lambda table: table.append_column("more", pa.array(range(28)))),
            "column 'more': expected only the features of the data set",
        ),
        (
            new_column("next.reward", pa.array(np.zeros(28))),
            "column 'next.reward': expected float32, found float64",
        ),
    ],
)
def test_a_damaged_file_is_named(harm: Harm, reason: str, arm: Path, tmp_path: Path) -> None:
    harm(arm)
    (broken,) = convert(arm, tmp_path / "out").broken
    assert broken.name == DATA
    assert reason in broken.reason and str(tmp_path) not in broken.reason


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        ({"codebase_version": "v2.1"}, "found 'v2.1': convert it with LeRobot: python -m lerobot."),
        ({"fps": 0}, "fps: expected up to 1000, found 0"),
        ({"features": 3}, "expected an object with features"),
        ({"data_path": "../arm/" + DATA}, "is not a path below the folder of the dataset"),
        ({"video_path": "/etc/{video_key}"}, "is not a path below the folder of the dataset"),
        ({"data_path": "data/{file_index:0999999999d}"}, "file_index, with up to 9 digits"),
        ({"data_path": "data/{file_index.__class__}"}, "file_index, with up to 9 digits"),
        ({"data_path": "data/{secret}"}, "found 'secret', expected chunk_index, file_index"),
        ({"data_path": "data/{file_index"}, "'data/{file_index': expected '}' before end"),
        ({"total_episodes": 5}, "expected 5 episodes in meta/, found 3"),
        ({"data_path": "data/gone"}, "data/gone, which has 3 of the episodes, is missing"),
    ],
)
def test_descriptions_checked(said: dict[str, Any], reason: str, arm: Path, tmp_path: Path) -> None:
    shutil.copytree(arm, tmp_path / "in" / "fine")
    shutil.copytree(arm, tmp_path / "in" / "odd")
    change_info(tmp_path / "in" / "odd", **said)
    report = convert(tmp_path / "in", tmp_path / "out", columns=["action"])
    assert report.n_samples in (3, 6)
    found = {one.name: one for one in report.broken}
    assert reason in found["odd/meta/info.json"].reason
    assert not any(name.startswith("fine") for name in found)


def test_a_data_set_without_an_episode_says_so(arm: Path, tmp_path: Path) -> None:
    change_table(arm / EPISODES, lambda table: table.slice(0, 0))
    with pytest.raises(InvalidArgument, match="meta/episodes: the tables list no episode"):
        convert(arm, tmp_path / "out")


def test_tasks_must_have_texts_and_numbers_of_their_own(arm: Path, tmp_path: Path) -> None:
    tasks = arm / "meta" / "tasks.parquet"
    change_table(tasks, lambda table: pa.concat_tables([table, table.slice(0, 1)]))
    with pytest.raises(InvalidArgument, match="tasks.parquet: two tasks have the same number"):
        convert(arm, tmp_path / "out")
    change_table(tasks, lambda table: table.select(["task_index"]))
    with pytest.raises(InvalidArgument, match="column 'task' is missing, found task_index"):
        convert(arm, tmp_path / "out")


def test_pictures_in_rows_say_the_way_out(arm: Path, tmp_path: Path) -> None:
    features = json.loads((arm / "meta" / "info.json").read_text())["features"]
    features["look"] = {"dtype": "image", "shape": [2, 2, 3], "names": None}
    change_info(arm, features=features)
    with pytest.raises(InvalidArgument, match=r"'look': found an image per row, .* \(columns\)"):
        convert(arm, tmp_path / "out")


def test_what_lies_in_no_data_set_is_refused(arm: Path, tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match=r"no LeRobot data set, with its meta/info\.json"):
        convert(arm / DATA, tmp_path / "out")
    wrong: list[dict[str, Any]] = [{"columns": []}, {"check": 1}, {"fields": {"a": "none"}}]
    for options in wrong:
        with pytest.raises(InvalidArgument) as caught:
            convert(arm, tmp_path / "out", **options)
        ((name, value),) = options.items()
        assert ("field 'a': found 'none'" if name == "fields" else name) in str(caught.value)
    assert not (tmp_path / "out").exists()
