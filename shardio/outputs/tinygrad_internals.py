"""Create tensors quickly with tinygrad's internals, which are tested before they are used.

A *view* is a tensor on the CPU device that shares the memory of a block. tinygrad's `Buffer` keeps
the owner of this memory alive; slices of the view and unrealized results refer to the same
`Buffer`. The public `Tensor.from_blob` takes more than ten times as long: 160 µs.

A *copy* is a tensor with memory of its own on any device, which the allocator's `_copyin` fills.
The public `Tensor(array).to(device).realize()` takes milliseconds, because it builds and runs a
schedule.

A *template* is an empty tensor without memory. tinygrad builds and checks its graph once, and all
tensors of the same shape and dtype are derived from it; each of them gets its own buffer.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import weakref
from collections.abc import Callable
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from tinygrad.device import Device
from tinygrad.dtype import DType, dtypes
from tinygrad.tensor import Tensor

Ndarray = npt.NDArray[Any]

INTERNALS_CHANGED: Final = (
    AssertionError,
    AttributeError,
    ImportError,
    LookupError,
    NotImplementedError,
    RuntimeError,
    TypeError,
    ValueError,
)
"""The exceptions that a version of tinygrad with other internals may raise."""


class TensorTemplates:
    """A cache of templates, and a factory of tensors over buffers of one device."""

    # Most loops need fewer templates. The limit is for loops in which shapes vary.
    MAX_TEMPLATES = 256

    def __init__(self, device: str) -> None:
        # Import here, because some versions of tinygrad lack these names.
        from tinygrad.device import Buffer, BufferSpec
        from tinygrad.uop.ops import UOp, buffers

        self._device = device
        self.Buffer, self.BufferSpec = Buffer, BufferSpec
        self._uop: Any = UOp
        self._buffers = buffers
        self._templates: dict[tuple[tuple[int, ...], DType], Callable[[Any], Tensor]] = {}
        # Get the function without its wrapper, which records the calling method and takes half of
        # the time of a call.
        derive: Any = Tensor._apply_uop
        self._derive: Callable[..., Tensor] = getattr(derive, "__wrapped__", derive)

    def tensor(self, shape: tuple[int, ...], dtype: DType, buffer: Any) -> Tensor:
        """Return a tensor of `shape` over a buffer, which the tensor then owns."""
        make = self._templates.get((shape, dtype))
        if make is None:
            if len(self._templates) >= self.MAX_TEMPLATES:
                self._templates.clear()
            make = self._templates[shape, dtype] = self._template(shape, dtype)
        return make(buffer)

    def _template(self, shape: tuple[int, ...], dtype: DType) -> Callable[[Any], Tensor]:
        template = Tensor.empty(*shape, dtype=dtype, device=self._device)
        graph: Any = template.uop
        leaf, buffers, uop, derive = graph.base, self._buffers, self._uop, self._derive
        if graph is not leaf and graph.src[0] is not leaf:
            raise TypeError(f"an empty tensor is not a reshaped buffer but {graph}")
        copy_node = self._node_copier(leaf)
        parts = graph.op, graph.dtype, graph.src[1:], graph.arg, graph.tag

        def make(buffer: Any) -> Tensor:
            node = copy_node()
            buffers[node] = buffer.ref(1)  # a weak key: tinygrad removes it with `node`
            if graph is leaf:
                return derive(template, lambda _: node)
            op, kind, sources, argument, tag = parts
            return derive(template, lambda _: uop(op, kind, (node, *sources), argument, tag))

        return make

    def _node_copier(self, leaf: Any) -> Callable[[], Any]:
        """Return a function that copies the graph node `leaf`; each copy gets a new number.

        tinygrad treats two nodes with the same number as one buffer. Its own `UOp.from_buffer` uses
        the address of the Buffer object as the number. If that Buffer is released while the node
        still exists, another Buffer may get the same address.
        """
        uop = self._uop
        if not hasattr(leaf.arg, "slot"):  # before tinygrad 0.14
            return functools.partial(uop.new_buffer, self._device, leaf.arg, leaf.dtype)
        rest = {f.name: getattr(leaf.arg, f.name) for f in dataclasses.fields(leaf.arg)}
        del rest["slot"]
        kind: Callable[..., Any] = type(leaf.arg)
        argument = functools.partial(kind, **rest)
        parts = leaf.op, leaf.dtype, leaf.src
        return lambda: uop(*parts, argument(slot=next(uop.unique_num)), leaf.tag)


class DeviceCopies:
    """A factory of tensors that have their own memory on a device, and can be overwritten."""

    def __init__(self, device: str) -> None:
        self._device = device
        self._graphs = TensorTemplates(device)

    def new(self, array: Ndarray, dtype: DType) -> Tensor:
        """Return a new tensor with the values of a non-empty, C-contiguous array."""
        buffer: Any = self._graphs.Buffer(self._device, math.prod(array.shape), dtype).allocate()
        self._fill(buffer, array)
        return self._graphs.tensor(array.shape, dtype, buffer)

    def refill(self, tensor: Tensor, array: Ndarray) -> None:
        """Overwrite a tensor returned by `new` with the values of an array of the same shape.

        Work that was queued before the call still reads the old values.
        """
        self._fill(tensor.uop.base.buffer, array)

    def _fill(self, buffer: Any, array: Ndarray) -> None:
        # View the array as bytes before taking its memoryview: a memoryview of float16, or of an
        # array of 0 dimensions, cannot be cast to bytes.
        buffer.allocator._copyin(buffer._buf, array.reshape(-1).view(np.uint8).data)


def find_copies(device: str) -> DeviceCopies | None:
    """Return a `DeviceCopies` for a device; None if it does not work with this tinygrad."""
    first, second = np.arange(6, dtype=np.float32).reshape(2, 3), np.full((2, 3), 7, np.float32)
    try:
        copies = DeviceCopies(device)
        tensor = copies.new(first, dtypes.float32)
        fits = _is_realized_on(device, tensor) and np.array_equal(tensor.numpy(), first)
        copies.refill(tensor, second)
        return copies if fits and np.array_equal(tensor.numpy(), second) else None
    except INTERNALS_CHANGED:
        return None


def _is_realized_on(device: str, tensor: Tensor) -> bool:
    """Return True for a realized tensor of 2 rows of 3 float32 on the device."""
    found = tensor.shape, tensor.dtype, tensor.device
    return found == ((2, 3), dtypes.float32, device) and bool(tensor.uop.base.is_realized)


class GraphViews:
    """A factory of views."""

    # The maximum number of cached results of `_external`. A loader needs fewer: one for each field
    # of each block. A result stays valid if other memory gets the same address.
    MAX_CACHED = 1024

    def __init__(self, device: str) -> None:
        self._device = device
        self._graphs = TensorTemplates(device)
        self._allocator: Any = Device[device].allocator
        self._cached: dict[tuple[int, int], tuple[Any, Any]] = {}

    def __call__(self, address: int, shape: tuple[int, ...], dtype: DType, owner: object) -> Tensor:
        """Return a tensor over the memory at `address`; the tensor keeps `owner` alive."""
        size = math.prod(shape)
        n_bytes = size * dtype.itemsize
        external = self._cached.get((address, n_bytes)) or self._external(address, n_bytes)
        buffer: Any = self._graphs.Buffer(self._device, size, dtype, *external)
        buffer._carrier = owner
        return self._graphs.tensor(shape, dtype, buffer)

    def _external(self, address: int, n_bytes: int) -> tuple[Any, Any]:
        """Return the arguments with which a Buffer uses external memory; cache them: 2 µs."""
        spec = self._graphs.BufferSpec(external_ptr=address)
        # Do not use the method `alloc`, which caches an entry for each address forever.
        found = self._allocator._alloc(n_bytes, spec), spec
        if len(self._cached) >= self.MAX_CACHED:
            self._cached.clear()
        self._cached[address, n_bytes] = found
        return found


def find_view(device: str) -> GraphViews | None:
    """Return a factory of views for a device; None if they do not work with this tinygrad.

    A view must keep its owner alive exactly while the memory is needed.
    """
    memory = np.zeros((2, 3), np.float32)  # need not be aligned, because no kernel reads it
    memory_ref = weakref.ref(memory)
    try:
        view = GraphViews(device)
        tensor = view(memory.ctypes.data, (2, 3), dtypes.float32, memory)
        fits = _is_realized_on(device, tensor)
        child = tensor[1:] + 1
        del memory, tensor
        fits = fits and memory_ref() is not None
        del child
        return view if fits and memory_ref() is None else None
    except INTERNALS_CHANGED:
        return None


# The names in the code of two methods `synchronize` in tinygrad 0.14: that of the CPU device, and
# that of its base class.
_KNOWN_SYNCHRONIZE: Final = [
    {"workers", "_wait_signal", "super", "synchronize"},
    {"HCQ_RUNTIME_DEV", "value", "device", "Device", "synchronize", "signal", "_buf", "cpu_view"}
    | {"view", "_wait_signal", "prof_ents", "collect_prof"},
]


def find_synchronize(name: str) -> Callable[[], object]:
    """Return a function that waits until a device has finished all queued work.

    With HCQ2=1, the CPU device of tinygrad 0.14 has worker threads with queues. `synchronize` takes
    4 µs even if there are no such threads, so it is called only if there are. If the code of
    `synchronize` is not that of this version, it is always called.
    """
    device: Any = Device[name]
    synchronize: Callable[[], object] = device.synchronize
    methods = [vars(kind).get("synchronize") for kind in type(device).__mro__]
    if [set(each.__code__.co_names) for each in methods if each][:2] != _KNOWN_SYNCHRONIZE:
        return synchronize

    def synchronize_if_queued() -> None:
        if device.workers or device.prof_ents:
            synchronize()

    return synchronize_if_queued
