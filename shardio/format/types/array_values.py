"""Convert the values that users pass for fields of arrays to the arrays that are stored.

Tensors are recognized by the name of their class, without importing torch.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

from shardio.errors import SchemaError
from shardio.format.types.field import type_mismatch

if TYPE_CHECKING:
    from shardio.format.types.arrays import Array

PLAIN_TYPES: Final = frozenset((np.ndarray, str, bytes, bool, int, float, dict, type(None)))
"""The types of most values, which are neither masked arrays nor tensors."""
_BFLOAT16_BITS: Final = np.dtype("<u2", metadata={"bits of": "bfloat16"})
"""The dtype of arrays with the bits of bfloat16 tensors."""


def is_of(value: object, package: str, name: str) -> bool:
    """Return True if the class of a value, or one of its bases, is `name` of `package`."""
    return any(
        kind.__name__ == name and str(kind.__module__).partition(".")[0] == package
        for kind in type(value).__mro__
    )


def as_bfloat16_bits(value: Any) -> Any:
    """Return the bits of bfloat16 numbers as arrays whose dtype `is_bfloat16_bits` recognizes.

    The items of a list are converted one by one.
    """
    if isinstance(value, list):
        return [as_bfloat16_bits(each) for each in value]
    return None if value is None else np.asarray(value).view(_BFLOAT16_BITS)


def is_bfloat16_bits(dtype: np.dtype[Any]) -> bool:
    """Return True for the dtype of arrays that `as_bfloat16_bits` and `tensor_to_array` return."""
    return dtype.metadata is not None and dtype.metadata.get("bits of") == "bfloat16"


def format_dtype(dtype: np.dtype[Any]) -> str:
    """Return the name of a dtype for messages; "bfloat16" for the dtype of bfloat16 bits."""
    return "bfloat16" if is_bfloat16_bits(dtype) else str(dtype)


def tensor_to_array(name: str, tensor: Any) -> npt.NDArray[Any]:
    """Return an array that shares the memory of a torch tensor on the CPU.

    bfloat16 becomes uint16 bits; see `is_bfloat16_bits`. Raises SchemaError for a tensor that no
    array represents.
    """
    device, layout = tensor.device.type, str(tensor.layout)
    if device != "cpu":
        raise SchemaError(
            f"field {name!r}: expected a tensor on the CPU, found one on {device}; "
            "move it first: x.cpu()"
        )
    if layout != "torch.strided":
        raise SchemaError(
            f"field {name!r}: expected a dense tensor, found {layout}; "
            "convert it first: x.to_dense()"
        )
    try:
        if str(tensor.dtype) != "torch.bfloat16":
            array: npt.NDArray[Any] = tensor.numpy(force=True)
            return array
        bits = tensor.detach().view(sys.modules["torch"].int16).numpy(force=True)
        return as_bfloat16_bits(bits)  # type: ignore[no-any-return]
    except (TypeError, RuntimeError, ValueError) as error:
        raise SchemaError(
            f"field {name!r}: no NumPy array can represent a tensor of {tensor.dtype} ({error}); "
            "convert it first, for example with x.float()"
        ) from error


def is_masked(value: object) -> bool:
    """Return True if a value is a NumPy masked array, even if no item is masked."""
    # Test the exact type first: importing np.ma takes milliseconds.
    is_subclass = type(value) is not np.ndarray and isinstance(value, np.ndarray)
    return is_subclass and isinstance(value, np.ma.MaskedArray)


def refuse_masked(place: str, value: object, depth: int = 1) -> None:
    """Raise SchemaError for a masked array, even inside lists nested up to `depth` levels deep."""
    if is_masked(value):
        raise SchemaError(
            f"{place}: a masked array would lose its mask; fill it with x.filled(0), or store the "
            "mask in a field of its own: np.ma.getmaskarray(x)"
        )
    if depth and isinstance(value, list | tuple) and not PLAIN_TYPES.issuperset(map(type, value)):
        for each in value:
            refuse_masked(place, each, depth - 1)


def tensors_to_arrays(name: str, value: Any, depth: int) -> Any:
    """Return a value with arrays in place of torch tensors, even inside nested lists.

    Lists are searched up to `depth` levels deep.

    Raises SchemaError for a masked array, or a tensor that cannot become an array.
    """
    refuse_masked(f"field {name!r}", value, 0)
    if is_of(value, "torch", "Tensor"):
        return tensor_to_array(name, value)
    if not depth or not isinstance(value, list | tuple) or PLAIN_TYPES.issuperset(map(type, value)):
        return value
    found = [tensors_to_arrays(f"{name}[{i}]", each, depth - 1) for i, each in enumerate(value)]
    return value if all(a is b for a, b in zip(found, value, strict=True)) else found


def encode_array(name: str, field: Array, value: object) -> npt.NDArray[Any]:
    """Return `value` as a C-contiguous little-endian array of the field's dtype and shape.

    Raises SchemaError for another shape, or if a number would change. The only numbers that may be
    rounded are Python numbers in a floating-point field.
    """
    found = _as_dtype(name, field, value)
    fits = found.ndim == len(field.shape) and all(
        d is None or d == n for d, n in zip(field.shape, found.shape, strict=True)
    )
    if not fits:
        raise SchemaError(
            f"field {name!r}: expected shape {_format_shape(field.shape)}, "
            f"found {_format_shape(found.shape)}"
        )
    whole: npt.NDArray[Any] = np.ascontiguousarray(found).reshape(found.shape)
    # An array of bool can contain other bytes than 0 and 1 if it is a view of other memory.
    if field.dtype == "bool" and (whole.view(np.uint8) > 1).any():
        raise SchemaError(f"field {name!r}: a bool in it is neither 0 nor 1")
    return whole


def _format_shape(shape: tuple[int | None, ...]) -> str:
    return "(" + ", ".join("any" if d is None else str(d) for d in shape) + ")"


def _as_dtype(name: str, field: Array, value: object) -> npt.NDArray[Any]:
    wanted = field.numpy
    if value is None:
        raise type_mismatch(name, field.dtype, value)
    refuse_masked(f"field {name!r}", value, len(field.shape))
    if is_of(value, "torch", "Tensor"):
        value = tensor_to_array(name, value)
    if isinstance(value, np.ndarray | np.generic):
        found = np.asarray(value)
        if field.dtype == "bfloat16":
            # Accept only arrays of the bits of bfloat16 numbers. If the number 1 were cast to
            # uint16, the result would be the bits of the smallest denormal.
            if found.dtype.name == "bfloat16":
                return found.view(wanted)
            if found.dtype.newbyteorder("<") == wanted:
                return found.astype(wanted, copy=False)
        elif not is_bfloat16_bits(found.dtype) and np.can_cast(found.dtype, wanted, "safe"):
            cast = found.astype(wanted, copy=False)
            # NumPy's "safe" cast from 64-bit integers to float64 rounds large values.
            if found.dtype.itemsize == 8 and found.dtype.kind in "iu" and wanted.kind == "f":
                _refuse_rounding(name, found, cast)
            return cast
        raise SchemaError(
            f"field {name!r}: expected dtype {field.dtype}, found {format_dtype(found.dtype)}"
        )
    try:
        return _cast_numbers(np.asarray(value), field)
    except MemoryError:
        raise
    except Exception as error:  # a class may raise anything in __array__
        is_of_numpy = isinstance(error, TypeError | ValueError | OverflowError | RuntimeError)
        reason = str(error) if is_of_numpy else f"{type(error).__name__}: {error}"
        raise SchemaError(
            f"field {name!r}: expected {field.dtype}, found {type(value).__name__}: {reason}"
        ) from error


def _refuse_rounding(name: str, original: npt.NDArray[Any], cast: npt.NDArray[Any]) -> None:
    with np.errstate(invalid="ignore"):
        changed = cast.astype(original.dtype) != original
    if changed.any():
        value = original[changed].flat[0]
        raise SchemaError(f"field {name!r}: {cast.dtype} cannot hold {value} exactly")


def _cast_numbers(found: npt.NDArray[Any], field: Array) -> npt.NDArray[Any]:
    """Return an array with the field's dtype; NumPy made `found` from Python numbers.

    Raises OverflowError for a number out of range, and TypeError for another kind of number.
    """
    wanted = field.numpy
    if found.size == 0 and found.dtype.kind == "f":
        return found.astype(wanted)
    if field.dtype == "bfloat16":
        raise TypeError("give an array of bfloat16, or of uint16 with the same bits")
    if found.dtype.kind not in {"b": "b", "i": "biu", "u": "biu", "f": "biuf"}[wanted.kind]:
        if found.dtype == object and all(type(n) is int for n in found.flat):
            raise OverflowError("an integer has more than 64 bits")
        raise TypeError(f"its values are {found.dtype}")
    if found.dtype == wanted:
        return found
    if found.size and wanted.kind in "iu" and found.dtype.kind != "b":
        limits = np.iinfo(wanted)
        if int(found.min()) < limits.min or int(found.max()) > limits.max:
            raise OverflowError(f"a value lies outside {limits.min}..{limits.max}")
    with np.errstate(over="ignore"):
        cast = found.astype(wanted)
    if wanted.kind == "f" and np.isfinite(found[np.isinf(cast)]).any():
        raise OverflowError(f"a value is too large for {field.dtype}")
    return cast
