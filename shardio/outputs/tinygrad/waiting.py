"""Waits until a device has done all that is queued; costs little where nothing is."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any, Final

from tinygrad.device import Device

from shardio.outputs.tinygrad.changed import CHANGED


class Glance:
    """Waits for tinygrad's CPU device; costs a glance at its counters where nothing is queued.

    `synchronize` looks the counters up each time, of what was given out and what is done, for each
    queue and for all together, which takes 5 us. Here they are looked up when a queue is new.
    """

    # The names and strings that `synchronize` is made of in tinygrad 0.14, from the class to its
    # bases; if it has come to do something else, it is called as it is.
    KNOWN: Final = (
        "Q _buf _wait_signal cpu_view done fmt getattr put super synchronize view workers",
        "CPU Device HCQ_RUNTIME_DEV Q _buf _wait_signal collect_prof cpu_view device fmt prof_ents "
        "signal synchronize timeline value view",
    )

    def __init__(self, device: Any) -> None:
        own = [vars(kind).get("synchronize") for kind in type(device).__mro__]
        found = tuple(" ".join(sorted(_words(each.__code__))) for each in own if each)
        if found[:2] != self.KNOWN:
            raise NotImplementedError(f"synchronize is made of {found}")
        self._device = device
        self._done = _counter(device.signal("timeline"))
        self._issued = _counter(device.signal("value", 1, device="CPU"))
        self._queues: list[tuple[Any, Any]] = []

    def __call__(self) -> None:
        """Wait until the device has done all that is queued."""
        device = self._device
        if len(self._queues) != len(device.workers):
            self._queues = [(_counter(each.put), _counter(each.done)) for each in device.workers]
        # Queues first: what one of them gives out to another counts as issued before it is done.
        is_idle = all(done[0] >= put[0] for put, done in self._queues)
        if not is_idle or self._done[0] < self._issued[0] - 1 or device.prof_ents:
            device.synchronize()


def _counter(buffer: Any) -> Any:
    return buffer._buf.cpu_view().view(fmt="Q")


def _words(code: types.CodeType) -> set[str]:
    """The names and strings that a function's code refers to."""
    found = set(code.co_names)
    for constant in code.co_consts:
        for each in constant if isinstance(constant, tuple) else (constant,):
            if isinstance(each, str):
                found.add(each)
            elif isinstance(each, types.CodeType):
                found |= _words(each)
    return found


def wait_for(name: str) -> Callable[[], object]:
    """What waits until a device has done all that is queued."""
    device: Any = Device[name]
    try:
        return Glance(device)
    except CHANGED:  # another device, another tinygrad
        wait: Callable[[], object] = device.synchronize
        return wait
