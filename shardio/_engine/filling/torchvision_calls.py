"""Calls of torchvision's transforms by user functions that run on NumPy arrays.

torchvision returns arrays unchanged, without a word. Nothing here imports torch.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Mapping
from typing import Any, Final

import numpy as np

from shardio.format.types.array_values import is_of

_V2: Final = "torchvision.transforms.v2"
_TAKE_ARRAYS: Final = ("Lambda", "ToImage", "ToPILImage", "ToTensor")
"""Transforms that do not leave arrays as they are."""


@contextlib.contextmanager
def refuse_pictures_as_arrays() -> Iterator[None]:
    """Make transforms of torchvision raise TypeError if they are called with arrays of pictures.

    They would return them unchanged.
    """
    if _V2 not in sys.modules:
        yield
        return
    hook = sys.modules["torch.nn.modules.module"].register_module_forward_pre_hook(_refuse_array)
    try:
        yield
    finally:
        hook.remove()


def _refuse_array(module: Any, given: Any) -> None:
    kind = type(module)
    is_chain = kind.__module__ == f"{_V2}._container"
    if not kind.__module__.startswith(f"{_V2}.") or is_chain or kind.__name__ in _TAKE_ARRAYS:
        return
    values = list(_values_in(given))
    is_converted = any(is_of(v, "torch", "Tensor") or is_of(v, "PIL", "Image") for v in values)
    if not is_converted and any(_is_pixels(value) for value in values):
        raise TypeError(
            f"v2.{kind.__name__} leaves arrays of NumPy as they are, and is called with a picture "
            "as such: pass transform=shardio.transforms.OnTensors(f), which calls f with tensors"
        )


def _values_in(given: Any) -> Iterator[Any]:
    for value in given.values() if isinstance(given, Mapping) else given:
        if isinstance(value, Mapping | list | tuple):
            yield from _values_in(value)
        else:
            yield value


def _is_pixels(value: Any) -> bool:
    is_levels = isinstance(value, np.ndarray) and value.dtype == np.uint8
    return is_levels and value.ndim in (3, 4) and value.shape[-1] == 3
