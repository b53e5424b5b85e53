"""Request all missing pages of a batch from the kernel at once.

Without requests, the page faults of a memory-mapped file wait for the storage one after another. If
no page is missing, however, requests would take longer than filling the batch. A few rows of a
batch are therefore probed first: for each of them, the kernel reports whether the page in the
middle of its data is in memory. While no page is missing, probes become rarer.

An order with windows divides the positions of an epoch into windows of equal length. The samples of
a window lie close together in few regions of the files, so a request can include neighbouring rows.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Final

import numpy as np

from shardio._engine.filling.batch_spec import BatchSpec, EpochPlan
from shardio._workers.processes.limits import available_bytes
from shardio.errors import ShardioError
from shardio.samples.clip_view import ClipView
from shardio.samples.extents import ClipExtents, Extents, Ranges, blocks_of, merge_ranges
from shardio.samples.field_sources import IndexChunk
from shardio.samples.view import SampleView
from shardio.shard.verification import Rows
from shardio.storage.file_access import PAGE_BYTES, is_cached, prefetch_range

N_PROBED: Final = 4
HITS_UNTIL_WARM: Final = 16
"""Probes become rarer after this number of consecutive hits: probes that find no missing page."""
HITS_OF_WINDOW: Final = 4
"""The number of hits that suffices in a new window, if the previous window was in memory.

One probe would prove little, because other workers may have requested parts of the window.
"""
MAX_SKIPPED: Final = 127
"""The maximum number of batches between two probes: 400 µs per probe are then 3 µs per batch."""
NEAR_BYTES: Final = 256 << 10
"""The size of a request if the order has windows, and WIDE_BYTES does not apply.

Neighbouring rows belong to the same window, so they will be needed soon.
"""
WIDE_BYTES: Final = 512 << 10
"""The size of a request if all files fit into half of the available memory: they stay cached."""
_MAX_REQUESTED: Final = 1 << 16


class ReadAhead:
    """The read-ahead of a Filler, which requests the data of a batch before filling the batch."""

    def __init__(self, batch_spec: BatchSpec, view: SampleView) -> None:
        self._batch_spec, self._view, self._dataset = batch_spec, view, view.dataset
        self._extents: Extents
        self._clips: ClipExtents | None = None
        self._wait = 0
        self._is_cold = False
        """True if the data of every batch is requested."""
        self._n_hits, self._next_pause = 0, 1
        self._has_stopped = False
        self._plan: EpochPlan | None = None
        self._n_positions: int | None = None
        """The number of positions in a window of the plan's order; None if it has no windows."""
        self._window: tuple[EpochPlan, int] | None = None
        """If the order has windows, the plan of the latest batch and the index of its window."""
        self._requested: set[int] = set()
        """The indices of the requested pieces of `_grain` bytes, counted across all files."""
        self._is_readahead_disabled = False

    def prefetch(self, plan: EpochPlan, step: int, index_chunk: IndexChunk, part: slice) -> None:
        """Probe the batch in `part` of `index_chunk` if a probe is due; request missing data."""
        if self._has_stopped:
            return
        if plan is not self._plan:
            self._plan, self._n_positions = plan, plan.order.window
        if self._n_positions is not None:
            window = plan, plan.partition.read_range(step)[0] // self._n_positions
            if window != self._window:
                self._window = window
                self._requested.clear()
                self._wait, self._is_cold, self._next_pause = 0, False, 1
                self._n_hits = min(self._n_hits, HITS_UNTIL_WARM - HITS_OF_WINDOW)
        if self._wait:
            self._wait -= 1
            return
        if plan.order.is_sequential:
            self._has_stopped = True  # the kernel's own read-ahead is right for sequential reads
            return
        with contextlib.suppress(OSError, ShardioError):  # filling the batch raises the same errors
            self._probe(plan, index_chunk, part)

    def _probe(self, plan: EpochPlan, index_chunk: IndexChunk, part: slice) -> None:
        if not hasattr(self, "_extents"):
            self._open()
        rows, shards = index_chunk.covered(part)
        first_frames = index_chunk.start_codes[part] if self._clips is not None else rows
        some = np.linspace(0, len(rows) - 1, N_PROBED).astype(np.int64)
        found = self._are_cached(rows[some], shards[some], first_frames[some])
        if found is None:
            self._has_stopped = True
        elif found:
            self._n_hits += 1
            if self._n_hits >= HITS_UNTIL_WARM:
                self._is_cold = False
                self._wait = self._next_pause
                self._next_pause = min(2 * self._next_pause + 1, MAX_SKIPPED)
        else:
            if not self._is_cold:
                self._requested.clear()  # earlier requests were evicted, or were for another epoch
            self._is_cold, self._n_hits, self._next_pause = True, 0, 1
            if not (self._fits or self._is_readahead_disabled):
                self._disable_kernel_readahead()
        if self._is_cold:
            grain = self._grain if self._fits or plan.order.window is not None else PAGE_BYTES
            n_fresh = self._request(rows, shards, first_frames, grain)
            if not found and not n_fresh:  # the requested data was evicted
                self._requested.clear()
                self._request(rows, shards, first_frames, grain)

    def _open(self) -> None:
        dataset, fields, view = self._dataset, self._batch_spec.fields, self._view
        extents = Extents(dataset, fields, dataset.verify)
        if isinstance(view, ClipView) and not view.clip.depends_on_times:
            self._clips = ClipExtents(dataset, view.clip, extents.files)
        self._fits = extents.files.n_bytes <= available_bytes() // 2
        self._grain = WIDE_BYTES if self._fits else NEAR_BYTES
        self._extents = extents  # set last: an error may end this method

    def _disable_kernel_readahead(self) -> None:
        """Disable the kernel's own read-ahead for the mapped files.

        With a read-ahead of 8 MiB, the kernel reads 2,000 unneeded pages for each missing page, and
        these pages evict requested ones.
        """
        self._is_readahead_disabled = True
        for name in self._batch_spec.fields:
            if self._batch_spec.transform is None and name in self._dataset.schema.columns:
                self._dataset.gather(name).disable_readahead()
        self._dataset.files.open_files.disable_readahead()

    def _ranges(self, rows: Rows, shards: Rows, first_frames: Rows) -> Iterator[Ranges]:
        """Yield the byte ranges of rows, then those of clips, which depend on data of the rows."""
        yield self._extents.fixed(rows, shards)
        yield self._extents.records(rows, shards)
        if self._clips is not None:
            yield self._clips.ranges(rows, shards, first_frames)

    def _are_cached(self, rows: Rows, shards: Rows, first_frames: Rows) -> bool | None:
        """Return whether the page in the middle of every range is in memory.

        Return None if the file system or the kernel does not support the probe.
        """
        files = self._extents.files
        for ranges in self._ranges(rows, shards, first_frames):
            middles = np.sort((ranges.starts + ranges.ends) // 2)
            for number, parts in files.pieces(Ranges(middles, middles)):
                with files.open_file(number) as fd:
                    for offset, _ in parts:
                        if not (found := is_cached(fd, offset)):
                            return found
        return True

    def _request(self, rows: Rows, shards: Rows, first_frames: Rows, grain: int) -> int:
        """Request the data of rows; return the number of new requests.

        If `grain` exceeds a page, whole pieces of `grain` bytes are requested, and each only once.
        """
        files, n_fresh = self._extents.files, 0
        for ranges in self._ranges(rows, shards, first_frames):
            if grain > PAGE_BYTES:
                if len(self._requested) > _MAX_REQUESTED:
                    self._requested.clear()
                blocks = blocks_of(ranges, grain).tolist()
                fresh = np.array([each for each in blocks if each not in self._requested], np.int64)
                self._requested.update(blocks)
                ranges = Ranges(fresh * grain, (fresh + 1) * grain)
            n_fresh += len(ranges.starts)
            for number, parts in files.pieces(merge_ranges(ranges, grain)):
                with files.open_file(number) as fd:
                    for offset, n_bytes in parts:
                        prefetch_range(fd, offset, n_bytes)
        return n_fresh
