"""Sound: the packets of its files untouched, any span of which is decoded when it is loaded."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from shardio import Array, Audio, Input, Outcome, Schema, Text
from shardio.media import library_versions, sound_of
from shardio_converters.media.videos import facts_of, is_media

_NO_SOUND = "no sound"


@dataclass(frozen=True, kw_only=True)
class AudioFiles:
    """Makes a sample of every file with sound, videos included: of the first stream of several.

    Every packet is decoded once, so that a damaged file is found.

    Fields: `audio`; `label` int64; `source`, the file's name below the source folder.
    """

    kind: ClassVar[str] = "audio"
    version: ClassVar[str] = "1"

    def schema(self) -> Schema:
        """Give the fields of a sample."""
        return Schema({"audio": Audio(), "label": Array("int64"), "source": Text()})

    def libraries(self) -> Mapping[str, str]:
        """Give the versions of PyAV and FFmpeg, which tell what is sound and what is damage."""
        return library_versions()

    def samples(self, source: Input) -> Generator[Mapping[str, Any], None, Outcome]:
        """Yield the one sample of a file."""
        if not is_media(source):
            return Outcome("unsupported", _NO_SOUND)
        stream = sound_of(source.path)
        if stream is None:
            return Outcome("unsupported", _NO_SOUND)
        yield {"audio": stream, "label": source.label, "source": source.name}
        return Outcome("converted", detail={**facts_of(stream), "samples": stream.n_frames})
