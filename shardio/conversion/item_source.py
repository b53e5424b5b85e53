"""What makes samples of items: a function of the user, with its samples checked."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import InitVar, dataclass
from pickle import loads
from typing import Any, ClassVar, Final

from shardio.conversion.source import Input, Item, Outcome
from shardio.conversion.values import infer_fields, named, ready
from shardio.errors import InvalidArgument, MediaError, SchemaError
from shardio.format.fields import Array, Audio, Video
from shardio.format.schema import Schema
from shardio.format.values import encode_array, encode_record, encode_stream
from shardio.shard.encoded import as_encoded

_MAX_TRIED: Final = 64
"""Items that are looked at, at most, for one that gives a sample to take the fields from."""

_NO_SAMPLE: Final = object()
MakesSamples = Callable[[Any], Any]


@dataclass(frozen=True)
class ItemSource:
    """Makes samples of items: what `make` gives for one, a dict, several, or None for no sample.

    `function` is its name, as it is recorded; `names` are those of a tuple's parts.
    """

    kind: ClassVar[str] = "items"
    version: ClassVar[str] = "1"

    function: str
    names: tuple[str, ...] | None = None
    make: InitVar[MakesSamples | None] = None
    fields: InitVar[Schema | None] = None

    def __post_init__(self, make: MakesSamples | None, fields: Schema | None) -> None:
        object.__setattr__(self, "_make", make)
        object.__setattr__(self, "_schema", fields)

    def schema(self) -> Schema:
        """Give the fields of a sample."""
        schema: Schema = vars(self)["_schema"]
        return schema

    def libraries(self) -> Mapping[str, str]:
        """Give nothing: what the function uses is not known."""
        return {}

    def samples(self, source: Input) -> Generator[Mapping[str, Any], None, Outcome]:
        """Yield the samples of an item.

        Raises:
            MediaError: the function raised, or a sample is not what the schema says.
        """
        n_samples = 0
        for value in _made(vars(self)["_make"], _unpacked(source)):
            try:
                sample = checked(named(value, self.names), self.schema())
            except (MediaError, SchemaError) as error:
                raise MediaError(f"sample {n_samples}: {error}") from error
            except Exception as error:  # from a class of the user's, such as a mapping
                raise MediaError(f"sample {n_samples}: {_told(error)}") from error
            yield sample
            n_samples += 1
        return Outcome("converted") if n_samples else Outcome("empty", "gave no sample")


def _unpacked(source: Input) -> Any:
    if not isinstance(source, Item):
        raise MediaError("expected an item, found a file")
    try:
        return loads(source.packed)
    except Exception as error:
        raise MediaError(f"cannot be unpickled in a worker: {_told(error)}") from error


def _made(make: MakesSamples, item: Any) -> Iterator[Any]:
    """What a function gives for an item, one after another.

    Raises:
        MediaError: it raised, or gave nothing that can be iterated over.
    """
    try:
        found = make(item)
        if found is None:
            return
        yield from [found] if isinstance(found, Mapping) else found
    except MediaError:
        raise
    except Exception as error:
        raise MediaError(_told(error)) from error


def _told(error: Exception) -> str:
    """An error in a line, with the line of code that raised it."""
    text = "".join(traceback.format_exception_only(error)).strip()
    frames = traceback.extract_tb(error.__traceback__)
    if not frames:
        return text
    return f"{text} ({os.path.basename(frames[-1].filename)}, line {frames[-1].lineno})"


def checked(sample: Mapping[str, Any], schema: Schema) -> dict[str, Any]:
    """A sample as a writer takes it: all of it is proved to fit.

    Raises:
        SchemaError: it does not fit.
        MediaError: a picture, video or sound cannot be read.
    """
    found = ready(sample, schema)
    missing = [n for n, f in schema.items() if n not in found and not f.optional]
    extra = [str(n) for n in found if n not in schema]
    if missing or extra:
        raise SchemaError(f"fields missing: {missing}, not in the schema: {extra}")
    for name, value in found.items():
        field = schema[name]
        if value is None and field.optional:
            continue
        if isinstance(field, Array):
            encode_array(name, field, value)
            continue
        found[name] = value = as_encoded(name, field, value)
        if isinstance(field, Video | Audio):
            encode_stream(name, field, value)
        else:
            encode_record(name, field, value)
    return found


def infer_of(make: MakesSamples, inputs: Sequence[Input], names: tuple[str, ...] | None) -> Schema:
    """The schema of the first sample that the items give.

    Raises:
        InvalidArgument: the first items give none.
        SchemaError: it is no sample, or no value of the first items can be stored.
    """
    first_error: Exception | None = None
    for one in inputs[:_MAX_TRIED]:
        try:
            found = next(_made(make, _unpacked(one)), _NO_SAMPLE)
        except MediaError as error:
            error.add_note(f"while making samples of {one.name}")
            first_error = first_error or error
            continue
        if found is _NO_SAMPLE:
            continue
        sample = named(found, names)
        try:
            return _inferred(sample)
        except SchemaError as error:  # this item only: later items may be storable
            error.add_note(f"while making samples of {one.name}")
            first_error = first_error or error
    if isinstance(first_error, SchemaError):
        raise first_error
    reason = f"; the first error: {first_error}" if first_error else ""
    raise InvalidArgument(
        f"none of the first {min(_MAX_TRIED, len(inputs))} items gives a sample to take "
        f"the schema from; give schema={reason}"
    ) from first_error


def _inferred(sample: Mapping[str, Any]) -> Schema:
    """Return the schema of a sample.

    Raises:
        SchemaError: a value cannot be stored, or the sample's own class raised an error.
    """
    try:
        return infer_fields(sample)
    except SchemaError:
        raise
    except Exception as error:
        raise SchemaError(_told(error)) from error
