"""Frames on show at a time: exact arithmetic, compared with a model that tries every frame."""

from __future__ import annotations

from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from shardio import EncodedStream
from shardio.errors import MediaError
from shardio.format.types.streams import PacketFlag, pack_packets
from shardio.order.permutation import keyed_hashes
from shardio.samples.clips import Clip, Clips, Events
from shardio.samples.video_index import FrameTimes, clip_frames, n_times

MAX = (1 << 63) - 1
HIDDEN = int(PacketFlag.HIDDEN)


@dataclass(frozen=True)
class Made:
    """A video as packets in the order of decoding: (pts, is hidden), and what its index says."""

    packets: list[tuple[int, bool]]
    time_base: Fraction
    last: int
    """For how many ticks each packet is shown; 0 if unknown."""
    is_known: bool

    @property
    def shown(self) -> list[int]:
        return sorted(pts for pts, is_hidden in self.packets if not is_hidden)

    @property
    def length(self) -> int:
        times = sorted({*self.shown})
        last = self.last or (times[-1] - times[-2] if len(times) > 1 else 1)
        return times[-1] - times[0] + last

    def stream(self) -> EncodedStream:
        pts, flags = [each for each, _ in self.packets], [HIDDEN * each for _, each in self.packets]
        packets = pack_packets([1] * len(pts), flags, pts, [self.last] * len(pts))
        length = self.length if self.is_known else 0
        data = b"x" * len(pts)
        return EncodedStream(
            {"codec": "h264"}, b"", packets, data, self.time_base, len(self.shown), 8, 8, length
        )

    def frame_at(self, ticks: Fraction) -> int:
        return max(i for i, pts in enumerate(self.shown) if pts - self.shown[0] <= ticks)

    def clip_at(self, first: Fraction, clip: Clip) -> list[int] | None:
        """Return the frames of a clip from a time on.

        None if its last one is not shown any more.
        """
        assert clip.rate is not None
        times = [first + i / clip.rate / self.time_base for i in range(clip.frames)]
        if times[-1] >= self.length:
            return None
        return [self.frame_at(time) for time in times]

    def n_frames(self, clip: Clip) -> int:
        assert clip.rate is not None
        return count_one_by_one(self.length, self.time_base, clip.rate)


def count_one_by_one(length: int, time_base: Fraction, fps: Fraction) -> int:
    n = 0
    while n / fps < length * time_base:
        n += 1
    return n


TIME_BASES = st.sampled_from([Fraction(1, 25), Fraction(1, 1000), Fraction(1001, 30000)])
RATES = st.sampled_from([8, 12.5, 30, Fraction(30000, 1001), 1000])
VIDEOS = st.builds(
    Made,
    st.lists(st.tuples(st.integers(-40, 40), st.booleans()), min_size=1, max_size=12),
    TIME_BASES,
    st.integers(0, 9),
    st.booleans(),
).filter(lambda made: any(not is_hidden for _, is_hidden in made.packets))


def clips_of(made: Made, clip: Clip, events: Events | None = None) -> list[list[int]]:
    times = FrameTimes(made.stream())
    counted = n_times(
        np.array([times.length], np.uint64),
        np.array([made.time_base.numerator], np.uint32),
        np.array([made.time_base.denominator], np.uint32),
        Fraction(clip.fps or 1),
    )
    if clip.rate is None:
        counted = np.array([len(times.pts)])
    clips = Clips(clip, counted, events)
    positions = np.arange(len(clips))
    codes = clips.start_codes(positions, clips.videos(positions), keyed_hashes(positions, 3))
    return [clip_frames(clips, code, times).tolist() for code in codes.tolist()]


@settings(max_examples=50)
@given(VIDEOS)
def test_a_video_lasts_until_its_last_frame_is_gone(made: Made) -> None:
    times = FrameTimes(made.stream())
    assert times.pts.tolist() == made.shown
    assert times.length == made.length


@settings(max_examples=50)
@given(VIDEOS, RATES, st.integers(1, 5), st.integers(1, 7))
def test_all_clips_by_time_start_every_step(made: Made, fps: Any, frames: int, step: int) -> None:
    clip = Clip(frames, fps=fps, step=step)
    assert clip.rate is not None
    expected, k = [], 0
    while found := made.clip_at(k * step / clip.rate / made.time_base, clip):
        expected.append(found)
        k += 1
    assert clips_of(made, clip) == expected


@settings(max_examples=50)
@given(VIDEOS, RATES, st.integers(1, 5), st.sampled_from(["random", "uniform"]))
def test_a_clip_may_start_at_any_shown_frame(made: Made, fps: Any, frames: int, where: Any) -> None:
    clip = Clip(frames, fps=fps, where=where, per_video=6)
    starts = [Fraction(pts - made.shown[0]) for pts in sorted({*made.shown})]
    every = [found for start in starts if (found := made.clip_at(start, clip))]
    chosen = [(2 * k + 1) * len(every) // 12 for k in range(6)]
    if where == "random":
        draws = keyed_hashes(np.arange(6), 3).tolist()
        chosen = [(draw >> 32) * len(every) >> 32 for draw in draws]
    assert clips_of(made, clip) == ([every[k] for k in chosen] if every else [])


@settings(max_examples=50)
@given(VIDEOS, RATES, st.integers(1, 5), st.sampled_from([0.0, 0.3, 0.5, 1.0]), st.data())
def test_clips_around_events_have_them_where_asked_or_are_moved_inside(
    made: Made, fps: Any, frames: int, lead: float, data: st.DataObject
) -> None:
    clip = Clip(frames, fps=fps, around="event", lead=lead)
    assert clip.rate is not None
    assume(made.n_frames(clip) >= frames)
    number = data.draw(st.integers(0, len(made.shown) - 1))
    ticks = Fraction(made.shown[number] - made.shown[0])
    value: np.ndarray[Any, Any] = np.array([number])
    if data.draw(st.booleans()):
        value = np.array([data.draw(st.floats(0, float(made.length * made.time_base)))])
        ticks = Fraction(value[0].item()) / made.time_base
    n_before = int(Fraction(str(lead)) * (frames - 1))
    first = max(Fraction(0), ticks - n_before / clip.rate / made.time_base)
    expected = made.clip_at(first, clip)
    if expected is None:  # the latest whole tick from which it fits
        last = max(k for k in range(made.length) if made.clip_at(Fraction(k), clip))
        expected = made.clip_at(Fraction(last), clip)
    assert clips_of(made, clip, Events(np.array([1]), value)) == [expected]


@settings(max_examples=50)
@given(VIDEOS, st.integers(1, 4), st.integers(1, 3), st.sampled_from([0.0, 0.5, 1.0]), st.data())
def test_clips_around_events_may_go_by_frames_too(
    made: Made, frames: int, stride: int, lead: float, data: st.DataObject
) -> None:
    clip, n = Clip(frames, stride, around="event", lead=lead), len(made.shown)
    assume(n >= clip.span)
    frame = data.draw(st.integers(0, n - 1))
    value: np.ndarray[Any, Any] = np.array([frame])
    if data.draw(st.booleans()):
        seconds = data.draw(st.floats(0, float(made.length * made.time_base)))
        frame = made.frame_at(Fraction(seconds) / made.time_base)
        value = np.array([seconds])
    start = frame - int(Fraction(str(lead)) * (frames - 1)) * stride
    start = min(max(start, 0), n - clip.span)
    expected = [start + k * stride for k in range(frames)]
    assert clips_of(made, clip, Events(np.array([1]), value)) == [expected]


@given(
    st.integers(0, (1 << 64) - 1),
    st.integers(1, (1 << 32) - 1),
    st.integers(1, (1 << 32) - 1),
    st.builds(Fraction, st.integers(1, (1 << 31) - 1), st.integers(1, (1 << 31) - 1)),
)
def test_n_times_is_exact(length: int, numerator: int, denominator: int, fps: Fraction) -> None:
    exact = -(-length * numerator * fps // denominator)
    columns = np.array([length], np.uint64), np.array([numerator], np.uint32)
    (found,) = n_times(*columns, np.array([denominator], np.uint32), fps).tolist()
    assert found == min(exact, MAX)


def test_times_that_are_far_apart_do_not_wrap_around() -> None:
    packets = [(-MAX - 1, False), (0, False), (MAX, False)]
    made = Made(packets, Fraction(1), 1, is_known=False)
    times = FrameTimes(made.stream())
    assert times.length == 1 << 64
    found = times.frames_at(Fraction(0), Fraction(1 << 62), 5)
    assert found.tolist() == [0, 0, 1, 1, 2]
    assert times.frames_at(Fraction((1 << 64) - 1), Fraction(1 << 40), 2).tolist() == [2, 2]
    assert times.start_at_fraction(1, 2, Fraction((1 << 63) - 1)) == 1 << 63
    assert times.clamp(Fraction(1 << 64), Fraction(5)) == (1 << 64) - 6


def test_a_table_that_counts_other_frames_is_refused() -> None:
    stream = Made([(0, False), (1, True)], Fraction(1, 25), 1, is_known=True).stream()
    other = replace(stream, n_frames=2)
    with pytest.raises(MediaError, match="holds 1 frames; expected 2"):
        _ = FrameTimes(other).pts


def test_a_clip_that_would_end_with_the_video_is_moved_by_a_tick() -> None:
    # From the frame at tick 32 the last time would be 40, the end; the latest that fits is 31.
    times = FrameTimes(
        Made([(k * 4, False) for k in range(10)], Fraction(1, 100), 4, True).stream()
    )
    assert times.clamp(Fraction(32), Fraction(8)) == 31
    assert times.clamp(Fraction(63, 2), Fraction(8)) == Fraction(63, 2)
