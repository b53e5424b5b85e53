"""The schema of a shard: the fields of a sample, by name.

A schema is stored as canonical JSON. The integer codes of types, dtypes and codecs never change
their meaning; `docs/reference/format.md` lists them.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, ItemsView, Iterable, Iterator, KeysView, Mapping
from typing import TYPE_CHECKING, Any, Final

from shardio._base.callers import ANY_OPTION, missing_attribute, refuses, unknown_field
from shardio._base.classes import Listed, cached_property, listed
from shardio._base.html import format_shape, fragment, table
from shardio.errors import SchemaError
from shardio.format.codecs import SPECS
from shardio.format.layout import Required
from shardio.format.types import FIELD_TYPES, Array, Field
from shardio.format.types.field import look_up
from shardio.format.types.text import canonical_json, read_json

MAX_FIELDS: Final = 1024
MAX_NAME_BYTES: Final = 255
_SHOWN_LENGTH: Final = 40
"""Messages show this number of characters of a name that is too long."""

_ADVICE: Final = {
    **dict.fromkeys(("column_names", "field_names", "names"), "write list(schema)"),
    **dict.fromkeys(("features", "fields", "to_dict", "types"), "write dict(schema)"),
    **dict.fromkeys(("dtype", "dtypes"), "write schema[name].dtype"),
    **dict.fromkeys(("shape", "shapes"), "write schema[name].shape"),
}
"""Attributes of other libraries' schemas, and what to write instead."""
_AS_A_DICT: Final = 'write the fields as a dict, Schema({"image": shardio.Image()})'


@refuses({ANY_OPTION: _AS_A_DICT, "fields": "a dict, such as {'image': shardio.Image()}"}, "Schema")
class Schema(Mapping[str, Field], Listed):
    """The fields of a sample, by name, in the order given. Immutable.

    A field whose name has dots is a field of a nested record: `{"camera": {"id": Text()}}` and
    `{"camera.id": Text()}` are the same schema, and the nested record `camera` is a *group*.

    Raises:
        SchemaError: there is no field, a name is not allowed, or a value is not a field type.
    """

    _public = "get items keys values"

    def __init__(self, fields: Mapping[str, Any]) -> None:
        self._fields: dict[str, Field] = {}
        if not isinstance(fields, Mapping):
            raise SchemaError(f"{_AS_A_DICT}; found {type(fields).__name__}")
        for name, field in _leaves(fields):
            if name in self._fields:
                raise SchemaError(f"two fields are named {name!r}")
            self._fields[name] = field
        if not self._fields:
            raise SchemaError("a schema needs at least one field")
        if len(self._fields) > MAX_FIELDS:
            raise SchemaError(f"{len(self._fields)} fields; at most {MAX_FIELDS} are possible")
        self.groups: Final = frozenset(
            name[:i]
            for name in self._fields
            for i, character in enumerate(name)
            if character == "."
        )
        """The names of nested records, which contain fields or further groups."""
        if both := self.groups & self._fields.keys():
            name = min(both)
            inner = next(each for each in self._fields if each.startswith(f"{name}."))
            raise SchemaError(
                f"field {name!r} conflicts with field {inner!r}: names of fields and of nested "
                "records must differ"
            )
        self._ids = {name: i for i, name in enumerate(self._fields)}
        self.columns: Final[dict[str, Array]] = {
            n: column for n, f in self._fields.items() if (column := f.column) is not None
        }
        """The fields stored as columns, in schema order."""
        self.records: Final[dict[str, Field]] = {
            n: f for n, f in self._fields.items() if n not in self.columns
        }
        """The fields stored record by record in the payload, in schema order."""

    if not TYPE_CHECKING:  # type checkers would accept any attribute

        def __getattr__(self, name: str) -> Any:
            # The module `copy` looks up special methods before the schema has fields.
            fields = () if name[:1] == "_" else self._fields
            advice = {name: f"write schema[{name!r}]"} if name in fields else {}
            return missing_attribute(self, name, _ADVICE | advice)

    def __getitem__(self, name: str) -> Field:
        if name not in self._fields:
            raise unknown_field("the schema", str(name), self._fields)
        return self._fields[name]

    def __contains__(self, name: object) -> bool:  # `Mapping` would create the KeyError
        return name in self._fields

    def __iter__(self) -> Iterator[str]:
        return iter(self._fields)

    def __len__(self) -> int:
        return len(self._fields)

    def keys(self) -> KeysView[str]:
        """Return the field names as a view of a dict, which is faster than a Mapping's view."""
        return self._fields.keys()

    def items(self) -> ItemsView[str, Field]:
        """Return names and fields as a view of a dict, which is faster than a Mapping's view."""
        return self._fields.items()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Schema) and self.to_json() == other.to_json()

    def __hash__(self) -> int:
        return hash(self.to_json())

    def __repr__(self) -> str:
        fields = (f"{name!r}: {field!r}" for name, field in self.items())
        return f"Schema({{{listed(fields, 190)}}})"

    def _repr_html_(self) -> str:
        return fragment("Schema", "", [f"{len(self):,} fields"], self.html_table())

    def html_table(self, header: str = "", describe: Callable[[str], object] | None = None) -> str:
        """Return an HTML table of the fields.

        `describe` is called with the name of each field that is shown, and returns the text of one
        more cell, in the column `header`.
        """
        more = () if describe is None else (header,)
        rows = (
            (name, *_html_cells(field), *(() if describe is None else (describe(name),)))
            for name, field in self.items()
        )
        return table(("field", "type", "dtype", "shape", "stored", *more), rows, len(self))

    def field_id(self, name: str) -> int:
        """Return the id of a field: its position in the schema."""
        return self._ids[name]

    @cached_property
    def optional(self) -> tuple[str, ...]:
        """The names of the fields that a sample may lack."""
        return tuple(name for name, field in self.items() if field.optional)

    @cached_property
    def required(self) -> Required:
        """The features that a reader needs because of the schema, independent of the samples."""
        found = Required.NESTED_NAMES if self.groups else Required(0)
        for field in self.values():
            if field.optional:
                found |= Required.OPTIONAL_FIELDS
            found |= field.required | SPECS[field.codec].required_by_field
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
        """Return the schema as canonical JSON, which is stored in a shard."""
        return self._json

    @cached_property
    def _json(self) -> bytes:
        fields = [_describe(name, self._ids[name], field) for name, field in self.items()]
        return canonical_json({"fields": fields})

    @classmethod
    def from_json(cls, content: bytes) -> Schema:
        """Parse a schema from the bytes of a shard.

        Raises SchemaError if `content` is not a valid schema in canonical JSON, and
        ShardUnsupported for an unknown type, dtype or codec.
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


def group_parts(names: Iterable[str], group: str) -> list[str]:
    """Return the names of the fields and groups directly in a nested record, without its prefix."""
    start = f"{group}."
    inner = (name.removeprefix(start) for name in names if name.startswith(start))
    return list(dict.fromkeys(name.partition(".")[0] for name in inner))


def _html_cells(field: Field) -> tuple[str, str, str, str]:
    array = field.array or field.item
    stored = [*([] if field.codec == "raw" else [field.codec]), *["optional"] * field.optional]
    numbers = ("", "") if array is None else (array.dtype, format_shape(array.shape))
    return type(field).__name__, *numbers, ", ".join(stored)


def _leaves(fields: Mapping[Any, Any], prefix: str = "") -> Iterator[tuple[str, Field]]:
    for key, field in fields.items():
        if not isinstance(key, str) or not key:
            raise SchemaError(f"a field's name must be a non-empty string; found {key!r}")
        name = prefix + key
        if isinstance(field, Mapping):
            if not field:
                raise SchemaError(f"the nested record {name!r} has no fields")
            yield from _leaves(field, f"{name}.")
            continue
        if type(field) not in FIELD_TYPES.values():
            types = ", ".join(kind.__name__ for kind in FIELD_TYPES.values())
            hint = _field_hint(field)
            raise SchemaError(
                f"field {name!r} is {field!r}; expected one of {types}, or a dict{hint}"
            )
        _check_name(name)
        yield name, field


def _field_hint(given: object) -> str:
    """Return the end of a message about a value that is not a field, such as a dtype or a class."""
    for kind in FIELD_TYPES.values():
        if given is kind or given == kind.spec_name():
            return f"; write {kind.__name__}({'dtype, shape' * (kind is Array)})"
    if given is str:
        return "; write Text()"
    try:
        return f"; write {Array(given)!r}"
    except SchemaError:
        return ""


def _check_name(name: str) -> None:
    if not all(name.split(".")):
        raise SchemaError(f"field {name!r}: a part of a dotted name is empty")
    try:
        n_bytes = len(name.encode("utf-8"))
    except UnicodeEncodeError as error:
        raise SchemaError(f"field {name!r} cannot be written in UTF-8") from error
    if n_bytes > MAX_NAME_BYTES:
        raise SchemaError(
            f"field {name[:_SHOWN_LENGTH] + '…'!r}: a name has at most {MAX_NAME_BYTES} bytes, "
            f"found {n_bytes}"
        )
    # "Cn" are the characters that are unknown to this Python's version of Unicode.
    if not all(c.isprintable() or unicodedata.category(c) == "Cn" for c in name):
        raise SchemaError(f"field {name!r}: only printable characters are allowed")


def _describe(name: str, field_id: int, field: Field) -> dict[str, object]:
    codes = {"codec": int(SPECS[field.codec].code), "id": field_id, "type": int(field.code)}
    entry: dict[str, object] = {"name": name, **codes}
    if field.optional:
        entry["optional"] = True
    return entry | field.describe()


def _parse_field(position: int, entry: object) -> tuple[str, Field]:
    if not isinstance(entry, dict):
        raise SchemaError(f"field {position} of the schema is not an object")
    name = entry.get("name")
    for key in ("codec", "id", "type"):
        if type(entry.get(key)) is not int:
            raise SchemaError(f"field {name!r} of the schema: {key!r} must be an integer")
    if entry["id"] != position:
        raise SchemaError(f"field {name!r}: expected id {position}, found {entry['id']}")
    codecs = {one.code: one.name for one in SPECS.values()}
    codec = look_up("codec", entry["codec"], codecs, name)
    kind = look_up("field type", entry["type"], FIELD_TYPES, name)
    return str(name), kind.parse(name, entry, codec, optional=entry.get("optional", False))
