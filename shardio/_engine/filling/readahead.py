"""Request all missing pages of a batch from the kernel at once.

Without requests, the page faults of a memory-mapped file wait for the storage one after another. If
no page is missing, however, requests would take longer than filling the batch. A few rows of a
batch are therefore probed first: for each of them, the kernel says whether the page in the middle
of its data is in memory. As long as no page is missing, probes become rarer.

An order with windows divides the positions of an epoch into windows of equal length. The samples of
a window lie close together in few regions of the files, and are loaded in random order. A request
in such an order can therefore include the data of neighbouring rows.
"""

from __future__ import annotations

import contextlib
from typing import Final

import numpy as np

from shardio._engine.filling.batch_spec import BatchSpec, EpochPlan
from shardio._workers.processes.limits import available_bytes
from shardio.errors import ShardioError
from shardio.samples.clip_view import ClipView
from shardio.samples.extents import ClipExtents, Extents, Ranges, blocks_of, merged
from shardio.samples.field_sources import IndexChunk
from shardio.samples.view import SampleView
from shardio.shard.verification import Rows
from shardio.storage.file_access import PAGE_BYTES, is_cached, prefetch_range

N_PROBED: Final = 4
"""The number of rows to probe in a batch."""
N_PROBED_FIRST: Final = 16
"""The number of rows to probe in the first batch of a window.

Other workers may have requested parts of the window, so that a few rows would prove little.
"""
HITS_UNTIL_WARM: Final = 16
"""The number of consecutive probes that find no missing page, before probes become rarer."""
MAX_SKIPPED: Final = 127
"""The maximum number of batches between two probes, which take up to 400 µs: 3 µs per batch."""
NEAR_BYTES: Final = 256 << 10
"""The size of a request if the order has windows, and WIDE_BYTES does not apply.

The rows near the requested row belong to the same window, so they will be needed soon.
"""
WIDE_BYTES: Final = 512 << 10
"""The size of a request if all files fit into half of the available memory: they stay cached."""
N_STALE: Final = 4
"""A window counts as requested after this number of consecutive batches without a new request."""
PAUSE: Final = 7
"""The number of batches between two probes of a window that has been requested."""
_MAX_ASKED: Final = 1 << 16
"""The maximum number of requested blocks of files to remember."""


class ProbePolicy:
    """A policy that decides, by earlier probes, which batches are probed and requested.

    `wait` is the number of batches before the next probe. While `is_cold` is True, the data of
    every batch is requested.
    """

    def __init__(self) -> None:
        self.wait = 0
        self.is_cold = False
        self._n_hits = 0
        self._next_pause = 1
        self._has_stopped = False

    def hit(self) -> None:
        """Record that a probe found all of its pages in memory."""
        self._n_hits += 1
        if self._n_hits >= HITS_UNTIL_WARM:
            self.is_cold = False
            self.wait = self._next_pause
            self._next_pause = min(2 * self._next_pause + 1, MAX_SKIPPED)

    def miss(self) -> None:
        """Record that a probe found a page that was not in memory."""
        self.is_cold = True
        self._n_hits, self._next_pause = 0, 1

    def rest(self) -> None:
        """Record that the whole window has been requested: pause for PAUSE batches."""
        self.is_cold, self.wait = False, PAUSE

    def wake(self) -> None:
        """Record that another window begins, whose first batch will be probed."""
        if not self._has_stopped:
            self.wait = 0
            self.is_cold = False

    def stop(self) -> None:
        """Never probe again."""
        self._has_stopped, self.is_cold = True, False
        self.wait = 1 << 62


class ReadAhead:
    """The read-ahead of a Filler: it requests the data of a batch before it is filled."""

    def __init__(self, batch_spec: BatchSpec, view: SampleView) -> None:
        self._batch_spec, self._view, self._dataset = batch_spec, view, view.dataset
        self._extents: Extents | None = None
        self._clips: ClipExtents | None = None
        self._probe_policy = ProbePolicy()
        self._window: tuple[EpochPlan, int] | None = None
        """If the order has windows, the plan of the latest batch and the index of its window."""
        self._asked: set[int] = set()
        """The requested blocks of `_grain()` bytes, as indices into all files together."""
        self._n_stale = 0
        """The number of consecutive batches that needed no new request."""
        self._fits: bool | None = None
        """True if all files fit into half of the available memory; None if not computed yet."""
        self._is_scattered = False
        """True once the kernel's own read-ahead is disabled."""

    def before(self, plan: EpochPlan, step: int, index_chunk: IndexChunk, part: slice) -> None:
        """Probe the batch of step `step`, and request its data, as the policy requires.

        The samples of the batch are `part` of `index_chunk`.
        """
        policy, n_probed, n_positions = self._probe_policy, N_PROBED, plan.order.window
        if n_positions is not None:
            window = plan, plan.partition.read(step)[0] // n_positions
            if window != self._window:
                self._window, n_probed = window, N_PROBED_FIRST
                self._asked.clear()
                policy.wake()
            elif policy.is_cold:
                n_probed = 0  # a probe would find pages that earlier batches have requested
        if policy.wait:
            policy.wait -= 1
            return
        if plan.order.is_sequential:
            policy.stop()  # the kernel's own read-ahead is right for sequential reads
            return
        with contextlib.suppress(OSError, ShardioError):  # reading the batch reports them
            self._probe_pages(plan, index_chunk, part, n_probed)

    def _probe_pages(
        self, plan: EpochPlan, index_chunk: IndexChunk, part: slice, n_probed: int
    ) -> None:
        if self._extents is None:
            batch_spec, view = self._batch_spec, self._view
            self._extents = Extents(self._dataset, batch_spec.fields, self._dataset.verify)
            if isinstance(view, ClipView) and not view.clip.goes_by_times:
                self._clips = ClipExtents(self._dataset, view.clip, self._extents.files)
        extents, policy = self._extents, self._probe_policy
        rows, shards = index_chunk.covered(part)
        first_frames = index_chunk.start_codes[part] if self._clips is not None else rows
        if n_probed:
            some = np.linspace(0, len(rows) - 1, n_probed).astype(np.int64)
            self._probe(extents, rows[some], shards[some], first_frames[some])
        if policy.is_cold:
            grain = self._grain(plan, extents)
            # The kernel's own read-ahead helps if all files fit into memory, and harms otherwise.
            if grain != WIDE_BYTES:
                self._expect_scattered()
            n_before = len(self._asked)
            self._ask(extents, extents.fixed(rows, shards), grain)
            self._ask(extents, extents.records(rows, shards), grain)
            if self._clips is not None:
                self._ask(extents, self._clips.ranges(rows, shards, first_frames), grain)
            self._n_stale = 0 if len(self._asked) > n_before else self._n_stale + 1
            if plan.order.window is not None and self._n_stale >= N_STALE:
                policy.rest()

    def _expect_scattered(self) -> None:
        """Disable the kernel's own read-ahead for the mapped files.

        If it is set to 8 MiB, the kernel reads 2,000 unneeded pages with each missing page, and
        these evict requested pages.
        """
        if self._is_scattered:
            return
        self._is_scattered = True
        dataset, fields = self._dataset, self._batch_spec.fields
        for name in fields:
            if self._batch_spec.transform is None and name in dataset.schema.columns:
                dataset.gather(name).disable_readahead()
        dataset.files.open_files.disable_readahead()

    def _probe(self, extents: Extents, rows: Rows, shards: Rows, first_frames: Rows) -> None:
        """Probe some rows, and record the result in the policy."""
        found = _are_cached(extents, extents.fixed(rows, shards))
        if found:
            found = _are_cached(extents, extents.records(rows, shards))
        if found and self._clips is not None:
            found = _are_cached(extents, self._clips.ranges(rows, shards, first_frames))
        if found is None:
            self._probe_policy.stop()
        elif found:
            self._probe_policy.hit()
        else:
            if not self._probe_policy.is_cold:
                # What was requested earlier has been evicted, or was requested for another epoch.
                self._asked.clear()
                self._n_stale = 0
            self._probe_policy.miss()

    def _grain(self, plan: EpochPlan, extents: Extents) -> int:
        """Return the size in bytes of the blocks of files to which requests are rounded."""
        if self._fits is None:
            self._fits = extents.files.n_bytes <= available_bytes() // 2
        if self._fits:
            return WIDE_BYTES
        return PAGE_BYTES if plan.order.window is None else NEAR_BYTES

    def _ask(self, extents: Extents, ranges: Ranges, grain: int) -> None:
        """Request byte ranges of files, rounded to whole blocks of `grain` bytes.

        Blocks larger than a page are only requested once.
        """
        if grain > PAGE_BYTES:
            if len(self._asked) > _MAX_ASKED:
                self._asked.clear()
            blocks = blocks_of(ranges, grain).tolist()
            fresh = np.array([each for each in blocks if each not in self._asked], np.int64)
            self._asked.update(blocks)
            ranges = Ranges(fresh * grain, (fresh + 1) * grain)
        for number, places in extents.files.pieces(merged(ranges, grain)):
            with extents.files.opened(number) as fd:
                for offset, n_bytes in places:
                    prefetch_range(fd, offset, n_bytes)


def _are_cached(extents: Extents, ranges: Ranges) -> bool | None:
    """Return True if the page in the middle of every range is in memory, and False otherwise.

    Return None if the file system or the kernel cannot answer this.
    """
    middles = np.sort((ranges.starts + ranges.ends) // 2)
    for number, places in extents.files.pieces(Ranges(middles, middles)):
        with extents.files.opened(number) as fd:
            for offset, _ in places:
                if not (found := is_cached(fd, offset)):
                    return found
    return True
