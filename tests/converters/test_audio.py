"""Sound by itself: folders of it become datasets, and what is damaged is listed."""

from __future__ import annotations

from pathlib import Path

import pytest

import shardio
from shardio import Audio
from shardio.media import demux
from shardio_tools.cli import main
from tests.media.test_audio import write
from tests.media_made import scene, write_flash, write_sound, write_video

pytestmark = pytest.mark.usefixtures("quick_disk")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Sound of two classes, and what a converter meets beside it."""
    folder = tmp_path / "in"
    for name in ("a", "b"):
        (folder / name).mkdir(parents=True)
    write(folder / "a" / "one.wav", "pcm_s16le")
    write(folder / "a" / "two.flac", "flac")
    write(folder / "a" / "three.mp3", "libmp3lame")
    write(folder / "b" / "four.m4a", "aac")
    write(folder / "b" / "five.opus", "libopus")
    write_flash(folder / "b" / "six.mkv", layouts=("mono", "stereo"))
    write_video(folder / "b" / "silent.mp4", scene(3))
    cut = write_sound(folder / "b" / "cut.wav")
    cut.write_bytes(cut.read_bytes()[:-500])
    (folder / "b" / "noise.ogg").write_bytes(bytes(range(256)) * 9)
    (folder / "notes.txt").write_text("notes")
    return folder


def test_every_file_with_sound_is_a_sample(root: Path, tmp_path: Path) -> None:
    report = shardio.convert(root, tmp_path / "out", kind="audio", workers=0)
    assert report.counts == {"converted": 6, "broken": 2, "unsupported": 2}
    assert [one.name for one in report.broken] == ["b/cut.wav", "b/noise.ogg"]
    assert "packet 15 is marked corrupt" in report.broken[0].reason
    assert report.broken[1].reason.startswith("not a readable sound file: ")
    with shardio.open(tmp_path / "out") as dataset:
        assert dataset.schema["audio"] == Audio() and list(dataset.classes) == ["a", "b"]
        for sample in dataset:
            source = demux(str(root / sample["source"]), "audio")
            assert bytes(sample["audio"].data) == source.data
            assert sample["audio"].n_frames == source.n_frames
            assert sample["label"] == "ab".index(sample["source"][0])
        details = {one["path"]: one["detail"] for one in dataset.inputs if "detail" in one}
    assert details["a/one.wav"]["samples"] == 30_000
    assert details["b/six.mkv"]["streams"] == 2


def test_the_command_says(root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (root / "b" / "six.mkv").unlink()
    (root / "b" / "silent.mp4").unlink()  # without a video the names tell what it is
    assert main(["convert", str(root), str(tmp_path / "out"), "--workers", "0"]) == 1
    told = capsys.readouterr().out
    assert "No sound: 1 file\n  notes.txt" in told and "Broken: 2 files" in told
    assert "converted 5 of 8 files into 5 sounds" in told
    assert "random sounds per second and core" in told
    assert main(["inspect", str(tmp_path / "out"), "--sample", "0"]) == 0
    assert "1 channel at 48,000 Hz, 30,000 samples" in capsys.readouterr().out
