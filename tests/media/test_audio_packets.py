"""When packets of sound are heard: to the sample, whatever a container makes of their times."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardio import EncodedStream
from shardio.errors import MediaError
from shardio.media import AudioDecoder, begin_of, demux, part_of, sound_of
from shardio.media.audio_packets import first_sample_time, packet_times, sample_rate
from tests.media_made import scene, write_flash, write_sound, write_video

MS = Fraction(1, 1000)


def rounded(begin: int, counts: Sequence[int], time_base: Fraction, rate: int) -> list[int]:
    """Return a container's rounded packet times, the first of which is heard at sample `begin`."""
    starts = begin + np.cumsum([0, *counts[:-1]])
    return [round(Fraction(int(n), rate) / time_base) for n in starts]


@pytest.mark.parametrize(
    ("rate", "apart"),
    # 1024 of 8,000 a second are 128 ms, so that every packet is rounded alike; of 48,000, 64/3 ms.
    [(8_000, 4), (22_050, 2), (44_100, 2), (48_000, 16)],
)
@settings(max_examples=20)
@given(begin=st.integers(-3000, 100_000))
def test_many_rounded_times_give_the_exact_one(rate: int, apart: int, begin: int) -> None:
    counts = [1024] * 200
    found = packet_times(rounded(begin, counts, MS, rate), counts, MS, rate)
    assert abs(int(found[0]) - begin) <= apart
    assert (np.diff(found) == 1024).all()


@pytest.mark.parametrize("begin", [0, 44_100 // 4, 44_100])
@pytest.mark.parametrize("n_before", [0, 1105])
def test_what_begins_with_a_tick_begins_there_exactly(begin: int, n_before: int) -> None:
    counts = [1152] * 3  # too few to narrow it down
    times = rounded(begin - n_before, counts, MS, 44_100)
    found = packet_times(times, counts, MS, 44_100, n_before)
    assert int(found[0]) + n_before == begin


@pytest.mark.parametrize(
    ("times", "counts", "time_base", "rate", "expected"),
    [
        ([-1024, 0, 1024], [1024] * 3, Fraction(1, 44_100), 44_100, [-1024, 0, 1024]),
        ([None, 960, None], [960] * 3, Fraction(1, 48_000), 48_000, [0, 960, 1920]),
        ([-128, 0, 576], [0, 576, 1024], Fraction(1, 48_000), 48_000, [0, 0, 576]),
        # Of 8,000 a second, 800 samples are 100 ms: a jitter goes, a gap stays.
        ([0, 130, 200, 300, 400], [800] * 5, MS, 8_000, [0, 800, 1600, 2400, 3200]),
        ([0, 100, 700, 800, 900], [800] * 5, MS, 8_000, [0, 800, 5600, 6400, 7200]),
    ],
)
def test_times_of_packets_are_those_of_their_samples(
    times: list[int | None], counts: list[int], time_base: Fraction, rate: int, expected: list[int]
) -> None:
    assert packet_times(times, counts, time_base, rate).tolist() == expected


def test_times_that_go_back_are_refused() -> None:
    with pytest.raises(MediaError, match=r"its times go back by 0\.200 s at packet 3; re-encode"):
        packet_times([0, 100, 200, 100], [800] * 4, MS, 8_000)


@pytest.mark.parametrize(
    ("name", "codec", "rate"),
    [
        ("a.mp4", "aac", 44_100),
        ("a.mov", "pcm_s16le", 16_000),
        ("a.mkv", "aac", 44_100),
        ("a.mkv", "flac", 44_100),
        ("a.mkv", "libopus", 48_000),
        ("a.flv", "aac", 44_100),
        ("a.ts", "aac", 48_000),
    ],
)
def test_clicks_are_heard_with_flashes(tmp_path: Path, name: str, codec: str, rate: int) -> None:
    path = write_flash(tmp_path / name, codec=codec, rate=rate)
    assert click_at(demux(str(path), "audio")) == flash_at(demux(str(path)))


@pytest.mark.parametrize(
    ("name", "codec"), [("a.mkv", "pcm_s16le"), ("a.mov", "pcm_s16le"), ("a.mkv", "aac")]
)
def test_sound_that_begins_later_keeps_its_time(tmp_path: Path, name: str, codec: str) -> None:
    path = write_flash(tmp_path / name, codec=codec, rate=48_000, sound_from=Fraction(1, 4))
    sound = demux(str(path), "audio")
    assert begin_of(sound) == Fraction(1, 4)
    assert click_at(sound) == flash_at(demux(str(path))) == 1


def click_at(stream: EncodedStream) -> Fraction:
    with AudioDecoder() as decoder:
        whole = decoder.decode(stream, 0, stream.n_frames)[:, 0]
    n = int(np.argmax(np.abs(whole) > 0.4))
    return Fraction(first_sample_time(stream) + n, sample_rate(stream))


def flash_at(stream: EncodedStream) -> Fraction:
    """Return the time of frame 25, which is the white one."""
    return int(np.sort(stream.packets["pts"])[25]) * stream.time_base


@pytest.mark.parametrize(("name", "codec"), [("a.mkv", "flac"), ("a.mp4", "aac"), ("a.wav", "")])
def test_a_part_is_what_is_heard_there_of_the_whole(tmp_path: Path, name: str, codec: str) -> None:
    if codec:
        path = write_flash(tmp_path / name, codec=codec, rate=44_100)
    else:
        path = write_sound(tmp_path / name)
    whole = demux(str(path), "audio")
    begin, seconds = Fraction(1, 3), Fraction(1, 5)
    part = part_of(whole, begin, seconds)
    assert part is not None and part.n_frames == round(seconds * whole.height)
    assert begin_of(part) == begin
    assert len(part.data) < len(whole.data) or not codec
    for rate in (whole.height, 16_000, 11_025):
        n = int(seconds * rate)
        with AudioDecoder() as decoder:
            expected, span = decoder.decode_at(whole, begin, n, rate=rate)
            found, its_span = decoder.decode_at(part, begin, n, rate=rate)
            assert its_span == span == (0, n)
            np.testing.assert_allclose(found, expected, atol=0.01 if codec == "aac" else 0)
            assert np.abs(expected).max() > 0.02
            # By itself it is a sound like any other: from sample 0 on.
            np.testing.assert_array_equal(decoder.decode(part, 0, n, rate=rate), found)


def test_where_nothing_is_heard_there_is_no_part(tmp_path: Path) -> None:
    path = write_flash(tmp_path / "a.mkv", sound_from=Fraction(1, 2))
    sound = demux(str(path), "audio")
    assert part_of(sound, Fraction(0), Fraction(1, 2)) is None
    assert part_of(sound, Fraction(5, 2), Fraction(1)) is None
    late = part_of(sound, Fraction(0), Fraction(3, 4))
    assert late is not None
    with AudioDecoder() as decoder:
        found, span = decoder.decode_at(late, Fraction(0), 12_000, rate=16_000)
    assert span == (8_000, 12_000) and not found[:8_000].any() and found[8_001:].any()


@pytest.mark.parametrize(
    ("parameters", "words"),
    [
        ({"rate": "fast"}, "rate is 'fast'"),
        ({"skip": 1.5}, "skip is 1.5"),
        ({"samples": "all"}, "samples is 'all'"),
        ({"begin": "1:0"}, "begin is '1:0': expected seconds"),
    ],
)
def test_impossible_parameters(tmp_path: Path, parameters: dict[str, object], words: str) -> None:
    sound = demux(str(write_sound(tmp_path / "a.wav")), "audio")
    forged = replace(sound, parameters={**sound.parameters, **parameters})
    with AudioDecoder() as decoder, pytest.raises(MediaError, match=words):
        decoder.decode(forged, 0, 10)


def test_a_file_without_sound_has_none(tmp_path: Path) -> None:
    assert sound_of(str(write_video(tmp_path / "a.mp4", scene(3)))) is None
    found = sound_of(str(write_flash(tmp_path / "b.mkv")))
    assert found is not None and "audio_streams" not in found.parameters
    path = write_flash(tmp_path / "c.mkv", layouts=("stereo", "mono"))
    several = sound_of(path.read_bytes())
    assert several is not None
    assert (several.width, several.parameters["audio_streams"]) == (2, 2)
