"""Convert arrays to JAX arrays, which share the NumPy arrays' memory if JAX supports this.

If JAX shares the memory of a NumPy array, JAX keeps the array alive as long as needed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy.typing as npt

from shardio.errors import InvalidArgument, import_extra

if TYPE_CHECKING:
    from jax import Array as Array

Ndarray = npt.NDArray[Any]


class JaxAdapter:
    """An adapter for JAX arrays on a device: "cpu", "gpu", "gpu:1"; None for JAX's default.

    JAX arrays are immutable: every batch gets new ones, and `aliases` is False.
    Without the option `jax_enable_x64`, JAX stores 64-bit types in 32 bits.
    """

    aliases = False
    wraps_items = True
    uploads = None
    make_copier = None

    def __init__(self, device: str | None = None) -> None:
        self._jax = import_extra("output='jax' needs JAX", "jax", "jax")
        self._device = None if device is None else _find_device(self._jax, device)
        self._name = device

    def __reduce__(self) -> tuple[Any, ...]:
        # Batches, which can be pickled, refer to their adapter.
        return JaxAdapter, (self._name,)

    def wrap(self, array: Ndarray, owner: object, dtype: str | None = None) -> Any:
        """Return an array as a JAX array, which keeps `array` alive if they share memory."""
        jax = self._jax
        array = array.astype(array.dtype.newbyteorder("="), copy=False)
        if dtype == "bfloat16":
            array = array.view(jax.numpy.bfloat16)
        return jax.device_put(array, self._device, may_alias=True)

    def synchronize(self) -> None:
        """Do nothing, because JAX keeps all memory alive that it still reads."""


def _find_device(jax: Any, name: str) -> Any:
    """Return a device by its name: a platform, or a platform, a colon and the device's index."""
    platform, _, number = name.partition(":")
    try:
        if number.startswith("-"):  # a negative index would count from the last device
            raise ValueError("device numbers start at 0")
        return jax.devices(platform)[int(number or 0)]
    except (IndexError, RuntimeError, ValueError) as error:
        known = ", ".join(map(str, jax.devices()))
        raise InvalidArgument(
            f"JAX has no device {name!r} here ({error}); found {known}"
        ) from error
