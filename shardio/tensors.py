"""Tensors over the blocks that batches arrive in; the only module that imports tinygrad.

On the CPU device a tensor *is* the block's memory. It stays valid because the object that keeps the
memory, the carrier, hangs on tinygrad's `Buffer`: whatever still needs the bytes (a tensor, a slice
of it, a lazy sum of it) refers to that Buffer, and not to the Tensor that it was made from.

tinygrad's public way there, `Tensor.from_blob`, costs three times what is needed, as it builds and
checks the same small graph for every batch. So the graph is kept, per shape and dtype, and only the
buffer under it is new. That takes internals of tinygrad; they are tried out once per TensorMaker,
and where they have changed, the public way serves. Other devices get a copy.
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

from shardio.errors import EnvironmentUnsuitable, InvalidArgument

__all__ = ["TensorMaker"]

Ndarray = npt.NDArray[Any]
# (address, shape, dtype, carrier) -> tensor over the memory there, which keeps the carrier
View = Callable[[int, tuple[int, ...], DType, object], Tensor]

_NAMES = "bool int8 int16 int32 int64 uint8 uint16 uint32 uint64 float16 float32 float64".split()
_DTYPES: Final[dict[np.dtype[Any], DType]] = {
    np.dtype(name): getattr(dtypes, name) for name in _NAMES
}

# A float32 kernel on memory at 8 bytes past a multiple of 16 ends in SIGSEGV: compilers use aligned
# vector loads. Blocks align every field to a cache line, which no vector is longer than.
_ALIGNMENT: Final = 64

# Devices whose copy has read the source when it returns, by their runtimes in tinygrad 0.14. After
# a copy to any other (CL reads later) we wait, which costs the overlap with queued work.
_READS_AT_ONCE: Final = frozenset({"CPU", "CUDA", "METAL", "NV", "AMD", "PYTHON", "QCOM"})

# CUDA copies by way of pinned memory, one piece per copy, and takes them back in `synchronize`
# only: a loop that never reads a result would pin ever more.
_KEEPS_STAGING: Final = frozenset({"CUDA"})
_STAGING_BYTES: Final = 512 << 20

_HOLDS_ONLY: Final = frozenset({"DISK", "NPY", "TINYFS"})

# What a changed internal of tinygrad looks like from here.
_CHANGED: Final = (
    AssertionError,
    AttributeError,
    ImportError,
    LookupError,
    NotImplementedError,
    RuntimeError,
    TypeError,
    ValueError,
)


class TensorMaker:
    """Makes tinygrad Tensors of arrays: of the same memory on the CPU device, else copies.

    Opens `device`, tinygrad's default if None; over a tuple, tensors are sharded along axis 0.
    `aliases` says whether tensors share the arrays' memory. Where they do not, `wrap` has read the
    array when it returns, and the memory may be written again at once. Use it in one thread, the
    one that uses tinygrad: tinygrad is not made for several.

    Raises:
        InvalidArgument: no such device, or none that computes.
        EnvironmentUnsuitable: the device cannot be opened here.
    """

    def __init__(self, device: str | tuple[str, ...] | None = None) -> None:
        names: tuple[str | None, ...] = device if isinstance(device, tuple) else (device,)
        self._devices = tuple(_open(name) for name in names)
        if not names or len(set(self._devices)) < len(names):
            raise InvalidArgument(f"device must name different devices; found {device!r}")
        self._waits = [_wait_for(name) for name in self._devices]
        self._n_staged_bytes = 0
        self._view = self._find_view() if _kinds(self._devices) == ["CPU"] else None
        self.aliases = self._view is not None

    def wrap(self, array: Ndarray, carrier: object, dtype: str | None = None) -> Tensor:
        """Make a Tensor of the array's shape and dtype, or of its bits taken as `dtype`.

        `carrier` keeps the array's memory valid. Where tensors alias, it is held until the Tensor
        and all that was made from it are gone or realized (a view realizes to the same memory);
        the memory must not be written until then. Arrays that are not C-contiguous, not in native
        byte order, empty, or not at a multiple of 64 bytes are copied also then.

        Raises:
            InvalidArgument: tinygrad has no such dtype, or the rows do not divide by the devices.
        """
        native = _DTYPES.get(array.dtype) if self._view is not None else None
        if self._view is None or native is None or not array.flags.c_contiguous or not array.size:
            tensor = self._copy(array)
        else:
            address: int = array.__array_interface__["data"][0]
            if address % _ALIGNMENT:
                tensor = self._copy(array)
            else:
                tensor = self._view(address, array.shape, native, carrier)
        if dtype is None or dtype == array.dtype.name:
            return tensor
        target = getattr(dtypes, dtype, None)
        if not isinstance(target, DType) or target.itemsize != array.dtype.itemsize:
            raise InvalidArgument(f"the bits of {array.dtype} cannot be taken as {dtype!r}")
        return tensor.bitcast(target)

    def synchronize(self) -> None:
        """Wait until the devices have done all work queued so far.

        Where tensors alias, call it after carriers were let go and before their memory is written:
        kernels that were queued may still read it.
        """
        for wait in self._waits:
            wait()
        self._n_staged_bytes = 0

    def _find_view(self) -> View | None:
        for make in (_Graft, _Blob):
            try:
                view = make(self._devices[0])
                if _holds(view, self._devices[0]):
                    return view
            except _CHANGED:
                continue  # the next one is slower, and needs less of tinygrad
        return None

    def _copy(self, array: Ndarray) -> Tensor:
        """Copy to the device, or shard over the devices; the array has been read at return."""
        native = array.dtype.newbyteorder("=")
        if native not in _DTYPES:
            raise InvalidArgument(
                f"tinygrad has no dtype for {array.dtype}: leave the field out with `fields=`, "
                'convert it in a transform, or use output="numpy"'
            )
        first, n_devices = self._devices[0], len(self._devices)
        if n_devices > 1 and (not array.ndim or len(array) % n_devices):
            raise InvalidArgument(
                f"shape {array.shape} cannot be sharded along axis 0 over {n_devices} devices: "
                'choose a batch_size that divides by them, and tail="drop"'
            )
        if not array.size:
            tensor = Tensor.empty(*array.shape, dtype=_DTYPES[native], device=first)
            return tensor.shard(self._devices, axis=0) if n_devices > 1 else tensor
        source = Tensor(np.ascontiguousarray(array, native).reshape(array.shape), device="NPY")
        try:
            tensor = source.shard(self._devices, axis=0) if n_devices > 1 else source.to(first)
            tensor.realize()
        except NotImplementedError:  # before 0.14, NumPy's memory is not cut without a kernel
            tensor = source.to(first).contiguous().realize().shard(self._devices, axis=0).realize()
        kinds = set(_kinds(self._devices))
        self._n_staged_bytes += array.nbytes if kinds & _KEEPS_STAGING else 0
        if not kinds <= _READS_AT_ONCE or self._n_staged_bytes > _STAGING_BYTES:
            self.synchronize()
        return tensor


class _Glance:
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


def _wait_for(name: str) -> Callable[[], object]:
    """What waits until a device has done all that is queued."""
    device: Any = Device[name]
    try:
        return _Glance(device)
    except _CHANGED:  # another device, another tinygrad
        wait: Callable[[], object] = device.synchronize
        return wait


class _Blob:
    """Views by the public way; only where the carrier is put is not public."""

    def __init__(self, device: str) -> None:
        self._device = device

    def __call__(
        self, address: int, shape: tuple[int, ...], dtype: DType, carrier: object
    ) -> Tensor:
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


class _Graft:
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


def _kinds(devices: tuple[str, ...]) -> list[str]:
    """Name the devices without their numbers."""
    return [name.partition(":")[0] for name in devices]


def _open(name: str | None) -> str:
    """Open a device and return its canonical name."""
    try:
        canonical = Device.canonicalize(name)
        if canonical.partition(":")[0] in _HOLDS_ONLY:
            raise InvalidArgument(f"device {canonical} holds data but computes nothing; try CPU")
        Device[canonical]
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("tinygrad.runtime.ops_"):
            raise InvalidArgument(f"tinygrad has no device {name!r}") from error
        raise _unsuitable(name, error) from error
    except InvalidArgument:
        raise
    except Exception as error:  # whatever a driver's absence leads to
        raise _unsuitable(name, error) from error
    return canonical


def _unsuitable(name: str | None, error: Exception) -> EnvironmentUnsuitable:
    return EnvironmentUnsuitable(
        f"tinygrad cannot open {'its default device' if name is None else f'device {name}'} "
        f"({type(error).__name__}: {error}); the CPU device needs the program clang "
        "(apt-get install clang), DEV=PYTHON works without but is very slow, and "
        'output="numpy" needs no device'
    )
