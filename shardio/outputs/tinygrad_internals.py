"""Fast ways to create tensors and to synchronize, which use tinygrad's internals.

Each of them is tested when it is created. If it does not work, the public API is used instead.

Views are tensors on the CPU device that share the memory of a block. The owner of the memory is
attached to tinygrad's `Buffer`. Everything that needs the memory, such as a slice or a lazy sum of
the tensor, refers to the `Buffer`, and so keeps the owner alive. The public `Tensor.from_blob`
takes three times as long.

Copies are tensors on devices that do not share the host's memory. The public
`Tensor(array).to(device).realize()` builds and runs a schedule for every copy. This takes
milliseconds, although in the end only the allocator's method `_copyin` is called.

Templates: tinygrad builds and checks a small graph for each tensor. The graph is the same for all
tensors of one shape and dtype. A template is such a graph over a buffer without memory. To create a
tensor, only the buffer of the template is replaced.

Synchronizing: if no work is queued, comparing the counters of tinygrad's queues is faster than
tinygrad's own `synchronize`.
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
"""The exceptions that may occur if tinygrad's internals differ from those of the known versions."""


class _Template(NamedTuple):
    """The graph of the tensors of one shape and dtype, over a buffer without memory.

    `leaf` is the node of the buffer. `wrapping` has the arguments of the node above the leaf; None
    if there is no such node. `number` is a function that creates an argument of the leaf from a
    unique number; None if leaves have no such argument in this version of tinygrad.
    """

    tensor: Tensor
    leaf: Any
    number: Callable[..., Any] | None
    wrapping: tuple[Any, ...] | None


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
        self._uop, self._buffers = UOp, buffers
        self._templates: dict[tuple[tuple[int, ...], DType], _Template] = {}
        # Get the function inside of a wrapper, which records the calling method and takes half of
        # the time.
        derive: Any = Tensor._apply_uop
        self._derive: Callable[..., Tensor] = getattr(derive, "__wrapped__", derive)

    def tensor(self, shape: tuple[int, ...], dtype: DType, buffer: Any) -> Tensor:
        """Return a tensor of `shape` over a buffer; the tensor then owns the buffer."""
        template, leaf, number, wrapping = self._template(shape, dtype)
        fresh = self._fresh(leaf, number)
        self._buffers[fresh] = buffer.ref(1)  # this entry is removed together with the node `fresh`
        if wrapping is None:
            return self._derive(template, lambda _: fresh)
        op, kind, sources, argument, tag = wrapping
        uop: Any = self._uop
        return self._derive(template, lambda _: uop(op, kind, (fresh, *sources), argument, tag))

    def _fresh(self, leaf: Any, number: Callable[..., Any] | None) -> Any:
        """Return a copy of a buffer's node with a number that no node has had before.

        tinygrad keeps only one node for each number, and finds the memory of a buffer by its node.
        tinygrad's own `UOp.from_buffer` uses the address of the Buffer object as the number. This
        is not safe: another Buffer object may get the same address while the node still exists.
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
    """A factory of tensors with their own memory on a device, which can also be overwritten."""

    def __init__(self, device: str) -> None:
        self._device = device
        self._graphs = TensorTemplates(device)

    def new(self, array: Ndarray, dtype: DType) -> Tensor:
        """Return a new tensor with the values of an array.

        The array must be C-contiguous, and must not be empty.
        """
        buffer: Any = self._graphs.Buffer(self._device, math.prod(array.shape), dtype).allocate()
        _fill(buffer, array)
        return self._graphs.tensor(array.shape, dtype, buffer)

    def refill(self, tensor: Tensor, array: Ndarray) -> None:
        """Overwrite a tensor that `new` has returned with the values of an array.

        The array must have the same shape. Work that was queued before still reads the old values.
        """
        _fill(tensor.uop.base.buffer, array)


def _fill(buffer: Any, array: Ndarray) -> None:
    # Use NumPy to get the bytes, because a memoryview of float16 or of 0 dimensions cannot be cast.
    buffer.allocator._copyin(buffer._buf, array.reshape(-1).view(np.uint8).data)


def find_copies(device: str) -> DeviceCopies | None:
    """Return a `DeviceCopies` for a device; None if it does not work with this tinygrad."""
    try:
        copies = DeviceCopies(device)
        return copies if _copies_work(copies, device) else None
    except INTERNALS_CHANGED:
        return None


def _copies_work(copies: DeviceCopies, device: str) -> bool:
    """Return True if a new tensor, and then the refilled tensor, has the values of its array."""
    first, second = np.arange(6, dtype=np.float32).reshape(2, 3), np.full((2, 3), 7, np.float32)
    tensor = copies.new(first, dtypes.float32)
    fits = (tensor.shape, tensor.dtype, tensor.device) == ((2, 3), dtypes.float32, device)
    fits &= bool(tensor.uop.base.is_realized) and np.array_equal(tensor.numpy(), first)
    copies.refill(tensor, second)
    return fits and np.array_equal(tensor.numpy(), second)


# A function of (address, shape, dtype, owner) that returns a tensor over the memory at the address.
# The tensor keeps the owner alive.
MakeView = Callable[[int, tuple[int, ...], DType, object], Tensor]


class BlobViews:
    """A factory of views that uses the public API. Only to attach the owner, it uses internals."""

    def __init__(self, device: str) -> None:
        self._device = device

    def __call__(self, address: int, shape: tuple[int, ...], dtype: DType, owner: object) -> Tensor:
        """Make a tensor over the memory at `address`; it keeps `owner`."""
        tensor = Tensor.from_blob(address, shape, dtype=dtype, device=self._device)
        tensor.uop.base.buffer._carrier = owner  # type: ignore[union-attr]
        return tensor


class GraphViews:
    """A factory of views that uses templates."""

    # The maximum number of cached results of `_place`, which is more than a loader's blocks need:
    # one for each field of each block. A result stays valid if other memory gets the same address.
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
        # Do not use the method `alloc`, which caches an entry for each address forever.
        found = self._allocator._alloc(n_bytes, spec), spec
        if len(self._places) >= self.MAX_PLACES:
            self._places.clear()
        self._places[address, n_bytes] = found
        return found


def find_view(device: str) -> MakeView | None:
    """Return the fastest factory of views that works on a device; None if none does."""
    for make in (GraphViews, BlobViews):
        try:
            view = make(device)
            if _view_works(view, device):
                return view
        except INTERNALS_CHANGED:
            continue  # the next factory is slower, but depends on fewer internals
    return None


class _ProbeOwner:
    """A stand-in for the owner of some memory, to test a factory of views."""


def _view_works(view: MakeView, device: str) -> bool:
    """Return True if a view has the right shape, and keeps its owner alive while it is needed."""
    owner = _ProbeOwner()
    is_gone = weakref.ref(owner)
    memory = np.zeros((2, 3), np.float32)  # it need not be aligned, because no kernel reads it
    tensor = view(memory.ctypes.data, memory.shape, dtypes.float32, owner)
    fits = (tensor.shape, tensor.dtype, tensor.device) == ((2, 3), dtypes.float32, device)
    fits &= bool(tensor.uop.base.is_realized)
    child = tensor[1:] + 1
    del owner, tensor
    is_kept = is_gone() is not None
    del child
    return fits and is_kept and is_gone() is None


class FastSynchronize:
    """A faster `synchronize` for tinygrad's CPU device. It first checks whether work is queued.

    The device and each of its queues have a counter of issued work and a counter of finished work.
    tinygrad's `synchronize` looks up these counters in every call, which takes 5 µs. This class
    looks them up only once.
    """

    # The names and strings in the code of tinygrad 0.14: those of `synchronize` in the device's
    # class, and those of `synchronize` in its base class. If the installed version has others, this
    # class is not used.
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
        # If work on one queue issues work to another queue, the issued work is counted before the
        # work on the first queue counts as finished. So no work is overlooked here.
        is_idle = all(done[0] >= put[0] for put, done in self._queues)
        if not is_idle or self._done[0] < self._issued[0] - 1 or device.prof_ents:
            device.synchronize()


def _counter(buffer: Any) -> Any:
    return buffer._buf.cpu_view().view(fmt="Q")


def _names_and_strings(code: types.CodeType) -> set[str]:
    """Return the names and strings that the code of a function contains."""
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
    except INTERNALS_CHANGED:  # the device is not the CPU, or tinygrad has another version
        wait: Callable[[], object] = device.synchronize
        return wait
