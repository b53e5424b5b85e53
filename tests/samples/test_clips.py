"""The clips of videos: arithmetic, without any video."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardio.errors import InvalidArgument
from shardio.order.permutation import keyed_hashes
from shardio.samples.clips import Clip, Clips

Found = list[tuple[int, list[int]]]


def draws(n: int, key: int = 7) -> npt.NDArray[np.uint64]:
    return keyed_hashes(np.arange(n), key)


def clips_of(clip: Clip, n_frames: list[int], key: int = 7) -> Found:
    clips = Clips(clip, np.array(n_frames, np.int64))
    positions = np.arange(len(clips))
    videos = clips.videos(positions)
    codes = clips.start_codes(positions, videos, draws(len(clips), key))
    pairs = zip(videos.tolist(), codes.tolist(), strict=True)
    return [(video, list(clips.frames(start))) for video, start in pairs]


def cut_one_by_one(clip: Clip, n_frames: list[int]) -> Found:
    """Return the clips of `where="all"` without arithmetic, as a player would find them."""
    found = []
    for video, n in enumerate(n_frames):
        for start in range(0, n, clip.step or 1):
            frames = [start + k * clip.stride for k in range(clip.frames)]
            if frames[-1] < n:
                found.append((video, frames))
    return found


@given(
    st.lists(st.integers(0, 40), max_size=6),
    st.integers(1, 5),
    st.integers(1, 4),
    st.none() | st.integers(1, 9),
)
def test_one_every_step(n_frames: list[int], frames: int, stride: int, step: int | None) -> None:
    clip = Clip(frames, stride, step=step)
    assert clips_of(clip, n_frames) == cut_one_by_one(clip, n_frames)


@pytest.mark.parametrize("where", ["random", "uniform"])
def test_there_are_so_many_clips_of_each_video_that_is_long_enough(where: Any) -> None:
    found = clips_of(Clip(3, 2, where=where, per_video=2), [9, 4, 0, 5])
    assert [video for video, _ in found] == [0, 0, 3, 3]
    assert all(frames[-1] < [9, 4, 0, 5][video] for video, frames in found)


def test_clips_that_are_spread_lie_in_the_middles_of_equal_parts() -> None:
    found = clips_of(Clip(1, where="uniform", per_video=4), [80])
    assert [frames for _, frames in found] == [[10], [30], [50], [70]]


def test_one_clip_that_is_spread_is_the_middle_one() -> None:
    assert clips_of(Clip(11, where="uniform"), [31]) == [(0, list(range(10, 21)))]


def test_random_clips_begin_anywhere_with_equal_likelihood() -> None:
    clip = Clip(4, 3, where="random", per_video=50_000)
    starts = [frames[0] for _, frames in clips_of(clip, [19])]
    counts = np.bincount(starts, minlength=10)
    assert len(counts) == 10  # of 19 frames a clip of 10 can start at any of the first 10
    expected = 5000
    # Chi-squared of 9 degrees of freedom: one key in 10^6 exceeds 47.
    assert ((counts - expected) ** 2 / expected).sum() < 47


def test_random_clips_depend_on_their_draws_and_others_do_not() -> None:
    for where, same in (("random", False), ("uniform", True), ("all", True)):
        clip = Clip(2, where=where)  # type: ignore[arg-type]
        assert (clips_of(clip, [90, 50], key=1) == clips_of(clip, [90, 50], key=2)) is same


def test_positions_may_be_asked_for_in_any_order() -> None:
    clips = Clips(Clip(2), np.array([9, 5]))
    assert len(clips) == 6
    positions = np.array([5, 0, 5, 3])
    videos = clips.videos(positions)
    assert videos.tolist() == [1, 0, 1, 0]
    assert clips.start_codes(positions, videos, draws(4)).tolist() == [2, 0, 2, 6]


def test_clips_of_appended_videos_come_behind() -> None:
    clip = Clip(3, where="uniform", per_video=2)
    assert clips_of(clip, [9, 4, 12])[:4] == clips_of(clip, [9, 4])


def test_the_same_clips_have_the_same_identity_whatever_their_pixels_are() -> None:
    assert Clip().identity == Clip(step=16, size=(8, 6), crop="random", pixels="yuv420").identity
    assert Clip().identity == Clip(times=True, loop_filter=False).identity
    others = [Clip(8), Clip(stride=2), Clip(step=8), Clip(where="random"), Clip(field="left")]
    others += [Clip(where="uniform"), Clip(where="uniform", per_video=2)]
    others += [Clip(fps=8), Clip(fps=Fraction(25, 2)), Clip(around="goal"), Clip(around="foul")]
    others += [Clip(around="goal", lead=0.9), Clip(around="goal", fps=8)]
    assert len({Clip().identity, *(clip.identity for clip in others)}) == 14
    assert Clip(per_video=4).identity == Clip().identity  # the same clips, in another order


def test_clips_by_time_have_the_same_identity_however_they_are_written() -> None:
    assert Clip(fps=12.5).identity == Clip(fps=Fraction(25, 2), step=16, times=True).identity
    assert Clip(fps=8) == Clip(fps=8.0)
    assert Clip(around="goal", frames=9).identity == Clip(9, around="goal", lead=0.55).identity


@pytest.mark.parametrize(
    ("frames", "lead", "n"), [(16, None, 7), (11, 0.3, 3), (11, 0, 0), (11, 1, 10), (1, 1.0, 0)]
)
def test_so_many_frames_are_before_that_of_the_event(frames: int, lead: Any, n: int) -> None:
    assert Clip(frames, around="goal", lead=lead).n_before == n


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"frames": 0}, "frames must be a whole number from 1"),
        ({"frames": 2.0}, "frames must be"),
        ({"stride": True}, "stride must be"),
        ({"step": 0}, "step must be"),
        ({"where": "some"}, "where must be one of 'all', 'random', 'uniform'"),
        ({"where": "random", "step": 4}, 'step is for where="all"'),
        ({"per_video": 0}, "per_video must be"),
        ({"where": "uniform", "per_video": 0}, "per_video must be"),
        ({"size": 112}, "size must be (height, width)"),
        ({"size": (0, 4)}, "size must be"),
        ({"size": (7, 8), "pixels": "yuv420"}, "even sizes"),
        ({"pixels": "bgr"}, "pixels must be one of 'rgb', 'rgb-fast', 'yuv420'"),
        ({"crop": "left"}, "crop must be one of"),
        ({"crop": "random"}, "needs size="),
        ({"field": 3}, "field must be the name"),
        ({"fps": 0}, "fps must be frames per second, above 0"),
        ({"fps": -8}, "found -8"),
        ({"fps": True}, "found True"),
        ({"fps": "8"}, "found '8'"),
        ({"fps": 29.97}, "such as fractions.Fraction(30000, 1001); found 29.97"),
        ({"fps": float("nan")}, "found nan"),
        ({"fps": 1 << 31}, "fps must be"),
        ({"fps": Fraction(1, 1 << 31)}, "fps must be"),
        ({"fps": 8, "stride": 2}, "pass one of them; found fps=8, stride=2"),
        ({"around": 3}, "around must be the name of a field"),
        ({"around": "goal", "where": "random"}, "leave out where and step"),
        ({"around": "goal", "step": 4}, "leave out where"),
        ({"around": "goal", "lead": 1.1}, "lead must be a number from 0 to 1; found 1.1"),
        ({"around": "goal", "lead": float("nan")}, "lead must be"),
        ({"around": "goal", "lead": "0.5"}, "lead must be"),
        ({"around": "goal", "lead": True}, "lead must be"),
        ({"lead": 0.5}, "lead is for clips around events"),
        ({"times": 1}, "times must be True or False"),
        ({"loop_filter": "no"}, "loop_filter must be True or False; found 'no'"),
    ],
)
def test_what_cannot_be_is_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        Clip(**options)
    assert words in str(caught.value)
