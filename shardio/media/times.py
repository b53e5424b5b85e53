"""The presentation time of every frame, as integers in the stream's own time base."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterable, Iterator
from typing import TypeVar

from shardio.errors import MediaError

__all__ = ["REORDER_WINDOW", "settled"]

_T = TypeVar("_T")

REORDER_WINDOW = 16  # frames: no coding standard in use lets a decoder hold back more


def settled(frames: Iterable[tuple[int, _T]]) -> Iterator[tuple[int, _T]]:
    """Give every frame its time, so that times rise with the order of presentation.

    `frames` are (time, frame) in the order in which the decoder hands them out, which is the order
    of presentation. Where the container stores presentation times they rise already and nothing
    changes. AVI stores none: what is read there numbers the frames in *coding* order, so that
    with B-frames the times are the right ones in the wrong places (1, 2, 4, 3, …). Hence the
    n-th frame shown gets the n-th smallest time, looking `REORDER_WINDOW` frames ahead.

    A time before one that was already given out means that the stream's clock started anew
    (recordings joined end to end); the order starts anew there.

    Raises:
        MediaError: `frames` raised it; the frames before it have been given out.
    """
    waiting: deque[_T] = deque()
    times: list[int] = []
    latest: int | None = None
    failure: MediaError | None = None
    try:
        for time, frame in frames:
            if latest is not None and time < latest:
                while waiting:
                    yield heapq.heappop(times), waiting.popleft()
                latest = None
            waiting.append(frame)
            heapq.heappush(times, time)
            if len(waiting) > REORDER_WINDOW:
                latest = heapq.heappop(times)
                yield latest, waiting.popleft()
    except MediaError as error:
        failure = error
    while waiting:
        yield heapq.heappop(times), waiting.popleft()
    if failure is not None:
        raise failure
