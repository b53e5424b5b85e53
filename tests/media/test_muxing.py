"""Streams become files whose packets, times and samples are those of the stream."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest

from shardio import MediaError
from shardio.format.types.streams import PacketFlag, pack_packets, packet_flags
from shardio.media import JpegEncoder, demux, encode, mux, times_of
from shardio.media.media_files import VideoFile
from tests.media.test_audio import write
from tests.media_made import scene, write_cut, write_video


@pytest.mark.parametrize("codec", ["h264", "hevc", "av1"])
def test_streams_that_were_encoded_here_become_files(codec: str) -> None:
    times = [0, 3, 5, 11, 12, 20]
    pictures = zip(times, scene(6), strict=True)
    stream = encode(pictures, 96, 64, Fraction(1, 250), codec=codec)
    made = mux(stream)
    again = demux(made.data, check=True)
    assert made.suffix == ".mp4" and again.n_frames == 6
    found = np.sort(again.packets["pts"]) * again.time_base
    assert found.tolist() == [time * Fraction(1, 250) for time in times]


def test_motion_jpeg_keeps_its_bytes() -> None:
    pytest.importorskip("simplejpeg", reason="simplejpeg is not installed")
    encoder = JpegEncoder(96, 64, Fraction(1, 25), quality=90)
    for time, picture in enumerate(scene(3)):
        encoder.add(time, picture)
    stream = encoder.finish()
    assert bytes(demux(mux(stream).data).data[:]) == bytes(stream.data[:])


@pytest.mark.parametrize("name", ["a.mp4", "a.mkv", "a.avi"])
def test_files_of_other_containers_come_back_as_they_were(name: str, tmp_path: Path) -> None:
    codec = "mpeg4" if name.endswith("avi") else "libx264"
    write_video(tmp_path / name, scene(9), codec=codec)
    stream = demux(str(tmp_path / name))
    again = demux(mux(stream).data)
    assert bytes(again.data[:]) == bytes(stream.data[:])
    found, expected = (one.packets["pts"] * one.time_base for one in (again, stream))
    assert (found == expected).all()


@pytest.mark.parametrize("codec", ["libx264", "mpeg4", "libvpx-vp9"])
def test_video_that_begins_before_0_begins_at_0_in_its_file(codec: str, tmp_path: Path) -> None:
    stream = demux(str(write_cut(tmp_path / "a.mkv", scene(20), 7, codec=codec)))
    assert times_of(stream).tolist() == list(range(-280, 520, 40))
    again = demux(mux(stream).data)
    assert bytes(again.data[:]) == bytes(stream.data[:])
    times = [time * again.time_base for time in times_of(again).tolist()]
    assert times == [Fraction(n, 25) for n in range(20)]


def test_a_turned_video_stays_turned(tmp_path: Path) -> None:
    write_video(tmp_path / "a.mp4", scene(3), rotation=90, aspect=Fraction(4, 3))
    stream = demux(str(tmp_path / "a.mp4"))
    made = tmp_path / "made.mp4"
    made.write_bytes(mux(stream).data)
    again = demux(str(made))
    for name in ("rotation", "sample_aspect"):
        assert again.parameters.get(name) == stream.parameters.get(name)
    with VideoFile(str(made)) as file:
        assert file is not None


@pytest.mark.parametrize(
    "change", [{"width": None}, {"height": "tall"}, {"width": 1 << 40}, {"height": [3]}]
)
def test_parameters_that_cannot_be_used_are_an_error(change: dict[str, object]) -> None:
    stream = encode(enumerate(scene(2)), 96, 64, Fraction(1, 25))
    parameters = {name: each for name, each in {**stream.parameters, **change}.items() if each}
    changed = replace(stream, parameters=parameters)
    with pytest.raises(MediaError, match="no container stores packets of h264 unchanged"):
        mux(changed)


CODECS = {"wav": "pcm_s16le", "flac": "flac", "mp3": "libmp3lame", "m4a": "aac", "opus": "libopus"}


@pytest.mark.parametrize("suffix", CODECS)
def test_sound_has_the_same_samples(suffix: str, tmp_path: Path) -> None:
    stream = demux(str(write(tmp_path / f"a.{suffix}", CODECS[suffix])), "audio")
    made = mux(stream)
    again = demux(made.data, "audio")
    assert made.suffix == f".{suffix}"
    assert bytes(again.data[:]) == bytes(stream.data[:])
    said = [(one.n_frames, one.parameters.get("skip")) for one in (stream, again)]
    assert said[0] == said[1]


def test_what_no_container_says_is_refused(tmp_path: Path) -> None:
    write_video(tmp_path / "a.mp4", scene(9))
    stream = demux(str(tmp_path / "a.mp4"))
    table = stream.packets
    sizes = (table["stored"] & np.uint64((1 << 48) - 1)).astype(np.int64)
    flags = packet_flags(table)
    flags[3] |= PacketFlag.HIDDEN
    hidden = pack_packets(sizes, flags, table["pts"], table["duration"])
    with pytest.raises(MediaError, match="flags of packets would differ"):
        mux(replace(stream, packets=hidden))
