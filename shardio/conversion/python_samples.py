"""Samples from Python values, and items that workers convert.

Like a file, an item is an input. The items of a map-style data set are indices, or ranges of
indices. Tensors and Pillow images are recognized by the names of their classes, without importing
torch or Pillow.
"""

from __future__ import annotations

import io
import json
import os
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import InitVar, dataclass, is_dataclass, replace
from pickle import loads
from typing import Any, ClassVar, Final

import numpy as np

from shardio._base.progress import counted
from shardio._workers.processes.serialization import pickled
from shardio.batch.batch import Batch
from shardio.batch.schema_inference import infer_schema
from shardio.conversion.append import known_classes, load_base
from shardio.conversion.classes import check_label, check_label_field
from shardio.conversion.converter import ITEMS, Converter, Input, Item, Outcome
from shardio.conversion.execution import ConvertOptions, convert_inputs
from shardio.conversion.inputs import Listing
from shardio.conversion.report import ConversionReport
from shardio.dataset.manifest import check_classes
from shardio.errors import InvalidArgument, MediaError, SchemaError
from shardio.format.checksum import hash_bytes
from shardio.format.schema import Schema
from shardio.format.types import Field, Image
from shardio.format.types.array_values import is_of
from shardio.shard.writer import check_names, encode_media

SampleFunction = Callable[[Any], Any]


_PLAIN: Final = frozenset((str, bytes, bool, int, float, np.ndarray, type(None)))
_PNG_MODES: Final = ("1", "L", "LA", "P", "RGB", "RGBA", "I;16")


def is_pillow_image(value: object) -> bool:
    """Return True if a value is a Pillow image."""
    return is_of(value, "PIL", "Image")


def to_plain(value: Any, field: Field | None = None) -> Any:
    """Return a value in a form that a field can store, or raise SchemaError.

    A tensor becomes an array; the array shares the memory of a tensor on the CPU. A Pillow image
    becomes an array of its pixels if `field` is an Array, otherwise the bytes of a PNG file.
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
    if isinstance(value, np.ndarray | np.generic):  # A later check rejects masked arrays.
        return value
    if callable(give := getattr(value, "numpy", None)):  # a tensor of tinygrad or TensorFlow
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
    bare.info = {}  # Do not store an orientation or a transparent colour in the PNG.
    file = io.BytesIO()
    bare.save(file, format="PNG", compress_level=1)
    return file.getvalue()


def as_mapping(value: object, names: Sequence[str] | None = None) -> Mapping[str, Any]:
    """Return a sample as a mapping. If it is a tuple, `names` are the names of its values."""
    if isinstance(value, Batch):
        raise SchemaError("a batch would be stored as one sample: pass samples one by one")
    if isinstance(value, Mapping):
        if names is not None and set(names) != value.keys():
            keys = ", ".join(map(str, value))
            raise SchemaError(
                f"names= is for samples that are tuples; this one is a dict of {keys}: leave names "
                "out"
            )
        return value
    if names is None:
        names = getattr(value, "_fields", None)  # the names in a named tuple
    parts = value if isinstance(value, tuple | list) else (value,)
    if value is None:
        raise SchemaError("a sample must be a dict of fields, found None; leave it out")
    if names is None and isinstance(value, str | os.PathLike):
        raise SchemaError(
            f"a sample must be a dict of fields, found a {type(value).__name__}; if these are "
            "paths, pass their folder or a pattern, or a function that reads a path: samples="
        )
    if names is None and is_dataclass(value):
        raise SchemaError(
            f"a sample must be a dict of fields, found the dataclass {type(value).__name__}; write "
            "dataclasses.asdict(sample)"
        )
    if names is None:
        is_tuple = isinstance(value, tuple | list)
        found = f"a {type(value).__name__} of {len(parts)}" if is_tuple else type(value).__name__
        names_shown = 'its parts: names=("image", "label")' if is_tuple else 'it: names=["image"]'
        raise SchemaError(f"a sample must be a dict of fields, found {found}; name {names_shown}")
    if len(names) != len(parts):
        n = counted(len(parts), "names")
        raise SchemaError(f"expected {n}, one for each value of a sample; found {', '.join(names)}")
    return dict(zip(names, parts, strict=True))


def infer_sample_schema(sample: Mapping[str, Any]) -> Schema:
    """Infer the schema of a sample, which may have Pillow images and bfloat16 tensors."""
    values = {name: _to_plain_field(name, value) for name, value in sample.items()}
    found: dict[str, Field] = dict(infer_schema(values))
    for name, value in sample.items():
        if is_pillow_image(value):
            found[name] = Image()
        elif str(getattr(value, "dtype", "")) == "torch.bfloat16" and (array := found[name].array):
            found[name] = replace(array, dtype="bfloat16")
    return Schema(found)


def prepare_sample(sample: Mapping[str, Any], schema: Schema) -> dict[str, Any]:
    """Return a flat sample in which each value has a form that its field can store."""
    flat = schema.flatten(sample)
    return {name: _to_plain_field(name, value, schema.get(name)) for name, value in flat.items()}


def _to_plain_field(name: str, value: Any, field: Field | None = None) -> Any:
    try:
        return to_plain(value, field)
    except SchemaError as error:
        raise SchemaError(f"field {name!r}: {error}") from error


def convert_items(
    items: Iterable[Any],
    make: SampleFunction,
    function: str,
    out: str | os.PathLike[str],
    options: ConvertOptions,
    schema: Schema | None,
    names: Sequence[str] | None,
    classes: tuple[str, ...] = (),
) -> ConversionReport:
    """Convert items to a new dataset, or append their samples to an existing one.

    `make` returns the samples of one item, and `function` is its name, which the dataset records.
    `classes` are the class names of the field `label`, unless the options name them.
    """
    options.check_for_inputs(None)
    base = load_base(out) if options.append else None
    given = options.converter_options.get("classes")
    classes = classes if given is None else check_classes(given)
    recorded = None if given is None else classes
    if base is not None:
        recorded = base.converter.get("options", {}).get("classes")
    staging = options.make_staging(out)
    listing = list_items(items)
    parts = None if names is None else tuple(names)
    if schema is None:
        schema = base.schema if base is not None else infer_item_schema(make, listing.inputs, parts)
    if given is not None:
        check_label_field(schema)
    if "label" in schema:
        listing = replace(listing, classes=known_classes(base, classes, out))
    checked = recorded if given is None else classes
    n_labels = None if checked is None else len(checked)
    source = ItemSource(function, parts, recorded, make, schema, n_labels)
    job = options.make_job(source, base, staging)
    return convert_inputs(listing, staging, job, options)


_MAX_NAME: Final = 200  # the maximum length of the name of an item, in characters


def list_items(items: Iterable[Any]) -> Listing:
    """Return a listing of items in the given order, each with a unique name."""
    found: list[Item] = []
    seen: Counter[str] = Counter()
    for item in items:
        packed = pickled(item, "pass what it is made from, and create it in the function")
        text = _encode_json(item)
        content = text.encode() or packed
        number = hash_bytes(content)
        name = _item_name(item, text, number)
        seen[name] += 1
        while seen[name] > 1:  # Number the items that have the name of an earlier item.
            name = f"{name} ({seen[name]})"
            seen[name] += 1
        found.append(
            Item(name, name, len(content), -1, (number, 0), hash=f"{number:016x}", packed=packed)
        )
    if not found:
        raise InvalidArgument("no items to make samples from")
    return Listing(tuple(found), ())


def _encode_json(item: Any) -> str:
    try:
        return json.dumps(item, sort_keys=True, default=os.fspath)
    except (TypeError, ValueError, RecursionError):
        return ""


def _item_name(item: Any, text: str, number: int) -> str:
    if isinstance(item, os.PathLike):
        item = os.fspath(item)
    if isinstance(item, str) and item:
        text = item.encode("utf-8", "backslashreplace").decode()
    elif not text:
        text = f"{type(item).__name__} {number:016x}"
    return text if len(text) <= _MAX_NAME else f"{text[:_MAX_NAME]}… {number:016x}"


_MAX_SCHEMA_ITEMS: Final = 64
"""The maximum number of items that are tried, in order, to get a sample for the schema."""
_NO_SAMPLE: Final = object()


@dataclass(frozen=True)
class ItemSource(Converter):
    """A converter that calls `make` for each item; `fields` is the schema of the samples.

    `classes` are the names that the dataset records for labels. Labels must be less than `n_labels`
    if it is given.
    """

    kind: ClassVar[str] = ITEMS
    version: ClassVar[str] = "1"

    function: str
    names: tuple[str, ...] | None = None
    classes: Sequence[str] | None = None
    make: InitVar[SampleFunction | None] = None
    fields: InitVar[Schema | None] = None
    n_labels: InitVar[int | None] = None

    def __post_init__(
        self, make: SampleFunction | None, fields: Schema | None, n_labels: int | None
    ) -> None:
        object.__setattr__(self, "_make", make)
        object.__setattr__(self, "_schema", fields)
        object.__setattr__(self, "_n_labels", n_labels)

    def schema(self) -> Schema:
        """Return the schema of the samples."""
        schema: Schema = vars(self)["_schema"]
        return schema

    def samples(self, source: Input) -> Generator[Mapping[str, Any], None, Outcome]:
        """Yield the samples of an item; raise MediaError if `make` raises an exception."""
        n_samples, n_labels = 0, vars(self)["_n_labels"]
        for value in _call(vars(self)["_make"], _unpickle(source), self.names):
            try:
                sample = validate_sample(as_mapping(value, self.names), self.schema())
                if n_labels is not None:
                    check_label(sample, n_labels)
            except (MediaError, SchemaError) as error:
                raise MediaError(f"sample {n_samples}: {error}") from error
            except Exception as error:  # A user-defined mapping may raise any exception.
                raise MediaError(f"sample {n_samples}: {_format_error(error)}") from error
            yield sample
            n_samples += 1
        return Outcome("converted") if n_samples else Outcome("empty", "gave no sample")


def _unpickle(source: Input) -> Any:
    if not isinstance(source, Item):
        raise MediaError("expected an item, found a file")
    try:
        return loads(source.packed)
    except Exception as error:
        raise MediaError(f"cannot be unpickled in a worker: {_format_error(error)}") from error


def _call(make: SampleFunction, item: Any, names: tuple[str, ...] | None) -> Iterator[Any]:
    """Yield the samples that `make` returns for an item; raise its exceptions as MediaError."""
    try:
        found = make(item)
        if found is None:
            return
        yield from [found] if _is_one_sample(found, names) else found
    except MediaError:
        raise
    except Exception as error:
        raise MediaError(_format_error(error)) from error


def _is_one_sample(found: Any, names: tuple[str, ...] | None) -> bool:
    """Return True for a dict, a tuple of values, or one value; False for several samples."""
    if isinstance(found, np.ndarray) and found.dtype == object:
        return False
    if isinstance(found, Mapping | str | bytes | os.PathLike) or hasattr(found, "__array__"):
        return True
    if isinstance(found, tuple) and found:
        return names is not None or not all(isinstance(each, Mapping) for each in found)
    return not isinstance(found, Iterable)


def _format_error(error: Exception) -> str:
    """Describe an exception, with the file and the line of the code that raised it."""
    text = "".join(traceback.format_exception_only(error)).strip()
    frames = traceback.extract_tb(error.__traceback__)
    if not frames:
        return text
    return f"{text} ({os.path.basename(frames[-1].filename)}, line {frames[-1].lineno})"


def validate_sample(sample: Mapping[str, Any], schema: Schema) -> dict[str, Any]:
    """Check all values of a sample, and return it in the form that a writer accepts."""
    found = prepare_sample(sample, schema)
    check_names(found, schema)
    for name, value in found.items():
        field = schema[name]
        if value is None and field.optional:
            continue
        found[name] = value = encode_media(name, field, value)
        field.record_encoder(name)(value)
    return found


def infer_item_schema(
    make: SampleFunction, inputs: Sequence[Input], names: tuple[str, ...] | None
) -> Schema:
    """Return the schema of the first sample from which a schema can be inferred."""
    first_error: Exception | None = None
    for one in inputs[:_MAX_SCHEMA_ITEMS]:
        try:
            found = next(_call(make, _unpickle(one), names), _NO_SAMPLE)
        except MediaError as error:
            error.add_note(f"while making samples of {one.name}")
            first_error = first_error or error
            continue
        if found is _NO_SAMPLE:
            continue
        sample = as_mapping(found, names)
        try:
            return _infer(sample)
        except SchemaError as error:  # A later item may give a valid sample.
            error.add_note(f"while making samples of {one.name}")
            first_error = first_error or error
    if isinstance(first_error, SchemaError):
        raise first_error
    reason = f"; the first error: {first_error}" if first_error else ""
    raise InvalidArgument(
        f"none of the first {min(_MAX_SCHEMA_ITEMS, len(inputs))} items gives a sample to infer "
        f"the schema from; pass schema={reason}"
    ) from first_error


def _infer(sample: Mapping[str, Any]) -> Schema:
    """Return the schema of a sample; raise SchemaError also if user code raises an exception."""
    try:
        return infer_sample_schema(sample)
    except SchemaError:
        raise
    except Exception as error:
        raise SchemaError(_format_error(error)) from error


MAX_ITEMS: Final = 16_384
"""The maximum number of items for a map-style data set, because the report lists every item."""


def is_map_style(src: object, workers: int | None) -> bool:
    """Return True if samples are read from a source by index instead of by iteration.

    The result is False for a torch IterableDataset: its inherited `__getitem__` always raises.
    """
    kind = type(src)
    if not (hasattr(kind, "__getitem__") and hasattr(kind, "__len__")):
        return False
    if isinstance(src, Mapping) or is_of(src, "torch", "IterableDataset"):
        return False
    return workers is not None or not hasattr(kind, "__iter__")


def samples_at(dataset: Any, run: int | tuple[int, int]) -> Iterator[Any]:
    """Yield the samples of a map-style data set at `run`.

    `run` is an index, or the first and the last index of a range.
    """
    first, last = (run, run) if isinstance(run, int) else run
    for position in range(first, last + 1):
        try:
            value = dataset[position]
        except Exception as error:
            error.add_note(f"at position {position}")
            raise
        if value is None:
            raise MediaError(f"position {position}: expected a sample, found None")
        yield value


def index_runs(n: int) -> list[int | tuple[int, int]]:
    """Return the items for a map-style data set of length `n`: indices, or ranges of indices."""
    n_run = 1 << max(0, -(-n // MAX_ITEMS) - 1).bit_length()
    if n_run == 1:
        return list(range(n))
    return [(first, min(first + n_run, n) - 1) for first in range(0, n, n_run)]
