"""Fast ways to create tensors, which use tinygrad's internals.

Each way is tested when it is created. If it fails, the public API is used, which copies.

Views are tensors on the CPU device that share the memory of a block. The owner of the memory is
attached to tinygrad's `Buffer`. Everything that needs the memory, such as a slice or a lazy sum of
the tensor, refers to the `Buffer`, and so keeps the owner alive. The public `Tensor.from_blob`
takes more than ten times as long: 160 µs.

Copies are tensors on devices that do not share the host's memory. The public
`Tensor(array).to(device).realize()` builds and runs a schedule for every copy. This takes
milliseconds, although in the end only the allocator's method `_copyin` is called.

tinygrad builds and checks a small graph for each tensor, which is the same for all tensors of one
shape and dtype. A *template* is such a graph over a buffer without memory. To create a tensor, only
the buffer of the template is replaced.
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
"""The exceptions that may occur if tinygrad's internals differ from those of the known versions."""


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
        # the time.
        derive: Any = Tensor._apply_uop
        self._derive: Callable[..., Tensor] = getattr(derive, "__wrapped__", derive)

    def tensor(self, shape: tuple[int, ...], dtype: DType, buffer: Any) -> Tensor:
        """Return a tensor of `shape` over a buffer; the tensor then owns the buffer."""
        over = self._templates.get((shape, dtype))
        if over is None:
            if len(self._templates) >= self.MAX_TEMPLATES:
                self._templates.clear()
            over = self._templates[shape, dtype] = self._template(shape, dtype)
        return over(buffer)

    def _template(self, shape: tuple[int, ...], dtype: DType) -> Callable[[Any], Tensor]:
        """Return a function that replaces the buffer of a new template by another buffer."""
        template = Tensor.empty(*shape, dtype=dtype, device=self._device)
        graph: Any = template.uop
        leaf, buffers, uop, derive = graph.base, self._buffers, self._uop, self._derive
        if graph is not leaf and graph.src[0] is not leaf:
            raise TypeError(f"an empty tensor is not a reshaped buffer but {graph}")
        fresh = self._numbered(leaf)
        parts = graph.op, graph.dtype, graph.src[1:], graph.arg, graph.tag

        def over(buffer: Any) -> Tensor:
            node = fresh()
            buffers[node] = buffer.ref(1)  # this entry is removed together with `node`
            if graph is leaf:
                return derive(template, lambda _: node)
            op, kind, sources, argument, tag = parts
            return derive(template, lambda _: uop(op, kind, (node, *sources), argument, tag))

        return over

    def _numbered(self, leaf: Any) -> Callable[[], Any]:
        """Return a function that copies a buffer's node, with a number that no node has had before.

        tinygrad keeps only one node for each number, and finds the memory of a buffer by its node.
        tinygrad's own `UOp.from_buffer` uses the address of the Buffer object as the number. This
        is not safe: another Buffer object may get the same address while the node still exists.
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
    """A factory of tensors with their own memory on a device, which can also be overwritten."""

    def __init__(self, device: str) -> None:
        self._device = device
        self._graphs = TensorTemplates(device)

    def new(self, array: Ndarray, dtype: DType) -> Tensor:
        """Return a new tensor with the values of an array, C-contiguous and not empty."""
        buffer: Any = self._graphs.Buffer(self._device, math.prod(array.shape), dtype).allocate()
        self._fill(buffer, array)
        return self._graphs.tensor(array.shape, dtype, buffer)

    def refill(self, tensor: Tensor, array: Ndarray) -> None:
        """Overwrite a tensor that `new` has returned with the values of an array of its shape.

        Work that was queued before still reads the old values.
        """
        self._fill(tensor.uop.base.buffer, array)

    def _fill(self, buffer: Any, array: Ndarray) -> None:
        # A memoryview of float16 or of 0 dimensions cannot be cast; an array can be viewed.
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
    """Return True if a tensor is realized, on the device, and has 2 rows of 3 float32."""
    found = tensor.shape, tensor.dtype, tensor.device
    return found == ((2, 3), dtypes.float32, device) and bool(tensor.uop.base.is_realized)


class GraphViews:
    """A factory of views."""

    def __init__(self, device: str) -> None:
        self._device = device
        self._graphs = TensorTemplates(device)
        self._allocator: Any = Device[device].allocator

    def __call__(self, address: int, shape: tuple[int, ...], dtype: DType, owner: object) -> Tensor:
        """Make a tensor over the memory at `address`; it keeps `owner` alive."""
        size = math.prod(shape)
        spec = self._graphs.BufferSpec(external_ptr=address)
        # Do not use the method `alloc`, which caches an entry for each address forever.
        memory = self._allocator._alloc(size * dtype.itemsize, spec)
        buffer: Any = self._graphs.Buffer(self._device, size, dtype, memory, spec)
        buffer._carrier = owner
        return self._graphs.tensor(shape, dtype, buffer)


def find_view(device: str) -> GraphViews | None:
    """Return a factory of views for a device; None if views do not work with this tinygrad.

    A view must keep its owner alive exactly while the memory is needed.
    """
    memory = np.zeros((2, 3), np.float32)  # it need not be aligned, because no kernel reads it
    is_gone = weakref.ref(memory)
    try:
        view = GraphViews(device)
        tensor = view(memory.ctypes.data, (2, 3), dtypes.float32, memory)
        fits = _is_realized_on(device, tensor)
        child = tensor[1:] + 1
        del memory, tensor
        fits = fits and is_gone() is not None
        del child
        return view if fits and is_gone() is None else None
    except INTERNALS_CHANGED:
        return None
