"""Verify every byte of shards and datasets. The errors that are found are called findings."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any, Final, Self

from shardio._base.classes import one_line
from shardio.errors import (
    DatasetCorrupt,
    DatasetNotFound,
    MediaError,
    ShardCorrupt,
    ShardIncomplete,
    ShardioError,
    ShardNotFound,
    ShardUnsupported,
)

MAX_FINDINGS: Final = 100
"""The maximum number of findings that are listed for a file. Further findings are only counted."""
_MAX_TEXT: Final = 300
_CODES: Final[dict[type[Exception], str]] = {
    DatasetCorrupt: "dataset",
    DatasetNotFound: "missing",
    MediaError: "media",
    ShardIncomplete: "incomplete",
    ShardNotFound: "missing",
    ShardUnsupported: "unsupported",
}
"""The codes of findings for exceptions that have no attribute `code`."""


@dataclass(frozen=True, slots=True)
class Finding:
    """An error in a file. Attributes that do not apply to the error are None.

    `code` is a short name for the kind of error, usually the rule of the file format that is
    violated. Codes stay the same in later versions. `sample` is the index of the row in the shard.
    `offset` is the offset in the file in bytes. `expected` and `found` are the two values that
    differ.
    """

    path: str
    code: str
    message: str
    section: str | None = None
    field: str | None = None
    sample: int | None = None
    offset: int | None = None
    expected: int | str | None = None
    found: int | str | None = None

    def __repr__(self) -> str:
        where = {"field": self.field, "sample": self.sample}
        facts = [f"{what} {value!r}" for what, value in where.items() if value is not None]
        return one_line(self, [self.path], self.code, *facts, self.message)

    def __str__(self) -> str:
        details = asdict(self)
        return str(ShardCorrupt(details.pop("message"), **details))

    def as_json(self) -> dict[str, Any]:
        """Return a JSON-serializable dict."""
        return asdict(self)

    @classmethod
    def of(cls, path: str, error: Exception, **where: Any) -> Self:
        """Return the finding for an error about the data at `path`.

        Details of the error take precedence over `where`, and a path in the error over `path`.
        """
        if isinstance(error, ShardCorrupt):
            known = {
                name: getattr(error, name) for name in ("section", "field", "sample", "offset")
            }
            known |= {"expected": _plain(error.expected), "found": _plain(error.found)}
            where |= {name: value for name, value in known.items() if value is not None}
            return cls(error.path or path, error.code, _short(error.what), **where)
        if isinstance(error, OSError) and not isinstance(error, ShardioError):
            place = error.filename if isinstance(error.filename, str) else path
            return cls(place, "unreadable", f"the file cannot be read: {error.strerror or error}")
        text = str(error)
        place, colon, message = text.partition(": ")
        if place == os.path.abspath(path):
            place = path
        rest = text.removeprefix(f"{path}: ")
        if rest != text or not colon or not place.startswith(path):
            place, message = path, rest
        return cls(place, _CODES.get(type(error), "unreadable"), _short(message), **where)


class Findings:
    """The findings of one file: all are counted; the first `MAX_FINDINGS` are kept."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.fspath(path)
        self.n_found = 0
        self._findings: list[Finding] = []

    def add(
        self,
        code: str,
        message: str,
        *,
        expected: object = None,
        found: object = None,
        **where: Any,
    ) -> None:
        """Add a finding. `where` can have the keys `section`, `field`, `sample` and `offset`."""
        self.n_found += 1
        if self.n_found <= MAX_FINDINGS:
            where |= {"expected": _plain(expected), "found": _plain(found)}
            self._findings.append(Finding(self.path, code, _short(message), **where))

    def add_mismatch(
        self,
        expected: int,
        found: int,
        code: str = "checksum",
        message: str = "bytes do not match their hash",
        **where: Any,
    ) -> None:
        """Add a finding: the stored hash is `expected`, but the hash of the data is `found`."""
        self.add(code, message, expected=f"{expected:016x}", found=f"{found:016x}", **where)

    def add_error(self, error: Exception, **where: Any) -> None:
        """Add the finding for an error; `where` is used for details that `error` does not have."""
        details = Finding.of(self.path, error, **where).as_json()
        del details["path"]
        self.add(**details)

    @contextmanager
    def catching(self, **where: Any) -> Iterator[None]:
        """Catch an error about a damaged shard in the `with` block, and pass it to `add_error`."""
        try:
            yield
        except (ShardCorrupt, ShardIncomplete, ShardUnsupported) as error:
            self.add_error(error, **where)

    def close(self) -> tuple[Finding, ...]:
        """Return the kept findings; if there are more, the last finding says how many."""
        more = self.n_found - len(self._findings)
        if not more:
            return tuple(self._findings)
        last = Finding(self.path, "more", f"{more} more findings are not listed", found=more)
        return (*self._findings, last)


def _plain(value: object) -> int | str | None:
    if value is None or isinstance(value, int):
        return value if value is None else int(value)
    return _short(value.hex() if isinstance(value, bytes) else str(value))


def _short(text: str) -> str:
    return text if len(text) <= _MAX_TEXT else text[: _MAX_TEXT - 1] + "…"
