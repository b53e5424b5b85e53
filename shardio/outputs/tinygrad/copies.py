"""Tensors on devices that do not share the host's memory: one copy each, by the backend's own way.

tinygrad's public way, `Tensor(array).to(device).realize()`, makes and runs a schedule for every
copy, which takes milliseconds; in the end that comes to one call of the allocator's `_copyin`. This
is tried out once per TensorMaker, and where it does not work, the public way serves.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt
from tinygrad.dtype import DType, dtypes
from tinygrad.tensor import Tensor

from shardio.outputs.tinygrad.changed import CHANGED
from shardio.outputs.tinygrad.graphs import Graphs

Ndarray = npt.NDArray[Any]


class Copies:
    """Makes tensors with memory of their own on a device, and writes into them."""

    def __init__(self, device: str) -> None:
        self._device = device
        self._graphs = Graphs(device)

    def new(self, array: Ndarray, dtype: DType) -> Tensor:
        """Make a tensor with the values of an array: C-contiguous, not empty."""
        buffer: Any = self._graphs.Buffer(self._device, math.prod(array.shape), dtype).allocate()
        _fill(buffer, array)
        return self._graphs.tensor(array.shape, dtype, buffer)

    def refill(self, tensor: Tensor, array: Ndarray) -> None:
        """Write an array's values over those of a tensor that `new` made of one of its shape.

        The copy is queued behind the work that was queued before, which reads the old values.
        """
        _fill(tensor.uop.base.buffer, array)


def _fill(buffer: Any, array: Ndarray) -> None:
    # As bytes, by way of NumPy: a memoryview of float16 or of no dimensions cannot be cast.
    buffer.allocator._copyin(buffer._buf, array.reshape(-1).view(np.uint8).data)


def find_copies(device: str) -> Copies | None:
    """What copies to a device; None if only the public way does."""
    try:
        copies = Copies(device)
        return copies if _copies_work(copies, device) else None
    except CHANGED:
        return None


def _copies_work(copies: Copies, device: str) -> bool:
    """Try it out: do tensors get the values, and others when they are refilled?"""
    first, second = np.arange(6, dtype=np.float32).reshape(2, 3), np.full((2, 3), 7, np.float32)
    tensor = copies.new(first, dtypes.float32)
    fits = (tensor.shape, tensor.dtype, tensor.device) == ((2, 3), dtypes.float32, device)
    fits &= bool(tensor.uop.base.is_realized) and np.array_equal(tensor.numpy(), first)
    copies.refill(tensor, second)
    return fits and np.array_equal(tensor.numpy(), second)
