"""Loader outputs: NumPy arrays, or tensors of tinygrad, torch or JAX.

A framework is imported when its adapter is created; workers and output="numpy" need none.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, Literal, Protocol, get_args

import numpy.typing as npt

if TYPE_CHECKING:
    from shardio.outputs.tinygrad import yuv420_to_rgb

__all__ = ["yuv420_to_rgb"]

Output = Literal["tinygrad", "numpy", "torch", "jax"]
OUTPUTS: Final = get_args(Output)


class TensorAdapter(Protocol):
    """A converter from arrays over a block to tensors.

    `aliases` is True if tensors share the memory of their arrays; later writes to the block then
    change the tensors.
    """

    aliases: bool

    def wrap(self, array: npt.NDArray[Any], owner: object, dtype: str | None = None) -> Any:
        """Return an array as a tensor, with its bits reinterpreted if `dtype` is given.

        The tensor and its views keep `owner`, whose memory the array uses.

        Raises:
            InvalidArgument: the framework has no such dtype.
        """

    def fixed(
        self, array: npt.NDArray[Any], dtype: str | None = None
    ) -> Callable[[npt.NDArray[Any]], Any]:
        """Return a function that copies a field's values into a tensor shared by all batches."""

    def synchronize(self) -> None:
        """Wait until no queued work reads memory that has been released."""


def create_adapter(output: str, device: Any) -> TensorAdapter | None:
    """Return the adapter for an output on a device; None for NumPy arrays.

    Raises:
        InvalidArgument: the framework has no such device.
        UnsupportedEnvironment: the framework is not installed, or cannot open the device.
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


def __getattr__(name: str) -> object:
    """Import a public name on first use (PEP 562), because it imports tinygrad."""
    if name not in __all__:
        raise AttributeError(f"module 'shardio.outputs' has no attribute {name!r}")
    from shardio.outputs.tinygrad import yuv420_to_rgb

    return yuv420_to_rgb
