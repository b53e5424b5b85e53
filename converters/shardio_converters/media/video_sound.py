"""The sound beside a video: its packets untouched, with times on the clock of the video's."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from fractions import Fraction
from typing import Any

from shardio import EncodedStream, MediaError, Outcome
from shardio.media import part_of, sound_of

_AUDIO_FACTS = {"codec": "codec", "rate": "rate", "layout": "layout", "audio_streams": "streams"}


class Sound:
    """The sound of a video file, if it is wanted and there is any; the first stream of several.

    One that is damaged is none: what is kept of the file, if anything is, is then its pictures.
    """

    def __init__(self, path: str, *, is_wanted: bool) -> None:
        self.path, self._is_wanted = path, is_wanted
        self.stream: EncodedStream | None = None
        self.failure: MediaError | None = None
        try:
            self.stream = sound_of(path) if is_wanted else None
        except MediaError as error:
            self.failure = error

    def whole(self) -> dict[str, EncodedStream | None]:
        """What a sample has that is a video."""
        return {"audio": self.stream} if self._is_wanted else {}

    def part(self, begin: Fraction, seconds: Fraction) -> dict[str, EncodedStream | None]:
        """What a sample has that is a clip, from a time on the video's clock."""
        if not self._is_wanted:
            return {}
        stream = self.stream
        return {"audio": None if stream is None else part_of(stream, begin, seconds)}

    def facts(self) -> dict[str, Any]:
        """What is worth recording of it; None where the file has none."""
        if not self._is_wanted:
            return {}
        return {"sound": None if self.stream is None else facts_of(self.stream)}


def facts_of(stream: EncodedStream) -> dict[str, Any]:
    """What is worth recording of a sound; `streams` where a file has several."""
    told = stream.parameters
    return {name: told[key] for key, name in _AUDIO_FACTS.items() if key in told}


def with_sound(
    samples: Generator[Mapping[str, Any], None, Outcome], sound: Sound
) -> Generator[Mapping[str, Any], None, Outcome]:
    """Yield the samples of a file, and say of its sound what there is to be said.

    Raises:
        MediaError: the file is damaged.
    """
    outcome = yield from samples
    if sound.failure is not None:
        # The pictures that there are may be kept, so that what is known of them is told.
        if outcome.kind == "broken":
            return outcome
        reason = str(sound.failure).removeprefix(f"{sound.path}: ")
        return Outcome("broken", reason, outcome.detail)
    return Outcome(outcome.kind, outcome.reason, {**outcome.detail, **sound.facts()})
