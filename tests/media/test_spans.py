"""Spans of videos: each is a stream of exactly its frames, which decode as those of the file do."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from shardio import EncodedStream, MediaError
from shardio.format.types.streams import packet_sizes
from shardio.media import SpanReader, demux, times_of
from tests.media.images_made import decoded
from tests.media.test_demuxing import B_FRAMES, OPEN
from tests.media_made import scene, write_cut, write_video

N_FRAMES = 40
CODECS: dict[str, dict[str, Any]] = {
    "B-frames": {"codec_options": B_FRAMES},
    "open groups": {"codec_options": OPEN},
    "one keyframe": {"codec_options": {"bf": "2", "g": "250"}},
    "AV1": {"codec": "libsvtav1", "codec_options": {"g": "2"}},
    "MPEG-4": {"codec": "mpeg4", "codec_options": {"bf": "2", "g": "9"}},
}


def made(path: Path, **options: Any) -> tuple[EncodedStream, npt.NDArray[np.uint8]]:
    write_video(path, scene(N_FRAMES), **options)
    whole = demux(str(path))
    return whole, pictures(whole)


def pictures(stream: EncodedStream) -> npt.NDArray[np.uint8]:
    return decoded(stream, range(stream.n_frames), (stream.height, stream.width, 3))


@pytest.mark.parametrize("kind", CODECS)
def test_a_span_has_its_own_frames_whatever_they_need(kind: str, tmp_path: Path) -> None:
    whole, expected = made(tmp_path / "a.mp4", **CODECS[kind])
    times = [time * whole.time_base for time in times_of(whole).tolist()]
    with SpanReader(str(tmp_path / "a.mp4")) as video:
        for first, stop in [(30, 33), (0, N_FRAMES), (7, 19), (19, 20), (3, 31), (11, 13)]:
            end = times[stop] if stop < N_FRAMES else None
            span = video.cut(times[first], end, times[first])
            assert span.n_frames == stop - first
            assert [time * span.time_base for time in times_of(span).tolist()] == [
                time - times[first] for time in times[first:stop]
            ]
            np.testing.assert_array_equal(pictures(span), expected[first:stop])


def test_a_span_that_begins_with_a_keyframe_has_no_other_packet(tmp_path: Path) -> None:
    whole, _ = made(tmp_path / "a.mp4", codec_options={"bf": "0", "g": "8", "keyint_min": "8"})
    times = [time * whole.time_base for time in times_of(whole).tolist()]
    with SpanReader(str(tmp_path / "a.mp4")) as video:
        half = (times[1] - times[0]) / 2
        span = video.cut(times[16] - half, times[24] - half)
        assert len(span.packets) == span.n_frames == 8
        assert packet_sizes(span.packets).sum() == packet_sizes(whole.packets)[16:24].sum()
        middle = video.cut(times[19], times[24])
        assert (len(middle.packets), middle.n_frames) == (8, 5)


def test_a_span_without_frames_is_refused(tmp_path: Path) -> None:
    made(tmp_path / "a.mp4")
    with SpanReader(str(tmp_path / "a.mp4")) as video:
        with pytest.raises(MediaError, match=r"no frame from second 9\.5 to 10$"):
            video.cut(Fraction(19, 2), Fraction(10))


def test_what_is_no_video_or_cut_off_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.mp4"
    made(path)
    path.write_bytes(path.read_bytes()[:-400])
    with pytest.raises(MediaError, match=r"a\.mp4: "):
        SpanReader(str(path))
    path.write_text("no video")
    with pytest.raises(MediaError, match="not a readable video"):
        SpanReader(str(path))


@pytest.mark.parametrize("codec", ["libx264", "libvpx-vp9"])
def test_a_file_whose_first_frames_have_no_time_is_refused(tmp_path: Path, codec: str) -> None:
    path = write_cut(tmp_path / "a.mkv", scene(70), 60, codec=codec)
    with pytest.raises(MediaError, match=r"a\.mkv: FFmpeg does not read the times"):
        SpanReader(str(path))


def test_checking_decodes_every_frame_of_a_span(tmp_path: Path) -> None:
    path = tmp_path / "a.mp4"
    whole, _ = made(path, codec="mpeg4", codec_options={"g": "5"})
    data = bytearray(path.read_bytes())
    packet = bytes(whole.data[int(whole.packets["offset"][33]) :][:40])
    at = data.find(packet)
    data[at + 8 : at + 30] = bytes(22)
    path.write_bytes(data)
    times = [time * whole.time_base for time in times_of(whole).tolist()]
    with SpanReader(str(path), check=True) as video:
        assert video.cut(times[0], times[20]).n_frames == 20
        with pytest.raises(MediaError, match=r"a\.mp4: "):
            video.cut(times[20], None)
