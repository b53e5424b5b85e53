"""Field specs (strings such as `float32[3,*]`), and the base of converters that infer fields."""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib.metadata import version
from typing import Any, ClassVar, Final

import numpy as np

from shardio import (
    Array,
    Audio,
    Bytes,
    Converter,
    Image,
    Input,
    InvalidArgument,
    Json,
    List,
    MediaError,
    Schema,
    ShardioError,
    Text,
    Video,
)
from shardio.media import library_versions

Field = Any
"""A field type of shardio; the base class of the types is not public."""
REFERENCES: Final[dict[str, Any]] = {"file": Bytes, "image": Image, "video": Video, "audio": Audio}
"""The field types whose values are file names in tables. The keys are the names in specs."""
_NAMED: Final[dict[str, Any]] = {"text": Text, "json": Json, "bytes": Bytes, **REFERENCES}
# NumPy dtypes that are stored as they are
DTYPES: Final = tuple(
    "bool int8 int16 int32 int64 uint8 uint16 uint32 uint64 float16 float32 float64".split()
)
_LIST: Final = re.compile(r"list\[(.+)\](\?)?")
_SPEC: Final = re.compile(r"(\w+)(?:\[((?:\d+|\*)(?:,(?:\d+|\*))*)\])?(\?)?")


def format_spec(dtype: str, shape: tuple[int | None, ...] = (), *, optional: bool = False) -> str:
    """Return the spec of a field; `dtype` is the dtype of an Array, or a type such as `text`.

    In the shape, `*` is a varying dimension; a trailing `?` means optional.
    """
    dims = ",".join("*" if n is None else str(n) for n in shape)
    return f"{dtype}{f'[{dims}]' if shape else ''}{'?' if optional else ''}"


def parse_field(name: str, spec: Any) -> Field:
    """Return the field that a spec declares."""
    if isinstance(spec, str) and (of := _LIST.fullmatch(spec)):
        element = parse_field(name, of[1])
        if not element.array or element.optional:
            raise InvalidArgument(f"field {name!r}: found {spec!r}; expected a list of arrays")
        return List(element, optional=bool(of[2]))
    found = _SPEC.fullmatch(spec) if isinstance(spec, str) else None
    try:
        if found is None:
            raise InvalidArgument(
                f"expected a dtype, or one of {', '.join(_NAMED)}, then [dimensions], then ?"
            )
        kind, dims, mark = found.groups()
        if kind in _NAMED:
            if dims is not None:
                raise InvalidArgument(f"{kind} has no dimensions")
            return _NAMED[kind](optional=bool(mark))
        shape = tuple(None if n == "*" else int(n) for n in (dims or "").split(",") if n)
        return Array(kind, shape, optional=bool(mark))
    except ShardioError as error:
        raise InvalidArgument(f"field {name!r}: found {spec!r}; {error}") from error


def are_compatible_names(names: Iterable[str]) -> bool:
    """Return True if one sample can have fields with all these names; `x` excludes `x.y`."""
    return not _names_error(tuple(names))


def check_names(names: Iterable[str], what: str, hint: str = "rename it or leave it out") -> None:
    """Check names for the fields of one sample; `what` is the plural noun for messages."""
    every = tuple(names)
    if len({*every}) < len(every):
        twice = next(name for name, n in Counter(every).items() if n > 1)
        raise MediaError(f"two {what} would become the field {twice!r}; {hint}")
    if every and (why_not := _names_error(every)):
        raise MediaError(f"names of {what} must be valid field names: {why_not}; {hint}")


@lru_cache(maxsize=16)  # the files of a conversion usually have the same field names
def _names_error(names: tuple[str, ...]) -> str:
    """Return why names cannot be the fields of one sample; "" if they can."""
    try:
        Schema(dict.fromkeys(names, Json()))
    except ShardioError as error:
        return str(error)
    return ""


def parse_schema(fields: Any) -> Schema:
    """Return the schema that specs declare."""
    if not isinstance(fields, Mapping) or not fields:
        raise InvalidArgument(f"fields is {fields!r}; expected a mapping of names to types")
    try:
        return Schema({name: parse_field(name, spec) for name, spec in fields.items()})
    except InvalidArgument:
        raise
    except ShardioError as error:
        raise InvalidArgument(f"the fields are not a schema: {error}") from error


def schema_of(fields: Mapping[str, str]) -> Schema:
    """Return the schema of valid specs, from a cache."""
    return _schema_of(tuple(fields.items()))


@lru_cache(maxsize=16)
def _schema_of(fields: tuple[tuple[str, str], ...]) -> Schema:
    return parse_schema(dict(fields))


def refuse_other(dtype: str, shape: Sequence[int | None], field: Array) -> None:
    """Check dtype and shape of an array against its field."""
    if dtype != field.dtype or not fits(shape, field.shape):
        wanted, found = format_spec(field.dtype, field.shape), format_spec(dtype, tuple(shape))
        raise MediaError(f"expected {wanted}, found {found}")


def fits(shape: Sequence[int | None], expected: Sequence[int | None]) -> bool:
    """Return True if `shape` fits a field of shape `expected`, in which None is any size."""
    return len(shape) == len(expected) and all(
        want in (None, n) for n, want in zip(shape, expected, strict=True)
    )


STEP_S: Final = 120.0  # damaged files make some C libraries, such as HDF5, loop forever


@dataclass(frozen=True, kw_only=True)
class InferringConverter(Converter):
    """A base of converters with an option `fields`: specs by name, or None to infer them.

    Samples also have additional fields, except those whose names `fields` declares. `keeps_order`
    is True if the fields of a dataset are in the order of `fields`, instead of sorted by name.
    """

    fields: Mapping[str, str] | None = dataclasses.field(
        default=None, metadata={"flag": "--schema"}
    )
    """JSON file with the field types (default: inferred from the files)."""
    keeps_order: ClassVar[bool] = False

    def __post_init__(self) -> None:
        """Validate the fields; sort them by name unless `keeps_order`."""
        if self.fields is None:
            return
        for name, field in parse_schema(self.fields).items():
            self.check_field(name, self.fields[name], field)
        fields = self.fields.items()
        object.__setattr__(self, "fields", dict(fields if self.keeps_order else sorted(fields)))

    def check_field(self, name: str, word: str, field: Field) -> None:
        """Check that files can provide a field; `word` is its spec."""

    def all_additional_fields(self) -> Mapping[str, str]:
        """Return the specs of all possible additional fields."""
        return {"label": "int64", "source": "text"}

    def additional_fields(self) -> dict[str, str]:
        """Return the specs of the additional fields that `fields` does not declare."""
        taken = {name.partition(".")[0] for name in self.fields or ()}
        return {
            name: spec for name, spec in self.all_additional_fields().items() if name not in taken
        }

    def additional_values(self, source: Input, /, **others: Any) -> dict[str, Any]:
        """Return the values of the additional fields: `label` and `source`, and `others`."""
        every = {"label": np.int64(source.label), "source": source.name, **others}
        return {name: every[name] for name in self.additional_fields()}

    def schema(self) -> Schema:
        """Return the fields of a sample."""
        if self.fields is None:
            raise InvalidArgument("fields are unknown: pass them, or infer them with fitted()")
        return schema_of(self.ordered(self.fields))

    def ordered(self, fields: Mapping[str, str]) -> dict[str, str]:
        """Return all field specs in the order of the dataset."""
        return {**fields, **self.additional_fields()}

    def refuse_missing(self, found: Collection[str], what: str) -> None:
        """Check that a file has all required fields; `what` is the noun for a field."""
        schema = self.schema()
        for name in self.fields or ():
            if name not in found and not schema[name].optional:
                raise MediaError(f"{what} {name!r} is missing, found {', '.join(sorted(found))}")

    def label_is_class(self) -> bool:
        """Return True unless the files have a field `label`."""
        return "label" in self.additional_fields()

    def class_names(self) -> Sequence[str] | None:
        """Return () if the files have labels; None to take the folders as classes."""
        return None if "label" in self.additional_fields() else ()

    def libraries(self) -> Mapping[str, str]:
        """Return the versions of the libraries that probe media."""
        found = [*schema_of(self.fields).values()] if self.fields else []
        streams = any(field.is_streamed for field in found)
        pictures = any(field.medium == "image" for field in found)
        return {
            **(library_versions() if streams else {}),
            **({name: version(name) for name in ("pillow", "simplejpeg")} if pictures else {}),
        }
