"""The lists of rows that pages have asked for last, and the scans that run for them."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from typing import Final

from shardio_tools.view.jobs import FairSemaphore
from shardio_tools.view.queries import Filter, MatchedRows, Scan
from shardio_tools.view.source import Source, version_of

_N_KEPT: Final = 4
_N_RUNNING: Final = 2
"""The maximum numbers of lists that are kept, and of scans that work at the same time."""
_N_WAITING: Final = 64
"""The maximum numbers of lists in the queue, and of pages that are known to want a list."""
_FORGOTTEN_S: Final = 2.0
"""The time after which a list may be replaced by another that no page has asked for meanwhile."""
_CLOSED_S: Final = 90.0
"""The time after which a scan is stopped that no page has asked for: browsers let pages in the
background ask once a minute.
"""

Key = tuple[str, Filter]


class QueuedScan(MatchedRows):
    """A list of rows whose scan has not begun, because others have not ended."""

    text = "waiting for other searches"
    is_complete = False
    progress = 0.0

    def __init__(self) -> None:
        super().__init__(0)


Listing = MatchedRows | Scan


class _Kept:
    """A scan, and the pages that want its list, in the order in which they asked last."""

    def __init__(self, scan: Scan) -> None:
        self.scan = scan
        self._pages: OrderedDict[str, None] = OrderedDict()
        self._asked = 0.0

    def ask(self, page: str) -> None:
        """Note that a page asks for the list."""
        self._asked = time.monotonic()
        self._pages[page] = None
        self._pages.move_to_end(page)
        if len(self._pages) > _N_WAITING:
            self._pages.popitem(last=False)

    def is_wanted(self, within_s: float) -> bool:
        """Return True if a page wants the list, and one has asked for it within a time."""
        return bool(self._pages) and time.monotonic() - self._asked <= within_s

    def forget(self, page: str) -> None:
        """Stop the scan if no other page wants its list."""
        self._pages.pop(page, None)
        if not self.is_wanted(_CLOSED_S):
            self.scan.cancel()


class Queries:
    """The last lists of rows by filter, and a queue of those for which there is no place yet.

    A page wants one list at a time: the scan of the list before is stopped, unless another page
    wants it. Scans take turns. A list that pages want keeps its place, so that each search is
    completed, however many pages search.
    """

    def __init__(self, source: Source) -> None:
        self._source = source
        self._kept: OrderedDict[Key, _Kept] = OrderedDict()
        self._queue: OrderedDict[Key, float] = OrderedDict()
        """The lists that wait for a place, with the time at which a page asked last."""
        self._semaphore = FairSemaphore(_N_RUNNING)
        self._lock = threading.Lock()

    def get(self, wanted: Filter, page: str = "") -> Listing:
        """Return the list for a filter; a new one is searched for in the background.

        `page` is any name of the page that asks.

        Raises:
            InvalidArgument: the list cannot be sorted.
        """
        dataset = self._source.required()
        if not wanted.needs_scan:
            subset = wanted.subset
            found = None if subset is None else self._source.subset_rows(subset)
            return MatchedRows(len(dataset), found)
        key = version_of(dataset), wanted
        with self._lock:
            for other, each in self._kept.items():
                if other != key:
                    each.forget(page)
            if (known := self._kept.get(key)) is None or known.scan.is_cancelled:
                if known is None and not self._has_place(key):
                    return QueuedScan()
                self._kept[key] = _Kept(Scan(self._source, wanted, self._semaphore))
            kept = self._kept[key]
            kept.ask(page)
            self._kept.move_to_end(key)
        return kept.scan

    def _has_place(self, key: Key) -> bool:
        """Return True if a list can be kept now; if not, it is queued."""
        now = time.monotonic()
        for other in [each for each, asked in self._queue.items() if now - asked > _FORGOTTEN_S]:
            del self._queue[other]
        if key in self._queue or len(self._queue) < _N_WAITING:
            self._queue[key] = now
        unwanted = [k for k, each in self._kept.items() if not each.is_wanted(_FORGOTTEN_S)]
        n_places = _N_KEPT - len(self._kept) + len(unwanted)
        if key not in [*self._queue][:n_places]:
            return False
        del self._queue[key]
        if len(self._kept) == _N_KEPT:
            self._kept.pop(unwanted[0]).scan.cancel()
        return True

    def close(self) -> None:
        """Stop all scans."""
        with self._lock:
            scans = [each.scan for each in self._kept.values()]
        for scan in scans:
            scan.cancel()
        for scan in scans:
            scan.join(0.1)
