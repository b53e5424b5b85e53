"""What main's dataset shows, for workers to show the same: long tables, one copy for all.

The rows of a selection; of clips, how many frames the video in each of the rows has, and which
events; of windows, where the documents in the rows end, and which one each begins in.
"""

from __future__ import annotations

from collections.abc import Sequence

from shardio._engine.filling.recipe import Recipe
from shardio._workers.processes.shared_memory import SharedArray
from shardio.dataset.dataset import Dataset
from shardio.views.clips import Clips, Events
from shardio.views.row_sets import RowList


def shared_tables(dataset: Dataset) -> tuple[SharedArray, ...]:
    """Put into memory files what a dataset shows and its recipe does not tell.

    Raises:
        InsufficientMemory: there is not that much memory.
    """
    tables, rows = [], dataset.rows
    if rows.row_list is not None:
        selection = SharedArray.of(rows.row_list.every(), "the rows of a selection")
        rows.show(RowList(selection.array))
        tables.append(selection)
    if rows.clips is not None:
        n_frames = SharedArray.of(rows.clips.n_frames, "how many frames each video has")
        rows.clips.n_frames = n_frames.array
        tables.append(n_frames)
        if rows.clips.events is not None:
            counts, values = rows.clips.events
            shared = SharedArray.of(counts, "how many events each video has")
            events = SharedArray.of(values, "the events of videos")
            rows.clips.events = Events(shared.array, events.array)
            tables += [shared, events]
    if rows.packed is not None:
        ends = SharedArray.of(rows.packed.ends, "where each document ends")
        firsts = SharedArray.of(rows.packed.firsts, "which document each window begins in")
        rows.packed.ends, rows.packed.firsts = ends.array, firsts.array
        tables += [ends, firsts]
    return tuple(tables)


def show_as_told(dataset: Dataset, recipe: Recipe, fds: Sequence[int]) -> None:
    """Have a worker's dataset show what main's does; takes over the descriptors of its tables."""
    left = list(fds)
    if recipe.packing is not None:
        firsts = SharedArray.received(left.pop(), "<i8", recipe.n_samples)
        ends = SharedArray.received(left.pop(), "<i8", recipe.packing.n_documents)
        dataset.rows.pack(recipe.packing.pack, ends.array, firsts.array)
    if recipe.cut is not None:
        events = None
        if recipe.cut.events is not None:
            values = SharedArray.received(left.pop(), *recipe.cut.events)
            counts = SharedArray.received(left.pop(), "<i8", recipe.cut.n_videos)
            events = Events(counts.array, values.array)
        n_frames = SharedArray.received(left.pop(), "<i8", recipe.cut.n_videos)
        dataset.rows.cut(Clips(recipe.cut.clip, n_frames.array, events))
    if left:
        selection = SharedArray.received(left.pop(), "<i8", recipe.n_selected)
        dataset.rows.show(RowList(selection.array))
