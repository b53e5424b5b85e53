"""A section waits in memory or in a temporary file, and comes back unchanged."""

from __future__ import annotations

import tempfile

from hypothesis import given
from hypothesis import strategies as st

from shardio.shard.section_writers import SectionBuffer


@given(st.lists(st.binary(max_size=300), max_size=20), st.integers(0, 20))
def test_a_buffer_returns_everything_written_from_memory_or_file(
    pieces: list[bytes], moved_after: int
) -> None:
    buffer, expected = SectionBuffer(), b"".join(pieces)
    for i, piece in enumerate(pieces):
        if i == moved_after:
            buffer.move_to(tempfile.TemporaryFile())
            assert buffer.waiting == 0
        buffer.write(memoryview(piece) if i % 2 else piece)
    assert buffer.n_bytes == len(expected)
    for _ in range(2):
        assert b"".join(map(bytes, buffer.chunks())) == expected
    buffer.close()


def test_all_chunks_of_a_buffer_but_the_last_are_whole_blocks() -> None:
    content = bytes(range(256)) * 10_000
    for in_file in (False, True):
        buffer = SectionBuffer()
        buffer.write(content)
        if in_file:
            buffer.move_to(tempfile.TemporaryFile())
        sizes = [len(chunk) for chunk in buffer.chunks()]
        assert sum(sizes) == len(content)
        assert all(size % 4096 == 0 for size in sizes[:-1])
        buffer.close()
