"""Sound beside videos: on every store the source's packets, heard when the pictures are seen."""

from __future__ import annotations

import json
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shardio
from shardio import Audio, InvalidArgument, ShardLoader
from shardio.maintenance import verify_dataset
from shardio.media import AudioDecoder, begin_of, demux
from shardio_converters.media.videos import Videos
from shardio_tools.cli import main
from tests.converters.stores import STORES, on_every_store
from tests.media_made import scene, write_flash, write_video

pytestmark = pytest.mark.usefixtures("quick_disk")

SMALL: dict[str, Any] = {"frames": 5, "size": 32, "audio": True}
CLIP_SAMPLES = 3200
"""Of five frames at 25 a second, at 16,000."""
NAMES = ("flash.mkv", "late.mkv", "silent.mp4", "short.mkv")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Videos of 50 frames, but for 9 that are silent."""
    folder = tmp_path_factory.mktemp("videos")
    write_flash(folder / "flash.mkv", codec="aac", rate=44_100, layouts=("stereo", "mono"))
    write_flash(folder / "late.mkv", sound_from=Fraction(1, 2))
    write_flash(folder / "short.mkv", codec="flac", rate=44_100, seconds=Fraction(11, 10))
    write_video(folder / "silent.mp4", scene(9, 32, 32))
    return folder


@pytest.fixture(scope="module")
def out(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    return on_every_store(root, tmp_path_factory, **SMALL)


def epoch(folder: Path, **options: Any) -> dict[str, np.ndarray[Any, Any]]:
    """All of the default view."""
    options = {"num_workers": 0, "output": "numpy", **options}
    with ShardLoader(folder, 100, **options) as loader:
        (batch,) = loader
        return {name: np.asarray(batch[name]) for name in batch}


@pytest.mark.parametrize("store", STORES[1:])
def test_the_sources_packets_are_kept(root: Path, out: Callable[[str], Path], store: str) -> None:
    with shardio.open(out(store)) as dataset:
        assert dataset.schema["audio"] == Audio(optional=True)
        for sample in dataset:
            if sample["source"] == "silent.mp4":
                assert sample["audio"] is None
                continue
            source = demux(str(root / sample["source"]), "audio")
            assert bytes(sample["audio"].data) == source.data
            np.testing.assert_array_equal(sample["audio"].packets, source.packets)
            assert sample["audio"].parameters == source.parameters
    assert not verify_dataset(out(store), workers=0).findings


@pytest.mark.parametrize("store", STORES)
def test_clicks_are_heard_with_flashes(out: Callable[[str], Path], store: str) -> None:
    found = epoch(out(store))
    pictures = found["frames"]
    assert found["audio"].shape == (31, CLIP_SAMPLES, 1)
    is_bright = pictures.mean(axis=(2, 3, 4)) > 128
    flashes = {(int(i), int(frame)) for i, frame in np.argwhere(is_bright)}
    loud = np.abs(found["audio"][:, :, 0]) > 0.35
    clicks = {(int(i), int(np.argmax(loud[i])) // 640) for i in np.flatnonzero(loud.any(1))}
    assert clicks == flashes and len(flashes) == 3
    for i, frame in flashes:
        # A click of 8 samples of the source; what is resampled begins to rise a little before.
        assert 0 <= frame * 640 - int(np.argmax(loud[i])) <= 2


def test_every_store_has_the_same_sound(out: Callable[[str], Path]) -> None:
    raw = epoch(out("raw"))
    for store in STORES[1:]:
        found = epoch(out(store))
        np.testing.assert_allclose(found["audio"], raw["audio"], atol=0.01)
        np.testing.assert_array_equal(found["audio_span"], raw["audio_span"])


def test_a_clip_says_how_much_of_its_sound_there_is(out: Callable[[str], Path]) -> None:
    found = epoch(out("packets"), shuffle=False)
    spans: dict[str, list[list[int]]] = {name: [] for name in NAMES}
    for source, span in zip(found["source"], found["audio_span"].tolist(), strict=True):
        spans[source].append(span)
    whole, nothing = [0, CLIP_SAMPLES], [0, 0]
    assert spans["flash.mkv"] == [whole] * 10
    assert spans["late.mkv"] == [nothing] * 2 + [[1600, 3200]] + [whole] * 7
    assert spans["short.mkv"] == [whole] * 5 + [[0, 1600]] + [nothing] * 4
    assert spans["silent.mp4"] == [nothing]
    for source, (low, high), sound in zip(
        found["source"], found["audio_span"], found["audio"], strict=True
    ):
        assert not sound[:low].any() and not sound[high + 1 :].any(), source


def test_a_clip_of_raw_has_the_packets_around_it(root: Path, out: Callable[[str], Path]) -> None:
    source = demux(str(root / "flash.mkv"), "audio")
    with shardio.open(out("raw")) as dataset:
        rows = [sample for sample in dataset if sample["source"] == "flash.mkv"]
        whole = bytes(source.data[:])
        for number, sample in enumerate(rows):
            sound = sample["audio"]
            assert begin_of(sound) == Fraction(number, 5)
            assert sound.n_frames == 44_100 // 5
            assert bytes(sound.data) in whole and len(sound.data) < len(whole) / 2
        with AudioDecoder() as decoder:  # and is a sound by itself
            found = decoder.decode(rows[3]["audio"], 0, 8820)
            expected = decoder.decode(source, 3 * 8820, 4 * 8820)
        np.testing.assert_allclose(found, expected, atol=0.01)


def test_without_being_asked_for_there_is_no_sound(root: Path, tmp_path: Path) -> None:
    asked: tuple[dict[str, Any], ...] = ({}, {"audio": False})
    for i, options in enumerate(asked):
        made = tmp_path / str(i)
        report = shardio.convert(root, made, workers=0, store="packets", frames=5, **options)
        with shardio.open(made) as dataset:
            assert "audio" not in dataset.schema
        assert not any("sound" in source.detail for source in report.inputs)
    with pytest.raises(InvalidArgument, match="audio is 'yes'; it must be True or False"):
        Videos(audio="yes")  # type: ignore[arg-type]


def test_a_sound_that_breaks_makes_its_file_broken(tmp_path: Path) -> None:
    path = write_flash(tmp_path / "in" / "a.mkv", codec="flac", rate=44_100)
    sound = demux(str(path), "audio")
    content = bytearray(path.read_bytes())
    packet = bytes(sound.data[int(sound.packets["offset"][9]) :][:64])
    content[content.index(packet) + 40] ^= 0x55
    path.write_bytes(content)
    options: dict[str, Any] = {"workers": 0, "store": "packets", "frames": 5}
    report = shardio.convert(tmp_path / "in", tmp_path / "silent", **options)
    assert report.counts == {"converted": 1}
    report = shardio.convert(tmp_path / "in", tmp_path / "out", audio=True, **options)
    assert "its audio: packet 9 " in report.broken[0].reason
    options |= {"audio": True, "keep_partial": True}
    for store in ("packets", "raw"):
        made = tmp_path / store
        report = shardio.convert(tmp_path / "in", made, **{**options, "store": store})
        assert report.counts == {"broken": 1} and report.n_samples > 0
        with shardio.open(made) as dataset:
            assert dataset[0]["audio"] is None


def test_the_sound_report(root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--store", "packets", "--frames", "5", "--audio", "--workers", "0"]
    assert main(["convert", str(root), str(tmp_path / "out"), *options]) == 0
    told = capsys.readouterr().out
    assert "audio  in 3 of 4 files; 1 file with several streams, only the first is kept" in told
    assert main(["convert", str(root), str(tmp_path / "json"), *options, "--json"]) == 0
    inputs = json.loads(capsys.readouterr().out)["inputs"]
    details = {one["path"]: one["detail"]["sound"] for one in inputs}
    assert details["silent.mp4"] is None
    assert details["flash.mkv"] == {"codec": "aac", "rate": 44100, "layout": "stereo", "streams": 2}
