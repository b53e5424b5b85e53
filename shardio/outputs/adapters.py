"""What makes of arrays the tensors or arrays that a loader is asked for, by the name of a package.

Each is loaded when it is asked for: workers and output="numpy" do without any.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, Literal, Protocol, get_args

import numpy.typing as npt

Output = Literal["tinygrad", "numpy", "torch", "jax"]
OUTPUTS: Final = get_args(Output)


class TensorAdapter(Protocol):
    """Makes tensors of arrays over a block.

    `aliases` says whether a tensor that was made once shows what is written to the block later.
    """

    aliases: bool

    def wrap(self, array: npt.NDArray[Any], owner: object, dtype: str | None = None) -> Any:
        """One field; holds `carrier` for as long as it or a part of it is held."""

    def fixed(
        self, array: npt.NDArray[Any], dtype: str | None = None
    ) -> Callable[[npt.NDArray[Any]], Any]:
        """One field, for many batches: what copies an array's values there."""

    def synchronize(self) -> None:
        """Wait until nothing reads memory that was let go."""


def create_adapter(output: str, device: Any) -> TensorAdapter | None:
    """What makes the output that was asked for, on a device; None for arrays of NumPy.

    Raises:
        InvalidArgument: the package has no such device.
        UnsupportedEnvironment: it is not installed, or cannot open the device here.
    """
    if output == "tinygrad":
        from shardio.outputs.tinygrad.adapter import TinygradAdapter

        return TinygradAdapter(device)
    if output == "torch":
        from shardio.outputs.torch import TorchAdapter

        return TorchAdapter(device)
    if output == "jax":
        from shardio.outputs.jax import JaxAdapter

        return JaxAdapter(device)
    return None
