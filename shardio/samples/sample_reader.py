"""Read samples one by one, decoded, in new memory: for a view, and for the user's transform."""

from __future__ import annotations

from typing import Any, NamedTuple

from shardio._base.classes import Closing
from shardio.dataset.dataset import Dataset
from shardio.media.frames import CropPosition
from shardio.samples.decoding import AudioReader, ClipReader, ImageReader
from shardio.samples.token_reader import TokenReader


class SamplePlace(NamedTuple):
    """The location of a sample, and its random draws.

    Attributes:
        number: the index of the sample in its view.
        shard, row: the shard, and the row within the shard, from which the sample is read.
        start: the start of the clip, or the random bits that determine the beginning of the audio.
        crop: the position of the clip's crop.
        tokens: the number of tokens of each source's stream, as in `PackedWindows.parts`.
    """

    number: int
    shard: int
    row: int
    start: int = 0
    crop: CropPosition | None = None
    tokens: tuple[int, ...] | None = None


class SampleReader(Closing):
    """A reader of single samples. It borrows the dataset and owns its decoders until `close`.

    Args:
        dataset: the dataset.
        fields: the stored fields to read, in the order of the samples' fields.
        images: the decoder of images.
        clips, sounds, tokens: the readers of clips, audio and windows; None if there are none.
    """

    def __init__(
        self,
        dataset: Dataset,
        fields: tuple[str, ...],
        images: ImageReader,
        clips: ClipReader | None = None,
        sounds: AudioReader | None = None,
        tokens: TokenReader | None = None,
    ) -> None:
        self._dataset = dataset
        self.images, self.clips, self.sounds, self.tokens = images, clips, sounds, tokens
        self._has_images = bool(images.names)
        self.reads_rows = clips is None and sounds is None and tokens is None
        """True if samples are rows, at most with decoded images; then `read_row` is faster."""
        made: dict[str, tuple[str, ...]] = {}
        if clips is not None:
            made[clips.name] = clips.names
        if sounds is not None:
            made |= {name: (name, span) for span, name in sounds.spans.items()}
        if tokens is not None:
            made[tokens.name] = tokens.names
        self._stored = [name for name in fields if name not in made]
        self._names = [each for name in fields for each in made.get(name, (name,))]

    def read_row(self, shard: int, row: int) -> dict[str, Any]:
        """Return a row of a shard as a sample, with its images decoded."""
        # Do not check for truncated files here: `Filler` does this once per batch.
        sample = self._dataset.sample(shard, row, self._stored, check_truncated=False)
        return self.images.of_sample(sample, shard, row) if self._has_images else sample

    def read(self, place: SamplePlace) -> dict[str, Any]:
        """Return a sample with its fields in the requested order.

        Raises:
            ShardCorrupt, MediaError: the message names the sample.
        """
        shard, row = place.shard, place.row
        sample = self.read_row(shard, row)
        if self.clips is not None:
            sample[self.clips.name] = self.clips.of_sample(shard, row, place.start, place.crop)
            sample |= self.clips.times_of_sample(shard, row, place.start)
        if self.tokens is not None:
            sample |= self.tokens.of_sample(place.number, place.tokens)
        if self.sounds is not None:
            sample |= self.sounds.fields_of(shard, row, place.start)
        return {name: sample[name] for name in self._names}

    def close(self) -> None:
        """Close decoders and files. Idempotent."""
        for each in (self.tokens, self.sounds, self.clips):
            if each is not None:
                each.close()
