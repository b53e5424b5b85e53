"""Files of others, as converters read them: what a fuzzer feeds, and how it makes it.

An input is a byte that says which form of files it is, and their contents one after the other.
"""

from __future__ import annotations

import io
import json
import random
import struct
import tarfile
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final
from unittest import mock

import numpy as np

from shardio import Converter, Input, ShardWriter
from shardio.conversion.converter import OUTCOMES, fit_converter, make_converter
from shardio.conversion.inputs import join_parts, list_inputs
from shardio.errors import InvalidArgument, MediaError, ShardioError
from tests.fuzz.mutate import change_bytes, change_json, dumped, number

SEPARATOR: Final = b"\n\0\n"
"""Between the files of an input."""


@dataclass(frozen=True)
class Form:
    """Files of a kind by their names; of `schema.json`, what is in it is the option `fields`."""

    kind: str
    names: tuple[str, ...]
    options: Mapping[str, Any] = field(default_factory=dict)


FORMS: Final = {
    "csv": Form("tables", ("t.csv",)),
    "jsonl": Form("tables", ("t.jsonl",)),
    "schema": Form("tables", ("t.jsonl", "schema.json")),
    "tar": Form("webdataset", ("t.tar",)),
    "mds": Form("mds", ("t.mds", "index.json")),
    "tfrecord": Form("tfrecord", ("t.tfrecord",)),
    "npy": Form("arrays", ("t.npy",)),
    "npz": Form("arrays", ("t.npz",)),
    "tensors": Form("arrays", ("t.safetensors",)),
    "zarr3": Form("zarr", ("t.zarr/zarr.json", "t.zarr/c/0")),
    "zarr2": Form("zarr", ("t.zarr/.zarray", "t.zarr/0")),
    "tokens": Form("tokens", ("t.bin",), {"dtype": "uint16", "length": 7}),
}
_MAX: Final[dict[str, Any]] = {"_MAX_PLAIN_BYTES": 1 << 14, "_MAX_RATIO": 16}
"""The size that arrays may claim: a gigabyte of zeros is allowed, and takes more than 1 s."""


class ConverterFiles:
    """Converts the files of an input, as far as samples in a shard."""

    def __init__(self, folder: Path) -> None:
        self._folders = [folder / "converting" / name for name in FORMS]
        self._shard = folder / "converted.shard"
        for place, form in zip(self._folders, FORMS.values(), strict=True):
            for name in form.names:
                (place / name).parent.mkdir(parents=True, exist_ok=True)

    def __call__(self, content: bytes) -> str:
        which = content[0] % len(FORMS) if content else 0
        name, form = [*FORMS.items()][which]
        files = dict(
            zip(form.names, content[1:].split(SEPARATOR, len(form.names) - 1), strict=False)
        )
        options = dict(form.options)
        try:
            if "schema.json" in files:
                options["fields"] = _json(files.pop("schema.json"))
            for each in form.names:
                (self._folders[which] / each).unlink(missing_ok=True)
            for each, data in files.items():
                (self._folders[which] / each).write_bytes(data)
            with mock.patch.multiple("shardio_converters.arrays.array_samples", **_MAX):
                return f"{name} {self._convert(form.kind, options, self._folders[which])}"
        except ShardioError as error:
            return f"{name} {type(error).__name__}"

    def _convert(self, kind: str, options: Mapping[str, Any], folder: Path) -> str:
        source = make_converter(kind, options)
        listing = join_parts(list_inputs(str(folder)), source)
        source = fit_converter(source, listing.inputs)
        outcomes = [_read(source, one, self._shard) for one in listing.inputs if not one.part_of]
        return min(outcomes)


def _json(data: bytes) -> Any:
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise InvalidArgument(f"not JSON: {error}") from error


def _read(source: Converter, one: Input, shard: Path) -> str:
    """Return the outcome of an input whose samples are written; errors are those of a driver."""
    shard.unlink(missing_ok=True)
    writer = ShardWriter(shard, source.schema())
    try:
        samples = source.samples(one)
        while True:
            writer.append(next(samples))
    except StopIteration as end:
        if end.value.kind not in OUTCOMES:
            raise ValueError(f"the outcome is {end.value}") from None
        return str(end.value.kind)
    except MediaError:
        return "broken"
    except OSError as error:
        if error.filename not in (None, one.path, *(part.path for part in one.parts)):
            raise
        return "unreadable"
    finally:
        writer.abort()


# --- inputs ---------------------------------------------------------------------------------------


def make_input(rng: random.Random) -> bytes:
    """One input: files that were sound, until something was changed in them."""
    which = rng.randrange(len(FORMS))
    files = _MAKERS[[*FORMS][which]](rng)
    if rng.random() < 0.2:
        i = rng.randrange(len(files))
        files[i] = change_bytes(rng, files[i])
    if rng.random() < 0.1:
        files[0] = files[0][: rng.randrange(len(files[0]) + 1)]
    return bytes([which]) + SEPARATOR.join(files)


_CELLS: Final = (
    b'a 0123 -1 1.5 nan 1e999 true "x" "" [1,2] {"a":1} \xc3\xbc 9223372036854775808 \0 "'.split()
)


def _csv(rng: random.Random) -> list[bytes]:
    n_columns = rng.randint(1, 4)
    lines = [rng.sample((b"a", b"b.c", b"label", b"source", b"b", b"\xef\xbb\xbfx"), n_columns)]
    kind = [rng.choice(_CELLS) for _ in range(n_columns)]
    for _ in range(rng.randrange(6)):
        odd = rng.random() < 0.3
        lines.append([rng.choice((*_CELLS, b"")) if odd else cell for cell in kind])
    return [rng.choice((b"\n", b"\r\n", b"\r")).join(b",".join(line) for line in lines)]


_ROWS: Final = [
    {"a": 1, "b": {"c": 0.5, "d": {"e": "x"}}, "v": [1, 2], "w": [[1.5], [2]], "t": "\u00fc"},
    {"a": 2, "b": {"c": None, "d": {}}, "v": [], "w": [[2.5], [3]], "t": None},
]
_FIELDS: Final = {
    "a": "int64",
    "b.c": "float64?",
    "b.d.e": "text?",
    "v": "uint8[*]",
    "w": "float32[*,1]",
    "t": "text?",
}
_WORDS: Final = ("json", "list[int8[*]]", "image", "file?", "bool", "int64[*,*]", "int64[0]", "x[")


def _jsonl(rng: random.Random) -> list[bytes]:
    rows = change_json(rng, _ROWS)
    entries = rows if isinstance(rows, list) else [rows]
    return [b"\n".join(dumped(rng, entry) for entry in entries)]


def _schema(rng: random.Random) -> list[bytes]:
    fields: Any = dict(_FIELDS)
    if rng.random() < 0.5:
        fields[rng.choice([*fields])] = rng.choice(_WORDS)
    fields = change_json(rng, fields) if rng.random() < 0.6 else fields
    rows = _jsonl(rng) if rng.random() < 0.5 else [b"\n".join(dumped(rng, row) for row in _ROWS)]
    return [*rows, dumped(rng, fields)]


def _npy(rng: random.Random, *, changed: bool = True) -> bytes:
    arrays: tuple[Any, ...] = (np.arange(6).reshape(3, 2), np.ones(3, "f2"), np.array(["a", "ü"]))
    file = io.BytesIO()
    np.save(file, rng.choice(arrays))
    content = file.getvalue()
    if not changed:
        return content
    header = content[10:128]
    for old, new in ((b"(3", b"(%d"), (b"2)", b"%d)")):
        if rng.random() < 0.3:
            header = header.replace(old, new % number(rng, 3))
    if rng.random() < 0.3:
        header = header.replace(rng.choice((b"'<i8'", b"False", b"'shape'")), rng.choice(_HEADERS))
    return content[:8] + struct.pack("<H", len(header)) + header + content[128:]


_HEADERS: Final = (
    b"'|O'",
    b"'>f4'",
    b"'<U%d'" % (1 << 31),
    b"True",
    b"[('a', 'i1')]",
    b"()",
    b"'M8[s]'",
)


def _npz(rng: random.Random) -> list[bytes]:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", rng.choice((zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED))) as made:
        for name in rng.sample(("x.npy", "y.npy", "x.z.npy", ".npy", "ü.npy"), rng.randint(0, 2)):
            made.writestr(name, _npy(rng, changed=rng.random() < 0.3))
    content = file.getvalue()
    start = max(0, content.find(b"PK\1\2"))
    if rng.random() < 0.5:  # the directory, which no checksum covers
        return [content[:start] + change_bytes(rng, content[start:])]
    return [content]


def _tensors(rng: random.Random) -> list[bytes]:
    about: Any = {
        "a": {"dtype": "I32", "shape": [2, 2], "data_offsets": [0, 16]},
        "b": {"dtype": "BF16", "shape": [2], "data_offsets": [16, 20]},
        "__metadata__": {"x": "y"},
    }
    header = dumped(rng, change_json(rng, about))
    n_bytes = len(header) if rng.random() < 0.9 else number(rng, len(header))
    return [struct.pack("<Q", n_bytes) + header + bytes(20)]


_MEMBERS: Final = (
    ("cls", b"3"),
    ("txt", b"\xc3\xbc"),
    ("json", b'{"a":[1]}'),
    ("x.y", b"?"),
    ("jpg", b"\xff\xd8\xff"),
    ("wav", b"RIFF"),
)


def _members(rng: random.Random) -> Iterator[tuple[str, bytes]]:
    yield from rng.sample(_MEMBERS[:4], rng.randint(1, 3))
    yield "npy", _npy(rng, changed=rng.random() < 0.2)
    if rng.random() < 0.1:
        yield rng.choice(_MEMBERS[4:])


def _tar(rng: random.Random) -> list[bytes]:
    file = io.BytesIO()
    formats = (tarfile.PAX_FORMAT, tarfile.GNU_FORMAT, tarfile.USTAR_FORMAT)
    with tarfile.open(fileobj=file, mode="w", format=rng.choice(formats)) as made:
        for row in range(rng.randint(0, 2)):
            for ending, content in _members(rng):
                long = "n" * 120 + "/" if rng.random() < 0.1 else ""
                member = tarfile.TarInfo(f"d/{long}{row}.{ending}")
                member.size = len(content)
                if rng.random() < 0.05:
                    member.type = rng.choice(
                        (tarfile.SYMTYPE, tarfile.DIRTYPE, tarfile.GNUTYPE_SPARSE)
                    )
                with suppress(ValueError):  # a name that a format does not take
                    made.addfile(member, io.BytesIO(content))
    blocks = bytearray(file.getvalue())
    headers = [at for at in range(0, len(blocks), 512) if blocks[at + 257 : at + 262] == b"ustar"]
    if headers and rng.random() < 0.6:
        at = rng.choice(headers)
        blocks[at : at + 512] = change_bytes(rng, bytes(blocks[at : at + 512])).ljust(512, b"\0")[
            :512
        ]
        sum_ = sum(blocks[at : at + 512]) - sum(blocks[at + 148 : at + 156]) + 256
        blocks[at + 148 : at + 156] = b"%06o\0 " % sum_
    return [bytes(blocks)]


def _mds(rng: random.Random) -> list[bytes]:
    about: Any = {
        "column_names": ["n", "t", "v"],
        "column_encodings": ["int", "str", "ndarray"],
        "column_sizes": [8, None, None],
        "format": "mds",
        "version": 2,
    }
    vector = bytes([33, 1 << 2, 2]) + struct.pack("<2i", 1, 2)
    samples = [struct.pack("<2Iq", 2, len(vector), n) + b"ab" + vector for n in range(2)]
    text = _changed(rng, about)
    places = np.cumsum([16 + len(text), *map(len, samples)]).tolist()
    head = [2, *places]
    if rng.random() < 0.3:
        head[rng.randrange(4)] = number(rng, 16, 32)
    if rng.random() < 0.3:
        samples[0] = change_bytes(rng, samples[0])
    shard = struct.pack("<4I", *head) + text + b"".join(samples)
    file = {"basename": "t.mds", "bytes": len(shard), "hashes": {}}
    index: Any = {"version": 2, "shards": [{"format": "mds", "version": 2, "raw_data": file}]}
    return [shard, _changed(rng, index) if rng.random() < 0.5 else dumped(rng, index)]


def _message(field_: int, content: bytes) -> bytes:
    return bytes([field_ << 3 | 2, len(content)]) + content


def _tfrecord(rng: random.Random) -> list[bytes]:
    kinds = {
        b"i": _message(3, _message(1, b"\x05\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01")),
        b"f": _message(2, _message(1, struct.pack("<2f", 1, 2))),
        b"b": _message(1, _message(1, b"x") + _message(1, b"y")),
    }
    records = []
    for _ in range(rng.randint(1, 3)):
        entries = (_message(1, name) + _message(2, kind) for name, kind in kinds.items())
        record = _message(1, b"".join(_message(1, entry) for entry in entries))
        if rng.random() < 0.5:
            record = change_bytes(rng, record)
        length = struct.pack("<Q", len(record) if rng.random() < 0.95 else number(rng, 9))
        records.append(length + _masked(length) + record + _masked(record))
    return [b"".join(records)]


def _masked(data: bytes) -> bytes:
    """Return the checksum of TFRecord; a wrong one if its package is not installed."""
    try:
        from google_crc32c import value
    except ModuleNotFoundError:
        return bytes(4)
    checksum: int = value(data)
    turned = (checksum >> 15 | checksum << 17) + 0xA282EAD8
    return struct.pack("<I", turned & 0xFFFF_FFFF)


def _changed(rng: random.Random, about: Any) -> bytes:
    return dumped(rng, change_json(rng, about) if rng.random() < 0.7 else about)


def _zarr3(rng: random.Random) -> list[bytes]:
    about: Any = {
        "zarr_format": 3,
        "node_type": "array",
        "shape": [4],
        "data_type": rng.choice(("int16", "float32", "bool", "string")),
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [4]}},
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
        "fill_value": 0,
        "codecs": [{"name": "bytes", "configuration": {"endian": "little"}}],
        "attributes": {},
    }
    codec = rng.choice((None, "zstd", "gzip", "blosc", "crc32c", "sharding_indexed"))
    if codec is not None:
        about["codecs"].append({"name": codec, "configuration": {"level": 1}})
    return [_changed(rng, about), rng.randbytes(rng.choice((0, 8, 16)))]


def _zarr2(rng: random.Random) -> list[bytes]:
    about: Any = {
        "zarr_format": 2,
        "shape": [4],
        "chunks": [4],
        "dtype": rng.choice(("<i2", ">f4", "|b1", "<U2", "|O", "|S2")),
        "fill_value": 0,
        "order": "C",
        "filters": None,
        "compressor": rng.choice((None, {"id": "zlib", "level": 1}, {"id": "blosc"})),
    }
    return [_changed(rng, about), rng.randbytes(rng.choice((0, 8, 16)))]


def _tokens(rng: random.Random) -> list[bytes]:
    head = np.zeros(256, "<i4")
    head[:3] = rng.choice((20240520, 20240801, 1)), rng.choice((1, 7)), 10
    if rng.random() < 0.3:
        head[rng.randrange(3)] = number(rng, 1, 31)
    return [(head.tobytes() if rng.random() < 0.6 else b"") + bytes(range(20))]


_MAKERS: Final[Mapping[str, Callable[[random.Random], list[bytes]]]] = {
    "csv": _csv,
    "jsonl": _jsonl,
    "schema": _schema,
    "tar": _tar,
    "mds": _mds,
    "tfrecord": _tfrecord,
    "npy": lambda rng: [_npy(rng)],
    "npz": _npz,
    "tensors": _tensors,
    "zarr3": _zarr3,
    "zarr2": _zarr2,
    "tokens": _tokens,
}
