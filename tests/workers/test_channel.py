from __future__ import annotations

import os
import socket

import pytest

from shardio._workers.processes.worker_main import (
    DESCRIPTOR_BYTES,
    MAX_MESSAGE_BYTES,
    pack_message,
    unpack_message,
)


@pytest.mark.usefixtures("swept")
@pytest.mark.parametrize(
    "n_bytes",
    [DESCRIPTOR_BYTES, DESCRIPTOR_BYTES + 1, MAX_MESSAGE_BYTES, MAX_MESSAGE_BYTES + 1, 3_000_000],
)
def test_a_parcel_of_any_length_arrives_whole(n_bytes: int) -> None:
    parcel = os.urandom(n_bytes)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        before = len(os.listdir("/proc/self/fd"))
        with pack_message(parcel) as (message, fds):
            # What is sent in a file is never taken for a descriptor alone.
            assert not fds or len(message) == DESCRIPTOR_BYTES + 1
            socket.send_fds(ours, [message], list(fds))
        data, received, _, _ = socket.recv_fds(theirs, MAX_MESSAGE_BYTES, 1)
        assert unpack_message(data, received) == parcel
        assert len(os.listdir("/proc/self/fd")) == before
