from __future__ import annotations

import copy
import json
import pickle
from typing import Any

import numpy as np
import pytest

from shardio import Array, Bytes, Json, Schema, Text
from shardio.batch.batch import Batch
from shardio.batch.layout import CLAIMED, EMPTY, FILLED, layout_for_samples
from shardio.errors import ShardCorrupt

SCHEMA = Schema(
    {
        "note": Text(),
        "image": Array("uint8", (2, 2)),
        "points": Array("int16", (None, 2)),
        "blob": Bytes(),
        "meta": Json(),
    }
)
RECORDS: dict[str, list[bytes]] = {
    "note": [b"", "größe 名前".encode(), b"c"],
    "points": [b"", np.arange(6, dtype="<i2").tobytes(), np.arange(2, dtype="<i2").tobytes()],
    "blob": [b"\0\xff", b"", b"xyz"],
    "meta": [b"null", b'{"a":[1,2.5]}', b'"x"'],
}


def make_batch(records: dict[str, list[bytes]] = RECORDS, n_rows: int = 3) -> Batch:
    """Return a batch of up to 4 rows over a block that is filled by hand."""
    layout = layout_for_samples(SCHEMA, 4)
    block = np.zeros(layout.heap + (1 << 20), np.uint8)
    origins = layout.origins(block)
    origins["position"], origins["shard"] = [70, 71, 5, 99], [1, 1, 0, 9]
    origins["row"], origins["status"] = [20, 21, 5, 9], [FILLED, FILLED, FILLED, EMPTY]
    place = 0
    for slot in layout.varying:
        for i, record in enumerate(records[slot.name]):
            place = -(-place // 64) * 64
            layout.extents(block, slot)[i] = (len(record), place)
            block[layout.heap + place :][: len(record)] = np.frombuffer(record, np.uint8)
            place += len(record)
            if slot.n_dims:
                layout.shapes(block, slot)[i] = (len(record) // 4, 2)
    (image,) = (layout.fixed_rows(block, slot, n_rows) for slot in layout.fixed)
    image[...] = np.arange(n_rows)[:, None, None]
    return Batch.of_block(layout, block, n_rows, {"image": image}, epoch=2, step=7)


def test_fields_are_what_was_given_or_lists_of_values_made_once() -> None:
    batch = make_batch()
    shown = "note 3 texts, image uint8 (3, 2, 2), points 3 arrays of int16 (0–3, 2), "
    shown += "blob 3 byte strings, meta 3 JSON values)"
    assert repr(batch) == f"Batch(step 7 of epoch 2: 3 rows, {shown}"
    assert repr(batch.keys()) == "dict_keys(['note', 'image', 'points', 'blob', 'meta'])"
    assert batch["image"][:, 0, 0].tolist() == [0, 1, 2]
    assert batch["note"] == ["", "größe 名前", "c"]
    assert batch["blob"] == [b"\0\xff", b"", b"xyz"]
    assert batch["meta"] == [None, {"a": [1, 2.5]}, "x"]
    assert [value.tolist() for value in batch["points"]] == [[], [[0, 1], [2, 3], [4, 5]], [[0, 1]]]
    assert [value.shape for value in batch["points"]] == [(0, 2), (3, 2), (1, 2)]
    assert np.shares_memory(batch["points"][1], batch._block)
    assert all(batch[name] is batch[name] for name in ("meta", "points"))
    with pytest.raises(KeyError, match="note, image, points, blob, meta"):
        batch["other"]


def test_a_batch_says_where_its_rows_came_from_in_copies() -> None:
    batch = make_batch()
    found = (batch.indices, batch.origins, batch.valid)
    assert [part.tolist() for part in found] == [
        [70, 71, 5],
        [[1, 20], [1, 21], [0, 5]],
        [True, True, True],
    ]
    assert [part.dtype.name for part in found] == ["int64", "int64", "bool"]
    assert not any(np.shares_memory(part, batch._block) for part in found)
    batch._layout.origins(batch._block)["status"][1] = CLAIMED  # not filled
    assert batch.valid.tolist() == [True, False, True]


@pytest.mark.parametrize(
    ("name", "record"),
    [
        ("note", b"\xff"),
        ("note", b"\xed\xa0\x80"),
        ("meta", b""),
        ("meta", b"{"),
        ("meta", b"\xff"),
        ("meta", json.dumps({"a": 1}).encode("utf-16")),
        ("meta", "\ufeff1".encode()),
        ("meta", b"[" * 200_000),
    ],
    ids=lambda value: repr(value)[:20],
)
def test_a_record_that_does_not_decode_is_named_by_its_sample(name: str, record: bytes) -> None:
    damaged = {**RECORDS, name: [RECORDS[name][0], record, RECORDS[name][2]]}
    batch = make_batch(damaged)
    with pytest.raises(ShardCorrupt) as caught:
        batch[name]
    error = caught.value
    assert (error.field, error.sample, error.code) == (name, 21, "value")
    assert "shard number 1" in str(error)
    others: dict[str, Any] = {key: batch[key] for key in SCHEMA if key != name}
    assert len(others) == 4


def test_libraries_that_rebuild_a_batch_get_a_dict() -> None:
    batch = make_batch()
    rebuilt = type(batch)({name: batch[name] for name in ("image", "note")})
    assert type(rebuilt) is dict and rebuilt["note"] == batch["note"]
    assert rebuilt["image"] is batch["image"]
    for copied in (copy.copy(batch), pickle.loads(pickle.dumps(batch))):
        assert type(copied) is Batch and copied["note"] == batch["note"]
        assert (copied.epoch, copied.step, copied.n_rows) == (2, 7, 3)


def test_a_batch_does_not_unpack_to_names() -> None:
    batch = make_batch()
    words = r"write batch\[name\] for each of 'note', 'image', .* or unpack batch\.values\(\)"
    with pytest.raises(TypeError, match=words):
        _a, _b, _c, _d, _e = batch
    with pytest.raises(TypeError, match=words):
        for _i, (_image, _label) in enumerate([batch] * 30):
            pass
    names = list(SCHEMA)
    assert [name for name in batch] == [*batch] == list(batch.keys()) == names
    assert list(dict(batch)) == list({**batch}) == names
    note, *_, meta = batch.values()
    assert note == batch["note"] and meta == batch["meta"]
