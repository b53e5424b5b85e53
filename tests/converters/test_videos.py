"""Videos become rows of clips: cutting, fields, outcomes; whole folders against a plain decode."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import shardio
from shardio import Input, MediaError, Outcome, media
from shardio_converters.media.videos import Videos
from tests.converters.stores import with_the_broken
from tests.media_made import plain_decode, scene, write_sound, write_video

pytestmark = pytest.mark.usefixtures("quick_disk")

SMALL: dict[str, Any] = {"store": "raw", "frames": 4, "size": 32}


def read_input(source: Input, **options: Any) -> tuple[list[dict[str, Any]], Outcome]:
    """All samples of one input, and its outcome."""
    found: list[dict[str, Any]] = []
    samples = Videos(**options).samples(source)
    while True:
        try:
            found.append(dict(next(samples)))
        except StopIteration as end:
            outcome: Outcome = end.value
            return found, outcome


def read(path: Path, **options: Any) -> tuple[list[dict[str, Any]], Outcome]:
    return read_input(Input(f"folder/{path.name}", str(path), 0, 3), **options)


class FakeVideo:
    """Stands for a video of `n_frames` frames whose pictures hold their own numbers."""

    n_frames: ClassVar[int]
    time_base = interval = Fraction(1, 10)

    def __init__(self, path: str) -> None:
        self.path = path

    def __enter__(self) -> FakeVideo:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def facts(self) -> dict[str, Any]:
        return {}

    def pictures(self, size: int, wanted: Callable[[int], bool]) -> Iterator[tuple[int, Any]]:
        for n in range(self.n_frames):
            yield n * 10, np.full((size, size, 3), n) if wanted(n) else None


@given(
    n_frames=st.integers(0, 60),
    frames=st.integers(1, 6),
    stride=st.integers(1, 5),
    step=st.integers(1, 12) | st.none(),
)
def test_clips_are_as_defined(n_frames: int, frames: int, stride: int, step: int | None) -> None:
    every = frames * stride if step is None else step
    span = (frames - 1) * stride + 1
    starts = [start for start in range(0, n_frames, every) if start + span <= n_frames]
    wanted = [list(range(start, start + span, stride)) for start in starts]
    fake = type("Fake", (FakeVideo,), {"n_frames": n_frames})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(media, "VideoFile", fake)
        # The file that is looked at is this one; its suffix is what makes it a video.
        source = Input("a.mp4", __file__, 0, -1)
        options: dict[str, Any] = {"store": "raw", "stride": stride, "step": step}
        clips, outcome = read_input(source, frames=frames, size=1, **options)
    assert [clip["frames"][:, 0, 0, 0].tolist() for clip in clips] == wanted
    assert [clip["pts"].tolist() for clip in clips] == [[n * 10 for n in clip] for clip in wanted]
    if not wanted:
        assert outcome.kind == "empty"
        return
    # Dropped: frames that belong to no clip, nor to the gap that the step leaves after one.
    kept = {n for start in starts for n in range(start, start + max(span, every))}
    assert outcome.detail["dropped"] == len(set(range(n_frames)) - kept)


def test_a_video_too_short_for_a_clip_says_so_and_is_no_error(tmp_path: Path) -> None:
    clips, outcome = read(write_video(tmp_path / "a.mp4", scene(3)), **SMALL)
    assert (clips, outcome.kind) == ([], "empty")
    assert outcome.reason == "3 frames; one clip spans 4"


def test_a_video_without_a_suffix_is_found_by_its_bytes(tmp_path: Path) -> None:
    path = write_video(tmp_path / "a.mp4", scene(4)).rename(tmp_path / "README")
    assert read(path, **SMALL)[1].kind == "converted"


@pytest.mark.parametrize("name", ["notes.txt", "data.bin", "LICENSE"])
def test_other_files_are_no_videos(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"some notes")
    assert read(tmp_path / name)[1].kind == "unsupported"


def test_sound_alone_is_broken_by_signature_or_suffix(tmp_path: Path) -> None:
    sound = write_sound(tmp_path / "a.wav")
    unnamed = tmp_path / "unnamed"
    unnamed.write_bytes(sound.read_bytes())
    for path in (sound, unnamed):
        with pytest.raises(MediaError, match="no video stream"):
            read(path)


def test_a_file_that_cannot_be_opened_is_broken_if_its_name_promises_video(tmp_path: Path) -> None:
    (tmp_path / "gone.mp4").symlink_to(tmp_path / "nowhere")
    (tmp_path / "gone.txt").symlink_to(tmp_path / "nowhere")
    with pytest.raises(MediaError, match="cannot be read: No such file"):
        read(tmp_path / "gone.mp4")
    assert read(tmp_path / "gone.txt")[1].kind == "unsupported"


def check_against_plain_decode(root: Path, dataset: shardio.ShardDataset) -> int:
    """Compare every clip of a converted folder with a plain decode; returns their number."""
    row = 0
    for entry in dataset.inputs:
        if entry["outcome"] != "converted":
            continue
        pictures, times, time_base = plain_decode(root / entry["path"], 112)
        rising = sorted(time for time in times if time is not None)
        for start in range(0, len(pictures) - 15, 16):
            clip = dataset[row]
            assert np.array_equal(clip["frames"], np.stack(pictures[start : start + 16]))
            assert clip["pts"].tolist() == rising[start : start + 16]
            assert clip["time_base"].tolist() == list(time_base.as_integer_ratio())
            assert clip["source"] == entry["path"]
            folder = Path(entry["path"]).parent.as_posix()
            assert clip["label"] == (-1 if folder == "." else dataset.classes.index(folder))
            row += 1
    assert row == len(dataset)
    return row


def test_a_folder_converts_to_the_clips_of_a_plain_decode(tmp_path: Path) -> None:
    root = tmp_path / "videos"
    write_video(root / "a" / "one.mp4", scene(40), codec_options={"bf": "2"})
    write_video(root / "b" / "two.mkv", scene(33, 101, 75), pixel_format="yuv444p")
    write_video(root / "three.avi", scene(17), codec="mpeg4")
    shardio.convert(root, tmp_path / "out", workers=0, store="raw")
    assert check_against_plain_decode(root, shardio.open(tmp_path / "out")) == 5


@pytest.mark.slow
@pytest.mark.process
def test_real_files_are_plain_decodes_or_listed(media_root: Path, tmp_path: Path) -> None:
    root = with_the_broken(media_root, tmp_path / "all")
    report = shardio.convert(root, tmp_path / "out", store="raw")
    assert [Path(source.name).name for source in report.broken] == (
        "audio_only.mp4 corrupted.mp4 empty.mp4 noise.mkv notes.mp4 sound.wav truncated.mp4".split()
    )
    assert all(source.reason for source in report.broken)
    assert check_against_plain_decode(root, shardio.open(tmp_path / "out")) == 138
