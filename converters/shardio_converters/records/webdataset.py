"""WebDataset tars: consecutive members with the same key are a sample; suffixes are its fields."""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Final

import numpy as np

from shardio import Array, Input, InvalidArgument, MediaError, Outcome
from shardio_converters.arrays.array_samples import TEXT, NamedArray
from shardio_converters.arrays.npy import array_in
from shardio_converters.files import media_value
from shardio_converters.inference import DtypeShape, SchemaInference, infer_fields
from shardio_converters.parsing import read_int, read_json, read_text
from shardio_converters.records.tar_files import Member, is_tar, open_tar
from shardio_converters.schema_spec import Field, InferringConverter, fits, format_spec

_PARTS: Final = re.compile(r"((?:.*/)?[^./]+)\.([^/]*)", re.DOTALL)
_IGNORED_NAME: Final = re.compile(r"__[^/]*__(?:$|/)")
_NUMBERS: Final = "cls cls2 id index inx"
_WORDS: Final = {
    _NUMBERS: "int64",
    "text transcript txt": "text",
    "jsn json": "json",
    "avif bmp dib gif jfif jpe jpeg jpg pbm pgm png pnm ppm qoi tif tiff webp": "image",
    "avi flv m4v mkv mov mp4 mpeg mpg ogv webm wmv": "video",
    "aac aiff flac m4a mp3 ogg opus wav wma": "audio",
}
_WORD_OF: Final = {ending: word for some, word in _WORDS.items() for ending in some.split()}
_PICKLES: Final = frozenset("pickle pkl pt pth pyd".split())
_NPY_HEAD: Final = (64 << 10) + 12  # bytes that are enough for the header of any .npy


def split(name: str) -> tuple[str, str] | None:
    """Split a member's name into key and field at the first dot after the last slash.

    Return None for hidden files, names without a dot, and `__names__`.
    """
    found = _PARTS.fullmatch(name)
    if found is None or _IGNORED_NAME.match(name):
        return None
    return found[1], found[2].lower()


def _samples_of(
    members: Iterable[Member], take: Callable[[str, Member], Any], aside: list[str]
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the key and the fields of each sample of a tar.

    A sample maps each member's field to `take(field, member)`. Names of members that belong to no
    sample are appended to `aside`.
    """
    seen: set[str] = set()
    key, sample = "", dict[str, Any]()
    for member in members:
        parts = split(member.name)
        if parts is None:
            aside.append(member.name)
            continue
        if parts[0] != key:
            if sample:
                yield key, sample
            key, sample = parts[0], {}
            if key in seen:
                raise MediaError(
                    f"member {member.name!r}: expected directly after the other members of "
                    f"{key!r}, found after members of other samples"
                )
            seen.add(key)
        if parts[1] in sample:
            raise MediaError(f"member {member.name!r} appears twice in a sample")
        try:
            sample[parts[1]] = take(parts[1], member)
        except MediaError as error:
            raise MediaError(
                f"member {member.name!r}: {str(error).removeprefix(f'{member.name}: ')}"
            ) from error
    if sample:
        yield key, sample


def _facts_of(field: str, member: Member) -> DtypeShape:
    """Return dtype and shape of a field, from the member's name or, for an array, its header."""
    ending = field.rpartition(".")[2]
    if ending == "npy":
        array = array_in(member.read(_NPY_HEAD), field, member.n_bytes)
        return _checked(array)
    if ending in _PICKLES:
        raise MediaError(f".{ending} is a pickle, which can run any code: {_hint(field)}")
    if ending == "npz":
        raise MediaError(f"a .npz is several arrays: save each as .npy, or {_hint(field)}")
    return _WORD_OF.get(ending, "bytes"), ()


def _value_of(name: str, field: Field, member: Member) -> Any:
    data = member.read()
    if field.medium or field.is_opaque:
        return media_value(field, data, member.name)
    if field.is_json:
        return read_json(data)
    if name.rpartition(".")[2] == "npy":
        return _array(name, field.array, data)
    if field.is_utf8:
        return read_text(data)
    return read_int(data, f"; --schema can say that {name!r} is text")


def _array(name: str, field: Array | None, data: bytes) -> Any:
    array = array_in(data, name, len(data))
    dtype, shape = _checked(array)
    known = (field.dtype, field.shape) if field else (TEXT, ())
    if dtype != known[0] or not fits(shape, known[1]):
        raise MediaError(f"expected {format_spec(*known)}, found {format_spec(dtype, shape)}")
    value = array.whole()
    return str(value) if dtype == TEXT else np.asarray(value, order="C")


def _checked(array: NamedArray) -> DtypeShape:
    if array.dtype == TEXT and array.shape:
        raise MediaError(f"expected one string, found {format_spec(TEXT, array.shape)}")
    if len(array.shape) > 16:
        raise MediaError(f"found {len(array.shape)} dimensions; 16 at most")
    return array.dtype, array.shape


def _hint(field: str) -> str:
    return f'store it unchanged with a --schema of all fields that contains "{field}": "bytes"'


@dataclass(frozen=True, kw_only=True)
class WebDataset(InferringConverter):
    """A converter that makes one sample from consecutive tar members that share a key.

    By default, fields are inferred from suffixes and from the headers of arrays: dimensions with
    differing sizes become variable; fields that some samples lack become optional.
    """

    kind: ClassVar[str] = "webdataset"
    version: ClassVar[str] = "1"
    splits_by_file_name: ClassVar[bool] = True

    def check_field(self, name: str, word: str, field: Field) -> None:
        """Check that members of this name can be converted to a field."""
        ending = name.rpartition(".")[2]
        if not field.array or ending == "npy":
            return
        if ending not in _NUMBERS.split() or (field.dtype, field.shape) != ("int64", ()):
            raise InvalidArgument(
                f"field {name!r}: found {format_spec(field.dtype, field.shape)}; arrays are "
                f"members in .npy; an int64 may also be in .{', .'.join(_NUMBERS.split())}"
            )

    def all_additional_fields(self) -> Mapping[str, str]:
        """Return the specs of the fields that a sample has in addition to its members."""
        return {"key": "text", **super().all_additional_fields()}

    def ordered(self, fields: Mapping[str, str]) -> dict[str, str]:
        """Return all field specs; those of members come last."""
        return {**self.additional_fields(), **fields}

    def fitted(self, inputs: Sequence[Input]) -> WebDataset:
        """Return the converter with `fields` inferred from all samples of all inputs."""
        what = "tar of samples that can be read"
        return replace(self, fields=self.fields or infer_fields(inputs, _fields_of, what))

    def samples(self, source: Input) -> Generator[Mapping[str, Any], None, Outcome]:
        """Yield the samples of a tar."""
        if not is_tar(source.name):
            return Outcome("unsupported", "not a tar")
        schema, fields = self.schema(), self.fields or {}
        about = self.additional_values(source, key="")
        optional = {name: None for name in fields if schema[name].optional}
        required = fields.keys() - optional.keys()

        def take(name: str, member: Member) -> Any:
            if name not in fields:
                _facts_of(name, member)  # may raise a more precise error
                raise MediaError(f"expected one of {', '.join(fields)}")
            return _value_of(name, schema[name], member)

        n_samples, aside = 0, list[str]()
        with ExitStack() as files:
            members = open_tar(source.path, source.name, files)
            for key, sample in _samples_of(members, take, aside):
                if missing := required - sample.keys():
                    raise MediaError(f"sample {key!r} lacks {', '.join(sorted(missing))}")
                if "key" in about:
                    about["key"] = key
                yield {**optional, **sample, **about}
                n_samples += 1
        detail = {"members_aside": len(aside)} if aside else {}
        if not n_samples:
            return Outcome("empty", "holds no sample", detail=detail)
        return Outcome("converted", detail=detail)


def _fields_of(source: Input) -> SchemaInference:
    found = SchemaInference()
    if is_tar(source.name):
        with ExitStack() as files:
            members = open_tar(source.path, source.name, files)
            for _, sample in _samples_of(members, _facts_of, []):
                found.add(sample)
    return found
