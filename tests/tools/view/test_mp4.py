"""The media of a sample is a file of which any range can be read, without decoding a video."""

from __future__ import annotations

import io
import wave
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shardio
from shardio import Array, Audio, Bytes, EncodedStream, Image, InvalidArgument, Text, Video
from shardio.errors import StoreUnavailable
from shardio.format.checksum import CHUNK_BYTES
from shardio.format.types.streams import pack_packets, packet_flags, packet_sizes
from shardio.media import AudioDecoder, ClipDecoder, Mp4File, demux, encode, sound_of
from shardio_tools.view import mp4
from shardio_tools.view.mp4 import MediaBytes, open_media, sound_field
from tests.media.images_made import saved
from tests.media_made import quadrants, scene, write_flash, write_video
from tests.shards import flip
from tests.tools.view.browsing import serving, visiting
from tests.tools.view.served import viewing


def _open(path: Path, fields: dict[str, Any], *samples: dict[str, Any]) -> shardio.ShardDataset:
    with shardio.DatasetWriter(path, shardio.Schema(fields)) as writer:
        for sample in samples:
            writer.append(sample)
    return shardio.open(path)


def _whole(media: MediaBytes, step: int = 1000) -> bytes:
    """Return the bytes of a file, read in chunks."""
    parts = range(0, media.size, step)
    data = b"".join(media.read(at, min(at + step, media.size)) for at in parts)
    assert len(data) == media.size and media.read(0, media.size) == data
    return data


def test_a_video_is_a_file_with_its_packets_and_its_sound(tmp_path: Path) -> None:
    source = str(write_flash(tmp_path / "a.mp4", codec="aac"))
    video, sound = demux(source), sound_of(source)
    assert sound is not None
    fields = {"video": Video(), "sound": Audio(optional=True)}
    samples = {"video": video, "sound": sound}, {"video": video, "sound": None}
    with _open(tmp_path / "set", fields, *samples) as dataset:
        made = open_media(dataset, 0, "video")
        data = _whole(made)
        silent = open_media(dataset, 1, "video")
        alone = open_media(dataset, 0, "sound")
    assert made.media_type == 'video/mp4; codecs="avc1.64000a, mp4a.40.2"'
    assert silent.media_type == 'video/mp4; codecs="avc1.64000a"'
    assert alone.media_type == 'audio/mp4; codecs="mp4a.40.2"'
    assert len({made.etag, silent.etag, alone.etag}) == 3
    (tmp_path / "made.mp4").write_bytes(data)
    again = sound_of(str(tmp_path / "made.mp4"))
    assert bytes(demux(str(tmp_path / "made.mp4")).data[:]) == bytes(video.data[:])
    assert again is not None and bytes(again.data[:]) == bytes(sound.data[:])


def test_the_etag_of_a_video_is_also_that_of_its_sound(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = str(write_flash(tmp_path / "a.mp4", codec="aac"))
    fields = {"video": Video(), "sound": Audio(optional=True)}
    samples = [{"video": demux(source), "sound": sound_of(source)}]
    with _open(tmp_path / "set", fields, *samples) as dataset:
        whole = open_media(dataset, 0, "video")

        def fail(error: Exception) -> Callable[..., Any]:
            def read(*_: object) -> Any:
                raise error

            return read

        monkeypatch.setattr(mp4, "stored_value", fail(shardio.MediaError("damaged")))
        silent = open_media(dataset, 0, "video")
        monkeypatch.setattr(mp4, "stored_value", fail(StoreUnavailable("the store is down")))
        with pytest.raises(StoreUnavailable):
            open_media(dataset, 0, "video")
    assert "mp4a" in whole.media_type and "mp4a" not in silent.media_type
    assert whole.etag != silent.etag and whole.size > silent.size


def test_tables_are_kept_and_the_packets_are_read_from_the_dataset_at_hand(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    video = demux(str(write_video(tmp_path / "a.mp4", scene(20))))
    with _open(tmp_path / "set", {"video": Video()}, {"video": video}) as dataset:
        first = _whole(open_media(dataset, 0, "video"))
    monkeypatch.setattr(mp4, "Mp4File", None)
    with shardio.open(tmp_path / "set") as dataset:
        made = open_media(dataset, 0, "video")
        assert _whole(made) == first


def test_tables_that_were_not_used_for_the_longest_time_are_dropped(tmp_path: Path) -> None:
    video = demux(str(write_video(tmp_path / "a.mp4", scene(20))))
    file = Mp4File(video)
    tables = mp4._Tables(max_bytes=2 * file.n_table_bytes)
    for key in "aab":
        tables.add(key, file)
    assert tables.get("a") is not None
    tables.add("c", file)
    assert [tables.get(key) is not None for key in "abc"] == [True, False, True]


def test_nothing_is_decoded_for_a_video(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = str(write_flash(tmp_path / "a.mp4", codec="aac"))
    sample = {"video": demux(source), "sound": sound_of(source)}

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("decoded")

    with _open(tmp_path / "set", {"video": Video(), "sound": Audio()}, sample) as dataset:
        for decoder in (ClipDecoder, AudioDecoder):
            monkeypatch.setattr(decoder, "decode", refuse)
        _whole(open_media(dataset, 0, "video"))


def test_sound_that_cannot_be_in_the_file_is_left_out(tmp_path: Path) -> None:
    source = str(write_flash(tmp_path / "a.mkv", codec="pcm_s16le"))
    video, sound = demux(source), sound_of(source)
    assert sound is not None
    vorbis = replace(sound, parameters={**sound.parameters, "codec": "flac"}, extradata=b"")
    fields = {"video": Video(), "sound": Audio()}
    samples = {"video": video, "sound": sound}, {"video": video, "sound": vorbis}
    with _open(tmp_path / "set", fields, *samples) as dataset:
        for row in (0, 1):
            assert open_media(dataset, row, "video").media_type == 'video/mp4; codecs="avc1.64000a"'
            _whole(open_media(dataset, row, "video"))


@pytest.mark.parametrize("layout", ["mono", "stereo"])
def test_other_sound_is_a_wav_file_whose_ranges_are_decoded(tmp_path: Path, layout: str) -> None:
    source = str(write_flash(tmp_path / "a.mkv", codec="pcm_s16le", layouts=(layout,)))
    sound = sound_of(source)
    assert sound is not None
    with _open(tmp_path / "set", {"sound": Audio()}, {"sound": sound}) as dataset:
        made = open_media(dataset, 0, "sound")
        data = _whole(made, 1013)
        for start, stop in ((0, 1), (40, 47), (43, 44), (45, 46), (44, 44), (101, 105)):
            assert made.read(start, stop) == data[start:stop]
    assert made.media_type == "audio/wav"
    with wave.open(io.BytesIO(data)) as file:
        assert (file.getframerate(), file.getnchannels()) == (16_000, sound.width)
        assert file.getnframes() == sound.n_frames == 32_000
        assert file.readframes(32_000) == bytes(sound.data[:])


@pytest.mark.parametrize(
    ("form", "media_type"),
    [("PNG", "image/png"), ("JPEG", "image/jpeg"), ("WEBP", "image/webp"), ("BMP", "image/bmp")],
)
def test_an_image_is_its_stored_file(tmp_path: Path, form: str, media_type: str) -> None:
    data = saved(quadrants(40, 30), form)
    with _open(tmp_path / "set", {"x": Image()}, {"x": data}) as dataset:
        made = open_media(dataset, 0, "x")
        assert (made.media_type, _whole(made, 100)) == (media_type, data)


def test_an_image_that_browsers_do_not_show_becomes_a_jpeg(tmp_path: Path) -> None:
    data = saved(quadrants(40, 30), "TIFF")
    fields = {"x": Image(), "y": Bytes()}
    with _open(tmp_path / "set", fields, {"x": data, "y": data}) as dataset:
        for name in fields:
            made = open_media(dataset, 0, name)
            assert made.media_type == "image/jpeg"
            assert _whole(made, 100).startswith(b"\xff\xd8\xff")


def test_an_image_is_read_once_for_an_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data, n_read = saved(quadrants(400, 300), "BMP"), 0

    def counted(*given: Any) -> MediaBytes:
        nonlocal n_read
        n_read += 1
        return open_media(*given)

    monkeypatch.setattr("shardio_tools.view.app.open_media", counted)
    monkeypatch.setattr("shardio_tools.view.responses.CHUNK_BYTES", 1000)
    _open(tmp_path / "set", {"x": Image()}, {"x": data}).close()
    with viewing(tmp_path / "set") as client:
        assert client.get("/media/0/x").content == data
    assert n_read == 1


def test_an_image_of_too_many_pixels_is_not_decoded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shardio_tools.view.stored.MAX_PIXELS", 40 * 30 - 1)
    samples = {form: saved(quadrants(40, 30), form) for form in ("TIFF", "PNG")}
    with _open(tmp_path / "set", dict.fromkeys(samples, Image()), samples) as dataset:
        with pytest.raises(
            InvalidArgument, match="30 high × 40 wide pixels: at most 1,199 are decoded"
        ):
            open_media(dataset, 0, "TIFF")
        assert open_media(dataset, 0, "PNG").media_type == "image/png"


def _repeated(source: EncodedStream, n: int) -> EncodedStream:
    """Return a video that is shown n times."""
    packets = np.tile(source.packets, n)
    packets["pts"] += np.repeat(np.arange(n) * source.duration, len(source.packets))
    sizes = np.tile(packet_sizes(source.packets), n)
    table = pack_packets(sizes, packet_flags(packets), packets["pts"], packets["duration"])
    return replace(
        source,
        packets=table,
        data=bytes(source.data[:]) * n,
        n_frames=n * source.n_frames,
        duration=n * source.duration,
    )


def test_a_seek_in_a_video_of_an_hour_is_a_look_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = demux(str(write_video(tmp_path / "a.mp4", scene(50, 32, 32))))
    hour = _repeated(source, 3600 // 2)
    with _open(tmp_path / "set", {"video": Video()}, {"video": hour}) as dataset:
        made = open_media(dataset, 0, "video")
        data = made.read(0, made.size)
        monkeypatch.setattr(mp4, "Mp4File", None)
        for start in np.random.default_rng(0).integers(0, made.size - 65_536, 20).tolist():
            found = open_media(dataset, 0, "video").read(start, start + 65_536)
            assert found == data[start : start + 65_536]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("mjpeg", "browsers do not play mjpeg, as in the field 'mjpeg'"),
        ("frames", "browsers do not play values, as in the field 'frames'"),
        ("note", "browsers do not play texts, as in the field 'note'"),
        ("blob", "the field 'blob' has no image"),
        ("maybe", "the field 'maybe' is missing"),
        ("x", "there is no field 'x'"),
    ],
)
def test_a_value_without_media_is_an_error(tmp_path: Path, name: str, expected: str) -> None:
    stream = demux(str(write_video(tmp_path / "a.mp4", scene(3))))
    fields = {
        "mjpeg": Video(),
        "frames": Array("uint8", (2, 8, 8, 3)),
        "note": Text(),
        "blob": Bytes(),
        "maybe": Image(optional=True),
    }
    sample = {
        "mjpeg": replace(stream, parameters={**stream.parameters, "codec": "mjpeg"}),
        "frames": np.zeros((2, 8, 8, 3), np.uint8),
        "note": "text",
        "blob": b"blob",
        "maybe": None,
    }
    with _open(tmp_path / "set", fields, sample) as dataset:
        with pytest.raises(InvalidArgument, match=expected):
            open_media(dataset, 0, name)


def test_damage_is_an_error_where_it_is(tmp_path: Path) -> None:
    source = demux(str(write_video(tmp_path / "a.mp4", scene(60))))
    stream = _repeated(source, 2 * CHUNK_BYTES // len(source.data) + 1)
    with _open(tmp_path / "set", {"video": Video()}, {"video": stream}) as dataset:
        made = open_media(dataset, 0, "video")
        whole = made.read(0, made.size)
    (shard,) = (tmp_path / "set").rglob("*.shard")
    flip(shard, shard.read_bytes().rindex(bytes(source.data[:])) + len(source.data) - 50)
    with shardio.open(tmp_path / "set") as dataset:
        made = open_media(dataset, 0, "video")
        assert made.read(0, 2000) == whole[:2000]
        with pytest.raises(shardio.ShardCorrupt, match="field 'video'"):
            made.read(made.size - 10, made.size)


def test_the_sound_of_a_video_is_in_the_same_record() -> None:
    def sounds(*names: str) -> dict[str, str | None]:
        kinds: dict[str, Callable[[], Any]] = {"v": Video, "s": Audio}
        schema = {name: kinds[name.rpartition(".")[2][0]]() for name in names}
        return {name: sound_field(schema, name) for name in names if schema[name].has_frames}

    assert sounds("v") == {"v": None}
    assert sounds("v", "s") == {"v": "s"}
    assert sounds("v1", "v2", "s1", "s2") == {"v1": "s1", "v2": None}
    assert sounds("a.v", "a.s", "b.v", "b.s") == {"a.v": "a.s", "b.v": "b.s"}
    assert sounds("a.v", "b.v", "s") == {"a.v": "s", "b.v": None}
    assert sounds("a.v", "b.s") == {"a.v": None}


_PLAY = """async ([address, times]) => {
  const video = document.createElement('video');
  video.muted = true;
  const loaded = new Promise((resolve, reject) => {
    video.onloadeddata = resolve;
    video.onerror = () => reject(new Error(video.error.message));
  });
  const nextFrame = () => new Promise((resolve) => {
    video.requestVideoFrameCallback((now, facts) => resolve(facts.mediaTime));
  });
  const first = nextFrame();
  video.src = address;
  document.body.append(video);
  await loaded;
  await first;  // it may be drawn only now, and would be taken for the one that is sought
  const shown = [];
  for (const time of times) {
    const frame = nextFrame();
    video.currentTime = time;
    shown.push(await frame);
  }
  const ended = new Promise((resolve) => { video.onended = resolve; });
  video.playbackRate = 4;
  await video.play();
  await ended;
  const found = [video.duration, video.videoWidth, video.videoHeight, shown];
  const n_bytes = video.webkitAudioDecodedByteCount;
  video.remove();
  return [...found, n_bytes];
}"""


@pytest.mark.external
@pytest.mark.process
@pytest.mark.slow
def test_a_browser_plays_each_codec_and_seeks_to_the_frame(tmp_path: Path) -> None:
    uneven = [0, 3, 4, 10, 11, 20]
    options: dict[str, Any] = {"times": uneven, "time_base": Fraction(1, 30), "rotation": 90}
    opus = str(write_flash(tmp_path / "b.mkv", codec="libopus", rate=48_000))
    videos = {
        "h264": demux(str(write_video(tmp_path / "h264.mp4", scene(50)))),
        "slices": demux(
            str(
                write_video(
                    tmp_path / "slices.ts", scene(50), codec_options={"x264-params": "slices=4"}
                )
            )
        ),
        "vp9": demux(str(write_video(tmp_path / "vp9.mkv", scene(50), codec="libvpx-vp9"))),
        "encoded": encode(enumerate(scene(50)), 96, 64, Fraction(1, 25)),
        "av1": encode(enumerate(scene(50)), 96, 64, Fraction(1, 25), codec="av1"),
        "uneven": demux(str(write_video(tmp_path / "uneven.mp4", scene(6), **options))),
        "clip.opus": demux(opus),
    }
    fields: dict[str, Any] = {name: Video() for name in videos} | {"clip.sound": Audio()}
    _open(tmp_path / "set", fields, {**videos, "clip.sound": sound_of(opus)}).close()
    with visiting() as visits, serving(tmp_path / "set") as link, visits.page(link) as page:
        for name in videos:
            times = [0.5, 0.1, 0.21] if name == "uneven" else [1.21, 0.5, 1.83, 0.1]
            found = page.evaluate(_PLAY, [f"media/0/{name}", times])
            seconds, width, height, shown, n_sound_bytes = found
            stream = videos[name]
            assert (width, height) == (stream.width, stream.height), name
            assert abs(seconds - float(stream.duration * stream.time_base)) < 0.05, name
            starts = np.array(uneven) / 30 if name == "uneven" else np.arange(50) / 25
            expected = [starts[starts <= each + 1e-6].max() for each in times]
            assert shown == pytest.approx(expected, abs=0.0006), name
            assert (n_sound_bytes > 0) == (name == "clip.opus"), name
        visits.check()
