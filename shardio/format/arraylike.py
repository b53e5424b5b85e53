"""Arrays other than NumPy's plain ones: masked arrays are refused, tensors of torch are converted.

Torch is not imported: its tensors are recognized by their class.
"""

from __future__ import annotations

import sys
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from shardio.errors import SchemaError

PLAIN_TYPES: Final = frozenset((np.ndarray, str, bytes, bool, int, float, dict, type(None)))
"""Types that most values have: neither masked arrays nor tensors."""
_BFLOAT16_BITS: Final = np.dtype("<u2", metadata={"bits of": "bfloat16"})
"""The dtype of arrays made from bfloat16 tensors: uint16 with metadata that marks it."""


def is_of(value: object, package: str, name: str) -> bool:
    """True if a value is of a class of this name from a package, or of a subclass."""
    return any(
        kind.__name__ == name and str(kind.__module__).partition(".")[0] == package
        for kind in type(value).__mro__
    )


def is_bfloat16_bits(dtype: np.dtype[Any]) -> bool:
    """True if a dtype is that of an array which `tensor_to_array` made of a bfloat16 tensor."""
    return dtype.metadata is not None and dtype.metadata.get("bits of") == "bfloat16"


def shown_dtype(dtype: np.dtype[Any]) -> str:
    """Return a dtype as messages show it, "bfloat16" for the bits of bfloat16."""
    return "bfloat16" if is_bfloat16_bits(dtype) else str(dtype)


def tensor_to_array(name: str, tensor: Any) -> npt.NDArray[Any]:
    """Return a CPU tensor of torch, with or without a gradient, as an array over its memory.

    A bfloat16 tensor becomes a uint16 array of its bits, recognized by `is_bfloat16_bits`.

    Raises:
        SchemaError: the tensor is on another device, sparse, or of a dtype that NumPy lacks. The
            message names the field.
    """
    device, layout = tensor.device.type, str(tensor.layout)
    if device != "cpu":
        raise SchemaError(
            f"field {name!r}: expected a tensor on the CPU, found one on {device}; "
            "move it first, x.cpu()"
        )
    if layout != "torch.strided":
        raise SchemaError(
            f"field {name!r}: expected a dense tensor, found {layout}; "
            "convert it first, x.to_dense()"
        )
    try:
        if str(tensor.dtype) != "torch.bfloat16":
            array: npt.NDArray[Any] = tensor.numpy(force=True)
            return array
        bits = tensor.detach().view(sys.modules["torch"].int16).numpy(force=True)
        return bits.view(_BFLOAT16_BITS)  # type: ignore[no-any-return]
    except (TypeError, RuntimeError, ValueError) as error:
        raise SchemaError(
            f"field {name!r}: a tensor of {tensor.dtype} has no array of NumPy ({error}); "
            "convert it first, as x.float()"
        ) from error


def is_masked(value: object) -> bool:
    """True if a value is a masked array of NumPy, whatever is masked in it."""
    # The exact type first: np.ma takes milliseconds to import.
    is_subclass = type(value) is not np.ndarray and isinstance(value, np.ndarray)
    return is_subclass and isinstance(value, np.ma.MaskedArray)


def refuse_masked(place: str, value: object, depth: int = 1) -> None:
    """Raise an error if a value is a masked array, or a list that has one among its elements.

    Args:
        place: names the field in the message.
        value: any value.
        depth: levels of lists and tuples to search.

    Raises:
        SchemaError: the value is or contains a masked array.
    """
    if is_masked(value):
        raise SchemaError(
            f"{place}: a masked array would lose its mask; fill it, x.filled(0), or give the mask "
            "as a field of its own, np.ma.getmaskarray(x)"
        )
    if depth and isinstance(value, list | tuple) and not PLAIN_TYPES.issuperset(map(type, value)):
        for each in value:
            refuse_masked(place, each, depth - 1)


def with_arrays(name: str, value: Any, depth: int) -> Any:
    """Return a value with its tensors of torch as arrays, or as it is if it has none.

    Args:
        name: of the field, for messages.
        value: any value; a list or tuple with a tensor is returned as a new list.
        depth: levels of lists and tuples to search.

    Raises:
        SchemaError: the value has a masked array, or a tensor that cannot become an array.
    """
    refuse_masked(f"field {name!r}", value, 0)
    if is_of(value, "torch", "Tensor"):
        return tensor_to_array(name, value)
    if not depth or not isinstance(value, list | tuple) or PLAIN_TYPES.issuperset(map(type, value)):
        return value
    found = [with_arrays(f"{name}[{i}]", each, depth - 1) for i, each in enumerate(value)]
    return value if all(a is b for a, b in zip(found, value, strict=True)) else found
