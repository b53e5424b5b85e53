"""Options for audio in samples: sample rate, channels and length."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Final, Literal, get_args

from shardio.errors import InvalidArgument

SoundType = Literal["float32", "int16"]
Start = Literal["first", "random"]

_MIN_RATE, _MAX_RATE = 1000, 768_000
_LONGEST: Final = 86_400


@dataclass(frozen=True, slots=True)
class Sound:
    """The format of a loader's fields of type `Audio`: (samples, channels).

    Each field gets a second one, its name with `_span`, int64 (2,): the first sample of the audio
    and the end of it; the rest is silence.

    Args:
        rate: samples per second to resample to; None keeps the stored rate, which must be the same
            everywhere.
        channels: 1 or 2, mixed by FFmpeg's rules; None keeps the stored number, which must be the
            same
            everywhere.
        seconds: the length; an integer, a `Fraction`, a text such as "0.64" or a float. None: the
            length of the clip if samples are clips of videos, else the whole audio. Shorter audio
            is followed by silence; of longer audio, `where` selects a part.
        dtype: `"float32"`, from -1 to 1, or `"int16"`.
        where: `"first"`: the first `seconds`. `"random"`: `seconds` from a sample drawn for each
            position of each epoch, uniformly from all samples, at `rate`, that can start them.
                Requires
            `seconds`, and samples that are not clips.

    If samples are clips of videos, the audio begins with the first frame of the clip.

    Raises:
        InvalidArgument: an option is not acceptable.
    """

    rate: int | None = 16_000
    channels: int | None = 1
    seconds: int | float | str | Fraction | None = None
    dtype: SoundType = "float32"
    where: Start = "first"

    def __post_init__(self) -> None:
        rate = self.rate
        if rate is not None and (type(rate) is not int or not _MIN_RATE <= rate <= _MAX_RATE):
            raise InvalidArgument(
                f"rate must be a whole number from {_MIN_RATE} to {_MAX_RATE:,}, samples per "
                f"second, or None; found {rate!r}"
            )
        if type(self.channels) is bool or self.channels not in (None, 1, 2):
            raise InvalidArgument(f"channels must be 1, 2 or None; found {self.channels!r}")
        for name, choices in (("dtype", get_args(SoundType)), ("where", get_args(Start))):
            if getattr(self, name) not in choices:
                known = ", ".join(map(repr, choices))
                raise InvalidArgument(
                    f"{name} must be one of {known}; found {getattr(self, name)!r}"
                )
        if self.seconds is not None:
            object.__setattr__(self, "seconds", _checked_seconds(self.seconds))
        elif self.where == "random":
            raise InvalidArgument('where="random" needs seconds: how long what is drawn is')

    @property
    def length(self) -> Fraction | None:
        """`seconds`, exactly."""
        return None if self.seconds is None else Fraction(self.seconds)


def _checked_seconds(value: Any) -> Fraction:
    try:
        if isinstance(value, bool) or not isinstance(value, int | float | str | Fraction):
            raise ValueError
        # What was written as 0.64 is 64 hundredths.
        found = Fraction(repr(value) if isinstance(value, float) else value)
    except (ValueError, ZeroDivisionError):
        found = Fraction(0)
    if not 0 < found <= _LONGEST:
        raise InvalidArgument(
            f"seconds must be a number above 0 and up to {_LONGEST:,}, or None; found {value!r}"
        )
    return found
