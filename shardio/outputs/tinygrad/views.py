"""Tensors that *are* a block's memory, on tinygrad's CPU device.

They stay valid because the object that keeps the memory, the carrier, hangs on tinygrad's `Buffer`:
whatever still needs the bytes (a tensor, a slice of it, a lazy sum of it) refers to that Buffer,
and not to the Tensor that it was made from.

tinygrad's public way there, `Tensor.from_blob`, costs three times what is needed. `graphs` has a
cheaper one, which is tried out once per TensorMaker; where it does not work, the public one serves.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
from tinygrad.device import Device
from tinygrad.dtype import DType, dtypes
from tinygrad.tensor import Tensor

from shardio.outputs.tinygrad.changed import CHANGED
from shardio.outputs.tinygrad.graphs import Graphs

# (address, shape, dtype, carrier) -> tensor over the memory there, which keeps the carrier
View = Callable[[int, tuple[int, ...], DType, object], Tensor]


class Blob:
    """Views by the public way; only where the carrier is put is not public."""

    def __init__(self, device: str) -> None:
        self._device = device

    def __call__(
        self, address: int, shape: tuple[int, ...], dtype: DType, carrier: object
    ) -> Tensor:
        """Make a tensor over the memory at `address`; it keeps `carrier`."""
        tensor = Tensor.from_blob(address, shape, dtype=dtype, device=self._device)
        tensor.uop.base.buffer._carrier = carrier  # type: ignore[union-attr]
        return tensor


class Graft:
    """Views by putting a new buffer under a graph that is kept for the next batch."""

    # As many fields as all blocks may have; an address that comes again means the same as before.
    MOST_PLACES = 1024

    def __init__(self, device: str) -> None:
        self._device = device
        self._graphs = Graphs(device)
        self._allocator: Any = Device[device].allocator
        self._places: dict[tuple[int, int], tuple[Any, Any]] = {}

    def __call__(
        self, address: int, shape: tuple[int, ...], dtype: DType, carrier: object
    ) -> Tensor:
        """Make a tensor over the memory at `address`; it keeps `carrier`."""
        size = math.prod(shape)
        n_bytes = size * dtype.itemsize
        place = self._places.get((address, n_bytes)) or self._place(address, n_bytes)
        buffer: Any = self._graphs.Buffer(self._device, size, dtype, *place)
        buffer._carrier = carrier
        return self._graphs.tensor(shape, dtype, buffer)

    def _place(self, address: int, n_bytes: int) -> tuple[Any, Any]:
        """What a Buffer is told of memory that is not its own: where it is, and that it is so."""
        spec = self._graphs.BufferSpec(external_ptr=address)
        # Not by `alloc`: it would keep an entry per address for ever.
        found = self._allocator._alloc(n_bytes, spec), spec
        if len(self._places) >= self.MOST_PLACES:
            self._places.clear()
        self._places[address, n_bytes] = found
        return found


def find_view(device: str) -> View | None:
    """The fastest way to make views on a device; None if no way keeps the memory."""
    for make in (Graft, Blob):
        try:
            view = make(device)
            if _view_works(view, device):
                return view
        except CHANGED:
            continue  # the next one is slower, and needs less of tinygrad
    return None


class _Carrier:
    """Stands for a lease while a way to make views is tried out."""


def _view_works(view: View, device: str) -> bool:
    """Try a way to make views: does it give the tensor asked for, and keep and free the carrier?"""
    carrier = _Carrier()
    is_gone = weakref.ref(carrier)
    memory = np.zeros((2, 3), np.float32)  # is not read, so it need not be aligned
    tensor = view(memory.ctypes.data, memory.shape, dtypes.float32, carrier)
    fits = (tensor.shape, tensor.dtype, tensor.device) == ((2, 3), dtypes.float32, device)
    fits &= bool(tensor.uop.base.is_realized)
    child = tensor[1:] + 1
    del carrier, tensor
    is_kept = is_gone() is not None
    del child
    return fits and is_kept and is_gone() is None
