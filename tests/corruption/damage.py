"""Damage to a shard: verification finds it, and a reader refuses it or returns the same.

Used by the tests, with some of all possible damage, and, with all, by
`tools/stress flips`.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from shardio.errors import ShardCorrupt, ShardioError
from shardio.maintenance.verify import Findings, shard
from shardio.maintenance.verify.shard import verify_bytes
from shardio.shard.reader import ShardReader
from shardio.shard.verification import Verify
from tests.corruption.forge import codes_of, read_everything
from tests.shards import same_value


class _FoundError(Exception):
    """Ends a verification at its first finding."""


class _FirstOnly(Findings):
    def add(self, code: str, message: str, **where: Any) -> None:
        if where.get("section") is None and where.get("field") is None:
            # A file of another size, or a header that was never written: nothing smaller to name.
            if code not in ("file_size", "incomplete"):
                raise ValueError(f"a finding without its place: {code}: {message}")
        elif where.get("offset") is None and where.get("found") is None:
            raise ValueError(f"a finding without its offset: {code}: {message}")
        raise _FoundError(code)


def code_found(content: bytes | bytearray | memoryview) -> str | None:
    """Return the code of the first finding, None if there is none.

    Raises:
        ValueError: the finding does not say where it is.
    """
    if not len(content):
        return "incomplete"
    try:
        vars(shard)["Findings"] = _FirstOnly
        verify_bytes(memoryview(content), "s.shard")
    except _FoundError as found:
        return str(found)
    finally:
        vars(shard)["Findings"] = Findings
    return None


class Victim:
    """A shard on disk that is damaged and mended again. Owns a descriptor until `close()`.

    Args:
        path: where the file is to be.
        content: what is in it; `content` is kept as it is on disk.
        samples: what a reader must return.
    """

    def __init__(
        self, path: Path, content: bytes | bytearray, samples: Sequence[dict[str, Any]]
    ) -> None:
        path.write_bytes(content)
        self.path, self.content, self._samples = path, bytearray(content), list(samples)
        self._file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        self.n_refused = self.n_same = 0

    def flip(self, bit: int) -> None:
        """Flip one bit of the file; once more restores it."""
        self.content[bit // 8] ^= 1 << bit % 8
        os.pwrite(self._file, self.content[bit // 8 : bit // 8 + 1], bit // 8)

    def complaint_about_flip(self, bit: int, verify: Verify = "first") -> str | None:
        """Flip a bit and back; returns what is wrong with how that was met, if anything."""
        self.flip(bit)
        try:
            return self._audit_complaint() or self.read_complaint(verify)
        finally:
            self.flip(bit)

    def complaint_about_length(self, n_bytes: int) -> str | None:
        """Cut the file to n_bytes, and mend it; returns what is wrong with how that was met."""
        os.truncate(self.path, n_bytes)
        try:
            return self._refusal_complaint(memoryview(self.content)[:n_bytes])
        finally:
            os.pwrite(self._file, self.content[n_bytes:], n_bytes)

    def complaint_about_tail(self, tail: bytes) -> str | None:
        """Append bytes, and remove them; returns what is wrong with how that was met."""
        os.pwrite(self._file, tail, len(self.content))
        try:
            return self._refusal_complaint(bytes(self.content) + tail)
        finally:
            os.truncate(self.path, len(self.content))

    def _audit_complaint(self) -> str | None:
        return None if code_found(self.content) else "verification found nothing"

    def _refusal_complaint(self, content: bytes | memoryview) -> str | None:
        if not code_found(content):
            return "verification found nothing"
        refused = isinstance(read_everything(self.path), ShardioError)
        self.n_refused += refused
        return None if refused else "a reader did not refuse the file"

    def read_complaint(self, verify: Verify = "first") -> str | None:
        """Read everything; returns what is wrong with what came, if anything."""
        try:
            with ShardReader(self.path, verify=verify) as reader:
                is_same = self._is_what_was_written(reader)
        except ShardioError as error:
            self.n_refused += 1
            return _complaint_about_error(error, str(self.path))
        if not is_same:
            return "a reader returned other data"
        self.n_same += 1
        return None

    def _is_what_was_written(self, reader: ShardReader) -> bool:
        """Read all there is, field by field: in a third of the time that sample by sample takes."""
        rows, found = np.arange(len(reader)), {}
        for name in reader.schema:
            if name in reader.schema.columns:
                column = reader.column(name, rows)
                present = reader.present(name).tolist()
                found[name] = [column[i] if present[i] else None for i in range(len(reader))]
            else:
                found[name] = list(reader.records.values(name, rows))
        written = {name: [sample[name] for sample in self._samples] for name in reader.schema}
        return len(reader) == len(self._samples) and all(
            all(map(same_value, found[name], written[name])) for name in written
        )

    def close(self) -> None:
        os.close(self._file)


def _complaint_about_error(error: ShardioError, path: str) -> str | None:
    """Return the details of the damage's place that an error lacks."""
    if path not in str(error):
        return f"the error does not name the file: {error}"
    if isinstance(error, ShardCorrupt) and error.code not in ("file_size", "hole"):
        if error.section is None and error.field is None:
            return f"the error names neither section nor field: {error}"
        if error.offset is None:
            return f"the error has no offset: {error}"
        if error.field is not None and error.section is None and error.sample is None:
            return f"the error names no sample: {error}"
    return None


def table(cases: Sequence[tuple[Any, ...]]) -> dict[str, Any]:
    """Return the arguments of `parametrize` for cases that begin with their name."""
    return {"argvalues": [case[1:] for case in cases], "ids": [case[0] for case in cases]}


def assert_refused(path: Path, content: bytes, code: str, verify: Any = "off") -> ShardCorrupt:
    """Check that a reader and a verification refuse a shard with this code; return the error."""
    path.write_bytes(content)
    error = read_everything(path, verify)
    assert isinstance(error, ShardCorrupt), error
    assert error.code == code
    assert str(path) in str(error)
    assert code in codes_of(content)
    return error
