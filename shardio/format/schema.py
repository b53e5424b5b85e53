"""The schema: the fields of a sample, by name.

Reader and writer both depend on this module; `fields` has the field types, `values` encodes samples
as bytes. A schema is stored as canonical JSON (UTF-8, keys sorted, no spaces) with stable integer
codes for types, dtypes and codecs; `docs/reference/format.md` lists them.
"""

from __future__ import annotations

import json
import unicodedata
from collections.abc import ItemsView, Iterator, KeysView, Mapping
from typing import Any, Final, NoReturn

from shardio._base.classes import cached_property
from shardio.errors import SchemaError, ShardUnsupported
from shardio.format.codecs import SPECS
from shardio.format.layout import Required
from shardio.format.types import (
    DTYPES,
    FIELD_TYPES,
    MEDIA,
    Array,
    Audio,
    Field,
    FieldType,
    Image,
    List,
    Video,
    array_of,
)

MAX_FIELDS: Final = 1024
MAX_NAME_BYTES: Final = 255
_SHOWN: Final = 40
"""Characters of an overlong name to show in messages."""
VARYING: Final = -1
"""The code of a varying dimension in the stored schema."""

_CLASSES: Final[dict[FieldType, type]] = {code: kind for kind, code in FIELD_TYPES.items()}
_FEATURES: Final[dict[type, Required]] = {
    List: Required.LISTS,
    Image: Required.IMAGES,
    Video: Required.VIDEOS,
    Audio: Required.AUDIO,
}
"""The feature that a reader needs for a field of a type."""


class Schema(Mapping[str, Field]):
    """The fields of a sample, by name, in the order given. Immutable.

    A name with dots is a field of a nested record: `{"camera": {"id": Text()}}` and `{"camera.id":
    Text()}` are the same schema, and `camera` is a *group*.

    Raises:
        SchemaError: there is no field, a name is not allowed, or a value is not a field type.
    """

    def __init__(self, fields: Mapping[str, Any]) -> None:
        self._fields: dict[str, Field] = {}
        for name, field in _leaves(fields):
            if name in self._fields:
                raise SchemaError(f"two fields are named {name!r}")
            self._fields[name] = field
        if not self._fields:
            raise SchemaError("a schema needs at least one field")
        if len(self._fields) > MAX_FIELDS:
            raise SchemaError(f"{len(self._fields)} fields; at most {MAX_FIELDS} are possible")
        self.groups: Final = frozenset(p for name in self._fields for p in _prefixes(name))
        """The names of nested records, which contain fields or further groups."""
        if both := self.groups & self._fields.keys():
            name = min(both)
            inner = next(each for each in self._fields if each.startswith(f"{name}."))
            raise SchemaError(
                f"field {name!r} stands beside field {inner!r}: names of fields and of nested "
                "records must differ"
            )
        self._ids = {name: i for i, name in enumerate(self._fields)}
        self.columns: Final[dict[str, Array]] = {
            n: f for n, f in self._fields.items() if isinstance(f, Array) and f.is_column
        }
        """The fields stored as columns, in schema order."""
        self.records: Final[dict[str, Field]] = {
            n: f for n, f in self._fields.items() if n not in self.columns
        }
        """The fields stored record by record in the payload, in schema order."""

    def __getitem__(self, name: str) -> Field:
        return self._fields[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._fields)

    def __len__(self) -> int:
        return len(self._fields)

    def keys(self) -> KeysView[str]:
        """Return the names, as quick to compare as those of a dict."""
        return self._fields.keys()

    def items(self) -> ItemsView[str, Field]:
        """Return names and fields, as quickly as a dict."""
        return self._fields.items()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Schema) and self.to_json() == other.to_json()

    def __hash__(self) -> int:
        return hash(self.to_json())

    def __repr__(self) -> str:
        return f"Schema({self._fields!r})"

    def field_id(self, name: str) -> int:
        """Return the stable integer of a field in section tables."""
        return self._ids[name]

    @cached_property
    def optional(self) -> tuple[str, ...]:
        """The fields that a sample may lack."""
        return tuple(name for name, field in self.items() if field.optional)

    @cached_property
    def required(self) -> Required:
        """The features that a reader needs because of the schema, independent of the samples."""
        found = Required.NESTED_NAMES if self.groups else Required(0)
        for field in self.values():
            if field.optional:
                found |= Required.OPTIONAL_FIELDS
            found |= _FEATURES.get(type(field), Required(0))
            found |= SPECS[field.codec].required_by_field
        return found

    def flatten(self, sample: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return a sample with the fields of nested records under their dotted names."""
        if not self.groups:
            return sample
        found: dict[str, Any] = {}
        for name, value in sample.items():
            self._flatten(str(name), value, found)
        return found

    def _flatten(self, name: str, value: object, found: dict[str, Any]) -> None:
        if name not in self.groups or not isinstance(value, Mapping):
            if name in found:
                raise SchemaError(f"field {name!r} is given twice")
            found[name] = value
            return
        for key, inner in value.items():
            self._flatten(f"{name}.{key}", inner, found)

    def to_json(self) -> bytes:
        """Return the canonical bytes that a shard stores."""
        return self._json

    @cached_property
    def _json(self) -> bytes:
        fields = [_describe(name, self._ids[name], field) for name, field in self.items()]
        return canonical_json({"fields": fields})

    @classmethod
    def from_json(cls, content: bytes) -> Schema:
        """Parse a schema from the bytes of a shard.

        Raises:
            SchemaError: the bytes are not canonical JSON, or break a rule.
            ShardUnsupported: a type, dtype or codec is unknown to this version.
        """
        try:
            parsed = read_json(content.decode("utf-8"))
        except (UnicodeDecodeError, ValueError, RecursionError) as error:
            raise SchemaError(f"the schema is not JSON in UTF-8: {error}") from error
        if not isinstance(parsed, dict) or set(parsed) != {"fields"}:
            raise SchemaError('the schema must be an object with the single key "fields"')
        if not isinstance(parsed["fields"], list):
            raise SchemaError('"fields" of the schema must be a list')
        fields: dict[str, Field] = {}
        for i, entry in enumerate(parsed["fields"]):
            name, field = _parse_field(i, entry)
            if name in fields:
                raise SchemaError(f"two fields are named {name!r}")
            fields[name] = field
        schema = cls(fields)
        if schema.to_json() != content:
            raise SchemaError("the schema is not in canonical form")
        return schema


def _leaves(fields: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Field]]:
    """Yield the fields of a schema, those of nested records by their dotted names."""
    for key, field in fields.items():
        _check_name(key)
        name = prefix + key
        if isinstance(field, Mapping):
            if not field:
                raise SchemaError(f"the nested record {name!r} has no fields")
            yield from _leaves(field, f"{name}.")
            continue
        if type(field) not in FIELD_TYPES:
            types = ", ".join(kind.__name__ for kind in FIELD_TYPES)
            raise SchemaError(f"field {name!r} is {field!r}; expected one of {types}, or a dict")
        if len(name.encode()) > MAX_NAME_BYTES:
            raise _too_long(name)
        yield name, field


def _prefixes(name: str) -> Iterator[str]:
    """Yield the nested records that contain a field."""
    for i, character in enumerate(name):
        if character == ".":
            yield name[:i]


def _check_name(name: object) -> None:
    if not isinstance(name, str) or not name:
        raise SchemaError(f"a field's name must be a non-empty string; found {name!r}")
    if not all(name.split(".")):
        raise SchemaError(f"field {name!r}: a part of a dotted name is empty")
    try:
        n_bytes = len(name.encode("utf-8"))
    except UnicodeEncodeError as error:
        raise SchemaError(f"field {name!r} cannot be written in UTF-8") from error
    if n_bytes > MAX_NAME_BYTES:
        raise _too_long(name)
    if not _is_printable(name):
        raise SchemaError(
            f"field {name!r}: at most {MAX_NAME_BYTES} bytes of printable characters are allowed"
        )


def _too_long(name: str) -> SchemaError:
    """Return the error for an overlong name; it shows the first characters."""
    return SchemaError(
        f"field {name[:_SHOWN] + '…'!r}: a name has at most {MAX_NAME_BYTES} bytes, "
        f"found {len(name.encode())}"
    )


def _is_printable(name: str) -> bool:
    """Return True if a name has no control or similar characters.

    Characters unknown to this Python's tables are accepted: a newer Python may have written them.
    """
    return name.isprintable() or all(
        c.isprintable() or unicodedata.category(c) == "Cn" for c in name
    )


def _describe(name: str, field_id: int, field: Field) -> dict[str, object]:
    entry: dict[str, object] = {
        "codec": int(SPECS[field.codec].code),
        "id": field_id,
        "name": name,
        "type": int(FIELD_TYPES[type(field)]),
    }
    if field.optional:
        entry["optional"] = True
    array = array_of(field)
    if array is not None:
        entry["dtype"] = int(DTYPES[array.dtype])
        entry["shape"] = [VARYING if d is None else d for d in array.shape]
    return entry


def _parse_field(position: int, entry: object) -> tuple[str, Field]:
    if not isinstance(entry, dict):
        raise SchemaError(f"field {position} of the schema is not an object")
    name = entry.get("name")
    for key in ("codec", "id", "type"):
        if type(entry.get(key)) is not int:
            raise SchemaError(f"field {name!r} of the schema: {key!r} must be an integer")
    if entry["id"] != position:
        raise SchemaError(f"field {name!r}: expected id {position}, found {entry['id']}")
    codec = _named("codec", entry["codec"], {one.code: one.name for one in SPECS.values()}, name)
    kind = _named("field type", entry["type"], _CLASSES, name)
    optional = entry.get("optional", False)
    if kind in MEDIA:
        if codec != kind.codec:
            raise SchemaError(f"field {name!r}: {kind.__name__} is never compressed; found {codec}")
        return str(name), kind(optional=optional)
    if kind not in (Array, List):
        return str(name), kind(codec, optional=optional)
    dtype, shape = _parse_array(name, entry)
    if kind is List:
        return str(name), List(Array(dtype, shape), codec, optional=optional)
    return str(name), Array(dtype, shape, codec, optional=optional)


def _parse_array(name: object, entry: dict[str, Any]) -> tuple[str, tuple[int | None, ...]]:
    """Return the dtype and the shape of an array, or of the arrays in a list."""
    if type(entry.get("dtype")) is not int:
        raise SchemaError(f"field {name!r} of the schema: 'dtype' must be an integer")
    dtype: str = _named("dtype", entry["dtype"], {v: k for k, v in DTYPES.items()}, name)
    shape = entry.get("shape")
    if not isinstance(shape, list) or not all(type(d) is int for d in shape):
        raise SchemaError(f"field {name!r}: the shape must be a list of integers")
    return dtype, tuple(None if d == VARYING else d for d in shape)


def _named(what: str, code: object, known: Mapping[Any, Any], name: object) -> Any:
    if code not in known:
        raise ShardUnsupported(
            f"field {name!r} has {what} {code!r}, which this version cannot read"
        )
    return known[code]


_CANONICAL: Final = json.JSONEncoder(
    ensure_ascii=False, sort_keys=True, separators=(",", ":"), allow_nan=False
)


def canonical_json(value: object) -> bytes:
    """Return a value as shardio's canonical JSON: UTF-8, keys sorted, no spaces, no NaN.

    Raises:
        SchemaError: JSON cannot express the value.
    """
    try:
        return _CANONICAL.encode(value).encode("utf-8")
    except (TypeError, ValueError, RecursionError) as error:
        raise SchemaError(f"a value cannot be written as JSON: {error}") from error


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")


read_json: Final = json.JSONDecoder(parse_constant=_refuse_constant).decode
"""Parse JSON text. Raises ValueError for invalid text, including NaN and Infinity."""
