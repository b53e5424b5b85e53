"""What this thread has spent on hashing, decoding and transforms since it was last asked.

Where the work is done, its nanoseconds are added; whoever fills a batch takes the sums afterwards.
"""

from __future__ import annotations

import threading
from time import perf_counter_ns
from typing import Final

CHECK, DECODE, TRANSFORM = range(3)
"""Places in `SPENT.sums_ns`."""

EVERY: Final = 7
"""Of records, one in so many is timed, and counts for as many: two readings of the clock cost as
much as the hash of a short one. A prime, since clips of a video may come in eights."""

now_ns = perf_counter_ns
"""The clock of all of this; processes of one machine share it."""


class _Spent(threading.local):
    """Sums of one thread."""

    def __init__(self) -> None:
        self.sums_ns = [0, 0, 0]


SPENT: Final = _Spent()
