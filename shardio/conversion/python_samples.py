"""Write samples from an iterable in the calling process, and convert Python values for storage.

Tensors become arrays and Pillow images become files. torch, Pillow and other libraries are not
imported: the class of a value identifies its library.
"""

from __future__ import annotations

import io
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any, Final

import numpy as np

from shardio.batch.schema_inference import infer_schema
from shardio.conversion.append import check_same_schema, load_base, rebase
from shardio.conversion.report import ConversionReport
from shardio.dataset.writer import DatasetWriter, GenerationWriter
from shardio.errors import InvalidArgument, SchemaError
from shardio.format.schema import Schema
from shardio.format.types import Field, Image
from shardio.format.types.array_values import is_of


def convert_samples(
    samples: Iterable[Mapping[str, Any]], out: str, schema: Schema | None, shard_bytes: int
) -> ConversionReport:
    """Write samples to a new dataset at `out`; infer a missing `schema` from the first sample.

    Without any sample, nothing is published.
    """
    start_s = time.monotonic()
    rest = iter(samples)
    first = next(rest, None)
    if schema is None:
        if first is None:
            raise InvalidArgument("no samples to infer the schema from; pass schema=")
        try:
            schema = infer_sample_schema(first)
        except SchemaError as error:
            raise SchemaError(f"sample 0: {error}") from error
    with DatasetWriter(out, schema, shard_bytes=shard_bytes) as writer:
        if first is None:
            writer.abort()
            return ConversionReport(
                Path(out), "samples", 0, 0, time.monotonic() - start_s, generation=0
            )
        for sample in _prepare_all(chain((first,), rest), schema):
            writer.append(sample)
        generation = writer.close()
    return ConversionReport(
        dataset=Path(out),
        kind="samples",
        n_samples=generation.n_samples,
        n_bytes=sum(shard.n_bytes for shard in generation.shards),
        elapsed_s=time.monotonic() - start_s,
    )


def append_samples(
    samples: Iterable[Mapping[str, Any]], out: str, schema: Schema | None, shard_bytes: int
) -> ConversionReport:
    """Append samples to the dataset at `out`, as its next generation.

    Raises:
        InvalidArgument: `schema` differs from the schema of the dataset.
        SchemaError: a sample does not match the schema; nothing is appended.
    """
    start_s = time.monotonic()
    base = load_base(out)
    if schema is not None:
        check_same_schema(base.schema, schema, out)
    n_samples = 0
    with GenerationWriter(out, base.schema, shard_bytes=shard_bytes, previous=base) as output:
        for sample in _prepare_all(samples, base.schema):
            output.append(sample)
            n_samples += 1
        found = latest = rebase(base, Path(out))
        if n_samples:
            output.follow(latest)
            stats = {key: value for key, value in latest.stats.items() if key != "whole"}
            found = output.publish(
                stats=stats,
                operation={"name": "append", "options": {"shard_bytes": shard_bytes}},
            )
    new = found.shards[len(latest.shards) :]
    return ConversionReport(
        dataset=Path(out),
        kind="samples",
        n_samples=n_samples,
        n_bytes=sum(shard.n_bytes for shard in new),
        elapsed_s=time.monotonic() - start_s,
        classes=found.classes,
        generation=found.number,
        n_samples_before=latest.n_samples,
        stats_dropped=found.stats != latest.stats,
    )


def _prepare_all(
    samples: Iterable[Mapping[str, Any]], schema: Schema
) -> Iterator[Mapping[str, Any]]:
    """Yield samples in the form that a writer accepts.

    Raises:
        SchemaError: a value cannot be stored; the message names sample and field.
    """
    for number, sample in enumerate(samples):
        try:
            found = prepare_sample(sample, schema)
        except SchemaError as error:
            raise SchemaError(f"sample {number}: {error}") from error
        yield found


_PLAIN: Final = frozenset((str, bytes, bool, int, float, np.ndarray, type(None)))
_PNG_MODES: Final = ("1", "L", "LA", "P", "RGB", "RGBA", "I;16")


def is_pillow_image(value: object) -> bool:
    """Return True for a Pillow image."""
    return is_of(value, "PIL", "Image")


def to_plain(value: Any, field: Field | None = None) -> Any:
    """Return a value in a form that a field can store.

    A tensor becomes an array, which shares its memory if it is on the CPU. A Pillow image becomes
    its pixels for an Array field, else a PNG file. Values in dicts, lists and tuples are converted
    too; other values are returned unchanged.

    Raises:
        SchemaError: PNG does not support the image mode, or the value could not be converted (for
            example, a sparse or meta tensor).
    """
    if type(value) in _PLAIN:
        return value
    try:
        return _to_plain(value, field)
    except (SchemaError, MemoryError):
        raise
    except Exception as error:
        kind = f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")
        raise SchemaError(f"a {kind} cannot be stored: {type(error).__name__}: {error}") from error


def _to_plain(value: Any, field: Field | None) -> Any:
    if isinstance(value, Mapping):
        return {name: to_plain(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [to_plain(each) for each in value]
    if is_of(value, "torch", "Tensor"):
        return _from_torch(value)
    if is_pillow_image(value):
        return np.asarray(value) if field and field.array else _encode_png(value)
    if isinstance(value, np.ndarray | np.generic):  # masked arrays are rejected later
        return value
    if callable(give := getattr(value, "numpy", None)):  # a tinygrad or TensorFlow tensor
        return give()
    return np.asarray(value) if hasattr(value, "__array__") else value


def _from_torch(tensor: Any) -> Any:
    if str(tensor.dtype) == "torch.bfloat16":
        tensor = tensor.view(sys.modules["torch"].int16)
        return tensor.numpy(force=True).view(np.uint16)
    return tensor.numpy(force=True)


def _encode_png(picture: Any) -> bytes:
    if picture.mode not in _PNG_MODES:
        raise SchemaError(
            f"a picture of mode {picture.mode}; expected one of {', '.join(_PNG_MODES)}: "
            'picture.convert("RGB")'
        )
    bare = picture.copy()
    bare.info = {}  # drop orientation and transparency, which are not in the pixels
    file = io.BytesIO()
    bare.save(file, format="PNG", compress_level=1)
    return file.getvalue()


def as_mapping(value: object, names: Sequence[str] | None = None) -> Mapping[str, Any]:
    """Return a sample as a mapping; the values of a tuple are named by `names`.

    Raises:
        SchemaError: the sample is not a mapping, and `names` is missing or has another length.
    """
    if isinstance(value, Mapping):
        return value
    if names is None:
        names = getattr(value, "_fields", None)  # a named tuple
    parts = value if isinstance(value, tuple | list) else (value,)
    if names is None:
        found = f"{type(value).__name__} of {len(parts)}" * isinstance(value, tuple | list)
        raise SchemaError(
            f"a sample must be a dict of fields, found a {found or type(value).__name__}; name "
            'its parts: names=("image", "label")'
        )
    if len(names) != len(parts):
        raise SchemaError(
            f"expected {len(parts)} names for {len(parts)} values; found {', '.join(names)}"
        )
    return dict(zip(names, parts, strict=True))


def infer_sample_schema(sample: Mapping[str, Any]) -> Schema:
    """Return the schema of one sample, as `infer_schema` does; a Pillow image becomes an Image.

    Raises:
        SchemaError: no field type can store a value.
    """
    values = {name: _to_plain_field(name, value) for name, value in sample.items()}
    found: dict[str, Field] = dict(infer_schema(values))
    for name, value in sample.items():
        if is_pillow_image(value):
            found[name] = Image()
        elif str(getattr(value, "dtype", "")) == "torch.bfloat16" and (array := found[name].array):
            found[name] = replace(array, dtype="bfloat16")
    return Schema(found)


def prepare_sample(sample: Mapping[str, Any], schema: Schema) -> dict[str, Any]:
    """Return a sample with plain values, and nested records under dotted names.

    Raises:
        SchemaError: as in `to_plain`; the message names the field.
    """
    flat = schema.flatten(sample)
    return {name: _to_plain_field(name, value, schema.get(name)) for name, value in flat.items()}


def _to_plain_field(name: str, value: Any, field: Field | None = None) -> Any:
    """Convert the value of a field as `to_plain` does; errors name the field."""
    try:
        return to_plain(value, field)
    except SchemaError as error:
        raise SchemaError(f"field {name!r}: {error}") from error
