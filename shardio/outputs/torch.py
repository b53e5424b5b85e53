"""Convert arrays to torch tensors, in batches and for transforms.

On the CPU, the tensors of a batch share the memory of its block; on other devices, they are copies.
A tensor on the CPU, a view of it, or a NumPy array made from it keeps the block alive.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import importlib
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final, Self

import numpy as np
import numpy.typing as npt

from shardio._base.callers import checking, shown, takes_rng, warn
from shardio.errors import InvalidArgument, UnsupportedEnvironment, import_extra
from shardio.format.types.array_values import is_bfloat16_bits, is_of

if TYPE_CHECKING:
    from torch import Tensor as Tensor

Ndarray = npt.NDArray[Any]

_WORKER_MODULES: Final = ("torch", "torchvision.tv_tensors", "torchvision.transforms.v2")


class TorchAdapter:
    """An adapter for torch tensors on a device; the default is the CPU."""

    wraps_items = True

    def __init__(self, device: str | None = None) -> None:
        self._torch = import_extra("output='torch' needs torch", "torch", "torch")
        self._device = _open_device(self._torch, device or "cpu")
        self.aliases: bool = self._device.type == "cpu"
        is_gpu = self._device.type == "cuda"
        self.uploads = CudaUploads(self._torch, self._device) if is_gpu else None

    def __reduce__(self) -> tuple[Any, ...]:
        # Batches, which can be pickled, refer to their adapter.
        return TorchAdapter, (str(self._device),)

    def wrap(self, array: Ndarray, owner: object, dtype: str | None = None) -> Any:
        """Return an array as a tensor: a copy or, on the CPU, a view that keeps the array alive."""
        return self._moved(self._cpu_tensor(array, dtype))

    def make_copier(self, array: Ndarray, dtype: str | None = None) -> Callable[[Ndarray], Any]:
        """Return a function that copies an array into a tensor: the same tensor in every call.

        Work that was queued on torch's current stream still reads the old values.
        """
        tensor = self._torch.empty_like(self._cpu_tensor(array, dtype), device=self._device)
        if self.uploads is None:
            return lambda values: tensor.copy_(self._cpu_tensor(values, dtype))
        # A copy to the same tensor must wait for the work that reads it. The upload does not.
        return lambda values: tensor.copy_(self._moved(self._cpu_tensor(values, dtype)))

    def synchronize(self) -> None:
        """Wait for uploads. Otherwise, a call of torch has read memory when it returns."""
        if self.uploads is not None:
            self.uploads.wait()

    def _moved(self, tensor: Any) -> Any:
        if self.aliases:
            return tensor
        return tensor.to(self._device) if self.uploads is None else self.uploads.copy(tensor)

    def _cpu_tensor(self, array: Ndarray, dtype: str | None) -> Any:
        """Return a tensor that shares an array's memory; a copy if its byte order is not native."""
        torch = self._torch
        array = array.astype(array.dtype.newbyteorder("="), copy=False)
        if dtype == "bfloat16":
            return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
        try:
            return torch.from_numpy(array)
        except TypeError as error:  # unsigned integers of 16 bits and more, in torch before 2.3
            raise InvalidArgument(
                f"torch {torch.__version__} has no dtype for {array.dtype}: leave the field out "
                'with `fields=`, convert it in a transform, or use output="numpy"'
            ) from error


def _open_device(torch: Any, name: str) -> Any:
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise InvalidArgument(f"torch has no device {name!r}: {error}") from error
    try:
        torch.empty(1, device=device)
    # If the device cannot be used, torch raises one of these errors, depending on the device.
    except (AssertionError, NotImplementedError, RuntimeError) as error:
        raise UnsupportedEnvironment(
            f"torch {torch.__version__} cannot open device {name} "
            f"({type(error).__name__}: {error}); `shardio doctor` shows the GPUs of this machine, "
            "and device='cpu' works everywhere"
        ) from error
    return device


class OnTensors:
    """A transform that calls a function with torch tensors in place of NumPy arrays.

    Pictures, uint8 of (height, width, 3), become `tv_tensors.Image` of (3, height, width), and
    clips become `tv_tensors.Video` of (frames, 3, height, width); without torchvision, both are
    plain tensors. Decoded media are not copied. Stored arrays are copied, because they are
    read-only, and torch has no read-only tensors. Numbers, text and bytes stay as they are. The
    loader takes pictures as the function returns them, in (channels, height, width), unless it has
    the option layout="HWC".

    A torch module, such as a transform of `torchvision.transforms.v2`, needs no OnTensors: a loader
    calls it in the same way.

    Args:
        function: f(sample) or f(sample, rng), which returns a dict. As a `batch_transform`, it gets
            the fields of a whole batch.

    Raises:
        InvalidArgument: `function` cannot be called in this way.
        UnsupportedEnvironment: (in the call) torch is missing.
    """

    takes_writable = True
    """Decoded arrays may be writable, because nothing else refers to them."""

    def __init__(self, function: Callable[..., Mapping[str, Any]]) -> None:
        if not callable(function):
            raise InvalidArgument(
                f"OnTensors takes a function of a sample; found {shown(function)}"
            )
        with checking("OnTensors"):
            _refuse_class(function)
            _refuse_to_tensor(function)
            self._function, self._draws = function, takes_rng("OnTensors", "sample", function)
        self._pictures: frozenset[str] = frozenset()
        self._n_leading = 0
        self._gets_channels_first = self._returns_arrays = False

    def __repr__(self) -> str:
        return f"OnTensors({self._function!r})"

    @property
    def worker_modules(self) -> list[str]:
        """The modules to import before workers are forked, if this process has imported them.

        torch takes seconds and 200 MB, which workers then share.
        """
        return [name for name in _WORKER_MODULES if name in sys.modules]

    def returning_arrays(self) -> Self:
        """Return a copy whose results are NumPy arrays, with pictures in (height, width, 3)."""
        made = copy.copy(self)
        made._returns_arrays = True
        return made

    def for_batches(self, pictures: frozenset[str], *, channels_first: bool) -> Self:
        """Return a copy for batches, in which the fields `pictures` contain pictures or clips.

        `channels_first` is True if these fields have the shape (rows, …, 3, height, width).
        """
        made = copy.copy(self)
        made._pictures = pictures | {f"{name}_mask" for name in pictures}  # from collate="pad"
        made._n_leading, made._gets_channels_first = 1, channels_first
        return made

    def __call__(self, sample: Mapping[str, Any], rng: np.random.Generator) -> Any:
        """Convert a sample to tensors, and return the result of the function."""
        n_leading = self._n_leading
        given = {name: self._tensors(name, value, n_leading) for name, value in sample.items()}
        with _one_thread():
            made = self._function(given, rng) if self._draws else self._function(given)
        if not self._returns_arrays or not isinstance(made, Mapping):
            return made
        pictures = {
            name for name, value in sample.items() if self._is_picture(name, value, n_leading)
        }
        return {name: _as_array(value, name in pictures) for name, value in made.items()}

    def _tensors(self, name: str, value: Any, n_leading: int) -> Any:
        if isinstance(value, list):  # of rows, or of the arrays of a sample: without leading axes
            return [self._tensors(name, each, 0) for each in value]
        if not isinstance(value, np.ndarray):
            return value
        torch, tv_tensors = _packages()
        value = value if value.flags.writeable else value.copy()
        if is_bfloat16_bits(value.dtype):
            return torch.from_numpy(value.view(np.int16)).view(torch.bfloat16)
        tensor = torch.from_numpy(value)
        if not self._is_picture(name, value, n_leading):
            return tensor
        if not self._gets_channels_first:
            tensor = tensor.movedim(-1, -3)
        if tv_tensors is None or value.dtype == np.bool_:  # masks are not pictures
            return tensor
        is_clip = value.ndim - n_leading > 3
        return (tv_tensors.Video if is_clip else tv_tensors.Image)(tensor)

    def _is_picture(self, name: str, value: Any, n_leading: int) -> bool:
        if isinstance(value, list):
            return any(self._is_picture(name, each, 0) for each in value)
        if not isinstance(value, np.ndarray) or value.ndim - n_leading not in (3, 4):
            return False
        return name in self._pictures or (value.dtype == np.uint8 and value.shape[-1] == 3)


def as_transform(function: Any) -> Any:
    """Return a user's transform; a torch module becomes an OnTensors.

    Raises InvalidArgument for a class of transforms.
    """
    _refuse_class(function)
    kind = getattr(sys.modules.get("torch.nn"), "Module", None)  # None also if partly imported
    return OnTensors(function) if kind and isinstance(function, kind) else function


def _refuse_class(function: Any) -> None:
    """Raise InvalidArgument for a class whose instances can be called."""
    if isinstance(function, type) and any("__call__" in vars(each) for each in function.__mro__):
        raise InvalidArgument(
            f"a transform is the class {function.__name__}; pass an instance, "
            f"{function.__name__}(…)"
        )


def _refuse_to_tensor(function: Any) -> None:
    """Raise InvalidArgument for `v2.ToTensor`, which has no effect on tensors.

    After `v2.ToPILImage` in a chain, it receives Pillow images, and is accepted.
    """
    for kind in map(type, _parts_of(function)):
        is_of_v2 = kind.__module__.startswith("torchvision.transforms.v2")
        if is_of_v2 and kind.__name__ == "ToPILImage":
            return
        if is_of_v2 and kind.__name__ == "ToTensor":
            raise InvalidArgument(
                "v2.ToTensor leaves the tensors that a transform is given as they are, uint8: "
                "write v2.ToDtype(torch.float32, scale=True), for floats from 0 to 1"
            )


def refuse_batch_transform(name: str, function: Any) -> None:
    """Raise InvalidArgument for a transform of samples that has MixUp or CutMix of torchvision."""
    for part in _parts_of(function):
        kind = type(part).__name__
        if kind in ("MixUp", "CutMix"):
            place = "" if part is function else f" (in {type(function).__name__})"
            raise InvalidArgument(
                f"{name}: {kind}{place} mixes the samples of a batch: write batch_transform="
            )


def _parts_of(function: Any) -> Iterator[Any]:
    """Yield a transform and, if it is a chain or a choice of transforms, its parts."""
    yield function
    inner = getattr(function, "transforms", function)
    if isinstance(function, OnTensors):
        inner = (function._function,)
    is_modules = is_of(inner, "torch", "ModuleList") or is_of(inner, "torch", "Sequential")
    for part in inner if is_modules or isinstance(inner, list | tuple) else ():
        yield from _parts_of(part)


def as_step(function: Any) -> Any:
    """Return a user's transform as a step of a chain, which takes and returns NumPy arrays."""
    found = as_transform(function)
    return found.returning_arrays() if isinstance(found, OnTensors) else found


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """Make torch use one thread, as in workers: float sums depend on the number of threads."""
    torch, _ = _packages()
    n_threads = torch.get_num_threads()
    if n_threads == 1:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(n_threads)


@functools.cache
def _packages() -> tuple[Any, Any]:
    """Return the modules torch and torchvision.tv_tensors; None for the second if it is missing."""
    torch = import_extra("a transform of tensors needs torch", "torch", "torch")
    try:
        return torch, importlib.import_module("torchvision.tv_tensors")
    except ImportError:
        return torch, None


def _as_array(value: Any, is_picture: bool) -> Any:  # noqa: FBT001
    """Return a tensor as an array, with the channels of pictures last; other values as they are.

    A tensor that NumPy cannot represent stays a tensor, which the loader converts or refuses.
    """
    if isinstance(value, list):
        return [_as_array(each, is_picture) for each in value]
    torch, tv_tensors = _packages()
    if not isinstance(value, torch.Tensor):
        return value
    if tv_tensors is not None:
        is_picture = is_picture or isinstance(value, tv_tensors.Image | tv_tensors.Video)
    tensor = value.as_subclass(torch.Tensor)
    if is_picture and tensor.ndim >= 3:
        tensor = tensor.movedim(-3, -1)
    is_array = tensor.device.type == "cpu" and tensor.layout is torch.strided
    if not is_array or tensor.dtype is torch.bfloat16:
        return tensor
    return tensor.numpy(force=True)


class CudaUploads:
    """Copies of CPU tensors on a CUDA device, for the stream that is current at the call.

    `tensor.to("cuda")` makes the program wait until the device has done all queued work: the copy
    joins the queue of the current stream. Here, copies have a *stream of their own*, on which they
    run beside that work. They read blocks that are *pinned*: the kernel may not move their pages,
    so that the device reads them by itself. The program does not wait for such a copy; the current
    stream does.

    Copies must not get far ahead of the computation, because each one takes memory of the device.
    They are held back by events: the copies of batch n begin when the work on batch n - 2 is done.
    """

    def __init__(self, torch: Any, device: Any) -> None:
        self._torch = torch
        self._stream = torch.cuda.Stream(device)
        self._device = self._stream.device  # "cuda" alone is the current device
        self._last_handed: Any = None
        """An event on the current stream: the work on all batches before the last one is done."""
        self._can_pin = True

    def begin_batch(self) -> None:
        """Let the copies of the next batch wait for the work on all batches but the last one."""
        if self._last_handed is not None:
            self._stream.wait_event(self._last_handed)
        self._last_handed = self._torch.cuda.current_stream(self._device).record_event()

    def copy(self, tensor: Any) -> Any:
        """Return a copy of a CPU tensor on the device.

        If the tensor's memory is pinned, it may be read until `wait` is called.
        """
        cuda, stream = self._torch.cuda, self._stream
        current = cuda.current_stream(self._device)
        with cuda.stream(stream):
            copied = tensor.to(self._device, non_blocking=tensor.is_pinned())
        current.wait_stream(stream)
        # `stream` allocated the memory. It may be reused only after the work that was queued on the
        # current stream when the tensor was released.
        copied.record_stream(current)
        return copied

    def wait(self) -> None:
        """Wait until all copies have been made."""
        self._stream.synchronize()

    def pin(self, memory: npt.NDArray[np.uint8]) -> Callable[[], None]:
        """Pin memory, which must be unpinned before it is unmapped; return `unpin`.

        If the driver refuses, warn once, and leave this and later memory as it is. Copies from it
        are correct, but slower, and the program waits for them.
        """
        if not self._can_pin:
            return _do_nothing
        runtime, address = self._torch.cuda.cudart(), memory.ctypes.data
        with self._torch.cuda.device(self._device):
            error = int(runtime.cudaHostRegister(address, memory.nbytes, 0))
        if error:
            self._can_pin = False
            self._clear_error()
            self._warn(runtime.cudaGetErrorString(runtime.cudaError(error)), memory.nbytes)
            return _do_nothing

        def unpin() -> None:
            # After an error of the device, every call of CUDA fails; closing must not.
            with contextlib.suppress(RuntimeError):
                self.wait()
                runtime.cudaHostUnregister(address)

        return unpin

    def _clear_error(self) -> None:
        """Consume the error of a failed call; CUDA would report it to the next launch of a kernel.

        Nothing else in torch calls cudaGetLastError.
        """
        with contextlib.suppress(RuntimeError):
            self._torch.ones(1, device=self._device)

    def _warn(self, reason: str, n_bytes: int) -> None:
        warn(
            f"the memory of batches cannot be pinned for {self._device} (cudaHostRegister of "
            f"{n_bytes} bytes: {reason}), so uploads are slower, and the program waits for them: "
            "lower memory_bytes or prefetch",
            RuntimeWarning,
        )


def _do_nothing() -> None:
    """Stand for `unpin` of memory that is not pinned."""
