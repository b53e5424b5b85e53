"""The outputs of a loader: NumPy arrays, or tensors of tinygrad, torch or JAX.

A framework is imported when its adapter is created. Workers and output="numpy" need no framework.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, Literal, Protocol, get_args

import numpy as np
import numpy.typing as npt

from shardio._base.callers import one_of, warn
from shardio.errors import InvalidArgument
from shardio.format.types.array_values import is_of

if TYPE_CHECKING:
    from shardio.outputs.tinygrad import yuv420_to_rgb

__all__ = ["yuv420_to_rgb"]

Output = Literal["tinygrad", "numpy", "torch", "jax"]
OUTPUTS: Final = get_args(Output)


MakeCopier = Callable[[npt.NDArray[Any], str | None], Callable[[npt.NDArray[Any]], Any]]


class Uploads(Protocol):
    """Copies to a device that run while the program continues, and while the device computes."""

    def begin_batch(self) -> None:
        """Start the uploads of a batch.

        They wait until the work on all batches but the latest has finished.
        """

    def pin(self, memory: npt.NDArray[np.uint8]) -> Callable[[], None]:
        """Pin a block's memory, so that copies from it are fast; return a function to unpin it.

        Call that function before the memory is unmapped.
        """


class TorchDevice(Protocol):
    """A `torch.device`, for type hints that are valid without torch."""

    @property
    def type(self) -> str: ...
    @property
    def index(self) -> int | None: ...


class TensorAdapter(Protocol):
    """A converter to tensors, from arrays that are views of a batch's block.

    If `aliases` is True, a tensor shares its array's memory: writes to the array change the tensor.
    If `wraps_items` is False, the arrays in lists stay NumPy arrays. If `uploads` is not None, or
    `aliases` is True, arrays may be read after `wrap` and copiers have returned: call `synchronize`
    before their memory changes.
    """

    aliases: bool
    wraps_items: bool

    @property
    def uploads(self) -> Uploads | None: ...

    def wrap(self, array: npt.NDArray[Any], owner: object, dtype: str | None = None) -> Any:
        """Return an array as a tensor, or raise InvalidArgument if the framework lacks its dtype.

        `dtype`, if not None, is a dtype that NumPy lacks; the bits are reinterpreted. A tensor that
        shares the array's memory, and its views, keep `owner` alive.
        """

    @property
    def make_copier(self) -> MakeCopier | None:
        """A function that returns a copier for arrays of a shape and dtype; see `wrap`.

        A copier copies an array into a tensor: where supported, the same tensor in every call. None
        if tensors cannot be overwritten.
        """

    def synchronize(self) -> None:
        """Wait until queued work has stopped reading the memory of tensors that were released.

        With `uploads`, wait for all copies.
        """


def create_adapter(output: str, device: Any) -> TensorAdapter | None:
    """Return the adapter for an output on a device; None if the output is NumPy arrays.

    Raises InvalidArgument or UnsupportedEnvironment if the framework or the device is missing.
    """
    if output == "tinygrad":
        from shardio.outputs.tinygrad import TinygradAdapter

        return TinygradAdapter(device)
    if output == "torch":
        from shardio.outputs.torch import TorchAdapter

        return TorchAdapter(device)
    if output == "jax":
        from shardio.outputs.jax import JaxAdapter

        return JaxAdapter(device)
    return None


def resolve_output(output: Any, *, uses_torch: bool) -> Output:
    """Return the checked output of a loader; for None, tinygrad, with a warning for users of torch.

    `uses_torch` is True if a transform of the loader is one of torch.
    """
    if output is not None:
        found: Output = one_of("output", output, OUTPUTS)
        return found
    if uses_torch or ("torch" in sys.modules and "tinygrad" not in sys.modules):
        warn(
            'batches are tensors of tinygrad: for tensors of torch, write output="torch"; '
            'output="tinygrad" turns this warning off',
            RuntimeWarning,
        )
    return "tinygrad"


def check_device(device: Any, output: str) -> Any:
    """Return the name of a device, or a tuple of names; None for the default device."""
    if device is None:
        return None
    if is_of(device, "torch", "device"):
        if output == "torch":
            return str(device)
        raise InvalidArgument(
            f'device is {device!r}, for tensors of torch: write output="torch"; found '
            f"output={output!r}"
        )
    if output == "numpy":
        raise InvalidArgument("device is for tensors; output is 'numpy'")
    if output != "tinygrad" and not isinstance(device, str):
        like = f"a name, such as 'cuda:0', with output={output!r}"
        raise InvalidArgument(f"device must be {like}; found {device!r}")
    names = device if isinstance(device, tuple | list) else (device,)
    if not names or not all(isinstance(name, str) for name in names):
        raise InvalidArgument(f"device must be a name or a tuple of names; found {device!r}")
    return device if isinstance(device, str) else tuple(device)


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module 'shardio.outputs' has no attribute {name!r}")
    from shardio.outputs.tinygrad import yuv420_to_rgb

    return yuv420_to_rgb
