"""Fast paths through tinygrad's internals, each tested when created, with a public fallback.

Views: tensors that share a block's memory on the CPU device. The owner of the memory is attached to
tinygrad's `Buffer`. Everything that needs the bytes, such as a slice or a lazy sum of the tensor,
refers to the `Buffer`. The public `Tensor.from_blob` takes three times as long.

Copies: tensors on devices that do not share the host's memory. The public
`Tensor(array).to(device).realize()` builds and runs a schedule for every copy, which takes
milliseconds, only to call the allocator's `_copyin`.

Templates: tinygrad builds and checks the same small graph for every tensor of a shape and dtype.
A template is such a graph over a buffer without memory; for a new tensor, only the buffer is
replaced.

Synchronizing: if nothing is queued, comparing tinygrad's queue counters is faster than its own
`synchronize`.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import types
import weakref
from collections.abc import Callable
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
from tinygrad.device import Device
from tinygrad.dtype import DType, dtypes
from tinygrad.tensor import Tensor

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
"""The exceptions that occur if an internal of tinygrad differs from the known versions."""


class _Template(NamedTuple):
    """The graph of the tensors of one shape and dtype, over a buffer without memory.

    `wrapping` has the arguments of the graph's top node, or None if the buffer is the top node.
    `leaf` is the buffer's node. `number` creates the node's argument from a unique number; None if
    this version of tinygrad has no such argument.
    """

    tensor: Tensor
    leaf: Any
    number: Callable[..., Any] | None
    wrapping: tuple[Any, ...] | None


class TensorTemplates:
    """A cache of templates, and a factory of tensors over buffers of one device."""

    # A loop usually has fewer shapes; the limit is for shapes that vary.
    MAX_TEMPLATES = 256

    def __init__(self, device: str) -> None:
        # Import here, because some versions of tinygrad lack these names.
        from tinygrad.device import Buffer, BufferSpec
        from tinygrad.uop.ops import UOp, buffers

        self._device = device
        self.Buffer, self.BufferSpec = Buffer, BufferSpec
        self._uop, self._buffers = UOp, buffers
        self._templates: dict[tuple[tuple[int, ...], DType], _Template] = {}
        # Bypass the wrapper that records the calling method, which takes half of the time.
        derive: Any = Tensor._apply_uop
        self._derive: Callable[..., Tensor] = getattr(derive, "__wrapped__", derive)

    def tensor(self, shape: tuple[int, ...], dtype: DType, buffer: Any) -> Tensor:
        """Return a tensor over a buffer, which it owns; `shape` must have the buffer's size."""
        template, leaf, number, wrapping = self._template(shape, dtype)
        fresh = self._fresh(leaf, number)
        self._buffers[fresh] = buffer.ref(1)  # the entry owns the Buffer until `fresh` is gone
        if wrapping is None:
            return self._derive(template, lambda _: fresh)
        op, kind, sources, argument, tag = wrapping
        uop: Any = self._uop
        return self._derive(template, lambda _: uop(op, kind, (fresh, *sources), argument, tag))

    def _fresh(self, leaf: Any, number: Callable[..., Any] | None) -> Any:
        """Copy a buffer's node under a number that no node had before.

        tinygrad keeps one node per number, and finds the memory by the node. Its `UOp.from_buffer`
        uses the address of the Buffer object as the number; the address may be reused while the
        node exists.
        """
        uop: Any = self._uop
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
            if len(self._templates) >= self.MAX_TEMPLATES:
                self._templates.clear()
            wrapping = None
            if graph is not leaf:
                wrapping = graph.op, graph.dtype, graph.src[1:], graph.arg, graph.tag
            number = None
            if hasattr(leaf.arg, "slot"):
                rest = {f.name: getattr(leaf.arg, f.name) for f in dataclasses.fields(leaf.arg)}
                del rest["slot"]
                number = functools.partial(type(leaf.arg), **rest)  # type: ignore[misc]
            found = _Template(template, leaf, number, wrapping)
            self._templates[shape, dtype] = found
        return found


Ndarray = npt.NDArray[Any]


class DeviceCopies:
    """A factory of tensors with their own memory on a device; `refill` overwrites a tensor."""

    def __init__(self, device: str) -> None:
        self._device = device
        self._graphs = TensorTemplates(device)

    def new(self, array: Ndarray, dtype: DType) -> Tensor:
        """Return a tensor with the values of an array, which is C-contiguous and not empty."""
        buffer: Any = self._graphs.Buffer(self._device, math.prod(array.shape), dtype).allocate()
        _fill(buffer, array)
        return self._graphs.tensor(array.shape, dtype, buffer)

    def refill(self, tensor: Tensor, array: Ndarray) -> None:
        """Overwrite a tensor from `new` with the values of an array of the same shape.

        The copy is queued after earlier work, which reads the old values.
        """
        _fill(tensor.uop.base.buffer, array)


def _fill(buffer: Any, array: Ndarray) -> None:
    # Convert to bytes with NumPy: a memoryview of float16 or of 0 dimensions cannot be cast.
    buffer.allocator._copyin(buffer._buf, array.reshape(-1).view(np.uint8).data)


def find_copies(device: str) -> DeviceCopies | None:
    """Return the fast copies for a device; None if only the public API works."""
    try:
        copies = DeviceCopies(device)
        return copies if _copies_work(copies, device) else None
    except INTERNALS_CHANGED:
        return None


def _copies_work(copies: DeviceCopies, device: str) -> bool:
    """Return True if new and refilled tensors have the values of their arrays."""
    first, second = np.arange(6, dtype=np.float32).reshape(2, 3), np.full((2, 3), 7, np.float32)
    tensor = copies.new(first, dtypes.float32)
    fits = (tensor.shape, tensor.dtype, tensor.device) == ((2, 3), dtypes.float32, device)
    fits &= bool(tensor.uop.base.is_realized) and np.array_equal(tensor.numpy(), first)
    copies.refill(tensor, second)
    return fits and np.array_equal(tensor.numpy(), second)


# A function from (address, shape, dtype, owner) to a tensor over the memory at the address. The
# tensor keeps the owner.
MakeView = Callable[[int, tuple[int, ...], DType, object], Tensor]


class BlobViews:
    """A factory of views that uses the public API, except for attaching the owner."""

    def __init__(self, device: str) -> None:
        self._device = device

    def __call__(self, address: int, shape: tuple[int, ...], dtype: DType, owner: object) -> Tensor:
        """Make a tensor over the memory at `address`; it keeps `owner`."""
        tensor = Tensor.from_blob(address, shape, dtype=dtype, device=self._device)
        tensor.uop.base.buffer._carrier = owner  # type: ignore[union-attr]
        return tensor


class GraphViews:
    """A factory of views that puts a new buffer under a cached graph."""

    # More than all blocks have fields. An entry is valid for any memory at the same address.
    MAX_PLACES = 1024

    def __init__(self, device: str) -> None:
        self._device = device
        self._graphs = TensorTemplates(device)
        self._allocator: Any = Device[device].allocator
        self._places: dict[tuple[int, int], tuple[Any, Any]] = {}

    def __call__(self, address: int, shape: tuple[int, ...], dtype: DType, owner: object) -> Tensor:
        """Make a tensor over the memory at `address`; it keeps `owner`."""
        size = math.prod(shape)
        n_bytes = size * dtype.itemsize
        place = self._places.get((address, n_bytes)) or self._place(address, n_bytes)
        buffer: Any = self._graphs.Buffer(self._device, size, dtype, *place)
        buffer._carrier = owner
        return self._graphs.tensor(shape, dtype, buffer)

    def _place(self, address: int, n_bytes: int) -> tuple[Any, Any]:
        """Return a Buffer's arguments for external memory: the handle and the specification."""
        spec = self._graphs.BufferSpec(external_ptr=address)
        # Do not use `alloc`, which keeps an entry per address forever.
        found = self._allocator._alloc(n_bytes, spec), spec
        if len(self._places) >= self.MAX_PLACES:
            self._places.clear()
        self._places[address, n_bytes] = found
        return found


def find_view(device: str) -> MakeView | None:
    """Return the fastest way to make views on a device; None if none keeps the memory alive."""
    for make in (GraphViews, BlobViews):
        try:
            view = make(device)
            if _view_works(view, device):
                return view
        except INTERNALS_CHANGED:
            continue  # the next method is slower, but depends on fewer internals
    return None


class _ProbeOwner:
    """A stand-in for a lease, to test a factory of views."""


def _view_works(view: MakeView, device: str) -> bool:
    """Return True if a view has the right values, and keeps and releases its owner."""
    owner = _ProbeOwner()
    is_gone = weakref.ref(owner)
    memory = np.zeros((2, 3), np.float32)  # not read by a kernel, so it need not be aligned
    tensor = view(memory.ctypes.data, memory.shape, dtypes.float32, owner)
    fits = (tensor.shape, tensor.dtype, tensor.device) == ((2, 3), dtypes.float32, device)
    fits &= bool(tensor.uop.base.is_realized)
    child = tensor[1:] + 1
    del owner, tensor
    is_kept = is_gone() is not None
    del child
    return fits and is_kept and is_gone() is None


class FastSynchronize:
    """A faster `synchronize` for tinygrad's CPU device, which reads the queues' counters first.

    tinygrad's `synchronize` looks up the counters of issued and finished work of each queue and of
    the device every time, which takes 5 us. Here they are looked up once per queue.
    """

    # The names and strings in the code of `synchronize` in tinygrad 0.14, from the class to its
    # bases. If they differ, tinygrad's own `synchronize` is used.
    KNOWN: Final = (
        "Q _buf _wait_signal cpu_view done fmt getattr put super synchronize view workers",
        "CPU Device HCQ_RUNTIME_DEV Q _buf _wait_signal collect_prof cpu_view device fmt prof_ents "
        "signal synchronize timeline value view",
    )

    def __init__(self, device: Any) -> None:
        own = [vars(kind).get("synchronize") for kind in type(device).__mro__]
        found = tuple(" ".join(sorted(_names_and_strings(each.__code__))) for each in own if each)
        if found[:2] != self.KNOWN:
            raise NotImplementedError(f"synchronize is made of {found}")
        self._device = device
        self._done = _counter(device.signal("timeline"))
        self._issued = _counter(device.signal("value", 1, device="CPU"))
        self._queues: list[tuple[Any, Any]] = []

    def __call__(self) -> None:
        """Wait until the device has finished all queued work."""
        device = self._device
        if len(self._queues) != len(device.workers):
            self._queues = [(_counter(each.put), _counter(each.done)) for each in device.workers]
        # When a queue issues work to another, that work is counted before the issuing work is done.
        is_idle = all(done[0] >= put[0] for put, done in self._queues)
        if not is_idle or self._done[0] < self._issued[0] - 1 or device.prof_ents:
            device.synchronize()


def _counter(buffer: Any) -> Any:
    return buffer._buf.cpu_view().view(fmt="Q")


def _names_and_strings(code: types.CodeType) -> set[str]:
    """Return the names and strings that a function's code refers to."""
    found = set(code.co_names)
    for constant in code.co_consts:
        for each in constant if isinstance(constant, tuple) else (constant,):
            if isinstance(each, str):
                found.add(each)
            elif isinstance(each, types.CodeType):
                found |= _names_and_strings(each)
    return found


def synchronizer_for(name: str) -> Callable[[], object]:
    """Return a function that waits until a device has finished all queued work."""
    device: Any = Device[name]
    try:
        return FastSynchronize(device)
    except INTERNALS_CHANGED:  # another device, or another version of tinygrad
        wait: Callable[[], object] = device.synchronize
        return wait
