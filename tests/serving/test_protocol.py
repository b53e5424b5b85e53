from __future__ import annotations

import ast
import json
import pickle
import random
from collections.abc import Callable, Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardio import Batch, ShardioError, ShardLoader, Sound
from shardio.errors import ChecksumMismatch, InvalidArgument, TransformError
from shardio.samples.clips import Clip
from shardio.samples.packing import Pack
from shardio.serving.client import handshake, protocol
from shardio.serving.client.handshake import LoaderInfo
from shardio.serving.client.protocol import (
    FROM_CLIENT,
    FROM_SERVER,
    MAX_HEAD_BYTES,
    MalformedMessage,
    is_address,
    layout_to_json,
    pack,
    pack_batch,
    parse,
    parse_all,
    unpack,
    unpack_batch,
)
from tests.fuzz.mutate import change_bytes, change_json
from tests.loading import bits, write_dataset

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def batches(tmp_path_factory: pytest.TempPathFactory) -> list[Batch]:
    path = write_dataset(tmp_path_factory.mktemp("wire") / "every", 9)
    found = []
    for collate in ("list", "pad", "ragged"):
        fields = None if collate == "list" else ["points", "label", "note"]
        with ShardLoader(
            path, 5, output="numpy", num_workers=0, collate=collate, fields=fields
        ) as loader:
            found += list(loader)
    return found


@pytest.mark.parametrize(
    ("frames", "said"),
    [
        ([], "a message of 0 frames"),
        ([b""], "a head that is not JSON: "),
        ([b"[]"], "a head that is not an object"),
        ([b'{"kind": 7}'], "a message of the kind 7"),
        ([b'{"kind": "batch"}'], "a message of the kind batch with 1 frames"),
        ([b'{"kind": "heartbeat"}', b""], "a message of the kind heartbeat with 2 frames"),
        ([b'{"kind": "heartbeat", "x": NaN}'], "a head that is not JSON: NaN"),
        ([b"\xff\xfe"], "a head that is not JSON: "),
        ([b"[" * 100_000], "a head"),
        ([b" " * (MAX_HEAD_BYTES + 1)], f"a head of more than {MAX_HEAD_BYTES} bytes"),
        ([pickle.dumps({"kind": "heartbeat"})], "a head that is not JSON: "),
    ],
)
def test_what_is_no_message_is_refused(frames: list[bytes], said: str) -> None:
    with pytest.raises(MalformedMessage) as caught:
        unpack(frames, FROM_SERVER)
    assert str(caught.value).startswith(said)


def test_a_batch_comes_back_bit_for_bit(batches: list[Batch]) -> None:
    for batch in batches:
        head, block = pack_batch(batch)
        assert bits(unpack_batch(head, block.tobytes())) == bits(batch)


def test_only_what_a_batch_uses_of_its_block_travels(batches: list[Batch]) -> None:
    for batch in batches:
        head, block = pack_batch(batch)
        with pytest.raises(MalformedMessage, match="field"):
            unpack_batch(head, block[:-1].tobytes())


def test_a_claim_of_more_than_came_is_refused(batches: list[Batch]) -> None:
    head, block = pack_batch(batches[0])
    layout = layout_to_json(batches[0].filled_block[0]).replace('"rows":5', '"rows":4000000000')
    with pytest.raises(MalformedMessage, match="its layout needs"):
        unpack_batch({**head, "layout": layout}, block.tobytes())
    with pytest.raises(MalformedMessage, match="rows in a block for"):
        unpack_batch({**head, "rows": 6}, block.tobytes())


def _look_at(batch: Batch) -> None:
    """Everything that a loop may ask of a batch; what is no text or JSON is said, as of a shard."""
    for name in batch:
        batch.present(name)
        try:
            values = batch[name]
        except ShardioError:
            continue
        if isinstance(values, np.ndarray):
            values.tobytes()
    assert len(batch.indices) == len(batch.origins) == len(batch.valid)


def test_thousands_of_damaged_batches_are_refused_or_can_be_read(batches: list[Batch]) -> None:
    rng = random.Random(7)
    packed = [pack_batch(batch) for batch in batches]
    n_refused = 0
    for _ in range(3000):
        head, block = rng.choice(packed)
        content, said = bytearray(block.tobytes()), pack("batch", **head)
        if rng.random() < 0.5:
            for _ in range(rng.randint(1, 4)):  # in the numbers in front, mostly
                place = min(int(rng.expovariate(1 / 400)), len(content) - 8)
                number = rng.choice([0, 1, 255, 1 << 31, (1 << 64) - 1, rng.getrandbits(64)])
                content[place : place + 8] = number.to_bytes(8, "little")
        else:
            said = change_bytes(rng, said)
        try:
            _look_at(unpack_batch(unpack([said, bytes(content)], FROM_SERVER), bytes(content)))
        except MalformedMessage:
            n_refused += 1
    assert 500 < n_refused < 3000


_ASKED: dict[str, Any] = {
    "batch_size": 4,
    "fields": ["a", "b.c"],
    "sampler": range(4),
    "collate": {"a": (None, 3), "b": "ragged"},
    "clips": {
        "frames": 8,
        "fps": Fraction(30000, 1001),
        "size": (16, 18),
        "around": "at",
        "loop_filter": False,
    },
    "decode": {"audio": Sound(seconds="0.64", where="random"), "image": False},
    "pack": {"length": 128, "targets": True, "eot": 7},
}


def test_options_come_back_as_they_were_asked_for() -> None:
    told = json.loads(json.dumps(handshake.options_to_json(_ASKED)))
    made = {"clips": Clip(**_ASKED["clips"]), "pack": Pack(**_ASKED["pack"])}
    assert handshake.options_from_json(told) == {**_ASKED, "sampler": [0, 1, 2, 3], **made}


def test_a_sampler_travels_if_it_holds_positions() -> None:
    with pytest.raises(MalformedMessage, match="sampler is not a WeightedSampler"):
        handshake.options_from_json({"sampler": {"weights": [1]}})
    assert handshake.options_to_json({"sampler": {3: "a", 1: "b"}}) == {"sampler": [3, 1]}
    assert handshake.options_to_json({"sampler": {7}}) == {"sampler": [7]}

    class Drawing:
        def __iter__(self) -> Iterator[int]:
            return iter([1])

    with pytest.raises(InvalidArgument, match=r"sampler is iterated again .*pass a sequence"):
        handshake.options_to_json({"sampler": Drawing()})


_QUESTION = {"kind": "open", "version": 1, "token": "0" * 32, "most_bytes": 9, "options": {}}
_OPENED: dict[str, Any] = {"version": 1, "lineage": "a", "generation": 3, "batches": 9}
_OPENED |= {"state": {"epoch": 0}, "served": {}}
_ERROR = ChecksumMismatch("a hash", code="hash", path="/d/0.shard", sample=3, found=7)


@pytest.mark.parametrize(
    ("whole", "read"),
    [
        (_QUESTION, lambda found: unpack([json.dumps(found).encode()], FROM_CLIENT)),
        (handshake.options_to_json(_ASKED), handshake.options_from_json),
        (_OPENED, lambda found: LoaderInfo.parse(found, parse("tcp://h:1"))),
        (protocol.error_to_json(_ERROR), protocol.error_from_json),
    ],
    ids=["question", "options", "opened", "error"],
)
def test_damaged_messages_are_refused(whole: dict[str, Any], read: Callable[[Any], object]) -> None:
    rng, n_taken = random.Random(9), 0
    for _ in range(3000):
        found = change_json(rng, whole)
        try:
            read(found if isinstance(found, dict) else {})
        except (MalformedMessage, InvalidArgument):
            continue
        n_taken += 1
    assert 0 < n_taken < 3000


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (InvalidArgument("\udc80.shard"), None),  # a name that UTF-8 cannot say
        (TransformError("Traceback …\nKeyError: 'x'"), None),
        (_ERROR, None),
        (KeyError("x"), "KeyError: 'x'"),
    ],
)
def test_errors_come_back(error: Exception, said: str | None) -> None:
    head = unpack([pack("failed", error=protocol.error_to_json(error))], FROM_SERVER)
    again = protocol.error_from_json(head["error"])
    assert (type(again), str(again)) == (ShardioError if said else type(error), said or str(error))


def test_a_long_error_loses_its_middle() -> None:
    text = protocol.error_to_json(TransformError("a" * 70_000 + "b"))["text"]
    assert len(text) < 66_000 and text.endswith("aab")


def test_a_class_that_is_no_error_of_ours_is_not_looked_up() -> None:
    assert type(protocol.error_from_json({"class": "Any", "text": "x"})) is ShardioError


@pytest.mark.parametrize(
    ("text", "is_loopback"),
    [
        ("tcp://127.0.0.1:5555", True),
        ("tcp://localhost:*", True),
        ("tcp://[::1]:5555", True),
        ("tcp://0.0.0.0:5555", False),
        ("tcp://decoder-1.example:5555", False),
    ],
)
def test_an_address_says_whether_it_stays_here(text: str, is_loopback: object) -> None:
    assert (str(parse(text)), parse(text).is_loopback) == (text, is_loopback)


@pytest.mark.parametrize("text", ["tcp://", "tcp://host", "ipc:///tmp/x", "tcp://h:99999", 7, None])
def test_what_is_no_address_is_refused(text: object) -> None:
    with pytest.raises(InvalidArgument, match="tcp://host:port"):
        parse(text)


def test_the_path_of_a_dataset_is_no_address() -> None:
    assert is_address("tcp://h:1") and is_address(["tcp://h:1", "tcp://h:2"])
    assert not any(map(is_address, ["/data/set", [], None, ["tcp://h:1", 7], [["tcp://h:1"]]]))
    with pytest.raises(InvalidArgument, match="different"):
        parse_all(["tcp://h:1", "tcp://h:1"])


def test_nothing_that_speaks_to_the_network_imports_pickle() -> None:
    imported = {
        alias.name.split(".")[0]
        for path in (ROOT / "shardio" / "serving").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in (*node.names, ast.alias(getattr(node, "module", None) or ""))
    }
    assert imported.isdisjoint({"pickle", "cloudpickle", "marshal", "dill", "shelve"})
