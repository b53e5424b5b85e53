"""The lists of rows that pages have asked for last, and the scans that run for them."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from typing import Final

from shardio_tools.view.queries import Filter, MatchedRows, Scan
from shardio_tools.view.source import Source

_N_KEPT: Final = 4
_N_RUNNING: Final = 2
"""The maximum numbers of lists that are kept, and of scans that run; others wait."""
_FORGOTTEN_S: Final = 2.0
"""The time after which a scan is stopped that no page asks for any more, when a page asks for
another list."""

Listing = MatchedRows | Scan


class Queries:
    """The last lists of rows by filter; the older ones are forgotten, and their scans stopped."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._kept: OrderedDict[tuple[int, Filter], Scan] = OrderedDict()
        self._slots = threading.Semaphore(_N_RUNNING)
        self._lock = threading.Lock()

    def get(self, wanted: Filter) -> Listing:
        """Return the list for a filter; a new one is searched for in the background.

        Raises:
            InvalidArgument: the list cannot be sorted.
        """
        dataset = self._source.required()
        if not wanted.needs_scan:
            subset = wanted.subset
            found = None if subset is None else self._source.subset_rows(subset)
            return MatchedRows(len(dataset), found)
        key = dataset.generation, wanted
        with self._lock:
            for other, each in self._kept.items():
                if other != key and time.monotonic() - each.asked > _FORGOTTEN_S:
                    each.cancel()
            if (known := self._kept.get(key)) is None or known.is_cancelled:
                self._kept[key] = Scan(self._source, wanted, self._slots)
            scan = self._kept[key]
            scan.asked = time.monotonic()
            self._kept.move_to_end(key)
            while len(self._kept) > _N_KEPT:
                self._kept.popitem(last=False)[1].cancel()
        return scan

    def close(self) -> None:
        """Stop all scans."""
        with self._lock:
            scans = [*self._kept.values()]
        for scan in scans:
            scan.cancel()
        for scan in scans:
            scan.join(0.1)
