"""Tensors that *are* a block's memory, on tinygrad's CPU device.

They stay valid because the object that keeps the memory, the carrier, hangs on tinygrad's `Buffer`:
whatever still needs the bytes (a tensor, a slice of it, a lazy sum of it) refers to that Buffer,
and not to the Tensor that it was made from.

tinygrad's public way there, `Tensor.from_blob`, costs three times what is needed, as it builds and
checks the same small graph for every batch. So the graph is kept, per shape and dtype, and only the
buffer under it is new. That takes internals of tinygrad; they are tried out once per TensorMaker,
and where they have changed, the public way serves.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from tinygrad.device import Device
from tinygrad.dtype import DType, dtypes
from tinygrad.tensor import Tensor

from shardio.tensors.changed import CHANGED

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


class _Template(NamedTuple):
    """The graph of every tensor of one shape and dtype, over a buffer without memory.

    `wrapping` is what makes the graph's topmost node of its sources, None where that is the buffer;
    `leaf` is the buffer's node, and `number` makes its argument of a number, where it has one.
    """

    tensor: Tensor
    leaf: Any
    number: Callable[..., Any] | None
    wrapping: tuple[Any, ...] | None
    size: int


class Graft:
    """Views by putting a new buffer under a graph that is kept for the next batch.

    The graphs are kept over buffers without memory, so that no batch stays alive with them.
    """

    # As many shapes as a loop may have batches of at a time; varying shapes must not pile up.
    MOST_TEMPLATES = 256
    # As many fields as all blocks may have; an address that comes again means the same as before.
    MOST_PLACES = 1024

    def __init__(self, device: str) -> None:
        # Here, because these names may go with any version of tinygrad.
        from tinygrad.device import Buffer, BufferSpec
        from tinygrad.uop.ops import UOp, buffers

        self._device = device
        self._allocator: Any = Device[device].allocator
        self._internals = Buffer, BufferSpec, UOp, buffers
        self._templates: dict[tuple[tuple[int, ...], DType], _Template] = {}
        self._places: dict[tuple[int, int], tuple[Any, Any]] = {}
        # Without the wrapper that notes, at half of the cost, which method made a node.
        derive: Any = Tensor._apply_uop
        self._derive: Callable[..., Tensor] = getattr(derive, "__wrapped__", derive)

    def __call__(
        self, address: int, shape: tuple[int, ...], dtype: DType, carrier: object
    ) -> Tensor:
        """Make a tensor over the memory at `address`; it keeps `carrier`."""
        Buffer, _, uop, buffers = self._internals
        template, leaf, number, wrapping, size = self._template(shape, dtype)
        n_bytes = size * dtype.itemsize
        place = self._places.get((address, n_bytes)) or self._place(address, n_bytes)
        buffer: Any = Buffer(self._device, size, dtype, *place)
        buffer._carrier = carrier
        fresh = self._fresh(leaf, number)
        buffers[fresh] = buffer.ref(1)  # this is what owns the Buffer: it goes with `fresh`
        if wrapping is None:
            return self._derive(template, lambda _: fresh)
        op, kind, sources, argument, tag = wrapping
        return self._derive(template, lambda _: uop(op, kind, (fresh, *sources), argument, tag))

    def _place(self, address: int, n_bytes: int) -> tuple[Any, Any]:
        """What a Buffer is told of memory that is not its own: where it is, and that it is so."""
        spec = self._internals[1](external_ptr=address)
        # Not by `alloc`: it would keep an entry per address for ever.
        found = self._allocator._alloc(n_bytes, spec), spec
        if len(self._places) >= self.MOST_PLACES:
            self._places.clear()
        self._places[address, n_bytes] = found
        return found

    def _fresh(self, leaf: Any, number: Callable[..., Any] | None) -> Any:
        """Copy a buffer's node under a number that no node ever had.

        tinygrad's own `UOp.from_buffer` takes the address of the Buffer object for a number, and
        that comes again: safe while each node's end comes first, but nothing is won by relying on
        it. tinygrad keeps one node per number and finds the memory by the node.
        """
        uop = self._internals[2]
        if number is not None:  # tinygrad 0.14; `new_buffer` is slower
            argument = number(slot=next(uop.unique_num))
            return uop(leaf.op, leaf.dtype, leaf.src, argument, leaf.tag)
        return uop.new_buffer(self._device, leaf.arg, leaf.dtype)

    def _template(self, shape: tuple[int, ...], dtype: DType) -> _Template:
        found = self._templates.get((shape, dtype))
        if found is None:
            template = Tensor.empty(*shape, dtype=dtype, device=self._device)
            graph: Any = template.uop
            leaf = graph.base
            if graph is not leaf and graph.src[0] is not leaf:
                raise TypeError(f"an empty tensor is not a reshaped buffer but {graph}")
            if len(self._templates) >= self.MOST_TEMPLATES:
                self._templates.clear()
            wrapping = None
            if graph is not leaf:
                wrapping = graph.op, graph.dtype, graph.src[1:], graph.arg, graph.tag
            number = None
            if hasattr(leaf.arg, "slot"):
                rest = {f.name: getattr(leaf.arg, f.name) for f in dataclasses.fields(leaf.arg)}
                del rest["slot"]
                number = functools.partial(type(leaf.arg), **rest)  # type: ignore[misc]
            found = _Template(template, leaf, number, wrapping, math.prod(shape))
            self._templates[shape, dtype] = found
        return found


def find_view(device: str) -> View | None:
    """The fastest way to make views on a device; None if no way keeps the memory."""
    for make in (Graft, Blob):
        try:
            view = make(device)
            if _holds(view, device):
                return view
        except CHANGED:
            continue  # the next one is slower, and needs less of tinygrad
    return None


class _Carrier:
    """Stands for a lease while a way to make views is tried out."""


def _holds(view: View, device: str) -> bool:
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
