"""OpenDataset: a dataset as users open it, and the views of it."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from fractions import Fraction
from typing import Any

import numpy as np
import numpy.typing as npt

from shardio.dataset.dataset import Dataset
from shardio.errors import InvalidArgument
from shardio.format.schema import Schema
from shardio.samples.clip_view import ClipView
from shardio.samples.clips import Clip, Crop, PixelForm, Where
from shardio.samples.packing import Pack, Rest
from shardio.samples.preload import preload
from shardio.samples.window_view import WindowView

Selection = (
    Callable[[dict[str, npt.NDArray[Any]]], Any]
    | Sequence[int]
    | Sequence[bool]
    | npt.NDArray[np.integer[Any]]
    | npt.NDArray[np.bool_]
)
"""A function from columns to a mask, a mask, or numbers of samples."""


class OpenDataset(Dataset):
    """A dataset that was opened: its samples as they are stored, and views of them.

    A view borrows the dataset and is usable until it is closed.
    """

    def clips(
        self,
        frames: int = 16,
        *,
        stride: int = 1,
        where: Where = "all",
        step: int | None = None,
        per_video: int | None = None,
        size: tuple[int, int] | None = None,
        crop: Crop = "center",
        pixels: PixelForm = "rgb",
        field: str | None = None,
        fps: float | Fraction | None = None,
        around: str | None = None,
        lead: float | None = None,
        times: bool = False,
    ) -> ClipView:
        """Return a view whose samples are clips of the videos, decoded.

        Args:
            frames: the number of frames of a clip.
            stride: use every `stride`-th frame of the video. Not together with `fps`.
            where: the set of clips. "all": one every `step` frames, as long as whole ones fit.
                "uniform": `per_video` of each video, from the middles of as many equal parts.
                "random": `per_video` of each video and epoch, with a uniformly drawn first frame.
            step: frames from the start of a clip to that of the next; by default the next one
                starts where one ends, after frames * stride. For "all" only; with `fps`, every
                step / fps seconds.
            per_video: the number of clips of a video that stay together when an epoch is shuffled,
                1 unless given: adjacent in the order, so that most batches decode them in one
                pass. With "random" and "uniform" an epoch has this many of each video.
            size: (height, width) to scale and crop frames to; None keeps their size.
            crop: the part that is kept if the proportions differ: the "center", or a part drawn
                for each clip, "random".
            pixels: "rgb", uint8 (frames, H, W, 3), or "yuv420", uint8 (frames, H * 3/2, W) with Y
                over U and V, of half the size: see `shardio.outputs.yuv420_to_rgb`.
            field: the field of videos; required if there are several.
            fps: frames of a clip per second of its video: an integer, a `Fraction`, or a float with
                a small denominator (12.5). Frame i of a clip is then the one on show exactly
                i / fps seconds after the clip's start.
            around: a field with the times of events in each video: there is one clip around each
                event, instead of those of `where`. Floats are seconds from the first frame,
                integers are frame numbers. A clip that would extend beyond the video is moved
                inside.
            lead: the part of a clip before its event, from 0 to 1; 0.5 unless given. The event is
                at frame lead * (frames - 1), rounded down, of a clip that is not moved.
            times: True adds the times of the clips' frames: with a field `video`, `video_pts`,
                int64 (frames,), in ticks, and `video_time_base`, int64 (2,), the numerator and the
                denominator of seconds per tick.

        A video shorter than one clip has no clips; with `fps`, one that ends before the time of the
        last frame of a clip from its start.

        Raises:
            InvalidArgument: an option is not acceptable, here or when the view is first used; there
                are videos, but no clip of any.
        """
        clip = Clip(
            frames=frames,
            stride=stride,
            where=where,
            step=step,
            per_video=per_video,
            size=size,
            crop=crop,
            pixels=pixels,
            field=field,
            fps=fps,
            around=around,
            lead=lead,
            times=times,
        )
        return ClipView(self, clip)

    def pack(
        self,
        field: str | None = None,
        *,
        length: int,
        targets: bool = False,
        apart: bool = False,
        eot: int | None = None,
        pad: int = 0,
        rest: Rest = "pad",
    ) -> WindowView:
        """Return a view whose samples are windows of tokens.

        All documents, one in each row, are one stream of tokens, cut into windows of one length.
        With a field `tokens` a sample has `tokens`, (length,), in the dtype of the field, and as
        selected `tokens_targets`, `tokens_segments`, `tokens_positions` and `tokens_mask`.

        Args:
            field: the field of tokens; required if several could be packed.
            length: the number of tokens of a window.
            targets: add `tokens_targets`: for every token the next one of the stream, also if that
                is in the next window. Windows are `length` apart in either case.
            apart: add fields that separate documents, both int32: `tokens_segments`, the document
                of each token, numbered in the window from 1 up, 0 in padding; and
                `tokens_positions`, the number of tokens of the same document before it in the
                window.
            eot: a token appended to every document, also to an empty one; part of the document.
            pad: the token that fills up the last window.
            rest: for the last tokens, which do not fill a window: "pad" them, or "drop" them.

        `tokens_mask`, bool, is present with rest="pad", and with `targets` and `apart` together. It
        is False in padding; with targets also at the last token of the stream, which has no target,
        and with `apart` at the last token of every document, whose target belongs to another.

        Raises:
            InvalidArgument: an option is not acceptable, here or when the view is first used; there
                are tokens, but no window of them.
        """
        pack = Pack(
            length=length, field=field, targets=targets, apart=apart, eot=eot, pad=pad, rest=rest
        )
        return WindowView(self, pack)

    def preload(self, fields: Iterable[str] | None = None) -> int:
        """Read some fields of all samples into the page cache; return the number of bytes.

        Loaders that are made later find them there; nothing pins them. Of a dataset in an object
        store, the shards are downloaded first.

        Args:
            fields: their names, by default all.

        Raises:
            InsufficientMemory: they do not fit into the available memory; nothing was read.
            InvalidArgument: there is no such field, or the cache has no room for the shards.
            ShardChanged, StoreUnavailable, OSError, …: a file cannot be read or downloaded.
        """
        return preload(self, known_fields(fields, self.schema))

    @abstractmethod
    def reopen(self, *, whole: bool = False, n_readers: int = 1) -> OpenDataset:
        """Open the same samples again, with files of their own; see ShardDataset."""

    @abstractmethod
    def select(self, rows: Selection, *, fields: Iterable[str] = ()) -> OpenDataset:
        """Return some of the samples as a new dataset; see ShardDataset."""

    @abstractmethod
    def subset(self, name: str) -> OpenDataset:
        """Return the samples of a subset as a new dataset.

        It opens the shards again, and is closed separately.

        Raises:
            InvalidArgument: there is no such subset.
        """


def known_fields(fields: Any, schema: Schema) -> tuple[str, ...]:
    """Return the names of fields, those of nested records spelled out; None is all."""
    if fields is None:
        return tuple(schema)
    if isinstance(fields, str):
        raise InvalidArgument(f"fields must be a list of names; found the string {fields!r}")
    if not isinstance(fields, Iterable):
        raise InvalidArgument(f"fields must be a list of names; found {fields!r}")
    wanted = tuple(each for name in fields for each in _below(name, schema))
    is_known = all(isinstance(name, str) and name in schema for name in wanted)
    if not is_known or not wanted or len(set(wanted)) < len(wanted):
        known = ", ".join(schema)
        raise InvalidArgument(f"fields must be different ones of {known}; found {wanted!r}")
    return wanted


def _below(name: Any, schema: Schema) -> list[Any]:
    """Return the fields of a nested record, or else the name itself."""
    if not isinstance(name, str) or name not in schema.groups:
        return [name]
    return [each for each in schema if each.startswith(f"{name}.")]
