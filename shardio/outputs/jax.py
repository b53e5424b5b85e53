"""JaxMaker: arrays become JAX's, of the same memory where JAX takes it, else copies.

JAX keeps the array that it made one of for as long as anything refers to the memory, also a
computation that was queued, and until it has copied it to another device. So the block that the
array lies in is kept as well.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy.typing as npt

from shardio.errors import InvalidArgument, UnsupportedEnvironment, install_hint

Ndarray = npt.NDArray[Any]


class JaxAdapter:
    """Makes JAX's arrays on a device, JAX's default if None: "cpu", "gpu", "gpu:1".

    JAX's arrays never change, so there are no two batches in one: `aliases` is False, and `fixed`
    makes a copy of each. Without `jax_enable_x64` JAX holds what has 64 bits in 32.

    Raises:
        InvalidArgument: JAX has no such device here.
        UnsupportedEnvironment: JAX is not installed.
    """

    aliases = False

    def __init__(self, device: str | None = None) -> None:
        self._jax = _jax()
        self._device = None if device is None else _find_device(self._jax, device)

    def wrap(self, array: Ndarray, owner: object, dtype: str | None = None) -> Any:
        """Make an array of the same shape and dtype, or of its bits taken as `dtype`.

        It keeps the array, whose memory `carrier` owns; `carrier` itself is not needed.
        """
        jax = self._jax
        array = array.astype(array.dtype.newbyteorder("="), copy=False)
        if dtype == "bfloat16":
            array = array.view(jax.numpy.bfloat16)
        return jax.device_put(array, self._device, may_alias=True)

    def fixed(self, array: Ndarray, dtype: str | None = None) -> Callable[[Ndarray], Any]:
        """Make nothing yet; the result makes a copy of an array's values."""
        return lambda values: self.wrap(values.copy(), None, dtype)

    def synchronize(self) -> None:
        """Return at once: memory that JAX still reads was not let go."""


def _jax() -> Any:
    """Load JAX."""
    try:
        import jax
    except ImportError as error:
        raise UnsupportedEnvironment(
            f"output='jax' needs JAX ({error}): {install_hint('jax')}"
        ) from error
    return jax


def _find_device(jax: Any, name: str) -> Any:
    """The device that a platform's name, and a number behind a colon, say."""
    platform, _, number = name.partition(":")
    try:
        if number.startswith("-"):  # which would count from the last one
            raise ValueError("numbers are from 0 up")
        return jax.devices(platform)[int(number or 0)]
    except (IndexError, RuntimeError, ValueError) as error:
        known = ", ".join(map(str, jax.devices()))
        raise InvalidArgument(
            f"JAX has no device {name!r} here ({error}); found {known}"
        ) from error
