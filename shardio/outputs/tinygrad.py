"""Convert arrays to tinygrad tensors: shared memory on the CPU device, copies on others.

tinygrad's public API is used if `tinygrad_internals` does not work with the installed version.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any, Final, Literal, get_args

import numpy as np
import numpy.typing as npt
from tinygrad.device import Device
from tinygrad.dtype import DType, dtypes
from tinygrad.tensor import Tensor as Tensor

from shardio.errors import InvalidArgument, UnsupportedEnvironment
from shardio.outputs.tinygrad_internals import find_copies, find_synchronize, find_view

Ndarray = npt.NDArray[Any]

_NAMES = "bool int8 int16 int32 int64 uint8 uint16 uint32 uint64 float16 float32 float64".split()
_DTYPES: Final[dict[np.dtype[Any], DType]] = {
    np.dtype(name): getattr(dtypes, name) for name in _NAMES
}

# The alignment that shared memory must have, in bytes. Compilers use loads of aligned vectors: a
# kernel for float32 crashes if the address of its memory is 8 bytes past a multiple of 16. The
# longest vectors have 64 bytes, a cache line; blocks align every field to such a line.
_ALIGNMENT: Final = 64

# The devices for which the source of a copy has been read when the call returns (tinygrad 0.14).
# For other devices, such as CL, `synchronize` is called after each copy, so copies do not overlap
# with queued work.
_READS_AT_ONCE: Final = frozenset({"CPU", "CUDA", "METAL", "NV", "AMD", "PYTHON", "QCOM"})

# tinygrad's CUDA device pins memory for every copy, and releases this memory only in `synchronize`.
# A loop that never reads a result would pin more and more memory. Therefore this module calls
# `synchronize` each time _STAGING_BYTES have been copied.
_KEEPS_STAGING: Final = frozenset({"CUDA"})
_STAGING_BYTES: Final = 512 << 20

_STORAGE_DEVICES: Final = frozenset({"DISK", "NPY", "TINYFS"})


class TinygradAdapter:
    """An adapter for tinygrad Tensors: shared memory on the CPU device, copies on others.

    `device` is the name of a device, None for tinygrad's default, or a tuple of names, over which
    tensors are sharded along axis 0. tinygrad is not thread-safe, so use the adapter only in the
    thread that uses tinygrad.
    """

    uploads = None

    def __init__(self, device: str | tuple[str, ...] | None = None) -> None:
        names: tuple[str | None, ...] = device if isinstance(device, tuple) else (device,)
        self._devices = tuple(_open(name) for name in names)
        if not names or len(set(self._devices)) < len(names):
            raise InvalidArgument(f"device must name different devices; found {device!r}")
        self.wraps_items = len(self._devices) == 1  # the items of a list cannot be sharded by rows
        self._waits = [find_synchronize(name) for name in self._devices]
        self._n_staged_bytes = 0
        self._view = find_view(self._devices[0]) if _kinds(self._devices) == ["CPU"] else None
        self.aliases = self._view is not None
        is_one_copy = not self.aliases and len(self._devices) == 1
        self._copies = find_copies(self._devices[0]) if is_one_copy else None

    def __reduce__(self) -> tuple[Any, ...]:
        # Batches, which can be pickled, refer to their adapter.
        return TinygradAdapter, (self._devices,)

    def wrap(self, array: Ndarray, owner: object, dtype: str | None = None) -> Tensor:
        """Return an array as a Tensor; each of several devices gets an equal share of the rows.

        If `aliases` is True, the Tensor, its views, and unrealized tensors computed from them keep
        `owner` alive; do not write to the memory while any of them exists. Arrays that are
        empty, not C-contiguous, not in native byte order, or not aligned to 64 bytes are always
        copied.
        """
        native = _DTYPES.get(array.dtype)
        address: int = array.__array_interface__["data"][0]
        is_aligned = bool(array.size) and not address % _ALIGNMENT and array.flags.c_contiguous
        if self._view is None or native is None or not is_aligned:
            tensor = self._copy(array)
        else:
            tensor = self._view(address, array.shape, native, owner)
        return _as_dtype(tensor, array, dtype)

    def make_copier(self, array: Ndarray, dtype: str | None = None) -> Callable[[Ndarray], Tensor]:
        """Return a function that copies an array into a Tensor: the same Tensor in every call.

        Work that was queued before a call still reads the old values. If the device does not
        support overwriting, each call returns a new Tensor.
        """
        copies, tensor = self._copies, self._copy(array)
        if copies is None or not array.size:
            return functools.partial(self.wrap, owner=None, dtype=dtype)
        result = _as_dtype(tensor, array, dtype)

        def copy_into(values: Ndarray) -> Tensor:
            copies.refill(tensor, _writeable(values))
            self._wait_if_needed(values)
            return result

        return copy_into

    def synchronize(self) -> None:
        """Wait until the devices have finished all queued work.

        Until then, queued kernels may read shared memory, even if all tensors are gone.
        """
        for wait in self._waits:
            wait()
        self._n_staged_bytes = 0

    def _copy(self, array: Ndarray) -> Tensor:
        """Return a copy of an array. The array has been read when this method returns."""
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
                'choose a batch_size that is a multiple of their number, and tail="drop"'
            )
        if not array.size:
            tensor = Tensor.empty(*array.shape, dtype=_DTYPES[native], device=first)
            return tensor.shard(self._devices, axis=0) if n_devices > 1 else tensor
        source = np.ascontiguousarray(array, native).reshape(array.shape)
        if self._copies is not None:
            tensor = self._copies.new(_writeable(source), _DTYPES[native])
        else:
            tensor = self._copy_by_public_api(source)
        self._wait_if_needed(array)
        return tensor

    def _copy_by_public_api(self, array: Ndarray) -> Tensor:
        source, first = Tensor(array, device="NPY"), self._devices[0]
        is_sharded = len(self._devices) > 1
        try:
            tensor = source.shard(self._devices, axis=0) if is_sharded else source.to(first)
            return tensor.realize()
        # Versions before 0.14 cannot slice memory of the device NPY.
        except NotImplementedError:
            tensor = source.to(first).contiguous().realize()
            return tensor.shard(self._devices, axis=0).realize()

    def _wait_if_needed(self, array: Ndarray) -> None:
        """Synchronize if a device may still read `array`, or keeps pinned memory."""
        kinds = set(_kinds(self._devices))
        self._n_staged_bytes += array.nbytes if kinds & _KEEPS_STAGING else 0
        if not kinds <= _READS_AT_ONCE or self._n_staged_bytes > _STAGING_BYTES:
            self.synchronize()


def _writeable(array: Ndarray) -> Ndarray:
    """Return the array, or a copy if it is read-only, because tinygrad needs writable memory."""
    return array if array.flags.writeable else array.copy()


def _as_dtype(tensor: Tensor, array: Ndarray, dtype: str | None) -> Tensor:
    """Return the tensor, with its bits reinterpreted if `dtype` is another dtype."""
    if dtype is None or dtype == array.dtype.name:
        return tensor
    target = getattr(dtypes, dtype, None)
    if not isinstance(target, DType) or target.itemsize != array.dtype.itemsize:
        raise InvalidArgument(f"the bits of {array.dtype} cannot be reinterpreted as {dtype!r}")
    return tensor.bitcast(target)


def _kinds(devices: tuple[str, ...]) -> list[str]:
    return [name.partition(":")[0] for name in devices]


def _open(name: str | None) -> str:
    try:
        canonical = Device.canonicalize(name)
        if canonical.partition(":")[0] in _STORAGE_DEVICES:
            raise InvalidArgument(f"device {canonical} holds data but cannot compute; try CPU")
        Device[canonical]
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("tinygrad.runtime.ops_"):
            raise InvalidArgument(f"tinygrad has no device {name!r}{_of_torch(name)}") from error
        raise _device_error(name, error) from error
    except InvalidArgument:
        raise
    except Exception as error:  # the exception for a missing driver depends on the device
        raise _device_error(name, error) from error
    return canonical


def _device_error(name: str | None, error: Exception) -> UnsupportedEnvironment:
    advice = (
        "the CPU device needs the program clang (apt-get install clang), DEV=PYTHON works without "
        "but is very slow, and"
    )
    if name is not None and not name.upper().startswith(("CPU", "PYTHON")):
        advice = "`shardio doctor` shows the GPUs of this machine;"
    return UnsupportedEnvironment(
        f"tinygrad cannot open {'its default device' if name is None else f'device {name}'} "
        f"({type(error).__name__}: {error}); {advice} "
        f'output="numpy" needs no device{_of_torch(name)}'
    )


def _of_torch(name: str | None) -> str:
    """Return the end of a message about a device: a hint if the name is written as in torch."""
    return (
        f'; for the device {name} of torch, write output="torch"'
        if _TORCH.match(name or "")
        else ""
    )


_TORCH: Final = re.compile(r"(?:cpu|cuda|mps|xpu)(?::\d+)?$")
Levels = Literal["uint8", "float16", "float32"]

_RED, _GREEN, _BLUE = 0.299, 0.587, 0.114  # the weights of BT.601 in luma


def yuv420_to_rgb(frames: Tensor, *, dtype: Levels = "uint8") -> Tensor:
    """Convert frames of YUV 4:2:0, such as those of clips with `pixels="yuv420"`, to RGB.

    The result of (..., H, W, 3) is lazy, so the function can be used in a TinyJit. Colours outside
    RGB are clipped. A chroma sample of 2 x 2 pixels lies in their left column, halfway between
    the rows, as in H.264. Chroma is interpolated linearly, and repeated at the edges.

    Args:
        frames: a Tensor of uint8 (..., H * 3 / 2, W), where H and W are even, in BT.601 of limited
            range. The first H rows are luma. Each of the H / 2 rows below has a row of U in its
            left half, and of V in its right half.
        dtype: the dtype of the result, with values from 0 to 255, rounded only for "uint8".

    Raises:
        InvalidArgument: the shape or an argument is invalid.
    """
    if dtype not in get_args(Levels):
        known = ", ".join(map(repr, get_args(Levels)))
        raise InvalidArgument(f"dtype must be one of {known}; found {dtype!r}")
    height, width = _size(frames)
    luma, chroma = frames.split([height, height // 2], -2)
    # Change the shape of chroma so that U and V are on an axis of their own. They are then
    # interpolated together.
    both = chroma.reshape(*frames.shape[:-2], height // 2, 2, width // 2).transpose(-3, -2)
    u, v = _double_width(_double_height(both.cast(dtypes.float) - 128)).split(1, -3)
    rgb = _yuv_to_rgb(luma.cast(dtypes.float), u.squeeze(-3), v.squeeze(-3))
    levels = rgb.clip(0, 255)
    return (levels + 0.5).cast(dtypes.uint8) if dtype == "uint8" else levels.cast(dtype)


def _yuv_to_rgb(y: Tensor, u: Tensor, v: Tensor) -> Tensor:
    luma = (y - 16) * (255 / 219)
    of_v, of_u = (2 * (1 - weight) * 255 / 224 for weight in (_RED, _BLUE))
    less = u * (of_u * _BLUE / _GREEN) + v * (of_v * _RED / _GREEN)
    return Tensor.stack(luma + v * of_v, luma - less, luma + u * of_u, dim=-1)


def _double_width(chroma: Tensor) -> Tensor:
    """Double the columns: after each sample, insert the mean of this sample and the next one."""
    after = chroma[..., 1:].cat(chroma[..., -1:], dim=-1)
    return Tensor.stack(chroma, (chroma + after) * 0.5, dim=-1).flatten(-2)


def _double_height(chroma: Tensor) -> Tensor:
    """Double the rows: replace each sample with two, a quarter of a row above and below it."""
    before = chroma[..., :1, :].cat(chroma[..., :-1, :], dim=-2)
    after = chroma[..., 1:, :].cat(chroma[..., -1:, :], dim=-2)
    near = chroma * 0.75
    return Tensor.stack(near + before * 0.25, near + after * 0.25, dim=-2).flatten(-3, -2)


def _size(frames: Tensor) -> tuple[int, int]:
    """Return the height and width of the pictures; raise InvalidArgument for a wrong shape."""
    if frames.dtype != dtypes.uint8 or frames.ndim < 2:
        raise InvalidArgument(
            f"frames must be uint8 of (..., H * 3 / 2, W); found {frames.dtype.name} "
            f"of {tuple(frames.shape)}"
        )
    rows, width = frames.shape[-2:]
    if rows % 3 or width % 2 or not rows or not width:
        raise InvalidArgument(
            f"{rows} rows of {width} are not a YUV 4:2:0 frame: expected H * 3 / 2 rows of W, "
            "H and W even"
        )
    return int(rows) // 3 * 2, int(width)
