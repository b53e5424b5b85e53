"""`store="auto"`: what a trial stores, how its sizes are scaled, and what a conversion records."""

from __future__ import annotations

import os
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

import shardio
from shardio import Input, InvalidArgument, media
from shardio.conversion import Progress, StoreChoice, StoreEstimate, journal
from shardio.errors import DatasetExists
from shardio_converters.media import store_trial, videos
from shardio_converters.media.store_trial import PACKET_SECONDS, SECONDS, store_beginning
from shardio_converters.media.videos import STORES, Videos
from tests.lines import contents, interrupt_after
from tests.media_made import scene, write_sound, write_video

pytestmark = pytest.mark.usefixtures("quick_disk")

SMALL: dict[str, Any] = {"frames": 4, "size": 32, "workers": 0}
ANY_RATE = 1e-9
"""A rate that every store reaches, so that the smallest store is chosen, whatever was measured."""


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return videos that are shorter than a trial; one too short for a clip, one broken, a text."""
    folder = tmp_path_factory.mktemp("videos")
    write_video(folder / "a" / "one.mp4", scene(30), with_sound=True)
    write_video(folder / "a" / "two.mkv", scene(11))
    write_video(folder / "b" / "short.mp4", scene(3))
    (folder / "b" / "cut.mp4").write_bytes((folder / "a" / "one.mp4").read_bytes()[:-900])
    (folder / "notes.txt").write_text("notes")
    return folder


@pytest.fixture
def no_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> StoreChoice:
        raise AssertionError("a trial")

    monkeypatch.setattr(videos, "choose_by_trial", refuse)


def an_input(path: Path) -> Input:
    return Input(path.name, str(path), path.stat().st_size, -1)


def estimates(report: shardio.ConversionReport) -> dict[str, StoreEstimate]:
    assert report.choice is not None
    return {one.store: one for one in report.choice.estimates}


def bytes_of_frames(out: Path) -> int:
    """Return the bytes of all frames of a dataset, with the tables of their packets."""
    with shardio.open(out) as dataset:
        values = [sample["frames"] for sample in dataset]
        if isinstance(dataset.schema["frames"], shardio.Array):
            return sum(value.nbytes for value in values)
        return sum(len(value.data) + value.packets.nbytes for value in values)


def test_videos_shorter_than_the_trial_are_measured_whole(root: Path, tmp_path: Path) -> None:
    source = root / "a"
    report = shardio.convert(source, tmp_path / "auto", store="auto", rate=ANY_RATE, **SMALL)
    found = estimates(report)
    assert [*found] == [*STORES]
    for store, one in found.items():
        shardio.convert(source, tmp_path / store, store=store, **SMALL)
        assert one.n_bytes == bytes_of_frames(tmp_path / store)
        assert one.clips_per_s > 0 and not one.problem
    assert report.choice is not None
    assert report.choice.store == min(found.values(), key=lambda one: one.n_bytes).store
    assert report.choice.basis == (
        "random clips of 4 frames, 32 x 32, in RGB; from the beginnings of 2 of 2 videos"
    )


def test_the_dataset_is_that_of_the_store_that_was_chosen(root: Path, tmp_path: Path) -> None:
    report = shardio.convert(root, tmp_path / "auto", store="auto", disk=1 << 40, **SMALL)
    assert report.choice is not None
    named = shardio.convert(root, tmp_path / "named", store=report.choice.store, **SMALL)
    assert named.choice is None
    assert contents(tmp_path / "auto") == contents(tmp_path / "named")
    with shardio.open(tmp_path / "auto") as dataset:
        options = dataset.converter["options"]
    assert options["store"] == report.choice.store
    assert {"disk", "rate"}.isdisjoint(options)


@pytest.mark.parametrize("store", ["planes", "jpeg", "h264"])
def test_a_trial_encodes_one_clip_and_some_seconds(tmp_path: Path, store: str) -> None:
    path = write_video(tmp_path / "a.mp4", scene(300), rate=30)
    converter = Videos(frames=4, stride=2, size=32, store=store)
    found = store_beginning(converter, an_input(path))
    assert found.stream is not None
    assert found.stream.n_frames == 7 + SECONDS * 30
    with media.VideoFile(str(path)) as video:
        whole, _, failure = converter.encode(video)
    assert failure is None
    assert found.n_bytes == pytest.approx(len(whole.data) + whole.packets.nbytes, rel=0.1)


def test_the_clips_of_raw_are_counted(tmp_path: Path) -> None:
    path = write_video(tmp_path / "a.mp4", scene(300), rate=30)
    found = store_beginning(Videos(frames=4, step=10, size=32, store="raw"), an_input(path))
    assert found.stream is None
    assert found.n_bytes == 30 * 4 * 32 * 32 * 3


def test_times_that_start_again_do_not_change_the_number_of_clips(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_video(tmp_path / "a.mp4", scene(300), rate=30)
    n_most, pictures = 4 + SECONDS * 30, Videos.pictures

    def restarted(self: Videos, video: media.VideoFile, pixels: str) -> Any:
        ticks = video.interval / video.time_base  # the last frame of the trial is before the first
        found = pictures(self, video, pixels)
        return (
            (time - n_most * ticks * (n >= n_most - 1), one) for n, (time, one) in enumerate(found)
        )

    monkeypatch.setattr(Videos, "pictures", restarted)
    found = store_beginning(Videos(frames=4, step=10, size=32, store="raw"), an_input(path))
    assert found.n_bytes == 30 * 4 * 32 * 32 * 3


def test_fps_makes_the_trial_longer_and_the_estimate_smaller(tmp_path: Path) -> None:
    path = write_video(tmp_path / "a.mp4", scene(300), rate=30)
    found = store_beginning(Videos(frames=4, size=32, fps=2), an_input(path))
    assert found.stream is not None
    assert found.stream.n_frames == 4 + SECONDS * 2
    assert media.times_of(found.stream)[-1] * found.stream.time_base == Fraction(9, 2)
    whole = store_beginning(Videos(frames=4, size=32), an_input(path))
    assert found.n_bytes < whole.n_bytes / 5


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("a.mp4", {"codec_options": {"bf": "2"}}),
        ("a.mkv", {}),
        ("a.avi", {"codec": "mpeg4"}),
        ("a.ts", {}),
    ],
)
def test_a_trial_reads_the_first_packets(
    tmp_path: Path, name: str, options: dict[str, Any]
) -> None:
    path = write_video(tmp_path / name, scene(90, 32, 32), rate=2, **options)
    converter = Videos(frames=4, size=32, store="packets")
    found = store_beginning(converter, an_input(path))
    assert found.stream is not None
    assert found.stream.n_frames == 4 + 2 * PACKET_SECONDS
    whole = media.demux(str(path))
    assert found.stream.data == whole.data[: len(found.stream.data)]
    assert found.n_bytes == pytest.approx(len(whole.data) + whole.packets.nbytes, rel=0.1)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("a.h264", {}),
        ("a.webm", {"codec": "libvpx-vp9", "container_options": {"live": "1"}}),
    ],
)
def test_without_a_declared_duration_the_bytes_of_a_file_count(
    tmp_path: Path, name: str, options: dict[str, Any]
) -> None:
    path = write_video(tmp_path / name, scene(400, 32, 32), rate=5, **options)
    with media.VideoFile(str(path)) as video:
        assert video.seconds is None
    found = store_beginning(Videos(frames=4, size=32, store="raw"), an_input(path))
    assert found.n_bytes == pytest.approx(400 * 32 * 32 * 3, rel=0.2)


def test_files_without_a_clip_add_nothing_to_the_sizes(root: Path, tmp_path: Path) -> None:
    auto: dict[str, Any] = {"store": "auto", "rate": ANY_RATE, **SMALL}
    sound = shardio.convert(root / "a", tmp_path / "sound", **auto)
    mixed = shardio.convert(root, tmp_path / "mixed", **auto)
    assert {name: one.n_bytes for name, one in estimates(mixed).items()} == {
        name: one.n_bytes for name, one in estimates(sound).items()
    }


def test_files_that_give_no_clip_are_left_out_of_the_trial(root: Path, tmp_path: Path) -> None:
    report = shardio.convert(root, tmp_path / "out", store="auto", rate=ANY_RATE, **SMALL)
    assert report.counts == {"converted": 2, "empty": 1, "broken": 1, "unsupported": 1}
    assert report.choice is not None
    assert report.choice.basis.endswith("from the beginnings of 2 of 4 videos")


def test_sizes_are_scaled_by_the_bytes_of_the_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trial ends when its time is over, but not before a video was stored."""
    monkeypatch.setattr(store_trial, "MAX_SECONDS", -1.0)
    content = write_video(tmp_path / "videos" / "0.mp4", scene(12)).read_bytes()
    one = shardio.convert(
        tmp_path / "videos", tmp_path / "one", store="auto", rate=ANY_RATE, **SMALL
    )
    for n in range(1, 20):
        (tmp_path / "videos" / f"{n}.mp4").write_bytes(content)
    (tmp_path / "videos" / "notes.txt").write_text("notes " * 10_000)
    all_of_them = shardio.convert(
        tmp_path / "videos", tmp_path / "all", store="auto", rate=ANY_RATE, **SMALL
    )
    assert all_of_them.choice is not None
    assert all_of_them.choice.basis.endswith("from the beginnings of 1 of 20 videos")
    assert {name: one.n_bytes for name, one in estimates(all_of_them).items()} == {
        name: 20 * each.n_bytes for name, each in estimates(one).items()
    }


def test_a_trial_stores_a_limited_number_of_videos(tmp_path: Path) -> None:
    content = write_video(tmp_path / "videos" / "0.mp4", scene(4, 16, 16)).read_bytes()
    for n in range(1, 40):
        (tmp_path / "videos" / f"{n}.mp4").write_bytes(content)
    options = Videos(frames=4, size=16, store="auto", rate=ANY_RATE)
    inputs = [an_input(path) for path in sorted((tmp_path / "videos").iterdir())]
    choice = options.fitted(inputs).store_choice
    assert choice is not None
    assert choice.basis.endswith(f"of {store_trial.MAX_VIDEOS} of 40 videos")


def test_audio_adds_the_same_bytes_to_each_store(root: Path, tmp_path: Path) -> None:
    path = root / "a" / "one.mp4"
    silent = shardio.convert(path, tmp_path / "0", store="auto", rate=ANY_RATE, **SMALL)
    heard = shardio.convert(path, tmp_path / "1", store="auto", rate=ANY_RATE, audio=True, **SMALL)
    sound = media.demux(str(path), "audio")
    added = len(sound.data) + sound.packets.nbytes
    assert {name: one.n_bytes - added for name, one in estimates(heard).items()} == {
        name: one.n_bytes for name, one in estimates(silent).items()
    }


def test_a_store_that_cannot_represent_a_video_is_not_chosen(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: Videos, path: str, n_packets: int) -> Any:
        raise shardio.MediaError(f"{path}: two clocks")

    monkeypatch.setattr(Videos, "packets", refuse)
    report = shardio.convert(root, tmp_path / "out", store="auto", rate=ANY_RATE, **SMALL)
    packets = estimates(report)["packets"]
    assert (packets.n_bytes, packets.clips_per_s) == (0, 0)
    assert packets.problem == "not measured: a/one.mp4: two clocks"
    with pytest.raises(InvalidArgument, match="tried is a video .*: two clocks; name"):
        shardio.convert(root, tmp_path / "no", store="auto", rate=ANY_RATE, check=True, **SMALL)


def test_packets_that_cannot_be_decoded_are_not_measured(tmp_path: Path) -> None:
    path = write_video(tmp_path / "a.mp4", scene(25 * SECONDS + 60), codec_options={"bf": "0"})
    stream = media.demux(str(path))
    last = stream.packets["offset"][25 * SECONDS + 40 :]
    content = bytearray(path.read_bytes())
    begin = content.index(bytes(stream.data[int(last[0]) : int(last[1])]))
    content[begin + 4 : begin + int(last[-1] - last[0])] = b"\xff" * int(last[-1] - last[0] - 4)
    path.write_bytes(content)
    report = shardio.convert(path, tmp_path / "out", store="auto", rate=ANY_RATE, **SMALL)
    found = estimates(report)
    assert found["packets"].problem.startswith("not measured: ")
    assert not any(one.problem for name, one in found.items() if name != "packets")


@pytest.mark.parametrize(
    ("options", "stores"),
    [
        ({}, STORES),
        ({"fps": 5}, ("raw", "planes", "jpeg", "h264")),
        ({"gop": 8}, ("planes", "h264")),
        ({"quality": 80}, ("jpeg",)),
        ({"codec": "zstd"}, ("planes",)),
        ({"check": True}, ("packets",)),
        ({"size": 33}, ("raw", "jpeg", "packets")),
    ],
)
def test_stores_that_do_not_accept_an_option_are_not_tried(
    options: dict[str, Any], stores: tuple[str, ...]
) -> None:
    found = Videos(store="auto", rate=1, **options).candidates()
    assert tuple(one.store for one in found) == stores
    assert all((one.disk, one.rate) == (None, None) for one in found)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"store": "auto"}, r"needs a limit: disk \(--disk\), .* rate \(--rate\)"),
        ({"disk": 5}, r"disk \(--disk\) and rate \(--rate\) are limits for store='auto'"),
        ({"store": "raw", "rate": 5}, "limits for store='auto' .* found store 'raw'"),
        ({"store": "auto", "disk": 0}, "disk is 0; it must be a whole number from 1"),
        ({"store": "auto", "disk": "1GB"}, "disk is '1GB'; it must be a whole number"),
        ({"store": "auto", "rate": 0}, "rate is 0; it must be a number of clips per second"),
        ({"store": "auto", "rate": float("nan")}, "rate is nan; it must be a number"),
        ({"store": "auto", "rate": 10**400}, "rate is 1000.*; it must be a number"),
        ({"store": "auto", "rate": True}, "rate is True; it must be a number"),
        ({"store": "auto", "rate": 1, "codec": "vp8"}, "no store accepts these options: .*h264: "),
        ({"store": "auto", "rate": 1, "gop": 8, "check": True}, "no store accepts these options"),
        ({"store": "auto", "rate": 1, "size": 0}, "^size is 0; "),
    ],
)
def test_limits_are_checked(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        Videos(**options)


def test_without_a_store_that_meets_the_limits_nothing_is_converted(
    root: Path, tmp_path: Path
) -> None:
    with pytest.raises(InvalidArgument, match="no store takes at most 10 bytes; allow") as caught:
        shardio.convert(root, tmp_path / "out", store="auto", disk=10, **SMALL)
    assert len(caught.value.__notes__) == 1 + len(STORES)
    assert not (tmp_path / "out").exists()


def test_pipes_are_not_opened_by_a_trial(root: Path, tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    os.mkfifo(source / "a.mp4")
    with pytest.raises(InvalidArgument, match=r"a.mp4: not a regular file; name"):
        shardio.convert(source, tmp_path / "no", store="auto", rate=ANY_RATE, **SMALL)
    (source / "b.mp4").write_bytes((root / "a" / "one.mp4").read_bytes())
    report = shardio.convert(source, tmp_path / "out", store="auto", rate=ANY_RATE, **SMALL)
    assert report.counts == {"converted": 1, "unsupported": 1}


def test_out_is_checked_before_a_trial(root: Path, tmp_path: Path, no_trial: None) -> None:
    (tmp_path / "notes.txt").write_text("notes")
    with pytest.raises(DatasetExists, match=r"already holds data \(notes.txt"):
        shardio.convert(root, tmp_path, store="auto", rate=ANY_RATE, **SMALL)
    shardio.convert(root / "a", tmp_path / "out", **SMALL)
    with pytest.raises(DatasetExists, match="already holds a dataset; overwrite"):
        shardio.convert(root, tmp_path / "out", store="auto", rate=ANY_RATE, **SMALL)


def test_an_option_that_the_recorded_store_refuses(root: Path, tmp_path: Path) -> None:
    shardio.convert(root / "a", tmp_path / "out", store="packets", **SMALL)
    with pytest.raises(InvalidArgument, match="found store 'packets'") as caught:
        shardio.convert(
            root / "a", tmp_path / "out", resume=True, store="auto", rate=1, fps=5, **SMALL
        )
    assert caught.value.__notes__ == [
        "store='auto' (--store auto) keeps the recorded store 'packets'"
    ]


def test_sources_without_videos_are_refused(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    write_sound(source / "a.wav")
    (source / "b.txt").write_text("notes")
    with pytest.raises(
        InvalidArgument, match="none of the files .* is a video .*: a.wav: no video"
    ):
        shardio.convert(source, tmp_path / "out", kind="videos", store="auto", disk=1 << 40)
    assert not (tmp_path / "out").exists()


def test_other_kinds_have_no_limits(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(b"")
    with pytest.raises(InvalidArgument, match="store is 'auto'; it must be one of original"):
        shardio.convert(tmp_path, tmp_path / "out", kind="images", store="auto")


def test_the_choice_is_part_of_the_progress(root: Path, tmp_path: Path) -> None:
    states: list[Progress] = []
    report = shardio.convert(
        root, tmp_path / "out", store="auto", rate=ANY_RATE, progress=states.append, **SMALL
    )
    assert len(states) == 6
    assert all(state.choice == report.choice is not None for state in states)


@pytest.mark.parametrize("again", [{"rate": ANY_RATE}, {"disk": 1 << 40}])
def test_a_resumed_conversion_keeps_the_store_without_a_trial(
    root: Path,
    tmp_path: Path,
    again: dict[str, Any],
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    out, auto = tmp_path / "out", {"store": "auto", **SMALL}
    monkeypatch.setattr(journal, "MIN_UNIT_BYTES", 1)  # a unit for each file
    with pytest.raises(KeyboardInterrupt):
        shardio.convert(root, out, progress=interrupt_after(4), rate=ANY_RATE, **auto)
    request.getfixturevalue("no_trial")
    resumed = shardio.convert(root, out, resume=True, **again, **auto)
    assert resumed.choice is None and resumed.n_samples == 2
    complete = shardio.convert(root, out, resume=True, **again, **auto)
    assert complete.n_samples == 0
    before = contents(out)
    added = shardio.convert(root, out, append=True, **again, **auto)
    assert added.counts["duplicate"] == 2
    assert {name: content for name, content in contents(out).items() if name in before} == before


def test_an_append_keeps_the_store_of_the_dataset(
    root: Path, tmp_path: Path, no_trial: None
) -> None:
    out = tmp_path / "out"
    shardio.convert(root / "a", out, store="planes", gop=2, **SMALL)
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "three.mp4").write_bytes((root / "a" / "one.mp4").read_bytes())
    report = shardio.convert(tmp_path / "new", out, append=True, store="auto", disk=1, workers=0)
    assert (report.n_samples_before, report.n_samples, report.choice) == (2, 1, None)
    with shardio.open(out) as dataset:
        assert dataset.converter["options"]["store"] == "planes"


def test_without_anything_to_resume_there_is_a_trial(root: Path, tmp_path: Path) -> None:
    report = shardio.convert(
        root, tmp_path / "out", resume=True, store="auto", rate=ANY_RATE, **SMALL
    )
    assert report.choice is not None
