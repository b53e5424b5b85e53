"""Which frames a clip has where that goes by times: at so many per second, or around an event."""

from __future__ import annotations

from fractions import Fraction

import numpy as np

from shardio.views.clips import Clip, Clips
from shardio.views.frame_times import FrameTimes, Numbers


def frames_of(clips: Clips, start: int, times: FrameTimes) -> Numbers:
    """The frames of the clip that `clips.starts` gives as `start`, of the video with these times.

    Whoever has another clip of it has other frames: nothing here depends on the position.
    """
    clip = clips.clip
    if not clip.goes_by_times:
        return _run(clip, start)
    if clip.rate is None:
        return _run(clip, _start_around(clip, _event(clips, start), times))
    every = times.ticks_at(clip.rate)
    reach = (clip.frames - 1) * every
    if clip.around is not None:
        first = _ticks_of(_event(clips, start), times) - clip.n_before * every
        first = times.inside(first, reach)
    elif clip.where == "all":
        first = start * every
    else:
        first = times.start_at_share(start, clips.n_shares, reach)
    return times.on_show(first, every, clip.frames)


def _run(clip: Clip, start: int) -> Numbers:
    return start + clip.stride * np.arange(clip.frames)


def _event(clips: Clips, number: int) -> int | float:
    """When an event is: in seconds, or as an integer at the time of a frame."""
    if clips.events is None:
        raise AssertionError("clips around events are made with their events")
    found: int | float = clips.events.values[number].item()
    return found


def _ticks_of(event: float, times: FrameTimes) -> Fraction:
    """How many ticks after the first frame an event is, exactly."""
    if isinstance(event, int):
        return Fraction(times.after_start(event))
    return Fraction(event) / times.time_base


def _start_around(clip: Clip, event: float, times: FrameTimes) -> int:
    """The first frame of a clip around an event, which goes by frames."""
    frame = event
    if not isinstance(event, int):
        (frame,) = times.on_show(_ticks_of(event, times), Fraction(0), 1).tolist()
    last = len(times.pts) - clip.span
    return max(0, min(int(frame) - clip.n_before * clip.stride, last))
