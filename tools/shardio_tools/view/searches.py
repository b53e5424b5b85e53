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
"""The maximum numbers of lists that are kept, and of scans that run at the same time."""
_N_WAITING: Final = 64
"""The maximum numbers of lists in the queue, and of pages that are remembered for a list."""
_STALE_S: Final = 2.0
"""The time after which a list that no page has asked for may be evicted, and leaves the queue."""
_ABANDONED_S: Final = 90.0
"""The time after which a scan that no page has asked for is stopped: browsers let pages in the
background ask once a minute.
"""

Key = tuple[str, Filter]


class QueuedScan(MatchedRows):
    """The empty list of a filter that waits in the queue for its scan."""

    text = "waiting for other searches"
    is_complete = False
    progress = 0.0

    def __init__(self) -> None:
        super().__init__(0)


Listing = MatchedRows | Scan


class _Entry:
    """A scan, and the pages that want its list, in the order of their last requests."""

    def __init__(self, scan: Scan) -> None:
        self.scan = scan
        self._pages: OrderedDict[str, None] = OrderedDict()
        self._asked = 0.0

    def request(self, page: str) -> None:
        """Record a request of a page for the list."""
        self._asked = time.monotonic()
        self._pages[page] = None
        self._pages.move_to_end(page)
        if len(self._pages) > _N_WAITING:
            self._pages.popitem(last=False)

    def is_wanted(self, within_s: float) -> bool:
        """Return True if a page wants the list, and the last request is at most `within_s` old."""
        return bool(self._pages) and time.monotonic() - self._asked <= within_s

    def forget(self, page: str) -> None:
        """Stop the scan if no other page wants its list."""
        self._pages.pop(page, None)
        if not self.is_wanted(_ABANDONED_S):
            self.scan.cancel()


class Queries:
    """A cache of the last lists of rows by filter, and a queue of the filters to admit next.

    A page wants one list at a time: the scan of its previous list is stopped, unless another page
    wants that list. Scans take turns. A list that a page wants is not evicted, so that each search
    is completed, however many pages search.
    """

    def __init__(self, source: Source) -> None:
        self._source = source
        self._entries: OrderedDict[Key, _Entry] = OrderedDict()
        self._queue: OrderedDict[Key, float] = OrderedDict()
        """The lists to admit, with the time of the last request for each."""
        self._semaphore = FairSemaphore(_N_RUNNING)
        self._lock = threading.Lock()

    def get(self, wanted: Filter, page: str = "") -> Listing:
        """Return the list for a filter; start to search in the background if there is none.

        `page` is any string that identifies the page that asks.

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
            for other, each in self._entries.items():
                if other != key:
                    each.forget(page)
            if (known := self._entries.get(key)) is None or known.scan.is_cancelled:
                if known is None and not self._admit(key):
                    return QueuedScan()
                self._entries[key] = _Entry(Scan(self._source, wanted, self._semaphore))
            entry = self._entries[key]
            entry.request(page)
            self._entries.move_to_end(key)
        return entry.scan

    def _admit(self, key: Key) -> bool:
        """Make room for a list and return True; queue it and return False if others come first."""
        now = time.monotonic()
        for other in [each for each, asked in self._queue.items() if now - asked > _STALE_S]:
            del self._queue[other]
        if key in self._queue or len(self._queue) < _N_WAITING:
            self._queue[key] = now
        unwanted = [k for k, each in self._entries.items() if not each.is_wanted(_STALE_S)]
        n_free = _N_KEPT - len(self._entries) + len(unwanted)
        if key not in [*self._queue][:n_free]:
            return False
        del self._queue[key]
        if len(self._entries) == _N_KEPT:
            self._entries.pop(unwanted[0]).scan.cancel()
        return True

    def close(self) -> None:
        """Stop all scans."""
        with self._lock:
            scans = [each.scan for each in self._entries.values()]
        for scan in scans:
            scan.cancel()
        for scan in scans:
            scan.join(0.1)
