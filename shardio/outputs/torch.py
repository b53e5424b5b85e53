"""Convert arrays to torch tensors: shared memory on the CPU, copies on other devices.

A tensor on the CPU, a view of it, or a NumPy array made from it keeps the block of memory alive.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from shardio.errors import InvalidArgument, UnsupportedEnvironment, import_extra

Ndarray = npt.NDArray[Any]


class TorchAdapter:
    """An adapter for torch tensors on a device; the default is the CPU."""

    def __init__(self, device: str | None = None) -> None:
        self._torch = import_extra("output='torch' needs torch", "torch", "torch")
        self._device = _open(self._torch, device or "cpu")
        self.aliases: bool = self._device.type == "cpu"

    def wrap(self, array: Ndarray, owner: object, dtype: str | None = None) -> Any:
        """Return an array as a tensor, which keeps the array alive on the CPU; a copy elsewhere."""
        tensor = self._cpu_tensor(array, dtype)
        return tensor if self.aliases else tensor.to(self._device)

    def make_copier(self, array: Ndarray, dtype: str | None = None) -> Callable[[Ndarray], Any]:
        """Return a function that copies an array into a tensor: the same tensor in every call.

        Work that was queued on torch's current stream still reads the old values.
        """
        tensor = self._torch.empty_like(self._cpu_tensor(array, dtype), device=self._device)
        return lambda values: tensor.copy_(self._cpu_tensor(values, dtype))

    def synchronize(self) -> None:
        """Do nothing, because a call of torch has read memory of the CPU when it returns."""

    def _cpu_tensor(self, array: Ndarray, dtype: str | None) -> Any:
        """Return a tensor that shares an array's memory; a copy unless its byte order is native."""
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


def _open(torch: Any, name: str) -> Any:
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
            f"({type(error).__name__}: {error}); device='cpu' works everywhere"
        ) from error
    return device
