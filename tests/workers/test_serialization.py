from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardio._engine.dispatch.worker import (
    RequestKind,
    Status,
    Task,
    pack,
    unpack,
)
from shardio._workers.processes.serialization import MAX_ERROR_BYTES
from shardio._workers.processes.worker_main import DESCRIPTOR_BYTES, MAX_MESSAGE_BYTES

U16, U32, U64 = (st.integers(0, (1 << n) - 1) for n in (16, 32, 64))


def test_a_descriptor_has_32_bytes() -> None:
    assert DESCRIPTOR_BYTES == 32
    assert MAX_ERROR_BYTES == MAX_MESSAGE_BYTES - DESCRIPTOR_BYTES
    assert len(pack(*Task(RequestKind.FILL, 1, 2, 3, 4, 5, 6))) == 32


@given(fields=st.tuples(U16, U16, U32, U64, U64, U32, U32), rest=st.binary(max_size=9))
def test_a_descriptor_arrives_as_it_was_sent_whatever_follows_it(
    fields: tuple[int, ...], rest: bytes
) -> None:
    assert unpack(pack(*fields) + rest) == fields


@pytest.mark.parametrize("n_bytes", [0, 1, 31])
def test_a_descriptor_that_is_cut_off_is_refused(n_bytes: int) -> None:
    with pytest.raises(struct.error):
        unpack(pack(RequestKind.FILL, 0, 0, 0, 0, 0, 0)[:n_bytes])


def test_codes_of_messages_stay_apart() -> None:
    assert len({int(ask) for ask in RequestKind}) == len(RequestKind)
    assert len({int(status) for status in Status}) == len(Status)
    assert 0 not in {*map(int, RequestKind), *map(int, Status)}
