"""Schemas and samples of every shape that version 1 can store, for property tests."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import strategies as st

from shardio.format.codecs import SPECS
from shardio.format.schema import Schema
from shardio.format.types import (
    DTYPES,
    Array,
    Audio,
    Bytes,
    EncodedImage,
    Field,
    Image,
    Json,
    List,
    Text,
    Video,
)
from shardio.format.types.images import MAX_PICTURE_SIDE
from tests.shards import made_stream

CODECS = st.sampled_from(sorted(SPECS))
OPTIONAL = st.booleans()
DIMENSIONS = st.lists(st.one_of(st.none(), st.integers(1, 5)), max_size=3).map(tuple)
TYPES = st.sampled_from(sorted(DTYPES))
ARRAYS = st.builds(Array, TYPES, DIMENSIONS, CODECS, optional=OPTIONAL)
FIELDS: st.SearchStrategy[Field] = st.one_of(
    ARRAYS,
    st.builds(Array, st.just("uint8"), st.just((2111,))),  # a hash per row, padded to the stride
    st.builds(List, st.builds(Array, TYPES, DIMENSIONS), CODECS, optional=OPTIONAL),
    st.builds(Bytes, CODECS, optional=OPTIONAL),
    st.builds(Text, CODECS, optional=OPTIONAL),
    st.builds(Json, CODECS, optional=OPTIONAL),
    *(st.builds(kind, optional=OPTIONAL) for kind in (Image, Video, Audio)),
)
PLAIN_NAMES = st.text('ab9 _-"\\äß名\U0001f3ac', min_size=1, max_size=9)
NAMES = st.one_of(PLAIN_NAMES, PLAIN_NAMES.map("n.{}".format), PLAIN_NAMES.map("n.m.{}".format))
SCHEMAS = st.dictionaries(NAMES, FIELDS, min_size=1, max_size=6).map(Schema)
TEXTS = st.text('ab9 _-."\\/\0\n\x7fäß名\u2028\uffff\U0001f3ac', max_size=60)
JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=8,
)


@st.composite
def values(draw: st.DrawFn, field: Field) -> Any:
    """Draw a value of a field, as a reader returns it."""
    if field.optional and draw(st.integers(0, 2)) == 0:
        return None
    if isinstance(field, List):
        return draw(st.lists(values(field.element), max_size=3))
    if isinstance(field, Text):
        return draw(TEXTS)
    if isinstance(field, Json):
        return draw(JSON)
    if isinstance(field, Bytes):
        return draw(st.binary(max_size=100)) * draw(st.integers(1, 20))
    if field.is_streamed:
        return made_stream(draw(st.integers(0, 99)), draw(st.integers(0, 9)), 20)
    if isinstance(field, Image):
        sides = st.integers(1, MAX_PICTURE_SIDE)
        content = draw(st.binary(min_size=1, max_size=100))
        return EncodedImage(content, draw(sides), draw(sides), draw(st.integers(1, 4)))
    assert isinstance(field, Array)
    shape = tuple(draw(st.integers(0, 4)) if d is None else d for d in field.shape)
    n_bytes = math.prod(shape) * field.numpy.itemsize
    seed = draw(st.integers(0, 1 << 32))
    raw = np.random.default_rng(seed).integers(0, 256 if seed % 3 else 1, n_bytes, np.uint8)
    if field.dtype == "bool":
        raw &= 1
    return raw.view(field.numpy).reshape(shape)


@st.composite
def shards(draw: st.DrawFn) -> tuple[Schema, list[dict[str, Any]]]:
    schema = draw(SCHEMAS)
    sample = st.fixed_dictionaries({name: values(field) for name, field in schema.items()})
    return schema, draw(st.lists(sample, max_size=5))


def opened(path: Path) -> str:
    """Open a shard in a process that has no added types and codecs; return its last error."""
    program = "import sys, shardio; shardio.ShardReader(sys.argv[1])"
    command = [sys.executable, "-c", program, str(path)]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    assert found.returncode == 1
    return found.stderr.splitlines()[-1]
