"""Clips of stored videos: which frames of which video stand at a position of a view. Pure.

A dataset of videos is loaded clip by clip. The clips are a view: nothing is stored for them, and
any position is found by arithmetic on how many frames each video has.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any, Final, Literal, get_args

import numpy as np
import numpy.typing as npt

from shardio.errors import InvalidArgument

Where = Literal["all", "random", "uniform"]
Crop = Literal["center", "random"]
PixelForm = Literal["rgb", "yuv420"]

_Numbers = npt.NDArray[np.int64]
_MOST: Final = 1 << 31
_MAX_SIDE: Final = 16384
_CHOICES: Final = {
    "where": get_args(Where),
    "crop": get_args(Crop),
    "pixels": get_args(PixelForm),
}


@dataclass(frozen=True, slots=True)
class Clip:
    """How clips are cut out of videos, and how their pixels arrive.

    Args:
        frames: how many frames a clip has.
        stride: every how manieth frame of the video is one of them.
        where: which clips there are. `"all"`: one every `step` frames, as far as whole ones fit.
            `"uniform"`: `per_video` of each video, from the middles of as many equal parts.
            `"random"`: `per_video` of each video and epoch; every frame that can start a clip is as
            likely to.
        step: frames from the start of a clip to that of the next; by default the next one starts
            where one ends, after frames * stride. For `"all"` only.
        per_video: how many clips of each video an epoch has; 1 unless given, not for `"all"`.
        size: (height, width) that pictures are scaled and cropped to; None as they are.
        crop: what is kept where the proportions differ: the middle, or a place drawn for each clip.
        pixels: `"rgb"`, uint8 (frames, H, W, 3), or `"yuv420"`, uint8 (frames, H * 3/2, W) with Y
            over U and V, of half the size: see `shardio.tensors.yuv420_to_rgb`.
        field: which field; needed where a dataset has several of videos.

    A video that is shorter than one clip gives none.

    Raises:
        InvalidArgument: an option is not acceptable.
    """

    frames: int = 16
    stride: int = 1
    where: Where = "all"
    step: int | None = None
    per_video: int | None = None
    size: tuple[int, int] | None = None
    crop: Crop = "center"
    pixels: PixelForm = "rgb"
    field: str | None = None

    def __post_init__(self) -> None:
        for name, known in _CHOICES.items():
            if getattr(self, name) not in known:
                raise InvalidArgument(
                    f"{name} must be one of {', '.join(map(repr, known))}; "
                    f"found {getattr(self, name)!r}"
                )
        _check_number("frames", self.frames)
        _check_number("stride", self.stride)
        if self.where == "all":
            if self.per_video is not None:
                raise InvalidArgument('per_video is for where="random" or "uniform"')
            # Said or not, the same step: options that give the same clips are the same.
            step = self.frames * self.stride if self.step is None else self.step
            object.__setattr__(self, "step", _check_number("step", step, 1 << 62))
        elif self.step is not None:
            raise InvalidArgument(f'step is for where="all"; found where={self.where!r}')
        else:
            n_clips = 1 if self.per_video is None else self.per_video
            object.__setattr__(self, "per_video", _check_number("per_video", n_clips, 1 << 20))
        if self.size is not None:
            object.__setattr__(self, "size", _checked_size(self.size, self.pixels))
        elif self.crop != "center":
            raise InvalidArgument(f"crop={self.crop!r} needs size=(height, width)")
        if not isinstance(self.field, str | None):
            raise InvalidArgument(f"field must be the name of a field; found {self.field!r}")

    @property
    def span(self) -> int:
        """Frames of the video from a clip's first to its last, both counted."""
        return (self.frames - 1) * self.stride + 1

    @property
    def identity(self) -> str:
        """What tells the clips that it cuts from those of others; nothing of pixels."""
        known = {name: value for name, value in asdict(self).items() if value is not None}
        for name in ("size", "crop", "pixels"):
            known.pop(name, None)
        return "clips " + json.dumps(known, sort_keys=True, separators=(",", ":"))


class Clips:
    """The clips of some videos, by position: those of the first video first. Immutable.

    Args:
        clip: how they are cut.
        n_frames: how many frames each video has; 0 where there is none.
    """

    def __init__(self, clip: Clip, n_frames: _Numbers) -> None:
        self.clip, self.n_frames = clip, n_frames
        n_starts = np.maximum(n_frames - (clip.span - 1), 0)
        if clip.where == "all":
            counts = -(-n_starts // (clip.step or 1))
        else:
            counts = (n_starts > 0) * np.int64(clip.per_video or 1)
        self._ends: _Numbers = np.cumsum(counts)
        self._begins: _Numbers = self._ends - counts
        self._n_starts: _Numbers = n_starts

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def videos(self, positions: _Numbers) -> _Numbers:
        """The video that each of `positions` is a clip of; they are from 0 to len() - 1."""
        return np.searchsorted(self._ends, positions, "right")

    def starts(
        self, positions: _Numbers, videos: _Numbers, draws: npt.NDArray[np.uint64]
    ) -> _Numbers:
        """The first frame of the clip at each of `positions`.

        Args:
            positions: from 0 to len() - 1.
            videos: what `videos` gives for them.
            draws: 64 random bits for each, keyed by seed, epoch and position; only clips that are
                `"random"` depend on them.
        """
        n_starts = self._n_starts[videos]
        if self.clip.where == "random":
            # 32 bits decide: of 100,000 starts none is likelier than another by 1 in 40,000.
            upper = (draws >> np.uint64(32)) * n_starts.astype(np.uint64)
            return (upper >> np.uint64(32)).astype(np.int64)
        numbers = positions - self._begins[videos]
        if self.clip.where == "all":
            found: _Numbers = numbers * (self.clip.step or 1)
            return found
        spread: _Numbers = (2 * numbers + 1) * n_starts // (2 * (self.clip.per_video or 1))
        return spread

    def frames(self, start: int) -> range:
        """The frames of the video that a clip from `start` on has."""
        return range(start, start + self.clip.span, self.clip.stride)


def _check_number(name: str, value: Any, most: int = _MOST) -> int:
    if type(value) is not int or not 1 <= value <= most:
        raise InvalidArgument(
            f"{name} must be a whole number from 1 up to {most:,}; found {value!r}"
        )
    return value


def _checked_size(size: Any, pixels: str) -> tuple[int, int]:
    is_pair = isinstance(size, tuple | list) and len(size) == 2
    if not is_pair or any(type(n) is not int or not 1 <= n <= _MAX_SIDE for n in size):
        raise InvalidArgument(
            f"size must be (height, width), each from 1 to {_MAX_SIDE} pixels; found {size!r}"
        )
    if pixels == "yuv420" and (size[0] % 2 or size[1] % 2):
        raise InvalidArgument(f'pixels="yuv420" needs even sizes; found {tuple(size)}')
    return size[0], size[1]
