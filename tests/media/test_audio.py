"""Sound by samples: any span of it is what lies there in the whole."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest

from shardio.errors import InvalidArgument, MediaError
from shardio.media.audio import AudioDecoder
from shardio.media.demuxing import demux
from tests.media_made import write_flash, write_sound

WAVE = (np.sin(np.arange(30_000) / 9) * np.linspace(0.1, 0.6, 30_000)).astype(np.float32)


def write(
    path: Path, codec: str, wave: Any = WAVE, begin: int = 0, layout: str = "mono", **options: str
) -> Path:
    """Write 48,000 samples per second, the same in every channel, from sample `begin` on."""
    with av.open(str(path), "w", options=options) as out:
        stream: Any = out.add_stream(codec, rate=48_000, layout=layout)
        context = stream.codec_context
        kind, n_channels = context.format.name, len(context.layout.channels)
        dtypes: dict[str, Any] = {"s16": np.int16, "s32": np.int32}
        dtype = dtypes.get(kind.rstrip("p"), np.float32)
        most = 1 if dtype is np.float32 else np.iinfo(dtype).max
        for n in range(0, len(wave), 960):
            values = (wave[n : n + 960] * most).astype(dtype)
            planar = np.stack([values] * n_channels)
            samples = planar if kind.endswith("p") else planar.T.reshape(1, -1)
            frame = av.AudioFrame.from_ndarray(samples, format=kind, layout=layout)
            frame.sample_rate, frame.pts = 48_000, n + begin
            out.mux(stream.encode(frame))
        out.mux(stream.encode())
    return path


@pytest.mark.parametrize(
    ("name", "codec", "apart"),
    [
        ("a.wav", "pcm_s16le", 1e-4),
        ("a.flac", "flac", 1e-4),
        ("a.m4a", "aac", 0.06),
        ("a.mp3", "libmp3lame", 0.06),
        ("a.ogg", "libopus", 0.06),
        ("a.mka", "libopus", 0.06),
    ],
)
def test_any_span_is_what_was_encoded(tmp_path: Path, name: str, codec: str, apart: float) -> None:
    stream = demux(str(write(tmp_path / name, codec)), "audio")
    assert (stream.width, stream.height) == (1, 48_000)
    assert 0 <= stream.n_frames - len(WAVE) < 1200  # AAC fills its last packet
    with AudioDecoder() as decoder:
        whole = decoder.decode(stream, 0, len(WAVE))
        assert np.abs(whole[2000:-2000, 0] - WAVE[2000:-2000]).max() < apart
        for start, stop in ((0, 1), (12_345, 13_000), (20_001, 29_999), (959, 962)):
            found = decoder.decode(stream, start, stop)
            # AAC fills gaps with noise that depends on where decoding began.
            assert np.abs(found - whole[start:stop]).max() < (0.01 if codec == "aac" else 1e-3)


@pytest.mark.parametrize(
    ("name", "codec"), [("a.m4a", "aac"), ("a.mp3", "libmp3lame"), ("a.ogg", "libopus")]
)
def test_a_span_is_the_same_whatever_came_before(tmp_path: Path, name: str, codec: str) -> None:
    noise = np.random.default_rng(0).normal(0, 0.02, 48_000).astype(np.float32)
    stream = demux(str(write(tmp_path / name, codec, noise)), "audio")
    with AudioDecoder() as fresh:
        expected = fresh.decode(stream, 20_000, 24_000)
    with AudioDecoder() as used:
        for start in (30_000, 11, 20_000):
            used.decode(stream, start, start + 7_000)
            assert np.array_equal(used.decode(stream, 20_000, 24_000), expected)


@pytest.mark.parametrize("rate", [8_000, 16_000, 44_100, 96_000])
def test_a_resampled_span_is_that_of_the_resampled_whole(tmp_path: Path, rate: int) -> None:
    stream = demux(str(write(tmp_path / "a.wav", "pcm_s16le")), "audio")
    n_whole = -(-len(WAVE) * rate // 48_000)
    with AudioDecoder() as decoder:
        whole = decoder.decode(stream, 0, n_whole, rate=rate)
        times = np.arange(n_whole) * 48_000 / rate
        wanted = np.interp(times, np.arange(len(WAVE)), WAVE)
        assert np.abs(whole[50:-50, 0] - wanted[50:-50]).max() < 0.01
        for start in (0, 1, 777, n_whole // 2, n_whole - 30):
            found = decoder.decode(stream, start, start + 30, rate=rate)
            assert np.abs(found - whole[start : start + 30]).max() < 1e-5


def test_behind_the_end_lies_silence(tmp_path: Path) -> None:
    stream = demux(str(write(tmp_path / "a.wav", "pcm_s16le")), "audio")
    with AudioDecoder() as decoder:
        found = decoder.decode(stream, len(WAVE) - 10, len(WAVE) + 10)
        assert np.abs(found[:10]).max() > 0 and not found[10:].any()
        assert not decoder.decode(stream, 10**6, 10**6 + 5).any()
        assert decoder.decode(stream, 5, 5).shape == (0, 1)


@pytest.mark.parametrize("rate", [8_000, 16_000, 48_000])
@pytest.mark.parametrize("channels", [1, 2, None])
def test_resampling_is_that_of_pyav(tmp_path: Path, rate: int, channels: int | None) -> None:
    path = write_flash(tmp_path / "a.mkv", codec="flac", rate=44_100, layouts=("5.1",))
    layout = {1: "mono", 2: "stereo", None: "5.1"}[channels]
    resampler = av.AudioResampler(format="fltp", layout=layout, rate=rate)
    with av.open(str(path)) as container:
        frames = [made for f in container.decode(audio=0) for made in resampler.resample(f)]
    made = np.concatenate([f.to_ndarray() for f in [*frames, *resampler.resample(None)]], axis=1).T
    stream = demux(str(path), "audio")
    assert stream.width == 6
    with AudioDecoder() as decoder:
        n = int(1.9 * rate)
        whole, span = decoder.decode_at(stream, Fraction(0), n, rate=rate, channels=channels)
        np.testing.assert_allclose(whole, made[:n], atol=1e-6)
        assert span == (0, n) and whole.shape == (n, channels or 6)
        begin = Fraction(2, 3)
        part, _ = decoder.decode_at(stream, begin, rate // 2, rate=rate, channels=channels)
        first = round(begin * rate)
        np.testing.assert_allclose(part, made[first : first + rate // 2], atol=1e-5)


def test_before_and_behind_the_sound_there_is_silence(tmp_path: Path) -> None:
    path = write_flash(tmp_path / "a.mkv", sound_from=Fraction(1, 2), seconds=Fraction(1))
    stream = demux(str(path), "audio")
    with AudioDecoder() as decoder:

        def at(begin: Fraction, n: int) -> tuple[Any, tuple[int, int]]:
            return decoder.decode_at(stream, begin, n, rate=8_000)

        found, span = at(Fraction(0), 16_000)
        assert span == (4_000, 12_000)
        assert not found[:4_000].any() and not found[12_001:].any() and found[4_001:11_990].any()
        assert at(Fraction(-1), 8_000)[1] == (0, 0)
        assert at(Fraction(3, 2), 100)[1] == (0, 0)
        inner, span = at(Fraction(1), 100)
        assert span == (0, 100)
        np.testing.assert_allclose(inner, found[8_000:8_100], atol=1e-6)
        assert at(Fraction(1), 0)[0].shape == (0, 1)
        with pytest.raises(InvalidArgument, match="-1 samples at a rate of 8000"):
            at(Fraction(0), -1)


@pytest.mark.parametrize("codec", ["pcm_u8", "pcm_s16le"])
def test_a_gap_is_silent_and_takes_its_time(tmp_path: Path, codec: str) -> None:
    stream = demux(str(write(tmp_path / "a.mkv", "pcm_s16le")), "audio")
    table = stream.packets.copy()
    if codec == "pcm_u8":  # the same bytes are twice as many samples, and silence is 128
        table["duration"] *= 2
    table["pts"] = np.cumsum(table["duration"]) - table["duration"]
    table["pts"][8:] += 5_000
    n = int(table["pts"][-1] + table["duration"][-1])
    parameters = {**stream.parameters, "codec": codec}
    gapped = replace(stream, packets=table, n_frames=n, parameters=parameters)
    begin = int(table["pts"][7] + table["duration"][7])
    with AudioDecoder() as decoder:
        found = decoder.decode(gapped, 0, n)
        assert not found[begin : begin + 5_000].any()
        assert found[begin - 50 : begin].any() and found[begin + 5_000 :][:50].any()
        part = decoder.decode(gapped, begin - 10, begin + 5_010)
        np.testing.assert_array_equal(part, found[begin - 10 : begin + 5_010])


@pytest.mark.parametrize("codec", ["aac", "ac3", "flac", "libopus", "libmp3lame", "pcm_s16le"])
def test_sound_below_0_in_matroska_stays_beside_pictures(tmp_path: Path, codec: str) -> None:
    """FFmpeg counts back by whole milliseconds there: 16 of them late after 50 packets."""
    wave = 0.5 * np.sin(np.arange(96_000) ** 2 / 3e6)  # no two spans are alike
    paths = tmp_path / "whole.mkv", tmp_path / "cut.mkv"
    for path, begin in zip(paths, (0, -48_000), strict=True):
        write(path, codec, wave, begin, "stereo", avoid_negative_ts="disabled")
    whole, cut = (demux(str(path), "audio") for path in paths)
    with AudioDecoder() as decoder:
        wanted, _ = decoder.decode_at(whole, Fraction(5, 4), 12_000, rate=48_000)
        found, _ = decoder.decode_at(cut, Fraction(1, 4), 12_000, rate=48_000)
    assert np.abs(wanted).max() > 0.3
    assert np.array_equal(found, wanted)


def test_what_is_broken_or_asked_wrongly_is_refused(tmp_path: Path) -> None:
    path = write_sound(tmp_path / "a.wav")
    stream = demux(str(path), "audio")
    with AudioDecoder() as decoder:
        for options in ({"rate": 10}, {"channels": 3}):
            with pytest.raises(InvalidArgument, match="expected"):
                decoder.decode(stream, 0, 1, **options)
        with pytest.raises(InvalidArgument, match="samples 5 to 4"):
            decoder.decode(stream, 5, 4)
        with pytest.raises(MediaError, match="is not an audio codec"):
            decoder.decode(replace(stream, parameters={"codec": "h264", "rate": 8000}), 0, 1)
    with pytest.raises(InvalidArgument, match="max_streams is 0"):
        AudioDecoder(0)
    path.write_bytes(path.read_bytes()[:-500])
    with pytest.raises(MediaError, match=r"a\.wav: packet 15 is marked corrupt"):
        demux(str(path), "audio")


def test_a_sound_is_shown_in_one_line(tmp_path: Path) -> None:
    stream = demux(str(write(tmp_path / "a.wav", "pcm_s16le")), "audio")
    length = f"{stream.n_frames:,} samples at {stream.height:,} Hz"
    assert repr(stream) == f"EncodedStream(pcm_s16le, {length})"
    assert repr(stream) in str({"audio": stream})
