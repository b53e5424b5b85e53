"""OpenDataset: the interface of opened datasets, which creates their views."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from fractions import Fraction
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from shardio._base.callers import did_you_mean, missing_attribute, refuses
from shardio.dataset.dataset import Dataset
from shardio.errors import InvalidArgument
from shardio.format.schema import Schema
from shardio.samples.clip_view import ClipView
from shardio.samples.clips import Clip, ClipChoice, Crop, PixelForm
from shardio.samples.packing import Pack, Rest
from shardio.samples.preload import preload
from shardio.samples.preview import dataset_html
from shardio.samples.step_view import StepView, resolve_steps
from shardio.samples.token_view import TokenView
from shardio.samples.view import DATASET_ADVICE, refuse_sum

if TYPE_CHECKING:
    from shardio.samples.preview import Viewer

Selection = (
    Callable[[dict[str, npt.NDArray[Any]]], Any]
    | Sequence[int]
    | Sequence[bool]
    | npt.NDArray[np.integer[Any]]
    | npt.NDArray[np.bool_]
)
"""A function that takes columns and returns a mask; or a mask; or indices of samples."""


class OpenDataset(Dataset):
    """An opened dataset: a sequence of samples as stored, from which views can be created.

    A view borrows the dataset, and can be used until the dataset is closed.
    """

    _public = "clips pack preload show windows"

    if not TYPE_CHECKING:  # type checkers would accept any attribute

        def __getattr__(self, name: str) -> Any:
            # Until a dataset is open, only special methods are looked up: those of `copy`.
            fields = () if name[:1] == "_" else self.schema
            advice = {name: f"write dataset.column({name!r})"} if name in fields else {}
            if name[:1] != "_" and name in self.subsets:
                advice = {name: f"write dataset.subset({name!r})"}
            return missing_attribute(self, name, DATASET_ADVICE | advice)

        __add__ = __radd__ = refuse_sum

        def __setattr__(self, name: str, value: Any) -> None:
            if name in DATASET_ADVICE:  # `dataset.transform = f` would do nothing
                missing_attribute(self, name, DATASET_ADVICE)
            super().__setattr__(name, value)

    @refuses(
        {
            **dict.fromkeys(("clip_len", "clip_length", "length", "n_frames"), "write frames="),
            **dict.fromkeys(("dilation", "frame_interval", "frame_step"), "write stride="),
            "frame_rate": "write fps=",
            "random": 'write where="random"',
            **dict.fromkeys(("deblock", "deblocking", "skip_loop_filter"), "write loop_filter="),
            "resize": "write size=(height, width)",
        }
    )
    def clips(
        self,
        frames: int = 16,
        *,
        stride: int = 1,
        where: ClipChoice = "all",
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
        loop_filter: bool = True,
    ) -> ClipView:
        """Return a view whose samples are clips of the videos, decoded.

        Args:
            frames: the number of frames of a clip.
            stride: use every `stride`-th frame of the video. Not together with `fps`.
            where: the set of clips. "all": a clip every `step` frames, as long as the whole clip is
                inside the video. "uniform": `per_video` clips per video; the possible first frames
                are divided into `per_video` equal parts, and a clip starts in the middle of each.
                "random": `per_video` clips per video and epoch, with first frames drawn uniformly.
            step: the number of frames from the start of a clip to the start of the next, by default
                frames * stride, which leaves no gap. Only for "all"; with `fps`, clips start every
                step / fps seconds.
            per_video: the number of clips of a video that stay together in a shuffled epoch, by
                default 1. These clips are adjacent in the order, so that most batches decode them
                in one pass. With "random" and "uniform", also the number of clips per video and
                epoch.
            size: the (height, width) to which frames are scaled and cropped; None keeps their size.
            crop: the part that is kept if the proportions differ: "center", or "random" for a part
                drawn for each clip.
            pixels: "rgb", uint8 (frames, H, W, 3); "rgb-fast", the same with less exact colours, in
                two thirds of the time if frames are 8-bit 4:2:0 and keep their size; or "yuv420",
                uint8 (frames, H * 3/2, W): Y above U and V, which have half the size; see
                `shardio.outputs.yuv420_to_rgb`.
            field: the field of videos; required if there are several.
            fps: the frame rate of the clips: an integer, a `Fraction`, or a float with a small
                denominator (12.5). Frame i of a clip is the frame that the video shows i / fps
                seconds after the clip's start.
            around: a field with the times of events in each video. The view then has one clip
                around each event; `where` does not apply. Floats are seconds from the first frame,
                integers are frame numbers. A clip that would extend beyond the video is moved
                inside.
            lead: the part of a clip before its event, from 0 to 1, by default 0.5. Unless the clip
                was moved, its frame lead * (frames - 1), rounded down, shows the event.
            times: True to add the times of the clips' frames. For a field `video`, these are
                `video_pts`, int64 (frames,), in ticks, and `video_time_base`, int64 (2,), the
                numerator and the denominator of seconds per tick.
            loop_filter: False to skip the last step of decoding a frame, in which H.264, HEVC, VP8
                and some older codecs smooth the edges of their blocks. Large frames then decode
                faster, but pixels are less exact: blocks are more visible, and errors grow from
                frame to frame until the next keyframe. VP9, AV1 and videos encoded by the store
                `h264` do not change.

        A video that is shorter than a clip has no clips. With `fps`, a video is too short if it
        lasts (frames - 1) / fps seconds or less.

        Raises:
            InvalidArgument: an option is invalid, which may be found on first use of the view; or
                no video has a clip.
        """
        options = step, per_video, size, crop, pixels, field, fps, around, lead, times, loop_filter
        clip = Clip(frames, stride, where, *options)
        self.check_open()
        return ClipView(self, clip)

    @refuses(dict.fromkeys(("block_size", "context_length", "seq_len"), "write length="))
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
    ) -> TokenView:
        """Return a view whose samples are windows of tokens.

        The documents of all rows are concatenated to one stream of tokens, which is cut into
        windows of one length. For a field `tokens`, a sample has `tokens`, (length,), in the dtype
        of the field and, depending on the options, `tokens_targets`, `tokens_segments`,
        `tokens_positions` and `tokens_mask`.

        Args:
            field: the field of tokens; required if several could be packed.
            length: the number of tokens of a window.
            targets: True to add `tokens_targets`: for every token the next token of the stream,
                even if it is in the next window. The starts of windows are always `length` apart.
            apart: True to add two int32 fields that separate documents. `tokens_segments` is the
                number of each token's document, counted from 1 in the window, and 0 in padding.
                `tokens_positions` is the number of earlier tokens of the same document in the
                window.
            eot: an end-of-text token to append to every document, even to an empty document; the
                token counts as part of the document.
            pad: the token that fills up the last window.
            rest: the treatment of the last tokens, which do not fill a window: "pad" or "drop".

        `tokens_mask`, bool, is present with rest="pad", and with `targets` and `apart` together.
        The mask is False in padding. With `targets`, it is also False at the last token of the
        stream, which has no target. With `targets` and `apart`, it is False at the last token of
        every document, whose target belongs to another document.

        Raises:
            InvalidArgument: an option is invalid, which may be found on first use of the view; or
                the tokens do not fill a window.
        """
        pack = Pack(
            length=length, field=field, targets=targets, apart=apart, eot=eot, pad=pad, rest=rest
        )
        self.check_open()
        return TokenView(self, pack)

    @refuses({"delta_timestamps": "pass the dict as the first argument"})
    def windows(
        self,
        offsets: Mapping[str, Sequence[float] | npt.NDArray[Any]],
        *,
        times: str | None = None,
        fps: float | Fraction | None = None,
        size: tuple[int, int] | None = None,
    ) -> StepView:
        """Return a view whose samples are the time steps of the rows, such as robot episodes.

        A row contains arrays whose first axis is the steps, and videos. For each field `name` in
        `offsets`, a sample contains the values or frames at these offsets from its step,
        (offsets, …), and `name_mask`, bool (offsets,). If an offset leads to a place before the
        first or after the last step, the value is that of the first or the last step, and the mask
        is False. Offsets in seconds may lead up to half a step before the first or after the last
        step. Fields with one value for the whole row are delivered too.

        Args:
            offsets: a dict from fields to offsets: whole numbers of steps such as range(50), or
                floats in seconds such as [-0.2, 0.0]; the step nearest to that time is used.
            times: a field with the time of each step in seconds, rising floats; by default
                `timestamp`, if it exists. Frames of videos are then found by time, so the times of
                videos must count from the same zero. Without such a field, frames are found by
                number.
            fps: the number of steps per second, instead of `times`.
            size: the (height, width) to which frames are scaled and cropped; None keeps their size.

        Raises:
            InvalidArgument: an option is invalid; or, on first use of the view, the fields of a row
                have different numbers of steps, or the times of a row do not ascend.
        """
        steps = resolve_steps(self.schema, offsets, times, fps, size)
        self.check_open()
        return StepView(self, steps)

    def preload(self, fields: Iterable[str] | None = None) -> int:
        """Read some fields of all samples into the page cache; return the number of bytes.

        Loaders that are created later find the data there, but the kernel may evict it again. If
        the dataset is in an object store, the shards are downloaded first.

        Args:
            fields: the names of the fields, by default all.

        Raises:
            InsufficientMemory: the data does not fit into the available memory; nothing was read.
            InvalidArgument: there is no such field, or the cache has no room for the shards.
            ShardChanged, StoreUnavailable, OSError, …: a file cannot be read or downloaded.
        """
        return preload(self, known_fields(fields, self.schema))

    def show(self) -> Viewer:
        """Show the dataset in the browser, or in a notebook, with `shardio view`.

        The whole dataset is shown, as published. The server runs in a process of its own until
        `close` is called on the result, or until this process exits.

        Raises:
            InvalidArgument: this is a mixture; show one of its `sources`.
            UnsupportedEnvironment: the extra `view` is missing, or the server cannot start.
        """
        from shardio.samples.preview import show  # what it imports takes 5 ms

        return show(self.current_path)

    def _repr_html_(self) -> str:
        return dataset_html(self)

    @abstractmethod
    def reopen(self, *, n_workers: int = 1) -> OpenDataset:
        """Open the same samples again, with separate files; see `ShardDataset.reopen`."""

    @abstractmethod
    def select(self, rows: Selection, *, fields: Iterable[str] = ()) -> OpenDataset:
        """Return some of the samples as a new dataset; see `ShardDataset.select`."""

    @abstractmethod
    def subset(self, name: str) -> OpenDataset:
        """Return the samples of a subset as a new dataset; see `ShardDataset.subset`."""


def known_fields(fields: Any, schema: Schema) -> tuple[str, ...]:
    """Return the dotted names of the requested fields; None requests all.

    In `fields`, the name of a nested record means all fields in the record.
    """
    if fields is None:
        return tuple(schema)
    if isinstance(fields, str) or not isinstance(fields, Iterable):
        found = f"the string {fields!r}: write [{fields!r}]" if isinstance(fields, str) else fields
        raise InvalidArgument(f"fields must be a list of names; found {found}")
    wanted: tuple[Any, ...] = ()
    names: Iterable[Any] = fields
    for name in names:
        is_group = isinstance(name, str) and name in schema.groups
        below = (each for each in schema if each.startswith(f"{name}."))
        wanted += tuple(below) if is_group else (name,)
    is_known = all(isinstance(name, str) and name in schema for name in wanted)
    if not is_known or not wanted or len(set(wanted)) < len(wanted):
        known = ", ".join(schema)
        unknown = (name for name in wanted if isinstance(name, str) and name not in schema)
        hint = "".join(f"; {asked}" for name in unknown if (asked := did_you_mean(name, schema)))
        raise InvalidArgument(
            f"fields must be different names among {known}; found {wanted!r}{hint}"
        )
    return wanted
