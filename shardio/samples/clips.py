"""Clips of stored videos: compute the video and the frames of a clip from the clip's index."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from fractions import Fraction
from typing import Any, Final, Literal, NamedTuple, get_args

import numpy as np
import numpy.typing as npt

from shardio._base.callers import one_of
from shardio.errors import InvalidArgument
from shardio.format.schema import Schema
from shardio.format.types import Array, Field
from shardio.media.frames import CropPosition

ClipChoice = Literal["all", "random", "uniform"]
Crop = Literal["center", "random"]
PixelForm = Literal["rgb", "rgb-fast", "yuv420"]

_Numbers = npt.NDArray[np.int64]
_MAX: Final = 1 << 31
_MAX_DENOMINATOR: Final = 1 << 16
"""The maximum denominator of `fps` as a float: 12.5 is accepted, but 29.97 is not."""
_MAX_SIDE: Final = 16384
_CHOICES: Final = {
    "where": get_args(ClipChoice),
    "crop": get_args(Crop),
    "pixels": get_args(PixelForm),
}


@dataclass(frozen=True, slots=True)
class Clip:
    """The options of `dataset.clips`, which documents them."""

    frames: int = 16
    stride: int = 1
    where: ClipChoice = "all"
    step: int | None = None
    per_video: int | None = None
    size: tuple[int, int] | None = None
    crop: Crop = "center"
    pixels: PixelForm = "rgb"
    field: str | None = None
    fps: int | float | Fraction | None = None
    around: str | None = None
    lead: float | None = None
    times: bool = False
    loop_filter: bool = True

    def __post_init__(self) -> None:
        for name, known in _CHOICES.items():
            one_of(name, getattr(self, name), known)
        _check_number("frames", self.frames)
        _check_number("stride", self.stride)
        for name in ("times", "loop_filter"):
            if not isinstance(value := getattr(self, name), bool):
                raise InvalidArgument(f"{name} must be True or False; found {value!r}")
        self._check_times()
        if self.around is not None:
            self._check_around(self.around)
        elif self.where == "all":
            # Set the step even if it was omitted: equal clips then have equal options.
            step = self.frames * self.stride if self.step is None else self.step
            object.__setattr__(self, "step", _check_number("step", step, 1 << 62))
        elif self.step is not None:
            raise InvalidArgument(f'step is for where="all"; found where={self.where!r}')
        n_clips = 1 if self.per_video is None else self.per_video
        object.__setattr__(self, "per_video", _check_number("per_video", n_clips, 1 << 20))
        if self.size is not None:
            object.__setattr__(self, "size", _checked_size(self.size, self.pixels))
        elif self.crop != "center":
            raise InvalidArgument(f"crop={self.crop!r} needs size=(height, width)")
        if not isinstance(self.field, str | None):
            raise InvalidArgument(f"field must be the name of a field; found {self.field!r}")

    def _check_times(self) -> None:
        if self.fps is not None:
            object.__setattr__(self, "fps", _checked_rate(self.fps))
            if self.stride != 1:
                raise InvalidArgument(
                    f"fps and stride both choose the frames of a clip: pass one of them; found "
                    f"fps={self.fps}, stride={self.stride}"
                )
        if self.lead is not None and self.around is None:
            raise InvalidArgument(f"lead is for clips around events; found lead={self.lead!r}")

    def _check_around(self, around: Any) -> None:
        if not isinstance(around, str):
            raise InvalidArgument(f"around must be the name of a field; found {around!r}")
        if (self.where, self.step) != ("all", None):
            raise InvalidArgument(
                "around already chooses the clips, one for each event: leave out where and step"
            )
        lead: Any = 0.5 if self.lead is None else self.lead
        if isinstance(lead, bool) or not isinstance(lead, int | float) or not 0 <= lead <= 1:
            raise InvalidArgument(f"lead must be a number from 0 to 1; found {self.lead!r}")
        object.__setattr__(self, "lead", float(lead))

    @property
    def rate(self) -> Fraction | None:
        """The frames per second of a clip; None if `fps` is not given."""
        # `__post_init__` has converted `fps` to a Fraction.
        return self.fps if isinstance(self.fps, Fraction) else None

    @property
    def depends_on_times(self) -> bool:
        """True if the frames of a clip depend on the times of the video's frames."""
        return self.fps is not None or self.around is not None

    @property
    def n_before(self) -> int:
        """The number of frames of a clip before the frame of its event."""
        # Use the decimal repr, so that 0.3 is exactly 3/10.
        return math.floor(Fraction(repr(self.lead or 0.0)) * (self.frames - 1))

    @property
    def span(self) -> int:
        """The number of frames of the video from the clip's first frame to its last, inclusive."""
        return (self.frames - 1) * self.stride + 1

    @property
    def array(self) -> Array:
        """The array type of one clip; `size` must be set."""
        height, width = self.size or (0, 0)
        if self.pixels == "yuv420":
            return Array("uint8", (self.frames, height * 3 // 2, width))
        return Array("uint8", (self.frames, height, width, 3))

    @property
    def names(self) -> tuple[str, ...]:
        """The fields of a clip: the pixels and, with `times`, the times of the frames."""
        name = self.field or ""
        return (name, *time_field_names(name)) if self.times else (name,)

    def sample_schema(self, schema: Schema) -> Schema:
        """Return the schema of samples, with the clip's fields in place of the video."""
        fields: dict[str, Field] = {}
        made = self.array, Array("int64", (self.frames,)), Array("int64", (2,))
        for name, field in schema.items():
            is_cut = name == self.field and field.medium == "video"
            fields |= dict(zip(self.names, made, strict=False)) if is_cut else {name: field}
        return Schema(fields)

    @property
    def identity(self) -> str:
        """A text that identifies the set of clips, regardless of their pixels, times and order."""
        known = {name: value for name, value in asdict(self).items() if value is not None}
        for name in ("size", "crop", "pixels", "times", "loop_filter"):
            known.pop(name, None)
        if self.fps is not None:
            known["fps"] = str(self.fps)
        if self.around is not None:
            known["lead"] = self.n_before  # different values of `lead` may give the same clips
        if self.where == "all":
            del known["per_video"]
        return "clips " + json.dumps(known, sort_keys=True, separators=(",", ":"))


class Events(NamedTuple):
    """The event count of each video, and all events in the order of the videos.

    Floats in `values` are seconds from a video's first frame; integers are indices of frames.
    Events of videos that are too short for a clip are left out.
    """

    counts: _Numbers
    values: npt.NDArray[Any]


class Clips:
    """The clips of some videos, by index, in the order of the videos.

    `n_frames` is the number of frames of each video at the rate of the clips (see
    `video_index.VideoIndex`), and 0 for a missing video.
    """

    def __init__(self, clip: Clip, n_frames: _Numbers, events: Events | None = None) -> None:
        self.clip, self.n_frames, self.events = clip, n_frames, events
        n_starts = np.maximum(n_frames - (clip.span - 1), 0)
        if events is not None:
            counts = events.counts
        elif clip.where == "all":
            counts = -(-n_starts // (clip.step or 1))
        else:
            counts = (n_starts > 0) * np.int64(clip.per_video or 1)
        self.ends: _Numbers = np.cumsum(counts)
        """The cumulative clip counts of the videos."""
        self._first_clips: _Numbers = self.ends - counts
        self._n_starts: _Numbers = n_starts

    def __len__(self) -> int:
        return int(self.ends[-1]) if len(self.ends) else 0

    def videos(self, positions: _Numbers) -> _Numbers:
        """Return the index of each clip's video; `positions` are the indices of the clips."""
        return np.searchsorted(self.ends, positions, "right")

    def start_codes(
        self, positions: _Numbers, videos: _Numbers, draws: npt.NDArray[np.uint64]
    ) -> _Numbers:
        """Return the start code of each clip, which `video_index.clip_frames` interprets.

        The meaning of the code depends on the options of the clips:

        * With `around`, it is the index of the event.
        * With neither `around` nor `fps`, it is the index of the clip's first frame.
        * With `fps` and where="all", the clip starts code / `fps` seconds after the video's first
          frame.
        * With `fps` and another `where`: if n frames are possible first frames of a clip, the clip
          starts at the one with index n * code // `start_code_divisor` among them.

        `draws` are 64 random bits for each clip, used only for where="random".
        """
        n_starts = self._n_starts[videos]
        if self.clip.around is not None:
            return positions
        if self.clip.rate is not None and self.clip.where == "random":
            return (draws >> np.uint64(32)).astype(np.int64)
        if self.clip.where == "random":
            # 32 bits suffice: the probabilities of 100,000 starts differ by less than 1/40,000.
            upper = (draws >> np.uint64(32)) * n_starts.astype(np.uint64)
            return (upper >> np.uint64(32)).astype(np.int64)
        numbers = positions - self._first_clips[videos]
        if self.clip.where == "all":
            found: _Numbers = numbers * (self.clip.step or 1)
            return found
        if self.clip.rate is not None:
            middles: _Numbers = 2 * numbers + 1
            return middles
        spread: _Numbers = (2 * numbers + 1) * n_starts // (2 * (self.clip.per_video or 1))
        return spread

    @property
    def start_code_divisor(self) -> int:
        """The divisor of start codes with `fps` and where="random" or "uniform"."""
        return 1 << 32 if self.clip.where == "random" else 2 * (self.clip.per_video or 1)

    def frames(self, first_frame: int) -> range:
        """Return the indices, in the video, of the frames of a clip."""
        return range(first_frame, first_frame + self.clip.span, self.clip.stride)


def time_field_names(name: str) -> tuple[str, str]:
    """Return the names of the fields for the times of a clip's frames, and for their time base."""
    return f"{name}_pts", f"{name}_time_base"


class ClipDraws(NamedTuple):
    """The start code of each clip, and the x and y of each crop; None centres all crops."""

    start_codes: _Numbers
    crops: npt.NDArray[np.float64] | None = None

    def crop_position(self, i: int) -> CropPosition | None:
        """Return the crop position of clip i."""
        return None if self.crops is None else CropPosition(*self.crops[i].tolist())


def _check_number(name: str, value: Any, most: int = _MAX) -> int:
    if type(value) is not int or not 1 <= value <= most:
        raise InvalidArgument(
            f"{name} must be a whole number from 1 up to {most:,}; found {value!r}"
        )
    return value


def _checked_rate(fps: Any) -> Fraction:
    is_number = isinstance(fps, int | float | Fraction) and not isinstance(fps, bool)
    found = Fraction(fps) if is_number and math.isfinite(fps) else Fraction(0)
    most = _MAX_DENOMINATOR if isinstance(fps, float) else _MAX - 1
    if not (0 < found.numerator < _MAX and found.denominator <= most):
        raise InvalidArgument(
            "fps must be frames per second, above 0: an integer, a float that is exact (12.5), or "
            f"a fraction such as fractions.Fraction(30000, 1001); found {fps!r}"
        )
    return found


def _checked_size(size: Any, pixels: str) -> tuple[int, int]:
    is_pair = isinstance(size, tuple | list) and len(size) == 2
    if not is_pair or any(type(n) is not int or not 1 <= n <= _MAX_SIDE for n in size):
        raise InvalidArgument(
            f"size must be (height, width), each from 1 to {_MAX_SIDE} pixels; found {size!r}"
        )
    if pixels == "yuv420" and (size[0] % 2 or size[1] % 2):
        raise InvalidArgument(f'pixels="yuv420" needs even sizes; found {tuple(size)}')
    return size[0], size[1]
