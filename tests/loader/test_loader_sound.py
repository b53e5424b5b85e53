"""Sound in batches: decoded, resampled, of one length or of several, beside clips of videos."""

from __future__ import annotations

import json
import wave
from collections.abc import Iterator
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardio import (
    Array,
    Audio,
    EncodedStream,
    InvalidArgument,
    Schema,
    ShardDataset,
    ShardLoader,
    ShardReader,
    Sound,
    Video,
    mix,
)
from shardio.errors import ChecksumMismatch, MediaError
from shardio.media import AudioDecoder, demux
from shardio.samples import decoding
from shardio.samples.clips import Clip
from tests.loading import WORKERS, bits, check_workers_agree, make_loader, write_dataset
from tests.media_made import write_flash

SOUND = Schema({"audio": Audio(optional=True), "label": Array("int64")})
BESIDE = Schema({"video": Video(), "audio": Audio(optional=True), "label": Array("int64")})
LENGTHS = (Fraction(2), Fraction(3, 2), None, Fraction(5, 2))
"""Seconds of sound; of one sample there is none."""
ALL = Clip(4, step=4)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two seconds of video each, with sound that is shorter or longer."""
    folder = tmp_path_factory.mktemp("files")
    return [
        write_flash(
            folder / f"{i}.mkv",
            codec="flac",
            rate=(44_100, 16_000, 16_000, 48_000)[i],
            layouts=("stereo" if i == 3 else "mono",),
            seconds=seconds or Fraction(2),
        )
        for i, seconds in enumerate(LENGTHS)
    ]


def sound_of(files: list[Path], i: int) -> EncodedStream | None:
    return None if LENGTHS[i] is None else demux(str(files[i]), "audio")


@pytest.fixture(scope="module")
def alone(files: list[Path], tmp_path_factory: pytest.TempPathFactory) -> str:
    """Sound by itself, two samples in each of two shards."""
    samples = ({"audio": sound_of(files, i), "label": i} for i in range(len(LENGTHS)))
    return write_dataset(tmp_path_factory.mktemp("alone") / "set", 4, 2, SOUND, samples)


@pytest.fixture(scope="module")
def beside(files: list[Path], tmp_path_factory: pytest.TempPathFactory) -> str:
    """Sound beside videos, likewise."""

    def samples() -> Iterator[dict[str, Any]]:
        for i, path in enumerate(files):
            yield {"video": path.read_bytes(), "audio": sound_of(files, i), "label": i}

    return write_dataset(tmp_path_factory.mktemp("beside") / "set", 4, 2, BESIDE, samples())


def loader_of(folder: Any, sound: Sound | None = None, **options: Any) -> ShardLoader:
    decode = True if sound is None else {"audio": sound}
    defaults = {"batch_size": 4, "num_workers": 0, "output": "numpy", "decode": decode}
    return make_loader(folder, **{**defaults, **options})


def batches(folder: Any, sound: Sound | None = None, **options: Any) -> list[Any]:
    with loader_of(folder, sound, **options) as loader:
        return list(loader)


@WORKERS
def test_unequal_sounds_are_a_list(files: list[Path], alone: str, num_workers: int) -> None:
    (batch,) = batches(alone, num_workers=num_workers)
    assert list(batch) == ["audio", "audio_span", "label"]
    assert [None if s is None else s.shape for s in batch["audio"]] == [
        (32_000, 1),
        (24_000, 1),
        None,
        (40_000, 1),
    ]
    assert batch["audio_span"].tolist() == [[0, 32_000], [0, 24_000], [0, 0], [0, 40_000]]
    with AudioDecoder() as decoder:
        for i in (0, 1, 3):
            stream = sound_of(files, i)
            assert stream is not None
            n = len(batch["audio"][i])
            found = decoder.decode(stream, 0, n, rate=16_000, channels=1)
            np.testing.assert_array_equal(batch["audio"][i], found)


@pytest.mark.parametrize("transform", [None, dict])
def test_so_many_seconds_are_one_array(alone: str, transform: Any) -> None:
    sound = Sound(rate=8_000, channels=2, seconds=1.75)
    (batch,) = batches(alone, sound, transform=transform)
    assert batch["audio"].shape == (4, 14_000, 2)
    assert batch["audio_span"].tolist() == [[0, 14_000], [0, 12_000], [0, 0], [0, 14_000]]
    assert not batch["audio"][1, 12_001:].any() and not batch["audio"][2].any()
    assert batch["audio"][1, :11_999].any()


def test_lengths_that_are_nearly_the_same_are_one_array(files: list[Path], tmp_path: Path) -> None:
    stream = sound_of(files, 1)
    assert stream is not None
    lengths = (24_000, 23_900, 23_879)
    for n_rows, shape in ((2, (2, 24_000, 1)), (3, None)):
        samples = [
            {"audio": type(stream)(**{**fields_of(stream), "n_frames": n}), "label": n}
            for n in lengths[:n_rows]
        ]
        made = write_dataset(tmp_path / str(n_rows), n_rows, 1, SOUND, samples)
        (batch,) = batches(made)
        if shape is None:
            assert [len(each) for each in batch["audio"]] == list(lengths)
        else:
            assert batch["audio"].shape == shape
            assert batch["audio_span"].tolist() == [[0, n] for n in lengths[:2]]


def fields_of(stream: EncodedStream) -> dict[str, Any]:
    return {name: getattr(stream, name) for name in stream.__slots__}


def test_sounds_are_collated_as_it_is_asked(alone: str) -> None:
    (listed,) = batches(alone)
    (padded,) = batches(alone, collate="pad")
    assert padded["audio"].shape == (4, 40_000, 1)
    assert padded["audio_mask"].sum(axis=(1, 2)).tolist() == [32_000, 24_000, 0, 40_000]
    (joined,) = batches(alone, collate={"audio": "ragged"})
    assert joined["audio_offsets"].tolist() == [0, 32_000, 56_000, 56_000, 96_000]
    for i in (0, 1, 3):
        sound = listed["audio"][i]
        np.testing.assert_array_equal(padded["audio"][i, : len(sound)], sound)
        begin, end = joined["audio_offsets"][i : i + 2]
        np.testing.assert_array_equal(joined["audio"][begin:end], sound)


def test_as_it_is_stored_it_has_to_be_the_same_everywhere(alone: str) -> None:
    with pytest.raises(InvalidArgument, match=r"sound of 16000 and 44100 samples per second"):
        loader_of(alone, Sound(rate=None))
    with pytest.raises(
        InvalidArgument, match=r"of 1 and 2 channels.*pass decode=\{'audio': Sound\(channels="
    ):
        loader_of(alone, Sound(channels=None))
    with ShardDataset(alone) as dataset, dataset.select([3]) as one:
        (batch,) = batches(one, Sound(rate=None, channels=None))
        assert batch["audio"].shape == (1, 120_000, 2)


def test_integers_are_the_same_sound(alone: str) -> None:
    (floats,) = batches(alone, Sound(seconds=2))
    (integers,) = batches(alone, Sound(seconds="2", dtype="int16"))
    assert integers["audio"].dtype == np.int16
    scaled = np.clip(floats["audio"] * 32768, -32768, 32767)
    assert np.abs(integers["audio"] - scaled).max() <= 0.5


def test_a_transform_gets_the_samples(alone: str) -> None:
    def loudness(sample: dict[str, Any]) -> dict[str, Any]:
        assert list(sample) == ["audio", "audio_span", "label"]
        sound = sample["audio"]
        return {"peak": 0.0 if sound is None else float(np.abs(sound).max()), **sample}

    (batch,) = batches(alone, transform=loudness)
    assert batch["peak"][2] == 0 and batch["peak"].min() < 0.5 < batch["peak"][0]
    (fixed,) = batches(alone, Sound(seconds=1), transform=loudness)
    assert fixed["audio"].shape == (4, 16_000, 1) and fixed["peak"].max() < 0.1


def test_streams_are_handed_over_undecoded(alone: str) -> None:
    def size(sample: dict[str, Any]) -> dict[str, Any]:
        stream = sample["audio"]
        return {"n": 0 if stream is None else len(bytes(stream.data))}

    (batch,) = batches(alone, decode=False, transform=size)
    assert (batch["n"] > 0).tolist() == [True, True, False, True]
    with pytest.raises(InvalidArgument, match="'audio' is an Audio, whose packets cannot be put"):
        loader_of(alone, decode=False)


@pytest.mark.parametrize(("num_workers", "transform"), [(0, None), (0, dict), (2, None)])
def test_clips_have_sound(files: list[Path], beside: str, num_workers: int, transform: Any) -> None:
    found = batches(beside, clip=ALL, num_workers=num_workers, transform=transform)
    assert {batch["audio"].shape[1:] for batch in found} == {(2560, 1)}
    spans = np.concatenate([batch["audio_span"] for batch in found]).reshape(4, 12, 2)
    assert (spans[[0, 3]] == [0, 2560]).all() and not spans[2].any()
    assert spans[1, 9].tolist() == [0, 24_000 - 9 * 2560] and not spans[1, 10:].any()
    clips = np.concatenate([batch["audio"] for batch in found])
    with AudioDecoder() as decoder:
        for row in (0, 1, 3):
            stream = sound_of(files, row)
            assert stream is not None
            whole = decoder.decode(stream, 0, 12 * 2560, rate=16_000, channels=1)
            own = clips[row * 12 :][:12].reshape(-1, 1)
            np.testing.assert_allclose(own, whole, atol=1e-5)


@pytest.mark.parametrize("where", ["random", "uniform"])
def test_wherever_a_clip_begins_the_click_comes_with_the_flash(beside: str, where: Any) -> None:
    clip = Clip(6, where=where, per_video=15)
    n_flashes = 0
    for batch in batches(beside, clip=clip, shuffle=True, seed=3, batch_size=40):
        bright = batch["video"].mean(axis=(2, 3, 4)) > 128
        loud = np.abs(batch["audio"][:, :, 0]) > 0.35
        for i in range(len(bright)):
            if not bright[i].any() or batch["label"][i] == 2:
                assert not loud[i].any()
                continue
            n_flashes += 1
            begin = int(np.argmax(bright[i])) * 640
            assert 0 <= begin - int(np.argmax(loud[i])) <= 2
    assert n_flashes > 4


@pytest.mark.parametrize("where", ["all", "random"])
def test_who_makes_the_batches_makes_no_difference(beside: str, where: Any) -> None:
    clip = Clip(4, where=where, per_video=None if where == "all" else 5)
    check_workers_agree(partial(loader_of, beside, clip=clip, shuffle=True, seed=5, batch_size=3))


def test_seconds_may_be_more_or_less_than_a_clip(beside: str) -> None:
    (plain,) = batches(beside, clip=ALL, batch_size=48)
    for seconds, n in ((Fraction(1, 10), 1600), (1, 16_000)):
        (batch,) = batches(beside, Sound(seconds=seconds), clip=ALL, batch_size=48)
        assert batch["audio"].shape == (48, n, 1)
        m = min(n, 2560)
        np.testing.assert_allclose(batch["audio"][:, :m], plain["audio"][:, :m], atol=1e-5)


def test_clips_of_other_frame_rates_are_of_other_lengths(files: list[Path], tmp_path: Path) -> None:
    slow = write_flash(tmp_path / "a.mkv", frame_rate=10, n_frames=20)
    samples = [
        {"video": path.read_bytes(), "audio": demux(str(path), "audio"), "label": 0}
        for path in (files[0], slow)
    ]
    made = write_dataset(tmp_path / "set", 2, 1, BESIDE, samples)
    (batch,) = batches(made, clip=Clip(2, where="uniform"))
    assert [len(sound) for sound in batch["audio"]] == [1280, 3200]
    assert batch["audio_span"].tolist() == [[0, 1280], [0, 3200]]
    (batch,) = batches(made, Sound(seconds=0.1), clip=Clip(2, where="uniform"))
    assert batch["audio"].shape == (2, 1600, 1)


def test_a_clip_by_time_is_heard_as_long_as_it_lasts(beside: str) -> None:
    clip = Clip(4, fps=5, where="random", per_video=10, times=True)
    n_flashes = 0
    for batch in batches(beside, clip=clip, shuffle=True, seed=1, batch_size=40):
        names = ["video", "video_pts", "video_time_base", "audio", "audio_span", "label"]
        assert list(batch) == names and batch["audio"].shape[1:] == (12_800, 1)
        begins = batch["video_pts"][:, 0] * 16  # of milliseconds, in samples
        loud = np.abs(batch["audio"][:, :, 0]) > 0.35
        for i in np.flatnonzero(loud.any(1)).tolist():
            n_flashes += 1
            assert 0 <= 16_000 - begins[i] - int(np.argmax(loud[i])) <= 2
    assert n_flashes > 4


def test_of_so_many_sounds_something_is_kept(beside: str, monkeypatch: pytest.MonkeyPatch) -> None:
    options: dict[str, Any] = {"clip": Clip(2, where="random", per_video=5), "shuffle": True}
    expected = [bits(batch) for batch in batches(beside, **options)]
    monkeypatch.setattr(decoding, "_MAX_AUDIO_STREAMS", 1)
    assert [bits(batch) for batch in batches(beside, **options)] == expected


def test_sources_of_a_mixture_have_sound(alone: str, beside: str) -> None:
    with ShardDataset(alone) as one, ShardDataset(alone) as other:
        (batch, *_) = batches(mix([one, other], weights=[1, 1]), Sound(seconds=1))
        assert batch["audio"].shape == (4, 16_000, 1)
    (plain,) = batches(beside, clip=ALL, batch_size=48)
    with ShardDataset(beside) as one, one.select([3, 1]) as chosen, one.select([1]) as last:
        found = batches(mix([chosen, last], weights=[2, 1]), clip=ALL)
    for batch in found:
        for i, row in enumerate(batch["label"].tolist()):
            own = plain["label"] == row
            assert any(np.array_equal(batch["audio"][i], each) for each in plain["audio"][own])
    assert {*np.concatenate([batch["label"] for batch in found]).tolist()} == {1, 3}


DRAWN = Sound(rate=8_000, seconds="1/2", where="random")


def starts_in(wholes: list[Any], batch: Any) -> list[int | None]:
    """Return where in its whole sound each sample of a batch begins."""
    found: list[int | None] = []
    for row, own in zip(batch["label"].tolist(), batch["audio"], strict=True):
        whole = wholes[row]
        if whole is None or len(whole) < len(own):
            found.append(None)
            continue
        views = np.lib.stride_tricks.sliding_window_view(whole[:, 0], 8)
        (at,) = np.flatnonzero((np.abs(views - own[:8, 0]) < 1e-5).all(1)).tolist()
        np.testing.assert_allclose(own, whole[at:][: len(own)], atol=1e-5)
        found.append(at)
    return found


@pytest.fixture(scope="module")
def noise(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, list[Any]]:
    """Sounds of which no part is like another, one of them absent, and what arrives of each."""
    folder = tmp_path_factory.mktemp("noise")
    samples: list[dict[str, Any]] = []
    for i, n in enumerate((16_000, 9_000, None, 8_000, 3_000)):
        stream = None
        if n is not None:
            values = np.random.default_rng(i).integers(-9_000, 9_000, n, np.int16)
            with wave.open(str(folder / f"{i}.wav"), "wb") as file:
                file.setparams((1, 2, 16_000, 0, "NONE", ""))
                file.writeframes(values.tobytes())
            stream = demux(str(folder / f"{i}.wav"), "audio")
        samples.append({"audio": stream, "label": i})
    made = write_dataset(folder / "set", len(samples), 2, SOUND, samples)
    (batch,) = batches(made, Sound(rate=8_000), batch_size=5)
    return made, batch["audio"]


def test_every_sample_that_can_start_a_span_is_as_likely_to(noise: tuple[str, list[Any]]) -> None:
    folder, wholes = noise
    found = []
    with loader_of(folder, DRAWN, shuffle=True, batch_size=5) as loader:
        for _ in range(80):
            (batch,) = loader
            assert batch["audio"].shape == (5, 4_000, 1)
            by_row = dict(zip(batch["label"].tolist(), starts_in(wholes, batch), strict=True))
            found.append([by_row[row] for row in (0, 1, 3)])
            spans = dict(zip(batch["label"].tolist(), batch["audio_span"].tolist(), strict=True))
            assert spans == {0: [0, 4_000], 1: [0, 4_000], 2: [0, 0], 3: [0, 4_000], 4: [0, 1_500]}
    long, short, exact = np.array(found).T
    assert not exact.any() and 0 <= short.min() < 50 and 450 < short.max() <= 500
    shares = np.bincount(long // 1000, minlength=4)[:4]
    assert long.max() <= 4_000 and (np.abs(shares - 20) < 13).all()
    assert len(set(long.tolist())) > 70


def test_a_span_can_reach_from_first_to_last_sample(noise: tuple[str, list[Any]]) -> None:
    folder, wholes = noise
    sound = Sound(rate=8_000, seconds=Fraction(4_499, 8_000), where="random")
    with ShardDataset(folder) as dataset, dataset.select([1]) as one, loader_of(one, sound) as it:
        found = {at for _ in range(20) for batch in it for at in starts_in(wholes, batch)}
    assert found == {0, 1}


def test_sound_that_is_shorter_is_followed_by_silence(noise: tuple[str, list[Any]]) -> None:
    folder, wholes = noise
    (drawn,) = batches(folder, DRAWN, batch_size=5)
    np.testing.assert_allclose(drawn["audio"][4, :1_400], wholes[4][:1_400], atol=1e-5)
    assert not drawn["audio"][4, 1_500:].any() and not drawn["audio"][2].any()


@pytest.mark.parametrize("transform", [None, dict])
def test_who_draws_a_span_makes_no_difference(noise: tuple[str, list[Any]], transform: Any) -> None:
    folder, _ = noise
    options: dict[str, Any] = {"shuffle": True, "seed": 7, "batch_size": 2}
    with loader_of(folder, DRAWN, **options) as loader:
        epochs = [[bits(batch) for batch in loader] for _ in range(2)]
        iterator = iter(loader)
        next(iterator)
        state = json.loads(json.dumps(loader.state_dict()))
        rest = [bits(batch) for batch in iterator]
    assert epochs[0] != epochs[1]
    with loader_of(folder, DRAWN, num_workers=2, transform=transform, **options) as loader:
        assert [[bits(batch) for batch in loader] for _ in range(2)] == epochs
        loader.load_state_dict(state)
        assert [bits(batch) for batch in loader] == rest


def damaged(files: list[Path], made: Path) -> str:
    """Write a dataset in which packet 5 of the fourth sound has changed."""
    samples = [{"audio": sound_of(files, i), "label": i} for i in range(len(LENGTHS))]
    copy = write_dataset(made, 4, 2, SOUND, samples)
    path = Path(copy) / "000001-000.shard"
    with ShardReader(path) as reader:
        stream = reader[1]["audio"]
        packet = bytes(stream.data[int(stream.packets["offset"][5]) :][:200])
    content = bytearray(path.read_bytes())
    content[content.index(packet) + 100] ^= 0x10
    path.write_bytes(content)
    return copy


@WORKERS
def test_damage_is_located_or_skipped(files: list[Path], tmp_path: Path, num_workers: int) -> None:
    copy = damaged(files, tmp_path / "set")
    options: dict[str, Any] = {"num_workers": num_workers}
    with pytest.raises(ChecksumMismatch, match=r"000001-000\.shard.*field 'audio'.*sample 1"):
        batches(copy, **options)
    where = r"000001-000\.shard, field 'audio', sample 1: packet 5 "
    with pytest.raises(MediaError, match=where):
        batches(copy, verify="off", **options)
    (batch,) = batches(copy, Sound(seconds=1), on_error="skip", max_skips=1, **options)
    assert batch.valid.tolist() == [True, True, True, False]
    assert [(each.index, each.error) for each in batch.skipped] == [(3, "ChecksumMismatch")]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"rate": 999}, "rate must be a whole number from 1000 to 768,000"),
        ({"channels": 3}, "channels must be 1, 2 or None; found 3"),
        ({"seconds": 0}, "seconds must be a number above 0"),
        ({"seconds": "1:2"}, "seconds must be a number above 0"),
        ({"dtype": "int8"}, "dtype must be one of 'float32', 'int16'"),
        ({"where": "all"}, "where must be one of 'first', 'random'; found 'all'"),
        ({"where": "random"}, 'where="random" needs seconds'),
    ],
)
def test_sound_that_cannot_be_is_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidArgument, match=words):
        Sound(**options)


def test_an_option_without_a_field_is_refused(alone: str, tmp_path: Path) -> None:
    for options, words in (
        ({"decode": {"audio": 16_000}}, r"audio fields to a shardio\.Sound.*read: audio; found"),
        ({"decode": {"audio": Sound()}, "fields": ["label"]}, "that are read: none; found 'audio'"),
        ({"decode": {"label": Sound()}}, "that are read: audio; found 'label'"),
        ({"decode": Sound()}, r'one of True, False, or .* decode=\{"audio": shardio\.Sound\('),
    ):
        with pytest.raises(InvalidArgument, match=words):
            loader_of(alone, **options)
    schema = Schema({"audio": Audio(optional=True), "audio_span": Array("int64")})
    made = write_dataset(tmp_path / "set", 1, 1, schema, [{"audio": None, "audio_span": 1}])
    with pytest.raises(
        InvalidArgument, match="'audio' adds the field 'audio_span', which exists already"
    ):
        loader_of(made)


def test_spans_are_not_drawn_beside_clips(beside: str) -> None:
    with pytest.raises(
        InvalidArgument, match="samples are clips of 'video'.*leave where=\"random\" out of Sound"
    ):
        loader_of(beside, DRAWN, clip=ALL)
    (batch,) = batches(beside, DRAWN, fields=["audio", "label"])
    assert batch["audio"].shape == (4, 4_000, 1)


def test_what_was_written_as_a_decimal_is_meant(alone: str) -> None:
    assert Sound(seconds=0.64) == Sound(seconds="16/25") != Sound(seconds=Fraction(0.64))
    assert Sound(seconds=0.64).length == Fraction(16, 25)
    assert Sound().length is None
