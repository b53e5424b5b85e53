"""Which samples of its rows a dataset shows: all, those of a view, clips, or windows of tokens."""

from __future__ import annotations

import numpy as np

from shardio.bundles import Bundling
from shardio.clips import Clips
from shardio.format.checksum import distinct
from shardio.packing import Pack, Packed
from shardio.units import Rows
from shardio.views import RowList, RowRuns


class Shown:
    """Positions and the rows that are there, of a dataset which sets `_starts` and `_view`."""

    _starts: Rows
    _view: RowRuns | RowList | None
    _clips: Clips | None = None
    _packed: Packed | None = None

    def __len__(self) -> int:
        if self._packed is not None:
            return len(self._packed)
        return self.n_shown if self._clips is None else len(self._clips)

    @property
    def n_shown(self) -> int:
        """How many rows it shows; as many samples, unless these are clips or windows."""
        return int(self._starts[-1]) if self._view is None else len(self._view)

    @property
    def is_plain(self) -> bool:
        """Whether its samples are all rows, in order."""
        return self._view is None and self._clips is None and self._packed is None

    @property
    def starts(self) -> Rows:
        """The number of each shard's first row, and of all rows at the end."""
        return self._starts

    @property
    def shard_ends(self) -> Rows:
        """How many of its samples lie in each shard and those before; of rows in their order."""
        ends = self._starts[1:]
        if self._view is not None:
            ends = self._view.n_below(ends)
        if self._clips is not None:
            ends = np.concatenate([[0], self._clips.ends])[ends]
        return ends

    @property
    def view_id(self) -> str:
        """What tells its view from others over the same dataset; empty where that is all rows.

        It stays the same when samples are appended that the view has no part in.
        """
        of_rows = "" if self._view is None else self._view.identity
        return self._identified(of_rows)

    def _identified(self, of_rows: str) -> str:
        """What tells its samples from others, by what tells its rows."""
        if self._packed is not None:
            return f"{of_rows} {self._packed.pack.identity}".lstrip()
        return of_rows if self._clips is None else f"{of_rows} {self._clips.clip.identity}".lstrip()

    @property
    def selection(self) -> RowList | None:
        """The rows that it shows, if they were chosen by `select`."""
        return self._view if isinstance(self._view, RowList) else None

    def show(self, selection: RowList) -> None:
        """Have it show these rows of all shards, instead of whatever it shows."""
        self._view = selection

    @property
    def clips(self) -> Clips | None:
        """What its samples are cut out of its rows by, if they are clips."""
        return self._clips

    @property
    def packed(self) -> Packed | None:
        """What its samples are made of its rows by, if they are windows of tokens."""
        return self._packed

    @property
    def bundling(self) -> Bundling | None:
        """What its samples lie together in where they are shuffled, if they are clips that do."""
        if self._clips is None or self._clips.clip.per_video in (None, 1):
            return None
        return Bundling(self._clips.clip.per_video, self._clip_ends(self._clips))

    def _clip_ends(self, clips: Clips) -> list[Rows]:
        """For each source, how many clips there are of its first video, its first two, …."""
        return [clips.ends]

    def cut(self, clips: Clips) -> None:
        """Have it show clips of the videos in the rows that it shows."""
        self._clips = clips

    def pack(self, pack: Pack, ends: Rows, firsts: Rows | None = None) -> None:
        """Have it show windows of the documents in the rows that it shows; see Packed."""
        self._packed = Packed(pack, ends, firsts=firsts)

    def rows(self, positions: Rows) -> Rows:
        """The rows of all shards that the samples at `positions` are, or are cut out of.

        Of a window it is the one that it begins in.
        """
        if self._packed is not None:
            positions = self._packed.firsts[positions]
        elif self._clips is not None:
            positions = self._clips.videos(positions)
        return self.shown_rows(positions)

    def shown_rows(self, numbers: Rows) -> Rows:
        """The rows of all shards that it shows, by their numbers up to `n_shown`."""
        return numbers if self._view is None else self._view.rows(numbers)

    def rows_within(self, positions: Rows) -> Rows:
        """All rows that the samples at `positions` are made of: of windows, every document's."""
        if self._packed is None:
            return self.rows(positions)
        return self.shown_rows(distinct(self._packed.parts(positions).documents))
