from __future__ import annotations

import gc
import os
import random
import subprocess
import sys
import weakref
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import numpy as np
import pytest
import tinygrad.tensor
from tinygrad.device import Device
from tinygrad.dtype import dtypes
from tinygrad.engine.jit import TinyJit
from tinygrad.tensor import Tensor
from tinygrad.uop.ops import UOpMetaClass, buffers

from shardio.errors import InvalidArgument, UnsupportedEnvironment
from shardio.outputs import tinygrad as adapter
from shardio.outputs import tinygrad_internals as internals
from shardio.outputs.tinygrad import TinygradAdapter

on_cpu = pytest.mark.cpu_device
VERSION = tuple(int(part) for part in version("tinygrad").split(".")[:2])
Array = Any


class Lease:
    """Keeps an array's memory; a test watches when it is let go."""

    def __init__(self, array: Array) -> None:
        self.array = array


def aligned(shape: tuple[int, ...], dtype: Any, past: int = 0) -> Array:
    """Zeros that lie `past` bytes behind a multiple of 64."""
    n_bytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
    memory = np.zeros(n_bytes + 128, np.uint8)
    start = -memory.ctypes.data % 64 + past
    return memory[start : start + n_bytes].view(dtype).reshape(shape)


def counting(shape: tuple[int, ...], dtype: Any = np.float32, past: int = 0) -> Array:
    array = aligned(shape, dtype, past)
    array[...] = (np.arange(array.size) % 100).reshape(shape)
    return array


@pytest.fixture
def maker() -> TinygradAdapter:
    """Return an adapter whose tensors alias."""
    made = TinygradAdapter("CPU")
    assert isinstance(made._view, internals.GraphViews)
    return made


# --- what a tensor holds ------------------------------------------------------------------------


@pytest.mark.parametrize("device", [pytest.param("CPU", marks=on_cpu), "PYTHON"])
@pytest.mark.parametrize(
    ("shape", "name"),
    [
        *((shape, "float32") for shape in ((6,), (6, 1), (2, 3, 5), (1,), (), (0, 3), (4, 0))),
        *(((3, 4), name) for name in adapter._NAMES),
    ],
)
def test_a_tensor_equals_its_array(device: str, shape: tuple[int, ...], name: str) -> None:
    array = counting(shape, name)
    array.flags.writeable = False
    tensor = TinygradAdapter((device,)).wrap(array, array, name)
    assert (tensor.shape, tensor.dtype, tensor.device) == (shape, getattr(dtypes, name), device)
    assert tensor.numpy().shape == shape
    np.testing.assert_array_equal(tensor.numpy(), array)
    if device == "CPU" and name == "float32" and array.size:
        np.testing.assert_array_equal((tensor * 2).numpy(), array * 2)


@on_cpu
def test_bits_in_uint16_become_bfloat16(maker: TinygradAdapter) -> None:
    array = aligned((2, 4), np.uint16)
    array[...] = np.arange(8, dtype=np.float32).reshape(2, 4).view(np.uint32) >> 16
    tensor = maker.wrap(array, array, "bfloat16")
    assert tensor.dtype == dtypes.bfloat16
    if VERSION >= (0, 14):  # others need a clang that knows bfloat16
        np.testing.assert_array_equal(tensor.float().numpy(), np.arange(8).reshape(2, 4))


def test_bits_are_not_taken_as_a_dtype_of_another_size() -> None:
    array = counting((4,), np.uint16)
    maker = TinygradAdapter("PYTHON")
    for dtype in ("float32", "complex64"):
        with pytest.raises(InvalidArgument, match=f"bits of uint16 .* '{dtype}'"):
            maker.wrap(array, array, dtype)


@on_cpu
def test_on_the_cpu_a_tensor_is_the_arrays_own_memory(maker: TinygradAdapter) -> None:
    array = counting((3, 4))
    tensor = maker.wrap(array, array)
    array[1, 1] = 77
    assert maker.aliases
    assert tensor[1, 1].item() == 77


@on_cpu
@pytest.mark.parametrize(
    "array",
    [
        counting((3, 4), past=4),
        counting((3, 4), past=16),
        np.asfortranarray(counting((3, 4))),
        counting((6, 4))[::2],
        counting((3, 4)).astype(">f4"),
    ],
    ids=["at 4", "at 16", "Fortran", "strided", "big-endian"],
)
def test_an_array_that_cannot_be_aliased_is_copied(maker: TinygradAdapter, array: Array) -> None:
    expected = np.array(array, np.float32)
    lease = Lease(array)
    is_gone = weakref.ref(lease)
    tensor = maker.wrap(array, lease)
    del lease
    array[...] = 0
    np.testing.assert_array_equal(tensor.numpy(), expected)
    assert is_gone() is None


def test_a_dtype_that_tinygrad_lacks_is_refused_with_ways_out() -> None:
    with pytest.raises(InvalidArgument, match="no dtype for complex64.*fields.*numpy"):
        TinygradAdapter().wrap(np.zeros(3, np.complex64), None)


# --- how long the memory is kept ----------------------------------------------------------------


DERIVED: dict[str, tuple[bool, Callable[[Tensor], Any]]] = {
    "the tensor itself": (True, lambda t: t),
    "a slice": (True, lambda t: t[1:, 2]),
    "a lazy sum": (True, lambda t: (t + 1).sum()),
    "a reshape": (True, lambda t: t.reshape(-1)),
    "a bitcast": (True, lambda t: t.bitcast(dtypes.uint32)),
    "a lazy copy": (True, lambda t: t.clone()),
    "a NumPy copy": (False, lambda t: t.numpy()),
    "a realized sum": (False, lambda t: (t + 1).sum().realize()),
    "a realized clone": (False, lambda t: t.clone().realize()),
    "a number": (False, lambda t: t.sum().realize().item()),
    "nothing": (False, lambda t: None),
}
"""Results of a tensor, and whether they read its memory."""


def leased(maker: TinygradAdapter) -> tuple[Tensor, weakref.ref[Lease]]:
    lease = Lease(counting((3, 4)))
    return maker.wrap(lease.array, lease), weakref.ref(lease)


@on_cpu
@pytest.mark.parametrize("what", DERIVED)
def test_memory_is_kept_while_something_reads_it(maker: TinygradAdapter, what: str) -> None:
    tensor, is_gone = leased(maker)
    is_kept, derive = DERIVED[what]
    result = derive(tensor)
    del tensor
    assert (is_gone() is not None) is is_kept
    if what == "a lazy sum":
        assert result.item() == (counting((3, 4)) + 1).sum()
    del result
    assert is_gone() is None  # by itself, without the garbage collector


@on_cpu
def test_a_realized_view_keeps_the_memory_exactly_if_it_reads_it(maker: TinygradAdapter) -> None:
    tensor, is_gone = leased(maker)
    array = is_gone().array  # type: ignore[union-attr]
    view = tensor[1:].contiguous().realize()
    del tensor
    is_kept = is_gone() is not None
    maker.synchronize()
    array[1, 1] = 77
    assert view.numpy()[0, 1] == (77 if is_kept else 5)
    del view
    assert is_gone() is None


@on_cpu
def test_memory_is_kept_until_the_gradient_is_realized(maker: TinygradAdapter) -> None:
    weight: Any = Tensor.ones(4, 2).contiguous().realize()
    if hasattr(weight, "requires_grad"):  # before 0.13
        weight.requires_grad = True
    tensor, is_gone = leased(maker)
    (tensor @ weight).sum().backward()
    del tensor
    assert is_gone() is not None
    gradient = weight.grad
    assert gradient is not None
    expected = counting((3, 4)).sum(axis=0)[:, None].repeat(2, axis=1)
    np.testing.assert_array_equal(gradient.realize().numpy(), expected)
    assert is_gone() is None


@on_cpu
def test_a_jitted_step_sees_every_batch_and_keeps_none(maker: TinygradAdapter) -> None:
    step: Any = TinyJit(lambda x, y: (x.float().sum() + y.sum()).realize())
    refs = []
    for i in range(8):
        lease = Lease(counting((4, 3), np.uint8))
        lease.array[...] = i
        labels = counting((4,), np.int64)
        refs.append(weakref.ref(lease))
        result = step(maker.wrap(lease.array, lease), maker.wrap(labels, labels))
        assert result.item() == 12 * i + 6
        del lease
    maker.synchronize()
    assert [ref for ref in refs if ref() is not None] == []


@on_cpu
def test_batches_over_reused_memory_are_never_mixed_up(maker: TinygradAdapter) -> None:
    rng = random.Random(0)
    slots = [aligned((2, 3), np.int32) for _ in range(8)]
    held: dict[int, tuple[Tensor, int]] = {}
    for i in range(3000):
        k = rng.randrange(len(slots))
        held.pop(k, None)
        slots[k][...] = i
        held[k] = maker.wrap(slots[k], slots[k]), i
        if i % 50 == 0:
            found = {k: tensor.numpy().ravel().tolist() for k, (tensor, _) in held.items()}
            assert found == {k: [value] * 6 for k, (_, value) in held.items()}


@on_cpu
def test_thousands_of_batches_leave_nothing_behind() -> None:
    def sizes() -> list[int]:
        allocator: Any = Device["CPU"].allocator
        return [
            len(d)
            for d in (UOpMetaClass.ucache, buffers, tinygrad.tensor.all_tensors, allocator.cache)
        ]

    maker = TinygradAdapter("CPU")
    memory = aligned((4096, 64), np.uint8)
    array = memory[0]
    (maker.wrap(array, array) + 1).realize()
    gc.collect()  # what earlier tests left
    before = sizes()
    for i in range(4000):
        array = memory[i]  # a new address every time
        (maker.wrap(array, array) + 1).realize() if i % 100 == 0 else maker.wrap(array, array)
    assert [after - b for after, b in zip(sizes(), before, strict=True)] == [0, 0, 0, 0]


@on_cpu
def test_varying_shapes_do_not_pile_up() -> None:
    maker = TinygradAdapter("CPU")
    memory = aligned((1000,), np.uint8)
    for n in range(1, 1000):
        assert maker.wrap(memory[:n], memory).shape == (n,)
    assert isinstance(maker._view, internals.GraphViews)
    assert len(maker._view._graphs._templates) <= internals.TensorTemplates.MAX_TEMPLATES


# --- other versions of tinygrad -----------------------------------------------------------------


@on_cpu
@pytest.mark.parametrize("kind", [ImportError, AttributeError, TypeError, KeyError, None])
def test_copied_as_fallback(monkeypatch: pytest.MonkeyPatch, kind: type[Exception] | None) -> None:
    def change(self: object, *args: object) -> Tensor:
        if kind is not None:
            raise kind("tinygrad has changed")
        return Tensor.zeros(2, 3, device="CPU").contiguous().realize()

    monkeypatch.setattr(internals.GraphViews, "__call__", change)
    maker = TinygradAdapter("CPU")
    array = counting((3, 4))
    tensor = maker.wrap(array, array)
    array[...] = 0
    assert not maker.aliases
    np.testing.assert_array_equal(tensor.numpy(), counting((3, 4)))


# --- other devices ------------------------------------------------------------------------------


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Record the calls of an adapter's `synchronize`, without those that copies make."""
    waited: list[str] = []
    synchronize = TinygradAdapter.synchronize

    def record(self: TinygradAdapter) -> None:
        waited.extend(self._devices)
        synchronize(self)

    monkeypatch.setattr(TinygradAdapter, "synchronize", record)
    return waited


def test_another_device_has_copied_the_bytes_when_wrap_returns() -> None:
    maker = TinygradAdapter("PYTHON")
    lease = Lease(counting((3, 4), past=4))
    is_gone = weakref.ref(lease)
    tensor = maker.wrap(lease.array, lease)
    lease.array[...] = 0
    del lease
    assert not maker.aliases
    assert is_gone() is None
    assert tensor.device == "PYTHON"
    np.testing.assert_array_equal(tensor.numpy(), counting((3, 4)))


def break_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: object, *args: object) -> None:
        raise AttributeError("tinygrad has changed")

    monkeypatch.setattr(internals.DeviceCopies, "new", fail)


@pytest.mark.parametrize("has_changed", ["", "yes"])
def test_a_fixed_tensor_is_refilled(monkeypatch: pytest.MonkeyPatch, has_changed: str) -> None:
    if has_changed:
        break_copies(monkeypatch)
    arrays = [counting((3, 4)) + i for i in range(3)]
    arrays[2].flags.writeable = False
    put = TinygradAdapter("PYTHON").make_copier(arrays[0])
    found = []
    for array in arrays:
        found.append(put(array))
        np.testing.assert_array_equal(found[-1].numpy(), array)
    assert len({*map(id, found)}) == (3 if has_changed else 1)


def test_one_tensor_of_bits_is_given_the_values_of_many_arrays() -> None:
    put = TinygradAdapter("PYTHON").make_copier(counting((4,), np.uint16), "bfloat16")
    for i in range(3):
        array = counting((4,), np.uint16) + np.uint16(i)
        tensor = put(array)
        assert tensor.dtype == dtypes.bfloat16
        np.testing.assert_array_equal(tensor.bitcast(dtypes.uint16).numpy(), array)


@on_cpu
def test_a_captured_step_sees_the_values_that_its_input_was_given() -> None:
    maker = TinygradAdapter("PYTHON")
    put = maker.make_copier(counting((3, 4)))

    @TinyJit
    def step(x: Tensor) -> Tensor:
        return (x * 2).sum().realize()

    for i in range(6):
        array = counting((3, 4)) + i
        assert step(put(array)).item() == (array * 2).sum()


def test_a_deferred_copy_is_waited_for(monkeypatch: pytest.MonkeyPatch, waits: list[str]) -> None:
    maker = TinygradAdapter("PYTHON")
    maker.wrap(counting((3, 4)), None)
    assert waits == []
    monkeypatch.setattr(adapter, "_READS_AT_ONCE", frozenset())
    maker.wrap(counting((3, 4)), None)
    assert waits == ["PYTHON"]


def test_staging_memory_is_bounded(monkeypatch: pytest.MonkeyPatch, waits: list[str]) -> None:
    monkeypatch.setattr(adapter, "_KEEPS_STAGING", frozenset({"PYTHON"}))
    monkeypatch.setattr(adapter, "_STAGING_BYTES", 100)
    maker = TinygradAdapter("PYTHON")
    n_waits = []
    for _ in range(6):
        maker.wrap(counting((3, 4)), None)  # 48 bytes
        n_waits.append(len(waits))
    assert n_waits == [0, 0, 1, 1, 1, 2]


def test_synchronize_waits_for_every_device(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[str] = []
    device: Any = Device["PYTHON"]
    monkeypatch.setattr(type(device), "synchronize", lambda self: waited.append(self.device))
    TinygradAdapter(("PYTHON", "PYTHON:1")).synchronize()
    assert waited == ["PYTHON", "PYTHON:1"]


# Only with HCQ2=1 when it is imported does tinygrad 0.14 queue work of the CPU device.
WITH_QUEUES = """
import numpy
from tinygrad import Device, Tensor
from shardio.outputs.tinygrad import TinygradAdapter
maker, device = TinygradAdapter("CPU"), Device["CPU"]
a = Tensor(numpy.ones((500, 500), numpy.float32)).realize()
for _ in range(20):
    result = (a @ a).sum().realize()
    maker.synchronize()
    counters = [queue.done._buf.cpu_view().view(fmt="Q")[0] for queue in device.workers]
    assert counters == [queue.put._buf.cpu_view().view(fmt="Q")[0] for queue in device.workers]
assert device.workers, "nothing was queued"
"""


@pytest.mark.slow
@on_cpu
@pytest.mark.skipif(VERSION < (0, 14), reason="this tinygrad has no queues of the CPU device")
def test_queued_work_of_the_cpu_device_is_waited_for() -> None:
    environment = {**os.environ, "DEV": "CPU", "HCQ2": "1"}
    subprocess.run([sys.executable, "-c", WITH_QUEUES], env=environment, check=True, timeout=300)


@on_cpu
def test_an_unknown_synchronize_is_always_called(monkeypatch: pytest.MonkeyPatch) -> None:
    device: Any = Device["CPU"]
    assert (internals.find_synchronize("CPU") == device.synchronize) == (VERSION < (0, 14))
    calls: list[str] = []
    monkeypatch.setattr(type(device), "synchronize", lambda self: calls.append(self.device))
    internals.find_synchronize("CPU")()
    assert calls == ["CPU"]


@on_cpu  # tinygrad puts the parts together there, whatever device they are on
@pytest.mark.parametrize("devices", [("CPU", "CPU:1"), ("PYTHON", "PYTHON:1")])
def test_over_several_devices_a_tensor_is_sharded_along_the_rows(devices: tuple[str, ...]) -> None:
    maker = TinygradAdapter(devices)
    array = counting((4, 3))
    tensor = maker.wrap(array, array)
    array[...] = 0
    assert not maker.aliases
    assert (tensor.shape, tensor.device) == ((4, 3), devices)
    np.testing.assert_array_equal(tensor.numpy(), counting((4, 3)))
    assert maker.wrap(np.zeros((4, 0), np.uint8), None).shape == (4, 0)


@pytest.mark.parametrize("shape", [(5, 2), ()])
def test_rows_that_do_not_divide_by_the_devices_are_refused(shape: tuple[int, ...]) -> None:
    maker = TinygradAdapter(("PYTHON", "PYTHON:1"))
    with pytest.raises(InvalidArgument, match="cannot be sharded .* over 2 devices.*batch_size"):
        maker.wrap(counting(shape), None)


@on_cpu
def test_a_second_cpu_device_aliases_too() -> None:
    maker = TinygradAdapter("cpu:1")
    array = counting((3, 4))
    assert maker.aliases
    assert (maker.wrap(array, array) + 1).device == "CPU:1"


@pytest.mark.parametrize(
    ("device", "message"),
    [
        ("WARP", "no device 'WARP'"),
        ("xpu:1", '; for the device xpu:1 of torch, write output="torch"$'),
        ("NPY", "cannot compute"),
        ("DISK:/nowhere", "cannot compute"),
        ((), "different devices"),
        (("PYTHON", "PYTHON:0"), "different devices"),
    ],
)
def test_an_unusable_device_is_refused(device: str | tuple[str, ...], message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        TinygradAdapter(device)


@pytest.mark.parametrize("cause", [FileNotFoundError("clang"), ModuleNotFoundError("x", name="x")])
def test_an_unopened_device_has_a_hint(monkeypatch: pytest.MonkeyPatch, cause: Exception) -> None:
    def fail(self: object, name: str) -> None:
        raise cause

    monkeypatch.setattr(type(Device), "__getitem__", fail)
    with pytest.raises(UnsupportedEnvironment, match=r"cannot open device CPU.*clang.*numpy"):
        TinygradAdapter("CPU")
    with pytest.raises(
        UnsupportedEnvironment, match=r"device CUDA.*shardio doctor.*numpy"
    ) as found:
        TinygradAdapter("CUDA")
    assert "program clang" not in str(found.value)
