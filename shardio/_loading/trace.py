"""What an engine has recorded of an iteration, as a timeline."""

from __future__ import annotations

from collections.abc import Sequence

import shardio._loading.timeline as kinds
from shardio._engine.dispatch.counters import Filling, Lap
from shardio._loading.timeline import Filled, HandedOver, Timeline

_S_PER_NS = 1e-9


def timeline_of(title: str, fillings: Sequence[Sequence[Filling]], lap: Lap) -> Timeline:
    """The timeline of one iteration.

    Args:
        title: what it was.
        fillings: of each worker.
        lap: what main has seen, with its moments.
    """
    began_ns = lap.began_ns
    main = [
        HandedOver(
            one.step,
            (one.asked_ns - began_ns) * _S_PER_NS,
            one.waited_ns * _S_PER_NS,
            (one.got_ns - began_ns) * _S_PER_NS,
        )
        for one in lap.moments
    ]
    return Timeline(title, [[_filled(one, began_ns) for one in each] for each in fillings], main)


def _filled(one: Filling, began_ns: int) -> Filled:
    whole_ns = one.end_ns - one.start_ns
    # Records are timed one in seven: of few, more may come out than there was.
    check_ns = min(one.check_ns, whole_ns)
    decode_ns = min(one.decode_ns, whole_ns - check_ns)
    transform_ns = min(one.transform_ns, whole_ns - check_ns - decode_ns)
    phases_ns = {
        kinds.READING: whole_ns - check_ns - decode_ns - transform_ns,
        kinds.CHECKING: check_ns,
        kinds.DECODING: decode_ns,
        kinds.TRANSFORMING: transform_ns,
    }
    return Filled(
        one.step,
        (one.start_ns - began_ns) * _S_PER_NS,
        (one.end_ns - began_ns) * _S_PER_NS,
        {kind: ns * _S_PER_NS for kind, ns in phases_ns.items()},
    )
